"""What the connector counts, through vLLM's own statistics: its log line and its /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
}
"""Every counter; with several workers, each counts what it did itself."""


class KvtierStats(KVConnectorStats):  # type: ignore[misc,unused-ignore]
    """Counters since they were last taken; only those that moved are in `data`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={} if data is None else data)

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter of COUNTERS."""
        assert name in COUNTERS, name
        if by:
            self.data[name] = self.data.get(name, 0) + by

    def reset(self) -> None:
        """Back to zero."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        """Add another's to these."""
        for name, value in other.data.items():
            self.count(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class KvtierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc,unused-ignore]
    """The same counters for vLLM's /metrics: vllm:kvtier_NAME, one an engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: counter(
                name=f"vllm:kvtier_{name}", documentation=documentation, labelnames=labelnames
            )
            for name, documentation in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what KvtierStats.data says."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(value)
