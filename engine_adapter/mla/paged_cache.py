"""The engine's own cache: fixed pages of latent records, handed out from a free list.

A page is exactly one kvtier block, all layers of 64 tokens, contiguous: moving a block in or out
is one memcpy. This module knows neither requests nor kvtier.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PAGE_TOKENS = 64


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


class PagedCache:
    """Latent records of all running sequences.

    Not thread-safe. Reading a page that nobody wrote gives arbitrary values.

    Attributes:
        pages: (num_pages, layers, 64, width), contiguous. A record is the normed latent, then
            the rotated key in the interleaved layout.
    """

    def __init__(self, num_pages: int, layers: int, width: int, dtype: torch.dtype) -> None:
        if num_pages <= 0:
            raise ValueError(f"num_pages {num_pages} must be positive")
        self.pages = torch.empty(num_pages, layers, PAGE_TOKENS, width, dtype=dtype)
        # Popped from the end, so that the lowest pages are used first and a mostly idle engine
        # touches little memory.
        self._free = list(reversed(range(num_pages)))

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.pages.shape[0]

    @property
    def free_pages(self) -> int:
        """Pages that allocate() can hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, all or none.

        Raises:
            OutOfPages: fewer are free.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Their content may be overwritten from now on."""
        assert not set(pages) & set(self._free), "a page was released twice"
        self._free.extend(reversed(pages))

    def write(self, layer: int, pages: Tensor, offsets: Tensor, records: Tensor) -> None:
        """Store one record a token.

        Args:
            layer: Layer index.
            pages: (tokens,) int64, the page of each token.
            offsets: (tokens,) int64 in [0, 64), its place in the page.
            records: (tokens, width) in the cache's dtype.
        """
        self.pages[:, layer].index_put_((pages, offsets), records)

    def read(self, layer: int, pages: Tensor, tokens: int) -> Tensor:
        """A sequence's first `tokens` records of one layer, copied: (tokens, width)."""
        # index_select copies whole pages; indexing with [] takes a slower, general path.
        return self.pages[:, layer].index_select(0, pages).flatten(0, 1)[:tokens]

    def page_bytes(self, page: int) -> npt.NDArray[np.uint8]:
        """The bytes of one page, a writable 1-D view: layers * 64 * width elements."""
        view: npt.NDArray[np.uint8] = self.pages[page].view(torch.uint8).flatten().numpy()
        return view
