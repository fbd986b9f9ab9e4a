"""What has become readable on a tier, and what no longer is, told as values.

The tiers say which blocks changed (index.Watcher); what is told of one is worked out when the
event is taken, from what is so by then and from what was told before. So every event is a change of
the follower's picture: no block is told twice, and one that came and went meanwhile not at all.
What changes many blocks at once, like a directory that fails, is found out by looking through the
index, a few at a time.

A picture that has taken in all events is exact: it has what a read finds, by tier. Only blocks of a
dropped namespace and of a lost segment, and those past their age, stay in it until they are
reclaimed. Nothing is kept but what was told, the changes that wait, and at most `backlog` of these:
beyond it they are forgotten and found again by looking at everything. No I/O, one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvtier.index import Block, BlockIndex, HostState, Namespace
from kvtier.metrics import Counters
from kvtier.types import BlockHash, NamespaceDigest, Tier

LOOKS = 2
"""Blocks that are looked at for each that may be told: looking costs less."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of a chain can be read from a tier.

    Attributes:
        parent: The block before the first; None if that is its chain's first.
    """

    tier: Tier
    namespace: NamespaceDigest
    block_tokens: int
    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks can't be read from a tier any more."""

    tier: Tier
    namespace: NamespaceDigest
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllRemoved:
    """Nothing can be read from any tier: the first event of a daemon, and of a snapshot."""


Event = BlocksStored | BlocksRemoved | AllRemoved


class Picture:
    """What was told at one moment, as the events that bring a follower there from anywhere.

    Attributes:
        blocks: Blocks told, counted once a tier.
    """

    def __init__(self, told: dict[Tier, dict[BlockHash, Namespace]]) -> None:
        self.blocks = sum(map(len, told.values()))
        self._told = told

    def events(self, limit: int) -> Iterator[list[Event]]:
        """Yield AllRemoved, then all blocks, `limit` of them at a time."""
        blocks = (
            (tier, key, namespace)
            for tier, told in self._told.items()
            for key, namespace in told.items()
        )
        events: list[Event] = [AllRemoved()]
        while True:
            telling = _Telling()
            for tier, key, namespace in islice(blocks, limit):
                # Its block may be gone by now, and with it what it continued.
                telling.stored(tier, namespace, key, namespace.blocks.get(key))
            events += telling.end()
            if not events:
                return
            yield events
            events = []


class ResidencyEvents:
    """The events of one daemon: an index.Watcher whose findings are taken bit by bit."""

    def __init__(self, index: BlockIndex, backlog: int, counters: Counters) -> None:
        """Begin with AllRemoved. `backlog` bounds the changes that wait to be taken."""
        self._index = index
        self._counters = counters
        self._backlog = backlog
        self._begun = False
        self._changed: OrderedDict[tuple[Tier, BlockHash], Namespace] = OrderedDict()
        self._told: dict[Tier, dict[BlockHash, Namespace]] = {Tier.HOST: {}, Tier.SSD: {}}
        self._looking: Iterator[tuple[Namespace, BlockHash]] | None = None

    # What index.Watcher asks for

    def changed(self, block: Block, tier: Tier) -> None:
        """A block came to a tier or left it."""
        self._changed[tier, block.hash] = block.namespace
        if len(self._changed) > self._backlog:
            self._counters.kv_event_overflows += 1
            self._changed.clear()
            self.all_changed()

    def all_changed(self) -> None:
        """Any block may have come or gone."""
        self._looking = self._everything()

    # What a publisher takes

    @property
    def waiting(self) -> bool:
        """Whether take() has something to do."""
        return bool(self._changed) or self._looking is not None or not self._begun

    def take(self, limit: int) -> list[Event]:
        """The next events, of up to `limit` blocks; none may be left though some were waiting."""
        if not self._begun:
            self._begun = True
            return [AllRemoved()]
        if len(self._changed) < limit:
            self._look(limit * LOOKS)
        telling = _Telling()
        for _ in range(min(limit, len(self._changed))):
            (tier, key), namespace = self._changed.popitem(last=False)
            told, block = self._told[tier], namespace.blocks.get(key)
            if _readable(block, tier) == (key in told):
                continue
            if key in told:
                del told[key]
                telling.removed(tier, namespace, key)
            else:
                told[key] = namespace
                telling.stored(tier, namespace, key, block)
        return telling.end()

    def picture(self) -> Picture:
        """What all events taken so far tell; O(blocks), but only a copy."""
        return Picture({tier: told.copy() for tier, told in self._told.items()})

    # What changed unnoticed

    def _look(self, limit: int) -> None:
        """Look at up to `limit` blocks for differences to what was told."""
        if self._looking is None:
            return
        seen = 0
        for namespace, key in islice(self._looking, limit):
            seen += 1
            block = namespace.blocks.get(key)
            for tier, told in self._told.items():
                if _readable(block, tier) != (key in told):
                    self._changed[tier, key] = namespace
        if seen < limit:
            self._looking = None

    def _everything(self) -> Iterator[tuple[Namespace, BlockHash]]:
        """All blocks, ancestors first; then those that were told, for what is gone from the index.

        Copies a table when its turn comes, as both change meanwhile.
        """
        for namespace in list(self._index.namespaces.values()):
            for key in list(namespace.blocks):
                yield namespace, key
        for told in self._told.values():
            for key, namespace in told.copy().items():
                yield namespace, key


def _readable(block: Block | None, tier: Tier) -> bool:
    """Whether a block that can be found can be read from a tier."""
    if block is None:
        return False
    if tier is Tier.HOST:
        return block.host is not None and block.host.state is HostState.READY
    return block.stored


class _Telling:
    """Makes as few events as it can of blocks that come one after the other."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._hashes: list[BlockHash] = []
        self._tier = Tier.HOST
        self._namespace: Namespace | None = None
        self._stores = False
        self._parent: BlockHash | None = None

    def stored(self, tier: Tier, namespace: Namespace, key: BlockHash, block: Block | None) -> None:
        """A block is readable; `block` is None if nothing more is known of it."""
        parent = None if block is None or block.parent is None else block.parent.hash
        continues = bool(self._hashes) and self._hashes[-1] == parent
        if not (self._stores and continues and self._is_of(tier, namespace)):
            self._begin(tier, namespace, stores=True)
            self._parent = parent
        self._hashes.append(key)

    def removed(self, tier: Tier, namespace: Namespace, key: BlockHash) -> None:
        """A block is no longer readable."""
        if self._stores or not self._is_of(tier, namespace):
            self._begin(tier, namespace, stores=False)
        self._hashes.append(key)

    def end(self) -> list[Event]:
        """The events of all that was said."""
        self._close()
        return self._events

    def _is_of(self, tier: Tier, namespace: Namespace) -> bool:
        return self._tier is tier and self._namespace is namespace

    def _begin(self, tier: Tier, namespace: Namespace, *, stores: bool) -> None:
        self._close()
        self._tier, self._namespace, self._stores = tier, namespace, stores

    def _close(self) -> None:
        hashes, namespace = tuple(self._hashes), self._namespace
        if not hashes or namespace is None:
            return
        self._hashes = []
        if self._stores:
            tokens = namespace.spec.block_tokens
            self._events.append(
                BlocksStored(self._tier, namespace.digest, tokens, self._parent, hashes)
            )
        else:
            self._events.append(BlocksRemoved(self._tier, namespace.digest, hashes))
