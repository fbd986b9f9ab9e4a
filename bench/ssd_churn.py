"""The SSD tier in steady state: mixed sizes, overwritten many times, read meanwhile.

Prompts of eight blocks in five namespaces (0.25 to 4.5 MB a block) are put and flushed through a
real daemon (`full`, codec raw), a group at a time:

    once over the capacity, so that all space was written before;
    fresh: everything is dropped, and the SSD filled until it starts to evict (median of three);
    the capacity ten times over; steady: the last three of them (median);
    then on, while another thread loads single blocks that are on the SSD only, one after the other.

`du` of the directory is watched all the time.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.common import (
    GB,
    DuSampler,
    chain,
    percentile,
    random_blocks,
    ssd_settings,
    v3_spec,
)
from kvtier.client import Client
from kvtier.codec.base import Bytes
from kvtier.process import DaemonProcess
from kvtier.types import BlockHash, NamespaceSpec
from kvtier.v1 import cache_pb2 as pb

BLOCK_TOKENS = (64, 32, 16, 8, 4)
"""Of the namespaces: blocks of 4.5, 2.2, 1.1, 0.56 and 0.28 MB."""
PROMPT_BLOCKS = 8
OVERWRITES = 10
REPEATS = 3
HOST_BYTES = 256 << 20
BATCH_BYTES = 16 << 20
RECENT_SHARE = 0.5
"""Loads are of the newest blocks of this share of the capacity, which have not been evicted yet."""
FLUSH_S = 60.0
EMPTY_S = 30.0
EMPTY_SHARE = 0.001
LOADING_S = 30.0
ATTACH_S = 30.0


@dataclass(slots=True)
class Amount:
    """What was written, and how long it took.

    Attributes:
        size_bytes: Of the blocks.
        put_s: Into RAM.
        flush_s: From there to the disk.
    """

    size_bytes: int = 0
    put_s: float = 0.0
    flush_s: float = 0.0

    def gbps(self) -> float:
        """Put and flush together."""
        return self.size_bytes / GB / (self.put_s + self.flush_s)

    def flush_gbps(self) -> float:
        """Flush alone."""
        return self.size_bytes / GB / self.flush_s


class Churn:
    """A daemon, and prompts that overwrite its SSD. Context manager.

    Attributes:
        capacity_bytes: Of the SSD tier.
        du: Watches its directory.
        recent: (namespace, hash) of the first blocks of prompts that are not old enough to be
            evicted; another tuple after each group.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Start the daemon in `directory`, which is made."""
        directory.mkdir()
        store = directory / "ssd"
        self.capacity_bytes = capacity_bytes
        self.recent: tuple[tuple[NamespaceSpec, BlockHash], ...] = ()
        self._specs = [v3_spec(f"bench/churn-{n}", block_tokens=n) for n in BLOCK_TOKENS]
        self._sources = [random_blocks(s, PROMPT_BLOCKS, seed=1) for s in self._specs]
        self._group_bytes = sum(spec.block_bytes for spec in self._specs) * PROMPT_BLOCKS
        self._prompts = 0
        with ExitStack() as stack:
            self._daemon = stack.enter_context(
                DaemonProcess(
                    directory,
                    **ssd_settings([store], capacity_bytes),
                    host_capacity_bytes=HOST_BYTES,
                    ssd_codec="raw",
                    ssd_durability="full",
                    ssd_batch_bytes=BATCH_BYTES,
                    idle_write_after_s=3600,  # Only flush() writes, while it is timed.
                )
            )
            self._client = stack.enter_context(self.connect())
            self.du = stack.enter_context(DuSampler([store], capacity_bytes))
            self._closing = stack.pop_all()

    def __enter__(self) -> Churn:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def connect(self) -> Client:
        """A client that raises where a call fails."""
        client = Client(self._daemon.address, raise_errors=True, acquire_timeout_s=5.0)
        client.wait_attached(ATTACH_S)
        return client

    def write(self, enough: Callable[[Amount], bool]) -> Amount:
        """Put and flush one group after the other, a prompt of each size, until it is enough."""
        amount = Amount()
        while not enough(amount):
            prompts = [self._next(number) for number in range(len(self._specs))]
            started_s = time.perf_counter()
            for spec, hashes, sources in prompts:
                self._put(spec, hashes, sources)
            put_s = time.perf_counter()
            for spec, hashes, _ in prompts:
                self._client.flush(spec, hashes, timeout_s=0.0)  # One queue for all of them.
            for spec, hashes, _ in prompts:
                if not all(self._client.flush(spec, hashes, timeout_s=FLUSH_S)):
                    raise SystemExit("blocks did not become durable")
            amount.flush_s += time.perf_counter() - put_s
            amount.put_s += put_s - started_s
            amount.size_bytes += self._group_bytes
            groups = round(RECENT_SHARE * self.capacity_bytes / self._group_bytes)
            firsts = tuple((spec, hashes[0]) for spec, hashes, _ in prompts)
            self.recent = (*self.recent, *firsts)[-groups * len(firsts) :]
        return amount

    def _next(self, number: int) -> tuple[NamespaceSpec, list[BlockHash], list[Bytes]]:
        self._prompts += 1
        spec = self._specs[number]
        return spec, chain(spec, PROMPT_BLOCKS, seed=self._prompts), self._sources[number]

    def _put(
        self, spec: NamespaceSpec, hashes: Sequence[BlockHash], sources: Sequence[Bytes]
    ) -> None:
        stored = self._client.put(spec, None, hashes, sources, wait_s=FLUSH_S)
        if stored != len(hashes):
            raise SystemExit(f"{stored} of {len(hashes)} blocks fitted into RAM")

    def evicted_blocks(self) -> float:
        """What the SSD tier has evicted since the daemon started."""
        return self._client.stats().counters["ssd_evicted_blocks"]

    def empty(self) -> None:
        """Drop everything, and wait until its room is free."""
        for spec in self._specs:
            self._client.drop_namespace(spec)
        self.recent = ()
        deadline_s = time.monotonic() + EMPTY_S
        while (used_bytes := self._used_bytes()) > EMPTY_SHARE * self.capacity_bytes:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"all was dropped, but {used_bytes} bytes of the SSD are in use")
            time.sleep(0.05)

    def _used_bytes(self) -> int:
        [ssd] = [tier for tier in self._client.stats().tiers if tier.tier == pb.TIER_SSD]
        return ssd.used_bytes


class Loader:
    """Loads single blocks at random in a thread of its own. Context manager.

    Attributes:
        times_s: From Acquire until the block is in RAM, for blocks that were on the SSD only.
    """

    def __init__(self, churn: Churn) -> None:
        self.times_s: list[float] = []
        self._churn = churn
        self._client = churn.connect()
        self._rng = random.Random(1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loader")
        self._thread.start()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            spec, first = self._rng.choice(self._churn.recent)
            started_s = time.perf_counter()
            with self._client.acquire(spec, [first]) as lease:
                if lease.ssd_blocks and lease.wait(1, timeout_s=FLUSH_S):
                    self.times_s.append(time.perf_counter() - started_s)


def measure(
    directory: Path, capacity_bytes: int, loads: int, tell: Callable[[str], None]
) -> dict[str, float]:
    """All of it; see the module.

    Args:
        directory: Does not exist yet.
        capacity_bytes: Of the SSD tier.
        loads: Single blocks to load.
        tell: Gets lines of progress.
    """
    with Churn(directory, capacity_bytes) as churn:
        fresh, steady = overwrite(churn, tell)
        tell("churn: loading meanwhile")
        with Loader(churn) as loader:
            deadline_s = time.monotonic() + LOADING_S
            loading = churn.write(
                lambda _: len(loader.times_s) >= loads or time.monotonic() > deadline_s
            )
        du = churn.du
    times_ms = [1000 * taken_s for taken_s in loader.times_s]
    return {
        "churn_ratio": typical(steady, Amount.gbps) / typical(fresh, Amount.gbps),
        "churn_flush_ratio": typical(steady, Amount.flush_gbps) / typical(fresh, Amount.flush_gbps),
        "file_over_cap": du.over > 0,
        "p99_load_ms": percentile(times_ms, 99),
        "p50_load_ms": percentile(times_ms, 50),
        "loads": len(times_ms),
        "churn_fresh_gbps": typical(fresh, Amount.gbps),
        "churn_steady_gbps": typical(steady, Amount.gbps),
        "churn_loading_gbps": loading.gbps(),
        "churn_fresh_flush_gbps": typical(fresh, Amount.flush_gbps),
        "churn_steady_flush_gbps": typical(steady, Amount.flush_gbps),
        "du_highest_of_cap": du.highest_bytes / capacity_bytes,
        "du_samples": du.samples,
    }


def overwrite(churn: Churn, tell: Callable[[str], None]) -> tuple[list[Amount], list[Amount]]:
    """What filling the empty SSD took, and what the last of many overwrites took."""

    def once(done: Amount) -> bool:
        return done.size_bytes >= churn.capacity_bytes

    def until_full(done: Amount) -> bool:
        return bool(done.size_bytes) and churn.evicted_blocks() > evicted_before

    tell("churn: writing all space once")
    churn.write(once)
    fresh, overwrites = [], []
    for repeat in range(REPEATS):
        tell(f"churn: fresh {repeat + 1}/{REPEATS}")
        churn.empty()
        evicted_before = churn.evicted_blocks()
        fresh.append(churn.write(until_full))
    for number in range(OVERWRITES):
        tell(f"churn: overwriting {number + 1}/{OVERWRITES}")
        overwrites.append(churn.write(once))
    return fresh, overwrites[-REPEATS:]


def typical(amounts: Sequence[Amount], speed: Callable[[Amount], float]) -> float:
    """The median speed."""
    return statistics.median(map(speed, amounts))
