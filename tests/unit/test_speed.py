"""A shard's speed: what a load will take."""

from __future__ import annotations

import pytest

from kvtier.speed import MEMORY_S, START_S, ReadSpeed


def test_nothing_is_known_at_first() -> None:
    speed = ReadSpeed()
    assert speed.bytes_per_s is None
    assert speed.load_s(1 << 30) == 0.0
    speed.measured(0, 1.0)
    speed.measured(10, 0.0)
    assert speed.bytes_per_s is None


def test_a_load_takes_its_turn() -> None:
    speed = ReadSpeed()
    speed.measured(1_000, 0.5)
    assert speed.load_s(4_000) == pytest.approx(START_S + 2.0)
    speed.loading_bytes = 2_000
    assert speed.load_s(4_000) == pytest.approx(START_S + 3.0)


def test_the_recent_past_counts_most() -> None:
    speed = ReadSpeed()
    speed.measured(1_000_000, 1.0)
    for _ in range(10):
        speed.measured(100, MEMORY_S / 10)
    assert speed.bytes_per_s is not None
    assert speed.bytes_per_s < 250_000
    speed.measured(100, MEMORY_S)
    assert speed.bytes_per_s == pytest.approx(100 / MEMORY_S)
