"""What stands in the tables of an SSD environment: pure encoding, no I/O.

All integers little-endian except table keys made of one integer, which are big-endian so that
they sort.

    header      b"format"       u32, FORMAT_VERSION
                b"created_by"   text
                b"live_bytes"   u64, stored bytes of all rows
                b"probe"        PROBE, and b"probe_at" its u64 file offset (see ssd.py)
    namespaces  digest       -> u64 generation, canonical JSON of the spec (hashing.py)
    rows        block hash   -> PLACE, HEADER without the hash, checksum
    values      u64 id       -> payloads one after the other, at least one page
    shares      u64 id       -> u32 blocks alive in a value that holds several
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvtier.codec.base import Bytes
from kvtier.errors import CorruptBlock, FormatError
from kvtier.hashing import canonical_spec, namespace_digest
from kvtier.tier.base import BlockMeta, NamespaceRow, PreparedBlock
from kvtier.types import (
    HASH_BYTES,
    BlockHash,
    Component,
    Loss,
    NamespaceDigest,
    NamespaceSpec,
    RopeSpec,
)

FORMAT_VERSION = 1
PROBE = b"kvtier probe page".ljust(4096, b".")
SHARED_VALUE_BYTES = 1 << 20
"""Stored blocks below this share a value: LMDB's search for room is slow for small ones."""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
_PLACE = struct.Struct("<QQB")  # Value id, file offset, shared.
_HEADER = struct.Struct("<32sQQBBBBIQq32s32s")
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Where a block lies and what it must be.

    Attributes:
        meta: Its identity.
        value_id: Key in the values table.
        offset: Of its first stored byte in the data file.
        shared: The value holds several blocks.
        stored_bytes: Length of its stored form.
        size_bytes: Length of the block.
        codec_id: Codec of the stored form.
        codec_version: Version of the stored form.
        loss: Loss of the stored form.
        checksum: See checksum().
    """

    meta: BlockMeta
    value_id: int
    offset: int
    shared: bool
    stored_bytes: int
    size_bytes: int
    codec_id: int
    codec_version: int
    loss: Loss
    checksum: bytes


def value_key(value_id: int) -> bytes:
    """Key of a value; ids grow, so that new values are appended."""
    return value_id.to_bytes(8, "big")


def _header(block: Row | PreparedBlock, stored_bytes: int) -> bytes:
    meta = block.meta
    return _HEADER.pack(
        meta.hash,
        block.size_bytes,
        stored_bytes,
        block.codec_id,
        block.codec_version,
        block.loss,
        meta.parent is not None,
        meta.depth,
        meta.generation,
        meta.stamp,
        meta.namespace,
        meta.parent or bytes(HASH_BYTES),
    )


def checksum(block: Row | PreparedBlock, payload: Bytes) -> bytes:
    """xxh3-128 over everything a row says of the block but its place, and over its payload."""
    state = xxhash.xxh3_128(_header(block, payload.size))
    state.update(payload.data)
    return state.digest()


def pack_row(block: PreparedBlock, value_id: int, offset: int, *, shared: bool) -> bytes:
    """The row of a block whose payload starts at `offset` of the data file."""
    place = _PLACE.pack(value_id, offset, shared)
    return place + _header(block, block.payload.size)[HASH_BYTES:] + block.checksum


def parse_row(key: bytes, data: bytes) -> Row:
    """Undo pack_row.

    Raises:
        CorruptBlock: not a row; the checksum, which needs the payload, is not tried.
    """
    end = len(data) - _CHECKSUM_BYTES
    try:
        value_id, offset, shared = _PLACE.unpack_from(data)
        fields = _HEADER.unpack(key + data[_PLACE.size : end])
        _, size, stored, codec, version, loss, chained, depth, generation, stamp, digest, up = (
            fields
        )
        parent = BlockHash(up) if chained else None
        meta = BlockMeta(BlockHash(key), parent, depth, NamespaceDigest(digest), generation, stamp)
        return Row(
            meta,
            value_id,
            offset,
            bool(shared),
            stored,
            size,
            codec,
            version,
            Loss(loss),
            data[end:],
        )
    except (struct.error, ValueError) as error:
        raise CorruptBlock(f"block {key.hex()}: no row of this format: {error}") from error


def pack_namespace(row: NamespaceRow) -> bytes:
    """A namespace's value; its digest is the key."""
    return U64.pack(row.generation) + canonical_spec(row.spec)


def parse_namespace(key: bytes, data: bytes) -> NamespaceRow:
    """Undo pack_namespace.

    Raises:
        FormatError: not a namespace, or not the one the key is the digest of.
    """
    try:
        (generation,) = U64.unpack_from(data)
        spec = _spec(data[U64.size :])
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"namespace {key.hex()}: {error!r}") from error
    if namespace_digest(spec) != key:
        raise FormatError(f"namespace {key.hex()}: the stored spec has another digest")
    return NamespaceRow(NamespaceDigest(key), spec, generation)


def _spec(canonical: bytes) -> NamespaceSpec:
    value = json.loads(canonical)
    components = tuple(
        Component(name, dtype, tuple(shape)) for name, dtype, shape in value.pop("components")
    )
    rope = value.pop("rope")
    parameters = tuple((name, parameter) for name, parameter in rope.pop("parameters"))
    return NamespaceSpec(
        components=components, rope=RopeSpec(parameters=parameters, **rope), **value
    )


def share_values(writes: Sequence[PreparedBlock]) -> list[list[PreparedBlock]]:
    """Group `writes`, in order, so that a value has SHARED_VALUE_BYTES where the batch allows."""
    groups: list[list[PreparedBlock]] = []
    small: list[PreparedBlock] = []
    small_bytes = 0
    for block in writes:
        if block.payload.size >= SHARED_VALUE_BYTES:
            groups.append([block])
            continue
        small.append(block)
        small_bytes += block.payload.size
        if small_bytes >= SHARED_VALUE_BYTES:
            groups.append(small)
            small, small_bytes = [], 0
    return [*groups, small] if small else groups
