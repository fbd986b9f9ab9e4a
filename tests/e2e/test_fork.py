"""What a fork does to a client: nothing, until the child attaches itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.process import DaemonProcess
from tests.e2e.conftest import Connect
from tests.e2e.support import chain, eventually, get_checked, put, spec_of

HEAD = """
import gc, os, signal, sys, threading
import numpy as np
from kvtier.client import Client
from kvtier.types import MissReason
from tests.e2e.support import BLOCK_BYTES, chain, contents, get_checked, put, spec_of

SPEC, HASHES = spec_of(), chain("forked", 4)
client = Client(sys.argv[1], acquire_timeout_s=5.0)
assert client.wait_attached(20.0)
assert put(client, SPEC, HASHES) == 4

def in_child(work, how=sys.exit):
    process = os.fork()
    if not process:
        work()
        how(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
"""

MISSES = """
def work():
    assert get_checked(client, SPEC, HASHES) == 0
    assert put(client, SPEC, HASHES) == 0
    assert client.lookup(SPEC, HASHES).num_blocks == 0
    assert not client.attached and not client.mapped
    client.finish(SPEC, HASHES[-1])
    assert client.misses[MissReason.FORKED] == 4, client.misses
    filler = [np.ones(1 << 20, dtype=np.uint8) for _ in range(64)]  # Where the map was.
    client.close()
    gc.collect()

for how in (sys.exit, os._exit):
    assert in_child(work, how) == 0
    assert client.attached and client.mapped
    assert get_checked(client, SPEC, HASHES) == 4
assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
assert not client.misses, client.misses
client.close()
"""

OLD_LEASES = """
reading = client.acquire(SPEC, HASHES)
more = chain("more", 4)
writing = client.reserve(SPEC, None, more)

def work():
    destinations = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in HASHES]
    assert reading.read_into(destinations) == 0
    assert reading.wait(4) in (0, 4)
    reading.release()
    writing.write_from(contents(more))
    assert not writing.commit()
    writing.abort()

for how in (sys.exit, os._exit):
    assert in_child(work, how) == 0
destinations = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in HASHES]
assert reading.read_into(destinations) == 4
assert all(np.array_equal(a, b) for a, b in zip(destinations, contents(HASHES)))
writing.write_from(contents(more))
assert writing.commit()
reading.release()
assert get_checked(client, SPEC, more) == 4
client.close()
"""

ATTACHES = """
def work():
    client.attach_in_child()
    assert client.wait_attached(20.0)
    assert client.mapped
    assert get_checked(client, SPEC, HASHES) == 4
    mine = chain(f"child {os.getpid()}", 4)
    assert put(client, SPEC, mine) == 4
    assert get_checked(client, SPEC, mine) == 4
    assert client.stats().sessions >= 3
    client.close()

for how in (sys.exit, os._exit):
    assert in_child(work, how) == 0
    assert client.attached
    assert get_checked(client, SPEC, HASHES) == 4

def grandchild():
    client.attach_in_child()
    assert client.wait_attached(20.0)
    assert in_child(work) == 0
    assert get_checked(client, SPEC, HASHES) == 4

assert in_child(grandchild) == 0
assert get_checked(client, SPEC, HASHES) == 4
client.close()
"""

BUSY = """
over = threading.Event()
errors = []

def busy():
    while not over.is_set():
        if get_checked(client, SPEC, HASHES) != 4:
            errors.append(client.misses)

threads = [threading.Thread(target=busy) for _ in range(4)]
for thread in threads:
    thread.start()

def work():
    client.attach_in_child()
    assert client.wait_attached(20.0)
    assert get_checked(client, SPEC, HASHES) == 4
    client.close()

try:
    for _ in range(4):
        assert in_child(work, os._exit) == 0
finally:
    over.set()
    for thread in threads:
        thread.join()
assert not errors, errors
client.close()
"""

WITHOUT_SUPPORT = """
def work():
    client.attach_in_child()
    assert get_checked(client, SPEC, HASHES) == 0
    assert client.misses[MissReason.FORKED] == 1

for how in (sys.exit, os._exit):
    assert in_child(work, how) == 0
assert get_checked(client, SPEC, HASHES) == 4
client.close()
"""


def run(script: str, daemon: DaemonProcess, **environment: str) -> str:
    """Run a script in a process of its own; what it wrote to standard error."""
    inherited = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    process = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script, daemon.address],
        cwd=Path(__file__).parents[2],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=100.0,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stderr


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(HEAD + MISSES, id="every call misses"),
        pytest.param(HEAD + OLD_LEASES, id="leases of the parent"),
        pytest.param(HEAD + ATTACHES, id="attaches"),
        pytest.param(HEAD + BUSY, id="while other threads call"),
    ],
)
def test_fork(daemon: DaemonProcess, connect: Connect, script: str) -> None:
    client = connect(daemon)
    put(client, spec_of(), chain("ours", 2))
    assert "Traceback" not in run(script, daemon)
    eventually(lambda: client.stats().sessions == 1, "all sessions end")
    eventually(lambda: client.stats().quarantined_bytes == 0, "and all locks are gone")
    assert client.stats().pinned_bytes == 0
    assert get_checked(client, spec_of(), chain("ours", 2)) == 2


def test_fork_without_support(daemon: DaemonProcess) -> None:
    """Where gRPC can't follow, a child stays a miss and does not crash; the parent's log tells."""
    output = run(HEAD + WITHOUT_SUPPORT, daemon, GRPC_ENABLE_FORK_SUPPORT="0")
    assert "GRPC_ENABLE_FORK_SUPPORT" in output


def test_a_child_that_outlives_its_parent(daemon: DaemonProcess, connect: Connect) -> None:
    """It must not keep the parent's lock alive, or half-written blocks would never come back."""
    client = connect(daemon)
    script = (
        HEAD
        + """
lease = client.reserve(SPEC, None, chain("half", 8))
assert len(lease.indices) == 8
ready, done = os.pipe()
if not os.fork():
    os.close(1)
    os.close(2)
    os.write(done, b".")
    signal.sigwait([signal.SIGTERM])
    os._exit(0)
os.read(ready, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    script = script.replace("if not os.fork():", "child = os.fork()\nif not child:").replace(
        "os.read(ready, 1)\n", "os.read(ready, 1)\nprint(child, flush=True)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, daemon.address],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100.0,
        check=False,
    )
    try:
        eventually(lambda: client.stats().sessions == 1, "the dead parent's session is over")
        eventually(lambda: client.stats().quarantined_bytes == 0, "its room comes back")
        assert client.stats().write_leases == 0
    finally:
        subprocess.run(["kill", "-9", process.stdout.strip()], check=True)
