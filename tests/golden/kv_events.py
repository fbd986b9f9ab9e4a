"""The bytes of each event. Tests with the engine hold them against vLLM's own classes."""

from __future__ import annotations

from kvtier.events import AllRemoved, BlocksRemoved, BlocksStored, Event
from kvtier.types import BlockHash, NamespaceDigest, Tier


def key(number: int) -> BlockHash:
    """A hash that is easy to see."""
    return BlockHash(bytes([number]) * 32)


NAMESPACE = NamespaceDigest(b"n" * 32)
WALL_S = 1.5

_HEAD, _TAIL = b"\x93\xcb\x3f\xf8" + bytes(6), b"\xc0"
_STORED = b"\xa4type\xabBlockStored\xacblock_hashes"
_OURS = b"\xa9namespace\xc4 " + NAMESPACE


def _bin(number: int) -> bytes:
    return b"\xc4 " + key(number)


GOLDEN: dict[str, tuple[list[Event], bytes]] = {
    "heartbeat": ([], _HEAD + b"\x90" + _TAIL),
    "cleared": ([AllRemoved()], _HEAD + b"\x91\x81\xa4type\xb0AllBlocksCleared" + _TAIL),
    "first blocks in RAM": (
        [BlocksStored(Tier.HOST, NAMESPACE, 64, None, (key(1), key(2)))],
        _HEAD
        + b"\x91\x89"
        + _STORED
        + (b"\x92" + _bin(1) + _bin(2))
        + b"\xb1parent_block_hash\xc0\xa9token_ids\x90\xaablock_size\x40"
        + b"\xa7lora_id\xc0\xa6medium\xa3CPU\xa9lora_name\xc0"
        + _OURS
        + _TAIL,
    ),
    "a later block on SSD": (
        [BlocksStored(Tier.SSD, NAMESPACE, 16, key(2), (key(3),))],
        _HEAD
        + b"\x91\x89"
        + _STORED
        + (b"\x91" + _bin(3))
        + (b"\xb1parent_block_hash" + _bin(2))
        + b"\xa9token_ids\x90\xaablock_size\x10"
        + b"\xa7lora_id\xc0\xa6medium\xa7STORAGE\xa9lora_name\xc0"
        + _OURS
        + _TAIL,
    ),
    "removed": (
        [BlocksRemoved(Tier.SSD, NAMESPACE, (key(3),))],
        _HEAD
        + b"\x91\x84\xa4type\xacBlockRemoved\xacblock_hashes"
        + (b"\x91" + _bin(3))
        + b"\xa6medium\xa7STORAGE"
        + _OURS
        + _TAIL,
    ),
}
"""Name -> (events of one batch at WALL_S, its bytes)."""
