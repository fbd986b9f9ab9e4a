"""FAKE: a tier in memory, and a store with a mover on it. Tests make it slow, wrong or broken."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtier.codec.base import Bytes
from kvtier.daemon.supervise import Supervisor
from kvtier.errors import CorruptBlock
from kvtier.hashing import namespace_digest
from kvtier.index import Namespace
from kvtier.leases import ReadLease
from kvtier.mover.context import MoverConfig
from kvtier.mover.mover import Mover
from kvtier.policy.lru import Lru
from kvtier.store import StoreConfig, TieredStore
from kvtier.tier.base import (
    STORED_BLOCK,
    BlockMeta,
    BlockTier,
    Deletion,
    NamespaceRow,
    Piece,
    PreparedBlock,
    Restamp,
    Scrubbed,
    StoredBlocks,
    TierUsage,
    Wanted,
    WrittenBlock,
)
from kvtier.tier.host import HostArena
from kvtier.types import BlockHash, GroupId, Loss, NamespaceDigest
from tests.e2e.support import content, spec_of

GROUP = GroupId(b"g" * 16)
SPEC = spec_of(4096)
CAPACITY_BYTES = 64 << 20
PATIENCE_S = 20.0
HANG_S = 0.5
"""Deadline of everything that is waited for; reached only by what is broken."""


class FakeTier(BlockTier):
    """FAKE tier. Segments are dicts; nothing is on a disk.

    Attributes:
        hook: Called at the start of each operation with its name and, if it is about one block,
            that block's hash; it may raise, and it may block.
        events: Operations that succeeded, in order: (name, block or number of things).
        segments: What is committed: number -> hash -> (meta, payload).
        segment: Which one new blocks go to.
        surplus: What excess() says, once.
        kept: Segments that reopen() finds again; None: all.
        limit_bytes: What usage() says of room.
        violations: What the mover must not do, and did.
        unnamed: Blocks written and neither committed nor discarded.
        saved_bytes: How much shorter stored forms are said to be; 0: they are raw.
    """

    def __init__(self) -> None:
        self.hook: Callable[[str, BlockHash | None], None] = lambda _name, _key: None
        self.events: list[tuple[str, object]] = []
        self.segments: dict[int, dict[BlockHash, tuple[BlockMeta, Bytes]]] = {}
        self.segment = 0
        self.unnamed: Counter[BlockHash] = Counter()
        self.rows: dict[NamespaceDigest, NamespaceRow] = {}
        self.surplus: int | None = None
        self.kept: Sequence[int] | None = None
        self.limit_bytes = CAPACITY_BYTES
        self.violations: list[str] = []
        self.saved_bytes = 0
        self._guard = threading.Lock()

    def _begin(self, name: str, key: BlockHash | None = None) -> None:
        self.hook(name, key)

    def _end(self, name: str, what: object = None) -> None:
        self.events.append((name, what))

    def done(self, name: str) -> list[object]:
        """What operations of this name were about, in order."""
        return [what for event, what in self.events if event == name]

    def namespaces(self) -> Sequence[NamespaceRow]:
        return list(self.rows.values())

    def scan(self) -> StoredBlocks:
        return np.zeros(0, STORED_BLOCK)

    def usage(self) -> TierUsage:
        blocks = [p for segment in self.segments.values() for _, p in segment.values()]
        used = sum(payload.size for payload in blocks)
        return TierUsage(used, used, self.limit_bytes, len(blocks), used)

    def prepare(
        self, meta: BlockMeta, block: Bytes, allowed_loss: Loss, *, loss: Loss = Loss.EXACT
    ) -> PreparedBlock:
        self._begin("prepare", meta.hash)
        return PreparedBlock(meta, block.size, block, 0, 0, loss, b"")

    def write(self, block: PreparedBlock) -> WrittenBlock:
        self._begin("write", block.meta.hash)
        with self._guard:
            self.unnamed[block.meta.hash] += 1
            self._end("write", block.meta.hash)
        kept = replace(block, payload=block.payload.copy())
        stored_bytes = block.payload.size - self.saved_bytes
        return WrittenBlock(kept, stored_bytes, self.segment, (Piece(0, 4096),))

    def discard(self, written: WrittenBlock) -> None:
        with self._guard:
            self.unnamed[written.block.meta.hash] -= 1
            self._end("discard", written.block.meta.hash)

    def commit(
        self,
        *,
        deletes: Sequence[Deletion] = (),
        writes: Sequence[WrittenBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
        restamps: Sequence[Restamp] = (),
    ) -> TierUsage:
        with self._guard:
            self.unnamed.subtract(written.block.meta.hash for written in writes)
        self._begin("commit")
        for deletion in deletes:
            for number, segment in self.segments.items():
                if deletion.segment in (None, number):
                    segment.pop(deletion.hash, None)
        self.rows.update({row.digest: row for row in namespaces})
        for written in writes:
            meta = written.block.meta
            self.segments.setdefault(written.segment, {})[meta.hash] = (meta, written.block.payload)
        for restamp in restamps:
            self._end("restamp", restamp.hash)
        self._end("commit", (len(deletes), len(namespaces), len(writes)))
        return self.usage()

    def read_into(self, wanted: Wanted, out: Bytes) -> int:
        key, segment = wanted.hash, wanted.segment
        self._begin("read", key)
        if key not in self.segments.get(segment, {}):
            raise CorruptBlock("absent")
        payload = self.segments[segment][key][1]
        np.copyto(out, payload)
        self._end("read", key)
        return payload.size

    def scrub(self, position: bytes) -> Scrubbed:
        self._begin("scrub")
        with self._guard:
            segments = [(number, list(keys)) for number, keys in self.segments.items()]
        found = sorted((key, number) for number, keys in segments for key in keys if key > position)
        if not found:
            return Scrubbed(b"", None, 0, 0, None)
        key, number = found[0]
        meta, payload = self.segments[number][key]
        good = np.array_equal(payload, content(key, payload.size))
        self._end("scrub", key)
        error = None if good else CorruptBlock("wrong bytes", "checksum")
        return Scrubbed(key, meta, number, payload.size, error)

    def excess(self) -> int | None:
        self._begin("excess")
        surplus, self.surplus = self.surplus, None
        return surplus

    def retire(self, segment: int, *, damaged: bool) -> TierUsage:
        self._begin("retire")
        if +self.unnamed:
            self.violations.append("a segment goes while blocks are being written")
        self.segments.pop(segment, None)
        self._end("retire", (segment, damaged))
        return self.usage()

    def reopen(self) -> Sequence[int]:
        self._begin("reopen")
        kept = list(self.segments) if self.kept is None else self.kept
        self.segments = {number: self.segments[number] for number in kept}
        if +self.unnamed:
            self.violations.append("a new start, and written blocks are neither here nor there")
        self._end("reopen")
        return kept

    def close(self) -> None:
        self._end("close")


class Gate:
    """Holds operations until it is opened, and tells how many it holds.

    Attributes:
        waiting: How many it holds now.
        most: How many it held at once.
        seen: The blocks of all that came, in order.
    """

    def __init__(self, *names: str) -> None:
        """`names`: the operations to hold."""
        self.waiting = 0
        self.most = 0
        self.seen: list[BlockHash | None] = []
        self._names = names
        self._guard = threading.Lock()
        self._open = threading.Event()

    def __call__(self, name: str, key: BlockHash | None) -> None:
        if name not in self._names:
            return
        with self._guard:
            self.seen.append(key)
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        assert self._open.wait(PATIENCE_S)
        with self._guard:
            self.waiting -= 1

    def open(self) -> None:
        """Let all through, now and later."""
        self._open.set()


class World:
    """A store with a mover under a supervisor, on FAKE tiers, without the wire."""

    def __init__(self, arena: HostArena, tiers: Sequence[FakeTier], config: MoverConfig) -> None:
        self.arena, self.tiers = arena, tiers
        self._config = config
        self.store = TieredStore(
            StoreConfig(host_bytes=arena.capacity_bytes),
            control=arena.control,
            epoch=b"e" * 16,
            host_policy=Lru(),
            ssd_policies=[Lru() for _ in tiers],
            ssd_usages=[tier.usage() for tier in tiers],
        )
        named = [(f"disk {number}", tier) for number, tier in enumerate(tiers)]
        self.mover = Mover(self.store, arena, named, config)
        self.told: list[bool] = []
        self.well = asyncio.Event()
        self.supervisor = Supervisor(self._tell)
        self.namespace: Namespace = self.store.open_namespace(namespace_digest(SPEC), SPEC)

    def start(self) -> None:
        """Start the mover's tasks."""
        for name, work in self.mover.tasks():
            self.supervisor.start(name, work)

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """What begins meanwhile hangs after HANG_S, all else after PATIENCE_S.

        So a stall of this machine is a hang only where the test wants one.
        """
        object.__setattr__(self._config, "timeout_s", HANG_S)  # Frozen for everybody else.
        try:
            yield
        finally:
            object.__setattr__(self._config, "timeout_s", PATIENCE_S)

    def _tell(self, healthy: bool) -> None:
        self.told.append(healthy)
        if healthy:
            self.well.set()

    def online(self, shard: int = 0) -> bool:
        """Whether a shard is."""
        assert self.store.tiers.ssd is not None
        return self.store.tiers.ssd.shards[shard].online

    @property
    def queued_bytes(self) -> int:
        """On their way to any shard."""
        assert self.store.tiers.ssd is not None
        return self.store.tiers.ssd.queued_bytes

    def put(self, hashes: Sequence[BlockHash]) -> None:
        """Store blocks in RAM."""
        now_s = time.monotonic()
        lease = self.store.writes.reserve(
            self.namespace, None, hashes, group=GROUP, now_s=now_s
        ).lease
        assert lease is not None
        for copy in lease.copies:
            out = self.arena.view(copy.extent, SPEC.block_bytes)
            np.copyto(out, content(copy.block.hash, SPEC.block_bytes))
        self.store.writes.commit(lease.id, GROUP, now_s)

    def write_all(self, *, later_s: float = 0.0) -> None:
        """Queue the writing of all that is unwritten."""
        self.store.tiers.write_ahead(time.monotonic() + later_s, idle=True)
        self.mover.pump()

    def stored(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """Which are on the SSD, as the store knows it."""
        blocks = self.namespace.blocks
        return [key in blocks and blocks[key].stored for key in hashes]

    async def put_on_ssd(self, hashes: Sequence[BlockHash]) -> None:
        """Store blocks, on the SSD only."""
        self.put(hashes)
        self.write_all()
        await self.until(lambda: all(self.stored(hashes)), "blocks are stored")
        host = self.store.tiers.host
        for key in reversed(hashes):
            host.evict(self.namespace.blocks[key])

    def acquire(self, hashes: Sequence[BlockHash]) -> ReadLease | None:
        """Lease a prefix; its loads start."""
        lease, _ = self.store.reads.acquire(
            self.namespace, hashes, group=GROUP, now_s=time.monotonic()
        )
        self.mover.pump()
        return lease

    async def loads_over(self) -> None:
        """Wait until no read is under way."""
        await self.until(lambda: not self.store.reads.kept(), "loads are over")

    def check(self, lease: ReadLease) -> None:
        """What is ready has the right bytes."""
        for copy in lease.copies[: lease.ready]:
            view = self.arena.view(copy.extent, SPEC.block_bytes)
            assert np.array_equal(view, content(copy.block.hash, SPEC.block_bytes))

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until it holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"still not: {what}"
            await asyncio.sleep(0.002)


@asynccontextmanager
async def world(
    *,
    shards: int = 1,
    start: bool = True,
    batch_bytes: int = 1 << 20,
    scrub_bytes_per_s: int = 0,
) -> AsyncIterator[World]:
    """A World; everything is closed afterwards, in the daemon's order, and must add up."""
    config = MoverConfig(
        batch_bytes=batch_bytes, timeout_s=PATIENCE_S, scrub_bytes_per_s=scrub_bytes_per_s
    )
    async with asyncio.timeout(3 * PATIENCE_S), AsyncExitStack() as stack:
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-", dir="/dev/shm"))
        arena = HostArena(Path(shm) / "arena", 16 << 20, b"e" * 16)
        stack.callback(arena.close)
        made = World(arena, [FakeTier() for _ in range(shards)], config)
        stack.push_async_callback(made.mover.close)
        stack.push_async_callback(made.supervisor.stop)
        if start:
            made.start()
        yield made
        made.store.check_integrity()
        assert not [violation for tier in made.tiers for violation in tier.violations]
