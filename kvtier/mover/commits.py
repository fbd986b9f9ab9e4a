"""What is committed to one SSD directory: one transaction after the other, in order.

A commit takes what is written, up to the first block that is not, or as much as it may carry. It
waits a moment for more while more is being written (group commit, by bytes and time).

A failed commit costs its blocks. Deletes and namespaces wait for the next one, in front of all that
came later, however long it takes: what the index forgot must not come back at a restart.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import structlog

from kvtier.errors import SegmentDamaged, TierError, TierFull, TierUnavailable
from kvtier.jobs import DeleteJob, RememberJob, RestampJob, WriteJob
from kvtier.mover.busy import BusyTime
from kvtier.mover.context import ShardContext
from kvtier.mover.health import ShardHealth
from kvtier.mover.progress import Progress
from kvtier.mover.quiet_log import QuietLog
from kvtier.tier.base import Deletion, WrittenBlock
from kvtier.types import BlockHash, Loss

log = structlog.get_logger(__name__)

MAX_DELETES = 128
DELETES_PAUSE_S = 0.01
"""Most deletes in one commit, and the pause after so many: a dropped namespace of 100,000 blocks
must not hold up loads, which want the same cores."""
GROUP_S = 0.005
"""Longest that a commit waits for more blocks."""
RETRY_S = 1.0
"""Pause after a commit that failed although the medium works."""
EXCESS_S = 1.0
"""Between two looks at the room on the medium."""

WriterJob = WriteJob | DeleteJob | RememberJob | RestampJob
Written = WrittenBlock | TierError


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Blocks that are written together; the outcome has one entry a job."""

    jobs: list[WriteJob]
    size_bytes: int
    outcome: asyncio.Task[list[Written]]

    def outcomes(self) -> list[Written]:
        """One a job, also after a bug."""
        if self.outcome.exception() is None:
            return self.outcome.result()
        return [TierUnavailable("the write did not return")] * len(self.jobs)


Item = Unit | DeleteJob | RememberJob | RestampJob


@dataclass(slots=True)
class _Batch:
    """What one commit carries: deletes take effect first, so it has no write before its delete."""

    deletes: list[DeleteJob] = field(default_factory=list)
    restamps: list[RestampJob] = field(default_factory=list)
    remembers: list[RememberJob] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    size_bytes: int = 0
    hashes: set[BlockHash] = field(default_factory=set)

    def takes(self, item: Item, most_bytes: int) -> bool:
        """Whether an item can be part of it, too."""
        if isinstance(item, Unit):
            fits = not self.units or self.size_bytes + item.size_bytes <= most_bytes
            apart = self.hashes.isdisjoint(job.meta.hash for job in item.jobs)
            return item.outcome.done() and fits and apart
        if isinstance(item, DeleteJob):
            return len(self.deletes) < MAX_DELETES and item.hash not in self.hashes
        return True

    def take(self, item: Item) -> None:
        """Add an item."""
        if isinstance(item, Unit):
            self.units.append(item)
            self.size_bytes += item.size_bytes
            self.hashes.update(job.meta.hash for job in item.jobs)
        elif isinstance(item, DeleteJob):
            self.deletes.append(item)
        elif isinstance(item, RememberJob):
            self.remembers.append(item)
        else:
            self.restamps.append(item)


class ShardCommits:
    """The transactions of one directory, and the answers to all its writer's jobs.

    Attributes:
        turn: Notified when there may be something to do.
        size_bytes: Blocks that are being written, or are written and not committed.
    """

    def __init__(
        self, context: ShardContext, health: ShardHealth, committer: Executor, writers: Executor
    ) -> None:
        """`committer` is the tier's one writer thread; `writers` may discard."""
        self.turn = Progress()
        self.size_bytes = 0
        self._context = context
        self._health = health
        self._committer = committer
        self._writers = writers
        self._items: deque[Item] = deque()
        self._open: OrderedDict[WriterJob, int] = OrderedDict()
        self._made = 0
        self._working = False
        self._busy = BusyTime(context.clock)
        self._retry_at_s = 0.0
        self._excess_at_s = 0.0
        self._quiet_log = QuietLog(context.clock)

    # Which jobs are open

    def note(self, job: WriterJob) -> None:
        """A job was made; each is answered once, by answer() or done()."""
        self._made += 1
        self._open[job] = self._made

    @property
    def made(self) -> int:
        """Jobs made so far."""
        return self._made

    def settled(self, made: int) -> bool:
        """Whether the first `made` jobs have their answers."""
        return next(iter(self._open.values()), made + 1) > made

    def is_open(self, job: WriterJob) -> bool:
        """Whether a job has no answer yet."""
        return job in self._open

    def answer(self, job: WriteJob, outcome: Written) -> None:
        """A write is over."""
        stored, error = (outcome, None) if isinstance(outcome, WrittenBlock) else (None, outcome)
        self._context.store.tiers.written(
            job,
            self._context.clock(),
            stored_bytes=0 if stored is None else stored.stored_bytes,
            segment=None if stored is None else stored.segment,
            loss=Loss.EXACT if stored is None else stored.block.loss,
            error=error,
        )
        self.done(job)

    def done(self, job: WriterJob) -> None:
        """A job is over; whoever calls this calls changed() once it is through."""
        del self._open[job]

    # What is to be committed

    def put(self, item: Item) -> None:
        """The next item in order."""
        self._items.append(item)
        if isinstance(item, Unit):
            self._busy.begin()
            self.size_bytes += item.size_bytes
            item.outcome.add_done_callback(lambda _: self.turn.notify())
        self.turn.notify()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way on the medium, and nothing written waits for a commit."""
        return not self._working and not self._busy.under_way

    async def stop(self) -> None:
        """Forget what is under way."""
        tasks = [item.outcome for item in self._items if isinstance(item, Unit)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self) -> None:
        """Commit, retire segments, look for excess; one at a time. Endless."""
        while True:
            while (step := self._next_step()) is None:
                await self.turn.wait(self._due_in_s())
            self._working = True
            try:
                await step()
            finally:
                self._working = False
                self.turn.notify()
                self._context.changed()

    def _next_step(self) -> Callable[[], Awaitable[None]] | None:
        """What to do now; None for nothing."""
        health, now_s = self._health, self._context.clock()
        if health.failed:
            return self._abandon if self._finished() else None
        if not health.online:
            return None  # What is written waits: nothing is lost.
        if now_s >= self._excess_at_s:
            return self._look_for_excess
        if now_s < self._retry_at_s:
            return None
        if health.condemned and not self._busy.under_way:
            return self._retire
        if self._due():
            return self._commit_group
        return None

    def _due(self) -> bool:
        """Whether there is something to commit; evictions wait for what is being written."""
        if not self._items:
            return False
        if not self._busy.under_way:
            return True
        evictions = (isinstance(item, DeleteJob) and item.evicted for item in self._items)
        first = next((n for n, evicted in enumerate(evictions) if not evicted), None)
        return first is not None and _Batch().takes(self._items[first], self._batch_bytes)

    def _due_in_s(self) -> float | None:
        """When there may be something to do without a notify(); None: not before one."""
        if not self._health.online:
            return None
        now_s = self._context.clock()
        due_s = self._excess_at_s
        if self._retry_at_s > now_s:
            due_s = min(due_s, self._retry_at_s)
        return max(0.0, due_s - now_s)

    @property
    def _batch_bytes(self) -> int:
        return self._context.config.batch_bytes

    def _finished(self) -> list[Unit]:
        return [item for item in self._items if isinstance(item, Unit) and item.outcome.done()]

    # Commits

    async def _commit_group(self) -> None:
        await self._let_grow()
        batch = _Batch()
        while self._items and batch.takes(self._items[0], self._batch_bytes):
            batch.take(self._items.popleft())
        await self._commit(batch)
        if len(batch.deletes) == MAX_DELETES:
            await asyncio.sleep(DELETES_PAUSE_S)

    async def _let_grow(self) -> None:
        """While blocks are being written, wait a moment for them; not if the batch is full."""
        deadline_s = self._context.clock() + GROUP_S
        while (left_s := deadline_s - self._context.clock()) > 0:
            finished = self._finished()
            full = sum(unit.size_bytes for unit in finished) >= self._batch_bytes
            if full or len(finished) == self._busy.under_way:
                return
            await self.turn.wait(left_s)

    async def _abandon(self) -> None:
        """The medium failed: answer what is written; deletes and namespaces wait."""
        batch = _Batch()
        for unit in self._finished():
            self._items.remove(unit)
            batch.take(unit)
        await self._commit(batch)

    async def _commit(self, batch: _Batch) -> None:
        """One transaction, and its answers, also after a bug."""
        written = [
            pair for unit in batch.units for pair in zip(unit.jobs, unit.outcomes(), strict=True)
        ]
        error: TierError | None = TierUnavailable("the commit did not return")
        try:
            written = await self._without_doomed(written)
            error = await self._transact(batch, [w for _, w in written if not _failed(w)])
            if any(isinstance(outcome, TierFull) for outcome in (error, *(w for _, w in written))):
                await self._report_room()
        finally:
            self._answer(batch, written, error)
        for unit in batch.units:
            if (bug := unit.outcome.exception()) is not None:
                raise bug  # The supervisor tells.

    async def _without_doomed(
        self, written: list[tuple[WriteJob, Written]]
    ) -> list[tuple[WriteJob, Written]]:
        """Give back the room of blocks that can't be committed; their outcome is an error then."""
        health = self._health
        kept: list[tuple[WriteJob, Written]] = []
        doomed: list[WrittenBlock] = []
        for job, outcome in written:
            if isinstance(outcome, WrittenBlock) and health.failed:
                doomed.append(outcome)
                kept.append((job, health.cause))
            elif isinstance(outcome, WrittenBlock) and outcome.segment in health.condemned:
                doomed.append(outcome)
                gone = SegmentDamaged("its segment was given up meanwhile", outcome.segment)
                kept.append((job, gone))
            else:
                kept.append((job, outcome))
        if doomed:
            await asyncio.wrap_future(self._writers.submit(self._discard, doomed))
        return kept

    def _discard(self, blocks: Sequence[WrittenBlock]) -> None:
        for block in blocks:
            self._context.tier.discard(block)

    async def _transact(self, batch: _Batch, writes: Sequence[Written]) -> TierError | None:
        context = self._context
        if not (batch.deletes or batch.restamps or batch.remembers or writes):
            return None
        commit = partial(
            context.tier.commit,
            deletes=[
                Deletion(job.hash, job.segment, job.stored_bytes, job.evicted)
                for job in batch.deletes
            ],
            writes=[block for block in writes if isinstance(block, WrittenBlock)],
            namespaces=[job.row for job in batch.remembers],
            restamps=[restamp for job in batch.restamps for restamp in job.restamps],
        )
        try:
            usage = await self._health.run(self._committer, commit)
        except TierError as error:
            self._health.trouble(error)
            return error
        context.store.tiers.ssd_committed(context.number, usage)
        return None

    async def _report_room(self) -> None:
        """Others may have filled the disk: the store has to know, or it would try for ever."""
        try:
            usage = await self._health.run(self._committer, self._context.tier.usage)
        except TierError as error:
            self._health.trouble(error)
            return
        self._context.store.tiers.ssd_committed(self._context.number, usage)

    def _answer(
        self,
        batch: _Batch,
        written: list[tuple[WriteJob, Written]],
        error: TierError | None,
    ) -> None:
        for job, outcome in written:
            self.answer(job, outcome if error is None or _failed(outcome) else error)
        for restamp in batch.restamps:  # Of no use to try again.
            self.done(restamp)
        if error is None:
            for delete in batch.deletes:
                self._context.store.tiers.deleted(delete)
                self.done(delete)
            for remember in batch.remembers:
                self.done(remember)
        else:
            self._items.extendleft(reversed([*batch.deletes, *batch.remembers]))
            if not isinstance(error, SegmentDamaged):
                self._retry_at_s = self._context.clock() + RETRY_S
        self._account(batch)
        self._tell([outcome for _, outcome in written if _failed(outcome)], error, batch)

    def _account(self, batch: _Batch) -> None:
        for unit in batch.units:
            self.size_bytes -= unit.size_bytes
            self._busy.end()
        if batch.units:
            self._context.store.counters.ssd_write_seconds += self._busy.elapsed_s()

    def _tell(self, failed: Sequence[Written], error: TierError | None, batch: _Batch) -> None:
        cause = error if error is not None else next(iter(failed), None)
        if cause is not None and (said := self._quiet_log.speak()):
            log.warning(
                "not stored on the ssd",
                directory=self._context.directory,
                blocks=len(failed) if error is None else sum(len(u.jobs) for u in batch.units),
                deletes_to_repeat=0 if error is None else len(batch.deletes),
                error=str(cause),
                failures=said,
            )

    # Segments

    async def _retire(self) -> None:
        """Give up what is condemned. Nothing is being written meanwhile (writes.py)."""
        context, health = self._context, self._health
        for segment, damaged in list(health.condemned.items()):
            retire = partial(context.tier.retire, segment, damaged=damaged)
            try:
                usage = await health.run(self._committer, retire)
            except TierError as error:
                health.trouble(error)
                self._retry_at_s = context.clock() + RETRY_S
                return
            health.condemned.pop(segment, None)
            context.store.tiers.ssd_committed(context.number, usage)
        self._excess_at_s = 0.0  # One may not have been enough.

    async def _look_for_excess(self) -> None:
        context, health = self._context, self._health
        self._excess_at_s = context.clock() + EXCESS_S
        if health.condemned:
            return
        tier = context.tier
        look = lambda: (tier.excess(), tier.usage())  # noqa: E731 - both on the writer's thread
        try:
            segment, usage = await health.run(self._committer, look)
        except TierError as error:
            health.trouble(error)
            return
        # Where others had taken all room, nothing is written that could tell of its return.
        context.store.tiers.ssd_committed(context.number, usage)
        if segment is not None:
            health.condemn(segment, damaged=False, reason="the file system is too full for it")


def _failed(outcome: Written) -> bool:
    return isinstance(outcome, TierError)
