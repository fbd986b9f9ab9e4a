"""What a request's blocks are called: everything that makes their content, and nothing else."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine_adapter.namespaces import rank_namespace
from engine_adapter.vllm.chain import HashChain
from engine_adapter.vllm.request_identity import (
    AdapterDigests,
    IdentifiedRequest,
    RequestIdentifier,
    Unidentified,
    media_keys,
)
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.types import BlockHash, Component, NamespaceSpec

TOKENS = list(range(100))
LATER_NS = 1 << 62
"""A start of an engine after all that these tests write."""

SPEC = NamespaceSpec("m", "r", (Component("latent_rope", "uint8", (1, 16, 4)),), block_tokens=16)
ROOT = root_hash(namespace_digest(SPEC))


@dataclass
class Adapter:
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    lora_name: str = "adapter"


@dataclass
class Span:
    offset: int
    length: int


@dataclass
class Medium:
    identifier: str | None
    mm_position: Span


@dataclass
class Request:
    """As vLLM's, as far as it is looked at."""

    request_id: str = "request"
    cache_salt: str | None = None
    prompt_embeds: object | None = None
    resumable: bool = False
    lora_request: Adapter | None = None
    mm_features: Sequence[Medium] = field(default_factory=list)


def plain(_request: IdentifiedRequest) -> Collection[str]:
    return ()


@pytest.fixture(autouse=True)
def _own_digest_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def hashes(request: Request, identifier: RequestIdentifier | None = None) -> list[BlockHash]:
    chain = (identifier or RequestIdentifier(16, plain)).chain(SPEC, request)
    assert chain is not None
    return chain.upto(TOKENS, 6)


def adapter_at(directory: Path, weights: bytes, rank: int = 8) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


def test_a_chain_grows_as_tokens_become_known() -> None:
    keys = {0: [b"a"], 3: [b"b", b"c"]}
    chain = HashChain(ROOT, 16, keys)
    expected = block_hashes(ROOT, TOKENS, 16, keys)
    assert chain.upto(TOKENS[:40], 2) == expected[:2]
    assert chain.upto(TOKENS, 5) == expected[:5]
    assert chain.upto(TOKENS, 3) == expected[:3]
    assert chain.upto(TOKENS, 6) == expected


def test_a_plain_request_has_the_hashes_of_every_other_engine() -> None:
    assert hashes(Request()) == block_hashes(ROOT, TOKENS, 16)


def test_a_salt_is_in_every_block() -> None:
    """User report 4."""
    red, blue = hashes(Request(cache_salt="red")), hashes(Request(cache_salt="blue"))
    assert not set(red) & set(blue)
    assert not set(red) & set(hashes(Request()))


def test_an_adapter_is_known_by_its_content(tmp_path: Path) -> None:
    """User report 1: same name with other weights misses, another name with the same hits."""
    one = hashes(Request(lora_request=Adapter(1, adapter_at(tmp_path / "one", b"weights"))))
    same = hashes(Request(lora_request=Adapter(2, adapter_at(tmp_path / "two", b"weights"))))
    other = hashes(Request(lora_request=Adapter(1, adapter_at(tmp_path / "one", b"others!"))))
    scaled = hashes(Request(lora_request=Adapter(3, adapter_at(tmp_path / "3", b"weights", 16))))
    assert one == same
    assert not set(one) & set(other)
    assert not set(one) & set(scaled)
    assert not set(one) & set(hashes(Request()))


def test_an_adapter_that_changes_under_its_id_is_unknown(tmp_path: Path) -> None:
    digests = AdapterDigests(LATER_NS)
    path = adapter_at(tmp_path / "adapter", b"weights")
    first = digests.digest(Adapter(1, path))
    assert digests.digest(Adapter(1, path)) == first
    adapter_at(tmp_path / "adapter", b"other weights")
    with pytest.raises(Unidentified, match="changed under it"):
        digests.digest(Adapter(1, path))
    reloaded = digests.digest(Adapter(1, path, load_inplace=True))
    assert reloaded != first
    assert digests.digest(Adapter(1, path)) == reloaded
    assert digests.digest(Adapter(2, path)) == reloaded


def test_bytes_that_change_under_an_old_time_are_a_change(tmp_path: Path) -> None:
    """As cp -p and rsync --times leave them."""
    digests = AdapterDigests(LATER_NS)
    path = adapter_at(tmp_path / "adapter", b"weights")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    before = weights.stat()
    digests.digest(Adapter(1, path))
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Unidentified, match="changed under it"):
        digests.digest(Adapter(1, path))


def test_an_adapter_written_after_the_start_is_unknown_unless_loaded_in_place(
    tmp_path: Path,
) -> None:
    """vLLM may have loaded it, by its own interface, before it was overwritten."""
    path = adapter_at(tmp_path / "adapter", b"weights")
    written_ns = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_ctime_ns
    assert AdapterDigests(written_ns + 1).digest(Adapter(1, path))
    digests = AdapterDigests(written_ns)
    with pytest.raises(Unidentified, match="changed after the engine started"):
        digests.digest(Adapter(1, path))
    assert digests.digest(Adapter(1, path, load_inplace=True))
    assert digests.digest(Adapter(1, path))
    old = digests.mixed(Adapter(1, path))
    assert old, "vLLM's own cache may have pages from before"


def test_a_check_finds_files_that_changed_or_went(tmp_path: Path) -> None:
    digests = AdapterDigests(LATER_NS)
    one = Adapter(1, adapter_at(tmp_path / "one", b"weights"), lora_name="one")
    two = Adapter(2, adapter_at(tmp_path / "two", b"weights"), lora_name="two")
    for adapter in (one, two):
        digests.digest(adapter)
        version = digests.version(adapter)
        digests.recheck(adapter)
        assert digests.version(adapter) == version
        assert not digests.mixed(adapter)
    adapter_at(tmp_path / "one", b"other weights")
    os.remove(tmp_path / "two" / "adapter_model.safetensors")
    for adapter in (one, two):
        version = digests.version(adapter)
        digests.recheck(adapter)
        assert digests.version(adapter) != version
        assert digests.mixed(adapter)
        with pytest.raises(Unidentified):
            digests.digest(adapter)


def test_a_name_that_two_adapters_have_is_mixed_in_vllms_own_cache(tmp_path: Path) -> None:
    digests = AdapterDigests(LATER_NS)
    digests.digest(Adapter(1, adapter_at(tmp_path / "one", b"weights")))
    same = Adapter(2, adapter_at(tmp_path / "two", b"weights"))
    digests.digest(same)
    assert not digests.mixed(same)
    other = Adapter(3, adapter_at(tmp_path / "three", b"other weights"))
    digests.digest(other)
    assert digests.mixed(other)


def test_media_are_in_the_blocks_that_they_reach_into() -> None:
    """User report 3: the whole hash, and where it is."""
    long = "a" * 64
    media = [Medium(long, Span(10, 20)), Medium("b", Span(40, 8))]
    keys = media_keys(media, 16)
    assert {block: [json.loads(key) for key in found] for block, found in keys.items()} == {
        0: [["mm", long, 10]],
        1: [["mm", long, -6]],
        2: [["mm", "b", 8]],
    }
    with_images = hashes(Request(mm_features=media))
    assert not set(with_images) & set(hashes(Request()))
    last_differs = hashes(Request(mm_features=[media[0], Medium("c", Span(40, 8))]))
    assert last_differs[:2] == with_images[:2]
    assert not set(last_differs[2:]) & set(with_images)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(prompt_embeds=object()), "embeddings"),
        (Request(resumable=True), "streaming"),
        (Request(mm_features=[Medium(None, Span(0, 4))]), "without a hash"),
        (Request(lora_request=Adapter(1, "/nonexistent/adapter")), "/nonexistent/adapter"),
    ],
)
def test_what_is_unidentified_is_not_cached_and_that_is_said_once(
    request_: Request, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    identifier = RequestIdentifier(16, plain)
    with caplog.at_level(logging.WARNING):
        assert identifier.chain(SPEC, request_) is None
        assert identifier.chain(SPEC, request_) is None
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert hashes(Request(), identifier), "others are"


def test_kinds_of_keys_that_are_new_to_us_are_not_cached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kinds(request: IdentifiedRequest) -> Collection[str]:
        return ("cache_salt", "moon_phase") if request.request_id == "odd" else ("lora", "mm")

    identifier = RequestIdentifier(16, kinds)
    assert identifier.chain(SPEC, Request("odd")) is None
    assert "moon_phase" in caplog.text
    assert identifier.chain(SPEC, Request("even")) is not None


def test_a_rank_has_a_namespace_of_its_own_where_the_cache_is_sharded() -> None:
    ranks = {namespace_digest(rank_namespace(SPEC, rank, 2)) for rank in range(2)}
    assert len(ranks | {namespace_digest(SPEC)}) == 3
    assert rank_namespace(SPEC, 0, 1) == SPEC
    assert rank_namespace(SPEC, 0, 2) != rank_namespace(SPEC, 0, 4)
    assert rank_namespace(SPEC, 1, 2).block_bytes == SPEC.block_bytes


def test_an_adapter_needs_its_configuration_and_its_weights(tmp_path: Path) -> None:
    path = adapter_at(tmp_path / "adapter", b"weights")
    os.remove(Path(path) / "adapter_config.json")
    with pytest.raises(Unidentified, match="adapter_config"):
        AdapterDigests().digest(Adapter(1, path))
