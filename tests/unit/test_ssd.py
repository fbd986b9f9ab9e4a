"""The SSD tier's own promises: its directory, its format, its bounds, its faults, sudden death."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

import lmdb
import numpy as np
import pytest

from kvtier.codec import RAW
from kvtier.errors import (
    AddressInUse,
    CapacityError,
    CorruptBlock,
    FormatError,
    SegmentDamaged,
    TierFull,
    TierUnavailable,
)
from kvtier.extents import aligned
from kvtier.hashing import namespace_digest
from kvtier.tier import ssd, ssd_changes, ssd_directory, ssd_walk
from kvtier.tier import ssd_format as fmt
from kvtier.tier import ssd_layout as layout
from kvtier.tier.base import Deletion, NamespaceRow, Piece, PreparedBlock, Restamp, WrittenBlock
from kvtier.tier.ssd import SsdTier
from kvtier.tier.ssd_env import Environment
from kvtier.tier.ssd_file import BlockIo, DataFile
from kvtier.types import BlockHash, Component, Loss, NamespaceSpec
from tests.contract.test_tier import (
    LARGE,
    MIDDLE,
    ROWS,
    SMALL,
    SPECS,
    Shelf,
    block,
    block_hash,
    fill,
    hashes,
    meta,
    wanted,
)

BATCH_BYTES = 1 << 20
ONE_SEGMENT = 18 << 20
CAPACITY_BYTES = 36 << 20
"""Two segments."""

GOLDEN_ROW = (
    "08000000000000000300000001000000022d6884f10020000000000000581b00"
    "00000000000101000102000000030000000000000002f1536547f68f9145f531"
    "671aa0935b1c97f86db89a3756c4dbb53775cf9bb7064f5766cabdbdfa02c612"
    "a9652e5e4965db9180b25e68ffcdb4deb4b278992a3967c67f00010203040506"
    "0708090a0b0c0d0e0f"
)
GOLDEN_CHECKSUM = "d655061306475c6265ae22eb0b5bacd1"


@dataclass
class FaultyIo(BlockIo):
    """FAKE: the system's calls, unless told otherwise."""

    read_errno: int = 0
    write_errno: int = 0
    most_bytes: int = 1 << 30
    no_direct: bool = False
    free: int | None = None
    before_read: Callable[[], object] = lambda: None
    proceed: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__()
        self.proceed.set()

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        self.entered.set()
        self.before_read()
        self.proceed.wait()
        self._fail(self.read_errno, descriptor)
        return super().preadv(descriptor, self._short(views), offset)

    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int, /) -> int:
        self.proceed.wait()
        self._fail(self.write_errno, descriptor)
        return super().pwritev(descriptor, self._short(views), offset)

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free

    def _fail(self, number: int, descriptor: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))
        flags = int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[3], 8)
        if self.no_direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")

    def _short(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        return [views[0][: self.most_bytes]] if len(views[0]) > self.most_bytes else views


def open_tier(
    home: Path,
    *,
    capacity_bytes: int = CAPACITY_BYTES,
    durability: Literal["relaxed", "full"] = "relaxed",
    min_free_bytes: int = 0,
    io: BlockIo | None = None,
) -> SsdTier:
    return SsdTier(
        home,
        capacity_bytes=capacity_bytes,
        codec_of=lambda _: RAW,
        durability=durability,
        max_batch_bytes=BATCH_BYTES,
        min_free_bytes=min_free_bytes,
        io=io,
    )


@dataclass
class Opened:
    """A directory, its tier and where its blocks are."""

    home: Path
    io: FaultyIo
    shelf: Shelf = field(init=False)

    def __post_init__(self) -> None:
        self.shelf = Shelf(open_tier(self.home, io=self.io))
        self.tier.commit(namespaces=ROWS)

    @property
    def tier(self) -> SsdTier:
        assert isinstance(self.shelf.tier, SsdTier)
        return self.shelf.tier

    def restart(self, *, capacity_bytes: int = CAPACITY_BYTES, min_free_bytes: int = 0) -> None:
        """Close, open, and forget the blocks that are not there any more."""
        self.tier.close()
        self.open_again(capacity_bytes=capacity_bytes, min_free_bytes=min_free_bytes)

    def open_again(self, *, capacity_bytes: int = CAPACITY_BYTES, min_free_bytes: int = 0) -> None:
        self.shelf.tier = open_tier(
            self.home, capacity_bytes=capacity_bytes, min_free_bytes=min_free_bytes, io=self.io
        )
        numbers = {block_hash(number): number for number in self.shelf.specs}
        self.shelf.where = {
            numbers[BlockHash(row["hash"].tobytes())]: int(row["segment"])
            for row in self.tier.scan()
        }

    def data(self, segment: int = 0) -> Path:
        return self.home / f"env-{segment:03}" / "data.mdb"

    def names(self) -> list[str]:
        return sorted(path.name for path in self.home.iterdir() if path.is_dir())

    def check_integrity(self) -> None:
        """What memory says of the room is what the rows say."""
        for env in self.tier._segments.open.values():
            env.room.check_integrity(env.account.used_bytes)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(tmp_path / "ssd", FaultyIo())
    yield opened
    opened.io.proceed.set()
    opened.tier.close()


def occupied_bytes(home: Path) -> int:
    """`du` of a directory that may change meanwhile."""
    total = 0
    for top, _, names in os.walk(home):
        for path in [Path(top), *(Path(top) / name for name in names)]:
            try:
                total += path.lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def edit_header(data: Path, key: bytes, value: bytes) -> None:
    with lmdb.open(str(data.parent), map_size=data.stat().st_size, max_dbs=8) as env:
        table = env.open_db(b"header")
        with env.begin(write=True) as txn:
            txn.put(key, value, db=table)


def zero_pages(content: bytearray, pattern: bytes) -> None:
    """Wipe every page of the tree that has `pattern`."""
    assert pattern in content
    while (at := content.find(pattern)) >= 0:
        content[at & ~4095 : (at & ~4095) + 4096] = bytes(4096)


def edit_rows(data: Path, edit: Callable[[int, bytearray], bytes | bytearray]) -> None:
    """Give the rows of blocks 0..3, without their keys, other values."""
    with lmdb.open(str(data.parent), map_size=data.stat().st_size, max_dbs=8) as env:
        table = env.open_db(b"rows")
        with env.begin(write=True) as txn:
            rows = [bytearray(txn.get(block_hash(n), b"", db=table)) for n in range(4)]
            for number, row in enumerate(rows):
                txn.put(block_hash(number), bytes(edit(number, row)), db=table)


class TestDirectory:
    def test_only_its_owner_can_read_it(self, opened: Opened) -> None:
        opened.shelf.put(SMALL, [0])
        for path in [opened.home, *opened.home.rglob("*")]:
            expected = 0o700 if path.is_dir() else 0o600
            assert path.stat().st_mode & 0o777 == expected, path

    def test_a_second_daemon_is_refused_and_harmless(self, opened: Opened) -> None:
        opened.shelf.put(SMALL, [0])
        with pytest.raises(AddressInUse, match="in use by another kvtier"):
            open_tier(opened.home)
        opened.shelf.assert_all_read()
        opened.shelf.put(SMALL, [1])
        opened.shelf.assert_all_read()

    def test_close_and_a_failed_open_give_everything_back(self, tmp_path: Path) -> None:
        tier = open_tier(tmp_path)
        tier.commit(namespaces=ROWS)
        tier.close()
        tier.close()
        edit_header(tmp_path / "env-000" / "data.mdb", b"format", fmt.U32.pack(1))
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with pytest.raises(FormatError):
                open_tier(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_it_never_outgrows_its_capacity(self, opened: Opened) -> None:
        """User report 21: at no moment, through ten times the capacity, with mixed sizes."""
        seen: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                seen.append(occupied_bytes(opened.home))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            churn(opened, 10 * CAPACITY_BYTES)
            opened.tier.retire(0, damaged=True)
            for number in [n for n, segment in opened.shelf.where.items() if segment == 0]:
                opened.shelf.deletion(number)
            churn(opened, CAPACITY_BYTES)
        finally:
            stop.set()
            watcher.join()
        seen.append(occupied_bytes(opened.home))
        assert len(seen) > 10
        assert CAPACITY_BYTES // 2 < max(seen) <= CAPACITY_BYTES
        opened.check_integrity()
        usage = opened.tier.usage()
        opened.restart()
        assert occupied_bytes(opened.home) <= CAPACITY_BYTES
        after = opened.tier.usage()  # User report 22.
        assert (after.used_bytes, after.live_bytes, after.blocks) == (
            usage.used_bytes,
            usage.live_bytes,
            usage.blocks,
        )
        opened.check_integrity()
        for number in opened.shelf.where:
            spec = opened.shelf.specs[number]
            assert np.array_equal(opened.shelf.read(spec, number), block(spec, 5))

    def test_a_place_that_is_no_directory_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(TierUnavailable, match="file"):
            open_tier(tmp_path / "file")

    def test_what_a_crash_left_half_made_or_half_deleted_goes(self, opened: Opened) -> None:
        opened.shelf.put(SMALL, [0])
        opened.tier.close()
        for name in ("env-007.new", "env-003.gone", "quarantine-000.gone"):
            shutil.copytree(opened.home / "env-000", opened.home / name)
        opened.open_again()
        assert opened.names() == ["env-000"]
        opened.shelf.assert_all_read()


def churn(opened: Opened, written_bytes: int) -> None:
    """Store blocks of mixed sizes and evict ahead, as the store does, oldest first."""
    rng = np.random.default_rng(1)
    shelf = opened.shelf
    resident = list(shelf.where)
    number = 10_000 + max([0, *shelf.where])
    left = written_bytes
    while left > 0:
        batch: list[WrittenBlock] = []
        deletes: list[int] = []
        projected = opened.tier.usage().used_bytes
        while sum(one.stored_bytes for one in batch) < BATCH_BYTES // 2:
            spec = SPECS[int(rng.integers(3))]
            projected += aligned(spec.block_bytes)
            while projected > opened.tier.usage().limit_bytes and resident:
                deletes.append(resident.pop(0))
                projected -= aligned(shelf.specs[deletes[-1]].block_bytes)
            number += 1
            prepared = opened.tier.prepare(meta(spec, number), block(spec, 5), Loss.EXACT)
            batch.append(opened.tier.write(prepared))
            left -= spec.block_bytes
        shelf.commit(batch, [gone for gone in deletes if gone in shelf.where])
        resident += [one.block.meta.depth for one in batch]


class TestCapacity:
    def test_too_small_for_its_batches(self, tmp_path: Path) -> None:
        with pytest.raises(CapacityError, match="lower ssd_batch_bytes"):
            open_tier(tmp_path, capacity_bytes=8 * BATCH_BYTES - 1)

    def test_larger_than_the_file_system(self, tmp_path: Path) -> None:
        status = os.statvfs(tmp_path)
        with pytest.raises(CapacityError, match="lower ssd_capacity_bytes"):
            open_tier(tmp_path, capacity_bytes=2 * status.f_blocks * status.f_frsize)

    @pytest.mark.parametrize("batches", [8, 9, 15, 16, 31, 32, 127, 128, 1000])
    def test_the_parts_fit_into_the_whole(self, batches: int) -> None:
        capacity_bytes = batches * BATCH_BYTES
        size_bytes = layout.map_bytes(capacity_bytes, BATCH_BYTES)
        number = layout.budget_bytes(capacity_bytes) // size_bytes
        assert number == min(8, max(1, batches // 16))
        assert number * size_bytes < capacity_bytes
        slabs_bytes = layout.slabs_bytes(size_bytes, 4096)
        assert 0.7 * size_bytes < slabs_bytes < size_bytes - layout.tables_bytes(size_bytes)
        assert slabs_bytes * number > (3 + number) * BATCH_BYTES

    def test_a_raised_capacity_keeps_the_old_environments_and_adds(self, opened: Opened) -> None:
        stored = fill(opened.shelf)
        before = opened.tier.usage()
        opened.restart(capacity_bytes=3 * CAPACITY_BYTES)
        assert opened.tier.usage().limit_bytes > 2 * before.limit_bytes
        opened.shelf.put(LARGE, range(1000, 1000 + len(stored)))
        opened.shelf.assert_all_read()
        assert len(opened.names()) > 2

    def test_a_lowered_capacity_deletes_whole_environments_coldest_first(
        self, opened: Opened
    ) -> None:
        fill(opened.shelf)
        first = opened.shelf.where[0]
        opened.tier.commit(restamps=[Restamp(block_hash(0), first, 1_000_000)])
        opened.restart(capacity_bytes=ONE_SEGMENT)
        assert occupied_bytes(opened.home) <= ONE_SEGMENT
        assert opened.names() == [f"env-{first:03}"]
        assert 0 in opened.shelf.where
        opened.shelf.assert_all_read()

    def test_what_was_set_aside_goes_first_when_the_capacity_is_lowered(
        self, opened: Opened
    ) -> None:
        fill(opened.shelf)
        opened.tier.retire(0, damaged=True)
        opened.restart(capacity_bytes=ONE_SEGMENT)
        assert opened.names() == ["env-001"]
        assert occupied_bytes(opened.home) <= ONE_SEGMENT
        opened.shelf.assert_all_read()

    def test_lowered_below_every_environment_it_starts_empty(self, opened: Opened) -> None:
        fill(opened.shelf)
        opened.restart(capacity_bytes=8 * BATCH_BYTES)
        assert (opened.tier.usage().blocks, opened.names()) == (0, [])
        assert set(opened.tier.namespaces()) == set()
        opened.tier.commit(namespaces=ROWS)
        fill(opened.shelf)
        assert occupied_bytes(opened.home) <= 8 * BATCH_BYTES

    def test_tiny_blocks_fill_the_tables_first_and_the_limit_says_so(self, tmp_path: Path) -> None:
        """Eviction ahead by the limit keeps them storable for good."""
        spec = NamespaceSpec("tiny", "rev", (Component("x", "uint8", (4096,)),))
        tier = open_tier(tmp_path, capacity_bytes=16 * BATCH_BYTES)
        data = np.zeros(4096, dtype=np.uint8)
        resident: list[int] = []
        usage = tier.usage()
        for first in range(0, 4000, 100):
            over = len(resident) + 100 - usage.limit_bytes // 4096
            gone, resident = resident[: max(0, over)], resident[max(0, over) :]
            numbers = range(first, first + 100)
            writes = [
                tier.write(tier.prepare(meta(spec, number), data, Loss.EXACT)) for number in numbers
            ]
            usage = tier.commit(
                deletes=[Deletion(block_hash(number), 0) for number in gone], writes=writes
            )
            resident += numbers
        assert usage.blocks == len(resident) > 1000
        tier.close()

    def test_without_eviction_tiny_blocks_stop_while_they_can_still_be_deleted(
        self, tmp_path: Path
    ) -> None:
        spec = NamespaceSpec("tiny", "rev", (Component("x", "uint8", (4096,)),))
        tier = open_tier(tmp_path, capacity_bytes=8 * BATCH_BYTES)
        data = np.zeros(4096, dtype=np.uint8)
        most = layout.most_rows(layout.map_bytes(8 * BATCH_BYTES, BATCH_BYTES))
        written = [
            tier.write(tier.prepare(meta(spec, number), data, Loss.EXACT)) for number in range(most)
        ]
        assert tier.commit(writes=written).blocks == most
        with pytest.raises(TierFull):
            tier.write(tier.prepare(meta(spec, most), data, Loss.EXACT))
        for number in range(0, most, 50):
            gone = range(number, min(number + 50, most))
            usage = tier.commit(deletes=[Deletion(block_hash(n), None) for n in gone])
        assert (usage.blocks, usage.used_bytes) == (0, 0)
        tier.close()

    def test_a_block_larger_than_a_slab(self, tmp_path: Path) -> None:
        """It takes pieces, and no more slabs than it needs."""
        spec = NamespaceSpec("huge", "rev", (Component("x", "uint8", (3 << 20,)),))
        tier = open_tier(tmp_path)
        tier.commit(namespaces=[NamespaceRow(meta(spec, 0).namespace, spec, 1)])
        assert layout.slab_bytes(layout.map_bytes(CAPACITY_BYTES, BATCH_BYTES)) < 3 << 20
        data = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)
        written = tier.write(tier.prepare(meta(spec, 0), data, Loss.EXACT))
        tier.commit(writes=[written])
        out = np.zeros_like(data)
        tier.read_into(wanted(spec, 0, written.segment), out)
        assert np.array_equal(out, data)
        assert occupied_bytes(tmp_path) < 6 << 20
        tier.close()

    def test_a_file_system_that_does_not_answer_limits_nothing(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A commit that was applied must not fail for it."""

        def fail(_: Path) -> int:
            raise OSError(errno.EIO, "Input/output error")

        written = opened.shelf.write(LARGE, 0)
        before = opened.tier.usage().limit_bytes
        monkeypatch.setattr(opened.io, "free_bytes", fail)
        assert opened.shelf.commit([written]).limit_bytes == before
        with pytest.raises(TierUnavailable, match=r"ssd.*Input/output"):
            opened.tier.excess()


class TestFormat:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (fmt.U32.pack(1), "format 1, this version of kvtier reads 2.*move the directory"),
            (fmt.U64.pack(3), "format 3"),
        ],
        ids=["older", "newer"],
    )
    def test_another_version_is_refused(self, opened: Opened, value: bytes, message: str) -> None:
        if len(value) == 8:
            value = value[:4] + struct.pack("<I", crc32(value[:4]))
        opened.tier.close()
        edit_header(opened.data(), b"format", value)
        with pytest.raises(FormatError, match=message):
            open_tier(opened.home)
        assert opened.names() == ["env-000"]

    def test_a_list_of_slabs_that_is_no_list_is_damage(self, opened: Opened) -> None:
        """User report 24: set aside, and the store starts empty."""
        opened.shelf.put(SMALL, range(2))
        opened.tier.close()
        data = opened.data()
        with lmdb.open(str(data.parent), map_size=data.stat().st_size, max_dbs=8) as env:
            table = env.open_db(b"slabs")
            with env.begin(write=True) as txn:
                txn.put(b"odd", b"short", db=table)
        tier = open_tier(opened.home)
        assert len(tier.scan()) == 0
        assert any(name.startswith("quarantine") for name in opened.names())
        tier.close()

    def test_a_foreign_environment_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "env-000").mkdir()
        with (
            lmdb.open(str(tmp_path / "env-000"), map_size=1 << 20) as env,
            env.begin(write=True) as txn,
        ):
            txn.put(b"theirs", b"value")
        with pytest.raises(FormatError, match="not kvtier's"):
            open_tier(tmp_path)
        assert (tmp_path / "env-000" / "data.mdb").exists()

    def test_a_damaged_namespace_is_told(self) -> None:
        value = fmt.pack_namespace(ROWS[0])
        assert fmt.parse_namespace(ROWS[0].digest, value) == ROWS[0]
        for damaged in (value.replace(b"small", b"smell"), value[:-1], b"", value[:8] + b"{}"):
            with pytest.raises(FormatError, match=ROWS[0].digest.hex()):
                fmt.parse_namespace(ROWS[0].digest, damaged)

    def golden(self) -> WrittenBlock:
        payload = np.frombuffer(b"payload" * 1000, dtype=np.uint8)
        prepared = PreparedBlock(meta(SMALL, 2), 8192, payload, 1, 1, Loss.EXACT, bytes(range(16)))
        return WrittenBlock(prepared, 7000, 0, (Piece(3 * 4096, 4096), Piece(8 * 4096, 4096)))

    def test_golden_row(self) -> None:
        """Rows of version 2, byte for byte."""
        written = self.golden()
        row, runs = fmt.pack_row(written)
        assert len(row) == fmt.ROW_BYTES == 137
        assert row.hex() == GOLDEN_ROW
        assert runs == struct.pack("<4I", 3, 1, 8, 1)
        assert fmt.checksum(written.block, written.block.payload).hex() == GOLDEN_CHECKSUM

    def test_a_row_comes_back(self) -> None:
        written = self.golden()
        row, runs = fmt.pack_row(written)
        parsed = fmt.parse_row(block_hash(2), row, runs)
        assert (parsed.meta, parsed.pieces) == (written.block.meta, written.pieces)
        assert (parsed.stored_bytes, parsed.size_bytes) == (7000, 8192)
        assert parsed.checksum == written.block.checksum
        payload = written.block.payload
        assert fmt.checksum(parsed, payload) == fmt.checksum(written.block, payload)
        assert fmt.parse_row(block_hash(2), fmt.restamped(row, -5), runs).meta == replace(
            parsed.meta, stamp=-5
        )
        table = np.frombuffer(block_hash(2) + row, dtype=fmt.ROW_WITH_KEY)
        found = fmt.stored_blocks(table, 9)[0]
        assert (found["stored_bytes"], found["depth"], found["segment"]) == (7000, 2, 9)

    @pytest.mark.parametrize("size", [0, 1, 40, 136, 138])
    def test_a_row_of_another_length_is_corrupt(self, size: int) -> None:
        with pytest.raises(CorruptBlock):
            fmt.parse_row(block_hash(0), bytes(size), b"")

    def test_no_flipped_bit_of_a_place_goes_unnoticed(self) -> None:
        row, runs = fmt.pack_row(self.golden())
        for at in range(8, 21):
            for bit in range(8):
                damaged = bytearray(row)
                damaged[at] ^= 1 << bit
                if at < 16:
                    continue  # Repeats what the pieces table has.
                with pytest.raises(CorruptBlock):
                    fmt.parse_row(block_hash(2), bytes(damaged), runs)
        for at in range(len(runs)):
            damaged = bytearray(runs)
            damaged[at] ^= 1
            with pytest.raises(CorruptBlock):
                fmt.parse_row(block_hash(2), row, bytes(damaged))


class TestFile:
    """Payload bytes, whatever the file system and the memory are like."""

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65536, 70000, 300_000, 1 << 20])
    @pytest.mark.parametrize("offset", [0, 1, 512])
    @pytest.mark.parametrize("direct", [True, False])
    def test_bytes_come_back(self, tmp_path: Path, size: int, offset: int, direct: bool) -> None:
        (tmp_path / "file").touch()
        io = FaultyIo(no_direct=not direct)
        file = DataFile(tmp_path / "file", io)
        pages = aligned(size) // 4096
        pieces = [
            Piece((2 * n + 3) << 20, 4096 * (pages // 3)) for n in range(3 if pages > 2 else 0)
        ]
        pieces.append(Piece(10 << 20, aligned(size) - sum(piece.size_bytes for piece in pieces)))
        pieces = [piece for piece in pieces if piece.size_bytes]
        for before in (aligned(size), aligned(size) - 1):
            file.write([Piece(15 << 20, aligned(size))], np.full(before, 0xFF, dtype=np.uint8))
        data = np.random.default_rng(size).integers(0, 256, size + offset, dtype=np.uint8)
        os.truncate(tmp_path / "file", 20 << 20)
        file.write(pieces, data[offset:])
        out = np.full(size + offset, 0xA5, dtype=np.uint8)
        file.read(pieces, out[offset:])
        assert np.array_equal(out[offset:], data[offset:])
        assert (out[:offset] == 0xA5).all()
        padding = file.read_at(sum(pieces[-1]) - aligned(size) + size, aligned(size) - size)
        assert not any(padding), "bytes of another block"
        assert file.direct == (direct or size < 65536)
        file.close()

    def test_calls_that_fall_short_go_on_where_they_stopped(self, opened: Opened) -> None:
        opened.io.most_bytes = 5000
        opened.shelf.put(LARGE, range(2))
        opened.shelf.put(SMALL, range(2, 4))
        opened.shelf.assert_all_read()

    def test_direct_is_tried_where_the_file_system_may_have_it(self, opened: Opened) -> None:
        opened.io.no_direct = True
        opened.shelf.put(LARGE, range(2))
        opened.shelf.assert_all_read()
        opened.io.no_direct = False
        opened.restart()
        opened.shelf.assert_all_read()


class TestFaults:
    def test_a_failing_read_is_unavailable(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, [0])
        opened.io.read_errno = errno.EIO
        with pytest.raises(TierUnavailable, match=r"env-000.*Input/output error"):
            opened.shelf.read(LARGE, 0)
        with pytest.raises(TierUnavailable):
            opened.tier.scrub(b"")
        opened.io.read_errno = 0
        opened.shelf.assert_all_read()

    def test_a_file_that_ends_early_is_corrupt(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened.shelf.put(LARGE, [0])
        monkeypatch.setattr(opened.io, "preadv", lambda *_: 0)
        with pytest.raises(CorruptBlock, match="in a block"):
            opened.shelf.read(LARGE, 0)

    @pytest.mark.parametrize(
        ("number", "expected"),
        [
            (errno.ENOSPC, TierFull),
            (errno.EDQUOT, TierFull),
            (errno.EIO, TierUnavailable),
            (errno.EROFS, TierUnavailable),
        ],
    )
    def test_a_failing_write_gives_its_room_back(
        self, opened: Opened, number: int, expected: type[Exception]
    ) -> None:
        opened.io.write_errno = number
        for _ in range(100):
            with pytest.raises(expected, match=os.strerror(number)):
                opened.shelf.write(LARGE, 0)
        opened.io.write_errno = 0
        opened.check_integrity()
        opened.shelf.put(LARGE, [0])
        opened.shelf.assert_all_read()

    def test_a_block_that_goes_while_it_is_scrubbed_is_not_corrupt(self, opened: Opened) -> None:
        """Its pages are another's when they are read."""
        opened.shelf.put(LARGE, [0])

        def replace_it() -> None:
            opened.io.before_read = lambda: None
            opened.shelf.delete([0])
            opened.shelf.put(LARGE, [1])

        opened.io.before_read = replace_it
        found = opened.tier.scrub(b"")
        assert found.meta is not None
        assert (found.meta.hash, found.error) == (block_hash(0), None)
        opened.shelf.assert_all_read()

    def test_a_read_that_hangs_holds_up_nobody_else(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(2))
        opened.io.proceed.clear()
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(opened.shelf.read, LARGE, 0)
            opened.io.entered.wait()
            usage = opened.tier.commit(deletes=[Deletion(block_hash(1), None)])
            assert usage.blocks == 1
            opened.tier.retire(opened.shelf.where[0], damaged=False)
            opened.io.proceed.set()
            assert np.array_equal(stuck.result(), block(LARGE, 0))

    def test_reopening_waits_for_what_hangs(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(2))
        opened.io.proceed.clear()
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(opened.shelf.read, LARGE, 0)
            opened.io.entered.wait()
            with pytest.raises(TierUnavailable):
                opened.tier.reopen()
            with pytest.raises(TierUnavailable, match="not open"):
                opened.shelf.read(LARGE, 1)
            opened.io.proceed.set()
            assert np.array_equal(stuck.result(), block(LARGE, 0))
            assert opened.tier.reopen() == [opened.shelf.where[0]]
        opened.shelf.assert_all_read()

    def test_a_failed_commit_leaves_nothing_of_its_writes(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened.shelf.put(LARGE, range(3))

        def no_space(*_: object) -> None:
            raise lmdb.DiskError("mdb_txn_commit", errno.ENOSPC)

        written = [opened.shelf.write(LARGE, number) for number in (3, 4)]
        with monkeypatch.context() as patch:
            patch.setattr(ssd_changes.Step, "apply", no_space)
            with pytest.raises(TierFull):
                opened.tier.commit(writes=written, deletes=[Deletion(block_hash(0), None)])
        opened.check_integrity()
        opened.shelf.assert_all_read()
        with pytest.raises(TierFull):
            opened.tier.commit(writes=written)  # Its room may be another's by now.
        opened.shelf.put(LARGE, (3, 4))
        opened.shelf.assert_all_read()

    @pytest.mark.parametrize("at", ["second segment", "second part"])
    def test_what_a_failing_commit_had_applied_is_given_up(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch, at: str
    ) -> None:
        """A batch over two segments, or of several transactions, of which only one succeeds."""
        fill(opened.shelf)
        numbers = [0, max(opened.shelf.where)]
        segments = [opened.shelf.where[number] for number in numbers]
        assert segments[0] != segments[1]
        opened.shelf.delete([*numbers, 1])
        written = [opened.shelf.write(LARGE, number) for number in (*numbers, 1)]
        assert {one.segment for one in written} == set(segments)
        if at == "second part":
            monkeypatch.setattr(ssd_changes, "MOST_ROWS", 1)
        apply, calls = ssd_changes.Step.apply, [0]

        def fail_later(step: ssd_changes.Step, changes: ssd_changes.Changes) -> None:
            if changes.writes:
                calls[0] += 1
                if calls[0] == 2:
                    raise lmdb.DiskError("mdb_put", errno.ENOSPC)
            apply(step, changes)

        before = opened.tier.usage()
        with monkeypatch.context() as patch:
            patch.setattr(ssd_changes.Step, "apply", fail_later)
            with pytest.raises(TierFull):
                opened.tier.commit(writes=written)
        assert calls[0] == 2
        assert replace(opened.tier.usage(), written_bytes=0) == replace(before, written_bytes=0)
        opened.check_integrity()
        for one in written:
            with pytest.raises(CorruptBlock):
                opened.shelf.read(LARGE, one.block.meta.depth, one.segment)
        assert hashes(opened.tier.scan()).isdisjoint(one.block.meta.hash for one in written)
        opened.shelf.put(LARGE, (*numbers, 1))
        opened.check_integrity()
        opened.restart()
        opened.shelf.assert_all_read()

    def test_the_tree_always_has_space_ahead(self, opened: Opened) -> None:
        """Deletes need pages, also on a disk that others have filled to the last one."""
        opened.shelf.put(SMALL, [0])
        env = opened.tier._segments.open[0]
        first_page = env._lmdb.info()["last_pgno"]
        while env._lmdb.info()["last_pgno"] < first_page + 300:
            more = [replace(SMALL, tenant=str(len(env.namespaces) + n)) for n in range(50)]
            rows = [NamespaceRow(namespace_digest(spec), spec, 1) for spec in more]
            opened.tier.commit(namespaces=rows)
        ahead_bytes = layout.ahead_bytes(env.map_bytes)
        assert env._space_end >= env._tree_end() + ahead_bytes // 2
        with opened.data().open("rb") as data:
            used = os.stat(data.fileno()).st_blocks * 512
        assert used >= env._tree_end() + ahead_bytes // 2

    def test_nobody_gets_into_a_retired_environment(self, opened: Opened) -> None:
        opened.shelf.put(SMALL, [0])
        env = opened.tier._segments.open[0]
        opened.tier.retire(0, damaged=False)
        assert env.closed
        with pytest.raises(CorruptBlock, match="gone"):
            env.hold()

    def test_many_changes_are_made_in_steps(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ssd_changes, "MOST_ROWS", 4)
        opened.shelf.put(SMALL, range(30))
        opened.tier.commit(
            restamps=[Restamp(block_hash(n), opened.shelf.where[n], 100 + n) for n in range(30)]
        )
        opened.shelf.commit([opened.shelf.write(SMALL, n) for n in range(30, 50)], range(10))
        opened.check_integrity()
        opened.restart()
        opened.shelf.assert_all_read()
        assert {int(row["stamp"]) for row in opened.tier.scan() if row["depth"] < 30} == {
            100 + number for number in range(10, 30)
        }

    def test_a_read_only_directory_is_unavailable(self, opened: Opened, tmp_path: Path) -> None:
        opened.shelf.put(LARGE, [0])
        opened.tier.close()
        frozen = tmp_path / "frozen"
        frozen.mkdir()
        with mounted("--bind", "-o", "ro", str(opened.home), str(frozen)):
            subprocess.run(["mount", "-o", "remount,bind,ro", frozen], check=True)
            with pytest.raises(TierUnavailable, match="frozen"):
                open_tier(frozen)
        opened.open_again()
        opened.shelf.assert_all_read()


@dataclass
class mounted:
    """A mount for the time of a `with`; skips the test where that is not allowed."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    def __enter__(self) -> None:
        if os.geteuid():
            pytest.skip("needs root to mount a file system")
        done = subprocess.run(["mount", *self._arguments], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"may not mount: {done.stderr.decode().strip()}")

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self._arguments[-1]], check=True)


def put_on(shelf: Shelf) -> None:
    """Store blocks for ever."""
    for number in range(100, 1000):
        shelf.put(LARGE, [number])


class TestSmallFileSystem:
    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Path]:
        """40 MiB, of which 34 may become the tier's."""
        place = tmp_path / "small"
        place.mkdir()
        with mounted("-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)):
            yield place

    def test_a_full_file_system_is_pressure(self, small: Path) -> None:
        """User reports 21 and 25: a foreign process fills the disk."""
        shelf = Shelf(open_tier(small / "ssd"))
        shelf.tier.commit(namespaces=ROWS)
        shelf.put(LARGE, range(6))
        with (small / "foreign").open("wb") as foreign:
            while True:
                try:
                    foreign.write(bytes(1 << 20))
                    foreign.flush()
                except OSError:
                    break
        with pytest.raises(TierFull):
            put_on(shelf)
        assert shelf.tier.usage().limit_bytes < 16 << 20, "the store must make room itself"
        shelf.assert_all_read()
        shelf.delete([0, 1])
        shelf.put(LARGE, [2000])
        shelf.assert_all_read()
        shelf.tier.close()
        shelf.tier = open_tier(small / "ssd")
        shelf.assert_all_read()
        (small / "foreign").unlink()
        shelf.put(LARGE, range(3000, 3010))
        shelf.assert_all_read()
        shelf.tier.close()

    def test_nothing_at_all_is_free(self, small: Path) -> None:
        """LMDB writes its lock file through a map: without space that is SIGBUS."""
        tier = open_tier(small / "ssd")
        (small / "foreign").write_bytes(bytes(BlockIo().free_bytes(small)))
        shelf = Shelf(tier)
        tier.commit(namespaces=ROWS)  # Or drops would wait for room that they do not need.
        with pytest.raises(TierFull):
            shelf.put(LARGE, [0])
        assert [path.name for path in (small / "ssd").iterdir() if path.is_dir()] == []
        (small / "foreign").unlink()
        shelf.put(LARGE, [0])
        tier.close()
        (small / "ssd" / "env-000" / "lock.mdb").unlink()
        (small / "foreign").write_bytes(bytes(BlockIo().free_bytes(small)))
        with pytest.raises(TierUnavailable, match="make room"):
            open_tier(small / "ssd")
        (small / "foreign").unlink()
        tier = open_tier(small / "ssd")
        assert set(tier.namespaces()) == set(ROWS)
        tier.close()

    def test_foreign_files_cost_whole_segments_coldest_first(self, small: Path) -> None:
        """min_free_bytes is kept, whoever fills the file system."""
        least = 3 << 20
        shelf = Shelf(open_tier(small / "ssd", min_free_bytes=least))
        shelf.tier.commit(namespaces=ROWS)
        fill(shelf)
        last = shelf.where[max(shelf.where)]
        shelf.tier.commit(restamps=[Restamp(block_hash(max(shelf.where)), last, 99)])
        assert shelf.tier.excess() is None
        free_bytes = BlockIo().free_bytes(small)
        assert free_bytes >= least
        (small / "foreign").write_bytes(bytes(free_bytes - least + (1 << 20)))
        excess = shelf.tier.excess()
        assert excess is not None
        assert excess != last
        shelf.tier.retire(excess, damaged=False)
        assert shelf.tier.excess() is None
        assert BlockIo().free_bytes(small) >= least
        for number in [n for n, segment in shelf.where.items() if segment == excess]:
            shelf.deletion(number)
        shelf.assert_all_read()
        with pytest.raises(TierFull):
            put_on(shelf)
        assert BlockIo().free_bytes(small) >= least
        shelf.tier.close()


class TestFloor:
    """User report 21: min_free_bytes, with a file system that is told what it has free."""

    FLOOR = 1 << 20

    def test_no_slab_is_made_below_the_floor(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, [0])
        opened.restart(min_free_bytes=self.FLOOR)
        before = opened.tier.usage().limit_bytes
        opened.io.free = self.FLOOR + (1 << 20)
        assert opened.tier.usage().limit_bytes < before
        with pytest.raises(TierFull, match="no room"):
            put_on(opened.shelf)
        opened.shelf.assert_all_read()
        assert opened.names() == ["env-000"]
        opened.io.free = None
        opened.shelf.put(LARGE, range(100, 110))

    def test_excess_gives_up_the_last_one_too_but_nothing_for_nothing(self, opened: Opened) -> None:
        fill(opened.shelf)
        opened.restart(min_free_bytes=self.FLOOR)
        opened.io.free = self.FLOOR
        assert opened.tier.excess() is None
        opened.io.free -= 1
        gone: list[int] = []
        while (segment := opened.tier.excess()) is not None:
            opened.tier.retire(segment, damaged=False)
            gone.append(segment)
        assert len(gone) == 2
        opened.tier.commit(namespaces=[replace(ROWS[0], generation=9)])
        assert opened.tier.excess() is None

    def test_room_that_is_about_to_come_counts(self, opened: Opened) -> None:
        """A retired segment's space is free only once its last reader is out."""
        fill(opened.shelf)
        opened.restart(min_free_bytes=self.FLOOR)
        opened.io.free = self.FLOOR - 1
        first = opened.tier.excess()
        assert first is not None
        with opened.tier._segments.open[first].held():
            opened.tier.retire(first, damaged=False)
            assert opened.tier.excess() is None
        assert opened.tier.excess() not in (None, first), "it came, and was not enough"


class TestDamage:
    """User report 24: whatever happens to the files, a block is right or a miss."""

    def assert_works(self, opened: Opened) -> None:
        opened.shelf.assert_all_read()
        opened.tier.commit(namespaces=ROWS)
        opened.shelf.put(LARGE, range(500, 505))
        opened.shelf.put(SMALL, range(505, 510))
        opened.shelf.assert_all_read()
        opened.check_integrity()
        assert occupied_bytes(opened.home) <= CAPACITY_BYTES

    @pytest.mark.parametrize("damage", ["garbage", "empty", "zeros", "gone", "cut", "cut short"])
    def test_a_broken_file_is_set_aside_and_a_new_one_starts(
        self, opened: Opened, damage: str
    ) -> None:
        opened.shelf.put(LARGE, range(6))
        opened.tier.close()
        data = opened.data()
        size = data.stat().st_size
        if damage == "garbage":
            data.write_bytes(b"no database" * 1000)
        elif damage == "zeros":
            data.write_bytes(bytes(size))
        elif damage == "gone":
            data.unlink()
        else:
            os.truncate(data, {"empty": 0, "cut": size // 2, "cut short": 4096}[damage])
        opened.open_again()
        assert opened.shelf.where == {}
        assert opened.names() == ["quarantine-000"]
        self.assert_works(opened)

    @pytest.mark.parametrize("size", [8192, 1 << 16, 3 << 20, -4096])
    def test_a_cut_file_is_never_read_behind_its_end(self, opened: Opened, size: int) -> None:
        opened.shelf.put(LARGE, range(6))
        opened.tier.close()
        os.truncate(opened.data(), size if size > 0 else opened.data().stat().st_size + size)
        opened.open_again()
        assert opened.shelf.where == {}
        self.assert_works(opened)

    def test_one_broken_environment_of_two_costs_only_its_blocks(self, opened: Opened) -> None:
        fill(opened.shelf)
        opened.tier.close()
        os.truncate(opened.data(0), 1 << 20)
        opened.open_again()
        assert set(opened.shelf.where.values()) == {1}
        assert opened.names() == ["env-001", "quarantine-000"]
        assert set(opened.tier.namespaces()) == set(ROWS)
        self.assert_works(opened)

    @pytest.mark.parametrize("table", ["tree page", "meta pages", "slab", "header"])
    def test_flipped_bits_in_the_tables(self, opened: Opened, table: str) -> None:
        opened.shelf.put(LARGE, range(6))
        opened.tier.close()
        data = opened.data()
        content = bytearray(data.read_bytes())
        if table == "tree page":
            zero_pages(content, block_hash(0))
        elif table == "meta pages":
            content[16:24] = content[4096 + 16 : 4096 + 24] = b"\xff" * 8
        elif table == "slab":
            content[content.index(b"kvtier slab")] ^= 1
        else:
            content = content.replace(b"identity", b"identitY")
        data.write_bytes(content)
        opened.open_again()
        assert opened.shelf.where == {}
        assert opened.names() == ["quarantine-000"]
        self.assert_works(opened)

    @pytest.mark.parametrize("mask", [0x01, 0x10, 0x80])
    @pytest.mark.parametrize("at", [8, 9, 12, 13, 16, 17, 29, 31, 39, 41, 57, 80, 125])
    def test_broken_rows_are_misses_and_their_room_comes_back(
        self, opened: Opened, at: int, mask: int
    ) -> None:
        """Found when opened or when read; stored again, it is as if nothing had been."""
        opened.shelf.put(LARGE, range(6))
        usage = opened.tier.usage()
        opened.tier.close()

        def flip(number: int, row: bytearray) -> bytearray:
            row[at] ^= mask
            return row

        edit_rows(opened.data(), flip)
        opened.open_again()
        assert {4, 5} <= set(opened.shelf.where) <= set(range(6))
        if at in (12, 13, 16, 29, 31) or (at == 39 and mask > 1):
            # Pages, pieces, stored bytes, loss: what makes no sense is not even reported.
            assert set(opened.shelf.where) == {4, 5}
        opened.check_integrity()
        for number in range(4):
            with pytest.raises(CorruptBlock):
                opened.shelf.read(LARGE, number, 0)
        opened.shelf.commit([opened.shelf.write(LARGE, n) for n in range(4)], deletes=range(4))
        opened.shelf.assert_all_read()
        opened.restart()
        after = opened.tier.usage()
        assert (after.used_bytes, after.live_bytes, after.blocks) == (
            usage.used_bytes,
            usage.live_bytes,
            usage.blocks,
        )
        self.assert_works(opened)

    def test_a_row_that_points_at_another_blocks_pages(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(5))
        opened.tier.close()
        seen: list[bytearray] = []

        def steal(number: int, row: bytearray) -> bytes | bytearray:
            seen.append(row)
            if number == 2:
                return b"short"
            return row[:8] + seen[0][8:21] + row[21:] if number == 1 else row

        edit_rows(opened.data(), steal)
        opened.open_again()
        assert set(opened.shelf.where) == {0, 3, 4}
        opened.shelf.assert_all_read()
        opened.shelf.put(LARGE, (1, 2))
        self.assert_works(opened)

    def test_two_rows_with_the_same_pages_are_both_distrusted(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(5))
        opened.tier.close()
        runs: list[bytes] = []

        def share(number: int, row: bytearray) -> bytes | bytearray:
            runs.append(bytes(row[8:16]))
            if number != 1:
                return row
            crc = crc32(runs[0], crc32(block_hash(1)))
            return row[:8] + runs[0] + row[16:17] + fmt.U32.pack(crc) + row[21:]

        edit_rows(opened.data(), share)
        opened.open_again()
        assert set(opened.shelf.where) == {2, 3, 4}
        opened.shelf.put(LARGE, (0, 1))
        self.assert_works(opened)

    def test_rows_that_break_while_open_cost_no_other_block(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(6))
        env = opened.tier._segments.open[0]
        with env._lmdb.begin(write=True) as txn:
            for number, at in ((0, 9), (1, 13), (2, 16)):
                row = bytearray(txn.get(block_hash(number), b"", db=env.tables.rows))
                row[at] ^= 1
                txn.put(block_hash(number), bytes(row), db=env.tables.rows)
        for number in range(3):
            with pytest.raises(CorruptBlock, match="place"):
                opened.shelf.read(LARGE, number)
        opened.shelf.delete(range(3))
        opened.shelf.put(LARGE, range(100, 120))
        opened.shelf.assert_all_read()
        opened.restart()
        self.assert_works(opened)

    def test_a_lost_lock_file_is_made_again(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(2))
        opened.tier.close()
        (opened.data().parent / "lock.mdb").unlink()
        opened.open_again()
        assert set(opened.shelf.where) == {0, 1}
        self.assert_works(opened)

    def test_a_broken_namespace_is_written_again(self, opened: Opened) -> None:
        fill(opened.shelf)
        opened.tier.close()
        content = opened.data(0).read_bytes()
        opened.data(0).write_bytes(content.replace(b'"model_id":"large"', b'"model_id":"lArge"'))
        opened.open_again()
        assert set(opened.tier.namespaces()) == set(ROWS)
        opened.shelf.assert_all_read()
        opened.shelf.delete([0])
        opened.tier.close()
        os.truncate(opened.data(1), 0)
        opened.open_again()
        assert set(opened.tier.namespaces()) == set(ROWS)
        opened.shelf.assert_all_read()

    def test_a_file_cut_while_open_is_told(self, opened: Opened) -> None:
        opened.shelf.put(LARGE, range(6))
        where = dict(opened.shelf.where)
        os.truncate(opened.data(), 1 << 16)
        for action in (
            lambda: opened.shelf.read(LARGE, 0),
            lambda: opened.tier.commit(deletes=[Deletion(block_hash(0), None)]),
            lambda: opened.tier.scrub(b""),
        ):
            with pytest.raises(SegmentDamaged, match="cut") as caught:
                action()
            assert caught.value.segment == where[0]
        opened.tier.retire(where[0], damaged=True)
        opened.shelf.where.clear()
        self.assert_works(opened)

    def test_what_lmdb_finds_broken_names_the_segment(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened.shelf.put(LARGE, [0])

        def broken(*_: object) -> None:
            raise lmdb.CorruptedError("mdb_get")

        with monkeypatch.context() as patch:
            patch.setattr(ssd_changes.Step, "apply", broken)
            with pytest.raises(SegmentDamaged, match="env-000") as caught:
                opened.shelf.delete([0])
        assert caught.value.segment == 0

    def test_set_aside_counts_and_the_oldest_goes_first(self, opened: Opened) -> None:
        for turn in range(20):
            opened.shelf.put(LARGE, range(10 * turn, 10 * turn + 4))
            opened.shelf.where.clear()
            opened.tier.retire(max(opened.tier._segments.open), damaged=True)
            assert occupied_bytes(opened.home) <= CAPACITY_BYTES
            assert opened.names()[-1] == f"quarantine-{turn:03}"
        assert opened.names()[0] > "quarantine-000", "there was no room for all"
        assert opened.tier.usage().limit_bytes > 0
        self.assert_works(opened)

    def test_flips_anywhere_never_give_a_wrong_byte(self, tmp_path: Path) -> None:
        """In a child, which a broken tree may kill; then the next one starts where it died."""
        command = [sys.executable, "-c", FLIPPER, str(tmp_path)]
        root = Path(__file__).parents[2]
        seed, crashes = 0, 0
        while seed < 30:
            done = subprocess.run(
                [*command, str(seed)],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": str(root)},
            )
            assert done.returncode <= 0, done.stderr
            seeds = [int(line) for line in done.stdout.split()]
            assert seeds, done.stderr
            if done.returncode < 0:
                crashes += 1
            seed = max(seeds) + 1
        assert crashes < 10


FLIPPER = """
import random, shutil, sys
from pathlib import Path
from kvtier.errors import CorruptBlock, FormatError, SegmentDamaged
from tests.contract.test_tier import LARGE, ROWS, SMALL, Shelf, block_hash
from tests.unit.test_ssd import open_tier

home, first = Path(sys.argv[1]), int(sys.argv[2])
sound = home / f"sound-{first}"
shelf = Shelf(open_tier(sound, capacity_bytes=8 << 20))
shelf.tier.commit(namespaces=ROWS)
shelf.put(LARGE, range(3))
shelf.put(SMALL, range(3, 40))
shelf.tier.close()
for seed in range(first, 30):
    print(seed, flush=True)
    rng = random.Random(seed)
    here = home / "flipped"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(sound, here)
    data = here / "env-000" / "data.mdb"
    content = bytearray(data.read_bytes())
    used = [page for page in range(0, len(content), 4096) if any(content[page : page + 4096])]
    tables = [page for page in used if content[page + 10] in (1, 2, 4, 8)]
    for _ in range(3):
        page = rng.choice(rng.choice((used, tables)))
        content[page + rng.randrange(4096)] ^= 1 << rng.randrange(8)
    data.write_bytes(content)
    try:
        shelf.tier = open_tier(here, capacity_bytes=8 << 20)
    except FormatError:
        continue
    where = {row["hash"].tobytes(): int(row["segment"]) for row in shelf.tier.scan()}
    for number in range(40):
        if block_hash(number) in where:
            shelf.where[number] = where[block_hash(number)]
            try:
                shelf.assert_reads(LARGE if number < 3 else SMALL, number)
            except (CorruptBlock, SegmentDamaged):
                pass
    shelf.tier.close()
"""

WRITER = """
import sys
from pathlib import Path
from tests.contract.test_tier import LARGE, ROWS, Shelf
from tests.unit.test_ssd import open_tier

shelf = Shelf(open_tier(Path(sys.argv[1]), durability=sys.argv[2]))
shelf.tier.commit(namespaces=ROWS)
for number in range(1000):
    shelf.commit([shelf.write(LARGE, number)], deletes=[number - 4])
    print(number, flush=True)
"""


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Environments whose trees were walked."""
    walked: list[Path] = []

    def walk(path: Path) -> list[str]:
        walked.append(path)
        return ssd_walk.tree_problems(path)

    monkeypatch.setattr("kvtier.tier.ssd_segments.tree_problems", walk)
    return walked


class TestSuddenDeath:
    @pytest.mark.parametrize("durability", ["relaxed", "full"])
    @pytest.mark.parametrize("commits", [1, 7, 23])
    def test_what_was_acknowledged_survives_kill_9(
        self, tmp_path: Path, durability: str, commits: int
    ) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path, durability],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if int(line) + 1 >= commits:
                    child.send_signal(signal.SIGKILL)
                    break
            last = max([commits - 1, *map(int, child.stdout.read().split())])
        shelf = Shelf(open_tier(tmp_path))
        shelf.where = {int(row["depth"]): int(row["segment"]) for row in shelf.tier.scan()}
        shelf.specs = dict.fromkeys(shelf.where, LARGE)
        expected = set(range(max(0, last - 3), last + 1))
        assert set(shelf.where) in (
            expected,
            set(range(max(0, last - 2), last + 2)),  # One more, unsaid.
        )
        shelf.assert_all_read()
        shelf.put(LARGE, [2000])
        shelf.assert_all_read()
        shelf.tier.close()

    def test_pages_held_by_a_dead_reader_are_reused(self, opened: Opened) -> None:
        """A killed process leaves its reader slot behind; the next open clears it."""
        opened.shelf.put(LARGE, [0])
        opened.tier.close()
        program = (
            "import lmdb, os, sys, signal;"
            "env = lmdb.open(sys.argv[1], max_dbs=8, create=False, readonly=sys.argv[2] == 'look');"
            "print(flush=True);"
            "sys.argv[2] == 'look' and sys.stdin.read();"
            "txn = env.begin(); os.kill(os.getpid(), signal.SIGKILL)"
        )
        command = [sys.executable, "-c", program, str(opened.data().parent)]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "look"], stdin=pipe, stdout=pipe) as looker:
            # While somebody else has it open, LMDB itself does not start its lock file anew.
            assert looker.stdout is not None
            looker.stdout.readline()
            subprocess.run([*command, "die"], check=False, stdout=subprocess.DEVNULL)
            opened.open_again()
            env = opened.tier._segments.open[0]
            for number in range(1, 200):
                opened.shelf.commit([opened.shelf.write(SMALL, number)], deletes=[number - 1])
                if number == 20:
                    before = env._lmdb.info()["last_pgno"]
            assert env._lmdb.info()["last_pgno"] <= before + 4

    def die(self, opened: Opened) -> None:
        """Leave the files as a killed daemon would."""
        opened.tier._shut()

    def test_a_store_that_keeps_killing_daemons_is_walked(
        self, opened: Opened, walks: list[Path]
    ) -> None:
        opened.shelf.put(LARGE, range(3))
        for deaths in range(1, 8):
            self.die(opened)
            opened.open_again()
            assert len(walks) == deaths // 3
        opened.shelf.assert_all_read()

    def test_a_store_that_kills_daemons_when_they_open_it_is_walked(
        self, opened: Opened, walks: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened.shelf.put(LARGE, range(3))
        self.die(opened)

        def die(_: Environment) -> None:
            raise KeyboardInterrupt  # FAKE: as far as the files go, it is SIGSEGV.

        with monkeypatch.context() as patch:
            patch.setattr(Environment, "load", die)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    opened.open_again()
        assert walks == []
        opened.open_again()
        assert walks == [opened.home / "env-000"]
        opened.shelf.assert_all_read()

    def test_a_daemon_that_ran_for_a_while_did_not_die_of_its_store(
        self, opened: Opened, walks: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ssd, "STEADY_AFTER_S", 0.0)
        for _ in range(8):
            assert opened.tier.excess() is None
            self.die(opened)
            opened.open_again()
        assert walks == []

    def test_a_clean_close_counts_as_no_death(self, opened: Opened, walks: list[Path]) -> None:
        for _ in range(2):
            self.die(opened)
            opened.open_again()
            opened.restart()
            self.die(opened)
            opened.open_again()
        assert walks == []


class TestPowerCut:
    @pytest.fixture
    def home(self, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A relaxed store with some blocks, left open by another boot of the machine."""
        opened.shelf.put(LARGE, range(3))
        opened.tier._shut()
        (tmp_path / "boot_id").write_text("another boot\n")
        monkeypatch.setattr(ssd_directory, "_BOOT_ID", tmp_path / "boot_id")
        return opened.home

    def test_a_sound_tree_is_kept(self, opened: Opened, home: Path) -> None:
        opened.open_again()
        assert set(opened.shelf.where) == {0, 1, 2}
        opened.shelf.assert_all_read()

    def test_a_torn_tree_is_set_aside_before_lmdb_sees_it(
        self, opened: Opened, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = bytearray(opened.data().read_bytes())
        zero_pages(content, block_hash(0))
        opened.data().write_bytes(content)
        seen: list[str] = []
        monkeypatch.setattr(lmdb, "open", lambda path, **_: seen.append(path))
        opened.open_again()
        assert (opened.shelf.where, seen) == ({}, [])
        assert opened.names() == ["quarantine-000"]

    def test_a_start_that_dies_is_followed_by_one_that_still_walks(
        self,
        opened: Opened,
        home: Path,
        walks: list[Path],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def die(_: Environment) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Environment, "load", die)
            with pytest.raises(KeyboardInterrupt):
                opened.open_again()
        opened.open_again()
        assert len(walks) == 2
        opened.tier._shut()
        opened.open_again()
        assert len(walks) == 2, "it is known to be sound now"

    def test_a_failing_medium_is_no_damage(
        self, opened: Opened, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Nothing is set aside because a disk does not answer for a while."""
        script = tmp_path / "walk.py"
        walk = Path(ssd_walk.__file__).read_text()
        failing = "lmdb.verify.verify = lambda _: open('/proc/self/mem', 'rb').read(1)"
        script.write_text(walk.replace("if __name__", f"{failing}\nif __name__"))
        with monkeypatch.context() as patch:
            patch.setattr(ssd_walk, "__file__", str(script))
            with pytest.raises(TierUnavailable, match=r"env-000.*Input/output"):
                open_tier(home)
        assert opened.names() == ["env-000"]
        opened.open_again()
        assert set(opened.shelf.where) == {0, 1, 2}

    def test_a_walk_of_nothing(self, tmp_path: Path) -> None:
        assert ssd_walk.tree_problems(tmp_path) == ["its data.mdb is gone"]

    @pytest.mark.parametrize("mark", ["", "{}", "nonsense", '{"boot_id": 5}'])
    def test_a_torn_mark_is_a_lost_power(
        self, opened: Opened, mark: str, walks: list[Path]
    ) -> None:
        opened.shelf.put(LARGE, [0])
        opened.tier._shut()
        (opened.home / "kvtier.boot").write_text(mark)
        opened.open_again()
        assert walks == [opened.home / "env-000"]

    def test_a_walk_that_dies_is_damage(
        self, opened: Opened, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        script = tmp_path / "walk.py"
        script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        monkeypatch.setattr(ssd_walk, "__file__", str(script))
        assert ssd_walk.tree_problems(home / "env-000") == ["the walk died of SIGSEGV"]
        script.write_text("raise SystemExit('no such thing')")
        assert ssd_walk.tree_problems(home / "env-000") == ["the walk failed: no such thing"]
        script.write_text("import time; time.sleep(60)")
        monkeypatch.setattr(ssd_walk, "_LEAST_S", 0.0)
        monkeypatch.setattr(ssd_walk, "_BYTES_PER_S", 1 << 40)
        assert ssd_walk.tree_problems(home / "env-000")[0].startswith("the walk took more than")

    def test_a_full_store_needs_no_walk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = open_tier(tmp_path / "full", durability="full")
        tier.commit(namespaces=ROWS)
        tier._shut()
        (tmp_path / "boot_id").write_text("another boot\n")
        monkeypatch.setattr(ssd_directory, "_BOOT_ID", tmp_path / "boot_id")
        monkeypatch.delattr("kvtier.tier.ssd_segments.tree_problems")
        tier = open_tier(tmp_path / "full", durability="full")
        assert len(tier.namespaces()) == len(ROWS)
        tier.close()


class TestReopen:
    def test_what_broke_meanwhile_is_not_among_the_survivors(self, opened: Opened) -> None:
        fill(opened.shelf)
        os.truncate(opened.data(0), 1 << 20)
        assert opened.tier.reopen() == [1]
        for number in [n for n, segment in opened.shelf.where.items() if segment == 0]:
            opened.shelf.deletion(number)
        opened.shelf.assert_all_read()
        opened.shelf.put(LARGE, [5000])
        assert opened.shelf.where[5000] != 0

    def test_a_segment_that_could_not_be_deleted_does_not_come_back(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill(opened.shelf)

        def fail(*_: object) -> None:
            raise TierUnavailable("read-only")

        with monkeypatch.context() as patch:
            patch.setattr(ssd_directory.StoreDirectory, "remove", fail)
            with pytest.raises(TierUnavailable):
                opened.tier.retire(0, damaged=False)
        assert opened.names() == ["env-000", "env-001"]
        assert opened.tier.reopen() == [1]
        assert opened.names() == ["env-001"]
        for number in [n for n, segment in opened.shelf.where.items() if segment == 0]:
            opened.shelf.deletion(number)
        opened.shelf.assert_all_read()

    def test_another_store_in_its_place_is_left_alone(self, opened: Opened, tmp_path: Path) -> None:
        opened.shelf.put(LARGE, [0])
        other = Opened(tmp_path / "other", FaultyIo())
        other.shelf.put(LARGE, [7])
        other.tier.close()
        opened.home.rename(tmp_path / "away")
        other.home.rename(opened.home)
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="another store"):
                opened.tier.reopen()
        opened.home.rename(other.home)
        (tmp_path / "away").rename(opened.home)
        assert opened.tier.reopen() == [0]
        opened.shelf.assert_all_read()
        other.open_again()
        other.shelf.assert_all_read()
        other.tier.close()

    def test_an_empty_disk_in_its_place_starts_empty(self, opened: Opened, tmp_path: Path) -> None:
        opened.shelf.put(LARGE, [0])
        opened.home.rename(tmp_path / "away")
        assert opened.tier.reopen() == []
        opened.shelf.where.clear()
        opened.shelf.put(LARGE, [1])
        opened.shelf.assert_all_read()
        assert set(opened.tier.namespaces()) == set(ROWS)

    def test_while_it_is_closed_everything_says_so(self, opened: Opened, tmp_path: Path) -> None:
        opened.shelf.put(LARGE, [0])
        usage = opened.tier.usage()
        opened.home.rename(tmp_path / "away")
        opened.home.write_bytes(b"")
        with pytest.raises(TierUnavailable):
            opened.tier.reopen()
        actions: list[Callable[[], object]] = [
            lambda: opened.shelf.read(LARGE, 0),
            lambda: opened.shelf.write(LARGE, 1),
            lambda: opened.tier.commit(),
            opened.tier.excess,
            lambda: opened.tier.scrub(b""),
            lambda: opened.tier.retire(0, damaged=False),
        ]
        for action in actions:
            with pytest.raises(TierUnavailable):
                action()
        assert opened.tier.usage() == usage
        opened.home.unlink()
        (tmp_path / "away").rename(opened.home)
        assert opened.tier.reopen() == [0]
        opened.shelf.assert_all_read()


class TestRows:
    def test_blocks_in_many_pieces(self, opened: Opened) -> None:
        """Only small holes are left: a block is spread over them, and comes back."""
        numbers = range(1100)
        count = 0
        for number in numbers:
            try:
                opened.shelf.put(MIDDLE, [number])
            except TierFull:
                break
            count += 1
        opened.shelf.delete(range(0, count, 2))
        written = opened.shelf.write(LARGE, 5000)
        assert len(written.pieces) > 2
        opened.shelf.commit([written])
        opened.check_integrity()
        opened.shelf.assert_all_read()
        usage = opened.tier.usage()
        opened.restart()
        assert opened.tier.usage() == usage
        opened.check_integrity()
        opened.shelf.assert_all_read()
        before = self.rows_in_pieces(opened)
        opened.shelf.delete([5000])
        opened.check_integrity()
        assert self.rows_in_pieces(opened) == before - 1

    def rows_in_pieces(self, opened: Opened) -> int:
        count = 0
        for env in opened.tier._segments.open.values():
            with env._lmdb.begin() as txn:
                count += txn.stat(env.tables.pieces)["entries"]
        return count
