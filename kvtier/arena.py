"""The arena: the file on tmpfs through which blocks travel, and the control page at its start.

Both sides map the same file; this module is its format and what each side may do with it. The
daemon's rules (reserve, take over, quarantine) are in tier/host.py, the client's in client.py.

    offset      content
    0           header: magic, format version, epoch, sizes                     (4 KiB)
    4096        lease slots: generation u64, counts u64 (usable << 32 | ready)  (16 B each)
    ...         write records: offset u64, size u64, epoch 16 B, writer 16 B    (64 B each)
    data_offset blocks, in 4 KiB-aligned extents; offsets on the wire count from 0 of the file

A reader's copy counts only if, after it, the page still shows the epoch and the slot generation it
was granted: the daemon moves a slot's generation on before any of the lease's extents can be
reused, and a new daemon changes the epoch before it touches anything. Fields are naturally aligned
words, stored whole.

A client process holds a shared flock on a file of its own in the lock directory, named
EPOCH-WRITER-RANDOM. A write extent whose lease did not end properly stays out of use until no lock
of its epoch and writer is held: then no process is left that could write into it. The writer is
the session that reserved, not its group: others of the group may live on for long.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import FormatError
from kvtier.extents import Extent

MAGIC = int.from_bytes(b"KVTARENA", "little")
FORMAT_VERSION = 1
LEASE_SLOTS = 16_384
WRITE_RECORDS = 16_384
EPOCH_BYTES = 16

_HEADER_BYTES = 4096
_SLOT_WORDS = 2
_RECORD_WORDS = 8
_SLOTS_AT = _HEADER_BYTES
_RECORDS_AT = _SLOTS_AT + LEASE_SLOTS * _SLOT_WORDS * 8
DATA_OFFSET = -(-(_RECORDS_AT + WRITE_RECORDS * _RECORD_WORDS * 8) // (2 << 20)) * (2 << 20)
"""First byte of blocks; a multiple of 2 MiB so that huge pages line up."""

NO_EPOCH = bytes(EPOCH_BYTES)
"""In the control page: no daemon owns the arena."""


def writer_of(session_id: bytes) -> bytes:
    """16 bytes that name a session in records and lock files without giving it away."""
    return hashlib.sha256(b"kvtier.writer.v1\n" + session_id).digest()[:16]


class WriteRecord(NamedTuple):
    """An extent that some process may be writing into."""

    number: int
    extent: Extent
    epoch: bytes
    writer: bytes


class ControlPage:
    """Typed access to the header, the lease slots and the write records.

    Plain stores into memory: never blocks. Works over any writable buffer of DATA_OFFSET bytes,
    so tests need no file.
    """

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        words = np.frombuffer(buffer, dtype="<u8", count=DATA_OFFSET // 8)
        self._header = words[: _HEADER_BYTES // 8]
        self._slots = words[_SLOTS_AT // 8 : _RECORDS_AT // 8].reshape(LEASE_SLOTS, _SLOT_WORDS)
        records = words[_RECORDS_AT // 8 : _RECORDS_AT // 8 + WRITE_RECORDS * _RECORD_WORDS]
        self._records = records.reshape(WRITE_RECORDS, _RECORD_WORDS)

    def format(self, arena_bytes: int) -> None:
        """Write a fresh header; the epoch is still unset."""
        self._header[1] = FORMAT_VERSION
        self._header[4] = arena_bytes
        self._header[0] = MAGIC

    def check_format(self) -> None:
        """Raise FormatError unless this is an arena of a version we speak."""
        if int(self._header[0]) != MAGIC:
            raise FormatError("not a kvtier arena: wrong magic number")
        if int(self._header[1]) != FORMAT_VERSION:
            raise FormatError(
                f"arena format {int(self._header[1])} is not {FORMAT_VERSION}: "
                "client and daemon are of different versions"
            )

    @property
    def epoch(self) -> bytes:
        """Boot id of the daemon that owns the arena now; zeros when none does."""
        return self._header[2:4].tobytes()

    @epoch.setter
    def epoch(self, value: bytes) -> None:
        self._header[2:4] = np.frombuffer(value, dtype="<u8")

    @property
    def arena_bytes(self) -> int:
        """Size of the file as its maker wrote it."""
        return int(self._header[4])

    def publish(self, slot: int, *, generation: int, ready_blocks: int, usable_blocks: int) -> None:
        """Show a lease's state. The counts come first: a reader trusts them by the generation."""
        self._slots[slot, 1] = usable_blocks << 32 | ready_blocks
        self._slots[slot, 0] = generation

    def generation(self, slot: int) -> int:
        """The generation a slot shows now."""
        return int(self._slots[slot, 0])

    def counts(self, slot: int) -> tuple[int, int]:
        """(ready blocks, usable blocks) that a slot shows now."""
        packed = int(self._slots[slot, 1])
        return packed & 0xFFFF_FFFF, packed >> 32

    def record_write(self, record: WriteRecord) -> None:
        """Remember an extent that a client is about to write; survives the daemon."""
        row = self._records[record.number]
        row[0] = record.extent.offset_bytes
        row[2:4] = np.frombuffer(record.epoch, dtype="<u8")
        row[4:6] = np.frombuffer(record.writer, dtype="<u8")
        row[1] = record.extent.size_bytes  # Last: a size makes the record count.

    def clear_write(self, number: int) -> None:
        """Forget a write record."""
        self._records[number, 1] = 0

    def open_writes(self) -> list[WriteRecord]:
        """The records that count, as a former daemon left them."""
        return [
            WriteRecord(
                number=int(number),
                extent=Extent(int(row[0]), int(row[1])),
                epoch=row[2:4].tobytes(),
                writer=row[4:6].tobytes(),
            )
            for number in np.flatnonzero(self._records[:, 1])
            for row in (self._records[number],)
        ]


class ArenaMapping:
    """A process's map of the arena file, with its page tables populated.

    A forked child does not inherit the map (MADV_DONTFORK). The map lives as long as this object
    or a view of it does.

    Attributes:
        control: The control page.
        data: (file size,) uint8, the whole file; offsets on the wire index it.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises:
            OSError: it can't be opened or mapped.
            FormatError: it is not an arena, or of another version.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size < DATA_OFFSET:
                raise FormatError(f"{path} is too short to be a kvtier arena")
            # An untouched mapping faults page by page and copies at a tenth of the speed.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(descriptor, size, flags=flags)
        finally:
            os.close(descriptor)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.control = ControlPage(self._map)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        _not_inherited.add(self)

    def forget_in_child(self) -> None:
        """After a fork: never unmap, for by now something else may be at that address."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))


class ClientLock:
    """A client process's sign of life beside the arena: a shared flock, gone with the process."""

    def __init__(self, lock_dir: Path, epoch: bytes, writer: bytes) -> None:
        """Create and lock a file of our own. Raises OSError where the directory is not ours."""
        unique = secrets.token_hex(8)
        self._path = lock_dir / f"{epoch.hex()}-{writer.hex()}-{unique}"
        # Locked before it has its name, so that the daemon never finds it unlocked.
        unnamed = lock_dir / f".{unique}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(unnamed, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        unnamed.rename(self._path)
        _not_inherited.add(self)

    def release(self) -> None:
        """No write of this process is in flight any more. Idempotent."""
        if self._descriptor >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1

    def forget_in_child(self) -> None:
        """After a fork: drop the inherited descriptor, which would keep the parent's lock alive."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_not_inherited: weakref.WeakSet[ArenaMapping | ClientLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for parents in list(_not_inherited):
        parents.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def live_owners(lock_dir: Path) -> set[tuple[bytes, bytes]]:
    """(epoch, writer) pairs of which some process holds a lock; dead ones' files are removed.

    Raises:
        OSError: the directory can't be read: who is alive is unknown.
    """
    alive: set[tuple[bytes, bytes]] = set()
    for path in lock_dir.iterdir():
        try:
            epoch_hex, writer_hex, _ = path.name.split("-")
            owner = bytes.fromhex(epoch_hex), bytes.fromhex(writer_hex)
        except ValueError:
            continue  # Not a lock file.
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.EISDIR):
                alive.add(owner)  # Another user's, or no descriptor is left: can't be told.
            continue  # Released this instant, or not a lock file.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        except BlockingIOError:
            alive.add(owner)
        finally:
            os.close(descriptor)
    return alive
