"""Whether one SSD directory works: how it leaves, and how it comes back.

    hangs      something took longer than the timeout. Offline until all of it has returned;
               nothing is lost
    fails      a write or a commit said so, or READS_IN_A_ROW reads. Offline until the tier could be
               opened again, which is tried with longer and longer pauses
    condemned  one of its segments is damaged, or there is no room for it: that segment goes

Offline its blocks are misses, and what waits for it is answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

import structlog

from kvtier.errors import KvtierError, SegmentDamaged, TierError, TierUnavailable
from kvtier.mover.context import ShardContext

log = structlog.get_logger(__name__)

READS_IN_A_ROW = 3
REOPEN_FIRST_S = 5.0
REOPEN_LONGEST_S = 60.0

T = TypeVar("T")


class Operation(Generic[T]):
    """A blocking call of the tier, and when it began: it may wait for a thread first."""

    def __init__(self, call: Callable[[], T], clock: Callable[[], float]) -> None:
        self._call = call
        self._clock = clock
        self._started_s: float | None = None

    def __call__(self) -> T:
        self._started_s = self._clock()
        return self._call()

    def left_s(self, timeout_s: float) -> float:
        """What is left of timeout_s; all of it while the call has not begun."""
        if self._started_s is None:
            return timeout_s
        return self._started_s + timeout_s - self._clock()


class ShardHealth:
    """The state of one directory. Runs on the event loop.

    Attributes:
        condemned: Segments that are to go, and whether they are damaged; nothing in them counts
            any more.
        turned: Called after every change of `online`, and when a segment was condemned.
    """

    def __init__(self, context: ShardContext) -> None:
        self.condemned: dict[int, bool] = {}
        self.turned: Callable[[], None] = lambda: None
        self._context = context
        self._failed = False
        self._hanging = 0
        self._bad_reads = 0
        self._cause = TierUnavailable(f"{context.directory} does not answer")
        self._failure = asyncio.Event()
        self._now = asyncio.Event()

    @property
    def online(self) -> bool:
        """True while it gets work."""
        return not self._failed and not self._hanging

    @property
    def failed(self) -> bool:
        """True from a failure until the tier was opened again."""
        return self._failed

    @property
    def cause(self) -> TierUnavailable:
        """Why it was offline last: the answer to what waits for it."""
        return self._cause

    # Operations under watch

    async def run(
        self, pool: Executor, call: Callable[[], T], on_late: Callable[[], None] | None = None
    ) -> T:
        """Do a blocking call on `pool`. It is waited for however long it takes; see watch()."""
        operation = Operation(call, self._context.clock)
        return await self.watch(operation, pool.submit(operation), on_late)

    async def watch(
        self,
        operation: Operation[T],
        submitted: Future[T],
        on_late: Callable[[], None] | None = None,
    ) -> T:
        """The result of a blocking call; while it takes too long, the directory is offline.

        Args:
            operation: The call.
            submitted: The same, on its executor.
            on_late: Called once if it takes too long.
        """
        timeout_s = self._context.config.timeout_s
        done = asyncio.wrap_future(submitted)
        try:
            while (left_s := operation.left_s(timeout_s)) > 0 and not done.done():
                await asyncio.wait((done,), timeout=left_s)
            if done.done():
                return done.result()
            self._hang(timeout_s)
            if on_late is not None:
                on_late()
            await asyncio.wait((done,))
            self._answers()
            return done.result()
        except asyncio.CancelledError:
            done.cancel()  # The thread goes on; nobody wants its result.
            raise

    def _hang(self, timeout_s: float) -> None:
        self._hanging += 1
        if self._hanging == 1 and not self._failed:
            text = f"{self._context.directory} has not answered for {timeout_s:g} s"
            log.error(
                "ssd directory hangs: its blocks are misses until it answers",
                directory=self._context.directory,
                seconds=timeout_s,
            )
            self._leave(TierUnavailable(text))

    def _answers(self) -> None:
        self._hanging -= 1
        if self.online:
            log.info("ssd directory answers again", directory=self._context.directory)
            self._context.store.tiers.shard_resumed(self._context.number)
            self._come_back()

    # Trouble

    def trouble(self, error: TierError) -> None:
        """A write or a commit went wrong."""
        if isinstance(error, SegmentDamaged):
            self.condemn(error.segment, damaged=True, reason=str(error))
        elif isinstance(error, TierUnavailable):
            self.fail(error)

    def read_over(self, error: TierError | None) -> None:
        """A read is over. One that fails may be bad luck; several in a row are not."""
        if error is None:
            self._bad_reads = 0
        elif isinstance(error, TierUnavailable):
            self._bad_reads += 1
            if self._bad_reads >= READS_IN_A_ROW:
                self.fail(error)
        else:
            self.trouble(error)

    def fail(self, error: TierUnavailable) -> None:
        """The medium is gone until it could be opened again."""
        if self._failed:
            return
        was_online, self._failed = self.online, True
        log.error(
            "ssd directory failed: its blocks are misses until it works again",
            directory=self._context.directory,
            error=str(error),
        )
        self._cause = error
        self._failure.set()
        if was_online:
            self._leave(error)

    def condemn(self, segment: int, *, damaged: bool, reason: str) -> None:
        """A segment is to go: nothing in it is hit from now on."""
        if segment in self.condemned:
            return
        log.warning(
            "ssd segment given up",
            directory=self._context.directory,
            segment=segment,
            reason=reason,
        )
        self.condemned[segment] = damaged
        tiers = self._context.store.tiers
        tiers.retire_segment(self._context.number, segment, damaged=damaged)
        self._context.changed()
        self.turned()

    def _leave(self, cause: TierUnavailable) -> None:
        self._cause = cause
        self._context.store.tiers.shard_down(self._context.number)
        self._context.changed()
        self.turned()

    def _come_back(self) -> None:
        self._context.changed()
        self.turned()

    # Coming back

    def retry_now(self) -> None:
        """Try to open a failed directory at once, not after the pause."""
        if self._failed:
            self._now.set()

    async def recover(self, writer: Executor, quiet: Callable[[], bool]) -> None:
        """Open the tier again whenever it has failed. Endless.

        Args:
            writer: The tier's writer thread.
            quiet: Whether nothing is under way on the medium.
        """
        while True:
            await self._failure.wait()
            pause_s = REOPEN_FIRST_S
            while self._failed:
                try:
                    async with asyncio.timeout(pause_s):
                        await self._now.wait()
                except TimeoutError:
                    pass
                self._now.clear()
                while not quiet():
                    await self._context.progress.wait(pause_s)
                await self._reopen(writer, first=pause_s == REOPEN_FIRST_S)
                pause_s = min(2 * pause_s, REOPEN_LONGEST_S)

    async def _reopen(self, writer: Executor, *, first: bool) -> None:
        context = self._context
        try:
            operation = writer.submit(lambda: (context.tier.reopen(), context.tier.usage()))
            segments, usage = await asyncio.wrap_future(operation)
        except KvtierError as error:
            say = log.warning if first else log.debug
            say("ssd directory still fails", directory=context.directory, error=str(error))
            return
        self._failed = False
        self._bad_reads = 0
        self._failure.clear()
        self.condemned = {s: damaged for s, damaged in self.condemned.items() if s in segments}
        log.info("ssd directory works again", directory=context.directory, blocks=usage.blocks)
        context.store.tiers.ssd_committed(context.number, usage)
        context.store.tiers.shard_up(context.number, segments)
        self._come_back()
