"""Reads decides what a reader gets: hits, read leases, loads from the SSD, pins.

    lookup           the longest cached prefix, no side effect
    record           what a prompt found that was looked up first
    acquire          -> pin what is in RAM, reserve extents for what is only on the SSD, LoadJobs
    loaded, late     <- the mover: the lease's ready count moves on, in the control page
    measured         <- the mover: how fast the SSD is, so that only what pays is loaded
    release          -> the slot's generation moves on, then the extents may be reused
    pin, unpin       the same without a session

Reading never waits: what has no room is not granted. No I/O, one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from kvtier.arena import LEASE_SLOTS, ControlPage
from kvtier.errors import CorruptBlock, LeaseState, TierError, UnknownLease
from kvtier.extents import Extent, aligned
from kvtier.index import Block, HostCopy, HostState, Namespace
from kvtier.jobs import LoadJob
from kvtier.leases import LeaseTable, Pin, ReadLease
from kvtier.metrics import Counters
from kvtier.speed import ReadSpeed
from kvtier.tier.base import Wanted
from kvtier.tiers import Tiers
from kvtier.types import BlockHash, GroupId, Loss, Refusal


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached prefix by the fastest tier of each block."""

    host_blocks: int
    ssd_blocks: int


class Reads:
    """Read leases and pins, and the loads that they wait for."""

    def __init__(
        self,
        tiers: Tiers,
        leases: LeaseTable,
        control: ControlPage,
        counters: Counters,
        pin_limit_bytes: int,
    ) -> None:
        """Start without leases.

        Args:
            tiers: Where the blocks are.
            leases: All leases; those of writers are none of ours.
            control: Where clients see how far a lease is; all its lease slots are ours.
            counters: What to count in.
            pin_limit_bytes: Most that pins may keep in RAM.
        """
        self._tiers = tiers
        self._leases = leases
        self._control = control
        self._counters = counters
        self._pin_limit_bytes = pin_limit_bytes
        self._slots = list(range(LEASE_SLOTS - 1, -1, -1))
        self._pins: dict[bytes, Pin] = {}
        self._loading: dict[HostCopy, list[ReadLease]] = {}
        self._loads: list[LoadJob] = []

    # Hits and grants

    def lookup(
        self, namespace: Namespace, hashes: Sequence[BlockHash], allowed_loss: Loss = Loss.EXACT
    ) -> Prefix:
        """The longest cached prefix; no side effect."""
        prefix = self._hits(namespace, hashes, allowed_loss)
        on_host = sum(block.host is not None for block in prefix)
        return Prefix(on_host, len(prefix) - on_host)

    def acquire(  # noqa: PLR0913 - the fields of the request
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        group: GroupId,
        now_s: float,
        ttl_s: float = 0.0,
        request_id: bytes = b"",
        allowed_loss: Loss = Loss.EXACT,
        prefill_tokens_per_s: float = 0.0,
        recorded: bool = False,
    ) -> tuple[ReadLease | None, Refusal]:
        """Lease the longest cached prefix, shortened to what pays and has room; touch it; load it.

        What pays: blocks on the SSD are loaded only as far as that is predicted to be faster than
        computing them at `prefill_tokens_per_s`; 0 for all of them. `recorded`: record() has
        counted the hits.

        Raises:
            LeaseState: the request id has a live lease on other hashes, or on lossier copies.
        """
        if (lease := self._leases.by_request(group, request_id)) is not None:
            granted = [copy.block.hash for copy in lease.copies]
            if granted != list(hashes[: len(granted)]):
                raise LeaseState(f"request {request_id.hex()} has a lease on other blocks")
            if any(copy.loss > allowed_loss for copy in lease.copies):
                raise LeaseState(f"request {request_id.hex()} has a lease that allows more loss")
            return lease, Refusal.NONE
        prefix = self._hits(namespace, hashes, allowed_loss)
        refusal = Refusal.NONE if self._slots else Refusal.LEASES
        paying = self._paying(prefix, prefill_tokens_per_s)
        if paying < len(prefix):
            declined = sum(block.host is None for block in prefix[paying:])
            self._counters.declined_blocks += declined
            prefix, refusal = prefix[:paying], Refusal.SLOW
        copies, on_ssd = self._grant(prefix, now_s) if self._slots else ([], 0)
        if len(copies) < len(prefix) and refusal in (Refusal.NONE, Refusal.SLOW):
            refusal = Refusal.FULL
        self._counters.acquires += 1
        self._counters.logical_bytes += len(copies) * namespace.size_bytes
        if not recorded:
            self.record(namespace, len(copies) - on_ssd, on_ssd, len(hashes) - len(copies))
        if not copies:
            return None, refusal
        slot = self._slots.pop()
        lease = ReadLease(
            id=self._leases.new_id(),
            group=group,
            deadline_s=self._leases.deadline_s(now_s, ttl_s),
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

    def _paying(self, prefix: list[Block], prefill_tokens_per_s: float) -> int:
        """How much of a prefix to load: where loading it and computing the rest ends soonest.

        A block behind one that is not loaded must be computed, too, wherever it is.
        """
        ssd = self._tiers.ssd
        if ssd is None or not prefill_tokens_per_s or all(b.host is not None for b in prefix):
            return len(prefix)
        compute_s = prefix[0].namespace.spec.block_tokens / prefill_tokens_per_s
        load_bytes = [0] * len(ssd.shards)
        load_s = 0.0
        best, best_s = 0, len(prefix) * compute_s
        for count, block in enumerate(prefix, start=1):
            if block.host is None:
                number = block.place.shard
                load_bytes[number] += block.ssd_bytes
                load_s = max(load_s, ssd.shards[number].speed.load_s(load_bytes[number]))
            total_s = load_s + (len(prefix) - count) * compute_s
            if total_s <= best_s:
                best, best_s = count, total_s
        return best

    def measured(self, shard: int, stored_bytes: int, busy_s: float) -> None:
        """So fast were a shard's reads just now; the next predictions follow."""
        ssd = self._tiers.ssd
        assert ssd is not None
        speed, counters = ssd.shards[shard].speed, self._counters
        if speed.bytes_per_s and stored_bytes:
            predicted_s = stored_bytes / speed.bytes_per_s
            counters.load_predicted_seconds += predicted_s
            counters.load_actual_seconds += busy_s
            counters.load_prediction_error_seconds += abs(predicted_s - busy_s)
        speed.measured(stored_bytes, busy_s)

    def _grant(self, prefix: list[Block], now_s: float) -> tuple[list[HostCopy], int]:
        """Pin a prefix, reserving extents for what is on the SSD only, as far as there is room."""
        host = self._tiers.host
        self._tiers.touch(prefix)
        if self._tiers.ssd is not None:
            self._tiers.ssd.used(prefix)
        resident = [block.host for block in prefix if block.host is not None]
        host.pin_all(resident)
        if len(resident) == len(prefix):
            return resident, 0
        copies: list[HostCopy] = []
        on_ssd = 0
        with closing(self._tiers.evictions(now_s)) as evictions:
            for block in prefix:
                known = block.host
                if known is None:
                    extent = host.allocate(block.namespace.size_bytes, evictions)
                    if extent is None:
                        break
                    if not block.stored:
                        host.extents.free(extent)
                        break  # Making room, for it or for those before, cost it its only copy.
                    known = self._load(block, extent)
                    on_ssd += 1
                copies.append(known)
        granted = set(copies)
        host.unpin_all(copy for copy in resident if copy not in granted)
        return copies, on_ssd

    def record(self, namespace: Namespace, on_host: int, on_ssd: int, missed: int) -> None:
        """A prompt asked for so many blocks, and this is where they were: the hit rate."""
        counters, tokens = self._counters, namespace.spec.block_tokens
        counters.requested_blocks += on_host + on_ssd + missed
        counters.requested_tokens += (on_host + on_ssd + missed) * tokens
        counters.host_hit_blocks += on_host
        counters.host_hit_tokens += on_host * tokens
        counters.ssd_hit_blocks += on_ssd
        counters.ssd_hit_tokens += on_ssd * tokens
        counters.missed_blocks += missed
        counters.missed_tokens += missed * tokens

    # Loads

    def _load(self, block: Block, extent: Extent) -> HostCopy:
        copy = block.host = HostCopy(block, extent, HostState.LOADING, block.ssd_loss)
        self._tiers.host.pin(copy)  # The job's, until loaded(): a pread can't be called back.
        self._tiers.host.pin(copy)  # The lease's.
        self._loading[copy] = []
        place, size_bytes, stored_bytes = block.place, block.namespace.size_bytes, block.ssd_bytes
        assert place.segment is not None
        self._speed(place.shard).loading_bytes += stored_bytes
        namespace = block.namespace
        wanted = Wanted(
            block.hash, place.segment, namespace.digest, namespace.generation, block.ssd_loss
        )
        job = LoadJob(place.shard, copy, wanted, size_bytes, stored_bytes)
        self._loads.append(job)
        return copy

    def _speed(self, shard: int) -> ReadSpeed:
        assert self._tiers.ssd is not None
        return self._tiers.ssd.shards[shard].speed

    def take_jobs(self) -> list[LoadJob]:
        """What is to be read from the SSD now, in order."""
        loads, self._loads = self._loads, []
        return loads

    def loaded(self, job: LoadJob, stored_bytes: int, error: TierError | None) -> None:
        """A load job is over. After an error the block is gone from the SSD: a miss.

        The load of a block that was dropped meanwhile fails, too: the medium may have had another
        block of this hash by then. So does one that was late.
        """
        copy, block = job.copy, job.copy.block
        waiting = self._loading.pop(copy)
        self._speed(job.shard).loading_bytes -= job.stored_bytes
        valid = error is None and copy.current and block.listed
        if valid:
            self._tiers.host.make_ready(copy)
            self._counters.ssd_read_blocks += 1
            self._counters.ssd_read_bytes += stored_bytes
            self._counters.ssd_served_bytes += job.size_bytes
        else:
            reason = _reason(error)
            failed = self._counters.load_failed_blocks
            failed[reason] = failed.get(reason, 0) + 1
            if copy.current and block.place.online:
                self._tiers.drop(block)
            elif copy.current:  # The whole shard is out, and comes back with the block.
                self._tiers.give_up_load(block)
        self._tiers.host.unpin(copy)
        self._shorten(waiting, None if valid else copy)

    def late(self, job: LoadJob) -> None:
        """A load takes too long: its leases end before it, and nobody waits for it any more.

        Its extent stays the job's, because the read may still write there, until loaded().
        """
        copy = job.copy
        self._counters.late_loads += 1
        if copy.current:
            self._tiers.give_up_load(copy.block)
        self._shorten(self._loading[copy], copy)
        self._loading[copy] = []

    def _shorten(self, waiting: list[ReadLease], missing: HostCopy | None) -> None:
        """Show leases how far they are, now that a copy of theirs is there, or will not be."""
        for lease in waiting:
            if self._leases.find(lease.id, lease.group) is lease:
                if missing is not None:
                    lease.usable = min(lease.usable, lease.copies.index(missing))
                self._advance(lease)

    def _advance(self, lease: ReadLease) -> None:
        """Count the leading ready copies and show them."""
        copies, ready, usable = lease.copies, lease.ready, lease.usable
        while ready < usable and copies[ready].state is HostState.READY:
            ready += 1
        lease.ready = ready
        self._control.publish(
            lease.slot, generation=lease.generation, ready_blocks=ready, usable_blocks=usable
        )

    # Live leases and their end

    def lease(self, lease_id: int, group: GroupId) -> ReadLease:
        """The live read lease of this id.

        Raises:
            UnknownLease: it is over, or another group's.
            LeaseState: it is a write lease.
        """
        lease = self._leases.find(lease_id, group)
        if lease is None:
            raise UnknownLease(f"no live lease {lease_id} of this owner group")
        if not isinstance(lease, ReadLease):
            raise LeaseState(f"lease {lease_id} is a write lease")
        return lease

    def release(self, lease_id: int, group: GroupId) -> None:
        """End a read lease; harmless if it is over.

        Raises:
            LeaseState: it is a write lease.
        """
        lease = self._leases.find(lease_id, group)
        if lease is None:
            return
        if not isinstance(lease, ReadLease):
            raise LeaseState(f"lease {lease_id} is a write lease: commit or abort it")
        self.end(lease)

    def end(self, lease: ReadLease) -> None:
        """End a live lease, whether its owner wants that or not."""
        self._leases.remove(lease)
        # Before any extent can be reused: a copy that is still running fails its check.
        self._control.publish(
            lease.slot, generation=lease.generation + 1, ready_blocks=0, usable_blocks=0
        )
        self._slots.append(lease.slot)
        self._tiers.host.unpin_all(lease.copies)

    # Pins

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
        room = max(0, self._pin_limit_bytes - pinned_bytes) // aligned(namespace.size_bytes)
        copies, _ = self._grant(self._hits(namespace, hashes, Loss.EXACT)[:room], now_s)
        if copies:
            self._pins[pin_id] = Pin(pin_id, now_s + ttl_s, copies)
        return len(copies)

    def unpin(self, pin_id: bytes) -> None:
        """End a pin; harmless if it is over."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._tiers.host.unpin_all(pin.copies)

    def expire_pins(self, now_s: float) -> None:
        """End the pins that are past their deadline."""
        for pin in [pin for pin in self._pins.values() if pin.deadline_s <= now_s]:
            self.unpin(pin.id)

    @property
    def pins(self) -> int:
        """Live pins."""
        return len(self._pins)

    def kept(self) -> set[HostCopy]:
        """Copies that pins and loads keep, beside those of leases. For tests: O(blocks)."""
        return {copy for pin in self._pins.values() for copy in pin.copies} | set(self._loading)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls of the store."""
        live, _ = self._leases.counts()
        assert live + len(self._slots) == LEASE_SLOTS, "lease slots do not add up"


def _reason(error: TierError | None) -> str:
    """Why a load gave nothing, in one word for counters."""
    if error is None:
        return "dropped"
    return error.reason if isinstance(error, CorruptBlock) else type(error).__name__
