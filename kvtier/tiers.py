"""Both tiers together: how recent a block is, and how it leaves.

Speaks of blocks, never of leases: reads.py and writes.py lease, store.py drops. No I/O, one thread.

    touch, stamp_behind    recency: one number of the block, the same for all tiers
    evictions              out of RAM, coldest first, through the SSD's queue
    start_demotions, write_ahead, flush
                           to the SSD before that: soon in the way, idle, asked for
    drop                   out of all tiers
    written, deleted, ssd_committed, shard_down, shard_up, retire_segment, corrupt
                           <- the mover

A block leaves a tier coldest first, never while pinned, and never as the last copy while blocks
that continue it are held: no held block loses its ancestors. Only a failing SSD is no reason to
keep one, or the chains that it holds the tails of would fill RAM for good.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from kvtier.errors import TierError
from kvtier.index import STAMP_STRIDE, Block, BlockIndex, HostState, Namespace, SsdState
from kvtier.jobs import DeleteJob, Job, WriteJob
from kvtier.metrics import Counters
from kvtier.residency import HostResidency
from kvtier.shards import SsdResidency
from kvtier.tier.base import BlockMeta, TierUsage
from kvtier.types import BlockHash, Loss


class Tiers:
    """Where all blocks are, how recent they are, and how they leave.

    Attributes:
        host: Blocks in RAM.
        ssd: Blocks on the SSD and on their way there; None without an SSD tier.
        wall_s: Seconds since 1970, as of the last tick.
    """

    def __init__(
        self,
        index: BlockIndex,
        host: HostResidency,
        ssd: SsdResidency | None,
        counters: Counters,
    ) -> None:
        self.host = host
        self.ssd = ssd
        self.wall_s = 0
        self._index = index
        self._counters = counters
        self._tick = 0

    # Recency

    def touch(self, chain: Sequence[Block]) -> None:
        """Make a chain the most recent, in every tier, its head last to leave."""
        self._tick += 1
        newest = (self._tick + 1) * STAMP_STRIDE - 1
        for block in chain:
            block.stamp = newest - block.depth
        self.host.touch(
            [b for b in chain if b.host is not None and b.host.state is HostState.READY]
        )
        if self.ssd is not None:
            self.ssd.touch([b for b in chain if b.ssd is SsdState.STORED])

    def stamp_behind(self, parent: Block | None) -> int:
        """Stamp of a new block: just before its parent leaves."""
        if parent is not None:
            return parent.stamp - 1
        self._tick += 1
        return (self._tick + 1) * STAMP_STRIDE - 1

    # Out of RAM

    def evictions(self, now_s: float) -> Generator[None, None, None]:
        """Evict the coldest block that may leave RAM, at each step. Close it before any other call.

        An unwritten block goes to the SSD's queue first; if that is full its demotion is shed.
        """
        host = self.host
        if host.extents.used_bytes == host.pinned_bytes + host.quarantined_bytes:
            return  # Without a look at every block: the answer is due at once.
        with closing(host.coldest()) as order:
            for block in order:
                copy = block.host
                assert copy is not None
                if copy.pins:
                    continue
                stored = self.ssd is not None and self.ssd.is_stored(block)
                if not stored and not self._may_go_unwritten(block, now_s):
                    continue
                host.evict(block)
                yield

    def _may_go_unwritten(self, block: Block, now_s: float) -> bool:
        """Whether an unwritten block leaves RAM now; if it is worth it, it is queued instead."""
        ssd = self.ssd
        admitted = ssd is not None and ssd.admits(block)
        if ssd is not None and admitted and ssd.demote(block, now_s):
            return False  # Leaves once it is written.
        if block.children and (ssd is None or not ssd.failing(block)):
            return False
        if ssd is not None:
            ssd.mark_clean(block)
            if admitted:
                self._counters.demotions_shed_blocks += 1
            else:
                ssd.skipped(block)
        return True

    # To the SSD

    def start_demotions(self, size_bytes: int, now_s: float) -> bool:
        """Queue writes of the coldest unwritten blocks in the way of size_bytes.

        Returns:
            True if waiting for the queue lets evictions() take them without losing any.
        """
        if self.ssd is None:
            return False
        missing = size_bytes - self.host.extents.free_bytes
        pending = False
        if missing > 0:
            with closing(self.host.coldest()) as order:
                for block in order:
                    copy = block.host
                    assert copy is not None
                    if block.ssd is SsdState.WRITING:
                        if not self.ssd.shards[block.place.shard].online:
                            continue  # Nobody knows when it answers.
                        pending = True
                    elif copy.pins:
                        continue
                    elif not self.ssd.is_stored(block) and self.ssd.admits(block):
                        if not self.ssd.demote(block, now_s):
                            continue
                        pending = True
                    missing -= copy.extent.size_bytes
                    if missing <= 0:
                        break
        return pending

    def write_ahead(self, now_s: float, *, idle: bool) -> None:
        """Queue writes of unwritten blocks, oldest first, if idle or if they fill half the RAM."""
        if self.ssd is None or not self.ssd.dirty:
            return
        bearable_bytes = self.host.extents.capacity_bytes // 2
        urgent = self.ssd.dirty_bytes > bearable_bytes
        while self.ssd.dirty and (idle or self.ssd.dirty_bytes > bearable_bytes):
            block = next(iter(self.ssd.dirty))
            if not block.listed:
                self.ssd.mark_clean(block)
            elif not self.ssd.demote(block, now_s, urgent=urgent):
                return

    def flush(self, namespace: Namespace, hashes: Sequence[BlockHash], now_s: float) -> list[bool]:
        """Which blocks are on the SSD now; queues writes of those that are in RAM only."""
        durable: list[bool] = []
        for key in hashes:
            block = namespace.blocks.get(key)
            durable.append(block is not None and block.stored)
            if self.ssd is None or block is None or self.ssd.is_stored(block):
                continue
            if block.ssd is SsdState.WRITING:
                continue
            if block.host is not None and block.host.state is HostState.READY:
                self.ssd.demote(block, now_s)
        return durable

    # Out of all tiers

    def drop(self, block: Block) -> None:
        """A block leaves everything, its place in the chain too if nothing is behind it."""
        self.drop_copies(block)
        self._index.prune(block)

    def allow_loss(self, block: Block, allowed_loss: Loss) -> None:
        """A client stores a block that RAM has: the SSD may have lost no more of it than this."""
        before, block.allowed_loss = block.allowed_loss, min(block.allowed_loss, allowed_loss)
        copy, ssd = block.host, self.ssd
        if ssd is None or copy is None or copy.state is not HostState.READY:
            return
        lost = {
            SsdState.STORED: block.ssd_loss,
            SsdState.WRITING: before,
            SsdState.ABSENT: Loss.EXACT,
        }
        if lost[block.ssd] > allowed_loss:
            ssd.drop(block)
            ssd.mark_dirty(block)

    def drop_copies(self, block: Block) -> None:
        """A block leaves every tier and keeps its place in the chain, for a new copy."""
        self.host.detach(block)
        if self.ssd is not None:
            self.ssd.drop(block)

    def give_up_load(self, block: Block) -> None:
        """A block does not come to RAM after all; what the SSD has of it stays."""
        self.host.detach(block)
        self._index.prune(block)

    # The SSD's jobs and their completions

    def take_jobs(self) -> list[Job]:
        """What the SSD's writer is to do now, in order."""
        return [] if self.ssd is None else self.ssd.take_jobs()

    def written(
        self,
        job: WriteJob,
        now_s: float,
        *,
        stored_bytes: int,
        segment: int | None,
        loss: Loss,
        error: TierError | None,
    ) -> None:
        """A write job is over; `segment` is where the block is, None after an error."""
        assert self.ssd is not None
        assert (segment is None) == (error is not None)
        self.ssd.written(job, now_s, stored_bytes=stored_bytes, segment=segment, loss=loss)
        self.host.unpin(job.copy)
        self._index.prune(job.copy.block)

    def deleted(self, job: DeleteJob) -> None:
        """A delete job is over."""
        assert self.ssd is not None
        self.ssd.deleted(job)

    def ssd_committed(self, shard: int, usage: TierUsage) -> None:
        """A shard's accounting after a batch."""
        assert self.ssd is not None
        self.ssd.shards[shard].usage = usage

    # What happens to the SSD's shards

    def shard_down(self, shard: int) -> None:
        """A directory fails or hangs: its blocks are misses, others take new ones. Idempotent."""
        assert self.ssd is not None
        self.ssd.shards[shard].set_online(False)
        self._index.watcher.all_changed()

    def shard_resumed(self, shard: int) -> None:
        """It only hung: nothing was lost."""
        assert self.ssd is not None
        self.ssd.shards[shard].set_online(True)
        self._index.watcher.all_changed()

    def shard_up(self, shard: int, segments: Sequence[int]) -> None:
        """It was opened again; blocks outside of these segments are gone."""
        assert self.ssd is not None
        self.ssd.back(self.ssd.shards[shard], segments)
        self._index.watcher.all_changed()

    def retire_segment(self, shard: int, segment: int, *, damaged: bool) -> None:
        """Give up all blocks of a segment: misses at once, reclaimed in batches. Idempotent."""
        assert self.ssd is not None
        if self.ssd.shards[shard].has(segment):
            self.ssd.give_up(self.ssd.shards[shard], segment, damaged=damaged)

    def corrupt(self, meta: BlockMeta, shard: int, segment: int, reason: str) -> None:
        """The scrubber found a block's bytes wrong: it is dropped on the SSD and counted."""
        assert self.ssd is not None
        namespace = self._index.namespaces.get(meta.namespace)
        block = None if namespace is None else namespace.blocks.get(meta.hash)
        if block is None or block.ssd is not SsdState.STORED:
            return  # Dropped meanwhile.
        if (block.place.shard, block.place.segment) != (shard, segment):
            return  # Stored again, elsewhere.
        loading = block.host is not None and block.host.state is HostState.LOADING
        if loading:
            return  # It finds out by itself.
        counts = self._counters.corrupt_blocks
        counts[reason] = counts.get(reason, 0) + 1
        self.ssd.drop(block)
        if block.host is not None and block.host.state is HostState.READY:
            self.ssd.mark_dirty(block)  # RAM has its bytes: they are stored again.
        self._index.prune(block)

    # Restart

    def restored(self, newest_stamp: int) -> None:
        """What is touched from now on is newer than all that a former daemon stored."""
        self._tick = max(self._tick, newest_stamp // STAMP_STRIDE)
