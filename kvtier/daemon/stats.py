"""What the daemon says about itself: the Stats rpc and Prometheus, from the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.daemon.translate import TIERS
from kvtier.metrics import Counters
from kvtier.store import TieredStore
from kvtier.types import Tier
from kvtier.v1 import cache_pb2 as pb


@dataclass(frozen=True, slots=True)
class TierState:
    """Occupancy of one tier."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    healthy: bool


def tier_states(store: TieredStore, ssd_capacity_bytes: int) -> list[TierState]:
    """Occupancy of the tiers there are."""
    host, ssd = store.tiers.host, store.tiers.ssd
    extents = host.extents
    states = [
        TierState(Tier.HOST, extents.capacity_bytes, extents.used_bytes, len(host), healthy=True)
    ]
    if ssd is not None:
        used_bytes = ssd.usage.used_bytes
        states.append(
            TierState(Tier.SSD, ssd_capacity_bytes, used_bytes, len(ssd), healthy=ssd.healthy)
        )
    return states


def gauges(store: TieredStore, sessions: int) -> dict[str, tuple[float, str]]:
    """Name -> (value, meaning) of what goes up and down."""
    reads, writes, pins = store.lease_counts()
    host, ssd = store.tiers.host, store.tiers.ssd
    return {
        "sessions": (sessions, "Connected sessions."),
        "read_leases": (reads, "Live read leases."),
        "write_leases": (writes, "Live write leases."),
        "pins": (pins, "Live pins."),
        "pinned_bytes": (host.pinned_bytes, "Arena bytes that leases, pins or jobs hold."),
        "quarantined_bytes": (
            host.quarantined_bytes,
            "Arena bytes that wait for a vanished writer.",
        ),
        "namespaces": (len(store.index.namespaces), "Open namespaces."),
        "unwritten_bytes": (ssd.dirty_bytes if ssd else 0, "Block bytes that are in RAM only."),
        "write_queue_bytes": (ssd.queued_bytes if ssd else 0, "Bytes on their way to the SSD."),
    }


def counter_values(counters: Counters) -> dict[str, float]:
    """Every plain counter by name; failures by reason as load_failed_blocks_REASON."""
    values: dict[str, float] = {}
    for field in fields(counters):
        value = getattr(counters, field.name)
        if isinstance(value, dict):
            values |= {f"{field.name}_{reason}": count for reason, count in value.items()}
        else:
            values[field.name] = value
    return values


def stats_response(
    store: TieredStore,
    *,
    version: str,
    epoch: bytes,
    uptime_s: float,
    sessions: int,
    ssd_capacity_bytes: int,
) -> pb.StatsResponse:
    """Answer to the Stats rpc."""
    reads, writes, pins = store.lease_counts()
    return pb.StatsResponse(
        version=version,
        epoch=epoch,
        uptime_s=uptime_s,
        tiers=[
            pb.TierStats(
                tier=TIERS[state.tier],
                capacity_bytes=state.capacity_bytes,
                used_bytes=state.used_bytes,
                blocks=state.blocks,
                healthy=state.healthy,
            )
            for state in tier_states(store, ssd_capacity_bytes)
        ],
        sessions=sessions,
        read_leases=reads,
        write_leases=writes,
        pins=pins,
        pinned_bytes=store.tiers.host.pinned_bytes,
        quarantined_bytes=store.tiers.host.quarantined_bytes,
        namespaces=len(store.index.namespaces),
        counters=counter_values(store.counters),
    )


class StoreCollector(Collector):
    """Prometheus metrics of a store, read when scraped. Scrapes run on the event loop."""

    def __init__(
        self, store: TieredStore, count_sessions: Callable[[], int], ssd_capacity_bytes: int
    ) -> None:
        self._store = store
        self._count_sessions = count_sessions
        self._ssd_capacity_bytes = ssd_capacity_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        counters = self._store.counters
        yield _by_tier(
            "kvtier_hit_blocks",
            "Blocks granted by Acquire, by the tier they were found on.",
            host=counters.host_hit_blocks,
            ssd=counters.ssd_hit_blocks,
        )
        yield _by_tier(
            "kvtier_hit_tokens",
            "Tokens granted by Acquire, by the tier they were found on.",
            host=counters.host_hit_tokens,
            ssd=counters.ssd_hit_tokens,
        )
        yield _by_tier(
            "kvtier_evicted_blocks",
            "Blocks that left a tier to make room.",
            host=counters.host_evicted_blocks,
            ssd=counters.ssd_evicted_blocks,
        )
        yield _by_tier(
            "kvtier_evicted_bytes",
            "Bytes that left a tier to make room.",
            host=counters.host_evicted_bytes,
            ssd=counters.ssd_evicted_bytes,
        )
        failed = CounterMetricFamily(
            "kvtier_load_failed_blocks", "Loads that became misses.", labels=["reason"]
        )
        for reason, count in counters.load_failed_blocks.items():
            failed.add_metric([reason], count)
        yield failed
        for name, meaning in _PLAIN.items():
            yield CounterMetricFamily(f"kvtier_{name}", meaning, value=getattr(counters, name))
        for name, (value, meaning) in gauges(self._store, self._count_sessions()).items():
            yield GaugeMetricFamily(f"kvtier_{name}", meaning, value=value)
        yield from self._tiers()

    def _tiers(self) -> Iterator[Metric]:
        families = {
            "capacity_bytes": "Capacity of a tier.",
            "used_bytes": "Bytes of a tier in use.",
            "blocks": "Readable blocks on a tier.",
            "healthy": "1 while a tier works.",
        }
        states = tier_states(self._store, self._ssd_capacity_bytes)
        for name, meaning in families.items():
            family = GaugeMetricFamily(f"kvtier_tier_{name}", meaning, labels=["tier"])
            for state in states:
                family.add_metric([state.tier], float(getattr(state, name)))
            yield family


def _by_tier(name: str, meaning: str, **values: float) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=["tier"])
    for tier, value in values.items():
        family.add_metric([tier], value)
    return family


_PLAIN = {
    "acquires": "Acquire calls.",
    "requested_blocks": "Blocks asked for by Acquire: hits on all tiers plus misses.",
    "requested_tokens": "Tokens asked for by Acquire.",
    "missed_blocks": "Blocks asked for by Acquire and not granted.",
    "missed_tokens": "Tokens asked for by Acquire and not granted.",
    "stored_blocks": "Blocks made visible by Commit.",
    "stored_bytes": "Bytes made visible by Commit.",
    "skipped_blocks": "Leading blocks that Reserve found present.",
    "refused_blocks": "Blocks that Reserve had no room for.",
    "demotions_shed_blocks": "Blocks that left RAM unwritten because the SSD did not keep up.",
    "skipped_by_admission_blocks": "Blocks that left RAM unwritten because the policy said so.",
    "ssd_read_blocks": "Blocks loaded from the SSD.",
    "ssd_read_bytes": "Stored bytes read from the SSD.",
    "ssd_read_seconds": "Time during which reads were in flight.",
    "ssd_written_blocks": "Blocks written to the SSD.",
    "ssd_written_bytes": "Stored bytes written to the SSD.",
    "ssd_write_seconds": "Time of the writer's commits.",
    "ssd_write_failed_blocks": "Blocks whose write failed.",
    "leases_expired": "Leases that ended by their deadline.",
    "namespaces_dropped": "Namespaces dropped.",
    "dropped_blocks": "Blocks dropped by hash.",
}
