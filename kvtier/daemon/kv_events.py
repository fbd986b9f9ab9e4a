"""Publishes what can be read from which tier, as vLLM publishes its KV events.

A PUB socket sends [topic, sequence number, batch]. A ROUTER socket answers a request for all
batches from a number on with [topic, number, batch] each and [b"", -1, b""] at the end. Numbers are
8 bytes, big-endian, one more with each batch.

Nobody makes the daemon wait or grow: PUB drops what a subscriber does not fetch in time, and only
the last batches are kept for replays. So a subscriber may miss batches, or come late. It sees a gap
in the numbers then, at the latest with the next heartbeat, and asks for what it missed. Where that
is not kept any more, the answer begins with a picture: AllBlocksCleared and everything that was
told up to now, under the last of the numbers asked for, so that the next is that of the next batch.
A daemon's first number is the time of its start, in microseconds, so that a restart is a gap, too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Any

import structlog
import zmq
import zmq.asyncio

from kvtier.addresses import Address, TcpAddress, UnixAddress, parse_address
from kvtier.config import Settings
from kvtier.daemon.kv_event_format import encode
from kvtier.daemon.sockets import make_way
from kvtier.errors import AddressInUse, ConfigError
from kvtier.events import AllRemoved, Event, ResidencyEvents
from kvtier.metrics import Counters

log = structlog.get_logger(__name__)

BATCH_BLOCKS = 256
"""Most that one batch tells, for the event loop's sake: half a millisecond."""
PAUSE_S = 0.02
"""Between two looks for changes: what happens in between is one batch."""
BUSY_PAUSE_S = 0.002
"""The same while many changes wait. Requests go first."""
HEARTBEAT_S = 1.0
"""Silence after which an empty batch says how far the numbers are."""
QUEUE_BATCHES = 1000
"""What a subscriber may leave unfetched; then batches are dropped for it."""
ANSWER_S = 2.0
"""How long an answer waits for a subscriber that does not fetch it."""
LINGER_MS = 200
END = (-1).to_bytes(8, "big", signed=True)
NUMBER_BYTES = 8
MAX_REQUEST_BYTES = 256
_BATCH_OVERHEAD_BYTES = 128
"""Of a batch in memory, beside its bytes."""


class RecentBatches:
    """The last batches, numbered one after the other, within a limit of bytes.

    Attributes:
        first: Number of the oldest.
        next: Number of the batch to come.
    """

    def __init__(self, first: int, limit_bytes: int) -> None:
        """Start empty; the limit counts what a batch takes in memory."""
        self.first = self.next = first
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._batches: deque[bytes] = deque()

    def add(self, batch: bytes) -> int:
        """Keep a batch, and forget the oldest as far as it takes their room; its number."""
        self._batches.append(batch)
        self._used_bytes += len(batch) + _BATCH_OVERHEAD_BYTES
        while self._used_bytes > self._limit_bytes and len(self._batches) > 1:
            self._used_bytes -= len(self._batches.popleft()) + _BATCH_OVERHEAD_BYTES
            self.first += 1
        self.next += 1
        return self.next - 1

    def get(self, number: int) -> bytes | None:
        """A batch; None if it is not kept any more, or not there yet."""
        at = number - self.first
        return self._batches[at] if 0 <= at < len(self._batches) else None


class KvEventPublisher:
    """The sockets of one daemon, and the tasks that serve them. On the event loop."""

    def __init__(self, settings: Settings, events: ResidencyEvents, counters: Counters) -> None:
        """Listen at the addresses of the settings.

        Raises:
            AddressInUse: a port or socket is taken.
            ConfigError: an address is none of this machine's.
        """
        self._events = events
        self._counters = counters
        self._topic = settings.kv_events_topic.encode()
        self._born = time.time_ns() // 1000
        self._recent = RecentBatches(self._born, settings.kv_events_buffer_bytes)
        self._published_s = 0.0
        self._replay: zmq.asyncio.Socket | None = None
        self._context = zmq.Context(io_threads=1)
        self._pub = self._context.socket(zmq.PUB)
        try:
            self._pub.set(zmq.SNDHWM, QUEUE_BATCHES)
            _listen(self._pub, "kv_events_address", settings.kv_events_address)
            if settings.kv_events_replay_address:
                self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                self._replay.set(zmq.ROUTER_MANDATORY, 1)  # A full queue is told, not dropped.
                self._replay.set(zmq.SNDHWM, QUEUE_BATCHES)
                _listen(self._replay, "kv_events_replay_address", settings.kv_events_replay_address)
        except BaseException:
            self._close(linger_ms=0)
            raise

    def close(self) -> None:
        """Tell subscribers that nothing can be read here any more, and close the sockets."""
        self._publish([AllRemoved()])
        self._close(LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
        self._pub.close(linger=linger_ms)
        self._context.term()  # Waits for the sockets, so all of them must be closed.

    async def publish(self) -> None:
        """Tell what changes, as it changes. Endless."""
        while True:
            events = self._events.take(BATCH_BLOCKS)
            if events or time.monotonic() >= self._published_s + HEARTBEAT_S:
                self._publish(events)
            await asyncio.sleep(BUSY_PAUSE_S if self._events.waiting else PAUSE_S)

    def _publish(self, events: Sequence[Event]) -> None:
        batch = encode(events, time.time())
        number = self._recent.add(batch)
        self._pub.send_multipart((self._topic, _bytes_of(number), batch), flags=zmq.DONTWAIT)
        self._published_s = time.monotonic()
        self._counters.kv_event_batches += 1
        for event in events:
            if not isinstance(event, AllRemoved):
                self._counters.kv_event_blocks += len(event.hashes)

    # Replays

    async def replay(self) -> None:
        """Answer requests for what was missed, one after the other. Endless."""
        assert self._replay is not None
        while True:
            client, *request = await self._replay.recv_multipart()
            if len(request) != 2 or request[0] or len(request[1]) != NUMBER_BYTES:
                log.debug("not a replay request", frames=[len(frame) for frame in request])
                continue
            self._counters.kv_event_replays += 1
            try:
                async with asyncio.timeout(None) as patience:
                    await self._answer(client, int.from_bytes(request[1], "big"), patience)
            except TimeoutError:
                log.warning("a subscriber does not fetch its replay")
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                log.debug("a subscriber left before its replay was over")

    async def _answer(self, client: bytes, start: int, patience: asyncio.Timeout) -> None:
        recent = self._recent
        if start > recent.next:
            start = 0  # Another daemon's numbers: its clock was ahead.
        if start < recent.first != self._born:
            start = await self._send_picture(client, start, patience)
        number = max(start, recent.first)
        while (batch := recent.get(number)) is not None:
            await self._send(client, self._topic, _bytes_of(number), batch, patience=patience)
            number += 1
        # If batches left meanwhile that were still to be sent, the subscriber sees a gap again.
        await self._send(client, b"", END, b"", patience=patience)

    async def _send_picture(self, client: bytes, start: int, patience: asyncio.Timeout) -> int:
        """Send what all batches so far say; the number of the batch after them."""
        self._counters.kv_event_pictures += 1
        picture, after = self._events.picture(), self._recent.next
        # Numbers must go up from `start` and end right before `after`, whatever there is to tell.
        limit = max(BATCH_BLOCKS, ceil(picture.blocks / (after - start)))
        first = after - max(1, ceil(picture.blocks / limit))
        for number, events in enumerate(picture.events(limit), first):
            batch = encode(events, time.time())
            await self._send(client, self._topic, _bytes_of(number), batch, patience=patience)
            await asyncio.sleep(BUSY_PAUSE_S)
        return after

    async def _send(self, client: bytes, *frames: bytes, patience: asyncio.Timeout) -> None:
        """Send one message of an answer as soon as the subscriber has room for it."""
        assert self._replay is not None
        patience.reschedule(asyncio.get_running_loop().time() + ANSWER_S)
        while True:
            try:
                await self._replay.send_multipart((client, b"", *frames), flags=zmq.DONTWAIT)
                return
            except zmq.Again:
                await asyncio.sleep(PAUSE_S)


def _bytes_of(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def _listen(endpoint: zmq.Socket[Any], setting: str, text: str) -> None:
    address = parse_address(text)
    make_way(address)
    endpoint.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    endpoint.set(zmq.TCP_KEEPALIVE, 1)
    endpoint.set(zmq.IPV6, int(isinstance(address, TcpAddress) and ":" in address.host))
    umask = os.umask(0o177)  # The socket is ours alone from its first instant.
    try:
        endpoint.bind(zmq_endpoint(address))
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise AddressInUse(f"{setting} {address}: {error.strerror}; choose another") from error
        raise ConfigError(
            f"{setting} {address}: {error.strerror}; name an IP address of this machine"
        ) from error
    finally:
        os.umask(umask)


def zmq_endpoint(address: Address) -> str:
    """How ZeroMQ writes an address; so subscribers connect to it."""
    if isinstance(address, UnixAddress):
        return f"ipc://{address.path}"
    return f"tcp://{address.target}"
