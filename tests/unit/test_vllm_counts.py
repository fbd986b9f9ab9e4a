"""The connector's counters: what moved since they were last taken."""

from __future__ import annotations

from collections import Counter

import pytest

from engine_adapter.vllm.counts import Counts
from kvtier.types import MissReason


def test_only_what_moved_is_taken_and_once() -> None:
    counts = Counts()
    counts.add("lookups")
    counts.add("loaded_bytes", 7)
    counts.add("loaded_bytes", 3)
    counts.add("failed_loads", 0)
    assert counts.take() == {"lookups": 1, "loaded_bytes": 10}
    assert not counts.take()


def test_misses_are_counted_as_they_grow() -> None:
    counts = Counts()
    before = Counter({MissReason.TIMEOUT: 2, MissReason.FULL: 1})
    now = Counter({MissReason.TIMEOUT: 5, MissReason.FULL: 1, MissReason.NO_SESSION: 4})
    counts.add_misses(now, before)
    assert counts == {"missed_timeout": 3, "missed_no_session": 4}


def test_an_unknown_counter_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="lokups"):
        Counts().add("lokups")
