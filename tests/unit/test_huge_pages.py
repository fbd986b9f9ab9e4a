"""The arena's memory is all there, with huge pages and without."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.arena import DATA_OFFSET
from kvtier.extents import Extent
from kvtier.tier import host, huge_pages
from kvtier.tier.host import HostArena
from kvtier.tier.huge_pages import HUGE_BYTES, STEP_BYTES, give_huge_pages

SIZE_BYTES = STEP_BYTES + 3 * HUGE_BYTES + mmap.PAGESIZE


@pytest.fixture
def descriptor() -> Iterator[int]:
    """An empty file in shared memory."""
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def backed_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_what_it_says_is_backed_is(descriptor: int) -> None:
    given = give_huge_pages(descriptor, SIZE_BYTES)
    assert given in (0, STEP_BYTES, SIZE_BYTES - mmap.PAGESIZE), "whole steps"
    assert os.fstat(descriptor).st_size == SIZE_BYTES
    assert backed_bytes(descriptor) >= given
    assert os.pread(descriptor, SIZE_BYTES, 0) == bytes(SIZE_BYTES)


def test_a_kernel_that_has_none(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 12_345)  # FAKE: an unknown advice.
    assert give_huge_pages(descriptor, SIZE_BYTES) == 0
    assert backed_bytes(descriptor) <= STEP_BYTES // HUGE_BYTES * mmap.PAGESIZE


def test_patience_ends(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "PATIENCE_S", -1.0)
    assert give_huge_pages(descriptor, SIZE_BYTES) == 0


@pytest.mark.parametrize("advice", [huge_pages._MADV_COLLAPSE, 12_345], ids=["huge", "FAKE none"])
def test_an_arena_is_reserved_either_way(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", advice)
    with tempfile.TemporaryDirectory(prefix="kvtier-", dir="/dev/shm") as shm:
        arena = HostArena(Path(shm) / "arena", SIZE_BYTES, b"e" * 16)
        assert arena.path.stat().st_blocks * 512 >= arena.size_bytes == DATA_OFFSET + SIZE_BYTES
        last = arena.view(Extent(SIZE_BYTES - mmap.PAGESIZE, mmap.PAGESIZE), mmap.PAGESIZE)
        assert not last.any()
        last[:] = 7
        arena.close()


def test_what_a_killed_daemon_left_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier-", dir="/dev/shm") as shm:
        directory = Path(shm) / "arena"
        directory.mkdir(mode=0o700)
        left = directory / "arena.new"
        left.write_bytes(bytes(mmap.PAGESIZE))
        seen = []
        monkeypatch.setattr(host, "_check_room", lambda *_: seen.append(left.exists()))
        HostArena(directory, HUGE_BYTES, b"e" * 16).close()
        assert seen == [False]
        assert not directory.exists(), "and a clean stop leaves nothing"
