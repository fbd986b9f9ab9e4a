"""Least recently used, exactly, without moving anything on a touch.

The heap holds an entry a key with the stamp known when it was pushed; a touch only overwrites the
key's stamp in a dict, in C for a whole chain. An entry whose stamp is out of date is pushed again
when it surfaces, so the heap's minimum is the true minimum whenever its entry is current: stamps
never fall.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from itertools import count

from kvtier.policy.base import EvictionPolicy, Key

_SLACK = 64


class Lru(EvictionPolicy[Key]):
    """Smallest stamp leaves first, the earlier inserted of two equal ones.

    insert and coldest are O(log n) a key, touch and remove O(1).
    """

    def __init__(self) -> None:
        # A key's (stamp, serial); the serial makes a re-inserted key's old heap entry stale.
        self._stamp: dict[Key, int] = {}
        self._serial: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        self._next_serial = count()

    def insert(self, key: Key, stamp: int) -> None:
        assert key not in self._stamp, "inserted twice"
        serial = next(self._next_serial)
        self._stamp[key] = stamp
        self._serial[key] = serial
        heapq.heappush(self._heap, (stamp, serial, key))
        if len(self._heap) > 2 * len(self._stamp) + _SLACK:
            self._rebuild()

    def touch(self, keys: Sequence[Key], stamps: Sequence[int]) -> None:
        self._stamp.update(zip(keys, stamps, strict=True))

    def remove(self, key: Key) -> None:
        del self._stamp[key]  # Its heap entry is discarded when it surfaces.
        del self._serial[key]

    def coldest(self) -> Generator[Key, None, None]:
        heap = self._heap
        passed: list[tuple[int, int, Key]] = []
        try:
            while heap:
                recorded, serial, key = heap[0]
                if self._serial.get(key) != serial:
                    heapq.heappop(heap)
                elif (stamp := self._stamp[key]) != recorded:
                    heapq.heapreplace(heap, (stamp, serial, key))
                else:
                    passed.append(heapq.heappop(heap))
                    yield key
        finally:
            for entry in passed:
                if self._serial.get(entry[2]) == entry[1]:
                    heapq.heappush(heap, entry)

    def __len__(self) -> int:
        return len(self._stamp)

    def _rebuild(self) -> None:
        self._heap = [(stamp, self._serial[key], key) for key, stamp in self._stamp.items()]
        heapq.heapify(self._heap)
