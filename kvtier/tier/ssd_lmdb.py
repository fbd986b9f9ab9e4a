"""What the SSD tier needs of LMDB: opening, its errors, and where in the file a large value lies.

LMDB keeps a large value on pages of its own, one after the other, and never moves them while the
value lives (lmdb 0.9 mdb.c, F_BIGDATA). So a value's *file offset*, taken from LMDB's page header
when it is put, holds for good.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np

from kvtier.codec.base import Bytes
from kvtier.errors import FormatError, SegmentDamaged, TierFull, TierUnavailable
from kvtier.tier.ssd_file import medium_errors

START_EMPTY = "move the directory away to start with an empty cache"

PAGE_HEADER = struct.Struct("<QHHI")
"""MDB_page: number, pad, flags, pages. A large value begins behind it."""

_OVERFLOW_FLAG = 0x04
_LEAST_MAP_BYTES = 1 << 20
_LOCK_BYTES = 8192
"""What LMDB makes it for its default of 126 readers."""

_FULL = (lmdb.MapFullError, lmdb.DiskError)
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.ProblemError,
)
"""What LMDB says of a broken tree. Not PanicError: that follows a failed write of the medium, and
opening again cures it."""


class Tables(NamedTuple):
    """Handles of the tables, in the order of ssd_format.TABLES."""

    header: Any
    namespaces: Any
    slabs: Any
    memory: Any
    rows: Any
    pieces: Any


@contextmanager
def lmdb_errors(path: Path, number: int) -> Iterator[None]:
    """Errors of LMDB and the system become ours, and name the place.

    Raises:
        TierFull: no room in the map or on the medium.
        SegmentDamaged: the tree is broken; names `number`.
        FormatError: the file is of another version of LMDB.
        TierUnavailable: everything else.
    """
    try:
        with medium_errors(path):
            yield
    except _FULL as error:
        raise TierFull(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise SegmentDamaged(f"{path}: {error}", number) from error
    except lmdb.VersionMismatchError as error:
        raise FormatError(f"{path}: written by another LMDB ({error}); {START_EMPTY}") from error
    except lmdb.Error as error:
        raise TierUnavailable(f"{path}: {error}") from error


def open_lmdb(path: Path, map_bytes: int, *, sync: bool) -> lmdb.Environment:
    """Open or create an environment.

    Its lock file, which LMDB writes through a map, gets its space first: on a full file system that
    is an error, and not SIGBUS.

    Raises:
        lmdb.Error, OSError: it is broken, or the medium failed or is full.
    """
    lock_fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(lock_fd, 0, _LOCK_BYTES)
    finally:
        os.close(lock_fd)
    return lmdb.open(
        str(path),
        map_size=max(map_bytes, _LEAST_MAP_BYTES),
        max_dbs=len(Tables._fields),
        sync=sync,
        mode=0o600,
        max_spare_txns=16,
    )


def put_large(txn: lmdb.Transaction[memoryview], key: bytes, value: Bytes, table: Any) -> int:
    """Append a value of several pages behind all keys of `table`.

    Args:
        txn: A write transaction with buffers.
        key: Greater than all keys of `table`.
        value: (n,) uint8.
        table: Its handle.

    Returns:
        Where its first byte lies in the data file, from commit until its deletion.

    Raises:
        FormatError: this build of lmdb has pages of another shape.
        lmdb.Error: there is no room.
    """
    txn.put(key, value.data, append=True, db=table)
    kept = np.frombuffer(txn.get(key, b"", db=table), dtype=np.uint8)
    header = ctypes.string_at(kept.ctypes.data - PAGE_HEADER.size, PAGE_HEADER.size)
    number, _, flags, pages = PAGE_HEADER.unpack(header)
    page_bytes = txn.stat(table)["psize"]
    needed = -(-(PAGE_HEADER.size + value.size) // page_bytes)
    if not flags & _OVERFLOW_FLAG or pages != needed:
        raise FormatError("this build of lmdb lays out pages in a way kvtier does not know")
    return int(number) * int(page_bytes) + PAGE_HEADER.size
