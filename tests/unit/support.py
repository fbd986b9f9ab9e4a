"""What the tests of the store and its parts share.

The numbers of user reports in their docstrings are those of the list that the project keeps of what
users of such systems have run into.
"""

from __future__ import annotations

from kvtier.index import Namespace, SsdState
from kvtier.store import StoreConfig
from kvtier.types import BlockHash
from tests.sim.world import World, group_id, spec_of

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
    """Which blocks of the SPEC namespace are stored."""
    blocks = world.open(SPEC).blocks
    return [key in blocks and blocks[key].ssd is SsdState.STORED for key in hashes]


def present(world: World, hashes: list[BlockHash]) -> int:
    """Length of the cached prefix in the SPEC namespace."""
    found = world.store.reads.lookup(world.open(SPEC), hashes)
    return found.host_blocks + found.ssd_blocks


def write_out(world: World, namespace: Namespace, hashes: list[BlockHash]) -> None:
    """The blocks reach the SSD."""
    world.store.tiers.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.settle()
