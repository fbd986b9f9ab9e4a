"""Reading a block back: its bytes, whether they are what was stored, and their decoding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtier.codec import RAW, codec_by_id
from kvtier.codec.base import Bytes
from kvtier.errors import CorruptBlock
from kvtier.tier import ssd_format as fmt
from kvtier.tier.base import NamespaceRow, Wanted
from kvtier.tier.ssd_env import Environment
from kvtier.tier.ssd_file import BlockIo, medium_errors
from kvtier.types import NamespaceDigest, NamespaceSpec


def read_block(
    env: Environment,
    row: fmt.Row,
    known: Mapping[NamespaceDigest, NamespaceRow],
    out: Bytes,
    io: BlockIo,
) -> None:
    """Read, verify and decode a block, all of it or raise.

    Args:
        env: Its environment, held.
        row: The block's, as env.find() gave it.
        known: The namespaces.
        out: (block bytes,) uint8; undefined after an error.
        io: For memory of this thread.

    Raises:
        CorruptBlock: these are not the bytes that were stored.
        TierUnavailable: the medium failed.
    """
    codec = codec_by_id(row.codec_id, row.codec_version)
    spec = _spec(row, known, out.size)
    stored = out if codec is RAW else io.buffer(row.stored_bytes)
    with medium_errors(env.path):
        env.file.read(row.pieces, stored)
    if fmt.checksum(row, stored) != row.checksum:
        raise _corrupt(row, "the checksum does not match", "checksum")
    if codec is not RAW:
        codec.decode_into(stored, spec, out)


def check_wanted(row: fmt.Row, wanted: Wanted) -> None:
    """Raise CorruptBlock if the row of a name is another block's than its reader means."""
    meta = row.meta
    if (meta.namespace, meta.generation) != (wanted.namespace, wanted.generation):
        raise _corrupt(row, "it is another namespace's, or of another generation", "absent")
    if row.loss > wanted.loss:
        raise _corrupt(row, "it has lost more than its reader allows", "absent")


def verify_block(
    env: Environment,
    row: fmt.Row,
    known: Mapping[NamespaceDigest, NamespaceRow],
    io: BlockIo,
) -> None:
    """read_block() into memory of its own, whose size the row has no say in."""
    namespace = known.get(row.meta.namespace)
    size_bytes = 0 if namespace is None else namespace.spec.block_bytes
    read_block(env, row, known, np.empty(size_bytes, dtype=np.uint8), io)


def _spec(
    row: fmt.Row, known: Mapping[NamespaceDigest, NamespaceRow], out_bytes: int
) -> NamespaceSpec:
    """The layout of the block, once its lengths agree with it."""
    namespace = known.get(row.meta.namespace)
    if namespace is None:
        raise _corrupt(row, "its namespace is not known", "layout")
    if not namespace.spec.block_bytes == row.size_bytes == out_bytes:
        raise _corrupt(row, f"{row.size_bytes} bytes are another layout", "layout")
    raw = row.codec_id == RAW.id
    if row.stored_bytes > out_bytes or (raw and row.stored_bytes < out_bytes):
        raise _corrupt(row, f"a stored length of {row.stored_bytes} bytes", "layout")
    return namespace.spec


def _corrupt(row: fmt.Row, what: str, reason: str) -> CorruptBlock:
    return CorruptBlock(f"block {row.meta.hash.hex()}: {what}", reason)
