"""SGLang's HiCache on a real daemon: real storage classes, host pools, page hashes, controller."""

from __future__ import annotations

import logging
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_adapter.hicache.arguments import (
    COMPUTING,
    CONTENTS,
    IDENTIFYING,
    NOT_COMPUTING,
    WEIGHTS_FROM_FILES,
)
from engine_adapter.hicache.identity import FILE_FORMATS, computation_digest
from engine_adapter.sglang import KvtierHiCache
from engine_adapter.sglang_version import TESTED, check_version, facts_of
from kvtier.client import Client
from kvtier.errors import ConfigError, InvalidRequest, KvtierError
from kvtier.process import DaemonProcess
from tests.e2e.conftest import daemons
from tests.e2e.support import PATIENCE_S, eventually
from tests.engines.sglang_pools import (
    LAYERS,
    PAGE_TOKENS,
    Controller,
    create_backend,
    extra_config,
    fill_randomly,
    mha_pool,
    mla_pool,
    native_hash,
    page_hashes,
    plain_hash,
    storage_config,
)

from sglang.srt.arg_groups.arg_utils import record_fields  # isort: skip - after the stand-in
from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES  # isort: skip
from sglang.srt.mem_cache.hicache_storage import (  # isort: skip
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # isort: skip
from sglang.srt.runtime_context import get_context  # isort: skip
from sglang.srt.server_args import ServerArgs  # isort: skip

PAGES = 8
TOKENS = list(range(1000, 1000 + PAGES * PAGE_TOKENS))
ALL = torch.arange(PAGES * PAGE_TOKENS)
ELSEWHERE = ALL + 2 * PAGES * PAGE_TOKENS
ROOT = HiCacheStorageExtraInfo(prefix_keys=[])

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = {
    **{f"mla-{layout}": (mla_pool, layout, True) for layout in LAYOUTS},
    **{f"mha-{layout}": (mha_pool, layout, False) for layout in LAYOUTS},
}

Start = Callable[..., KvtierHiCache]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for all tests, each with a tenant of its own."""
    with daemons(tmp_path_factory.mktemp("shared")) as start:
        yield start(ssd=False, host_capacity_bytes=128 << 20)


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of this test's own, with an SSD."""
    with daemons(tmp_path) as start:
        daemon = start()
        yield daemon
        assert_clean(daemon)


def assert_clean(daemon: DaemonProcess) -> None:
    """Nothing is leased or pinned, but for what is on its way to an SSD just now."""
    with Client(daemon.address) as client:
        assert client.wait_attached(PATIENCE_S)

        def idle() -> bool:
            stats = client.stats()
            leases = stats.read_leases + stats.write_leases + stats.pins
            return not (leases or stats.pinned_bytes or stats.quarantined_bytes)

        eventually(idle, f"no lease, nothing pinned: {client.stats()}")


@pytest.fixture
def start_backend(
    request: pytest.FixtureRequest,
    daemon: DaemonProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Start]:
    """Make backends as SGLang does, at `daemon` unless told otherwise; it is clean at the end.

    They are patient, for what is tested is not this machine's speed.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # Of weights' digests.
    with ExitStack() as stack:

        def make(
            pool: Any,
            extra: dict[str, object] | None = None,
            *,
            at: DaemonProcess = daemon,
            attached: bool = True,
            **changes: Any,
        ) -> KvtierHiCache:
            settings: dict[str, object] = {
                "address": at.address,
                "weights_revision": "r1",
                "acquire_timeout_ms": 10_000,
                **(extra or {}),
            }
            settings["tenant"] = f"{request.node.name}/{settings.get('tenant', '')}"
            given = {name: value for name, value in settings.items() if value is not None}
            backend = create_backend(storage_config(given, **changes), pool)
            stack.callback(backend.close)
            assert isinstance(backend, KvtierHiCache)
            assert not attached or backend._client.wait_attached(PATIENCE_S)
            return backend

        yield make
    assert_clean(daemon)


def pages_of(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    """Copies of pages, as bytes."""
    return [
        pool.get_data_page(int(start)).view(torch.uint8).clone() for start in indices[::PAGE_TOKENS]
    ]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Equal pages, and as many."""
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def stored(backend: KvtierHiCache, pool: Any, seed: int = 1) -> list[torch.Tensor]:
    """Store TOKENS' pages with random content; what they are."""
    fill_randomly(pool, seed)
    assert all(backend.batch_set_v1(page_hashes(TOKENS), ALL, ROOT))
    return pages_of(pool, ALL)


# Set, exists, get


@pytest.mark.parametrize("name", POOLS)
def test_what_is_set_is_got_byte_for_byte(start_backend: Start, name: str) -> None:
    """In every layout, by another process's pool, at other places."""
    make_pool, layout, is_mla = POOLS[name]
    pool, other = make_pool(layout), make_pool(layout)
    keys = page_hashes(TOKENS)
    right = stored(start_backend(pool, is_mla_model=is_mla), pool)
    reader = start_backend(other, is_mla_model=is_mla)
    assert reader.batch_exists(keys, ROOT) == PAGES
    before = pages_of(other, ALL)
    assert reader.batch_get_v1(keys, ELSEWHERE, ROOT) == [True] * PAGES
    assert same(pages_of(other, ELSEWHERE), right)
    assert same(pages_of(other, ALL), before)  # Nothing else was touched.


@pytest.mark.parametrize("told", [True, False], ids=["chained", "single"])
def test_the_daemon_counts_what_sglang_asked_for(
    start_backend: Start, daemon: DaemonProcess, told: bool
) -> None:
    """User report 33: three of eight pages are there; the rate says so, also after a load."""
    pool = mla_pool("page_first")
    backend, keys = start_backend(pool), page_hashes(TOKENS)
    fill_randomly(pool, 1)
    first = ALL[: 3 * PAGE_TOKENS]
    prefix = ROOT if told else None
    assert all(backend.batch_set_v1(keys[:3], first, prefix))
    with Client(daemon.address, acquire_timeout_s=5.0, raise_errors=True) as client:
        before = client.stats().counters
        assert backend.batch_exists(keys, prefix) == 3
        assert backend.batch_get_v1(keys[:3], first, prefix) == [True] * 3

        def rate() -> tuple[float, float]:
            now = client.stats().counters
            hits = now["host_hit_blocks"] - before["host_hit_blocks"]
            return hits, now["requested_blocks"] - before["requested_blocks"]

        eventually(lambda: rate() == (3, PAGES), "three pages of eight")
        assert not backend.exists(keys[-1])
        transfers = [PoolTransfer(PoolName.INDEXER)]
        usable = backend.batch_exists_v2(keys, transfers, prefix).kv_hit_pages
        assert usable == 0, "a page with a part missing is no page"
        eventually(lambda: rate() == (3, 2 * PAGES), "a pool beside it is not asked for by itself")


@pytest.mark.parametrize("name", POOLS)
def test_both_interfaces_have_the_same_pages(start_backend: Start, name: str) -> None:
    make_pool, layout, is_mla = POOLS[name]
    pool = make_pool(layout)
    keys = page_hashes(TOKENS)
    backend = start_backend(pool, is_mla_model=is_mla)
    right = stored(backend, pool)
    generic = start_backend(pool, {"interface_v1": 0}, is_mla_model=is_mla)
    got = generic.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    assert same([page.view(torch.uint8) for page in got if page is not None], right)


def test_the_generic_interface_keeps_pages_one_by_one(start_backend: Start) -> None:
    pool = mla_pool()
    fill_randomly(pool, 3)
    keys = page_hashes(TOKENS)
    backend = start_backend(pool, {"interface_v1": 0})
    assert not backend.exists(keys[2])
    assert backend.get(keys[2], pool.get_dummy_flat_data_page()) is None
    assert backend.set(keys[2], pool.get_data_page(2 * PAGE_TOKENS))
    assert backend.exists(keys[2])
    assert not backend.exists(keys[1])
    target = pool.get_dummy_flat_data_page()
    got = backend.get(keys[2], target)
    assert got is not None
    assert got.data_ptr() == target.data_ptr()
    right = pages_of(pool, ALL[2 * PAGE_TOKENS : 3 * PAGE_TOKENS])
    assert same([target.view(torch.uint8)], right)
    made = backend.get(keys[2])
    assert made is not None
    assert same([made.view(torch.uint8)], right)

    assert backend.batch_set(keys[:2], [pool.get_data_page(0), pool.get_data_page(PAGE_TOKENS)])
    assert backend.batch_exists(keys) == 3
    assert [page is not None for page in backend.batch_get(keys)] == [True] * 3 + [False] * 5


def test_exists_counts_the_consecutive_prefix(start_backend: Start) -> None:
    pool = mla_pool()
    backend = start_backend(pool)
    stored(backend, pool)
    keys = page_hashes(TOKENS)
    others = page_hashes([t + 1 for t in TOKENS])
    assert backend.batch_exists(keys) == PAGES  # SGLang tells no prefix of a first page.
    assert backend.batch_exists([*keys[:3], *others]) == 3
    assert backend.batch_exists([others[0], *keys[1:]]) == 0
    assert backend.batch_exists(keys[3:], HiCacheStorageExtraInfo(prefix_keys=keys[:3])) == 5
    assert backend.batch_exists([]) == 0
    assert (
        backend.batch_get_v1([*keys[:3], *others[3:]], ELSEWHERE, ROOT) == [True] * 3 + [False] * 5
    )


def test_a_longer_prompt_continues_a_shorter_one(start_backend: Start) -> None:
    """Only what lies behind the known prefix is copied, into the right pages."""
    pool, other = mla_pool(), mla_pool()
    writer, reader = start_backend(pool), start_backend(other)
    fill_randomly(pool, 1)
    keys = page_hashes(TOKENS)
    first, rest = ALL[: 5 * PAGE_TOKENS], ALL[5 * PAGE_TOKENS :]
    behind = HiCacheStorageExtraInfo(prefix_keys=keys[:5])
    assert all(writer.batch_set_v1(keys[:5], first, ROOT))
    assert all(writer.batch_set_v1(keys[5:], rest, behind))
    assert reader.batch_get_v1(keys[5:], rest, behind) == [True] * 3
    assert same(pages_of(other, rest), pages_of(pool, rest))
    assert not other.kv_buffer[: 5 * PAGE_TOKENS].any()


def test_pages_whose_prefix_kvtier_lost_are_kept_for_themselves(start_backend: Start) -> None:
    """SGLang has a prefix, kvtier does not: a page behind it must still be stored and found."""
    pool, other = mla_pool(), mla_pool()
    writer, reader = start_backend(pool), start_backend(other)
    fill_randomly(pool, 1)
    keys = page_hashes(TOKENS)
    rest = ALL[3 * PAGE_TOKENS :]
    behind = HiCacheStorageExtraInfo(prefix_keys=keys[:3])
    assert writer.batch_set_v1(keys[3:], rest, behind) == [True] * 5
    assert reader.batch_exists(keys[3:], behind) == 5
    assert reader.batch_get_v1(keys[3:], rest, behind) == [True] * 5
    assert same(pages_of(other, rest), pages_of(pool, rest))
    assert reader.batch_exists(keys, ROOT) == 0
    # Once the prefix is there, the whole prompt is found, over both.
    assert all(writer.batch_set_v1(keys[:3], ALL[: 3 * PAGE_TOKENS], ROOT))
    assert reader.batch_exists(keys, ROOT) == PAGES
    assert reader.batch_get_v1(keys, ELSEWHERE, ROOT) == [True] * PAGES
    assert same(pages_of(other, ELSEWHERE), pages_of(pool, ALL))


def test_without_prefix_keys_pages_are_stored_and_it_is_said_once(
    start_backend: Start, caplog: pytest.LogCaptureFixture
) -> None:
    pool, other = mla_pool(), mla_pool()
    backend, reader = start_backend(pool), start_backend(other)
    fill_randomly(pool, 1)
    keys = page_hashes(TOKENS)
    with caplog.at_level(logging.WARNING):
        assert all(backend.batch_set_v1(keys[:4], ALL[: 4 * PAGE_TOKENS]))
        assert all(backend.batch_set_v1(keys[4:], ALL[4 * PAGE_TOKENS :]))
    said = [r for r in caplog.records if "hicache_storage_pass_prefix_keys" in r.getMessage()]
    assert len(said) == 1
    assert reader.batch_exists(keys) == PAGES
    assert reader.batch_exists(keys[5:]) == 3
    assert all(reader.batch_get_v1(keys, ELSEWHERE))
    assert same(pages_of(other, ELSEWHERE), pages_of(pool, ALL))


def test_storing_twice_stores_once(start_backend: Start, daemon: DaemonProcess) -> None:
    pool = mla_pool()
    backend = start_backend(pool)
    with Client(daemon.address) as client:
        assert client.wait_attached(PATIENCE_S)
        before = client.stats().counters["stored_blocks"]
        stored(backend, pool)
        stored(backend, pool)
        assert client.stats().counters["stored_blocks"] == before + PAGES


@pytest.mark.parametrize(
    "indices",
    [
        ALL[:-1],
        ALL + 1,
        ALL + 1_000_000,
        ALL - 2 * PAGE_TOKENS,
        torch.cat([ALL[PAGE_TOKENS // 2 :], ALL[: PAGE_TOKENS // 2]]),
        ALL[: 2 * PAGE_TOKENS],
    ],
    ids=["not whole", "not aligned", "beyond", "before", "torn", "too few"],
)
def test_indices_that_are_not_the_pools_pages_are_refused(
    start_backend: Start, indices: torch.Tensor
) -> None:
    """User report 15, at the engine: a typed error, and no byte is read or written."""
    pool = mla_pool()
    backend = start_backend(pool)
    keys = page_hashes(TOKENS)
    with pytest.raises(InvalidRequest, match="host_indices"):
        backend.batch_set_v1(keys, indices, ROOT)
    with pytest.raises(InvalidRequest, match="host_indices"):
        backend.batch_get_v1(keys, indices, ROOT)
    assert not pool.kv_buffer.any()
    assert backend.batch_exists(keys, ROOT) == 0


def test_a_tensor_of_another_size_is_refused(start_backend: Start) -> None:
    pool = mla_pool()
    backend = start_backend(pool, {"interface_v1": 0})
    (key,) = page_hashes(TOKENS[:PAGE_TOKENS])
    with pytest.raises(InvalidRequest, match="bytes for a page"):
        backend.set(key, torch.zeros(7, dtype=torch.bfloat16))
    with pytest.raises(InvalidRequest, match="bytes for a page"):
        backend.get(key, torch.zeros(7, dtype=torch.bfloat16))
    assert not backend.exists(key)


# Who shares


def test_a_salt_or_an_adapter_sees_only_its_own_pages(start_backend: Start) -> None:
    """User reports 1 and 4: SGLang's own page hashes carry the request's salt and adapter."""
    pool = mla_pool()
    backend = start_backend(pool)
    stored(backend, pool)
    for strangers in ({"salt": "a"}, {"salt": "b"}, {"extra_key": "adapter"}):
        keys = page_hashes(TOKENS, **strangers)
        assert backend.batch_exists(keys, ROOT) == 0
        assert backend.batch_get_v1(keys, ELSEWHERE, ROOT) == [False] * PAGES
    salted = page_hashes(TOKENS, salt="a")
    assert all(backend.batch_set_v1(salted, ELSEWHERE, ROOT))
    assert backend.batch_exists(salted, ROOT) == PAGES
    assert backend.batch_exists(page_hashes(TOKENS, salt="b"), ROOT) == 0


OTHERS: dict[str, dict[str, Any]] = {
    "tenant": {"extra": {"tenant": "b"}},
    "weights": {"extra": {"weights_revision": "r2"}},
    "model": {"model_name": "another"},
    "stage": {"pp_rank": 1, "pp_size": 2},
    "context": {"attn_cp_rank": 1, "attn_cp_size": 2},
}


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("difference", OTHERS)
def test_another_namespace_never_hits(
    start_backend: Start, difference: str, interface_v1: int
) -> None:
    """User reports 2 and 4: equal tokens, equal names, another model, revision or tenant."""
    pool, other = mla_pool(), mla_pool()
    keys = page_hashes(TOKENS)
    extra: dict[str, object] = {"tenant": "a", "interface_v1": interface_v1}
    fill_randomly(pool, 1)
    backend = start_backend(pool, extra)
    assert all(backend.batch_set_v1(keys, ALL, ROOT if interface_v1 else None))
    changes = dict(OTHERS[difference])
    stranger = start_backend(other, {**extra, **changes.pop("extra", {})}, **changes)
    assert stranger.batch_exists(keys, ROOT) == 0
    assert stranger.batch_get_v1(keys, ALL, ROOT) == [False] * PAGES
    assert not stranger.exists(keys[0])
    assert stranger.batch_get(keys) == [None] * PAGES
    assert not other.kv_buffer.any()
    assert backend.batch_exists(keys) == PAGES


UNLIKE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "float16": (mla_pool, lambda: mla_pool(dtype=torch.float16)),
    "float32": (mla_pool, lambda: mla_pool(dtype=torch.float32)),
    "page_first_direct": (mla_pool, lambda: mla_pool("page_first_direct")),
    "layer_first": (mla_pool, lambda: mla_pool("layer_first")),
    "layers": (mla_pool, lambda: mla_pool(layers=LAYERS + 1)),
    "mha": (mla_pool, mha_pool),
    "mha float16": (mha_pool, lambda: mha_pool(dtype=torch.float16)),
    "mha page_first_direct": (mha_pool, lambda: mha_pool("page_first_direct")),
}


@pytest.mark.parametrize("difference", UNLIKE)
def test_another_dtype_or_layout_never_hits(start_backend: Start, difference: str) -> None:
    """User report 2: pages of equal size, too."""
    make_pool, make_other = UNLIKE[difference]
    pool, other = make_pool(), make_other()
    stored(start_backend(pool), pool)
    stranger = start_backend(other)
    keys = page_hashes(TOKENS)
    assert stranger.batch_exists(keys, ROOT) == 0
    assert not any(stranger.batch_get_v1(keys, ALL, ROOT))
    assert not other.kv_buffer.any()


def test_of_an_mla_group_the_first_rank_stores_and_all_read(
    start_backend: Start, daemon: DaemonProcess
) -> None:
    keys = page_hashes(TOKENS)
    pools = [mla_pool() for _ in range(3)]
    ranks = [start_backend(pool, tp_rank=n, tp_size=3) for n, pool in enumerate(pools)]
    for pool, rank in zip(pools[1:], ranks[1:], strict=True):
        fill_randomly(pool, 2)
        assert rank.batch_set_v1(keys, ALL, ROOT) == [True] * PAGES
        assert rank.batch_set(keys[:1], [pool.get_data_page(0)])
    assert ranks[0].batch_exists(keys, ROOT) == 0
    assert not ranks[0].exists(keys[0])
    right = stored(ranks[0], pools[0])
    for pool, rank in zip(pools, ranks, strict=True):
        assert all(rank.batch_get_v1(keys, ELSEWHERE, ROOT))
        assert same(pages_of(pool, ELSEWHERE), right)
    # Another width of the group has the same latents.
    single = start_backend(mla_pool())
    assert single.batch_exists(keys, ROOT) == PAGES


def test_gqa_ranks_keep_their_own_heads(start_backend: Start) -> None:
    keys = page_hashes(TOKENS)
    pools = [mha_pool() for _ in range(2)]
    ranks = [
        start_backend(pool, is_mla_model=False, tp_rank=n, tp_size=2)
        for n, pool in enumerate(pools)
    ]
    first = stored(ranks[0], pools[0], seed=1)
    assert ranks[1].batch_exists(keys, ROOT) == 0
    second = stored(ranks[1], pools[1], seed=2)
    assert all(ranks[0].batch_get_v1(keys, ELSEWHERE, ROOT))
    assert all(ranks[1].batch_get_v1(keys, ELSEWHERE, ROOT))
    assert same(pages_of(pools[0], ELSEWHERE), first)
    assert same(pages_of(pools[1], ELSEWHERE), second)
    assert start_backend(mha_pool(), is_mla_model=False).batch_exists(keys, ROOT) == 0


# Several pools


def test_a_page_counts_only_with_all_its_parts(start_backend: Start) -> None:
    """User report 10: a latent without its indexer key is no page."""
    pool, sidecar = mla_pool(), mla_pool(layers=1)
    fill_randomly(sidecar, 5)
    backend = start_backend(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.register_mem_host_pool_v2(sidecar, PoolName.INDEXER)
    stored(backend, pool)
    keys = page_hashes(TOKENS)
    wanted = [PoolTransfer(PoolName.INDEXER)]
    found = backend.batch_exists_v2(keys, wanted, ROOT)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert found.extra_pool_hit_pages == {PoolName.KV: PAGES}

    half = ALL[: 4 * PAGE_TOKENS]
    done = backend.batch_set_v2([PoolTransfer(PoolName.INDEXER, half, keys=keys[:4])], ROOT)
    assert done == {PoolName.INDEXER: [True] * 4}
    found = backend.batch_exists_v2(keys, wanted, ROOT)
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [1, 2, 3, 4]
    assert found.extra_pool_hit_pages == {PoolName.KV: PAGES, PoolName.INDEXER: 4}

    right = pages_of(sidecar, half)
    got = backend.batch_get_v2([PoolTransfer(PoolName.INDEXER, ELSEWHERE, keys=keys)], ROOT)
    assert got == {PoolName.INDEXER: [True] * 4 + [False] * 4}
    assert same(pages_of(sidecar, ELSEWHERE[: 4 * PAGE_TOKENS]), right)


def test_pools_that_keep_no_prefix_are_not_cached_and_it_is_said_once(
    start_backend: Start, caplog: pytest.LogCaptureFixture
) -> None:
    pool = mla_pool()
    backend = start_backend(pool)
    stored(backend, pool)
    keys = page_hashes(TOKENS)
    backend.register_mem_host_pool_v2(mla_pool(layers=1), PoolName.SWA)
    tail = PoolTransfer(
        PoolName.SWA, ALL[-PAGE_TOKENS:], keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert backend.batch_set_v2([tail], ROOT) == {PoolName.SWA: [False]}
            assert backend.batch_exists_v2(keys, [tail], ROOT).kv_hit_pages == 0
    assert len([r for r in caplog.records if "swa" in r.getMessage()]) == 1


# SGLang's controller


@pytest.mark.skipif(shutil.which("g++") is None, reason="SGLang compiles its page hash")
def test_the_tests_page_hashes_are_sglangs() -> None:
    key = RadixKey(array("q", TOKENS))
    for prior in (None, bytes(range(32))):
        assert plain_hash(key, prior, PAGE_TOKENS) == native_hash(key, prior, PAGE_TOKENS)


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_sglangs_own_threads_find_what_they_backed_up(
    daemon: DaemonProcess, request: pytest.FixtureRequest, zero_copy: bool, told: bool
) -> None:
    """The real controller attaches by the documented extra config; over more than one batch."""
    first, pages = 130, 200
    tokens = list(range(pages * PAGE_TOKENS))
    keys = page_hashes(tokens)
    extra = extra_config(
        address=daemon.address,
        tenant=request.node.name,
        weights_revision="r1",
        acquire_timeout_ms=10_000,
        interface_v1=int(zero_copy),
        hicache_storage_pass_prefix_keys=told,
    )
    pool, other = (mla_pool(layers=1, tokens=pages * PAGE_TOKENS) for _ in range(2))
    fill_randomly(pool, 1)
    indices = torch.arange(pages * PAGE_TOKENS)
    cut = first * PAGE_TOKENS
    with Controller(extra, pool) as writer:
        assert isinstance(writer.backend, KvtierHiCache)
        assert writer.backend._client.wait_attached(PATIENCE_S)
        assert writer.backup(keys[:first], indices[:cut], []) == first
        assert writer.backup(keys[first:], indices[cut:], keys[:first]) == pages - first
    with Controller(extra, other) as reader:
        assert reader.backend._client.wait_attached(PATIENCE_S)
        head = reader.prefetch(tokens[:cut], [])
        assert same(pages_of(other, head), pages_of(pool, indices[:cut]))
        tail = reader.prefetch(tokens[cut:], keys[:first])
        assert same(pages_of(other, tail), pages_of(pool, indices[cut:]))
        assert not len(reader.prefetch([token + 1 for token in tokens], []))
    assert_clean(daemon)


# The daemon comes and goes


def test_without_a_daemon_everything_is_a_miss_and_nothing_an_error(
    start_backend: Start, tmp_path: Path
) -> None:
    pool = mla_pool()
    fill_randomly(pool, 1)
    nowhere = f"unix:{tmp_path / 'nobody.sock'}"
    backend = start_backend(pool, {"address": nowhere}, attached=False)
    keys = page_hashes(TOKENS)
    assert backend.batch_set_v1(keys, ALL, ROOT) == [False] * PAGES
    assert backend.batch_exists(keys, ROOT) == 0
    assert backend.batch_get_v1(keys, ALL, ROOT) == [False] * PAGES
    assert not backend.set(keys[0], pool.get_data_page(0))
    assert backend.get(keys[0], pool.get_dummy_flat_data_page()) is None
    assert not backend.exists(keys[0])
    with pytest.raises(KvtierError, match="may still be there"):
        backend.clear()


def test_a_restarted_daemon_is_found_again(start_backend: Start, own_daemon: DaemonProcess) -> None:
    """User report 13: what it lost is a miss, what comes after is stored, also behind a prefix."""
    pool, other = mla_pool(), mla_pool()
    backend = start_backend(pool, at=own_daemon)
    reader = start_backend(other, at=own_daemon)
    keys = page_hashes(TOKENS)
    stored(backend, pool)
    own_daemon.kill()
    assert backend.batch_exists(keys, ROOT) == 0
    assert reader.batch_get_v1(keys, ALL, ROOT) == [False] * PAGES
    own_daemon.start()
    assert backend._client.wait_attached(PATIENCE_S)
    assert reader._client.wait_attached(PATIENCE_S)

    fill_randomly(pool, 7)
    fresh = [t + 5 for t in TOKENS]
    fresh_keys = page_hashes(fresh, prior=keys[-1])
    behind = HiCacheStorageExtraInfo(prefix_keys=keys)
    assert all(backend.batch_set_v1(fresh_keys, ALL, behind))
    assert all(reader.batch_get_v1(fresh_keys, ELSEWHERE, behind))
    assert same(pages_of(other, ELSEWHERE), pages_of(pool, ALL))


def test_an_engine_may_start_before_the_daemon(start_backend: Start, tmp_path: Path) -> None:
    home = tmp_path / "late"
    home.mkdir()
    pool = mla_pool()
    backend = start_backend(pool, {"address": f"unix:{home / 'kvtier.sock'}"}, attached=False)
    keys = page_hashes(TOKENS)
    assert backend.batch_exists(keys, ROOT) == 0
    with DaemonProcess(home, ssd=False, host_capacity_bytes=32 << 20):
        assert backend._client.wait_attached(PATIENCE_S)
        stored(backend, pool)
        assert backend.batch_exists(keys, ROOT) == PAGES


def test_pages_survive_on_the_ssd(start_backend: Start, own_daemon: DaemonProcess) -> None:
    """User report 23: engine and daemon are new, the pages are the same."""
    pool, other = mla_pool(), mla_pool()
    right = stored(start_backend(pool, at=own_daemon), pool)
    assert own_daemon.stop() == 0
    own_daemon.start()
    reader = start_backend(other, at=own_daemon)
    assert all(reader.batch_get_v1(page_hashes(TOKENS), ALL, ROOT))
    assert same(pages_of(other, ALL), right)


# Administration


def test_clear_drops_this_models_pages_only(start_backend: Start) -> None:
    pool = mla_pool()
    keys = page_hashes(TOKENS)
    backend, tenant = start_backend(pool), start_backend(pool, {"tenant": "b"})
    stored(backend, pool)
    single = page_hashes(TOKENS, salt="generic")
    assert backend.batch_set(single[:1], [pool.get_data_page(0)])
    stored(tenant, pool)
    backend.clear()
    assert backend.batch_exists(keys, ROOT) == 0
    assert not backend.exists(single[0])
    assert tenant.batch_exists(keys, ROOT) == PAGES
    stored(backend, pool)
    assert backend.batch_exists(keys, ROOT) == PAGES


def test_stats_are_what_sglangs_metrics_want(start_backend: Start) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    pool = mla_pool()
    assert start_backend(pool).get_stats() is None
    backend = start_backend(pool, enable_storage_metrics=True)
    stored(backend, pool)
    assert all(backend.batch_get_v1(page_hashes(TOKENS), ELSEWHERE, ROOT))
    assert backend.batch_get_v1(page_hashes([1] * len(TOKENS)), ELSEWHERE, ROOT)[0] is False
    stats = backend.get_stats()
    assert isinstance(stats, StorageMetrics)
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([PAGES], [PAGES])
    assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
    # User report 31: bytes over measured time, so no more than memory can do.
    assert 0 < stats.prefetch_bandwidth[0] < 500
    assert backend.get_stats() == StorageMetrics()


def test_close_ends_the_session(start_backend: Start, daemon: DaemonProcess) -> None:
    pool = mla_pool()
    backend = start_backend(pool)
    stored(backend, pool)
    with Client(daemon.address) as client:
        assert client.wait_attached(PATIENCE_S)
        eventually(lambda: client.stats().sessions == 2, "both are attached")
        backend.close()
        backend.close()
        eventually(lambda: client.stats().sessions == 1, "the session ends")
    assert backend.batch_exists(page_hashes(TOKENS), ROOT) == 0
    assert backend.batch_set_v1(page_hashes(TOKENS), ALL, ROOT) == [False] * PAGES


# Wrong configurations stop the start


@pytest.mark.parametrize("version", ["0.5.22", "0.4.9.post1", "0.6.0", "1.0", "unknown"])
def test_a_version_that_was_not_tested_is_told(version: str) -> None:
    with pytest.raises(ImportError, match=rf"tested with sglang {TESTED}.*this is {version}"):
        check_version(version)


@pytest.mark.parametrize("version", [TESTED, "0.5.23.post1", "0.5.24rc1"])
def test_the_tested_version_and_its_fixes_are_let_through(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"adress": "unix:/x"}, "'address'"),
        ({"tenant": 3}, "tenant"),
        ({"allowed_loss": "some"}, "exact, bounded"),
        ({"address": "nowhere"}, "unix:"),
        ({"acquire_timeout_ms": 0}, "positive"),
        ({"weights_revision": ""}, "empty"),
    ],
)
def test_a_wrong_setting_is_told(extra: dict[str, object], words: str) -> None:
    """User report 32, through SGLang's factory."""
    with pytest.raises(ConfigError, match=words):
        create_backend(storage_config({"weights_revision": "r1", **extra}), mla_pool())


def test_weights_that_cannot_be_identified_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="weights_revision"):
        create_backend(storage_config({}), mla_pool())


def test_what_cuts_pages_differently_is_refused() -> None:
    revision: dict[str, object] = {"weights_revision": "r1"}
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        create_backend(
            storage_config(revision, should_split_heads=True, is_mla_model=False), mha_pool()
        )
    with pytest.raises(ConfigError, match="context parallelism"):
        create_backend(
            storage_config(revision, dcp_size=2, tp_size=2, logical_page_size=32), mla_pool()
        )


def make_checkpoint(directory: Path, weights: bytes = b"weights one") -> Path:
    """What a checkpoint looks like to who identifies it."""
    directory.mkdir(exist_ok=True)
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text("{}")
    return directory


def test_the_checkpoints_content_is_its_identity(start_backend: Start, tmp_path: Path) -> None:
    """User report 2: other weights or another config in one directory, under one name."""
    checkpoint = make_checkpoint(tmp_path / "model")
    pool = mla_pool()
    keys = page_hashes(TOKENS)
    here: dict[str, object] = {"weights_revision": None, "model_path": str(checkpoint)}
    stored(start_backend(pool, here), pool)
    assert start_backend(pool, here).batch_exists(keys, ROOT) == PAGES
    (checkpoint / "config.json").write_text('{"rope_theta": 1}')
    assert start_backend(pool, here).batch_exists(keys, ROOT) == 0
    make_checkpoint(checkpoint, b"weights two")
    assert start_backend(pool, here).batch_exists(keys, ROOT) == 0
    make_checkpoint(checkpoint)
    assert start_backend(pool, here).batch_exists(keys, ROOT) == PAGES


def test_what_the_server_was_started_with_names_its_weights(
    start_backend: Start, tmp_path: Path
) -> None:
    """From SGLang's own resolved arguments, without a word in the extra config."""
    pool = mla_pool()
    keys = page_hashes(TOKENS)
    checkpoint = make_checkpoint(tmp_path / "model")
    adapter = make_checkpoint(tmp_path / "adapter", b"adapter one")
    served = {"model_path": str(checkpoint), "lora_paths": [{"lora_path": str(adapter)}]}
    nothing: dict[str, object] = {"weights_revision": None}
    with get_context().override_server_args(**served):
        stored(start_backend(pool, nothing), pool)
        assert start_backend(pool, nothing).batch_exists(keys, ROOT) == PAGES
    decrypted = tmp_path / "decrypted.json"
    decrypted.write_text('{"rope_theta": 1}')
    for change in (
        {"dtype": "float16"},
        {"json_model_override_args": '{"rope_theta": 1}'},
        {"decrypted_config_file": str(decrypted)},
        {"model_loader_extra_config": '{"model_weights": "x"}'},
    ):
        with get_context().override_server_args(**served, **change):
            assert start_backend(pool, nothing).batch_exists(keys, ROOT) == 0
    # User report 1: SGLang's id of such an adapter is made of its name and path.
    make_checkpoint(adapter, b"adapter two")
    with get_context().override_server_args(**served):
        assert start_backend(pool, nothing).batch_exists(keys, ROOT) == 0


def test_every_setting_of_this_sglang_is_in_one_list() -> None:
    """One that a new version brings must be judged: does it change what is computed?"""
    lists = (IDENTIFYING, CONTENTS, tuple(WEIGHTS_FROM_FILES), COMPUTING, NOT_COMPUTING)
    listed = [name for names in lists for name in names]
    assert not [name for name in listed if listed.count(name) > 1]
    assert set(listed) == {field.name for field in record_fields(ServerArgs)}


def resolved(**fields: Any) -> dict[str, Any]:
    """SGLang's own resolved arguments."""
    with get_context().override_server_args(**fields):
        return dict(get_context().resolved_server_args_dict())


def digest_of(arguments: Mapping[str, Any]) -> str:
    return computation_digest(facts_of(arguments), model_path=None, named_revision="r1")


def test_settings_change_the_identity_unless_they_are_known_not_to() -> None:
    """Each of its own; one that nobody has judged yet keeps caches apart."""
    plain = resolved()
    changed = {name: digest_of({**plain, name: "changed"}) for name in (*COMPUTING, "not yet")}
    assert len({digest_of(plain), *changed.values()}) == len(changed) + 1
    harmless = dict.fromkeys(NOT_COMPUTING, "changed")
    assert digest_of({**plain, **harmless}) == digest_of(plain)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_in_a_setting_changes_the_identity_by_its_content(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.json"
    path.write_text("one")
    given = {**resolved(), name: str(path)}
    one = digest_of(given)
    path.write_text("two, and longer")
    assert len({digest_of(resolved()), one, digest_of(given)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        *({"load_format": name} for name in sorted({*LOAD_FORMAT_CHOICES} - {*FILE_FORMATS})),
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"weight_cache_mode": "client"},
        {"weight_cache_mode": "daemon"},
        {"speculative_draft_load_format": "dummy"},
    ],
    ids=str,
)
def test_weights_that_come_from_no_checkpoint_stop_the_start(
    tmp_path: Path, change: dict[str, object]
) -> None:
    checkpoint = str(make_checkpoint(tmp_path / "model"))
    served = {
        **resolved(),
        "model_path": checkpoint,
        "load_format": "auto",
        "speculative_draft_model_path": checkpoint,
    }
    assert computation_digest(facts_of(served), model_path=None, named_revision=None)
    with pytest.raises(ConfigError, match="weights_revision"):
        computation_digest(facts_of({**served, **change}), model_path=None, named_revision=None)
    assert digest_of({**served, **change})


def test_adapters_of_all_settings_count(tmp_path: Path) -> None:
    adapter = make_checkpoint(tmp_path / "adapter", b"one")
    given = {**resolved(), "uno_lora_path": str(adapter)}
    one = digest_of(given)
    make_checkpoint(adapter, b"other")
    assert len({digest_of(resolved()), one, digest_of(given)}) == 3


def test_a_setting_that_is_gone_is_told() -> None:
    arguments = resolved()
    del arguments["quantization"]
    with pytest.raises(ConfigError, match="no setting quantization"):
        facts_of(arguments)


def test_a_set_is_told_in_one_order() -> None:
    """Its own order differs between processes, and so would their namespaces."""
    given = {**resolved(), "lora_target_modules": {"q_proj", "k_proj", "o_proj"}}
    assert facts_of(given).arguments["lora_target_modules"] == "['k_proj', 'o_proj', 'q_proj']"


def test_weights_replaced_while_serving_hit_nothing_older(
    start_backend: Start, caplog: pytest.LogCaptureFixture
) -> None:
    pool = mla_pool()
    keys = page_hashes(TOKENS)
    with get_context().override_server_args():
        backend = start_backend(pool)
        stored(backend, pool)
        with caplog.at_level(logging.WARNING):
            # As Scheduler.record_weight_version_change does it.
            get_context().override("scheduler.weight_version", weight_version="2")
            assert backend.batch_exists(keys, ROOT) == 0
            assert backend.batch_get_v1(keys, ELSEWHERE, ROOT) == [False] * PAGES
            assert backend.batch_set_v1(keys, ALL, ROOT) == [False] * PAGES
            assert not backend.exists(keys[0])
            assert backend.batch_get(keys[:1]) == [None]
            assert not backend.set(keys[0], pool.get_data_page(0))
        said = [r for r in caplog.records if "weights_revision" in r.getMessage()]
        assert len(said) == 1
        # The way out that the message names.
        again = start_backend(pool, {"weights_revision": "2"})
        assert again.batch_exists(keys, ROOT) == 0
        stored(again, pool)
        assert again.batch_exists(keys, ROOT) == PAGES
