"""The disk as plain files see it: the best of buffered and O_DIRECT, one to four threads.

The yardstick of bench.ssd. Requests of 4 MB, on space that was written before, each thread at its
own interleaved share of one file; a write ends with fdatasync, a read starts with an empty cache.
The bytes come from shared memory as large as the file and go there, as the tier's do: where a disk
is emulated, or copies through the page cache, one small buffer that stays in the CPU's cache would
be read into up to twice as fast, and hold nothing in the end. And it is made of the same pages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.tier.huge_pages import give_huge_pages

REQUEST_BYTES = 4 << 20


def _shared_memory(size_bytes: int) -> mmap.mmap:
    """As the daemon's arena: of huge pages where there are any."""
    descriptor = os.memfd_create("raw-file", os.MFD_CLOEXEC)
    try:
        give_huge_pages(descriptor, size_bytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(descriptor, size_bytes, flags=flags)
    finally:
        os.close(descriptor)


class Mode(NamedTuple):
    """One way to write or read a file."""

    direct: bool
    threads: int

    def __str__(self) -> str:
        return f"{'direct' if self.direct else 'buffered'}_{self.threads}"


class RawFile:
    """A file of incompressible bytes.

    Attributes:
        size_bytes: A whole number of requests.
        modes: What the file system offers.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Write it once; `size_bytes` is rounded down to whole requests."""
        self.size_bytes = size_bytes // REQUEST_BYTES * REQUEST_BYTES
        self._requests = self.size_bytes // REQUEST_BYTES
        # O_DIRECT wants memory at page boundaries, which maps have.
        self._memory = _shared_memory(self.size_bytes)
        content = np.random.default_rng(1).bytes(REQUEST_BYTES)
        self._buffers = [
            memoryview(self._memory)[at : at + REQUEST_BYTES]
            for at in range(0, self.size_bytes, REQUEST_BYTES)
        ]
        for buffer in self._buffers:
            buffer[:] = content
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptors = {False: os.open(path, flags, 0o600)}
        with suppress(OSError):  # A file system without it.
            self._descriptors[True] = os.open(path, flags | os.O_DIRECT)
        self.modes = [
            Mode(direct, threads) for direct in self._descriptors for threads in (1, 2, 4)
        ]
        self.write(Mode(direct=False, threads=1))

    def write(self, mode: Mode) -> None:
        """All of it, then fdatasync."""
        self._run(mode, os.pwritev)
        os.fdatasync(self._descriptors[mode.direct])

    def read(self, mode: Mode) -> None:
        """All of it."""
        self._run(mode, os.preadv)

    def drop_cache(self) -> None:
        """Make the next read() come from the disk."""
        os.posix_fadvise(self._descriptors[False], 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give back the file and the memory."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        for buffer in self._buffers:
            buffer.release()
        self._memory.close()

    def _run(self, mode: Mode, request: Callable[[int, list[memoryview], int], int]) -> None:
        descriptor = self._descriptors[mode.direct]

        def share(thread: int) -> None:
            for number in range(thread, self._requests, mode.threads):
                done = request(descriptor, [self._buffers[number]], number * REQUEST_BYTES)
                if done != REQUEST_BYTES:
                    raise OSError(f"{done} of {REQUEST_BYTES} bytes at request {number}")

        with ThreadPoolExecutor(mode.threads) as pool:
            list(pool.map(share, range(mode.threads)))
