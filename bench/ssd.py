"""How close the SSD tier comes to the disk, through the real daemon and client.

    python -m bench.ssd [--json] [--runs 5] [--blocks 96] [--capacity 2GiB] [--directory DIR]

In one run, on one file system, interleaved, medians: plain files (raw_file.py) written + fdatasync
and read cold, buffered and with O_DIRECT, by 1, 2 and 4 threads; the same number of bytes put into
RAM and flushed until the daemon says durable (ssd_durability = full), and loaded cold into the
arena. Blocks are 4.5 MB and incompressible, the codec is raw; lossless is measured beside it on
latent-like blocks, in logical bytes. All space was written before. The bytes that the disk
delivered (/proc/diskstats) show that a read was cold.

    write_ratio, read_ratio   the tier's GB/s over those of the best way with plain files
    churn_ratio               steady state over fresh, mixed sizes, put and flush (ssd_churn.py)
    file_over_cap             whether `du` of the churned directory was ever above its capacity
    p99_load_ms               of loads of single blocks while others are written
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.common import (
    GB,
    chain,
    disk_read_bytes,
    drop_page_cache,
    medians,
    progress,
    random_blocks,
    report,
    scratch_directory,
    seconds,
    ssd_settings,
    v3_spec,
)
from bench.raw_file import RawFile
from bench.ssd_churn import measure as measure_churn
from kvtier.client import Client
from kvtier.codec.base import Bytes
from kvtier.process import DaemonProcess
from kvtier.sizes import parse_size
from kvtier.types import NamespaceSpec

COLD_SHARE = 0.85
FLUSH_TIMEOUT_S = 60.0
ATTACH_S = 30.0
LOADS = 400
SWITCH_S = 0.0005
"""So soon a thread that times a load gets the interpreter back from one that puts blocks."""


class SsdTierUnderTest:
    """The SSD tier behind a real daemon."""

    def __init__(self, directory: Path, codec: str, blocks: list[Bytes]) -> None:
        directory.mkdir()
        self._blocks = blocks
        self.spec = v3_spec(f"bench/ssd-{codec}")
        self.size_bytes = len(blocks) * self.spec.block_bytes
        capacity_bytes = 2 * self.size_bytes + (1 << 30)
        self._daemon = DaemonProcess(
            directory,
            **ssd_settings([directory / "ssd"], capacity_bytes),
            host_capacity_bytes=self.size_bytes + (64 << 20),
            ssd_codec=codec,
            ssd_durability="full",
            write_queue_bytes=self.size_bytes + (64 << 20),
            idle_write_after_s=3600,  # Only flush() writes, while it is timed.
        )
        self._client = self._connect()
        self._run = 0
        # Write the space that the timed runs reuse.
        for _ in range(1 + capacity_bytes // self.size_bytes):
            self.put()
            self.flush()
            self.forget()
        self.put()

    def _connect(self) -> Client:
        client = Client(self._daemon.address, raise_errors=True, acquire_timeout_s=1.0)
        client.wait_attached(ATTACH_S)
        if not client.mapped:
            raise SystemExit("the arena is not mapped")
        return client

    def put(self) -> None:
        """New blocks, into RAM."""
        self._run += 1
        self._hashes = chain(self.spec, len(self._blocks), seed=self._run)
        stored = self._client.put(self.spec, None, self._hashes, self._blocks)
        if stored != len(self._blocks):
            raise SystemExit(f"{stored} of {len(self._blocks)} blocks fitted into RAM")

    def flush(self) -> None:
        """Until the daemon says that all of them are durable."""
        durable = self._client.flush(self.spec, self._hashes, timeout_s=FLUSH_TIMEOUT_S)
        if not all(durable):
            raise SystemExit(f"{sum(durable)} of {len(durable)} blocks became durable")

    def forget(self) -> None:
        """Drop the blocks, so that their space is written again."""
        self._client.drop(self.spec, self._hashes)

    def make_cold(self) -> None:
        """Empty RAM (a new daemon) and the page cache of the store."""
        self._client.close()
        self._daemon.stop()
        drop_page_cache(self._daemon.ssd_directory)
        self._daemon.start()
        self._client = self._connect()
        self._client.lookup(self.spec, self._hashes)  # Opens the namespace.

    def load(self) -> None:
        """All blocks from the SSD into the arena."""
        with self._client.acquire(self.spec, self._hashes) as lease:
            if lease.ssd_blocks != len(self._hashes) or lease.wait(
                len(self._hashes), timeout_s=FLUSH_TIMEOUT_S
            ) != len(self._hashes):
                raise SystemExit(f"{lease.ssd_blocks} of {len(self._hashes)} blocks were on SSD")

    def verify(self) -> None:
        """Fail unless every byte comes back."""
        fresh = list(np.zeros((len(self._blocks), self.spec.block_bytes), dtype=np.uint8))
        got = self._client.get(self.spec, self._hashes, fresh)
        if got.num_blocks != len(fresh) or not all(map(np.array_equal, fresh, self._blocks)):
            raise SystemExit("wrong bytes")

    def close(self) -> None:
        """Stop the daemon."""
        self._client.close()
        self._daemon.close()


def cold(path: Path, expected_bytes: int, read: Callable[[], None]) -> float:
    """Seconds of a read; fails if the disk did not deliver the bytes."""
    before = disk_read_bytes(path)
    taken_s = seconds(read)
    after = disk_read_bytes(path)
    if before is not None and after is not None:
        delivered = after - before
        if delivered < COLD_SHARE * expected_bytes:
            raise SystemExit(f"not cold: the disk delivered {delivered} of {expected_bytes} bytes")
    return taken_s


def latent_blocks(spec: NamespaceSpec, blocks: int) -> list[Bytes]:
    """bf16 values distributed like normed latents, of another scale in each layer."""
    rng = np.random.default_rng(3)
    layers, tokens, width = spec.components[0].shape
    scales = np.exp(rng.uniform(-3, 2, (layers, 1, 1))).astype(np.float32)
    one = (rng.standard_normal((layers, tokens, width), dtype=np.float32) * scales).view(np.uint32)
    block = (one >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    return [block] * blocks


def run_once(directory: Path, raw: RawFile, tiers: dict[str, SsdTierUnderTest]) -> dict[str, float]:
    """One interleaved round."""
    result = {}
    for mode in raw.modes:
        result[f"raw_write_{mode}_gbps"] = raw.size_bytes / GB / seconds(raw.write, mode)
    for name, tier in tiers.items():
        result[f"{name}write_gbps"] = tier.size_bytes / GB / seconds(tier.flush)
    for mode in raw.modes:
        raw.drop_cache()
        taken_s = cold(directory, raw.size_bytes, partial(raw.read, mode))
        result[f"raw_read_{mode}_gbps"] = raw.size_bytes / GB / taken_s
    for name, tier in tiers.items():
        tier.make_cold()
        expected = tier.size_bytes if name == "ssd_" else tier.size_bytes // 4
        result[f"{name}read_gbps"] = tier.size_bytes / GB / cold(directory, expected, tier.load)
        tier.verify()
        tier.forget()
        tier.put()
    return result


def best(results: dict[str, float], prefix: str) -> float:
    """The highest of the results whose names start so."""
    return max(value for name, value in results.items() if name.startswith(prefix))


def measure_transfers(directory: Path, blocks: int, runs: int) -> dict[str, float]:
    """The tier's large writes and reads against plain files."""
    sources = random_blocks(v3_spec("raw"), blocks, seed=1)
    lossless = latent_blocks(v3_spec("lossless"), blocks)
    measured = []
    with ExitStack() as stack:
        raw = RawFile(directory / "plain-file", sum(block.size for block in sources))
        stack.callback(raw.close)
        tiers: dict[str, SsdTierUnderTest] = {}
        for name, codec, data in (
            ("ssd_", "raw", sources),
            ("ssd_lossless_", "lossless", lossless),
        ):
            progress(f"{codec}: writing all space once")
            tiers[name] = SsdTierUnderTest(directory / codec, codec, data)
            stack.callback(tiers[name].close)
        for run in range(runs):
            progress(f"run {run + 1}/{runs}")
            measured.append(run_once(directory, raw, tiers))
    results = medians(measured)
    ratios = {
        f"{way}_ratio": results[f"ssd_{way}_gbps"] / best(results, f"raw_{way}_")
        for way in ("write", "read")
    }
    return ratios | results


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs (median)")
    parser.add_argument("--blocks", type=int, default=96, help="4.5 MB blocks a run")
    parser.add_argument("--capacity", type=parse_size, default=2 << 30, help="of the churned tier")
    parser.add_argument("--directory", type=Path, help="where on the SSD; default: temporary files")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    with scratch_directory(arguments.directory) as directory:
        home = directory / "transfers"
        home.mkdir()
        results = measure_transfers(home, arguments.blocks, arguments.runs)
        shutil.rmtree(home)
        results |= measure_churn(directory / "churn", arguments.capacity, LOADS, progress)
    report(f"SSD tier against its disk, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
