"""A FAKE medium and a little world round the real store: clients, a clock, a mover, a RAM arena.

Nothing here is production code. Writers really fill extents, load jobs really copy into them and
readers check every byte, so a store that hands one extent to two owners is found out. Writers that
lost their lease and reads that are under way keep scribbling, as stopped processes and stuck disks
do.

The fake mover keeps the promises that the store's jobs ask for: jobs for a shard's writer take
effect in the order they were made, and deletes and namespace rows are tried until they succeed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvtier.arena import DATA_OFFSET, ControlPage
from kvtier.errors import CorruptBlock, TierError, TierUnavailable
from kvtier.extents import Extent, aligned
from kvtier.index import Block, HostCopy, HostState, Namespace
from kvtier.jobs import DeleteJob, LoadJob, RememberJob, RestampJob, RetireJob, WriteJob
from kvtier.leases import ReadLease
from kvtier.policy.lru import Lru
from kvtier.store import StoreConfig, TieredStore
from kvtier.tier.base import STORED_BLOCK, BlockMeta, NamespaceRow, StoredBlocks, TierUsage
from kvtier.types import (
    BlockHash,
    Component,
    GroupId,
    Loss,
    NamespaceDigest,
    NamespaceSpec,
    Refusal,
)
from kvtier.writes import Reserved

Content = npt.NDArray[np.uint8]
WriterJob = WriteJob | DeleteJob | RememberJob | RestampJob | RetireJob
LINGERING = 4
"""Evicted blocks that the fake medium keeps until it forgets them all."""

SEGMENT_WRITES = 3
"""Blocks that the fake medium puts into one segment before it starts another."""

Version = tuple[int, int]
"""Which bytes a block has: (drops of its namespace, drops of the block) before it was written."""


def group_id(number: int) -> GroupId:
    """An owner group."""
    return GroupId(number.to_bytes(16, "big"))


def spec_of(block_bytes: int, tenant: str = "") -> NamespaceSpec:
    """A namespace whose blocks have this many bytes."""
    component = Component("latent_rope", "uint8", (1, 1, block_bytes))
    return NamespaceSpec("sim", "revision", (component,), block_tokens=1, tenant=tenant)


def digest_of(spec: NamespaceSpec) -> NamespaceDigest:
    """A digest that only this simulation uses."""
    return NamespaceDigest(hashlib.sha256(repr(spec).encode()).digest())


def chain(namespace: Namespace, tokens: Sequence[int]) -> list[BlockHash]:
    """Block hashes of a prompt; equal token prefixes give equal hashes."""
    hashes: list[BlockHash] = []
    parent: bytes = namespace.digest
    for token in tokens:
        parent = hashlib.sha256(parent + token.to_bytes(4, "little")).digest()
        hashes.append(BlockHash(parent))
    return hashes


def content(key: BlockHash, version: Version, size_bytes: int) -> Content:
    """(size_bytes,) uint8: the only right bytes of a block."""
    seed = hashlib.sha256(key + repr(version).encode()).digest()
    return np.resize(np.frombuffer(seed, dtype=np.uint8), size_bytes)


class FakeMedium:
    """FAKE SSD shard: a dict with a byte limit. Survives restarts of the store.

    Room counts in whole pages, as on the real one.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.blocks: dict[BlockHash, tuple[BlockMeta, Content, Version]] = {}
        self.losses: dict[BlockHash, Loss] = {}
        self.segments: dict[BlockHash, int] = {}
        self.rows: dict[NamespaceDigest, NamespaceRow] = {}
        self.puts = 0
        self.retired: set[int] = set()
        self.lingering: set[BlockHash] = set()

    def put(self, meta: BlockMeta, data: Content, version: Version, loss: Loss) -> int:
        """Store a block; a present one is replaced. `loss` is a label: the bytes stay exact.

        Returns:
            Its segment.
        """
        assert meta.namespace in self.rows, "a block before its namespace"
        assert self.rows[meta.namespace].generation == meta.generation, "out of generation"
        self.delete(meta.hash)
        for key in [key for key in self.lingering if len(self.lingering) > LINGERING]:
            self.delete(key)
        segment = self.puts // SEGMENT_WRITES
        while segment in self.retired:
            self.puts += 1
            segment = self.puts // SEGMENT_WRITES
        self.puts += 1
        self.blocks[meta.hash] = meta, data, version
        self.losses[meta.hash] = loss
        self.segments[meta.hash] = segment
        self.used_bytes += aligned(data.size)
        assert self.used_bytes <= self.limit_bytes, "the store overfilled the SSD"
        return segment

    def delete(self, key: BlockHash) -> None:
        """Forget a block; an absent one is fine."""
        if key in self.blocks:
            size_bytes = aligned(self.blocks.pop(key)[1].size)
            self.used_bytes -= 0 if key in self.lingering else size_bytes
        self.lingering.discard(key)

    def evict(self, key: BlockHash) -> None:
        """Count a block's room as free; it stays until later, or comes back with a restart."""
        if key in self.blocks and key not in self.lingering:
            self.lingering.add(key)
            self.used_bytes -= aligned(self.blocks[key][1].size)

    def restart(self) -> None:
        """What lingered is there again."""
        self.lingering.clear()
        self.used_bytes = sum(aligned(data.size) for _, data, _ in self.blocks.values())

    def restamp(self, key: BlockHash, stamp: int) -> None:
        """Remember how recent a block is."""
        if key in self.blocks:
            meta, data, version = self.blocks[key]
            self.blocks[key] = replace(meta, stamp=stamp), data, version

    def retire(self, segment: int) -> None:
        """Forget a segment's blocks; nothing is put there again."""
        self.retired.add(segment)
        for key in [key for key in self.blocks if self.segments[key] == segment]:
            self.delete(key)

    def usage(self) -> TierUsage:
        """What a real tier reports after a commit."""
        return TierUsage(self.used_bytes, self.used_bytes, self.limit_bytes, len(self.blocks))

    def scan(self) -> StoredBlocks:
        """What a real tier yields at open."""
        rows = np.zeros(len(self.blocks), STORED_BLOCK)
        for row, (key, (meta, data, _)) in zip(rows, self.blocks.items(), strict=True):
            row["hash"], row["parent"] = key, meta.parent or bytes(32)
            row["namespace"], row["generation"] = meta.namespace, meta.generation
            row["stamp"], row["stored_bytes"] = meta.stamp, data.size
            row["depth"], row["born_s"] = meta.depth, meta.born_s
            row["segment"], row["loss"] = self.segments[key], self.losses[key]
        return rows


@dataclass(slots=True)
class Grant:
    """What a reader remembers of its lease."""

    lease: ReadLease
    epoch: bytes
    hashes: list[BlockHash]
    versions: list[Version]
    allowed_loss: Loss


@dataclass(slots=True)
class Writing:
    """What a writer remembers of its lease, and the process that does not forget it."""

    lease_id: int
    group: GroupId
    epoch: bytes
    copies: list[HostCopy]
    versions: list[Version]
    loss: Loss


@dataclass(slots=True)
class World:
    """The store with everything round it. Set `limit_bytes` None for a store without SSD; it is
    the limit of each of `shards` directories.

    Attributes:
        writings: Live write leases.
        zombies: Write leases that ended before their writer stopped writing.
        grants: Read leases ever granted, but for those whose slot moved on.
        loads: Reads under way.
        late: Those that nobody waits for any more.
        writers: Jobs for each shard's writer, in order.
        excused: Blocks that may lack while blocks behind them are held: dropped by a client,
            failed to load, never written, or given up while the SSD failed.
        disk_failed: A write failed since the last check, or a shard has not recovered.
    """

    config: StoreConfig
    limit_bytes: int | None = None
    shards: int = 1
    now_s: float = 0.0
    wall_s: float = 1_800_000_000.0
    boots: int = 0
    control: ControlPage = field(init=False)
    memory: Content = field(init=False)
    media: list[FakeMedium] = field(init=False)
    store: TieredStore = field(init=False)
    epoch: bytes = b""
    specs: dict[NamespaceDigest, NamespaceSpec] = field(default_factory=dict)
    groups: set[GroupId] = field(default_factory=set)
    writings: dict[int, Writing] = field(default_factory=dict)
    zombies: list[Writing] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    late: set[LoadJob] = field(default_factory=set)
    writers: list[deque[WriterJob]] = field(init=False)
    versions: dict[HostCopy, Version] = field(default_factory=dict)
    lost: dict[HostCopy, Loss] = field(default_factory=dict)
    namespace_drops: dict[NamespaceDigest, int] = field(default_factory=dict)
    block_drops: dict[BlockHash, int] = field(default_factory=dict)
    drops: int = 0
    queued: list[int] = field(init=False)
    applied: list[int] = field(init=False)
    open_drops: list[tuple[list[int], NamespaceDigest, BlockHash | None]] = field(
        default_factory=list
    )
    excused: set[BlockHash] = field(default_factory=set)
    disk_failed: bool = False
    scribble: int = 0

    def __post_init__(self) -> None:
        page = bytearray(DATA_OFFSET)
        self.control = ControlPage(page)
        self.control.format(DATA_OFFSET + self.config.host_bytes)
        self.memory = np.zeros(self.config.host_bytes, dtype=np.uint8)
        self.media = [FakeMedium(self.limit_bytes or 0) for _ in range(self.shards)]
        self.writers = [deque() for _ in self.media]
        self.queued, self.applied = [0] * self.shards, [0] * self.shards
        self.boot()

    @property
    def medium(self) -> FakeMedium:
        """The only shard's."""
        (medium,) = self.media
        return medium

    @property
    def writer(self) -> list[WriterJob]:
        """All jobs that wait for a writer, each shard's in order."""
        return [job for writer in self.writers for job in writer]

    # The daemon

    def boot(self) -> None:
        """A daemon starts over the same arena and the same medium."""
        self.boots += 1
        for medium in self.media:
            medium.restart()
        self.epoch = self.boots.to_bytes(16, "little")
        self.control.epoch = self.epoch
        on_ssd = self.limit_bytes is not None
        self.store = TieredStore(
            self.config,
            control=self.control,
            epoch=self.epoch,
            host_policy=Lru(),
            ssd_policies=[Lru() for _ in self.media] if on_ssd else [],
            ssd_usages=[medium.usage() for medium in self.media] if on_ssd else [],
        )
        alive = self.alive()
        for record in self.control.open_writes():
            if (record.epoch, record.writer) in alive:
                self.store.writes.restore_quarantine(record)
            else:
                self.control.clear_write(record.number)
        if on_ssd:
            self.store.restore(
                [list(medium.rows.values()) for medium in self.media],
                [medium.scan() for medium in self.media],
            )
            self.take_jobs()
        self.store.tick(self.now_s, self.wall_s)

    def restart(self) -> None:
        """kill -9 of the daemon and a new start; its clients live on."""
        self.zombies += self.writings.values()
        self.writings.clear()
        for writer in self.writers:
            writer.clear()
        self.loads.clear()  # A dead process's preads write nothing any more.
        self.late.clear()
        for held in self.zombies:
            self.excused.update(copy.block.hash for copy in held.copies)
        self._undo_open_drops()
        self.applied = list(self.queued)
        self.boot()
        for digest, spec in self.specs.items():
            self.store.open_namespace(digest, spec)

    def _undo_open_drops(self) -> None:
        """Drops that were not yet on the medium need not survive; all others must."""
        undone = {digest for _, digest, key in self.open_drops if key is None}
        stored = [item for medium in self.media for item in medium.blocks.items()]
        for key, (meta, _, (namespace_drops, block_drops)) in stored:
            current = self.generation(meta.namespace) == meta.generation
            if current and meta.namespace in undone:
                self.namespace_drops[meta.namespace] = namespace_drops
                self.block_drops[key] = block_drops
        for _, digest, dropped in self.open_drops:
            # Where a shard was out, it may have another copy than those that worked: the newest.
            copies = [m.blocks[dropped] for m in self.media if dropped in m.blocks]
            copies = [c for c in copies if c[2][0] == self.namespace_drops.get(digest, 0)]
            if copies and dropped is not None:
                newest = max(copies, key=lambda copy: (copy[0].born_s, copy[0].stamp))
                self.block_drops[dropped] = newest[2][1]
        self.open_drops.clear()

    def generation(self, digest: NamespaceDigest) -> int:
        """The latest generation that any medium has stored."""
        return max(m.rows[digest].generation for m in self.media if digest in m.rows)

    def open(self, spec: NamespaceSpec) -> Namespace:
        """OpenNamespace."""
        digest = digest_of(spec)
        self.specs[digest] = spec
        return self.store.open_namespace(digest, spec)

    def take_jobs(self) -> None:
        """The mover takes what the store wants done."""
        for job in self.store.take_jobs():
            if isinstance(job, LoadJob):
                self.loads.append(job)
                self._scribble_on(job.copy.extent)
            else:
                self.writers[job.shard].append(job)
                self.queued[job.shard] += 1

    def finish_load(self, at: int, error: TierError | None = None) -> None:
        """A read of the medium returns."""
        job = self.loads.pop(at)
        medium = self.media[job.shard]
        stored = medium.blocks.get(job.hash)
        if error is None and (stored is None or medium.segments[job.hash] != job.segment):
            error = CorruptBlock("absent")
        self.late.discard(job)
        if error is not None:
            self._scribble_on(job.copy.extent)
            if job.copy.current:
                self.excused.add(job.hash)
            self.store.reads.loaded(job, 0, error)
        else:
            assert stored is not None
            assert stored[1].size == job.size_bytes
            self.view(job.copy.extent)[: job.size_bytes] = stored[1]
            self.versions[job.copy] = stored[2]
            self.lost[job.copy] = medium.losses[job.hash]
            self.store.reads.loaded(job, job.size_bytes, None)
        self.take_jobs()

    def make_late(self, at: int) -> None:
        """A read takes longer than anybody waits."""
        job = self.loads[at]
        if job not in self.late:
            self.late.add(job)
            if job.copy.current:
                self.excused.add(job.hash)
            self.store.reads.late(job)
            self.take_jobs()

    def finish_write(self, error: TierError | None = None, which: int = 0) -> None:
        """A shard's writer commits its oldest job, or fails to."""
        busy = [shard for shard, writer in enumerate(self.writers) if writer]
        shard = busy[which % len(busy)]
        writer, medium = self.writers[shard], self.media[shard]
        job = writer[0]
        if not self.online(shard):
            error = TierUnavailable("it is out")
        if error is not None and not isinstance(job, WriteJob | RestampJob):
            return  # Tried again: a lost delete would bring a dropped block back.
        writer.popleft()
        self.applied[shard] += 1
        if isinstance(job, WriteJob):
            self._finish_write(job, error)
        elif isinstance(job, RememberJob):
            medium.rows[job.row.digest] = job.row
        elif isinstance(job, DeleteJob) and job.evicted:
            medium.evict(job.hash)
        elif isinstance(job, DeleteJob):
            medium.delete(job.hash)
        elif isinstance(job, RetireJob):
            medium.retire(job.segment)
        elif error is None:
            for restamp in job.restamps:
                medium.restamp(restamp.hash, restamp.stamp)
        self.store.tiers.ssd_committed(shard, medium.usage())
        if isinstance(job, DeleteJob):
            self.store.tiers.deleted(job)
        self._close_applied_drops()
        self.take_jobs()

    def _finish_write(self, job: WriteJob, error: TierError | None) -> None:
        medium, segment, stored_bytes = self.media[job.shard], None, 0
        loss = max(job.allowed_loss, job.copy.loss)
        if error is not None:
            self.disk_failed = True
        else:
            stored_bytes = job.size_bytes
            data = self.view(job.copy.extent)[:stored_bytes].copy()
            version = self.versions[job.copy]
            right = content(job.meta.hash, version, stored_bytes)
            assert np.array_equal(data, right), "a write job's bytes changed under it"
            lost = max(job.allowed_loss, self.lost[job.copy])
            segment = medium.put(job.meta, data, version, lost)
            self.store.tiers.ssd_committed(job.shard, medium.usage())
        self.store.tiers.written(
            job,
            self.now_s,
            stored_bytes=stored_bytes,
            segment=segment,
            loss=loss,
            error=error,
        )

    # Shards

    def online(self, shard: int) -> bool:
        """Whether a shard works."""
        ssd = self.store.tiers.ssd
        return ssd is not None and ssd.shards[shard].online

    def fail(self, shard: int) -> None:
        """A directory goes away, with all that is under way there."""
        self.store.tiers.shard_down(shard)
        self.disk_failed = True
        self.take_jobs()
        for job in [job for job in self.loads if job.shard == shard]:
            self.finish_load(self.loads.index(job), TierUnavailable("it went away"))
        while self.writers[shard] and isinstance(self.writers[shard][0], WriteJob):
            self.finish_write(which=sum(bool(w) for w in self.writers[:shard]))

    def come_back(self, shard: int, *, lost: int | None) -> None:
        """It works again, all but one segment."""
        medium = self.media[shard]
        segments = set(medium.segments.values()) - medium.retired - {lost}
        if lost is not None:
            self._excuse(shard, lost)
            medium.retire(lost)
        self.store.tiers.shard_up(shard, sorted(segments))
        self.take_jobs()

    def retire(self, shard: int, segment: int) -> None:
        """A segment is damaged, or has to make room."""
        self._excuse(shard, segment)
        self.store.tiers.retire_segment(shard, segment, damaged=True)
        self.take_jobs()

    def _excuse(self, shard: int, segment: int) -> None:
        medium = self.media[shard]
        self.excused.update(key for key in medium.blocks if medium.segments[key] == segment)
        writing = (job for job in self.writers[shard] if isinstance(job, WriteJob))
        self.excused.update(job.meta.hash for job in writing)

    def settle(self) -> None:
        """All jobs end well."""
        for shard in range(self.shards):
            if self.limit_bytes is not None and not self.online(shard):
                self.come_back(shard, lost=None)
        while self.loads or self.writer:
            while self.loads:
                self.finish_load(0)
            if self.writer:
                self.finish_write()

    # Clients

    def current(self, namespace: NamespaceDigest, key: BlockHash) -> Version:
        """The version of a block that is written now, and the only one that may be hit."""
        return self.namespace_drops.get(namespace, 0), self.block_drops.get(key, 0)

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        group: GroupId,
        *,
        ttl_s: float = 0.0,
        request_id: bytes = b"",
        allowed_loss: Loss = Loss.EXACT,
    ) -> tuple[ReadLease | None, Refusal]:
        """Acquire; remembers what the bytes must be."""
        before = self.store.reads.lookup(namespace, hashes, allowed_loss)
        lease, refusal = self.store.reads.acquire(
            namespace,
            hashes,
            group=group,
            now_s=self.now_s,
            ttl_s=ttl_s,
            request_id=request_id,
            allowed_loss=allowed_loss,
        )
        granted = 0 if lease is None else len(lease.copies)
        self.take_jobs()
        if lease is None or not any(grant.lease is lease for grant in self.grants):
            cached = before.host_blocks + before.ssd_blocks
            assert granted <= cached
            assert granted == cached or refusal is not Refusal.NONE
            if lease is not None:
                assert all(copy.loss <= allowed_loss for copy in lease.copies)
                mine = list(hashes[:granted])
                versions = [self.current(namespace.digest, key) for key in mine]
                self.grants.append(Grant(lease, self.epoch, mine, versions, allowed_loss))
        return lease, refusal

    def reserve(
        self,
        namespace: Namespace,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        group: GroupId,
        *,
        ttl_s: float = 0.0,
        allowed_loss: Loss = Loss.EXACT,
        loss: Loss = Loss.EXACT,
    ) -> Reserved:
        """Reserve; half a block of garbage is written at once."""
        for key in hashes:
            block = namespace.blocks.get(key)
            if block is not None and block.held and not block.hit(max(allowed_loss, loss)):
                self.excused.add(key)  # Being written, or has lost too much and gives way.
        reserved = self.store.writes.reserve(
            namespace,
            parent,
            hashes,
            group=group,
            now_s=self.now_s,
            ttl_s=ttl_s,
            allowed_loss=allowed_loss,
            loss=loss,
        )
        self._check_allowed_loss(namespace, hashes[: reserved.covered_blocks], allowed_loss, loss)
        lease = reserved.lease
        if lease is not None:
            versions = [self.current(namespace.digest, copy.block.hash) for copy in lease.copies]
            self.writings[lease.id] = Writing(
                lease.id, group, self.epoch, list(lease.copies), versions, loss
            )
            for copy in lease.copies:
                self._scribble_on(copy.extent)
        self.take_jobs()
        return reserved

    def _check_allowed_loss(
        self, namespace: Namespace, hashes: Sequence[BlockHash], allowed: Loss, loss: Loss
    ) -> None:
        """What a store covers will not come back with more loss than its client allows."""
        for key in hashes:
            block = namespace.blocks.get(key)
            if block is None:
                continue  # Evicted, to make room for those behind it.
            assert block.allowed_loss <= max(allowed, loss)
            copy = block.host
            if copy is not None and copy.state is HostState.READY and block.stored:
                assert block.ssd_loss <= max(allowed, loss), "its own store replaces a lossy copy"

    def commit(self, lease_id: int, group: GroupId) -> int:
        """Write all bytes, then Commit."""
        writing = self.writings[lease_id]
        for copy, version in zip(writing.copies, writing.versions, strict=True):
            size_bytes = copy.block.namespace.size_bytes
            self.view(copy.extent)[:size_bytes] = content(copy.block.hash, version, size_bytes)
        visible = self.store.writes.commit(lease_id, group, self.now_s)
        del self.writings[lease_id]
        for copy, version in zip(writing.copies, writing.versions, strict=True):
            self.versions[copy] = version
            self.lost[copy] = writing.loss
            if copy.current and copy.block.listed:
                self.excused.discard(copy.block.hash)
            else:
                self.excused.add(copy.block.hash)
        self.take_jobs()
        return visible

    def abort(self, lease_id: int, group: GroupId) -> None:
        """Stop writing, then Abort."""
        self._gone(self.writings.pop(lease_id))
        self.store.writes.abort(lease_id, group)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        group: GroupId | None = None,
        *,
        parent: BlockHash | None = None,
    ) -> Reserved:
        """Reserve, write and commit."""
        group = group or group_id(1)
        reserved = self.reserve(namespace, parent, hashes, group)
        if reserved.lease is not None:
            self.commit(reserved.lease.id, group)
        return reserved

    def serve(
        self, namespace: Namespace, hashes: Sequence[BlockHash], group: GroupId | None = None
    ) -> int:
        """What an engine does with a request: acquire, store the rest, release, finish; the hit."""
        group = group or group_id(1)
        lease, _ = self.acquire(namespace, hashes, group)
        hit = 0 if lease is None else len(lease.copies)
        reserved = Reserved(None, [], Refusal.NONE, 0, 0)
        if hit < len(hashes):
            parent = hashes[hit - 1] if hit else None
            reserved = self.put(namespace, hashes[hit:], group, parent=parent)
        if lease is not None:
            self.store.reads.release(lease.id, group)
        known = hit + reserved.covered_blocks
        if known:
            self.store.finish(namespace, hashes[known - 1])
        self.take_jobs()
        return hit

    def drop_blocks(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> int:
        """Drop; from here on writers write other bytes under these hashes."""
        dropped = self.store.drop_blocks(namespace, hashes)
        self.take_jobs()
        for key in hashes:
            self.drops += 1
            self.block_drops[key] = self.drops
            self.excused.add(key)
            self.open_drops.append((list(self.queued), namespace.digest, key))
        self._close_applied_drops()
        return dropped

    def drop_namespace(self, namespace: Namespace) -> None:
        """Drop a whole namespace: its weights changed."""
        self.store.drop_namespace(namespace)
        self.take_jobs()
        self.drops += 1
        self.namespace_drops[namespace.digest] = self.drops
        self.open_drops.append((list(self.queued), namespace.digest, None))
        self._close_applied_drops()

    def expire(self) -> None:
        """The daemon looks at its clock; writers past their deadline don't notice."""
        self.store.tick(self.now_s, self.wall_s)
        self.take_jobs()
        live = {lease.id for lease in self.store.leases}
        self._become_zombies(lambda writing: writing.lease_id not in live)

    def end_group(self, group: GroupId) -> None:
        """A group's last session ends; its processes live on and may still write."""
        self.store.end_group(group)
        self._become_zombies(lambda writing: writing.group == group)

    def kill(self, group: GroupId) -> None:
        """kill -9 of all processes of a group."""
        self.end_group(group)
        self.groups.discard(group)
        for gone in [zombie for zombie in self.zombies if zombie.group == group]:
            self.zombies.remove(gone)

    def alive(self) -> set[tuple[bytes, GroupId]]:
        """What arena.live_owners() would say."""
        alive = {(self.epoch, group) for group in self.groups}
        return (
            alive
            | {(held.epoch, held.group) for held in self.zombies}
            | {(held.epoch, held.group) for held in self.writings.values()}
        )

    def _become_zombies(self, ended: Callable[[Writing], bool]) -> None:
        for writing in [w for w in self.writings.values() if ended(w)]:
            del self.writings[writing.lease_id]
            self._gone(writing)
            self.zombies.append(writing)

    def _gone(self, writing: Writing) -> None:
        self.excused.update(copy.block.hash for copy in writing.copies)

    def _close_applied_drops(self) -> None:
        self.open_drops = [
            drop
            for drop in self.open_drops
            if any(a < q for a, q in zip(self.applied, drop[0], strict=True))
        ]

    # Memory

    def view(self, extent: Extent) -> Content:
        """The arena's bytes of an extent."""
        return self.memory[extent.offset_bytes : sum(extent)]

    def _scribble_on(self, extent: Extent) -> None:
        self.scribble += 1
        self.view(extent)[:] = self.scribble % 251

    # What must always hold

    def check(self) -> None:
        """Scribble wherever somebody may, then check every byte that anybody may trust."""
        for held in (*self.writings.values(), *self.zombies):
            for copy in held.copies:
                self._scribble_on(copy.extent)
        for job in self.loads:
            self._scribble_on(job.copy.extent)
        self.store.check_integrity()
        self._check_readers()
        self._check_bounds()
        self._check_medium()
        self._check_ancestors()
        ssd = self.store.tiers.ssd
        self.disk_failed = ssd is not None and not all(
            shard.online and shard.healthy for shard in ssd.shards
        )

    def _check_readers(self) -> None:
        valid: list[Grant] = []
        for grant in self.grants:
            lease = grant.lease
            if self.control.epoch != grant.epoch:
                continue
            if self.control.generation(lease.slot) != lease.generation:
                continue
            valid.append(grant)
            ready, usable = self.control.counts(lease.slot)
            assert ready <= usable <= len(lease.copies)
            assert (ready, usable) == (lease.ready, lease.usable)
            for copy, key, version in zip(
                lease.copies[:ready], grant.hashes, grant.versions, strict=False
            ):
                size_bytes = copy.block.namespace.size_bytes
                found = self.view(copy.extent)[:size_bytes]
                assert np.array_equal(found, content(key, version, size_bytes)), "a wrong byte"
                assert self.lost[copy] <= grant.allowed_loss, "lossy bytes for who wants exact ones"
        self.grants = valid

    def _check_bounds(self) -> None:
        host, ssd = self.store.tiers.host, self.store.tiers.ssd
        extents = host.extents
        assert 0 <= extents.used_bytes <= self.config.host_bytes
        assert 0 <= host.pinned_bytes <= extents.used_bytes
        assert 0 <= host.quarantined_bytes <= extents.used_bytes
        counters = self.store.counters
        hits = counters.host_hit_blocks + counters.ssd_hit_blocks
        assert counters.requested_blocks == hits + counters.missed_blocks
        if ssd is not None:
            for shard in ssd.shards:
                assert shard.queued_bytes >= 0
                assert shard.speed.loading_bytes >= 0
            queued = [job for job in self.writer if isinstance(job, WriteJob)]
            assert sum(job.size_bytes for job in queued) <= self.config.write_queue_bytes
            assert ssd.queued_bytes == sum(aligned(job.size_bytes) for job in queued)

    def _check_medium(self) -> None:
        """Blocks that the store calls stored are on the medium, in their current version."""
        for namespace in self.store.index.namespaces.values():
            for key, block in namespace.blocks.items():
                if block.stored:
                    medium = self.media[block.place.shard]
                    assert key in medium.blocks, "a stored block is not on the medium"
                    assert medium.segments[key] == block.place.segment, "it is elsewhere"
                    assert key not in medium.lingering, "it was evicted"
                    version = medium.blocks[key][2]
                    assert version == self.current(namespace.digest, key), "a dropped block is back"

    def _check_ancestors(self) -> None:
        for namespace in self.store.index.namespaces.values():
            for block in namespace.blocks.values():
                if block.held:
                    self._check_parent(block)

    def _check_parent(self, block: Block) -> None:
        above = block.parent
        if above is not None and not above.held:
            if self.disk_failed:
                self.excused.add(above.hash)
            assert above.hash in self.excused, "a held block lost its ancestor"

    def check_idle(self) -> None:
        """Once every lease and job is over, nothing is pinned and nothing waits."""
        assert not self.loads
        assert not self.writer
        assert self.store.tiers.host.pinned_bytes == 0
        assert self.store.tiers.host.quarantined_bytes == 0
        assert self.store.lease_counts() == (0, 0, 0)
        assert self.control.open_writes() == []
        copies = [
            block.host
            for namespace in self.store.index.namespaces.values()
            for block in namespace.blocks.values()
            if block.host is not None
        ]
        assert all(copy.state is HostState.READY for copy in copies)
        if not self.store.index.has_retired:
            used = sum(copy.extent.size_bytes for copy in copies)
            assert used == self.store.tiers.host.extents.used_bytes, "extents leaked"
