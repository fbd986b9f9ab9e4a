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

import logging
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from kvtier.addresses import find_address, parse_address
from kvtier.client import fork
from kvtier.client.attachment import Attachment, join_hashes
from kvtier.client.calls import CALL_TIMEOUT_S, Calls, Missed
from kvtier.client.leases import WAIT_SLICE_S, ReadLease, WriteLease, abort_request
from kvtier.codec.base import Bytes
from kvtier.errors import ConfigError, KvtierError
from kvtier.hashing import canonical_spec, namespace_digest
from kvtier.types import (
    GROUP_BYTES,
    MAX_ACQUIRE_TIMEOUT_MS,
    MAX_BLOCKS_PER_CALL,
    BlockHash,
    GroupId,
    Loss,
    MissReason,
    NamespaceSpec,
    Tier,
)
from kvtier.v1 import cache_pb2 as pb

log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT_S = 0.05
RESERVE_TIMEOUT_S = 0.1
DROP_TIMEOUT_S = 5.0
RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 1.0
_NO_BLOCKS = {
    pb.REASON_NONE: MissReason.NOT_CACHED,
    pb.REASON_SLOW: MissReason.SLOW,
}
"""Why Acquire granted nothing; any other reason is a lack of room."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """Answer to get() and lookup().

    Attributes:
        num_blocks: Leading destinations that hold their blocks.
        blocks_by_tier: The same blocks by the tier they were found on.
        loss: What some of them may have lost. What is computed behind them has lost as much: say so
            when storing it.
        answered: False if lookup() got no answer; then there may be more.
    """

    num_blocks: int
    blocks_by_tier: Mapping[Tier, int] = field(default_factory=dict)
    loss: Loss = Loss.EXACT
    answered: bool = True


@dataclass(frozen=True, slots=True)
class DropResult:
    """Answer to drop_namespace().

    Attributes:
        num_blocks: How many there were.
        confirmed: The daemon said that they are gone, for good. Without that some may be hit again:
            repeat the call.
    """

    num_blocks: int
    confirmed: bool


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
            acquire_timeout_s: Deadline of Acquire and Lookup, MAX_ACQUIRE_TIMEOUT_MS at most.
                Reserve has at least RESERVE_TIMEOUT_S, and what is rare CALL_TIMEOUT_S.

        Raises:
            ConfigError: the address does not parse, or the deadline is out of range.
        """
        if not 0 < acquire_timeout_s <= MAX_ACQUIRE_TIMEOUT_MS / 1000:
            raise ConfigError(
                f"acquire_timeout_s={acquire_timeout_s}: must be more than 0, and at most"
                f" {MAX_ACQUIRE_TIMEOUT_MS // 1000} seconds"
            )
        self.group = owner_group or GroupId(secrets.token_bytes(GROUP_BYTES))
        self._target = parse_address(address or find_address()).target
        self._name = name or f"pid {os.getpid()}"
        self._shared_memory = shared_memory
        self._calls = Calls(
            raise_errors=raise_errors, timeout_s=max(CALL_TIMEOUT_S, acquire_timeout_s)
        )
        self._acquire_timeout_s = acquire_timeout_s
        self._max_age_s: dict[NamespaceSpec, int] = {}
        self._start()
        _clients.add(self)

    def _start(self) -> None:
        self._attachment: Attachment | None = None
        self._dialled: Attachment | None = None
        self._refusal = ""
        self._forked = False
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._changed = threading.Condition()
        self._calls.close_breaker()
        self._thread = threading.Thread(target=self._keep_attached, name="kvtier-session")
        self._thread.daemon = True
        self._thread.start()
        self._tried.wait(self._calls.timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session; every call misses from now on. Idempotent."""
        self._closed.set()
        if self._forked:
            return  # The threads and the channel are the parent's.
        attachment = self._dialled
        if attachment is not None:
            attachment.close()
        self._thread.join()

    @property
    def misses(self) -> Counter[MissReason]:
        """Calls that gave nothing, by reason."""
        return self._calls.misses

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
        """After a fork: give this process a session of its own. Until then every call misses.

        It stays so where gRPC has no support for forks (fork.py): import this package before gRPC.
        """
        if self._forked and fork.supported():
            self._start()

    # Reading

    def lookup(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        *,
        allowed_loss: Loss = Loss.EXACT,
    ) -> GetResult:
        """How much of a prompt is cached, by tier; nothing is leased, touched or counted."""
        with self._calls.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.LookupRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                allowed_loss=allowed_loss.value,  # type: ignore[arg-type]
            )
            answer = self._calls.call(
                attachment, attachment.stub.Lookup, request, self._acquire_timeout_s
            )
            by_tier = {Tier.HOST: answer.host_blocks, Tier.SSD: answer.ssd_blocks}
            return GetResult(answer.blocks, by_tier)
        return GetResult(0, answered=False)

    def record_hits(
        self, spec: NamespaceSpec, blocks_by_tier: Mapping[Tier, int], missed_blocks: int
    ) -> None:
        """Tell the daemon's hit rate what a prompt asked for and found, once a prompt.

        For engines that look up, and acquire only what is there. Does not wait for the answer, and
        what gets lost stays uncounted. Of very long prompts the first MAX_BLOCKS_PER_CALL count.
        """
        with suppress(Missed):
            attachment, digest = self._namespace(spec)
            most = MAX_BLOCKS_PER_CALL - sum(blocks_by_tier.values())
            request = pb.RecordHitsRequest(
                session_id=attachment.session_id,
                namespace=digest,
                host_blocks=blocks_by_tier.get(Tier.HOST, 0),
                ssd_blocks=blocks_by_tier.get(Tier.SSD, 0),
                missed_blocks=max(0, min(missed_blocks, most)),
            )
            self._calls.tell(attachment, attachment.stub.RecordHits, request)

    def acquire(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        *,
        request_id: bytes = b"",
        ttl_s: float = 0.0,
        allowed_loss: Loss = Loss.EXACT,
        prefill_tokens_per_s: float = 0.0,
        recorded: bool = False,
    ) -> ReadLease:
        """Lease the longest cached prefix; its loads start.

        Args:
            spec: The namespace.
            hashes: The prompt's block hashes, first block first.
            request_id: Makes a repeated call answer the same lease.
            ttl_s: Life of the lease; 0 means the daemon's default.
            allowed_loss: What the stored form may have lost.
            prefill_tokens_per_s: How fast the engine would compute what it does not get; what
                loads slower than that is not granted. 0: unknown, all of it is.
            recorded: record_hits() has said what came of this prompt.
        """
        if not hashes:
            return ReadLease(self._calls, None, pb.AcquireResponse())
        with self._calls.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.AcquireRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                request_id=request_id,
                ttl_ms=round(ttl_s * 1000),
                allowed_loss=allowed_loss.value,  # type: ignore[arg-type]
                prefill_tokens_per_s=prefill_tokens_per_s,
                recorded=recorded,
            )
            call = attachment.stub.Acquire
            answer = self._calls.call(attachment, call, request, self._acquire_timeout_s)
            if not answer.blocks:
                self._calls.count_miss(_NO_BLOCKS.get(answer.reason, MissReason.FULL))
            return ReadLease(self._calls, attachment if answer.lease_id else None, answer)
        return ReadLease(self._calls, None, pb.AcquireResponse())

    def get(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        destinations: Sequence[Bytes],
        *,
        allowed_loss: Loss = Loss.EXACT,
        prefill_tokens_per_s: float = 0.0,
    ) -> GetResult:
        """Copy the longest cached prefix into destinations.

        Args:
            spec: The namespace.
            hashes: The prompt's block hashes, first block first.
            destinations: At least as many (spec.block_bytes,) uint8 arrays.
            allowed_loss: What the stored form may have lost.
            prefill_tokens_per_s: As for acquire().
        """
        with self.acquire(
            spec, hashes, allowed_loss=allowed_loss, prefill_tokens_per_s=prefill_tokens_per_s
        ) as lease:
            done = lease.read_into(destinations)
            on_ssd = min(lease.ssd_blocks, done)
            by_tier = {Tier.HOST: done - on_ssd, Tier.SSD: on_ssd}
            return GetResult(done, by_tier, lease.loss if done else Loss.EXACT)

    # Writing

    def reserve(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        *,
        ttl_s: float = 0.0,
        allowed_loss: Loss = Loss.EXACT,
        loss: Loss = Loss.EXACT,
        wait_s: float = 0.0,
    ) -> WriteLease:
        """Room for those of consecutive blocks that are not present.

        Args:
            spec: The namespace.
            parent: Hash of the block before; None if hashes[0] is a first block.
            hashes: The blocks, in chain order.
            ttl_s: Life of the lease; 0 means the daemon's default.
            allowed_loss: What stored forms of these blocks may lose.
            loss: What these blocks have lost already: the loss of those they were computed behind.
            wait_s: How long the daemon may wait for unwritten blocks to reach the SSD.
        """
        if not hashes:
            return WriteLease(self._calls, None, pb.ReserveResponse())
        with self._calls.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.ReserveRequest(
                session_id=attachment.session_id,
                namespace=digest,
                parent=parent or b"",
                hashes=join_hashes(hashes),
                ttl_ms=round(ttl_s * 1000),
                allowed_loss=allowed_loss.value,  # type: ignore[arg-type]
                loss=loss.value,  # type: ignore[arg-type]
                wait_ms=round(wait_s * 1000),
            )
            answer = self._calls.call_for_lease(
                attachment,
                attachment.stub.Reserve,
                request,
                max(RESERVE_TIMEOUT_S, self._acquire_timeout_s) + wait_s,
                on_late=lambda late: attachment.settle_later(
                    attachment.stub.Abort, abort_request(attachment, late)
                ),
            )
            if answer.reason != pb.REASON_NONE:
                full = answer.reason == pb.REASON_FULL
                self._calls.count_miss(MissReason.FULL if full else MissReason.REFUSED)
            return WriteLease(self._calls, attachment, answer)
        return WriteLease(self._calls, None, pb.ReserveResponse())

    def put(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        sources: Sequence[Bytes],
        *,
        allowed_loss: Loss = Loss.EXACT,
        loss: Loss = Loss.EXACT,
        wait_s: float = 0.0,
    ) -> int:
        """Store consecutive blocks; the number of leading ones that the daemon has, or is getting.

        Args:
            spec: The namespace.
            parent: Hash of the block before; None if hashes[0] is a first block.
            hashes: The blocks, in chain order.
            sources: As many (spec.block_bytes,) uint8 arrays.
            allowed_loss: What stored forms of these blocks may lose.
            loss: What these blocks have lost already: the loss of those they were computed behind.
            wait_s: How long the daemon may wait for unwritten blocks to reach the SSD.
        """
        with self.reserve(
            spec, parent, hashes, allowed_loss=allowed_loss, loss=loss, wait_s=wait_s
        ) as lease:
            if not lease.indices:
                return lease.covered_blocks
            lease.write_from(sources)
            return lease.covered_blocks if lease.commit() else lease.indices[0]

    def finish(self, spec: NamespaceSpec, tail: BlockHash) -> None:
        """The request is over: its chain becomes the most recent. Does not wait for the answer."""
        with self._calls.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.FinishRequest(
                session_id=attachment.session_id, namespace=digest, tail=tail
            )
            self._calls.send(attachment, attachment.stub.Finish, request)

    def flush(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], *, timeout_s: float
    ) -> list[bool]:
        """Write blocks to the SSD and say for each whether it is durable now."""
        deadline_s = time.monotonic() + timeout_s
        durable = [False] * len(hashes)
        while hashes:
            left_s = deadline_s - time.monotonic()
            slice_s = max(0.0, min(left_s, WAIT_SLICE_S))
            answered = False
            with self._calls.failing_open():
                attachment, digest = self._namespace(spec)
                request = pb.FlushRequest(
                    session_id=attachment.session_id,
                    namespace=digest,
                    hashes=join_hashes(hashes),
                    timeout_ms=round(slice_s * 1000),
                )
                call = attachment.stub.Flush
                answer = self._calls.call(
                    attachment, call, request, slice_s + self._calls.timeout_s
                )
                durable = [bool(flag) for flag in answer.durable]
                answered = True
            if not answered or all(durable) or left_s <= slice_s:
                break
        return durable

    # Administration

    def open_namespace(self, spec: NamespaceSpec, *, max_age_s: int = 0) -> bool:
        """Make a namespace known; every other call does so by itself, without an age.

        Args:
            spec: The namespace.
            max_age_s: Blocks older than this are misses and go. The shortest wish of all clients
                holds; this client repeats its own after a restart of the daemon. 0: no wish.

        Returns:
            Whether the daemon knows it now.
        """
        self._max_age_s[spec] = max_age_s
        with self._calls.failing_open():
            self._require().opened.pop(spec, None)
            self._namespace(spec)
            return True
        return False

    def pin(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], *, ttl_s: float
    ) -> tuple[bytes, int]:
        """Keep the longest cached prefix in RAM; (pin id, blocks), (b"", 0) for none."""
        with self._calls.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.PinRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=join_hashes(hashes),
                ttl_ms=round(ttl_s * 1000),
            )
            answer = self._calls.call(
                attachment, attachment.stub.Pin, request, self._calls.timeout_s
            )
            return answer.pin_id, answer.blocks
        return b"", 0

    def unpin(self, pin_id: bytes) -> None:
        """End a pin. Harmless if it is over."""
        with self._calls.failing_open():
            attachment = self._require()
            request = pb.UnpinRequest(session_id=attachment.session_id, pin_id=pin_id)
            self._calls.call(attachment, attachment.stub.Unpin, request, self._calls.timeout_s)

    def drop(self, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> int:
        """Take blocks out of all tiers; how many had a copy."""
        return self._drop(spec, join_hashes(hashes), whole_namespace=False).num_blocks

    def drop_namespace(self, spec: NamespaceSpec) -> DropResult:
        """Nothing stored in this namespace before is ever hit again, if that is confirmed."""
        return self._drop(spec, b"", whole_namespace=True)

    def _drop(self, spec: NamespaceSpec, hashes: bytes, *, whole_namespace: bool) -> DropResult:
        with self._calls.failing_open():
            attachment, digest = self._namespace(spec)
            request = pb.DropRequest(
                session_id=attachment.session_id,
                namespace=digest,
                hashes=hashes,
                whole_namespace=whole_namespace,
            )
            answer = self._calls.call(
                attachment,
                attachment.stub.Drop,
                request,
                max(DROP_TIMEOUT_S, self._calls.timeout_s),
            )
            return DropResult(answer.dropped_blocks, confirmed=True)
        return DropResult(0, confirmed=False)

    def stats(self) -> pb.StatsResponse:
        """The daemon's counters; empty if it can't be asked."""
        with self._calls.failing_open():
            attachment = self._require()
            call: Callable[..., pb.StatsResponse] = attachment.stub.Stats
            return self._calls.call(attachment, call, pb.StatsRequest(), self._calls.timeout_s)
        return pb.StatsResponse()

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
        if self._closed.is_set():
            raise Missed(MissReason.CLOSED)
        raise Missed(MissReason.NO_SESSION, self._refusal)

    def _namespace(self, spec: NamespaceSpec) -> tuple[Attachment, bytes]:
        attachment = self._require()
        digest = attachment.opened.get(spec)
        if digest is None:
            digest = namespace_digest(spec)
            request = pb.OpenNamespaceRequest(
                session_id=attachment.session_id,
                digest=digest,
                spec=canonical_spec(spec),
                max_age_s=self._max_age_s.get(spec, 0),
            )
            self._calls.call(
                attachment, attachment.stub.OpenNamespace, request, self._calls.timeout_s
            )
            attachment.opened[spec] = digest
        return attachment, digest

    def _keep_attached(self) -> None:
        """The session thread: attach, stay until the session is over, attach again."""
        retry_s, lost = RETRY_FIRST_S, False
        while not self._closed.is_set():
            attachment = self._dialled = Attachment(self._target)
            if self._closed.is_set():
                attachment.close()  # close() may have looked for it before it was there.
            try:
                attachment.attach(self.group, self._name, shared_memory=self._shared_memory)
            except (grpc.RpcError, KvtierError) as error:
                self._refusal = (
                    error.details() or "" if isinstance(error, grpc.RpcError) else str(error)
                )
                self._tried.set()
                self._closed.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_LONGEST_S)
                continue
            retry_s = RETRY_FIRST_S
            with self._changed:
                self._attachment = attachment
                self._calls.close_breaker()
                self._changed.notify_all()
            self._tried.set()
            if lost:
                log.warning("attached to the kvtier daemon at %s again", self._target)
            attachment.run()
            lost = not self._closed.is_set()
            if lost:
                log.warning("lost the kvtier daemon at %s: uncached until it is back", self._target)

    def forget_in_child(self) -> None:
        """After a fork: this process has no session; the parent's stays the parent's."""
        self._forked = True
        self._calls.forget_in_child()
        if self._dialled is not None:
            self._dialled.forget_in_child()
        self._attachment = self._dialled = None


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _before_fork() -> None:
    if any(client.attached for client in list(_clients)):
        fork.warn_if_unsupported()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forget_in_child()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
