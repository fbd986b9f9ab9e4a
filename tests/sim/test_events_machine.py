"""Whoever follows the events knows what the store has, after whatever random calls and faults.

The calls are those of the store's own machine; a follower takes events a few at a time meanwhile.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from kvtier.events import BlocksStored, ResidencyEvents
from kvtier.index import HostState, SsdState
from kvtier.store import StoreConfig
from kvtier.types import BlockHash, GroupId, Loss, Tier
from tests.sim.follower import Follower
from tests.sim.test_store_machine import GROUPS, QUICK, SPECS, TOKENS, WHERE, WHO, StoreMachine
from tests.sim.world import World


class EventsMachine(StoreMachine):
    """Has a follower beside the world; small backlogs, so that they overflow."""

    @initialize(
        host_pages=st.integers(6, 24),
        ssd_blocks=st.integers(1, 24),
        queue_blocks=st.integers(1, 8),
        shards=st.sampled_from((1, 2, 3)),
    )
    def start(self, host_pages: int, ssd_blocks: int, queue_blocks: int, shards: int) -> None:
        self.world = World(
            StoreConfig(
                host_bytes=host_pages * 4096,
                pin_limit_bytes=host_pages * 4096 // 3,
                write_queue_bytes=queue_blocks * 5_000 * shards,
                event_backlog=queue_blocks * 4,
            ),
            limit_bytes=ssd_blocks * 8_192,
            shards=shards,
        )
        self.world.groups.update(GROUPS)
        for spec in SPECS:
            self.world.open(spec)
        self.pins = 0
        self.follower = Follower()

    @property
    def events(self) -> ResidencyEvents:
        events = self.world.store.events
        assert events is not None
        return events

    @rule(limit=st.integers(1, 6))
    def take_some(self, limit: int) -> None:
        self.follower.follow(self.events.take(limit))

    @rule(limit=st.integers(1, 9))
    def a_late_follower_starts_from_a_picture(self, limit: int) -> None:
        late, picture = Follower(), self.events.picture()
        batches = list(picture.events(limit))
        assert len(batches) == max(1, -(-picture.blocks // limit))
        for batch in batches:
            late.follow(batch)
        assert late.blocks == self.follower.blocks
        assert picture.blocks == sum(map(len, late.blocks.values()))

    @rule(where=WHERE, prompts=st.lists(TOKENS, min_size=2, max_size=6), who=WHO)
    def churn(self, where: int, prompts: list[list[int]], who: GroupId) -> None:
        """Served, written, evicted, loaded again."""
        self.serve_with_a_quick_disk(where, prompts, who)
        self.serve(where, prompts[::-1], who)
        while self.world.loads:
            self.world.finish_load(0)
        self.take_some(2)

    @rule()
    def a_quiet_moment(self) -> None:
        """All that was dropped is reclaimed, and the follower is up to date."""
        while self.world.store.reap():
            pass
        self.world.take_jobs()
        self.catch_up()
        assert self.follower.blocks == self.readable()

    def catch_up(self) -> None:
        rounds = 0
        while self.events.waiting:
            events = self.events.take(3)
            self.follower.follow(events)
            self.check_chains(events)
            rounds += 1
            assert rounds < 1_000, "it does not come to an end"

    def check_chains(self, events: object) -> None:
        """Blocks of one event follow each other, behind the parent that it names."""
        assert isinstance(events, list)
        for event in events:
            if isinstance(event, BlocksStored):
                namespace = self.world.store.index.namespaces[event.namespace]
                assert event.block_tokens == namespace.spec.block_tokens
                above = event.parent
                for key in event.hashes:
                    parent = namespace.blocks[key].parent
                    assert above == (None if parent is None else parent.hash)
                    above = key

    def readable(self) -> dict[Tier, set[BlockHash]]:
        """What the tiers hold, by their own words."""
        found: dict[Tier, set[BlockHash]] = {Tier.HOST: set(), Tier.SSD: set()}
        for namespace in self.world.store.index.namespaces.values():
            for key, block in namespace.blocks.items():
                if block.host is not None and block.host.state is HostState.READY:
                    found[Tier.HOST].add(key)
                if block.ssd is SsdState.STORED and block.place.online:
                    found[Tier.SSD].add(key)
        return found

    @invariant()
    def nothing_readable_stays_untold(self) -> None:
        """Once all waiting events are taken; what was dropped may still be told."""
        if not hasattr(self, "world") or self.events.waiting:
            return
        for tier, blocks in self.readable().items():
            assert blocks <= self.follower.blocks[tier]

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "world"):
            return
        self.a_quiet_moment()
        hit = {
            key
            for namespace in self.world.store.index.namespaces.values()
            for key, block in namespace.blocks.items()
            if block.hit(Loss.BOUNDED)
        }
        assert self.follower.blocks[Tier.HOST] | self.follower.blocks[Tier.SSD] == hit


def test_who_follows_the_events_knows_what_the_store_has() -> None:
    """A short run, the same one every time."""
    run_state_machine_as_test(EventsMachine, settings=settings(QUICK, stateful_step_count=80))
