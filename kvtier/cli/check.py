"""`kvtier check`: is everything on the SSD what it should be?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvtier.errors import KvtierError
from kvtier.sizes import rounded_size

if TYPE_CHECKING:
    from kvtier.tier.ssd_check import Report

PROBLEMS, CANNOT_CHECK = 1, 2


def check(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="SSD directories of a stopped daemon.")
    ],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Delete broken blocks, set broken environments aside (quarantine-NNN)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every block in SSD directories and verify it; no daemon may have them open.

    Exit code 0: clean, or everything wrong was repaired; 1: problems found; 2: could not check.
    """
    code = 0
    answers: list[dict[str, object]] = []
    for directory in directories:
        try:
            report = _checked(directory, repair)
        except (KvtierError, OSError) as error:
            code = CANNOT_CHECK
            answers.append({"directory": str(directory), "error": str(error)})
            Console(stderr=True).print(f"{directory}: not checked: {error}", markup=False)
            continue
        if not report.clean:
            code = max(code, PROBLEMS)
        answers.append({**asdict(report), "clean": report.clean})
        if not as_json:
            _print(report)
    if as_json:
        print(json.dumps({"directories": answers}, indent=2))
    if code:
        raise typer.Exit(code)


def _checked(directory: Path, repair: bool) -> Report:
    from kvtier.tier.ssd_check import check_directory  # LMDB is for those who use it.

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(str(directory), total=None)

        def show(what: str, done_bytes: int, total_bytes: int) -> None:
            bar.update(task, description=what, completed=done_bytes, total=total_bytes or None)

        return check_directory(directory, repair=repair, progress=show)


def _print(report: Report) -> None:
    console = Console(highlight=False)
    counted = (
        f"{report.directory}: {report.blocks:,} blocks, {rounded_size(report.stored_bytes)}, "
        f"in {report.environments} environments"
    )
    if report.quarantined_bytes:
        counted += f"; {rounded_size(report.quarantined_bytes)} set aside"
    console.print(counted, markup=False)
    if not report.problems:
        console.print("  clean", markup=False)
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.problems.items()))
    console.print(f"  {report.found} problems: {kinds}", markup=False)
    for line in report.first:
        console.print(f"    {line}", markup=False)
    if report.found > len(report.first):
        console.print(f"    and {report.found - len(report.first)} more", markup=False)
    if report.repaired:
        console.print(f"  {report.repaired} repaired", markup=False)
