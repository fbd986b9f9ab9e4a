"""The endurance budget: a token bucket in bytes."""

from __future__ import annotations

import pytest

from kvtier.endurance import DAY_S, START_LEVEL, TIGHT_LEVEL, WriteBudget

DAILY = 8_000
BURST = DAILY // 4


def spent(size_bytes: int) -> WriteBudget:
    budget = WriteBudget(DAILY)
    budget.tick(0.0)
    budget.spend(size_bytes)
    return budget


def test_without_a_limit_everything_is_allowed() -> None:
    budget = WriteBudget(0)
    budget.spend(1 << 60)
    assert budget.allows(1 << 60)
    assert budget.level == 1.0
    assert not budget.tight


def test_what_is_spent_is_gone_until_time_brings_it_back() -> None:
    start = int(BURST * START_LEVEL)
    budget = spent(start - 100)
    assert budget.allows(100)
    assert not budget.allows(101)
    budget.tick(DAY_S * 50 / DAILY)
    assert budget.allows(150)
    assert not budget.allows(151)


def test_a_quiet_time_earns_no_more_than_the_burst() -> None:
    budget = spent(0)
    budget.tick(100.0 * DAY_S)
    assert budget.allows(BURST)
    assert not budget.allows(BURST + 1)


def test_it_gets_tight_before_it_is_empty() -> None:
    assert not spent(0).tight
    budget = spent(int(BURST * (START_LEVEL - TIGHT_LEVEL)) + 1)
    assert budget.tight
    assert budget.allows(100)


def test_a_day_of_full_use_writes_the_daily_bytes_and_one_start() -> None:
    budget = WriteBudget(DAILY)
    written = 0
    for minute in range(24 * 60 + 1):
        budget.tick(minute * 60.0)
        while budget.allows(1):
            budget.spend(1)
            written += 1
    assert written == pytest.approx(DAILY + BURST * START_LEVEL, abs=2)
    assert budget.written_today_bytes == pytest.approx(DAILY, rel=0.2)


def test_the_life_left_needs_a_rating_and_some_writing() -> None:
    assert WriteBudget(0).lifetime_days(5) is None
    rated = WriteBudget(0, rated_bytes=10_000)
    rated.tick(0.0)
    assert rated.lifetime_days(0) is None
    rated.spend(100)
    assert rated.lifetime_days(4_000) == 60
    assert rated.lifetime_days(20_000) == 0
