"""Structured logs on standard error: one line an event, for people or as JSON."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level: str, log_format: str) -> None:
    """Send structlog's events of `level` and above to standard error.

    Args:
        level: "debug", "info", "warning" or "error".
        log_format: "console" or "json".
    """
    as_json = log_format == "json"
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        # The default would spend seconds on drawing every local of a traceback.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
