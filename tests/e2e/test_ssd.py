"""Blocks on their way to the SSD and back, through kill -9, a clean stop and damaged bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.process import DaemonProcess
from kvtier.types import BlockHash, NamespaceSpec, Tier
from kvtier.v1 import cache_pb2 as pb
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import (
    BLOCK_BYTES,
    chain,
    content,
    counter,
    eventually,
    get_checked,
    put,
    spec_of,
    used_bytes,
)

SPEC = spec_of()
CORRUPT = ("load_failed_blocks_", "corrupt_blocks_")


def damage(daemon: DaemonProcess, hashes: Sequence[BlockHash], spec: NamespaceSpec) -> None:
    """Flip one bit in the middle of each block's bytes in the data file."""
    path = daemon.ssd_directory / "env-000" / "data.mdb"
    data = bytearray(path.read_bytes())
    for key in hashes:
        at = data.find(content(key, spec.block_bytes).tobytes())
        assert at >= 0, "the block's bytes are in the file"
        with path.open("r+b") as file:
            file.seek(at + spec.block_bytes // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("durability", ["relaxed", "full"])
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_what_flush_acknowledged_is_there(
    start_daemon: StartDaemon, connect: Connect, durability: str, codec: str
) -> None:
    """After kill -9, of blocks that share a value and of blocks that have one each (report 23)."""
    daemon = start_daemon(ssd_durability=durability, ssd_codec=codec)
    client = connect(daemon)
    sizes = [spec_of(16 << 10), spec_of(600 << 10), spec_of(3 << 19)]
    prompts = [chain(f"{spec.block_bytes}", 6) for spec in sizes]
    for spec, hashes in zip(sizes, prompts, strict=True):
        assert put(client, spec, hashes, wait_s=20.0) == 6
        assert client.flush(spec, hashes, timeout_s=20.0) == [True] * 6
    used = used_bytes(client, pb.TIER_SSD)
    daemon.kill()
    daemon.start()
    client = connect(daemon)
    assert used_bytes(client, pb.TIER_SSD) == used, "the accounting survives (report 22)"
    for spec, hashes in zip(sizes, prompts, strict=True):
        assert client.lookup(spec, hashes).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 6}
        assert get_checked(client, spec, hashes) == 6
        assert client.flush(spec, hashes, timeout_s=20.0) == [True] * 6
    assert counter(client, "ssd_written_blocks") == 0, "nothing is written twice"


def test_promotion_after_pressure(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    hashes = chain("cold", 32)
    put(client, SPEC, hashes)
    for number in range(3):
        put(client, SPEC, chain(f"pressure {number}", 400), wait_s=20.0)
    assert client.lookup(SPEC, hashes).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 32}
    eventually(lambda: get_checked(client, SPEC, hashes) == 32, "room for all of it")
    assert client.lookup(SPEC, hashes).blocks_by_tier == {Tier.HOST: 32, Tier.SSD: 0}
    before = counter(client, "ssd_read_blocks")
    assert get_checked(client, SPEC, hashes) == 32
    assert counter(client, "ssd_read_blocks") == before
    assert counter(client, "demotions_shed_blocks") == 0


def test_hit_rates_add_up(daemon: DaemonProcess, connect: Connect) -> None:
    """A trace that hits half its blocks shows exactly that, and tiers sum up (report 33)."""
    client = connect(daemon)
    hashes = chain("half", 16)
    put(client, SPEC, hashes[:8])
    assert all(client.flush(SPEC, hashes[:8], timeout_s=20.0))
    for _ in range(5):
        assert get_checked(client, SPEC, hashes) == 8
    daemon.kill()
    daemon.start()
    client = connect(daemon)
    assert get_checked(client, SPEC, hashes[:4]) == 4
    for _ in range(4):
        assert get_checked(client, SPEC, hashes) == 8
    counters = client.stats().counters
    assert counters["acquires"] == 5
    assert counters["requested_blocks"] == 4 + 4 * 16
    assert counters["ssd_hit_blocks"] == 8
    assert counters["host_hit_blocks"] == 4 + 4 * 8 - 8
    assert counters["missed_blocks"] == 4 * 8
    for unit in ("blocks", "tokens"):
        hits = counters[f"host_hit_{unit}"] + counters[f"ssd_hit_{unit}"]
        assert hits + counters[f"missed_{unit}"] == counters[f"requested_{unit}"]
    assert counters["requested_tokens"] == counters["requested_blocks"] * SPEC.block_tokens
    assert counters["ssd_read_blocks"] == 8
    assert counters["ssd_read_bytes"] == 8 * BLOCK_BYTES
    assert counters["ssd_read_seconds"] > 0


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "streamed"])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 3 << 19], ids=["shared", "alone"])
def test_flipped_bits_are_a_miss(
    daemon: DaemonProcess, connect: Connect, block_bytes: int, mapped: bool
) -> None:
    """User reports 6 and 24: the good head is kept, the rest counted, and can be stored again."""
    spec = spec_of(block_bytes)
    hashes = chain("rots", 6)
    client = connect(daemon)
    put(client, spec, hashes)
    assert all(client.flush(spec, hashes, timeout_s=20.0))
    daemon.kill()
    damage(daemon, hashes[3:4], spec)
    daemon.start()
    client = connect(daemon, shared_memory=mapped)
    assert get_checked(client, spec, hashes) == 3
    counters = client.stats().counters  # The read or the scrubber finds it, or both at once.
    found = {name: count for name, count in counters.items() if name.startswith(CORRUPT) and count}
    assert set(found.values()) == {1}, found
    eventually(lambda: client.stats().pinned_bytes == 0, "no lease is left")
    assert client.lookup(spec, hashes).num_blocks == 3
    assert put(client, spec, hashes) == 6
    assert get_checked(client, spec, hashes) == 6
    assert all(client.flush(spec, hashes, timeout_s=20.0))
    daemon.kill()
    daemon.start()
    assert get_checked(connect(daemon), spec, hashes) == 6


def test_a_clean_stop_writes_everything(start_daemon: StartDaemon, connect: Connect) -> None:
    """SIGTERM right after the last commit: the next daemon hits it all, from the SSD."""
    daemon = start_daemon(idle_write_after_s=600)
    client = connect(daemon)
    hashes = chain("unwritten", 400)
    assert put(client, SPEC, hashes) == 400
    socket = Path(daemon.address.removeprefix("unix:"))
    (arena,) = {
        Path(line.split()[-1]).parent
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("/arena")
    }
    assert daemon.stop() == 0
    assert not socket.exists()
    assert not arena.exists()
    daemon.start()
    client = connect(daemon)
    assert client.lookup(SPEC, hashes).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 400}
    assert get_checked(client, SPEC, hashes) == 400


def test_a_clean_stop_forgets_what_was_dropped(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    hashes = chain("dropped", 32)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    client.drop(SPEC, hashes[16:])
    assert daemon.stop() == 0
    daemon.start()
    assert connect(daemon).lookup(SPEC, hashes).num_blocks == 16


def test_idle_time_is_for_writing(daemon: DaemonProcess, connect: Connect) -> None:
    """A crash loses little: what nobody flushed is on the SSD some time later."""
    client = connect(daemon)
    hashes = chain("left alone", 32)
    put(client, SPEC, hashes)
    eventually(lambda: counter(client, "ssd_written_blocks") == 32, "the writer found the time")
    daemon.kill()
    daemon.start()
    assert get_checked(connect(daemon), SPEC, hashes) == 32


def test_the_capacity_is_a_hard_bound(start_daemon: StartDaemon, connect: Connect) -> None:
    """Twice of what fits is stored (reports 21 and 25): old blocks go, the daemon lives."""
    daemon = start_daemon(
        ssd_capacity_bytes=128 << 20, ssd_batch_bytes=4 << 20, write_queue_bytes=16 << 20
    )
    client = connect(daemon)
    spec = spec_of(1 << 20)
    for number in range(16):
        hashes = chain(f"much {number}", 16)
        assert put(client, spec, hashes, wait_s=20.0) == 16
        used = sum(path.stat().st_blocks * 512 for path in daemon.ssd_directory.rglob("*"))
        assert used <= 128 << 20
    assert all(client.flush(spec, hashes, timeout_s=20.0))
    assert counter(client, "ssd_evicted_blocks") > 100
    daemon.kill()
    daemon.start()
    client = connect(daemon)
    assert get_checked(client, spec, hashes) == 16
    found = sum(get_checked(client, spec, chain(f"much {n}", 16)) for n in range(16))
    assert 32 <= found < 256
