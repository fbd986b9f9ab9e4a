"""How long something is under way: bandwidth is bytes over this, not over the sum of all waits."""

from __future__ import annotations

from collections.abc import Callable


class BusyTime:
    """How long anything was under way. What overlaps counts once.

    Attributes:
        under_way: How many are now.
        since_s: Since when, or since elapsed_s() was last called.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.under_way = 0
        self.since_s = 0.0
        self._clock = clock

    def begin(self) -> None:
        """One more is under way."""
        if not self.under_way:
            self.since_s = self._clock()
        self.under_way += 1

    def end(self) -> None:
        """One less is."""
        self.under_way -= 1

    def elapsed_s(self) -> float:
        """Time since since_s, which moves on to now."""
        now_s = self._clock()
        elapsed_s, self.since_s = now_s - self.since_s, now_s
        return elapsed_s
