"""A worker's side: leases, and the copies between kvtier and the pages of this worker.

A load takes its read lease, copies and releases it in one go, so none outlives its load. Stores
reserve before the forward, while the cores are free, and copy right after it, before the engine can
give the pages to anybody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from engine_adapter.namespaces import rank_namespace
from engine_adapter.vllm.counts import Counts
from engine_adapter.vllm.paging import Bytes, Geometry, PagedLayers
from engine_adapter.vllm.plan import Load, Plan, Report, Store
from engine_adapter.vllm.settings import Settings
from kvtier.client import Client, WriteLease
from kvtier.types import MAX_BLOCKS_PER_CALL, BlockHash, Loss, NamespaceSpec

LOAD_THREADS = 2
STORE_TTL_S = 120.0
"""Longest forward between reserve and copy; a daemon's longest lease, by default."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load came to.

    Attributes:
        blocks: Leading blocks that are right.
        loss: What they may have lost.
        on_ssd: How many were on an SSD only.
        seconds: How long it took.
    """

    blocks: int
    loss: Loss = Loss.EXACT
    on_ssd: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StoredRequest:
    """What of a request is stored, or waits to be.

    Attributes:
        parent: The last block that kvtier has; None before the first.
        hashes: Blocks behind it that kvtier did not take yet.
        pages: Their pages.
        room: For them, while a step is computed.
    """

    parent: BlockHash | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    room: WriteLease | None = None

    @property
    def tail(self) -> BlockHash | None:
        """The last block that was offered."""
        return self.hashes[-1] if self.hashes else self.parent


class WorkerSide:
    """Copies what the plan says.

    Attributes:
        counts: What it did since they were last taken.

    Args:
        client: Leases.
        geometry: Of this worker's cache.
        settings: The operator's.
        rank: This worker's, in tensor parallelism.
        agree: Makes all ranks' values the lowest of theirs; every rank calls it in the same steps.
    """

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        settings: Settings,
        rank: int,
        agree: Callable[[list[int]], list[int]],
    ) -> None:
        self._client = client
        self._geometry = geometry
        self._settings = settings
        self._shard = 0 if geometry.replicated else rank
        self._stores_here = rank == 0 or not geometry.replicated
        self._agree = agree
        self._layers: PagedLayers | None = None
        self._namespace: tuple[NamespaceSpec, NamespaceSpec] | None = None
        self._requests: dict[str, StoredRequest] = {}
        self._to_store: list[StoredRequest] = []
        self._pool = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvtier-load")
        self._running: dict[Future[Outcome], Load] = {}
        self._aborted: set[str] = set()
        self._bad_pages: set[int] = set()
        self._failed_step = 0
        self._loss = Loss.EXACT
        self._taken: list[BlockHash] = []
        self.counts = Counts()

    def use(self, layers: PagedLayers) -> None:
        """This worker's cache is there."""
        self._layers = layers

    # A step, in vLLM's order

    def begin(self, plan: Plan) -> None:
        """Before the forward: find room for what this step will fill."""
        for request_id in plan.preempted:
            self._requests.pop(request_id, None)
        self._loss = max(self._loss, plan.loss)
        if plan.spec is None:
            return
        if self._namespace is None or self._namespace[0] is not plan.spec:
            self._enter(plan.spec)
        if not any(_is_now(load) for load in plan.loads):
            self._find_room(plan)

    def load(self, plan: Plan) -> None:
        """Start the plan's loads; those that this step's forward needs are finished then."""
        now = [load for load in plan.loads if _is_now(load)]
        for load in plan.loads:
            if not _is_now(load):
                self._running[self._pool.submit(self._load, load, self._spec)] = load
        if not now:
            return
        outcomes = [self._load(load, self._spec) for load in now]
        # What one rank could not load spoils what all of them compute from it.
        values = [outcome.blocks for outcome in outcomes]
        *blocks, loss = self._agree([*values, -max(outcome.loss for outcome in outcomes)])
        self._loss = max(self._loss, Loss(-loss))
        for load, outcome, right in zip(now, outcomes, blocks, strict=True):
            self._count(load, outcome)
            if not self._settle(load, right):
                self._failed_step = plan.step
        self._find_room(plan)  # Only now is it known what the blocks may have lost.

    def store(self) -> None:
        """After the forward: copy out what it has filled."""
        waiting, self._to_store = self._to_store, []
        for request in waiting:
            self._store(request)

    def end(self, finished: Iterable[str]) -> set[str]:
        """These requests are over; which loads between steps are."""
        loading = {load.request_id for load in self._running.values()}
        for request_id in finished:
            self._finish(request_id)
            if request_id in loading:
                self._aborted.add(request_id)
        done = [future for future in self._running if future.done()]
        loaded = set()
        for future in done:
            load, outcome = self._running.pop(future), future.result()
            self._loss = max(self._loss, outcome.loss)
            self._count(load, outcome)
            self._settle(load, outcome.blocks)
            loaded.add(load.request_id)
        for request_id in loaded & self._aborted:
            self._finish(request_id)
        self._aborted -= loaded
        return loaded

    def _finish(self, request_id: str) -> None:
        """Forget a request; its chain was used just now."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.parent is not None and self._stores_here:
            self._client.finish(self._spec, request.parent)

    def take_bad_pages(self) -> set[int]:
        """Pages that should have been loaded and were not, since the last call."""
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def report(self) -> Report:
        """For the scheduler's side."""
        taken, self._taken = tuple(self._taken), []
        return Report(self._failed_step, self._loss, taken)

    @property
    def known_requests(self) -> int:
        """Requests that it remembers something of."""
        return len(self._requests) + len(self._aborted)

    def close(self) -> None:
        """Give everything back."""
        self._forget(self._requests)
        self._pool.shutdown(wait=True, cancel_futures=True)

    # Loading

    def _load(self, load: Load, spec: NamespaceSpec) -> Outcome:
        """Lease, copy, release. May run beside the engine's own thread."""
        layers, started_s = self._require_layers(), time.perf_counter()
        per_block = self._geometry.pages_per_block

        def take(first: int, blocks: Sequence[Bytes]) -> None:
            for index, block in enumerate(blocks, first):
                if index >= load.first:
                    skip = load.skip if index == load.first else 0
                    at = (index - load.first) * per_block - load.skip + skip
                    pages = load.pages[at : at + per_block - skip]
                    layers.write_block(block, pages, skip)

        loss = self._settings.allowed_loss
        with self._client.acquire(spec, load.hashes, allowed_loss=loss, recorded=True) as lease:
            done = lease.read_with(take, len(load.hashes))
            loss = lease.loss if done else Loss.EXACT
            seconds = time.perf_counter() - started_s
            return Outcome(done, loss, min(lease.ssd_blocks, done), seconds)

    def _settle(self, load: Load, right: int) -> bool:
        """Note what is loaded and what is not; False if something is not."""
        wanted = len(load.hashes)
        if right:
            self._requests[load.request_id] = StoredRequest(load.hashes[right - 1])
        if right == wanted:
            return True
        per_block = self._geometry.pages_per_block
        good_pages = max(0, (right - load.first) * per_block - load.skip)
        self._bad_pages.update(load.pages[good_pages:])
        self.counts.add("failed_loads")
        return False

    def _count(self, load: Load, outcome: Outcome) -> None:
        blocks = max(0, outcome.blocks - load.first)
        on_ssd = min(blocks, outcome.on_ssd)
        self.counts.add("loaded_host_blocks", blocks - on_ssd)
        self.counts.add("loaded_ssd_blocks", on_ssd)
        self.counts.add("loaded_bytes", blocks * self._require_layers().block_bytes)
        self.counts.add("load_seconds", outcome.seconds)

    # Storing

    def _find_room(self, plan: Plan) -> None:
        """Not after a failed load: everything computed since may be wrong.

        Once the scheduler's side knows of it, it offers every request's blocks again.
        """
        if self._stores_here and plan.failures_known >= self._failed_step:
            self._to_store = [self._offer(store) for store in plan.stores]

    def _offer(self, store: Store) -> StoredRequest:
        """Add new blocks to those that kvtier did not take yet, and ask for room for all."""
        request = self._requests.get(store.request_id)
        if request is None or request.tail != store.parent:
            request = self._requests[store.request_id] = StoredRequest(store.parent)
        request.hashes += store.hashes
        request.pages += store.pages
        request.room = self._client.reserve(
            self._spec,
            request.parent,
            request.hashes[:MAX_BLOCKS_PER_CALL],
            ttl_s=STORE_TTL_S,
            allowed_loss=self._settings.allowed_loss,
            loss=self._loss,
        )
        return request

    def _store(self, request: StoredRequest) -> None:
        room, request.room = request.room, None
        assert room is not None, "a request waits in _to_store once for each room"
        started_s, layers = time.perf_counter(), self._require_layers()
        per_block = self._geometry.pages_per_block

        def fill(index: int, block: Bytes) -> None:
            layers.read_block(request.pages[index * per_block : (index + 1) * per_block], block)

        room.write_with(fill)
        room.commit_later()
        covered = room.covered_blocks
        self.counts.add("stored_blocks", len(room.indices))
        self.counts.add("stored_bytes", len(room.indices) * layers.block_bytes)
        self.counts.add("unstored_blocks", len(request.hashes) - covered)
        if self._settings.kv_events:
            self._taken += request.hashes[:covered]
        if covered:
            request.parent = request.hashes[covered - 1]
            del request.hashes[:covered], request.pages[: covered * per_block]
        self.counts.add("store_seconds", time.perf_counter() - started_s)

    def _forget(self, requests: dict[str, StoredRequest]) -> None:
        for request in requests.values():
            if request.room is not None:
                request.room.abort()
                request.room = None
        requests.clear()

    # Parts

    def _enter(self, spec: NamespaceSpec) -> None:
        """Blocks belong to this namespace from now on."""
        if self._namespace is None or self._namespace[0] != spec:
            self._forget(self._requests)
        self._namespace = (spec, rank_namespace(spec, self._shard, self._geometry.shards))

    @property
    def _spec(self) -> NamespaceSpec:
        """The namespace of this worker's shard."""
        assert self._namespace is not None, "a plan with work in it names its namespace"
        return self._namespace[1]

    def _require_layers(self) -> PagedLayers:
        assert self._layers is not None, "register_kv_caches comes before the first step"
        return self._layers


def _is_now(load: Load) -> bool:
    """True if the step's own forward needs it."""
    return not load.later
