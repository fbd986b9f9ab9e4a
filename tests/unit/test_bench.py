"""The benchmarks' own parts: what they count, what they build, and that they can find fault."""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bench import torture_client
from bench.common import DuSampler, disk_usage_bytes, report
from bench.raw_file import REQUEST_BYTES, RawFile
from bench.restart import anonymous_bytes, cpu_s, differences, label_of, prompts
from bench.torture import SCENARIOS, leftovers, open_files, parts_of, tracebacks
from bench.torture_client import BLOCK_BYTES, MAX_BLOCKS, TortureClient, content, prompt
from bench.torture_journal import Event, Journal, Slot
from kvtier.client import Client
from kvtier.client.calls import Missed
from kvtier.codec.base import Bytes
from kvtier.types import BlockHash, MissReason, NamespaceSpec

KEY = BlockHash(bytes(range(32)))


def open_journal(path: Path) -> Journal:
    return Journal(path, namespaces=2, slots=3)


# The journal


@pytest.mark.parametrize("seed", range(3))
def test_a_journal_comes_back_as_it_was(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with open_journal(tmp_path / "journal") as journal:
        for _ in range(50):
            journal.append(rng.choice(list(Event)), rng.randrange(2), rng.randrange(3), 5)
            with open_journal(tmp_path / "journal") as again:
                assert again.slots == journal.slots
                assert list(again.pending_drops()) == list(journal.pending_drops())


def test_what_is_owed(tmp_path: Path) -> None:
    """From the acknowledged flush on, until a drop is sent or all is released."""
    with open_journal(tmp_path / "journal") as journal:
        journal.append(Event.STORE, 1, 2, 4)
        journal.append(Event.DURABLE, 1, 2, 3)
        assert journal.slots[1][2] == Slot(blocks=4, durable=3)
        journal.append(Event.DROP, 1, 2)
        assert journal.slots[1][2].dropping
        assert journal.slots[1][2].durable == 0
        journal.append(Event.DROPPED, 1, 2)
        assert journal.slots[1][2] == Slot(drops=1)
        journal.append(Event.STORE, 1, 2, 2)
        journal.append(Event.DURABLE, 1, 2, 2)
        journal.append(Event.RELEASE)
        assert journal.slots[1][2] == Slot(drops=1, blocks=2, released=True)
        journal.append(Event.RENEW, 1, 2)
        assert journal.slots[1][2] == Slot(serial=1)


def test_unanswered_drops_are_pending(tmp_path: Path) -> None:
    with open_journal(tmp_path / "journal") as journal:
        journal.append(Event.DROP, 0, 1)
        journal.append(Event.DROP_ALL, 1)
        assert list(journal.pending_drops()) == [(Event.DROP_ALL, 1, 0), (Event.DROP, 0, 1)]
        journal.append(Event.DROPPED, 0, 1)
        journal.append(Event.DROPPED_ALL, 1)
        assert list(journal.pending_drops()) == []
        assert [slot.drops for slot in journal.slots[1]] == [1, 1, 1]


# The client


class FakeDaemon:
    """FAKE: a dictionary of blocks that answers like a client of a daemon. Subclasses misbehave."""

    def __init__(self) -> None:
        self.blocks: dict[NamespaceSpec, dict[BlockHash, Bytes]] = {}

    def wait_attached(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass

    def put(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        sources: Sequence[Bytes],
        *,
        wait_s: float,
    ) -> int:
        for key, source in zip(hashes, sources, strict=True):
            self.blocks.setdefault(spec, {}).setdefault(key, source)
        return len(hashes)

    def lookup(self, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> SimpleNamespace:
        assert hashes, "the daemon refuses this"
        flags = [key in self.blocks.get(spec, {}) for key in hashes]
        return SimpleNamespace(num_blocks=[*flags, False].index(False))

    def flush(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], *, timeout_s: float
    ) -> list[bool]:
        return [key in self.blocks.get(spec, {}) for key in hashes]

    def get(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], destinations: list[Bytes]
    ) -> SimpleNamespace:
        done = 0
        for key, destination in zip(hashes, destinations, strict=True):
            found = self.blocks.get(spec, {}).get(key)
            if found is None:
                break
            np.copyto(destination, found)
            done += 1
        return SimpleNamespace(num_blocks=done)

    def drop(self, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> None:
        for key in hashes:
            self.blocks.get(spec, {}).pop(key, None)

    def drop_namespace(self, spec: NamespaceSpec) -> None:
        self.blocks.pop(spec, None)

    def finish(self, spec: NamespaceSpec, tail: BlockHash) -> None:
        pass

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(counters={"ssd_evicted_blocks": 0.0})


class Forgets(FakeDaemon):
    """Acknowledges blocks that it does not keep."""

    def put(self, *arguments: Any, **options: Any) -> int:
        return len(arguments[2])

    def lookup(self, *arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(num_blocks=len(arguments[1]))

    def flush(self, *arguments: Any, **options: Any) -> list[bool]:
        return [True] * len(arguments[1])


class Remembers(FakeDaemon):
    """Does not drop."""

    def drop(self, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> None:
        pass


class Flips(FakeDaemon):
    """Serves one wrong bit a block."""

    def get(self, *arguments: Any) -> SimpleNamespace:
        found = super().get(*arguments)
        for destination in arguments[2][: found.num_blocks]:
            destination[-1] ^= 1
        return found


class Refuses(FakeDaemon):
    """Lives, and finds every put wrong."""

    def put(self, *arguments: Any, **options: Any) -> int:
        raise Missed(MissReason.RPC_ERROR, "INVALID_ARGUMENT")


class Dies(Refuses):
    """So does this one, and answers nothing any more."""

    def stats(self) -> SimpleNamespace:
        raise Missed(MissReason.NO_SESSION)


class Steps(queue.SimpleQueue[object]):
    """Lets work() take so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def empty(self) -> bool:
        self.left -= 1
        return self.left >= 0


Torment = Callable[..., Counter[str]]


@pytest.fixture
def torment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Torment:
    """Works with a daemon and verifies; sums of all findings, also of those told on the way."""
    for name in ("PATIENCE_S", "RESIGNED_S"):
        monkeypatch.setattr(torture_client, name, 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def run(daemon: FakeDaemon, *, evicts: bool = False) -> Counter[str]:
        with Journal(tmp_path / "journal", len(BLOCK_BYTES), 2) as journal:
            client = TortureClient(
                "a", lambda: cast(Client, daemon), journal, random.Random(1), evicts=evicts
            )
            for _ in range(3):
                client.verify()
                client.work(Steps(30))
            client.verify()
            client.tell(done=True)
        told: Counter[str] = Counter()
        for line in capsys.readouterr().out.splitlines():
            told.update({k: v for k, v in json.loads(line).items() if isinstance(v, int)})
        return told

    return run


@pytest.mark.parametrize("evicts", [False, True])
def test_a_client_finds_no_fault_where_none_is(torment: Torment, evicts: bool) -> None:
    found = torment(FakeDaemon(), evicts=evicts)
    assert found["wrong_bytes"] == found["lost_durable"] == 0
    assert min(found[f"{what}_blocks"] for what in ("stored", "durable", "checked")) > 20


def test_a_client_finds_lost_blocks(torment: Torment) -> None:
    found = torment(Forgets())
    assert found["lost_durable"] > 20
    assert found["wrong_bytes"] == 0


def test_a_client_finds_blocks_that_were_dropped(torment: Torment) -> None:
    assert torment(Remembers())["wrong_bytes"] > min(BLOCK_BYTES)


def test_a_client_finds_a_flipped_bit(torment: Torment) -> None:
    found = torment(Flips())
    assert found["wrong_bytes"] == found["checked_blocks"] > 20


def test_a_refused_call_is_no_miss(torment: Torment) -> None:
    with pytest.raises(SystemExit, match="INVALID_ARGUMENT"):
        torment(Refuses())


def test_a_call_that_a_kill_interrupts_is_a_miss(torment: Torment) -> None:
    assert torment(Dies())["stored_blocks"] == 0


def test_a_client_kills_at_the_very_moment(tmp_path: Path) -> None:
    """What was acknowledged is noted all the same: the daemon has said it."""
    victim = subprocess.Popen(["sleep", "60"])
    with Journal(tmp_path / "journal", len(BLOCK_BYTES), 2) as journal:
        daemon = FakeDaemon()
        client = TortureClient(
            "a", lambda: cast(Client, daemon), journal, random.Random(1), evicts=False
        )
        client.verify()
        client.kill_after(victim.pid, Event.DURABLE)
        client.work(Steps(20))
        assert victim.wait(10) == -9
        assert any(slot.durable for slots in journal.slots for slot in slots)


def test_bytes_name_the_block_and_its_drops() -> None:
    assert np.array_equal(content(KEY, 3, 1000), content(KEY, 3, 1000))
    assert not np.array_equal(content(KEY, 3, 1000), content(KEY, 4, 1000))
    assert not np.array_equal(content(KEY, 3, 1000), content(prompt("a", 0, 0)[0], 3, 1000))
    assert len({*prompt("a", 0, 0), *prompt("a", 0, 1), *prompt("b", 0, 0)}) == 3 * max(MAX_BLOCKS)


# What is seen from outside


def test_what_a_clean_stop_may_leave(tmp_path: Path) -> None:
    store = tmp_path / "ssd"
    for name in ("env-000/data.mdb", "env-000/lock.mdb", "kvtier.boot", "kvtier.lock"):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).touch()
    (tmp_path / "kvtier.log").touch()
    assert leftovers(tmp_path, [store]) == []
    strange = [
        tmp_path / "kvtier.sock",
        store / "env-000" / "data.new",
        store / "env-001.new",
        store / "quarantine-000",
    ]
    for path in strange:
        path.touch()
    assert leftovers(tmp_path, [store]) == sorted(map(str, strange))


def test_tracebacks_are_told_by_their_last_line() -> None:
    one = "Traceback (most recent call last):\n  File x\n    f()\n\nKeyError: 3\n"
    assert tracebacks("info\n" + one + "info\n" + one) == Counter({"KeyError: 3": 2})
    assert tracebacks("info\nwarning: no Traceback\n") == Counter()
    assert tracebacks(one[:-13]).total() == 1


def test_open_files_are_counted_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = open_files(os.getpid())
    with path.open("w"), path.open():
        assert open_files(os.getpid()) - before == Counter({str(path): 2})


def test_du_is_that_of_du(tmp_path: Path) -> None:
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "file").write_bytes(bytes(100_000))
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
    said = subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, check=True, text=True)
    assert disk_usage_bytes(tmp_path) == int(said.stdout.split()[0])


def test_a_directory_over_its_capacity_is_seen(tmp_path: Path) -> None:
    for capacity_bytes, over in ((1 << 20, False), (64 << 10, True)):
        (tmp_path / "file").write_bytes(bytes(200_000))
        with DuSampler([tmp_path / "not there", tmp_path], capacity_bytes) as du:
            pass
        assert du.samples >= 2
        assert bool(du.over) == over
        assert du.highest_bytes >= 200_000


def test_every_kill_has_its_scenario() -> None:
    for kills in (0, 1, 5, 200):
        assert sum(parts_of(kills)) == kills
        assert len(parts_of(kills)) == len(SCENARIOS)


def test_plain_files_are_written_and_read_whole(tmp_path: Path) -> None:
    raw = RawFile(tmp_path / "file", 3 * REQUEST_BYTES + 1)
    try:
        assert raw.size_bytes == 3 * REQUEST_BYTES == (tmp_path / "file").stat().st_size
        for mode in raw.modes:
            raw.write(mode)
            raw.drop_cache()
            raw.read(mode)
    finally:
        raw.close()
    data = np.fromfile(tmp_path / "file", dtype=np.uint8)
    assert np.count_nonzero(data) > 0.99 * data.size


# The stores that daemons are started on


def test_prompts_are_chains() -> None:
    made = list(prompts(3000, namespaces=3, seed=1))
    metas = {meta.hash: meta for new in made for meta in new}
    assert len(metas) == 3000
    assert len({meta.namespace for meta in metas.values()}) == 3
    for meta in metas.values():
        assert (meta.parent is None) == (meta.depth == 0)
        if meta.parent is not None:
            parent = metas[meta.parent]
            assert (parent.namespace, parent.depth + 1) == (meta.namespace, meta.depth)
    for new in made:
        assert [meta.stamp for meta in new] == sorted((m.stamp for m in new), reverse=True)
    assert sum(new[0].parent is not None for new in made) > len(made) / 4


def test_costs_are_differences() -> None:
    measured = {"start_empty_s": 0.4, "rss_empty_mb": 50.0}
    measured |= {"start_100k_s": 0.6, "rss_100k_mb": 90.0, "start_2m_s": 3.4, "rss_2m_mb": 650.0}
    costs = differences(measured, [100_000, 2_000_000])
    assert costs == pytest.approx(
        {
            "index_100k_s": 0.2,
            "bytes_per_block_100k": 400.0,
            "index_2m_s": 3.0,
            "bytes_per_block_2m": 300.0,
            "bytes_per_block": 300.0,
        }
    )
    assert [label_of(n) for n in (0, 1_000_000, 100_000, 1234)] == ["empty", "1m", "100k", "1234"]


def test_a_process_is_weighed() -> None:
    ticks = 0.05  # Their rounding.
    earlier, now_s, later = os.times(), cpu_s(os.getpid()), os.times()
    assert sum(earlier[:2]) - ticks <= now_s <= sum(later[:2]) + ticks
    before = anonymous_bytes(os.getpid())
    held = np.ones(64 << 20, dtype=np.uint8)
    assert anonymous_bytes(os.getpid()) - before == pytest.approx(held.size, rel=0.1)


def test_results_keep_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    report("title", {"ratio": 0.123456, "over": False, "kills": 200}, as_json=True)
    assert capsys.readouterr().out == '{"ratio": 0.1235, "over": false, "kills": 200}\n'
