"""Payload bytes between memory and a data file: direct where the file system can, else buffered.

O_DIRECT saves a copy through the page cache, and it wants memory, offset and length aligned. So
whole pages are moved: the tail of a block goes through a page of its own, and memory that is not
aligned through a buffer of the thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtier.codec.base import Bytes
from kvtier.errors import CorruptBlock, TierFull, TierUnavailable
from kvtier.extents import aligned
from kvtier.tier.base import Piece
from kvtier.tier.ssd_format import PAGE_BYTES

DIRECT_FROM_BYTES = 64 << 10
"""Smaller payloads are faster through the page cache."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def medium_errors(path: Path) -> Iterator[None]:
    """Errors of the system become ours, and name the place."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise TierFull(f"{path}: {error.strerror}") from error
        raise TierUnavailable(f"{path}: {error.strerror or error}") from error


class _Call(Protocol):
    """preadv or pwritev of a BlockIo."""

    def __call__(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int: ...


class _Memory(threading.local):
    """A thread's aligned memory."""

    def __init__(self) -> None:
        """Runs once a thread."""
        self.tail = _pages(PAGE_BYTES)
        self.buffer = self.tail[:0]


class BlockIo:
    """The system calls that move payloads, and each thread's aligned memory.

    Tests put their own in its place, whose calls fail, fall short or hang.
    """

    def __init__(self) -> None:
        self._memory = _Memory()

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        """As os.preadv."""
        return os.preadv(descriptor, views, offset)

    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        """As os.pwritev."""
        return os.pwritev(descriptor, views, offset)

    def free_bytes(self, path: Path) -> int:
        """What the file system has left for us."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def tail(self) -> Bytes:
        """One page of this thread."""
        return self._memory.tail

    def buffer(self, size_bytes: int) -> Bytes:
        """Aligned memory of this thread, (size_bytes,); as large as the largest it was asked."""
        if self._memory.buffer.size < size_bytes:
            self._memory.buffer = _pages(aligned(size_bytes))
        return self._memory.buffer[:size_bytes]


def _pages(size_bytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)


class DataFile:
    """An open data.mdb. Its methods may run in any number of threads.

    Attributes:
        direct: Whether O_DIRECT works here.
    """

    def __init__(self, path: Path, io: BlockIo) -> None:
        """Open it.

        Raises:
            OSError: it can't be opened for reading and writing.
        """
        self.path = path
        self._io = io
        flags = os.O_RDWR | os.O_CLOEXEC
        self._buffered = os.open(path, flags)
        os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)  # Hints say what comes.
        self._unbuffered = self._buffered
        self.direct = True
        try:
            self._unbuffered = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(self._buffered)
                raise
            self.direct = False

    def size_bytes(self) -> int:
        """Its length."""
        return os.fstat(self._buffered).st_size

    def take_space(self, offset: int, size_bytes: int) -> None:
        """Have the file system give a sparse range its space now.

        Raises:
            OSError: it has none, or can't.
        """
        os.posix_fallocate(self._buffered, offset, size_bytes)

    def prefetch(self, offset: int, size_bytes: int) -> None:
        """Have the kernel read a range ahead."""
        os.posix_fadvise(self._buffered, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def write(self, pieces: Sequence[Piece], payload: Bytes) -> None:
        """Put `payload` into `pieces`, which it fills but for the end of the last page.

        Raises:
            OSError: the medium failed.
        """
        direct = self.direct and payload.size >= DIRECT_FROM_BYTES
        size = payload.size
        if direct and not _is_aligned(payload):
            copy = self._io.buffer(aligned(size))
            np.copyto(copy[:size], payload)
            copy[size:] = 0
            payload = copy
        whole = payload.size - payload.size % PAGE_BYTES
        tail = self._io.tail()
        if whole < payload.size:
            tail[: payload.size - whole] = payload[whole:]
            tail[payload.size - whole :] = 0
        for offset, views in _spread(pieces, payload[:whole], tail):
            self._move(self._io.pwritev, views, offset, direct=direct)

    def read(self, pieces: Sequence[Piece], out: Bytes) -> None:
        """Fill `out`, which ends in the last page of `pieces`.

        Raises:
            CorruptBlock: the file ends before.
            OSError: the medium failed.
        """
        direct = self.direct and out.size >= DIRECT_FROM_BYTES
        if direct and not _is_aligned(out):
            copy = self._io.buffer(aligned(out.size))
            self._read(pieces, copy, direct=True)
            np.copyto(out, copy[: out.size])
            return
        self._read(pieces, out, direct=direct)

    def _read(self, pieces: Sequence[Piece], out: Bytes, *, direct: bool) -> None:
        if not direct:
            for piece in pieces:
                self.prefetch(*piece)
        whole, tail = out.size - out.size % PAGE_BYTES, self._io.tail()
        for offset, views in _spread(pieces, out[:whole], tail):
            self._move(self._io.preadv, views, offset, direct=direct)
        out[whole:] = tail[: out.size - whole]

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Some bytes, fewer at the end of the file; buffered."""
        return os.pread(self._buffered, size_bytes, offset)

    def _move(self, call: _Call, views: list[memoryview], offset: int, *, direct: bool) -> None:
        """Move all of `views`; what a first direct call leaves undone goes through the cache."""
        done, size = 0, sum(len(view) for view in views)
        if direct:
            done = self._try_direct(call, views, offset)
        while done < size:
            moved = call(self._buffered, _behind(views, done), offset + done)
            if not moved:
                raise CorruptBlock(f"{self.path} ends at {offset + done}, in a block", "short")
            done += moved

    def _try_direct(self, call: _Call, views: list[memoryview], offset: int) -> int:
        try:
            return call(self._unbuffered, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False  # Opened, but this file system or medium refuses it after all.
            return 0

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._buffered)
        if self._unbuffered != self._buffered:
            os.close(self._unbuffered)


def _is_aligned(data: Bytes) -> bool:
    return data.ctypes.data % PAGE_BYTES == 0


def _spread(
    pieces: Sequence[Piece], whole: Bytes, tail: Bytes
) -> Iterator[tuple[int, list[memoryview]]]:
    """What of a block's whole pages, and then of its tail page, lies in each piece."""
    at = 0
    for piece in pieces:
        part = whole[at : at + piece.size_bytes]
        views = [part.data] if part.size else []
        if part.size < piece.size_bytes:
            views.append(tail.data)
        yield piece.offset_bytes, views
        at += piece.size_bytes


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """The views without their first `done` bytes."""
    left: list[memoryview] = []
    for view in views:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left
