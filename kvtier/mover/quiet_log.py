"""Lines that would appear once a block: a failing disk must not fill another one with its log."""

from __future__ import annotations

from collections.abc import Callable

QUIET_S = 10.0
"""Lines of one kind appear at most this often."""


class QuietLog:
    """Says when a line may be logged that would else appear once a block."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s = float("-inf")
        self._unsaid = 0

    def speak(self) -> int:
        """How many lines this one stands for; 0: stay silent."""
        self._unsaid += 1
        if self._clock() < self._next_s:
            return 0
        self._next_s = self._clock() + QUIET_S
        said, self._unsaid = self._unsaid, 0
        return said
