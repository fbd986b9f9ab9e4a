"""The allocator gives every byte to at most one owner, and takes all of them back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.extents import EXTENT_ALIGN_BYTES, Extent, ExtentAllocator, aligned

PAGE = EXTENT_ALIGN_BYTES


def test_sizes_are_rounded_up_to_whole_extents() -> None:
    assert [aligned(size) for size in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]
    extents = ExtentAllocator(10 * PAGE + 5)
    assert extents.capacity_bytes == 10 * PAGE
    assert extents.allocate(1) == Extent(0, PAGE)


def test_the_smallest_hole_that_fits_is_taken() -> None:
    extents = ExtentAllocator(10 * PAGE)
    held = [extents.allocate(PAGE) for _ in range(10)]
    for at in (1, 2, 3, 5, 6, 8):
        extents.free(Extent(at * PAGE, PAGE))
    assert None not in held
    assert extents.largest_hole_bytes == 3 * PAGE
    assert extents.allocate(2 * PAGE) == Extent(5 * PAGE, 2 * PAGE)
    assert extents.allocate(PAGE) == Extent(8 * PAGE, PAGE)
    assert extents.allocate(4 * PAGE) is None
    assert extents.allocate(3 * PAGE) == Extent(1 * PAGE, 3 * PAGE)
    assert extents.free_bytes == 0
    extents.check_integrity()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_freed_neighbours_merge(order: tuple[int, ...]) -> None:
    extents = ExtentAllocator(3 * PAGE)
    for _ in range(3):
        extents.allocate(PAGE)
    for at in order:
        extents.free(Extent(at * PAGE, PAGE))
        extents.check_integrity()
    assert extents.allocate(3 * PAGE) == Extent(0, 3 * PAGE)


def test_freeing_twice_is_an_error_of_ours() -> None:
    extents = ExtentAllocator(4 * PAGE)
    extent = extents.allocate(PAGE)
    other = extents.allocate(PAGE)
    assert extent is not None
    assert other is not None
    extents.free(extent)
    with pytest.raises(AssertionError):
        extents.free(extent)


def test_claimed_extents_are_never_given_out() -> None:
    extents = ExtentAllocator(10 * PAGE)
    for claimed in (Extent(2 * PAGE, 3 * PAGE), Extent(0, PAGE), Extent(9 * PAGE, PAGE)):
        extents.claim(claimed)
        extents.check_integrity()
    with pytest.raises(AssertionError, match="not free"):
        extents.claim(Extent(4 * PAGE, 2 * PAGE))
    assert extents.allocate(4 * PAGE) == Extent(5 * PAGE, 4 * PAGE)
    assert extents.allocate(2 * PAGE) is None
    extents.free(Extent(2 * PAGE, 3 * PAGE))
    assert extents.allocate(2 * PAGE) is not None


def test_pieces_are_few_and_only_where_no_hole_is_long_enough() -> None:
    extents = ExtentAllocator(20 * PAGE)
    extents.claim(Extent(0, 20 * PAGE))
    for start, pages in ((1, 1), (4, 3), (9, 5), (16, 2)):
        extents.free(Extent(start * PAGE, pages * PAGE))
    assert extents.allocate_pieces(3 * PAGE, 4) == [Extent(4 * PAGE, 3 * PAGE)]
    extents.free(Extent(4 * PAGE, 3 * PAGE))
    assert extents.allocate_pieces(7 * PAGE - 5, 1) is None
    assert extents.allocate_pieces(10 * PAGE, 2) is None
    assert extents.free_bytes == 11 * PAGE
    # The largest holes, and the best fit for what is left.
    assert extents.allocate_pieces(7 * PAGE - 5, 2) == [
        Extent(9 * PAGE, 5 * PAGE),
        Extent(16 * PAGE, 2 * PAGE),
    ]
    assert extents.allocate_pieces(5 * PAGE, 9) is None
    assert extents.allocate_pieces(4 * PAGE, 2) == [
        Extent(4 * PAGE, 3 * PAGE),
        Extent(1 * PAGE, 1 * PAGE),
    ]
    assert extents.free_bytes == 0
    extents.check_integrity()


def test_an_allocator_of_nothing_has_nothing() -> None:
    extents = ExtentAllocator(PAGE - 1)
    assert extents.allocate(1) is None
    assert extents.largest_hole_bytes == extents.free_bytes == 0
    extents.check_integrity()


STEP = st.tuples(st.booleans(), st.integers(1, 5 * PAGE), st.integers(0, 63))


@given(st.lists(STEP, max_size=60))
def test_owners_never_overlap_and_everything_comes_back(
    steps: list[tuple[bool, int, int]],
) -> None:
    """Against a byte map; room is refused only where no hole is long enough."""
    pages = 24
    extents = ExtentAllocator(pages * PAGE)
    owner = [0] * pages
    held: dict[int, Extent] = {}
    for number, (give, size, which) in enumerate(steps, start=1):
        if give:
            extent = extents.allocate(size)
            wanted = aligned(size) // PAGE
            if extent is None:
                free = "".join("x" if page else "." for page in owner)
                assert "." * wanted not in free
            else:
                first = extent.offset_bytes // PAGE
                assert extent.size_bytes == wanted * PAGE
                assert not any(owner[first : first + wanted])
                owner[first : first + wanted] = [number] * wanted
                held[number] = extent
        elif held:
            gone = list(held)[which % len(held)]
            extents.free(held.pop(gone))
            owner = [0 if page == gone else page for page in owner]
        extents.check_integrity()
        assert extents.used_bytes == sum(map(bool, owner)) * PAGE
    for extent in held.values():
        extents.free(extent)
    assert extents.allocate(pages * PAGE) == Extent(0, pages * PAGE)
