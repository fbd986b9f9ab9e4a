"""FAULT INJECTION: a daemon whose SSDs fail, fall short or hang on command.

    python -m tests.e2e.faulty_daemon FAULTS serve ...

FAULTS is a directory that a test shares with it (Faults): while a file of a fault lies there, calls
that it is about do not work. Pauses before another try are short, for there are many. Everything
else is kvtier's own command line.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import kvtier.daemon.service
import kvtier.mover.commits
import kvtier.mover.health
import kvtier.shards
from kvtier.cli.main import app
from kvtier.tier.ssd_file import BlockIo, DataFile
from kvtier.tier.ssd_format import PAGE_BYTES

_POLL_S = 0.005
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with payloads on the medium.

    Attributes:
        call: The system call that does not work.
        kind: error: EIO. short: a page of what was asked for. hang: until the fault is over.
        under: Only files below this directory.
        first: Only calls that touch the bytes of the file from here ...
        end: ... up to here.
    """

    call: Literal["preadv", "pwritev"]
    kind: Literal["error", "short", "hang"]
    under: str = ""
    first: int = 0
    end: int = 1 << 62

    def hits(self, call: str, path: str, offset: int, size_bytes: int) -> bool:
        """Whether a call is one of those."""
        touches = offset < self.end and self.first < offset + size_bytes
        return call == self.call and path.startswith(self.under) and touches


class Faults:
    """The faults that there are now; the test and the daemon have an object of one directory each.

    Attributes:
        program: For DaemonProcess.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.program = ("tests.e2e.faulty_daemon", str(directory))
        directory.mkdir(exist_ok=True)

    @contextmanager
    def broken(self, fault: Fault) -> Iterator[None]:
        """While inside, the medium has this fault."""
        place = self._directory / f"{time.monotonic_ns()}.fault"
        new = place.with_suffix(".new")
        new.write_text(json.dumps(asdict(fault)))
        new.replace(place)
        try:
            yield
        finally:
            place.unlink()

    def hanging(self) -> int:
        """Calls that hang."""
        return len(list(self._directory.glob("*.hangs")))

    def here(self) -> list[Fault]:
        """All of now."""
        found = []
        for path in self._directory.glob("*.fault"):
            try:
                found.append(Fault(**json.loads(path.read_text())))
            except FileNotFoundError:
                continue  # It was over just now.
        return found

    def meet(self, call: str, descriptor: int, offset: int, size_bytes: int) -> bool:
        """In the daemon, before a call: fail or hang as told. True: it shall fall short."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        mark = self._directory / f"{threading.get_ident()}.hangs"
        try:
            while kinds := {
                fault.kind for fault in self.here() if fault.hits(call, path, offset, size_bytes)
            }:
                if "error" in kinds:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                if "short" in kinds:
                    return True
                mark.touch()
                time.sleep(_POLL_S)
        finally:
            mark.unlink(missing_ok=True)
        return False


def inject(faults: Faults) -> None:
    """From now on payloads meet these faults, and what an opening reads around LMDB."""
    real_preadv, real_pwritev = BlockIo.preadv, BlockIo.pwritev
    real_read_at = DataFile.read_at

    def preadv(self: BlockIo, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        short = faults.meet("preadv", descriptor, offset, sum(map(len, views)))
        return real_preadv(self, descriptor, _first_page(views) if short else views, offset)

    def pwritev(self: BlockIo, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        short = faults.meet("pwritev", descriptor, offset, sum(map(len, views)))
        return real_pwritev(self, descriptor, _first_page(views) if short else views, offset)

    def read_at(self: DataFile, offset: int, size_bytes: int) -> bytes:
        faults.meet("preadv", self._buffered, offset, size_bytes)
        return real_read_at(self, offset, size_bytes)

    BlockIo.preadv = preadv  # type: ignore[method-assign]
    BlockIo.pwritev = pwritev  # type: ignore[method-assign]
    DataFile.read_at = read_at  # type: ignore[method-assign]


def hurry() -> None:
    """Try again soon what failed."""
    kvtier.shards.RETRY_S = _PAUSE_S
    kvtier.mover.commits.RETRY_S = _PAUSE_S
    kvtier.mover.health.REOPEN_FIRST_S = _PAUSE_S
    kvtier.daemon.service.DROP_DURABLE_S = 10 * _PAUSE_S


def _first_page(views: Sequence[memoryview]) -> list[memoryview]:
    return [views[0][:PAGE_BYTES]]


if __name__ == "__main__":
    inject(Faults(Path(sys.argv.pop(1))))
    hurry()
    app()
