"""A fake of kvtier.client.Client: the three calls the engine makes, over a dict.

It stands in for a daemon where the subject is the engine; tests/e2e runs the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine_adapter.mla.prefix_cache import Buffer
from kvtier.types import BlockHash, Loss, NamespaceSpec, Tier


@dataclass(frozen=True)
class FakeGetResult:
    """What FakeClient.get copied."""

    num_blocks: int
    blocks_by_tier: Mapping[Tier, int]
    loss: Loss


@dataclass
class FakeRoom:
    """Keeps copies at its commit."""

    client: FakeClient
    spec: NamespaceSpec
    parent: BlockHash | None
    hashes: list[BlockHash]
    accepted: list[BlockHash]
    loss: Loss
    copies: list[Buffer] = field(default_factory=list)

    @property
    def covered_blocks(self) -> int:
        """What the client had room for."""
        return len(self.accepted)

    def write_from(self, sources: Sequence[Buffer]) -> None:
        """Copy."""
        assert len(sources) == len(self.hashes)
        assert all(source.nbytes == self.spec.block_bytes for source in sources)
        self.copies = [source.copy() for source in sources]

    def commit_later(self) -> None:
        """Make the copies visible, at once."""
        self.client.puts.append((self.parent, self.hashes))
        for key, copy in zip(self.accepted, self.copies, strict=False):
            self.client.blocks[self.spec, key] = copy
            if self.loss is Loss.BOUNDED:
                self.client.lossy.add(key)

    def abort(self) -> None:
        """Count."""
        self.client.aborted += 1


@dataclass
class FakeClient:
    """Keeps copies of blocks and a list of the calls.

    Attributes:
        blocks: By namespace and hash.
        puts: (parent, hashes) of every commit.
        gets: Number of hashes of every get.
        speeds: Prefill speed told with every get.
        finished: Tail of every finish.
        dead: Every call is a miss, and a get leaves rubbish in all destinations.
        room: Most blocks that a put accepts.
        aborted: Rooms given back.
        lossy: Blocks that have lost something.
    """

    blocks: dict[tuple[NamespaceSpec, BlockHash], Buffer] = field(default_factory=dict)
    puts: list[tuple[BlockHash | None, list[BlockHash]]] = field(default_factory=list)
    gets: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    finished: list[BlockHash] = field(default_factory=list)
    dead: bool = False
    room: int = 1 << 30
    aborted: int = 0
    lossy: set[BlockHash] = field(default_factory=set)

    def get(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        destinations: Sequence[Buffer],
        *,
        allowed_loss: Loss,
        prefill_tokens_per_s: float,
    ) -> FakeGetResult:
        """Copy the longest prefix; overwrite the other destinations with NaNs, as is allowed."""
        self.gets.append(len(hashes))
        self.speeds.append(prefill_tokens_per_s)
        for destination in destinations:
            assert destination.nbytes == spec.block_bytes
            destination.fill(0xFF)
        count, loss = 0, False
        if not self.dead:
            for key, destination in zip(hashes, destinations, strict=False):
                block = self.blocks.get((spec, key))
                if block is None or (key in self.lossy and allowed_loss is Loss.EXACT):
                    break
                loss |= key in self.lossy
                destination[:] = block
                count += 1
        host = count // 2
        return FakeGetResult(count, {Tier.HOST: host, Tier.SSD: count - host}, Loss(loss))

    def reserve(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        *,
        allowed_loss: Loss,
        loss: Loss,
    ) -> FakeRoom:
        """Blocks whose parent is unknown are refused, as a daemon may."""
        orphans = parent is not None and (spec, parent) not in self.blocks
        accepted = [] if self.dead or orphans else list(hashes[: self.room])
        assert loss <= allowed_loss
        return FakeRoom(self, spec, parent, list(hashes), accepted, loss)

    def finish(self, spec: NamespaceSpec, tail: BlockHash) -> None:
        """Remember the tail."""
        assert spec.block_bytes > 0
        self.finished.append(tail)
