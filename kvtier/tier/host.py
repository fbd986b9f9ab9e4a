"""The host tier's memory: one file on tmpfs, reserved up front, owned by one daemon at a time.

    DIRECTORY/daemon.lock   flock: the owner
    DIRECTORY/arena         the file (arena.py)
    DIRECTORY/locks/        one file a client process (arena.ClientLock)

A daemon that finds the file of a dead one takes it over: clients may still have it mapped, so it is
never truncated, punched or doubled. It changes the epoch first, so that every copy in flight fails
its check.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from kvtier.addresses import is_private
from kvtier.arena import DATA_OFFSET, NO_EPOCH, ArenaMapping, ControlPage, WriteRecord, live_owners
from kvtier.codec.base import Bytes
from kvtier.errors import AddressInUse, CapacityError, ConfigError, FormatError
from kvtier.extents import EXTENT_ALIGN_BYTES, Extent
from kvtier.tier.huge_pages import give_huge_pages

OWNER_LOCK = "daemon.lock"
MEMORY_MARGIN_BYTES = 128 << 20
"""Left to everybody else when the arena is reserved."""


class HostArena:
    """The mapped arena of this daemon.

    Attributes:
        path: The file that clients map.
        lock_dir: Where clients hold their locks.
        capacity_bytes: Room for blocks.
        size_bytes: Size of the file.
        leftovers: Write records of former daemons: their writers may still be alive.
    """

    def __init__(self, directory: Path, capacity_bytes: int, epoch: bytes) -> None:
        """Reserve or take over.

        Args:
            directory: Ours alone, on a tmpfs; created 0700.
            capacity_bytes: Room for blocks, rounded down to whole extents.
            epoch: This daemon's boot id, 16 bytes.

        Raises:
            AddressInUse: another daemon owns the directory.
            ConfigError: the directory can't be made, or is on no tmpfs.
            CapacityError: the file system, the memory or the cgroup has too little room.
        """
        self.capacity_bytes = capacity_bytes // EXTENT_ALIGN_BYTES * EXTENT_ALIGN_BYTES
        self.size_bytes = DATA_OFFSET + self.capacity_bytes
        self.path = directory / "arena"
        self.lock_dir = directory / "locks"
        self._directory = directory
        _check_tmpfs(directory)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"arena_dir {directory}: {error.strerror}") from error
        if not is_private(directory):
            raise AddressInUse(
                f"{directory} is not a directory that only this user may write: "
                "remove it, or choose another arena_dir"
            )
        self._owner_lock = _own(directory)
        try:
            self.lock_dir.mkdir(mode=0o700, exist_ok=True)
            if not self._can_take_over():
                self._reserve()
            self._mapping = ArenaMapping(self.path)
        except BaseException:
            if not self.path.exists():
                self._remove_files()
            os.close(self._owner_lock)
            raise
        self.control: ControlPage = self._mapping.control
        self.control.epoch = epoch
        self.leftovers: list[WriteRecord] = self.control.open_writes()
        self._data = self._mapping.data[DATA_OFFSET:]

    def view(self, extent: Extent, size_bytes: int) -> Bytes:
        """(size_bytes,) uint8: the first bytes of an extent, in place."""
        return self._data[extent.offset_bytes : extent.offset_bytes + size_bytes]

    def live_owners(self) -> set[tuple[bytes, bytes]]:
        """(epoch, writer) pairs some process of which may still write (arena.live_owners)."""
        return live_owners(self.lock_dir)

    def close(self) -> None:
        """Disown and unlink the arena; copies in flight fail their check. Idempotent."""
        if self._owner_lock < 0:
            return
        self.control.epoch = NO_EPOCH
        self._remove_files()
        os.close(self._owner_lock)
        self._owner_lock = -1

    @property
    def _unnamed(self) -> Path:
        """The file until it is an arena."""
        return self.path.with_suffix(".new")

    def _remove_files(self) -> None:
        """File by file: whatever else an operator keeps there is none of our business."""
        self.path.unlink(missing_ok=True)
        self._unnamed.unlink(missing_ok=True)
        shutil.rmtree(self.lock_dir, ignore_errors=True)
        (self._directory / OWNER_LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def _can_take_over(self) -> bool:
        """True if a usable file of our size is there. A file nobody can be using is removed."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False
        if status.st_size == self.size_bytes and status.st_blocks * 512 >= self.size_bytes:
            try:
                ArenaMapping(self.path).control.check_format()
                return True
            except FormatError:
                pass  # Torn at birth, or of another version: replaced below.
        if self.live_owners():
            raise CapacityError(
                f"{self.path} is mapped by running engines and has {status.st_size - DATA_OFFSET} "
                f"bytes, not {self.capacity_bytes}: a second one beside it would double the "
                "memory; keep the capacity, or stop the engines first"
            )
        self.path.unlink()
        return False

    def _reserve(self) -> None:
        unnamed = self._unnamed
        unnamed.unlink(missing_ok=True)  # Of a daemon that was killed here: it takes our room.
        _check_room(self._directory, self.size_bytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(unnamed, flags, 0o600)
        try:
            give_huge_pages(descriptor, self.size_bytes)
            os.posix_fallocate(descriptor, 0, self.size_bytes)
        except OSError as error:
            unnamed.unlink()
            if error.errno == errno.ENOSPC:
                raise CapacityError(
                    f"{self._directory} filled up while {self.size_bytes} bytes were reserved"
                ) from error
            raise
        finally:
            os.close(descriptor)
        ArenaMapping(unnamed).control.format(self.size_bytes)
        unnamed.rename(self.path)


def _own(directory: Path) -> int:
    """Take the directory's owner lock; its descriptor."""
    path = directory / OWNER_LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise AddressInUse(f"{directory} belongs to a running daemon") from error
        except FileNotFoundError:
            pass
        os.close(descriptor)  # A daemon that was just ending has unlinked what we opened.


def _check_tmpfs(directory: Path) -> None:
    """Raise ConfigError if bytes there would go to a disk. What can't be told is let pass."""
    home = next(path for path in (directory, *directory.parents) if path.exists())
    device = home.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        kind = source.split()[0]
        if mount.split()[2] == wanted and kind not in ("tmpfs", "ramfs", "hugetlbfs"):
            raise ConfigError(
                f"arena_dir {directory} is on {kind}, not in memory: choose a directory on a "
                "tmpfs, such as one in /dev/shm"
            )


def _check_room(directory: Path, size_bytes: int) -> None:
    """Raise CapacityError unless size_bytes fit the file system, the memory and the cgroup."""
    file_system = os.statvfs(directory)
    limits = {
        f"the file system of {directory}": file_system.f_bavail * file_system.f_frsize,
        "MemAvailable": memory_available_bytes() - MEMORY_MARGIN_BYTES,
    }
    cgroup_bytes = cgroup_available_bytes()
    if cgroup_bytes is not None:
        limits["the cgroup's memory limit"] = cgroup_bytes - MEMORY_MARGIN_BYTES
    for what, room_bytes in limits.items():
        if size_bytes > room_bytes:
            raise CapacityError(
                f"the host tier needs {size_bytes} bytes, but {what} has room for "
                f"{max(0, room_bytes)}: lower host_capacity_bytes"
            )


def memory_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable, as the kernel estimates it."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise FormatError(f"{meminfo} has no MemAvailable line")


def cgroup_available_bytes(
    root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Least room below the memory limits of this process's cgroup (v1 or v2) and its ancestors.

    None where there is no limit. Page cache that the kernel would reclaim counts as room.
    """
    room: int | None = None
    for line in self_cgroup.read_text().splitlines() if self_cgroup.exists() else []:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        limit_name = "memory.limit_in_bytes" if controllers else "memory.max"
        usage_name = "memory.usage_in_bytes" if controllers else "memory.current"
        directory = base / name.lstrip("/")
        while True:
            here = _cgroup_room(directory / limit_name, directory / usage_name)
            if here is not None:
                room = here if room is None else min(room, here)
            if directory == base or base not in directory.parents:
                break
            directory = directory.parent
    return room


def _cgroup_room(limit: Path, usage: Path) -> int | None:
    try:
        text = limit.read_text().strip()
        if text == "max" or int(text) >= 1 << 60:
            return None
        reclaimable = 0
        for line in (usage.parent / "memory.stat").read_text().splitlines():
            key, value = line.split()
            if key in ("inactive_file", "total_inactive_file"):
                reclaimable = int(value)
        return int(text) - int(usage.read_text()) + reclaimable
    except (OSError, ValueError):
        return None  # Not mounted, or not readable in this container.
