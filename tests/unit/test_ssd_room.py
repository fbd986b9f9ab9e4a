"""Pages of slabs: what the rows say is what is taken, and conflicts are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tier.base import Piece
from kvtier.tier.ssd_room import Room, conflicting

PAGE = 4096
SLABS = [Piece(2 * PAGE, 10 * PAGE), Piece(13 * PAGE, 6 * PAGE), Piece(30 * PAGE, 10 * PAGE)]
RUN = st.tuples(st.integers(0, 45), st.integers(0, 12))


def arrays(runs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(runs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def inside(run: tuple[int, int]) -> bool:
    return run[1] > 0 and any(
        start <= run[0] * PAGE and sum(run) * PAGE <= start + size for start, size in SLABS
    )


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < sum(other) and other[0] < sum(one)


@given(st.lists(RUN, max_size=8))
def test_conflicts_are_those_that_a_comparison_of_all_pairs_finds(
    runs: list[tuple[int, int]],
) -> None:
    """At least those; and none without a conflict anywhere."""
    found = conflicting(SLABS, *arrays(runs)).tolist()
    sound = [inside(run) for run in runs]
    for at, run in enumerate(runs):
        clash = any(
            overlap(run, other) for n, other in enumerate(runs) if n != at and run[1] and other[1]
        )
        if not sound[at] or clash:
            assert found[at], (runs, at)
    if all(sound) and not any(
        overlap(runs[a], runs[b]) for a in range(len(runs)) for b in range(a)
    ):
        assert not any(found)


def test_without_slabs_nothing_is_sound() -> None:
    assert conflicting([], *arrays([(2, 1)])).tolist() == [True]
    assert conflicting(SLABS, *arrays([])).tolist() == []


@given(st.lists(RUN, max_size=12))
def test_what_rows_have_is_never_given_out(runs: list[tuple[int, int]]) -> None:
    taken: list[tuple[int, int]] = []
    for run in runs:
        if inside(run) and not any(overlap(run, other) for other in taken):
            taken.append(run)
    room = Room(50 * PAGE)
    room.restore(SLABS, *arrays(taken))
    used_bytes = sum(pages for _, pages in taken) * PAGE
    room.check_integrity(used_bytes)
    assert room.free_bytes == 26 * PAGE - used_bytes
    while pieces := room.take(PAGE):
        page = (pieces[0].offset_bytes // PAGE, 1)
        assert inside(page)
        assert not any(overlap(page, other) for other in taken)
        taken.append(page)
    assert room.free_bytes == 0
    assert sum(pages for _, pages in taken) == 26


def test_pages_go_from_free_to_written_to_a_blocks_and_back() -> None:
    room = Room(50 * PAGE)
    assert room.take(1) == ()
    room.add_slab(SLABS[0])
    written = room.take(3 * PAGE - 1)
    assert written == (Piece(2 * PAGE, 3 * PAGE),)
    assert (room.written_blocks, room.free_bytes, room.size_bytes) == (1, 7 * PAGE, 10 * PAGE)
    assert room.has_written(written)
    room.commit(written)
    assert not room.has_written(written)
    room.give_back(written)  # Harmless: it is a block's.
    room.check_integrity(3 * PAGE)
    room.free(written)
    room.check_integrity(0)


def test_pages_that_are_no_blocks_can_not_be_freed() -> None:
    """A row that says otherwise is damaged: nobody's pages change."""
    room = Room(1 << 20)
    room.add_slab(Piece(0, 16 * PAGE))
    block, written = room.take(2 * PAGE), room.take(PAGE)
    room.commit(block)
    with pytest.raises(ValueError, match="no block's"):
        room.free(written)
    room.free(block)
    with pytest.raises(ValueError, match="no block's"):
        room.free(block)
    room.give_back(written)
    room.check_integrity(0)


def test_equal_pieces_of_another_time_are_others() -> None:
    """A block that was written before a reopen must not take the room of one written since."""
    before, after = Room(50 * PAGE), Room(50 * PAGE)
    for room in (before, after):
        room.add_slab(SLABS[0])
    old, new = before.take(PAGE), after.take(PAGE)
    assert old == new
    assert not after.has_written(old)
    after.give_back(old)
    assert after.has_written(new)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_block_is_in_so_many_pieces_at_most(pieces: int) -> None:
    room = Room(50 * PAGE)
    for slab in SLABS[:2]:
        room.add_slab(slab)
    assert len(room.take(12 * PAGE, pieces)) == (pieces if pieces > 1 else 0)
