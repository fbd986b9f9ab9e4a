"""TieredStore decides: what is a hit, what gets room, what leaves, what is written where.

Plain synchronous code: no threads, locks, clocks, randomness or I/O. Time and completions come in
as arguments; jobs go out through take_jobs(). The only effect outside is plain stores into the
control page. All calls come from one thread, so each is atomic.

    acquire   -> pin what is in RAM, reserve extents for what is only on the SSD, LoadJobs
    reserve   -> extents for new blocks, evicting the coldest; commit makes them visible
    finish    -> the request's chain becomes the most recent, its head last to leave
    loaded, written, deleted, ssd_committed <- the mover

A block leaves a tier coldest first, never while pinned, and never as the last copy while blocks
that continue it are held: no held block loses its ancestors. Only a failing SSD is no reason to
keep one, or the chains that it holds the tails of would fill RAM for good.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

from kvtier.arena import LEASE_SLOTS, WRITE_RECORDS, ControlPage, WriteRecord
from kvtier.errors import (
    CapacityError,
    InvalidRequest,
    LeaseState,
    NamespaceMismatch,
    TierError,
    UnknownLease,
)
from kvtier.extents import Extent, aligned
from kvtier.index import STAMP_STRIDE, Block, BlockIndex, HostCopy, HostState, Namespace, SsdState
from kvtier.jobs import DeleteJob, Job, LoadJob, WriteJob
from kvtier.leases import LeaseTable, Pin, Quarantine, ReadLease, WriteLease
from kvtier.metrics import Counters
from kvtier.policy.base import EvictionPolicy
from kvtier.residency import HostResidency, SsdResidency
from kvtier.tier.base import NamespaceRow, StoredBlock, TierUsage
from kvtier.types import BlockHash, GroupId, Loss, NamespaceDigest, NamespaceSpec, Refusal

REAP_BATCH_BLOCKS = 1024
"""Blocks of dropped namespaces whose bytes are reclaimed in one go."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Bounds of the store.

    Attributes:
        host_bytes: Room for blocks in the arena.
        lease_ttl_s: Life of a lease whose request names none.
        lease_ttl_max_s: Longest life of a lease.
        pin_limit_bytes: Most that pins may keep in RAM.
        write_queue_bytes: Most that may be on its way to the SSD; beyond it, demotions are shed.
        max_namespaces: Most namespaces open at once.
    """

    host_bytes: int
    lease_ttl_s: float = 30.0
    lease_ttl_max_s: float = 120.0
    pin_limit_bytes: int = 0
    write_queue_bytes: int = 256 << 20
    max_namespaces: int = 1024


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached prefix by the fastest tier of each block."""

    host_blocks: int
    ssd_blocks: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to reserve().

    Attributes:
        lease: None where nothing is granted.
        indices: Which of the asked hashes the lease's copies are.
        refusal: Why not all absent blocks are granted.
        present_blocks: Leading hashes that were present before.
        covered_blocks: Leading hashes that are present, being written, or granted here.
    """

    lease: WriteLease | None
    indices: list[int]
    refusal: Refusal
    present_blocks: int
    covered_blocks: int = 0


class TieredStore:
    """The host tier, the SSD tier (if there is one) and everything that is decided about them."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        control: ControlPage,
        epoch: bytes,
        host_policy: EvictionPolicy[Block],
        ssd_policy: EvictionPolicy[Block] | None = None,
        ssd_usage: TierUsage | None = None,
    ) -> None:
        """Start empty; restore() brings the SSD's blocks back.

        Args:
            config: Bounds.
            control: The arena's control page; its epoch is already `epoch`.
            epoch: This daemon's boot id, 16 bytes.
            host_policy: Order of leaving RAM; empty.
            ssd_policy: Order of leaving the SSD; None for no SSD tier.
            ssd_usage: The SSD tier's accounting at open; goes with ssd_policy.
        """
        self.config = config
        self.counters = Counters()
        self.index = BlockIndex()
        self.host = HostResidency(self.index, host_policy, config.host_bytes, self.counters)
        self.ssd: SsdResidency | None = None
        if ssd_policy is not None:
            assert ssd_usage is not None
            self.ssd = SsdResidency(self.host, ssd_policy, ssd_usage, config.write_queue_bytes)
        self.draining = False
        self._control = control
        self._epoch = epoch
        self._tick = 0
        self._leases = LeaseTable(first_id=int.from_bytes(epoch[:5], "little") << 20)
        self._slots = list(range(LEASE_SLOTS - 1, -1, -1))
        self._records = list(range(WRITE_RECORDS - 1, -1, -1))
        self._pins: dict[bytes, Pin] = {}
        self._quarantine: dict[int, Quarantine] = {}
        self._loading: dict[HostCopy, list[ReadLease]] = {}
        self._loads: list[Job] = []

    # Namespaces

    def open_namespace(self, digest: NamespaceDigest, spec: NamespaceSpec) -> Namespace:
        """Make a namespace known; idempotent. The caller has checked that the digest is the spec's.

        Raises:
            NamespaceMismatch: the digest is known with another spec.
            CapacityError: too many namespaces.
        """
        namespace = self.index.namespaces.get(digest)
        if namespace is not None:
            if namespace.spec != spec:
                raise NamespaceMismatch(f"namespace {digest.hex()[:12]} is open with another spec")
            return namespace
        if len(self.index.namespaces) >= self.config.max_namespaces:
            raise CapacityError(
                f"{self.config.max_namespaces} namespaces are open: raise max_namespaces"
            )
        return self.index.open(digest, spec)

    def drop_namespace(self, namespace: Namespace) -> None:
        """Nothing stored before is hit again, in O(1); reap() reclaims the bytes."""
        self.index.retire(namespace)
        self.counters.namespaces_dropped += 1
        if self.ssd is not None and namespace.remembered:
            row = NamespaceRow(namespace.digest, namespace.spec, namespace.generation)
            self.ssd.new_generation(row)

    def reap(self) -> bool:
        """Reclaim a batch of dropped namespaces' blocks. True if more is left."""
        for block in self.index.retired(REAP_BATCH_BLOCKS):
            self._drop(block)
        return self.index.has_retired

    # Reading

    def lookup(
        self, namespace: Namespace, hashes: Sequence[BlockHash], allowed_loss: Loss = Loss.EXACT
    ) -> Prefix:
        """The longest cached prefix; no side effect."""
        prefix = self._hits(namespace, hashes, allowed_loss)
        on_host = sum(block.host is not None for block in prefix)
        return Prefix(on_host, len(prefix) - on_host)

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        group: GroupId,
        now_s: float,
        ttl_s: float = 0.0,
        request_id: bytes = b"",
        allowed_loss: Loss = Loss.EXACT,
    ) -> tuple[ReadLease | None, Refusal]:
        """Lease the longest cached prefix, shortened to what has room; touch it; load the rest.

        Raises:
            LeaseState: the request id has a live lease on other hashes.
        """
        if (lease := self._leases.by_request(group, request_id)) is not None:
            granted = [copy.block.hash for copy in lease.copies]
            if granted != list(hashes[: len(granted)]):
                raise LeaseState(f"request {request_id.hex()} has a lease on other blocks")
            return lease, Refusal.NONE
        prefix = self._hits(namespace, hashes, allowed_loss)
        refusal = Refusal.NONE if self._slots else Refusal.LEASES
        copies, on_ssd = self._grant(prefix, now_s) if self._slots else ([], 0)
        if len(copies) < len(prefix) and refusal is Refusal.NONE:
            refusal = Refusal.FULL
        self._count_acquire(namespace, len(hashes), len(copies), on_ssd)
        if not copies:
            return None, refusal
        slot = self._slots.pop()
        lease = ReadLease(
            id=self._leases.new_id(),
            group=group,
            deadline_s=now_s + self._ttl(ttl_s),
            copies=copies,
            slot=slot,
            generation=self._control.generation(slot) + 1,
            request_id=request_id,
            usable=len(copies),
            ssd_blocks=on_ssd,
        )
        self._leases.add(lease)
        if on_ssd or self._loading:
            for copy in copies:
                if copy.state is HostState.LOADING:
                    self._loading[copy].append(lease)
        self._advance(lease)
        return lease, refusal

    def read_lease(self, lease_id: int, group: GroupId) -> ReadLease:
        """A live read lease of the group; raises UnknownLease or LeaseState."""
        return self._leases.read_lease(lease_id, group)

    def release(self, lease_id: int, group: GroupId) -> None:
        """End a read lease; harmless if it is over.

        Raises:
            LeaseState: it is a write lease.
        """
        lease = self._leases.find(lease_id, group)
        if isinstance(lease, WriteLease):
            raise LeaseState(f"lease {lease_id} is a write lease: commit or abort it")
        if lease is not None:
            self._end_read(lease)

    def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        pin_id: bytes,
        now_s: float,
        ttl_s: float,
    ) -> int:
        """Keep the longest cached prefix in RAM for ttl_s, up to the limit on pins; its length."""
        pinned_bytes = sum(
            copy.extent.size_bytes for pin in self._pins.values() for copy in pin.copies
        )
        room = max(0, self.config.pin_limit_bytes - pinned_bytes) // aligned(namespace.size_bytes)
        copies, _ = self._grant(self._hits(namespace, hashes, Loss.EXACT)[:room], now_s)
        if copies:
            self._pins[pin_id] = Pin(pin_id, now_s + ttl_s, copies)
        return len(copies)

    def unpin(self, pin_id: bytes) -> None:
        """End a pin; harmless if it is over."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self.host.unpin_all(pin.copies)

    # Writing

    def start_demotions(self, size_bytes: int, now_s: float) -> bool:
        """Queue writes of the coldest unwritten blocks in the way of size_bytes.

        Returns:
            True if waiting for the queue lets reserve() take them without losing any.
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
                    if block.ssd is SsdState.ABSENT:
                        if copy.pins or not self.ssd.demote(block, now_s):
                            continue
                        pending = True
                    elif block.ssd is SsdState.WRITING:
                        pending = True
                    elif copy.pins:
                        continue
                    missing -= copy.extent.size_bytes
                    if missing <= 0:
                        break
        return pending

    def reserve(  # noqa: PLR0913 - the fields of the request
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        *,
        group: GroupId,
        now_s: float,
        ttl_s: float = 0.0,
        allowed_loss: Loss = Loss.EXACT,
        writer: bytes = b"",
    ) -> Reserved:
        """Extents for the absent ones of consecutive blocks behind `parent` (None: the root).

        `writer` is whose lock tells whether somebody still writes (arena.py); empty for the group.
        Takes room from the coldest blocks. Unwritten ones go to the SSD's queue if it has room;
        otherwise their demotion is shed.

        Raises:
            InvalidRequest: a present hash has another parent, so the hashes are no chain.
        """
        if self.draining:
            return Reserved(None, [], Refusal.DRAINING, 0)
        if namespace.size_bytes > self.host.extents.capacity_bytes:
            return Reserved(None, [], Refusal.TOO_LARGE, 0)
        behind: Block | None = None
        if parent is not None:
            behind = namespace.blocks.get(parent)
            if behind is None or not behind.held:
                self.counters.refused_blocks += len(hashes)
                return Reserved(None, [], Refusal.ORPHAN, 0)
        indices: list[int] = []
        copies: list[HostCopy] = []
        records: list[int] = []
        present = 0
        refusal = Refusal.NONE
        with closing(self._evictions(now_s)) as evictions:
            for at, key in enumerate(hashes):
                block = namespace.blocks.get(key)
                if block is not None and block.parent is not behind:
                    self._abandon(copies, records)
                    raise InvalidRequest(f"hashes: block {at} is known behind another parent")
                if block is not None and self._is_present(block, allowed_loss):
                    if at == present:
                        present += 1
                    behind = block
                    continue
                if block is None:
                    block = self.index.add(namespace, key, behind, self._stamp_behind(behind))
                copy = self._new_copy(block, records, copies, evictions)
                if isinstance(copy, Refusal):
                    refusal = copy
                    self.index.prune(block)
                    break
                block.allowed_loss = allowed_loss
                indices.append(at)
                copies.append(copy)
                behind = block
        self.counters.skipped_blocks += present
        covered = len(hashes) if refusal is Refusal.NONE else at
        self.counters.refused_blocks += len(hashes) - covered
        if not copies:
            return Reserved(None, [], refusal, present, covered)
        writer = writer or group
        self._write_records(copies, records, writer)
        deadline_s = now_s + self._ttl(ttl_s)
        lease = WriteLease(self._leases.new_id(), group, writer, deadline_s, copies, records)
        self._leases.add(lease)
        return Reserved(lease, indices, refusal, present, covered)

    def write_lease(self, lease_id: int, group: GroupId) -> WriteLease:
        """A live write lease of the group; the caller's copies into any other have stopped.

        Raises:
            UnknownLease: it is over, or another group's; its quarantined extents are free now.
            LeaseState: it is a read lease.
        """
        lease = self._leases.find(lease_id, group)
        if lease is None:
            self._end_quarantine(lease_id, group)
            raise UnknownLease(
                f"no live lease {lease_id} of this owner group: expired, committed or aborted"
            )
        if not isinstance(lease, WriteLease):
            raise LeaseState(f"lease {lease_id} is a read lease")
        return lease

    def commit(self, lease_id: int, group: GroupId) -> int:
        """Make a write lease's blocks visible and end it. Raises as write_lease().

        Returns:
            Blocks that are visible now.
        """
        lease = self.write_lease(lease_id, group)
        self._leases.remove(lease)
        self._clear_records(lease.records)
        visible = 0
        for copy in lease.copies:
            block = copy.block
            if copy.current and block.listed:
                visible += 1
                self.counters.stored_bytes += copy.extent.size_bytes
                block.stamp = self._stamp_behind(block.parent)
                if self.ssd is not None:
                    self.ssd.mark_dirty(block)
            self.host.make_ready(copy)
            self.host.unpin(copy)
        self.counters.stored_blocks += visible
        return visible

    def abort(self, lease_id: int, group: GroupId) -> None:
        """End a write lease; its writer has stopped. Harmless if it is over.

        Raises:
            LeaseState: it is a read lease.
        """
        try:
            lease = self.write_lease(lease_id, group)
        except UnknownLease:
            return
        self._leases.remove(lease)
        self._abandon(lease.copies, lease.records)

    def finish(self, namespace: Namespace, tail: BlockHash) -> int:
        """Touch the chain that ends at `tail`, in every tier; the number of its blocks."""
        block = namespace.blocks.get(tail)
        if block is None:
            return 0
        chain = self.index.chain(block)
        self._touch(chain)
        return len(chain)

    def flush(self, namespace: Namespace, hashes: Sequence[BlockHash], now_s: float) -> list[bool]:
        """Which blocks are on the SSD now; queues writes of those that are in RAM only."""
        durable: list[bool] = []
        for key in hashes:
            block = namespace.blocks.get(key)
            durable.append(block is not None and block.ssd is SsdState.STORED)
            if self.ssd is None or block is None or block.ssd is not SsdState.ABSENT:
                continue
            if block.host is not None and block.host.state is HostState.READY:
                self.ssd.demote(block, now_s)
        return durable

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

    def drop_blocks(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> int:
        """Take blocks out of all tiers; how many had a copy."""
        dropped = 0
        for key in hashes:
            block = namespace.blocks.get(key)
            if block is not None and block.held:
                dropped += 1
                self._drop(block)
        self.counters.dropped_blocks += dropped
        return dropped

    # Time, owners

    def expire(self, now_s: float) -> None:
        """End what is past its deadline."""
        for lease in self._leases.expired(now_s):
            self.counters.leases_expired += 1
            self._end(lease)
        for pin in [pin for pin in self._pins.values() if pin.deadline_s <= now_s]:
            self.unpin(pin.id)

    def end_group(self, group: GroupId) -> None:
        """The group's last session is over: its leases end, its half-written extents wait."""
        for lease in self._leases.of_group(group):
            self._end(lease)

    @property
    def has_quarantine(self) -> bool:
        """True while some extents wait for their writer's lock."""
        return bool(self._quarantine)

    def release_quarantine(self, alive: Iterable[tuple[bytes, bytes]]) -> None:
        """Free the extents of writers that are not among the living (arena.live_owners)."""
        living = set(alive)
        for held in list(self._quarantine.values()):
            if (held.epoch, held.writer) not in living:
                self._end_quarantine(held.lease_id, held.group)

    def restore_quarantine(self, record: WriteRecord) -> None:
        """A former daemon's client may be writing here: keep out until it can't."""
        self.host.extents.claim(record.extent)
        self._records.remove(record.number)
        lease_id = self._leases.new_id()
        self._quarantine[lease_id] = Quarantine(
            lease_id, record.epoch, record.writer, GroupId(b""), [record.extent], [record.number]
        )

    # Completions

    def take_jobs(self) -> list[Job]:
        """What the mover is to do now, in order."""
        loads, self._loads = self._loads, []
        return loads + self.ssd.take_jobs() if self.ssd is not None else loads

    def loaded(self, job: LoadJob, stored_bytes: int, error: TierError | None) -> None:
        """A load job is over. After an error the block is gone from the SSD: a miss.

        The load of a block that was dropped meanwhile fails, too: the medium may have had another
        block of this hash by then.
        """
        copy, block = job.copy, job.copy.block
        waiting = self._loading.pop(copy)
        valid = error is None and copy.current and block.listed
        if valid:
            self.host.make_ready(copy)
            self.counters.ssd_read_blocks += 1
            self.counters.ssd_read_bytes += stored_bytes
        else:
            reason = "Dropped" if error is None else type(error).__name__
            failed = self.counters.load_failed_blocks
            failed[reason] = failed.get(reason, 0) + 1
            if copy.current:
                self._drop(block)
        self.host.unpin(copy)
        for lease in waiting:
            if self._leases.find(lease.id, lease.group) is lease:
                if not valid:
                    lease.usable = min(lease.usable, lease.copies.index(copy))
                self._advance(lease)

    def written(
        self,
        job: WriteJob,
        now_s: float,
        *,
        stored_bytes: int,
        loss: Loss,
        error: TierError | None,
    ) -> None:
        """A write job is over."""
        assert self.ssd is not None
        self.ssd.written(job, now_s, stored_bytes, loss, error is not None)
        self.host.unpin(job.copy)
        self.index.prune(job.copy.block)

    def deleted(self, job: DeleteJob) -> None:
        """A delete job is over."""
        assert self.ssd is not None
        self.ssd.deleted(job)

    def ssd_committed(self, usage: TierUsage) -> None:
        """The SSD tier's accounting after a batch."""
        assert self.ssd is not None
        self.ssd.usage = usage

    # Restart

    def restore(self, rows: Iterable[NamespaceRow], stored: Iterable[StoredBlock]) -> None:
        """Take over what the SSD tier remembers. Blocks of former generations and blocks without
        their ancestors are deleted: nobody could hit them."""
        assert self.ssd is not None
        for row in rows:
            namespace = self.index.open(row.digest, row.spec, row.generation)
            namespace.remembered = True
        for found in sorted(stored, key=lambda found: found.meta.depth):
            meta = found.meta
            home = self.index.namespaces.get(meta.namespace)
            parent = None
            if home is not None and meta.parent is not None:
                parent = home.blocks.get(meta.parent)
            if (
                home is None
                or home.generation != meta.generation
                or (parent is None) != (meta.parent is None)
            ):
                self.ssd.forget(meta.hash, found.stored_bytes)
                continue
            block = self.index.add(home, meta.hash, parent, meta.stamp)
            block.allowed_loss = found.loss
            self.ssd.restore(block, found.stored_bytes, found.loss)
            self._tick = max(self._tick, meta.stamp // STAMP_STRIDE)

    # Accounting

    def lease_counts(self) -> tuple[int, int, int]:
        """(read leases, write leases, pins) alive."""
        return *self._leases.counts(), len(self._pins)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that wait for a writer to be gone."""
        return sum(e.size_bytes for held in self._quarantine.values() for e in held.extents)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls. For tests: O(blocks)."""
        self.index.check_integrity()
        self.host.extents.check_integrity()
        copies = {lease_copy for lease in self._leases for lease_copy in lease.copies}
        copies |= {copy for pin in self._pins.values() for copy in pin.copies}
        copies |= set(self._loading)
        for copy in copies:
            assert copy.block.linked or not copy.current, "a copy's block is out of its chain"
        ready = stored = 0
        for namespace in self.index.namespaces.values():
            for block in namespace.blocks.values():
                if block.host is not None:
                    copies.add(block.host)
                    ready += block.host.state is HostState.READY
                stored += block.ssd is SsdState.STORED
        extents = [copy.extent for copy in copies]
        extents += [e for held in self._quarantine.values() for e in held.extents]
        extents.sort()
        assert all(sum(a) <= b.offset_bytes for a, b in pairwise(extents)), "two owners share bytes"
        if not self.index.has_retired:
            assert ready == len(self.host), "the host policy has other blocks than the index"
            if self.ssd is not None:
                assert stored == len(self.ssd), "the SSD policy has other blocks than the index"
                if not self.ssd.queued_bytes:
                    used = sum(extent.size_bytes for extent in extents)
                    assert used == self.host.extents.used_bytes, "arena bytes do not add up"
        reads = self.lease_counts()[0]
        assert reads + len(self._slots) == LEASE_SLOTS, "lease slots do not add up"

    # Inside

    def _hits(
        self, namespace: Namespace, hashes: Sequence[BlockHash], allowed_loss: Loss
    ) -> list[Block]:
        """The longest cached prefix. It ends where the hashes are no chain from a first block on:
        leases keep whole prefixes, and each block once."""
        prefix: list[Block] = []
        behind: Block | None = None
        find = namespace.blocks.get
        for key in hashes:
            block = find(key)
            if block is None or block.parent is not behind or not block.hit(allowed_loss):
                break
            prefix.append(block)
            behind = block
        return prefix

    def _grant(self, prefix: list[Block], now_s: float) -> tuple[list[HostCopy], int]:
        """Pin a prefix, reserving extents for what is on the SSD only, as far as there is room."""
        self._touch(prefix)
        resident = [block.host for block in prefix if block.host is not None]
        self.host.pin_all(resident)
        if len(resident) == len(prefix):
            return resident, 0
        copies: list[HostCopy] = []
        on_ssd = 0
        with closing(self._evictions(now_s)) as evictions:
            for block in prefix:
                known = block.host
                if known is None:
                    extent = self.host.allocate(block.namespace.size_bytes, evictions)
                    if extent is None:
                        break
                    if block.ssd is not SsdState.STORED:
                        self.host.extents.free(extent)
                        break  # Making room, for it or for those before, cost it its only copy.
                    known = self._load(block, extent)
                    on_ssd += 1
                copies.append(known)
        granted = set(copies)
        self.host.unpin_all(copy for copy in resident if copy not in granted)
        return copies, on_ssd

    def _load(self, block: Block, extent: Extent) -> HostCopy:
        copy = block.host = HostCopy(block, extent, HostState.LOADING, block.ssd_loss)
        self.host.pin(copy)  # The job's, until loaded(): a pread can't be called back.
        self.host.pin(copy)  # The lease's.
        self._loading[copy] = []
        self._loads.append(LoadJob(copy, block.hash, block.namespace.size_bytes))
        return copy

    def _touch(self, chain: Sequence[Block]) -> None:
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

    def _stamp_behind(self, parent: Block | None) -> int:
        """Stamp of a new block: just before its parent leaves."""
        if parent is not None:
            return parent.stamp - 1
        self._tick += 1
        return (self._tick + 1) * STAMP_STRIDE - 1

    def _evictions(self, now_s: float) -> Generator[None, None, None]:
        """Evict the coldest block that may leave RAM, at each step."""
        extents, busy_bytes = self.host.extents, self.host.pinned_bytes + self.quarantined_bytes
        if extents.used_bytes == busy_bytes:
            return  # Without a look at every block: the answer is due at once.
        with closing(self.host.coldest()) as order:
            for block in order:
                copy = block.host
                assert copy is not None
                if copy.pins:
                    continue
                if block.ssd is not SsdState.STORED:
                    if self.ssd is not None:
                        if self.ssd.demote(block, now_s):
                            continue  # Leaves once it is written.
                        if not (block.children and self.ssd.healthy):
                            self.counters.demotions_shed_blocks += 1
                            self.ssd.mark_clean(block)
                    if block.children and (self.ssd is None or self.ssd.healthy):
                        continue
                self.host.evict(block)
                yield

    def _is_present(self, block: Block, allowed_loss: Loss) -> bool:
        copy = block.host
        if copy is not None and copy.state is HostState.WRITING:
            return True
        if block.hit(allowed_loss):
            return True
        # A copy that lost more than this client allows gives way to its exact one.
        if block.held:
            self._drop_copies(block)
        return False

    def _new_copy(
        self,
        block: Block,
        records: list[int],
        copies: list[HostCopy],
        evictions: Iterator[None],
    ) -> HostCopy | Refusal:
        block.children += 1  # It may lose all blocks behind it now, but not its own place.
        extent = self.host.allocate(block.namespace.size_bytes, evictions)
        block.children -= 1
        if extent is None:
            return Refusal.FULL
        if not copies or sum(copies[-1].extent) != extent.offset_bytes:
            if not self._records:
                self.host.extents.free(extent)
                return Refusal.LEASES
            records.append(self._records.pop())
        copy = block.host = HostCopy(block, extent, HostState.WRITING, Loss.EXACT)
        self.host.pin(copy)
        return copy

    def _write_records(self, copies: list[HostCopy], records: list[int], writer: bytes) -> None:
        runs: list[Extent] = []
        for copy in copies:
            offset, size = copy.extent
            if runs and sum(runs[-1]) == offset:
                runs[-1] = Extent(runs[-1].offset_bytes, runs[-1].size_bytes + size)
            else:
                runs.append(copy.extent)
        for index, run in zip(records, runs, strict=True):
            self._control.record_write(WriteRecord(index, run, self._epoch, writer))

    def _clear_records(self, records: list[int]) -> None:
        for index in records:
            self._control.clear_write(index)
        self._records += records

    def _end(self, lease: ReadLease | WriteLease) -> None:
        """End a lease whose owner did not."""
        if isinstance(lease, ReadLease):
            self._end_read(lease)
            return
        self._leases.remove(lease)
        held = Quarantine(lease.id, self._epoch, lease.writer, lease.group, [], lease.records)
        for copy in lease.copies:
            held.extents.append(copy.extent)
            self._forget_unwritten(copy, keep_extent=True)
        self._quarantine[lease.id] = held

    def _end_read(self, lease: ReadLease) -> None:
        self._leases.remove(lease)
        # Before any extent can be reused: a copy that is still running fails its check.
        self._control.publish(
            lease.slot, generation=lease.generation + 1, ready_blocks=0, usable_blocks=0
        )
        self._slots.append(lease.slot)
        self.host.unpin_all(lease.copies)

    def _abandon(self, copies: list[HostCopy], records: list[int]) -> None:
        """Undo a reservation whose writer has stopped."""
        for copy in copies:
            self._forget_unwritten(copy, keep_extent=False)
        self._clear_records(records)

    def _forget_unwritten(self, copy: HostCopy, *, keep_extent: bool) -> None:
        block = copy.block
        was_current = copy.current
        if was_current:
            self.host.detach(block)
        self.host.discard(copy, keep_extent=keep_extent)
        if was_current:
            self.index.prune(block)

    def _end_quarantine(self, lease_id: int, group: GroupId) -> None:
        held = self._quarantine.get(lease_id)
        if held is None or held.group != group:
            return
        del self._quarantine[lease_id]
        for extent in held.extents:
            self.host.extents.free(extent)
        self._clear_records(held.records)

    def _drop(self, block: Block) -> None:
        self._drop_copies(block)
        self.index.prune(block)

    def _drop_copies(self, block: Block) -> None:
        self.host.detach(block)
        if self.ssd is not None:
            self.ssd.drop(block)

    def _advance(self, lease: ReadLease) -> None:
        """Count the leading ready copies and show them."""
        copies, ready, usable = lease.copies, lease.ready, lease.usable
        while ready < usable and copies[ready].state is HostState.READY:
            ready += 1
        lease.ready = ready
        self._control.publish(
            lease.slot, generation=lease.generation, ready_blocks=ready, usable_blocks=usable
        )

    def _ttl(self, ttl_s: float) -> float:
        return min(ttl_s or self.config.lease_ttl_s, self.config.lease_ttl_max_s)

    def _count_acquire(
        self, namespace: Namespace, requested: int, granted: int, on_ssd: int
    ) -> None:
        counters, tokens = self.counters, namespace.spec.block_tokens
        counters.acquires += 1
        counters.requested_blocks += requested
        counters.requested_tokens += requested * tokens
        counters.host_hit_blocks += granted - on_ssd
        counters.host_hit_tokens += (granted - on_ssd) * tokens
        counters.ssd_hit_blocks += on_ssd
        counters.ssd_hit_tokens += on_ssd * tokens
        counters.missed_blocks += requested - granted
        counters.missed_tokens += (requested - granted) * tokens
