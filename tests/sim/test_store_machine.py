"""The store against a model: random calls, random completions, faults, restarts, and every byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier.errors import CorruptBlock, LeaseState, TierUnavailable, UnknownLease
from kvtier.index import Namespace, SsdState
from kvtier.store import StoreConfig
from kvtier.types import BlockHash, GroupId, Loss
from tests.sim.world import Grant, World, Writing, chain, digest_of, group_id, spec_of

SPECS = (spec_of(5_000), spec_of(12_000))
"""Blocks of two and of three pages, so that holes of the wrong size come up."""

GROUPS = [group_id(number) for number in (1, 2, 3)]
TOKENS = st.lists(st.sampled_from((0, 0, 0, 1)), min_size=1, max_size=7)
WHICH = st.integers(0, 63)
WHERE = st.integers(0, 1)
WHO = st.sampled_from(GROUPS)
TTL = st.sampled_from((1.0, 5.0, 60.0))
LOSS = st.sampled_from(Loss)
RARELY = st.sampled_from((False, False, False, True))
FAULT = st.sampled_from((None, None, None, TierUnavailable("EIO"), CorruptBlock("checksum")))


class StoreMachine(RuleBasedStateMachine):
    """Drives a World with rules; its own checks are in World.check()."""

    @initialize(
        host_pages=st.integers(6, 24),
        ssd_blocks=st.integers(1, 24),
        queue_blocks=st.integers(1, 8),
        shards=st.sampled_from((1, 1, 2, 3)),
    )
    def start(self, host_pages: int, ssd_blocks: int, queue_blocks: int, shards: int) -> None:
        self.world = World(
            StoreConfig(
                host_bytes=host_pages * 4096,
                pin_limit_bytes=host_pages * 4096 // 3,
                write_queue_bytes=queue_blocks * 5_000 * shards,
            ),
            limit_bytes=ssd_blocks * 8_192,
            shards=shards,
        )
        self.world.groups.update(GROUPS)
        for spec in SPECS:
            self.world.open(spec)
        self.pins = 0

    def namespace(self, where: int) -> Namespace:
        return self.world.store.index.namespaces[digest_of(SPECS[where])]

    def writing(self, which: int) -> Writing:
        return list(self.world.writings.values())[which % len(self.world.writings)]

    def grant(self, which: int) -> Grant:
        return self.world.grants[which % len(self.world.grants)]

    # Reading

    @rule(where=WHERE, tokens=TOKENS, who=WHO, ttl_s=TTL, loss=LOSS)
    def acquire(
        self, where: int, tokens: list[int], who: GroupId, ttl_s: float, loss: Loss
    ) -> None:
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        lease, _ = self.world.acquire(namespace, hashes, who, ttl_s=ttl_s, allowed_loss=loss)
        if lease is not None:
            assert [copy.block.hash for copy in lease.copies] == hashes[: len(lease.copies)]

    @rule(where=WHERE, tokens=TOKENS, who=WHO)
    def acquire_twice(self, where: int, tokens: list[int], who: GroupId) -> None:
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        request_id = b"request" + bytes(tokens) + bytes([where])
        try:
            first, _ = self.world.acquire(namespace, hashes, who, request_id=request_id)
        except LeaseState:
            return
        pinned_bytes = self.world.store.tiers.host.pinned_bytes
        second, _ = self.world.acquire(namespace, hashes, who, request_id=request_id)
        if first is not None:  # What found no room may have made some for the next.
            assert second is first
            assert self.world.store.tiers.host.pinned_bytes == pinned_bytes

    @rule(where=WHERE, tokens=TOKENS, who=WHO, order=st.permutations(range(4)))
    def acquire_nonsense(
        self, where: int, tokens: list[int], who: GroupId, order: list[int]
    ) -> None:
        """Hashes that are no chain: repeated, reordered, without their head."""
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        self.world.acquire(namespace, [hashes[at % len(hashes)] for at in order], who)

    @precondition(lambda self: self.world.grants)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        grant = self.grant(which)
        self.world.store.reads.release(grant.lease.id, grant.lease.group)
        assert self.world.control.generation(grant.lease.slot) != grant.lease.generation
        self.world.store.reads.release(grant.lease.id, grant.lease.group)

    @precondition(lambda self: self.world.grants)
    @rule(which=WHICH)
    def release_a_foreign_lease(self, which: int) -> None:
        lease = self.grant(which).lease
        thief = next(group for group in GROUPS if group != lease.group)
        self.world.store.reads.release(lease.id, thief)
        with pytest.raises(UnknownLease):
            self.world.store.reads.lease(lease.id, thief)
        with pytest.raises(UnknownLease):
            self.world.store.writes.commit(lease.id, thief, self.world.now_s)
        assert self.world.control.generation(lease.slot) == lease.generation

    @rule(where=WHERE, tokens=TOKENS, ttl_s=TTL)
    def pin(self, where: int, tokens: list[int], ttl_s: float) -> None:
        self.pins += 1
        namespace = self.namespace(where)
        self.world.store.reads.pin(
            namespace,
            chain(namespace, tokens),
            pin_id=self.pins.to_bytes(16, "little"),
            now_s=self.world.now_s,
            ttl_s=ttl_s,
        )
        self.world.take_jobs()

    @precondition(lambda self: self.pins)
    @rule(which=WHICH)
    def unpin(self, which: int) -> None:
        self.world.store.reads.unpin((1 + which % self.pins).to_bytes(16, "little"))

    # Writing

    @rule(
        where=WHERE,
        tokens=TOKENS,
        who=WHO,
        behind=st.integers(0, 4),
        ttl_s=TTL,
        allowed_loss=LOSS,
        loss=LOSS,
    )
    def reserve(
        self,
        where: int,
        tokens: list[int],
        who: GroupId,
        behind: int,
        ttl_s: float,
        allowed_loss: Loss,
        loss: Loss,
    ) -> None:
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        behind = min(behind, len(hashes) - 1)
        parent = hashes[behind - 1] if behind else None
        reserved = self.world.reserve(
            namespace,
            parent,
            hashes[behind:],
            who,
            ttl_s=ttl_s,
            allowed_loss=allowed_loss,
            loss=loss,
        )
        if reserved.lease is not None and allowed_loss is Loss.BOUNDED:
            self.world.commit(reserved.lease.id, who)

    @rule(where=WHERE, prompts=st.lists(TOKENS, min_size=1, max_size=4), who=WHO)
    def serve(self, where: int, prompts: list[list[int]], who: GroupId) -> None:
        namespace = self.namespace(where)
        for tokens in prompts:
            self.world.serve(namespace, chain(namespace, tokens), who)

    @rule(where=WHERE, prompts=st.lists(TOKENS, min_size=2, max_size=6), who=WHO)
    def serve_with_a_quick_disk(self, where: int, prompts: list[list[int]], who: GroupId) -> None:
        namespace = self.namespace(where)
        for tokens in prompts:
            self.world.serve(namespace, chain(namespace, tokens), who)
            self.world.store.tiers.write_ahead(self.world.now_s, idle=True)
            self.world.take_jobs()
            self.write_all()

    def write_all(self) -> None:
        while any(
            writer and self.world.online(shard) for shard, writer in enumerate(self.world.writers)
        ):
            for which in range(self.world.shards):
                if self.world.writer:
                    self.world.finish_write(which=which)

    @precondition(lambda self: self.world.writings)
    @rule(which=WHICH)
    def commit(self, which: int) -> None:
        writing = self.writing(which)
        self.world.commit(writing.lease_id, writing.group)
        with pytest.raises(UnknownLease):
            self.world.store.writes.commit(writing.lease_id, writing.group, self.world.now_s)

    @precondition(lambda self: self.world.writings)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        writing = self.writing(which)
        self.world.abort(writing.lease_id, writing.group)
        self.world.store.writes.abort(writing.lease_id, writing.group)

    @precondition(lambda self: self.world.writings)
    @rule(which=WHICH)
    def steal_a_write_lease(self, which: int) -> None:
        writing = self.writing(which)
        thief = next(group for group in GROUPS if group != writing.group)
        self.world.store.writes.abort(writing.lease_id, thief)
        with pytest.raises(UnknownLease):
            self.world.store.writes.commit(writing.lease_id, thief, self.world.now_s)
        with pytest.raises(LeaseState):
            self.world.store.reads.release(writing.lease_id, writing.group)

    @precondition(lambda self: self.world.zombies)
    @rule(which=WHICH, how=st.sampled_from(("abort", "commit", "exit")))
    def a_late_writer_stops(self, which: int, how: str) -> None:
        zombie = self.world.zombies.pop(which % len(self.world.zombies))
        if how == "abort":
            self.world.store.writes.abort(zombie.lease_id, zombie.group)
        elif how == "commit":
            with pytest.raises(UnknownLease):
                self.world.store.writes.commit(zombie.lease_id, zombie.group, self.world.now_s)

    @rule(where=WHERE, tokens=TOKENS)
    def finish(self, where: int, tokens: list[int]) -> None:
        namespace = self.namespace(where)
        self.world.store.finish(namespace, chain(namespace, tokens)[-1])

    @rule(where=WHERE, tokens=TOKENS)
    def flush(self, where: int, tokens: list[int]) -> None:
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        durable = self.world.store.tiers.flush(namespace, hashes, self.world.now_s)
        self.world.take_jobs()
        for key, says in zip(hashes, durable, strict=True):
            if says:
                version = self.world.current(namespace.digest, key)
                stored = [medium.blocks.get(key) for medium in self.world.media]
                assert any(found is not None and found[2] == version for found in stored)

    @rule(idle=st.booleans())
    def write_ahead(self, idle: bool) -> None:
        self.world.store.tiers.write_ahead(self.world.now_s, idle=idle)
        self.world.take_jobs()

    @rule(pages=st.integers(1, 12))
    def start_demotions(self, pages: int) -> None:
        self.world.store.tiers.start_demotions(pages * 4096, self.world.now_s)
        self.world.take_jobs()

    @rule(where=WHERE, tokens=TOKENS, aborts=st.booleans(), hole=st.integers(1, 3))
    def fill_a_hole(self, where: int, tokens: list[int], aborts: bool, hole: int) -> None:
        """A head goes away under blocks that continue it, and comes back while RAM is full."""
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        hole = min(hole, len(hashes))
        head = self.world.reserve(namespace, None, hashes[:hole], GROUPS[0])
        self.world.put(namespace, hashes[hole:], GROUPS[1], parent=hashes[hole - 1])
        if aborts and head.lease is not None:
            self.world.abort(head.lease.id, GROUPS[0])
        elif not aborts:
            self.world.drop_blocks(namespace, hashes[:hole])
        self.world.serve(namespace, chain(namespace, [0, *tokens]))
        self.world.serve(namespace, hashes)

    # Dropping

    @rule(where=WHERE, tokens=TOKENS, last=st.integers(1, 3))
    def drop_blocks(self, where: int, tokens: list[int], last: int) -> None:
        namespace = self.namespace(where)
        hashes = chain(namespace, tokens)
        self.world.drop_blocks(namespace, hashes[-last:])
        self.assert_miss(namespace, hashes)

    @rule(where=WHERE, tokens=TOKENS, really=RARELY)
    def drop_namespace(self, where: int, tokens: list[int], really: bool) -> None:
        if not really:
            return
        namespace = self.namespace(where)
        self.world.drop_namespace(namespace)
        self.assert_miss(namespace, chain(namespace, tokens))

    @precondition(lambda self: self.world.loads)
    @rule(which=WHICH, who=WHO, whole=st.booleans())
    def replace_under_a_load(self, which: int, who: GroupId, whole: bool) -> None:
        """A block is dropped and stored anew, with other bytes, while its old bytes are read."""
        block = self.world.loads[which % len(self.world.loads)].copy.block
        namespace = block.namespace
        hashes = [above.hash for above in self.world.store.index.chain(block)][::-1]
        if whole:
            self.world.drop_namespace(namespace)
        else:
            self.world.drop_blocks(namespace, hashes)
        self.world.put(namespace, hashes, who)
        self.world.store.tiers.flush(namespace, hashes, self.world.now_s)
        self.world.take_jobs()
        self.write_all()

    @rule()
    def reap(self) -> None:
        while self.world.store.reap():
            pass
        self.world.take_jobs()

    def assert_miss(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> None:
        hit = self.world.store.reads.lookup(namespace, hashes)
        assert hit.host_blocks + hit.ssd_blocks < len(hashes)

    # Time and completions

    @rule(seconds=st.sampled_from((0.5, 2.0, 10.0, 700.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.wall_s += seconds
        self.world.expire()

    @precondition(lambda self: self.world.loads)
    @rule(which=WHICH, error=FAULT)
    def a_load_ends(self, which: int, error: TierUnavailable | None) -> None:
        self.world.finish_load(which % len(self.world.loads), error)

    @precondition(lambda self: self.world.loads)
    @rule(which=WHICH)
    def a_load_is_late(self, which: int) -> None:
        self.world.make_late(which % len(self.world.loads))

    @precondition(lambda self: self.world.writer)
    @rule(error=FAULT, jobs=st.integers(1, 6), which=WHICH)
    def the_writer_works(self, error: TierUnavailable | None, jobs: int, which: int) -> None:
        self.world.finish_write(error, which)
        for step in range(min(jobs, len(self.world.writer))):
            if self.world.writer:
                self.world.finish_write(which=which + step)

    # Shards

    @rule(which=WHICH, really=RARELY)
    def a_shard_fails(self, which: int, really: bool) -> None:
        if really:
            self.world.fail(which % self.world.shards)

    @rule(which=WHICH, loses=RARELY)
    def a_shard_comes_back(self, which: int, loses: bool) -> None:
        shard = which % self.world.shards
        if not self.world.online(shard):
            segments = sorted(set(self.world.media[shard].segments.values()))
            lost = segments[which % len(segments)] if loses and segments else None
            self.world.come_back(shard, lost=lost)

    @rule(which=WHICH)
    def a_shard_hangs_and_resumes(self, which: int) -> None:
        shard = which % self.world.shards
        if self.world.online(shard):
            self.world.store.tiers.shard_down(shard)
            self.world.store.tiers.shard_resumed(shard)

    @rule(which=WHICH, really=RARELY)
    def a_segment_is_given_up(self, which: int, really: bool) -> None:
        shard = which % self.world.shards
        segments = sorted(set(self.world.media[shard].segments.values()))
        if really and segments:
            self.world.retire(shard, segments[which % len(segments)])

    @rule()
    def the_mover_catches_up(self) -> None:
        self.world.settle()

    # Processes

    @rule(who=WHO, really=RARELY)
    def end_group(self, who: GroupId, really: bool) -> None:
        if really:
            self.world.end_group(who)

    @rule(who=WHO, really=RARELY)
    def kill_client(self, who: GroupId, really: bool) -> None:
        if not really:
            return
        self.world.kill(who)
        self.world.store.writes.release_quarantine(self.world.alive())
        self.world.groups.add(who)

    @rule()
    def release_quarantine(self) -> None:
        self.world.store.writes.release_quarantine(self.world.alive())

    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        if really:
            self.world.restart()

    # What must hold

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for group in GROUPS:
            world.kill(group)
        world.now_s += 1_000.0
        world.expire()
        world.zombies.clear()
        world.store.writes.release_quarantine(set())
        while world.store.reap():
            pass
        world.take_jobs()
        world.settle()
        world.check()
        world.check_idle()
        self.check_restart()

    def check_restart(self) -> None:
        """After a last restart the stored blocks are there, and evicted ones that lingered."""
        before = self.stored()
        self.world.restart()
        after = self.stored()
        assert before <= after <= self.on_media()
        self.world.settle()
        assert self.on_media() == after, "an orphan stays on a medium"

    def on_media(self) -> set[BlockHash]:
        return {key for medium in self.world.media for key in medium.blocks}

    def stored(self) -> set[BlockHash]:
        return {
            key
            for namespace in self.world.store.index.namespaces.values()
            for key, block in namespace.blocks.items()
            if block.ssd is SsdState.STORED
            and all(above.ssd is SsdState.STORED for above in self.world.store.index.chain(block))
        }


QUICK = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_random_calls_never_break_the_store() -> None:
    """A short run, the same one every time."""
    run_state_machine_as_test(StoreMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_calls_never_break_the_store() -> None:
    """A long run, another one every time."""
    long = settings(QUICK, max_examples=2_000, stateful_step_count=150, derandomize=False)
    run_state_machine_as_test(StoreMachine, settings=long)
