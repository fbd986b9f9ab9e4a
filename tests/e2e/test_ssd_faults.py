"""SSDs that are full, fail, hang, lie or are not there: misses, never a wrong byte, never an error.

The daemon is the real one. Full, read-only and damaged media are real; errors and hangs of the
medium are injected (faulty_daemon.py).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.process import DaemonProcess
from kvtier.types import BlockHash, MissReason, NamespaceSpec, Tier
from kvtier.v1 import cache_pb2 as pb
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.faulty_daemon import Fault, Faults
from tests.e2e.support import (
    BLOCK_BYTES,
    PATIENCE_S,
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
SMALL: dict[str, object] = {
    "host_capacity_bytes": 16 << 20,
    "ssd_capacity_bytes": 32 << 20,
    "ssd_batch_bytes": 1 << 20,
    "write_queue_bytes": 4 << 20,
}
"""RAM for 256 blocks, of which 64 may wait for the SSD, which has two environments."""
DEATHS = 6
"""A supervisor starts it again; more deaths than this in a row are too many."""


def stored(client: Client, name: str, count: int = 32) -> list[BlockHash]:
    """A prompt that is in RAM and on the SSD now."""
    hashes = chain(name, count)
    assert put(client, SPEC, hashes, wait_s=PATIENCE_S) == count
    assert all(client.flush(SPEC, hashes, timeout_s=PATIENCE_S))
    return hashes


def store_much(client: Client, name: str, prompts: int = 8, *, wait_s: float = 0.0) -> None:
    """Prompts that RAM has no room for; whatever the SSD does, each is taken as a whole."""
    for number in range(prompts):
        hashes = chain(f"{name} {number}", 64)
        assert put(client, SPEC, hashes, wait_s=wait_s) == 64
        assert get_checked(client, SPEC, hashes) == 64


def push_out(client: Client) -> None:
    """Fill RAM with what is not asked for again."""
    store_much(client, "in the way", 5)


def nothing_failed(client: Client) -> None:
    """No call of the client had another answer than hits or misses."""
    assert not client.misses.keys() - {MissReason.NOT_CACHED, MissReason.LOAD_FAILED}, client.misses


def settled(client: Client) -> None:
    """Wait until nothing is on its way to the SSD."""
    eventually(lambda: not any(shard.queued_bytes for shard in client.stats().shards), "settled")


def online(client: Client) -> list[bool]:
    """Of the SSD directories."""
    return [shard.online for shard in client.stats().shards]


def du(directory: Path) -> int:
    """Bytes that files occupy."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def data_file(directory: Path) -> Path:
    """The data file of the first environment."""
    return min(directory.glob("env-*")) / "data.mdb"


def place_of(directory: Path, key: BlockHash) -> tuple[Path, int]:
    """In which data file a block's bytes are, and where."""
    for path in directory.glob("env-*/data.mdb"):
        at = path.read_bytes().find(content(key).tobytes())
        if at >= 0:
            return path, at
    raise AssertionError("the block is not on the medium")


def on_disk(directory: Path, key: BlockHash) -> bool:
    """Whether the block is in this one."""
    sample = content(key).tobytes()
    return any(sample in path.read_bytes() for path in directory.glob("env-*/data.mdb"))


@contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    """A mount, where that is allowed; else the test is skipped."""
    if os.geteuid():
        pytest.skip("needs root to mount a file system")
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", arguments[-1]], check=True)


@pytest.fixture
def small_disk(tmp_path: Path, _nothing_leaks: None) -> Iterator[Path]:
    """A file system of 40 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)):
        yield place


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """What is wrong with the SSDs of daemons started with `program=faults.program`."""
    monkeypatch.chdir(Path(__file__).parents[2])  # Where Python finds the program.
    return Faults(tmp_path / "faults")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Two directories."""
    return [tmp_path / "one", tmp_path / "two"]


def joined(paths: Sequence[Path]) -> str:
    """As the setting takes them."""
    return ",".join(map(str, paths))


def again(daemon: DaemonProcess, connect: Connect) -> Client:
    """kill -9, a new start, and a client of it."""
    daemon.kill()
    daemon.start()
    return connect(daemon)


# Full


def fill_up(file: Path, leave_bytes: int = 0) -> None:
    """A foreign process takes all that is free."""
    status = os.statvfs(file.parent)
    with file.open("wb") as foreign:
        os.posix_fallocate(foreign.fileno(), 0, status.f_bavail * status.f_frsize - leave_bytes)


@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_full_disk_is_pressure(
    start_daemon: StartDaemon, connect: Connect, faults: Faults, small_disk: Path, when: str
) -> None:
    """User report 25: demotions are shed and counted; room comes back, and all is well alone."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_directories=small_disk / "ssd")
    client = connect(daemon)
    foreign = small_disk / "foreign"
    if when == "later":
        stored(client, "before")
    fill_up(foreign)
    store_much(client, "full")
    if when == "at first":  # Else old blocks make room for new ones.
        assert counter(client, "demotions_shed_blocks") > 0
        assert used_bytes(client, pb.TIER_SSD) == 0
    assert client.drop_namespace(SPEC).num_blocks > 0
    nothing_failed(client)
    foreign.unlink()
    last = chain("after", 32)
    assert put(client, SPEC, last) == 32
    eventually(lambda: all(client.flush(SPEC, last, timeout_s=1.0)), "it writes again")
    assert get_checked(again(daemon, connect), SPEC, last) == 32


def test_foreign_files_cost_whole_environments(
    start_daemon: StartDaemon, connect: Connect, small_disk: Path
) -> None:
    """User report 21: what must stay free stays free, whoever fills the disk."""
    floor = 4 << 20
    daemon = start_daemon(**SMALL, ssd_directories=small_disk / "ssd", ssd_min_free_bytes=floor)
    client = connect(daemon)

    def free_bytes() -> int:
        status = os.statvfs(small_disk)
        return status.f_bavail * status.f_frsize

    store_much(client, "one", 7, wait_s=PATIENCE_S)
    last = stored(client, "two", 8)
    assert len(list((small_disk / "ssd").glob("env-*"))) == 2
    assert free_bytes() >= floor
    fill_up(small_disk / "foreign 1", leave_bytes=floor - (1 << 20))
    eventually(lambda: free_bytes() >= floor, "an environment goes")
    assert len(list((small_disk / "ssd").glob("env-*"))) == 1
    store_much(client, "three", 7)
    assert free_bytes() >= floor
    assert get_checked(client, SPEC, last) in (0, 8)
    fill_up(small_disk / "foreign 2")
    eventually(lambda: free_bytes() >= floor, "the last one goes, too")
    fill_up(small_disk / "foreign 3")
    store_much(client, "nowhere", 7)
    assert used_bytes(client, pb.TIER_SSD) == 0
    nothing_failed(client)
    for foreign in small_disk.glob("foreign *"):
        foreign.unlink()

    def stored_again() -> bool:
        store_much(client, "four", 7)
        return used_bytes(client, pb.TIER_SSD) > 20 << 20

    eventually(stored_again, "it takes the room again")
    assert free_bytes() >= floor


def test_the_cap_holds_over_restarts(start_daemon: StartDaemon, connect: Connect) -> None:
    """User reports 21 and 22: the accounting is exact after kill -9, and so the cap holds."""
    daemon = start_daemon(**SMALL)
    client = connect(daemon)
    for number in range(3):
        store_much(client, f"{number}", 6, wait_s=PATIENCE_S)
        last = stored(client, f"last {number}")
        assert du(daemon.ssd_directory) <= 32 << 20
        settled(client)
        before = client.stats().shards[0]
        client = again(daemon, connect)
        after = client.stats().shards[0]
        assert du(daemon.ssd_directory) <= 32 << 20
        # What was evicted last may come back.
        assert before.used_bytes <= after.used_bytes <= before.used_bytes + (1 << 20)
        assert after.used_bytes == after.blocks * BLOCK_BYTES
        assert client.lookup(SPEC, last).blocks_by_tier[Tier.SSD] == 32


# Errors


def test_one_block_that_can_not_be_read(
    start_daemon: StartDaemon, connect: Connect, faults: Faults
) -> None:
    """User reports 6 and 24: EIO on one block costs that block, and it can be stored again."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_scrub_bytes_per_s=0)
    hashes = stored(connect(daemon), "eio", 8)
    client = again(daemon, connect)
    _, at = place_of(daemon.ssd_directory, hashes[5])
    with faults.broken(Fault("preadv", "error", first=at, end=at + BLOCK_BYTES)):
        assert get_checked(client, SPEC, hashes) == 5
        assert counter(client, "load_failed_blocks_TierUnavailable") == 1
        assert online(client) == [True]
        assert client.lookup(SPEC, hashes).num_blocks == 5, "it is dropped"
    assert put(client, SPEC, hashes) == 8
    assert all(client.flush(SPEC, hashes, timeout_s=PATIENCE_S))
    assert get_checked(again(daemon, connect), SPEC, hashes) == 8


def test_calls_that_fall_short(start_daemon: StartDaemon, connect: Connect, faults: Faults) -> None:
    """A page at a time is slow, and right."""
    daemon = start_daemon(**SMALL, program=faults.program)
    with faults.broken(Fault("pwritev", "short")), faults.broken(Fault("preadv", "short")):
        hashes = stored(connect(daemon), "short", 8)
        assert get_checked(again(daemon, connect), SPEC, hashes) == 8


def test_a_directory_that_fails(
    start_daemon: StartDaemon, connect: Connect, faults: Faults, two: list[Path]
) -> None:
    """EIO on all reads: it is out, the other one goes on; SIGHUP brings it back, blocks and all."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_directories=joined(two))
    hashes = stored(connect(daemon), "both", 64)
    client = again(daemon, connect)
    assert client.lookup(SPEC, hashes).num_blocks == 64
    with faults.broken(Fault("preadv", "error", under=str(two[0]))):
        eventually(
            lambda: get_checked(client, SPEC, hashes) < 64 and online(client) == [False, True],
            "it is out",
        )
        on_one = stored(client, "one")
        push_out(client)
        assert get_checked(client, SPEC, on_one) == 32
        assert online(client) == [False, True]
        nothing_failed(client)
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: all(online(client)), "it is back")
    left = client.stats().shards[0].blocks
    assert left > 10, "its blocks are there, but for those whose reads had failed before"
    assert put(client, SPEC, hashes) == 64
    assert all(client.flush(SPEC, hashes, timeout_s=PATIENCE_S))
    assert get_checked(again(daemon, connect), SPEC, hashes) == 64


def test_a_directory_that_can_not_be_written(
    start_daemon: StartDaemon, connect: Connect, faults: Faults, two: list[Path]
) -> None:
    """The same for EIO on writes; what was on it is hit again, after it came back by itself."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_directories=joined(two))
    client = connect(daemon)
    hashes = stored(client, "both", 64)
    with faults.broken(Fault("pwritev", "error", under=str(two[1]))):
        store_much(client, "more")
        eventually(lambda: online(client) == [True, False], "it is out")
        nothing_failed(client)
    eventually(lambda: all(online(client)), "it is back")
    got = get_checked(client, SPEC, hashes)
    assert put(client, SPEC, hashes) == 64
    assert all(client.flush(SPEC, hashes, timeout_s=PATIENCE_S))
    assert get_checked(client, SPEC, hashes) == 64 >= got


def test_a_drop_that_can_not_be_stored(
    start_daemon: StartDaemon, connect: Connect, faults: Faults, two: list[Path]
) -> None:
    """It is in effect, the client is told that a restart may undo it, and its session lives on."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_directories=joined(two))
    hashes = stored(connect(daemon), "both", 64)
    client = again(daemon, connect)
    with faults.broken(Fault("preadv", "error", under=str(two[0]))):
        eventually(
            lambda: get_checked(client, SPEC, hashes) < 64 and online(client) == [False, True],
            "it is out",
        )
        kept = chain("kept", 8)
        put(client, SPEC, kept)
        with client.acquire(SPEC, kept) as lease:
            assert client.drop(SPEC, hashes) == 0
            assert client.misses[MissReason.RPC_ERROR] == 1
            assert lease.read_into([content(key) for key in kept]) == 8
        assert client.lookup(SPEC, hashes).num_blocks == 0
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: all(online(client)), "it is back")

    def dropped() -> bool:
        before = client.misses[MissReason.RPC_ERROR]
        client.drop(SPEC, hashes)
        return client.misses[MissReason.RPC_ERROR] == before

    eventually(dropped, "the SSD stores it")
    assert again(daemon, connect).lookup(SPEC, hashes).num_blocks == 0


# Not there


@pytest.fixture
def read_only(tmp_path: Path, _nothing_leaks: None) -> Iterator[Path]:
    """A directory that nobody can write."""
    place = tmp_path / "read-only"
    place.mkdir()
    with mounted("-t", "tmpfs", "-o", "ro,size=40m", "tmpfs", str(place)):
        yield place


def test_one_of_two_is_read_only(
    start_daemon: StartDaemon, connect: Connect, read_only: Path, tmp_path: Path
) -> None:
    """The daemon serves without it, and takes it once it is writable."""
    daemon = start_daemon(**SMALL, ssd_directories=joined([read_only, tmp_path / "two"]))
    client = connect(daemon)
    assert online(client) == [False, True]
    stored(client, "one")
    nothing_failed(client)
    subprocess.run(["mount", "-o", "remount,rw", str(read_only)], check=True)
    os.kill(daemon.pid, signal.SIGHUP)
    eventually(lambda: all(online(client)), "it is there")
    stored(client, "two", 64)
    assert client.stats().shards[0].blocks > 10


def test_the_only_one_is_read_only(start_daemon: StartDaemon, read_only: Path) -> None:
    with pytest.raises(KvtierError) as caught:
        start_daemon(**SMALL, ssd_directories=read_only)
    *_, last = str(caught.value).splitlines()
    assert f"no SSD directory works: {read_only}: Read-only file system" in last
    assert "change ssd_directories" in last
    assert "Traceback" not in str(caught.value)


def test_a_second_daemon_harms_nothing(
    start_daemon: StartDaemon, connect: Connect, two: list[Path]
) -> None:
    """It refuses, also if only one of its directories is taken; nothing is changed or left."""
    daemon = start_daemon(**SMALL, ssd_directories=two[0])
    client = connect(daemon)
    hashes = stored(client, "mine")
    before = data_file(two[0]).read_bytes()
    for number, order in enumerate((two, two[::-1], two[:1])):
        with pytest.raises(KvtierError, match=f"{two[0]} is in use by another kvtier daemon"):
            start_daemon(f"second {number}", **SMALL, ssd_directories=joined(order))
    assert data_file(two[0]).read_bytes() == before
    push_out(client)
    assert get_checked(client, SPEC, hashes) == 32
    assert get_checked(again(daemon, connect), SPEC, hashes) == 32


# Hanging


def test_reads_that_hang(
    start_daemon: StartDaemon, connect: Connect, faults: Faults, two: list[Path]
) -> None:
    """User reports 6 and 25: a miss at the deadline, the good head kept; RAM comes back after."""
    daemon = start_daemon(
        **SMALL,
        program=faults.program,
        ssd_directories=joined(two),
        ssd_load_timeout_s=0.3,
        ssd_scrub_bytes_per_s=0,
    )
    hashes = stored(connect(daemon), "hangs", 32)
    client = again(daemon, connect)
    sick = 0 if list(two[0].glob("env-*")) else 1
    bad = next(i for i in range(8, 32) if on_disk(two[sick], hashes[i]))
    path, at = place_of(two[sick], hashes[bad])
    with faults.broken(Fault("preadv", "hang", str(path), at, at + BLOCK_BYTES)):
        with client.acquire(SPEC, hashes) as lease:
            assert lease.num_blocks == 32
            assert client.lookup(SPEC, hashes).num_blocks >= bad, "others are answered meanwhile"
        assert get_checked(client, SPEC, hashes) == bad
        assert not online(client)[sick]
        assert online(client)[1 - sick]
        assert faults.hanging() == 1
        store_much(client, "meanwhile", 5)
        eventually(
            lambda: client.stats().pinned_bytes == BLOCK_BYTES,
            "only the block that is still being read is held",
        )
        nothing_failed(client)
    eventually(lambda: all(online(client)), "it answers again")
    eventually(lambda: client.stats().pinned_bytes == 0, "nothing is held")
    assert get_checked(client, SPEC, hashes) >= bad
    assert put(client, SPEC, hashes) == 32
    assert get_checked(client, SPEC, hashes) == 32


def test_writes_that_hang(start_daemon: StartDaemon, connect: Connect, faults: Faults) -> None:
    """User report 25: RAM does not wait for a disk that does not answer, and all is well after."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_load_timeout_s=0.3)
    client = connect(daemon)
    first = stored(client, "first")
    with faults.broken(Fault("pwritev", "hang")):
        put(client, SPEC, chain("hangs", 16))
        client.flush(SPEC, chain("hangs", 16), timeout_s=0.0)
        eventually(lambda: online(client) == [False], "it is out")
        store_much(client, "meanwhile", 5, wait_s=PATIENCE_S)  # Nobody waits for it.
        assert client.stats().pinned_bytes <= 16 * BLOCK_BYTES, "what is being written"
        assert counter(client, "demotions_shed_blocks") > 0
        nothing_failed(client)
    eventually(lambda: all(online(client)), "it answers again")
    after = stored(client, "after")
    client = again(daemon, connect)
    assert get_checked(client, SPEC, first) == 32
    assert get_checked(client, SPEC, after) == 32


def test_a_stop_while_the_disk_hangs(
    start_daemon: StartDaemon, connect: Connect, faults: Faults
) -> None:
    """SIGTERM does not wait for ever for what will not come."""
    daemon = start_daemon(**SMALL, program=faults.program, ssd_load_timeout_s=0.3)
    client = connect(daemon)
    hashes = stored(client, "first")
    with faults.broken(Fault("pwritev", "hang")):
        put(client, SPEC, chain("hangs", 16))
        client.flush(SPEC, chain("hangs", 16), timeout_s=0.0)
        eventually(lambda: faults.hanging() > 0, "it hangs")
        os.kill(daemon.pid, signal.SIGTERM)
        eventually(lambda: "unwritten blocks are lost" in daemon.log_tail(), "it gives up")
    assert daemon.stop() == 0
    daemon.start()
    assert get_checked(connect(daemon), SPEC, hashes) == 32


def test_reads_in_flight(start_daemon: StartDaemon, connect: Connect, faults: Faults) -> None:
    """User report 28: blocks are not read one by one, but as many at once as the setting says."""
    daemon = start_daemon(
        **SMALL,
        program=faults.program,
        ssd_read_threads=8,
        ssd_scrub_bytes_per_s=0,
        ssd_load_timeout_s=60.0,  # A slow machine may take its time to begin nine reads.
    )
    hashes = stored(connect(daemon), "deep", 64)
    client = again(daemon, connect)
    with client.acquire(SPEC, hashes[:1]) as lease:
        assert lease.num_blocks == 1
    with faults.broken(Fault("preadv", "hang")):
        lease = client.acquire(SPEC, hashes)
        eventually(lambda: faults.hanging() == 9, "eight at once, and one more of raw blocks")
    with lease:
        assert lease.num_blocks == 64
    eventually(lambda: get_checked(client, SPEC, hashes) == 64, "all of them come")


# Lying


def flip(path: Path) -> None:
    """A bit in every 16 KiB, tables included."""
    content_now = bytearray(path.read_bytes())
    for at in range(100, len(content_now), 16 << 10):
        content_now[at] ^= 0x10
    overwrite(path, bytes(content_now))


def overwrite(path: Path, data: bytes) -> None:
    """In place: who has the file open sees it."""
    with path.open("rb+") as file:
        file.write(data)


def garbage(size_bytes: int) -> bytes:
    """The same in every run: what it hits is not to be luck."""
    return random.Random(24).randbytes(size_bytes)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bits flipped": flip,
    "zeros in its second half": lambda path: overwrite_half(path, 1),
    "zeros in its first half": lambda path: overwrite_half(path, 0),
    "all zeros": lambda path: overwrite(path, bytes(path.stat().st_size)),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut to nothing": lambda path: os.truncate(path, 0),
    "garbage in place": lambda path: overwrite(path, garbage(path.stat().st_size)),
    "replaced by garbage": lambda path: replaced(path, garbage(1 << 20)),
    "replaced by nothing": lambda path: replaced(path, b""),
    "gone": lambda path: path.unlink(),
    "its lock gone": lambda path: path.with_name("lock.mdb").unlink(),
    "its lock garbage": lambda path: overwrite(path.with_name("lock.mdb"), garbage(8192)),
}


def overwrite_half(path: Path, half: int) -> None:
    """Zeros there."""
    size = path.stat().st_size // 2
    with path.open("rb+") as file:
        file.seek(half * size)
        file.write(bytes(size))


def replaced(path: Path, data: bytes) -> None:
    """Another file gets the name; who has it open keeps the old one."""
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


def start_supervised(daemon: DaemonProcess) -> None:
    """Start it until it stays, as a supervisor does."""
    for _ in range(DEATHS):
        try:
            daemon.start()
        except KvtierError:
            continue
        return
    raise AssertionError(f"it died {DEATHS} times:\n{daemon.log_tail()}")


def dead(daemon: DaemonProcess) -> bool:
    """Whether it ended."""
    assert daemon._process is not None
    return daemon._process.poll() is not None


def heal(client: Client, prompts: Sequence[list[BlockHash]]) -> int:
    """Get prompts, and store them until they come; how many did at once."""
    came = 0
    for hashes in prompts:
        came += get_checked(client, SPEC, hashes) == len(hashes)
        for _ in range(len(hashes)):  # Damage behind a bad block is found when that one is there.
            if get_checked(client, SPEC, hashes) == len(hashes):
                break
            assert put(client, SPEC, hashes) == len(hashes)
    return came


def test_damage_while_it_is_down(
    start_daemon: StartDaemon, connect: Connect, tmp_path: Path
) -> None:
    """User report 24: a directory for each kind of damage, and one that must not suffer.

    Never a wrong byte; the good blocks are there; storing the others again works.
    """
    directories = {how: tmp_path / how for how in ["sound", *DAMAGE]}
    daemon = start_daemon(**SMALL, ssd_directories=joined(list(directories.values())))
    client = connect(daemon)
    prompts = [chain(f"{number}", 1) for number in range(240)]
    for hashes in prompts:
        assert put(client, SPEC, hashes) == 1
    assert all(all(client.flush(SPEC, hashes, timeout_s=PATIENCE_S)) for hashes in prompts)
    on_sound = [hashes for hashes in prompts if on_disk(directories["sound"], hashes[0])]
    assert len(on_sound) > 5
    daemon.kill()
    for how, damage in DAMAGE.items():
        damage(data_file(directories[how]))
    start_supervised(daemon)
    client = connect(daemon)
    assert all(online(client))
    assert heal(client, on_sound) == len(on_sound)
    assert heal(client, prompts) < len(prompts)
    for hashes in prompts:
        assert client.flush(SPEC, hashes, timeout_s=PATIENCE_S) == [True]
    assert all(du(directory) <= 32 << 20 for directory in directories.values())
    assert heal(again(daemon, connect), prompts) == len(prompts)


WORST = (
    "bits flipped",
    "zeros in its first half",
    "cut in half",
    "garbage in place",
    "replaced by garbage",
    "gone",
    "its lock gone",
)


def test_damage_while_it_runs(start_daemon: StartDaemon, connect: Connect, faults: Faults) -> None:
    """User report 24: it may end and be started again; there is no wrong byte, and no error."""
    hashes, more = chain("damaged", 64), chain("more", 32)
    victims: dict[str, tuple[DaemonProcess, Client]] = {}
    for how in WORST:
        daemon = start_daemon(how, **SMALL, program=faults.program)
        victims[how] = daemon, connect(daemon)
    for how, (daemon, client) in victims.items():
        stored(client, "damaged", 64)
        store_much(client, "in the way", 4)
        DAMAGE[how](data_file(daemon.ssd_directory))

    def stored_again(daemon: DaemonProcess, client: Client) -> bool:
        if dead(daemon):
            start_supervised(daemon)
            assert client.wait_attached(PATIENCE_S)
        get_checked(client, SPEC, hashes)
        put(client, SPEC, hashes)
        put(client, SPEC, more)
        return all(client.flush(SPEC, [*hashes, *more], timeout_s=0.0))

    left = dict(victims)
    for _ in range(10_000):
        left = {how: victim for how, victim in left.items() if not stored_again(*victim)}
        if not left:
            break
    assert not left, "all is stored again"
    for daemon, client in victims.values():
        assert du(daemon.ssd_directory) <= 32 << 20
        daemon.kill()
        start_supervised(daemon)
        assert client.wait_attached(PATIENCE_S)
        heal(client, [hashes, more])


def readers(environment: Path) -> int:
    """Slots that are taken in LMDB's reader table."""
    with lmdb.open(str(environment), readonly=True, max_dbs=8) as env:
        return len(str(env.readers()).strip().splitlines()) - 1


def test_a_stale_reader_slot(start_daemon: StartDaemon, connect: Connect) -> None:
    """What a killed reader of LMDB left behind keeps no page from reuse: the cap holds."""
    daemon = start_daemon(**SMALL)
    client = connect(daemon)
    stored(client, "first")
    path = data_file(daemon.ssd_directory).parent
    script = (
        "import lmdb, os, signal, sys\n"
        "env = lmdb.open(sys.argv[1], readonly=True, max_dbs=8)\n"
        "txn = env.begin()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert readers(path) == 2, "the daemon and the dead one"
    for number in range(6):
        store_much(client, f"{number}", 6, wait_s=PATIENCE_S)
        assert du(daemon.ssd_directory) <= 32 << 20
    assert counter(client, "demotions_shed_blocks") == 0
    assert counter(client, "ssd_write_failed_blocks") == 0
    assert readers(path) == 1
    last = stored(client, "last")
    assert get_checked(again(daemon, connect), SPEC, last) == 32


# What is whose


def prompt(spec: NamespaceSpec, adapter: bytes) -> list[BlockHash]:
    """The same tokens, under an adapter of this content."""
    root = root_hash(namespace_digest(spec), lora_digest=adapter)
    return block_hashes(root, list(range(8 * spec.block_tokens)), spec.block_tokens)


def test_adapters_do_not_share_blocks(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 1: the same prompt under LoRA A, then B, then the base model.

    An adapter is its content: the name may stay while the weights change.
    """
    client = connect(daemon)
    of_a = prompt(SPEC, b"weights of A")
    assert put(client, SPEC, of_a) == 8
    assert all(client.flush(SPEC, of_a, timeout_s=PATIENCE_S))
    others = [prompt(SPEC, adapter) for adapter in (b"weights of B", b"", b"A, trained further")]
    for _ in range(2):
        for other in others:
            assert client.lookup(SPEC, other).num_blocks == 0
            assert get_checked(client, SPEC, other) == 0
        assert get_checked(client, SPEC, of_a) == 8
        client = again(daemon, connect)
    base = prompt(SPEC, b"")
    assert put(client, SPEC, base) == 8
    assert all(client.flush(SPEC, base, timeout_s=PATIENCE_S))
    client = again(daemon, connect)
    assert client.lookup(SPEC, base).blocks_by_tier[Tier.SSD] == 8
    assert client.lookup(SPEC, of_a).blocks_by_tier[Tier.SSD] == 8
    for other in others[::2]:
        assert client.lookup(SPEC, other).num_blocks == 0
    other_weights = replace(SPEC, weights_revision="another")
    assert client.lookup(other_weights, of_a).num_blocks == 0


# What is written


def test_everything_is_there_after_a_restart(start_daemon: StartDaemon, connect: Connect) -> None:
    """User report 23: the same prompts hit fully, nothing is rewritten, no file is an orphan."""
    daemon = start_daemon(**SMALL)
    client = connect(daemon)
    prompts = [stored(client, f"{number}", 32) for number in range(4)]
    for _ in range(2):
        client = again(daemon, connect)
        files = sorted(path for path in daemon.ssd_directory.rglob("*"))
        for hashes in prompts:
            assert client.lookup(SPEC, hashes).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 32}
            assert get_checked(client, SPEC, hashes) == 32
            assert put(client, SPEC, hashes) == 32
            assert all(client.flush(SPEC, hashes, timeout_s=PATIENCE_S))
        assert counter(client, "ssd_written_blocks") == 0
        assert sorted(path for path in daemon.ssd_directory.rglob("*")) == files


def test_what_admission_leaves_out_is_told(start_daemon: StartDaemon, connect: Connect) -> None:
    """User report 26: an SSD that stays empty says why, and is not: what is used twice gets there.

    User report 27: what is written and served is told, too.
    """
    daemon = start_daemon(**SMALL, ssd_write_policy="second_touch")
    client = connect(daemon)
    for number in range(6):
        put(client, SPEC, chain(f"once {number}", 64), wait_s=PATIENCE_S)
    assert used_bytes(client, pb.TIER_SSD) == 0
    assert counter(client, "skipped_by_admission_blocks") > 0
    assert client.stats().ssd_wear.written_today_bytes == 0
    twice = chain("twice", 32)
    put(client, SPEC, twice)
    assert get_checked(client, SPEC, twice) == 32
    eventually(lambda: used_bytes(client, pb.TIER_SSD) >= 32 * BLOCK_BYTES, "it is worth a write")
    push_out(client)
    assert get_checked(client, SPEC, twice) == 32
    wear = client.stats().ssd_wear
    assert wear.written_today_bytes >= 32 * BLOCK_BYTES
    assert wear.written_per_served_byte > 0
