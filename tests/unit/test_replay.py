"""The replay benchmark: trace formats, and hits that a naive model of the two tiers confirms."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest
import zstandard

from bench.replay import replay
from bench.traces import read_trace
from kvtier.types import WritePolicy


class NaiveTiers:
    """The rules of the two-tier model, written down plainly; transfers take no time."""

    def __init__(self, ram: int, ssd: int, *, through: bool) -> None:
        self.capacity = {"ram": ram, "ssd": ssd}
        self.ram: OrderedDict[int, int] = OrderedDict()
        self.ssd: dict[int, int] = {}
        self.through = through
        self.clock = 0
        self.ram_hits = self.ssd_hits = self.writes = 0

    def serve(self, request: list[int]) -> None:
        for block in request:
            if block not in self.ram and block not in self.ssd:
                break
            self.ram_hits += block in self.ram
            self.ssd_hits += block not in self.ram
        for block in reversed(request):
            self.clock += 1
            self.ram[block] = self.clock
            if block in self.ssd:
                self.ssd[block] = self.clock
        for block in request:
            if self.through and block not in self.ssd:
                self.write(block, self.ram[block])
        while len(self.ram) > self.capacity["ram"]:
            coldest = min(self.ram, key=self.ram.__getitem__)
            stamp = self.ram.pop(coldest)
            if coldest not in self.ssd:
                self.write(coldest, stamp)

    def write(self, block: int, stamp: int) -> None:
        self.writes += 1
        self.ssd[block] = stamp
        if len(self.ssd) > self.capacity["ssd"]:
            del self.ssd[min(self.ssd, key=self.ssd.__getitem__)]


def random_requests(seed: int) -> list[list[int]]:
    """Prompts that share prefixes; an id names a block with its whole prefix."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(400):
        tokens = tuple(rng.choice((0, 0, 0, 1, 2, 3)) for _ in range(rng.randint(1, 12)))
        requests.append([ids.setdefault(tokens[: end + 1], len(ids)) for end in range(len(tokens))])
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_through_hits_are_those_of_the_naive_model(seed: int) -> None:
    requests = random_requests(seed)
    model = NaiveTiers(20, 60, through=True)
    for request in requests:
        model.serve(request)
    found = replay(requests, 20, 60, WritePolicy.THROUGH)
    assert found["ram_hit_blocks"] == model.ram_hits
    assert found["ssd_hit_blocks"] == model.ssd_hits
    assert found["ssd_written_blocks"] == model.writes


@pytest.mark.parametrize("seed", range(6))
def test_on_evict_hits_are_close_to_the_naive_model(seed: int) -> None:
    """Not equal: the model lets a last copy leave while blocks that continue it stay."""
    requests = random_requests(seed)
    model = NaiveTiers(20, 60, through=False)
    for request in requests:
        model.serve(request)
    found = replay(requests, 20, 60, WritePolicy.ON_EVICT)
    assert found["ram_hit_blocks"] == pytest.approx(model.ram_hits, rel=0.01)
    assert found["ssd_hit_blocks"] == pytest.approx(model.ssd_hits, rel=0.05)
    assert found["ssd_written_blocks"] == pytest.approx(model.writes, rel=0.05)


def test_second_touch_writes_less_and_says_what_it_skipped() -> None:
    requests = random_requests(1)
    lazy = replay(requests, 20, 60, WritePolicy.LAZY)
    second = replay(requests, 20, 60, WritePolicy.SECOND_TOUCH)
    assert 0 < second["ssd_written_blocks"] < lazy["ssd_written_blocks"]
    assert second["skipped_by_admission_blocks"] > 0
    assert lazy["skipped_by_admission_blocks"] == 0


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_both_formats_give_the_same_requests(tmp_path: Path, suffix: str) -> None:
    requests = [[5, 6, 7], [5, 6, 9, 10], [20]]
    mooncake = "".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests)
    delta = "0 a 1 1 0 5 3\n1 a 1 1 2 9 2\n2 b 1 1 0 20 1\n"
    for name, text in (("m.jsonl", mooncake), ("d.txt", delta)):
        path = tmp_path / (name + suffix)
        data = text.encode()
        path.write_bytes(zstandard.compress(data) if suffix else data)
        assert list(read_trace(path)) == requests


@pytest.mark.parametrize(
    "line", ["{}", '{"hash_ids": ["x"]}', "0 a 1", "0 a 1 1 3 5 3", "0 a 1 1 0 5"]
)
def test_a_line_of_neither_format_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace"
    path.write_text(f"0 s 1 1 0 1 1\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read_trace(path))
