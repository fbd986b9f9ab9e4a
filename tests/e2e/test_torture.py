"""A short run of bench.torture: kills at work, while starting and while draining, and no damage."""

from __future__ import annotations

from pathlib import Path

from bench.torture import FAULTS, torture


def test_kills_do_no_damage(tmp_path: Path) -> None:
    """User reports 21 to 24. The long run is `python -m bench.torture --kills 200`."""
    counts, notes = torture(kills=5, seed=1, directory=tmp_path)
    assert {fault: counts[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0), notes
    assert counts["kills"] == 5
    assert counts["clean_stops"] >= 2
    assert counts["durable_blocks"] > 200
    assert counts["checked_blocks"] > counts["durable_blocks"] / 2
    assert counts["evicted_blocks"] > 0
    assert counts["du_samples"] > 100
