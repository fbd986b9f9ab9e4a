"""What the benchmarks share: medians of interleaved runs, block data, disks, output."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtier.codec.base import Bytes
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.types import BlockHash, Component, NamespaceSpec, RopeSpec

GB = 1e9
DU_PAUSE_S = 0.005
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


def ssd_settings(directories: Sequence[Path], capacity_bytes: int) -> dict[str, Any]:
    """Settings of an SSD tier in these directories, of so many bytes each."""
    return {
        "ssd_directories": ",".join(map(str, directories)),
        "ssd_capacity_bytes": capacity_bytes,
    }


def drop_page_cache(directory: Path) -> None:
    """Make what is read from the files below `directory` come from the disk, once."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)  # Dirty pages would stay.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_read_bytes(path: Path) -> int | None:
    """Bytes that the disk under `path` has delivered since boot; None if it can't be told."""
    device = path.stat().st_dev
    wanted = [str(os.major(device)), str(os.minor(device))]
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if fields[:2] == wanted:
            return int(fields[5]) * 512
    return None


def disk_usage_bytes(directory: Path) -> int:
    """What `du` says of a directory: blocks of its files and of the directories themselves."""
    total = 0
    pending = [directory]
    while pending:
        path = pending.pop()
        try:
            total += path.stat().st_blocks * 512
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue  # Gone meanwhile.
    return total


class DuSampler:
    """Watches `du` of some directories in a thread of its own. Context manager.

    Attributes:
        samples: Looks so far.
        over: Looks that found a directory above its capacity.
        highest_bytes: The most that any directory had.
    """

    def __init__(self, directories: Sequence[Path], capacity_bytes: int) -> None:
        """`capacity_bytes` is each directory's."""
        self.samples = self.over = self.highest_bytes = 0
        self._directories = directories
        self._capacity_bytes = capacity_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="du")

    def __enter__(self) -> DuSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            for directory in self._directories:
                used_bytes = disk_usage_bytes(directory)
                self.samples += 1
                self.over += used_bytes > self._capacity_bytes
                self.highest_bytes = max(self.highest_bytes, used_bytes)
            if self._stop.wait(DU_PAUSE_S):
                return


def report(title: str, results: Mapping[str, float], *, as_json: bool) -> None:
    """Print results: a table for people, or one JSON line."""
    if as_json:
        print(json.dumps({key: _rounded(value, 4) for key, value in results.items()}))
        return
    table = Table(title=title)
    table.add_column("measure")
    table.add_column("value", justify="right")
    for key, value in results.items():
        table.add_row(key, str(_rounded(value, 3)))
    Console().print(table)


def _rounded(value: float, digits: int) -> float:
    """Truth values and whole numbers stay what they are."""
    return value if isinstance(value, int) else round(value, digits)


def progress(message: str) -> None:
    """A line of progress, on standard error."""
    print(message, file=sys.stderr, flush=True)
