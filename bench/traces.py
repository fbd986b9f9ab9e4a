"""Public request traces as sequences of block ids.

Two formats, plain or .zst:

    Mooncake JSONL   an object a line; `hash_ids` are the request's blocks, first block first
                     (kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0)
    delta text       `ts_ms session in_len out_len keep [start count]*` a line: the first `keep`
                     blocks of this session's request before, then runs of consecutive ids

An id names a block with its whole prefix, so equal ids are equal blocks.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import zstandard


def read_trace(path: Path) -> Iterator[list[int]]:
    """Yield the block ids of each request, in file order.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is of neither format; the message has its number.
    """
    sessions: dict[str, list[int]] = {}
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _from_json(line) if line.startswith("{") else _from_delta(line, sessions)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a trace: {error!r}") from error


def _open(path: Path) -> TextIO:
    if path.suffix != ".zst":
        return path.open(encoding="utf-8")
    stream = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True)
    return io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8")


def _from_json(line: str) -> list[int]:
    return [int(block) for block in json.loads(line)["hash_ids"]]


def _from_delta(line: str, sessions: dict[str, list[int]]) -> list[int]:
    _, session, _, _, keep, *runs = line.split()
    blocks = sessions.get(session, [])[: int(keep)]
    if len(blocks) < int(keep):
        raise ValueError(f"keeps {keep} blocks of a request that had {len(blocks)}")
    for start, count in zip(runs[::2], runs[1::2], strict=True):
        blocks.extend(range(int(start), int(start) + int(count)))
    sessions[session] = blocks
    return blocks
