"""The connector's counters as vLLM wants them: for its log line and its /metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from engine_adapter.vllm.counts import COUNTERS, Counts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KvtierStats(KVConnectorStats):
    """Counters of one interval."""

    def __init__(self, data: Mapping[str, float] | None = None) -> None:
        super().__init__(data=Counts(data or {}))

    def reset(self) -> None:
        """Back to zero."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KvtierStats:
        """Add another's to these."""
        for name, value in other.data.items():
            self.data.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def to_dict(self) -> dict[str, float]:
        """As it travels between vLLM's processes."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class KvtierPromMetrics(KVConnectorPromMetrics):
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
