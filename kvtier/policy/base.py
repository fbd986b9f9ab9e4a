"""The contract of an eviction policy: the order in which blocks leave one tier.

A policy knows keys and stamps. It knows nothing of bytes, pins, tiers, clocks or I/O. The store
makes the stamps so that a chain leaves tail first: larger means more recently used, and within one
request an ancestor's stamp is larger than its descendants'. Every implementation passes
tests/contract/test_policy.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(ABC, Generic[Key]):
    """Orders the resident blocks of one tier. Not thread-safe; the event loop owns it."""

    @abstractmethod
    def insert(self, key: Key, stamp: int) -> None:
        """Add a key that is not resident. The caller never inserts twice."""

    def insert_sorted(self, keys: Sequence[Key], stamps: Sequence[int]) -> None:
        """Add many keys, none resident, smallest stamp first: a restart's blocks."""
        for key, stamp in zip(keys, stamps, strict=True):
            self.insert(key, stamp)

    @abstractmethod
    def touch(self, keys: Sequence[Key], stamps: Sequence[int]) -> None:
        """Note a use of resident keys. The caller passes resident keys only; stamps never fall."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Forget a resident key, evicted or dropped."""

    @abstractmethod
    def coldest(self) -> Generator[Key, None, None]:
        """Yield resident keys in the order in which they should leave.

        The caller may remove() a key after it was yielded, and may stop early; it must close the
        iterator (exhaust it, or contextlib.closing) before any other call but remove().
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Key]:
        """Resident keys, in no order."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident keys."""
