"""SSD shards: striping, a directory that goes away, segments that are given up, recency, age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.errors import CorruptBlock, TierUnavailable
from kvtier.jobs import RestampJob, WriteJob
from kvtier.shards import RESTAMP_S, SsdResidency
from kvtier.store import StoreConfig
from kvtier.types import BlockHash, Refusal, WritePolicy
from tests.sim.world import World, chain, spec_of
from tests.unit.support import ALICE, BOB, PAGE, SPEC, present, world_of, write_out


def shards_of(world: World) -> SsdResidency:
    ssd = world.store.tiers.ssd
    assert ssd is not None
    return ssd


def striped(shards: int, *, blocks: int = 64, ssd_blocks: int = 256) -> World:
    config = StoreConfig(host_bytes=blocks * PAGE, write_queue_bytes=blocks * PAGE * shards)
    world = World(config, limit_bytes=ssd_blocks * PAGE, shards=shards)
    world.groups.update((ALICE, BOB))
    return world


def stored_chain(world: World, tokens: int, start: int = 0) -> list[BlockHash]:
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(start, start + tokens))
    world.put(namespace, hashes)
    write_out(world, namespace, hashes)
    return hashes


def only_on_ssd(world: World, hashes: list[BlockHash]) -> None:
    """Push a chain out of RAM."""
    filler = chain(world.open(SPEC), range(10_000, 10_000 + 64))
    world.put(world.open(SPEC), filler)
    write_out(world, world.open(SPEC), filler)
    blocks = world.open(SPEC).blocks
    assert all(blocks[key].host is None for key in hashes)


def test_blocks_are_striped_and_found_again_after_a_restart() -> None:
    """User report 23: after a restart everything hits, and nothing is written again."""
    world = striped(3)
    hashes = stored_chain(world, 48)
    held = [set(medium.blocks) for medium in world.media]
    assert set().union(*held) == set(hashes)
    assert sum(map(len, held)) == 48
    assert all(len(part) > 5 for part in held), "striping is uneven"
    world.restart()
    assert present(world, hashes) == 48
    assert not world.writer
    assert world.serve(world.open(SPEC), hashes) == 48
    world.settle()
    assert world.store.counters.ssd_written_blocks == 0


def test_a_directory_that_fails_costs_its_blocks_only_and_comes_back_with_them() -> None:
    world = striped(2)
    hashes = stored_chain(world, 40)
    only_on_ssd(world, hashes)
    out = 1
    first_out = next(at for at, key in enumerate(hashes) if key in world.media[out].blocks)
    world.fail(out)
    assert present(world, hashes) == first_out
    # What is computed again goes to the shard that works.
    assert world.serve(world.open(SPEC), hashes) == first_out
    write_out_online(world, hashes)
    assert set(hashes) <= set(world.media[0].blocks) | {
        key for key in hashes if key in world.media[out].blocks
    }
    assert present(world, hashes) == 40
    only_ssd = [world.open(SPEC).blocks[key].place.shard for key in hashes]
    assert set(only_ssd) == {0}
    world.come_back(out, lost=None)
    world.settle()
    assert present(world, hashes) == 40
    world.restart()
    assert present(world, hashes) == 40


def write_out_online(world: World, hashes: list[BlockHash]) -> None:
    world.store.tiers.flush(world.open(SPEC), hashes, world.now_s)
    world.take_jobs()
    while world.writers[0]:
        world.finish_write()


def test_a_mere_hang_loses_nothing() -> None:
    world = striped(2)
    hashes = stored_chain(world, 20)
    only_on_ssd(world, hashes)
    world.store.tiers.shard_down(0)
    assert present(world, hashes) < 20
    world.store.tiers.shard_resumed(0)
    assert present(world, hashes) == 20


def test_without_any_shard_online_nothing_is_queued_and_ram_goes_on() -> None:
    world = striped(1, blocks=8)
    world.fail(0)
    for start in range(0, 100, 10):
        hashes = chain(world.open(SPEC), range(start, start + 8))
        world.serve(world.open(SPEC), hashes)
        assert present(world, hashes) == 8
    assert not world.writer
    assert world.store.counters.demotions_shed_blocks > 0


def test_one_full_shard_evicts_blocks_behind_its_own_on_the_others() -> None:
    """Chains are striped: the coldest of a shard may all be ancestors of blocks elsewhere."""
    world = striped(2, blocks=16, ssd_blocks=24)
    world.media[1].limit_bytes = 1_000 * PAGE
    shards_of(world).shards[1].usage = world.media[1].usage()
    for start in range(0, 1_000, 16):
        hashes = chain(world.open(SPEC), range(start, start + 16))
        world.serve(world.open(SPEC), hashes)
        write_out(world, world.open(SPEC), hashes)
        assert world.media[0].used_bytes <= 24 * PAGE
        world.check()
    assert present(world, hashes) == 16
    counters = world.store.counters
    assert counters.demotions_shed_blocks == 0
    assert counters.ssd_evicted_blocks > 0


def test_a_segment_that_is_given_up_is_a_miss_at_once_and_reaped_later() -> None:
    world = striped(1)
    hashes = stored_chain(world, 30)
    only_on_ssd(world, hashes)
    lost = world.media[0].segments[hashes[10]]
    first = next(at for at, key in enumerate(hashes) if world.media[0].segments[key] == lost)
    world.retire(0, lost)
    assert present(world, hashes) == first
    world.retire(0, lost)
    world.settle()
    while world.store.reap():
        world.take_jobs()
    world.settle()
    assert len(shards_of(world)) == len(world.media[0].blocks)
    assert world.serve(world.open(SPEC), hashes) == first
    write_out(world, world.open(SPEC), hashes)
    assert present(world, hashes) == 30
    world.check()


def test_a_write_that_lands_in_a_segment_given_up_meanwhile_did_not_happen() -> None:
    world = striped(1)
    stored_chain(world, 1)
    namespace = world.open(SPEC)
    late = chain(namespace, [777])
    world.put(namespace, late)
    world.store.tiers.flush(namespace, late, world.now_s)
    world.take_jobs()
    world.retire(0, world.media[0].puts // 3)
    world.finish_write()
    block = namespace.blocks[late[0]]
    assert not block.stored
    assert block in shards_of(world).dirty
    world.excused.update(late)
    world.settle()
    world.now_s += 10.0
    write_out(world, namespace, late)
    assert block.stored


def test_recency_survives_a_restart_approximately() -> None:
    """Touches are stored in batches; after a restart the touched chain is not the coldest."""
    world = striped(1, blocks=128, ssd_blocks=60)
    old = stored_chain(world, 20)
    new = stored_chain(world, 20, start=500)
    world.store.finish(world.open(SPEC), old[-1])
    world.now_s += RESTAMP_S + 1
    world.expire()
    assert any(isinstance(job, RestampJob) for job in world.writer)
    world.settle()
    world.now_s += RESTAMP_S + 1
    world.expire()
    assert not world.writer, "a stamp is stored once"
    world.restart()
    stored_chain(world, 35, start=900)
    assert present(world, old) > present(world, new)


def test_a_late_load_is_a_miss_and_its_extent_waits_for_the_read() -> None:
    """User reports 6 and 12: the good head is kept, and a late read harms nobody."""
    world = striped(1)
    hashes = stored_chain(world, 6)
    only_on_ssd(world, hashes)
    lease, _ = world.acquire(world.open(SPEC), hashes, ALICE)
    assert lease is not None
    world.finish_load(0)
    world.finish_load(0)
    for at in range(4):
        world.make_late(at)
    assert (lease.ready, lease.usable) == (2, 2)
    world.store.reads.release(lease.id, ALICE)
    pinned_bytes = world.store.tiers.host.pinned_bytes
    assert pinned_bytes == 4 * PAGE
    # The same blocks can be loaded again meanwhile, into other extents.
    again, _ = world.acquire(world.open(SPEC), hashes, BOB)
    assert again is not None
    late = {job.copy.extent for job in world.loads[:4]}
    assert not late & {copy.extent for copy in again.copies}
    world.settle()
    assert again.ready == 6
    world.check()
    world.store.reads.release(again.id, BOB)
    assert world.store.tiers.host.pinned_bytes == 0
    assert world.store.counters.late_loads == 4


def test_a_read_error_drops_the_block_but_a_dead_shard_keeps_its_own() -> None:
    world = striped(1)
    hashes = stored_chain(world, 3)
    only_on_ssd(world, hashes)
    world.acquire(world.open(SPEC), hashes, ALICE)
    world.finish_load(2, TierUnavailable("EIO"))
    assert (
        not world.open(SPEC).blocks[hashes[2]].held
        if hashes[2] in world.open(SPEC).blocks
        else True
    )
    world.store.tiers.shard_down(0)
    world.finish_load(1, TierUnavailable("EIO"))
    world.finish_load(0, TierUnavailable("EIO"))
    assert present(world, hashes) == 0
    world.store.tiers.shard_resumed(0)
    assert present(world, hashes) == 2


def test_the_scrubber_drops_what_is_corrupt_and_ram_writes_it_again() -> None:
    """User report 24: dropped, counted, and storing again works."""
    world = striped(1)
    hashes = stored_chain(world, 3)
    meta = world.media[0].blocks[hashes[1]][0]
    segment = world.media[0].segments[hashes[1]]
    world.store.tiers.corrupt(meta, 0, segment + 1, "checksum")
    assert world.open(SPEC).blocks[hashes[1]].stored, "it is elsewhere by now"
    world.store.tiers.corrupt(meta, 0, segment, "checksum")
    assert not world.open(SPEC).blocks[hashes[1]].stored
    assert world.store.counters.corrupt_blocks == {"checksum": 1}
    world.take_jobs()
    world.settle()
    assert hashes[1] not in world.media[0].blocks
    world.store.tiers.write_ahead(world.now_s, idle=True)
    world.take_jobs()
    world.settle()
    assert world.open(SPEC).blocks[hashes[1]].stored


class TestLoadOrRecompute:
    """User report 30: load only what is faster to load than to recompute."""

    def measured(self, bytes_per_s: float) -> tuple[World, list[BlockHash]]:
        world = striped(1)
        hashes = stored_chain(world, 20)
        only_on_ssd(world, hashes)
        world.store.reads.measured(0, int(bytes_per_s), 1.0)
        return world, hashes

    def grant(
        self, world: World, hashes: list[BlockHash], tokens_per_s: float
    ) -> tuple[int, Refusal]:
        lease, refusal = world.store.reads.acquire(
            world.open(SPEC),
            hashes,
            group=ALICE,
            now_s=world.now_s,
            prefill_tokens_per_s=tokens_per_s,
        )
        world.take_jobs()
        return 0 if lease is None else len(lease.copies), refusal

    def test_a_fast_disk_is_loaded(self) -> None:
        world, hashes = self.measured(1e9)
        assert self.grant(world, hashes, 100.0) == (20, Refusal.NONE)
        assert world.store.counters.declined_blocks == 0

    def test_a_slow_disk_is_declined(self) -> None:
        world, hashes = self.measured(PAGE)  # A block a second, a block has one token.
        assert self.grant(world, hashes, 100.0) == (0, Refusal.SLOW)
        assert world.store.counters.declined_blocks == 20
        assert world.store.counters.missed_blocks == 20
        assert not world.loads

    def test_without_a_rate_or_a_measurement_all_is_loaded(self) -> None:
        world, hashes = self.measured(PAGE)
        assert self.grant(world, hashes, 0.0) == (20, Refusal.NONE)
        unknown = striped(1)
        hashes = stored_chain(unknown, 20)
        only_on_ssd(unknown, hashes)
        assert self.grant(unknown, hashes, 1e9) == (20, Refusal.NONE)

    def test_what_is_in_ram_is_granted_and_only_the_rest_declined(self) -> None:
        world, hashes = self.measured(PAGE)
        world.acquire(world.open(SPEC), hashes[:5], BOB)
        while world.loads:
            world.finish_load(0)
        assert self.grant(world, hashes, 100.0) == (5, Refusal.SLOW)

    def test_ram_behind_a_slow_block_pays_for_loading_it(self) -> None:
        world, hashes = self.measured(10 * PAGE)  # 0.1 s a block.
        world.acquire(world.open(SPEC), hashes, BOB)
        while world.loads:
            world.finish_load(0)
        blocks = world.open(SPEC).blocks
        assert blocks[hashes[3]].host is not None
        world.store.reads.release(world.grants[-1].lease.id, BOB)
        world.store.tiers.host.evict(blocks[hashes[3]])
        # Computing 17 tokens at 50/s takes 0.34 s: more than the 0.1 s of one block.
        assert self.grant(world, hashes, 50.0) == (20, Refusal.NONE)
        world.settle()
        world.store.tiers.host.pin(blocks[hashes[0]].host)  # type: ignore[arg-type]
        assert self.grant(world, hashes, 1e6) == (20, Refusal.NONE), "all is in RAM now"

    def test_the_queue_ahead_counts(self) -> None:
        world, hashes = self.measured(100 * PAGE)  # 10 ms a block.
        assert self.grant(world, hashes[:2], 20.0) == (2, Refusal.NONE)
        other = chain(world.open(SPEC), range(10_000, 10_064))
        speed = shards_of(world).shards[0].speed
        assert speed.loading_bytes == 2 * PAGE
        assert speed.load_s(PAGE) == pytest.approx(0.032)
        world.settle()
        assert speed.loading_bytes == 0
        assert other

    def test_the_prediction_error_is_counted(self) -> None:
        world, _ = self.measured(1_000.0)
        world.store.reads.measured(0, 500, 1.0)
        counters = world.store.counters
        assert counters.load_predicted_seconds == pytest.approx(0.5)
        assert counters.load_actual_seconds == pytest.approx(1.0)
        assert counters.load_prediction_error_seconds == pytest.approx(0.5)


class TestRetention:
    def test_old_blocks_are_misses_at_once_and_reclaimed(self) -> None:
        world = striped(1)
        namespace = world.open(SPEC)
        world.store.open_namespace(namespace.digest, SPEC, max_age_s=100)
        world.expire()
        old = stored_chain(world, 4)
        world.wall_s += 60
        world.expire()
        young = stored_chain(world, 4, start=50)
        assert (present(world, old), present(world, young)) == (4, 4)
        world.wall_s += 60
        world.expire()
        assert (present(world, old), present(world, young)) == (0, 4)
        world.expire()
        world.settle()
        assert set(world.media[0].blocks) == set(young)
        assert world.store.counters.expired_blocks == 4

    def test_an_old_block_can_be_stored_again(self) -> None:
        world = striped(1)
        namespace = world.open(SPEC)
        world.store.open_namespace(namespace.digest, SPEC, max_age_s=100)
        hashes = stored_chain(world, 4)
        world.wall_s += 200
        world.expire()
        assert world.serve(namespace, hashes) == 0
        assert present(world, hashes) == 4

    def test_the_age_survives_a_restart(self) -> None:
        world = World(
            StoreConfig(host_bytes=64 * PAGE, write_queue_bytes=64 * PAGE, max_age_s=100),
            limit_bytes=256 * PAGE,
        )
        hashes = stored_chain(world, 4)
        world.wall_s += 90
        world.restart()
        assert present(world, hashes) == 4
        world.wall_s += 20
        world.expire()
        assert present(world, hashes) == 0

    def test_the_shortest_wish_holds(self) -> None:
        world = world_of(8)
        namespace = world.open(SPEC)
        assert namespace.max_age_s == 0
        for wish, holds in ((50, 50), (100, 50), (0, 50), (20, 20)):
            world.store.open_namespace(namespace.digest, SPEC, max_age_s=wish)
            assert namespace.max_age_s == holds


class TestEndurance:
    """User report 27: SSD wear."""

    def world(self, daily_blocks: int) -> World:
        config = StoreConfig(
            host_bytes=32 * PAGE,
            write_queue_bytes=64 * PAGE,
            daily_write_bytes=daily_blocks * PAGE,
            rated_write_bytes=10_000 * PAGE,
        )
        world = World(config, limit_bytes=10_000 * PAGE)
        world.groups.add(ALICE)
        return world

    def test_writes_stop_when_the_budget_is_spent_and_go_on_with_time(self) -> None:
        """User report 26: what is not written is shown as skipped by admission."""
        world = self.world(800)  # A burst of 200, 100 at start.
        counters = world.store.counters
        for start in range(0, 2_000, 20):
            hashes = chain(world.open(SPEC), range(start, start + 20))
            world.serve(world.open(SPEC), hashes)
            world.store.tiers.write_ahead(world.now_s, idle=True)
            world.take_jobs()
            world.settle()
            world.expire()
        assert 0 < counters.ssd_written_blocks <= 100
        assert counters.skipped_by_admission_blocks > 1_000
        world.now_s += 6 * 3600
        world.expire()
        hashes = chain(world.open(SPEC), range(5_000, 5_020))
        world.put(world.open(SPEC), hashes)  # What is in the way is written first.
        world.settle()
        world.put(world.open(SPEC), hashes)
        write_out(world, world.open(SPEC), hashes)
        assert set(hashes) <= set(world.media[0].blocks)

    def test_a_short_budget_writes_only_what_is_used_twice(self) -> None:
        world = self.world(800)
        ssd = shards_of(world)
        ssd.budget.spend(80 * PAGE)
        world.expire()
        assert ssd.budget.tight
        once = chain(world.open(SPEC), range(4))
        twice = chain(world.open(SPEC), range(50, 54))
        world.put(world.open(SPEC), once)
        world.put(world.open(SPEC), twice)
        world.serve(world.open(SPEC), twice)
        world.store.tiers.write_ahead(world.now_s, idle=True)
        world.take_jobs()
        world.settle()
        assert set(world.media[0].blocks) == set(twice)

    def test_bytes_written_today_and_the_life_left(self) -> None:
        world = self.world(0)
        budget = shards_of(world).budget
        assert budget.allows(1 << 60)
        assert shards_of(world).lifetime_days is None
        world.now_s = 3600.0 * 100
        world.expire()
        stored_chain(world, 10)
        assert budget.written_today_bytes == 10 * PAGE
        assert shards_of(world).lifetime_days == pytest.approx(1_000)
        world.now_s += 3600.0 * 25
        world.expire()
        assert budget.written_today_bytes == 0


def test_a_restart_forgets_what_nobody_can_hit() -> None:
    """User report 23: no orphans. A hole in a chain, a dropped generation, a block twice."""
    world = striped(2)
    hashes = stored_chain(world, 12)
    hole = hashes[5]
    for medium in world.media:
        medium.delete(hole)
    world.excused.add(hole)
    world.media[0].rows, both = world.media[0].rows, hashes[0]
    holder = next(medium for medium in world.media if both in medium.blocks)
    other = next(medium for medium in world.media if medium is not holder)
    meta, data, version = holder.blocks[both]
    other.put(meta, data, version, holder.losses[both])
    world.restart()
    assert present(world, hashes) == 5
    world.settle()
    assert sorted(key for medium in world.media for key in medium.blocks) == sorted(hashes[:5])


def test_a_load_that_finds_nothing_is_a_miss() -> None:
    world = striped(1)
    hashes = stored_chain(world, 2)
    only_on_ssd(world, hashes)
    world.media[0].delete(hashes[1])
    world.excused.add(hashes[1])
    lease, _ = world.acquire(world.open(SPEC), hashes, ALICE)
    assert lease is not None
    world.finish_load(0)
    world.finish_load(0, CorruptBlock("it is short", "short"))
    assert (lease.ready, lease.usable) == (1, 1)
    assert world.store.counters.load_failed_blocks == {"short": 1}


def test_write_policies_are_untouched_without_a_budget() -> None:
    config = StoreConfig(host_bytes=8 * PAGE, write_policy=WritePolicy.THROUGH)
    world = World(config, limit_bytes=64 * PAGE)
    world.put(world.open(SPEC), chain(world.open(SPEC), range(4)))
    assert len(world.writer) == 5


def test_a_medium_that_starts_empty_may_reuse_segment_numbers_and_gets_its_namespaces() -> None:
    world = striped(1)
    hashes = stored_chain(world, 10)
    world.fail(0)
    world.media[0] = type(world.media[0])(world.media[0].limit_bytes)
    world.excused.update(hashes)
    world.come_back(0, lost=None)
    while world.store.reap():
        world.take_jobs()
    world.settle()
    assert len(shards_of(world)) == 0
    again = stored_chain(world, 10, start=100)
    assert all(world.open(SPEC).blocks[key].stored for key in again)
    world.check()


def test_while_a_shard_is_out_ancestors_of_its_blocks_may_leave() -> None:
    world = striped(2, blocks=16, ssd_blocks=10)
    hashes = stored_chain(world, 16)
    only_on_ssd_of(world, hashes)
    world.fail(1)
    for start in range(1_000, 1_300, 16):
        newer = chain(world.open(SPEC), range(start, start + 16))
        world.serve(world.open(SPEC), newer)
        write_out_online(world, newer)
    on_the_other = set(world.media[0].blocks) & set(hashes)
    assert not on_the_other, "the coldest of a full shard can't leave"


def only_on_ssd_of(world: World, hashes: list[BlockHash]) -> None:
    for key in reversed(hashes):
        world.store.tiers.host.evict(world.open(SPEC).blocks[key])


def test_what_a_lost_segment_held_is_not_deleted_there_again() -> None:
    world = striped(1)
    hashes = stored_chain(world, 2)
    world.retire(0, world.media[0].segments[hashes[1]])
    world.settle()
    for key in hashes:
        shards_of(world).drop(world.open(SPEC).blocks[key])
    world.excused.update(hashes)
    assert world.store.take_jobs() == []


def test_a_dropped_block_is_not_restamped() -> None:
    world = striped(1)
    hashes = stored_chain(world, 2)
    world.serve(world.open(SPEC), hashes)
    shard = shards_of(world).shards[0]
    assert len(shard.touched) == 2
    world.drop_blocks(world.open(SPEC), hashes)
    assert not shard.touched


def test_the_budget_counts_what_the_codec_left() -> None:
    world = striped(1)
    namespace = world.open(SPEC)
    hashes = chain(namespace, range(1))
    world.put(namespace, hashes)
    world.store.tiers.flush(namespace, hashes, world.now_s)
    world.take_jobs()
    world.finish_write()
    (job,) = world.writer
    assert isinstance(job, WriteJob)
    ssd = shards_of(world)
    assert ssd.budget.written_today_bytes == PAGE
    ssd.written(job, 0.0, stored_bytes=1_000, segment=0, loss=job.allowed_loss)
    assert ssd.budget.written_today_bytes == 1_000


def test_a_parent_in_another_namespace_is_no_parent() -> None:
    world = striped(1)
    hashes = stored_chain(world, 2)
    other = world.open(spec_of(2 * PAGE))
    stray = chain(other, [1])
    world.put(other, stray)
    write_out(world, other, stray)
    meta, data, version = world.media[0].blocks[stray[0]]
    forged = replace(meta, parent=hashes[0], depth=1)
    world.media[0].blocks[stray[0]] = forged, data, version
    world.excused.update(stray)
    world.restart()
    assert world.store.reads.lookup(world.open(spec_of(2 * PAGE)), stray).ssd_blocks == 0
    assert stray[0] not in world.open(spec_of(2 * PAGE)).blocks
    world.settle()
    assert stray[0] not in world.media[0].blocks


def test_a_shard_that_missed_a_drop_learns_of_it_at_the_restart() -> None:
    world = striped(2)
    hashes = stored_chain(world, 12)
    world.store.tiers.shard_down(1)
    world.drop_namespace(world.open(SPEC))
    while world.writers[0]:
        world.finish_write(which=0)
    behind = world.media[1].rows[world.open(SPEC).digest].generation
    assert behind < world.media[0].rows[world.open(SPEC).digest].generation
    world.open_drops.clear()
    world.restart()
    assert present(world, hashes) == 0
    world.settle()
    generations = {medium.rows[world.open(SPEC).digest].generation for medium in world.media}
    assert generations == {world.open(SPEC).generation}
    assert not world.media[1].blocks


def test_a_block_that_was_too_slow_to_load_comes_to_ram_when_it_is_computed() -> None:
    """It is offered again for nothing; the SSD has it already, so it is not written twice."""
    world = striped(1)
    hashes = stored_chain(world, 4)
    only_on_ssd(world, hashes)
    written = world.store.counters.ssd_written_blocks
    reserved = world.put(world.open(SPEC), hashes)
    assert reserved.indices == [0, 1, 2, 3]
    assert world.store.reads.lookup(world.open(SPEC), hashes).host_blocks == 4
    world.store.tiers.write_ahead(world.now_s, idle=True)
    world.take_jobs()
    world.settle()
    assert world.store.counters.ssd_written_blocks == written
    world.restart()
    assert present(world, hashes) == 4


def test_a_dropped_block_that_was_evicted_before_does_not_come_back() -> None:
    """An evicted block lingers on the medium; a drop must reach it there, too."""
    world = striped(1, blocks=4, ssd_blocks=3)
    old = stored_chain(world, 2)
    stored_chain(world, 3, start=100)
    assert world.media[0].lingering == set(old)
    world.drop_blocks(world.open(SPEC), old)
    world.settle()
    world.restart()
    assert present(world, old) == 0


def test_an_evicted_block_may_come_back_after_a_crash() -> None:
    world = striped(1, blocks=4, ssd_blocks=3)
    old = stored_chain(world, 2)
    stored_chain(world, 3, start=100)
    assert world.media[0].lingering == set(old)
    world.restart()
    assert present(world, old) == 2
    newer = stored_chain(world, 3, start=200)
    assert present(world, newer) == 3
    assert world.media[0].used_bytes <= 3 * PAGE


@pytest.mark.parametrize("late", [False, True])
def test_a_load_from_a_segment_that_is_reaped_meanwhile_leaves_no_block(late: bool) -> None:
    world = striped(1)
    hashes = stored_chain(world, 1)
    only_on_ssd(world, hashes)
    world.acquire(world.open(SPEC), hashes, ALICE)
    world.retire(0, world.media[0].segments[hashes[0]])
    while world.store.reap():
        pass
    if late:
        world.make_late(0)
    world.finish_load(0, TierUnavailable("EIO"))
    assert hashes[0] not in world.open(SPEC).blocks
    world.check()


def test_of_two_copies_that_a_crash_left_the_newer_counts() -> None:
    world = striped(2)
    hashes = stored_chain(world, 1)
    holder = next(medium for medium in world.media if hashes[0] in medium.blocks)
    other = next(medium for medium in world.media if medium is not holder)
    meta, data, version = holder.blocks[hashes[0]]
    for older, newer in ((other, holder), (holder, other)):
        older.rows = newer.rows = {**holder.rows, **other.rows}
        older.put(replace(meta, stamp=meta.stamp - 1), data, version, holder.losses[hashes[0]])
        newer.put(meta, data, version, holder.losses[hashes[0]])
        world.restart()
        assert world.open(SPEC).blocks[hashes[0]].place.shard == world.media.index(newer)
        world.settle()
        assert hashes[0] not in older.blocks


def test_a_stored_ancestor_stays_while_its_copy_in_ram_is_only_being_written() -> None:
    world = striped(1, blocks=8, ssd_blocks=4)
    hashes = stored_chain(world, 2)
    only_on_ssd_of(world, hashes)
    world.acquire(world.open(SPEC), hashes, ALICE)
    for at in range(2):
        world.make_late(at)
    reserved = world.reserve(world.open(SPEC), None, hashes[:1], BOB)
    assert reserved.lease is not None
    stored_chain(world, 4, start=100)
    world.abort(reserved.lease.id, BOB)
    world.check()


def test_a_copy_in_ram_does_not_leave_unwritten_for_a_segment_that_is_gone() -> None:
    world = striped(1, blocks=8)
    hashes = stored_chain(world, 4)
    world.retire(0, world.media[0].segments[hashes[0]])
    world.retire(0, world.media[0].segments[hashes[3]])
    for start in (100, 200, 300):  # Push it out of RAM before anybody reaps.
        world.put(world.open(SPEC), chain(world.open(SPEC), range(start, start + 8)))
        world.settle()
    assert present(world, hashes) == 4
    world.check()


def test_a_segment_that_is_still_there_after_a_failure_stays_given_up() -> None:
    world = striped(1)
    hashes = stored_chain(world, 1)
    segment = world.media[0].segments[hashes[0]]
    world.store.tiers.retire_segment(0, segment, damaged=True)
    world.excused.update(hashes)
    world.store.tiers.shard_down(0)
    world.store.tiers.shard_up(0, [segment])
    assert not shards_of(world).shards[0].has(segment)
    assert present(world, hashes) == 1, "RAM has it"


def test_a_block_dropped_by_name_while_its_namespace_is_reclaimed_frees_its_room_once() -> None:
    """Found by a random walk: a delete by hash takes blocks of former generations, too."""
    world = striped(1, ssd_blocks=32)
    hashes = stored_chain(world, 8)
    shard = shards_of(world).shards[0]
    world.drop_namespace(world.open(SPEC))
    world.store.drop_blocks(world.open(SPEC), hashes)
    world.take_jobs()
    world.settle()
    assert not world.media[0].blocks
    while world.store.reap():
        pass
    world.take_jobs()
    assert shard.projected_bytes == 0, "what was gone already is not freed again"
    world.settle()
    world.check()
