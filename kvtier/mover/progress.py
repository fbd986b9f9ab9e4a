"""Progress: coroutines wait until something changed, without polling."""

from __future__ import annotations

import asyncio


class Progress:
    """Wakes everyone who waits. Runs on one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next notify(); False if timeout_s passed first. None: no limit."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True
