"""How close the host tier comes to memcpy, through the real daemon and client.

    python -m bench.data_plane [--json] [--runs 9]

In one run, interleaved, medians: numpy's copy of the same blocks; put and get of 4.5 MB blocks, 64
and 16 a call; the same bytes inside gRPC messages; acquire and release of 2,048 resident hashes.
Every byte is verified once, outside the timing.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from bench.common import (
    GB,
    chain,
    medians,
    percentile,
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
from kvtier.types import BlockHash, Component, NamespaceSpec

BLOCKS = 64
FEW_BLOCKS = 16
RESIDENT = 2048
ACQUIRES = 200


def measure_copies(client: Client, streaming: Client, runs: int) -> dict[str, float]:
    """GB/s of memcpy, put, get and gRPC, interleaved."""
    spec = v3_spec("bench/data-plane")
    sources = random_blocks(spec, BLOCKS, seed=1)
    destinations = list(np.zeros((BLOCKS, spec.block_bytes), dtype=np.uint8))
    few_sources = sources[:FEW_BLOCKS]
    size = BLOCKS * spec.block_bytes / GB
    small = FEW_BLOCKS * spec.block_bytes / GB
    results = []
    for run in range(runs + 1):
        progress(f"copies {run}/{runs}")
        many = chain(spec, BLOCKS, seed=100 + run)
        few = chain(spec, FEW_BLOCKS, seed=10_000 + run)
        result = {
            "memcpy_gbps": size / seconds(copy, sources, destinations),
            "host_put_gbps": size / seconds(client.put, spec, None, many, sources),
            "host_get_gbps": size / seconds(client.get, spec, many, destinations),
            "host_put_16_gbps": small / seconds(client.put, spec, None, few, few_sources),
            "host_get_16_gbps": small / seconds(client.get, spec, few, destinations),
            "grpc_get_gbps": small / seconds(streaming.get, spec, few, destinations),
        }
        verify(client, spec, many, sources)
        client.drop(spec, many)
        client.drop(spec, few)
        if run:  # The first run warms page tables, channels and caches.
            results.append(result)
    return medians(results)


def copy(sources: list[Bytes], destinations: list[Bytes]) -> None:
    """The baseline: one numpy copy a block."""
    for source, destination in zip(sources, destinations, strict=True):
        np.copyto(destination, source)


def verify(
    client: Client, spec: NamespaceSpec, hashes: list[BlockHash], sources: list[Bytes]
) -> None:
    """Fail unless every byte comes back."""
    fresh = list(np.zeros((BLOCKS, spec.block_bytes), dtype=np.uint8))
    got = client.get(spec, hashes, fresh)
    if got.num_blocks != BLOCKS or not all(map(np.array_equal, fresh, sources)):
        raise SystemExit("wrong bytes")


def measure_acquires(client: Client) -> dict[str, float]:
    """Milliseconds of acquire + release of 2,048 resident hashes."""
    spec = NamespaceSpec("bench/acquire", "benchmark", (Component("tiny", "uint8", (64,)),))
    hashes = chain(spec, RESIDENT, seed=7)
    source = [np.zeros(64, dtype=np.uint8)] * RESIDENT
    if client.put(spec, None, hashes, source) != RESIDENT:
        raise SystemExit("the small blocks did not fit")

    def acquire_and_release() -> None:
        with client.acquire(spec, hashes) as lease:
            if lease.num_blocks != RESIDENT:
                raise SystemExit(f"{lease.num_blocks} of {RESIDENT} blocks acquired")

    acquire_and_release()
    times_ms = [1000 * seconds(acquire_and_release) for _ in range(ACQUIRES)]
    return {
        "acquire_2048_p50_ms": percentile(times_ms, 50),
        "acquire_2048_p99_ms": percentile(times_ms, 99),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--runs", type=int, default=9, help="interleaved runs (median)")
    arguments = parser.parse_args()
    with scratch_directory(None) as directory:
        daemon = DaemonProcess(directory, ssd=False, host_capacity_bytes="1GiB")
        with daemon:
            clients = {
                shared: Client(
                    daemon.address,
                    shared_memory=shared,
                    raise_errors=True,
                    acquire_timeout_s=1.0,
                )
                for shared in (True, False)
            }
            with clients[True] as client, clients[False] as streaming:
                if not client.mapped or streaming.mapped:
                    raise SystemExit("the arena is not mapped as it should be")
                results = measure_copies(client, streaming, arguments.runs)
                results |= measure_acquires(client)
    for key in ("host_put", "host_get", "host_put_16", "host_get_16"):
        results[f"{key}_ratio"] = results[f"{key}_gbps"] / results["memcpy_gbps"]
    report(f"data plane, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
