from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class Loss(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOSS_EXACT: _ClassVar[Loss]
    LOSS_BOUNDED: _ClassVar[Loss]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_NONE: _ClassVar[Reason]
    REASON_FULL: _ClassVar[Reason]
    REASON_ORPHAN: _ClassVar[Reason]
    REASON_LEASES: _ClassVar[Reason]
    REASON_TOO_LARGE: _ClassVar[Reason]
    REASON_DRAINING: _ClassVar[Reason]
    REASON_SLOW: _ClassVar[Reason]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_HOST: Tier
TIER_SSD: Tier
TIER_REMOTE: Tier
LOSS_EXACT: Loss
LOSS_BOUNDED: Loss
REASON_NONE: Reason
REASON_FULL: Reason
REASON_ORPHAN: Reason
REASON_LEASES: Reason
REASON_TOO_LARGE: Reason
REASON_DRAINING: Reason
REASON_SLOW: Reason

class SessionRequest(_message.Message):
    __slots__ = ("hello", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    heartbeat: Heartbeat
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("wire_version_min", "wire_version_max", "owner_group", "client_name")
    WIRE_VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    OWNER_GROUP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    wire_version_min: int
    wire_version_max: int
    owner_group: bytes
    client_name: str
    def __init__(self, wire_version_min: _Optional[int] = ..., wire_version_max: _Optional[int] = ..., owner_group: _Optional[bytes] = ..., client_name: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("wire_version", "session_id", "epoch", "arena_path", "arena_bytes", "heartbeat_ms", "session_timeout_ms", "lock_dir")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LOCK_DIR_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    session_id: bytes
    epoch: bytes
    arena_path: str
    arena_bytes: int
    heartbeat_ms: int
    session_timeout_ms: int
    lock_dir: str
    def __init__(self, wire_version: _Optional[int] = ..., session_id: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., arena_path: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., session_timeout_ms: _Optional[int] = ..., lock_dir: _Optional[str] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("session_id", "digest", "spec", "max_age_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_S_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    digest: bytes
    spec: bytes
    max_age_s: int
    def __init__(self, session_id: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., spec: _Optional[bytes] = ..., max_age_s: _Optional[int] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("generation", "block_bytes")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    block_bytes: int
    def __init__(self, generation: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "hashes", "allowed_loss")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_LOSS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    hashes: bytes
    allowed_loss: Loss
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., allowed_loss: _Optional[_Union[Loss, str]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("blocks", "host_blocks", "ssd_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    host_blocks: int
    ssd_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "hashes", "request_id", "ttl_ms", "allowed_loss", "prefill_tokens_per_s", "recorded")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_LOSS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    hashes: bytes
    request_id: bytes
    ttl_ms: int
    allowed_loss: Loss
    prefill_tokens_per_s: float
    recorded: bool
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., request_id: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., allowed_loss: _Optional[_Union[Loss, str]] = ..., prefill_tokens_per_s: _Optional[float] = ..., recorded: bool = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "blocks", "ready_blocks", "ssd_blocks", "block_bytes", "offsets", "slot", "slot_generation", "reason", "loss")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: int
    ready_blocks: int
    ssd_blocks: int
    block_bytes: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    slot_generation: int
    reason: Reason
    loss: Loss
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[int] = ..., ready_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., slot_generation: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., loss: _Optional[_Union[Loss, str]] = ...) -> None: ...

class RecordHitsRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "host_blocks", "ssd_blocks", "missed_blocks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SSD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    host_blocks: int
    ssd_blocks: int
    missed_blocks: int
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., host_blocks: _Optional[int] = ..., ssd_blocks: _Optional[int] = ..., missed_blocks: _Optional[int] = ...) -> None: ...

class RecordHitsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "blocks", "timeout_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    blocks: int
    timeout_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., blocks: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class WaitResponse(_message.Message):
    __slots__ = ("ready_blocks", "usable_blocks")
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ready_blocks: int
    usable_blocks: int
    def __init__(self, ready_blocks: _Optional[int] = ..., usable_blocks: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "parent", "hashes", "ttl_ms", "allowed_loss", "wait_ms", "loss")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_LOSS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    parent: bytes
    hashes: bytes
    ttl_ms: int
    allowed_loss: Loss
    wait_ms: int
    loss: Loss
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., allowed_loss: _Optional[_Union[Loss, str]] = ..., wait_ms: _Optional[int] = ..., loss: _Optional[_Union[Loss, str]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease_id", "indices", "offsets", "block_bytes", "reason", "present_blocks", "covered_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COVERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    block_bytes: int
    reason: Reason
    present_blocks: int
    covered_blocks: int
    def __init__(self, lease_id: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., block_bytes: _Optional[int] = ..., reason: _Optional[_Union[Reason, str]] = ..., present_blocks: _Optional[int] = ..., covered_blocks: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "tail")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    tail: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., tail: _Optional[bytes] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("touched_blocks",)
    TOUCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    touched_blocks: int
    def __init__(self, touched_blocks: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "hashes", "timeout_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    hashes: bytes
    timeout_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("durable", "durable_blocks", "durable_prefix_blocks")
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DURABLE_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    durable: bytes
    durable_blocks: int
    durable_prefix_blocks: int
    def __init__(self, durable: _Optional[bytes] = ..., durable_blocks: _Optional[int] = ..., durable_prefix_blocks: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "blocks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    blocks: int
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StoreChunk(_message.Message):
    __slots__ = ("session_id", "lease_id", "data")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_id: int
    data: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "hashes", "ttl_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    hashes: bytes
    ttl_ms: int
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin_id", "blocks")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pin_id: bytes
    blocks: int
    def __init__(self, pin_id: _Optional[bytes] = ..., blocks: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("session_id", "pin_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    pin_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., pin_id: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("session_id", "namespace", "hashes", "whole_namespace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    namespace: bytes
    hashes: bytes
    whole_namespace: bool
    def __init__(self, session_id: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., whole_namespace: bool = ...) -> None: ...

class DropResponse(_message.Message):
    __slots__ = ("dropped_blocks", "generation")
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: int
    generation: int
    def __init__(self, dropped_blocks: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "epoch", "uptime_s", "tiers", "sessions", "read_leases", "write_leases", "pins", "pinned_bytes", "quarantined_bytes", "namespaces", "counters", "shards", "ssd_wear")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    READ_LEASES_FIELD_NUMBER: _ClassVar[int]
    WRITE_LEASES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SSD_WEAR_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: bytes
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    sessions: int
    read_leases: int
    write_leases: int
    pins: int
    pinned_bytes: int
    quarantined_bytes: int
    namespaces: int
    counters: _containers.ScalarMap[str, float]
    shards: _containers.RepeatedCompositeFieldContainer[ShardStats]
    ssd_wear: SsdWear
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[bytes] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., sessions: _Optional[int] = ..., read_leases: _Optional[int] = ..., write_leases: _Optional[int] = ..., pins: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., namespaces: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., shards: _Optional[_Iterable[_Union[ShardStats, _Mapping]]] = ..., ssd_wear: _Optional[_Union[SsdWear, _Mapping]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "blocks", "healthy")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    healthy: bool
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., healthy: bool = ...) -> None: ...

class ShardStats(_message.Message):
    __slots__ = ("directory", "online", "capacity_bytes", "used_bytes", "blocks", "queued_bytes", "written_bytes", "read_bytes_per_s", "stored_bytes", "block_bytes")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ONLINE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, directory: _Optional[str] = ..., online: bool = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., stored_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class SsdWear(_message.Message):
    __slots__ = ("written_today_bytes", "budget_level", "lifetime_days", "written_per_served_byte")
    WRITTEN_TODAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_LEVEL_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_DAYS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_PER_SERVED_BYTE_FIELD_NUMBER: _ClassVar[int]
    written_today_bytes: int
    budget_level: float
    lifetime_days: float
    written_per_served_byte: float
    def __init__(self, written_today_bytes: _Optional[int] = ..., budget_level: _Optional[float] = ..., lifetime_days: _Optional[float] = ..., written_per_served_byte: _Optional[float] = ...) -> None: ...
