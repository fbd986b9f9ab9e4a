"""What takes the whole store: namespaces, drops, restarts. User reports: see support.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.errors import CapacityError, InvalidRequest, LeaseState, NamespaceMismatch
from kvtier.index import HostState, Namespace
from kvtier.reads import Prefix
from kvtier.store import StoreConfig
from kvtier.types import BlockHash, Loss, NamespaceDigest, Refusal
from tests.sim.world import World, chain, digest_of, spec_of
from tests.unit.support import ALICE, BOB, PAGE, SPEC, on_ssd, present, world_of, write_out

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
    world.store.tiers.write_ahead(world.now_s, idle=True)
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
    world.store.tiers.flush(namespace, hashes, world.now_s)
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
        write_out(world, namespace, hashes)
        assert on_ssd(world, hashes) == [True, True]
        world.drop_namespace(namespace)
    world.serve(namespace, hashes)
    write_out(world, namespace, hashes)
    while world.store.reap():
        pass
    world.take_jobs()
    world.settle()
    world.check()
    world.restart()
    assert world.store.reads.lookup(world.open(SPEC), hashes) == Prefix(0, 2)


# Lossy copies


def store(
    world: World,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    *,
    allowed_loss: Loss = Loss.EXACT,
    loss: Loss = Loss.EXACT,
) -> None:
    """Reserve and commit."""
    reserved = world.reserve(namespace, None, hashes, ALICE, allowed_loss=allowed_loss, loss=loss)
    assert reserved.lease is not None
    world.commit(reserved.lease.id, ALICE)


def test_a_lossy_copy_serves_only_who_allows_it_and_gives_way_to_the_exact_one() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    store(world, namespace, hashes, allowed_loss=Loss.BOUNDED)
    assert present(world, hashes) == 2, "RAM holds what the engine delivered"
    write_out(world, namespace, hashes)
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
    world.store.reads.release(lossy.id, ALICE)
    assert world.store.tiers.host.extents.used_bytes == 2 * PAGE
    world.check()


def test_an_exact_store_replaces_the_lossy_copy_of_a_block_that_ram_has() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    store(world, namespace, hashes, allowed_loss=Loss.BOUNDED)
    write_out(world, namespace, hashes)
    assert namespace.blocks[hashes[0]].ssd_loss is Loss.BOUNDED
    again = world.reserve(namespace, None, hashes, BOB)
    assert (again.lease, again.covered_blocks) == (None, 2), "RAM has the exact bytes"
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    lease, _ = world.acquire(namespace, hashes, BOB)
    assert lease is not None
    assert len(lease.copies) == 2
    world.settle()
    world.check()


def test_an_exact_store_beside_a_lossy_write_that_is_under_way_replaces_it() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(1))
    store(world, namespace, hashes, allowed_loss=Loss.BOUNDED)
    world.store.tiers.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    assert world.reserve(namespace, None, hashes, BOB).covered_blocks == 1
    write_out(world, namespace, hashes)
    world.settle()
    assert namespace.blocks[hashes[0]].ssd_loss is Loss.EXACT
    world.check()


def test_a_store_that_overtakes_a_lossy_one_gets_an_exact_copy() -> None:
    """What is computed behind lossy blocks is lossy, whoever wrote it down without loss."""
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(1))
    lossy = world.reserve(namespace, None, hashes, ALICE, loss=Loss.BOUNDED)
    assert lossy.lease is not None
    exact = world.reserve(namespace, None, hashes, BOB)
    assert exact.indices == [0], "it does not wait for the lossy one"
    assert exact.lease is not None
    world.commit(exact.lease.id, BOB)
    world.commit(lossy.lease.id, ALICE)
    lease, _ = world.acquire(namespace, hashes, BOB)
    assert lease is not None
    world.check()


def test_lossy_bytes_stay_lossy_on_the_ssd_and_in_ram_again() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(1))
    store(world, namespace, hashes, loss=Loss.BOUNDED)
    assert present(world, hashes) == 0
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    assert present(world, hashes) == 0
    lease, _ = world.acquire(namespace, hashes, ALICE, allowed_loss=Loss.BOUNDED)
    assert lease is not None
    world.settle()
    # The SSD loses it: RAM's lossy bytes are written again, by an exact codec.
    world.store.tiers.retire_segment(
        0, namespace.blocks[hashes[0]].place.segment or 0, damaged=True
    )
    while world.store.tiers.ssd is not None and world.store.tiers.ssd.reap(100):
        pass
    write_out(world, namespace, hashes)
    assert namespace.blocks[hashes[0]].stored
    assert namespace.blocks[hashes[0]].ssd_loss is Loss.BOUNDED
    assert present(world, hashes) == 0
    world.check()


def test_an_exact_store_beside_one_that_fills_ram_again_replaces_the_lossy_copy() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(1))
    store(world, namespace, hashes, allowed_loss=Loss.BOUNDED)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    reserved = world.reserve(namespace, None, hashes, ALICE, allowed_loss=Loss.BOUNDED)
    assert reserved.lease is not None
    assert world.reserve(namespace, None, hashes, BOB).covered_blocks == 1
    world.commit(reserved.lease.id, ALICE)
    write_out(world, namespace, hashes)
    assert namespace.blocks[hashes[0]].ssd_loss is Loss.EXACT
    world.check()


@pytest.mark.parametrize("end", ["refused", "aborted", "no chain"])
def test_a_lossy_copy_stays_until_its_successor_is_there(end: str) -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(3))
    store(world, namespace, hashes, allowed_loss=Loss.BOUNDED)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    if end == "refused":
        filler = chain(namespace, range(10, 14))
        full = world.reserve(namespace, None, filler, ALICE)
        assert full.lease is not None
        assert world.reserve(namespace, None, hashes, BOB).refusal is Refusal.FULL
        world.abort(full.lease.id, ALICE)
    elif end == "aborted":
        reserved = world.reserve(namespace, None, hashes[:1], BOB)
        assert reserved.lease is not None
        world.abort(reserved.lease.id, BOB)
    else:
        with pytest.raises(InvalidRequest):
            world.reserve(namespace, None, [hashes[0], hashes[2]], BOB)
    lease, _ = world.acquire(namespace, hashes, ALICE, allowed_loss=Loss.BOUNDED)
    assert lease is not None
    assert len(lease.copies) == 3
    world.settle()
    world.check()


def test_a_request_s_lease_is_not_answered_to_who_allows_less_loss() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    store(world, namespace, hashes, loss=Loss.BOUNDED)
    name = b"request"
    lease, _ = world.acquire(namespace, hashes, ALICE, request_id=name, allowed_loss=Loss.BOUNDED)
    assert lease is not None
    with pytest.raises(LeaseState, match="more loss"):
        world.acquire(namespace, hashes, ALICE, request_id=name)


def test_lossy_bytes_do_not_cover_an_exact_copy_on_the_ssd() -> None:
    world = world_of(1, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(1))
    world.put(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    reserved = world.reserve(namespace, None, hashes, ALICE, loss=Loss.BOUNDED)
    assert (reserved.lease, reserved.covered_blocks) == (None, 1)
    assert present(world, hashes) == 1


# Restarts


def test_a_restart_finds_the_ssd_warm_and_rewrites_nothing() -> None:
    """User report 23."""
    world = world_of(8, ssd_blocks=64)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.serve(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    namespace = world.open(SPEC)
    assert world.serve(namespace, hashes) == 8
    world.settle()
    world.store.tiers.write_ahead(world.now_s, idle=True)
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
    write_out(world, namespace, hashes[1:])
    assert len(world.medium.blocks) == 3
    world.restart()
    assert present(world, hashes) == 0
    world.settle()
    assert world.medium.blocks == {}
