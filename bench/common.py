"""What the benchmarks share: medians of interleaved runs, block data, output."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtier.codec.base import Bytes
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.types import BlockHash, Component, NamespaceSpec, RopeSpec

GB = 1e9
P = ParamSpec("P")


def v3_spec(model_id: str, block_tokens: int = 64) -> NamespaceSpec:
    """DeepSeek-V3 geometry: 61 layers of 576-wide bf16 records, 4,497,408 B a 64-token block."""
    return NamespaceSpec(
        model_id=model_id,
        weights_revision="benchmark",
        components=(Component("latent_rope", "bfloat16", (61, block_tokens, 576)),),
        rope=RopeSpec("interleaved", 64),
        block_tokens=block_tokens,
    )


def chain(spec: NamespaceSpec, blocks: int, seed: int) -> list[BlockHash]:
    """Hashes of a random prompt of that many blocks."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 17, blocks * spec.block_tokens)
    return block_hashes(root_hash(namespace_digest(spec)), tokens.tolist(), spec.block_tokens)


def random_blocks(spec: NamespaceSpec, blocks: int, seed: int) -> list[Bytes]:
    """Incompressible blocks, one after the other in one buffer."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 63, blocks * spec.block_bytes // 8, dtype=np.uint64)
    return list(words.view(np.uint8).reshape(blocks, spec.block_bytes))


def seconds(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> float:
    """How long `work` takes once."""
    started_s = time.perf_counter()
    work(*args, **kwargs)
    return time.perf_counter() - started_s


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median of each key over interleaved runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed."""
    return float(np.percentile(np.asarray(values), percent))


@contextmanager
def scratch_directory(base: Path | None) -> Iterator[Path]:
    """An empty directory under `base` (None: the default for temporary files), removed after."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=base) as path:
        yield Path(path)


def report(title: str, results: dict[str, float], *, as_json: bool) -> None:
    """Print results: a table for people, or one JSON line."""
    if as_json:
        print(json.dumps({key: round(value, 4) for key, value in results.items()}))
        return
    table = Table(title=title)
    table.add_column("measure")
    table.add_column("median", justify="right")
    for key, value in results.items():
        table.add_row(key, f"{value:.3f}")
    Console().print(table)


def progress(message: str) -> None:
    """A line of progress, on standard error."""
    print(message, file=sys.stderr, flush=True)
