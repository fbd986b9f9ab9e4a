"""Exact replay of a public trace through the real store.

    python -m bench.replay TRACE --ram BLOCKS [--ssd BLOCKS] [--write-policy POLICY] [--json]

The store is the daemon's; clock and medium are fakes: transfers take no time. Per request: acquire
the longest cached prefix, let it load, reserve and commit the rest, release, finish. So a request's
blocks are used tail to head, and those of the running request don't leave. A block that is hit
counts for RAM if it is there, else for the SSD.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from bench.common import report
from bench.traces import read_trace
from kvtier.arena import DATA_OFFSET, ControlPage
from kvtier.hashing import namespace_digest
from kvtier.index import Block, Namespace
from kvtier.jobs import DeleteJob, LoadJob, WriteJob
from kvtier.policy.lru import Lru
from kvtier.store import StoreConfig, TieredStore
from kvtier.tier.base import TierUsage
from kvtier.types import BlockHash, Component, GroupId, Loss, NamespaceSpec, WritePolicy

BLOCK_BYTES = 4096
GROUP = GroupId(bytes(16))
EPOCH = bytes(range(16))
POLICIES: dict[str, type[Lru[Block]]] = {"lru": Lru}


class Replay:
    """A store, with a medium that answers at once."""

    def __init__(
        self, ram_blocks: int, ssd_blocks: int, write_policy: WritePolicy, policy: type[Lru[Block]]
    ) -> None:
        control = ControlPage(bytearray(DATA_OFFSET))
        control.format(DATA_OFFSET)
        control.epoch = EPOCH
        self._ssd_limit_bytes = ssd_blocks * BLOCK_BYTES
        self._stored: dict[BlockHash, int] = {}
        self.store = TieredStore(
            StoreConfig(
                host_bytes=ram_blocks * BLOCK_BYTES,
                write_policy=write_policy,
                write_queue_bytes=max(ram_blocks, 1) * BLOCK_BYTES,
            ),
            control=control,
            epoch=EPOCH,
            host_policy=policy(),
            ssd_policies=[policy()] if ssd_blocks else [],
            ssd_usages=[self._usage()] if ssd_blocks else [],
        )
        component = Component("block", "uint8", (BLOCK_BYTES,))
        spec = NamespaceSpec("replay", "trace", (component,))
        self._namespace: Namespace = self.store.open_namespace(namespace_digest(spec), spec)
        self.hit_blocks = 0
        self.total_blocks = 0

    def request(self, block_ids: list[int]) -> None:
        """Serve one request."""
        store = self.store
        hashes = [BlockHash(block.to_bytes(32, "little")) for block in block_ids]
        self.total_blocks += len(hashes)
        self._make_room(store.reads.lookup(self._namespace, hashes).ssd_blocks)
        lease, _ = store.reads.acquire(self._namespace, hashes, group=GROUP, now_s=0.0)
        self._settle()
        hit = len(lease.copies) if lease is not None else 0
        self.hit_blocks += hit
        if hit < len(hashes):
            self._store_rest(hashes, hit)
        if lease is not None:
            store.reads.release(lease.id, GROUP)
        store.finish(self._namespace, hashes[-1])

    def _store_rest(self, hashes: list[BlockHash], hit: int) -> None:
        missing = hashes[hit:]
        self._make_room(len(missing))
        parent = hashes[hit - 1] if hit else None
        reserved = self.store.writes.reserve(
            self._namespace, parent, missing, group=GROUP, now_s=0.0
        )
        if reserved.lease is not None:
            self.store.writes.commit(reserved.lease.id, GROUP, 0.0)
        self._settle()

    def _make_room(self, blocks: int) -> None:
        """Let unwritten blocks in the way reach the SSD, so that the coldest ones leave RAM."""
        while self.store.tiers.start_demotions(blocks * BLOCK_BYTES, 0.0):
            self._settle()

    def _settle(self) -> None:
        """Everything the store wants done is done."""
        tiers = self.store.tiers
        for job in self.store.take_jobs():
            if isinstance(job, LoadJob):
                self.store.reads.loaded(job, BLOCK_BYTES, None)
            elif isinstance(job, WriteJob):
                self._stored[job.meta.hash] = BLOCK_BYTES
                tiers.ssd_committed(job.shard, self._usage())
                tiers.written(
                    job, 0.0, stored_bytes=BLOCK_BYTES, segment=0, loss=Loss.EXACT, error=None
                )
            elif isinstance(job, DeleteJob):
                self._stored.pop(job.hash, None)
                tiers.ssd_committed(job.shard, self._usage())
                tiers.deleted(job)

    def _usage(self) -> TierUsage:
        used_bytes = len(self._stored) * BLOCK_BYTES
        return TierUsage(used_bytes, used_bytes, self._ssd_limit_bytes, len(self._stored))

    def results(self) -> dict[str, float]:
        """Counts so far."""
        counters = self.store.counters
        return {
            "hit_blocks": self.hit_blocks,
            "total_blocks": self.total_blocks,
            "ram_hit_blocks": counters.host_hit_blocks,
            "ssd_hit_blocks": counters.ssd_hit_blocks,
            "ssd_written_blocks": counters.ssd_written_blocks,
            "skipped_by_admission_blocks": counters.skipped_by_admission_blocks,
        }


def replay(
    requests: Iterable[list[int]],
    ram_blocks: int,
    ssd_blocks: int = 0,
    write_policy: WritePolicy = WritePolicy.LAZY,
    policy: str = "lru",
) -> dict[str, float]:
    """Replay requests; see results()."""
    run = Replay(ram_blocks, ssd_blocks, write_policy, POLICIES[policy])
    for block_ids in requests:
        if block_ids:
            run.request(block_ids)
    return run.results()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="Mooncake JSONL or delta text, plain or .zst")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="lru")
    parser.add_argument("--ram", type=int, required=True, help="blocks that RAM holds")
    parser.add_argument("--ssd", type=int, default=0, help="blocks that the SSD holds; 0: no SSD")
    parser.add_argument(
        "--write-policy", choices=[p.value for p in WritePolicy], default=WritePolicy.LAZY.value
    )
    parser.add_argument("--json", action="store_true", help="one JSON line")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if arguments.ram < 1 or arguments.ssd < 0:
        parser.error("--ram must be at least 1, --ssd at least 0")
    try:
        requests = list(read_trace(arguments.trace))
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    results = replay(
        track(requests, "replaying", console=console, transient=True),
        arguments.ram,
        arguments.ssd,
        WritePolicy(arguments.write_policy),
        arguments.policy,
    )
    if arguments.json:
        print(json.dumps(results))
        return
    results["block_hit_rate"] = results["hit_blocks"] / max(1, results["total_blocks"])
    report(f"{arguments.trace.name}, {arguments.policy}", results, as_json=False)


if __name__ == "__main__":
    main()
