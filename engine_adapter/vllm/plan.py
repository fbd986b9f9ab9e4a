"""What the scheduler's side tells the workers' side for one step, and what comes back.

vLLM carries these values between its processes. They name blocks and pages; no bytes are in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.types import BlockHash, Loss, NamespaceSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to load into a request's pages.

    Attributes:
        request_id: Whose.
        hashes: From its first block up to the last one wanted.
        first: The first block wanted; those before it are in vLLM's own cache.
        skip: How many first pages of that block are in vLLM's own cache as well.
        pages: Where the rest goes.
        later: Load between steps (async_load), not before this one's forward.
    """

    request_id: str
    hashes: Sequence[BlockHash]
    first: int
    skip: int
    pages: Sequence[int]
    later: bool


@dataclass(frozen=True, slots=True)
class Store:
    """Blocks of a request that are full after this step.

    Attributes:
        request_id: Whose.
        parent: Hash of the block before; None if the first of these is a first block.
        hashes: The blocks, in chain order.
        pages: All their pages, in the order of their tokens.
    """

    request_id: str
    parent: BlockHash | None
    hashes: Sequence[BlockHash]
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        step: Counts up from 1.
        spec: The namespace, without a worker's shard of it; None while nothing is cached.
        loads: Before or after its forward (Load.later).
        stores: After its forward.
        preempted: Requests that lost their pages.
        failures_known: The last step whose failed loads the scheduler has dealt with.
        loss: What blocks that were loaded before this step may have lost.
    """

    step: int
    spec: NamespaceSpec | None
    loads: Sequence[Load]
    stores: Sequence[Store]
    preempted: frozenset[str]
    failures_known: int
    loss: Loss


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker's loads came to.

    Attributes:
        failed_step: The last step in which a load before its forward failed; 0 for none.
        loss: What loaded blocks may have lost.
        taken: Blocks that kvtier has since the last report; only where kv_events are wanted.
    """

    failed_step: int
    loss: Loss
    taken: tuple[BlockHash, ...] = ()

    def with_other(self, other: Report) -> Report:
        """Of two workers."""
        return Report(
            max(self.failed_step, other.failed_step),
            max(self.loss, other.loss),
            self.taken + other.taken,
        )
