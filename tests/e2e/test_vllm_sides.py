"""The vLLM connector's two sides against a real daemon; vLLM itself is in tests/engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine_adapter.namespaces import rank_namespace
from engine_adapter.vllm.settings import Settings
from kvtier.client import Client
from kvtier.hashing import namespace_digest, scoped, split_hashes
from kvtier.process import DaemonProcess
from kvtier.types import Loss, MissReason, NamespaceSpec, Tier
from tests.e2e.conftest import Connect, StartDaemon, daemons
from tests.e2e.support import (
    PATIENCE_S,
    chain,
    cont_daemon,
    counter,
    eventually,
    stop_daemon,
)
from tests.e2e.vllm_steps import (
    BLOCK_TOKENS,
    PER_BLOCK,
    Engine,
    Rank,
    Request,
    request_of,
    spec_of,
)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One for all tests here; each has a namespace of its own."""
    with daemons(tmp_path_factory.mktemp("daemon")) as start:
        yield start()


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> NamespaceSpec:
    """This test's namespace."""
    return spec_of(request.node.name)


@pytest.fixture
def make_engine(spec: NamespaceSpec) -> Iterator[MakeEngine]:
    """Make engines with one MLA worker; at the end each is shut down."""
    engines: list[Engine] = []

    def make(client: Client, settings: Settings | None = None, **options: bool) -> Engine:
        values = settings or Settings()
        engine = Engine(client, spec, [Rank(client, values)], values, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def nothing_is_held(client: Client) -> None:
    """No lease and no pin is left."""

    def free() -> bool:
        stats = client.stats()
        return not (stats.read_leases or stats.write_leases or stats.pinned_bytes)

    eventually(free, "leases end")


def cached_blocks(client: Client, engine: Engine, request: Request) -> int:
    """Of its tokens' blocks, once what was committed is there."""
    hashes = engine.hashes(request)
    return client.lookup(engine.spec, hashes).num_blocks


def has_blocks(client: Client, engine: Engine, request: Request, blocks: int) -> None:
    """Commits are not waited for by the engine."""
    eventually(
        lambda: cached_blocks(client, engine, request) == blocks, f"{blocks} blocks are stored"
    )


def test_a_prompt_is_stored_and_loaded_by_another_engine(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    client = connect(daemon)
    cold, warm = make_engine(client), make_engine(connect(daemon))
    first = request_of("a", 200)
    assert cold.prefill(first) == 0
    has_blocks(client, cold, first, 3)
    again = request_of("b", 200)
    assert warm.prefill(again) == 192, "one token and more is left to compute"
    warm.check(again, 3)
    assert warm.scheduler.hits_by_tier(again, 192) == {Tier.HOST: 192}
    assert warm.ranks[0].side.counts["loaded_host_blocks"] == 3
    warm.finish(again)
    cold.finish(first)
    nothing_is_held(client)


def test_at_least_one_token_is_left_to_compute(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 128)
    engine.prefill(first)
    has_blocks(client, engine, first, 2)
    assert engine.admit(request_of("b", 128)) == 64
    assert engine.admit(request_of("c", 129)) == 128
    assert engine.admit(request_of("d", 64)) == 0


def test_the_daemon_knows_the_hit_rate(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    """Counted once a request, misses too, without what vLLM's own cache has."""
    client = connect(daemon)
    engine = make_engine(client)
    before = client.stats().counters

    def counted() -> tuple[float, float, float]:
        now = client.stats().counters
        names = ("requested_blocks", "host_hit_blocks", "missed_blocks")
        requested, hits, missed = (now[name] - before[name] for name in names)
        return requested, hits, missed

    first = request_of("a", 200)
    engine.prefill(first)
    eventually(lambda: counted() == (3, 0, 3), "a cold prompt is all misses")
    has_blocks(client, engine, first, 3)
    longer = request_of("b", 300)
    for _ in range(100):
        engine.scheduler.matched_tokens(longer, 96)
    aborted = request_of("c", 500)
    assert engine.scheduler.matched_tokens(aborted, 0) == 192
    engine.scheduler.finished(aborted)
    assert engine.prefill(longer, local_tokens=96) == 96
    eventually(lambda: counted() == (6, 2, 4), "one of four blocks is vLLM's own, two are hit")
    engine.scheduler.matched_tokens(longer, 0)  # It was preempted, and is admitted again.
    engine.scheduler.allocated(longer, longer.pages, 0)
    later = request_of("d", 64 + 1, first=900)
    engine.prefill(later)
    eventually(lambda: counted() == (7, 2, 5), "and nothing twice, nor what never ran")


def test_lookups_hold_nothing_and_do_not_hammer_the_daemon(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    """User report 19: 10,000 times a waiting request is asked about and never scheduled."""
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 200)
    engine.prefill(first)
    has_blocks(client, engine, first, 3)
    waiting = request_of("b", 200)
    for _ in range(10_000):
        assert engine.scheduler.matched_tokens(waiting, 0) == 192
    assert engine.scheduler.counts["lookups"] < 1_000
    engine.scheduler.finished(waiting)
    nothing_is_held(client)


def test_pages_that_vllm_has_are_left_alone(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    """vLLM's own hits end at its blocks of 16, in the middle of ours of 64."""
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 200)
    engine.prefill(first)
    has_blocks(client, engine, first, 3)
    again = request_of("b", 200)
    assert engine.admit(again, local_tokens=96) == 96
    local = again.pages[:6]
    engine.step({"b": 8})
    assert not any(tensor[local].any() for tensor in engine.ranks[0].tensors), "not ours to write"
    right = engine.ranks[0].right(engine.hashes(again)[2])
    assert np.array_equal(engine.ranks[0].block(again.pages[8:12]), right)
    third = request_of("c", 200)
    assert engine.admit(third, local_tokens=192) == 0


def test_a_failed_load_names_its_pages_and_is_computed_again(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine, spec: NamespaceSpec
) -> None:
    """User report 6: the good head is kept, nothing computed behind the hole is stored."""
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 330)
    engine.prefill(first)
    has_blocks(client, engine, first, 5)
    again = request_of("b", 330)
    assert engine.admit(again) == 320
    again.all_token_ids += range(9000, 9054)  # What this step computes fills one block more.
    engine.grow(again)
    client.drop(spec, engine.hashes(first)[2:])
    bad, _ = engine.step({"b": 64})
    assert bad == set(again.pages[2 * PER_BLOCK : 5 * PER_BLOCK])
    assert engine.ranks[0].side.counts["failed_loads"] == 1
    assert cached_blocks(client, engine, again) == 2, "nothing that was computed wrong is stored"

    again.num_computed_tokens = 128  # As vLLM sets it back.
    engine.step({"b": 256})
    has_blocks(client, engine, again, 6)
    engine.check(again, 6)
    engine.preempt(again)
    assert engine.admit(again) == 0, "it is not sent into the same hole again and again"
    engine.finish(again)
    nothing_is_held(client)


def test_a_plan_made_before_the_failure_was_known_stores_nothing(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine, spec: NamespaceSpec
) -> None:
    """vLLM schedules a step ahead: that step, too, computes behind the hole."""
    client = connect(daemon)
    engine = make_engine(client)
    first, other = request_of("a", 200), request_of("other", 100, first=5000)
    engine.prefill(first)
    engine.prefill(other)
    has_blocks(client, engine, first, 3)
    again = request_of("b", 200)
    assert engine.admit(again) == 192
    client.drop(spec, engine.hashes(first)[1:])
    one, two = {"b": 8}, {"b": 56, "other": 28}
    failing = engine.plan(one)
    again.all_token_ids += range(9000, 9056)
    other.all_token_ids += range(6000, 6028)
    for request in (again, other):
        engine.grow(request)
    ahead = engine.plan(two)
    assert {store.request_id for store in ahead.stores} == {"b", "other"}
    bad, _, report = engine.run(failing, one)
    assert bad
    _, _, late = engine.run(ahead, two)
    assert cached_blocks(client, engine, other) == 1
    engine.scheduler.reported(report, bad)
    engine.scheduler.reported(late, set())

    again.num_computed_tokens = 64
    engine.step({"b": 192})
    has_blocks(client, engine, again, 4)
    other.all_token_ids.append(1)
    engine.step({"other": 1})
    has_blocks(client, engine, other, 2)
    engine.check(again, 4)


def test_after_a_failure_all_blocks_are_offered_again(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine, spec: NamespaceSpec
) -> None:
    """From the first: kvtier may have lost those that it had."""
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 200)
    engine.prefill(first)
    has_blocks(client, engine, first, 3)
    running, failing = request_of("b", 200), request_of("c", 200)
    assert engine.prefill(running) == 192
    assert engine.admit(failing) == 192
    client.drop(spec, engine.hashes(first))
    bad, _ = engine.step({"c": 8})
    assert len(bad) == 3 * PER_BLOCK
    running.all_token_ids.append(1)
    engine.step({"b": 1})
    has_blocks(client, engine, running, 3)


def test_who_shares_a_bad_page_stores_nothing_behind_it(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine, spec: NamespaceSpec
) -> None:
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 200)
    engine.prefill(first)
    has_blocks(client, engine, first, 3)
    owner, sharer = request_of("owner", 200), request_of("sharer", 300)
    assert engine.admit(owner) == 192
    sharer.pages = owner.pages[:12]
    engine.requests["sharer"] = sharer
    engine.scheduler.matched_tokens(sharer, 192)
    engine.grow(sharer)
    sharer.num_computed_tokens = 192
    client.drop(spec, engine.hashes(first))
    engine.step({"owner": 8, "sharer": 108})
    owner.num_computed_tokens = 0
    sharer.num_computed_tokens = 192
    engine.step({"sharer": 108})
    assert cached_blocks(client, engine, sharer) == 0
    engine.step({"owner": 200})
    has_blocks(client, engine, owner, 3)
    engine.preempt(sharer)
    assert engine.prefill(sharer) == 192
    has_blocks(client, engine, sharer, 4)


def test_what_one_rank_cannot_load_no_rank_has(
    daemon: DaemonProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    """With tensor parallelism one rank's hole is in what all of them compute."""
    client, settings = connect(daemon), Settings()
    cold = Engine(client, spec, [Rank(client, settings)], settings)
    first = request_of("a", 200)
    cold.prefill(first)
    has_blocks(client, cold, first, 3)
    ranks = [Rank(client, settings, 0, 2, others_blocks=1), Rank(client, settings, 1, 2)]
    engine = Engine(client, spec, ranks, settings)
    again = request_of("b", 200)
    assert engine.admit(again) == 192
    again.all_token_ids += range(9000, 9056)
    engine.grow(again)
    engine.run(engine.plan({"b": 64}), {"b": 64})
    assert engine.ranks[0].side.report().failed_step
    assert cached_blocks(client, engine, again) == 3, "the block behind the hole is not stored"
    for each in (cold, engine):
        each.close()
    nothing_is_held(client)


def test_mla_ranks_store_once_and_all_load(
    daemon: DaemonProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    client, settings = connect(daemon), Settings()

    def ranks() -> list[Rank]:
        return [Rank(client, settings, rank, 2) for rank in range(2)]

    cold, warm = Engine(client, spec, ranks(), settings), Engine(client, spec, ranks(), settings)
    first, again = request_of("a", 200), request_of("b", 200)
    cold.prefill(first)
    has_blocks(client, cold, first, 3)
    assert [rank.side.counts.get("stored_blocks", 0) for rank in cold.ranks] == [3, 0]
    assert warm.prefill(again) == 192
    warm.check(again, 3)
    for each in (cold, warm):
        each.close()


def test_sharded_caches_are_stored_by_rank(
    daemon: DaemonProcess, connect: Connect, spec: NamespaceSpec
) -> None:
    """A hit is what every rank has; each loads its own bytes."""
    client, settings = connect(daemon), Settings()

    def ranks() -> list[Rank]:
        return [Rank(client, settings, rank, 2, replicated=False) for rank in range(2)]

    cold, warm = Engine(client, spec, ranks(), settings), Engine(client, spec, ranks(), settings)
    first, again = request_of("a", 200), request_of("b", 200)
    cold.prefill(first)
    hashes = cold.hashes(first)
    shards = [rank_namespace(spec, rank, 2) for rank in range(2)]
    eventually(
        lambda: all(client.lookup(shard, hashes).num_blocks == 3 for shard in shards), "stored"
    )
    client.drop(shards[1], hashes[2:])
    assert warm.prefill(again) == 128
    warm.check(again, 3)
    for each in (cold, warm):
        each.close()


def test_loads_between_steps(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine, spec: NamespaceSpec
) -> None:
    client = connect(daemon)
    engine = make_engine(client, Settings(async_load=True))
    first = request_of("a", 330)
    engine.prefill(first)
    has_blocks(client, engine, first, 5)
    good, holed = request_of("good", 200), request_of("holed", 330)
    assert engine.admit(good) == 192
    assert engine.admit(holed) == 320
    client.drop(spec, engine.hashes(first)[3:])
    bad: set[int] = set()
    loaded: set[str] = set()

    def stepped() -> bool:
        new_bad, new_loaded = engine.step({})
        bad.update(new_bad)
        loaded.update(new_loaded)
        assert not bad or "holed" in loaded, "reported in the same step"
        return len(loaded) == 2

    eventually(stepped, "both loads end")
    assert bad == set(holed.pages[3 * PER_BLOCK : 5 * PER_BLOCK])
    engine.check(good, 3)
    engine.check(holed, 3)
    holed.num_computed_tokens = 192
    engine.step({"good": 8, "holed": 138})
    has_blocks(client, engine, holed, 5)
    nothing_is_held(client)


def test_an_abort_between_a_loads_start_and_its_end(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    """vLLM keeps the pages until the load is reported; then nothing of the request is left."""
    client = connect(daemon)
    engine = make_engine(client, Settings(async_load=True))
    first, aborted = request_of("a", 200), request_of("gone", 200)
    engine.prefill(first)
    has_blocks(client, engine, first, 3)
    assert engine.admit(aborted) == 192
    plan = engine.plan({})
    engine.scheduler.finished(aborted)
    side = engine.ranks[0].side
    stop_daemon(daemon)
    try:
        _, loaded, _ = engine.run(plan, {})
        assert not loaded
        assert not side.end(["gone"])
    finally:
        cont_daemon(daemon)
    assert eventually(lambda: side.end([]), "the load ends") == {"gone"}
    engine.finish(first)
    assert side.known_requests == 0
    nothing_is_held(client)


def test_preemption_and_abort_give_everything_back(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    client = connect(daemon)
    engine = make_engine(client)
    first, aborted = request_of("a", 200), request_of("gone", 200, first=3000)
    engine.admit(first)
    engine.step({"a": 100})
    engine.admit(aborted)
    engine.step({"a": 50, "gone": 100})
    engine.preempt(first)
    engine.finish(aborted)
    nothing_is_held(client)
    assert engine.prefill(first) == 128
    engine.check(first, 3)
    has_blocks(client, engine, first, 3)


def test_answers_are_stored_as_they_grow(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 100)
    engine.prefill(first)
    before = counter(client, "stored_blocks")
    engine.decode(first, 100)
    has_blocks(client, engine, first, 3)
    assert counter(client, "stored_blocks") - before == 2
    frugal = make_engine(client, Settings(store_decode=False))
    other = request_of("b", 100, first=4000)
    frugal.prefill(other)
    frugal.decode(other, 100)
    frugal.finish(other)
    assert cached_blocks(client, frugal, other) == 1


def test_tokens_that_are_not_known_yet_are_not_stored(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    """Drafts that may be refused, and tokens that an earlier step is still sampling."""
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 63)
    engine.admit(first)
    assert not engine.plan({"a": 66}).stores
    first.num_computed_tokens = 63
    first.all_token_ids.append(7)
    [store] = engine.plan({"a": 4}).stores
    assert len(store.hashes) == 1


def test_an_engine_that_started_before_the_daemon_stores_all_of_it_later(
    start_daemon: StartDaemon, connect: Connect, make_engine: MakeEngine
) -> None:
    """Blocks that were refused are offered again, with those that follow them (13)."""
    daemon = start_daemon()
    daemon.kill()
    with Client(daemon.address, acquire_timeout_s=5.0) as client:
        engine = make_engine(client)
        first = request_of("a", 200)
        assert engine.prefill(first) == 0
        assert client.misses[MissReason.NO_SESSION]
        assert engine.ranks[0].side.counts["unstored_blocks"] == 3
        daemon.start()
        assert client.wait_attached(PATIENCE_S)
        engine.decode(first, 60)
        has_blocks(client, engine, first, 4)
        again = request_of("b", 200)
        assert engine.prefill(again) == 192
        engine.check(again, 3)
        engine.close()


def test_what_found_no_room_is_offered_again(
    start_daemon: StartDaemon, connect: Connect, make_engine: MakeEngine
) -> None:
    """User report 18: a full daemon takes the blocks that fit, and later the rest."""
    daemon = start_daemon(host_capacity_bytes=16 << 20)
    client, holder = connect(daemon), connect(daemon)
    others = spec_of("others")
    everything = holder.reserve(others, None, chain("others", 4096))
    count = len(everything.indices)
    everything.abort()
    room = holder.reserve(others, None, chain("others", count - 2))
    engine = make_engine(client)
    first = request_of("a", 200)
    engine.prefill(first)
    assert engine.ranks[0].side.counts["stored_blocks"] == 2
    assert engine.ranks[0].side.counts["unstored_blocks"] == 1
    room.abort()
    engine.decode(first, 60)
    has_blocks(client, engine, first, 4)
    again = request_of("b", 200)
    assert engine.prefill(again) == 192
    engine.check(again, 3)


def test_a_reset_hits_nothing_older(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    """The weights changed in place: by what was computed before, by others, and while running."""
    client = connect(daemon)
    engine, other = make_engine(client), make_engine(connect(daemon))
    before, running = request_of("a", 200), request_of("running", 200, first=3000)
    engine.prefill(before)
    engine.admit(running)
    engine.step({"running": 100})
    has_blocks(client, engine, before, 3)
    engine.reset()
    assert cached_blocks(client, other, before) == 0, "dropped"
    other.prefill(request_of("other", 200))
    has_blocks(client, other, before, 3)
    again = request_of("b", 200)
    assert engine.prefill(again) == 0, "nor what an engine with the old weights stores now"
    engine.step({"running": 100})
    has_blocks(client, engine, again, 3)
    assert cached_blocks(client, engine, running) == 0, "half of it is of the old weights"
    engine.preempt(running)
    assert engine.prefill(running) == 0
    has_blocks(client, engine, running, 3)
    assert engine.prefill(request_of("c", 200)) == 192
    engine.reset()
    assert engine.prefill(request_of("d", 200)) == 0


@pytest.mark.parametrize("by", ["step", "lookup"])
def test_a_reset_without_the_daemon_is_repeated(
    start_daemon: StartDaemon, connect: Connect, make_engine: MakeEngine, by: str
) -> None:
    """The weights changed while the daemon was away; its SSD still has what they computed."""
    daemon = start_daemon()
    with Client(daemon.address, acquire_timeout_s=5.0) as client:
        engine = make_engine(client)
        first = request_of("a", 200)
        engine.prefill(first)
        has_blocks(client, engine, first, 3)
        old, hashes = engine.spec, engine.hashes(first)
        assert all(client.flush(old, hashes, timeout_s=20.0))
        daemon.kill()
        eventually(lambda: not client.attached, "the daemon's death is known")
        assert not engine.scheduler.reset(), "nobody confirmed it"
        engine.step({})
        daemon.start()
        assert client.wait_attached(PATIENCE_S)
        other = connect(daemon)
        assert other.lookup(old, hashes).num_blocks == 3, "they came back"
        numbers = iter(range(1000))

        def dropped() -> bool:
            if by == "step":
                engine.step({})
            else:
                engine.scheduler.matched_tokens(request_of(f"new {next(numbers)}", 200), 0)
            return other.lookup(old, hashes).num_blocks == 0

        eventually(dropped, "the drop is repeated")
        assert engine.scheduler.reset()
        engine.close()


def test_roles(daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine) -> None:
    client = connect(daemon)
    producer = make_engine(client, loads=False)
    consumer = make_engine(client, stores=False)
    first, again, other = request_of("a", 200), request_of("b", 200), request_of("c", 200, 3000)
    assert producer.prefill(first) == 0
    has_blocks(client, producer, first, 3)
    assert producer.prefill(request_of("d", 200)) == 0
    assert consumer.prefill(again) == 192
    consumer.prefill(other)
    consumer.finish(other)
    assert cached_blocks(client, consumer, other) == 0


def test_prompt_logprobs_need_the_whole_prompt(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine
) -> None:
    client = connect(daemon)
    engine = make_engine(client)
    first = request_of("a", 200)
    engine.prefill(first)
    has_blocks(client, engine, first, 3)
    assert engine.admit(request_of("b", 200, skip_reading_prefix_cache=True)) == 0


@dataclass
class Adapter:
    """vLLM's LoRARequest, as far as the connector looks at it."""

    lora_path: str
    load_inplace: bool = False
    lora_name: str = "adapter"
    lora_int_id: int = 1


def write_adapter(directory: Path, weights: bytes) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


@pytest.fixture
def adapter_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An adapter that is there before the engine starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_adapter(tmp_path / "adapter", b"old")


@pytest.mark.parametrize("how", ["files", "in place", "in place, from elsewhere"])
def test_an_adapter_that_changes_while_requests_run(
    daemon: DaemonProcess,
    connect: Connect,
    make_engine: MakeEngine,
    adapter_path: str,
    how: str,
) -> None:
    """From then on its requests compute with either content; nothing of that is stored."""
    client = connect(daemon)
    engine = make_engine(client)
    running, waiting = (
        request_of(name, 300, lora_request=Adapter(adapter_path)) for name in ("a", "w")
    )
    engine.admit(running)
    engine.step({"a": 100})
    has_blocks(client, engine, running, 1)
    assert engine.scheduler.matched_tokens(waiting, 0) == 64
    named_by_old = engine.hashes(running)
    in_place = how != "files"
    path = f"{adapter_path}2" if how.endswith("elsewhere") else adapter_path
    write_adapter(Path(path), b"newer")
    new = request_of("b", 200, lora_request=Adapter(path, load_inplace=in_place))
    if in_place:
        assert engine.admit(new) == 0
    plan = engine.plan({"a": 100})
    assert not plan.stores
    engine.run(plan, {"a": 100})
    assert client.lookup(engine.spec, named_by_old).num_blocks == 1
    if not in_place:
        assert engine.scheduler.matched_tokens(waiting, 0) == 0
        assert engine.prefill(new) == 0, "nobody knows what it computes with"
        assert cached_blocks(client, engine, new) == 0
        return
    engine.step({"b": 200})
    has_blocks(client, engine, new, 3)
    again = request_of("c", 400, lora_request=Adapter(path))
    assert engine.admit(again, local_tokens=256) == 0
    assert not engine.plan({"c": 144}).stores, "vLLM's own cache may be of the old content"
    assert engine.scheduler.matched_tokens(waiting, 0) == (192 if path == adapter_path else 0)


def test_salts_do_not_mix(daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine) -> None:
    """User report 4."""
    client = connect(daemon)
    engine = make_engine(client)
    red = request_of("a", 200, cache_salt="red")
    engine.prefill(red)
    has_blocks(client, engine, red, 3)
    assert engine.prefill(request_of("b", 200, cache_salt="blue")) == 0
    assert engine.prefill(request_of("c", 200)) == 0
    assert engine.prefill(request_of("d", 200, cache_salt="red")) == 192


def test_what_is_computed_behind_lossy_blocks_is_lossy(
    daemon: DaemonProcess, connect: Connect, make_engine: MakeEngine, spec: NamespaceSpec
) -> None:
    """And never hit by an engine that wants exact blocks."""
    client = connect(daemon)
    lossy = make_engine(client, Settings(allowed_loss=Loss.BOUNDED))
    exact = make_engine(connect(daemon))
    first = request_of("a", 100)
    rank = lossy.ranks[0]
    room = client.reserve(
        spec, None, lossy.hashes(first), allowed_loss=Loss.BOUNDED, loss=Loss.BOUNDED
    )
    room.write_from([rank.right(key) for key in lossy.hashes(first)])
    assert room.commit()
    longer = request_of("b", 200)
    assert exact.scheduler.matched_tokens(longer, 0) == 0
    assert lossy.prefill(longer) == BLOCK_TOKENS
    eventually(
        lambda: (
            client.lookup(spec, lossy.hashes(longer), allowed_loss=Loss.BOUNDED).num_blocks == 3
        ),
        "stored",
    )
    assert cached_blocks(client, exact, longer) == 0
    unrelated = request_of("c", 200, first=7000)
    lossy.prefill(unrelated)
    eventually(
        lambda: (
            client.lookup(spec, lossy.hashes(unrelated), allowed_loss=Loss.BOUNDED).num_blocks == 3
        ),
        "stored",
    )
    assert cached_blocks(client, exact, unrelated) == 0, "vLLM's own cache may have mixed them"


def test_tokens_of_blocks_are_told_once_kvtier_has_them(
    start_daemon: StartDaemon, make_engine: MakeEngine
) -> None:
    daemon = start_daemon()
    daemon.kill()
    with Client(daemon.address, acquire_timeout_s=5.0) as client:
        engine = make_engine(client, Settings(kv_events=True))
        first = request_of("a", 200)
        engine.prefill(first)
        assert not engine.scheduler.take_taken(), "it was not there"
        daemon.start()
        assert client.wait_attached(PATIENCE_S)
        engine.decode(first, 56)
        told = engine.scheduler.take_taken()
        packed = b"".join(engine.hashes(first))
        names = split_hashes(scoped(namespace_digest(engine.spec), packed))
        assert [block.hash for block in told] == names
        assert [block.parent for block in told] == [None, *names[:-1]]
        tokens = [token for block in told for token in block.token_ids]
        assert tokens == first.all_token_ids
        assert not engine.scheduler.take_taken()
        quiet = make_engine(client)
        quiet.prefill(request_of("b", 200, first=4000))
        assert not quiet.scheduler.take_taken()
        engine.close()
        quiet.close()
