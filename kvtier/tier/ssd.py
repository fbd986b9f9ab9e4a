"""Blocks on an SSD, in LMDB: the tree is LMDB's, the bytes are read around it.

A read is one lookup and one preadv (ssd_env.py); its transaction stays open until the bytes are
there, so that no commit can reuse their pages.

A page is reusable only some commits after it was freed, and a large value needs pages in a row.
So usage().limit_bytes stays below the map by a share for holes and by several batches.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lmdb
import lmdb.verify
import numpy as np

from kvtier.codec import RAW, codec_by_id, encode_block
from kvtier.codec.base import Bytes, Codec
from kvtier.codec.lossless import Lossless
from kvtier.errors import CapacityError, CorruptBlock, FormatError, TierFull, TierUnavailable
from kvtier.tier import ssd_format as fmt
from kvtier.tier.base import (
    BlockMeta,
    BlockTier,
    NamespaceRow,
    PreparedBlock,
    StoredBlock,
    TierUsage,
)
from kvtier.tier.ssd_directory import StoreDirectory
from kvtier.tier.ssd_env import START_EMPTY, Environment
from kvtier.types import BlockHash, Loss, NamespaceSpec

MAX_BATCH_BYTES = 32 << 20
_RESERVED_BATCHES = 3
_HOLES = 8
"""One part in so many of the map is left to holes that no value fits."""
_LEAST_BATCHES = 8
_LOSSLESS = Lossless()
_NOTHING = np.empty(0, dtype=np.uint8)


class SsdTier(BlockTier):
    """One directory on one SSD.

    With durability "full" a batch is on the medium when commit() returns. With "relaxed" it
    survives the process but not a power cut, which may cost the whole store; that is noticed at
    the next open, and what is still readable is checked like everything else.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        codec: Codec,
        durability: Literal["relaxed", "full"],
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        """Open the store, or create it.

        Args:
            directory: Its home, for one daemon at a time; created 0700.
            capacity_bytes: Bound of `du` of the directory.
            codec: Stored form of new blocks; those already there keep theirs.
            durability: When a commit is safe from a power cut.
            max_batch_bytes: The most payload one commit() may carry.

        Raises:
            AddressInUse: a live daemon owns the directory.
            CapacityError: too small for the batches, too large for the file system, or smaller
                than what the store already occupies.
            FormatError: not ours, of a newer version, or damaged.
            TierUnavailable: the medium failed.
        """
        self.directory = directory
        self.max_batch_bytes = max_batch_bytes
        self._codec = codec
        self._scratch = threading.local()
        map_bytes = _map_bytes(capacity_bytes, max_batch_bytes)
        hole_bytes = map_bytes // _HOLES
        self._limit_bytes = map_bytes - hole_bytes - _RESERVED_BATCHES * max_batch_bytes
        with self._medium(), ExitStack() as stack:
            home = StoreDirectory(directory)
            stack.callback(home.close)
            home.check_space(map_bytes)
            if home.lost_power():
                _verify_tree(home.env_path)
            self._env = Environment(home.env_path, map_bytes=map_bytes, sync=durability == "full")
            stack.callback(self._env.close)
            self._load()
            self._env.lmdb.sync(True)  # What an earlier, relaxed owner left in the page cache.
            if durability == "relaxed":
                home.mark_open()
            else:
                home.mark_clean()
            stack.callback(self._finish, home)
            self._closing = stack.pop_all()

    def _finish(self, home: StoreDirectory) -> None:
        self._env.lmdb.sync(True)
        home.mark_clean()

    def _load(self) -> None:
        with self._env.lmdb.begin() as txn:
            rows = [fmt.parse_namespace(*item) for item in txn.cursor(self._env.namespaces)]
            (live_bytes,) = fmt.U64.unpack(txn.get(b"live_bytes", b"", db=self._env.header))
            self._usage = self._measure(txn, live_bytes)
            values = txn.cursor(self._env.values)
            self._next_value = int.from_bytes(values.key(), "big") + 1 if values.last() else 0
        self._known = {row.digest: row for row in rows}

    # ---- what is there

    def namespaces(self) -> Sequence[NamespaceRow]:
        return list(self._known.values())

    def scan(self) -> Iterator[StoredBlock]:
        with self._medium(), self._env.lmdb.begin() as txn:
            for key, data in txn.cursor(self._env.rows):
                try:
                    row = fmt.parse_row(key, data)
                except CorruptBlock:
                    continue  # Not readable, so not reported.
                yield StoredBlock(row.meta, row.stored_bytes, row.loss)

    def usage(self) -> TierUsage:
        return self._usage

    def _measure(self, txn: lmdb.Transaction[Any], live_bytes: int) -> TierUsage:
        return TierUsage(
            used_bytes=self._env.used_bytes(txn),
            live_bytes=live_bytes,
            limit_bytes=self._limit_bytes,
            blocks=txn.stat(self._env.rows)["entries"],
        )

    # ---- writing

    def prepare(self, meta: BlockMeta, block: Bytes, allowed_loss: Loss) -> PreparedBlock:
        codec = self._codec if self._codec.loss <= allowed_loss else _LOSSLESS
        known = self._known.get(meta.namespace)
        used, payload = encode_block(codec, block, known.spec) if known else (RAW, block)
        unsigned = PreparedBlock(
            meta, block.size, payload, used.id, used.version, used.loss, checksum=b""
        )
        return replace(unsigned, checksum=fmt.checksum(unsigned, payload))

    def commit(
        self,
        *,
        deletes: Sequence[BlockHash] = (),
        writes: Sequence[PreparedBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
    ) -> TierUsage:
        assert len({block.meta.hash for block in writes}) == len(writes), "a block twice in a batch"
        first_value = self._next_value
        live_bytes = self._usage.live_bytes
        with self._medium(), self._env.lmdb.begin(write=True, buffers=True) as txn:
            for key in [*deletes, *(block.meta.hash for block in writes)]:
                live_bytes -= self._delete(txn, key)
            for row in namespaces:
                txn.put(row.digest, fmt.pack_namespace(row), db=self._env.namespaces)
            groups = fmt.share_values(writes)
            for value_id, group in enumerate(groups, start=first_value):
                live_bytes += self._write(txn, value_id, group)
            txn.put(b"live_bytes", fmt.U64.pack(live_bytes), db=self._env.header)
            usage = self._measure(txn, live_bytes)
        self._next_value = first_value + len(groups)
        self._known = self._known | {row.digest: row for row in namespaces}
        self._usage = usage
        return usage

    def _delete(self, txn: lmdb.Transaction[memoryview], key: BlockHash) -> int:
        """Forget one block, and its value with the last of those that share it."""
        data = bytes(txn.get(key, b"", db=self._env.rows))
        if not txn.delete(key, db=self._env.rows):
            return 0
        try:
            row = fmt.parse_row(key, data)
        except CorruptBlock:
            return 0  # Nothing tells any more which value was its: that room is lost.
        value = fmt.value_key(row.value_id)
        if row.shared:
            (alive,) = fmt.U32.unpack(txn.get(value, fmt.U32.pack(1), db=self._env.shares))
            if alive > 1:
                txn.put(value, fmt.U32.pack(alive - 1), db=self._env.shares)
                return row.stored_bytes
            txn.delete(value, db=self._env.shares)
        txn.delete(value, db=self._env.values)
        return row.stored_bytes

    def _write(
        self, txn: lmdb.Transaction[memoryview], value_id: int, group: list[PreparedBlock]
    ) -> int:
        """Put one value and the rows of its blocks; its stored bytes."""
        key = fmt.value_key(value_id)
        stored_bytes = sum(block.payload.size for block in group)
        value = group[0].payload
        if len(group) > 1 or stored_bytes < self._env.page_bytes:
            padding = np.zeros(max(0, self._env.page_bytes - stored_bytes), dtype=np.uint8)
            value = np.concatenate([*(block.payload for block in group), padding])
        offset = self._env.put_value(txn, key, value.data, self._env.values)
        shared = len(group) > 1
        if shared:
            txn.put(key, fmt.U32.pack(len(group)), db=self._env.shares)
        for block in group:
            row = fmt.pack_row(block, value_id, offset, shared=shared)
            txn.put(block.meta.hash, row, db=self._env.rows)
            offset += block.payload.size
        return stored_bytes

    # ---- reading

    def read_into(self, key: BlockHash, out: Bytes) -> int:
        with self._medium(), self._env.lmdb.begin() as txn:
            data = txn.get(key, db=self._env.rows)
            if data is None:
                raise CorruptBlock(f"block {key.hex()} is not here")
            row = fmt.parse_row(key, data)
            codec = codec_by_id(row.codec_id, row.codec_version)
            spec = self._spec(row, out.size)
            stored = out if codec is RAW else self._buffer(row.stored_bytes)
            self._env.read(stored, row.offset)
        if fmt.checksum(row, stored) != row.checksum:
            raise CorruptBlock(f"block {key.hex()}: the checksum does not match")
        if codec is not RAW:
            codec.decode_into(stored, spec, out)
        return row.stored_bytes

    def _spec(self, row: fmt.Row, out_bytes: int) -> NamespaceSpec:
        """The layout of the block, once its lengths agree with it."""
        known = self._known.get(row.meta.namespace)
        if known is None or not known.spec.block_bytes == row.size_bytes == out_bytes:
            raise CorruptBlock(f"block {row.meta.hash.hex()}: a block of another layout")
        raw = row.codec_id == RAW.id
        if row.stored_bytes > out_bytes or (raw and row.stored_bytes < out_bytes):
            raise CorruptBlock(f"block {row.meta.hash.hex()}: stored length {row.stored_bytes}")
        return known.spec

    def _buffer(self, stored_bytes: int) -> Bytes:
        """This thread's scratch memory; as large as the largest block it has read."""
        buffer: Bytes = getattr(self._scratch, "buffer", _NOTHING)
        if buffer.size < stored_bytes:
            buffer = self._scratch.buffer = np.empty(stored_bytes, dtype=np.uint8)
        return buffer[:stored_bytes]

    # ---- the rest

    @contextmanager
    def _medium(self) -> Iterator[None]:
        """The one place where errors of LMDB and the system become ours."""
        try:
            yield
        except (lmdb.MapFullError, lmdb.DiskError) as error:
            raise TierFull(f"{self.directory}: {error}") from error
        except (lmdb.Error, OSError) as error:
            raise TierUnavailable(f"{self.directory}: {error}") from error

    def close(self) -> None:
        with self._medium():
            self._closing.close()


def _map_bytes(capacity_bytes: int, max_batch_bytes: int) -> int:
    """The data file's bound: the capacity without lock files and the file system's extent trees."""
    least_bytes = _LEAST_BATCHES * max_batch_bytes
    if capacity_bytes < least_bytes:
        raise CapacityError(
            f"ssd_capacity_bytes {capacity_bytes} is below {least_bytes}, {_LEAST_BATCHES} "
            f"batches of {max_batch_bytes}: raise it, or lower the batch"
        )
    rest_bytes = capacity_bytes - (1 << 20) - (capacity_bytes >> 10)
    return rest_bytes - rest_bytes % mmap.PAGESIZE


def _verify_tree(env_path: Path) -> None:
    """Walk a tree that a power cut may have torn, without LMDB, which such a tree can crash.

    Cost: the tree's own pages and a step a 4 KiB page of the file; a later version does it in a
    child process and goes on with an empty store.
    """
    try:
        problems = lmdb.verify.verify(env_path)  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        problems = [str(error)]
    if problems:
        raise FormatError(f"{env_path}: a power cut tore the store: {problems[0]}; {START_EMPTY}")
