"""Which token comes next, and when an answer ends."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.

    Attributes:
        max_tokens: Longest answer; the model's context may end it earlier.
        temperature: 0 takes the most likely token.
        top_p: Draw from the fewest tokens whose probabilities reach this sum.
        seed: Equal seeds draw equal tokens, whatever else runs; None draws a fresh seed.
        ignore_eos: Go on past an end-of-sequence token.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} must be 0 or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1]")


class Sampler:
    """One request's draws, from a generator of its own."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> int:
        """Choose a token.

        Args:
            logits: (vocabulary,) float32.
        """
        if self._params.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits / self._params.temperature, dim=-1)
        if self._params.top_p < 1:
            probabilities = self._nucleus(probabilities)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _nucleus(self, probabilities: Tensor) -> Tensor:
        """Zero all but the most likely tokens that together reach top_p."""
        descending, order = probabilities.sort(descending=True)
        before = descending.cumsum(0) - descending
        return torch.zeros_like(probabilities).index_put_(
            (order,), descending.masked_fill(before >= self._params.top_p, 0)
        )
