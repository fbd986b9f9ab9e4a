"""`kvtier footprint`: bytes that a token's KV cache takes, in each form and in a running daemon."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.addresses import find_address
from kvtier.cli.status import AddressOption, DaemonStatus, fetch
from kvtier.errors import KvtierError
from kvtier.sizes import rounded_size

if TYPE_CHECKING:
    from kvtier.footprint.geometries import Geometry
    from kvtier.footprint.sizes import Form


@dataclass(frozen=True, slots=True)
class Stored:
    """What a daemon's SSD tier makes of the blocks it gets.

    Attributes:
        codec_ratio: ssd_stored_bytes over ssd_block_bytes; None with nothing on the SSD.
        end_to_end_ratio: ssd_written_bytes over logical_bytes; None without SSD, and with nothing
            cached or nothing written yet (as after a restart).
        ssd_stored_bytes: Stored forms of the blocks that are on the SSD now.
        ssd_block_bytes: The same blocks as engines delivered them.
        ssd_written_bytes: Stored forms written since the daemon's start.
        logical_bytes: What requests' cached tokens would have taken since then, each for itself.
    """

    codec_ratio: float | None
    end_to_end_ratio: float | None
    ssd_stored_bytes: int
    ssd_block_bytes: int
    ssd_written_bytes: int
    logical_bytes: int


def footprint(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|CONFIG.json",
            help="deepseek-v2 (default), v2-lite, v3, v3.2 (all four with or without deepseek-),"
            " kimi-k2, glm-5, or a Hugging Face config.json.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    stored: Annotated[
        bool,
        typer.Option("--stored", help="What a running daemon stores. Models only if one is named."),
    ] = False,
    address: AddressOption = None,
) -> None:
    """Show how many bytes a token's KV cache takes: as keys and values, as a latent, encoded.

    What codecs need is measured: they encode blocks of real latents that come with kvtier.
    """
    from kvtier.footprint import geometries, report, sizes  # numpy, zstd: for those who use them.

    answer: dict[str, object] = {}
    console = Console(highlight=False)
    if model is not None or not stored:
        geometry = geometries.geometry_of(geometries.DEFAULT if model is None else model)
        forms = sizes.forms(geometry)
        answer = report.as_dict(geometry, forms)
        if not as_json:
            _print_model(console, geometry, forms)
    if stored:
        found = stored_by(fetch(address or find_address()))
        answer["stored"] = {**asdict(found), "notes": list(_STORED_NOTES)}
        if not as_json:
            _print_stored(console, found)
    if as_json:
        print(json.dumps(answer, indent=2))


def _print_model(console: Console, geometry: Geometry, forms: list[Form]) -> None:
    from kvtier.footprint import report, sizes

    console.print(f"{report.title(geometry)}\n", markup=False)
    table = Table("form", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.columns[0].min_width = max(len(form.name) for form in forms)
    for header in ("bytes a\ntoken", "and\nlayer", "of\ngqa8", "against\n67B"):
        table.add_column(header, justify="right", no_wrap=True)
    for tier in sizes.TIERS:
        table.add_column(f"tokens/\nGiB {tier.upper()}", justify="right", no_wrap=True)
    for form in forms:
        table.add_row(
            form.name,
            f"{form.bytes_per_token:,.0f}",
            f"{form.bytes_per_token_layer:,.0f}",
            report.fraction(form.ratio_to_gqa8),
            f"{-100 * form.reduction_vs_deepseek_67b:+,.1f} %",
            *("" if count is None else f"{count:,}" for count in form.tokens_per_gib.values()),
        )
    console.print(table)
    for line in (*report.notes(geometry), *report.conclusions(forms)):
        console.print(f"* {line}", markup=False)


# A daemon


def stored_by(daemon: DaemonStatus) -> Stored:
    """The two ratios of a daemon, from its own figures.

    Raises:
        KvtierError: it is too old to tell.
    """
    if "logical_bytes" not in daemon.counters:
        raise KvtierError(
            f"the daemon at {daemon.address} (version {daemon.version}) does not count logical"
            " bytes: restart it with this version"
        )
    stored_bytes = sum(shard.stored_bytes for shard in daemon.shards)
    block_bytes = sum(shard.block_bytes for shard in daemon.shards)
    written_bytes = int(daemon.counters["ssd_written_bytes"])
    logical_bytes = int(daemon.counters["logical_bytes"])
    return Stored(
        codec_ratio=stored_bytes / block_bytes if block_bytes else None,
        end_to_end_ratio=written_bytes / logical_bytes if written_bytes and logical_bytes else None,
        ssd_stored_bytes=stored_bytes,
        ssd_block_bytes=block_bytes,
        ssd_written_bytes=written_bytes,
        logical_bytes=logical_bytes,
    )


def _print_stored(console: Console, found: Stored) -> None:
    """Each ratio with its two parts, so that nobody takes one for the other."""
    table = Table("ratio", "is", "of", "over", title="stored on the SSD", title_justify="left")
    table.add_row(
        "codec",
        _rounded(found.codec_ratio),
        f"{rounded_size(found.ssd_stored_bytes)}: stored forms of the blocks there now",
        f"{rounded_size(found.ssd_block_bytes)}: the same blocks as engines delivered them",
    )
    table.add_row(
        "end to end",
        "nothing written since the start"
        if found.logical_bytes and not found.ssd_written_bytes
        else _rounded(found.end_to_end_ratio),
        f"{rounded_size(found.ssd_written_bytes)}: stored forms written since the start",
        f"{rounded_size(found.logical_bytes)}: all requests' cached tokens since the start, as"
        " engines deliver them, each request for itself",
    )
    console.print(table)
    for line in _STORED_NOTES:
        console.print(f"* {line}")


_STORED_NOTES = (
    "The codec ratio is what codecs do. The end-to-end ratio has in it, too, what requests"
    " share (written once) and what was not written: not worth it, or still in RAM only.",
)


def _rounded(ratio: float | None) -> str:
    return "nothing yet" if ratio is None else f"{ratio:.3f}"
