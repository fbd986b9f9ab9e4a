"""The command line: what it offers, how it fails, and what status shows of a daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from rich.console import Console

from kvtier import __version__
from kvtier.addresses import parse_address
from kvtier.cli import main, status
from kvtier.config import Settings, env_name, flag_name
from kvtier.config_docs import document
from kvtier.daemon import server
from kvtier.errors import AddressInUse, ConfigError, KvtierError
from kvtier.v1 import cache_pb2, cache_pb2_grpc

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [env_name(field) for field in Settings.model_fields]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "250")


class FakeDaemon(cache_pb2_grpc.CacheServicer):
    """Answers Stats; each call adds 10 requested blocks, 5 of them hits in RAM."""

    def __init__(self) -> None:
        self.calls = 0

    def Stats(
        self, request: cache_pb2.StatsRequest, context: grpc.ServicerContext
    ) -> cache_pb2.StatsResponse:
        self.calls += 1
        return cache_pb2.StatsResponse(
            version="1.2.3",
            epoch=bytes(range(16)),
            uptime_s=3725,
            tiers=[
                cache_pb2.TierStats(
                    tier=cache_pb2.TIER_HOST,
                    capacity_bytes=1 << 30,
                    used_bytes=1 << 28,
                    blocks=1234,
                    healthy=True,
                ),
                cache_pb2.TierStats(tier=cache_pb2.TIER_SSD, healthy=False),
            ],
            shards=[
                cache_pb2.ShardStats(
                    directory="/ssd/one",
                    online=True,
                    capacity_bytes=1 << 34,
                    used_bytes=3 << 30,
                    blocks=777,
                    queued_bytes=5 << 20,
                    read_bytes_per_s=float(2 << 30),
                ),
                cache_pb2.ShardStats(directory="/ssd/two"),
            ],
            ssd_wear=cache_pb2.SsdWear(
                written_today_bytes=5 << 30,
                budget_level=0.25,
                lifetime_days=1000.4,
                written_per_served_byte=0.5,
            ),
            sessions=2,
            quarantined_bytes=4096,
            counters={
                "requested_blocks": 10.0 * self.calls,
                "host_hit_blocks": 5.0 * self.calls,
                "stored_bytes": float(3 << 20),
                "never_seen": 0.0,
            },
        )


class Running:
    """A fake daemon's address and health."""

    def __init__(self, address: str, health_service: health.HealthServicer) -> None:
        self.address = address
        self._health = health_service

    def turn_red(self) -> None:
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    address = f"unix:{tmp_path}/a b%20.sock"
    with ThreadPoolExecutor(2) as pool:
        grpc_server = grpc.server(pool)
        health_service = health.HealthServicer()
        cache_pb2_grpc.add_CacheServicer_to_server(FakeDaemon(), grpc_server)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, grpc_server)
        grpc_server.add_insecure_port(parse_address(address).target)
        grpc_server.start()
        yield Running(address, health_service)
        grpc_server.stop(None).wait()


@pytest.mark.parametrize("command", ["serve", "config"])
def test_help_lists_every_setting(command: str, capsys: Output) -> None:
    assert main.run([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for doc in document():
        assert f" {flag_name(doc.name)} " in text
        assert env_name(doc.name) in text
        assert doc.meaning in text


def test_no_arguments_show_the_commands(capsys: Output) -> None:
    assert main.run([]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("serve", "config", "status", "top", "version"))


def test_version(capsys: Output) -> None:
    assert main.run(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "--host-capacity-byte", "1GiB"], 2, "--host-capacity-bytes"),
        (["config", "--host-capacity-bytes", "1MiB"], 2, "must be at least 16MiB"),
        (["config", "--config", "/nowhere/x.toml"], 2, "no configuration file /nowhere/x.toml"),
        (["config", "stray"], 2, "stray"),
        (["statsu"], 2, "Did you mean 'status'"),
        (["status", "--address", "nonsense"], 2, "'nonsense' is neither unix:<path>"),
        (["status", "--address", "unix:/nowhere/x.sock"], 1, "no daemon answers at unix:/nowhere"),
        (["top", "--address", "unix:/nowhere/x.sock"], 1, "no daemon answers at unix:/nowhere"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(
    arguments: list[str], code: int, message: str, capsys: Output
) -> None:
    assert main.run(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("kvtier: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_misspelt_environment_variable_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("KVTIER_HOST_CAPACTY_BYTES", "1GiB")
    monkeypatch.setattr(server, "serve", lambda settings: pytest.fail("it started"))
    assert main.run(["serve"]) == 2
    assert "nearest valid name is KVTIER_HOST_CAPACITY_BYTES" in capsys.readouterr().err


def test_serve_hands_over_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kvtier.toml").write_text("max_sessions = 5\n")
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "kvtier.toml"))
    seen: list[Settings] = []
    monkeypatch.setattr(server, "serve", seen.append)
    assert main.run(["serve", "--ssd-codec", "raw"]) == 0
    assert seen[0].ssd_codec == "raw"
    assert seen[0].max_sessions == 5


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (AddressInUse("taken"), 1, "kvtier: taken\n"),
        (ConfigError("two\nlines"), 2, "kvtier: two lines\n"),
        (KvtierError("other"), 1, "kvtier: other\n"),
        (
            ModuleNotFoundError("no", name="torch"),
            1,
            "kvtier: torch is missing: pip install 'kvtier[engine]'\n",
        ),
    ],
)
def test_exit_codes_of_serve(
    error: Exception, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def fail(settings: Settings) -> None:
        raise error

    monkeypatch.setattr(server, "serve", fail)
    assert main.run(["serve"]) == code
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: Settings) -> None:
        raise ModuleNotFoundError("a bug", name="something_else")

    monkeypatch.setattr(server, "serve", fail)
    with pytest.raises(ModuleNotFoundError, match="a bug"):
        main.run(["serve"])


def test_config_prints_a_file_that_gives_the_same_settings(tmp_path: Path, capsys: Output) -> None:
    arguments = ["--address", f"unix:{tmp_path}/x.sock", "--lease-ttl-s", "1.25"]
    assert main.run(["config", *arguments, "--ssd-directories", f"{tmp_path}/s,/t"]) == 0
    first = capsys.readouterr().out
    assert "lease_ttl_s = 1.25  # flag\n" in first
    assert 'host_capacity_bytes = "1GiB"  # default\n' in first
    (tmp_path / "kvtier.toml").write_text(first)
    assert main.run(["config", "--config", str(tmp_path / "kvtier.toml")]) == 0
    second = capsys.readouterr().out
    assert [line.split("  # ")[0] for line in first.splitlines()] == [
        line.split("  # ")[0] for line in second.splitlines()
    ]


def test_status_of_a_daemon(daemon: Running, capsys: Output) -> None:
    assert main.run(["status", "--address", daemon.address]) == 0
    text = capsys.readouterr().out
    for part in ("1.2.3", "1 h 02 min", "256 MiB", "1 GiB", "1,234", "failed", "host 50.0 %"):
        assert part in text
    assert "  serving" in text
    assert "never_seen" not in text
    [one] = [line for line in text.splitlines() if "/ssd/one" in line]
    assert all(part in one for part in ("3 GiB", "777", "5 MiB", "2 GiB/s", "online"))
    [two] = [line for line in text.splitlines() if "/ssd/two" in line]
    assert "offline" in two
    [wear] = [line for line in text.splitlines() if "ssd wear" in line]
    assert "5 GiB written today" in wear
    assert "0.50 bytes written a byte served, budget 25 % full, lasts 1,000 days" in wear


def test_status_as_json(daemon: Running, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("KVTIER_ADDRESS", daemon.address)
    assert main.run(["status", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["address"] == daemon.address
    assert answer["serving"] is True
    assert answer["epoch"] == bytes(range(16)).hex()
    assert answer["tiers"][0] == {
        "tier": "host",
        "capacity_bytes": 1 << 30,
        "used_bytes": 1 << 28,
        "blocks": 1234,
        "healthy": True,
    }
    assert answer["counters"]["never_seen"] == 0
    assert [shard["directory"] for shard in answer["shards"]] == ["/ssd/one", "/ssd/two"]
    assert answer["wear"]["lifetime_days"] == 1000.4


def test_status_of_a_daemon_that_does_not_serve(daemon: Running, capsys: Output) -> None:
    daemon.turn_red()
    assert main.run(["status", "--address", daemon.address]) == 1
    assert "not serving" in capsys.readouterr().out


def test_status_of_something_else(tmp_path: Path, capsys: Output) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        other.add_insecure_port(f"unix:{tmp_path}/x.sock")
        other.start()
        assert main.run(["status", "--address", f"unix:{tmp_path}/x.sock"]) == 1
        other.stop(None).wait()
    assert "is no kvtier daemon of this version: UNIMPLEMENTED" in capsys.readouterr().err


def test_top_once_shows_rates(daemon: Running, capsys: Output) -> None:
    assert main.run(["top", "--once", "--interval", "0.1", "--address", daemon.address]) == 0
    text = capsys.readouterr().out
    assert "per second" in text
    assert "in this interval" in text


def test_rates_are_differences_over_time(daemon: Running) -> None:
    console = Console(width=200)
    before, now = status.fetch(daemon.address), status.fetch(daemon.address)
    with console.capture() as capture:
        console.print(status.overview(now, before, 2.0))
    [row] = [line for line in capture.get().splitlines() if "requested_blocks" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["requested_blocks", "20", "5"]


def test_importing_the_command_line_brings_no_engine() -> None:
    code = (
        "import sys, kvtier.cli.main; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'lmdb', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
