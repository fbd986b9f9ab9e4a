"""Who has which pages of an environment's slabs: in memory only, rebuilt from the rows at open.

A page is free, *written* (a payload is on its way there or there, and no row names it yet) or a
block's. Only commit() makes a written page a block's, and a block's page free again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.extents import Extent, ExtentAllocator
from kvtier.tier.base import Piece
from kvtier.tier.ssd_format import MOST_PIECES, PAGE_BYTES

Pages = npt.NDArray[np.int64]
"""(n,) page numbers, or counts of pages."""


class Room:
    """The pages of one environment. Thread-safe.

    Attributes:
        size_bytes: Of all slabs.
    """

    def __init__(self, map_bytes: int) -> None:
        """No slab yet."""
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._extents = ExtentAllocator(map_bytes)
        self._extents.claim(Extent(0, self._extents.capacity_bytes))
        self._written: dict[int, tuple[Piece, ...]] = {}

    @property
    def free_bytes(self) -> int:
        """Of pages that nobody has."""
        return self._extents.free_bytes

    @property
    def written_blocks(self) -> int:
        """How many blocks are on their way."""
        return len(self._written)

    def add_slab(self, slab: Piece) -> None:
        """New, free pages."""
        with self._lock:
            self.size_bytes += slab.size_bytes
            self._extents.free(Extent(*slab))

    def restore(self, slabs: Sequence[Piece], pages: Pages, counts: Pages) -> None:
        """Take over slabs, and the runs of pages that blocks have of them: inside, disjoint."""
        runs = np.stack([pages, counts], axis=1) * PAGE_BYTES
        holes = _holes(np.array(slabs, dtype=np.int64).reshape(-1, 2), runs)
        with self._lock:
            self.size_bytes = sum(slab.size_bytes for slab in slabs)
            for start, end in holes.tolist():
                self._extents.free(Extent(start, end - start))

    def take(self, size_bytes: int, pieces: int = MOST_PIECES) -> tuple[Piece, ...]:
        """Room for a payload, now written; () if there is none in so few pieces."""
        with self._lock:
            extents = self._extents.allocate_pieces(size_bytes, pieces)
            if extents is None:
                return ()
            taken = tuple(Piece(*extent) for extent in extents)
            self._written[taken[0].offset_bytes] = taken
            return taken

    def has_written(self, pieces: tuple[Piece, ...]) -> bool:
        """Whether take() gave these, and they are neither committed nor given back.

        The very same tuple: after a reopen somebody else may have been given equal pieces.
        """
        return self._written.get(pieces[0].offset_bytes) is pieces

    def commit(self, pieces: tuple[Piece, ...]) -> None:
        """Written pages are a block's now."""
        with self._lock:
            del self._written[pieces[0].offset_bytes]

    def give_back(self, pieces: tuple[Piece, ...]) -> None:
        """Written pages are free again; harmless if they are not, say of before a reopen."""
        with self._lock:
            if self.has_written(pieces):
                del self._written[pieces[0].offset_bytes]
                self._free(pieces)

    def free(self, pieces: tuple[Piece, ...]) -> None:
        """A block's pages are free again.

        Raises:
            ValueError: they are no block's; nothing has changed.
        """
        with self._lock:
            for start, _ in pieces:
                if self._extents.begins_hole(start) or start in self._written:
                    raise ValueError(f"the pages at {start} are no block's")
            self._free(pieces)

    def _free(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            self._extents.free(Extent(*piece))

    def check_integrity(self, used_bytes: int) -> None:
        """Assert that free pages, written ones and used_bytes of blocks are all there are."""
        with self._lock:
            self._extents.check_integrity()
            written = sum(piece.size_bytes for pieces in self._written.values() for piece in pieces)
            assert self.free_bytes + written + used_bytes == self.size_bytes


def _holes(slabs: Pages, used: Pages) -> Pages:
    """(holes, 2) starts and ends of what `used` leaves of `slabs`; both (n, 2) offset and size."""
    # Between neighbours of one slab there is a hole, or nothing; a slab begins and ends with one.
    starts = np.concatenate([slabs[:, 0], used[:, 0] + used[:, 1]])
    ends = np.concatenate([used[:, 0], slabs[:, 0] + slabs[:, 1]])
    holes = np.stack([np.sort(starts), np.sort(ends)], axis=1)
    return holes[holes[:, 0] < holes[:, 1]]


def conflicting(slabs: Sequence[Piece], pages: Pages, counts: Pages) -> npt.NDArray[np.bool_]:
    """Which runs of pages can't be blocks': outside all slabs, or overlapping another one.

    Args:
        slabs: In the order of their offsets.
        pages: (runs,) first page of each run.
        counts: (runs,) how many.

    Returns:
        (runs,) bool.
    """
    bounds = np.array(slabs, dtype=np.int64).reshape(-1, 2) // PAGE_BYTES
    ends = pages + counts
    if not len(bounds):
        return np.ones(len(pages), dtype=np.bool_)
    home = np.searchsorted(bounds[:, 0], pages, side="right") - 1
    bad: npt.NDArray[np.bool_] = (home < 0) | (ends > bounds[home].sum(axis=1)) | (counts <= 0)
    order = np.argsort(pages, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    behind = pages[order][1:] < reach[:-1]  # Begins before one of those before it ends.
    bad[order[1:][behind]] = True
    # Of those before it, any that reaches into it is part of the conflict too.
    first = np.minimum.accumulate(pages[order][::-1])[::-1]
    bad[order[:-1][ends[order][:-1] > first[1:]]] = True
    return bad
