"""What the store wants done: values that the mover runs and answers.

`shard` says on which SSD directory. Jobs for a shard's writer (all but LoadJob) take effect in the
order in which they were made. A job's `copy` is the store's own handle; the mover reads its extent
and hands it back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.index import HostCopy
from kvtier.tier.base import BlockMeta, NamespaceRow, Restamp, Wanted
from kvtier.types import BlockHash, Loss


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Read a block from the SSD into copy.extent; answered by store.reads.loaded().

    If it takes too long, store.reads.late() comes first: nobody waits for it any more, but it
    still owns its extent.
    """

    shard: int
    copy: HostCopy
    wanted: Wanted
    size_bytes: int
    stored_bytes: int

    @property
    def hash(self) -> BlockHash:
        """Of the block."""
        return self.wanted.hash

    @property
    def segment(self) -> int:
        """Where the block is."""
        return self.wanted.segment

    @property
    def is_raw(self) -> bool:
        """Whether the bytes on the SSD are the block's own; any other form is shorter."""
        return self.stored_bytes == self.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Write a block from copy.extent to the SSD; answered by store.tiers.written().

    Attributes:
        urgent: Somebody waits for it, or will soon: it may compete with the engine for a core.
    """

    shard: int
    id: int
    copy: HostCopy
    meta: BlockMeta
    size_bytes: int
    allowed_loss: Loss
    urgent: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeleteJob:
    """Forget a block on the SSD; answered by store.tiers.deleted().

    Attributes:
        segment: Where it is; None if its write has no answer yet.
        stored_bytes: Of its stored form, rounded up to pages.
        evicted: It makes room, and nobody would mind if it came back after a crash.
    """

    shard: int
    segment: int | None
    hash: BlockHash
    stored_bytes: int
    evicted: bool


@dataclass(frozen=True, slots=True, eq=False)
class RememberJob:
    """Keep a namespace's spec and generation on the SSD; needs no answer."""

    shard: int
    row: NamespaceRow


@dataclass(frozen=True, slots=True, eq=False)
class RestampJob:
    """Keep the recency of some blocks on the SSD; needs no answer, and may be lost."""

    shard: int
    restamps: tuple[Restamp, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RetireJob:
    """Give up a segment whose blocks nobody can hit any more; needs no answer."""

    shard: int
    segment: int
    damaged: bool


Job = LoadJob | WriteJob | DeleteJob | RememberJob | RestampJob | RetireJob
