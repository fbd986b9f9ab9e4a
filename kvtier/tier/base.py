"""The contract of a tier that keeps blocks on a medium of its own (SSD now, remote later).

A tier holds bytes and reports; it never decides what to hold, and nothing here runs on the event
loop. It is made of *segments*, numbered parts that come and go as a whole (for the SSD, LMDB
environments of a fixed size); a block lives in one of them. Who calls what:

    prepare                 any thread; pure                  (codec executor)
    write, discard          any number of threads at once     (write executor)
    commit, excess, retire,
    reopen                  one thread, always the same one   (the tier's writer)
    read_into, scrub        any number of threads at once     (reader executor)
    open, scan, close       exclusive

Every implementation passes tests/contract/test_tier.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.codec.base import Bytes
from kvtier.errors import TierError
from kvtier.types import BlockHash, Loss, NamespaceDigest, NamespaceSpec


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What is known of a block besides its bytes; kept in the tier's metadata table.

    Attributes:
        hash: The block's name.
        parent: The previous block's hash; None for a first block.
        depth: Blocks before it in its chain.
        namespace: Digest of its namespace.
        generation: The namespace's generation it was stored under.
        stamp: Its recency (policy/base.py) when it was written, or as commit() updated it.
        born_s: When its bytes were stored, in whole seconds since 1970: retention counts from it.
    """

    hash: BlockHash
    parent: BlockHash | None
    depth: int
    namespace: NamespaceDigest
    generation: int
    stamp: int
    born_s: int = 0


STORED_BLOCK = np.dtype(
    [
        ("hash", "V32"),
        ("parent", "V32"),  # Zeros for a first block.
        ("namespace", "V32"),
        ("generation", "<u8"),
        ("stamp", "<i8"),
        ("stored_bytes", "<u8"),
        ("depth", "<u4"),
        ("born_s", "<u4"),
        ("segment", "<u2"),
        ("loss", "u1"),
    ]
)
"""A row of a warm tier, as scan() yields it: packed, because a million of them must start in
seconds. Fields as in BlockMeta; `segment` holds the block, in `stored_bytes` of form `loss`."""

StoredBlocks = npt.NDArray[np.void]
"""(blocks,) STORED_BLOCK."""


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A block in its stored form, ready to write.

    Attributes:
        meta: Its identity.
        size_bytes: Length of the block itself.
        payload: (stored bytes,) uint8; may be a view of the source, which the caller keeps still
            until write returns.
        codec_id: Codec of the payload.
        codec_version: Version of the payload's form.
        loss: What it has lost, in the codec or before.
        checksum: xxh3-128 over header and payload.
    """

    meta: BlockMeta
    size_bytes: int
    payload: Bytes
    codec_id: int
    codec_version: int
    loss: Loss
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stored block, by all that its reader relies on.

    Attributes:
        hash: Its name.
        segment: Where it is.
        namespace: Whose it is.
        generation: Of the namespace.
        loss: The most that it may have lost.
    """

    hash: BlockHash
    segment: int
    namespace: NamespaceDigest
    generation: int
    loss: Loss


class Piece(NamedTuple):
    """A run of a segment's bytes."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """A block whose payload is on the medium, in room that no block has; commit() names it.

    Attributes:
        block: What was written; its payload may be gone by now.
        stored_bytes: Length of the payload.
        segment: Where it is.
        pieces: And where in there, in the payload's order.
    """

    block: PreparedBlock
    stored_bytes: int
    segment: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """A namespace as a warm tier remembers it."""

    digest: NamespaceDigest
    spec: NamespaceSpec
    generation: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Exact accounting of a tier after a commit.

    Attributes:
        used_bytes: Room that committed blocks have, rounded up to whole pages.
        live_bytes: Stored bytes of the blocks that can be read.
        limit_bytes: As long as used_bytes, and what is on its way beside it, stay at or below
            this, writes fit; the store evicts ahead of it. Below the capacity by the tier's own
            tables and by the batches under way, whose deletes give their room back only with
            their commit.
        blocks: Blocks that can be read.
        written_bytes: Bytes that commits have written to the medium since the tier was created,
            as far as the tier knows: payloads, padding and tables.
    """

    used_bytes: int
    live_bytes: int
    limit_bytes: int
    blocks: int
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Deletion:
    """A block to forget.

    Attributes:
        hash: Its name.
        segment: Where it is; None if it was decided before the write had an answer: the tier
            looks everywhere.
        stored_bytes: Of its stored form, rounded up to pages; 0 with no segment.
        evicted: It only makes room. It may outlive the commit for a while, and come back after a
            crash; its room counts as free at once.
    """

    hash: BlockHash
    segment: int | None
    stored_bytes: int = 0
    evicted: bool = False


@dataclass(frozen=True, slots=True)
class Restamp:
    """A block's recency as it is now, for the next start."""

    hash: BlockHash
    segment: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """One block that scrub() read.

    Attributes:
        position: Where to go on.
        meta: Whose bytes; None if there was no block left to read, or its row does not parse.
        segment: Where it is.
        stored_bytes: Bytes read from the medium.
        error: What is wrong with it; None if nothing is.
    """

    position: bytes
    meta: BlockMeta | None
    segment: int
    stored_bytes: int
    error: TierError | None


class BlockTier(ABC):
    """Durable home of blocks, named by hash. Constructed open, or raises."""

    @abstractmethod
    def namespaces(self) -> Sequence[NamespaceRow]:
        """Namespaces the tier remembers, each once, in its latest generation."""

    @abstractmethod
    def scan(self) -> StoredBlocks:
        """Every readable block, in no order; reads metadata only. Call before the first commit.

        A block may be there twice, in two segments, after a crash; one of the two must go.
        """

    @abstractmethod
    def usage(self) -> TierUsage:
        """Accounting as of the last commit."""

    @abstractmethod
    def prepare(
        self, meta: BlockMeta, block: Bytes, allowed_loss: Loss, *, loss: Loss = Loss.EXACT
    ) -> PreparedBlock:
        """Encode `block` and compute its checksum; pure, releases the GIL.

        A namespace that no commit() brought yet has no known layout: its blocks stay raw.

        Args:
            meta: Its identity.
            block: (block bytes,) uint8, kept still until the commit.
            allowed_loss: The stored form loses no more than this.
            loss: What `block` has lost before; the stored form has lost at least as much.
        """

    @abstractmethod
    def write(self, block: PreparedBlock) -> WrittenBlock:
        """Put a payload on the medium, in room that no committed or written block has.

        Until commit() names it nobody can read it, and it does not outlive the process. Blocks;
        several threads at once reach the medium's full bandwidth.

        Raises:
            TierFull: no room, or the medium has less free than it must keep.
            SegmentDamaged: a segment's own tables are broken.
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def discard(self, written: WrittenBlock) -> None:
        """Give back the room of a block that will not be committed."""

    @abstractmethod
    def commit(
        self,
        *,
        deletes: Sequence[Deletion] = (),
        writes: Sequence[WrittenBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
        restamps: Sequence[Restamp] = (),
    ) -> TierUsage:
        """Apply one batch: deletes and restamps, then namespaces, then writes (one group commit).

        Deleting or restamping an absent block is harmless; a written block that is present in
        the same segment replaces that one; no block is in `writes` twice. When it returns, the
        batch survives `kill -9` of this process, and a power cut if the tier is `full` durable.
        After an error no block of `writes` can be read, its room is given back, and of the rest
        some may have been applied.

        Raises:
            TierFull: the medium has no room for the tables.
            SegmentDamaged: a segment's own tables are broken.
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def read_into(self, wanted: Wanted, out: Bytes) -> int:
        """Read, verify and decode one block into `out`, all of it or raise.

        Args:
            wanted: A committed block that no commit deletes meanwhile.
            out: (block bytes,) uint8; undefined after an error.

        Returns:
            Stored bytes read from the medium.

        Raises:
            CorruptBlock: absent, short, checksum or codec mismatch, or another block than wanted.
            SegmentDamaged: the segment's own tables are broken.
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def scrub(self, position: bytes) -> Scrubbed:
        """Read and verify the block behind `position` (b"": the first) of an endless round.

        Raises:
            SegmentDamaged: a segment's own tables are broken.
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def excess(self) -> int | None:
        """The coldest segment if the medium has no room for all of them any more, else None.

        Others may have filled it, so that less is free than the tier must keep.

        Raises:
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def retire(self, segment: int, *, damaged: bool) -> TierUsage:
        """Give a segment and all its blocks up; an absent one is harmless.

        A damaged one is set aside for inspection, as long as the capacity has room for it. Reads
        of it that are under way may fail. A later commit may start a new, empty segment under
        another number.

        Raises:
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def reopen(self) -> Sequence[int]:
        """Try to work again after TierUnavailable; no read is under way.

        Returns:
            Segments that are what they were; all others are gone or start empty.

        Raises:
            KvtierError: the medium still fails, or is another one.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the medium; idempotent."""
