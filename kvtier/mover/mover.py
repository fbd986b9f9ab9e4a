"""The mover does what the store decided: jobs in, bytes moved, completions back.

It hands each job to its shard's mover (shard.py), which runs it on threads of its own; only
the codec threads are shared. Runs on the event loop. Nowhere else is a TierError caught: it becomes
a failed job, and the store makes a miss of it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.errors import TierUnavailable
from kvtier.mover.context import MoverConfig, ShardContext
from kvtier.mover.progress import Progress
from kvtier.mover.shard import Codecs, ShardMover, Work
from kvtier.store import TieredStore
from kvtier.tier.base import BlockTier
from kvtier.tier.host import HostArena

CODEC_THREADS = 4
"""At most; never more than there are cores."""


class Mover:
    """Runs the store's jobs on the host arena and the SSD tiers.

    Attributes:
        progress: Notified after each completion.
    """

    def __init__(
        self,
        store: TieredStore,
        arena: HostArena,
        tiers: Sequence[tuple[str, BlockTier]],
        config: MoverConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start no work yet; the tasks do.

        Args:
            store: Whose jobs to run.
            arena: Where blocks are in RAM.
            tiers: Each shard's directory, for logs, and its tier.
            config: Bounds, for each shard.
            clock: Seconds, monotonic.
        """
        self.progress = Progress()
        self._store = store
        self._clock = clock
        threads = min(CODEC_THREADS, os.cpu_count() or 1)
        self._urgent_codecs = ThreadPoolExecutor(threads, "codec")
        self._idle_codec = ThreadPoolExecutor(1, "codec-idle")
        codecs = Codecs(self._urgent_codecs, self._idle_codec)
        self._shards = [
            ShardMover(
                ShardContext(
                    number, name, tier, store, arena, config, self.progress, self.pump, clock
                ),
                codecs,
            )
            for number, (name, tier) in enumerate(tiers)
        ]

    def pump(self) -> None:
        """Take over the jobs that the store has made. Call after every call of the store."""
        for job in self._store.take_jobs():
            self._shards[job.shard].add(job)

    def tasks(self) -> list[tuple[str, Work]]:
        """The endless coroutines that do the work, by name, for a supervisor to run."""
        return [task for shard in self._shards for task in shard.tasks()]

    def fail(self, shard: int, error: TierUnavailable) -> None:
        """A shard's directory does not work: offline until its tier could be opened again."""
        self._shards[shard].fail(error)

    def retry_now(self) -> None:
        """Try to open the directories that failed at once."""
        for shard in self._shards:
            shard.retry_now()

    async def settle(self, timeout_s: float) -> bool:
        """Wait until the writers are through with all jobs made so far; False if time ran out."""
        made = [shard.made for shard in self._shards]
        deadline_s = self._clock() + timeout_s
        while not all(map(ShardMover.settled, self._shards, made)):
            if not await self.progress.wait(max(0.0, deadline_s - self._clock())):
                return False
        return True

    async def close(self) -> None:
        """Wait for running work and end the threads; the tasks have ended."""
        for shard in self._shards:
            await shard.stop()
        await asyncio.to_thread(self._end_threads)  # The event loop goes on: signals are heard.

    def _end_threads(self) -> None:
        self._urgent_codecs.shutdown(wait=True, cancel_futures=True)
        self._idle_codec.shutdown(wait=True, cancel_futures=True)
        for shard in self._shards:
            shard.close()
