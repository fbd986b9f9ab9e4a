"""What stands in an SSD directory: format version 2. Pure encoding, no I/O.

    kvtier.lock          flock of the owner
    kvtier.boot          how the store was left (ssd_directory.py)
    env-NNN/data.mdb     an LMDB environment of a fixed size: exactly header.map_bytes long, sparse
    quarantine-NNN/      an environment that was found damaged

An environment holds *slabs*: large LMDB values that are put once, as zeros, and never deleted, so
that LMDB never moves them. The payloads of blocks lie in there, on pages that kvtier gives out
itself and writes and reads around LMDB. A page is 4096 bytes, counted from the start of data.mdb.

All integers are little-endian except keys made of one integer, which are big-endian so that they
sort. Tables:

    header      b"format"     u32 FORMAT_VERSION, u32 crc32 of those four bytes
                b"created_by" text
                b"identity"   16 random bytes
                b"map_bytes"  u64, length of the file
                b"account"    i64 newest stamp written, u64 bytes written (ACCOUNT)
    namespaces  digest     -> u64 generation, canonical JSON of the spec (hashing.py)
    slabs       u32 number -> u32 first page, u32 pages: its room
    memory      u32 number -> the slab: slab_head(), padded to the end of its first LMDB page; room
    rows        block hash -> place, header without the hash, checksum: ROW_BYTES, always
    pieces      block hash -> u32 page, u32 pages, once a piece: for blocks in more than one

A row's place is its stamp, page and pages of its first piece, the number of its pieces, and the
crc32 of the hash and all its pieces. Its checksum is xxh3-128 over the header, which begins with
the hash, and the payload: neither stamp nor place are in there, they may change.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codec.base import Bytes
from kvtier.errors import CorruptBlock, FormatError, InvalidRequest
from kvtier.extents import EXTENT_ALIGN_BYTES, aligned
from kvtier.hashing import canonical_spec, namespace_digest, parse_spec
from kvtier.tier.base import (
    STORED_BLOCK,
    BlockMeta,
    NamespaceRow,
    Piece,
    PreparedBlock,
    StoredBlocks,
    WrittenBlock,
)
from kvtier.types import HASH_BYTES, BlockHash, Loss, NamespaceDigest

FORMAT_VERSION = 2
PAGE_BYTES = EXTENT_ALIGN_BYTES
MOST_PIECES = 32
"""Of one block. Each is an I/O of its own."""

TABLES = (b"header", b"namespaces", b"slabs", b"memory", b"rows", b"pieces")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
ACCOUNT = struct.Struct("<qQ")
RUN = struct.Struct("<II")
_FORMAT = struct.Struct("<II")
_STAMP = struct.Struct("<q")
_PLACE = struct.Struct("<qIIBI")
_HEADER = struct.Struct("<32sQQBBBBIQI32s32s")
_STORED_BYTES = struct.Struct("<Q")
_STORED_BYTES_AT = _PLACE.size + 8
_CHECKSUM_BYTES = 16
_SLAB_MAGIC = b"kvtier slab"

ROW_WITH_KEY = np.dtype(
    [
        ("hash", "V32"),
        ("stamp", "<i8"),
        ("page", "<u4"),
        ("pages", "<u4"),
        ("pieces", "u1"),
        ("place_crc", "<u4"),
        ("size_bytes", "<u8"),
        ("stored_bytes", "<u8"),
        ("codec_id", "u1"),
        ("codec_version", "u1"),
        ("loss", "u1"),
        ("chained", "u1"),
        ("depth", "<u4"),
        ("generation", "<u8"),
        ("born_s", "<u4"),
        ("namespace", "V32"),
        ("parent", "V32"),
        ("checksum", "V16"),
    ]
)
"""A key of the rows table with its value behind it, as one array of many."""

ROW_BYTES = ROW_WITH_KEY.itemsize - HASH_BYTES
Rows = npt.NDArray[np.void]
"""(rows,) ROW_WITH_KEY."""


@dataclass(frozen=True, slots=True)
class Row:
    """Where a block lies and what it must be.

    Attributes:
        meta: Its identity.
        pieces: Where its stored form lies, in order.
        stored_bytes: Length of its stored form.
        size_bytes: Length of the block.
        codec_id: Codec of the stored form.
        codec_version: Version of the stored form.
        loss: Loss of the stored form.
        checksum: See checksum().
    """

    meta: BlockMeta
    pieces: tuple[Piece, ...]
    stored_bytes: int
    size_bytes: int
    codec_id: int
    codec_version: int
    loss: Loss
    checksum: bytes


def number_key(number: int) -> bytes:
    """Key of a slab."""
    return number.to_bytes(4, "big")


def slab_head(identity: bytes, number: int) -> bytes:
    """How a slab begins: it shows that LMDB still has its pages where they were put."""
    return _SLAB_MAGIC + identity + number_key(number)


def pack_format() -> bytes:
    """The header's b"format"."""
    version = U32.pack(FORMAT_VERSION)
    return version + U32.pack(crc32(version))


def parse_format(data: bytes) -> int | None:
    """The version; None if it is damaged."""
    if len(data) == U32.size:  # Version 1 had no checksum.
        return 1 if data == U32.pack(1) else None
    if len(data) != _FORMAT.size:
        return None
    version, crc = _FORMAT.unpack(data)
    return int(version) if crc == crc32(data[: U32.size]) else None


# ---- rows


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
        meta.born_s,
        meta.namespace,
        meta.parent or bytes(HASH_BYTES),
    )


def checksum(block: Row | PreparedBlock, payload: Bytes) -> bytes:
    """xxh3-128 over what a row says of the block but its stamp and place, and over its payload."""
    state = xxhash.xxh3_128(_header(block, payload.size))
    state.update(payload.data)
    return state.digest()


def pack_pieces(pieces: Iterable[Piece]) -> bytes:
    """The pieces table's value."""
    return b"".join(
        RUN.pack(piece.offset_bytes // PAGE_BYTES, piece.size_bytes // PAGE_BYTES)
        for piece in pieces
    )


def pack_row(written: WrittenBlock) -> tuple[bytes, bytes]:
    """The rows table's value, and the pieces table's: empty if the block is in one piece."""
    block, runs = written.block, pack_pieces(written.pieces)
    key = block.meta.hash
    page, pages = RUN.unpack_from(runs)
    place = _PLACE.pack(block.meta.stamp, page, pages, len(written.pieces), crc32(runs, crc32(key)))
    row = place + _header(block, written.stored_bytes)[HASH_BYTES:] + block.checksum
    return row, runs if len(written.pieces) > 1 else b""


def restamped(data: bytes, stamp: int) -> bytes:
    """A row with another stamp."""
    return _STAMP.pack(stamp) + data[_STAMP.size :]


def in_pieces(data: bytes) -> bool:
    """Whether a row's place continues in the pieces table."""
    return len(data) == ROW_BYTES and data[_PLACE.size - U32.size - 1] > 1


def parse_place(key: bytes, data: bytes, runs: bytes) -> tuple[Piece, ...]:
    """Where a block lies, by its row and what the pieces table has of it.

    Raises:
        CorruptBlock: the place is damaged.
    """
    if len(data) != ROW_BYTES:
        raise CorruptBlock(f"block {key.hex()}: a row of {len(data)} bytes", "row")
    _, page, pages, count, crc = _PLACE.unpack_from(data)
    if count == 1:
        runs = RUN.pack(page, pages)
    if len(runs) != count * RUN.size or crc != crc32(runs, crc32(key)):
        raise CorruptBlock(f"block {key.hex()}: its place is damaged", "row")
    return tuple(
        Piece(page * PAGE_BYTES, pages * PAGE_BYTES) for page, pages in RUN.iter_unpack(runs)
    )


def stored_bytes_of(data: bytes) -> int:
    """A row's stored bytes; 0 if it is no row."""
    if len(data) != ROW_BYTES:
        return 0
    return int(_STORED_BYTES.unpack_from(data, _STORED_BYTES_AT)[0])


def parse_row(key: bytes, data: bytes, runs: bytes) -> Row:
    """Undo pack_row.

    Raises:
        CorruptBlock: not a row; the checksum, which needs the payload, is not tried.
    """
    pieces = parse_place(key, data, runs)
    (stamp,) = _STAMP.unpack_from(data)
    end = len(data) - _CHECKSUM_BYTES
    _, size, stored, codec, version, loss, chained, depth, generation, born, digest, up = (
        _HEADER.unpack(key + data[_PLACE.size : end])
    )
    if loss not in (Loss.EXACT, Loss.BOUNDED):
        raise CorruptBlock(f"block {key.hex()}: no loss is {loss}", "row")
    if not 0 < stored <= aligned(stored) == sum(piece.size_bytes for piece in pieces):
        raise CorruptBlock(f"block {key.hex()}: its pieces do not hold {stored} bytes", "row")
    parent = BlockHash(up) if chained else None
    meta = BlockMeta(
        BlockHash(key), parent, depth, NamespaceDigest(digest), generation, stamp, born
    )
    return Row(meta, pieces, stored, size, codec, version, Loss(loss), data[end:])


def stored_blocks(rows: Rows, segment: int) -> StoredBlocks:
    """What scan() says of them."""
    blocks = np.empty(len(rows), dtype=STORED_BLOCK)
    names = STORED_BLOCK.names
    assert names is not None
    for name in names:
        if name != "segment":
            blocks[name] = rows[name]
    blocks["segment"] = segment
    return blocks


# ---- namespaces


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
        spec = parse_spec(data[U64.size :])
    except (struct.error, InvalidRequest) as error:
        raise FormatError(f"namespace {key.hex()}: {error}") from error
    if namespace_digest(spec) != key:
        raise FormatError(f"namespace {key.hex()}: the stored spec has another digest")
    return NamespaceRow(NamespaceDigest(key), spec, generation)
