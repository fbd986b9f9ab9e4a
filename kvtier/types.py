"""The nouns of kvtier, as plain values.

Standard library only, no behaviour beyond validation: every other module may import this one.
Words are those of the README's glossary: namespace, block, tier, lease, session, epoch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from math import prod
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""32 bytes naming one block: its namespace, its whole token prefix and its extra keys."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes: sha256 of a namespace's canonical encoding (see hashing.py)."""

GroupId = NewType("GroupId", bytes)
"""16 random bytes shared by the processes of one engine; owner of their leases."""

HASH_BYTES = 32
GROUP_BYTES = 16
DEFAULT_BLOCK_TOKENS = 64
MAX_BLOCKS_PER_CALL = 16_384
"""Hashes one request may carry: 1 M tokens in 64-token blocks, 512 KiB on the wire."""
MAX_ACQUIRE_TIMEOUT_MS = 60_000
"""No engine waits longer for a first token, and gRPC raises where a deadline overflows."""

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3": 1,
    "uint8": 1,
}


class Tier(enum.StrEnum):
    """A medium that holds bytes. It never decides what to hold."""

    HBM = "hbm"
    HOST = "host"
    SSD = "ssd"
    REMOTE = "remote"


class Loss(enum.IntEnum):
    """How far stored bytes may differ from those the engine delivered.

    Not part of a block's identity: it travels with Acquire and Reserve, and a copy whose loss
    exceeds what a request allows is not a hit for it.
    """

    EXACT = 0
    BOUNDED = 1


class WritePolicy(enum.StrEnum):
    """When a block that is in RAM only goes to the SSD. Never twice, whatever the policy.

    LAZY: when the writer is idle, when unwritten blocks fill half the RAM, or when it leaves RAM.
    THROUGH: as soon as it is stored.
    ON_EVICT: when it leaves RAM.
    SECOND_TOUCH: as LAZY, but only once it is used again, or stored again after it was evicted.
    """

    LAZY = "lazy"
    THROUGH = "through"
    ON_EVICT = "on_evict"
    SECOND_TOUCH = "second_touch"


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of a block, C-contiguous, shaped for a whole block.

    Attributes:
        name: What it is, e.g. "latent_rope" (MLA) or "indexer_key". Lossy codecs touch only what
            is "latent" or begins with "latent_" or "latent."; the rest is stored without loss.
        dtype: A key of DTYPE_BYTES.
        shape: For MLA (layers, block_tokens, kv_lora_rank + rope width).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a component needs a name")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(sorted(DTYPE_BYTES))
            raise ValueError(
                f"component {self.name!r}: unknown dtype {self.dtype!r} (known: {known})"
            )
        if not self.shape or any(n <= 0 for n in self.shape):
            raise ValueError(f"component {self.name!r}: shape {self.shape} must be positive")

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of this component in one block."""
        return prod(self.shape) * self.itemsize_bytes


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How the rotary part of the cached keys was produced.

    Attributes:
        layout: "interleaved" (pairs side by side: DeepSeek, vLLM, HF V2), "half" (evens then
            odds: HF V3) or "none".
        width: Elements at the end of each record that carry the rotated key.
        parameters: Sorted (name, JSON value) pairs: theta, scaling type and factors.
    """

    layout: str = "none"
    width: int = 0
    parameters: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.layout not in ("interleaved", "half", "none"):
            raise ValueError(f"unknown rope layout {self.layout!r} (interleaved, half, none)")
        if self.width < 0:
            raise ValueError(f"rope width {self.width} is negative")
        if list(self.parameters) != sorted(self.parameters):
            raise ValueError("rope parameters must be sorted by name")


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything of a model that must be equal for cached bytes to be exchangeable.

    Per-request identity (LoRA content, cache salt) enters the root hash instead.

    Attributes:
        model_id: The model's public name, e.g. "deepseek-ai/DeepSeek-V3".
        weights_revision: Content digest of the weight files (hashing.weights_revision).
        components: The tensors of a block, in the order of their bytes.
        rope: Rotary layout and parameters.
        block_tokens: Tokens a block.
        tenant: Isolation between users of one daemon; empty for none.
        hash_scheme: How block hashes are computed; "kvtier-sha256-v1" is hashing.py's.
    """

    model_id: str
    weights_revision: str
    components: tuple[Component, ...]
    rope: RopeSpec = field(default_factory=RopeSpec)
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    tenant: str = ""
    hash_scheme: str = "kvtier-sha256-v1"

    def __post_init__(self) -> None:
        if not self.model_id:
            raise ValueError("a namespace needs a model id")
        if not self.weights_revision:
            raise ValueError("a namespace needs a weights revision (see hashing.weights_revision)")
        if not self.components:
            raise ValueError("a namespace needs at least one component")
        if self.block_tokens <= 0:
            raise ValueError(f"block_tokens {self.block_tokens} must be positive")
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise ValueError(f"component names must differ: {names}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the components one after the other, no padding."""
        return sum(component.size_bytes for component in self.components)


class Refusal(enum.Enum):
    """Why a grant is shorter than what was asked."""

    NONE = enum.auto()
    FULL = enum.auto()
    ORPHAN = enum.auto()
    LEASES = enum.auto()
    TOO_LARGE = enum.auto()
    DRAINING = enum.auto()
    SLOW = enum.auto()


class MissReason(enum.StrEnum):
    """Why a call gave the engine nothing. Every miss is counted under exactly one."""

    NOT_CACHED = "not_cached"
    NO_SESSION = "no_session"
    TIMEOUT = "timeout"
    BREAKER_OPEN = "breaker_open"
    RPC_ERROR = "rpc_error"
    FORKED = "forked"
    LEASE_LOST = "lease_lost"
    LOAD_FAILED = "load_failed"
    FULL = "full"
    REFUSED = "refused"
    SLOW = "slow"
    CLOSED = "closed"
