"""A daemon that writes down which calls reach it.

    python -m tests.engines.counting_daemon FILE serve ...

Everything else is kvtier's own command line.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvtier.cli.main import app
from kvtier.daemon.service import CacheService

COUNTED = ("Lookup", "Acquire", "Wait", "Release", "Reserve", "Commit", "Abort", "Finish")


class Calls:
    """What reached a daemon, so far.

    Attributes:
        program: For DaemonProcess.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.program = ("tests.engines.counting_daemon", str(path))

    def so_far(self) -> Counter[str]:
        """Calls by name."""
        return Counter(self._path.read_text().split())


def count(path: Path) -> None:
    """From now on every call of COUNTED is a line of this file, before it is carried out."""
    file = path.open("a", buffering=1)

    def counted(name: str) -> Any:
        real = getattr(CacheService, name)

        async def call(self: CacheService, request: Any, context: Any) -> Any:
            file.write(name + "\n")
            return await real(self, request, context)

        return call

    for name in COUNTED:
        setattr(CacheService, name, counted(name))


if __name__ == "__main__":
    count(Path(sys.argv.pop(1)))
    app()
