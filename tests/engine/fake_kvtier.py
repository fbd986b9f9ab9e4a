"""A fake of kvtier.client.Client: the three calls the engine makes, over a dict.

It stands in for a daemon where the subject is the engine; tests/e2e runs the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_adapter.mla.prefix_cache import Buffer
from kvtier.types import BlockHash, NamespaceSpec, Tier


@dataclass(frozen=True)
class FakeGetResult:
    """What FakeClient.get copied."""

    num_blocks: int
    blocks_by_tier: Mapping[Tier, int]


@dataclass
class FakeClient:
    """Keeps copies of blocks and a list of the calls.

    Attributes:
        blocks: By namespace and hash.
        puts: (parent, hashes) of every put.
        gets: Number of hashes of every get.
        finished: Tail of every finish.
        dead: Every call is a miss, and a get leaves rubbish in all destinations.
        room: Most blocks that a put accepts.
    """

    blocks: dict[tuple[NamespaceSpec, BlockHash], Buffer] = field(default_factory=dict)
    puts: list[tuple[BlockHash | None, list[BlockHash]]] = field(default_factory=list)
    gets: list[int] = field(default_factory=list)
    finished: list[BlockHash] = field(default_factory=list)
    dead: bool = False
    room: int = 1 << 30

    def get(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        destinations: Sequence[Buffer],
    ) -> FakeGetResult:
        """Copy the longest prefix; overwrite the other destinations with NaNs, as is allowed."""
        self.gets.append(len(hashes))
        for destination in destinations:
            assert destination.nbytes == spec.block_bytes
            destination.fill(0xFF)
        count = 0
        if not self.dead:
            for key, destination in zip(hashes, destinations, strict=False):
                block = self.blocks.get((spec, key))
                if block is None:
                    break
                destination[:] = block
                count += 1
        host = count // 2
        return FakeGetResult(count, {Tier.HOST: host, Tier.SSD: count - host})

    def put(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        sources: Sequence[Buffer],
        *,
        wait_commit: bool,
    ) -> int:
        """Keep copies; blocks whose parent is unknown are refused, as a daemon may."""
        assert not wait_commit, "an engine has better things to do"
        self.puts.append((parent, list(hashes)))
        if self.dead or (parent is not None and (spec, parent) not in self.blocks):
            return 0
        accepted = hashes[: self.room]
        assert len(sources) == len(hashes)
        for key, source in zip(accepted, sources, strict=False):
            assert source.nbytes == spec.block_bytes
            self.blocks[spec, key] = source.copy()
        return len(accepted)

    def finish(self, spec: NamespaceSpec, tail: BlockHash) -> None:
        """Remember the tail."""
        assert spec.block_bytes > 0
        self.finished.append(tail)
