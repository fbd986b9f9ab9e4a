"""How much may still be written to the SSD: the endurance budget.

A token bucket in bytes: it fills at the daily rate and holds a quarter of a day's bytes, so that a
busy hour may borrow from a quiet one. Nearly empty it makes admission stricter, empty it stops
writing (admission.py). Pure: time and bytes come in as arguments.
"""

from __future__ import annotations

from collections import deque

DAY_S = 86_400
BURST_DAYS = 0.25
TIGHT_LEVEL = 0.25
START_LEVEL = 0.5
_HOUR_S = 3600


class WriteBudget:
    """What a day may write, and what the last day has written."""

    def __init__(self, daily_bytes: int, rated_bytes: int = 0) -> None:
        """`daily_bytes` 0: no limit. `rated_bytes`: what the drives may write in all; 0: unknown.

        It starts half full: a daemon that starts over and over does not get more than its share.
        """
        self._daily_bytes = daily_bytes
        self._rated_bytes = rated_bytes
        self._burst_bytes = daily_bytes * BURST_DAYS
        self._tokens_bytes = self._burst_bytes * START_LEVEL
        self._now_s: float | None = None
        self._hours: deque[tuple[int, int]] = deque()

    def tick(self, now_s: float) -> None:
        """Time has passed; `now_s` is monotonic."""
        if self._now_s is not None:
            earned_bytes = (now_s - self._now_s) * self._daily_bytes / DAY_S
            self._tokens_bytes = min(self._burst_bytes, self._tokens_bytes + earned_bytes)
        self._now_s = now_s
        oldest_hour = int(now_s) // _HOUR_S - DAY_S // _HOUR_S
        while self._hours and self._hours[0][0] <= oldest_hour:
            self._hours.popleft()

    def spend(self, size_bytes: int) -> None:
        """A write of so many bytes was decided; negative for what a codec saved afterwards."""
        self._tokens_bytes -= size_bytes
        hour = int(self._now_s or 0) // _HOUR_S
        if self._hours and self._hours[-1][0] == hour:
            hour, size_so_far_bytes = self._hours.pop()
            size_bytes += size_so_far_bytes
        self._hours.append((hour, size_bytes))

    def allows(self, size_bytes: int) -> bool:
        """Whether a write of so many bytes is within the budget now."""
        return not self._daily_bytes or self._tokens_bytes >= size_bytes

    @property
    def tight(self) -> bool:
        """True when only blocks that were used twice are worth a write."""
        return self.level < TIGHT_LEVEL

    @property
    def level(self) -> float:
        """How full the bucket is, 0 to 1; 1 without a limit."""
        if not self._daily_bytes:
            return 1.0
        return max(0.0, self._tokens_bytes / self._burst_bytes)

    @property
    def written_today_bytes(self) -> int:
        """Block bytes written in the last 24 hours (by the hour), since the daemon started."""
        return sum(size_bytes for _, size_bytes in self._hours)

    def lifetime_days(self, written_bytes: int) -> float | None:
        """Days until the drives' rated bytes are written, at today's rate; None if unknown.

        `written_bytes` is what was written since the tier was created.
        """
        if not self._rated_bytes or not self.written_today_bytes:
            return None
        return max(0, self._rated_bytes - written_bytes) / self.written_today_bytes
