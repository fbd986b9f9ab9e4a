"""Sizes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizes import exact_size, parse_size, rounded_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1kb", 1000),
        (" 2 KiB ", 2048),
        ("0.5KiB", 512),
        ("7", 7),
        ("7B", 7),
        ("3TiB", 3 << 40),
        ("16Gi", 16 << 30),
        ("1G", 10**9),
    ],
)
def test_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 XB", "1iB", "i", "-1", "1e9", "1,5GB", "0.3B", "٣GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_exact_text_reads_back(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes
    assert parse_size(size_bytes) == size_bytes


@given(st.integers(min_value=0, max_value=10**6), st.sampled_from(["KiB", "MiB", "GB", "TB"]))
def test_case_and_spaces_do_not_matter(number: int, unit: str) -> None:
    assert parse_size(f"{number} {unit.lower()}") == parse_size(f"{number}{unit}")


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017  # Either outcome is right.


def test_rounding_for_people() -> None:
    assert rounded_size(1_572_864_000) == "1.46 GiB"
    assert rounded_size(1023) == "1023 B"
