"""A subscriber's picture of what a daemon has, made from nothing but its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.events import AllRemoved, BlocksStored, Event
from kvtier.types import BlockHash, Tier


def _nothing() -> dict[Tier, set[BlockHash]]:
    return {Tier.HOST: set(), Tier.SSD: set()}


@dataclass(slots=True)
class Follower:
    """Takes events in and insists that each of them changes something.

    Attributes:
        blocks: What can be read from each tier.
        begun: AllRemoved was seen.
    """

    blocks: dict[Tier, set[BlockHash]] = field(default_factory=_nothing)
    begun: bool = False

    def follow(self, events: Iterable[Event]) -> None:
        """Take events in, in order."""
        for event in events:
            if isinstance(event, AllRemoved):
                self.blocks, self.begun = _nothing(), True
                continue
            assert self.begun, "an event before the picture had a beginning"
            assert event.hashes
            known, told = self.blocks[event.tier], set(event.hashes)
            assert len(told) == len(event.hashes)
            if isinstance(event, BlocksStored):
                assert not told & known, "told twice"
                known |= told
            else:
                assert told <= known, "removed what was not there"
                known -= told
