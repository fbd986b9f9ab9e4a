"""Blocks to one SSD directory: what is fed to it, encoded and written, ahead of the commits.

    queue --feed--> encode (codec threads) --> write (write threads) --> commits

So blocks are encoded and written while those before them are committed. At most UNDER_WAY batches
are not committed; nothing is fed while loads are in flight. A failed block costs that block only.

Encoding is what costs CPU: what nobody waits for is encoded on one thread. (Not on a thread of the
lowest class: one that is preempted while it holds the GIL stops the event loop.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

from kvtier.errors import TierError
from kvtier.jobs import RememberJob, RestampJob, WriteJob
from kvtier.mover.commits import MAX_DELETES, ShardCommits, Unit, WriterJob, Written
from kvtier.mover.context import ShardContext
from kvtier.mover.health import Operation, ShardHealth
from kvtier.mover.loads import ShardLoads
from kvtier.tier.base import PreparedBlock, WrittenBlock

WAIT_FOR_LOADS_S = 0.5
"""Longest that loads keep writes waiting: a long run of them must not starve the writer."""
UNDER_WAY = 3
"""One that is committed, one written, one encoded; the tier keeps as much room (TierUsage)."""
UNIT_BYTES = 1 << 20
"""Small blocks are encoded and written together, or handing them over would take longer."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteThreads:
    """Where blocks are encoded and written.

    Attributes:
        codec: All shards'; they compete with the engine for cores.
        idle_codec: One, all shards': for what nobody waits for.
        write: This shard's.
    """

    codec: Executor
    idle_codec: Executor
    write: Executor


class ShardWrites:
    """The writer's queue of one directory. Runs on the event loop."""

    def __init__(
        self,
        context: ShardContext,
        health: ShardHealth,
        loads: ShardLoads,
        commits: ShardCommits,
        threads: WriteThreads,
    ) -> None:
        self._context = context
        self._health = health
        self._loads = loads
        self._commits = commits
        self._threads = threads
        self._queue: deque[WriterJob] = deque()
        self._urgent = 0
        self._remember: RememberJob | None = None

    def add(self, job: WriterJob) -> None:
        """Queue a job; it takes effect after those before it."""
        self._commits.note(job)
        self._queue.append(job)
        self._urgent += isinstance(job, WriteJob) and job.urgent
        self._commits.turn.notify()
        if not self._health.online:
            self.give_up()

    def give_up(self) -> None:
        """Answer the writes that have not begun: RAM must not wait for a disk that is out."""
        jobs, self._queue, self._urgent = self._queue, deque(), 0
        for job in jobs:
            if isinstance(job, WriteJob):
                self._commits.answer(job, self._health.cause)
            elif isinstance(job, RestampJob):
                self._commits.done(job)
            else:
                self._queue.append(job)
        if len(self._queue) < len(jobs):
            self._context.changed()

    async def run(self) -> None:
        """Feed the commits. Endless."""
        while True:
            while not self._may_feed():
                await self._commits.turn.wait()
            await self._loads.pass_by(WAIT_FOR_LOADS_S)
            self._feed()

    def _may_feed(self) -> bool:
        """Whether the first job of the queue may start now."""
        if not self._queue or not self._health.online or self._health.condemned:
            return False
        if self._remember is not None:
            if self._commits.is_open(self._remember):
                return False  # Encoding needs to know the namespace.
            self._remember = None
        if len(self._commits) >= 2 * MAX_DELETES:
            return False
        head = self._queue[0]
        if not isinstance(head, WriteJob) or not self._commits.size_bytes:
            return True
        return head.size_bytes <= self._room_bytes

    @property
    def _room_bytes(self) -> int:
        """What may still get under way."""
        return UNDER_WAY * self._context.config.batch_bytes - self._commits.size_bytes

    def _feed(self) -> None:
        """Start as much as may start, up to a batch."""
        # The first in the queue are encoded at once, too, if somebody waits for the last.
        codec = self._threads.codec if self._urgent else self._threads.idle_codec
        fed_bytes = 0
        while fed_bytes < self._context.config.batch_bytes and self._may_feed():
            job = self._queue.popleft()
            if isinstance(job, WriteJob):
                fed_bytes += self._start(job, codec)
                continue
            self._commits.put(job)
            if isinstance(job, RememberJob):
                self._remember = job

    def _start(self, first: WriteJob, codec: Executor) -> int:
        """Encode and write a block, and small ones behind it; their bytes."""
        jobs, size_bytes, names = [first], first.size_bytes, {first.meta.hash}
        most_bytes = min(UNIT_BYTES, self._room_bytes)
        while self._queue:
            job = self._queue[0]
            if not isinstance(job, WriteJob) or size_bytes + job.size_bytes > most_bytes:
                break
            if job.meta.hash in names:
                break  # One commit has a name once.
            names.add(job.meta.hash)
            jobs.append(job)
            size_bytes += job.size_bytes
            self._queue.popleft()
        self._urgent -= sum(job.urgent for job in jobs)
        outcome = asyncio.create_task(self._store(jobs, codec))
        self._commits.put(Unit(jobs, size_bytes, outcome))
        return size_bytes

    async def _store(self, jobs: Sequence[WriteJob], codec: Executor) -> list[Written]:
        encoded = codec.submit(self._encode, jobs)
        write, submitted = await asyncio.wrap_future(encoded)
        outcomes = await self._health.watch(write, submitted)
        for outcome in outcomes:
            if isinstance(outcome, TierError):
                self._health.trouble(outcome)
        return outcomes

    # On other threads

    def _encode(
        self, jobs: Sequence[WriteJob]
    ) -> tuple[Operation[list[Written]], Future[list[Written]]]:
        """On a codec thread. Hands over to a write thread itself: the event loop may be busy."""
        prepared = [self._prepare(job) for job in jobs]
        write = Operation(partial(self._write, prepared), self._context.clock)
        return write, self._threads.write.submit(write)

    def _prepare(self, job: WriteJob) -> PreparedBlock | TierError:
        block = self._context.arena.view(job.copy.extent, job.size_bytes)
        try:
            return self._context.tier.prepare(job.meta, block, job.allowed_loss, loss=job.copy.loss)
        except TierError as error:
            return error

    def _write(self, prepared: Sequence[PreparedBlock | TierError]) -> list[Written]:
        tier = self._context.tier
        outcomes: list[Written] = []
        try:
            for block in prepared:
                try:
                    outcomes.append(block if isinstance(block, TierError) else tier.write(block))
                except TierError as error:
                    outcomes.append(error)
        except Exception:  # A bug: nobody will know what was written, so its room goes back.
            for outcome in outcomes:
                if isinstance(outcome, WrittenBlock):
                    tier.discard(outcome)
            raise
        return outcomes
