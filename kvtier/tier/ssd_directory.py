"""One daemon's hold on one SSD directory: who owns it, what is in it, how it was left.

kvtier.lock      flock of the owner; outlives nobody
kvtier.boot      JSON while the store is open (Mark); gone after a clean close
env-NNN/         an environment; env-NNN.new while it is being made
quarantine-NNN/  one that was found damaged, for inspection; the lowest number is the oldest
*.gone/          one that is being deleted
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier.errors import AddressInUse, TierFull, TierUnavailable
from kvtier.tier.ssd_file import medium_errors

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MARK_BYTES = 512
"""A sector: written as a whole, or not."""

_NEW, _GONE = ".new", ".gone"


@dataclass(frozen=True, slots=True)
class Mark:
    """How the last daemon that had the store runs, ended or died.

    Attributes:
        clean: Whether it closed the store: everything written is on the medium.
        boot_id: The machine's, when it opened the store.
        relaxed: Whether its commits did not wait for the medium.
        deaths: Daemons before it that died one after the other without ever running for long.
        steady: Whether it ran for long itself.
    """

    clean: bool
    boot_id: str
    relaxed: bool
    deaths: int = 0
    steady: bool = False


class StoreDirectory:
    """Creates and locks the directory; close() gives it back."""

    def __init__(self, path: Path) -> None:
        """Take the directory.

        Raises:
            AddressInUse: a live daemon owns it.
            TierUnavailable: it can't be created or locked.
        """
        self.path = path
        self._boot_path = path / "kvtier.boot"
        with medium_errors(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock_fd = os.open(path / "kvtier.lock", flags, 0o600)
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for leftover in [*path.glob(f"env-*{_NEW}"), *path.glob(f"*{_GONE}")]:
                    shutil.rmtree(leftover)
            except BlockingIOError as error:
                os.close(self._lock_fd)
                raise AddressInUse(
                    f"SSD directory {path} is in use by another kvtier daemon: stop it first, or "
                    "name another directory"
                ) from error
            except OSError:
                os.close(self._lock_fd)
                raise

    # ---- how it was left

    def mark(self) -> Mark:
        """What the last owner left behind; a torn one is read as the worst.

        Raises:
            TierUnavailable: the medium failed.
        """
        with medium_errors(self.path):
            try:
                return Mark(**json.loads(self._boot_path.read_bytes()))
            except FileNotFoundError:
                return Mark(clean=True, boot_id="", relaxed=False)
            except (ValueError, TypeError):
                return Mark(clean=False, boot_id="", relaxed=True)

    def set_mark(self, mark: Mark) -> None:
        """Leave a mark, on the medium: in place, since a full one has no room for a new file.

        Raises:
            TierUnavailable: the medium failed, or has no room for the first mark.
        """
        data = json.dumps(asdict(mark)).encode().ljust(_MARK_BYTES)
        try:
            with medium_errors(self.path):
                fd = os.open(self._boot_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb", buffering=0) as file:
                    file.write(data)
                    os.fsync(fd)
        except TierFull as error:
            raise TierUnavailable(f"{error}: not a page is free, make room") from error

    # ---- what is in it

    def environments(self) -> dict[int, Path]:
        """By number, in order.

        Raises:
            TierUnavailable: the medium failed.
        """
        return self._numbered("env")

    def fresh_path(self, number: int) -> Path:
        """Where an environment is made, until finish(); what an earlier try left is deleted.

        Raises:
            TierUnavailable: the medium failed.
        """
        path = self.path / f"env-{number:03}{_NEW}"
        with medium_errors(self.path):
            if path.exists():
                shutil.rmtree(path)
        return path

    def finish(self, number: int) -> Path:
        """An environment is complete: it gets its name, on the medium.

        Raises:
            TierUnavailable: the medium failed.
        """
        path = self.path / f"env-{number:03}"
        with medium_errors(self.path):
            path.with_name(path.name + _NEW).replace(path)
            self.sync()
        return path

    def quarantine(self, path: Path) -> Path:
        """Set an environment aside; where.

        Raises:
            TierUnavailable: the medium failed.
        """
        number = max(self._numbered("quarantine"), default=-1) + 1
        aside = self.path / f"quarantine-{number:03}"
        with medium_errors(self.path):
            path.replace(aside)
        return aside

    def quarantined_bytes(self) -> int:
        """What all that was set aside occupies.

        Raises:
            TierUnavailable: the medium failed.
        """
        return sum(self.occupied_bytes(path) for path in self._numbered("quarantine").values())

    def drop_oldest_quarantine(self) -> Path | None:
        """Delete what was set aside first; None if there is nothing.

        Raises:
            TierUnavailable: the medium failed.
        """
        for path in self._numbered("quarantine").values():
            self.remove(path)
            return path
        return None

    def remove(self, path: Path) -> None:
        """Delete an environment; its space is free once nobody has it open.

        Raises:
            TierUnavailable: the medium failed.
        """
        gone = path.with_name(path.name + _GONE)
        with medium_errors(self.path):
            path.replace(gone)
            shutil.rmtree(gone)

    def occupied_bytes(self, path: Path) -> int:
        """`du` of a directory.

        Raises:
            TierUnavailable: the medium failed.
        """
        total_bytes = 0
        with medium_errors(self.path):
            for item in [path, *path.rglob("*")]:
                with contextlib.suppress(FileNotFoundError):
                    total_bytes += item.lstat().st_blocks * 512
        return total_bytes

    def size_bytes(self) -> int:
        """Of the whole file system.

        Raises:
            TierUnavailable: the medium failed.
        """
        with medium_errors(self.path):
            status = os.statvfs(self.path)
            return status.f_blocks * status.f_frsize

    def sync(self) -> None:
        """Wait until the names in it are on the medium."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let the next daemon have the directory."""
        os.close(self._lock_fd)

    def _numbered(self, kind: str) -> dict[int, Path]:
        pattern = re.compile(rf"{kind}-(\d+)")
        with medium_errors(self.path):
            found = {
                int(match[1]): path
                for path in self.path.iterdir()
                if (match := pattern.fullmatch(path.name))
            }
        return dict(sorted(found.items()))


def this_boot() -> str:
    """Of the machine."""
    return _BOOT_ID.read_text().strip()
