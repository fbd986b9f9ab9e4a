"""One daemon's hold on one SSD directory: who owns it, whether it fits, how it was left.

kvtier.lock   flock of the owner; outlives nobody
kvtier.boot   boot id of the machine while the store is open; gone after a clean close
env-000/      an LMDB environment of a fixed size (several of them: a later version)
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvtier.errors import AddressInUse, CapacityError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StoreDirectory:
    """Creates and locks the directory; close() gives it back.

    Attributes:
        env_path: The environment's directory.
        data_path: Its data file.
    """

    def __init__(self, path: Path) -> None:
        """Take the directory.

        Raises:
            AddressInUse: a live daemon owns it.
            OSError: it can't be created or locked.
        """
        self.env_path = path / "env-000"
        self.data_path = self.env_path / "data.mdb"
        self._boot_path = path / "kvtier.boot"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = os.open(path / "kvtier.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.env_path.mkdir(mode=0o700, exist_ok=True)
        except BlockingIOError as error:
            os.close(self._lock_fd)
            raise AddressInUse(
                f"SSD directory {path} is in use by another kvtier daemon"
            ) from error
        except OSError:
            os.close(self._lock_fd)
            raise

    def check_space(self, map_bytes: int) -> None:
        """Refuse a new data file that could fill the file system.

        One that is there is opened whatever is free: its blocks can be read, and writes that find
        no room fail like any other.

        Raises:
            CapacityError: it can grow beyond what is free.
        """
        if self.data_path.exists():
            return
        status = os.statvfs(self.env_path)
        free_bytes = status.f_bavail * status.f_frsize
        if map_bytes > free_bytes:
            raise CapacityError(
                f"{self.env_path.parent}: the SSD tier may grow to {map_bytes} bytes, the file "
                f"system has {free_bytes} free: lower ssd_capacity_bytes, or make room"
            )

    def lost_power(self) -> bool:
        """Whether the machine went down with the store open, so that unsynced writes are gone."""
        left_open = self._boot_path.exists() and self.data_path.exists()
        return left_open and self._boot_path.read_text() != _BOOT_ID.read_text()

    def mark_open(self) -> None:
        """Remember this boot until mark_clean()."""
        fd = os.open(self._boot_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(_BOOT_ID.read_text())
            file.flush()
            os.fsync(fd)

    def mark_clean(self) -> None:
        """Everything written is on the medium."""
        self._boot_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let the next daemon have the directory."""
        os.close(self._lock_fd)
