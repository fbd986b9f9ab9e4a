"""Opens the SSD tier's directories, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from kvtier.codec import choose_codec
from kvtier.config import Settings
from kvtier.daemon.late_tier import LateTier
from kvtier.errors import TierUnavailable
from kvtier.tier.base import STORED_BLOCK, BlockTier, NamespaceRow, StoredBlocks
from kvtier.tier.ssd import SsdTier

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedShard:
    """One directory as the start found it.

    Attributes:
        directory: Which.
        tier: What is on it.
        rows: Namespaces that it remembers.
        stored: Blocks that it holds.
        failure: Why it could not be opened; it starts offline. None: it works.
    """

    directory: Path
    tier: BlockTier
    rows: Sequence[NamespaceRow]
    stored: StoredBlocks
    failure: TierUnavailable | None


async def open_shards(settings: Settings, stack: AsyncExitStack) -> list[OpenedShard]:
    """Open all directories; `stack` closes them. One that fails starts offline if others work.

    Raises:
        AddressInUse: a live daemon owns a directory.
        CapacityError: the capacity does not fit one.
        FormatError: one was written by a newer or foreign version.
        TierUnavailable: none works.
    """
    opened = await asyncio.gather(
        *(asyncio.to_thread(_open, path, settings) for path in settings.ssd_directories),
        return_exceptions=True,
    )
    shards = [shard for shard in opened if isinstance(shard, OpenedShard)]
    for shard in shards:
        stack.callback(shard.tier.close)
    for error in opened:
        if isinstance(error, BaseException):
            raise error
    failures = [shard.failure for shard in shards if shard.failure is not None]
    if failures and len(failures) == len(shards):
        raise TierUnavailable(
            f"no SSD directory works: {failures[0]}; repair it, or change ssd_directories"
        )
    return shards


def _open(directory: Path, settings: Settings) -> OpenedShard:
    make = partial(_make, directory, settings)
    started_s = time.perf_counter()
    try:
        tier, rows, stored = _open_and_scan(make)
    except TierUnavailable as error:
        return OpenedShard(directory, LateTier(make, error), (), np.zeros(0, STORED_BLOCK), error)
    log.info(
        "ssd directory open",
        directory=str(directory),
        blocks=len(stored),
        seconds=round(time.perf_counter() - started_s, 3),
    )
    return OpenedShard(directory, tier, rows, stored, None)


def _make(directory: Path, settings: Settings) -> SsdTier:
    return SsdTier(
        directory,
        capacity_bytes=settings.ssd_capacity_bytes,
        codec_of=choose_codec(settings.ssd_codec, settings.ssd_codec_rules),
        durability=settings.ssd_durability,
        max_batch_bytes=settings.ssd_batch_bytes,
        min_free_bytes=settings.ssd_min_free_bytes,
    )


def _open_and_scan(
    make: Callable[[], SsdTier],
) -> tuple[SsdTier, Sequence[NamespaceRow], StoredBlocks]:
    tier = make()
    try:
        return tier, tier.namespaces(), tier.scan()
    except BaseException:
        tier.close()
        raise
