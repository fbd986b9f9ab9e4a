"""A client's tie to one daemon boot: its channel, its session and its map of the arena.

An Attachment is made once and never repaired: when the session ends, or the epoch changes, the
client drops it and makes another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvtier.arena import ArenaMapping, ClientLock, writer_of
from kvtier.client.fork import gate, keep_forever
from kvtier.errors import FormatError, SessionError
from kvtier.types import GroupId, NamespaceSpec
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
ATTACH_TIMEOUT_S = 5.0
SETTLE_TIMEOUT_S = 1.0
MAX_UNSETTLED = 1024


class Attachment:
    """One session with one daemon.

    Attributes:
        stub: The daemon's rpcs.
        session_id: Goes with every call.
        epoch: The daemon's boot id.
        mapped: True if bytes travel through shared memory.
        mapping: That memory, until the attachment is lost; leases keep their own reference.
        opened: Namespaces known to be open, with their digests.
        lost: Set for good when this attachment must not be used any more.
    """

    def __init__(self, target: str) -> None:
        """Dial `target`; attach() does the rest."""
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.session_id = b""
        self.epoch = b""
        self.mapped = False
        self.mapping: ArenaMapping | None = None
        self.opened: dict[NamespaceSpec, bytes] = {}
        self.lost = threading.Event()
        self._guard = threading.Lock()
        self._lock: ClientLock | None = None
        self._writers = 0
        self._heartbeat_s = 0.0
        self._welcomed = threading.Event()
        self._stopped = threading.Event()
        self._stream: Any = None
        self._unsettled: deque[tuple[Callable[..., Any], Any]] = deque(maxlen=MAX_UNSETTLED)
        with gate:
            self._channel = grpc.insecure_channel(target, options)
        self.stub = cache_pb2_grpc.CacheStub(self._channel)

    def attach(self, group: GroupId, name: str, *, shared_memory: bool) -> None:
        """Start the session and map the arena, or raise and be lost. close() ends the waiting.

        Raises:
            grpc.RpcError: no daemon there, no answer in time, or it refused; the status says why.
            SessionError: it answered something else than a welcome, or close() came first.
        """
        patience = threading.Timer(ATTACH_TIMEOUT_S, self.close)
        patience.daemon = True
        patience.start()
        try:
            try:
                with gate:
                    self._stream = self.stub.Session(self._requests(group, name))
            except ValueError as error:
                raise SessionError("closed") from error
            if self.lost.is_set():
                raise SessionError("closed")
            welcome = next(self._stream, pb.SessionResponse()).welcome
            if not welcome.session_id:
                raise SessionError("the daemon ended the session at once")
            self.session_id, self.epoch = welcome.session_id, welcome.epoch
            if shared_memory:
                self._map(welcome)
            self._heartbeat_s = welcome.heartbeat_ms / 1000
            self._welcomed.set()
        except BaseException:
            self.close()
            raise
        finally:
            patience.cancel()

    def run(self) -> None:
        """Keep the session alive; returns when it is over, whoever ended it."""
        try:
            for _ in self._stream:
                self._settle()  # The daemon has just answered, so now is a good time.
        except grpc.RpcError:
            pass  # However the session ended, it is over.
        finally:
            self.close()

    def close(self) -> None:
        """End the session. Idempotent."""
        self.lost.set()
        self._stopped.set()
        self._welcomed.set()
        with gate:
            if self._stream is not None:
                self._stream.cancel()
            self._channel.close()
        with self._guard:
            # Not ours any more: a restarted daemon may need the memory. Leases that are still
            # copying have their own reference.
            self.mapping = None
            self._release_idle_lock()

    def forget_in_child(self) -> None:
        """After a fork: the map is not there, the channel and the lock are the parent's."""
        keep_forever(self)
        # New ones: a thread that is not here may have held their locks.
        self.lost = threading.Event()
        self.lost.set()
        self._guard = threading.Lock()
        self.mapping = None

    def settle_later(self, call: Callable[..., Any], request: Any) -> None:
        """A call that must reach the daemon once it answers again; sent with a heartbeat."""
        self._unsettled.append((call, request))

    # Shared memory

    def shows(self, mapping: ArenaMapping, slot: int, generation: int) -> bool:
        """True if the control page still shows this epoch, and this generation in this slot."""
        control = mapping.control
        return (
            not self.lost.is_set()
            and control.generation(slot) == generation
            and control.epoch == self.epoch
        )

    def start_write(self) -> None:
        """A write lease of this process is live: hold the lock until end_write()."""
        with self._guard:
            self._writers += 1

    def end_write(self) -> None:
        """This process writes into that lease's extents no more."""
        with self._guard:
            self._writers -= 1
            self._release_idle_lock()

    def _release_idle_lock(self) -> None:
        if self._lock is not None and self.lost.is_set() and not self._writers:
            self._lock.release()

    def _map(self, welcome: pb.Welcome) -> None:
        """Map the arena if it is here and this daemon's; otherwise bytes are streamed."""
        try:
            mapping = ArenaMapping(Path(welcome.arena_path))
            mapping.control.check_format()
            if mapping.control.epoch != welcome.epoch or mapping.data.size != welcome.arena_bytes:
                return  # Another daemon's file at the same path: another mount namespace.
            lock = ClientLock(Path(welcome.lock_dir), welcome.epoch, writer_of(welcome.session_id))
        except (OSError, FormatError):
            return  # Another host or container: the file is not here.
        with self._guard:
            self._lock, self.mapping, self.mapped = lock, mapping, True
            if self.lost.is_set():
                self.mapping = None
                self._release_idle_lock()

    # Session

    def _requests(self, group: GroupId, name: str) -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(
            hello=pb.Hello(
                wire_version_min=WIRE_VERSION,
                wire_version_max=WIRE_VERSION,
                owner_group=group,
                client_name=name,
            )
        )
        self._welcomed.wait()
        while not self._stopped.wait(self._heartbeat_s):
            yield pb.SessionRequest(heartbeat=pb.Heartbeat())

    def _settle(self) -> None:
        while self._unsettled and not self.lost.is_set():
            call, request = self._unsettled.popleft()
            try:
                with gate:
                    call(request, timeout=SETTLE_TIMEOUT_S)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._unsettled.append((call, request))
                    return
            except ValueError:
                return  # The channel was closed meanwhile.


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Hashes as they travel."""
    return b"".join(hashes)
