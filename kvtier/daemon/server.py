"""Wires a daemon together and runs it until SIGTERM or SIGINT.

Shut-down order: health red, no new sessions, reservations refused, sessions end, unwritten blocks
are written, the server stops, tiers close in reverse order of opening. A second signal skips the
writing. SIGHUP tries SSD directories that failed again.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from math import ceil

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from kvtier import __version__
from kvtier.addresses import Address, UnixAddress, parse_address
from kvtier.config import Settings
from kvtier.daemon.http import start_http
from kvtier.daemon.logs import configure_logs
from kvtier.daemon.open_shards import OpenedShard, open_shards
from kvtier.daemon.service import CacheService
from kvtier.daemon.sockets import make_way
from kvtier.daemon.stats import StoreCollector
from kvtier.daemon.supervise import Supervisor, Work
from kvtier.errors import AddressInUse
from kvtier.index import Block
from kvtier.mover.context import MoverConfig
from kvtier.mover.mover import Mover
from kvtier.policy.lru import Lru
from kvtier.shards import TOUCHED
from kvtier.sizes import exact_size
from kvtier.store import StoreConfig, TieredStore
from kvtier.tier.host import HostArena
from kvtier.v1 import cache_pb2, cache_pb2_grpc

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
SERVICE_NAME = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
CALLS_PER_SESSION = 16
"""Calls at once, as a multiple of the sessions allowed; more are RESOURCE_EXHAUSTED."""
TICK_S = 0.2
REAP_PAUSE_S = 0.004
"""Between two batches of what was dropped, each of which takes about half a millisecond."""
QUARANTINE_POLL_S = 1.0
DRAIN_S = 10.0
GIL_SWITCH_S = 0.0005
KV_EVENT_BACKLOG = 1 << 17
"""Changes that may wait to be told; more than a full queue of requests makes."""


def serve(settings: Settings) -> None:
    """Run a daemon; returns after a clean shut-down.

    Raises:
        AddressInUse: a live daemon owns the socket, the arena or an SSD directory.
        CapacityError: a capacity does not fit the machine.
        FormatError: an SSD directory was written by a newer or foreign version.
        TierUnavailable: no SSD directory works.
    """
    configure_logs(settings.log_level, settings.log_format)
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stop, force = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)  # From now on nothing is left behind.
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # Until there is something to try again.
    gc.disable()  # A warm start makes a million objects and no garbage.
    async with AsyncExitStack() as stack:
        daemon = await Daemon.open(settings, stack)
        loop.add_signal_handler(signal.SIGHUP, daemon.retry_shards)
        # The event loop asks for the GIL back after this long: with all cores busy, a lookup's p90
        # was 3 to 5 times shorter than with the default of 5 ms.
        sys.setswitchinterval(GIL_SWITCH_S)
        log.info(
            "serving",
            version=__version__,
            address=str(daemon.address),
            host=exact_size(settings.host_capacity_bytes),
            ssd=_ssd_in_words(settings),
            metrics=settings.metrics_address or "off",
        )
        await stop.wait()
        await daemon.drain(force)
    log.info("stopped")


class Daemon:
    """The parts of a running daemon."""

    def __init__(
        self,
        settings: Settings,
        address: Address,
        store: TieredStore,
        mover: Mover | None,
        service: CacheService,
        health: HealthServicer,
    ) -> None:
        self.address = address
        self.store = store
        self.healthy = True
        self._settings = settings
        self._mover = mover
        self._service = service
        self._health = health
        self._health_changes: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, settings: Settings, stack: AsyncExitStack) -> Daemon:
        """Open tiers and ports, in order; `stack` closes them in reverse."""
        address = parse_address(settings.address)
        make_way(address)
        epoch = secrets.token_bytes(16)
        arena = HostArena(settings.arena_dir, settings.host_capacity_bytes, epoch)
        stack.callback(arena.close)
        started_s = time.perf_counter()
        shards = await open_shards(settings, stack)
        store = _build_store(settings, arena, shards, epoch)
        if shards:
            log.info(
                "ssd tier warm",
                blocks=0 if store.tiers.ssd is None else len(store.tiers.ssd),
                seconds=round(time.perf_counter() - started_s, 3),
            )
        mover = _build_mover(settings, arena, shards, store)
        if mover is not None:
            stack.push_async_callback(mover.close)
        del shards  # With all that was scanned.
        _settle_memory()
        service = CacheService(settings, epoch, store, arena, mover)
        service.release_quarantine()
        health = HealthServicer()
        daemon = cls(settings, address, store, mover, service, health)
        supervisor = Supervisor(daemon.set_health)
        for name, work in mover.tasks() if mover is not None else []:
            supervisor.start(name, work)
        for name, work in _kv_event_tasks(settings, store, stack):
            supervisor.start(name, work)
        supervisor.start("tick", daemon.tick)
        stack.push_async_callback(supervisor.stop)
        if settings.metrics_address:
            registry = CollectorRegistry()
            registry.register(StoreCollector(store, lambda: len(service.sessions), settings))
            runner = await start_http(settings.metrics_address, registry, lambda: daemon.healthy)
            stack.push_async_callback(runner.cleanup)
        server = await _start_grpc(
            address, service, health, CALLS_PER_SESSION * settings.max_sessions
        )
        stack.push_async_callback(_stop_grpc, server, address)
        daemon.set_health(True)
        return daemon

    def set_health(self, healthy: bool) -> None:
        """Show the daemon's health, here and over gRPC."""
        self.healthy = healthy
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            change = asyncio.ensure_future(self._health.set(name, status))
            self._health_changes.add(change)
            change.add_done_callback(self._health_changes.discard)

    async def tick(self) -> None:
        """What time alone brings about: deadlines, quarantines, idle writing, reaping."""
        next_poll_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.store.tick(now_s, time.time())
            if now_s >= next_poll_s:
                self._service.release_quarantine()
                next_poll_s = now_s + QUARANTINE_POLL_S
            while self.store.reap():
                self._pump()
                await asyncio.sleep(REAP_PAUSE_S)  # Requests and loads go first.
            idle = now_s - self._service.last_request_s >= self._settings.idle_write_after_s
            self.store.tiers.write_ahead(now_s, idle=idle)
            self._pump()

    async def drain(self, force: asyncio.Event) -> None:
        """End sessions and write what is unwritten, until done, forced or out of time."""
        log.info("draining")
        self.set_health(False)
        self.store.writes.draining = True
        self._service.close_sessions()
        ssd = self.store.tiers.ssd
        if self._mover is None or ssd is None:
            return
        deadline_s = time.monotonic() + DRAIN_S
        while ssd.dirty or ssd.queued_bytes:
            now_s = time.monotonic()
            working = any(shard.online for shard in ssd.shards)
            if force.is_set() or now_s >= deadline_s or not working:
                log.warning("unwritten blocks are lost", blocks=len(ssd.dirty))
                return
            self.store.tiers.write_ahead(now_s, idle=True)
            self._pump()
            await self._mover.progress.wait(TICK_S)
        ssd.restamp(TOUCHED)
        self._pump()
        await self._mover.settle(max(0.0, deadline_s - time.monotonic()))  # Deletes count, too.

    def retry_shards(self) -> None:
        """Try the SSD directories that failed again, at once."""
        if self._mover is not None:
            log.info("trying failed ssd directories again")
            self._mover.retry_now()

    def _pump(self) -> None:
        if self._mover is not None:
            self._mover.pump()


def _settle_memory() -> None:
    """After a warm start, before the first request.

    The index is large, long-lived and acyclic: walking it again and again would only stall
    requests. So what is there now is exempt from collections, and full ones become rare. And what
    the start needed for a while goes back to the system: 100 bytes a block.
    """
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # The C library has it, if it is glibc.
    if trim is not None:
        trim(0)


def _ssd_in_words(settings: Settings) -> str:
    if not settings.ssd_directories:
        return "none"
    size = exact_size(settings.ssd_capacity_bytes)
    return size if len(settings.ssd_directories) == 1 else f"{len(settings.ssd_directories)}x{size}"


def _build_store(
    settings: Settings, arena: HostArena, shards: Sequence[OpenedShard], epoch: bytes
) -> TieredStore:
    config = StoreConfig(
        host_bytes=arena.capacity_bytes,
        lease_ttl_s=settings.lease_ttl_s,
        lease_ttl_max_s=settings.lease_ttl_max_s,
        pin_limit_bytes=settings.pin_limit_bytes,
        write_queue_bytes=settings.write_queue_bytes,
        write_policy=settings.ssd_write_policy,
        max_namespaces=settings.max_namespaces,
        daily_write_bytes=settings.ssd_daily_write_bytes,
        rated_write_bytes=settings.ssd_rated_write_bytes,
        max_age_s=ceil(settings.max_age_s),
        event_backlog=KV_EVENT_BACKLOG if settings.kv_events_address else 0,
    )
    ssd_policies: list[Lru[Block]] = [Lru() for _ in shards]
    store = TieredStore(
        config,
        control=arena.control,
        epoch=epoch,
        host_policy=Lru(),
        ssd_policies=ssd_policies,
        ssd_usages=[shard.tier.usage() for shard in shards],
    )
    for record in arena.leftovers:
        store.writes.restore_quarantine(record)
    store.tick(time.monotonic(), time.time())  # What is too old is no hit from the first call on.
    if shards:
        store.restore([shard.rows for shard in shards], [shard.stored for shard in shards])
    return store


def _build_mover(
    settings: Settings, arena: HostArena, shards: Sequence[OpenedShard], store: TieredStore
) -> Mover | None:
    if not shards:
        return None
    config = MoverConfig(
        read_threads=settings.ssd_read_threads,
        write_threads=settings.ssd_write_threads,
        batch_bytes=settings.ssd_batch_bytes,
        timeout_s=settings.ssd_load_timeout_s,
        scrub_bytes_per_s=settings.ssd_scrub_bytes_per_s,
    )
    mover = Mover(store, arena, [(str(shard.directory), shard.tier) for shard in shards], config)
    for number, shard in enumerate(shards):
        if shard.failure is not None:
            mover.fail(number, shard.failure)
    return mover


def _kv_event_tasks(
    settings: Settings, store: TieredStore, stack: AsyncExitStack
) -> list[tuple[str, Work]]:
    """What publishes KV events, if the settings ask for it; `stack` closes its sockets."""
    if store.events is None:
        return []
    from kvtier.daemon.kv_events import KvEventPublisher  # ZeroMQ's 7 MB are for who wants it.

    publisher = KvEventPublisher(settings, store.events, store.counters)
    stack.callback(publisher.close)
    tasks: list[tuple[str, Work]] = [("kv events", publisher.publish)]
    if settings.kv_events_replay_address:
        tasks.append(("kv event replays", publisher.replay))
    return tasks


async def _start_grpc(
    address: Address, service: CacheService, health: HealthServicer, max_calls: int
) -> grpc.aio.Server:
    server = grpc.aio.server(
        maximum_concurrent_rpcs=max_calls,
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ],
    )
    cache_pb2_grpc.add_CacheServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    umask = os.umask(0o177)  # The socket is ours alone from its first instant.
    try:
        port = server.add_insecure_port(address.target)
    except RuntimeError as error:
        raise AddressInUse(f"can't listen on {address}: is it in use, or not ours?") from error
    finally:
        os.umask(umask)
    if not port:
        raise AddressInUse(f"can't listen on {address}")
    await server.start()
    return server


async def _stop_grpc(server: grpc.aio.Server, address: Address) -> None:
    await server.stop(grace=1.0)
    if isinstance(address, UnixAddress):
        address.path.unlink(missing_ok=True)
