"""TierContract: what every block tier promises; a new tier is one subclass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvtier.codec import codec_by_name
from kvtier.codec.base import Bytes, Codec
from kvtier.errors import CorruptBlock, TierFull
from kvtier.extents import aligned
from kvtier.hashing import namespace_digest
from kvtier.tier.base import (
    BlockMeta,
    BlockTier,
    Deletion,
    NamespaceRow,
    PreparedBlock,
    Restamp,
    StoredBlocks,
    TierUsage,
    Wanted,
    WrittenBlock,
)
from kvtier.tier.ssd import SsdTier
from kvtier.types import BlockHash, Component, Loss, NamespaceSpec, RopeSpec

SMALL = NamespaceSpec(
    "small",
    "rev",
    (Component("latent", "bfloat16", (2, 8, 96)), Component("key", "uint8", (2, 8, 5))),
    rope=RopeSpec("half", 32, (("theta", "10000"),)),
    tenant="tenant",
)
MIDDLE = NamespaceSpec("middle", "rev", (Component("latent", "bfloat16", (3, 64, 333)),))
LARGE = NamespaceSpec("large", "rev", (Component("latent", "bfloat16", (5, 64, 1024)),))
SPECS = (SMALL, MIDDLE, LARGE)
ROWS = [NamespaceRow(namespace_digest(spec), spec, 3) for spec in SPECS]


def block_hash(number: int) -> BlockHash:
    return BlockHash(sha256(b"block %d" % number).digest())


@cache
def block(spec: NamespaceSpec, number: int) -> Bytes:
    """A block of bf16-like bytes, another for every number."""
    count = -(-spec.block_bytes // 2)
    normal = np.random.default_rng(number).standard_normal(count, dtype=np.float32)
    return (normal.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[: spec.block_bytes].copy()


def meta(spec: NamespaceSpec, number: int) -> BlockMeta:
    parent = block_hash(number - 1) if number else None
    return BlockMeta(
        block_hash(number),
        parent,
        depth=number,
        namespace=namespace_digest(spec),
        generation=3,
        stamp=10 - number,
        born_s=1_700_000_000 + number,
    )


def wanted_by(meta: BlockMeta, segment: int, loss: Loss = Loss.BOUNDED) -> Wanted:
    """What a reader of this block asks for."""
    return Wanted(meta.hash, segment, meta.namespace, meta.generation, loss)


def wanted(spec: NamespaceSpec, number: int, segment: int) -> Wanted:
    return wanted_by(meta(spec, number), segment)


class Lossy(Codec):
    """Keeps the first half; never meant to be read back."""

    id = 250
    version = 1
    name = "half"
    loss = Loss.BOUNDED

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        return block[: block.size // 2]

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        raise CorruptBlock("half of it is gone")


class Shelf:
    """A tier, and where its blocks are, as the store keeps it; blocks are named by number."""

    def __init__(self, tier: BlockTier) -> None:
        self.tier = tier
        self.where: dict[int, int] = {}
        self.specs: dict[int, NamespaceSpec] = {}

    def prepare(self, spec: NamespaceSpec, number: int) -> PreparedBlock:
        return self.tier.prepare(meta(spec, number), block(spec, number), Loss.EXACT)

    def write(self, spec: NamespaceSpec, number: int) -> WrittenBlock:
        return self.tier.write(self.prepare(spec, number))

    def put(self, spec: NamespaceSpec, numbers: Iterable[int]) -> TierUsage:
        return self.commit([self.write(spec, number) for number in numbers])

    def commit(self, writes: Sequence[WrittenBlock], deletes: Iterable[int] = ()) -> TierUsage:
        usage = self.tier.commit(deletes=[self.deletion(n) for n in deletes], writes=writes)
        for written in writes:
            number = written.block.meta.depth
            self.where[number] = written.segment
            self.specs[number] = spec_of(written.block)
        return usage

    def delete(self, numbers: Iterable[int]) -> TierUsage:
        return self.commit([], numbers)

    def deletion(self, number: int) -> Deletion:
        return Deletion(block_hash(number), self.where.pop(number, None))

    def read(self, spec: NamespaceSpec, number: int, segment: int | None = None) -> Bytes:
        out = np.full(spec.block_bytes, 0xA5, dtype=np.uint8)
        segment = self.where[number] if segment is None else segment
        stored = self.tier.read_into(wanted(spec, number, segment), out)
        assert 0 < stored <= spec.block_bytes
        return out

    def assert_reads(self, spec: NamespaceSpec, number: int) -> None:
        assert np.array_equal(self.read(spec, number), block(spec, number))

    def assert_all_read(self) -> None:
        """Every block, and no other one, is there."""
        for number in self.where:
            self.assert_reads(self.specs[number], number)
        assert self.tier.usage().blocks == len(self.where)


def spec_of(prepared: PreparedBlock) -> NamespaceSpec:
    return next(row.spec for row in ROWS if row.digest == prepared.meta.namespace)


def hashes(rows: StoredBlocks) -> set[bytes]:
    found = [row["hash"].tobytes() for row in rows]
    assert len(set(found)) == len(found)
    return set(found)


class TierContract:
    """Give `make` and `damage`; MAX_BATCH_BYTES is the most the suite commits at once."""

    MAX_BATCH_BYTES = 2 << 20

    def make(self, home: Path, codec: Codec) -> BlockTier:
        """Open the tier that lives at `home`, of some 70 MB in two segments."""
        raise NotImplementedError

    def damage(self, home: Path, payload: bytes) -> None:
        """Flip a bit on the medium wherever `payload` is stored."""
        raise NotImplementedError

    @pytest.fixture(params=["raw", "lossless"])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return codec_by_name(request.param)

    @pytest.fixture
    def shelf(self, tmp_path: Path, codec: Codec) -> Iterator[Shelf]:
        shelf = Shelf(self.make(tmp_path / "tier", codec))
        shelf.tier.commit(namespaces=ROWS)
        yield shelf
        shelf.tier.close()

    @pytest.fixture
    def restart(self, shelf: Shelf, tmp_path: Path, codec: Codec) -> Callable[[], StoredBlocks]:
        """Close the tier and open it again: what scan() finds then."""

        def restart() -> StoredBlocks:
            shelf.tier.close()
            shelf.tier = self.make(tmp_path / "tier", codec)
            return shelf.tier.scan()

        return restart

    # ---- what is there

    def test_a_new_tier_is_empty(self, tmp_path: Path, codec: Codec) -> None:
        tier = self.make(tmp_path / "tier", codec)
        assert len(tier.scan()) == 0
        assert list(tier.namespaces()) == []
        usage = tier.usage()
        assert (usage.used_bytes, usage.live_bytes, usage.blocks) == (0, 0, 0)
        assert usage.limit_bytes > 20 * self.MAX_BATCH_BYTES
        tier.close()
        tier.close()

    @pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model_id)
    def test_blocks_come_back(self, shelf: Shelf, spec: NamespaceSpec) -> None:
        shelf.put(spec, range(3))
        shelf.assert_all_read()

    def test_large_and_small_blocks_in_one_batch(self, shelf: Shelf) -> None:
        mixed = [(SMALL, 0), (LARGE, 1), (MIDDLE, 2), (LARGE, 3), (SMALL, 4)]
        shelf.commit([shelf.write(spec, number) for spec, number in mixed])
        shelf.assert_all_read()

    def test_unaligned_memory_on_both_sides(self, shelf: Shelf) -> None:
        """Engines' buffers are where they are."""
        odd = np.zeros(LARGE.block_bytes + 1, dtype=np.uint8)[1:]
        np.copyto(odd, block(LARGE, 0))
        prepared = shelf.tier.prepare(meta(LARGE, 0), odd, Loss.EXACT)
        shelf.commit([shelf.tier.write(prepared)])
        out = np.zeros(LARGE.block_bytes + 3, dtype=np.uint8)[3:]
        shelf.tier.read_into(wanted(LARGE, 0, shelf.where[0]), out)
        assert np.array_equal(out, block(LARGE, 0))

    def test_scan_tells_everything_of_a_block(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        written = [shelf.write(SMALL, 0), shelf.write(LARGE, 1)]
        shelf.commit(written)
        rows = {row["depth"]: row for row in restart()}
        assert sorted(rows) == [0, 1]
        for number, spec in ((0, SMALL), (1, LARGE)):
            row, known = rows[number], meta(spec, number)
            assert row["hash"].tobytes() == known.hash
            assert row["parent"].tobytes() == (known.parent or bytes(32))
            assert row["namespace"].tobytes() == known.namespace
            assert (row["generation"], row["stamp"], row["born_s"], row["loss"]) == (
                known.generation,
                known.stamp,
                known.born_s,
                Loss.EXACT,
            )
            assert row["segment"] == shelf.where[number]
            assert row["stored_bytes"] == written[number].stored_bytes

    def test_usage_is_exact(self, shelf: Shelf) -> None:
        """User report 22: what is used is what the rows say, to the page."""
        written = [shelf.write(spec, n) for n, spec in enumerate([SMALL, LARGE, MIDDLE] * 2)]
        sizes = [one.stored_bytes for one in written]
        assert sizes == [one.block.payload.size for one in written]
        shelf.commit(written)
        usage = shelf.delete([1])
        del sizes[1]
        assert usage.live_bytes == sum(sizes)
        assert usage.used_bytes == sum(map(aligned, sizes))
        assert usage.blocks == 5
        assert shelf.tier.usage() == usage

    def test_a_restart_shows_the_same_bytes_and_usage(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        """User reports 22 and 23: nothing is rewritten, the accounting is exact."""
        shelf.put(SMALL, range(5))
        shelf.put(LARGE, range(5, 8))
        usage = shelf.delete([2, 6])
        rows = restart()
        assert shelf.tier.usage() == usage
        assert hashes(rows) == {block_hash(number) for number in shelf.where}
        shelf.assert_all_read()
        usage = shelf.put(MIDDLE, [50])
        shelf.assert_all_read()
        restart()
        assert shelf.tier.usage() == usage

    def test_bytes_written_are_counted_for_good(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        """User report 27."""
        before = shelf.tier.usage().written_bytes
        for turn in range(3):
            usage = shelf.put(LARGE, [turn])
            shelf.delete([turn])
        written = usage.written_bytes - before
        assert 3 * 0.5 * LARGE.block_bytes < written
        assert shelf.tier.usage().written_bytes >= usage.written_bytes
        usage = shelf.tier.usage()
        restart()
        assert shelf.tier.usage().written_bytes == usage.written_bytes

    # ---- namespaces

    def test_namespaces_are_remembered_with_their_latest_generation(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        shelf.tier.commit(namespaces=[replace(ROWS[0], generation=4)])
        expected = {replace(ROWS[0], generation=4), *ROWS[1:]}
        assert set(shelf.tier.namespaces()) == expected
        restart()
        assert set(shelf.tier.namespaces()) == expected
        assert len(shelf.tier.namespaces()) == len(ROWS)

    def test_a_namespace_may_come_with_its_first_blocks(self, tmp_path: Path, codec: Codec) -> None:
        shelf = Shelf(self.make(tmp_path / "tier", codec))
        written = shelf.write(SMALL, 0)
        shelf.tier.commit(namespaces=ROWS, writes=[written])
        shelf.where[0] = written.segment
        shelf.assert_reads(SMALL, 0)
        shelf.tier.close()

    def test_a_block_of_an_unknown_namespace_stays_raw(self, tmp_path: Path, codec: Codec) -> None:
        shelf = Shelf(self.make(tmp_path / "tier", codec))
        prepared = shelf.prepare(LARGE, 0)
        assert (prepared.codec_id, prepared.payload.size) == (0, LARGE.block_bytes)
        shelf.commit([shelf.tier.write(prepared)])
        with pytest.raises(CorruptBlock, match="namespace is not known"):
            shelf.read(LARGE, 0)
        shelf.tier.commit(namespaces=ROWS)
        shelf.assert_reads(LARGE, 0)
        shelf.tier.close()

    def test_a_lossy_codec_is_used_only_where_loss_is_allowed(self, tmp_path: Path) -> None:
        shelf = Shelf(self.make(tmp_path / "tier", Lossy()))
        shelf.tier.commit(namespaces=ROWS)
        lossy = shelf.tier.prepare(meta(SMALL, 0), block(SMALL, 0), Loss.BOUNDED)
        exact = shelf.prepare(SMALL, 1)
        before = shelf.tier.prepare(meta(SMALL, 2), block(SMALL, 2), Loss.EXACT, loss=Loss.BOUNDED)
        assert (before.codec_id, before.loss) == (exact.codec_id, Loss.BOUNDED)
        assert (lossy.codec_id, lossy.loss) == (Lossy.id, Loss.BOUNDED)
        assert exact.codec_id != Lossy.id
        shelf.commit([shelf.tier.write(each) for each in (lossy, exact, before)])
        shelf.assert_reads(SMALL, 1)
        shelf.assert_reads(SMALL, 2)
        shelf.tier.close()
        tier = self.make(tmp_path / "tier", Lossy())
        assert {row["depth"]: row["loss"] for row in tier.scan()} == {
            0: Loss.BOUNDED,
            1: Loss.EXACT,
            2: Loss.BOUNDED,
        }
        tier.close()

    # ---- writing

    def test_what_is_not_committed_is_not_there(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        written = shelf.write(LARGE, 0)
        with pytest.raises(CorruptBlock):
            shelf.read(LARGE, 0, written.segment)
        assert shelf.tier.usage().blocks == 0
        assert len(restart()) == 0

    def test_discarded_room_is_used_again(self, shelf: Shelf) -> None:
        """As often as it takes to fill the tier several times."""
        room = shelf.tier.usage().limit_bytes // LARGE.block_bytes
        for turn in range(3):
            written = [shelf.write(LARGE, turn * 1000 + n) for n in range(room)]
            for one in written:
                shelf.tier.discard(one)
                shelf.tier.discard(one)
        shelf.put(LARGE, [0])
        shelf.assert_all_read()

    def test_writes_run_side_by_side(self, shelf: Shelf) -> None:
        """No two blocks share a byte, whoever writes them and whoever commits meanwhile."""
        with ThreadPoolExecutor(8) as pool:
            for first in range(0, 64, 16):
                specs = [(SPECS[number % 3], number) for number in range(first, first + 16)]
                shelf.commit(list(pool.map(lambda of: shelf.write(*of), specs)))
        shelf.assert_all_read()

    def test_writing_a_present_block_replaces_it(self, shelf: Shelf) -> None:
        before = shelf.put(SMALL, range(3))
        again = shelf.tier.prepare(meta(SMALL, 1), block(SMALL, 77), Loss.EXACT)
        after = shelf.commit([shelf.tier.write(again)])
        assert np.array_equal(shelf.read(SMALL, 1), block(SMALL, 77))
        assert (after.blocks, after.used_bytes) == (3, before.used_bytes)
        shelf.assert_reads(SMALL, 0)

    def test_a_full_tier_refuses_and_works_on(self, shelf: Shelf) -> None:
        """User report 25: a full disk is pressure, not a crash."""
        stored = fill(shelf)
        usage = shelf.tier.usage()
        assert usage.used_bytes > usage.limit_bytes, "the limit promises room"
        assert usage.blocks == len(stored)
        shelf.delete(stored[: len(stored) // 2])
        shelf.put(LARGE, [2000, 2001])
        shelf.assert_all_read()

    def test_below_the_limit_a_batch_always_fits(self, shelf: Shelf) -> None:
        """Evict ahead as the store does, with mixed sizes, two batches in flight."""
        rng = np.random.default_rng(5)
        resident: list[int] = []
        under_way: list[WrittenBlock] = []
        deletes: list[int] = []
        projected = 0
        for number in range(400):
            spec = SPECS[int(rng.choice(3, p=[0.2, 0.4, 0.4]))]
            projected += aligned(spec.block_bytes)
            while projected > shelf.tier.usage().limit_bytes:
                victim = resident.pop(int(rng.integers(len(resident))))
                deletes.append(victim)
                projected -= aligned(shelf.specs[victim].block_bytes)
            under_way.append(shelf.write(spec, number))
            if sum(one.stored_bytes for one in under_way) > 2 * self.MAX_BATCH_BYTES:
                usage = shelf.commit(under_way, deletes)
                resident += [one.block.meta.depth for one in under_way]
                under_way, deletes, projected = [], [], usage.used_bytes
        assert len(resident) < 300
        shelf.commit(under_way)
        shelf.assert_all_read()

    # ---- committing

    def test_deletes_come_before_writes_and_absent_ones_are_harmless(self, shelf: Shelf) -> None:
        shelf.put(SMALL, range(4))
        shelf.commit([shelf.write(SMALL, 2)], deletes=[1, 2, 99])
        assert shelf.tier.usage().blocks == 3
        for number in (0, 2, 3):
            shelf.assert_reads(SMALL, number)
        with pytest.raises(CorruptBlock):
            shelf.read(SMALL, 1, shelf.where[0])

    def test_a_delete_without_a_segment_looks_everywhere(self, shelf: Shelf) -> None:
        stored = fill(shelf)
        assert len(set(shelf.where.values())) > 1
        for number in (stored[0], stored[-1]):
            shelf.where.pop(number)
            usage = shelf.tier.commit(deletes=[Deletion(block_hash(number), None)])
        assert usage.blocks == len(stored) - 2

    def test_a_delete_in_another_segment_is_harmless(self, shelf: Shelf) -> None:
        usage = shelf.put(SMALL, [0])
        other = shelf.where[0] + 1
        assert shelf.tier.commit(deletes=[Deletion(block_hash(0), other)]).blocks == usage.blocks
        shelf.assert_reads(SMALL, 0)

    def test_deleting_everything_gives_everything_back(self, shelf: Shelf) -> None:
        shelf.put(SMALL, range(12))
        shelf.put(LARGE, range(20, 23))
        for number in list(shelf.where):
            usage = shelf.delete([number])
        assert (usage.live_bytes, usage.used_bytes, usage.blocks) == (0, 0, 0)

    def test_restamps_are_for_the_next_start(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        shelf.put(SMALL, range(3))
        segment = shelf.where[1]
        restamps = [
            Restamp(block_hash(1), segment, 1234),
            Restamp(block_hash(2), segment + 1, 99),
            Restamp(block_hash(50), segment, 5),
        ]
        assert shelf.tier.commit(restamps=restamps).blocks == 3
        assert {row["depth"]: row["stamp"] for row in restart()} == {0: 10, 1: 1234, 2: 8}
        shelf.assert_all_read()

    # ---- reading

    def test_an_absent_block_is_corrupt(self, shelf: Shelf) -> None:
        shelf.put(SMALL, [0])
        for number, segment in ((1, shelf.where[0]), (0, shelf.where[0] + 1)):
            with pytest.raises(CorruptBlock):
                shelf.read(SMALL, number, segment)

    def test_a_buffer_of_another_length_is_corrupt(self, shelf: Shelf) -> None:
        shelf.put(SMALL, [0])
        for size in (SMALL.block_bytes - 1, SMALL.block_bytes + 1):
            with pytest.raises(CorruptBlock):
                shelf.tier.read_into(
                    wanted(SMALL, 0, shelf.where[0]), np.empty(size, dtype=np.uint8)
                )

    def test_another_block_of_that_name_is_corrupt(self, shelf: Shelf) -> None:
        """Names of two namespaces may be equal: a reader relies on more than that."""
        written = shelf.write(SMALL, 0)
        shelf.commit([written])
        right = wanted(SMALL, 0, written.segment)
        out = np.empty(SMALL.block_bytes, dtype=np.uint8)
        assert shelf.tier.read_into(right, out)
        for wrong in (
            replace(right, namespace=namespace_digest(LARGE)),
            replace(right, generation=right.generation + 1),
        ):
            with pytest.raises(CorruptBlock):
                shelf.tier.read_into(wrong, out)

    def test_a_block_that_lost_more_than_wanted_is_corrupt(self, shelf: Shelf) -> None:
        prepared = shelf.tier.prepare(
            meta(SMALL, 0), block(SMALL, 0), Loss.EXACT, loss=Loss.BOUNDED
        )
        written = shelf.tier.write(prepared)
        shelf.commit([written])
        out = np.empty(SMALL.block_bytes, dtype=np.uint8)
        shelf.tier.read_into(wanted_by(prepared.meta, written.segment), out)
        with pytest.raises(CorruptBlock, match="lost more"):
            shelf.tier.read_into(wanted_by(prepared.meta, written.segment, Loss.EXACT), out)

    @pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model_id)
    def test_a_flipped_bit_on_the_medium_is_corrupt_and_can_be_rewritten(
        self, shelf: Shelf, tmp_path: Path, codec: Codec, spec: NamespaceSpec
    ) -> None:
        """User report 24."""
        batch = [shelf.write(spec, number) for number in range(2)]
        payload = batch[0].block.payload.tobytes()
        shelf.commit(batch)
        shelf.tier.close()
        self.damage(tmp_path / "tier", payload)
        shelf.tier = self.make(tmp_path / "tier", codec)
        with pytest.raises(CorruptBlock):
            shelf.read(spec, 0)
        shelf.assert_reads(spec, 1)
        shelf.commit([shelf.write(spec, 0)], deletes=[0])
        shelf.assert_all_read()

    @pytest.mark.parametrize(
        "change",
        [
            {"checksum": bytes(16)},
            {"codec_id": 77},
            {"codec_version": 77},
            {"size_bytes": SMALL.block_bytes - 2},
            {"loss": Loss.BOUNDED},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_block_that_is_not_what_its_row_says_is_corrupt(
        self, shelf: Shelf, change: dict[str, int]
    ) -> None:
        wrong = replace(shelf.prepare(SMALL, 0), **change)  # type: ignore[arg-type]
        shelf.commit([shelf.tier.write(wrong)])
        with pytest.raises(CorruptBlock):
            shelf.read(SMALL, 0)

    @pytest.mark.parametrize("change", [{"hash": block_hash(1)}, {"generation": 4}, {"born_s": 1}])
    def test_the_checksum_covers_what_a_block_is(
        self, shelf: Shelf, change: dict[str, object]
    ) -> None:
        prepared = shelf.prepare(SMALL, 0)
        wrong = replace(prepared, meta=replace(prepared.meta, **change))  # type: ignore[arg-type]
        written = shelf.tier.write(wrong)
        shelf.tier.commit(writes=[written])
        out = np.empty(SMALL.block_bytes, dtype=np.uint8)
        with pytest.raises(CorruptBlock, match="checksum"):
            shelf.tier.read_into(wanted_by(wrong.meta, written.segment), out)

    def test_readers_never_see_another_block_while_the_writer_commits(self, shelf: Shelf) -> None:
        shelf.put(LARGE, range(4))
        expected = [block(LARGE, number) for number in range(4)]
        stop = threading.Event()

        def read_on(number: int) -> int:
            reads = 0
            while not stop.is_set() or not reads:
                assert np.array_equal(shelf.read(LARGE, number), expected[number])
                reads += 1
            return reads

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(read_on, number) for number in range(4)]
            try:
                for number in range(100, 140):
                    shelf.commit([shelf.write(LARGE, number)], deletes=[number - 3])
            finally:
                stop.set()
            assert all(future.result() for future in running)

    def test_a_block_that_goes_while_it_is_read_is_right_or_corrupt(self, shelf: Shelf) -> None:
        """Its room is given to others at once; no reader may ever see their bytes as its own."""
        stop = threading.Event()
        turn = [0]
        shelf.put(LARGE, [0])
        home = shelf.where[0]

        def read_on() -> None:
            out = np.empty(LARGE.block_bytes, dtype=np.uint8)
            while not stop.is_set():
                number = turn[0]
                try:
                    shelf.tier.read_into(wanted(LARGE, number, home), out)
                except CorruptBlock:
                    continue
                assert np.array_equal(out, block(LARGE, number))

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(read_on) for _ in range(2)]
            try:
                for number in range(1, 40):
                    shelf.delete([number - 1])
                    shelf.put(LARGE, [number])
                    turn[0] = number
            finally:
                stop.set()
            for future in running:
                future.result()

    # ---- scrubbing

    def test_scrubbing_goes_round_and_round(self, shelf: Shelf) -> None:
        stored = {*fill(shelf)[:30], 9000}
        shelf.delete([number for number in shelf.where if number not in stored])
        shelf.put(SMALL, [9000])
        seen: list[int] = []
        position = b""
        for _ in range(2 * len(stored) + 2):
            found = shelf.tier.scrub(position)
            position = found.position
            assert found.error is None
            if found.meta is not None:
                seen.append(found.meta.depth)
                assert found.segment == shelf.where[found.meta.depth]
                assert found.stored_bytes > 0
        assert set(seen) == stored
        assert len(seen) == 2 * len(stored)

    def test_scrubbing_nothing_reads_nothing(self, shelf: Shelf) -> None:
        found = shelf.tier.scrub(b"")
        assert (found.meta, found.stored_bytes, found.error) == (None, 0, None)
        assert shelf.tier.scrub(found.position).meta is None

    def test_scrubbing_finds_a_flipped_bit(
        self, shelf: Shelf, tmp_path: Path, codec: Codec
    ) -> None:
        batch = [shelf.write(MIDDLE, number) for number in range(4)]
        payload = batch[2].block.payload.tobytes()
        shelf.commit(batch)
        shelf.tier.close()
        self.damage(tmp_path / "tier", payload)
        shelf.tier = self.make(tmp_path / "tier", codec)
        position, errors = b"", {}
        for _ in range(4):
            found = shelf.tier.scrub(position)
            position = found.position
            assert found.meta is not None
            errors[found.meta.depth] = found.error
        assert isinstance(errors.pop(2), CorruptBlock)
        assert errors == {0: None, 1: None, 3: None}

    # ---- segments

    def test_a_retired_segment_takes_its_blocks_along(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        fill(shelf)
        gone = shelf.where[0]
        usage = shelf.tier.retire(gone, damaged=False)
        assert shelf.tier.retire(gone, damaged=False) == usage
        lost = [number for number, segment in shelf.where.items() if segment == gone]
        for number in lost[:3]:
            with pytest.raises(CorruptBlock):
                shelf.read(LARGE, number)
        for number in lost:
            shelf.deletion(number)
        shelf.tier.commit(deletes=[Deletion(block_hash(lost[0]), gone)])
        shelf.assert_all_read()
        shelf.put(LARGE, lost)  # There is room again.
        assert gone not in shelf.where.values()
        assert set(shelf.tier.namespaces()) == set(ROWS)
        restart()
        shelf.assert_all_read()
        assert set(shelf.tier.namespaces()) == set(ROWS)

    def test_all_segments_may_go(self, shelf: Shelf) -> None:
        shelf.put(SMALL, [0])
        written = shelf.write(SMALL, 1)
        before = shelf.tier.usage().written_bytes
        usage = shelf.tier.retire(shelf.where[0], damaged=True)
        assert (usage.blocks, usage.used_bytes) == (0, 0)
        shelf.where.clear()
        with pytest.raises(TierFull):
            shelf.commit([written])
        shelf.put(SMALL, [2])
        shelf.assert_all_read()
        assert set(shelf.tier.namespaces()) == set(ROWS)
        assert shelf.tier.usage().written_bytes > before

    def test_a_segment_may_go_while_it_is_read(self, shelf: Shelf) -> None:
        shelf.put(LARGE, range(3))
        home = shelf.where[0]
        started = threading.Barrier(3)

        def read_on() -> None:
            out = np.empty(LARGE.block_bytes, dtype=np.uint8)
            started.wait()
            while True:
                shelf.tier.read_into(wanted(LARGE, 0, home), out)

        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(read_on) for _ in range(2)]
            started.wait()
            shelf.tier.retire(home, damaged=False)
            for future in running:
                with pytest.raises(CorruptBlock):
                    future.result()

    def test_there_is_no_excess_as_long_as_the_medium_has_room(self, shelf: Shelf) -> None:
        fill(shelf)
        assert shelf.tier.excess() is None

    # ---- opening again

    def test_reopening_keeps_what_was_committed(self, shelf: Shelf) -> None:
        fill(shelf)
        usage = shelf.tier.usage()
        assert sorted(shelf.tier.reopen()) == sorted(set(shelf.where.values()))
        assert shelf.tier.usage() == usage
        shelf.assert_all_read()
        shelf.delete(range(4))
        shelf.put(LARGE, [3000])
        shelf.assert_all_read()

    def test_what_was_written_before_a_reopen_is_refused(self, shelf: Shelf) -> None:
        shelf.put(LARGE, [0])
        before = shelf.write(LARGE, 1)
        shelf.tier.reopen()
        after = shelf.write(LARGE, 2)
        with pytest.raises(TierFull):
            shelf.tier.commit(writes=[before, after])
        with pytest.raises(TierFull):
            shelf.tier.commit(writes=[after])  # Its room was given back too.
        shelf.tier.discard(before)
        with pytest.raises(CorruptBlock):
            shelf.read(LARGE, 2, after.segment)
        stored = fill(shelf)
        assert len(stored) > 40
        shelf.assert_all_read()

    # Evictions

    def evicted(self, shelf: Shelf, numbers: Iterable[int]) -> list[Deletion]:
        """What the store says when it makes room."""
        rows = {row["hash"].tobytes(): int(row["stored_bytes"]) for row in shelf.tier.scan()}
        return [
            Deletion(block_hash(n), shelf.where.pop(n), aligned(rows[block_hash(n)]), evicted=True)
            for n in numbers
        ]

    def test_room_of_evicted_blocks_counts_as_free_at_once(self, shelf: Shelf) -> None:
        shelf.put(SMALL, range(20))
        used_bytes = shelf.tier.usage().used_bytes
        gone = self.evicted(shelf, range(5))
        usage = shelf.tier.commit(deletes=gone, writes=[shelf.write(SMALL, 50)])
        kept = sum(each.stored_bytes for each in gone)
        assert usage.used_bytes <= used_bytes - kept + aligned(SMALL.block_bytes)

    def test_a_commit_without_writes_leaves_no_evicted_block(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        shelf.put(SMALL, range(20))
        gone = self.evicted(shelf, range(5))
        shelf.tier.commit(deletes=gone, writes=[])
        shelf.assert_all_read()
        assert hashes(restart()) == {block_hash(n) for n in range(5, 20)}

    def test_a_drop_reaches_evicted_blocks_wherever_they_are(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        """What a client dropped must not come back, also if it was evicted before."""
        shelf.put(SMALL, range(20))
        gone = self.evicted(shelf, range(5))
        drops = [Deletion(each.hash, None) for each in gone]
        shelf.tier.commit(deletes=gone, writes=[shelf.write(LARGE, 50)])
        shelf.tier.commit(deletes=drops, writes=[shelf.write(LARGE, 51)])
        assert not hashes(restart()) & {block_hash(n) for n in range(5)}

    def test_an_evicted_block_that_is_stored_again_stays(
        self, shelf: Shelf, restart: Callable[[], StoredBlocks]
    ) -> None:
        shelf.put(SMALL, range(10))
        gone = self.evicted(shelf, [3])
        shelf.tier.commit(deletes=gone, writes=[shelf.write(LARGE, 50)])
        shelf.put(SMALL, [3])
        shelf.tier.commit()
        shelf.assert_reads(SMALL, 3)
        assert block_hash(3) in hashes(restart())

    def test_below_the_limit_writes_fit_whatever_lingers(self, shelf: Shelf) -> None:
        """Evict for room as the store does, through four fillings of the medium."""
        resident: list[int] = []
        sizes: dict[int, int] = {}
        batch_blocks = self.MAX_BATCH_BYTES // LARGE.block_bytes
        room_bytes = batch_blocks * aligned(LARGE.block_bytes)
        for first in range(0, 200, batch_blocks):
            usage, deletes, freed = shelf.tier.usage(), [], 0
            while usage.used_bytes - freed + room_bytes > usage.limit_bytes:
                number = resident.pop(0)
                freed += sizes[number]
                where = shelf.where.pop(number)
                deletes.append(Deletion(block_hash(number), where, sizes[number], evicted=True))
            numbers = range(first, first + batch_blocks)
            written = [shelf.write(LARGE, number) for number in numbers]
            shelf.tier.commit(deletes=deletes, writes=written)
            for number, each in zip(numbers, written, strict=True):
                shelf.where[number] = each.segment
                sizes[number] = aligned(each.stored_bytes)
                resident.append(number)
        for number in resident[::7]:
            shelf.assert_reads(LARGE, number)


def fill(shelf: Shelf) -> list[int]:
    """Store LARGE blocks one by one until there is no room; their numbers."""
    for number in range(1000):
        try:
            shelf.put(LARGE, [number])
        except TierFull:
            return sorted(shelf.where)
    raise AssertionError("the tier never fills")


class TestSsd(TierContract):
    def make(self, home: Path, codec: Codec) -> BlockTier:
        return SsdTier(
            home,
            capacity_bytes=72 << 20,
            codec_of=lambda _: codec,
            durability="relaxed",
            max_batch_bytes=self.MAX_BATCH_BYTES,
        )

    def damage(self, home: Path, payload: bytes) -> None:
        found = 0
        for data in home.glob("env-*/data.mdb"):
            content = bytearray(data.read_bytes())
            at = content.find(payload)
            while at >= 0:
                content[at + len(payload) // 2] ^= 1
                found += 1
                at = content.find(payload, at + 1)
            data.write_bytes(content)
        assert found, "the payload is stored as it is"
