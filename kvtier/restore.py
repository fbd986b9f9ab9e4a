"""A warm start: the index is rebuilt from what the SSD's shards remember.

A million blocks have to be there in seconds and in little memory. So which rows can be hit, and who
is whose parent, is found on whole columns (tier/base.py); blocks are then made level by level,
ancestors first, and share the numbers that they have in common.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.index import Block, BlockIndex, Namespace, Place, SsdState
from kvtier.tier.base import NamespaceRow, StoredBlocks
from kvtier.tiers import Tiers
from kvtier.types import Loss, NamespaceDigest

Ints = npt.NDArray[np.int64]

_LOSSES = {int(loss): loss for loss in Loss}
_LEVEL_ROWS = 1 << 15


class Restore:
    """One warm start, into an empty index."""

    def __init__(self, index: BlockIndex, tiers: Tiers) -> None:
        assert tiers.ssd is not None
        self._index = index
        self._tiers = tiers
        self._ssd = tiers.ssd

    def namespaces(self, rows: Sequence[Sequence[NamespaceRow]]) -> None:
        """Open all namespaces, each in the latest generation that any shard knows."""
        latest: dict[NamespaceDigest, NamespaceRow] = {}
        for row in (row for of_shard in rows for row in of_shard):
            known = latest.get(row.digest)
            if known is None or known.generation < row.generation:
                latest[row.digest] = row
        for row in latest.values():
            self._index.open(row.digest, row.spec, row.generation)
        for shard, of_shard in enumerate(rows):
            for row in of_shard:
                self._index.namespaces[row.digest].remembered.add(shard)
                if row.generation < latest[row.digest].generation:
                    self._ssd.new_generation(latest[row.digest], [shard])

    def blocks(self, stored: Sequence[StoredBlocks]) -> None:
        """Take over the blocks that can be hit; have all others deleted.

        Those are blocks of former generations, blocks without their ancestors, and the second of
        two that a crash left.
        """
        rows = np.concatenate(stored) if len(stored) > 1 else stored[0]
        if not len(rows):
            return
        shards = np.repeat(np.arange(len(stored)), [len(of_shard) for of_shard in stored])
        homes, home_of = self._homes(rows)
        parents, usable = _parents(rows, home_of)
        places, place_of = self._places(shards, rows)
        for at in np.flatnonzero(~usable).tolist():
            key, size_bytes = rows["hash"][at].tobytes(), int(rows["stored_bytes"][at])
            self._ssd.forget(places[place_of[at]], key, size_bytes)
        order = np.flatnonzero(usable)
        order = order[np.argsort(rows["depth"][order])]
        made = self._make(rows, order, parents, homes, home_of, places, place_of)
        if made:
            sizes = np.array([home.size_bytes for home in homes])[home_of[order]]
            _account(places, place_of[order], rows["stored_bytes"][order], sizes)
        self._hand_over(shards[order], rows["stamp"][order], made)

    def _make(
        self,
        rows: StoredBlocks,
        order: Ints,
        parents: Ints,
        homes: list[Namespace],
        home_of: Ints,
        places: list[Place],
        place_of: Ints,
    ) -> list[Block]:
        """Make and link the blocks of the rows in `order`, first blocks first."""
        position = np.zeros(len(rows) + 1, np.int64)  # Of parents[] -1, the last: 0, for None.
        position[order] = np.arange(1, len(order) + 1)
        children = np.bincount(position[parents[order]], minlength=len(order) + 1)[1:]
        made: list[Block | None] = [None]
        shared: dict[int, int] = {}
        for depth, level in _levels(rows["depth"][order]):
            at = order[level]
            part = rows[at]
            keys, stamps = part["hash"].tolist(), part["stamp"].tolist()
            blocks = list(
                map(
                    Block,
                    keys,
                    map(homes.__getitem__, home_of[at].tolist()),
                    map(made.__getitem__, position[parents[at]].tolist()),
                    repeat(depth),
                    stamps,
                    map(_LOSSES.__getitem__, _values(part["loss"])),
                    _shared(part["born_s"], shared),
                    repeat(None),
                    repeat(SsdState.STORED),
                    map(places.__getitem__, place_of[at].tolist()),
                    _shared(part["stored_bytes"], shared),
                    map(_LOSSES.__getitem__, _values(part["loss"])),
                    repeat(0),
                    children[level].tolist(),
                )
            )
            made += blocks
            numbers = home_of[at]
            if (numbers == numbers[0]).all():
                homes[numbers[0]].blocks.update(zip(keys, blocks, strict=True))
            else:
                for block in blocks:
                    block.namespace.blocks[block.hash] = block
        return cast("list[Block]", made[1:])

    def _homes(self, rows: StoredBlocks) -> tuple[list[Namespace], Ints]:
        """The namespaces, and of each row the number of its one; -1 for none, or a dropped one."""
        homes = list(self._index.namespaces.values())
        home_of = np.full(len(rows), -1)
        prefixes = _prefix(rows["namespace"])
        for number, home in enumerate(homes):
            mine = prefixes == np.frombuffer(home.digest, np.uint64, 1)
            home_of[mine & (rows["generation"] == home.generation)] = number
        return homes, home_of

    def _places(self, shards: Ints, rows: StoredBlocks) -> tuple[list[Place], Ints]:
        """All places, and of each row which one it has."""
        spots, place_of = np.unique(shards << 16 | rows["segment"], return_inverse=True)
        places = [self._ssd.shards[spot >> 16].place(spot & 0xFFFF) for spot in spots.tolist()]
        return places, place_of

    def _hand_over(self, shards: Ints, stamps: Ints, blocks: list[Block]) -> None:
        """Tell each shard its blocks, coldest first."""
        for shard in self._ssd.shards:
            mine = np.flatnonzero(shards == shard.number)
            mine = mine[np.argsort(stamps[mine])]
            coldest_first = array("q", stamps[mine].tobytes())
            shard.policy.insert_sorted(list(map(blocks.__getitem__, mine.tolist())), coldest_first)
        if blocks:
            self._tiers.restored(int(stamps.max()))


def _account(
    places: list[Place], place_of: Ints, stored: npt.NDArray[np.uint64], sizes: Ints
) -> None:
    """Add blocks, their stored and their own bytes, to what is at their places."""
    # bincount adds up in float64: exact below 2^53 bytes.
    stored_bytes = np.bincount(place_of, weights=stored, minlength=len(places)).tolist()
    block_bytes = np.bincount(place_of, weights=sizes, minlength=len(places)).tolist()
    for place, of_stored, of_blocks in zip(places, stored_bytes, block_bytes, strict=True):
        place.stored_bytes += int(of_stored)
        place.block_bytes += int(of_blocks)


def _values(column: npt.NDArray[np.integer[Any]]) -> Iterable[int]:
    """A column's numbers, at least one; where all are equal, one number for ever."""
    first = column[0]
    return repeat(int(first)) if (column == first).all() else column.tolist()


def _shared(column: npt.NDArray[np.integer[Any]], shared: dict[int, int]) -> Iterable[int]:
    """A column's numbers, one object for equal ones: 32 bytes less a block."""
    values = _values(column)
    return values if isinstance(values, repeat) else map(shared.setdefault, values, values)


def _parents(rows: StoredBlocks, home_of: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Of each row its parent's number (-1: a first block), and whether it can be hit."""
    depths = rows["depth"]
    by_hash = _sorted_by_hash(rows)
    hashes = rows["hash"][by_hash]
    usable = home_of >= 0
    usable[by_hash[1:][hashes[1:] == hashes[:-1]]] = False
    wanted = _prefix(rows["parent"])
    by_parent = np.argsort(wanted)  # Sorted, the search walks through memory.
    parents = np.empty(len(rows), np.int64)
    found = np.searchsorted(_prefix(hashes), wanted[by_parent])
    parents[by_parent] = by_hash[np.minimum(found, len(rows) - 1)]
    has_parent = (
        (rows["hash"][parents] == rows["parent"])
        & (home_of[parents] == home_of)
        & (depths[parents] == depths.astype(np.int64) - 1)
    )
    first = depths == 0
    parents[first] = -1
    usable &= first | has_parent
    if usable.all():
        return parents, usable
    order = np.argsort(depths)
    for _, level in _levels(depths[order]):
        at = order[level]
        usable[at] &= (parents[at] < 0) | usable[parents[at]]
    return parents, usable


def _sorted_by_hash(rows: StoredBlocks) -> Ints:
    """Row numbers in the order of their hashes' first bytes; of equal hashes the newest first."""
    prefixes = _prefix(rows["hash"])
    order = np.argsort(prefixes)
    ordered = prefixes[order]
    if (ordered[1:] == ordered[:-1]).any():  # Rare, so only then the whole order.
        order = np.lexsort((-rows["stamp"], -rows["born_s"].astype(np.int64), prefixes))
    return order


def _prefix(hashes: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of hashes: enough to find them among billions."""
    return np.ascontiguousarray(hashes).view(np.uint64).reshape(len(hashes), -1)[:, 0]


def _levels(sorted_depths: npt.NDArray[np.uint32]) -> Iterator[tuple[int, slice]]:
    """Yield (depth, where it stands), in parts of a bounded size."""
    starts = np.flatnonzero(np.diff(sorted_depths.astype(np.int64), prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(sorted_depths)]):
        for first in range(start, end, _LEVEL_ROWS):
            yield int(sorted_depths[start]), slice(first, min(first + _LEVEL_ROWS, end))
