"""The contract of a tier that keeps blocks on a medium of its own (SSD now, remote later).

A tier holds bytes and reports; it never decides what to hold, and nothing here runs on the event
loop. Who calls what:

    prepare     any thread; pure                        (codec executor)
    commit      one thread, always the same one         (the tier's writer)
    read_into   any number of threads at once           (reader executor)
    open, close exclusive

Every implementation passes tests/contract/test_tier.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.codec.base import Bytes
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
        stamp: Its recency (policy/base.py) when it was written.
    """

    hash: BlockHash
    parent: BlockHash | None
    depth: int
    namespace: NamespaceDigest
    generation: int
    stamp: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One row of a warm tier, as scan() yields it.

    Attributes:
        meta: Its identity.
        stored_bytes: Bytes of its stored form.
        loss: Loss of its stored form.
    """

    meta: BlockMeta
    stored_bytes: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A block in its stored form, ready to commit.

    Attributes:
        meta: Its identity.
        size_bytes: Length of the block itself.
        payload: (stored bytes,) uint8; may be a view of the source, which the caller keeps still
            until commit returns.
        codec_id: Codec of the payload.
        codec_version: Version of the payload's form.
        loss: Loss of the payload.
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
class NamespaceRow:
    """A namespace as a warm tier remembers it."""

    digest: NamespaceDigest
    spec: NamespaceSpec
    generation: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Exact accounting of a tier after a commit.

    Attributes:
        used_bytes: Bytes of the medium in use: payloads, their padding, dead neighbours in a
            shared value, metadata.
        live_bytes: Stored bytes of the blocks that can be read.
        limit_bytes: used_bytes stays at or below this for the next commit to be sure to fit;
            the store evicts ahead of it. Below the capacity by what copy-on-write needs.
        blocks: Blocks that can be read.
    """

    used_bytes: int
    live_bytes: int
    limit_bytes: int
    blocks: int


class BlockTier(ABC):
    """Durable home of blocks, named by hash. Constructed open, or raises."""

    @abstractmethod
    def namespaces(self) -> Sequence[NamespaceRow]:
        """Namespaces the tier remembers."""

    @abstractmethod
    def scan(self) -> Iterator[StoredBlock]:
        """Yield every readable block; reads metadata only. Call before the first commit."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Accounting as of the last commit."""

    @abstractmethod
    def prepare(self, meta: BlockMeta, block: Bytes, allowed_loss: Loss) -> PreparedBlock:
        """Encode `block` and compute its checksum; pure, releases the GIL.

        A namespace that no commit() brought yet has no known layout: its blocks stay raw.

        Args:
            meta: Its identity.
            block: (block bytes,) uint8, kept still until the commit.
            allowed_loss: The stored form loses no more than this.
        """

    @abstractmethod
    def commit(
        self,
        *,
        deletes: Sequence[BlockHash] = (),
        writes: Sequence[PreparedBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
    ) -> TierUsage:
        """Apply one batch atomically: deletes, then namespaces, then writes (one group commit).

        Deleting an absent block is harmless; writing a present one replaces it; no block is in
        `writes` twice. When it returns, the batch survives `kill -9` of this process, and a power
        cut if the tier is `full` durable.

        Raises:
            TierFull: no room; nothing of the batch was applied.
            TierUnavailable: the medium failed; nothing of the batch is promised.
        """

    @abstractmethod
    def read_into(self, key: BlockHash, out: Bytes) -> int:
        """Read, verify and decode one block into `out`, all of it or raise.

        Args:
            key: A committed block that no commit deletes meanwhile.
            out: (block bytes,) uint8; undefined after an error.

        Returns:
            Stored bytes read from the medium.

        Raises:
            CorruptBlock: absent, short, checksum or codec mismatch.
            TierUnavailable: the medium failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the medium; idempotent."""
