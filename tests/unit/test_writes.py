"""What writing promises: leases and quarantine. User reports have their numbers from support.py."""

from __future__ import annotations

import pytest

from kvtier.errors import InvalidRequest, UnknownLease
from kvtier.types import BlockHash, Refusal
from tests.sim.world import chain, spec_of
from tests.unit.support import ALICE, BOB, PAGE, SPEC, present, world_of


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
        world.store.writes.commit(reserved.lease.id, ALICE, world.now_s)


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
    world.store.writes.draining = True
    assert world.reserve(namespace, None, hashes, ALICE).refusal is Refusal.DRAINING
    world.store.writes.draining = False
    huge = world.open(spec_of(5 * PAGE))
    assert world.reserve(huge, None, chain(huge, [1]), ALICE).refusal is Refusal.TOO_LARGE


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


# Quarantine


def test_an_expired_write_lease_is_quarantined_until_its_owner_is_gone() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.reserve(namespace, None, chain(namespace, range(4)), ALICE, ttl_s=1.0)
    world.now_s = 2.0
    world.expire()
    assert world.store.tiers.host.quarantined_bytes == 4 * PAGE
    world.store.writes.release_quarantine(world.alive())
    full = world.reserve(namespace, None, chain(namespace, [9]), BOB)
    assert full.refusal is Refusal.FULL
    world.check()
    world.kill(ALICE)
    world.store.writes.release_quarantine(world.alive())
    assert world.store.tiers.host.quarantined_bytes == 0
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
    world.store.writes.abort(reserved.lease.id, BOB)
    assert world.store.tiers.host.quarantined_bytes == 4 * PAGE, "another group freed it"
    world.zombies.clear()
    if how == "abort":
        world.store.writes.abort(reserved.lease.id, ALICE)
        world.store.writes.abort(reserved.lease.id, ALICE)
    else:
        with pytest.raises(UnknownLease):
            world.store.writes.commit(reserved.lease.id, ALICE, world.now_s)
    assert world.store.tiers.host.quarantined_bytes == 0
    assert present(world, chain(namespace, range(4))) == 0
    world.check()
    world.check_idle()


def test_a_new_daemon_keeps_out_of_what_an_old_writer_may_touch() -> None:
    world = world_of(4)
    namespace = world.open(SPEC)
    world.reserve(namespace, None, chain(namespace, range(3)), ALICE)
    world.restart()
    namespace = world.open(SPEC)
    assert world.store.tiers.host.quarantined_bytes == 3 * PAGE
    assert len(world.put(namespace, chain(namespace, [7, 8]), BOB).indices) == 1
    world.check()
    world.kill(ALICE)
    world.store.writes.release_quarantine(world.alive())
    assert world.store.tiers.host.quarantined_bytes == 0
    assert world.control.open_writes() == []
