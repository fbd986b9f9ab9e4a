"""The mover on FAKE tiers: order, overlap, errors, hangs, and that every job has its answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from kvtier.daemon import supervise
from kvtier.daemon.logs import configure_logs
from kvtier.errors import SegmentDamaged, TierError, TierFull, TierUnavailable
from kvtier.mover import commits, quiet_log, scrubber, writes
from kvtier.shards import RETRY_S
from kvtier.types import BlockHash
from tests.e2e.support import chain
from tests.unit.fake_tier import SPEC, Gate, world

BLOCK_BYTES = SPEC.block_bytes


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    configure_logs("info", "console")  # As the daemon does.
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "RETRY_S", 0.02)
    monkeypatch.setattr(commits, "EXCESS_S", 0.02)
    monkeypatch.setattr(writes, "WAIT_FOR_LOADS_S", 0.1)
    monkeypatch.setattr(supervise, "RESTART_AFTER_S", 0.02)


@pytest.fixture
def scrubbing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrubber does not rest for long."""
    monkeypatch.setattr(scrubber, "EMPTY_PAUSE_S", 0.005)
    monkeypatch.setattr(scrubber, "BUSY_PAUSE_S", 0.005)


class Failing:
    """Makes an operation fail: so many times, or for these blocks, or until it is over."""

    def __init__(
        self,
        where: str,
        error: Exception,
        *,
        times: int | None = None,
        keys: set[BlockHash] | None = None,
    ) -> None:
        self.left = times
        self.raised = 0
        self._where = where
        self._error = error
        self._keys = keys
        self._guard = threading.Lock()

    def __call__(self, name: str, key: BlockHash | None) -> None:
        if name != self._where or (self._keys is not None and key not in self._keys):
            return
        with self._guard:
            if self.left is not None:
                if not self.left:
                    return
                self.left -= 1
            self.raised += 1
        raise self._error

    def over(self) -> None:
        """It works again."""
        self.left = 0


# What works


async def test_blocks_go_to_their_disks_and_come_back() -> None:
    async with world(shards=3) as made:
        hashes = chain("striped", 64)
        await made.put_on_ssd(hashes)
        counts = [len(tier.done("write")) for tier in made.tiers]
        assert sum(counts) == 64
        assert min(counts) > 5, "striped by hash"
        lease = made.acquire(hashes)
        assert lease is not None
        assert lease.ssd_blocks == 64
        await made.until(lambda: lease.ready == 64, "all is loaded")
        made.check(lease)
        assert made.store.counters.ssd_read_bytes == 64 * BLOCK_BYTES
        assert made.store.counters.ssd_read_seconds > 0
        assert made.store.counters.ssd_write_seconds > 0
        assert await made.mover.settle(20.0)


@pytest.mark.parametrize(("saved_bytes", "most"), [(1, 4), (0, 5)], ids=["coded", "raw"])
async def test_as_many_reads_in_flight_as_there_are_threads(saved_bytes: int, most: int) -> None:
    """User report 28. In prefix order, and no more than that."""
    async with world() as made:
        hashes = chain("deep", 32)
        made.tiers[0].saved_bytes = saved_bytes
        await made.put_on_ssd(hashes)
        gate = made.tiers[0].hook = Gate("read")
        lease = made.acquire(hashes)
        assert lease is not None
        await made.until(lambda: gate.waiting == most, "so many reads in flight")
        gate.open()
        await made.until(lambda: lease.ready == 32, "all is loaded")
        assert gate.most == most
        assert set(gate.seen[:most]) == set(hashes[:most]), "the first blocks first"


async def test_decoding_does_not_delay_a_block_that_needs_none() -> None:
    async with world() as made:
        tier, coded, raw = made.tiers[0], chain("coded", 32), chain("raw", 8)
        await made.put_on_ssd(raw)
        tier.saved_bytes = 1
        await made.put_on_ssd(coded)
        gate = Gate("read")
        tier.hook = lambda name, key: gate(name, key) if key in coded else None
        slow, quick = made.acquire(coded), made.acquire(raw)
        assert slow is not None
        assert quick is not None
        await made.until(lambda: gate.waiting == 4, "all readers of coded blocks are busy")
        await made.until(lambda: quick.ready == 8, "the raw blocks are there")
        assert slow.ready == 0
        gate.open()
        await made.until(lambda: slow.ready == 32, "and then the others")


async def test_blocks_are_written_while_others_are_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writes, "UNIT_BYTES", BLOCK_BYTES)
    async with world(batch_bytes=8 * BLOCK_BYTES) as made:
        tier = made.tiers[0]
        await made.put_on_ssd(chain("first", 1))
        gate = tier.hook = Gate("commit")
        hashes = chain("overlapping", 64)
        made.put(hashes)
        made.write_all()
        await made.until(lambda: gate.waiting == 1, "a commit is under way")
        await made.until(lambda: len(tier.done("write")) >= 9, "and blocks behind it are written")
        await asyncio.sleep(0.05)
        unnamed = +tier.unnamed
        gate.open()
        await made.until(lambda: all(made.stored(hashes)), "all is stored")
        assert gate.most == 1, "one commit at a time"
        assert len(unnamed) <= 3 * 8, "three batches are under way, not more"
        commits = [what for what in tier.done("commit") if isinstance(what, tuple)]
        assert max(writes for _, _, writes in commits) == 8, commits


async def test_a_commit_waits_for_what_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group commit: not one transaction a block."""
    monkeypatch.setattr(commits, "GROUP_S", 20.0)
    monkeypatch.setattr(writes, "UNIT_BYTES", BLOCK_BYTES)
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(chain("first", 1))
        hashes = chain("grouped", 4)
        gate = Gate("write")
        tier.hook = lambda name, key: None if key == hashes[0] else gate(name, key)
        made.put(hashes)
        made.write_all()
        await made.until(lambda: gate.waiting == 3, "one is written, three are not")
        await asyncio.sleep(0.02)
        assert not made.stored(hashes)[0], "it waits for them"
        gate.open()
        await made.until(lambda: all(made.stored(hashes)), "all is stored")
        assert tier.done("commit")[-1] == (0, 0, 4)


async def test_writes_wait_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "WAIT_FOR_LOADS_S", 20.0)
    async with world() as made:
        await made.put_on_ssd(hashes := chain("wanted", 4))
        written = len(made.tiers[0].done("write"))
        gate = made.tiers[0].hook = Gate("read")
        lease = made.acquire(hashes)
        await made.until(lambda: gate.waiting == 4, "loads in flight")
        made.put(chain("later", 4))
        made.write_all()
        await asyncio.sleep(0.05)
        assert len(made.tiers[0].done("write")) == written, "nothing is written meanwhile"
        gate.open()
        await made.until(lambda: all(made.stored(chain("later", 4))), "it is written afterwards")
        assert lease is not None
        assert lease.ready == 4


async def test_a_long_run_of_loads_does_not_starve_the_writer() -> None:
    async with world() as made:
        await made.put_on_ssd(hashes := chain("wanted", 4))
        gate = made.tiers[0].hook = Gate("read")
        lease = made.acquire(hashes)
        made.put(later := chain("later", 4))
        made.write_all()
        await made.until(lambda: all(made.stored(later)), "it is written all the same")
        assert gate.waiting == 4
        gate.open()
        await made.until(lambda: lease is not None and lease.ready == 4, "loaded")


async def test_deletes_come_in_bounded_batches() -> None:
    async with world() as made:
        hashes = [key for part in range(10) for key in chain(f"many {part}", 250)]
        for part in range(10):
            made.put(chain(f"many {part}", 250))
            made.write_all()
            assert await made.mover.settle(20.0)
        assert all(made.stored(hashes))
        made.store.drop_namespace(made.namespace)
        while made.store.reap():
            pass
        made.mover.pump()
        assert await made.mover.settle(20.0)
        deletes = [what[0] for what in made.tiers[0].done("commit") if isinstance(what, tuple)]
        assert sum(deletes) == 2500
        assert max(deletes) <= commits.MAX_DELETES
        assert not made.tiers[0].segments[0]


async def test_a_block_that_is_deleted_and_stored_again_stays() -> None:
    """A delete never takes what came after it, whatever is committed together."""
    async with world() as made:
        hashes = chain("again", 4)
        await made.put_on_ssd(hashes)
        gate = made.tiers[0].hook = Gate("commit")
        for _ in range(3):
            made.store.drop_blocks(made.namespace, hashes)
            made.put(hashes)
            made.write_all()
        gate.open()
        assert await made.mover.settle(20.0)
        made.write_all()
        assert await made.mover.settle(20.0)
        assert set(made.tiers[0].segments[0]) == set(hashes)
        assert all(made.stored(hashes))


async def test_a_block_that_is_dropped_on_its_way_goes() -> None:
    """Its delete takes effect after its write, though both are ready for the same commit."""
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(chain("first", 1))
        gate = tier.hook = Gate("commit")
        made.put(chain("second", 1))
        made.write_all()
        await made.until(lambda: gate.waiting, "a commit is under way")
        made.put(dropped := chain("dropped", 4))
        made.write_all()
        await made.until(lambda: set(dropped) <= set(+tier.unnamed), "they are written")
        made.store.drop_blocks(made.namespace, dropped)
        made.mover.pump()
        gate.open()
        assert await made.mover.settle(20.0)
        assert not set(dropped) & set(tier.segments[0])


async def test_speed_is_bytes_over_time_with_reads_in_flight() -> None:
    """User report 31."""
    async with world() as made:
        await made.put_on_ssd(hashes := chain("measured", 16))
        ssd = made.store.tiers.ssd
        assert ssd is not None
        speed = ssd.shards[0].speed
        before = speed.bytes_per_s
        lease = made.acquire(hashes)
        await made.until(lambda: lease is not None and lease.ready == 16, "loaded")
        assert speed.bytes_per_s != before
        assert speed.bytes_per_s is not None
        seconds = made.store.counters.ssd_read_seconds
        assert speed.bytes_per_s <= 16 * BLOCK_BYTES / seconds * 1.01


# Errors


async def test_one_block_that_can_not_be_written() -> None:
    async with world() as made:
        hashes = chain("unlucky", 8)
        made.tiers[0].hook = Failing("write", TierFull("no room"), keys={hashes[3]})
        made.put(hashes)
        made.write_all()
        assert await made.mover.settle(20.0)
        assert made.stored(hashes) == [key != hashes[3] for key in hashes]
        assert made.online(), "a full medium works"
        assert made.store.counters.ssd_write_failed_blocks == 1


async def test_the_store_learns_that_others_have_filled_the_disk() -> None:
    async with world() as made:
        await made.put_on_ssd(old := chain("old", 8))
        made.tiers[0].hook = Failing("write", TierFull("others have filled the disk"), times=1)
        made.tiers[0].limit_bytes = 8 * BLOCK_BYTES
        made.put(new := chain("new", 1))
        made.write_all()
        assert await made.mover.settle(20.0)
        made.write_all(later_s=2 * RETRY_S)
        await made.until(lambda: all(made.stored(new)), "in the place of an old one")
        assert made.stored(old).count(True) == 7


async def test_a_block_that_can_not_be_encoded() -> None:
    async with world() as made:
        hashes = chain("unlucky", 8)
        made.tiers[0].hook = Failing("prepare", TierError("no such codec"), keys={hashes[3]})
        made.put(hashes)
        made.write_all()
        assert await made.mover.settle(20.0)
        assert made.stored(hashes) == [key != hashes[3] for key in hashes]
        assert made.online()


async def test_a_write_that_finds_the_medium_failed() -> None:
    async with world(shards=2) as made:
        made.tiers[0].hook = fault = Failing("write", TierUnavailable("EIO"))
        hashes = chain("failing", 64)
        made.put(hashes)
        made.write_all()
        await made.until(lambda: not made.queued_bytes, "every job has its answer")
        here = [len(tier.segments.get(0, ())) for tier in made.tiers]
        assert here[0] == 0
        assert here[1] > 10, "the other disk goes on"
        assert not made.online(0)
        assert made.online(1)
        fault.over()
        made.mover.retry_now()
        await made.until(lambda: made.online(0), "it is back")
        made.write_all(later_s=2 * RETRY_S)
        await made.until(lambda: all(made.stored(hashes)), "the rest is written")


async def test_a_commit_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks wait in RAM; what was under way is given back; deletes are not forgotten."""
    monkeypatch.setattr(writes, "UNIT_BYTES", BLOCK_BYTES)
    async with world(batch_bytes=8 * BLOCK_BYTES) as made:
        tier = made.tiers[0]
        await made.put_on_ssd(old := chain("old", 4))
        gate, fault = Gate("commit"), Failing("commit", TierUnavailable("EIO"))

        def hook(name: str, key: BlockHash | None) -> None:
            gate(name, key)
            fault(name, key)

        tier.hook = hook
        made.store.drop_blocks(made.namespace, old)
        made.put(new := chain("new", 64))
        made.write_all()
        await made.until(lambda: gate.waiting and len(+tier.unnamed) >= 8, "more is written")
        gate.open()
        await made.until(lambda: not made.queued_bytes, "no write waits")
        assert not made.online()
        assert not any(made.stored(new))
        await made.until(lambda: not +tier.unnamed, "all room is given back")
        assert set(tier.segments[0]) == set(old), "not deleted yet"
        assert fault.raised == 1, "a failed medium gets no more commits"
        assert not await made.mover.settle(0.05), "deletes are open"
        fault.over()
        made.mover.retry_now()
        assert await made.mover.settle(20.0)
        assert made.online()
        assert not tier.segments[0], "deleted"
        made.write_all(later_s=2 * RETRY_S)
        assert await made.mover.settle(20.0)
        assert set(tier.segments[0]) == set(new)


async def test_deletes_of_a_full_medium_are_tried_again() -> None:
    async with world() as made:
        await made.put_on_ssd(old := chain("old", 4))
        made.tiers[0].hook = Failing("commit", TierFull("tables"), times=1)
        made.store.drop_blocks(made.namespace, old)
        made.mover.pump()
        assert await made.mover.settle(20.0)
        assert made.online()
        assert not made.tiers[0].segments[0]


async def test_a_later_write_does_not_overtake_a_delete_that_failed() -> None:
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(hashes := chain("again", 4))
        gate, fault = Gate("commit"), Failing("commit", TierFull("tables"), times=1)

        def hook(name: str, key: BlockHash | None) -> None:
            gate(name, key)
            fault(name, key)

        tier.hook = hook
        made.store.drop_blocks(made.namespace, hashes)
        made.mover.pump()
        await made.until(lambda: gate.waiting, "the delete is under way")
        made.put(hashes)
        made.write_all()
        await made.until(lambda: len(+tier.unnamed) == 4, "the blocks are written again")
        gate.open()
        assert await made.mover.settle(20.0)
        assert all(made.stored(hashes))
        assert set(tier.segments[0]) == set(hashes)


async def test_a_namespace_is_stored_before_its_blocks_are_encoded() -> None:
    async with world() as made:
        made.tiers[0].hook = Failing("commit", TierFull("tables"), times=1)
        made.put(hashes := chain("first", 4))
        made.write_all()
        await made.until(lambda: all(made.stored(hashes)), "stored, after a second try")
        names = [name for name, _ in made.tiers[0].events]
        assert made.tiers[0].done("commit")[0] == (0, 1, 0)
        assert names.index("commit") < names.index("write")


async def test_several_bad_reads_in_a_row_take_a_disk_out() -> None:
    async with world(shards=2) as made:
        hashes = chain("unreadable", 64)
        await made.put_on_ssd(hashes)
        made.tiers[0].hook = fault = Failing("read", TierUnavailable("EIO"))
        lease = made.acquire(hashes)
        assert lease is not None
        await made.until(lambda: not made.online(0), "out")
        await made.loads_over()
        found = made.store.reads.lookup(made.namespace, hashes)
        first = next(i for i, key in enumerate(hashes) if not made.stored([key])[0])
        assert found.host_blocks + found.ssd_blocks == first, "its blocks are misses"
        assert made.online(1)
        fault.over()
        made.mover.retry_now()
        await made.until(lambda: made.online(0), "back")
        assert made.stored(hashes).count(True) == 62, "two looked like bad blocks, the rest stays"


async def test_good_reads_between_bad_ones_keep_a_disk() -> None:
    async with world() as made:
        for number in range(6):
            await made.put_on_ssd(hashes := chain(f"half {number}", 2))
            made.tiers[0].hook = Failing("read", TierUnavailable("EIO"), keys=set(hashes[1:]))
            made.acquire(hashes)
            await made.loads_over()
        assert made.online()
        assert made.store.counters.load_failed_blocks["TierUnavailable"] == 6
        assert made.store.counters.ssd_read_blocks == 6


async def test_failing_loads_do_not_fill_the_log() -> None:
    async with world() as made:
        await made.put_on_ssd(hashes := chain("loud", 64))
        made.tiers[0].segments[0].clear()
        with capture_logs() as lines:
            made.acquire(hashes)
            failed = made.store.counters.load_failed_blocks
            await made.until(lambda: sum(failed.values()) == 64, "all failed")
        assert [line["event"] for line in lines].count("load failed") == 1


def test_a_quiet_line_tells_how_many_it_stands_for() -> None:
    now_s = [0.0]
    quiet = quiet_log.QuietLog(lambda: now_s[0])
    assert [quiet.speak() for _ in range(3)] == [1, 0, 0]
    now_s[0] = quiet_log.QUIET_S
    assert [quiet.speak() for _ in range(2)] == [3, 0]


# Segments


@pytest.mark.parametrize("where", ["read", "write", "commit"])
async def test_a_damaged_segment_goes(where: str) -> None:
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(old := chain("old", 4))
        tier.hook = fault = Failing(where, SegmentDamaged("the tree is cut", 0))

        def retired(name: str, key: BlockHash | None) -> None:
            if name == "retire":
                fault.over()
                tier.segment = 1
            fault(name, key)

        tier.hook = retired
        if where == "read":
            made.acquire(old)
        made.put(new := chain("new", 4))
        made.write_all()
        await made.until(lambda: tier.done("retire"), "it is given up")
        assert tier.done("retire") == [(0, True)]
        assert not any(made.stored(old))
        while made.store.reap():
            pass
        made.mover.pump()
        made.write_all(later_s=2 * RETRY_S)
        await made.until(lambda: all(made.stored(new)), "others are stored elsewhere")
        assert made.online()
        assert set(tier.segments) == {1}
        assert await made.mover.settle(20.0)
        assert not +tier.unnamed


async def test_what_was_written_into_a_segment_that_goes_is_not_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writes, "UNIT_BYTES", BLOCK_BYTES)
    async with world(batch_bytes=8 * BLOCK_BYTES) as made:
        tier = made.tiers[0]
        await made.put_on_ssd(chain("old", 4))
        gate = tier.hook = Gate("commit")
        made.put(new := chain("new", 64))
        made.write_all()
        await made.until(lambda: gate.waiting and len(+tier.unnamed) > 4, "written")
        made.store.tiers.retire_segment(0, 0, damaged=False)
        made.mover.pump()
        await asyncio.sleep(0.05)
        written = len(tier.done("write"))
        gate.open()
        await made.until(lambda: tier.done("retire"), "it is given up")
        assert written <= 4 + 3 * 8, "nothing is fed meanwhile"
        retired_at = tier.events.index(("retire", (0, False)))
        assert not [e for e in tier.events[:retired_at] if e[0] == "write"][written:]
        assert tier.done("discard"), "its room is given back"
        assert not any(made.stored(new)), "not one is thought to be there"
        tier.segment = 1
        assert await made.mover.settle(20.0)
        assert not +tier.unnamed


async def test_excess_is_given_up() -> None:
    """User report 21: a foreign file needs the room."""
    async with world() as made:
        await made.put_on_ssd(hashes := chain("too much", 4))
        made.tiers[0].surplus = 0
        await made.until(lambda: made.tiers[0].done("retire"), "the segment is given up")
        assert made.tiers[0].done("retire") == [(0, False)]
        assert not any(made.stored(hashes))
        assert made.online()


# Hangs


async def test_a_read_that_hangs_is_a_miss_in_time() -> None:
    """User report 12: nobody waits for it, nobody gets its extent, other disks go on."""
    async with world(shards=2) as made:
        hashes = chain("hanging", 64)
        await made.put_on_ssd(hashes)
        gate = made.tiers[0].hook = Gate("read")
        with made.impatient():
            lease = made.acquire(hashes)
            assert lease is not None
            await made.until(lambda: not made.online(0), "out")
        assert lease.usable < 64, "the rest is a miss"
        assert made.online(1)
        assert gate.waiting, "the reads have not returned"
        held = made.store.tiers.host.pinned_bytes
        made.store.reads.release(lease.id, lease.group)
        assert held > made.store.tiers.host.pinned_bytes >= gate.waiting * BLOCK_BYTES, "extents"
        assert len(made.store.reads.kept()) < 5 + 64 // 2, "what was queued there is given up"
        gate.open()
        await made.until(lambda: made.online(0), "back, nothing is lost")
        await made.until(lambda: not made.store.tiers.host.pinned_bytes, "extents are free")
        assert all(made.stored(hashes))
        here = [key for key in hashes if made.namespace.blocks[key].place.shard == 0]
        late = made.store.counters.late_loads
        assert len(here) - 4 <= late <= len(here), "a read that hangs, and what waited behind it"
        again = made.acquire(hashes)
        assert again is not None
        await made.until(lambda: again.ready == 64, "all is loaded")
        made.check(again)


@pytest.mark.parametrize("where", ["write", "commit"])
async def test_a_write_that_hangs_takes_the_disk_out(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User report 25: RAM is not pinned by a slow disk, and it recovers alone."""
    monkeypatch.setattr(writes, "UNIT_BYTES", BLOCK_BYTES)
    async with world(batch_bytes=8 * BLOCK_BYTES) as made:
        await made.put_on_ssd(old := chain("old", 4))
        gate = made.tiers[0].hook = Gate(where)
        made.put(new := chain("new", 128))
        with made.impatient():
            made.write_all()
            await made.until(lambda: not made.online(), "out")
        assert made.queued_bytes <= 3 * 8 * BLOCK_BYTES, "what had not begun is answered"
        assert made.store.reads.lookup(made.namespace, old).ssd_blocks == 0
        gate.open()
        await made.until(lambda: made.online(), "back")
        assert made.store.reads.lookup(made.namespace, old).ssd_blocks == 4
        assert await made.mover.settle(20.0)
        made.write_all(later_s=2 * RETRY_S)
        await made.until(lambda: all(made.stored(new)), "all is written")
        assert not +made.tiers[0].unnamed


async def test_a_failure_during_a_hang_needs_a_new_start() -> None:
    async with world() as made:
        await made.put_on_ssd(hashes := chain("both", 8))
        gate = Gate("read")
        fault = Failing("read", TierUnavailable("EIO"))

        def hook(name: str, key: BlockHash | None) -> None:
            gate(name, key)
            fault(name, key)

        made.tiers[0].hook = hook
        with made.impatient():
            made.acquire(hashes)
            await made.until(lambda: not made.online(), "out")
        with capture_logs() as lines:
            gate.open()
            await made.until(
                lambda: any("failed" in line["event"] for line in lines), "the reads failed"
            )
        assert not made.online()
        assert not made.tiers[0].done("reopen")
        fault.over()
        made.mover.retry_now()
        await made.until(lambda: made.online(), "back")
        assert made.tiers[0].done("reopen") == [None]


# Coming back


async def test_a_new_start_waits_for_what_is_under_way() -> None:
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(hashes := chain("stuck", 4))
        gate = tier.hook = Gate("read")
        made.acquire(hashes)
        await made.until(lambda: gate.waiting == 4, "reads are under way")
        made.mover.fail(0, TierUnavailable("pulled out"))
        made.mover.retry_now()
        await asyncio.sleep(0.05)
        assert not tier.done("reopen")
        gate.open()
        await made.until(lambda: made.online(), "back")


async def test_a_medium_that_does_not_come_back_at_once() -> None:
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(hashes := chain("kept", 8))
        tier.hook = fault = Failing("reopen", TierUnavailable("EIO"))
        with capture_logs() as lines:
            made.mover.fail(0, TierUnavailable("pulled out"))
            for _ in range(3):
                made.mover.retry_now()
                await made.until(
                    lambda: any("still fails" in line["event"] for line in lines), "one try"
                )
        assert not made.online()
        assert [line["event"] for line in lines if line["log_level"] == "error"] == [
            "ssd directory failed: its blocks are misses until it works again"
        ]
        fault.over()
        made.mover.retry_now()
        await made.until(lambda: made.online(), "back")
        lease = made.acquire(hashes)
        await made.until(lambda: lease is not None and lease.ready == 8, "its blocks are there")


async def test_another_medium_comes_back() -> None:
    """Its blocks are forgotten, its tables are written again."""
    async with world() as made:
        tier = made.tiers[0]
        await made.put_on_ssd(hashes := chain("gone", 8))
        made.mover.fail(0, TierUnavailable("pulled out"))
        tier.kept = []
        tier.rows.clear()
        made.mover.retry_now()
        await made.until(lambda: made.online(), "back")
        while made.store.reap():
            pass
        assert not any(made.stored(hashes))
        assert await made.mover.settle(20.0)
        assert list(tier.rows) == [made.namespace.digest]


async def test_a_disk_that_fails_before_the_first_job() -> None:
    async with world(shards=2, start=False) as made:
        made.mover.fail(0, TierUnavailable("not there"))
        made.start()
        made.put(hashes := chain("elsewhere", 16))
        made.write_all()
        await made.until(lambda: all(made.stored(hashes)), "on the other")
        assert not made.tiers[0].segments
        made.mover.retry_now()
        await made.until(lambda: made.online(0), "there")


# The scrubber


async def test_rotten_blocks_are_found_without_a_read(scrubbing: None) -> None:
    async with world(scrub_bytes_per_s=1 << 30) as made:
        tier = made.tiers[0]
        await made.put_on_ssd(hashes := chain("rots", 16))
        meta, payload = tier.segments[0][hashes[5]]
        tier.segments[0][hashes[5]] = (meta, np.bitwise_xor(payload, 1))
        await made.until(lambda: not made.stored(hashes[5:6])[0], "it is found and dropped")
        assert made.stored(hashes) == [key != hashes[5] for key in hashes]
        assert made.store.counters.corrupt_blocks == {"checksum": 1}
        assert made.store.counters.scrubbed_bytes >= BLOCK_BYTES
        assert made.store.reads.lookup(made.namespace, hashes).ssd_blocks == 5
        assert made.online()


async def test_scrubbing_waits_for_loads(scrubbing: None) -> None:
    async with world(scrub_bytes_per_s=1 << 30) as made:
        tier = made.tiers[0]
        await made.put_on_ssd(hashes := chain("wanted", 8))
        await made.until(lambda: len(tier.done("scrub")) > 8, "round after round")
        gate = tier.hook = Gate("read")
        lease = made.acquire(hashes)
        await made.until(lambda: gate.waiting == 5, "loads in flight")
        await asyncio.sleep(0.01)  # One slice may have been under way.
        seen = len(tier.done("scrub"))
        await asyncio.sleep(0.05)
        assert len(tier.done("scrub")) == seen
        gate.open()
        await made.until(lambda: lease is not None and lease.ready == 8, "loaded")
        await made.until(lambda: len(tier.done("scrub")) > seen, "and on")


async def test_scrubbing_keeps_to_its_rate(scrubbing: None) -> None:
    async with world(scrub_bytes_per_s=1) as made:
        await made.put_on_ssd(chain("slowly", 64))
        await made.until(lambda: made.tiers[0].done("scrub"), "a slice")
        await asyncio.sleep(0.1)
        assert len(made.tiers[0].done("scrub")) <= scrubber.SLICE_BYTES // scrubber.LEAST_BYTES


async def test_a_speed_is_known_before_the_first_load(scrubbing: None) -> None:
    """So that the first request can be told whether loading pays; also with scrubbing off."""
    async with world(scrub_bytes_per_s=0) as made:
        ssd = made.store.tiers.ssd
        assert ssd is not None
        assert ssd.shards[0].speed.bytes_per_s is None
        await made.put_on_ssd(chain("probed", 8))
        await made.until(lambda: ssd.shards[0].speed.bytes_per_s, "measured")
        seen = len(made.tiers[0].done("scrub"))
        await asyncio.sleep(0.05)
        assert len(made.tiers[0].done("scrub")) == seen, "once is enough"


async def test_a_scrub_that_can_not_read_takes_the_disk_out(scrubbing: None) -> None:
    async with world(scrub_bytes_per_s=1 << 30) as made:
        await made.put_on_ssd(hashes := chain("unreadable", 8))
        made.tiers[0].hook = fault = Failing("scrub", TierUnavailable("EIO"))
        await made.until(lambda: not made.online(), "out")
        fault.over()
        made.mover.retry_now()
        await made.until(lambda: made.online(), "back")
        assert all(made.stored(hashes)), "no block is lost for it"


# Bugs, and the end


@pytest.mark.parametrize("where", ["prepare", "write", "commit", "read", "retire", "scrub"])
async def test_a_bug_is_told_and_every_job_has_its_answer(where: str, scrubbing: None) -> None:
    """User report 20: the task is started again, health was red."""
    async with world(scrub_bytes_per_s=1 << 20) as made:
        await made.put_on_ssd(old := chain("old", 4))
        keys = {chain("new", 8)[5], old[1]} if where in ("prepare", "write", "read") else None
        made.tiers[0].hook = Failing(where, ZeroDivisionError("a bug"), times=1, keys=keys)
        if where == "retire":
            made.tiers[0].surplus = 0
        made.acquire(old)
        made.put(new := chain("new", 8))
        made.write_all()
        await made.well.wait()
        assert made.told == [False, True]
        assert await made.mover.settle(20.0)
        assert made.queued_bytes == 0
        made.tiers[0].segment = 1
        while made.store.reap():
            pass
        made.store.tiers.flush(made.namespace, new, time.monotonic() + 2 * RETRY_S)
        made.mover.pump()
        await made.until(lambda: all(made.stored(new)), "the rest is written")
        assert await made.mover.settle(20.0)
        assert not +made.tiers[0].unnamed
        await made.loads_over()


async def test_stopping_while_the_medium_fails_for_good() -> None:
    """Deletes wait for ever; a daemon that is told to stop does not."""
    async with world() as made:
        await made.put_on_ssd(hashes := chain("deleted", 8))
        made.tiers[0].hook = Failing("commit", TierUnavailable("EIO"))
        made.store.drop_blocks(made.namespace, hashes)
        made.put(chain("unwritten", 64))
        made.write_all()
        await made.until(lambda: not made.online(), "out")


async def test_stopping_in_the_middle_of_writes() -> None:
    async with world() as made:
        gate = made.tiers[0].hook = Gate("write")
        made.put(chain("unwritten", 64))
        made.write_all()
        await made.until(lambda: gate.waiting, "writes are under way")
        threading.Timer(0.05, gate.open).start()
