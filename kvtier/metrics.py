"""Counters of the core, as plain numbers. The daemon exports them; nothing here knows how."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the daemon started.

    Hit rates are counted once a prompt, at Acquire or at RecordHits: requested = hit on host + hit
    on SSD + missed, in blocks.
    """

    acquires: int = 0
    requested_blocks: int = 0
    requested_tokens: int = 0
    host_hit_blocks: int = 0
    host_hit_tokens: int = 0
    ssd_hit_blocks: int = 0
    ssd_hit_tokens: int = 0
    missed_blocks: int = 0
    missed_tokens: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    logical_bytes: int = 0
    skipped_blocks: int = 0
    refused_blocks: int = 0
    host_evicted_blocks: int = 0
    host_evicted_bytes: int = 0
    ssd_evicted_blocks: int = 0
    ssd_evicted_bytes: int = 0
    demotions_shed_blocks: int = 0
    skipped_by_admission_blocks: int = 0
    declined_blocks: int = 0
    expired_blocks: int = 0
    ssd_read_blocks: int = 0
    ssd_read_bytes: int = 0
    ssd_read_seconds: float = 0.0
    ssd_served_bytes: int = 0
    late_loads: int = 0
    load_predicted_seconds: float = 0.0
    load_actual_seconds: float = 0.0
    load_prediction_error_seconds: float = 0.0
    scrubbed_blocks: int = 0
    scrubbed_bytes: int = 0
    ssd_written_blocks: int = 0
    ssd_written_bytes: int = 0
    ssd_write_seconds: float = 0.0
    ssd_write_failed_blocks: int = 0
    leases_expired: int = 0
    namespaces_dropped: int = 0
    dropped_blocks: int = 0
    kv_event_batches: int = 0
    kv_event_blocks: int = 0
    kv_event_overflows: int = 0
    kv_event_replays: int = 0
    kv_event_pictures: int = 0
    load_failed_blocks: dict[str, int] = field(default_factory=dict)
    corrupt_blocks: dict[str, int] = field(default_factory=dict)
