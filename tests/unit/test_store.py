"""What takes the whole store: namespaces, drops, restarts. User reports: see support.py."""

from __future__ import annotations

import pytest

from kvtier.errors import CapacityError, NamespaceMismatch
from kvtier.index import HostState
from kvtier.reads import Prefix
from kvtier.store import StoreConfig
from kvtier.types import Loss, NamespaceDigest, Refusal
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


def test_a_lossy_copy_serves_only_who_allows_it_and_gives_way_to_the_exact_one() -> None:
    world = world_of(4, ssd_blocks=16)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(2))
    reserved = world.reserve(namespace, None, hashes, ALICE, allowed_loss=Loss.BOUNDED)
    assert reserved.lease is not None
    world.commit(reserved.lease.id, ALICE)
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
