"""Evicted blocks whose rows are deleted later, with others of their environment.

A commit costs each environment that it touches a flush of its own (with `full`), and evictions hit
others than the one that is being filled. So they wait: until their environment is written anyway,
until there are many, or until nothing is written at all. Their pages are not free before that; the
tier keeps as much room beside (ssd_layout.py). After a crash they are there again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from kvtier.tier.base import Deletion
from kvtier.types import BlockHash


class Lingering:
    """What was evicted and is not deleted yet, by environment.

    Attributes:
        size_bytes: Its pages.
    """

    def __init__(self, most_bytes: int) -> None:
        """Nothing; `most_bytes` may linger after a commit."""
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._evicted: dict[int, dict[BlockHash, int]] = {}

    def add(self, deletes: Iterable[Deletion]) -> list[Deletion]:
        """Keep the evictions among `deletes`; the others, which are due now."""
        due: list[Deletion] = []
        for gone in deletes:
            if not gone.evicted or gone.segment is None:
                due.append(gone)
                continue
            waiting = self._evicted.setdefault(gone.segment, {})
            if gone.hash not in waiting:
                waiting[gone.hash] = gone.stored_bytes
                self.size_bytes += gone.stored_bytes
        return due

    @property
    def too_many(self) -> bool:
        """Whether all of it is due."""
        return self.size_bytes > self._most_bytes

    def of(self, segment: int) -> list[BlockHash]:
        """What lingers in an environment."""
        return list(self._evicted.get(segment, ()))

    def over(self, segment: int, keys: Iterable[BlockHash]) -> None:
        """These are deleted there, or were written anew."""
        waiting = self._evicted.get(segment)
        if waiting is not None:
            for key in keys:
                self.size_bytes -= waiting.pop(key, 0)

    def keep_only(self, segments: Container[int]) -> None:
        """Other environments are gone."""
        for segment in [segment for segment in self._evicted if segment not in segments]:
            self.size_bytes -= sum(self._evicted.pop(segment).values())
