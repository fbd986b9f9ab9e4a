"""The engine's own cache: fixed pages of latent records, handed out from a free list.

A page is exactly one kvtier block, all layers of 64 tokens, contiguous: moving a block in or out
is one memcpy. This module knows neither requests nor kvtier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PAGE_TOKENS = 64


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A sequence's pages in the order of its tokens.

    Attributes:
        index: (pages,) int64.
        first: The first page.
        consecutive: Whether the others follow it one by one.
    """

    index: Tensor
    first: int
    consecutive: bool

    @classmethod
    def of(cls, pages: Sequence[int]) -> PageTable:
        """The table of a list of pages, at least one."""
        consecutive = list(pages) == list(range(pages[0], pages[0] + len(pages)))
        return cls(torch.tensor(pages), pages[0], consecutive)

    def up_to(self, tokens: int) -> PageTable:
        """The pages that hold the first `tokens` tokens."""
        return PageTable(self.index[: -(-tokens // PAGE_TOKENS)], self.first, self.consecutive)


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
        self._free = list(range(num_pages))  # Always sorted, so that runs are easy to see.

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self.pages.shape[0]

    @property
    def free_pages(self) -> int:
        """Pages that allocate() can hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, all or none; consecutive ones if there is such a run.

        Raises:
            OutOfPages: fewer are free.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        starts = range(len(self._free) - count + 1)
        runs = (at for at in starts if self._free[at + count - 1] - self._free[at] == count - 1)
        first = next(runs, 0)
        taken = self._free[first : first + count]
        del self._free[first : first + count]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. Their content may be overwritten from now on."""
        assert not set(pages) & set(self._free), "a page was released twice"
        self._free = sorted([*self._free, *pages])

    def write(self, layer: int, pages: Tensor, offsets: Tensor, records: Tensor) -> None:
        """Store one record a token.

        Args:
            layer: Layer index.
            pages: (tokens,) int64, the page of each token.
            offsets: (tokens,) int64 in [0, 64), its place in the page.
            records: (tokens, width) in the cache's dtype.
        """
        self.pages[:, layer].index_put_((pages, offsets), records)

    def read(self, layer: int, pages: PageTable) -> Tensor:
        """One layer of a sequence's pages, (pages, 64, width): a view if they are consecutive.

        In decoding, copying every record once a step would cost as much as attending to it.
        """
        if pages.consecutive:
            return self.pages[pages.first : pages.first + len(pages.index), layer]
        # index_select copies whole pages; indexing with [] takes a slower, general path.
        return self.pages[:, layer].index_select(0, pages.index)

    def page_bytes(self, page: int) -> npt.NDArray[np.uint8]:
        """The bytes of one page, a writable 1-D view: layers * 64 * width elements."""
        view: npt.NDArray[np.uint8] = self.pages[page].view(torch.uint8).flatten().numpy()
        return view
