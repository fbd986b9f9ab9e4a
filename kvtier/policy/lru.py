"""Least recently used, exactly, without moving anything on a touch.

The heap holds an entry a key with the stamp known when it was pushed; a touch only overwrites the
key's stamp in a dict, in C for a whole chain. An entry whose stamp is out of date is pushed again
when it surfaces, so the heap's minimum is the true minimum whenever its entry is current: stamps
never fall. Keys that came sorted (a restart brings a million of them) wait in a list beside the
heap, at 16 bytes each.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterator, Sequence
from itertools import count

from kvtier.policy.base import EvictionPolicy, Key

_SLACK = 64
_STEP = 8
"""Entries looked at in one call while there are too many void ones: no call may take long."""


class Lru(EvictionPolicy[Key]):
    """Smallest stamp leaves first, of two equal ones mostly the earlier inserted.

    insert and coldest are O(log n) a key, touch and remove O(1).
    """

    def __init__(self) -> None:
        # Of all keys but those that came sorted and were neither touched nor removed since.
        self._stamp: dict[Key, int] = {}
        # (stamp, serial, key). A key that was removed and inserted again may have two entries;
        # coldest() sees to it that only one of them counts.
        self._heap: list[tuple[int, int, Key]] = []
        self._leaving: list[tuple[int, int, Key]] = []
        """Another heap, whose valid entries go to the first one."""
        self._sorted: list[Key | None] = []  # Coldest last; those before _first are gone.
        self._sorted_stamps = array("q")
        self._first = 0
        self._untouched = 0
        self._removed: set[Key] = set()
        """Keys whose entry in _sorted, if they have one, is void."""
        self._serials = count()

    def insert(self, key: Key, stamp: int) -> None:
        assert key not in self._stamp, "inserted twice"
        self._stamp[key] = stamp
        heapq.heappush(self._heap, (stamp, next(self._serials), key))
        self._tidy()

    def insert_sorted(self, keys: Sequence[Key], stamps: Sequence[int]) -> None:
        if self._sorted:
            super().insert_sorted(keys, stamps)
            return
        self._sorted = list(keys)
        self._sorted.reverse()
        self._sorted_stamps = array("q", stamps)
        self._sorted_stamps.reverse()
        self._untouched = len(keys)

    def touch(self, keys: Sequence[Key], stamps: Sequence[int]) -> None:
        known = len(self._stamp)
        self._stamp.update(zip(keys, stamps, strict=True))
        self._untouched -= len(self._stamp) - known

    def remove(self, key: Key) -> None:
        # Its entry in a heap is discarded when it surfaces.
        if self._stamp.pop(key, None) is None:
            assert self._untouched, "removed twice"
            self._untouched -= 1
        if self._sorted:
            self._removed.add(key)
        self._tidy()

    def coldest(self) -> Generator[Key, None, None]:
        passed: dict[Key, tuple[int, int, Key]] = {}
        try:
            while (entry := self._pop()) is not None:
                recorded, serial, key = entry
                stamp = self._stamp.get(key)
                if stamp is None or key in passed:
                    continue
                if stamp != recorded:
                    heapq.heappush(self._heap, (stamp, serial, key))
                    continue
                passed[key] = entry
                yield key
        finally:
            for key, entry in passed.items():
                if key in self._stamp:
                    heapq.heappush(self._heap, entry)

    def _pop(self) -> tuple[int, int, Key] | None:
        """Take out the entry with the smallest stamp."""
        heaps = [heap for heap in (self._heap, self._leaving) if heap]
        coldest = min(heaps, key=lambda heap: heap[0][0]) if heaps else None
        while len(self._sorted) > self._first and (
            coldest is None or self._sorted_stamps[-1] <= coldest[0][0]
        ):
            key, stamp = self._sorted.pop(), self._sorted_stamps.pop()
            if (entry := self._from_sorted(key, stamp)) is not None:
                return entry
        return heapq.heappop(coldest) if coldest is not None else None

    def _from_sorted(self, key: Key | None, stamp: int) -> tuple[int, int, Key] | None:
        """The heap entry of one that was taken out of _sorted; None if it was void."""
        assert key is not None
        if key in self._removed:
            self._removed.discard(key)
            return None
        if key not in self._stamp:
            self._stamp[key] = stamp
            self._untouched -= 1
        return stamp, next(self._serials), key

    def _tidy(self) -> None:
        """Look at some entries if most are void: a dropped namespace must not stay in memory."""
        if not self._leaving and len(self._heap) > 2 * len(self._stamp) + _SLACK:
            self._leaving, self._heap = self._heap, []
        for _ in range(min(_STEP, len(self._leaving))):
            _, serial, key = self._leaving.pop()  # The last of a heap is never missed.
            if (stamp := self._stamp.get(key)) is not None:
                heapq.heappush(self._heap, (stamp, serial, key))
        if 2 * len(self._removed) > len(self._sorted) - self._first + _SLACK:
            self._tidy_sorted()

    def _tidy_sorted(self) -> None:
        for at in range(self._first, min(self._first + _STEP, len(self._sorted))):
            entry = self._from_sorted(self._sorted[at], self._sorted_stamps[at])
            self._sorted[at] = None
            self._first = at + 1
            if entry is not None:
                heapq.heappush(self._heap, entry)
        if self._first >= len(self._sorted):
            self._sorted, self._sorted_stamps, self._first = [], array("q"), 0
            self._removed.clear()

    def __iter__(self) -> Iterator[Key]:
        yield from self._stamp
        for key in self._sorted[self._first :]:
            if key is not None and key not in self._stamp and key not in self._removed:
                yield key

    def __len__(self) -> int:
        return len(self._stamp) + self._untouched
