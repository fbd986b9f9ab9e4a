"""What the daemon says about itself: the Stats rpc and Prometheus, from the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.config import Settings
from kvtier.daemon.translate import TIERS
from kvtier.metrics import Counters
from kvtier.store import TieredStore
from kvtier.types import Tier
from kvtier.v1 import cache_pb2 as pb


@dataclass(frozen=True, slots=True)
class TierState:
    """Occupancy of one tier. Healthy: all of it works."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class ShardState:
    """One directory of the SSD tier. Its fields are those of the wire's ShardStats."""

    directory: str
    online: bool
    capacity_bytes: int
    used_bytes: int
    blocks: int
    queued_bytes: int
    written_bytes: int
    read_bytes_per_s: float
    stored_bytes: int
    block_bytes: int


def shard_states(store: TieredStore, settings: Settings) -> list[ShardState]:
    """The SSD tier's directories, in the order of the settings."""
    ssd = store.tiers.ssd
    return [
        ShardState(
            directory=str(directory),
            online=shard.online,
            capacity_bytes=settings.ssd_capacity_bytes,
            used_bytes=shard.usage.used_bytes,
            blocks=shard.usage.blocks,
            queued_bytes=shard.queued_bytes,
            written_bytes=shard.usage.written_bytes,
            read_bytes_per_s=shard.speed.bytes_per_s or 0.0,
            stored_bytes=shard.stored_bytes,
            block_bytes=shard.block_bytes,
        )
        for directory, shard in zip(
            settings.ssd_directories, ssd.shards if ssd is not None else (), strict=True
        )
    ]


def tier_states(store: TieredStore, settings: Settings) -> list[TierState]:
    """Occupancy of the tiers there are."""
    host, ssd = store.tiers.host, store.tiers.ssd
    extents = host.extents
    states = [
        TierState(Tier.HOST, extents.capacity_bytes, extents.used_bytes, len(host), healthy=True)
    ]
    if ssd is not None:
        shards = shard_states(store, settings)
        states.append(
            TierState(
                Tier.SSD,
                sum(shard.capacity_bytes for shard in shards),
                sum(shard.used_bytes for shard in shards),
                len(ssd),
                healthy=all(shard.online and shard.healthy for shard in ssd.shards),
            )
        )
    return states


def wear(store: TieredStore) -> pb.SsdWear | None:
    """How fast the SSDs are worn; None without an SSD tier."""
    ssd, counters = store.tiers.ssd, store.counters
    if ssd is None:
        return None
    served_bytes = counters.ssd_served_bytes
    return pb.SsdWear(
        written_today_bytes=max(0, ssd.budget.written_today_bytes),
        budget_level=ssd.budget.level,
        lifetime_days=ssd.lifetime_days,
        written_per_served_byte=counters.ssd_written_bytes / served_bytes if served_bytes else 0.0,
    )


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
    """Every plain counter by name; those by reason as NAME_REASON."""
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
    settings: Settings,
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
            for state in tier_states(store, settings)
        ],
        shards=[pb.ShardStats(**asdict(state)) for state in shard_states(store, settings)],
        ssd_wear=wear(store),
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
        self, store: TieredStore, count_sessions: Callable[[], int], settings: Settings
    ) -> None:
        self._store = store
        self._count_sessions = count_sessions
        self._settings = settings

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        counters = self._store.counters
        yield _by_tier(
            "kvtier_hit_blocks",
            "Blocks that prompts asked for and found, by tier.",
            host=counters.host_hit_blocks,
            ssd=counters.ssd_hit_blocks,
        )
        yield _by_tier(
            "kvtier_hit_tokens",
            "Tokens that prompts asked for and found, by tier.",
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
        yield _by_reason(
            "kvtier_load_failed_blocks", "Loads that became misses.", counters.load_failed_blocks
        )
        yield _by_reason(
            "kvtier_corrupt_blocks", "Blocks that the scrubber dropped.", counters.corrupt_blocks
        )
        for name, meaning in _PLAIN.items():
            yield CounterMetricFamily(f"kvtier_{name}", meaning, value=getattr(counters, name))
        for name, (value, meaning) in gauges(self._store, self._count_sessions()).items():
            yield GaugeMetricFamily(f"kvtier_{name}", meaning, value=value)
        yield from self._tiers()
        yield from self._shards()
        yield from self._wear()

    def _tiers(self) -> Iterator[Metric]:
        families = {
            "capacity_bytes": "Capacity of a tier.",
            "used_bytes": "Bytes of a tier in use.",
            "blocks": "Readable blocks on a tier.",
            "healthy": "1 while a tier works.",
        }
        states = tier_states(self._store, self._settings)
        for name, meaning in families.items():
            family = GaugeMetricFamily(f"kvtier_tier_{name}", meaning, labels=["tier"])
            for state in states:
                family.add_metric([state.tier], float(getattr(state, name)))
            yield family

    def _shards(self) -> Iterator[Metric]:
        states = shard_states(self._store, self._settings)
        for name, meaning in _SHARD.items():
            family = GaugeMetricFamily(f"kvtier_ssd_shard_{name}", meaning, labels=["directory"])
            for state in states:
                family.add_metric([state.directory], float(getattr(state, name)))
            yield family
        written = CounterMetricFamily(
            "kvtier_ssd_shard_written_bytes",
            "Bytes written since a directory's store was created.",
            labels=["directory"],
        )
        for state in states:
            written.add_metric([state.directory], state.written_bytes)
        yield written

    def _wear(self) -> Iterator[Metric]:
        now = wear(self._store)
        if now is None:
            return
        for name, meaning in _WEAR.items():
            # An unknown lifetime is no sample: 0 days would be an alarm.
            value = None
            if name != "lifetime_days" or now.HasField("lifetime_days"):
                value = getattr(now, name)
            yield GaugeMetricFamily(f"kvtier_ssd_{name}", meaning, value=value)


def _by_tier(name: str, meaning: str, **values: float) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=["tier"])
    for tier, value in values.items():
        family.add_metric([tier], value)
    return family


def _by_reason(name: str, meaning: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=["reason"])
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family


_SHARD = {
    "online": "1 while a directory is used; 0 while it fails or hangs.",
    "capacity_bytes": "Most that a directory may occupy.",
    "used_bytes": "Room that its blocks have.",
    "blocks": "Blocks in it, as of its last commit.",
    "queued_bytes": "Bytes on their way to it.",
    "read_bytes_per_s": "How fast its last reads were; 0: not measured yet.",
    "stored_bytes": "Stored forms of its blocks.",
    "block_bytes": "The same blocks as engines delivered them.",
}
_WEAR = {
    "written_today_bytes": "Block bytes written to the SSDs in 24 hours, since the start.",
    "budget_level": "How full the endurance budget is, 0 to 1; 1 without one.",
    "lifetime_days": "Days until the rated bytes are written, at today's rate.",
    "written_per_served_byte": "Bytes written to the SSDs over bytes served from them.",
}
_PLAIN = {
    "acquires": "Acquire calls.",
    "requested_blocks": "Blocks that prompts asked for: hits on all tiers plus misses.",
    "requested_tokens": "Tokens that prompts asked for.",
    "missed_blocks": "Blocks that prompts asked for and did not find.",
    "missed_tokens": "Tokens that prompts asked for and did not find.",
    "stored_blocks": "Blocks made visible by Commit.",
    "stored_bytes": "Bytes made visible by Commit.",
    "logical_bytes": "Bytes that requests' cached tokens would take, each request for itself: "
    "granted by Acquire, found present by Reserve, or made visible by Commit.",
    "skipped_blocks": "Leading blocks that Reserve found present.",
    "refused_blocks": "Blocks that Reserve had no room for.",
    "demotions_shed_blocks": "Blocks that left RAM unwritten because the SSD did not keep up.",
    "skipped_by_admission_blocks": "Blocks that left RAM unwritten because the policy said so.",
    "declined_blocks": "Blocks not loaded because computing them is faster.",
    "expired_blocks": "Blocks dropped for their age.",
    "ssd_served_bytes": "Block bytes served from the SSD.",
    "late_loads": "Loads that took longer than ssd_load_timeout_s, or waited for one that did.",
    "load_predicted_seconds": "Time that loads were predicted to take.",
    "load_actual_seconds": "Time that the same loads took.",
    "load_prediction_error_seconds": "Differences of the two, added up without their signs.",
    "scrubbed_blocks": "Blocks that the scrubber read and checked.",
    "scrubbed_bytes": "Stored bytes that it read.",
    "ssd_read_blocks": "Blocks loaded from the SSD.",
    "ssd_read_bytes": "Stored bytes read from the SSD.",
    "ssd_read_seconds": "Time with reads in flight, of each SSD directory.",
    "ssd_written_blocks": "Blocks written to the SSD.",
    "ssd_written_bytes": "Stored bytes written to the SSD.",
    "ssd_write_seconds": "Time with writes and their commits under way, of each SSD directory.",
    "ssd_write_failed_blocks": "Blocks whose write failed.",
    "leases_expired": "Leases that ended by their deadline.",
    "namespaces_dropped": "Namespaces dropped.",
    "dropped_blocks": "Blocks dropped by hash.",
    "kv_event_batches": "Batches of KV events published, heartbeats too.",
    "kv_event_blocks": "Blocks that they told, once a tier they came to or left.",
    "kv_event_overflows": "Times that too many changes waited and everything was compared anew.",
    "kv_event_replays": "Replays asked for by subscribers.",
    "kv_event_pictures": "Replays that began with everything, as the batches were not kept.",
}
