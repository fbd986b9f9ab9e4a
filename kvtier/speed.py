"""How fast a shard reads, and what a load will take: for loading only what pays.

The speed is a running mean of what the mover measured, weighted by time, so it includes queueing in
the device, decoding and checking. Pure.
"""

from __future__ import annotations

MEMORY_S = 2.0
"""Busy time after which a measurement has lost most of its weight."""

START_S = 0.002
"""What the first block takes beyond its bytes: a round through the daemon's threads."""


class ReadSpeed:
    """A shard's recent bandwidth.

    Attributes:
        loading_bytes: Stored bytes of loads queued and in flight.
    """

    def __init__(self) -> None:
        self.loading_bytes = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def measured(self, stored_bytes: int, busy_s: float) -> None:
        """So many bytes came in so much time with reads in flight."""
        if busy_s <= 0 or not stored_bytes:
            return
        keep = max(0.0, 1.0 - busy_s / MEMORY_S)
        self._bytes = self._bytes * keep + stored_bytes
        self._seconds = self._seconds * keep + busy_s

    @property
    def bytes_per_s(self) -> float | None:
        """Recent bandwidth in stored bytes; None before the first measurement."""
        return self._bytes / self._seconds if self._seconds else None

    def load_s(self, stored_bytes: int) -> float:
        """Seconds until that many more bytes are loaded, behind what is queued; 0 if unknown."""
        bandwidth = self.bytes_per_s
        if not bandwidth:
            return 0.0
        return START_S + (self.loading_bytes + stored_bytes) / bandwidth
