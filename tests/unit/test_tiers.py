"""What leaves a tier, when, and where it goes. User reports have their numbers from support.py."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvtier.errors import TierUnavailable
from kvtier.types import BlockHash, Refusal
from tests.sim.world import chain, spec_of
from tests.unit.support import PAGE, SPEC, on_ssd, present, world_of, write_out

# Out of RAM


def test_a_quarter_evicted_leaves_three_quarters_usable() -> None:
    """User report 11: 64 blocks stored in 8 calls, 16 evicted: 48 hit."""
    world = world_of(64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, [7] * 64)
    for at in range(0, 64, 8):
        world.put(namespace, hashes[at : at + 8], parent=hashes[at - 1] if at else None)
    assert present(world, hashes) == 64
    world.put(namespace, chain(namespace, [9] * 16))
    assert present(world, hashes) == 48
    assert world.store.counters.host_evicted_blocks == 16
    world.check()


def test_a_full_store_takes_new_blocks_for_ever() -> None:
    """User report 18: 100 % full and stores keep coming: evict on demand, nothing refused."""
    world = world_of(16)
    namespace = world.open(SPEC)
    for number in range(200):
        world.serve(namespace, chain(namespace, [number, 1, 2, 3]))
    assert world.store.counters.refused_blocks == 0
    assert world.store.counters.stored_blocks == 800
    assert world.store.tiers.host.extents.used_bytes == 16 * PAGE
    world.check()


def test_a_full_store_finds_room_for_a_larger_block() -> None:
    """User report 18, by bytes: one large block takes the room of several small ones."""
    world = world_of(16)
    small, large = world.open(SPEC), world.open(spec_of(5 * PAGE))
    for number in range(16):
        world.serve(small, chain(small, [number]))
    reserved = world.put(large, chain(large, [1]))
    assert reserved.refusal is Refusal.NONE
    assert len(reserved.indices) == 1
    world.check()


def test_blocks_leave_tail_first() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.serve(namespace, hashes)
    for number in range(8):
        assert present(world, hashes) == 8 - number
        world.put(namespace, chain(namespace, [100 + number]))


class NaiveLru:
    """The definition: k = longest present prefix, then every block is touched, tail to head."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def serve(self, hashes: list[BlockHash]) -> int:
        hit = next((at for at, key in enumerate(hashes) if key not in self.blocks), len(hashes))
        for key in reversed(hashes):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hit


@pytest.mark.parametrize("seed", range(12))
def test_hits_are_those_of_a_naive_lru(seed: int) -> None:
    """Every request's hit, on random traces of prompts that share prefixes."""
    rng = random.Random(seed)
    capacity = rng.choice((5, 20, 60))
    world, oracle = world_of(capacity), NaiveLru(capacity)
    namespace = world.open(SPEC)
    for _ in range(300):
        length = rng.randint(1, min(capacity, 24))
        tokens = [rng.choice((0, 0, 0, 0, 1, 2)) for _ in range(length)]
        hashes = chain(namespace, tokens)
        assert world.serve(namespace, hashes) == oracle.serve(hashes)
        assert set(namespace.blocks) == set(oracle.blocks)
    world.check()


def test_a_prompt_longer_than_the_store_keeps_its_head() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(20))
    assert world.serve(namespace, hashes) == 0
    assert world.serve(namespace, hashes) == 8


# To the SSD, and out of it


def test_blocks_on_the_ssd_stay_there_when_they_come_back_to_ram() -> None:
    """SSD copies are inclusive, so a promoted block is never written twice."""
    world = world_of(4, ssd_blocks=64)
    namespace = world.open(SPEC)
    prompts = [chain(namespace, [number] * 4) for number in range(3)]
    for _ in range(3):
        for hashes in prompts:
            world.serve(namespace, hashes)
            world.store.tiers.write_ahead(world.now_s, idle=True)
            world.take_jobs()
            world.settle()
    assert world.store.counters.ssd_written_blocks == 12
    assert len(world.medium.blocks) == 12
    assert world.store.counters.ssd_hit_blocks == 24
    world.check()


def test_demotions_are_shed_when_the_queue_is_full() -> None:
    """User report 25: stores go on, what is lost is counted, and the queue is bounded."""
    world = world_of(8, ssd_blocks=64, queue_blocks=2)
    namespace = world.open(SPEC)
    for number in range(20):
        world.serve(namespace, chain(namespace, [number]))
        assert world.store.tiers.ssd is not None
        assert world.store.tiers.ssd.queued_bytes <= 2 * PAGE
    counters = world.store.counters
    assert counters.refused_blocks == 0
    assert counters.demotions_shed_blocks == counters.host_evicted_blocks > 0
    world.settle()
    assert counters.ssd_written_blocks == 2
    world.check()


def test_the_ssd_never_holds_more_than_its_limit() -> None:
    """User report 21; the fake medium checks every write."""
    world = world_of(8, ssd_blocks=6)
    namespace = world.open(SPEC)
    for number in range(40):
        world.serve(namespace, chain(namespace, [number, 1]))
        world.store.tiers.write_ahead(world.now_s, idle=True)
        world.take_jobs()
        world.settle()
        assert world.medium.used_bytes <= 6 * PAGE
    assert len(world.medium.blocks) - len(world.medium.lingering) == 6
    assert world.store.counters.ssd_evicted_blocks > 0
    world.check()


def test_a_block_larger_than_the_ssd_does_not_empty_it() -> None:
    world = world_of(16, ssd_blocks=4)
    small, large = world.open(SPEC), world.open(spec_of(5 * PAGE))
    hashes = chain(small, range(4))
    world.serve(small, hashes)
    write_out(world, small, hashes)
    world.serve(large, chain(large, [1]))
    write_out(world, large, chain(large, [1]))
    assert on_ssd(world, hashes) == [True] * 4


def test_flush_writes_what_has_left_the_ssd() -> None:
    world = world_of(16, ssd_blocks=4)
    namespace = world.open(SPEC)
    first, second = chain(namespace, [1] * 4), chain(namespace, [2] * 4)
    for hashes in (first, second, first):
        world.serve(namespace, hashes)
        write_out(world, namespace, hashes)
        assert world.store.tiers.flush(namespace, hashes, world.now_s) == [True] * 4
    world.check()


def test_a_failing_ssd_does_not_freeze_ram() -> None:
    """Chains whose tails are on the SSD only must still make room when no write succeeds."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.serve(namespace, hashes)
    world.store.tiers.start_demotions(2 * PAGE, world.now_s)
    world.take_jobs()
    world.settle()
    assert on_ssd(world, hashes) == [False] * 6 + [True] * 2
    world.serve(namespace, chain(namespace, [50, 51]))
    world.take_jobs()
    for _ in range(100):
        while world.writer:
            world.finish_write(TierUnavailable("EIO"))
        world.now_s += 1.0
        world.serve(namespace, chain(namespace, [100 + int(world.now_s)] * 3))
    assert present(world, hashes) == 0
    assert present(world, chain(namespace, [100 + int(world.now_s)] * 3)) == 3
    world.check()


def test_nobody_waits_for_a_disk_that_hangs() -> None:
    """Other blocks make room, at once."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    world.serve(namespace, chain(namespace, range(8)))
    tiers = world.store.tiers
    assert tiers.start_demotions(2 * PAGE, world.now_s)
    world.take_jobs()
    assert tiers.start_demotions(2 * PAGE, world.now_s), "they are on their way"
    tiers.shard_down(0)
    assert not tiers.start_demotions(2 * PAGE, world.now_s)
    tiers.shard_resumed(0)
    assert tiers.start_demotions(2 * PAGE, world.now_s)
    world.settle()
    world.check()


def test_a_failed_write_is_tried_again_later() -> None:
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, [1])
    world.serve(namespace, hashes)
    world.store.tiers.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.finish_write()  # The namespace.
    world.finish_write(TierUnavailable("EIO"))
    assert world.store.tiers.ssd is not None
    assert not world.store.tiers.ssd.shards[0].healthy
    world.store.tiers.write_ahead(world.now_s + 1.0, idle=True)
    assert world.store.take_jobs() == []
    world.now_s += 10.0
    world.store.tiers.write_ahead(world.now_s, idle=True)
    world.take_jobs()
    world.settle()
    assert on_ssd(world, hashes) == [True]
    assert world.store.tiers.ssd.shards[0].healthy
