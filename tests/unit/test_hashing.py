"""The golden vectors of identity: a change here strands every cache there is."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import InvalidRequest
from kvtier.hashing import (
    block_hashes,
    canonical_spec,
    namespace_digest,
    root_hash,
    scoped,
    split_hashes,
    weights_revision,
)
from kvtier.types import BlockHash, Component, NamespaceDigest, NamespaceSpec, RopeSpec

SPEC = NamespaceSpec(
    model_id="deepseek-ai/DeepSeek-V3",
    weights_revision="00ff",
    components=(
        Component("latent_rope", "bfloat16", (61, 64, 576)),
        Component("indexer_key", "uint8", (61, 64, 132)),
    ),
    rope=RopeSpec("interleaved", 64, (("scaling", '"yarn"'), ("theta", "10000"))),
    block_tokens=64,
    tenant="té",
)
CANONICAL = (
    b'{"block_tokens":64,'
    b'"components":[["latent_rope","bfloat16",[61,64,576]],["indexer_key","uint8",[61,64,132]]],'
    b'"hash_scheme":"kvtier-sha256-v1","model_id":"deepseek-ai/DeepSeek-V3",'
    b'"rope":{"layout":"interleaved","parameters":[["scaling","\\"yarn\\""],["theta","10000"]],'
    b'"width":64},"tenant":"t\\u00e9","weights_revision":"00ff"}'
)
DIGEST = "ca9b567f98b1acf2a99819ad872d89113fdc9e05979b71381aa9fc733884f079"
ROOT = "5156d7433f40f9682990c3516e0a2de8b9c037b5bd555c7100044c11c8efe20b"
BLOCKS = (
    "86b8ed6fc4898a0b8dd07587fa15e1a5ff10d9b926e1c5446e5ff1b13644eacb",
    "b391a31fb986a497c39538b8523436b6b2d35ea5d084f1545368440f585e5c84",
)


def prefixed(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def test_canonical_spec_is_this_very_string() -> None:
    assert canonical_spec(SPEC) == CANONICAL


def test_namespace_digest() -> None:
    by_hand = hashlib.sha256(b"kvtier.namespace.v1\n" + CANONICAL).hexdigest()
    assert namespace_digest(SPEC).hex() == by_hand == DIGEST


def test_root_hash() -> None:
    text = (
        b"kvtier.root.v1\n" + prefixed(bytes.fromhex(DIGEST)) + prefixed(b"lora") + prefixed(b"s")
    )
    got = root_hash(namespace_digest(SPEC), lora_digest=b"lora", cache_salt=b"s").hex()
    assert got == hashlib.sha256(text).hexdigest() == ROOT


def test_block_hashes() -> None:
    root = BlockHash(bytes.fromhex(ROOT))
    tokens = [0, 1, 0xFFFFFFFF, 7, 8, 9, 10]
    first = hashlib.sha256(root + struct.pack("<3I", 0, 1, 0xFFFFFFFF)).digest()
    second = hashlib.sha256(
        first + struct.pack("<3I", 7, 8, 9) + prefixed(b"image") + prefixed(b"")
    ).digest()
    got = block_hashes(root, tokens, 3, {1: [b"image", b""], 2: [b"beyond the full blocks"]})
    assert got == [first, second]
    assert tuple(h.hex() for h in got) == BLOCKS


def test_a_block_that_is_not_full_has_no_hash() -> None:
    root = BlockHash(bytes(32))
    assert block_hashes(root, [], 4) == []
    assert block_hashes(root, [1, 2, 3], 4) == []
    assert len(block_hashes(root, range(11), 4)) == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, model_id="deepseek-ai/DeepSeek-V2"),
        replace(SPEC, weights_revision="00fe"),
        replace(SPEC, components=SPEC.components[::-1]),
        replace(SPEC, components=SPEC.components[:1]),
        replace(SPEC, rope=replace(SPEC.rope, layout="half")),
        replace(SPEC, rope=replace(SPEC.rope, width=32)),
        replace(SPEC, rope=replace(SPEC.rope, parameters=(("theta", "10001"),))),
        replace(SPEC, block_tokens=32),
        replace(SPEC, tenant=""),
        replace(SPEC, hash_scheme="vllm-sha256-cbor"),
    ],
)
def test_every_field_of_a_namespace_counts(other: NamespaceSpec) -> None:
    assert namespace_digest(other) != namespace_digest(SPEC)


def test_lora_and_salt_can_not_stand_for_each_other() -> None:
    digest = namespace_digest(SPEC)
    roots = {
        root_hash(digest, lora_digest=lora, cache_salt=salt)
        for lora, salt in ((b"", b""), (b"ab", b""), (b"", b"ab"), (b"a", b"b"))
    }
    assert len(roots) == 4


def test_the_whole_prefix_counts() -> None:
    root = BlockHash(bytes(32))
    plain = block_hashes(root, [1, 2, 3, 4], 2)
    assert block_hashes(root, [9, 2, 3, 4], 2)[1] != plain[1]
    assert block_hashes(root, [1, 2, 3, 4], 2, {0: [b"x"]})[1] != plain[1]
    assert block_hashes(root, [1, 2, 3, 4], 2, {1: [b"ab"]}) != block_hashes(
        root, [1, 2, 3, 4], 2, {1: [b"a", b"b"]}
    )


def test_split_hashes_undoes_join() -> None:
    hashes = block_hashes(BlockHash(bytes(32)), range(10), 2)
    assert split_hashes(b"".join(hashes)) == hashes
    with pytest.raises(InvalidRequest, match="multiple of 32"):
        split_hashes(bytes(33))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidRequest, match="digest"):
        root_hash(NamespaceDigest(b"short"))
    with pytest.raises(InvalidRequest, match="root"):
        block_hashes(BlockHash(b"short"), [1], 1)
    for token in (-1, 1 << 32):
        with pytest.raises(InvalidRequest, match="token ids"):
            block_hashes(BlockHash(bytes(32)), [token], 1)


def test_fresh_interpreters_agree_whatever_their_hash_seed() -> None:
    """User report 5."""
    program = (
        "from tests.unit.test_hashing import SPEC, namespace_digest, root_hash, block_hashes;"
        "root = root_hash(namespace_digest(SPEC), lora_digest=b'lora', cache_salt=b's');"
        "print(root.hex(), *(h.hex() for h in block_hashes(root, range(40), 4)))"
    )
    root = Path(__file__).parents[2]
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": "random", "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(3)
    }
    assert len(seen) == 1
    assert seen.pop().startswith(ROOT)


class TestWeightsRevision:
    def _files(self, tmp_path: Path) -> list[Path]:
        shards = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
        for shard in shards:
            shard.write_bytes(shard.name.encode() * 1000)
        return shards

    def test_golden(self, tmp_path: Path) -> None:
        state = hashlib.sha256(b"kvtier.weights.v1\n")
        for shard in self._files(tmp_path):
            state.update(prefixed(shard.name.encode()))
            state.update(hashlib.sha256(shard.name.encode() * 1000).digest())
        got = weights_revision(self._files(tmp_path), cache_dir=tmp_path / "cache")
        assert got == state.hexdigest()

    def test_order_and_directory_do_not_matter(self, tmp_path: Path) -> None:
        shards, cache = self._files(tmp_path), tmp_path / "cache"
        (tmp_path / "copy").mkdir()
        copies = [s.rename(tmp_path / "copy" / s.name) for s in self._files(tmp_path)]
        moved = weights_revision(reversed(copies), cache_dir=cache)
        self._files(tmp_path)
        assert weights_revision(shards, cache_dir=cache) == moved

    def test_content_is_read_once(self, tmp_path: Path) -> None:
        shards, cache = self._files(tmp_path), tmp_path / "cache"
        before = weights_revision(shards, cache_dir=cache)
        entries = sorted(cache.iterdir())
        assert len(entries) == 2
        for entry in entries:  # Only a cache that is used can be fooled.
            entry.write_text("ab" * 32)
        assert weights_revision(shards, cache_dir=cache) != before

    def test_a_changed_file_is_read_again(self, tmp_path: Path) -> None:
        shards, cache = self._files(tmp_path), tmp_path / "cache"
        before = weights_revision(shards, cache_dir=cache)
        shards[0].write_bytes(b"other")
        assert weights_revision(shards, cache_dir=cache) != before

    def test_a_file_changed_in_place_with_its_old_time_is_read_again(self, tmp_path: Path) -> None:
        shards, cache = self._files(tmp_path), tmp_path / "cache"
        before = weights_revision(shards, cache_dir=cache)
        status = shards[0].stat()
        with shards[0].open("r+b") as file:
            file.write(b"other")
        os.utime(shards[0], ns=(status.st_atime_ns, status.st_mtime_ns))
        assert shards[0].stat().st_size == status.st_size
        assert weights_revision(shards, cache_dir=cache) != before

    def test_an_unusable_cache_only_costs_time(self, tmp_path: Path) -> None:
        shards, cache = self._files(tmp_path), tmp_path / "cache"
        before = weights_revision(shards, cache_dir=cache)
        for entry in cache.iterdir():
            entry.write_text("damaged")
        assert weights_revision(shards, cache_dir=cache) == before
        (tmp_path / "file").touch()
        assert weights_revision(shards, cache_dir=tmp_path / "file" / "below") == before

    def test_no_files(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="weight files"):
            weights_revision([], cache_dir=tmp_path)


def test_a_block_s_name_in_the_daemon_differs_between_namespaces_and_leads_back() -> None:
    one, two = (NamespaceDigest(hashlib.sha256(name).digest()) for name in (b"one", b"two"))
    hashes = [hashlib.sha256(bytes([n])).digest() for n in range(3)]
    packed = b"".join(hashes)
    names = {digest: scoped(digest, packed) for digest in (one, two)}
    assert not {*split_hashes(names[one])} & {*split_hashes(names[two]), *split_hashes(packed)}
    assert all(scoped(digest, named) == packed for digest, named in names.items())
    assert names[one][:32] == bytes(a ^ b for a, b in zip(one, hashes[0], strict=True)), "golden"
    assert scoped(one, b"") == b""
