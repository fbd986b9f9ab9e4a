"""Reads one SSD directory through, slowly, while it has no loads: rotten blocks go before a hit.

It also tells how fast the directory reads when no load has for a while.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import structlog

from kvtier.errors import CorruptBlock, TierError, TierUnavailable
from kvtier.mover.context import ShardContext
from kvtier.mover.health import ShardHealth
from kvtier.mover.loads import ShardLoads
from kvtier.tier.base import Scrubbed

log = structlog.get_logger(__name__)

SLICE_BYTES = 1 << 20
"""Read in one go: what a load that comes now may have to wait for."""
LEAST_BYTES = 64 << 10
"""What a block counts for at least: small ones cost more time than their bytes."""
PROBE_S = 60.0
"""A speed older than this is measured anew."""
LEAST_BLOCKS = 2
"""Read in one go at least: the first warms up, the second measures."""
EMPTY_PAUSE_S = 10.0
BUSY_PAUSE_S = 0.25


class Scrubber:
    """Walks one directory. Runs on the event loop.

    Attributes:
        busy: True while it reads.
    """

    def __init__(
        self, context: ShardContext, health: ShardHealth, loads: ShardLoads, readers: Executor
    ) -> None:
        self.busy = False
        self._context = context
        self._health = health
        self._loads = loads
        self._readers = readers
        self._position = b""

    async def run(self) -> None:
        """Read a little, rest, go on behind it. Endless."""
        while True:
            pause_s = await self._step()
            await asyncio.sleep(pause_s)

    async def _step(self) -> float:
        """Read a slice if it is time for one; how long to rest."""
        rate = self._context.config.scrub_bytes_per_s
        probing = self._context.clock() - self._loads.measured_s >= PROBE_S
        if not rate and not probing:
            return PROBE_S
        if not self._health.online or self._loads.under_way:
            return BUSY_PAUSE_S
        blocks = await self._read(probing)
        cost_bytes = sum(max(LEAST_BYTES, block.stored_bytes) for block in blocks)
        if not cost_bytes or not rate:
            return EMPTY_PAUSE_S
        return cost_bytes / rate

    async def _read(self, probing: bool) -> list[Scrubbed]:
        """Blocks behind the position; none after a failure."""
        self.busy = True
        try:
            done = await self._health.run(self._readers, self._slice)
        except TierError as error:
            self._health.read_over(error)
            return []
        finally:
            self.busy = False
            self._context.progress.notify()
        for block, _ in done:
            self._position = block.position
            self._note(block)
        if probing:
            self._measure(done[1:] or done)  # The first one warmed up.
        return [block for block, _ in done if block.stored_bytes or block.error]

    def _measure(self, done: list[tuple[Scrubbed, float]]) -> None:
        stored_bytes = sum(block.stored_bytes for block, _ in done)
        if stored_bytes:
            self._loads.speed(stored_bytes, sum(seconds for _, seconds in done))

    def _slice(self) -> list[tuple[Scrubbed, float]]:
        """On a reader's thread: some blocks, and the seconds that each took."""
        clock = self._context.clock
        # A slow disk is not one that hangs.
        end_s = clock() + self._context.config.timeout_s / 4
        done: list[tuple[Scrubbed, float]] = []
        position, cost_bytes = self._position, 0
        while len(done) < LEAST_BLOCKS or cost_bytes < SLICE_BYTES:
            started_s = clock()
            block = self._context.tier.scrub(position)
            done.append((block, clock() - started_s))
            if block.meta is None or clock() > end_s:
                break
            if self._loads.under_way:
                break  # They go first.
            position = block.position
            cost_bytes += max(LEAST_BYTES, block.stored_bytes)
        return done

    def _note(self, block: Scrubbed) -> None:
        context = self._context
        if block.meta is None and block.error is None:
            return  # There is nothing to read.
        context.store.counters.scrubbed_blocks += 1
        context.store.counters.scrubbed_bytes += block.stored_bytes
        if block.error is None or isinstance(block.error, TierUnavailable):
            self._health.read_over(block.error)
        if block.error is None or not self._health.online:
            return
        log.warning(
            "corrupt block found",
            directory=context.directory,
            block="?" if block.meta is None else block.meta.hash.hex(),
            segment=block.segment,
            error=str(block.error),
        )
        if block.meta is not None:
            error = block.error
            reason = error.reason if isinstance(error, CorruptBlock) else type(error).__name__
            context.store.tiers.corrupt(block.meta, context.number, block.segment, reason)
            context.changed()
