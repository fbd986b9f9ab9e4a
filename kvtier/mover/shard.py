"""Runs one SSD directory's jobs: its threads, and the parts that use them.

    loads       blocks from it                        ssd-read    (more: raw blocks, scrubber)
    writes      blocks to it, ahead of the commits    codec, ssd-write
    commits     its transactions, in order            ssd-commit
    health      whether it works                      ssd-commit
    scrubber    reads it through, slowly              ssd-read

Each directory has threads of its own but for codecs, so one that hangs blocks no other.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvtier.errors import TierUnavailable
from kvtier.jobs import Job, LoadJob, RetireJob
from kvtier.mover.commits import ShardCommits
from kvtier.mover.context import ShardContext
from kvtier.mover.health import ShardHealth
from kvtier.mover.loads import ShardLoads
from kvtier.mover.scrubber import Scrubber
from kvtier.mover.writes import ShardWrites, WriteThreads

Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, eq=False)
class Codecs:
    """Threads that all directories share.

    Attributes:
        urgent: For blocks that somebody waits for.
        idle: One thread, for all others.
    """

    urgent: Executor
    idle: Executor


class ShardMover:
    """One directory. Runs on the event loop."""

    def __init__(self, context: ShardContext, codecs: Codecs) -> None:
        """Start no work yet; the tasks do."""
        config, number = context.config, context.number
        self._context = context
        self._readers = ThreadPoolExecutor(config.read_threads + 2, f"ssd{number}-read")
        self._writers = ThreadPoolExecutor(config.write_threads, f"ssd{number}-write")
        self._committer = ThreadPoolExecutor(1, f"ssd{number}-commit")
        health = self._health = ShardHealth(context)
        self._loads = ShardLoads(context, health, self._readers)
        self._commits = ShardCommits(context, health, self._committer, self._writers)
        threads = WriteThreads(codecs.urgent, codecs.idle, self._writers)
        self._writes = ShardWrites(context, health, self._loads, self._commits, threads)
        self._scrubber = Scrubber(context, health, self._loads, self._readers)
        health.turned = self._turned

    def add(self, job: Job) -> None:
        """Queue a job of this shard."""
        if isinstance(job, LoadJob):
            self._loads.add(job)
        elif isinstance(job, RetireJob):
            # Ahead of all others: the store has forgotten what is there, and nothing before it may
            # fail because of it.
            self._health.condemned.setdefault(job.segment, job.damaged)
            self._commits.turn.notify()
        else:
            self._writes.add(job)

    def tasks(self) -> list[tuple[str, Work]]:
        """The endless coroutines that do the work, by name."""
        number = self._context.number
        works: list[tuple[str, Work]] = [
            ("feed", self._writes.run),
            ("commit", self._commits.run),
            ("scrub", self._scrubber.run),
            ("recover", self._recover),
            ("load-raw", self._loads.run_raw),
        ]
        works += [(f"load-{i}", self._loads.run) for i in range(self._context.config.read_threads)]
        return [(f"ssd{number}-{name}", work) for name, work in works]

    @property
    def made(self) -> int:
        """Writer jobs made so far."""
        return self._commits.made

    def settled(self, made: int) -> bool:
        """Whether the first `made` of them are over."""
        return self._commits.settled(made)

    def fail(self, error: TierUnavailable) -> None:
        """The directory does not work: offline until the tier could be opened again."""
        self._health.fail(error)

    def retry_now(self) -> None:
        """If it failed, try to open it at once."""
        self._health.retry_now()

    async def stop(self) -> None:
        """Forget what is under way; the tasks have ended."""
        await self._commits.stop()

    def close(self) -> None:
        """Wait for what runs, and end the threads."""
        for executor in (self._readers, self._writers, self._committer):
            executor.shutdown(wait=True, cancel_futures=True)

    async def _recover(self) -> None:
        await self._health.recover(self._committer, self._quiet)

    def _quiet(self) -> bool:
        return self._commits.quiet and not self._loads.under_way and not self._scrubber.busy

    def _turned(self) -> None:
        if not self._health.online:
            self._loads.give_up()
            self._writes.give_up()
        self._commits.turn.notify()
