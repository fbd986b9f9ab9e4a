"""The parts of SGLang's backend that need no SGLang: settings, identity, keys, pages, versions."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_adapter.hicache.host_pages import HostPages
from engine_adapter.hicache.identity import (
    FILE_FORMATS,
    EngineFacts,
    checkpoint_revision,
    computation_digest,
)
from engine_adapter.hicache.page_store import block_hash
from engine_adapter.hicache.settings import HiCacheSettings, parse_extra_config
from kvtier.errors import ConfigError, InvalidRequest
from kvtier.types import Loss

# Settings


def test_nothing_but_sglangs_own_keys_gives_the_defaults() -> None:
    extra = {"backend_name": "kvtier", "module_path": "m", "class_name": "C", "interface_v1": 1}
    assert parse_extra_config(extra) == HiCacheSettings(zero_copy=True)
    assert parse_extra_config({}) == HiCacheSettings()


def test_every_setting_arrives() -> None:
    settings = parse_extra_config(
        {
            "address": "unix:/run/x.sock",
            "tenant": "t",
            "allowed_loss": "bounded",
            "model_path": "/m",
            "weights_revision": "r",
            "acquire_timeout_ms": 70,
        }
    )
    assert settings == HiCacheSettings("unix:/run/x.sock", "t", Loss.BOUNDED, "/m", "r", 70)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"tennant": "t"}, "'tenant'"),
        ({"interface": 1}, "'interface_v1'"),
        ({"tenant": None}, "tenant=None"),
        ({"acquire_timeout_ms": True}, "of type int"),
        ({"acquire_timeout_ms": -1}, "positive"),
        ({"acquire_timeout_ms": 60_001}, "60000 at most"),
        ({"acquire_timeout_ms": 10**400}, "60000 at most"),
        ({"address": ""}, "address is empty"),
        ({"allowed_loss": "lossy"}, "exact, bounded"),
        ({"tenant": "t" * 257}, "257 bytes"),
        ({"tenant": "é" * 129}, "258 bytes"),
        ({"tenant": "\ud800"}, "no text in UTF-8"),
    ],
)
def test_a_wrong_setting_is_told(extra: dict[str, object], words: str) -> None:
    """User report 32: with the nearest valid name."""
    with pytest.raises(ConfigError, match=words):
        parse_extra_config(extra)


def test_the_longest_tenant_is_taken() -> None:
    assert parse_extra_config({"tenant": "é" * 128}).tenant == "é" * 128


# Identity


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "a.safetensors").write_bytes(b"a")
    (directory / "b.safetensors").write_bytes(b"b")
    (directory / "config.json").write_text("{}")
    return directory


def digest(facts: EngineFacts | None, path: str | None = None, named: str | None = None) -> str:
    return computation_digest(facts, model_path=path, named_revision=named)


def test_all_that_changes_the_computation_changes_the_digest(checkpoint: Path) -> None:
    """User report 2."""
    adapter = checkpoint.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"one")
    facts = EngineFacts(str(checkpoint), arguments={"dtype": "bfloat16", "quantization": "None"})
    adapted = replace(facts, lora_paths=(str(adapter),))
    digests = [
        digest(facts),
        digest(replace(facts, arguments={"dtype": "float16", "quantization": "None"})),
        digest(replace(facts, arguments={"dtype": "bfloat16", "quantization": "fp8"})),
        digest(replace(facts, draft_model_path=str(checkpoint))),
        digest(facts, named="r1"),
        digest(facts, named="r2"),
        digest(adapted),
    ]
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    digests.append(digest(adapted))
    (checkpoint / "config.json").write_text('{"rope_theta": 1}')
    digests.append(digest(facts))
    (checkpoint / "b.safetensors").write_bytes(b"c")
    digests.append(digest(facts))
    (checkpoint / "quantize_config.json").write_text('{"bits": 4}')
    digests.append(digest(facts))
    (checkpoint / "modeling_own.py").write_text("# The checkpoint's own code")
    digests.append(digest(facts))
    assert len(set(digests)) == len(digests)
    (checkpoint / "tokenizer.json").write_text("{}")
    assert digest(facts) == digests[-1]


def test_a_file_that_a_setting_names_counts_by_its_content(checkpoint: Path) -> None:
    """Not by its path, and the operator's word on the weights does not cover it."""
    config = checkpoint.parent / "decrypted.json"
    config.write_text("one")
    facts = EngineFacts(str(checkpoint), contents={"decrypted_config_file": str(config)})
    digests = [digest(EngineFacts(str(checkpoint))), digest(facts), digest(facts, named="r1")]
    config.write_text("two, and longer")
    digests += [digest(facts), digest(facts, named="r1")]
    assert len(set(digests)) == len(digests)
    elsewhere = checkpoint.parent / "elsewhere"
    elsewhere.mkdir()
    moved = {"decrypted_config_file": str(config.rename(elsewhere / config.name))}
    assert digest(replace(facts, contents=moved)) == digests[3]
    with pytest.raises(ConfigError, match="decrypted_config_file"):
        digest(facts)  # It is gone.


@pytest.mark.parametrize("load_format", FILE_FORMATS)
def test_formats_that_read_the_checkpoints_files_are_taken(
    checkpoint: Path, load_format: str
) -> None:
    facts = EngineFacts(str(checkpoint), load_format=load_format, draft_load_format=load_format)
    assert digest(replace(facts, draft_model_path=str(checkpoint)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_format": "dummy"}, "'dummy'"),
        ({"load_format": "presharded"}, "'presharded'"),
        ({"load_format": "of a later version"}, "of a later version"),
        ({"elsewhere": ("weight_cache_mode=client",)}, "weight_cache_mode=client"),
        ({"model_path": "org/name", "download_dir": "/d"}, "download_dir=/d"),
    ],
)
def test_weights_from_elsewhere_need_the_operators_word(
    checkpoint: Path, change: dict[str, Any], words: str
) -> None:
    facts = replace(EngineFacts(str(checkpoint)), **change)
    with pytest.raises(ConfigError, match=f"{words}.*weights_revision"):
        digest(facts)
    assert digest(facts, named="r1") != digest(facts, named="r2")


def test_draft_weights_from_elsewhere_need_the_operators_word(checkpoint: Path) -> None:
    facts = EngineFacts(
        str(checkpoint), draft_model_path=str(checkpoint), draft_load_format="remote"
    )
    with pytest.raises(ConfigError, match=r"'remote'.*weights_revision"):
        digest(facts)
    assert digest(facts, named="r1") != digest(facts, named="r2")


def test_the_operators_word_comes_before_the_engines(checkpoint: Path) -> None:
    facts = EngineFacts("/not/there")
    assert digest(facts, path=str(checkpoint)) == digest(EngineFacts(str(checkpoint)))
    assert digest(None, named="r1")


@pytest.mark.parametrize(
    "facts", [None, EngineFacts("/not/there"), EngineFacts("org/name"), "empty"]
)
def test_weights_that_cannot_be_identified_are_refused(
    checkpoint: Path, facts: EngineFacts | str | None
) -> None:
    if facts == "empty":
        facts = EngineFacts(str(checkpoint.parent))
    assert not isinstance(facts, str)
    with pytest.raises(ConfigError, match="weights_revision"):
        digest(facts)


def test_a_hubs_snapshot_is_named_by_its_commit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = checkpoint.parent / "hub"
    commits = {"main": "a" * 40, "v2": "b" * 40}
    for branch, commit in commits.items():
        home = hub / "models--org--name"
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / branch).write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    assert checkpoint_revision("org/name", None) == f"models--org--name@{'a' * 40}"
    assert checkpoint_revision("org/name", "v2") == f"models--org--name@{'b' * 40}"
    assert checkpoint_revision("org/name", "b" * 40) == f"models--org--name@{'b' * 40}"
    snapshot = hub / "models--org--name" / "snapshots" / commits["v2"]
    assert checkpoint_revision(str(snapshot), None) == f"models--org--name@{'b' * 40}"
    with pytest.raises(ConfigError, match="hub cache"):
        checkpoint_revision("org/name", "v3")


# Keys


def test_a_page_hash_is_its_block_hash_and_other_keys_are_digested_whole() -> None:
    """User report 3: nothing of a key is cut off."""
    key = hashlib.sha256(b"page").hexdigest()
    assert block_hash(key) == bytes.fromhex(key)
    others = [key + "_k", key + "_v", key + "_0_2", key.upper(), key[:-1], ""]
    hashes = {block_hash(key), *(block_hash(other) for other in others)}
    assert len(hashes) == len(others) + 1
    assert {len(value) for value in hashes} == {32}
    golden = "6c3dea9284c29c3b4f66f4024a4b53436bd0ed6a96c772bf55e65e6c2a1b0362"
    assert block_hash("0" * 64 + "_k").hex() == golden


# Pages


@dataclass
class FakePool:
    """A fake host pool: two tokens a page, a page in two parts, and any addresses one likes."""

    kv_buffer: torch.Tensor
    page_size: int = 2
    size: int = 8
    layout: str = "fake"
    off_bytes: int = 0
    error: Exception | None = None
    asked: list[int] = field(default_factory=list)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        if self.error is not None:
            raise self.error
        half = self.kv_buffer.numel() // 2
        addresses: list[int] = []
        for start in indices[:: self.page_size].tolist():
            at = self.kv_buffer.data_ptr() + start * 4 + self.off_bytes
            addresses += [at + half, at]  # Downwards: parts come back upwards.
        return addresses, [8] * len(addresses)


def make_pool() -> FakePool:
    return FakePool(torch.arange(64, dtype=torch.uint8))


def test_a_page_is_a_view_of_its_parts() -> None:
    pool = make_pool()
    pages = HostPages(pool)
    assert (pages.page_bytes, pages.parts_per_page) == (16, 2)
    first, second = pages.pages(torch.tensor([4, 5, 0, 1]))
    assert [part.tolist() for part in first] == [[*range(16, 24)], [*range(48, 56)]]
    assert [part.tolist() for part in second] == [[*range(8)], [*range(32, 40)]]
    second[1][:] = 0
    assert pool.kv_buffer[32:40].tolist() == [0] * 8


@pytest.mark.parametrize("off_bytes", [-1, 1, 1 << 40])
def test_an_address_outside_the_pool_is_refused(off_bytes: int) -> None:
    pool = make_pool()
    pages = HostPages(pool)
    pool.off_bytes = off_bytes
    edge = torch.tensor([0, 1, 6, 7])
    with pytest.raises(InvalidRequest, match="outside"):
        pages.pages(edge)


@pytest.mark.parametrize(
    "indices", [[0], [1, 2], [0, 2], [1, 0], [8, 9], [-2, -1], [[0, 1]]], ids=str
)
def test_indices_that_are_no_pages_are_refused(indices: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="host_indices"):
        HostPages(make_pool()).pages(torch.tensor(indices))


def test_a_layout_without_pages_is_refused() -> None:
    pool = make_pool()
    pool.error = ValueError("Unsupported layout: fake")
    with pytest.raises(ConfigError, match="--hicache-mem-layout page_first"):
        HostPages(pool)
    with pytest.raises(ConfigError, match="no pages in host memory"):
        HostPages(FakePool(torch.empty(0)))


# Versions


def test_without_sglang_the_import_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install sglang==\d"):
        importlib.import_module("engine_adapter.sglang")
