"""What the daemon tells of itself: complete, documented, and the same in all places."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from kvtier.arena import DATA_OFFSET, ControlPage
from kvtier.config import Settings
from kvtier.daemon.stats import StoreCollector, counter_values, stats_response, wear
from kvtier.metrics import Counters
from kvtier.policy.lru import Lru
from kvtier.store import StoreConfig, TieredStore
from kvtier.tier.base import TierUsage

ROOT = Path(__file__).parents[2]
TWO = Settings(ssd_directories=(Path("/ssd/one"), Path("/ssd/two")), ssd_capacity_bytes=1 << 30)


def store_of(shards: int, *, rated_write_bytes: int = 0) -> TieredStore:
    """An empty store; its shards have used and written some."""
    return TieredStore(
        StoreConfig(host_bytes=1 << 20, rated_write_bytes=rated_write_bytes),
        control=ControlPage(bytearray(DATA_OFFSET)),
        epoch=b"e" * 16,
        host_policy=Lru(),
        ssd_policies=[Lru() for _ in range(shards)],
        ssd_usages=[TierUsage(100 + n, 90, 1000, 7, 5000 + n) for n in range(shards)],
    )


def metrics(store: TieredStore, settings: Settings) -> dict[str, Metric]:
    """Families by name, without the prefix."""
    collector = StoreCollector(store, lambda: 3, settings)
    return {family.name.removeprefix("kvtier_"): family for family in collector.collect()}


def by_directory(family: Metric) -> dict[str, float]:
    return {sample.labels["directory"]: sample.value for sample in family.samples}


@pytest.mark.parametrize("shards", [0, 2])
def test_every_counter_is_a_metric(shards: int) -> None:
    families = metrics(store_of(shards), TWO if shards else Settings())
    for counter in fields(Counters):
        name = re.sub("^(host|ssd)_(hit|evicted)_", r"\2_", counter.name)
        assert name in families, counter.name


def test_the_readme_names_every_metric() -> None:
    store = store_of(2, rated_write_bytes=1)
    text = (ROOT / "README.md").read_text()
    text = text[text.index("## Metrics") : text.index("## Benchmarks")]
    named = set()
    for line in text.splitlines():
        full = re.findall(r"`kvtier_(\w+)`", line)
        named.update(full)
        stem = full[0] if full else ""
        for tail in re.findall(r"`\.\.\.(_\w+)`", line):
            parts = stem.split("_")
            named.update("_".join(parts[:end]) + tail for end in range(1, len(parts)))
    for name, family in metrics(store, TWO).items():
        shown = f"{name}_total" if family.type == "counter" else name
        assert shown in named, f"README.md lacks kvtier_{shown}"


def test_shards_have_a_row_each() -> None:
    store = store_of(2)
    store.tiers.shard_down(1)
    families = metrics(store, TWO)
    assert by_directory(families["ssd_shard_online"]) == {"/ssd/one": 1, "/ssd/two": 0}
    assert by_directory(families["ssd_shard_used_bytes"]) == {"/ssd/one": 100, "/ssd/two": 101}
    written = by_directory(families["ssd_shard_written_bytes"])
    assert written == {"/ssd/one": 5000, "/ssd/two": 5001}
    answer = stats_response(store, version="1", epoch=b"", uptime_s=0.0, sessions=0, settings=TWO)
    assert [shard.directory for shard in answer.shards] == ["/ssd/one", "/ssd/two"]
    assert [shard.online for shard in answer.shards] == [True, False]
    ssd = answer.tiers[1]
    assert (ssd.capacity_bytes, ssd.used_bytes, ssd.healthy) == (2 << 30, 201, False)
    assert answer.HasField("ssd_wear")


def test_no_ssd_no_shards() -> None:
    store = store_of(0)
    assert wear(store) is None
    assert not any(name.startswith("ssd_lifetime") for name in metrics(store, Settings()))
    answer = stats_response(
        store, version="1", epoch=b"", uptime_s=0.0, sessions=0, settings=Settings()
    )
    assert not answer.HasField("ssd_wear")
    assert not answer.shards


def test_wear() -> None:
    """User report 27: bytes written today and per byte served, and how long that goes well."""
    store = store_of(2, rated_write_bytes=110_001)
    ssd = store.tiers.ssd
    assert ssd is not None
    assert not metrics(store, TWO)["ssd_lifetime_days"].samples, "unknown is not 0"
    ssd.budget.spend(1000)
    store.counters.ssd_written_bytes, store.counters.ssd_served_bytes = 1000, 4000
    now = wear(store)
    assert now is not None
    assert now.written_today_bytes == 1000
    assert now.lifetime_days == 100
    assert now.written_per_served_byte == 0.25
    assert now.budget_level == 1.0
    [sample] = metrics(store, TWO)["ssd_lifetime_days"].samples
    assert sample.value == 100


def test_counters_by_reason_are_named_by_it() -> None:
    counters = Counters(corrupt_blocks={"CorruptBlock": 3}, late_loads=2)
    values = counter_values(counters)
    assert values["corrupt_blocks_CorruptBlock"] == 3
    assert values["late_loads"] == 2
    assert "corrupt_blocks" not in values
