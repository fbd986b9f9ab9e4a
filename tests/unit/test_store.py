"""What the store promises, one behaviour a test. The numbers of user reports are those of the list
that the project keeps of what users of such systems have run into."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvtier.arena import LEASE_SLOTS
from kvtier.errors import (
    CapacityError,
    CorruptBlock,
    InvalidRequest,
    LeaseState,
    NamespaceMismatch,
    TierUnavailable,
    UnknownLease,
)
from kvtier.index import HostState, SsdState
from kvtier.store import Prefix, StoreConfig
from kvtier.types import BlockHash, Loss, NamespaceDigest, Refusal
from tests.sim.world import World, chain, digest_of, group_id, spec_of

PAGE = 4096
ALICE, BOB = group_id(1), group_id(2)
SPEC = spec_of(PAGE)


def world_of(
    blocks: int,
    *,
    ssd_blocks: int | None = None,
    queue_blocks: int = 1_000,
    pin_blocks: int = 0,
) -> World:
    """Room for so many one-page blocks."""
    config = StoreConfig(
        host_bytes=blocks * PAGE,
        write_queue_bytes=queue_blocks * PAGE,
        pin_limit_bytes=pin_blocks * PAGE,
    )
    world = World(config, limit_bytes=None if ssd_blocks is None else ssd_blocks * PAGE)
    world.groups.update((ALICE, BOB))
    return world


def on_ssd(world: World, hashes: list[BlockHash]) -> list[bool]:
    blocks = world.open(SPEC).blocks
    return [key in blocks and blocks[key].ssd is SsdState.STORED for key in hashes]


def present(world: World, hashes: list[BlockHash]) -> int:
    found = world.store.lookup(world.open(SPEC), hashes)
    return found.host_blocks + found.ssd_blocks


# Prefixes and eviction


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
    assert world.store.host.extents.used_bytes == 16 * PAGE
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


# Read leases


def test_seven_readers_keep_what_the_eighth_released() -> None:
    """User report 9: eight readers, the first finishes, eviction runs, seven still read."""
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.put(namespace, hashes)
    readers = [world.acquire(namespace, hashes, group_id(10 + at))[0] for at in range(8)]
    assert readers[0] is not None
    world.store.release(readers[0].id, readers[0].group)
    refused = world.put(namespace, chain(namespace, [50] * 8))
    assert refused.refusal is Refusal.FULL
    world.check()
    assert len(world.grants) == 7
    for reader in readers[1:]:
        assert reader is not None
        assert world.control.counts(reader.slot) == (8, 8)


def test_a_lookup_has_no_effect() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    old, new = chain(namespace, [1, 1]), chain(namespace, [2, 2])
    world.serve(namespace, old)
    world.serve(namespace, new)
    assert world.store.lookup(namespace, old) == Prefix(2, 0)
    world.serve(namespace, chain(namespace, [3]))
    assert (present(world, old), present(world, new)) == (1, 2)
    assert world.store.host.pinned_bytes == 0


def test_leases_that_are_never_fetched_leave_nothing_pinned() -> None:
    """User report 19: 10,000 lookups that are never fetched: pinned bytes go back to zero."""
    world = world_of(64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(64))
    world.put(namespace, hashes)
    for number in range(10_000):
        world.store.lookup(namespace, hashes[: 1 + number % 64])
        lease, _ = world.store.acquire(
            namespace, hashes[: 1 + number % 64], group=ALICE, now_s=number / 100, ttl_s=1.0
        )
        assert lease is not None
        if number % 100 == 0:
            world.store.expire(number / 100)
    assert world.store.host.pinned_bytes > 0
    world.store.expire(1_000.0)
    assert world.store.host.pinned_bytes == 0
    assert world.store.lease_counts() == (0, 0, 0)
    assert world.store.counters.leases_expired == 10_000
    world.check()


def test_an_expired_lease_fails_its_readers_check() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.put(namespace, chain(namespace, [1]))
    lease, _ = world.acquire(namespace, chain(namespace, [1]), ALICE, ttl_s=5.0)
    assert lease is not None
    world.now_s = 4.9
    world.expire()
    assert world.control.generation(lease.slot) == lease.generation
    world.now_s = 5.0
    world.expire()
    assert world.control.generation(lease.slot) > lease.generation
    with pytest.raises(UnknownLease):
        world.store.read_lease(lease.id, ALICE)


def test_a_slot_never_shows_a_generation_twice() -> None:
    """Also not after a restart: a process that slept through it must not take it for its own."""
    world = world_of(4)
    seen: set[tuple[int, int]] = set()
    for _ in range(3):
        namespace = world.open(SPEC)
        world.put(namespace, chain(namespace, [1]))
        for _ in range(5):
            lease, _ = world.acquire(namespace, chain(namespace, [1]), ALICE)
            assert lease is not None
            assert (lease.slot, lease.generation) not in seen
            seen.add((lease.slot, lease.generation))
            world.store.release(lease.id, ALICE)
        world.restart()


def test_a_lease_is_nobody_elses_business() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.put(namespace, chain(namespace, [1]))
    lease, _ = world.acquire(namespace, chain(namespace, [1]), ALICE)
    assert lease is not None
    world.store.release(lease.id, BOB)
    with pytest.raises(UnknownLease):
        world.store.read_lease(lease.id, BOB)
    assert world.store.read_lease(lease.id, ALICE) is lease
    with pytest.raises(LeaseState):
        world.store.commit(lease.id, ALICE)
    world.store.release(lease.id, ALICE)
    world.store.release(lease.id, ALICE)
    assert world.store.host.pinned_bytes == 0


def test_acquire_is_idempotent_by_request() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes, others = chain(namespace, [1, 2, 3]), chain(namespace, [4])
    world.put(namespace, hashes)
    world.put(namespace, others)
    first, _ = world.acquire(namespace, hashes, ALICE, request_id=b"r")
    again, _ = world.acquire(namespace, hashes, ALICE, request_id=b"r")
    foreign, _ = world.acquire(namespace, hashes, BOB, request_id=b"r")
    assert first is again
    assert first is not None
    assert foreign is not None
    assert foreign is not first
    assert world.store.counters.acquires == 2
    with pytest.raises(LeaseState):
        world.acquire(namespace, others, ALICE, request_id=b"r")
    world.store.release(first.id, ALICE)
    fresh, _ = world.acquire(namespace, others, ALICE, request_id=b"r")
    assert fresh is not None
    assert fresh is not first


def test_two_prompts_that_do_not_fit_together_do_not_block_each_other() -> None:
    """Both only on the SSD, each as large as RAM: the second gets what is left, at once."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    first, second = chain(namespace, [1] * 8), chain(namespace, [2] * 8)
    for hashes in (first, second):
        world.serve(namespace, hashes)
        world.store.flush(namespace, hashes, world.now_s)
        world.take_jobs()
        world.settle()
    world.restart()
    namespace = world.open(SPEC)
    mine, _ = world.acquire(namespace, first[:5], ALICE)
    yours, refusal = world.acquire(namespace, second, BOB)
    assert mine is not None
    assert yours is not None
    assert (len(mine.copies), len(yours.copies)) == (5, 3)
    assert refusal is Refusal.FULL
    nothing, refusal = world.acquire(namespace, first, BOB)
    assert nothing is not None
    assert (len(nothing.copies), refusal) == (5, Refusal.FULL)
    world.check()
    world.settle()
    assert mine.ready == 5
    assert yours.ready == 3
    world.check()


def test_a_store_that_is_all_leased_answers_full_at_once() -> None:
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    stored, leased = chain(namespace, [1] * 8), chain(namespace, [2] * 8)
    for hashes in (stored, leased):
        world.serve(namespace, hashes)
        world.store.flush(namespace, hashes, world.now_s)
        world.take_jobs()
        world.settle()
    lease, _ = world.acquire(namespace, leased, ALICE)
    assert lease is not None
    assert len(lease.copies) == 8
    world.settle()
    assert present(world, stored) == 8
    assert world.acquire(namespace, stored, BOB) == (None, Refusal.FULL)
    reserved = world.reserve(namespace, None, chain(namespace, [3]), BOB)
    assert (reserved.lease, reserved.refusal) == (None, Refusal.FULL)
    world.store.release(lease.id, ALICE)
    assert world.acquire(namespace, stored, BOB)[1] is Refusal.NONE


def test_hashes_that_are_no_chain_hit_only_as_far_as_they_are_one() -> None:
    """A repeated, skipped or reordered block ends the prefix; pins stay balanced."""
    world = world_of(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.restart()
    namespace = world.open(SPEC)
    cases = [[0, 0, 1], [0, 2], [1, 2], [0, 1, 0, 1], [3, 2, 1, 0]]
    lengths = []
    for order in cases:
        lease, _ = world.acquire(namespace, [hashes[at] for at in order], ALICE)
        lengths.append(len(lease.copies) if lease else 0)
        if lease is not None:
            world.store.release(lease.id, ALICE)
    assert lengths == [1, 1, 0, 2, 0]
    world.settle()
    world.check()
    world.check_idle()


def test_out_of_lease_slots_is_a_miss_with_a_reason() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    hashes = chain(namespace, [1])
    world.put(namespace, hashes)
    leases = [
        world.store.acquire(namespace, hashes, group=ALICE, now_s=0.0)[0]
        for _ in range(LEASE_SLOTS)
    ]
    refused = world.store.acquire(namespace, hashes, group=BOB, now_s=0.0)
    assert refused == (None, Refusal.LEASES)
    assert leases[0] is not None
    world.store.release(leases[0].id, ALICE)
    assert world.store.acquire(namespace, hashes, group=BOB, now_s=0.0)[0] is not None


def test_pins_keep_a_prefix_up_to_the_limit() -> None:
    world = world_of(8, pin_blocks=3)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(5))
    world.serve(namespace, hashes)
    pin = {"now_s": 0.0, "ttl_s": 10.0}
    assert world.store.pin(namespace, hashes, pin_id=b"a", **pin) == 3
    assert world.store.pin(namespace, hashes, pin_id=b"b", **pin) == 0
    for number in range(20):
        world.serve(namespace, chain(namespace, [100 + number]))
    assert present(world, hashes) == 3
    world.now_s = 10.0
    world.expire()
    assert world.store.host.pinned_bytes == 0
    assert world.store.pin(namespace, hashes, pin_id=b"c", now_s=10.0, ttl_s=10.0) == 3
    world.store.unpin(b"c")
    world.store.unpin(b"c")
    assert world.store.host.pinned_bytes == 0


def test_pins_count_whole_extents() -> None:
    """A block of one page and a byte takes two pages of the limit."""
    spec = spec_of(PAGE + 1)
    world = world_of(16, pin_blocks=5)
    namespace = world.open(spec)
    hashes = chain(namespace, range(5))
    world.serve(namespace, hashes)
    assert world.store.pin(namespace, hashes, pin_id=b"a", now_s=0.0, ttl_s=1.0) == 2
    assert world.store.host.pinned_bytes == 4 * PAGE


# Write leases


def test_two_clients_store_the_same_block_and_one_aborts() -> None:
    """User report 7: the reader gets the right bytes or a miss."""
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(3))
    mine = world.reserve(namespace, None, hashes, ALICE)
    theirs = world.reserve(namespace, None, hashes, BOB)
    assert mine.lease is not None
    assert theirs.lease is None
    world.abort(mine.lease.id, ALICE)
    assert present(world, hashes) == 0
    theirs = world.put(namespace, hashes, BOB)
    assert theirs.indices == [0, 1, 2]
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    assert lease.ready == 3
    world.check()


def test_a_half_written_block_is_a_miss() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(3))
    reserved = world.reserve(namespace, None, hashes, ALICE)
    assert reserved.lease is not None
    assert world.acquire(namespace, hashes, BOB) == (None, Refusal.NONE)
    assert world.commit(reserved.lease.id, ALICE) == 3
    assert present(world, hashes) == 3
    with pytest.raises(UnknownLease):
        world.store.commit(reserved.lease.id, ALICE)


def test_an_expired_write_lease_is_quarantined_until_its_owner_is_gone() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.reserve(namespace, None, chain(namespace, range(4)), ALICE, ttl_s=1.0)
    world.now_s = 2.0
    world.expire()
    assert world.store.quarantined_bytes == 4 * PAGE
    world.store.release_quarantine(world.alive())
    full = world.reserve(namespace, None, chain(namespace, [9]), BOB)
    assert full.refusal is Refusal.FULL
    world.check()
    world.kill(ALICE)
    world.store.release_quarantine(world.alive())
    assert world.store.quarantined_bytes == 0
    assert world.put(namespace, chain(namespace, [9]), BOB).refusal is Refusal.NONE
    world.check()


@pytest.mark.parametrize("how", ["abort", "commit"])
def test_a_late_writer_frees_its_quarantine_itself(how: str) -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    reserved = world.reserve(namespace, None, chain(namespace, range(4)), ALICE, ttl_s=1.0)
    assert reserved.lease is not None
    world.now_s = 2.0
    world.expire()
    world.store.abort(reserved.lease.id, BOB)
    assert world.store.quarantined_bytes == 4 * PAGE, "another group freed it"
    world.zombies.clear()
    if how == "abort":
        world.store.abort(reserved.lease.id, ALICE)
        world.store.abort(reserved.lease.id, ALICE)
    else:
        with pytest.raises(UnknownLease):
            world.store.commit(reserved.lease.id, ALICE)
    assert world.store.quarantined_bytes == 0
    assert present(world, chain(namespace, range(4))) == 0
    world.check()
    world.check_idle()


def test_a_new_daemon_keeps_out_of_what_an_old_writer_may_touch() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.reserve(namespace, None, chain(namespace, range(3)), ALICE)
    world.restart()
    namespace = world.open(SPEC)
    assert world.store.quarantined_bytes == 3 * PAGE
    assert len(world.put(namespace, chain(namespace, [7, 8]), BOB).indices) == 1
    world.check()
    world.kill(ALICE)
    world.store.release_quarantine(world.alive())
    assert world.store.quarantined_bytes == 0
    assert world.control.open_writes() == []


def test_a_block_without_its_parent_is_refused() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    orphan = world.reserve(namespace, hashes[1], hashes[2:], ALICE)
    assert (orphan.lease, orphan.refusal) == (None, Refusal.ORPHAN)
    world.put(namespace, hashes[:2])
    assert world.reserve(namespace, hashes[1], hashes[2:], ALICE).refusal is Refusal.NONE


def test_hashes_behind_another_parent_are_an_error_and_leave_nothing() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.put(namespace, hashes)
    with pytest.raises(InvalidRequest, match="hashes"):
        world.reserve(namespace, None, [BlockHash(b"n" * 32), hashes[2]], ALICE)
    with pytest.raises(InvalidRequest, match="hashes"):
        world.reserve(namespace, None, [BlockHash(b"m" * 32)] * 2, ALICE)
    assert len(namespace.blocks) == 4
    world.check()
    world.check_idle()


def test_reserve_grants_what_fits_and_says_why_not_more() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(6))
    reserved = world.reserve(namespace, None, hashes, ALICE)
    assert reserved.indices == [0, 1, 2, 3]
    assert reserved.refusal is Refusal.FULL
    assert world.store.counters.refused_blocks == 2
    world.store.draining = True
    assert world.reserve(namespace, None, hashes, ALICE).refusal is Refusal.DRAINING
    world.store.draining = False
    huge = world.open(spec_of(5 * PAGE))
    assert world.reserve(huge, None, chain(huge, [1]), ALICE).refusal is Refusal.TOO_LARGE


# Namespaces and drops


def test_a_digest_stands_for_one_spec() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    assert world.store.open_namespace(digest_of(SPEC), SPEC) is namespace
    with pytest.raises(NamespaceMismatch):
        world.store.open_namespace(digest_of(SPEC), spec_of(PAGE, tenant="other"))


def test_namespaces_are_bounded() -> None:
    world = World(StoreConfig(host_bytes=PAGE, max_namespaces=2))
    for number in range(2):
        world.store.open_namespace(NamespaceDigest(bytes([number]) * 32), SPEC)
    with pytest.raises(CapacityError):
        world.store.open_namespace(NamespaceDigest(b"x" * 32), SPEC)


def test_a_dropped_namespace_is_never_hit_again() -> None:
    """Not now, not while its writes are on their way, and not after a restart."""
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    world.store.write_ahead(world.now_s, idle=True)
    world.take_jobs()
    world.finish_write()
    world.finish_write()
    world.drop_namespace(namespace)
    assert present(world, hashes) == 0
    world.settle()
    world.restart()
    assert present(world, hashes) == 0
    world.settle()
    assert world.medium.blocks == {}


def test_a_write_on_its_way_does_not_undo_a_drop() -> None:
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    assert world.drop_blocks(namespace, hashes[2:]) == 2
    world.settle()
    assert present(world, hashes) == 2
    world.restart()
    assert present(world, hashes) == 2
    world.check()


def test_reclaiming_a_dropped_generation_spares_the_new_one() -> None:
    """The medium knows hashes only: the old block's delete must not hit the new one's bytes."""
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    for _ in range(2):
        world.serve(namespace, hashes)
        world.store.flush(namespace, hashes, world.now_s)
        world.take_jobs()
        world.settle()
        assert on_ssd(world, hashes) == [True, True]
        world.drop_namespace(namespace)
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    while world.store.reap():
        pass
    world.take_jobs()
    world.settle()
    world.check()
    world.restart()
    assert world.store.lookup(world.open(SPEC), hashes) == Prefix(0, 2)


@pytest.mark.parametrize("whole", [True, False])
def test_a_load_under_a_drop_delivers_nothing(whole: bool) -> None:
    """By the time the disk answers it may hold another block of the same hash."""
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    if whole:
        world.drop_namespace(namespace)
    else:
        world.drop_blocks(namespace, hashes)
    world.put(namespace, hashes, BOB)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    assert (lease.ready, lease.usable) == (0, 0)
    assert world.store.counters.load_failed_blocks == {"Dropped": 2}
    world.check()
    assert on_ssd(world, hashes) == [True, True]


# The SSD


def test_blocks_on_the_ssd_stay_there_when_they_come_back_to_ram() -> None:
    """SSD copies are inclusive, so a promoted block is never written twice."""
    world = world_of(4, ssd_blocks=64)
    namespace = world.open(SPEC)
    prompts = [chain(namespace, [number] * 4) for number in range(3)]
    for _ in range(3):
        for hashes in prompts:
            world.serve(namespace, hashes)
            world.store.write_ahead(world.now_s, idle=True)
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
        assert world.store.ssd is not None
        assert world.store.ssd.queued_bytes <= 2 * PAGE
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
        world.store.write_ahead(world.now_s, idle=True)
        world.take_jobs()
        world.settle()
        assert world.medium.used_bytes <= 6 * PAGE
    assert len(world.medium.blocks) == 6
    assert world.store.counters.ssd_evicted_blocks > 0
    world.check()


def test_a_block_larger_than_the_ssd_does_not_empty_it() -> None:
    world = world_of(16, ssd_blocks=4)
    small, large = world.open(SPEC), world.open(spec_of(5 * PAGE))
    hashes = chain(small, range(4))
    world.serve(small, hashes)
    world.store.flush(small, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.serve(large, chain(large, [1]))
    world.store.flush(large, chain(large, [1]), world.now_s)
    world.take_jobs()
    world.settle()
    assert on_ssd(world, hashes) == [True] * 4


def test_flush_writes_what_has_left_the_ssd() -> None:
    world = world_of(16, ssd_blocks=4)
    namespace = world.open(SPEC)
    first, second = chain(namespace, [1] * 4), chain(namespace, [2] * 4)
    for hashes in (first, second, first):
        world.serve(namespace, hashes)
        world.store.flush(namespace, hashes, world.now_s)
        world.take_jobs()
        world.settle()
        assert world.store.flush(namespace, hashes, world.now_s) == [True] * 4
    world.check()


@pytest.mark.parametrize("error", [CorruptBlock("checksum"), TierUnavailable("EIO")])
def test_a_failed_load_keeps_the_good_head(error: CorruptBlock | TierUnavailable) -> None:
    """User reports 6 and 24: the lease shrinks to what is right; the bad block is a miss."""
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    world.finish_load(2, error)
    assert (lease.ready, lease.usable) == (0, 2)
    world.settle()
    assert (lease.ready, lease.usable) == (2, 2)
    assert world.control.counts(lease.slot) == (2, 2)
    assert world.store.counters.load_failed_blocks == {type(error).__name__: 1}
    assert present(world, hashes) == 2
    assert hashes[2] not in world.medium.blocks
    world.store.release(lease.id, ALICE)
    assert world.serve(namespace, hashes) == 2
    assert present(world, hashes) == 4
    world.check()


def test_a_released_load_is_kept_until_the_disk_answers() -> None:
    """User report 12: a late read never writes into memory that somebody else has."""
    world = world_of(2, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    world.store.release(lease.id, ALICE)
    assert world.reserve(namespace, None, chain(namespace, [9]), BOB).refusal is Refusal.FULL
    world.check()
    world.settle()
    assert world.put(namespace, chain(namespace, [9]), BOB).refusal is Refusal.NONE
    assert world.store.host.pinned_bytes == 0


def test_a_failing_ssd_does_not_freeze_ram() -> None:
    """Chains whose tails are on the SSD only must still make room when no write succeeds."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.serve(namespace, hashes)
    world.store.start_demotions(2 * PAGE, world.now_s)
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


def test_a_failed_write_is_tried_again_later() -> None:
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, [1])
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.finish_write()  # The namespace.
    world.finish_write(TierUnavailable("EIO"))
    assert world.store.ssd is not None
    assert not world.store.ssd.healthy
    world.store.write_ahead(world.now_s + 1.0, idle=True)
    assert world.store.take_jobs() == []
    world.now_s += 10.0
    world.store.write_ahead(world.now_s, idle=True)
    world.take_jobs()
    world.settle()
    assert on_ssd(world, hashes) == [True]
    assert world.store.ssd.healthy


def test_a_restart_finds_the_ssd_warm_and_rewrites_nothing() -> None:
    """User report 23."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.restart()
    namespace = world.open(SPEC)
    assert world.serve(namespace, hashes) == 8
    world.settle()
    world.store.write_ahead(world.now_s, idle=True)
    world.take_jobs()
    assert not world.writer
    copies = [namespace.blocks[key].host for key in hashes]
    assert all(copy is not None and copy.state is HostState.READY for copy in copies)
    world.check()


def test_a_restart_forgets_blocks_without_their_ancestors() -> None:
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    world.store.flush(namespace, hashes[1:], world.now_s)
    world.take_jobs()
    world.settle()
    assert len(world.medium.blocks) == 3
    world.restart()
    assert present(world, hashes) == 0
    world.settle()
    assert world.medium.blocks == {}


# Counting


def test_the_hit_rate_of_a_known_trace_is_exact() -> None:
    """User report 33: a known 50 % trace shows exactly 50 %, and the tiers sum to the requests."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    prompts = [chain(namespace, [number] * 4) for number in range(5)]
    for hashes in prompts * 2:
        world.serve(namespace, hashes)
        world.store.write_ahead(world.now_s, idle=True)
        world.take_jobs()
        world.settle()
    counters = world.store.counters
    assert counters.requested_blocks == 40
    assert counters.host_hit_blocks + counters.ssd_hit_blocks == 20
    assert counters.missed_blocks == 20
    assert counters.ssd_hit_blocks > 0
    tokens = counters.host_hit_tokens + counters.ssd_hit_tokens + counters.missed_tokens
    assert counters.requested_tokens == tokens == 40
    assert counters.acquires == 10


def test_stored_counts_only_what_became_visible() -> None:
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(3))
    reserved = world.reserve(namespace, None, hashes, ALICE)
    assert reserved.lease is not None
    world.drop_blocks(namespace, hashes[1:])
    assert world.commit(reserved.lease.id, ALICE) == 1
    assert world.store.counters.stored_blocks == 1
    assert world.store.counters.stored_bytes == PAGE
    world.check()
    world.check_idle()


# Making room for a block must not take its own place in the chain


def test_a_hole_can_be_filled_when_that_costs_the_block_behind_it() -> None:
    """User report 7, in a full store: the aborted head comes back, its orphan leaves for it."""
    world = world_of(2)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(3))
    head = world.reserve(namespace, None, hashes[:1], ALICE)
    assert head.lease is not None
    world.put(namespace, hashes[1:2], BOB, parent=hashes[0])
    world.abort(head.lease.id, ALICE)
    world.put(namespace, chain(namespace, [50]), BOB)
    world.store.finish(namespace, chain(namespace, [50])[0])
    reserved = world.reserve(namespace, None, [hashes[0]], ALICE)
    assert reserved.lease is not None
    world.check()
    assert world.commit(reserved.lease.id, ALICE) == 1
    assert present(world, hashes) == 1
    assert world.put(namespace, hashes[1:], BOB, parent=hashes[0]).refusal is Refusal.FULL
    world.check()


def test_a_block_that_left_the_ssd_to_make_room_for_itself_is_not_granted() -> None:
    """A tiny SSD: to load a block another one is demoted, into its place."""
    world = world_of(2, ssd_blocks=2, queue_blocks=1)
    namespace = world.open(SPEC)
    interior, wanted = chain(namespace, [1, 1]), chain(namespace, [2])
    for hashes in (interior[:1], wanted):
        world.serve(namespace, hashes)
        world.store.flush(namespace, hashes, world.now_s)
        world.take_jobs()
        world.settle()
    world.restart()
    namespace = world.open(SPEC)
    world.put(namespace, chain(namespace, [3]))
    world.put(namespace, interior[1:], parent=interior[0])
    assert world.acquire(namespace, wanted, ALICE) == (None, Refusal.FULL)
    assert not world.loads
    world.check()
    world.settle()
    world.check()
    world.check_idle()
    assert on_ssd(world, interior) == [True, True]


def test_a_lossy_copy_serves_only_who_allows_it_and_gives_way_to_the_exact_one() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    reserved = world.reserve(namespace, None, hashes, ALICE, allowed_loss=Loss.BOUNDED)
    assert reserved.lease is not None
    world.commit(reserved.lease.id, ALICE)
    assert present(world, hashes) == 2, "RAM holds what the engine delivered"
    world.store.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
    world.restart()
    namespace = world.open(SPEC)
    assert world.acquire(namespace, hashes, ALICE) == (None, Refusal.NONE)
    lossy, _ = world.acquire(namespace, hashes, ALICE, allowed_loss=Loss.BOUNDED)
    assert lossy is not None
    world.settle()
    assert lossy.ready == 2
    assert world.acquire(namespace, hashes, BOB) == (None, Refusal.NONE)
    assert world.put(namespace, hashes, BOB).indices == [0, 1]
    assert present(world, hashes) == 2
    world.settle()
    world.check()
    world.store.release(lossy.id, ALICE)
    assert world.store.host.extents.used_bytes == 2 * PAGE
    world.check()
