"""Which blocks are worth a write to the SSD, and when: the write policies.

Pure: answers questions of shards.py, knows hashes only. By replay (bench/replay.py) writing back
beats writing through on hits and on bytes written; second touch writes least and hits least.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

from kvtier.types import BlockHash, WritePolicy

GHOSTS = 1 << 17
"""Hashes remembered of blocks that left RAM unwritten; about 16 MiB."""


class When(enum.Enum):
    """NOW: queue the write. LATER: when idle, or when it must leave. NOT_YET: not worth it yet."""

    NOW = enum.auto()
    LATER = enum.auto()
    NOT_YET = enum.auto()


class Admission:
    """One write policy and what it remembers.

    Attributes:
        tight: The endurance budget runs short: second touch, whatever the policy.
    """

    def __init__(self, policy: WritePolicy) -> None:
        self.tight = False
        self._policy = policy
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def policy(self) -> WritePolicy:
        """The policy in effect."""
        return WritePolicy.SECOND_TOUCH if self.tight else self._policy

    def stored(self, key: BlockHash) -> When:
        """When to write a block that has just been stored in RAM."""
        if self.policy is WritePolicy.THROUGH:
            return When.NOW
        if self.policy is WritePolicy.LAZY:
            return When.LATER
        if key in self._ghosts:  # Stored again after it left: used twice.
            del self._ghosts[key]
            return When.LATER
        return When.NOT_YET

    @property
    def use_marks(self) -> bool:
        """True if a use of an unwritten block makes it worth a write."""
        return self.policy is WritePolicy.SECOND_TOUCH

    def admits(self, *, marked: bool) -> bool:
        """Whether to write an unwritten block that leaves RAM; `marked`: by stored() or a use."""
        return self.policy is not WritePolicy.SECOND_TOUCH or marked

    def skipped(self, key: BlockHash) -> None:
        """A block that admits() refused has left RAM."""
        self._ghosts[key] = None
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
