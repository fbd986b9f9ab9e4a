"""Several SSD directories: striping, a warm restart, one that is not there yet; what loads pay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest

from kvtier.process import DaemonProcess
from kvtier.types import MissReason, Tier
from kvtier.v1 import cache_pb2 as pb
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import (
    Raw,
    chain,
    counter,
    eventually,
    get_checked,
    put,
    refused,
    spec_of,
)

SPEC = spec_of()


@pytest.fixture
def two(tmp_path: Path) -> str:
    """Two directories, as the setting takes them."""
    return f"{tmp_path}/one,{tmp_path}/two"


def test_blocks_are_striped_and_stay_over_a_restart(
    start_daemon: StartDaemon, connect: Connect, two: str
) -> None:
    daemon = start_daemon(ssd_directories=two)
    client = connect(daemon)
    hashes = chain("striped", 64)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    daemon.kill()
    daemon.start()
    client = connect(daemon)
    shards = client.stats().shards
    assert [shard.directory for shard in shards] == two.split(",")
    assert sum(shard.blocks for shard in shards) == 64
    assert min(shard.blocks for shard in shards) > 10
    assert client.lookup(SPEC, hashes).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 64}
    assert get_checked(client, SPEC, hashes) == 64


def test_a_directory_that_comes_later(
    start_daemon: StartDaemon, connect: Connect, two: str
) -> None:
    """The daemon serves without it, and takes it at once when it is told to (SIGHUP)."""
    in_the_way = Path(two.split(",")[1])
    in_the_way.write_text("not a directory")
    daemon = start_daemon(ssd_directories=two)
    client = connect(daemon)
    assert [shard.online for shard in client.stats().shards] == [True, False]
    hashes = chain("one disk", 32)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0)), "all go to the one that works"
    in_the_way.unlink()
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: all(shard.online for shard in client.stats().shards), "it is there")
    more = chain("two disks", 64)
    put(client, SPEC, more)
    assert all(client.flush(SPEC, more, timeout_s=20.0))
    assert client.stats().shards[1].blocks > 10
    daemon.kill()
    daemon.start()
    client = connect(daemon)
    assert get_checked(client, SPEC, hashes) == 32
    assert get_checked(client, SPEC, more) == 64


def cold(daemon: DaemonProcess, connect: Connect, blocks: int) -> None:
    """A prompt on the SSD only, of a daemon that knows how fast that reads."""
    client = connect(daemon)
    hashes = chain("cold", blocks)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    client.close()
    daemon.kill()
    daemon.start()


def test_only_what_pays_is_loaded(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 30: an engine that computes faster than the SSD reads gets no load."""
    cold(daemon, connect, 16)
    client = connect(daemon)
    eventually(lambda: client.stats().shards[0].read_bytes_per_s > 0, "its speed is known")
    hashes = chain("cold", 16)
    with client.acquire(SPEC, hashes, prefill_tokens_per_s=1e12) as lease:
        assert lease.num_blocks == 0
    assert client.misses == {MissReason.SLOW: 1}
    assert counter(client, "declined_blocks") == 16
    with client.acquire(SPEC, hashes, prefill_tokens_per_s=1e-3) as lease:
        assert lease.num_blocks == 16
    assert counter(client, "load_predicted_seconds") >= 0


@pytest.mark.parametrize("speed", [-1.0, float("nan"), float("inf")])
def test_a_speed_that_is_none(daemon: DaemonProcess, speed: float) -> None:
    with Raw(daemon.address) as raw:
        digest = raw.open(SPEC)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "prefill_tokens_per_s"):
            raw.stub.Acquire(
                pb.AcquireRequest(
                    session_id=raw.session_id,
                    namespace=digest,
                    hashes=b"".join(chain("a", 1)),
                    prefill_tokens_per_s=speed,
                )
            )


def test_blocks_get_too_old(daemon: DaemonProcess, connect: Connect) -> None:
    """Retention, of a namespace; the client repeats its wish after a restart of the daemon."""
    client = connect(daemon)
    kept = spec_of(tenant="kept")
    hashes, kept_hashes = chain("old", 8), chain("kept", 8)
    assert client.open_namespace(SPEC, max_age_s=1)
    for spec, prompt in ((SPEC, hashes), (kept, kept_hashes)):
        put(client, spec, prompt)
        client.flush(spec, prompt, timeout_s=20.0)
    eventually(lambda: not client.lookup(SPEC, hashes).num_blocks, "too old")
    assert client.lookup(kept, kept_hashes).num_blocks == 8
    eventually(lambda: counter(client, "expired_blocks") == 8, "and gone")
    daemon.kill()
    daemon.start()
    assert client.wait_attached(20.0)
    put(client, SPEC, hashes)
    eventually(lambda: not client.lookup(SPEC, hashes).num_blocks, "too old again")
    assert client.lookup(kept, kept_hashes).num_blocks == 8
