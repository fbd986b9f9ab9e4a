"""The `kvtier` command: what commands there are, and how errors reach a person.

Importing this must stay quick and must not import torch: commands import what they need.

Exit codes: 0 done, 1 failed, 2 the command line or a setting is wrong, 130 ctrl-c. `kvtier check`
says what its own mean.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvtier import __version__
from kvtier.cli import check, demo, footprint, serve, status
from kvtier.errors import ConfigError, KvtierError

_ENGINE_PACKAGES = {"torch", "safetensors", "tokenizers"}
"""What the extra "engine" brings."""

app = typer.Typer(
    name="kvtier",
    help="A sidecar that keeps MLA KV cache blocks across requests, engines and restarts.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.with_settings(serve.serve))
app.command("config")(serve.with_settings(serve.config))
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("top")(status.top)
app.command("check")(check.check)
app.command("footprint")(footprint.footprint)


@app.command("version")
def version() -> None:
    """Print the version."""
    print(__version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    """A sidecar that keeps MLA KV cache blocks across requests, engines and restarts."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; errors raised on purpose become one line on stderr.

    Returns:
        The exit code.
    """
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="kvtier", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(error.format_message(), code=error.exit_code)
    except ConfigError as error:
        return _fail(str(error), code=2)
    except (KvtierError, OSError) as error:
        return _fail(str(error), code=1)
    except ModuleNotFoundError as error:
        if error.name not in _ENGINE_PACKAGES:
            raise
        return _fail(f"{error.name} is missing: pip install 'kvtier[engine]'", code=1)
    return code if isinstance(code, int) else 0


def _fail(message: str, *, code: int) -> int:
    print(f"kvtier: {' '.join(message.split())}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
