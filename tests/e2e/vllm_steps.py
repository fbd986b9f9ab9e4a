"""A stand-in for vLLM's engine loop: the connector's two sides, driven step by step.

Not a fake of kvtier: daemon, client and both sides are real. What is played here is vLLM, whose
real loop is in tests/engines. "Computing" a block writes the only right bytes of its hash into its
pages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine_adapter.vllm.paging import Geometry, PagedLayers
from engine_adapter.vllm.plan import Plan, Report
from engine_adapter.vllm.request_identity import IdentifiedRequest, RequestIdentifier
from engine_adapter.vllm.scheduler import SchedulerSide
from engine_adapter.vllm.settings import Settings
from engine_adapter.vllm.worker import WorkerSide
from kvtier.client import Client
from kvtier.types import BlockHash, Component, NamespaceSpec
from tests.e2e.support import Content, content

LAYERS, PAGES, PAGE_TOKENS, BLOCK_TOKENS = 2, 128, 16, 64
PAGE_BYTES = 1024
PER_BLOCK = BLOCK_TOKENS // PAGE_TOKENS


def spec_of(tenant: str) -> NamespaceSpec:
    """A namespace of two layers; every test has one of its own, and they share a daemon."""
    shape = (LAYERS, BLOCK_TOKENS, PAGE_BYTES // PAGE_TOKENS)
    component = Component("latent_rope", "uint8", shape)
    return NamespaceSpec("vllm", "revision", (component,), block_tokens=BLOCK_TOKENS, tenant=tenant)


@dataclass
class Request:
    """vLLM's request, as far as the connector looks at it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    prompt_embeds: object | None = None
    resumable: bool = False
    lora_request: Any = None
    mm_features: Sequence[Any] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Known so far."""
        return len(self.all_token_ids)


def request_of(name: str, tokens: int, first: int = 0, **options: Any) -> Request:
    """A request whose prompt is `first`, `first` + 1, ..."""
    return Request(name, list(range(first, first + tokens)), tokens, **options)


def no_kinds(_request: IdentifiedRequest) -> Collection[str]:
    """Nothing besides tokens."""
    return ()


class Rank:
    """A worker and its pages.

    Args:
        client: Its own.
        settings: As the scheduler's.
        rank: From 0.
        ranks: How many there are.
        replicated: MLA; else the ranks' bytes differ.
        others_blocks: The fewest blocks that the other ranks load, in every load.
    """

    def __init__(
        self,
        client: Client,
        settings: Settings,
        rank: int = 0,
        ranks: int = 1,
        *,
        replicated: bool = True,
        others_blocks: int = 1 << 30,
    ) -> None:
        self.tensors = [
            torch.zeros(PAGES, PAGE_TOKENS, PAGE_BYTES // PAGE_TOKENS, dtype=torch.uint8)
            for _ in range(LAYERS)
        ]
        self._paged = PagedLayers(self.tensors, PER_BLOCK, PAGE_BYTES)
        self._mark = 0 if replicated else rank
        names = tuple(f"layer.{index}" for index in range(LAYERS))
        geometry = Geometry(names, PAGE_TOKENS, PAGE_BYTES, PER_BLOCK, ranks, replicated)
        self.geometry = geometry
        self.side = WorkerSide(
            client,
            geometry,
            settings,
            rank,
            lambda values: [*(min(value, others_blocks) for value in values[:-1]), values[-1]],
        )
        self.side.use(self._paged)

    def right(self, key: BlockHash) -> Content:
        """The only right bytes of a block on this rank."""
        return content(key, self._paged.block_bytes) ^ np.uint8(self._mark)

    def compute(self, key: BlockHash, pages: Sequence[int]) -> None:
        """What a forward does."""
        self._paged.write_block(self.right(key), pages, 0)

    def block(self, pages: Sequence[int]) -> Content:
        """What is in these pages."""
        found = np.zeros(self._paged.block_bytes, dtype=np.uint8)
        self._paged.read_block(pages, found)
        return found


class Engine:
    """vLLM's loop over a scheduler's side and workers' sides."""

    def __init__(
        self,
        client: Client,
        spec: NamespaceSpec,
        ranks: Sequence[Rank],
        settings: Settings,
        *,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        self.scheduler = SchedulerSide(
            client,
            spec,
            ranks[0].geometry,
            settings,
            RequestIdentifier(BLOCK_TOKENS, no_kinds),
            loads=loads,
            stores=stores,
        )
        self.ranks = ranks
        self.spec = spec
        self.requests: dict[str, Request] = {}
        self._free = list(range(PAGES - 1, 0, -1))  # Ids descend, as vLLM's may.
        self._over: list[str] = []
        self._preempted: set[str] = set()

    def hashes(self, request: Request) -> list[BlockHash]:
        """Of the full blocks of its tokens."""
        chain = RequestIdentifier(BLOCK_TOKENS, no_kinds).chain(self.spec, request)
        assert chain is not None
        return chain.upto(request.all_token_ids, request.num_tokens // BLOCK_TOKENS)

    def admit(self, request: Request, local_tokens: int = 0) -> int:
        """Look it up and give it pages; tokens that will be loaded."""
        matched = self.scheduler.matched_tokens(request, local_tokens)
        self.requests[request.request_id] = request
        self.grow(request)
        self.scheduler.allocated(request, request.pages, matched)
        request.num_computed_tokens = local_tokens + matched
        return matched

    def grow(self, request: Request) -> None:
        """Pages for all its tokens, and one more."""
        while len(request.pages) * PAGE_TOKENS <= request.num_tokens:
            request.pages.append(self._free.pop())

    def pages_of(self, request_id: str) -> tuple[list[int], ...]:
        """As vLLM's scheduler answers."""
        request = self.requests.get(request_id)
        return (request.pages if request is not None else [],)

    def plan(self, scheduled: dict[str, int]) -> Plan:
        """Schedule so many tokens of each request."""
        preempted, self._preempted = self._preempted, set()
        plan = self.scheduler.plan(scheduled, preempted, self.pages_of)
        assert plan.spec is not None
        self.spec = plan.spec
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        return plan

    def run(self, plan: Plan, scheduled: dict[str, int]) -> tuple[set[int], set[str], Report]:
        """Execute a plan on all ranks; bad pages, finished loads, the ranks' report."""
        over, self._over = self._over, []
        now = any(not load.later for load in plan.loads)
        bad: set[int] = set()
        loaded: set[str] = set()
        report: Report | None = None
        for rank in self.ranks:
            rank.side.begin(plan)
            if now:
                rank.side.load(plan)
            for name in scheduled:
                self._forward(rank, self.requests[name], scheduled[name])
            if not now:
                rank.side.load(plan)
            rank.side.store()
            loaded |= rank.side.end(over)
            bad |= rank.side.take_bad_pages()
            mine = rank.side.report()
            report = mine if report is None else report.with_other(mine)
        assert report is not None
        return bad, loaded, report

    def step(self, scheduled: dict[str, int]) -> tuple[set[int], set[str]]:
        """Plan, run and report; bad pages, finished loads."""
        bad, loaded, report = self.run(self.plan(scheduled), scheduled)
        self.scheduler.reported(report, bad)
        return bad, loaded

    def prefill(self, request: Request, local_tokens: int = 0) -> int:
        """Admit it and compute the rest of its prompt in one step; tokens loaded."""
        matched = self.admit(request, local_tokens)
        rest = request.num_tokens - request.num_computed_tokens
        bad, _ = self.step({request.request_id: rest})
        assert not bad
        return matched

    def decode(self, request: Request, tokens: int) -> None:
        """Sample and compute one token after the other."""
        for _ in range(tokens):
            request.all_token_ids.append(7)
            self.grow(request)
            self.step({request.request_id: 1})

    def finish(self, request: Request) -> None:
        """It is over: its pages go, and the workers hear of it in the next step."""
        self.scheduler.finished(request)
        del self.requests[request.request_id]
        self._free += request.pages
        self._over.append(request.request_id)
        self.step({})

    def preempt(self, request: Request) -> None:
        """It loses its pages."""
        self._free += request.pages
        request.pages, request.num_computed_tokens = [], 0
        self._preempted.add(request.request_id)

    def check(self, request: Request, blocks: int) -> None:
        """Its first blocks are right on every rank."""
        for index, key in enumerate(self.hashes(request)[:blocks]):
            pages = request.pages[index * PER_BLOCK : (index + 1) * PER_BLOCK]
            for rank in self.ranks:
                assert np.array_equal(rank.block(pages), rank.right(key)), (index, "wrong bytes")

    def reset(self) -> None:
        """The weights change."""
        assert self.scheduler.reset()
        self.step({})

    def close(self) -> None:
        """As vLLM's shutdown."""
        for rank in self.ranks:
            rank.side.close()

    def _forward(self, rank: Rank, request: Request, count: int) -> None:
        """Fills the pages of every block that is full now, from where the load ended."""
        done = request.num_computed_tokens
        first = (done - count) // BLOCK_TOKENS
        hashes = self.hashes(request)
        for index in range(first, min(done, request.num_tokens) // BLOCK_TOKENS):
            pages = request.pages[index * PER_BLOCK : (index + 1) * PER_BLOCK]
            rank.compute(hashes[index], pages)
