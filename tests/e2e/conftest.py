"""Fixtures of the end-to-end tests: daemons that clean up, and the check that nothing leaks."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil  # type: ignore[import-untyped]
import pytest

from kvtier.client import Client
from kvtier.process import DaemonProcess
from tests.e2e.support import SSD_SETTINGS, eventually

StartDaemon = Callable[..., DaemonProcess]
Connect = Callable[..., Client]

BUGS = ("Traceback", "a bug", "background task", "Task exception", "never awaited")
"""What the log of a daemon that works as meant never has."""


def _descriptors() -> list[str]:
    """What this process has open, but for gRPC's own pollers, which it keeps for good."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if not name.startswith("anon_inode:"):
            names.append(name.split(":")[0] if name.startswith(("socket:", "pipe:")) else name)
    return sorted(name for name in names if not name.startswith("/proc/"))


def _orphaned_arenas() -> set[str]:
    """Arenas that this process had made and that no daemon owns any more."""
    orphans = set()
    for directory in Path("/dev/shm").glob(f"kvtier-*{os.getpid()}*"):
        try:
            with (directory / "daemon.lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:
            pass
        orphans.add(directory.name)
    return orphans


@pytest.fixture(scope="session", autouse=True)
def _warm_grpc() -> None:
    """What gRPC opens once a process is no test's leak."""
    grpc.insecure_channel("unix:/nonexistent").close()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    threads, descriptors, arenas = threading.active_count(), _descriptors(), _orphaned_arenas()
    children = _children()
    yield
    gc.collect()  # Tracebacks of errors that were expected keep what they saw.
    eventually(lambda: threading.active_count() <= threads, f"threads end: {threading.enumerate()}")
    eventually(
        lambda: len(_descriptors()) <= len(descriptors),
        f"descriptors close: {descriptors} before, {_descriptors()} after",
    )
    eventually(lambda: _children() <= children, "children end")
    eventually(lambda: not _orphaned_arenas() - arenas, "arenas vanish")


@contextmanager
def daemons(directory: Path) -> Iterator[StartDaemon]:
    """Start daemons, each in a directory of its own, with an SSD tier unless told otherwise.

    At the end each must still be able to stop, and its log must tell of no bug.
    """
    logs: list[Path] = []
    with ExitStack() as stack:

        def start(name: str = "d", **settings: object) -> DaemonProcess:
            home = directory / name
            home.mkdir()
            values = {"host_capacity_bytes": 32 << 20, **SSD_SETTINGS, **settings}
            logs.append(home / "kvtier.log")
            return stack.enter_context(DaemonProcess(home, **values))  # type: ignore[arg-type]

        yield start
    for path in logs:
        text = path.read_text(errors="replace")
        assert not any(word in text for word in BUGS), text


@pytest.fixture
def start_daemon(tmp_path: Path, _nothing_leaks: None) -> Iterator[StartDaemon]:
    """Starts daemons of this test's own."""
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    """A daemon with 32 MiB of RAM and an SSD tier."""
    return start_daemon()


@pytest.fixture
def connect(_nothing_leaks: None) -> Iterator[Connect]:
    """Make clients; deadlines are patient, for what is tested is not this machine's speed."""
    with ExitStack() as stack:

        def make(daemon: DaemonProcess, **options: object) -> Client:
            values = {"acquire_timeout_s": 5.0, **options}
            client = stack.enter_context(Client(daemon.address, **values))  # type: ignore[arg-type]
            assert client.wait_attached(20.0)
            return client

        yield make
