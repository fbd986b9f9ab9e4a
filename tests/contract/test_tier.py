"""TierContract: what every block tier promises; a new tier is one subclass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
from kvtier.hashing import namespace_digest
from kvtier.tier.base import BlockMeta, BlockTier, NamespaceRow, PreparedBlock, StoredBlock
from kvtier.tier.ssd import SsdTier
from kvtier.types import BlockHash, Component, Loss, NamespaceSpec, RopeSpec

SMALL = NamespaceSpec(
    "small",
    "rev",
    (Component("latent", "bfloat16", (2, 8, 96)), Component("key", "uint8", (2, 8, 5))),
    rope=RopeSpec("half", 32, (("theta", "10000"),)),
    tenant="tenant",
)
LARGE = NamespaceSpec("large", "rev", (Component("latent", "bfloat16", (10, 64, 1024)),))
ROWS = [NamespaceRow(namespace_digest(spec), spec, 3) for spec in (SMALL, LARGE)]


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
    return BlockMeta(block_hash(number), parent, number, namespace_digest(spec), 3, 10 - number)


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


class TierContract:
    """Give `make` and `damage`; MAX_BATCH_BYTES is the most the suite commits at once."""

    MAX_BATCH_BYTES = 4 << 20

    def make(self, home: Path, codec: Codec) -> BlockTier:
        """Open the tier that lives at `home`, of some 40 MB."""
        raise NotImplementedError

    def damage(self, home: Path, payload: bytes) -> None:
        """Flip a bit on the medium wherever `payload` is stored."""
        raise NotImplementedError

    @pytest.fixture(params=["raw", "lossless"])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return codec_by_name(request.param)

    @pytest.fixture
    def tier(self, tmp_path: Path, codec: Codec) -> Iterator[BlockTier]:
        tier = self.make(tmp_path / "tier", codec)
        tier.commit(namespaces=ROWS)
        yield tier
        tier.close()

    def reopened(self, tier: BlockTier, tmp_path: Path, codec: Codec) -> BlockTier:
        tier.close()
        return self.make(tmp_path / "tier", codec)

    def test_a_new_tier_is_empty(self, tmp_path: Path, codec: Codec) -> None:
        tier = self.make(tmp_path / "tier", codec)
        assert list(tier.scan()) == []
        assert list(tier.namespaces()) == []
        usage = tier.usage()
        assert (usage.live_bytes, usage.blocks) == (0, 0)
        assert 0 <= usage.used_bytes < usage.limit_bytes
        tier.close()
        tier.close()

    @pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
    def test_blocks_come_back(self, tier: BlockTier, spec: NamespaceSpec) -> None:
        put(tier, spec, range(3))
        for number in range(3):
            assert_reads(tier, spec, number)

    def test_large_and_small_blocks_in_one_batch(self, tier: BlockTier) -> None:
        mixed = [(SMALL, 0), (LARGE, 1), (SMALL, 2), (LARGE, 3), (SMALL, 4)]
        tier.commit(writes=[prepared(tier, spec, number) for spec, number in mixed])
        for spec, number in mixed:
            assert_reads(tier, spec, number)

    def test_an_absent_block_is_corrupt(self, tier: BlockTier) -> None:
        put(tier, SMALL, [0])
        with pytest.raises(CorruptBlock):
            read(tier, SMALL, 1)

    def test_a_buffer_of_another_length_is_corrupt(self, tier: BlockTier) -> None:
        put(tier, SMALL, [0])
        for size in (SMALL.block_bytes - 1, SMALL.block_bytes + 1):
            with pytest.raises(CorruptBlock):
                tier.read_into(block_hash(0), np.empty(size, dtype=np.uint8))

    def test_writing_a_present_block_replaces_it(self, tier: BlockTier) -> None:
        put(tier, SMALL, range(3))
        tier.commit(writes=[tier.prepare(meta(SMALL, 1), block(SMALL, 77), Loss.EXACT)])
        assert np.array_equal(read(tier, SMALL, 1), block(SMALL, 77))
        assert tier.usage().blocks == 3
        assert_reads(tier, SMALL, 0)

    def test_deletes_come_before_writes_and_absent_ones_are_harmless(self, tier: BlockTier) -> None:
        put(tier, SMALL, range(4))
        tier.commit(
            deletes=[block_hash(1), block_hash(2), block_hash(99)],
            writes=[prepared(tier, SMALL, 2)],
        )
        assert {row.meta.hash for row in tier.scan()} == {block_hash(n) for n in (0, 2, 3)}
        assert_reads(tier, SMALL, 2)
        with pytest.raises(CorruptBlock):
            read(tier, SMALL, 1)

    def test_deleting_everything_gives_everything_back(self, tier: BlockTier) -> None:
        empty = tier.usage()
        put(tier, SMALL, range(12))
        put(tier, LARGE, range(20, 23))
        filled = tier.usage()
        assert filled.used_bytes >= empty.used_bytes + filled.live_bytes
        numbers = [*range(12), *range(20, 23)]
        for number in numbers:
            usage = tier.commit(deletes=[block_hash(number)])
        assert (usage.live_bytes, usage.blocks) == (0, 0)
        # A page or so may be left for tables that were never used before.
        assert usage.used_bytes <= empty.used_bytes + (16 << 10)

    def test_dead_neighbours_count_as_used(self, tier: BlockTier) -> None:
        put(tier, SMALL, range(40))
        before = tier.usage()
        after = tier.commit(deletes=[block_hash(n) for n in range(1, 40)])
        assert after.live_bytes < before.live_bytes
        assert after.blocks == 1
        assert after.used_bytes >= after.live_bytes
        assert_reads(tier, SMALL, 0)

    def test_a_restart_shows_the_same_rows_bytes_and_usage(
        self, tier: BlockTier, tmp_path: Path, codec: Codec
    ) -> None:
        put(tier, SMALL, range(5))
        put(tier, LARGE, range(5, 7))
        tier.commit(deletes=[block_hash(2)])
        before = sorted(tier.scan(), key=lambda row: row.meta.hash)
        usage = tier.usage()
        tier = self.reopened(tier, tmp_path, codec)
        assert sorted(tier.scan(), key=lambda row: row.meta.hash) == before
        assert tier.usage() == usage
        specs = {number: SMALL if number < 5 else LARGE for number in (0, 1, 3, 4, 5, 6)}
        assert sorted(row.meta.hash for row in before) == sorted(map(block_hash, specs))
        for number, spec in specs.items():
            assert (
                StoredBlock(meta(spec, number), stored_bytes(before, number), Loss.EXACT) in before
            )
            assert_reads(tier, spec, number)
        put(tier, SMALL, [50])
        assert_reads(tier, SMALL, 50)
        tier.close()

    def test_namespaces_are_remembered_with_their_latest_generation(
        self, tier: BlockTier, tmp_path: Path, codec: Codec
    ) -> None:
        tier.commit(namespaces=[replace(ROWS[0], generation=4)])
        tier = self.reopened(tier, tmp_path, codec)
        expected = {replace(ROWS[0], generation=4), ROWS[1]}
        assert set(tier.namespaces()) == expected
        tier.close()

    def test_a_namespace_may_come_with_its_first_blocks(self, tmp_path: Path, codec: Codec) -> None:
        tier = self.make(tmp_path / "tier", codec)
        tier.commit(namespaces=ROWS, writes=[prepared(tier, SMALL, 0)])
        assert_reads(tier, SMALL, 0)
        tier.close()

    def test_live_bytes_are_the_sum_of_the_rows(self, tier: BlockTier) -> None:
        put(tier, SMALL, range(9))
        tier.commit(deletes=[block_hash(4)], writes=[prepared(tier, SMALL, 5)])
        assert tier.usage().live_bytes == sum(row.stored_bytes for row in tier.scan())

    def test_a_full_tier_refuses_the_whole_batch_and_works_on(self, tier: BlockTier) -> None:
        stored, number = fill(tier)
        usage = tier.usage()
        assert usage.blocks == len(stored)
        assert usage.used_bytes > usage.limit_bytes, "the limit promises room"
        assert {row.generation for row in tier.namespaces() if row.spec == SMALL} == {number - 2}
        assert {row.meta.hash for row in tier.scan()} == {block_hash(n) for n in stored}
        for victim in stored[: len(stored) // 2]:
            tier.commit(deletes=[block_hash(victim)])
        put(tier, LARGE, [number, number + 1])
        for survivor in [*stored[len(stored) // 2 :], number, number + 1]:
            assert_reads(tier, LARGE, survivor)

    def test_below_the_limit_a_batch_always_fits(self, tier: BlockTier) -> None:
        """Evict ahead as the store does, through four fillings of the medium."""
        resident: list[int] = []
        batch_blocks = self.MAX_BATCH_BYTES // LARGE.block_bytes
        for first in range(0, 100, batch_blocks):
            room_bytes = batch_blocks * LARGE.block_bytes
            while tier.usage().used_bytes + room_bytes > tier.usage().limit_bytes:
                tier.commit(deletes=[block_hash(resident.pop(len(resident) // 2))])
            put(tier, LARGE, range(first, first + batch_blocks))
            resident += range(first, first + batch_blocks)
        for number in resident[::5]:
            assert_reads(tier, LARGE, number)

    @pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
    def test_a_flipped_bit_on_the_medium_is_corrupt_and_can_be_rewritten(
        self, tier: BlockTier, tmp_path: Path, codec: Codec, spec: NamespaceSpec
    ) -> None:
        batch = [prepared(tier, spec, number) for number in range(2)]
        tier.commit(writes=batch)
        tier.close()
        self.damage(tmp_path / "tier", batch[0].payload.tobytes())
        tier = self.make(tmp_path / "tier", codec)
        with pytest.raises(CorruptBlock):
            read(tier, spec, 0)
        assert_reads(tier, spec, 1)
        tier.commit(writes=[prepared(tier, spec, 0)])
        assert_reads(tier, spec, 0)
        tier.close()

    @pytest.mark.parametrize(
        "change",
        [
            {"checksum": bytes(16)},
            {"codec_id": 77},
            {"codec_version": 77},
            {"size_bytes": SMALL.block_bytes - 2},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_a_block_that_is_not_what_its_row_says_is_corrupt(
        self, tier: BlockTier, change: dict[str, int]
    ) -> None:
        tier.commit(writes=[replace(prepared(tier, SMALL, 0), **change)])  # type: ignore[arg-type]
        with pytest.raises(CorruptBlock):
            read(tier, SMALL, 0)

    def test_bytes_of_one_block_never_pass_for_another(self, tier: BlockTier) -> None:
        """The checksum covers the name."""
        tier.commit(writes=[replace(prepared(tier, SMALL, 0), meta=meta(SMALL, 1))])
        with pytest.raises(CorruptBlock):
            read(tier, SMALL, 1)

    def test_a_lossy_codec_is_used_only_where_loss_is_allowed(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path / "tier", Lossy())
        tier.commit(namespaces=ROWS)
        lossy = tier.prepare(meta(SMALL, 0), block(SMALL, 0), Loss.BOUNDED)
        exact = tier.prepare(meta(SMALL, 1), block(SMALL, 1), Loss.EXACT)
        assert (lossy.codec_id, lossy.loss) == (Lossy.id, Loss.BOUNDED)
        assert exact.codec_id != Lossy.id
        tier.commit(writes=[lossy, exact])
        assert {row.meta.hash: row.loss for row in tier.scan()} == {
            block_hash(0): Loss.BOUNDED,
            block_hash(1): Loss.EXACT,
        }
        assert_reads(tier, SMALL, 1)
        tier.close()

    def test_readers_never_see_another_block_while_the_writer_commits(
        self, tier: BlockTier
    ) -> None:
        put(tier, LARGE, range(4))
        expected = [block(LARGE, number) for number in range(4)]
        stop = threading.Event()

        def read_on(number: int) -> int:
            out, reads = np.empty(LARGE.block_bytes, dtype=np.uint8), 0
            while not stop.is_set() or not reads:
                tier.read_into(block_hash(number), out)
                assert np.array_equal(out, expected[number])
                reads += 1
            return reads

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(read_on, number) for number in range(4)]
            try:
                for turn in range(40):
                    tier.commit(
                        deletes=[block_hash(100 + turn - 3)],
                        writes=[prepared(tier, LARGE, 100 + turn)],
                    )
            finally:
                stop.set()
            assert all(future.result() for future in running)


def fill(tier: BlockTier) -> tuple[list[int], int]:
    """Commit pairs of blocks until one is refused: the blocks there, and the refused pair's first.

    Every batch also bumps SMALL's generation to its first number; the second deletes block 0.
    """
    stored: list[int] = []
    for number in range(0, 1000, 2):
        try:
            tier.commit(
                deletes=[block_hash(0)] if number == 2 else [],
                namespaces=[replace(ROWS[0], generation=number)],
                writes=[prepared(tier, LARGE, number), prepared(tier, LARGE, number + 1)],
            )
        except TierFull:
            return stored[1:], number
        stored += [number, number + 1]
    raise AssertionError("the tier never fills")


def prepared(tier: BlockTier, spec: NamespaceSpec, number: int) -> PreparedBlock:
    return tier.prepare(meta(spec, number), block(spec, number), Loss.EXACT)


def put(tier: BlockTier, spec: NamespaceSpec, numbers: range | list[int]) -> None:
    tier.commit(writes=[prepared(tier, spec, number) for number in numbers])


def read(tier: BlockTier, spec: NamespaceSpec, number: int) -> Bytes:
    out = np.full(spec.block_bytes, 0xA5, dtype=np.uint8)
    stored = tier.read_into(block_hash(number), out)
    assert 0 < stored <= spec.block_bytes
    return out


def assert_reads(tier: BlockTier, spec: NamespaceSpec, number: int) -> None:
    assert np.array_equal(read(tier, spec, number), block(spec, number))


def stored_bytes(rows: list[StoredBlock], number: int) -> int:
    return next(row.stored_bytes for row in rows if row.meta.hash == block_hash(number))


class TestSsd(TierContract):
    def make(self, home: Path, codec: Codec) -> BlockTier:
        return SsdTier(
            home,
            capacity_bytes=40 << 20,
            codec=codec,
            durability="relaxed",
            max_batch_bytes=self.MAX_BATCH_BYTES,
        )

    def damage(self, home: Path, payload: bytes) -> None:
        data = home / "env-000" / "data.mdb"
        content = bytearray(data.read_bytes())
        at = content.find(payload)
        assert at >= 0, "the payload is stored as it is"
        while at >= 0:
            content[at + len(payload) // 2] ^= 1
            at = content.find(payload, at + 1)
        data.write_bytes(content)
