"""A bug in a tier: every job gets its answer, the task is started again, health was red."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import structlog

from kvtier.codec import codec_by_name
from kvtier.codec.base import Bytes
from kvtier.daemon.logs import configure_logs
from kvtier.daemon.supervise import Supervisor
from kvtier.errors import TierUnavailable
from kvtier.hashing import namespace_digest
from kvtier.index import Namespace
from kvtier.mover import Mover
from kvtier.policy.lru import Lru
from kvtier.residency import SSD_RETRY_S
from kvtier.store import StoreConfig, TieredStore
from kvtier.tier.base import BlockMeta, NamespaceRow, PreparedBlock, TierUsage
from kvtier.tier.host import HostArena
from kvtier.tier.ssd import SsdTier
from kvtier.types import BlockHash, GroupId, Loss
from tests.e2e.support import chain, content, spec_of

GROUP = GroupId(b"g" * 16)
SPEC = spec_of()


class BuggySsd(SsdTier):
    """A real tier in which `fails` raises what it likes."""

    fails: Callable[[str], None] = staticmethod(lambda where: None)

    def prepare(self, meta: BlockMeta, block: Bytes, allowed_loss: Loss) -> PreparedBlock:
        self.fails("prepare")
        return super().prepare(meta, block, allowed_loss)

    def commit(
        self,
        *,
        deletes: Sequence[BlockHash] = (),
        writes: Sequence[PreparedBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
    ) -> TierUsage:
        self.fails("remember" if namespaces else "commit")
        return super().commit(deletes=deletes, writes=writes, namespaces=namespaces)

    def read_into(self, key: BlockHash, out: Bytes) -> int:
        self.fails("read")
        return super().read_into(key, out)


class World:
    """A store with a mover under a supervisor, without the wire."""

    def __init__(self, ssd: BuggySsd, arena: HostArena) -> None:
        self.ssd, self.arena = ssd, arena
        self.store = TieredStore(
            StoreConfig(host_bytes=arena.capacity_bytes),
            control=arena.control,
            epoch=b"e" * 16,
            host_policy=Lru(),
            ssd_policy=Lru(),
            ssd_usage=ssd.usage(),
        )
        self.mover = Mover(self.store, arena, ssd, read_threads=2, batch_bytes=4 << 20)
        self.told: list[bool] = []
        self.well = asyncio.Event()
        self.supervisor = Supervisor(self._tell)
        for name, work in self.mover.tasks():
            self.supervisor.start(name, work)
        self.namespace: Namespace = self.store.open_namespace(namespace_digest(SPEC), SPEC)

    def _tell(self, healthy: bool) -> None:
        self.told.append(healthy)
        if healthy:
            self.well.set()

    def put(self, hashes: list[BlockHash]) -> None:
        """Store blocks in RAM."""
        now_s = time.monotonic()
        lease = self.store.writes.reserve(
            self.namespace, None, hashes, group=GROUP, now_s=now_s
        ).lease
        assert lease is not None
        for copy in lease.copies:
            np.copyto(self.arena.view(copy.extent, SPEC.block_bytes), content(copy.block.hash))
        self.store.writes.commit(lease.id, GROUP, now_s)

    def write_all(self, *, later_s: float = 0.0) -> None:
        """Queue the writing of all that is unwritten."""
        self.store.tiers.write_ahead(time.monotonic() + later_s, idle=True)
        self.mover.pump()


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    configure_logs("info", "console")  # As the daemon does.
    yield
    structlog.reset_defaults()


@asynccontextmanager
async def world(directory: Path) -> AsyncIterator[World]:
    """A World; everything is closed afterwards, in the daemon's order."""
    async with AsyncExitStack() as stack:
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-", dir="/dev/shm"))
        arena = HostArena(Path(shm) / "arena", 16 << 20, b"e" * 16)
        stack.callback(arena.close)
        ssd = BuggySsd(
            directory,
            capacity_bytes=64 << 20,
            codec=codec_by_name("raw"),
            durability="relaxed",
            max_batch_bytes=4 << 20,
        )
        stack.callback(ssd.close)
        made = World(ssd, arena)
        stack.callback(made.mover.close)
        stack.push_async_callback(made.supervisor.stop)
        yield made


@pytest.mark.parametrize("where", ["prepare", "commit", "remember"])
async def test_a_bug_while_writing(tmp_path: Path, where: str) -> None:
    async with asyncio.timeout(60.0), world(tmp_path) as made:
        bugs = [where]

        def fails(here: str) -> None:
            if here in bugs:
                bugs.remove(here)
                raise ZeroDivisionError(here)

        made.ssd.fails = fails
        hashes = chain("unlucky", 8)
        made.put(hashes)
        made.write_all()
        assert await made.mover.settle(20.0), "every job has its answer"
        assert made.store.tiers.ssd is not None
        assert made.store.tiers.ssd.queued_bytes == 0
        await made.well.wait()
        assert made.told == [False, True]
        made.write_all(later_s=2 * SSD_RETRY_S)
        assert await made.mover.settle(20.0)
        assert not made.store.tiers.ssd.dirty
        assert all(made.store.tiers.flush(made.namespace, hashes, time.monotonic()))
        assert not made.store.tiers.host.pinned_bytes
        made.store.check_integrity()


async def test_stopping_while_the_medium_fails_for_good(tmp_path: Path) -> None:
    """Deletes are tried again for ever; a daemon that is told to stop does not wait for that."""
    async with asyncio.timeout(60.0), world(tmp_path) as made:
        hashes = chain("deleted", 8)
        made.put(hashes)
        made.write_all()
        assert await made.mover.settle(20.0)
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fails(here: str) -> None:
            loop.call_soon_threadsafe(asked.set)
            raise TierUnavailable("EIO")

        made.ssd.fails = fails
        made.store.drop_blocks(made.namespace, hashes)
        made.mover.pump()
        await asked.wait()
