"""Random use of a daemon that is much too small for it, and what must be known of it afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.client import Client
from kvtier.hashing import namespace_digest, scoped, split_hashes
from kvtier.process import DaemonProcess
from kvtier.types import BlockHash, NamespaceSpec, Tier
from kvtier.v1 import cache_pb2 as pb
from tests.e2e.kv_subscriber import Subscriber, settings
from tests.e2e.support import chain, eventually, spec_of

BLOCK_BYTES = 48 << 10
"""So RAM has 341 of 960 blocks, and the SSD some more. Writes are asked for, so that nothing
changes while a test compares."""

SMALL: dict[str, object] = {
    "host_capacity_bytes": 16 << 20,
    "ssd_capacity_bytes": 24 << 20,
    "ssd_batch_bytes": 2 << 20,
    "write_queue_bytes": 4 << 20,
    "ssd_min_free_bytes": 0,
    "idle_write_after_s": 3600.0,
}
SPECS = (spec_of(BLOCK_BYTES, tenant="one"), spec_of(BLOCK_BYTES, tenant="two"))
CHAINS, BLOCKS = 120, 8


def prompt(which: int) -> list[BlockHash]:
    """The hashes of a prompt; each is asked for in two namespaces, as ranks or tenants do."""
    return chain(f"{which // len(SPECS)}", BLOCKS)


def names_of(spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> list[BlockHash]:
    """As events name these blocks."""
    return split_hashes(scoped(namespace_digest(spec), b"".join(hashes)))


@contextmanager
def small_daemon(directory: Path, **others: object) -> Iterator[DaemonProcess]:
    """A daemon that publishes its events in `directory`."""
    home = directory / "daemon"
    home.mkdir()
    values = settings(directory, **{**SMALL, **others})
    with DaemonProcess(home, **values) as daemon:  # type: ignore[arg-type]
        yield daemon


class Churn:
    """Random calls. The same seed makes the same calls."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self._daemon = daemon
        self._random = random.Random(seed)
        noise = np.random.default_rng(seed)  # No codec shrinks it.
        self._pages = [noise.integers(0, 256, BLOCK_BYTES, np.uint8) for _ in range(BLOCKS)]
        self._client = Client(daemon.address, acquire_timeout_s=5.0)

    def __enter__(self) -> Churn:
        assert self._client.wait_attached(20.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def client(self) -> Client:
        """Attached again after restart()."""
        return self._client

    def calls(self, count: int) -> None:
        """Do so many operations."""
        for _ in range(count):
            self._call()

    def _call(self) -> None:
        rng, client = self._random, self._client
        spec, hashes = self._prompt()
        length = rng.randint(1, BLOCKS)
        kind = rng.choices(("serve", "get", "drop", "flush", "drop_namespace"), (60, 30, 6, 3, 1))
        if kind == ["get"]:
            client.get(spec, hashes[:length], self._pages)
        elif kind == ["drop"]:
            client.drop(spec, hashes[length - 1 :])
        elif kind == ["flush"]:
            client.flush(spec, hashes[:length], timeout_s=0.1)
        elif kind == ["drop_namespace"] and rng.random() < 0.2:
            client.drop_namespace(spec)
        else:
            got = client.get(spec, hashes[:length], self._pages).num_blocks
            parent = hashes[got - 1] if got else None
            client.put(spec, parent, hashes[got:length], self._pages[: length - got])
            client.finish(spec, hashes[length - 1])

    def _prompt(self) -> tuple[NamespaceSpec, list[BlockHash]]:
        which = int(CHAINS * self._random.random() ** 2)  # Some prompts are common.
        return SPECS[which % len(SPECS)], prompt(which)

    def restart(self, *, kill: bool) -> None:
        """The daemon goes, one way or the other, and comes back."""
        if kill:
            self._daemon.kill()
        else:
            assert self._daemon.stop() == 0
        self._daemon.start()
        eventually(lambda: self._client.stats().tiers, "the client has attached again")

    def write_all(self) -> None:
        """Have what is in RAM written, as far as the SSD tier has room."""
        for which in range(CHAINS):
            at = which % len(SPECS)
            self._client.flush(SPECS[at], prompt(which), timeout_s=0.0)
            if which % 10 == 9:
                self.settled()

    def settled(self) -> None:
        """Wait until nothing is under way in the daemon."""

        def quiet() -> bool:
            stats = self._client.stats()
            queued = any(shard.queued_bytes for shard in stats.shards)
            return bool(stats.tiers) and not stats.pinned_bytes and not queued

        eventually(quiet, "the daemon is quiet")

    def check(self, subscriber: Subscriber) -> None:
        """Wait until the subscriber has exactly what the daemon has."""

        def differences() -> list[str]:
            subscriber.follow(0.05)
            return list(self._differences(subscriber.picture))

        last: list[str] = []

        def equal() -> bool:
            last[:] = differences()
            return not last

        try:
            eventually(equal, "the subscriber has what the daemon has")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last[:5]}") from error

    def _differences(self, picture: dict[str, set[bytes]]) -> Iterator[str]:
        """How many blocks each tier has, and what every prompt would hit."""
        tiers = {state.tier: state.blocks for state in self._client.stats().tiers}
        for tier, medium in ((pb.TIER_HOST, "CPU"), (pb.TIER_SSD, "STORAGE")):
            if tiers.get(tier) != len(picture[medium]):  # None: no answer just now.
                yield f"{tiers.get(tier)} blocks in {medium}, {len(picture[medium])} told"
        for which in range(CHAINS):
            at = which % len(SPECS)
            hashes = prompt(which)
            found = self._client.lookup(SPECS[at], hashes)
            told = {Tier.HOST: 0, Tier.SSD: 0}
            for name in names_of(SPECS[at], hashes):
                if name in picture["CPU"]:
                    told[Tier.HOST] += 1
                elif name in picture["STORAGE"]:
                    told[Tier.SSD] += 1
                else:
                    break
            if found.blocks_by_tier != told:
                yield f"prompt {which}: {found.blocks_by_tier}, told {told}"
