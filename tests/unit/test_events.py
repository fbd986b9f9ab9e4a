"""Events of the store: how few there are, and what they name. That they are exact: tests/sim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.events import AllRemoved, BlocksRemoved, BlocksStored, Event, ResidencyEvents
from kvtier.types import Tier
from tests.sim.follower import Follower
from tests.sim.world import World, chain, digest_of
from tests.unit.support import ALICE, SPEC, world_of, write_out


def watched(blocks: int, *, ssd_blocks: int | None = None, backlog: int = 1_000) -> World:
    """A world whose store tells events."""
    plain = world_of(blocks, ssd_blocks=ssd_blocks)
    config = replace(plain.config, event_backlog=backlog)
    world = World(config, limit_bytes=plain.limit_bytes)
    world.groups.add(ALICE)
    return world


def source(world: World) -> ResidencyEvents:
    events = world.store.events
    assert events is not None
    return events


def told(world: World, limit: int = 1_000) -> list[Event]:
    """All events that wait, as a publisher would take them."""
    events: list[Event] = []
    while source(world).waiting:
        events += source(world).take(limit)
    return events


def test_the_first_event_clears_everything() -> None:
    world = watched(4)
    assert told(world) == [AllRemoved()]
    assert told(world) == []
    assert not source(world).waiting


def test_a_chain_is_one_event() -> None:
    world = watched(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(6))
    told(world)
    world.put(namespace, hashes[:4])
    digest = digest_of(SPEC)
    assert told(world) == [BlocksStored(Tier.HOST, digest, 1, None, tuple(hashes[:4]))]
    world.put(namespace, hashes[4:], parent=hashes[3])
    assert told(world) == [BlocksStored(Tier.HOST, digest, 1, hashes[3], tuple(hashes[4:]))]
    write_out(world, namespace, hashes)
    assert told(world) == [BlocksStored(Tier.SSD, digest, 1, None, tuple(hashes))]
    world.drop_blocks(namespace, hashes[2:])
    events = told(world)
    assert all(isinstance(event, BlocksRemoved) for event in events)
    follower = Follower({tier: set(hashes) for tier in (Tier.HOST, Tier.SSD)}, begun=True)
    follower.follow(events)
    assert follower.blocks == {tier: set(hashes[:2]) for tier in (Tier.HOST, Tier.SSD)}


def test_other_chains_and_namespaces_are_events_of_their_own() -> None:
    world = watched(8)
    one, two = world.open(SPEC), world.open(replace(SPEC, tenant="two"))
    told(world)
    world.put(one, chain(one, [1, 2]))
    world.put(one, chain(one, [1, 3])[1:], parent=chain(one, [1])[0])
    world.put(two, chain(two, [1, 2]))
    events = told(world)
    assert events == [
        BlocksStored(Tier.HOST, one.digest, 1, None, tuple(chain(one, [1, 2]))),
        BlocksStored(Tier.HOST, one.digest, 1, chain(one, [1])[0], (chain(one, [1, 3])[1],)),
        BlocksStored(Tier.HOST, two.digest, 1, None, tuple(chain(two, [1, 2]))),
    ]
    for namespace in (one, two):
        world.drop_blocks(namespace, chain(namespace, [1, 2]))
    assert [type(event) for event in told(world)] == [BlocksRemoved, BlocksRemoved]


def test_what_came_and_went_is_not_told() -> None:
    world = watched(8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(4))
    told(world)
    world.put(namespace, hashes)
    world.drop_blocks(namespace, hashes)
    assert told(world) == []
    world.put(namespace, hashes)
    told(world)
    world.drop_blocks(namespace, hashes)
    world.put(namespace, hashes)
    assert told(world) == []


def test_blocks_that_are_being_written_or_loaded_are_not_told() -> None:
    world = watched(4, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(3))
    told(world)
    reserved = world.reserve(namespace, None, hashes, ALICE)
    assert told(world) == []
    assert reserved.lease is not None
    world.commit(reserved.lease.id, ALICE)
    assert len(told(world)) == 1
    write_out(world, namespace, hashes)
    others = chain(namespace, range(50, 54))
    world.put(namespace, others)
    write_out(world, namespace, others)
    told(world)
    lease, _ = world.acquire(namespace, hashes, ALICE)
    assert lease is not None
    assert namespace.blocks[hashes[0]].host is not None
    assert not any(isinstance(event, BlocksStored) for event in told(world))
    world.settle()
    assert [event.hashes for event in told(world) if isinstance(event, BlocksStored)] == [
        tuple(hashes)
    ]


def test_few_at_a_time() -> None:
    world = watched(32)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(32))
    told(world)
    world.put(namespace, hashes)
    parts = []
    while source(world).waiting:
        parts += source(world).take(10)
    lengths = [len(event.hashes) for event in parts if isinstance(event, BlocksStored)]
    assert lengths == [10, 10, 10, 2]


def test_a_directory_that_hangs_takes_its_blocks_along_and_brings_them_back() -> None:
    world = watched(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    told(world)
    world.put(namespace, hashes)
    write_out(world, namespace, hashes)
    told(world)
    world.store.tiers.shard_down(0)
    gone = told(world, limit=3)
    assert {key for event in gone if isinstance(event, BlocksRemoved) for key in event.hashes} == {
        *hashes
    }
    world.store.tiers.shard_resumed(0)
    assert told(world) == [BlocksStored(Tier.SSD, namespace.digest, 1, None, tuple(hashes))]


def test_a_dropped_namespace_is_told_as_it_is_reclaimed() -> None:
    world = watched(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    told(world)
    world.put(namespace, hashes)
    write_out(world, namespace, hashes)
    follower = Follower(begun=True)
    follower.follow(told(world)[:])
    world.drop_namespace(namespace)
    world.put(namespace, hashes[:1])  # Of the new generation, before the old one is reclaimed.
    while world.store.reap():
        pass
    follower.follow(told(world))
    assert follower.blocks[Tier.HOST] == {hashes[0]}


def test_a_warm_start_tells_what_the_ssd_has() -> None:
    world = watched(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(8))
    world.put(namespace, hashes)
    write_out(world, namespace, hashes)
    world.restart()
    assert told(world) == [
        AllRemoved(),
        BlocksStored(Tier.SSD, namespace.digest, 1, None, tuple(hashes)),
    ]


def test_too_many_changes_are_forgotten_and_found_again() -> None:
    world = watched(16, backlog=5)
    namespace = world.open(SPEC)
    follower = Follower()
    follower.follow(told(world))
    world.put(namespace, chain(namespace, range(4)))
    follower.follow(told(world))
    assert world.store.counters.kv_event_overflows == 0
    world.drop_blocks(namespace, chain(namespace, range(4)))
    world.put(namespace, chain(namespace, range(20, 29)))
    assert world.store.counters.kv_event_overflows > 0
    follower.follow(told(world, limit=2))
    assert follower.blocks[Tier.HOST] == set(chain(namespace, range(20, 29)))


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_a_picture_is_what_was_told(limit: int) -> None:
    world = watched(8, ssd_blocks=8)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(6))
    told(world)
    world.put(namespace, hashes)
    write_out(world, namespace, hashes)
    told(world)
    picture = source(world).picture()
    world.drop_blocks(namespace, hashes)  # Not told yet, and gone from the index.
    batches = list(picture.events(limit))
    assert picture.blocks == 12
    assert len(batches) == -(-12 // limit)
    follower = Follower()
    for batch in batches:
        follower.follow(batch)
    assert follower.blocks == {tier: set(hashes) for tier in (Tier.HOST, Tier.SSD)}
