"""What the connector counts. stats.py hands it to vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtier.types import MissReason

COUNTERS: Mapping[str, str] = {
    "lookups": "Prompts looked up in kvtier.",
    "unidentified_requests": "Requests that are not cached, for they can't be identified.",
    "loads_planned": "Requests for which blocks were to be loaded.",
    "loaded_host_blocks": "Blocks loaded that were in host memory.",
    "loaded_ssd_blocks": "Blocks loaded that were on an SSD only.",
    "loaded_bytes": "Bytes loaded.",
    "load_seconds": "Time that loads took, together.",
    "failed_loads": "Loads that gave fewer blocks than were looked up; vLLM computed them.",
    "stored_blocks": "Blocks copied to kvtier.",
    "stored_bytes": "Bytes copied to kvtier.",
    "store_seconds": "Time that stores took, together.",
    "unstored_blocks": "Blocks that kvtier had no room for, or that it could not be asked about.",
    **{
        f"missed_{reason}": f"Calls to kvtier that gave nothing: {reason.replace('_', ' ')}."
        for reason in MissReason
    },
}
"""Every counter; with several workers, each counts what it did itself."""


class Counts(dict[str, float]):
    """Counters of COUNTERS since they were last taken; only those that moved are in it."""

    def add(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        assert name in COUNTERS, name
        if by:
            self[name] = self.get(name, 0) + by

    def add_misses(self, now: Counter[MissReason], before: Counter[MissReason]) -> None:
        """Add what a client's misses grew by."""
        for reason, count in now.items():
            self.add(f"missed_{reason}", count - before[reason])

    def take(self) -> Counts:
        """All of them; zero from now on."""
        taken = Counts(self)
        self.clear()
        return taken
