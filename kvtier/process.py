"""A daemon as a child process, in a directory of its own: for the demo, benchmarks and tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.errors import KvtierError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.01


class DaemonProcess:
    """`kvtier serve` on a unix socket in `directory`. Context manager: stops it and cleans up.

    Attributes:
        address: Where it listens; the same after a restart.
        ssd_directory: Its SSD tier's home, unless the settings name others; survives kill() and
            start().
    """

    def __init__(
        self,
        directory: Path,
        *,
        ssd: bool = True,
        program: Sequence[str] = ("kvtier",),
        **settings: object,
    ) -> None:
        """Start, and wait until it answers.

        Args:
            directory: An empty directory for the socket, the SSD tier and the log.
            ssd: False for no SSD tier.
            program: The module that runs kvtier's command line, and what it wants first.
            settings: Further settings by name (kvtier.config.Settings).

        Raises:
            KvtierError: it did not come up; the message has the end of its log.
        """
        self._socket = directory / "kvtier.sock"
        self._log = directory / "kvtier.log"
        self.address = f"unix:{self._socket}"
        self.ssd_directory = directory / "ssd"
        # tmpfs, and away from `directory`, which may be on a disk.
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._arena = Path(tempfile.mkdtemp(prefix=f"kvtier-{os.getpid()}-", dir=shm))
        values: dict[str, object] = {
            "address": self.address,
            "arena_dir": self._arena,
            "ssd_directories": self.ssd_directory if ssd else "",
            "metrics_address": "",
            **settings,
        }
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        self._command = [sys.executable, "-m", *program, "serve", *flags]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the running daemon."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it (again) and wait until it answers."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise KvtierError(f"the daemon did not start:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """kill -9, and reap."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM, and wait for the clean shut-down; its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise KvtierError(f"the daemon did not stop:\n{self.log_tail()}") from None

    def close(self) -> None:
        """Stop it if it runs, and remove its arena. Idempotent."""
        try:
            if self._process is not None and self._process.poll() is None:
                self.stop()
        finally:
            shutil.rmtree(self._arena, ignore_errors=True)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True
