"""What reading promises: leases, loads, pins. User reports have their numbers from support.py."""

from __future__ import annotations

import pytest

from kvtier.arena import LEASE_SLOTS
from kvtier.errors import CorruptBlock, LeaseState, TierUnavailable, UnknownLease
from kvtier.reads import Prefix
from kvtier.types import Refusal
from tests.sim.world import chain, group_id, spec_of
from tests.unit.support import ALICE, BOB, PAGE, SPEC, on_ssd, present, world_of, write_out


def test_seven_readers_keep_what_the_eighth_released() -> None:
    """User report 9: eight readers, the first finishes, eviction runs, seven still read."""
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.put(namespace, hashes)
    readers = [world.acquire(namespace, hashes, group_id(10 + at))[0] for at in range(8)]
    assert readers[0] is not None
    world.store.reads.release(readers[0].id, readers[0].group)
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
    assert world.store.reads.lookup(namespace, old) == Prefix(2, 0)
    world.serve(namespace, chain(namespace, [3]))
    assert (present(world, old), present(world, new)) == (1, 2)
    assert world.store.tiers.host.pinned_bytes == 0


def test_leases_that_are_never_fetched_leave_nothing_pinned() -> None:
    """User report 19: 10,000 lookups that are never fetched: pinned bytes go back to zero."""
    world = world_of(64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(64))
    world.put(namespace, hashes)
    for number in range(10_000):
        world.store.reads.lookup(namespace, hashes[: 1 + number % 64])
        lease, _ = world.store.reads.acquire(
            namespace, hashes[: 1 + number % 64], group=ALICE, now_s=number / 100, ttl_s=1.0
        )
        assert lease is not None
        if number % 100 == 0:
            world.store.tick(number / 100, 0.0)
    assert world.store.tiers.host.pinned_bytes > 0
    world.store.tick(1_000.0, 0.0)
    assert world.store.tiers.host.pinned_bytes == 0
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
        world.store.reads.lease(lease.id, ALICE)


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
            world.store.reads.release(lease.id, ALICE)
        world.restart()


def test_a_lease_is_nobody_elses_business() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.put(namespace, chain(namespace, [1]))
    lease, _ = world.acquire(namespace, chain(namespace, [1]), ALICE)
    assert lease is not None
    world.store.reads.release(lease.id, BOB)
    with pytest.raises(UnknownLease):
        world.store.reads.lease(lease.id, BOB)
    assert world.store.reads.lease(lease.id, ALICE) is lease
    with pytest.raises(LeaseState):
        world.store.writes.commit(lease.id, ALICE, world.now_s)
    world.store.reads.release(lease.id, ALICE)
    world.store.reads.release(lease.id, ALICE)
    assert world.store.tiers.host.pinned_bytes == 0


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
    world.store.reads.release(first.id, ALICE)
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
        write_out(world, namespace, hashes)
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
        write_out(world, namespace, hashes)
    lease, _ = world.acquire(namespace, leased, ALICE)
    assert lease is not None
    assert len(lease.copies) == 8
    world.settle()
    assert present(world, stored) == 8
    assert world.acquire(namespace, stored, BOB) == (None, Refusal.FULL)
    reserved = world.reserve(namespace, None, chain(namespace, [3]), BOB)
    assert (reserved.lease, reserved.refusal) == (None, Refusal.FULL)
    world.store.reads.release(lease.id, ALICE)
    assert world.acquire(namespace, stored, BOB)[1] is Refusal.NONE


def test_hashes_that_are_no_chain_hit_only_as_far_as_they_are_one() -> None:
    """A repeated, skipped or reordered block ends the prefix; pins stay balanced."""
    world = world_of(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    cases = [[0, 0, 1], [0, 2], [1, 2], [0, 1, 0, 1], [3, 2, 1, 0]]
    lengths = []
    for order in cases:
        lease, _ = world.acquire(namespace, [hashes[at] for at in order], ALICE)
        lengths.append(len(lease.copies) if lease else 0)
        if lease is not None:
            world.store.reads.release(lease.id, ALICE)
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
        world.store.reads.acquire(namespace, hashes, group=ALICE, now_s=0.0)[0]
        for _ in range(LEASE_SLOTS)
    ]
    refused = world.store.reads.acquire(namespace, hashes, group=BOB, now_s=0.0)
    assert refused == (None, Refusal.LEASES)
    assert leases[0] is not None
    world.store.reads.release(leases[0].id, ALICE)
    assert world.store.reads.acquire(namespace, hashes, group=BOB, now_s=0.0)[0] is not None


# Loads


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CorruptBlock("it differs", "checksum"), "checksum"),
        (TierUnavailable("EIO"), "TierUnavailable"),
    ],
)
def test_a_failed_load_keeps_the_good_head(
    error: CorruptBlock | TierUnavailable, reason: str
) -> None:
    """User reports 6 and 24: the lease shrinks to what is right; the bad block is a miss."""
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    world.serve(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    world.finish_load(2, error)
    assert (lease.ready, lease.usable) == (0, 2)
    world.settle()
    assert (lease.ready, lease.usable) == (2, 2)
    assert world.control.counts(lease.slot) == (2, 2)
    assert world.store.counters.load_failed_blocks == {reason: 1}
    assert present(world, hashes) == 2
    assert hashes[2] not in world.medium.blocks
    world.store.reads.release(lease.id, ALICE)
    assert world.serve(namespace, hashes) == 2
    assert present(world, hashes) == 4
    world.check()


def test_a_released_load_is_kept_until_the_disk_answers() -> None:
    """User report 12: a late read never writes into memory that somebody else has."""
    world = world_of(2, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    world.serve(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    world.store.reads.release(lease.id, ALICE)
    assert world.reserve(namespace, None, chain(namespace, [9]), BOB).refusal is Refusal.FULL
    world.check()
    world.settle()
    assert world.put(namespace, chain(namespace, [9]), BOB).refusal is Refusal.NONE
    assert world.store.tiers.host.pinned_bytes == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_load_under_a_drop_delivers_nothing(whole: bool) -> None:
    """By the time the disk answers it may hold another block of the same hash."""
    world = world_of(8, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    world.serve(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    if whole:
        world.drop_namespace(namespace)
    else:
        world.drop_blocks(namespace, hashes)
    world.put(namespace, hashes, BOB)
    write_out(world, namespace, hashes)
    assert (lease.ready, lease.usable) == (0, 0)
    assert world.store.counters.load_failed_blocks == {"dropped": 2}
    world.check()
    assert on_ssd(world, hashes) == [True, True]


def test_a_block_that_left_the_ssd_to_make_room_for_itself_is_not_granted() -> None:
    """A tiny SSD: to load a block another one is demoted, into its place."""
    world = world_of(2, ssd_blocks=2, queue_blocks=1)
    namespace = world.open(SPEC)
    interior, wanted = chain(namespace, [1, 1]), chain(namespace, [2])
    for hashes in (interior[:1], wanted):
        world.serve(namespace, hashes)
        write_out(world, namespace, hashes)
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


# Pins


def test_pins_keep_a_prefix_up_to_the_limit() -> None:
    world = world_of(8, pin_blocks=3)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(5))
    world.serve(namespace, hashes)
    pin = {"now_s": 0.0, "ttl_s": 10.0}
    assert world.store.reads.pin(namespace, hashes, pin_id=b"a", **pin) == 3
    assert world.store.reads.pin(namespace, hashes, pin_id=b"b", **pin) == 0
    for number in range(20):
        world.serve(namespace, chain(namespace, [100 + number]))
    assert present(world, hashes) == 3
    world.now_s = 10.0
    world.expire()
    assert world.store.tiers.host.pinned_bytes == 0
    assert world.store.reads.pin(namespace, hashes, pin_id=b"c", now_s=10.0, ttl_s=10.0) == 3
    world.store.reads.unpin(b"c")
    world.store.reads.unpin(b"c")
    assert world.store.tiers.host.pinned_bytes == 0


def test_pins_count_whole_extents() -> None:
    """A block of one page and a byte takes two pages of the limit."""
    spec = spec_of(PAGE + 1)
    world = world_of(16, pin_blocks=5)
    namespace = world.open(spec)
    hashes = chain(namespace, range(5))
    world.serve(namespace, hashes)
    assert world.store.reads.pin(namespace, hashes, pin_id=b"a", now_s=0.0, ttl_s=1.0) == 2
    assert world.store.tiers.host.pinned_bytes == 4 * PAGE


# Counting


def test_the_hit_rate_of_a_known_trace_is_exact() -> None:
    """User report 33: a known 50 % trace shows exactly 50 %, and the tiers sum to the requests."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    prompts = [chain(namespace, [number] * 4) for number in range(5)]
    for hashes in prompts * 2:
        world.serve(namespace, hashes)
        world.store.tiers.write_ahead(world.now_s, idle=True)
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


def test_an_engine_that_looks_up_first_is_counted_once() -> None:
    """Its look-ups say nothing, and its acquires only what is there; it says what it asked for."""
    world = world_of(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, [1, 2, 3, 4])
    world.put(namespace, hashes[:3])
    reads, counters = world.store.reads, world.store.counters
    before = counters.requested_blocks
    for _ in range(5):
        assert reads.lookup(namespace, hashes).host_blocks == 3
    assert counters.requested_blocks == before
    reads.record(namespace, 2, 1, 1)
    lease, _ = reads.acquire(namespace, hashes[:3], group=ALICE, now_s=world.now_s, recorded=True)
    assert lease is not None
    assert counters.requested_blocks - before == 4
    assert (counters.host_hit_blocks, counters.ssd_hit_blocks) == (2, 1)
    tokens = SPEC.block_tokens
    assert (counters.host_hit_tokens, counters.ssd_hit_tokens) == (2 * tokens, tokens)
    assert counters.requested_tokens == counters.requested_blocks * tokens
    assert counters.missed_blocks == counters.requested_blocks - 3
    assert counters.missed_tokens == counters.missed_blocks * tokens
