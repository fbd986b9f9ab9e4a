"""How soon a daemon knows what its SSD holds, and what that knowledge weighs.

    python -m bench.restart [--blocks 100000 1000000] [--runs 3] [--directory DIR] [--json]

Fills a store with 4 KiB blocks: prompts of 1 to 2,000 blocks (median 60), half of them branching
off an earlier one, in eight namespaces. Closes it cleanly, drops its files out of the page cache
and starts a real daemon on it. Per number of blocks, e.g. 100k and 1m, medians of the runs:

    index_100k_s    from the start of the process until a Lookup hits a whole prompt on the SSD,
                    less the same time of a daemon with an empty store
    bytes_per_block_100k
                    anonymous memory (RssAnon) of that daemon, less that of the one with an empty
                    store, over the blocks; bytes_per_block is the largest store's

Beside them: start_100k_s and rss_100k_mb without anything taken off, start_empty_s and
rss_empty_mb, cpu_100k_s (what the start took of the cores, which other work does not lengthen),
read_100k_mb (what the disk delivered meanwhile), and build_100k_s.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.common import (
    disk_read_bytes,
    drop_page_cache,
    medians,
    progress,
    report,
    scratch_directory,
    seconds,
    ssd_settings,
)
from kvtier.client import Client
from kvtier.codec import choose_codec
from kvtier.codec.base import Bytes
from kvtier.hashing import namespace_digest
from kvtier.index import STAMP_STRIDE
from kvtier.process import DaemonProcess
from kvtier.tier.base import BlockMeta, NamespaceRow, WrittenBlock
from kvtier.tier.ssd import SsdTier
from kvtier.types import BlockHash, Component, Loss, NamespaceSpec

BLOCK_BYTES = 4096
BATCH_BLOCKS = 8192
NAMESPACES = 8
MEDIAN_PROMPT_BLOCKS, LONGEST_PROMPT_BLOCKS = 60, 2000
WRITE_THREADS = 4
BLOCKS_A_TASK = 64
SETTLE_S = 0.5
ATTACH_S = 30.0
MB = 1e6


def spec_of(number: int) -> NamespaceSpec:
    """A namespace with blocks of BLOCK_BYTES."""
    component = Component("latent_rope", "uint8", (1, 64, BLOCK_BYTES // 64))
    return NamespaceSpec(f"bench/restart-{number}", "benchmark", (component,))


def prompts(blocks: int, namespaces: int, seed: int) -> Iterator[list[BlockMeta]]:
    """New blocks of one prompt after the other, `blocks` in all.

    Lengths are lognormal; every second prompt continues an earlier one of its namespace from some
    block of it on.
    """
    rng = np.random.default_rng(seed)
    digests = [namespace_digest(spec_of(number)) for number in range(namespaces)]
    earlier: list[list[list[BlockMeta]]] = [[] for _ in digests]
    tick = made = 0
    while made < blocks:
        tick += 1
        home = int(rng.integers(namespaces))
        length = int(np.clip(rng.lognormal(np.log(MEDIAN_PROMPT_BLOCKS), 1.0), 1, None))
        length = min(length, LONGEST_PROMPT_BLOCKS, blocks - made)
        last: BlockMeta | None = None
        if earlier[home] and rng.random() < 0.5:
            other = earlier[home][int(rng.integers(len(earlier[home])))]
            last = other[int(rng.integers(len(other)))]
        new = []
        for index in range(length):
            depth = 0 if last is None else last.depth + 1
            parent = None if last is None else last.hash
            key = hashlib.sha256((parent or b"") + f"{seed}/{made + index}".encode()).digest()
            stamp = (tick + 1) * STAMP_STRIDE - 1 - depth
            last = BlockMeta(BlockHash(key), parent, depth, digests[home], 0, stamp)
            new.append(last)
        made += length
        earlier[home].append(new)
        yield new


def content(key: BlockHash) -> Bytes:
    """(BLOCK_BYTES,) uint8 that name their block."""
    return np.frombuffer(key * (BLOCK_BYTES // len(key)), dtype=np.uint8)


def capacity_bytes(blocks: int) -> int:
    """Room for so many blocks with their rows, the batches under way and whole segments."""
    return (1 << 30) + 2 * blocks * BLOCK_BYTES


def build(directory: Path, blocks: int, console: Console) -> list[BlockHash]:
    """Fill a new store and close it cleanly; the hashes of a whole prompt that is in it."""
    tier = SsdTier(
        directory,
        capacity_bytes=capacity_bytes(blocks),
        codec_of=choose_codec("raw"),
        durability="relaxed",
        max_batch_bytes=BATCH_BLOCKS * BLOCK_BYTES,
    )
    rows = [NamespaceRow(namespace_digest(s), s, 0) for s in map(spec_of, range(NAMESPACES))]
    whole: list[BlockHash] = []

    def metas() -> Iterator[BlockMeta]:
        for new in prompts(blocks, NAMESPACES, seed=blocks):
            if new[0].parent is None and new[0].namespace == rows[0].digest:
                whole[:] = [meta.hash for meta in new]
            yield from new

    source = metas()
    try:
        tier.commit(namespaces=rows)
        with ThreadPoolExecutor(WRITE_THREADS) as pool:
            for _ in track(
                range(-(-blocks // BATCH_BLOCKS)),
                f"building {blocks} blocks",
                console=console,
                transient=True,
            ):
                store(tier, list(islice(source, BATCH_BLOCKS)), pool)
        found = tier.usage().blocks
    finally:
        tier.close()
    if found != blocks:
        raise SystemExit(f"the store has {found} blocks instead of {blocks}")
    if not whole:
        raise SystemExit(f"--blocks {blocks} is too few: no prompt to look for")
    return whole


def store(tier: SsdTier, metas: Sequence[BlockMeta], pool: ThreadPoolExecutor) -> None:
    """One batch."""
    tasks = [metas[at : at + BLOCKS_A_TASK] for at in range(0, len(metas), BLOCKS_A_TASK)]

    def write(task: Sequence[BlockMeta]) -> list[WrittenBlock]:
        prepared = [tier.prepare(meta, content(meta.hash), Loss.EXACT) for meta in task]
        return [tier.write(block) for block in prepared]

    tier.commit(writes=[block for done in pool.map(write, tasks) for block in done])


@dataclass(frozen=True, slots=True)
class Store:
    """A closed store to start daemons on.

    Attributes:
        label: For the keys of the results: "100k".
        home: The daemon's directory.
        blocks: In the store.
        prompt: Hashes of a prompt in it; of none in an empty one.
        daemon: Stopped.
    """

    label: str
    home: Path
    blocks: int
    prompt: list[BlockHash]
    daemon: DaemonProcess

    def measure(self) -> dict[str, float]:
        """Start the daemon cold, until a Lookup is answered, and stop it."""
        drop_page_cache(self.daemon.ssd_directory)
        before = disk_read_bytes(self.home)
        started_s = time.perf_counter()
        self.daemon.start()
        with Client(self.daemon.address, raise_errors=True, acquire_timeout_s=10.0) as client:
            client.wait_attached(ATTACH_S)
            asked = self.prompt or [BlockHash(bytes(32))]
            found = client.lookup(spec_of(0), asked).num_blocks
            taken_s = time.perf_counter() - started_s
            after = disk_read_bytes(self.home)
            used_s = cpu_s(self.daemon.pid)
            if found != len(self.prompt):
                raise SystemExit(f"{found} of {len(self.prompt)} blocks are there")
            self._compare(client)
        time.sleep(SETTLE_S)
        results = {
            f"start_{self.label}_s": taken_s,
            f"cpu_{self.label}_s": used_s,
            f"rss_{self.label}_mb": anonymous_bytes(self.daemon.pid) / MB,
        }
        if before is not None and after is not None:
            results[f"read_{self.label}_mb"] = (after - before) / MB
        self.daemon.stop()
        return results

    def _compare(self, client: Client) -> None:
        destinations = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in self.prompt]
        if client.get(spec_of(0), self.prompt, destinations).num_blocks != len(self.prompt):
            raise SystemExit("not all blocks came")
        if not all(map(np.array_equal, destinations, map(content, self.prompt))):
            raise SystemExit("wrong bytes")


def make_store(base: Path, blocks: int, console: Console) -> tuple[Store, float]:
    """A store of so many blocks, and the seconds it took to build it."""
    label = label_of(blocks)
    home = base / label
    home.mkdir()
    directory = home / "ssd"
    prompt: list[BlockHash] = []
    build_s = seconds(lambda: prompt.extend(build(directory, blocks, console))) if blocks else 0.0
    daemon = DaemonProcess(
        home,
        **ssd_settings([directory], capacity_bytes(blocks)),
        host_capacity_bytes="64MiB",
        ssd_codec="raw",
        ssd_batch_bytes=BATCH_BLOCKS * BLOCK_BYTES,
    )
    daemon.stop()
    return Store(label, home, blocks, prompt, daemon), build_s


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: its memory without mapped files and shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel has no RssAnon")


def cpu_s(pid: int) -> float:
    """Seconds of the cores that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def label_of(blocks: int) -> str:
    """100000 -> "100k", 1000000 -> "1m", 0 -> "empty"."""
    if not blocks:
        return "empty"
    for size, unit in ((10**6, "m"), (10**3, "k")):
        if blocks % size == 0:
            return f"{blocks // size}{unit}"
    return str(blocks)


def differences(results: dict[str, float], blocks: Sequence[int]) -> dict[str, float]:
    """What a store of each size costs beyond an empty one."""
    costs = {}
    for count in blocks:
        label = label_of(count)
        costs[f"index_{label}_s"] = results[f"start_{label}_s"] - results["start_empty_s"]
        extra_bytes = (results[f"rss_{label}_mb"] - results["rss_empty_mb"]) * MB
        costs[f"bytes_per_block_{label}"] = extra_bytes / count
    costs["bytes_per_block"] = costs[f"bytes_per_block_{label_of(max(blocks))}"]
    return costs


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=3, help="interleaved starts (median)")
    parser.add_argument("--directory", type=Path, help="where on the SSD; default: temporary files")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    arguments = parser.parse_args()
    if min(arguments.blocks) < 1:
        parser.error("--blocks must be at least 1")
    console = Console(stderr=True)
    stores: list[Store] = []
    built: dict[str, float] = {}
    runs = []
    with scratch_directory(arguments.directory) as directory:
        try:
            for blocks in [0, *arguments.blocks]:
                made, build_s = make_store(directory, blocks, console)
                stores.append(made)
                if blocks:
                    built[f"build_{made.label}_s"] = build_s
            for run in range(arguments.runs):
                progress(f"start {run + 1}/{arguments.runs}")
                results: dict[str, float] = {}
                for made in stores:
                    results |= made.measure()
                runs.append(results)
        finally:
            for made in stores:
                made.daemon.close()
    measured = medians(runs)
    results = differences(measured, arguments.blocks) | measured | built
    report(f"restart, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
