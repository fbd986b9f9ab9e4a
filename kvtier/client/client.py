"""The client that engines use: thin, synchronous, fails open.

    client = Client()
    got = client.get(spec, hashes, destinations)      # longest cached prefix, copied
    client.put(spec, parent, hashes, sources)         # store blocks as they fill
    client.finish(spec, hashes[-1])                   # the request is over

get and put are acquire and reserve with their copies; use those to overlap copies with other work.
Whatever goes wrong is a miss with a counted reason, never an exception and never a wait beyond the
deadlines, unless the client was made with raise_errors=True. Thread-safe.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import numpy as np

from kvtier.addresses import find_address, parse_address
from kvtier.attachment import Attachment, join_hashes
from kvtier.codec.base import Bytes
from kvtier.errors import KvtierError
from kvtier.hashing import canonical_spec, namespace_digest
from kvtier.types import GROUP_BYTES, BlockHash, GroupId, Loss, MissReason, NamespaceSpec, Tier
from kvtier.v1 import cache_pb2 as pb

ACQUIRE_TIMEOUT_S = 0.05
RESERVE_TIMEOUT_S = 0.1
CALL_TIMEOUT_S = 1.0
READ_TIMEOUT_S = 10.0
BREAKER_FIRST_S = 1.0
BREAKER_LONGEST_S = 30.0
RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 1.0
CHUNK_BYTES = 1 << 20

Response = TypeVar("Response")


class Missed(KvtierError):
    """A call gave nothing; raised only by clients made with raise_errors=True."""

    def __init__(self, reason: MissReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GetResult:
    """Answer to get().

    Attributes:
        num_blocks: Leading destinations that hold their blocks.
        blocks_by_tier: The same blocks by the tier they were found on.
    """

    num_blocks: int
    blocks_by_tier: Mapping[Tier, int] = field(default_factory=dict)


class ReadLease:
    """The longest cached prefix, pinned until release(); zero blocks is a miss. Context manager.

    Attributes:
        num_blocks: Blocks granted.
        ssd_blocks: How many of them were on the SSD only.
    """

    def __init__(
        self, client: Client, attachment: Attachment | None, answer: pb.AcquireResponse
    ) -> None:
        self.num_blocks = answer.blocks
        self.ssd_blocks = answer.ssd_blocks
        self._client = client
        self._attachment = attachment
        self._answer = answer
        self._ready = answer.ready_blocks

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def read_into(self, destinations: Sequence[Bytes], *, timeout_s: float = READ_TIMEOUT_S) -> int:
        """Copy blocks as they become ready, in prefix order.

        Args:
            destinations: One (block bytes,) uint8 array a block wanted, at most num_blocks count.
            timeout_s: For those that are still on the SSD.

        Returns:
            Leading destinations that hold their blocks; later ones are undefined.
        """
        wanted = min(len(destinations), self.num_blocks)
        attachment = self._attachment
        if not wanted or attachment is None:
            return 0
        if attachment.mapped:
            done = self._copy(attachment, destinations, wanted, time.monotonic() + timeout_s)
        else:
            done = self._fetch(attachment, destinations, wanted, timeout_s)
        if done < wanted:
            self._client.count_miss(
                MissReason.LEASE_LOST if attachment.lost.is_set() else MissReason.LOAD_FAILED
            )
        return done

    def wait(self, blocks: int, *, timeout_s: float = READ_TIMEOUT_S) -> int:
        """Wait until the first `blocks` are ready, or can't be; how many are."""
        attachment = self._attachment
        if attachment is None or self._ready >= min(blocks, self.num_blocks):
            return self._ready
        request = pb.WaitRequest(
            session_id=attachment.session_id,
            lease_id=self._answer.lease_id,
            blocks=blocks,
            timeout_ms=max(0, round(timeout_s * 1000)),
        )
        with self._client.failing_open():
            call = attachment.stub.Wait
            answer = self._client.call(attachment, call, request, timeout_s + CALL_TIMEOUT_S)
            self._ready = answer.ready_blocks
        return self._ready

    def release(self) -> None:
        """Let the blocks go. Idempotent."""
        attachment, self._attachment = self._attachment, None
        if attachment is None or attachment.lost.is_set():
            return
        request = pb.ReleaseRequest(
            session_id=attachment.session_id, lease_id=self._answer.lease_id
        )
        with self._client.failing_open():
            self._client.call(attachment, attachment.stub.Release, request, CALL_TIMEOUT_S)

    def _copy(
        self,
        attachment: Attachment,
        destinations: Sequence[Bytes],
        wanted: int,
        deadline_s: float,
    ) -> int:
        answer, done = self._answer, 0
        while done < wanted:
            ready = min(wanted, self._ready)
            if ready == done:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.wait(done + 1, timeout_s=left_s) <= done:
                    return done
                continue
            if attachment.lost.is_set():
                return done
            for index in range(done, ready):
                source = attachment.extent(answer.offsets[index], answer.block_bytes)
                np.copyto(destinations[index], source)
            if not attachment.shows(answer.slot, answer.slot_generation):
                return done  # The lease ended under the copies: they count for nothing.
            done = ready
        return done

    def _fetch(
        self,
        attachment: Attachment,
        destinations: Sequence[Bytes],
        wanted: int,
        timeout_s: float,
    ) -> int:
        request = pb.FetchRequest(
            session_id=attachment.session_id, lease_id=self._answer.lease_id, blocks=wanted
        )
        received, size_bytes = 0, self._answer.block_bytes
        try:
            for chunk in attachment.stub.Fetch(request, timeout=timeout_s):
                data = np.frombuffer(chunk.data, dtype=np.uint8)
                index, inside = divmod(received, size_bytes)
                np.copyto(destinations[index][inside : inside + data.size], data)
                received += data.size
        except grpc.RpcError:
            pass  # What has arrived whole is good: chunks come in order, copied under the lease.
        return received // size_bytes


class WriteLease:
    """Room for new blocks: write them, then commit() or abort(). Context manager: aborts on exit
    unless committed.

    Attributes:
        indices: Which of the asked hashes want writing; the others are present or had no room.
        covered_blocks: Leading asked hashes that are present, being written, or granted here.
    """

    def __init__(
        self, client: Client, attachment: Attachment | None, answer: pb.ReserveResponse
    ) -> None:
        self.indices: Sequence[int] = answer.indices
        self.covered_blocks = answer.covered_blocks
        self._client = client
        self._answer = answer
        self._attachment = attachment if answer.lease_id else None
        self._streamed: list[Bytes] = []
        if self._attachment is not None:
            self._attachment.start_write()

    def __enter__(self) -> WriteLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write_from(self, sources: Sequence[Bytes]) -> None:
        """Copy sources[i] for each i of `indices`.

        Args:
            sources: One (block bytes,) uint8 array for each asked hash. Without shared memory
                they must not change before commit().
        """
        attachment, answer = self._attachment, self._answer
        if attachment is None or attachment.lost.is_set():
            return
        if not attachment.mapped:
            self._streamed = [sources[index] for index in answer.indices]
            return
        for index, offset in zip(answer.indices, answer.offsets, strict=True):
            np.copyto(attachment.extent(offset, answer.block_bytes), sources[index])

    def commit(self) -> bool:
        """Make the blocks visible, all or none; False if they are not."""
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return not self._answer.reason and not self._answer.lease_id
        committed = False
        try:
            with self._client.failing_open():
                if attachment.mapped:
                    request = pb.CommitRequest(
                        session_id=attachment.session_id, lease_id=self._answer.lease_id
                    )
                    call = attachment.stub.Commit
                    self._client.call(attachment, call, request, CALL_TIMEOUT_S)
                else:
                    self._store(attachment)
                committed = True
        finally:
            attachment.end_write()
        return committed

    def abort(self) -> None:
        """Give the room back; our copies have stopped. Idempotent, harmless after commit()."""
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        attachment.end_write()
        if attachment.lost.is_set():
            return
        request = pb.AbortRequest(session_id=attachment.session_id, lease_id=self._answer.lease_id)
        with self._client.failing_open():
            self._client.call(attachment, attachment.stub.Abort, request, CALL_TIMEOUT_S)

    def _store(self, attachment: Attachment) -> None:
        def chunks() -> Iterator[pb.StoreChunk]:
            yield pb.StoreChunk(session_id=attachment.session_id, lease_id=self._answer.lease_id)
            for source in self._streamed:
                for at in range(0, source.size, CHUNK_BYTES):
                    yield pb.StoreChunk(data=source[at : at + CHUNK_BYTES].tobytes())

        self._client.call(attachment, attachment.stub.Store, chunks(), READ_TIMEOUT_S)


class _FailingOpen:
    """Turns Missed into a counted miss."""

    def __init__(self, client: Client, raise_errors: bool) -> None:
        self._client = client
        self._raise_errors = raise_errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Missed):
            return False
        self._client.count_miss(error.reason)
        return not self._raise_errors


class Client:
    """A process's connection to the daemon. Attaches by itself, now and whenever it must again."""

    def __init__(
        self,
        address: str | None = None,
        *,
        owner_group: GroupId | None = None,
        name: str = "",
        shared_memory: bool = True,
        raise_errors: bool = False,
        acquire_timeout_s: float = ACQUIRE_TIMEOUT_S,
    ) -> None:
        """Start attaching; returns when the first try is over, whatever came of it.

        Args:
            address: "unix:/path" or "tcp:host:port"; None looks in the default places.
            owner_group: 16 random bytes that the processes of one engine share; None makes one.
            name: For the daemon's log.
            shared_memory: False streams all bytes, as a client on another host has to.
            raise_errors: Raise Missed where a call fails, instead of counting a miss.
            acquire_timeout_s: Deadline of Acquire and Lookup.

        Raises:
            ConfigError: the address does not parse.
        """
        self.group = owner_group or GroupId(secrets.token_bytes(GROUP_BYTES))
        self.misses: Counter[MissReason] = Counter()
        self._target = parse_address(address or find_address()).target
        self._name = name or f"pid {os.getpid()}"
        self._shared_memory = shared_memory
        self._raise_errors = raise_errors
        self._acquire_timeout_s = acquire_timeout_s
        self._start()
        _clients.add(self)

    def _start(self) -> None:
        self._attachment: Attachment | None = None
        self._forked = False
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._changed = threading.Condition()
        self._breaker_until_s = 0.0
        self._breaker_s = BREAKER_FIRST_S
        self._thread = threading.Thread(target=self._keep_attached, name="kvtier-session")
        self._thread.daemon = True
        self._thread.start()
        self._tried.wait(CALL_TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session; every call misses from now on. Idempotent."""
        self._closed.set()
        if self._forked:
            return
        attachment = self._attachment
        if attachment is not None:
            attachment.close()
        self._thread.join()

    @property
    def attached(self) -> bool:
        """True while there is a session."""
        return self._live() is not None

    @property
    def mapped(self) -> bool:
        """True while bytes travel through shared memory."""
        attachment = self._live()
        return attachment is not None and attachment.mapped

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until there is a session; False if timeout_s passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.attached, timeout_s)

    def attach_in_child(self) -> None:
        """After a fork: give this process a session of its own. Until then every call misses."""
        self._start()

    # Reading

    def lookup(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        *,
        allowed_loss: Loss = Loss.EXACT,
    ) -> GetResult:
        """How much of a prompt is cached, by tier; nothing is leased, touched or loaded."""
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.LookupRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                allowed_loss=allowed_loss.value,  # type: ignore[arg-type]
            )
            answer = self.call(attachment, attachment.stub.Lookup, request, self._acquire_timeout_s)
            by_tier = {Tier.HOST: answer.host_blocks, Tier.SSD: answer.ssd_blocks}
            return GetResult(answer.blocks, by_tier)
        return GetResult(0)

    def acquire(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        *,
        request_id: bytes = b"",
        ttl_s: float = 0.0,
        allowed_loss: Loss = Loss.EXACT,
    ) -> ReadLease:
        """Lease the longest cached prefix; its loads start.

        Args:
            spec: The namespace.
            hashes: The prompt's block hashes, first block first.
            request_id: Makes a repeated call answer the same lease.
            ttl_s: Life of the lease; 0 means the daemon's default.
            allowed_loss: What the stored form may have lost.
        """
        if not hashes:
            return ReadLease(self, None, pb.AcquireResponse())
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.AcquireRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                request_id=request_id,
                ttl_ms=round(ttl_s * 1000),
                allowed_loss=allowed_loss.value,  # type: ignore[arg-type]
            )
            call = attachment.stub.Acquire
            answer = self.call(attachment, call, request, self._acquire_timeout_s)
            if not answer.blocks:
                full = answer.reason != pb.REASON_NONE
                self.count_miss(MissReason.FULL if full else MissReason.NOT_CACHED)
            return ReadLease(self, attachment if answer.lease_id else None, answer)
        return ReadLease(self, None, pb.AcquireResponse())

    def get(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        destinations: Sequence[Bytes],
        *,
        allowed_loss: Loss = Loss.EXACT,
    ) -> GetResult:
        """Copy the longest cached prefix into destinations.

        Args:
            spec: The namespace.
            hashes: The prompt's block hashes, first block first.
            destinations: At least as many (spec.block_bytes,) uint8 arrays.
            allowed_loss: What the stored form may have lost.
        """
        with self.acquire(spec, hashes, allowed_loss=allowed_loss) as lease:
            done = lease.read_into(destinations)
            on_ssd = min(lease.ssd_blocks, done)
            return GetResult(done, {Tier.HOST: done - on_ssd, Tier.SSD: on_ssd})

    # Writing

    def reserve(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        *,
        ttl_s: float = 0.0,
        allowed_loss: Loss = Loss.EXACT,
        wait_s: float = 0.0,
    ) -> WriteLease:
        """Room for those of consecutive blocks that are not present.

        Args:
            spec: The namespace.
            parent: Hash of the block before; None if hashes[0] is a first block.
            hashes: The blocks, in chain order.
            ttl_s: Life of the lease; 0 means the daemon's default.
            allowed_loss: What stored forms of these blocks may lose.
            wait_s: How long the daemon may wait for unwritten blocks to reach the SSD.
        """
        if not hashes:
            return WriteLease(self, None, pb.ReserveResponse())
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.ReserveRequest(
                session_id=attachment.session_id,
                namespace=digest,
                parent=parent or b"",
                hashes=join_hashes(hashes),
                ttl_ms=round(ttl_s * 1000),
                allowed_loss=allowed_loss.value,  # type: ignore[arg-type]
                wait_ms=round(wait_s * 1000),
            )
            call = attachment.stub.Reserve
            answer = self.call(attachment, call, request, RESERVE_TIMEOUT_S + wait_s)
            if answer.reason != pb.REASON_NONE:
                full = answer.reason == pb.REASON_FULL
                self.count_miss(MissReason.FULL if full else MissReason.REFUSED)
            return WriteLease(self, attachment, answer)
        return WriteLease(self, None, pb.ReserveResponse())

    def put(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        sources: Sequence[Bytes],
        *,
        allowed_loss: Loss = Loss.EXACT,
        wait_s: float = 0.0,
    ) -> int:
        """Store consecutive blocks; the number of leading ones that the daemon has, or is getting.

        Args:
            spec: The namespace.
            parent: Hash of the block before; None if hashes[0] is a first block.
            hashes: The blocks, in chain order.
            sources: As many (spec.block_bytes,) uint8 arrays.
            allowed_loss: What stored forms of these blocks may lose.
            wait_s: How long the daemon may wait for unwritten blocks to reach the SSD.
        """
        with self.reserve(spec, parent, hashes, allowed_loss=allowed_loss, wait_s=wait_s) as lease:
            if not lease.indices:
                return lease.covered_blocks
            lease.write_from(sources)
            return lease.covered_blocks if lease.commit() else lease.indices[0]

    def finish(self, spec: NamespaceSpec, tail: BlockHash) -> None:
        """The request is over: its chain becomes the most recent."""
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.FinishRequest(
                session_id=attachment.session_id, namespace=digest, tail=tail
            )
            self.call(attachment, attachment.stub.Finish, request, CALL_TIMEOUT_S)

    def flush(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], *, timeout_s: float
    ) -> list[bool]:
        """Write blocks to the SSD and say for each whether it is durable now."""
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.FlushRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                timeout_ms=round(timeout_s * 1000),
            )
            call = attachment.stub.Flush
            answer = self.call(attachment, call, request, timeout_s + CALL_TIMEOUT_S)
            return [bool(flag) for flag in answer.durable]
        return [False] * len(hashes)

    # Administration

    def pin(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], *, ttl_s: float
    ) -> tuple[bytes, int]:
        """Keep the longest cached prefix in RAM; (pin id, blocks), (b"", 0) for none."""
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.PinRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                ttl_ms=round(ttl_s * 1000),
            )
            answer = self.call(attachment, attachment.stub.Pin, request, CALL_TIMEOUT_S)
            return answer.pin_id, answer.blocks
        return b"", 0

    def unpin(self, pin_id: bytes) -> None:
        """End a pin. Harmless if it is over."""
        with self.failing_open():
            attachment = self._require()
            request = pb.UnpinRequest(session_id=attachment.session_id, pin_id=pin_id)
            self.call(attachment, attachment.stub.Unpin, request, CALL_TIMEOUT_S)

    def drop(self, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> int:
        """Take blocks out of all tiers; how many had a copy."""
        return self._drop(spec, join_hashes(hashes), whole_namespace=False)

    def drop_namespace(self, spec: NamespaceSpec) -> int:
        """Nothing stored in this namespace before is ever hit again; how many blocks that is."""
        return self._drop(spec, b"", whole_namespace=True)

    def _drop(self, spec: NamespaceSpec, hashes: bytes, *, whole_namespace: bool) -> int:
        with self.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.DropRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=hashes,
                whole_namespace=whole_namespace,
            )
            answer = self.call(attachment, attachment.stub.Drop, request, 5 * CALL_TIMEOUT_S)
            return int(answer.dropped_blocks)
        return 0

    def stats(self) -> pb.StatsResponse:
        """The daemon's counters; empty if it can't be asked."""
        with self.failing_open():
            attachment = self._require()
            call: Callable[..., pb.StatsResponse] = attachment.stub.Stats
            return self.call(attachment, call, pb.StatsRequest(), CALL_TIMEOUT_S)
        return pb.StatsResponse()

    # Failing open

    def count_miss(self, reason: MissReason) -> None:
        """Note that a call gave nothing."""
        self.misses[reason] += 1

    def failing_open(self) -> _FailingOpen:
        """Count a Missed inside, and swallow it unless the client was asked to raise."""
        return _FailingOpen(self, self._raise_errors)

    def call(
        self,
        attachment: Attachment,
        method: Callable[..., Response],
        request: Any,
        timeout_s: float,
    ) -> Response:
        """One rpc.

        Raises:
            Missed: it failed, or the breaker is open.
        """
        if attachment.lost.is_set():
            raise Missed(MissReason.NO_SESSION)
        if time.monotonic() < self._breaker_until_s:
            raise Missed(MissReason.BREAKER_OPEN)
        try:
            answer = method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._missed(attachment, error) from error
        except ValueError as error:  # The channel was closed meanwhile.
            raise Missed(MissReason.NO_SESSION, str(error)) from error
        self._breaker_s = BREAKER_FIRST_S
        return answer

    def _missed(self, attachment: Attachment, error: grpc.RpcError) -> Missed:
        code, detail = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._breaker_until_s = time.monotonic() + self._breaker_s
            self._breaker_s = min(2 * self._breaker_s, BREAKER_LONGEST_S)
            return Missed(MissReason.TIMEOUT, detail)
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE):
            attachment.close()  # Another boot, or gone: the session thread attaches again.
            return Missed(MissReason.NO_SESSION, detail)
        if code is grpc.StatusCode.NOT_FOUND:
            return Missed(MissReason.LEASE_LOST, detail)
        return Missed(MissReason.RPC_ERROR, f"{code.name}: {detail}")

    # Attaching

    def _live(self) -> Attachment | None:
        attachment = self._attachment
        return attachment if attachment is not None and not attachment.lost.is_set() else None

    def _require(self) -> Attachment:
        attachment = self._live()
        if attachment is not None:
            return attachment
        if self._forked:
            raise Missed(MissReason.FORKED, "attach_in_child() gives this process a session")
        raise Missed(MissReason.CLOSED if self._closed.is_set() else MissReason.NO_SESSION)

    def _namespace(self, spec: NamespaceSpec) -> tuple[Attachment, bytes]:
        attachment = self._require()
        digest = attachment.opened.get(spec)
        if digest is None:
            digest = namespace_digest(spec)
            request = pb.OpenNamespaceRequest(
                session_id=attachment.session_id, digest=digest, spec=canonical_spec(spec)
            )
            self.call(attachment, attachment.stub.OpenNamespace, request, CALL_TIMEOUT_S)
            attachment.opened[spec] = digest
        return attachment, digest

    def _keep_attached(self) -> None:
        """The session thread: attach, stay until the session is over, attach again."""
        retry_s = RETRY_FIRST_S
        while not self._closed.is_set():
            try:
                attachment = Attachment(
                    self._target, self.group, self._name, shared_memory=self._shared_memory
                )
            except (grpc.RpcError, KvtierError):
                self._tried.set()
                self._closed.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_LONGEST_S)
                continue
            retry_s = RETRY_FIRST_S
            with self._changed:
                self._attachment = attachment
                self._changed.notify_all()
            self._tried.set()
            if self._closed.is_set():
                attachment.close()
            attachment.run()

    def forget_in_child(self) -> None:
        """After a fork: this process has no session; the parent's stays the parent's."""
        self._forked = True
        if self._attachment is not None:
            self._attachment.forget_in_child()
            # Never freed here: freeing would unmap an address that may be somebody else's by now.
            _parents_attachments.append(self._attachment)
            self._attachment = None


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_parents_attachments: list[Attachment] = []


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
