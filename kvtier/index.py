"""What is known of every block: its place in its chain, and its copies on the tiers.

A Block is a node of a chain and outlives its copies while it has children, so a chain with a hole
stays a chain. A copy in the host tier is an object of its own, because a lease must keep a copy
that was dropped meanwhile. Nothing here decides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.extents import Extent
from kvtier.types import BlockHash, Loss, NamespaceDigest, NamespaceSpec, Tier

STAMP_STRIDE = 1 << 24
"""Stamps between two touches; a chain is shorter than this."""


class HostState(enum.Enum):
    """WRITING: a client fills it. LOADING: the mover fills it. READY: anyone may read it."""

    WRITING = enum.auto()
    LOADING = enum.auto()
    READY = enum.auto()


class SsdState(enum.Enum):
    """WRITING: a write job is on its way. STORED: committed, so it survives kill -9."""

    ABSENT = enum.auto()
    WRITING = enum.auto()
    STORED = enum.auto()


@dataclass(slots=True, eq=False)
class Place:
    """Where on the SSD blocks are: one object a segment, which all blocks in it know.

    Attributes:
        shard: Number of the directory.
        segment: Number of the segment there; None for blocks that are being written.
        online: Its blocks can be read now. Taking a million blocks out is one assignment.
        stored_bytes: Of its STORED blocks' stored forms.
        block_bytes: Of the same blocks themselves.
    """

    shard: int
    segment: int | None
    online: bool = True
    stored_bytes: int = 0
    block_bytes: int = 0


NOWHERE = Place(shard=0, segment=None, online=False)
"""The place of a block that is not on the SSD."""


@dataclass(slots=True, eq=False)
class HostCopy:
    """A block's bytes in the arena.

    Attributes:
        pins: Leases and jobs that use the extent; above zero it stays what it is.
    """

    block: Block
    extent: Extent
    state: HostState
    loss: Loss
    pins: int = 0

    @property
    def current(self) -> bool:
        """False once the block was dropped or its load failed: only leases still know the copy."""
        return self.block.host is self


@dataclass(slots=True, eq=False)
class Block:
    """One block of one namespace generation.

    Attributes:
        parent: The block before it; None for a first block.
        depth: Blocks before it.
        stamp: Recency, the same for all tiers (policy/base.py).
        allowed_loss: What its storing client lets lossy codecs do to it.
        born_s: When its bytes were stored, in whole seconds since 1970.
        place: Where on the SSD it is, or is going to.
        ssd_job: The write job whose completion counts; others are out of date.
        children: Linked blocks that have this one as parent.
        linked: In its namespace's table, or on its way out of a retired one.
    """

    hash: BlockHash
    namespace: Namespace
    parent: Block | None
    depth: int
    stamp: int
    allowed_loss: Loss = Loss.EXACT
    born_s: int = 0
    host: HostCopy | None = None
    ssd: SsdState = SsdState.ABSENT
    place: Place = NOWHERE
    ssd_bytes: int = 0
    ssd_loss: Loss = Loss.EXACT
    ssd_job: int = 0
    children: int = 0
    linked: bool = True

    def hit(self, allowed_loss: Loss) -> bool:
        """True if some copy can serve a request that allows this loss."""
        if self.born_s < self.namespace.oldest_s:
            return False
        copy = self.host
        if copy is not None:
            return copy.state is not HostState.WRITING and copy.loss <= allowed_loss
        return self.stored and self.ssd_loss <= allowed_loss

    @property
    def stored(self) -> bool:
        """True if it can be read from the SSD now."""
        return self.place.online and self.ssd is SsdState.STORED

    @property
    def listed(self) -> bool:
        """False once its namespace was dropped (or it was unlinked): nobody can find it."""
        return self.namespace.blocks.get(self.hash) is self

    @property
    def held(self) -> bool:
        """True if some tier has a copy, or is getting one."""
        return self.host is not None or self.ssd is not SsdState.ABSENT


@dataclass(slots=True, eq=False)
class Namespace:
    """One namespace and the blocks of its current generation.

    Attributes:
        size_bytes: Bytes of one block.
        max_age_s: Blocks older than this are not hit; 0 for none.
        oldest_s: Blocks born before are not hit, in seconds since 1970; moves with the clock.
        remembered: Shards that have it, or have a job to.
    """

    digest: NamespaceDigest
    spec: NamespaceSpec
    generation: int
    size_bytes: int
    blocks: dict[BlockHash, Block] = field(default_factory=dict)
    max_age_s: int = 0
    oldest_s: int = 0
    remembered: set[int] = field(default_factory=set)


class Watcher(Protocol):
    """Whoever wants to know what can be read where (events.py). It may look, not change."""

    def changed(self, block: Block, tier: Tier) -> None:
        """A block can be read from a tier now, or no longer."""

    def all_changed(self) -> None:
        """The same of many blocks at once, without a call each."""


class _Nobody:
    """The watcher where nobody watches."""

    def changed(self, block: Block, tier: Tier) -> None:
        pass

    def all_changed(self) -> None:
        pass


class BlockIndex:
    """All namespaces and their blocks.

    Attributes:
        watcher: Told by the tiers which blocks came and went.
    """

    def __init__(self) -> None:
        self.namespaces: dict[NamespaceDigest, Namespace] = {}
        self.watcher: Watcher = _Nobody()
        self._retired: list[dict[BlockHash, Block]] = []

    def open(self, digest: NamespaceDigest, spec: NamespaceSpec, generation: int = 0) -> Namespace:
        """Make a namespace known. The caller has checked that it is new."""
        namespace = Namespace(digest, spec, generation, spec.block_bytes)
        self.namespaces[digest] = namespace
        return namespace

    def add(self, namespace: Namespace, key: BlockHash, parent: Block | None, stamp: int) -> Block:
        """Link a new block behind `parent`."""
        assert key not in namespace.blocks, "added twice"
        depth = 0 if parent is None else parent.depth + 1
        block = Block(key, namespace, parent, depth, stamp)
        namespace.blocks[key] = block
        if parent is not None:
            parent.children += 1
        return block

    def prune(self, block: Block | None) -> None:
        """Unlink a block that has neither copy nor children, and so on up its chain."""
        while block is not None and block.linked and not block.held and not block.children:
            block.linked = False
            if block.listed:
                del block.namespace.blocks[block.hash]
            block = block.parent
            if block is not None:
                block.children -= 1

    def retire(self, namespace: Namespace) -> None:
        """Move a namespace's generation on, in O(1): nothing stored before is found again."""
        namespace.generation += 1
        if namespace.blocks:
            self._retired.append(namespace.blocks)
            namespace.blocks = {}

    def retired(self, limit: int) -> Iterator[Block]:
        """Yield up to `limit` blocks of retired generations, each once, for their copies to go."""
        for _ in range(limit):
            while self._retired and not self._retired[-1]:
                self._retired.pop()
            if not self._retired:
                return
            yield self._retired[-1].popitem()[1]

    def retired_namesakes(self, key: BlockHash) -> list[Block]:
        """Blocks of this hash that are still to be reclaimed."""
        return [table[key] for table in self._retired if key in table]

    @property
    def has_retired(self) -> bool:
        """True while retired() has something to yield."""
        return any(self._retired)

    def chain(self, tail: Block) -> list[Block]:
        """The blocks from the tail up to the first."""
        blocks = [tail]
        while (parent := blocks[-1].parent) is not None:
            blocks.append(parent)
        return blocks

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls of the store."""
        children: dict[int, int] = {}
        for namespace in self.namespaces.values():
            for key, block in namespace.blocks.items():
                assert block.hash == key
                assert block.linked, "an unlinked block is in a table"
                assert block.held or block.children, "a dead block was not pruned"
                if block.host is not None:
                    assert block.host.block is block
                if block.parent is not None:
                    assert block.depth == block.parent.depth + 1
                    assert block.parent.linked
                    children[id(block.parent)] = children.get(id(block.parent), 0) + 1
        if not self._retired:
            for namespace in self.namespaces.values():
                for block in namespace.blocks.values():
                    assert block.children == children.get(id(block), 0), "children miscounted"
