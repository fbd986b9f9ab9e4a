"""What the end-to-end tests share: namespaces, bytes that name their block, children, polling.

Nothing here sleeps to let something happen: eventually() polls with a deadline, children answer
line by line.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from kvtier.client import Client
from kvtier.hashing import canonical_spec, namespace_digest
from kvtier.process import DaemonProcess
from kvtier.types import BlockHash, Component, NamespaceSpec
from kvtier.v1 import cache_pb2 as pb
from kvtier.v1 import cache_pb2_grpc

Content = npt.NDArray[np.uint8]
T = TypeVar("T")

BLOCK_BYTES = 64 << 10
PATIENCE_S = 20.0
"""Deadline of everything that is waited for; reached only by what is broken."""

SSD_SETTINGS: dict[str, object] = {
    "ssd_capacity_bytes": 256 << 20,
    "ssd_batch_bytes": 16 << 20,
    "ssd_min_free_bytes": 0,
}


def spec_of(block_bytes: int = BLOCK_BYTES, *, tenant: str = "") -> NamespaceSpec:
    """A namespace whose blocks have this many bytes and stand for 16 tokens."""
    component = Component("latent_rope", "uint8", (1, 16, block_bytes // 16))
    return NamespaceSpec("e2e", "revision", (component,), block_tokens=16, tenant=tenant)


def chain(name: str, count: int) -> list[BlockHash]:
    """Block hashes of a prompt; a longer prompt of the same name continues a shorter one."""
    hashes: list[BlockHash] = []
    parent = name.encode()
    for index in range(count):
        parent = hashlib.sha256(parent + index.to_bytes(4, "little")).digest()
        hashes.append(BlockHash(parent))
    return hashes


def content(key: BlockHash, size_bytes: int = BLOCK_BYTES) -> Content:
    """(size_bytes,) uint8: the only right bytes of a block. Random, so that no codec shrinks it."""
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(key[:8], "little")))
    return generator.integers(0, 256, size_bytes, dtype=np.uint8)


def contents(hashes: Sequence[BlockHash], size_bytes: int = BLOCK_BYTES) -> list[Content]:
    """The right bytes of each."""
    return [content(key, size_bytes) for key in hashes]


def put(client: Client, spec: NamespaceSpec, hashes: Sequence[BlockHash], **options: Any) -> int:
    """Store a whole prompt with its right bytes; leading blocks that the daemon has then."""
    return client.put(spec, None, hashes, contents(hashes, spec.block_bytes), **options)


def get_checked(client: Client, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> int:
    """Get a prompt; how many blocks came. They must be right to the last byte."""
    destinations = [np.full(spec.block_bytes, 0xA5, dtype=np.uint8) for _ in hashes]
    got = client.get(spec, hashes, destinations)
    for key, destination in zip(hashes[: got.num_blocks], destinations, strict=False):
        assert np.array_equal(destination, content(key, spec.block_bytes)), "wrong bytes"
    assert sum(got.blocks_by_tier.values()) == got.num_blocks
    return got.num_blocks


def eventually(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Poll until `condition` is true; its value. Fails with `what` after timeout_s."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"still not after {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


def counter(client: Client, name: str) -> float:
    """A counter of the daemon."""
    return client.stats().counters[name]


def used_bytes(client: Client, tier: int = pb.TIER_HOST) -> int:
    """Bytes of a tier in use."""
    return next(state.used_bytes for state in client.stats().tiers if state.tier == tier)


class PausingSequence(Sequence[Content]):
    """Arrays that call `pause` when number `at` is asked for, to catch a copy in the middle."""

    def __init__(self, arrays: Sequence[Content], at: int, pause: Callable[[], None]) -> None:
        self._arrays = arrays
        self._at = at
        self._pause = pause

    @overload
    def __getitem__(self, index: int) -> Content: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Content]: ...
    def __getitem__(self, index: int | slice) -> Content | Sequence[Content]:
        if isinstance(index, slice):
            return PausingSequence(self._arrays[index], self._at, self._pause)
        if index == self._at:
            self._pause()
        return self._arrays[index]

    def __len__(self) -> int:
        return len(self._arrays)


class Child:
    """A client in a process of its own: tests/e2e/child.py, spoken to line by line."""

    def __init__(self, role: str, address: str, **arguments: object) -> None:
        """Start `role` with keyword arguments that JSON can carry."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.child", role, address, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=Path(__file__).parents[2],
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def line(self, timeout_s: float = PATIENCE_S) -> Any:
        """The next line it says, as JSON."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"the child said nothing for {timeout_s} s"
        text = self._process.stdout.readline()
        assert text, f"the child ended with {self._process.wait(PATIENCE_S)}"
        return json.loads(text)

    def expect(self, value: object) -> None:
        """The next line must be this."""
        assert (line := self.line()) == value, line

    def say(self, value: object = "go") -> None:
        """Answer it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "child stopped")

    def cont(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def wait(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """kill -9 and reap. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Raw:
    """A session on the bare stubs: what a client that breaks the contract looks like."""

    def __init__(self, address: str, group: bytes | None = None) -> None:
        self.channel = grpc.insecure_channel(
            address, [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        )
        self.stub: Any = cache_pb2_grpc.CacheStub(self.channel)
        self.group = group or os.urandom(16)
        self.requests = _Requests(hello(self.group))
        self._stream = self.stub.Session(self.requests)
        try:
            self.welcome = next(self._stream).welcome
        except BaseException:
            self.close()
            raise
        self.session_id = self.welcome.session_id

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session and the channel."""
        self.requests.end()
        self._stream.cancel()
        self.channel.close()

    def beat(self) -> None:
        """Send a heartbeat and wait for its echo."""
        self.requests.send(pb.SessionRequest(heartbeat=pb.Heartbeat()))
        assert next(self._stream).WhichOneof("message") == "heartbeat"

    def wait_over(self) -> None:
        """Wait until the daemon ends the session."""
        for _ in self._stream:
            pass

    def open(self, spec: NamespaceSpec) -> bytes:
        """OpenNamespace; the digest."""
        digest = namespace_digest(spec)
        self.stub.OpenNamespace(
            pb.OpenNamespaceRequest(
                session_id=self.session_id, digest=digest, spec=canonical_spec(spec)
            )
        )
        return digest


class _Requests(Iterator[pb.SessionRequest]):
    """A stream of requests that stays open until end()."""

    def __init__(self, *first: pb.SessionRequest) -> None:
        self._queue: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        for request in first:
            self._queue.put(request)

    def send(self, request: pb.SessionRequest) -> None:
        self._queue.put(request)

    def end(self) -> None:
        self._queue.put(None)

    def __next__(self) -> pb.SessionRequest:
        request = self._queue.get()
        if request is None:
            raise StopIteration
        return request


def hello(group: bytes, *, version: int = 1, name: str = "raw") -> pb.SessionRequest:
    """The first message of a session."""
    return pb.SessionRequest(
        hello=pb.Hello(
            wire_version_min=version, wire_version_max=version, owner_group=group, client_name=name
        )
    )


@contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[None]:
    """The call inside must fail with this status, and its message must have these words."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    status: Any = caught.value
    assert status.code() is code, (status.code(), status.details())
    assert all(word in status.details() for word in words), status.details()


def stop_daemon(daemon: DaemonProcess) -> None:
    """SIGSTOP it, and wait until it stands still."""
    os.kill(daemon.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{daemon.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "daemon stopped")


def cont_daemon(daemon: DaemonProcess) -> None:
    """SIGCONT it."""
    os.kill(daemon.pid, signal.SIGCONT)
