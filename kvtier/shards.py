"""Which blocks the SSD holds, and in what room: its shards, one a directory.

Blocks are striped by hash over the shards that are online. A shard has its own accounting and its
own order of leaving; a write takes its room from the coldest there. No I/O, one thread.

A block on a shard that is offline, or in a segment that was given up, is a miss at once, because
its place says so (index.py). What is left of it goes when somebody stores it again, or by reap().
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice

from kvtier.admission import Admission, When
from kvtier.endurance import WriteBudget
from kvtier.extents import aligned
from kvtier.index import NOWHERE, Block, BlockIndex, HostState, Place, SsdState
from kvtier.jobs import DeleteJob, Job, RememberJob, RestampJob, RetireJob, WriteJob
from kvtier.metrics import Counters
from kvtier.policy.base import EvictionPolicy
from kvtier.residency import HostResidency
from kvtier.speed import ReadSpeed
from kvtier.tier.base import BlockMeta, NamespaceRow, Restamp, TierUsage
from kvtier.types import BlockHash, Loss, Tier

RETRY_S = 5.0
"""After a failed write a shard gets no new one for this long."""

RESTAMP_S = 600.0
RESTAMPS = 1 << 14
"""Every RESTAMP_S so many blocks' recency is stored: a page written each, so not more often."""

TOUCHED = 1 << 17
PASSED = 64
"""Blocks of one shard that may be passed over before others have to make room."""


class SsdShard:
    """One directory.

    Attributes:
        usage: What the tier reported after its last commit.
        online: Its blocks can be hit, and it takes new ones.
        healthy: The last write went well.
        queued_bytes: Blocks on their way to it.
        speed: How fast it reads.
    """

    def __init__(self, number: int, policy: EvictionPolicy[Block], usage: TierUsage) -> None:
        self.usage = usage
        self.online = True
        self.healthy = True
        self.queued_bytes = 0
        self.speed = ReadSpeed()
        self.number = number
        self.policy = policy
        self.writing = Place(number, None)
        self.deleting_bytes = 0
        self.retry_at_s = 0.0
        self.touched: OrderedDict[Block, None] = OrderedDict()
        self._places: dict[int, Place] = {}
        self._given_up: set[int] = set()

    def place(self, segment: int) -> Place:
        """The place of blocks in a segment that is not given up."""
        place = self._places.get(segment)
        if place is None:
            place = self._places[segment] = Place(self.number, segment, self.online)
        return place

    def set_online(self, online: bool) -> None:
        """All its segments at once."""
        self.online = online
        for place in self._places.values():
            place.online = online

    def give_up(self, segment: int) -> None:
        """Nobody finds the segment's blocks again."""
        self._given_up.add(segment)
        place = self._places.pop(segment, None)
        if place is not None:
            place.online = False

    def has(self, segment: int) -> bool:
        """False once a segment was given up."""
        return segment not in self._given_up

    def knows(self, place: Place) -> bool:
        """Whether blocks of this place still are somewhere."""
        return place.segment is None or self._places.get(place.segment) is place

    def back(self, segments: Sequence[int]) -> None:
        """After a failure: online, with those segments that are still what they were."""
        for segment in set(self._places) - set(segments):
            self.give_up(segment)
        # Nothing is on its way any more, and the medium may reuse the numbers of what is gone.
        self._given_up.intersection_update(segments)
        self.set_online(True)

    @property
    def projected_bytes(self) -> int:
        """Used once all that is queued is done."""
        return self.usage.used_bytes + self.queued_bytes - self.deleting_bytes

    @property
    def stored_bytes(self) -> int:
        """Stored forms of its blocks, offline ones too."""
        return sum(place.stored_bytes for place in self._places.values())

    @property
    def block_bytes(self) -> int:
        """The same blocks themselves."""
        return sum(place.block_bytes for place in self._places.values())

    def has_room(self, size_bytes: int) -> bool:
        """Whether a write fits without evictions."""
        return self.projected_bytes + size_bytes <= self.usage.limit_bytes


class SsdResidency:
    """Blocks on the SSD, and blocks on their way there.

    Room is projected: what the tier reported, plus writes queued, less deletes queued. The tier's
    next report corrects the projection, and the next write evicts by it.

    Attributes:
        shards: By number.
        budget: What may still be written.
        dirty: Blocks in RAM that are to be written, oldest first.
        dirty_bytes: Their size.
    """

    def __init__(  # noqa: PLR0913 - what it decides about
        self,
        index: BlockIndex,
        host: HostResidency,
        policies: Sequence[EvictionPolicy[Block]],
        usages: Sequence[TierUsage],
        queue_bytes: int,
        counters: Counters,
        admission: Admission,
        budget: WriteBudget,
    ) -> None:
        """One policy and one usage a shard; `queue_bytes` bounds the blocks on their way."""
        pairs = zip(policies, usages, strict=True)
        self.shards = [SsdShard(number, *pair) for number, pair in enumerate(pairs)]
        self.budget = budget
        # Not a dict: to find its first again and again costs the square of what was taken out.
        self.dirty: OrderedDict[Block, None] = OrderedDict()
        self.dirty_bytes = 0
        self._index = index
        self._host = host
        self._queue_bytes = queue_bytes
        self._counters = counters
        self._admission = admission
        self._last_job = 0
        self._restamp_at_s = RESTAMP_S
        self._jobs: list[Job] = []
        self._lost: list[Iterator[Block]] = []

    def take_jobs(self) -> list[Job]:
        """Hand out the jobs made since the last call, in order."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self.budget.tick(now_s)
        self._admission.tight = self.budget.tight
        if now_s >= self._restamp_at_s:
            self._restamp_at_s = now_s + RESTAMP_S
            self.restamp(RESTAMPS)

    # Shards

    def shard_for(self, key: BlockHash) -> SsdShard | None:
        """The shard that takes a block: by its hash, or the next online; None without any."""
        count = len(self.shards)
        first = int.from_bytes(key[:4], "little")
        for step in range(count):
            shard = self.shards[(first + step) % count]
            if shard.online:
                return shard
        return None

    @property
    def queued_bytes(self) -> int:
        """Blocks on their way to any shard."""
        return sum(shard.queued_bytes for shard in self.shards)

    @property
    def lifetime_days(self) -> float | None:
        """Days until the drives' rated bytes are written, at today's rate; None if unknown."""
        return self.budget.lifetime_days(sum(shard.usage.written_bytes for shard in self.shards))

    def failing(self, block: Block) -> bool:
        """Whether the block can't be written because its shard fails, or all are out."""
        shard = self.shard_for(block.hash)
        return shard is None or not shard.healthy

    def give_up(self, shard: SsdShard, segment: int, *, damaged: bool) -> None:
        """Drop a segment: its blocks are misses at once, reap() takes them out of the index."""
        shard.give_up(segment)
        self._jobs.append(RetireJob(shard.number, segment, damaged))
        self.forget_lost(shard)

    def forget_lost(self, shard: SsdShard) -> None:
        """Have reap() forget the blocks of segments that were given up."""
        self._lost.append(iter(list(shard.policy)))

    def reap(self, limit: int) -> bool:
        """Forget up to `limit` blocks of segments that were given up. True if more are left."""
        while self._lost and limit > 0:
            seen = 0
            for block in islice(self._lost[-1], limit):
                seen += 1
                if block.ssd is SsdState.STORED and not self.is_stored(block):
                    if block.host is not None and block.host.state is HostState.READY:
                        self.mark_dirty(block)  # RAM has its bytes: they are stored again.
                    self._index.prune(block)
            limit -= seen
            if limit > 0:
                self._lost.pop()
        return bool(self._lost)

    def knows(self, block: Block) -> bool:
        """Whether the SSD has a block, be it offline."""
        return block.ssd is SsdState.STORED and self.shards[block.place.shard].knows(block.place)

    def is_stored(self, block: Block) -> bool:
        """Whether the SSD has a block, be it offline; forgets one whose segment is gone."""
        if self.knows(block):
            return True
        if block.ssd is not SsdState.STORED:
            return False
        self._forget(self.shards[block.place.shard], block)
        self._index.prune(block)
        return False

    def _forget(self, shard: SsdShard, block: Block) -> None:
        """A stored block is gone from the medium."""
        shard.policy.remove(block)
        shard.touched.pop(block, None)
        block.place.stored_bytes -= block.ssd_bytes
        block.place.block_bytes -= block.namespace.size_bytes
        block.ssd, block.ssd_bytes, block.place = SsdState.ABSENT, 0, NOWHERE
        self._index.watcher.changed(block, Tier.SSD)

    # Recency

    def touch(self, blocks: Sequence[Block]) -> None:
        """Note a use of stored blocks; they have their new stamps."""
        if len(self.shards) == 1:
            self._touch(self.shards[0], blocks)
            return
        for shard in self.shards:
            self._touch(shard, [block for block in blocks if block.place.shard == shard.number])

    def _touch(self, shard: SsdShard, blocks: Sequence[Block]) -> None:
        shard.policy.touch(blocks, [block.stamp for block in blocks])
        shard.touched.update(dict.fromkeys(blocks))
        while len(shard.touched) > TOUCHED:
            shard.touched.popitem(last=False)

    def restamp(self, limit: int) -> None:
        """Have the recency of up to `limit` touched blocks a shard stored, oldest touch first."""
        for shard in self.shards:
            restamps = []
            for block in list(islice(shard.touched, limit)):
                del shard.touched[block]
                segment = block.place.segment
                if block.stored and segment is not None:
                    restamps.append(Restamp(block.hash, segment, block.stamp))
            if restamps:
                self._jobs.append(RestampJob(shard.number, tuple(restamps)))

    def restore(self, shard: SsdShard, blocks: list[Block], stamps: list[int]) -> None:
        """Take over blocks that a former daemon stored, coldest first."""
        shard.policy.insert_sorted(blocks, stamps)

    # Admission

    def stored(self, block: Block, now_s: float) -> None:
        """A block has become READY: write it when the policy says."""
        assert block.ssd is SsdState.ABSENT
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
        worth = self._admission.admits(marked=block in self.dirty)
        return worth and self.budget.allows(block.namespace.size_bytes)

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

    # Writes and deletes

    def demote(self, block: Block, now_s: float, *, urgent: bool = True) -> bool:
        """Queue a write of a READY block.

        False if the queue, the shard, its health or the endurance budget forbid it, or the block's
        namespace was dropped.
        """
        copy, namespace = block.host, block.namespace
        assert copy is not None
        assert copy.state is HostState.READY
        assert block.ssd is SsdState.ABSENT
        shard = self.shard_for(block.hash)
        if shard is None or not block.listed or now_s < shard.retry_at_s:
            return False
        size_bytes = namespace.size_bytes
        if shard.queued_bytes + size_bytes > self._queue_bytes // len(self.shards):
            return False
        if not self.budget.allows(size_bytes) or not self._make_room(shard, aligned(size_bytes)):
            return False
        self.remember(shard, block)
        self.mark_clean(block)
        # The medium knows a block by its hash only: a later delete of the old one would hit ours.
        for dropped in self._index.retired_namesakes(block.hash):
            self.drop(dropped)
        self._last_job += 1
        block.ssd, block.ssd_job, block.place = SsdState.WRITING, self._last_job, shard.writing
        self._host.pin(copy)
        shard.queued_bytes += aligned(size_bytes)
        self.budget.spend(size_bytes)
        parent = None if block.parent is None else block.parent.hash
        meta = BlockMeta(
            hash=block.hash,
            parent=parent,
            depth=block.depth,
            namespace=namespace.digest,
            generation=namespace.generation,
            stamp=block.stamp,
            born_s=block.born_s,
        )
        job = WriteJob(
            shard.number, self._last_job, copy, meta, size_bytes, block.allowed_loss, urgent
        )
        self._jobs.append(job)
        return True

    def back(self, shard: SsdShard, segments: Sequence[int]) -> None:
        """A shard works again after a failure, with those segments that are what they were."""
        shard.back(segments)
        shard.healthy = True
        self.forget_lost(shard)
        for namespace in self._index.namespaces.values():
            if shard.number in namespace.remembered:  # It may have lost its tables.
                row = NamespaceRow(namespace.digest, namespace.spec, namespace.generation)
                self._jobs.append(RememberJob(shard.number, row))

    def remember(self, shard: SsdShard, block: Block) -> None:
        """Have the block's namespace stored before its first block on a shard."""
        namespace = block.namespace
        if shard.number not in namespace.remembered:
            namespace.remembered.add(shard.number)
            row = NamespaceRow(namespace.digest, namespace.spec, namespace.generation)
            self._jobs.append(RememberJob(shard.number, row))

    def new_generation(self, row: NamespaceRow, shards: Iterable[int]) -> None:
        """Store a namespace's new generation, so that a restart does not undo a drop."""
        self._jobs += [RememberJob(shard, row) for shard in sorted(shards)]

    def drop(self, block: Block, *, evicted: bool = False) -> None:
        """Take a block off the SSD, whether stored or on its way there.

        With `evicted` only for its room: it may come back after a crash.
        """
        self.mark_clean(block)
        if block.ssd is SsdState.ABSENT:
            return
        place, shard = block.place, self.shards[block.place.shard]
        if block.ssd is SsdState.WRITING:
            # The write takes effect before this delete, and its answer no longer counts.
            self._delete(shard, place, block.hash, 0, evicted=False)
            block.ssd, block.ssd_job, block.place = SsdState.ABSENT, 0, NOWHERE
            return
        stored_bytes = block.ssd_bytes
        self._forget(shard, block)
        if shard.knows(place):
            self._delete(shard, place, block.hash, stored_bytes, evicted=evicted)

    def forget(self, place: Place, key: BlockHash, stored_bytes: int) -> None:
        """Delete a block that a former daemon stored and that nobody could hit."""
        self._delete(self.shards[place.shard], place, key, stored_bytes, evicted=False)

    def erase(self, key: BlockHash) -> None:
        """Have a block deleted wherever it may still be: evicted ones may linger (tier/base.py)."""
        for dropped in self._index.retired_namesakes(key):
            self.drop(dropped)  # Here, too: its room must not be counted as freed twice.
        self._jobs += [
            DeleteJob(shard.number, None, key, 0, evicted=False) for shard in self.shards
        ]

    def _delete(
        self, shard: SsdShard, place: Place, key: BlockHash, stored_bytes: int, *, evicted: bool
    ) -> None:
        stored_bytes = aligned(stored_bytes)
        self._jobs.append(DeleteJob(shard.number, place.segment, key, stored_bytes, evicted))
        shard.deleting_bytes += stored_bytes

    def written(
        self,
        job: WriteJob,
        now_s: float,
        *,
        stored_bytes: int,
        segment: int | None,
        loss: Loss,
    ) -> None:
        """A write job is over; `segment` None: it failed, and the block waits for another try."""
        shard, block = self.shards[job.shard], job.copy.block
        shard.queued_bytes -= aligned(job.size_bytes)
        self.budget.spend(stored_bytes - job.size_bytes)
        shard.healthy = segment is not None
        if segment is None:
            shard.retry_at_s = now_s + RETRY_S
        elif not shard.has(segment):
            segment = None  # Given up meanwhile: no fault of the shard.
        if segment is None:
            self._counters.ssd_write_failed_blocks += 1
        else:
            self._counters.ssd_written_blocks += 1
            self._counters.ssd_written_bytes += stored_bytes
        if block.ssd_job != job.id:
            return
        block.ssd_job = 0
        if segment is not None:
            block.ssd, block.ssd_bytes, block.ssd_loss = SsdState.STORED, stored_bytes, loss
            block.place = shard.place(segment)
            block.place.stored_bytes += stored_bytes
            block.place.block_bytes += block.namespace.size_bytes
            shard.policy.insert(block, block.stamp)
            self._index.watcher.changed(block, Tier.SSD)
            return
        block.ssd, block.place = SsdState.ABSENT, NOWHERE
        if job.copy.current:
            self.mark_dirty(block)

    def deleted(self, job: DeleteJob) -> None:
        """A delete job is over."""
        self.shards[job.shard].deleting_bytes -= job.stored_bytes

    def __len__(self) -> int:
        return sum(len(shard.policy) for shard in self.shards)

    # Room

    def _make_room(self, shard: SsdShard, size_bytes: int) -> bool:
        """Evict until a write fits: the coldest of the shard, as long as no block loses ancestors.

        Where too many of them are ancestors of blocks on other shards, those go first: the coldest
        of all shards, until this one has room.
        """
        if shard.has_room(size_bytes):
            return True
        if size_bytes > shard.usage.limit_bytes:
            return False  # Emptying the shard would not help.
        online = [each for each in self.shards if each.online]
        fits = lambda: shard.has_room(size_bytes)  # noqa: E731 - named for its readers
        if len(online) > 1 and self._evict([shard], fits, passed=PASSED):
            return True
        return self._evict(online, fits)

    def _evict(
        self, shards: list[SsdShard], enough: Callable[[], bool], passed: int | None = None
    ) -> bool:
        """Evict the coldest of some shards; False if nothing is left to, or `passed` stayed."""
        broken = not all(shard.online for shard in self.shards)
        with closing(_coldest(shards)) as order:
            for block in order:
                state = None if block.host is None else block.host.state
                if state is HostState.LOADING:
                    continue
                # What is being written to RAM may never be complete.
                if state is not HostState.READY and block.children and not broken:
                    if passed is not None:
                        passed -= 1
                        if not passed:
                            return False
                    continue
                self._counters.ssd_evicted_blocks += 1
                self._counters.ssd_evicted_bytes += block.ssd_bytes
                self.drop(block, evicted=True)
                self._index.prune(block)
                if enough():
                    return True
        return False


def _coldest(shards: list[SsdShard]) -> Generator[Block, None, None]:
    """Stored blocks of some shards, coldest first."""
    with ExitStack() as stack:
        orders = [stack.enter_context(closing(shard.policy.coldest())) for shard in shards]
        if len(orders) == 1:
            yield from orders[0]
        else:
            yield from heapq.merge(*orders, key=lambda block: block.stamp)
