"""TieredStore decides: what is a hit, what gets room, what leaves, what is written where.

Plain synchronous code: no threads, locks, clocks, randomness or I/O. Time and completions come in
as arguments; jobs go out through take_jobs(). The only effect outside is plain stores into the
control page. All calls come from one thread, so each is atomic.

It is made of parts, and callers speak to the part that decides:

    store.reads     lookup, acquire, release, pin; loaded    <- the mover     reads.py
    store.writes    reserve, commit, abort; quarantine                        writes.py
    store.tiers     write_ahead, start_demotions, flush;                      tiers.py
                    written, deleted, ssd_committed          <- the mover

What takes more than one of them is here: namespaces and drops, finish, deadlines and owners, the
jobs, a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from kvtier.admission import Admission
from kvtier.arena import ControlPage
from kvtier.endurance import WriteBudget
from kvtier.errors import CapacityError, NamespaceMismatch
from kvtier.events import ResidencyEvents
from kvtier.index import Block, BlockIndex, HostState, Namespace, SsdState
from kvtier.jobs import Job
from kvtier.leases import LeaseTable, ReadLease, WriteLease
from kvtier.metrics import Counters
from kvtier.policy.base import EvictionPolicy
from kvtier.reads import Reads
from kvtier.residency import HostResidency
from kvtier.restore import Restore
from kvtier.shards import SsdResidency
from kvtier.tier.base import NamespaceRow, StoredBlocks, TierUsage
from kvtier.tiers import Tiers
from kvtier.types import BlockHash, GroupId, NamespaceDigest, NamespaceSpec, WritePolicy
from kvtier.writes import Writes

REAP_BATCH_BLOCKS = 128
"""Blocks of dropped namespaces and lost segments reclaimed in one go: about half a millisecond."""

AGE_BATCH_BLOCKS = 2048
"""Blocks whose age is looked at in one tick, for those of old age to be reclaimed."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Bounds of the store.

    Attributes:
        host_bytes: Room for blocks in the arena.
        lease_ttl_s: Life of a lease whose request names none.
        lease_ttl_max_s: Longest life of a lease.
        pin_limit_bytes: Most that pins may keep in RAM.
        write_queue_bytes: Most that may be on its way to the SSD; beyond it, demotions are shed.
        write_policy: Which blocks go to the SSD, and when.
        max_namespaces: Most namespaces open at once.
        daily_write_bytes: Most that a day may write to the SSD (endurance.py); 0: no limit.
        rated_write_bytes: What the SSDs may write in all, to estimate their life; 0: unknown.
        max_age_s: Blocks older than this are not hit, in any namespace; 0: no limit.
        event_backlog: Most changes that wait to be taken as events (events.py); 0: no events.
    """

    host_bytes: int
    lease_ttl_s: float = 30.0
    lease_ttl_max_s: float = 120.0
    pin_limit_bytes: int = 0
    write_queue_bytes: int = 256 << 20
    write_policy: WritePolicy = WritePolicy.LAZY
    max_namespaces: int = 1024
    daily_write_bytes: int = 0
    rated_write_bytes: int = 0
    max_age_s: int = 0
    event_backlog: int = 0


class TieredStore:
    """The blocks, the tiers and the leases of a daemon, and everything that is decided about them.

    Attributes:
        counters: What happened so far.
        index: All namespaces and their blocks.
        tiers: Where the blocks are, and how they leave.
        leases: Who holds what until when.
        reads: What readers get.
        writes: What writers get.
        events: What has become readable where, and what no longer is; None if nobody asked.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        control: ControlPage,
        epoch: bytes,
        host_policy: EvictionPolicy[Block],
        ssd_policies: Sequence[EvictionPolicy[Block]] = (),
        ssd_usages: Sequence[TierUsage] = (),
    ) -> None:
        """Start empty; restore() brings the SSD's blocks back.

        Args:
            config: Bounds.
            control: The arena's control page; its epoch is already `epoch`.
            epoch: This daemon's boot id, 16 bytes.
            host_policy: Order of leaving RAM; empty.
            ssd_policies: Order of leaving each SSD shard; empty for no SSD tier.
            ssd_usages: Each shard's accounting at open.
        """
        self.counters = Counters()
        self.index = BlockIndex()
        self.events: ResidencyEvents | None = None
        if config.event_backlog:
            self.events = ResidencyEvents(self.index, config.event_backlog, self.counters)
            self.index.watcher = self.events
        host = HostResidency(self.index, host_policy, config.host_bytes, self.counters)
        ssd = None
        if ssd_policies:
            ssd = SsdResidency(
                self.index,
                host,
                ssd_policies,
                ssd_usages,
                config.write_queue_bytes,
                self.counters,
                Admission(config.write_policy),
                WriteBudget(config.daily_write_bytes, config.rated_write_bytes),
            )
        self.tiers = Tiers(self.index, host, ssd, self.counters)
        self.leases = LeaseTable(
            first_id=int.from_bytes(epoch[:5], "little") << 20,
            ttl_s=config.lease_ttl_s,
            ttl_max_s=config.lease_ttl_max_s,
        )
        self.reads = Reads(self.tiers, self.leases, control, self.counters, config.pin_limit_bytes)
        self.writes = Writes(self.index, self.tiers, self.leases, control, epoch, self.counters)
        self._max_namespaces = config.max_namespaces
        self._max_age_s = config.max_age_s
        self._ageing: Iterator[Block] = iter(())

    # Namespaces

    def open_namespace(
        self, digest: NamespaceDigest, spec: NamespaceSpec, max_age_s: int = 0
    ) -> Namespace:
        """Make a namespace known; idempotent. The caller has checked that the digest is the spec's.

        Blocks of it that are older than `max_age_s` are not hit any more; 0 for no such wish. The
        shortest wish holds, as long as the daemon lives.

        Raises:
            NamespaceMismatch: the digest is known with another spec.
            CapacityError: too many namespaces.
        """
        namespace = self.index.namespaces.get(digest)
        if namespace is not None and namespace.spec != spec:
            raise NamespaceMismatch(f"namespace {digest.hex()[:12]} is open with another spec")
        if namespace is None:
            if len(self.index.namespaces) >= self._max_namespaces:
                raise CapacityError(
                    f"{self._max_namespaces} namespaces are open: raise max_namespaces"
                )
            namespace = self.index.open(digest, spec)
        wishes = [age for age in (namespace.max_age_s, max_age_s, self._max_age_s) if age]
        namespace.max_age_s = min(wishes, default=0)
        self._age(namespace)
        return namespace

    def drop_namespace(self, namespace: Namespace) -> None:
        """Nothing stored before is hit again, in O(1); reap() reclaims the bytes."""
        self.index.retire(namespace)
        self.counters.namespaces_dropped += 1
        if self.tiers.ssd is not None and namespace.remembered:
            row = NamespaceRow(namespace.digest, namespace.spec, namespace.generation)
            self.tiers.ssd.new_generation(row, namespace.remembered)

    def reap(self) -> bool:
        """Reclaim a batch of blocks of dropped namespaces and lost segments. True: more left."""
        for block in self.index.retired(REAP_BATCH_BLOCKS):
            self.tiers.drop(block)
        lost = self.tiers.ssd is not None and self.tiers.ssd.reap(REAP_BATCH_BLOCKS)
        return self.index.has_retired or lost

    def drop_blocks(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> int:
        """Take blocks out of all tiers; how many had a copy."""
        dropped = 0
        for key in hashes:
            block = namespace.blocks.get(key)
            if block is not None and block.held:
                dropped += 1
                self.tiers.drop(block)
            if self.tiers.ssd is not None:
                self.tiers.ssd.erase(key)
        self.counters.dropped_blocks += dropped
        return dropped

    # Requests, time, owners

    def finish(self, namespace: Namespace, tail: BlockHash) -> int:
        """Touch the chain that ends at `tail`, in every tier; the number of its blocks."""
        block = namespace.blocks.get(tail)
        if block is None:
            return 0
        chain = self.index.chain(block)
        self.tiers.touch(chain)
        return len(chain)

    def tick(self, now_s: float, wall_s: float) -> None:
        """Time has passed: `now_s` on the monotonic clock, `wall_s` since 1970. Call it at start.

        Ends what is past its deadline, and drops what is past its age.
        """
        self.tiers.wall_s = int(wall_s)
        if self.tiers.ssd is not None:
            self.tiers.ssd.tick(now_s)
        for namespace in self.index.namespaces.values():
            self._age(namespace)
        self._drop_aged()
        for lease in self.leases.expired(now_s):
            self.counters.leases_expired += 1
            self._end(lease)
        self.reads.expire_pins(now_s)

    def _age(self, namespace: Namespace) -> None:
        if namespace.max_age_s:
            namespace.oldest_s = self.tiers.wall_s - namespace.max_age_s

    def _drop_aged(self) -> None:
        """Look at some more blocks of the namespaces with a retention; an endless round."""
        batch = list(islice(self._ageing, AGE_BATCH_BLOCKS))
        for block in batch:
            if block.held and block.born_s < block.namespace.oldest_s and block.listed:
                writing = block.host is not None and block.host.state is HostState.WRITING
                if not writing:  # Its bytes are about to be new.
                    self.counters.expired_blocks += 1
                    self.tiers.drop(block)
        if len(batch) < AGE_BATCH_BLOCKS:
            self._ageing = (
                block
                for namespace in list(self.index.namespaces.values())
                if namespace.max_age_s
                for block in list(namespace.blocks.values())
            )

    def end_group(self, group: GroupId) -> None:
        """The group's last session is over: its leases end, its half-written extents wait."""
        for lease in self.leases.of_group(group):
            self._end(lease)

    def _end(self, lease: ReadLease | WriteLease) -> None:
        """End a lease whose owner did not."""
        if isinstance(lease, ReadLease):
            self.reads.end(lease)
        else:
            self.writes.quarantine(lease)

    # Jobs, restart

    def take_jobs(self) -> list[Job]:
        """What the mover is to do now, in order."""
        return [*self.reads.take_jobs(), *self.tiers.take_jobs()]

    def restore(
        self, rows: Sequence[Sequence[NamespaceRow]], stored: Sequence[StoredBlocks]
    ) -> None:
        """Take over what the SSD's shards remember, one entry each (restore.py). Call it once."""
        restore = Restore(self.index, self.tiers)
        restore.namespaces(rows)
        restore.blocks(stored)
        for namespace in self.index.namespaces.values():
            namespace.max_age_s = self._max_age_s
            self._age(namespace)
        self.index.watcher.all_changed()

    # Accounting

    def lease_counts(self) -> tuple[int, int, int]:
        """(read leases, write leases, pins) alive."""
        return *self.leases.counts(), self.reads.pins

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls. For tests: O(blocks)."""
        host, ssd = self.tiers.host, self.tiers.ssd
        self.index.check_integrity()
        host.extents.check_integrity()
        self.reads.check_integrity()
        self.writes.check_integrity()
        copies = {copy for lease in self.leases for copy in lease.copies} | self.reads.kept()
        for copy in copies:
            assert copy.block.linked or not copy.current, "a copy's block is out of its chain"
        ready = stored = stored_bytes = block_bytes = 0
        for namespace in self.index.namespaces.values():
            for block in namespace.blocks.values():
                if block.host is not None:
                    copies.add(block.host)
                    ready += block.host.state is HostState.READY
                stored += block.ssd is SsdState.STORED
                if ssd is not None and ssd.knows(block):
                    stored_bytes += block.ssd_bytes
                    block_bytes += namespace.size_bytes
        extents = sorted([*(copy.extent for copy in copies), *self.writes.quarantined()])
        assert all(sum(a) <= b.offset_bytes for a, b in pairwise(extents)), "two owners share bytes"
        if not self.index.has_retired:
            assert ready == len(host), "the host policy has other blocks than the index"
            if ssd is not None:
                assert stored == len(ssd), "the SSD policy has other blocks than the index"
                assert stored_bytes == sum(shard.stored_bytes for shard in ssd.shards)
                assert block_bytes == sum(shard.block_bytes for shard in ssd.shards)
                if not ssd.queued_bytes:
                    used = sum(extent.size_bytes for extent in extents)
                    assert used == host.extents.used_bytes, "arena bytes do not add up"
