"""Blocks from one SSD directory into the arena: a queue in prefix order, some reads in flight.

A load has an answer whatever happens, but only once its read has returned: until then the medium
may still write into its extent. What was queued when the directory went offline is given up.

Blocks are decoded by the thread that read them. A block that needs no decoding doesn't wait for
that: beside the reads of all blocks there is one of raw blocks only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import structlog

from kvtier.errors import TierError
from kvtier.jobs import LoadJob
from kvtier.mover.busy import BusyTime
from kvtier.mover.context import ShardContext
from kvtier.mover.health import ShardHealth
from kvtier.mover.quiet_log import QuietLog

log = structlog.get_logger(__name__)

MEASURE_S = 0.25
"""While loads come without a pause, their speed is reported this often."""


class ShardLoads:
    """The loads of one directory. Runs on the event loop.

    Attributes:
        measured_s: When their speed was last known; minus infinity: never.
    """

    def __init__(self, context: ShardContext, health: ShardHealth, readers: Executor) -> None:
        self.measured_s = float("-inf")
        self._context = context
        self._health = health
        self._readers = readers
        self._raw: deque[LoadJob] = deque()
        self._coded: deque[LoadJob] = deque()
        self._work = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._busy = BusyTime(context.clock)
        self._bytes = 0
        self._quiet_log = QuietLog(context.clock)

    @property
    def under_way(self) -> int:
        """Loads queued and in flight."""
        return self._busy.under_way

    def add(self, job: LoadJob) -> None:
        """Queue a load."""
        self._busy.begin()
        self._none.clear()
        (self._raw if job.is_raw else self._coded).append(job)
        self._work.set()
        if not self._health.online:
            self.give_up()

    def give_up(self) -> None:
        """Answer all that has not begun: misses."""
        jobs = [*self._raw, *self._coded]
        self._raw.clear()
        self._coded.clear()
        for job in jobs:
            self._context.store.reads.late(job)
            self._over(job, 0, self._health.cause)

    async def pass_by(self, timeout_s: float) -> None:
        """Wait until there are none, but not for longer than timeout_s."""
        if self.under_way:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._none.wait()
            except TimeoutError:
                pass

    async def run(self) -> None:
        """Load one after the other. Endless; as many run side by side as there are readers."""
        await self._run(lambda: self._coded or self._raw)

    async def run_raw(self) -> None:
        """The same for blocks that need no decoding. Endless; one runs beside the others."""
        await self._run(lambda: self._raw)

    async def _run(self, queue: Callable[[], deque[LoadJob]]) -> None:
        while True:
            while not queue():
                self._work.clear()
                await self._work.wait()
            await self._load(queue().popleft())

    async def _load(self, job: LoadJob) -> None:
        context = self._context
        out = context.arena.view(job.copy.extent, job.size_bytes)
        read = partial(context.tier.read_into, job.wanted, out)
        late = partial(context.store.reads.late, job)
        try:
            stored_bytes = await self._health.run(self._readers, read, late)
        except TierError as error:
            if said := self._quiet_log.speak():
                log.warning(
                    "load failed",
                    directory=context.directory,
                    block=job.hash.hex(),
                    error=str(error),
                    failures=said,
                )
            # First: if the whole directory is out, its blocks stay where they are.
            self._health.read_over(error)
            self._over(job, 0, error)
        except Exception:  # A bug: the supervisor tells; no job may pin its extent forever.
            self._over(job, 0, TierError("the read did not return"))
            raise
        else:
            self._health.read_over(None)
            self._over(job, stored_bytes, None)

    def _over(self, job: LoadJob, stored_bytes: int, error: TierError | None) -> None:
        self._measure(stored_bytes)
        self._context.store.reads.loaded(job, stored_bytes, error)
        self._context.changed()

    def _measure(self, stored_bytes: int) -> None:
        """Note a load that is over; report the speed of all when due."""
        self._bytes += stored_bytes
        self._busy.end()
        if not self.under_way:
            self._none.set()
        elif self._context.clock() < self._busy.since_s + MEASURE_S:
            return
        busy_s = self._busy.elapsed_s()
        self._context.store.counters.ssd_read_seconds += busy_s
        if self._bytes:
            self.speed(self._bytes, busy_s)
            self._bytes = 0

    def speed(self, stored_bytes: int, busy_s: float) -> None:
        """So much came in so much time with reads in flight."""
        self.measured_s = self._context.clock()
        self._context.store.reads.measured(self._context.number, stored_bytes, busy_s)
