"""A client's tie to one daemon boot: its channel, its session and its map of the arena.

An Attachment is made once and never repaired: when the session ends, or the epoch changes, the
client drops it and makes another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc

from kvtier.arena import ArenaMapping, ClientLock
from kvtier.codec.base import Bytes
from kvtier.errors import FormatError, SessionError
from kvtier.types import GroupId, NamespaceSpec
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20


class Attachment:
    """One session with one daemon.

    Attributes:
        stub: The daemon's rpcs.
        session_id: Goes with every call.
        epoch: The daemon's boot id.
        mapped: True if bytes travel through shared memory.
        opened: Namespaces known to be open, with their digests.
        lost: Set for good when this attachment must not be used any more.
    """

    def __init__(self, target: str, group: GroupId, name: str, *, shared_memory: bool) -> None:
        """Attach, or raise.

        Raises:
            grpc.RpcError: no daemon there, or it refused; the status says why.
            SessionError: it answered something else than a welcome.
        """
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(target, options)
        self.stub = cache_pb2_grpc.CacheStub(self._channel)
        self.opened: dict[NamespaceSpec, bytes] = {}
        self.lost = threading.Event()
        self._guard = threading.Lock()
        self._writers = 0
        self._stopped = threading.Event()
        self._heartbeat_s = 1.0
        try:
            self._stream = self.stub.Session(self._requests(group, name))
            welcome = next(self._stream, pb.SessionResponse()).welcome
            if not welcome.session_id:
                raise SessionError("the daemon ended the session at once")
        except BaseException:
            self._stopped.set()
            self._channel.close()
            raise
        self._heartbeat_s = welcome.heartbeat_ms / 1000
        self.session_id = welcome.session_id
        self.epoch = welcome.epoch
        self._mapping: ArenaMapping | None = None
        self._lock: ClientLock | None = None
        if shared_memory:
            self._map(welcome, group)
        self.mapped = self._mapping is not None

    def run(self) -> None:
        """Keep the session alive; returns when it is over, whoever ended it."""
        try:
            for _ in self._stream:
                pass
        except grpc.RpcError:
            pass  # However the session ended, it is over.
        finally:
            self.close()

    def close(self) -> None:
        """End the session. The map stays until the last lease object is gone. Idempotent."""
        self.lost.set()
        self._stopped.set()
        self._stream.cancel()
        self._channel.close()
        with self._guard:
            self._release_idle_lock()

    def forget_in_child(self) -> None:
        """After a fork: the map is not there, the channel and the lock are the parent's."""
        self.lost.set()
        if self._lock is not None:
            self._lock.forget_in_child()

    # Shared memory

    def extent(self, offset: int, size_bytes: int) -> Bytes:
        """(size_bytes,) uint8, in place. Only while not lost."""
        assert self._mapping is not None
        return self._mapping.data[offset : offset + size_bytes]

    def shows(self, slot: int, generation: int) -> bool:
        """True if the control page still shows this epoch, and this generation in this slot."""
        if self.lost.is_set() or self._mapping is None:
            return False
        control = self._mapping.control
        return control.generation(slot) == generation and control.epoch == self.epoch

    def counts(self, slot: int) -> tuple[int, int]:
        """(ready, usable) blocks that a slot shows; they count if shows() is true afterwards."""
        assert self._mapping is not None
        return self._mapping.control.counts(slot)

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

    def _map(self, welcome: pb.Welcome, group: GroupId) -> None:
        """Map the arena if it is here and this daemon's; otherwise bytes are streamed."""
        try:
            mapping = ArenaMapping(Path(welcome.arena_path))
            mapping.control.check_format()
            if mapping.control.epoch != welcome.epoch:
                return  # Another daemon's file at the same path: another mount namespace.
            self._lock = ClientLock(Path(welcome.lock_dir), welcome.epoch, group)
        except (OSError, FormatError):
            return  # Another host or container: the file is not here.
        self._mapping = mapping

    def _requests(self, group: GroupId, name: str) -> Iterator[pb.SessionRequest]:
        yield pb.SessionRequest(
            hello=pb.Hello(
                wire_version_min=WIRE_VERSION,
                wire_version_max=WIRE_VERSION,
                owner_group=group,
                client_name=name,
            )
        )
        while not self._stopped.wait(self._heartbeat_s):
            yield pb.SessionRequest(heartbeat=pb.Heartbeat())


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    """Hashes as they travel."""
    return b"".join(hashes)
