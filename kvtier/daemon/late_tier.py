"""An SSD directory that could not be opened when the daemon started, and may be later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.codec.base import Bytes
from kvtier.errors import TierUnavailable
from kvtier.tier.base import (
    STORED_BLOCK,
    BlockMeta,
    BlockTier,
    Deletion,
    NamespaceRow,
    PreparedBlock,
    Restamp,
    Scrubbed,
    StoredBlocks,
    TierUsage,
    Wanted,
    WrittenBlock,
)
from kvtier.types import Loss


class LateTier(BlockTier):
    """Empty and out of order until reopen() succeeds; from then on the tier that it opened.

    What the directory holds is given up then: the store's index was built without it.
    """

    def __init__(self, make: Callable[[], BlockTier], cause: TierUnavailable) -> None:
        """`make` opens the tier, or raises; `cause` is why it could not at the start."""
        self._make = make
        self._cause = cause
        self._tier: BlockTier | None = None

    @property
    def _opened(self) -> BlockTier:
        if self._tier is None:
            raise TierUnavailable(f"not open since the start: {self._cause}")
        return self._tier

    def namespaces(self) -> Sequence[NamespaceRow]:
        return () if self._tier is None else self._tier.namespaces()

    def scan(self) -> StoredBlocks:
        return np.zeros(0, STORED_BLOCK) if self._tier is None else self._tier.scan()

    def usage(self) -> TierUsage:
        return TierUsage(0, 0, 0, 0) if self._tier is None else self._tier.usage()

    def prepare(
        self, meta: BlockMeta, block: Bytes, allowed_loss: Loss, *, loss: Loss = Loss.EXACT
    ) -> PreparedBlock:
        return self._opened.prepare(meta, block, allowed_loss, loss=loss)

    def write(self, block: PreparedBlock) -> WrittenBlock:
        return self._opened.write(block)

    def discard(self, written: WrittenBlock) -> None:
        self._opened.discard(written)

    def commit(
        self,
        *,
        deletes: Sequence[Deletion] = (),
        writes: Sequence[WrittenBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
        restamps: Sequence[Restamp] = (),
    ) -> TierUsage:
        return self._opened.commit(
            deletes=deletes, writes=writes, namespaces=namespaces, restamps=restamps
        )

    def read_into(self, wanted: Wanted, out: Bytes) -> int:
        return self._opened.read_into(wanted, out)

    def scrub(self, position: bytes) -> Scrubbed:
        return self._opened.scrub(position)

    def excess(self) -> int | None:
        return self._opened.excess()

    def retire(self, segment: int, *, damaged: bool) -> TierUsage:
        return self._opened.retire(segment, damaged=damaged)

    def reopen(self) -> Sequence[int]:
        if self._tier is not None:
            return self._tier.reopen()
        tier = self._make()
        try:
            for segment in np.unique(tier.scan()["segment"]).tolist():
                tier.retire(segment, damaged=False)
        except BaseException:
            tier.close()
            raise
        self._tier = tier
        return ()

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close()
