"""Events as vLLM's event publisher writes them, so that its subscribers read ours.

The format is that of vllm/distributed/kv_events.py as of vLLM 0.32: a batch is a msgpack array
[time, events, rank], an event a msgpack map whose "type" names it. Tests hold these bytes against
vLLM's own classes. `namespace` is ours: decoders skip what they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtier.events import AllRemoved, BlocksStored, Event
from kvtier.types import Tier

MEDIA = {Tier.HOST: "CPU", Tier.SSD: "STORAGE"}
"""vLLM's names of our tiers."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    """Consecutive blocks of a chain can be read from a medium.

    Attributes:
        block_hashes: 32 bytes each, as the daemon knows them: a block's hash XOR its namespace's
            digest (hashing.scoped), so that subscribers need not tell namespaces apart.
        parent_block_hash: Of the block before the first; None for a chain's first.
        token_ids: Empty: kvtier knows hashes only.
        block_size: Tokens of a block.
        medium: See MEDIA.
        namespace: 32 bytes; which model the blocks are of.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    namespace: bytes


class BlockRemoved(_Event):
    """Blocks can't be read from a medium any more; attributes as in BlockStored."""

    block_hashes: tuple[bytes, ...]
    medium: str
    namespace: bytes


class AllBlocksCleared(_Event):
    """Nothing can be read from any medium."""


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: None = None


_ENCODER = msgspec.msgpack.Encoder()


def encode(events: Sequence[Event], wall_s: float) -> bytes:
    """One batch; `wall_s` is now, in seconds since 1970."""
    return _ENCODER.encode(_Batch(wall_s, [_as_vllm(event) for event in events]))


def _as_vllm(event: Event) -> BlockStored | BlockRemoved | AllBlocksCleared:
    if isinstance(event, AllRemoved):
        return AllBlocksCleared()
    medium = MEDIA[event.tier]
    if isinstance(event, BlocksStored):
        return BlockStored(
            block_hashes=event.hashes,
            parent_block_hash=event.parent,
            token_ids=(),
            block_size=event.block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=None,
            namespace=event.namespace,
        )
    return BlockRemoved(event.hashes, medium, event.namespace)
