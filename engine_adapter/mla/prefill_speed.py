"""How fast this engine prefills, by its recent chunks: what a load must beat."""

from __future__ import annotations

MEMORY_TOKENS = 8192
"""Tokens after which a measurement has lost most of its weight; the first ones warm up."""


class PrefillSpeed:
    """A running mean over computed tokens."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        """A chunk of so many tokens took so long."""
        keep = max(0.0, 1.0 - tokens / MEMORY_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def tokens_per_s(self) -> float:
        """Recent speed; 0 before the first chunk."""
        return self._tokens / self._seconds if self._seconds else 0.0
