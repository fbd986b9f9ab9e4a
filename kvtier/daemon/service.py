"""The Cache service: each rpc parses, calls the store once, pumps the mover, answers.

Runs on the event loop. A call of the store never spans an await; after an await, leases and
namespaces are looked up anew.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import structlog

from kvtier import __version__
from kvtier.arena import DATA_OFFSET, writer_of
from kvtier.config import Settings
from kvtier.daemon import sessions as owners
from kvtier.daemon.stats import stats_response
from kvtier.daemon.translate import (
    LOSSES,
    REASONS,
    WIRE_VERSION,
    Context,
    check_length,
    hash_of,
    hashes_of,
    loss_of,
    spec_of,
    speed_of,
    typed_errors,
)
from kvtier.errors import (
    InvalidRequest,
    NotDurable,
    TierUnavailable,
    UnknownNamespace,
    WireVersionError,
)
from kvtier.index import Namespace
from kvtier.leases import ReadLease
from kvtier.mover.mover import Mover
from kvtier.mover.progress import Progress
from kvtier.store import TieredStore
from kvtier.tier.host import HostArena
from kvtier.types import (
    GROUP_BYTES,
    MAX_BLOCKS_PER_CALL,
    BlockHash,
    GroupId,
    NamespaceDigest,
)
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc

log = structlog.get_logger(__name__)

CHUNK_BYTES = 1 << 20
MAX_REQUEST_ID_BYTES = 64
MAX_CLIENT_NAME_BYTES = 128
MAX_WAIT_S = 60.0
DROP_DURABLE_S = 4.0


class CacheService(cache_pb2_grpc.CacheServicer):
    """kvtier.v1.Cache over one store."""

    def __init__(
        self,
        settings: Settings,
        epoch: bytes,
        store: TieredStore,
        arena: HostArena,
        mover: Mover | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve `store`; `mover` is None where there is no SSD tier."""
        self.sessions = owners.Sessions(settings.max_sessions)
        self.last_request_s = clock()
        self._settings = settings
        self._epoch = epoch
        self._store = store
        self._arena = arena
        self._mover = mover
        self._progress = mover.progress if mover is not None else Progress()
        self._clock = clock
        self._started_s = clock()
        self._closing = asyncio.Event()

    def close_sessions(self) -> None:
        """End all sessions; no new one starts."""
        self._closing.set()

    # Session

    @typed_errors
    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(self._settings.session_timeout_s):
                first = await anext(requests, pb.SessionRequest())
        except TimeoutError:
            raise InvalidRequest("hello: did not come in time") from None
        session = self._start(first)
        try:
            await context.write(pb.SessionResponse(welcome=self._welcome(session)))
            await self._heartbeats(requests, context)
        finally:
            self._end(session)

    def _start(self, first: pb.SessionRequest) -> owners.Session:
        if first.WhichOneof("message") != "hello":
            raise InvalidRequest("hello: must be a session's first message")
        hello = first.hello
        if not hello.wire_version_min <= WIRE_VERSION <= hello.wire_version_max:
            raise WireVersionError(
                f"the client speaks wire versions {hello.wire_version_min} to "
                f"{hello.wire_version_max}, this daemon only {WIRE_VERSION}"
            )
        if len(hello.owner_group) != GROUP_BYTES:
            raise InvalidRequest(f"owner_group: {len(hello.owner_group)} bytes, not {GROUP_BYTES}")
        if len(hello.client_name.encode()) > MAX_CLIENT_NAME_BYTES:
            raise InvalidRequest(f"client_name: more than {MAX_CLIENT_NAME_BYTES} bytes")
        if self._closing.is_set():
            raise TierUnavailable("the daemon is draining")
        session = self.sessions.start(GroupId(hello.owner_group), hello.client_name)
        log.debug("session started", client=session.client_name)
        return session

    async def _heartbeats(
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        closing = asyncio.create_task(self._closing.wait())
        try:
            while not closing.done():
                beat: asyncio.Task[pb.SessionRequest | None] = asyncio.ensure_future(
                    anext(requests, None)
                )
                done, _ = await asyncio.wait(
                    (beat, closing),
                    timeout=self._settings.session_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if beat not in done:
                    beat.cancel()
                    return  # Silent for too long, or the daemon is going.
                if beat.result() is None:
                    return
                await context.write(pb.SessionResponse(heartbeat=pb.Heartbeat()))
        finally:
            closing.cancel()

    def _welcome(self, session: owners.Session) -> pb.Welcome:
        return pb.Welcome(
            wire_version=WIRE_VERSION,
            session_id=session.id,
            epoch=self._epoch,
            arena_path=str(self._arena.path),
            arena_bytes=self._arena.size_bytes,
            lock_dir=str(self._arena.lock_dir),
            heartbeat_ms=round(self._settings.heartbeat_s * 1000),
            session_timeout_ms=round(self._settings.session_timeout_s * 1000),
        )

    def _end(self, session: owners.Session) -> None:
        log.debug("session ended", client=session.client_name)
        if self.sessions.end(session):
            self._store.end_group(session.group)
            self.release_quarantine()
            self._pump()

    def release_quarantine(self) -> None:
        """Free half-written extents whose writers are gone."""
        if not self._store.writes.has_quarantine:
            return
        try:
            alive = self._arena.live_owners()
        except OSError as error:  # Nobody knows who is alive, so nothing is freed.
            log.error("client locks can't be read", error=str(error))
            return
        self._store.writes.release_quarantine(alive)

    # Namespaces

    @typed_errors
    async def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: Context
    ) -> pb.OpenNamespaceResponse:
        self._group(request.session_id)
        digest, spec = spec_of(request.digest, request.spec)
        namespace = self._store.open_namespace(digest, spec, max_age_s=request.max_age_s)
        return pb.OpenNamespaceResponse(
            generation=namespace.generation, block_bytes=namespace.size_bytes
        )

    @typed_errors
    async def Drop(self, request: pb.DropRequest, context: Context) -> pb.DropResponse:
        self._group(request.session_id)
        namespace = self._namespace(request.namespace)
        if not request.whole_namespace:
            dropped = self._store.drop_blocks(namespace, hashes_of(namespace, request.hashes))
        elif request.hashes:
            raise InvalidRequest("hashes: must be empty with whole_namespace")
        else:
            dropped = len(namespace.blocks)
            self._store.drop_namespace(namespace)
        generation = namespace.generation
        self._pump()
        if self._mover is not None and not await self._mover.settle(DROP_DURABLE_S):
            raise NotDurable(
                "dropped, but a restart may undo it: an SSD does not store it; repeat it"
            )
        return pb.DropResponse(dropped_blocks=dropped, generation=generation)

    # Reading

    @typed_errors
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        self._group(request.session_id)
        namespace = self._namespace(request.namespace)
        found = self._store.reads.lookup(
            namespace,
            hashes_of(namespace, request.hashes),
            loss_of("allowed_loss", request.allowed_loss),
        )
        return pb.LookupResponse(
            blocks=found.host_blocks + found.ssd_blocks,
            host_blocks=found.host_blocks,
            ssd_blocks=found.ssd_blocks,
        )

    @typed_errors
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        if len(request.request_id) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequest(f"request_id: more than {MAX_REQUEST_ID_BYTES} bytes")
        group = self._group(request.session_id)
        namespace = self._namespace(request.namespace)
        lease, refusal = self._store.reads.acquire(
            namespace,
            hashes_of(namespace, request.hashes),
            group=group,
            now_s=self._clock(),
            ttl_s=request.ttl_ms / 1000,
            request_id=request.request_id,
            allowed_loss=loss_of("allowed_loss", request.allowed_loss),
            prefill_tokens_per_s=speed_of(request.prefill_tokens_per_s),
            recorded=request.recorded,
        )
        self._pump()
        if lease is None:
            return pb.AcquireResponse(block_bytes=namespace.size_bytes, reason=REASONS[refusal])
        return pb.AcquireResponse(
            lease_id=lease.id,
            blocks=len(lease.copies),
            ready_blocks=lease.ready,
            ssd_blocks=lease.ssd_blocks,
            block_bytes=namespace.size_bytes,
            offsets=[DATA_OFFSET + copy.extent.offset_bytes for copy in lease.copies],
            slot=lease.slot,
            slot_generation=lease.generation,
            reason=REASONS[refusal],
            loss=LOSSES[max(copy.loss for copy in lease.copies)],
        )

    @typed_errors
    async def RecordHits(
        self, request: pb.RecordHitsRequest, context: Context
    ) -> pb.RecordHitsResponse:
        self._group(request.session_id)
        namespace = self._namespace(request.namespace)
        found = request.host_blocks, request.ssd_blocks, request.missed_blocks
        if sum(found) > MAX_BLOCKS_PER_CALL:
            raise InvalidRequest(f"blocks: {sum(found)} of one prompt, not {MAX_BLOCKS_PER_CALL}")
        self._store.reads.record(namespace, *found)
        return pb.RecordHitsResponse()

    @typed_errors
    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.WaitResponse:
        group = self._group(request.session_id)
        timeout_s = min(request.timeout_ms / 1000, MAX_WAIT_S)
        lease = await self._ready(request.lease_id, group, request.blocks, timeout_s)
        return pb.WaitResponse(ready_blocks=lease.ready, usable_blocks=lease.usable)

    async def _ready(
        self, lease_id: int, group: GroupId, blocks: int, timeout_s: float
    ) -> ReadLease:
        """The lease once its first `blocks` are ready or can't be, or the time is up."""
        deadline_s = self._clock() + timeout_s
        while True:
            lease = self._store.reads.lease(lease_id, group)
            left_s = deadline_s - self._clock()
            if lease.ready >= min(blocks, lease.usable) or left_s <= 0:
                return lease
            await self._progress.wait(left_s)

    @typed_errors
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._store.reads.release(request.lease_id, self._group(request.session_id))
        return pb.ReleaseResponse()

    @typed_errors
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        group = self._group(request.session_id)
        for index in range(request.blocks):
            lease = await self._ready(request.lease_id, group, index + 1, MAX_WAIT_S)
            if lease.ready <= index:
                return
            # Copied while the lease holds; sending may outlive it.
            copy = lease.copies[index]
            view = self._arena.view(copy.extent, copy.block.namespace.size_bytes)
            starts = range(0, view.size, CHUNK_BYTES)
            for data in [view[at : at + CHUNK_BYTES].tobytes() for at in starts]:
                await context.write(pb.FetchChunk(data=data))

    @typed_errors
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        self._group(request.session_id)
        if not request.ttl_ms:
            raise InvalidRequest("ttl_ms: a pin needs a time to live")
        pin_id = secrets.token_bytes(16)
        namespace = self._namespace(request.namespace)
        blocks = self._store.reads.pin(
            namespace,
            hashes_of(namespace, request.hashes),
            pin_id=pin_id,
            now_s=self._clock(),
            ttl_s=request.ttl_ms / 1000,
        )
        self._pump()
        return pb.PinResponse(pin_id=pin_id if blocks else b"", blocks=blocks)

    @typed_errors
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        self._group(request.session_id)
        self._store.reads.unpin(request.pin_id)
        return pb.UnpinResponse()

    # Writing

    @typed_errors
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        group = self._group(request.session_id)
        namespace = self._namespace(request.namespace)
        hashes = hashes_of(namespace, request.hashes)
        parent = hash_of(namespace, "parent", request.parent) if request.parent else None
        allowed_loss = loss_of("allowed_loss", request.allowed_loss)
        loss = loss_of("loss", request.loss)
        if request.wait_ms:
            await self._make_room(namespace, hashes, min(request.wait_ms / 1000, MAX_WAIT_S))
        reserved = self._store.writes.reserve(
            namespace,
            parent,
            hashes,
            group=group,
            now_s=self._clock(),
            ttl_s=request.ttl_ms / 1000,
            allowed_loss=allowed_loss,
            loss=loss,
            writer=writer_of(request.session_id),
        )
        self._pump()
        lease = reserved.lease
        return pb.ReserveResponse(
            lease_id=0 if lease is None else lease.id,
            indices=reserved.indices,
            offsets=[DATA_OFFSET + c.extent.offset_bytes for c in lease.copies] if lease else [],
            block_bytes=namespace.size_bytes,
            reason=REASONS[reserved.refusal],
            present_blocks=reserved.present_blocks,
            covered_blocks=reserved.covered_blocks,
        )

    async def _make_room(
        self, namespace: Namespace, hashes: list[BlockHash], timeout_s: float
    ) -> None:
        """Let unwritten blocks in the way reach the SSD first, as far as the time allows."""
        deadline_s = self._clock() + timeout_s
        absent = sum(key not in namespace.blocks for key in hashes)
        while self._store.tiers.start_demotions(absent * namespace.size_bytes, self._clock()):
            self._pump()
            if not await self._progress.wait(max(0.0, deadline_s - self._clock())):
                return

    @typed_errors
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        blocks = self._store.writes.commit(
            request.lease_id, self._group(request.session_id), self._clock()
        )
        self._store.tiers.write_ahead(self._clock(), idle=False)
        self._pump()
        self._progress.notify()  # A Flush may have come first.
        return pb.CommitResponse(blocks=blocks)

    @typed_errors
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self._store.writes.abort(request.lease_id, self._group(request.session_id))
        return pb.AbortResponse()

    @typed_errors
    async def Store(
        self, request_iterator: AsyncIterator[pb.StoreChunk], context: Context
    ) -> pb.StoreResponse:
        lease_id, group, received = 0, GroupId(b""), 0
        try:
            async for chunk in request_iterator:
                if not group:
                    group, lease_id = self._group(chunk.session_id), chunk.lease_id
                received = self._store_chunk(lease_id, group, received, chunk.data)
            if not group:
                raise InvalidRequest("an empty stream")
            lease = self._store.writes.lease(lease_id, group)
            expected = sum(copy.block.namespace.size_bytes for copy in lease.copies)
            if received != expected:
                raise InvalidRequest(f"data: {received} bytes for blocks of {expected}")
            blocks = self._store.writes.commit(lease_id, group, self._clock())
        except BaseException:
            if group:
                self._store.writes.abort(lease_id, group)
            raise
        self._pump()
        return pb.StoreResponse(blocks=blocks)

    def _store_chunk(self, lease_id: int, group: GroupId, at: int, data: bytes) -> int:
        """Copy a chunk to its place behind `at` bytes; the new number of bytes."""
        lease = self._store.writes.lease(lease_id, group)
        size_bytes = lease.copies[0].block.namespace.size_bytes
        rest = np.frombuffer(data, dtype=np.uint8)
        while rest.size:
            index, inside = divmod(at, size_bytes)
            if index >= len(lease.copies):
                raise InvalidRequest("data: more than the lease's blocks")
            view = self._arena.view(lease.copies[index].extent, size_bytes)[inside:]
            taken = min(view.size, rest.size)
            np.copyto(view[:taken], rest[:taken])
            rest, at = rest[taken:], at + taken
        return at

    @typed_errors
    async def Finish(self, request: pb.FinishRequest, context: Context) -> pb.FinishResponse:
        self._group(request.session_id)
        namespace = self._namespace(request.namespace)
        touched = self._store.finish(namespace, hash_of(namespace, "tail", request.tail))
        return pb.FinishResponse(touched_blocks=touched)

    @typed_errors
    async def Flush(self, request: pb.FlushRequest, context: Context) -> pb.FlushResponse:
        self._group(request.session_id)
        hashes = hashes_of(self._namespace(request.namespace), request.hashes)
        deadline_s = self._clock() + min(request.timeout_ms / 1000, MAX_WAIT_S)
        while True:
            namespace = self._namespace(request.namespace)
            durable = self._store.tiers.flush(namespace, hashes, self._clock())
            self._pump()
            left_s = deadline_s - self._clock()
            if all(durable) or left_s <= 0 or self._mover is None:
                break
            await self._progress.wait(left_s)
        prefix = durable.index(False) if False in durable else len(durable)
        return pb.FlushResponse(
            durable=bytes(durable), durable_blocks=sum(durable), durable_prefix_blocks=prefix
        )

    @typed_errors
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        return stats_response(
            self._store,
            version=__version__,
            epoch=self._epoch,
            uptime_s=self._clock() - self._started_s,
            sessions=len(self.sessions),
            settings=self._settings,
        )

    # Inside

    def _group(self, session_id: bytes) -> GroupId:
        group = self.sessions.group_of(session_id)
        self.last_request_s = self._clock()
        return group

    def _namespace(self, digest: bytes) -> Namespace:
        found = self._store.index.namespaces.get(NamespaceDigest(digest))
        if found is None:
            check_length("namespace", digest)
            raise UnknownNamespace(f"namespace {digest.hex()[:12]} is not open: OpenNamespace")
        return found

    def _pump(self) -> None:
        if self._mover is not None:
            self._mover.pump()
