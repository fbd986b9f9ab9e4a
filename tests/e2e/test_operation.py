"""Starting, refusing to start, being watched and stopping."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from zlib import crc32

import lmdb
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.daemon.supervise import RESTART_AFTER_S, Supervisor
from kvtier.process import DaemonProcess
from kvtier.v1 import cache_pb2 as pb
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import (
    BLOCK_BYTES,
    SSD_SETTINGS,
    chain,
    cont_daemon,
    eventually,
    get_checked,
    put,
    spec_of,
    stop_daemon,
)

SPEC = spec_of()


class Serve:
    """`kvtier serve` with flags of our own; for starts that should fail."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "s.sock"
        self.arena = Path(f"/dev/shm/kvtier-e2e-{os.getpid()}")
        self.ssd = home / "ssd"

    def command(self, **settings: object) -> list[str]:
        """Its command line."""
        values = {
            "address": f"unix:{self.socket}",
            "arena_dir": self.arena,
            "ssd_directories": self.ssd,
            "host_capacity_bytes": 32 << 20,
            "metrics_address": "",
            **SSD_SETTINGS,
            **settings,
        }
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        return [sys.executable, "-m", "kvtier", "serve", *flags]

    def refuses(self, *words: str, code: int = 1, **settings: object) -> str:
        """It must end with this exit code and one line that has these words, and leave nothing."""
        process = subprocess.run(
            self.command(**settings), capture_output=True, text=True, timeout=60.0, check=False
        )
        assert process.returncode == code, process.stderr
        *before, last = process.stderr.strip().splitlines()
        assert last.startswith("kvtier: "), process.stderr
        assert "Traceback" not in process.stderr
        assert all(word in last for word in words), last
        assert not before or all("[info" in line for line in before), process.stderr
        return last

    def left_nothing(self) -> None:
        """Neither a socket nor an arena."""
        assert not self.socket.exists()
        assert not self.arena.exists()


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A home for a daemon that will not start."""
    return Serve(tmp_path)


# The socket


def test_a_live_daemon_keeps_its_socket(
    daemon: DaemonProcess, connect: Connect, serve: Serve
) -> None:
    client = connect(daemon)
    serve.refuses("live daemon", "kvtier.sock", address=daemon.address)
    serve.left_nothing()
    assert put(client, SPEC, chain("a", 2)) == 2, "the live one has not noticed"


def test_a_hung_daemon_keeps_its_socket(daemon: DaemonProcess, serve: Serve) -> None:
    """However many wait for it already."""
    stop_daemon(daemon)
    waiting: list[socket.socket] = []
    try:
        path = daemon.address.removeprefix("unix:")
        for _ in range(5000):
            sock = socket.socket(socket.AF_UNIX)
            waiting.append(sock)
            sock.setblocking(False)
            try:
                sock.connect(path)
            except BlockingIOError:
                break
            if len(waiting) + 64 > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                break
        serve.refuses("live daemon", address=daemon.address)
    finally:
        for sock in waiting:
            sock.close()
        cont_daemon(daemon)
    serve.left_nothing()


def test_a_dead_daemon_gives_its_socket_away(daemon: DaemonProcess, connect: Connect) -> None:
    daemon.kill()
    assert Path(daemon.address.removeprefix("unix:")).is_socket()
    daemon.start()
    assert put(connect(daemon), SPEC, chain("a", 2)) == 2


def test_files_at_the_socket_path(serve: Serve) -> None:
    serve.socket.write_text("precious")
    serve.refuses("not a socket", str(serve.socket))
    assert serve.socket.read_text() == "precious"
    serve.socket.unlink()
    serve.socket.mkdir()
    serve.refuses("not a socket", str(serve.socket))
    assert not serve.arena.exists()


def test_directories_that_can_not_be(serve: Serve) -> None:
    file = serve.home / "file"
    file.write_text("precious")
    serve.refuses(str(file), code=2, address=f"unix:{file}/s.sock")
    serve.refuses(str(file), code=2, arena_dir=file / "arena")
    serve.refuses(str(file), ssd_directories=file / "ssd")
    serve.left_nothing()
    assert file.read_text() == "precious"


# The arena and the SSD directory


def test_one_daemon_an_arena_and_an_ssd_directory(
    daemon: DaemonProcess, connect: Connect, serve: Serve
) -> None:
    client = connect(daemon)
    put(client, SPEC, chain("a", 2))
    arena = next(
        Path(line.split()[-1]).parent
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("/arena")
    )
    serve.refuses("running daemon", str(arena), arena_dir=arena)
    serve.left_nothing()
    serve.refuses("in use", str(daemon.ssd_directory), ssd_directories=daemon.ssd_directory)
    serve.left_nothing()
    assert get_checked(client, SPEC, chain("a", 2)) == 2
    assert client.attached


def test_an_arena_directory_keeps_what_is_not_ours(serve: Serve) -> None:
    serve.arena.mkdir(mode=0o700)
    precious = serve.arena / "precious"
    try:
        precious.write_text("x")
        process = subprocess.Popen(serve.command(log_level="error"))
        eventually(serve.socket.is_socket, "it serves")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0
        assert [path.name for path in serve.arena.iterdir()] == ["precious"]
    finally:
        precious.unlink()
        serve.arena.rmdir()


def test_another_capacity_while_clients_live(daemon: DaemonProcess, connect: Connect) -> None:
    """A second arena beside the mapped one would double the memory."""
    client = connect(daemon)
    put(client, SPEC, chain("a", 2))
    daemon.kill()
    daemon._command.append(f"--host-capacity-bytes={48 << 20}")
    client.close()
    daemon.start()
    assert put(connect(daemon), SPEC, chain("a", 2)) == 2


def test_a_newer_format(serve: Serve, start_daemon: StartDaemon, connect: Connect) -> None:
    daemon = start_daemon()
    client = connect(daemon)
    put(client, SPEC, hashes := chain("a", 2))
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    assert daemon.stop() == 0
    file = daemon.ssd_directory / "env-000" / "data.mdb"
    environment = lmdb.open(str(file.parent), max_dbs=8, map_size=file.stat().st_size, create=False)
    header = environment.open_db(b"header", create=False)
    version = struct.pack("<I", 999)
    with environment.begin(write=True) as transaction:
        transaction.put(b"format", version + struct.pack("<I", crc32(version)), db=header)
    environment.close()
    before = file.read_bytes()
    serve.refuses("999", str(daemon.ssd_directory), ssd_directories=daemon.ssd_directory)
    serve.left_nothing()
    assert file.read_bytes() == before


def test_capacities_that_do_not_fit(serve: Serve) -> None:
    serve.refuses("host_capacity_bytes", "room", host_capacity_bytes="100TiB")
    serve.left_nothing()
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    serve.refuses("host_capacity_bytes", "room", host_capacity_bytes=available)
    serve.left_nothing()
    serve.refuses("ssd_capacity_bytes", "free", ssd_capacity_bytes="1000TiB")
    serve.left_nothing()
    serve.refuses("ssd_capacity_bytes", "batch", ssd_capacity_bytes=16 << 20)
    serve.left_nothing()


def test_a_metrics_port_in_use(serve: Serve) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        serve.refuses("metrics_address", str(port), metrics_address=f"127.0.0.1:{port}")
        serve.left_nothing()
        serve.refuses(str(port), address=f"tcp:127.0.0.1:{port}")
        serve.left_nothing()


def test_wrong_settings(serve: Serve) -> None:
    serve.refuses("lease_ttl_s", "lease_ttl_max_s", code=2, lease_ttl_s=500)
    serve.refuses("--ssd-codec", code=2, ssd_codec="zip")
    serve.left_nothing()


def test_terminated_while_starting(serve: Serve) -> None:
    """At any moment: nothing is left behind once it has begun to make something."""
    for _ in range(3):
        process = subprocess.Popen(serve.command(log_level="error"))
        try:
            eventually(serve.arena.exists, "it has begun")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30.0) == 0
            serve.left_nothing()
        finally:
            process.kill()
            process.wait()


# Watching


@pytest.fixture
def metrics(start_daemon: StartDaemon) -> tuple[DaemonProcess, str]:
    """A daemon with its HTTP address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return start_daemon(metrics_address=address), f"http://{address}"


def fetch(url: str) -> str:
    """The body at a URL."""
    with urllib.request.urlopen(url, timeout=20.0) as response:
        return str(response.read().decode())


def samples(url: str) -> dict[tuple[str, str], float]:
    """(name, tier) -> value of all metrics."""
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(fetch(f"{url}/metrics"))
        for sample in family.samples
    }


def test_metrics(metrics: tuple[DaemonProcess, str], connect: Connect) -> None:
    daemon, url = metrics
    client = connect(daemon)
    hashes = chain("counted", 16)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    for number in range(3):
        put(client, SPEC, chain(f"pressure {number}", 400), wait_s=20.0)
    assert client.flush(SPEC, chain("pressure 2", 400), timeout_s=20.0)
    assert get_checked(client, SPEC, [*hashes, *chain("missed", 4)]) == 16
    assert get_checked(client, SPEC, hashes) == 16
    seen = samples(url)
    tokens = SPEC.block_tokens
    for unit, each in (("blocks", 1), ("tokens", tokens)):
        assert seen[f"kvtier_hit_{unit}_total", "ssd"] == 16 * each
        assert seen[f"kvtier_hit_{unit}_total", "host"] == 16 * each
        assert seen[f"kvtier_missed_{unit}_total", ""] == 4 * each
        assert seen[f"kvtier_requested_{unit}_total", ""] == 36 * each
    assert seen["kvtier_evicted_blocks_total", "host"] > 16
    assert seen["kvtier_evicted_bytes_total", "host"] > 16 * BLOCK_BYTES
    assert seen["kvtier_ssd_read_bytes_total", ""] == 16 * BLOCK_BYTES
    assert seen["kvtier_ssd_written_bytes_total", ""] >= 400 * BLOCK_BYTES
    assert seen["kvtier_ssd_read_seconds_total", ""] > 0
    assert seen["kvtier_ssd_write_seconds_total", ""] > 0
    assert seen["kvtier_tier_capacity_bytes", "host"] == 32 << 20
    assert seen["kvtier_tier_healthy", "ssd"] == 1
    assert seen["kvtier_sessions", ""] == 1
    stats = client.stats()
    assert seen["kvtier_stored_blocks_total", ""] == stats.counters["stored_blocks"]
    host = next(state for state in stats.tiers if state.tier == pb.TIER_HOST)
    assert seen["kvtier_tier_used_bytes", "host"] == host.used_bytes


def test_healthz(metrics: tuple[DaemonProcess, str]) -> None:
    _, url = metrics
    assert fetch(f"{url}/healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(f"{url}/nothing")
    assert caught.value.code == 404
    caught.value.close()


async def test_health_is_red_while_a_task_is_down() -> None:
    """User report 20: the task is started again, and health tells meanwhile."""
    told: list[bool] = []
    starts = 0
    runs = asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise RuntimeError("a bug")
        runs.set()
        await asyncio.Event().wait()

    async def well() -> None:
        await asyncio.Event().wait()

    supervisor = Supervisor(told.append)
    supervisor.start("fails once", work)
    supervisor.start("fine", well)
    async with asyncio.timeout(RESTART_AFTER_S + 10.0):
        await runs.wait()
    assert told == [False, True]
    await supervisor.stop()
    assert told == [False, True]


def test_an_idle_daemon_sleeps(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 29: no busy polling. Aim: 1 % of a core; the bound is generous."""
    client = connect(daemon)
    put(client, SPEC, chain("a", 64))
    assert all(client.flush(SPEC, chain("a", 64), timeout_s=20.0))

    def cpu_s() -> float:
        fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    started_s, before = time.monotonic(), cpu_s()
    eventually(lambda: time.monotonic() > started_s + 3.0, "three idle seconds")
    percent = 100 * (cpu_s() - before) / (time.monotonic() - started_s)
    sys.stdout.write(f"idle daemon: {percent:.2f} % of a core\n")
    assert percent < 5.0


# Wear


def test_thousands_of_leases_cost_no_memory(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    hashes = chain("again", 64)
    put(client, SPEC, hashes)

    def resident() -> int:
        text = Path(f"/proc/{daemon.pid}/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) * 1024

    def serve_some() -> int:
        for _ in range(1000):
            with client.acquire(SPEC, hashes) as lease:
                assert lease.num_blocks == 64
        return resident()

    serve_some()
    before = serve_some()
    assert serve_some() - before < 4 << 20
    assert client.stats().pinned_bytes == 0
