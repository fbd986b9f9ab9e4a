"""`kvtier serve` and `kvtier config`: a flag for every setting, made from Settings itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from kvtier.config import FILE_ENV, Loaded, env_name, flag_name, load, toml_value
from kvtier.config_docs import document

_METAVARS = {"bytes": "SIZE", "bytes/s": "SIZE", "seconds": "SECONDS", "": "TEXT"}


def with_settings(command: Callable[[Loaded], None]) -> Callable[..., None]:
    """`command` as typer wants it: one optional text flag a setting, and --config.

    Values stay text here; load() alone parses and judges them.
    """

    def run(config: Path | None, **flags: str | None) -> None:
        given = {name: value for name, value in flags.items() if value is not None}
        command(load(given, file=config))

    parameters = [
        _parameter(
            "config",
            Path | None,
            flag="--config",
            metavar="FILE",
            envvar=FILE_ENV,
            help="TOML file of settings; flags and environment win over it.",
        )
    ]
    parameters += [
        _parameter(
            doc.name,
            str | None,
            flag=flag_name(doc.name),
            metavar=_METAVARS[doc.unit],
            help=f"{doc.meaning} [{env_name(doc.name)}; default: {doc.default or 'empty'}]",
        )
        for doc in document()
    ]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(name: str, annotation: Any, *, flag: str, **option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, flag, show_default=False, **option),
        annotation=annotation,
    )


def serve(loaded: Loaded) -> None:
    """Run the daemon until SIGTERM or ctrl-c.

    SIGHUP makes it try SSD directories that failed again at once.
    """
    from kvtier.daemon import server

    server.serve(loaded.settings)


def config(loaded: Loaded) -> None:
    """Print the settings in effect, as a TOML file, with where each value comes from."""
    for name, value in loaded.settings:
        origin = loaded.origins.get(name, "default")
        print(f"{name} = {toml_value(name, value)}  # {origin}")
