"""The chained block hashes of one request, hashed as its tokens become known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.hashing import block_hashes
from kvtier.types import BlockHash


class HashChain:
    """Block hashes of one request, each block hashed once.

    Args:
        root: hashing.root_hash of the request.
        block_tokens: Tokens a block.
        extra_keys: What besides its tokens makes a block's content, by the block's index.
    """

    def __init__(
        self, root: BlockHash, block_tokens: int, extra_keys: Mapping[int, Sequence[bytes]]
    ) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self._extra_keys = extra_keys
        self._hashes: list[BlockHash] = []

    def upto(self, token_ids: Sequence[int], blocks: int) -> list[BlockHash]:
        """Hashes of the first `blocks` blocks; do not change the list.

        Args:
            token_ids: The request's tokens so far; those of earlier calls first, unchanged.
            blocks: At most as many as these tokens fill.
        """
        known = len(self._hashes)
        if known < blocks:
            first, last = known * self._block_tokens, blocks * self._block_tokens
            keys = {index - known: value for index, value in self._extra_keys.items()}
            self._hashes += block_hashes(
                self.parent_of(known), token_ids[first:last], self._block_tokens, keys
            )
        return self._hashes if len(self._hashes) == blocks else self._hashes[:blocks]

    def parent_of(self, block: int) -> BlockHash:
        """The hash before a block's: the root's for the first one."""
        return self._hashes[block - 1] if block else self._root
