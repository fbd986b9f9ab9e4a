"""Which blocks each tier holds, and in what room.

HostResidency owns the arena's extents, SsdResidency the queue of writes and deletes and the room on
the SSD, which a write takes from the coldest there. What leaves RAM is for tiers.py to say. No I/O,
one thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

from kvtier.admission import Admission, When
from kvtier.extents import Extent, ExtentAllocator
from kvtier.index import Block, BlockIndex, HostCopy, HostState, SsdState
from kvtier.jobs import DeleteJob, Job, RememberJob, WriteJob
from kvtier.metrics import Counters
from kvtier.policy.base import EvictionPolicy
from kvtier.tier.base import BlockMeta, NamespaceRow, TierUsage
from kvtier.types import BlockHash, Loss

SSD_RETRY_S = 5.0
"""After a failed write the SSD gets no new one for this long."""


class HostResidency:
    """Blocks in the arena: extents, pins, order of leaving.

    Attributes:
        pinned_bytes: Extents of copies that leases, pins or jobs use.
        quarantined_bytes: Extents without a copy, whose writer may still be writing.
    """

    def __init__(
        self,
        index: BlockIndex,
        policy: EvictionPolicy[Block],
        capacity_bytes: int,
        counters: Counters,
    ) -> None:
        self.extents = ExtentAllocator(capacity_bytes)
        self.pinned_bytes = 0
        self.quarantined_bytes = 0
        self._index = index
        self._policy = policy
        self._counters = counters

    def touch(self, blocks: list[Block]) -> None:
        """Note a use of READY blocks; they have their new stamps."""
        self._policy.touch(blocks, [block.stamp for block in blocks])

    def pin(self, copy: HostCopy) -> None:
        """Keep a copy where it is."""
        if not copy.pins:
            self.pinned_bytes += copy.extent.size_bytes
        copy.pins += 1

    def pin_all(self, copies: Iterable[HostCopy]) -> None:
        """Pin many: the hot path of Acquire, so without a call each."""
        newly_bytes = 0
        for copy in copies:
            if not copy.pins:
                newly_bytes += copy.extent.size_bytes
            copy.pins += 1
        self.pinned_bytes += newly_bytes

    def unpin_all(self, copies: Iterable[HostCopy]) -> None:
        """Undo pin_all(); a copy that left its block meanwhile gives its extent back."""
        freed_bytes = 0
        for copy in copies:
            copy.pins -= 1
            if not copy.pins:
                freed_bytes += copy.extent.size_bytes
                if copy.block.host is not copy:
                    self.extents.free(copy.extent)
        self.pinned_bytes -= freed_bytes

    def unpin(self, copy: HostCopy) -> None:
        """Undo one pin."""
        self.unpin_all((copy,))

    def make_ready(self, copy: HostCopy) -> None:
        """The copy's bytes are complete: readers may have them, and it may be evicted."""
        copy.state = HostState.READY
        if copy.current:
            self._policy.insert(copy.block, copy.block.stamp)

    def detach(self, block: Block) -> None:
        """Take the copy off its block; the extent is free once nobody pins it."""
        copy = block.host
        if copy is None:
            return
        if copy.state is HostState.READY:
            self._policy.remove(block)
        block.host = None
        if not copy.pins:
            self.extents.free(copy.extent)

    def discard(self, copy: HostCopy, *, keep_extent: bool) -> None:
        """End a copy that was never READY; its writer was its only pin.

        With keep_extent the writer may go on: quarantine until free_quarantined().
        """
        assert copy.pins == 1
        block, was_current = copy.block, copy.current
        if was_current:
            self.detach(block)
        copy.pins = 0
        self.pinned_bytes -= copy.extent.size_bytes
        if keep_extent:
            self.quarantined_bytes += copy.extent.size_bytes
        else:
            self.extents.free(copy.extent)
        if was_current:
            self._index.prune(block)

    def keep_out(self, extent: Extent) -> None:
        """Quarantine an extent that a former daemon gave to a writer."""
        self.extents.claim(extent)
        self.quarantined_bytes += extent.size_bytes

    def free_quarantined(self, extent: Extent) -> None:
        """Nobody writes there any more."""
        self.extents.free(extent)
        self.quarantined_bytes -= extent.size_bytes

    def coldest(self) -> Generator[Block, None, None]:
        """READY blocks in the order in which they should leave (policy/base.py)."""
        return self._policy.coldest()

    def evict(self, block: Block) -> None:
        """A READY, unpinned block leaves RAM."""
        assert block.host is not None
        self._counters.host_evicted_blocks += 1
        self._counters.host_evicted_bytes += block.host.extent.size_bytes
        self.detach(block)
        self._index.prune(block)

    def allocate(self, size_bytes: int, evictions: Iterator[None]) -> Extent | None:
        """An extent, evicting as long as none fits and something may leave."""
        while (extent := self.extents.allocate(size_bytes)) is None:
            if next(evictions, self) is self:
                return None
        return extent

    def __len__(self) -> int:
        return len(self._policy)


class SsdResidency:
    """Blocks on the SSD, and blocks on their way there.

    Room is projected: what the tier reported, plus writes queued, less deletes queued. The tier's
    next report corrects the projection, and the next write evicts by it.
    """

    def __init__(
        self,
        index: BlockIndex,
        host: HostResidency,
        policy: EvictionPolicy[Block],
        usage: TierUsage,
        queue_bytes: int,
        counters: Counters,
        admission: Admission,
    ) -> None:
        """`queue_bytes` bounds the blocks on their way to the SSD."""
        self.usage = usage
        self._admission = admission
        self.healthy = True
        self.queued_bytes = 0
        self.dirty: dict[Block, None] = {}
        self.dirty_bytes = 0
        self._index = index
        self._host = host
        self._policy = policy
        self._queue_bytes = queue_bytes
        self._counters = counters
        self._deleting_bytes = 0
        self._retry_at_s = 0.0
        self._last_job = 0
        self._jobs: list[Job] = []

    def take_jobs(self) -> list[Job]:
        """Hand out the jobs made since the last call, in order."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def touch(self, blocks: list[Block]) -> None:
        """Note a use; `blocks` have their new stamps."""
        self._policy.touch(blocks, [block.stamp for block in blocks])

    def restore(self, block: Block, stored_bytes: int, loss: Loss) -> None:
        """Take over a block that a former daemon stored."""
        block.ssd, block.ssd_bytes, block.ssd_loss = SsdState.STORED, stored_bytes, loss
        self._policy.insert(block, block.stamp)

    def stored(self, block: Block, now_s: float) -> None:
        """A block has become READY: write it when the policy says."""
        when = self._admission.stored(block.hash)
        if when is When.LATER or (when is When.NOW and not self.demote(block, now_s)):
            self.mark_dirty(block)

    def used(self, blocks: Iterable[Block]) -> None:
        """Blocks were acquired: for some policies that makes unwritten ones worth a write."""
        if self._admission.use_marks:
            for block in blocks:
                if block.ssd is SsdState.ABSENT:
                    self.mark_dirty(block)

    def admits(self, block: Block) -> bool:
        """Whether a block that leaves RAM unwritten is worth a write."""
        return self._admission.admits(marked=block in self.dirty)

    def skipped(self, block: Block) -> None:
        """A block that admits() refused leaves RAM."""
        self._admission.skipped(block.hash)
        self._counters.skipped_by_admission_blocks += 1

    def mark_dirty(self, block: Block) -> None:
        """A block is in RAM only; write it when there is time."""
        if block not in self.dirty:
            self.dirty[block] = None
            self.dirty_bytes += block.namespace.size_bytes

    def mark_clean(self, block: Block) -> None:
        """A block no longer waits to be written."""
        if block in self.dirty:
            del self.dirty[block]
            self.dirty_bytes -= block.namespace.size_bytes

    def demote(self, block: Block, now_s: float, *, urgent: bool = True) -> bool:
        """Queue a write of a READY block.

        False if the queue, the SSD or its health forbid it, or the block's namespace was dropped.
        """
        copy, namespace = block.host, block.namespace
        assert copy is not None
        assert copy.state is HostState.READY
        assert block.ssd is SsdState.ABSENT
        if not block.listed or now_s < self._retry_at_s:
            return False
        if self.queued_bytes + namespace.size_bytes > self._queue_bytes:
            return False
        if not self._make_room(namespace.size_bytes):
            return False
        self.remember(block)
        self.mark_clean(block)
        # The medium knows a block by its hash only: a later delete of the old one would hit ours.
        for dropped in self._index.retired_namesakes(block.hash):
            self.drop(dropped)
        self._last_job += 1
        block.ssd, block.ssd_job = SsdState.WRITING, self._last_job
        self._host.pin(copy)
        self.queued_bytes += namespace.size_bytes
        parent = None if block.parent is None else block.parent.hash
        meta = BlockMeta(
            hash=block.hash,
            parent=parent,
            depth=block.depth,
            namespace=namespace.digest,
            generation=namespace.generation,
            stamp=block.stamp,
        )
        size_bytes, loss = namespace.size_bytes, block.allowed_loss
        self._jobs.append(WriteJob(self._last_job, copy, meta, size_bytes, loss, urgent))
        return True

    def remember(self, block: Block) -> None:
        """Have the block's namespace stored before its first block."""
        namespace = block.namespace
        if not namespace.remembered:
            namespace.remembered = True
            row = NamespaceRow(namespace.digest, namespace.spec, namespace.generation)
            self._jobs.append(RememberJob(row))

    def new_generation(self, row: NamespaceRow) -> None:
        """Store a namespace's new generation, so that a restart does not undo a drop."""
        self._jobs.append(RememberJob(row))

    def drop(self, block: Block) -> None:
        """Take a block off the SSD, whether stored or on its way there."""
        self.mark_clean(block)
        if block.ssd is SsdState.ABSENT:
            return
        if block.ssd is SsdState.STORED:
            self._policy.remove(block)
        # A write on its way takes effect before this delete, and its answer no longer counts.
        self._jobs.append(DeleteJob(block.hash, block.ssd_bytes))
        self._deleting_bytes += block.ssd_bytes
        block.ssd, block.ssd_bytes, block.ssd_job = SsdState.ABSENT, 0, 0

    def forget(self, key: BlockHash, stored_bytes: int) -> None:
        """Delete a block that a former daemon stored and that nobody could hit."""
        self._jobs.append(DeleteJob(key, stored_bytes))
        self._deleting_bytes += stored_bytes

    def written(
        self, job: WriteJob, now_s: float, stored_bytes: int, loss: Loss, error: bool
    ) -> None:
        """A write job is over. After an error the block waits for another try."""
        self.queued_bytes -= job.size_bytes
        block = job.copy.block
        if error:
            self.healthy = False
            self._retry_at_s = now_s + SSD_RETRY_S
            self._counters.ssd_write_failed_blocks += 1
        else:
            self.healthy = True
            self._counters.ssd_written_blocks += 1
            self._counters.ssd_written_bytes += stored_bytes
        if block.ssd_job != job.id:
            return
        block.ssd_job = 0
        if error:
            block.ssd = SsdState.ABSENT
            if job.copy.current:
                self.mark_dirty(block)
        else:
            self.restore(block, stored_bytes, loss)

    def deleted(self, job: DeleteJob) -> None:
        """A delete job is over."""
        self._deleting_bytes -= job.stored_bytes

    def __len__(self) -> int:
        return len(self._policy)

    def _make_room(self, size_bytes: int) -> bool:
        if self._projected_bytes + size_bytes <= self.usage.limit_bytes:
            return True
        if size_bytes > self.usage.limit_bytes:
            return False  # Emptying the SSD would not help.
        with closing(self._policy.coldest()) as order:
            for block in order:
                copy = block.host
                if copy is not None and copy.state is HostState.LOADING:
                    continue
                if copy is None and block.children:
                    continue
                self._counters.ssd_evicted_blocks += 1
                self._counters.ssd_evicted_bytes += block.ssd_bytes
                self.drop(block)
                self._index.prune(block)
                if self._projected_bytes + size_bytes <= self.usage.limit_bytes:
                    return True
        return False

    @property
    def _projected_bytes(self) -> int:
        return self.usage.used_bytes + self.queued_bytes - self._deleting_bytes
