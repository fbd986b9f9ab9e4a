"""The mover does what the store decided: jobs in, bytes moved, completions back.

    loads    a queue in prefix order, `read_threads` reads in flight
    writes   one ordered queue; a batch is encoded on the codec threads while the one before it is
             committed on the writer thread; waits while loads are in flight. Encoding is what
             costs CPU: batches that nobody waits for do it on one thread. (Not on threads of the
             lowest class: one that is preempted while it holds the GIL stops the event loop)

Runs on the event loop; blocking work is on small executors. The only place where TierError is
caught: it becomes a failed job, and the store makes a miss of it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from kvtier.errors import TierError, TierUnavailable
from kvtier.jobs import DeleteJob, LoadJob, RememberJob, WriteJob
from kvtier.store import TieredStore
from kvtier.tier.base import BlockTier, NamespaceRow, PreparedBlock
from kvtier.tier.host import HostArena
from kvtier.types import BlockHash, Loss

log = structlog.get_logger(__name__)

WRITES_WAIT_FOR_LOADS_S = 0.5
"""Longest that loads keep a write batch waiting."""

UNAVAILABLE_RETRY_S = 1.0


@dataclass(slots=True)
class _Batch:
    """Jobs for one commit; deletes take effect before writes, so no write precedes its delete."""

    deletes: list[DeleteJob] = field(default_factory=list)
    remembers: list[RememberJob] = field(default_factory=list)
    writes: list[WriteJob] = field(default_factory=list)
    prepared: list[PreparedBlock] = field(default_factory=list)


class Progress:
    """Lets coroutines wait until something changed, without polling."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next notify(); False if timeout_s passed first."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True


class Mover:
    """Runs the store's jobs on the host arena and the SSD tier."""

    def __init__(
        self,
        store: TieredStore,
        arena: HostArena,
        ssd: BlockTier,
        *,
        read_threads: int,
        batch_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start no work yet; run() does.

        Args:
            store: Whose jobs to run.
            arena: Where blocks are in RAM.
            ssd: Where they are on disk.
            read_threads: Reads in flight.
            batch_bytes: A group commit takes no more than this many bytes of blocks.
            clock: Seconds, monotonic.
        """
        self.progress = Progress()
        self._store = store
        self._arena = arena
        self._ssd = ssd
        self._batch_bytes = batch_bytes
        self._clock = clock
        self._loads: asyncio.Queue[LoadJob] = asyncio.Queue()
        self._loads_open = 0
        self._loading_since_s = 0.0
        self._no_loads = asyncio.Event()
        self._no_loads.set()
        self._writes: deque[WriteJob | DeleteJob | RememberJob] = deque()
        self._writes_made = 0
        self._writes_done = 0
        self._work = asyncio.Event()
        self._read_threads = read_threads
        self._readers = ThreadPoolExecutor(read_threads, "ssd-read")
        self._writer = ThreadPoolExecutor(1, "ssd-write")
        threads = min(4, os.cpu_count() or 1)
        self._codecs = ThreadPoolExecutor(threads, "codec")
        self._idle_codec = ThreadPoolExecutor(1, "codec-idle")

    def pump(self) -> None:
        """Take over the jobs that the store has made. Call after every call of the store."""
        for job in self._store.take_jobs():
            if isinstance(job, LoadJob):
                if not self._loads_open:
                    self._no_loads.clear()
                    self._loading_since_s = time.perf_counter()
                self._loads_open += 1
                self._loads.put_nowait(job)
            else:
                self._writes_made += 1
                self._writes.append(job)
                self._work.set()

    def tasks(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """The endless coroutines that do the work, by name, for a supervisor to run."""
        loaders = [(f"load-{index}", self._load_loop) for index in range(self._read_threads)]
        return [*loaders, ("write", self._write_loop)]

    async def settle(self, timeout_s: float) -> bool:
        """Wait until the writer is through with all jobs made so far; False if timeout_s passed."""
        target = self._writes_made
        deadline_s = self._clock() + timeout_s
        while self._writes_done < target:
            if not await self.progress.wait(max(0.0, deadline_s - self._clock())):
                return False
        return True

    def close(self) -> None:
        """Wait for running work and end the threads."""
        for executor in (self._readers, self._idle_codec, self._codecs, self._writer):
            executor.shutdown(wait=True, cancel_futures=True)

    async def _load_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            job = await self._loads.get()
            out = self._arena.view(job.copy.extent, job.size_bytes)
            stored_bytes, failure = 0, None
            try:
                stored_bytes = await loop.run_in_executor(
                    self._readers, self._ssd.read_into, job.hash, out
                )
            except TierError as error:
                failure = error
                log.warning("load failed", block=job.hash.hex(), error=str(error))
            finally:
                # Also after a bug in a tier: a job without an answer would pin its extent forever.
                if failure is None and not stored_bytes:
                    failure = TierError("the read did not return")
                self._loads_open -= 1
                if not self._loads_open:
                    self._no_loads.set()
                    busy_s = time.perf_counter() - self._loading_since_s
                    self._store.counters.ssd_read_seconds += busy_s
                self._store.reads.loaded(job, stored_bytes, failure)
                self.pump()
                self.progress.notify()

    async def _write_loop(self) -> None:
        committing: asyncio.Task[None] | None = None
        try:
            while True:
                while not self._writes:
                    if committing is not None and committing.done():
                        await committing  # After a bug it raises, and not only with the next batch.
                        committing = None
                    self._work.clear()
                    await self._work.wait()
                await self._let_loads_pass()
                batch = self._next_batch()
                if batch.remembers:
                    # Encoding needs the namespace. Rare: once a namespace, once a drop.
                    await self._remember(batch)
                failure = await self._prepare(batch)
                try:
                    if committing is not None:
                        await committing
                finally:
                    committing = asyncio.create_task(self._commit(batch, failure))
                    committing.add_done_callback(lambda _: self._work.set())
        except asyncio.CancelledError:
            if committing is not None:
                committing.cancel()  # It may be trying again and again, on a medium that failed.
            raise
        finally:
            if committing is not None:
                await asyncio.gather(committing, return_exceptions=True)

    async def _let_loads_pass(self) -> None:
        if self._loads_open:
            try:
                async with asyncio.timeout(WRITES_WAIT_FOR_LOADS_S):
                    await self._no_loads.wait()
            except TimeoutError:
                pass  # A long run of loads must not starve the writer for good.

    def _next_batch(self) -> _Batch:
        batch, size_bytes = _Batch(), 0
        written: set[BlockHash] = set()
        while self._writes:
            job = self._writes[0]
            if isinstance(job, DeleteJob):
                if job.hash in written:
                    break
                batch.deletes.append(job)
            elif isinstance(job, RememberJob):
                batch.remembers.append(job)
            else:
                if batch.writes and size_bytes + job.size_bytes > self._batch_bytes:
                    break
                size_bytes += job.size_bytes
                written.add(job.meta.hash)
                batch.writes.append(job)
            self._writes.popleft()
        return batch

    async def _prepare(self, batch: _Batch) -> TierError | None:
        """Encode the batch's blocks on the codec threads."""
        loop = asyncio.get_running_loop()
        urgent = any(job.urgent for job in batch.writes)
        encoded = [
            loop.run_in_executor(
                self._codecs if urgent else self._idle_codec,
                self._ssd.prepare,
                job.meta,
                self._arena.view(job.copy.extent, job.size_bytes),
                job.allowed_loss,
            )
            for job in batch.writes
        ]
        try:
            batch.prepared = await asyncio.gather(*encoded)
        except TierError as error:
            return error
        except Exception:  # A bug: the supervisor tells; no job may stay without an answer.
            await self._commit(batch, TierUnavailable("encoding did not return"))
            raise
        return None

    async def _remember(self, batch: _Batch) -> None:
        """Commit namespaces, however long it takes: blocks without one are lost at a restart."""
        rows = [job.row for job in batch.remembers]
        try:
            while (failure := await self._try_commit(namespaces=rows)) is not None:
                log.warning("namespace not stored yet", error=str(failure))
                await asyncio.sleep(UNAVAILABLE_RETRY_S)
        except Exception:  # A bug: the supervisor tells, and starts us again.
            self._writes.extendleft([*batch.writes[::-1], *batch.remembers, *batch.deletes])
            raise
        self._done(len(rows))

    async def _commit(self, batch: _Batch, failure: TierError | None) -> None:
        """Commit a batch and answer its jobs, also after a bug in a tier."""
        deletes = [job.hash for job in batch.deletes]
        started_s = time.perf_counter()
        outcome: TierError | None = TierUnavailable("the commit did not return")
        try:
            if failure is None:
                failure = await self._try_commit(deletes=deletes, writes=batch.prepared)
            if failure is not None:
                log.warning("blocks not written", blocks=len(batch.writes), error=str(failure))
                while deletes and (again := await self._try_commit(deletes=deletes)) is not None:
                    # What the index forgot must not come back at a restart.
                    log.warning("blocks not deleted yet", blocks=len(deletes), error=str(again))
                    await asyncio.sleep(UNAVAILABLE_RETRY_S)
            outcome = failure
        finally:
            self._store.counters.ssd_write_seconds += time.perf_counter() - started_s
            self._answer(batch, outcome)

    def _answer(self, batch: _Batch, failure: TierError | None) -> None:
        for gone in batch.deletes:
            self._store.tiers.deleted(gone)
        now_s = self._clock()
        for index, job in enumerate(batch.writes):
            if failure is None:
                stored = batch.prepared[index]
                stored_bytes, loss = stored.payload.size, stored.loss
            else:
                stored_bytes, loss = 0, Loss.EXACT
            self._store.tiers.written(
                job, now_s, stored_bytes=stored_bytes, loss=loss, error=failure
            )
        self._done(len(batch.deletes) + len(batch.writes))

    async def _try_commit(
        self,
        *,
        deletes: Sequence[BlockHash] = (),
        writes: Sequence[PreparedBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
    ) -> TierError | None:
        commit = partial(self._ssd.commit, deletes=deletes, writes=writes, namespaces=namespaces)
        try:
            usage = await asyncio.get_running_loop().run_in_executor(self._writer, commit)
        except TierError as error:
            return error
        self._store.tiers.ssd_committed(usage)
        return None

    def _done(self, jobs: int) -> None:
        self._writes_done += jobs
        self.pump()
        self.progress.notify()
