"""Who owns which bytes of a fixed range: an allocator of contiguous, aligned extents.

Accounting only, no memory: the host arena and the SSD tier use it alike. Free neighbours are always
merged, so one free extent never touches another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

EXTENT_ALIGN_BYTES = 4096


class Extent(NamedTuple):
    """size_bytes from offset_bytes on; both multiples of EXTENT_ALIGN_BYTES."""

    offset_bytes: int
    size_bytes: int


def aligned(size_bytes: int) -> int:
    """size_bytes rounded up to a whole extent."""
    return -(-size_bytes // EXTENT_ALIGN_BYTES) * EXTENT_ALIGN_BYTES


class ExtentAllocator:
    """Best fit over merged free extents.

    Every operation is O(1) in the number of extents but for a bisection over the distinct sizes of
    free extents, which stay few: equal blocks leave merged runs.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Own [0, capacity_bytes), rounded down to whole extents; all of it free."""
        self.capacity_bytes = capacity_bytes // EXTENT_ALIGN_BYTES * EXTENT_ALIGN_BYTES
        self.used_bytes = 0
        self._size_at: dict[int, int] = {}  # free extents by their start ...
        self._start_of_end: dict[int, int] = {}  # ... by their end ...
        self._starts: dict[int, dict[int, None]] = {}  # ... and by size, oldest hole first
        self._sizes: list[int] = []  # the keys of _starts, sorted
        if self.capacity_bytes:
            self._add_hole(0, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that no extent owns; they need not be contiguous."""
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_hole_bytes(self) -> int:
        """Size of the largest extent that allocate() can give now."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, size_bytes: int) -> Extent | None:
        """Own size_bytes (rounded up) of contiguous room, or None where no hole is large enough."""
        assert size_bytes > 0, "an extent has a size"
        wanted = aligned(size_bytes)
        at = bisect_left(self._sizes, wanted)
        if at == len(self._sizes):
            return None
        hole = self._sizes[at]
        start = next(iter(self._starts[hole]))
        self._remove_hole(start, hole)
        if hole > wanted:
            self._add_hole(start + wanted, hole - wanted)
        self.used_bytes += wanted
        return Extent(start, wanted)

    def allocate_pieces(self, size_bytes: int, pieces: int) -> list[Extent] | None:
        """Own size_bytes (rounded up) of room in at most `pieces` extents, or None.

        One where a hole is large enough, else the largest holes and a best fit for the rest.
        """
        left_bytes = aligned(size_bytes)
        if left_bytes > self.free_bytes:
            return None
        given: list[Extent] = []
        while left_bytes and len(given) < pieces and self._sizes:
            extent = self.allocate(min(left_bytes, self._sizes[-1]))
            assert extent is not None
            given.append(extent)
            left_bytes -= extent.size_bytes
        if left_bytes:
            for extent in given:
                self.free(extent)
            return None
        return given

    def free(self, extent: Extent) -> None:
        """Give back an extent that allocate() gave."""
        start, size = extent
        assert self.used_bytes >= size, "freed more than was allocated"
        assert start not in self._size_at, f"extent at {start} freed twice"
        self.used_bytes -= size
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove_hole(before, start - before)
            size += start - before
            start = before
        after = self._size_at.get(start + size)
        if after is not None:
            self._remove_hole(start + size, after)
            size += after
        self._add_hole(start, size)

    def begins_hole(self, offset_bytes: int) -> bool:
        """Whether free room begins there."""
        return offset_bytes in self._size_at

    def claim(self, extent: Extent) -> None:
        """Own a given free extent: how a new daemon fences what an old one's writer may touch."""
        for start, size in self._size_at.items():
            if start <= extent.offset_bytes and sum(extent) <= start + size:
                break
        else:
            raise AssertionError(f"{extent} is not free")
        self._remove_hole(start, size)
        if start < extent.offset_bytes:
            self._add_hole(start, extent.offset_bytes - start)
        if sum(extent) < start + size:
            self._add_hole(sum(extent), start + size - sum(extent))
        self.used_bytes += extent.size_bytes

    def check_integrity(self) -> None:
        """Assert that holes are disjoint, merged and add up."""
        position, free = -1, 0
        for start in sorted(self._size_at):
            size = self._size_at[start]
            assert start > position, "holes touch or overlap"
            assert self._start_of_end[start + size] == start
            assert start in self._starts[size]
            position = start + size
            free += size
        assert position <= self.capacity_bytes
        assert free == self.free_bytes, "free bytes do not add up"
        assert self._sizes == sorted(self._starts)
        assert len(self._start_of_end) == len(self._size_at)

    def _add_hole(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of_end[start + size] = start
        if size not in self._starts:
            self._starts[size] = {}
            insort(self._sizes, size)
        self._starts[size][start] = None

    def _remove_hole(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_of_end[start + size]
        starts = self._starts[size]
        del starts[start]
        if not starts:
            del self._starts[size]
            del self._sizes[bisect_left(self._sizes, size)]
