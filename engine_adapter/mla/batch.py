"""Which tokens one forward pass computes, and where their records lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine_adapter.mla.paged_cache import PAGE_TOKENS, PageTable


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence: a prefill chunk, or the one token of a decode step.

    Attributes:
        pages: The sequence's pages up to the span's end.
        start: Position of the first token; everything before it is in the cache.
        length: Tokens.
    """

    pages: PageTable
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position behind the last token: how many records its queries may see."""
        return self.start + self.length

    def last(self) -> Span:
        """The span of the last token only."""
        return self if self.length == 1 else Span(self.pages, self.end - 1, 1)


@dataclass(frozen=True)
class Batch:
    """Spans side by side, their tokens concatenated.

    Attributes:
        positions: (tokens,) int64.
        pages: (tokens,) int64, the page of each token.
        last_rows: (spans,) int64, the row of each span's last token.
    """

    spans: Sequence[Span]
    positions: Tensor
    pages: Tensor
    last_rows: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Batch:
        """Lay spans side by side."""
        positions = [torch.arange(span.start, span.end) for span in spans]
        pages = [
            span.pages.index[position // PAGE_TOKENS]
            for span, position in zip(spans, positions, strict=True)
        ]
        lengths = torch.tensor([span.length for span in spans])
        return cls(spans, torch.cat(positions), torch.cat(pages), lengths.cumsum(0) - 1)

    @cached_property
    def offsets(self) -> Tensor:
        """(tokens,) int64: each token's place in its page."""
        return self.positions % PAGE_TOKENS
