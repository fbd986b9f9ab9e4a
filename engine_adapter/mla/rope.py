"""Rotary positions in the interleaved layout: elements 2i and 2i+1 turn together.

DeepSeek's own code, vLLM and transformers' V2 cache the rotated key in this layout; transformers'
V3 caches [evens | odds]. Queries and keys only ever meet in a dot product, so the layout does not
change a score; keeping one for both families lets engines share cached blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine_adapter.mla.config import RopeConfig, YarnConfig


class Rope:
    """Turns pairs of elements by angles proportional to the token's position.

    Args:
        config: Base frequency and context extension.
        width: Rotary elements of a query or key; even.
    """

    def __init__(self, config: RopeConfig, width: int) -> None:
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self._frequencies = 1.0 / config.theta**exponents
        self._magnitude = 1.0
        if config.yarn is not None:
            keep = _kept_share(config.yarn, config.theta, width)
            stretched = self._frequencies / config.yarn.factor
            self._frequencies = stretched * (1 - keep) + self._frequencies * keep
            self._magnitude = config.yarn.attention_factor

    def rotation(self, positions: Tensor) -> Tensor:
        """Unit turns (times YaRN's magnitude) of each position.

        Args:
            positions: (tokens,) int64.

        Returns:
            (tokens, width / 2) complex64.
        """
        angles = positions[:, None].float() * self._frequencies
        return torch.polar(torch.full_like(angles, self._magnitude), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn the pairs of the last dimension; computed in float32, returned in x's dtype.

    Args:
        x: (..., width), pairs side by side.
        rotation: complex64, broadcastable to (..., width / 2).
    """
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def _kept_share(yarn: YarnConfig, theta: float, width: int) -> Tensor:
    """How much of each frequency YaRN keeps: 1 for fast ones, 0 for slow ones, a ramp between."""

    def dimension(rotations: float) -> float:
        turns = yarn.original_tokens / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # A ramp of no width would divide by zero.
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)
