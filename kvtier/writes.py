"""Writes decides what a writer gets: extents for new blocks, until it commits or aborts.

    reserve            -> extents for the absent blocks, evicting the coldest; write records
    commit             -> the blocks become visible
    abort              -> as if nothing had been
    quarantine         a lease ended, its writer may still be writing: the extents wait until it is
                       known to have stopped (release_quarantine, or a late commit or abort)
    restore_quarantine the same across daemons: a write record outlives the one that made it

No I/O, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvtier.arena import WRITE_RECORDS, ControlPage, WriteRecord
from kvtier.errors import InvalidRequest, LeaseState, UnknownLease
from kvtier.extents import Extent
from kvtier.index import Block, BlockIndex, HostCopy, HostState, Namespace, SsdState
from kvtier.leases import LeaseTable, Quarantine, WriteLease
from kvtier.metrics import Counters
from kvtier.tiers import Tiers
from kvtier.types import BlockHash, GroupId, Loss, Refusal


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


class Writes:
    """Write leases, their records in the control page, and what their writers leave behind.

    Attributes:
        draining: Refuse every reservation: the daemon is going.
    """

    def __init__(
        self,
        index: BlockIndex,
        tiers: Tiers,
        leases: LeaseTable,
        control: ControlPage,
        epoch: bytes,
        counters: Counters,
    ) -> None:
        """Start without leases.

        Args:
            index: Where new blocks get their place.
            tiers: Where they get room.
            leases: All leases; those of readers are none of ours.
            control: Where write records outlive the daemon; all of them are ours.
            epoch: This daemon's boot id, 16 bytes.
            counters: What to count in.
        """
        self.draining = False
        self._index = index
        self._tiers = tiers
        self._leases = leases
        self._control = control
        self._epoch = epoch
        self._counters = counters
        self._records = list(range(WRITE_RECORDS - 1, -1, -1))
        self._quarantine: dict[int, Quarantine] = {}

    # Reserve

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
        loss: Loss = Loss.EXACT,
        writer: bytes = b"",
    ) -> Reserved:
        """Extents for the absent ones of consecutive blocks behind `parent` (None: the root).

        `writer` is whose lock tells whether somebody still writes (arena.py); empty for the group.
        Takes room from the coldest blocks. Unwritten ones go to the SSD's queue if it has room;
        otherwise their demotion is shed.

        `loss` is what the bytes to come have lost already, computed behind lossy blocks; who
        delivers such allows as much. A store that allows less than what the SSD keeps of a block
        has that replaced, be it by the exact copy that RAM has.

        Raises:
            InvalidRequest: a present hash has another parent, so the hashes are no chain.
        """
        allowed_loss = max(allowed_loss, loss)
        if self.draining:
            return Reserved(None, [], Refusal.DRAINING, 0)
        if namespace.size_bytes > self._tiers.host.extents.capacity_bytes:
            return Reserved(None, [], Refusal.TOO_LARGE, 0)
        behind: Block | None = None
        if parent is not None:
            behind = namespace.blocks.get(parent)
            if behind is None or not behind.held:
                self._counters.refused_blocks += len(hashes)
                return Reserved(None, [], Refusal.ORPHAN, 0)
        indices: list[int] = []
        copies: list[HostCopy] = []
        records: list[int] = []
        present = 0
        refusal = Refusal.NONE
        with closing(self._tiers.evictions(now_s)) as evictions:
            for at, key in enumerate(hashes):
                block = namespace.blocks.get(key)
                if block is not None and block.parent is not behind:
                    self._abandon(copies, records)
                    raise InvalidRequest(f"hashes: block {at} is known behind another parent")
                if block is not None and self._is_present(block, allowed_loss, loss):
                    if at == present:
                        present += 1
                    behind = block
                    continue
                if block is None:
                    stamp = self._tiers.stamp_behind(behind)
                    block = self._index.add(namespace, key, behind, stamp)
                copy = self._new_copy(block, loss, records, copies, evictions)
                if isinstance(copy, Refusal):
                    refusal = copy
                    self._index.prune(block)
                    break
                block.allowed_loss = allowed_loss
                indices.append(at)
                copies.append(copy)
                behind = block
        self._counters.skipped_blocks += present
        self._counters.logical_bytes += present * namespace.size_bytes
        covered = len(hashes) if refusal is Refusal.NONE else at
        self._counters.refused_blocks += len(hashes) - covered
        if not copies:
            return Reserved(None, [], refusal, present, covered)
        writer = writer or group
        self._write_records(copies, records, writer)
        deadline_s = self._leases.deadline_s(now_s, ttl_s)
        lease = WriteLease(self._leases.new_id(), group, writer, deadline_s, copies, records)
        self._leases.add(lease)
        return Reserved(lease, indices, refusal, present, covered)

    def _is_present(self, block: Block, allowed_loss: Loss, loss: Loss) -> bool:
        copy = block.host
        if copy is not None and copy.loss <= allowed_loss:
            if copy.state is HostState.WRITING or block.hit(allowed_loss):
                self._tiers.allow_loss(block, allowed_loss)
                return True
        elif block.hit(allowed_loss):
            # One on the SSD only was too slow to load, or had no room: here it comes for nothing,
            # unless what comes has lost more.
            return loss > block.ssd_loss
        # A copy that can't be hit gives way. One on the SSD that only lost too much stays until its
        # successor is there (commit), for nobody knows whether that comes.
        lossy = block.stored and block.born_s >= block.namespace.oldest_s
        if block.held and not lossy:
            self._tiers.drop_copies(block)
        return False

    def _new_copy(
        self,
        block: Block,
        loss: Loss,
        records: list[int],
        copies: list[HostCopy],
        evictions: Iterator[None],
    ) -> HostCopy | Refusal:
        host = self._tiers.host
        block.children += 1  # It may lose all blocks behind it now, but not its own place.
        extent = host.allocate(block.namespace.size_bytes, evictions)
        block.children -= 1
        if extent is None:
            return Refusal.FULL
        if not copies or sum(copies[-1].extent) != extent.offset_bytes:
            if not self._records:
                host.extents.free(extent)
                return Refusal.LEASES
            records.append(self._records.pop())
        host.detach(block)
        copy = block.host = HostCopy(block, extent, HostState.WRITING, loss)
        host.pin(copy)
        return copy

    def _write_records(self, copies: list[HostCopy], records: list[int], writer: bytes) -> None:
        runs: list[Extent] = []
        for copy in copies:
            offset, size = copy.extent
            if runs and sum(runs[-1]) == offset:
                runs[-1] = Extent(runs[-1].offset_bytes, runs[-1].size_bytes + size)
            else:
                runs.append(copy.extent)
        for number, run in zip(records, runs, strict=True):
            self._control.record_write(WriteRecord(number, run, self._epoch, writer))

    def _clear_records(self, records: list[int]) -> None:
        for number in records:
            self._control.clear_write(number)
        self._records += records

    # Commit or abort

    def lease(self, lease_id: int, group: GroupId) -> WriteLease:
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

    def commit(self, lease_id: int, group: GroupId, now_s: float) -> int:
        """Make a write lease's blocks visible and end it. Raises as lease().

        Returns:
            Blocks that are visible now.
        """
        lease = self.lease(lease_id, group)
        tiers, host, ssd = self._tiers, self._tiers.host, self._tiers.ssd
        self._leases.remove(lease)
        self._clear_records(lease.records)
        fresh: list[Block] = []
        for copy in lease.copies:
            block = copy.block
            if copy.current and block.listed:
                self._counters.stored_bytes += copy.extent.size_bytes
                self._counters.logical_bytes += block.namespace.size_bytes
                block.stamp = tiers.stamp_behind(block.parent)
                block.born_s = tiers.wall_s
                fresh.append(block)
            host.make_ready(copy)
            host.unpin(copy)
        if ssd is not None:
            for block in fresh:
                tiers.allow_loss(block, block.allowed_loss)
                if not ssd.is_stored(block) and block.ssd is SsdState.ABSENT:
                    ssd.stored(block, now_s)
        self._counters.stored_blocks += len(fresh)
        return len(fresh)

    def abort(self, lease_id: int, group: GroupId) -> None:
        """End a write lease; its writer has stopped. Harmless if it is over.

        Raises:
            LeaseState: it is a read lease.
        """
        try:
            lease = self.lease(lease_id, group)
        except UnknownLease:
            return
        self._leases.remove(lease)
        self._abandon(lease.copies, lease.records)

    def _abandon(self, copies: list[HostCopy], records: list[int]) -> None:
        """Undo a reservation whose writer has stopped."""
        for copy in copies:
            self._tiers.host.discard(copy, keep_extent=False)
        self._clear_records(records)

    # Quarantine

    def quarantine(self, lease: WriteLease) -> None:
        """End a live lease whose owner did not: its writer may go on."""
        self._leases.remove(lease)
        for copy in lease.copies:
            self._tiers.host.discard(copy, keep_extent=True)
        extents = [copy.extent for copy in lease.copies]
        self._quarantine[lease.id] = Quarantine(
            lease.id, self._epoch, lease.writer, lease.group, extents, lease.records
        )

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
        self._tiers.host.keep_out(record.extent)
        self._records.remove(record.number)
        lease_id = self._leases.new_id()
        self._quarantine[lease_id] = Quarantine(
            lease_id, record.epoch, record.writer, GroupId(b""), [record.extent], [record.number]
        )

    def _end_quarantine(self, lease_id: int, group: GroupId) -> None:
        held = self._quarantine.get(lease_id)
        if held is None or held.group != group:
            return
        del self._quarantine[lease_id]
        for extent in held.extents:
            self._tiers.host.free_quarantined(extent)
        self._clear_records(held.records)

    def quarantined(self) -> list[Extent]:
        """Extents that wait for a writer to be gone. For tests."""
        return [extent for held in self._quarantine.values() for extent in held.extents]

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls of the store."""
        waiting_bytes = sum(extent.size_bytes for extent in self.quarantined())
        assert waiting_bytes == self._tiers.host.quarantined_bytes, "quarantine does not add up"
