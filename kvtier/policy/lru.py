"""Least recently used, exactly, without moving anything on a touch.

The heap holds one entry a key with the stamp known when it was pushed; a touch only overwrites the
key's stamp in a dict, in C for a whole chain. An entry whose stamp is out of date is pushed again
when it surfaces, so the heap's minimum is the true minimum whenever its entry is current: stamps
only grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from kvtier.policy.base import EvictionPolicy
from kvtier.types import BlockHash

_SLACK = 64


class Lru(EvictionPolicy):
    """Smallest stamp leaves first. insert and touch are O(1), coldest O(log n) a key."""

    def __init__(self) -> None:
        self._stamp: dict[BlockHash, int] = {}
        self._heap: list[tuple[int, BlockHash]] = []

    def insert(self, key: BlockHash, stamp: int) -> None:
        assert key not in self._stamp, "inserted twice"
        self._stamp[key] = stamp
        heapq.heappush(self._heap, (stamp, key))
        if len(self._heap) > 2 * len(self._stamp) + _SLACK:
            self._rebuild()

    def touch(self, keys: Sequence[BlockHash], stamps: Sequence[int]) -> None:
        self._stamp.update(zip(keys, stamps, strict=True))

    def remove(self, key: BlockHash) -> None:
        del self._stamp[key]  # Its heap entry is discarded when it surfaces.

    def coldest(self) -> Iterator[BlockHash]:
        heap, stamps = self._heap, self._stamp
        passed: list[tuple[int, BlockHash]] = []
        last: tuple[int, BlockHash] | None = None
        try:
            while heap:
                recorded, key = entry = heap[0]
                stamp = stamps.get(key)
                if stamp is None or entry == last:
                    # Removed, or a second entry left by remove + insert of the same key.
                    heapq.heappop(heap)
                elif stamp != recorded:
                    heapq.heapreplace(heap, (stamp, key))
                else:
                    last = heapq.heappop(heap)
                    passed.append(last)
                    yield key
        finally:
            for entry in passed:
                if entry[1] in stamps:
                    heapq.heappush(heap, entry)

    def __len__(self) -> int:
        return len(self._stamp)

    def _rebuild(self) -> None:
        self._heap = [(stamp, key) for key, stamp in self._stamp.items()]
        heapq.heapify(self._heap)
