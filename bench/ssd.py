"""How close the SSD tier comes to the disk, through the real daemon and client.

    python -m bench.ssd [--json] [--runs 5] [--blocks 96] [--directory DIR]

In one run, on one file system, interleaved, medians: one file written sequentially + fdatasync, and
read cold by four threads; the same bytes put into RAM and flushed until the daemon says durable
(ssd_durability = full), and loaded cold into the arena. Blocks are 4.5 MB and incompressible, the
codec is raw; lossless is measured beside it on latent-like blocks, in logical bytes. All space was
written before. The bytes that the disk delivered (/proc/diskstats) show that a read was cold.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.common import (
    GB,
    chain,
    medians,
    progress,
    random_blocks,
    report,
    scratch_directory,
    seconds,
    v3_spec,
)
from kvtier.client import Client
from kvtier.codec.base import Bytes
from kvtier.process import DaemonProcess
from kvtier.types import NamespaceSpec

READ_THREADS = 4
READ_BYTES = 4 << 20
COLD_SHARE = 0.85
FLUSH_TIMEOUT_S = 60.0


class RawFile:
    """The disk as a file sees it."""

    def __init__(self, path: Path, blocks: list[Bytes]) -> None:
        self._blocks = blocks
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._buffers = [np.zeros(READ_BYTES, dtype=np.uint8) for _ in range(READ_THREADS)]
        self.size_bytes = sum(block.size for block in blocks)
        self.write()

    def write(self) -> None:
        """Sequentially, then fdatasync."""
        at = 0
        for block in self._blocks:
            at += os.pwrite(self._descriptor, block.data, at)
        os.fdatasync(self._descriptor)

    def drop_cache(self) -> None:
        """Make the next read() come from the disk."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> None:
        """All of it, by READ_THREADS threads."""
        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(self._read_share, range(READ_THREADS)))

    def _read_share(self, thread: int) -> None:
        buffer = self._buffers[thread].data
        step = READ_BYTES * READ_THREADS
        for at in range(thread * READ_BYTES, self.size_bytes, step):
            os.preadv(self._descriptor, [buffer], at)


class SsdTierUnderTest:
    """The SSD tier behind a real daemon."""

    def __init__(self, directory: Path, codec: str, blocks: list[Bytes]) -> None:
        directory.mkdir()
        self._blocks = blocks
        self.spec = v3_spec(f"bench/ssd-{codec}")
        self.size_bytes = len(blocks) * self.spec.block_bytes
        self._daemon = DaemonProcess(
            directory,
            host_capacity_bytes=self.size_bytes + (64 << 20),
            ssd_capacity_bytes=3 * self.size_bytes + (512 << 20),
            ssd_codec=codec,
            ssd_durability="full",
            write_queue_bytes=self.size_bytes + (64 << 20),
            idle_write_after_s=3600,  # Only flush() writes, while it is timed.
        )
        self._client = self._connect()
        self._run = 0
        for _ in range(2):  # Write the space that the timed runs reuse.
            self.put()
            self.flush()
            self.forget()
        self.put()

    def _connect(self) -> Client:
        client = Client(self._daemon.address, raise_errors=True, acquire_timeout_s=1.0)
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
        self._daemon.kill()
        for path in self._daemon.ssd_directory.rglob("data.mdb"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
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


def disk_read_bytes(path: Path) -> int | None:
    """Bytes that the disk under `path` has delivered since boot; None if it can't be told."""
    device = path.stat().st_dev
    wanted = [str(os.major(device)), str(os.minor(device))]
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if fields[:2] == wanted:
            return int(fields[5]) * 512
    return None


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
    result = {"raw_write_gbps": raw.size_bytes / GB / seconds(raw.write)}
    for name, tier in tiers.items():
        result[f"{name}write_gbps"] = tier.size_bytes / GB / seconds(tier.flush)
    raw.drop_cache()
    result["raw_read_gbps"] = raw.size_bytes / GB / cold(directory, raw.size_bytes, raw.read)
    for name, tier in tiers.items():
        tier.make_cold()
        expected = tier.size_bytes if name == "ssd_" else tier.size_bytes // 4
        result[f"{name}read_gbps"] = tier.size_bytes / GB / cold(directory, expected, tier.load)
        tier.verify()
        tier.forget()
        tier.put()
    return result


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs (median)")
    parser.add_argument("--blocks", type=int, default=96, help="4.5 MB blocks a run")
    parser.add_argument("--directory", type=Path, help="where on the SSD; default: temporary files")
    arguments = parser.parse_args()
    with scratch_directory(arguments.directory) as directory:
        blocks = random_blocks(v3_spec("raw"), arguments.blocks, seed=1)
        raw = RawFile(directory / "raw", blocks)
        lossless = latent_blocks(v3_spec("lossless"), arguments.blocks)
        tiers: dict[str, SsdTierUnderTest] = {}
        try:
            tiers["ssd_"] = SsdTierUnderTest(directory / "raw-codec", "raw", blocks)
            tiers["ssd_lossless_"] = SsdTierUnderTest(directory / "lossless", "lossless", lossless)
            runs = []
            for run in range(arguments.runs):
                progress(f"run {run + 1}/{arguments.runs}")
                runs.append(run_once(directory, raw, tiers))
        finally:
            for tier in tiers.values():
                tier.close()
    results = medians(runs)
    results["write_ratio"] = results["ssd_write_gbps"] / results["raw_write_gbps"]
    results["read_ratio"] = results["ssd_read_gbps"] / results["raw_read_gbps"]
    report(f"SSD tier against its disk, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
