"""What a drop of a large namespace costs: when it takes effect, and how long loads wait meanwhile.

    python -m bench.drops [--json] [--blocks 100000] [--directory DIR]

A store of so many 4 KiB blocks in one namespace, and of some thousand in another, is built in
process. Then a real daemon on it loads single blocks of the other namespace from the SSD, one after
the other, before the drop and while the dropped blocks are reaped and deleted.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.common import percentile, progress, report, scratch_directory, ssd_settings
from bench.restart import BATCH_BLOCKS, BLOCK_BYTES, capacity_bytes, spec_of, store
from kvtier.client import Client
from kvtier.codec import choose_codec
from kvtier.errors import KvtierError
from kvtier.hashing import namespace_digest
from kvtier.process import DaemonProcess
from kvtier.tier.base import BlockMeta, NamespaceRow
from kvtier.tier.ssd import SsdTier
from kvtier.types import BlockHash, NamespaceSpec

PROMPT_BLOCKS = 100
LOADS = 1500
DROPPED, KEPT = spec_of(0), spec_of(1)


def prompts(spec: NamespaceSpec, blocks: int, prompt_blocks: int) -> Iterator[BlockMeta]:
    """Chains of prompt_blocks each."""
    digest = namespace_digest(spec)
    parent: BlockHash | None = None
    for number in range(blocks):
        depth = number % prompt_blocks
        above = parent if depth else None
        key = BlockHash(hashlib.sha256(digest + number.to_bytes(8, "little")).digest())
        yield BlockMeta(key, above, depth, digest, 0, (number + 1 << 24) - depth)
        parent = key


def build(directory: Path, blocks: int) -> list[BlockHash]:
    """Fill a new store; the hashes of the kept namespace, each a prompt of one block."""
    tier = SsdTier(
        directory,
        capacity_bytes=capacity_bytes(blocks),
        codec_of=choose_codec("raw"),
        durability="relaxed",
        max_batch_bytes=BATCH_BLOCKS * BLOCK_BYTES,
    )
    kept = list(prompts(KEPT, 2 * LOADS, 1))
    try:
        tier.commit(
            namespaces=[NamespaceRow(namespace_digest(spec), spec, 0) for spec in (DROPPED, KEPT)]
        )
        with ThreadPoolExecutor() as pool:
            metas = [*prompts(DROPPED, blocks, PROMPT_BLOCKS), *kept]
            for first in range(0, len(metas), BATCH_BLOCKS):
                store(tier, metas[first : first + BATCH_BLOCKS], pool)
    finally:
        tier.close()
    return [meta.hash for meta in kept]


def load_ms(client: Client, key: BlockHash) -> float:
    """From Acquire until a block that was on the SSD only is in RAM."""
    started_s = time.perf_counter()
    with client.acquire(KEPT, [key]) as lease:
        if lease.ssd_blocks != 1 or lease.wait(1, timeout_s=10.0) != 1:
            raise SystemExit("a block was not loaded from the SSD")
    return 1000 * (time.perf_counter() - started_s)


def measure(directory: Path, blocks: int) -> dict[str, float]:
    """All of it; see the module."""
    ssd = directory / "ssd"
    progress(f"building {blocks} blocks")
    keys = build(ssd, blocks)
    with (
        DaemonProcess(
            directory,
            **ssd_settings([ssd], capacity_bytes(blocks)),
            host_capacity_bytes="64MiB",
            ssd_codec="raw",
            ssd_batch_bytes=BATCH_BLOCKS * BLOCK_BYTES,
            ssd_scrub_bytes_per_s=0,
        ) as daemon,
        Client(daemon.address, raise_errors=True, acquire_timeout_s=5.0) as client,
        Client(daemon.address, raise_errors=True, acquire_timeout_s=5.0) as dropper,
        ThreadPoolExecutor(1) as other,
    ):
        client.wait_attached(30.0)
        dropper.wait_attached(30.0)
        stored = sum(shard.blocks for shard in client.stats().shards)
        progress("loading before")
        before = [load_ms(client, key) for key in keys[:LOADS]]
        progress("dropping, and loading meanwhile")
        started_s = time.perf_counter()
        drop = other.submit(dropper.drop_namespace, DROPPED)
        during = []
        reaped_s = 0.0
        for number, key in enumerate(keys[LOADS:]):
            during.append(load_ms(client, key))
            if number % 25 == 24:
                left = sum(shard.blocks for shard in client.stats().shards)
                if left <= stored - blocks:
                    reaped_s = time.perf_counter() - started_s
                    break
        dropped = drop.result().num_blocks
    if dropped != blocks:
        raise SystemExit(f"{dropped} of {blocks} blocks were dropped")
    return {
        "dropped_blocks": dropped,
        "load_p50_before_ms": percentile(before, 50),
        "load_p99_before_ms": percentile(before, 99),
        "load_p50_during_ms": percentile(during, 50),
        "load_p99_during_ms": percentile(during, 99),
        "load_max_during_ms": max(during),
        "loads_during": len(during),
        "reaped_s": reaped_s,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--blocks", type=int, default=100_000, help="of the dropped namespace")
    parser.add_argument("--directory", type=Path, help="where on the SSD; default: temporary files")
    arguments = parser.parse_args()
    with scratch_directory(arguments.directory) as directory:
        results = measure(directory, arguments.blocks)
    report(f"a drop, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    try:
        main()
    except KvtierError as error:
        raise SystemExit(str(error)) from error
