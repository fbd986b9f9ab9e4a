"""`kvtier status` and `kvtier top`: what a daemon says of itself (Stats and health over gRPC)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from kvtier.addresses import find_address, parse_address
from kvtier.config import env_name
from kvtier.errors import KvtierError
from kvtier.sizes import rounded_size
from kvtier.types import Tier
from kvtier.v1 import cache_pb2, cache_pb2_grpc

_TIMEOUT_S = 2.0
_TIERS = {
    cache_pb2.TIER_HBM: Tier.HBM,
    cache_pb2.TIER_HOST: Tier.HOST,
    cache_pb2.TIER_SSD: Tier.SSD,
    cache_pb2.TIER_REMOTE: Tier.REMOTE,
}
_HIT_COUNTERS = {Tier.HOST: "host_hit_blocks", Tier.SSD: "ssd_hit_blocks"}


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier's occupancy."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    healthy: bool


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One directory of the SSD tier.

    Attributes:
        queued_bytes: On their way there.
        written_bytes: Since its store was created.
        read_bytes_per_s: As of its last loads; 0: not measured yet.
        stored_bytes: Stored forms of its blocks.
        block_bytes: The same blocks as engines delivered them.
    """

    directory: str
    online: bool
    capacity_bytes: int
    used_bytes: int
    blocks: int
    queued_bytes: int
    written_bytes: int
    read_bytes_per_s: float
    stored_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class WearStatus:
    """How fast the SSDs are worn.

    Attributes:
        written_today_bytes: In 24 hours, since the start.
        budget_level: How full the endurance budget is, 0 to 1.
        lifetime_days: Until the drives' rated bytes are written, at today's rate; None: unknown.
        written_per_served_byte: Since the start; 0: nothing served yet.
    """

    written_today_bytes: int
    budget_level: float
    lifetime_days: float | None
    written_per_served_byte: float


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """A daemon's answer. `kvtier status --json` prints these fields.

    Attributes:
        serving: What its health check says.
        epoch: Hexadecimal boot id.
        shards: The SSD tier's directories; empty without one.
        wear: None without an SSD tier.
        counters: Totals since the start, by name.
    """

    address: str
    serving: bool
    version: str
    epoch: str
    uptime_s: float
    sessions: int
    read_leases: int
    write_leases: int
    pins: int
    pinned_bytes: int
    quarantined_bytes: int
    namespaces: int
    tiers: list[TierStatus]
    shards: list[ShardStatus] = field(default_factory=list)
    wear: WearStatus | None = None
    counters: dict[str, float] = field(default_factory=dict)


def fetch(address: str) -> DaemonStatus:
    """Ask the daemon at `address`. Waits two seconds at most.

    Raises:
        ConfigError: not an address.
        KvtierError: no daemon answers there.
    """
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(parse_address(address).target, options=options) as channel:
        try:
            stats = cache_pb2_grpc.CacheStub(channel).Stats(
                cache_pb2.StatsRequest(), timeout=_TIMEOUT_S
            )
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise KvtierError(_trouble(address, error.code(), error.details() or "")) from error
    return DaemonStatus(
        address=address,
        serving=health.status == health_pb2.HealthCheckResponse.SERVING,
        version=stats.version,
        epoch=stats.epoch.hex(),
        uptime_s=stats.uptime_s,
        sessions=stats.sessions,
        read_leases=stats.read_leases,
        write_leases=stats.write_leases,
        pins=stats.pins,
        pinned_bytes=stats.pinned_bytes,
        quarantined_bytes=stats.quarantined_bytes,
        namespaces=stats.namespaces,
        tiers=[
            TierStatus(
                _TIERS.get(tier.tier, f"tier {tier.tier}"),
                tier.capacity_bytes,
                tier.used_bytes,
                tier.blocks,
                tier.healthy,
            )
            for tier in stats.tiers
        ],
        shards=[
            ShardStatus(**{name.name: getattr(shard, name.name) for name in fields(ShardStatus)})
            for shard in stats.shards
        ],
        wear=_wear(stats.ssd_wear) if stats.HasField("ssd_wear") else None,
        counters=dict(sorted(stats.counters.items())),
    )


def _wear(wear: cache_pb2.SsdWear) -> WearStatus:
    return WearStatus(
        wear.written_today_bytes,
        wear.budget_level,
        wear.lifetime_days if wear.HasField("lifetime_days") else None,
        wear.written_per_served_byte,
    )


def _trouble(address: str, code: grpc.StatusCode, details: str) -> str:
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        cause = details.rpartition("error: ")[2]  # gRPC nests what it tried before it.
        return f"no daemon answers at {address} ({cause})"
    return f"what answers at {address} is no kvtier daemon of this version: {code.name} ({details})"


AddressOption = Annotated[
    str | None,
    typer.Option(
        envvar=env_name("address"),
        help="The daemon's address. Default: the first default place that has a socket.",
    ),
]


def status(
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a daemon's tiers, leases and counters. Exit code 1 unless one answers and serves."""
    answer = fetch(address or find_address())
    if as_json:
        print(json.dumps(asdict(answer), indent=2))
    else:
        Console().print(overview(answer))
    if not answer.serving:
        raise typer.Exit(1)


def top(
    address: AddressOption = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Between refreshes.")
    ] = 1.0,
    once: Annotated[bool, typer.Option(help="Print one interval and end.")] = False,
) -> None:
    """Show a daemon's status and rates, refreshed; q or ctrl-c ends."""
    where = address or find_address()
    before, since = fetch(where), time.monotonic()
    if once:
        time.sleep(interval_s)
        answer = fetch(where)
        Console().print(overview(answer, before, time.monotonic() - since))
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        _single_keys(),
        Live(overview(before), screen=True, auto_refresh=False) as live,
    ):
        while not _quit_within(interval_s):
            answer, now = fetch(where), time.monotonic()
            live.update(overview(answer, before, now - since), refresh=True)
            before, since = answer, now


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Let keys arrive without Enter, if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    saved = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def _quit_within(seconds: float) -> bool:
    """Wait; True as soon as q is pressed."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left_s)
        if ready and os.read(sys.stdin.fileno(), 1) == b"q":
            return True
    return False


def overview(
    now: DaemonStatus, before: DaemonStatus | None = None, elapsed_s: float = 1.0
) -> RenderableType:
    """The status as tables; with an earlier one, also the rates between the two."""
    state = "[green]serving[/]" if now.serving else "[red]not serving[/]"
    facts = Table.grid(padding=(0, 2))
    facts.add_row("daemon", f"{now.address}  {state}  version {now.version}")
    facts.add_row("up", f"{_duration(now.uptime_s)}  epoch {now.epoch[:12]}")
    facts.add_row(
        "held by",
        f"{now.sessions} sessions, {now.read_leases} read and {now.write_leases} write leases, "
        f"{now.pins} pins ({rounded_size(now.pinned_bytes)}), {now.namespaces} namespaces",
    )
    if now.quarantined_bytes:
        facts.add_row("quarantined", f"[yellow]{rounded_size(now.quarantined_bytes)}[/]")
    rate = _hit_rate(now.counters, before.counters if before else {})
    if rate:
        facts.add_row("hits", rate + (" in this interval" if before else ""))
    if now.wear is not None:
        facts.add_row("ssd wear", _wear_in_words(now.wear))
    parts: list[RenderableType] = [facts, _tier_table(now)]
    if now.shards:
        parts.append(_shard_table(now))
    if any(now.counters.values()):
        parts.append(_counter_table(now, before, elapsed_s))
    return Group(*parts)


def _tier_table(now: DaemonStatus) -> Table:
    table = Table("tier", "used", "of", "%", "blocks", "health")
    for tier in now.tiers:
        share = 100 * tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        table.add_row(
            tier.tier,
            rounded_size(tier.used_bytes),
            rounded_size(tier.capacity_bytes),
            f"{share:.0f}",
            f"{tier.blocks:,}",
            "[green]good[/]" if tier.healthy else "[red]failed[/]",
        )
    return table


def _shard_table(now: DaemonStatus) -> Table:
    table = Table("ssd directory", "used", "blocks", "queued", "reads", "state")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for shard in now.shards:
        speed = shard.read_bytes_per_s
        table.add_row(
            shard.directory,
            rounded_size(shard.used_bytes),
            f"{shard.blocks:,}",
            rounded_size(shard.queued_bytes),
            f"{rounded_size(speed)}/s" if speed else "?",
            "[green]online[/]" if shard.online else "[red]offline[/]",
        )
    return table


def _wear_in_words(wear: WearStatus) -> str:
    words = [f"{rounded_size(wear.written_today_bytes)} written today"]
    if wear.written_per_served_byte:
        words.append(f"{wear.written_per_served_byte:.2f} bytes written a byte served")
    if wear.budget_level < 1.0:
        words.append(f"budget {100 * wear.budget_level:.0f} % full")
    if wear.lifetime_days is not None:
        words.append(f"lasts {wear.lifetime_days:,.0f} days at today's rate")
    return ", ".join(words)


def _counter_table(now: DaemonStatus, before: DaemonStatus | None, elapsed_s: float) -> Table:
    table = Table("counter", "total", *(["per second"] if before else []))
    table.columns[1].justify = "right"
    for name, total in now.counters.items():
        if not total:
            continue
        row = [name, _amount(name, total)]
        if before:
            rate = (total - before.counters.get(name, 0.0)) / elapsed_s
            row.append(_amount(name, max(rate, 0.0)))
        table.add_row(*row)
    return table


def _hit_rate(now: Mapping[str, float], before: Mapping[str, float]) -> str:
    """Share of the requested blocks found, by tier; "" where nothing was requested."""

    def grown(name: str) -> float:
        return now.get(name, 0.0) - before.get(name, 0.0)

    requested = grown("requested_blocks")
    if requested <= 0:
        return ""
    return ", ".join(
        f"{tier} {100 * grown(name) / requested:.1f} %" for tier, name in _HIT_COUNTERS.items()
    )


def _amount(name: str, value: float) -> str:
    if "_bytes" in name:
        return rounded_size(value)
    return f"{value:,.3f}" if "_seconds" in name else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
