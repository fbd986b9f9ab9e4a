"""The scheduler's side: what of a request is cached, what to load where, what to store.

Looks up without side effects and never touches bytes. Everything it decides goes to the workers in
the step's Plan; so nothing is leased for a request that is not scheduled.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from engine_adapter.namespaces import rank_namespace
from engine_adapter.vllm.chain import HashChain
from engine_adapter.vllm.counts import Counts
from engine_adapter.vllm.paging import Geometry
from engine_adapter.vllm.plan import Load, Plan, Report, Store
from engine_adapter.vllm.request_identity import IdentifiedRequest, RequestIdentifier
from engine_adapter.vllm.settings import Settings
from kvtier.client import Client, GetResult
from kvtier.hashing import namespace_digest, scoped, split_hashes
from kvtier.types import MAX_BLOCKS_PER_CALL, BlockHash, Loss, NamespaceSpec, Tier

log = logging.getLogger(__name__)

LOOKUP_AGE_S = 1.0
"""How long the answer about a request that waits is good for: vLLM asks again in every step."""

DROP_AGAIN_S = 1.0
"""Between tries to drop a namespace that the daemon has not confirmed to be dropped."""

UNTOLD_BLOCKS = 1 << 16
"""Blocks on their way to kvtier whose tokens are remembered, for events."""

PagesOf = Callable[[str], tuple[Sequence[int], ...]]
"""A request's pages, in the order of their tokens, one list a group; there is one group."""


@dataclass(frozen=True, slots=True)
class TakenBlock:
    """A block that kvtier took, for whoever follows blocks by their tokens.

    Attributes:
        hash: Its name in the daemon's events (hashing.scoped); of sharded caches, the first rank's.
        parent: The block before; None for a first block.
        token_ids: Its tokens, as many as a block has.
        lora_name: Of the request's adapter.
    """

    hash: BlockHash
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    lora_name: str | None


class Request(IdentifiedRequest, Protocol):
    """What of vllm.v1.request.Request says how far it is."""

    num_computed_tokens: int
    skip_reading_prefix_cache: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Of its prompt."""

    @property
    def num_tokens(self) -> int:
        """Known so far: prompt and answer."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """These tokens."""


class CachedRequest:
    """One request's blocks, from its first lookup to its end.

    Attributes:
        request: vLLM's own.
        chain: Its hashes.
        local_tokens: What vLLM's own cache had, when it was last asked.
        offered: Leading blocks that were loaded, or given to the workers to store.
        loaded_pages: Where its blocks were loaded to.
        may_load: False once a load failed: it computes, instead of trying again and again.
        asked: Blocks that it last asked kvtier for, and how many of them were there; None if it
            asked for none, or got no answer.
        recorded: True once the daemon's hit rate has it.
        may_store: False if its pages may hold what was not computed from its tokens.
        adapter_version: Of its adapter (AdapterDigests.version), when its chain was made.
    """

    def __init__(self, request: Request, chain: HashChain, adapter_version: int) -> None:
        self.request = request
        self.chain = chain
        self.adapter_version = adapter_version
        self.may_load = True
        self.recorded = False
        self.restart()
        self._found = GetResult(0)
        self._found_key: tuple[int, float] | None = None

    def restart(self) -> None:
        """It has no pages: it is new, or was preempted."""
        self.local_tokens = 0
        self.offered = 0
        self.loaded_pages: frozenset[int] = frozenset()
        self.may_store = True
        self.asked: tuple[int, int] | None = None

    def found(self, blocks: int, now_s: float, look_up: Callable[[], GetResult]) -> GetResult:
        """What is cached of its first `blocks` blocks, asked anew when that is LOOKUP_AGE_S old."""
        key = self._found_key
        if key is None or key[0] != blocks or now_s - key[1] > LOOKUP_AGE_S:
            self._found, self._found_key = look_up(), (blocks, now_s)
        return self._found

    def forget_found(self) -> None:
        """It waits no more; if it comes back, what it has stored meanwhile counts."""
        self._found_key = None

    def hits_by_tier(self, tokens: int, block_tokens: int) -> dict[Tier, int]:
        """Loaded tokens by the tier that they were found on; slower tiers hold a prefix's tail.

        With 1 for block_tokens, the same in blocks.
        """
        hits: dict[Tier, int] = {}
        left = tokens
        for tier in (Tier.SSD, Tier.HOST):
            here = min(left, self._found.blocks_by_tier.get(tier, 0) * block_tokens)
            if here:
                hits[tier] = here
                left -= here
        return hits


class SchedulerSide:
    """Plans every step.

    Attributes:
        counts: What it did since they were last taken.

    Args:
        client: Looks up.
        spec: The model's namespace; None if it can't be identified, and then nothing is cached.
        geometry: Of vLLM's cache.
        settings: The operator's.
        identifier: Names requests.
        loads: Whether it loads.
        stores: Whether it stores.
    """

    def __init__(
        self,
        client: Client,
        spec: NamespaceSpec | None,
        geometry: Geometry,
        settings: Settings,
        identifier: RequestIdentifier,
        *,
        loads: bool,
        stores: bool,
    ) -> None:
        self._client = client
        self._spec = spec
        self._geometry = geometry
        self._settings = settings
        self._identifier = identifier
        self._loads = loads
        self._stores = stores
        self._requests: dict[str, CachedRequest] = {}
        self._unidentified: set[str] = set()
        self._pages_of: PagesOf | None = None
        self._planned: list[Load] = []
        self._step = 0
        self._failures_known = 0
        self._loss = Loss.EXACT
        self._adapters_checked: set[int] = set()
        self._undropped: list[NamespaceSpec] = []
        self._drop_again_s = 0.0
        self._untold: OrderedDict[BlockHash, TakenBlock] = OrderedDict()
        self._told: list[TakenBlock] = []
        self.counts = Counts()

    # A request waits

    def matched_tokens(self, request: Request, local_tokens: int) -> int:
        """Tokens that can be loaded behind those in vLLM's own cache. No side effect in kvtier."""
        cached = self._cached(request)
        if cached is None:
            return 0
        cached.restart()
        cached.local_tokens = local_tokens
        adapter = request.lora_request
        if local_tokens and adapter is not None and self._identifier.adapters.mixed(adapter):
            cached.may_store = False
        size = self._settings.block_tokens
        # One token is left to compute: its logits are what is wanted.
        blocks = min((request.num_tokens - 1) // size, MAX_BLOCKS_PER_CALL)
        if not self._loads or not cached.may_load or request.skip_reading_prefix_cache:
            return 0
        local = local_tokens // size
        if blocks <= local:
            return 0
        found = cached.found(blocks, time.monotonic(), lambda: self._look_up(cached, blocks))
        if found.answered:
            cached.asked = blocks - local, max(0, found.num_blocks - local)
        return max(0, found.num_blocks * size - local_tokens)

    def allocated(self, request: Request, pages: Sequence[int], loaded_tokens: int) -> None:
        """vLLM gave the request its pages, and will have these tokens loaded into some of them.

        Args:
            request: It does not wait any more.
            pages: Its pages, in the order of their tokens.
            loaded_tokens: Behind those that matched_tokens() was told of; 0 for none.
        """
        cached = self._requests.get(request.request_id)
        if cached is None:
            return
        cached.forget_found()
        self._record(cached)
        if not loaded_tokens:
            return
        size, page_tokens = self._settings.block_tokens, self._geometry.page_tokens
        local = cached.local_tokens
        assert (local + loaded_tokens) % size == 0, "vLLM loads other tokens than it was offered"
        blocks, first = (local + loaded_tokens) // size, local // size
        destination = pages[local // page_tokens : (local + loaded_tokens) // page_tokens]
        self._planned.append(
            Load(
                request.request_id,
                tuple(cached.chain.upto(request.all_token_ids, blocks)),
                first,
                (local - first * size) // page_tokens,
                tuple(destination),
                self._settings.async_load,
            )
        )
        cached.offered = blocks
        cached.loaded_pages = frozenset(destination)
        self.counts.add("loads_planned")

    def hits_by_tier(self, request: Request, tokens: int) -> dict[Tier, int]:
        """The loaded tokens by tier."""
        cached = self._requests.get(request.request_id)
        return cached.hits_by_tier(tokens, self._settings.block_tokens) if cached else {}

    # A step

    def plan(self, scheduled: Mapping[str, int], preempted: Set[str], pages_of: PagesOf) -> Plan:
        """What the workers do in this step.

        Args:
            scheduled: Tokens that it computes, by request.
            preempted: Requests that lost their pages since the last step.
            pages_of: Tells a request's pages, now and until the next step.
        """
        self._step += 1
        self._pages_of = pages_of
        self._drop_again()
        self._adapters_checked.clear()
        loads, self._planned = self._planned, []
        stores = self._new_stores(scheduled) if self._stores and self._requests else []
        self._adapters_checked.clear()
        return Plan(
            step=self._step,
            spec=self._spec,
            loads=loads,
            stores=stores,
            preempted=frozenset(preempted),
            failures_known=self._failures_known,
            loss=self._loss,
        )

    def _new_stores(self, scheduled: Mapping[str, int]) -> list[Store]:
        size, stores = self._settings.block_tokens, []
        for request_id, fresh in scheduled.items():
            cached = self._requests.get(request_id)
            if cached is None or not cached.may_store:
                continue
            request = cached.request
            # Computed after this step, and known: a token that is only a draft, or that an earlier
            # step is still sampling, is not in num_tokens.
            tokens = min(request.num_computed_tokens + fresh, request.num_tokens)
            if not self._settings.store_decode:
                tokens = min(tokens, request.num_prompt_tokens)
            full = tokens // size
            if full > cached.offered and not self._forget_outdated(cached):
                stores.append(self._store(cached, full))
        return stores

    def _store(self, cached: CachedRequest, full: int) -> Store:
        first, per_block = cached.offered, self._geometry.pages_per_block
        cached.offered = full
        hashes = cached.chain.upto(cached.request.all_token_ids, full)
        pages = self._pages(cached)
        if self._settings.kv_events:
            self._remember(cached.request, hashes, first)
        return Store(
            cached.request.request_id,
            hashes[first - 1] if first else None,
            tuple(hashes[first:]),
            tuple(pages[first * per_block : full * per_block]),
        )

    def _remember(self, request: Request, hashes: Sequence[BlockHash], first: int) -> None:
        """The tokens of new blocks, until a worker says that kvtier took them."""
        assert self._spec is not None
        size, adapter = self._settings.block_tokens, request.lora_request
        first_rank = rank_namespace(self._spec, 0, self._geometry.shards)
        names = split_hashes(scoped(namespace_digest(first_rank), b"".join(hashes)))
        for index in range(first, len(hashes)):
            self._untold[hashes[index]] = TakenBlock(
                names[index],
                names[index - 1] if index else None,
                tuple(request.all_token_ids[index * size : (index + 1) * size]),
                adapter.lora_name if adapter is not None else None,
            )
        while len(self._untold) > UNTOLD_BLOCKS:
            self._untold.popitem(last=False)

    def take_taken(self) -> list[TakenBlock]:
        """Blocks that kvtier took since the last call; only with the setting kv_events."""
        told, self._told = self._told, []
        return told

    def reported(self, report: Report | None, bad_pages: Set[int]) -> None:
        """What all workers said about a step.

        Args:
            report: None if they said nothing.
            bad_pages: Pages whose load failed.
        """
        if report is not None:
            self._failures_known = max(self._failures_known, report.failed_step)
            self._loss = max(self._loss, report.loss)
            for taken in report.taken:
                block = self._untold.pop(taken, None)
                if block is not None:
                    self._told.append(block)
        if bad_pages:
            self._recompute(bad_pages)

    def _recompute(self, bad_pages: Set[int]) -> None:
        """Loads failed; vLLM has set back the requests that touch those pages.

        Workers have stored nothing since, so every request offers its blocks again. A request
        that only shares a bad page has no say in when that page is right again: what it computes
        meanwhile is not stored.
        """
        for cached in self._requests.values():
            cached.offered = 0
            if cached.loaded_pages & bad_pages:
                cached.may_load = False
            shared = bad_pages - cached.loaded_pages
            if shared and not shared.isdisjoint(self._pages(cached)):
                cached.may_store = False

    def _pages(self, cached: CachedRequest) -> Sequence[int]:
        assert self._pages_of is not None, "no step was planned, yet one was reported"
        [pages] = self._pages_of(cached.request.request_id)
        return pages

    # A request ends

    def finished(self, request: Request) -> None:
        """It is over, however; the workers hear of that from vLLM."""
        self._requests.pop(request.request_id, None)
        self._unidentified.discard(request.request_id)

    # The weights change

    def reset(self) -> bool:
        """Nothing stored before is hit again; what follows is this engine's own.

        The namespace may be other engines', whose weights have not changed. It is dropped, and
        this engine goes on in one of its own, since nobody can tell what its weights are now.

        Returns:
            Whether the daemon confirmed the drop. If not, it is repeated from step to step; until
            it is confirmed, other engines may hit what was stored before.
        """
        if self._spec is None:
            return True
        for rank in range(self._geometry.shards):
            self._undropped.append(rank_namespace(self._spec, rank, self._geometry.shards))
        self._drop_now()
        revision = f"{self._spec.weights_revision.partition('+')[0]}+reset-{secrets.token_hex(16)}"
        self._spec = dataclasses.replace(self._spec, weights_revision=revision)
        # Requests that still run hold pages of the old weights.
        self._requests.clear()
        log.info("cache reset: kvtier namespace moved on to revision %s", revision)
        if self._undropped:
            log.warning(
                "cache reset: kvtier's daemon has not confirmed that the old blocks are dropped;"
                " that is tried again until it does"
            )
        return not self._undropped

    def _drop_again(self) -> None:
        """What reset() could not, at most once in DROP_AGAIN_S."""
        if not self._undropped or not self._client.attached:
            return
        if time.monotonic() >= self._drop_again_s:
            self._drop_now()
            if not self._undropped:
                log.info("cache reset: the old blocks are dropped")

    def _drop_now(self) -> None:
        self._undropped = [
            spec for spec in self._undropped if not self._client.drop_namespace(spec).confirmed
        ]
        self._drop_again_s = time.monotonic() + DROP_AGAIN_S

    # Parts

    def _cached(self, request: Request) -> CachedRequest | None:
        name = request.request_id
        cached = self._requests.get(name)
        if cached is not None and self._forget_outdated(cached):
            cached = None
        if cached is None and self._spec is not None and name not in self._unidentified:
            chain = self._identifier.chain(self._spec, request)
            if chain is None:
                self._unidentified.add(name)
                self.counts.add("unidentified_requests")
                return None
            cached = self._requests[name] = CachedRequest(
                request, chain, self._adapter_version(request)
            )
        return cached

    def _adapter_version(self, request: Request) -> int:
        adapter = request.lora_request
        return 0 if adapter is None else self._identifier.adapters.version(adapter)

    def _forget_outdated(self, cached: CachedRequest) -> bool:
        """Forget a request whose adapter has not the content any more that its blocks are named by.

        What it has computed meanwhile is of either; when it has lost its pages it is looked up
        again. An adapter's files are looked at once before a step's lookups, and once
        before its stores.
        """
        adapter = cached.request.lora_request
        if adapter is None:
            return False
        if adapter.lora_int_id not in self._adapters_checked:
            self._adapters_checked.add(adapter.lora_int_id)
            self._identifier.adapters.recheck(adapter)
        if cached.adapter_version == self._adapter_version(cached.request):
            return False
        del self._requests[cached.request.request_id]
        return True

    def _look_up(self, cached: CachedRequest, blocks: int) -> GetResult:
        """The longest prefix that every rank has."""
        assert self._spec is not None
        self._drop_again()
        hashes = cached.chain.upto(cached.request.all_token_ids, blocks)
        found = []
        for rank in range(self._geometry.shards):
            spec = rank_namespace(self._spec, rank, self._geometry.shards)
            loss = self._settings.allowed_loss
            found.append(self._client.lookup(spec, hashes, allowed_loss=loss))
        self.counts.add("lookups")
        return min(found, key=lambda result: result.num_blocks)

    def _record(self, cached: CachedRequest) -> None:
        """Tell the daemon's hit rate, once, what a request asked for beyond vLLM's own cache.

        When it is admitted, as vLLM counts: look-ups of one that waits, or never runs, don't.
        """
        if cached.recorded or cached.asked is None or self._spec is None:
            return
        cached.recorded = True
        requested, found = cached.asked
        by_tier = cached.hits_by_tier(found, 1)
        for rank in range(self._geometry.shards):
            spec = rank_namespace(self._spec, rank, self._geometry.shards)
            self._client.record_hits(spec, by_tier, requested - found)
