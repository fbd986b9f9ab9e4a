"""What breaks the contract gets a status that says so, and the daemon lives (user report 15)."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier.hashing import canonical_spec, namespace_digest
from kvtier.process import DaemonProcess
from kvtier.types import MAX_BLOCKS_PER_CALL
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc
from tests.e2e.conftest import Connect, StartDaemon, daemons
from tests.e2e.support import (
    BLOCK_BYTES,
    Raw,
    chain,
    content,
    eventually,
    get_checked,
    hello,
    put,
    refused,
    spec_of,
    used_bytes,
)

SPEC = spec_of()
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
HASHES = b"".join(chain("wire", 4))
STRANGER = b"?" * 16


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all that no bad request may harm."""
    with daemons(tmp_path_factory.mktemp("wire")) as start:
        yield start(ssd=False)


@pytest.fixture
def raw(shared: DaemonProcess) -> Iterator[Raw]:
    """A session on bare stubs, with SPEC open and empty; afterwards the daemon still works."""
    with Raw(shared.address) as session:
        names: Any = {"session_id": session.session_id, "namespace": session.open(SPEC)}
        session.stub.Drop(pb.DropRequest(**names, whole_namespace=True))
        yield session
        session.beat()
        granted = reserve(session, b"".join(chain("afterwards", 1)))
        assert granted.lease_id
        session.stub.Abort(abort_of(session, granted.lease_id))
        assert session.stub.Stats(pb.StatsRequest()).quarantined_bytes == 0


def abort_of(session: Raw, lease_id: int) -> pb.AbortRequest:
    """Abort."""
    return pb.AbortRequest(session_id=session.session_id, lease_id=lease_id)


def reserve(session: Raw, hashes: bytes = HASHES, **fields: Any) -> Any:
    """Reserve in SPEC."""
    names: Any = {"session_id": session.session_id, "namespace": namespace_digest(SPEC)}
    return session.stub.Reserve(pb.ReserveRequest(**names, hashes=hashes, **fields))


def acquire(session: Raw, hashes: bytes = HASHES, **fields: Any) -> Any:
    """Acquire in SPEC."""
    names: Any = {"session_id": session.session_id, "namespace": namespace_digest(SPEC)}
    return session.stub.Acquire(pb.AcquireRequest(**names, hashes=hashes, **fields))


def commit(session: Raw, lease_id: int) -> Any:
    """Commit."""
    return session.stub.Commit(pb.CommitRequest(session_id=session.session_id, lease_id=lease_id))


def stored(session: Raw, hashes: bytes = HASHES) -> None:
    """Have these blocks, whatever their bytes."""
    commit(session, reserve(session, hashes).lease_id)


def calls(session_id: bytes, namespace: bytes, hashes: bytes) -> dict[str, Any]:
    """A request of every rpc that names a namespace."""
    names: Any = {"session_id": session_id, "namespace": namespace}
    return {
        "Lookup": pb.LookupRequest(**names, hashes=hashes),
        "Acquire": pb.AcquireRequest(**names, hashes=hashes),
        "Reserve": pb.ReserveRequest(**names, hashes=hashes),
        "Flush": pb.FlushRequest(**names, hashes=hashes),
        "Pin": pb.PinRequest(**names, hashes=hashes, ttl_ms=1000),
        "Drop": pb.DropRequest(**names, hashes=hashes),
        "Finish": pb.FinishRequest(**names, tail=hashes),
    }


def test_hits_are_recorded_within_a_bound(raw: Raw) -> None:
    """So that one call can't make the counters overflow; a stranger can't touch them."""

    def record(*blocks: int, session: bytes = raw.session_id, of: bytes = b"") -> None:
        host, ssd, missed = blocks
        request = pb.RecordHitsRequest(
            session_id=session,
            namespace=of or namespace_digest(SPEC),
            host_blocks=host,
            ssd_blocks=ssd,
            missed_blocks=missed,
        )
        raw.stub.RecordHits(request)

    before = raw.stub.Stats(pb.StatsRequest()).counters
    record(1, 2, 3)
    record(0, 0, MAX_BLOCKS_PER_CALL)
    for blocks in ((MAX_BLOCKS_PER_CALL, 0, 1), (2**32 - 1, 2**32 - 1, 2**32 - 1)):
        with refused(INVALID, "blocks"):
            record(*blocks)
    with refused(UNAUTHENTICATED, "session"):
        record(1, 1, 1, session=STRANGER)
    with refused(NOT_FOUND, "namespace"):
        record(1, 1, 1, of=b"n" * 32)
    after = raw.stub.Stats(pb.StatsRequest()).counters
    grown = {name: after[name] - before[name] for name in after}
    assert (grown["host_hit_blocks"], grown["ssd_hit_blocks"]) == (1, 2)
    assert grown["missed_blocks"] == 3 + MAX_BLOCKS_PER_CALL
    assert grown["requested_blocks"] == 6 + MAX_BLOCKS_PER_CALL


RPCS = list(calls(b"", b"", b""))


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize(
    "hashes", [b"", b"x", HASHES[:-1], HASHES + b"x"], ids=["none", "one byte", "short", "long"]
)
def test_hashes_of_a_wrong_length(raw: Raw, rpc: str, hashes: bytes) -> None:
    request = calls(raw.session_id, namespace_digest(SPEC), hashes)[rpc]
    with refused(INVALID, "tail" if rpc == "Finish" else "hashes"):
        getattr(raw.stub, rpc)(request)


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc != "Finish"])
def test_too_many_hashes(raw: Raw, rpc: str) -> None:
    hashes = bytes(32 * (MAX_BLOCKS_PER_CALL + 1))
    with refused(INVALID, "hashes", str(MAX_BLOCKS_PER_CALL)):
        getattr(raw.stub, rpc)(calls(raw.session_id, namespace_digest(SPEC), hashes)[rpc])


@pytest.mark.parametrize("rpc", RPCS)
def test_unknown_sessions_and_namespaces(raw: Raw, rpc: str) -> None:
    call: Callable[[Any], Any] = getattr(raw.stub, rpc)
    with refused(UNAUTHENTICATED, "session"):
        call(calls(STRANGER, namespace_digest(SPEC), HASHES[:32])[rpc])
    with refused(UNAUTHENTICATED, "session"):
        call(calls(b"", namespace_digest(SPEC), HASHES[:32])[rpc])
    with refused(NOT_FOUND, "namespace"):
        call(calls(raw.session_id, b"?" * 32, HASHES[:32])[rpc])
    with refused(INVALID, "namespace"):
        call(calls(raw.session_id, b"?" * 31, HASHES[:32])[rpc])


def test_most_hashes_are_served(raw: Raw) -> None:
    hashes = os.urandom(32 * MAX_BLOCKS_PER_CALL)
    assert acquire(raw, hashes).lease_id == 0
    granted = reserve(raw, hashes)
    assert granted.reason == pb.REASON_FULL
    assert 0 < len(granted.indices) <= 512
    raw.stub.Abort(pb.AbortRequest(session_id=raw.session_id, lease_id=granted.lease_id))


def test_leases_nobody_granted(raw: Raw) -> None:
    names: Any = {"session_id": raw.session_id, "lease_id": 12345}
    for call in (
        lambda: raw.stub.Commit(pb.CommitRequest(**names)),
        lambda: raw.stub.Wait(pb.WaitRequest(**names, blocks=1)),
        lambda: list(raw.stub.Fetch(pb.FetchRequest(**names, blocks=1))),
        lambda: raw.stub.Store(iter([pb.StoreChunk(**names, data=b"x")])),
    ):
        with refused(NOT_FOUND, "lease 12345"):
            call()
    raw.stub.Release(pb.ReleaseRequest(**names))
    raw.stub.Abort(pb.AbortRequest(**names))


def test_a_lease_ends_once(raw: Raw) -> None:
    lease_id = reserve(raw).lease_id
    assert commit(raw, lease_id).blocks == 4
    with refused(NOT_FOUND, str(lease_id)):
        commit(raw, lease_id)
    raw.stub.Abort(pb.AbortRequest(session_id=raw.session_id, lease_id=lease_id))
    assert acquire(raw).blocks == 4, "aborting what is committed undoes nothing"


def test_leases_of_others(shared: DaemonProcess, raw: Raw) -> None:
    """Committing, aborting, releasing or reading them is impossible."""
    stored(raw, b"".join(chain("read", 2)))
    reading, writing = acquire(raw, b"".join(chain("read", 2))), reserve(raw)
    with Raw(shared.address) as thief:
        with refused(NOT_FOUND, str(writing.lease_id)):
            commit(thief, writing.lease_id)
        with refused(NOT_FOUND, str(writing.lease_id)):
            thief.stub.Store(
                iter([pb.StoreChunk(session_id=thief.session_id, lease_id=writing.lease_id)])
            )
        with refused(NOT_FOUND, str(reading.lease_id)):
            list(
                thief.stub.Fetch(
                    pb.FetchRequest(
                        session_id=thief.session_id, lease_id=reading.lease_id, blocks=2
                    )
                )
            )
        thief.stub.Abort(pb.AbortRequest(session_id=thief.session_id, lease_id=writing.lease_id))
        thief.stub.Release(
            pb.ReleaseRequest(session_id=thief.session_id, lease_id=reading.lease_id)
        )
    stats = raw.stub.Stats(pb.StatsRequest())
    assert (stats.read_leases, stats.write_leases) == (1, 1)
    assert commit(raw, writing.lease_id).blocks == 4


def test_leases_of_the_other_kind(raw: Raw) -> None:
    stored(raw)
    reading, writing = acquire(raw), reserve(raw, b"".join(chain("other", 1)))
    with refused(PRECONDITION, "read lease"):
        commit(raw, reading.lease_id)
    with refused(PRECONDITION, "read lease"):
        raw.stub.Abort(pb.AbortRequest(session_id=raw.session_id, lease_id=reading.lease_id))
    with refused(PRECONDITION, "write lease"):
        raw.stub.Release(pb.ReleaseRequest(session_id=raw.session_id, lease_id=writing.lease_id))
    with refused(PRECONDITION, "write lease"):
        raw.stub.Wait(
            pb.WaitRequest(session_id=raw.session_id, lease_id=writing.lease_id, blocks=1)
        )
    assert commit(raw, writing.lease_id).blocks == 1


def test_request_ids(raw: Raw) -> None:
    stored(raw)
    first = acquire(raw, request_id=b"one")
    assert acquire(raw, request_id=b"one") == first
    with refused(PRECONDITION, "request"):
        acquire(raw, b"".join(chain("other", 4)), request_id=b"one")
    with refused(INVALID, "request_id"):
        acquire(raw, request_id=b"x" * 65)
    raw.stub.Release(pb.ReleaseRequest(session_id=raw.session_id, lease_id=first.lease_id))
    assert acquire(raw, request_id=b"one").lease_id != first.lease_id


def test_chains_that_are_none(raw: Raw) -> None:
    one, two, three, _ = chain("chain", 4)
    with refused(INVALID, "parent"):
        reserve(raw, one, parent=b"short")
    assert reserve(raw, two, parent=one).reason == pb.REASON_ORPHAN
    with refused(INVALID, "hashes"):
        reserve(raw, one + one)
    with refused(INVALID, "hashes"):
        reserve(raw, one + two + one)
    stored(raw, one + two)
    with refused(INVALID, "hashes"):
        reserve(raw, two + three)
    with refused(INVALID, "hashes"):
        reserve(raw, one, parent=two)
    assert acquire(raw, two).blocks == 0, "no prefix of any prompt"


@pytest.mark.parametrize("value", [2, 99, -1])
def test_unknown_losses(raw: Raw, value: int) -> None:
    for call in (acquire, reserve):
        with refused(INVALID, "allowed_loss", str(value)):
            call(raw, allowed_loss=value)


def test_fields_that_need_a_value(raw: Raw) -> None:
    names: Any = {"session_id": raw.session_id, "namespace": namespace_digest(SPEC)}
    with refused(INVALID, "ttl_ms"):
        raw.stub.Pin(pb.PinRequest(**names, hashes=HASHES))
    with refused(INVALID, "hashes"):
        raw.stub.Drop(pb.DropRequest(**names, hashes=HASHES, whole_namespace=True))
    with refused(INVALID, "hashes"):
        raw.stub.Drop(pb.DropRequest(**names))


def test_numbers_at_their_limits(raw: Raw) -> None:
    """Bounded by the daemon, not believed."""
    most = (1 << 32) - 1
    stored(raw)
    lease = acquire(raw, ttl_ms=most)
    answer = raw.stub.Wait(
        pb.WaitRequest(
            session_id=raw.session_id, lease_id=lease.lease_id, blocks=most, timeout_ms=most
        )
    )
    assert answer.ready_blocks == 4
    fetch = pb.FetchRequest(session_id=raw.session_id, lease_id=lease.lease_id, blocks=most)
    assert sum(len(chunk.data) for chunk in raw.stub.Fetch(fetch)) == 4 * BLOCK_BYTES
    room = reserve(raw, b"".join(chain("long", 1)), ttl_ms=most, wait_ms=most)
    raw.stub.Abort(pb.AbortRequest(session_id=raw.session_id, lease_id=room.lease_id))


def test_oversized_messages(raw: Raw) -> None:
    with refused(EXHAUSTED):
        acquire(raw, bytes(5 << 20))
    lease_id = reserve(raw).lease_id
    with refused(EXHAUSTED):
        raw.stub.Store(
            iter([pb.StoreChunk(session_id=raw.session_id, lease_id=lease_id, data=bytes(5 << 20))])
        )
    raw.stub.Abort(pb.AbortRequest(session_id=raw.session_id, lease_id=lease_id))


# Store


@pytest.mark.parametrize("by", [-1, 1, BLOCK_BYTES])
def test_store_of_a_wrong_length(raw: Raw, by: int) -> None:
    lease_id = reserve(raw).lease_id
    data = bytes(4 * BLOCK_BYTES + by)
    with refused(INVALID, "data"):
        raw.stub.Store(
            iter([pb.StoreChunk(session_id=raw.session_id, lease_id=lease_id, data=data)])
        )
    assert raw.stub.Stats(pb.StatsRequest()).write_leases == 0, "aborted"
    assert acquire(raw).blocks == 0
    assert reserve(raw, HASHES[:32]).lease_id, "the room is free again"


def test_store_of_nothing(raw: Raw) -> None:
    with refused(INVALID):
        raw.stub.Store(iter([]))
    with refused(UNAUTHENTICATED, "session"):
        raw.stub.Store(iter([pb.StoreChunk(data=b"x")]))
    lease_id = reserve(raw).lease_id
    with refused(INVALID, "data"):
        raw.stub.Store(iter([pb.StoreChunk(session_id=raw.session_id, lease_id=lease_id)]))


def test_store_in_odd_chunks(shared: DaemonProcess, raw: Raw, connect: Connect) -> None:
    hashes = chain("wire", 4)
    data = np.concatenate([content(key) for key in hashes]).tobytes()
    lease_id = reserve(raw).lease_id

    def chunks() -> Iterator[pb.StoreChunk]:
        yield pb.StoreChunk(session_id=raw.session_id, lease_id=lease_id)
        for at in range(0, len(data), 77_777):
            yield pb.StoreChunk(data=data[at : at + 77_777])

    assert raw.stub.Store(chunks()).blocks == 4
    assert get_checked(connect(shared), SPEC, hashes) == 4


def test_store_cut_off(raw: Raw) -> None:
    """A stream that breaks in the middle aborts."""
    digest = raw.open(spec_of(1 << 20))
    room = raw.stub.Reserve(
        pb.ReserveRequest(session_id=raw.session_id, namespace=digest, hashes=HASHES)
    )

    def chunks() -> Iterator[pb.StoreChunk]:
        for _ in range(3):  # Far more than is under way unread.
            yield pb.StoreChunk(
                session_id=raw.session_id, lease_id=room.lease_id, data=bytes(1 << 20)
            )
        call.cancel()

    call = raw.stub.Store.future(chunks())
    with pytest.raises(grpc.FutureCancelledError):
        call.result(20.0)
    eventually(lambda: not raw.stub.Stats(pb.StatsRequest()).write_leases, "the lease ends", 5.0)


# Namespaces


def open_namespace(session: Raw, digest: bytes, spec: bytes) -> Any:
    """OpenNamespace with any bytes."""
    return session.stub.OpenNamespace(
        pb.OpenNamespaceRequest(session_id=session.session_id, digest=digest, spec=spec)
    )


def test_a_spec_that_is_not_its_digest(raw: Raw) -> None:
    other = spec_of(tenant="other")
    with refused(PRECONDITION, "digest"):
        open_namespace(raw, namespace_digest(SPEC), canonical_spec(other))
    with refused(PRECONDITION, "digest"):
        open_namespace(raw, b"short", canonical_spec(other))
    assert open_namespace(raw, namespace_digest(other), canonical_spec(other)).block_bytes


def _changed(**fields: object) -> bytes:
    value = json.loads(canonical_spec(SPEC)) | fields
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        canonical_spec(SPEC) + b" ",
        canonical_spec(SPEC).replace(b'","', b'", "', 1),
        _changed(unknown=1),
        _changed(model_id=7),
        _changed(model_id=""),
        _changed(block_tokens=0),
        _changed(block_tokens=16.5),
        _changed(block_tokens=True),
        _changed(components=[]),
        _changed(components=[["latent", "complex128", [1]]]),
        _changed(components=[["latent", "uint8", [0]]]),
        _changed(components=[["latent", "uint8", [-4096]]]),
        _changed(components=[["latent", "uint8", 4096]]),
        _changed(components=[["latent", "uint8", [1 << 62, 1 << 62]]]),
        canonical_spec(SPEC).replace(b'"block_tokens":16', b'"block_tokens":1e999'),
        canonical_spec(SPEC).replace(b'"block_tokens":16', b'"block_tokens":' + b"9" * 5000),
        _changed(rope=None),
        _changed(rope={"layout": "spiral", "parameters": [], "width": 0}),
    ],
    ids=lambda spec: spec[:24].decode(errors="replace") if len(spec) < 24 else f"{len(spec)} bytes",
)
def test_specs_that_are_none(raw: Raw, spec: bytes) -> None:
    with refused(INVALID, "spec"):
        open_namespace(raw, b"?" * 32, spec)


def test_too_many_namespaces(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(max_namespaces=2)
    with Raw(daemon.address) as session:
        for name in "ab":
            session.open(spec_of(tenant=name))
        with refused(EXHAUSTED, "namespaces"):
            session.open(spec_of(tenant="c"))
        session.open(spec_of(tenant="a"))


def test_a_block_larger_than_the_arena(raw: Raw) -> None:
    spec = spec_of(64 << 20)
    answer = raw.stub.Reserve(
        pb.ReserveRequest(session_id=raw.session_id, namespace=raw.open(spec), hashes=HASHES)
    )
    assert answer.reason == pb.REASON_TOO_LARGE
    assert not answer.lease_id


# Sessions


def session_refused(
    daemon: DaemonProcess, code: grpc.StatusCode, *words: str, first: list[pb.SessionRequest]
) -> None:
    """A Session that begins with these messages must fail so."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(daemon.address, options) as channel:
        stub = cache_pb2_grpc.CacheStub(channel)
        with refused(code, *words):
            next(stub.Session(iter(first), timeout=20.0))


def test_sessions_that_begin_wrong(shared: DaemonProcess) -> None:
    heartbeat = pb.SessionRequest(heartbeat=pb.Heartbeat())
    for first in ([], [heartbeat], [pb.SessionRequest()], [heartbeat, hello(STRANGER)]):
        session_refused(shared, INVALID, "hello", first=first)
    session_refused(shared, PRECONDITION, "99", "1", first=[hello(STRANGER, version=99)])
    session_refused(shared, PRECONDITION, "version", first=[hello(STRANGER, version=0)])
    for group in (b"", b"x", b"x" * 17):
        session_refused(shared, INVALID, "owner_group", str(len(group)), first=[hello(group)])
    session_refused(shared, INVALID, "client_name", first=[hello(STRANGER, name="n" * 129)])
    session_refused(shared, INVALID, "client_name", first=[hello(STRANGER, name="é" * 65)])


def test_a_range_of_versions(shared: DaemonProcess) -> None:
    """A newer client that still speaks ours is welcome, in our version."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    newer = hello(STRANGER)
    newer.hello.wire_version_max = 7
    with grpc.insecure_channel(shared.address, options) as channel:
        stream = cache_pb2_grpc.CacheStub(channel).Session(iter([newer]))
        assert next(stream).welcome.wire_version == 1


def test_a_session_without_hello_ends(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(session_timeout_s=0.3, heartbeat_s=0.1)
    with Raw(daemon.address) as session:
        session.wait_over()
        with refused(UNAUTHENTICATED, "session"):
            session.open(SPEC)
    over = threading.Event()

    def silent() -> Iterator[pb.SessionRequest]:
        over.wait(20.0)
        yield from ()

    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(daemon.address, options) as channel:
        with refused(INVALID, "hello"):
            next(cache_pb2_grpc.CacheStub(channel).Session(silent(), timeout=20.0))
        over.set()


def test_too_many_sessions(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(max_sessions=2)
    with Raw(daemon.address) as first:
        with Raw(daemon.address):
            session_refused(daemon, EXHAUSTED, "sessions", first=[hello(STRANGER)])
        eventually(lambda: first.stub.Stats(pb.StatsRequest()).sessions == 1, "one has ended")
        with Raw(daemon.address):
            pass


def test_a_session_that_said_goodbye(shared: DaemonProcess) -> None:
    with Raw(shared.address) as session:
        session.open(SPEC)
        session.requests.end()
        session.wait_over()
        with refused(UNAUTHENTICATED, "session"):
            acquire(session)


def test_more_calls_than_there_may_be(start_daemon: StartDaemon, connect: Connect) -> None:
    """A flood is refused, and costs nobody else's session."""
    daemon = start_daemon(max_sessions=2, ssd=True)
    client = connect(daemon)
    put(client, SPEC, chain("wire", 4))
    with Raw(daemon.address) as session:
        session.open(SPEC)
        hashes = b"".join(chain("never there", 1))
        flush = pb.FlushRequest(
            session_id=session.session_id,
            namespace=namespace_digest(SPEC),
            hashes=hashes,
            timeout_ms=60_000,
        )
        flood = [session.stub.Flush.future(flush) for _ in range(200)]
        eventually(
            lambda: any(call.done() and call.code() is EXHAUSTED for call in flood), "refusals"
        )
        for call in flood:
            call.cancel()
        eventually(lambda: get_checked(client, SPEC, chain("wire", 4)) == 4, "it serves again")
    assert client.attached


def test_garbage_on_the_socket(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    path = daemon.address.removeprefix("unix:")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000), preface + os.urandom(10_000)):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20.0)
            sock.connect(path)
            try:
                sock.sendall(garbage)
                while sock.recv(4096):
                    pass
            except (ConnectionError, TimeoutError):
                pass
    assert put(client, SPEC, chain("wire", 2)) == 2
    with Raw(daemon.address) as session:
        channel: Any = session.channel
        with refused(grpc.StatusCode.UNKNOWN, "parsing"):  # gRPC's own answer.
            channel.unary_unary("/kvtier.v1.Cache/Acquire")(b"\xff" * 1000)
        with refused(grpc.StatusCode.UNIMPLEMENTED):
            channel.unary_unary("/kvtier.v1.Cache/Format")(b"")
    assert get_checked(client, SPEC, chain("wire", 2)) == 2
    assert used_bytes(client) == 2 * BLOCK_BYTES


def test_health_and_reflection(shared: DaemonProcess) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(shared.address, options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kvtier.v1.Cache"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with refused(NOT_FOUND):
            health.Check(health_pb2.HealthCheckRequest(service="another"))
        names = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([names]))
        listed = {service.name for service in answer.list_services_response.service}
        assert {"kvtier.v1.Cache", "grpc.health.v1.Health"} <= listed


def test_files_are_private(daemon: DaemonProcess, raw: Raw) -> None:
    path = Path(daemon.address.removeprefix("unix:"))
    arena = Path(raw.welcome.arena_path)
    for file in (path, arena, arena.parent / "daemon.lock"):
        assert file.stat().st_mode & 0o777 == 0o600, file
    for directory in (arena.parent, Path(raw.welcome.lock_dir), daemon.ssd_directory):
        assert directory.stat().st_mode & 0o777 == 0o700, directory
