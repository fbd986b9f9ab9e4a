"""Endless background tasks that must not die in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

RESTART_AFTER_S = 1.0

Work = Callable[[], Coroutine[Any, Any, None]]
"""An endless task."""


class Supervisor:
    """Runs tasks, restarts those that fail, and knows whether all of them run."""

    def __init__(self, on_health: Callable[[bool], None]) -> None:
        """`on_health` is told False when a task has failed, True when all run again."""
        self._on_health = on_health
        self._tasks: list[asyncio.Task[None]] = []
        self._down: set[str] = set()

    def start(self, name: str, work: Work) -> None:
        """Run `work` until stop()."""
        self._tasks.append(asyncio.create_task(self._keep(name, work), name=name))

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, name: str, work: Work) -> None:
        while True:
            try:
                await work()
                log.error("background task ended", task=name)
            except Exception:  # The top of a task: logged, shown, restarted.
                log.exception("background task failed", task=name)
            self._down.add(name)
            self._on_health(False)
            await asyncio.sleep(RESTART_AFTER_S)
            self._down.discard(name)
            if not self._down:
                self._on_health(True)
