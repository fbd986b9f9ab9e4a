"""One LMDB environment whose large values are read around LMDB.

LMDB keeps a large value on pages of its own, one after the other, and never moves them while the
value lives (lmdb 0.9 mdb.c, F_BIGDATA). So put_value() returns the value's *file offset*, taken
from the page header while the pages are still in memory, and read() is a preadv there: an I/O
error is an errno and not SIGBUS, the bytes land where they belong, and py-lmdb's habit of touching
every page of a value it returns (0.4 GB/s cold) is avoided.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from kvtier.codec.base import Bytes
from kvtier.errors import CapacityError, CorruptBlock, FormatError
from kvtier.tier import ssd_format as fmt

_TABLES = (b"header", b"namespaces", b"rows", b"values", b"shares")
_META_PAGES = 2
_PAGE_HEADER = struct.Struct("<QHHI")  # MDB_page: number, pad, flags, pages.
_OVERFLOW_FLAG = 0x04
START_EMPTY = "move the directory away to start with an empty cache"


class Environment:
    """Opens or creates an environment; the caller owns the directory alone.

    Attributes:
        lmdb: For transactions.
        page_bytes: Size of its pages, and the least size of a value for put_value().
        namespaces, rows, values, shares, header: The tables (ssd_format.py).
    """

    def __init__(self, path: Path, *, map_bytes: int, sync: bool) -> None:
        """Open it.

        Args:
            path: Existing directory.
            map_bytes: Bound of its data file.
            sync: Whether a commit waits for the medium.

        Raises:
            CapacityError: it occupies more than map_bytes.
            FormatError: not ours, of a newer version, or cut short.
            lmdb.Error, OSError: the medium failed.
        """
        self._path = path / "data.mdb"
        try:
            self.lmdb = lmdb.open(
                str(path),
                map_size=map_bytes,
                max_dbs=len(_TABLES),
                sync=sync,
                mode=0o600,
                max_spare_txns=16,
            )
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
            raise FormatError(f"{self._path}: {error}; {START_EMPTY}") from error
        with ExitStack() as stack:
            stack.callback(self.lmdb.close)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, self._fd)
            self.page_bytes = self.lmdb.stat()["psize"]
            self._fit_file(map_bytes)
            self.lmdb.reader_check()  # Slots of a killed daemon would keep pages from reuse.
            self._open_tables()
            self._closing = stack.pop_all()

    def _fit_file(self, map_bytes: int) -> None:
        """Make the file exactly as long as the map, sparse.

        LMDB may leave its last pages unwritten, so only a file of a known length can show that
        it was cut; touching the map beyond its end is SIGBUS.
        """
        used_bytes = (self.lmdb.info()["last_pgno"] + 1) * self.page_bytes
        file_bytes = os.fstat(self._fd).st_size
        if file_bytes < used_bytes:
            raise FormatError(
                f"{self._path} has {file_bytes} bytes and uses {used_bytes}: it was cut; "
                f"{START_EMPTY}"
            )
        if map_bytes < used_bytes:
            raise CapacityError(
                f"{self._path} occupies {used_bytes} bytes and can't shrink to {map_bytes}: "
                f"raise ssd_capacity_bytes, or {START_EMPTY}"
            )
        os.ftruncate(self._fd, map_bytes)

    def _open_tables(self) -> None:
        if self.lmdb.stat()["entries"] == 0:
            self._create_tables()
        try:
            self.header = self.lmdb.open_db(b"header", create=False)
        except lmdb.NotFoundError as error:
            raise FormatError(f"{self._path} is not kvtier's; {START_EMPTY}") from error
        with self.lmdb.begin() as txn:
            found = txn.get(b"format", b"", db=self.header)
            probe_at = txn.get(b"probe_at", b"", db=self.header)
        if found != fmt.U32.pack(fmt.FORMAT_VERSION):
            raise FormatError(
                f"{self._path} has format {int.from_bytes(found, 'little')}, this version reads "
                f"{fmt.FORMAT_VERSION}: upgrade kvtier, or {START_EMPTY}"
            )
        if os.pread(self._fd, len(fmt.PROBE), *fmt.U64.unpack(probe_at)) != fmt.PROBE:
            raise FormatError(
                f"{self._path}: pages are not where they were written (a compacted copy?); "
                f"{START_EMPTY}"
            )
        _, self.namespaces, self.rows, self.values, self.shares = (
            self.lmdb.open_db(name, create=False) for name in _TABLES
        )

    def _create_tables(self) -> None:
        with self.lmdb.begin(write=True, buffers=True) as txn:
            self.header, *_ = [self.lmdb.open_db(name, txn=txn) for name in _TABLES]
            probe_at = self.put_value(txn, b"probe", fmt.PROBE, self.header)
            txn.put(b"probe_at", fmt.U64.pack(probe_at), db=self.header)
            txn.put(b"format", fmt.U32.pack(fmt.FORMAT_VERSION), db=self.header)
            txn.put(b"created_by", b"kvtier", db=self.header)
            txn.put(b"live_bytes", fmt.U64.pack(0), db=self.header)

    def put_value(
        self, txn: lmdb.Transaction[memoryview], key: bytes, value: bytes | memoryview, db: Any
    ) -> int:
        """Append a value of at least a page behind all keys of `db`.

        Args:
            txn: A write transaction with buffers.
            key: Greater than all keys of `db`.
            value: Its bytes.
            db: A table.

        Returns:
            Where its first byte lies in the data file, from commit until its deletion.

        Raises:
            FormatError: this build of lmdb has pages of another shape.
        """
        txn.put(key, value, append=True, db=db)
        kept = np.frombuffer(txn.get(key, b"", db=db), dtype=np.uint8)
        header = ctypes.string_at(kept.ctypes.data - _PAGE_HEADER.size, _PAGE_HEADER.size)
        number, _, flags, pages = _PAGE_HEADER.unpack(header)
        needed = -(-(_PAGE_HEADER.size + kept.size) // self.page_bytes)
        if not flags & _OVERFLOW_FLAG or pages != needed:
            raise FormatError("this build of lmdb lays out pages in a way kvtier does not know")
        return int(number) * self.page_bytes + _PAGE_HEADER.size

    def read(self, out: Bytes, offset: int) -> None:
        """Fill `out` from the data file, inside a transaction that keeps the value alive.

        Raises:
            CorruptBlock: the file ends before.
            OSError: the medium failed.
        """
        view = out.data
        while view:
            done = os.preadv(self._fd, [view], offset)
            if not done:
                raise CorruptBlock(f"{self._path} ends at {offset}, before the block does")
            view = view[done:]
            offset += done

    def used_bytes(self, txn: lmdb.Transaction[Any]) -> int:
        """Bytes of all pages in use, by LMDB's own count; without its list of free pages."""
        tables = (self.header, self.namespaces, self.rows, self.values, self.shares, None)
        stats = [txn.stat(db) for db in tables]  # None is the table of tables.
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return (_META_PAGES + pages) * self.page_bytes

    def close(self) -> None:
        """Give back the map and the file; nothing is synced."""
        self._closing.close()
