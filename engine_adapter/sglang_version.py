"""Where SGLang's versions differ: which were tested, and what is asked of its inner parts.

Imported before anything else of SGLang, so that another version is told as such and not as a
missing name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine_adapter.hicache.arguments import (
    COMPUTING,
    CONTENTS,
    IDENTIFYING,
    NEVER_HASHED,
    WEIGHTS_FROM_FILES,
)
from engine_adapter.hicache.identity import EngineFacts
from kvtier.errors import ConfigError

TESTED = "0.5.23"
"""Before it, page hashes carry neither a request's salt nor its adapter: pages of one tenant would
be hits of another's (user report 4)."""
TOO_NEW = "0.6"
"""HiCache's interface moves with every release; 0.5.x after the tested one is let through."""


def check_version(found: str) -> None:
    """Refuse versions that the tests say nothing about.

    Raises:
        ImportError: too old or too new; the message has the range.
    """
    if not _release(TESTED) <= _release(found) < _release(TOO_NEW):
        raise ImportError(
            f"engine_adapter.sglang is tested with sglang {TESTED} and refuses versions before it "
            f"and from {TOO_NEW} on; this is {found}: pip install sglang=={TESTED}"
        )


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.5.23 of 0.5.23.post1."""
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def engine_facts() -> EngineFacts | None:
    """What this process's SGLang computes with, all defaults resolved; None outside of a server.

    Raises:
        ConfigError: this SGLang has other settings than the tested one.
    """
    from sglang.srt.runtime_context import get_context

    try:
        arguments = get_context().resolved_server_args_dict()
    except ValueError:  # "Global server args is not set yet!"
        return None
    return facts_of(arguments)


def facts_of(arguments: Mapping[str, Any]) -> EngineFacts:
    """What resolved ServerArgs say of the model.

    Args:
        arguments: All of them. Those that hicache.arguments does not know count as ones that change
            pages.

    Raises:
        ConfigError: a setting that matters is not there.
    """
    missing = COMPUTING.union(IDENTIFYING, CONTENTS, WEIGHTS_FROM_FILES).difference(arguments)
    if missing:
        raise ConfigError(
            f"kvtier: this SGLang has no setting {', '.join(sorted(missing))}, so what it computes "
            f"can't be told apart; sglang {TESTED} is tested"
        )
    adapters = [str(lora["lora_path"]) for lora in arguments["lora_paths"] or ()]
    if arguments["uno_lora_path"] is not None:
        adapters.append(arguments["uno_lora_path"])
    load_format = _text(arguments["load_format"])
    draft_format = arguments["speculative_draft_load_format"]
    return EngineFacts(
        model_path=arguments["model_path"],
        revision=arguments["revision"],
        download_dir=arguments["download_dir"],
        load_format=load_format,
        elsewhere=tuple(
            f"{name}={_text(arguments[name])}"
            for name, from_files in WEIGHTS_FROM_FILES.items()
            if _text(arguments[name]) != from_files
        ),
        arguments={
            name: _text(value) for name, value in arguments.items() if name not in NEVER_HASHED
        },
        contents={name: str(arguments[name]) for name in CONTENTS if arguments[name]},
        draft_model_path=arguments["speculative_draft_model_path"],
        draft_revision=arguments["speculative_draft_model_revision"],
        draft_load_format=load_format if draft_format is None else _text(draft_format),
        lora_paths=tuple(adapters),
    )


def _text(value: object) -> str:
    """Equal for equal settings, in every process: a set's own order differs between them."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, dict):
        return str(sorted((_text(key), _text(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return str(sorted(_text(item) for item in value))
    return str(value)


def weights_in_use() -> tuple[Any, ...]:
    """Equal as long as SGLang has not said that its weights were replaced; a cheap look."""
    from sglang.srt.runtime_context import get_context

    try:
        return tuple(get_context().config_leaf(name) for name in ("model_path", "weight_version"))
    except ValueError:  # Nothing is published outside of a server.
        return ()


class TransferStats:
    """What SGLang's metrics want of a backend: pages and GiB/s of each transfer since last asked.

    Bounded: of more than LONGEST transfers, the last ones.
    """

    LONGEST = 4096

    def __init__(self) -> None:
        # Only here: it imports much of the engine, and only a server with metrics needs it.
        from sglang.srt.observability.metrics_collector import StorageMetrics

        self._metrics = StorageMetrics
        self._reads: deque[tuple[int, float]] = deque(maxlen=self.LONGEST)
        self._writes: deque[tuple[int, float]] = deque(maxlen=self.LONGEST)

    def read(self, pages: int, page_bytes: int, seconds: float) -> None:
        """So many pages came, in this time."""
        if pages:
            self._reads.append((pages, pages * page_bytes / seconds / (1 << 30)))

    def wrote(self, pages: int, page_bytes: int, seconds: float) -> None:
        """So many pages went, in this time."""
        if pages:
            self._writes.append((pages, pages * page_bytes / seconds / (1 << 30)))

    def take(self) -> Any:
        """A StorageMetrics of what was not taken yet."""
        metrics = self._metrics()
        for held, pages, bandwidth in (
            (self._reads, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._writes, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            for _ in range(len(held)):
                count, gib_per_s = held.popleft()
                pages.append(count)
                bandwidth.append(gib_per_s)
        return metrics


try:
    check_version(version("sglang"))
except PackageNotFoundError as missing:
    raise ImportError(
        f"engine_adapter.sglang needs SGLang: pip install sglang=={TESTED}"
    ) from missing
