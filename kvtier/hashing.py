"""Identity: what makes two blocks the same block.

Every function is pure: equal inputs give equal bytes in every process and on every machine,
whatever PYTHONHASHSEED says. Golden vectors in tests/unit/test_hashing.py are the format.

    namespace digest = sha256("kvtier.namespace.v1\\n" || canonical JSON of the spec)
    root = sha256("kvtier.root.v1\\n" || lp(namespace digest) || lp(LoRA digest) || lp(salt))
    block hash = sha256(parent || token ids, u32 little-endian || lp(extra key) ...)

lp(x) is x behind its length as u32 little-endian, so no two inputs share an encoding. The token
part needs no length: a block has exactly `block_tokens` ids, and that number is in the namespace.
Canonical JSON: keys sorted, no white space, ASCII escapes, integers and strings only.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvtier.errors import InvalidRequest
from kvtier.types import (
    HASH_BYTES,
    BlockHash,
    Component,
    NamespaceDigest,
    NamespaceSpec,
    RopeSpec,
)

_U32 = struct.Struct("<I")
_HASH = struct.Struct(f"{HASH_BYTES}s")
_READ_BYTES = 1 << 20


def canonical_spec(spec: NamespaceSpec) -> bytes:
    """The one byte string that stands for `spec`: what is hashed, sent and stored."""
    value = {
        "model_id": spec.model_id,
        "weights_revision": spec.weights_revision,
        "components": [[c.name, c.dtype, list(c.shape)] for c in spec.components],
        "rope": {
            "layout": spec.rope.layout,
            "width": spec.rope.width,
            "parameters": [list(pair) for pair in spec.rope.parameters],
        },
        "block_tokens": spec.block_tokens,
        "tenant": spec.tenant,
        "hash_scheme": spec.hash_scheme,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def parse_spec(encoded: bytes) -> NamespaceSpec:
    """Undo canonical_spec().

    Raises:
        InvalidRequest: not the canonical form of any spec.
    """
    try:
        value = json.loads(encoded)
        rope = value["rope"]
        spec = NamespaceSpec(
            model_id=_text(value["model_id"]),
            weights_revision=_text(value["weights_revision"]),
            components=tuple(
                Component(_text(name), _text(dtype), tuple(int(n) for n in shape))
                for name, dtype, shape in value["components"]
            ),
            rope=RopeSpec(
                layout=_text(rope["layout"]),
                width=int(rope["width"]),
                parameters=tuple((_text(name), _text(text)) for name, text in rope["parameters"]),
            ),
            block_tokens=int(value["block_tokens"]),
            tenant=_text(value["tenant"]),
            hash_scheme=_text(value["hash_scheme"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"spec: not a namespace: {error!r}") from error
    if canonical_spec(spec) != encoded:
        raise InvalidRequest("spec: not in canonical form (hashing.canonical_spec)")
    return spec


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def namespace_digest(spec: NamespaceSpec) -> NamespaceDigest:
    """32 bytes that name `spec`."""
    return NamespaceDigest(hashlib.sha256(b"kvtier.namespace.v1\n" + canonical_spec(spec)).digest())


def _length_prefixed(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def root_hash(
    digest: NamespaceDigest, *, lora_digest: bytes = b"", cache_salt: bytes = b""
) -> BlockHash:
    """The parent of a first block.

    Args:
        digest: The namespace's.
        lora_digest: Digest of the adapter's *content*; empty without one. Never its name.
        cache_salt: The request's or tenant's salt; empty without one.
    """
    if len(digest) != HASH_BYTES:
        raise InvalidRequest(f"a namespace digest has {HASH_BYTES} bytes, not {len(digest)}")
    state = hashlib.sha256(b"kvtier.root.v1\n")
    for part in (digest, lora_digest, cache_salt):
        state.update(_length_prefixed(part))
    return BlockHash(state.digest())


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    try:
        words = array.array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids must be integers in [0, 2**32): {error}") from error
    if words.itemsize != 4:  # pragma: no cover - no supported platform
        raise InvalidRequest("this platform's C unsigned int is not 4 bytes")
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def block_hashes(
    root: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    extra_keys: Mapping[int, Sequence[bytes]] | None = None,
) -> list[BlockHash]:
    """Chained hashes of the full blocks of `token_ids`, first block first.

    A last block that is not full has no hash: it is never stored.

    Args:
        root: root_hash() of the request.
        token_ids: The prompt, ids in [0, 2**32).
        block_tokens: Tokens a block, as in the namespace.
        extra_keys: For a block's index, what besides its tokens makes its content (digests of
            images, for example), whole and in order.

    Raises:
        InvalidRequest: root of a wrong length, or an id out of range.
    """
    if len(root) != HASH_BYTES:
        raise InvalidRequest(f"a root hash has {HASH_BYTES} bytes, not {len(root)}")
    data = _token_bytes(token_ids)
    stride = 4 * block_tokens
    extra_keys = extra_keys or {}
    hashes: list[BlockHash] = []
    parent: bytes = root
    for index in range(len(data) // stride):
        state = hashlib.sha256(parent)
        state.update(data[index * stride : (index + 1) * stride])
        for key in extra_keys.get(index, ()):
            state.update(_length_prefixed(key))
        parent = state.digest()
        hashes.append(BlockHash(parent))
    return hashes


def split_hashes(packed: bytes) -> list[BlockHash]:
    """Undo b"".join(hashes).

    Raises:
        InvalidRequest: the length is not a multiple of 32.
    """
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(
            f"hashes: {len(packed)} bytes is not a multiple of {HASH_BYTES} (sha256)"
        )
    return [BlockHash(value) for (value,) in _HASH.iter_unpack(packed)]


def scoped(digest: NamespaceDigest, packed: bytes) -> bytes:
    """The daemon's own names of blocks: their hashes, each XOR the namespace's digest; and back.

    Hashes that engines bring along may cover tokens only. On the tiers, equal hashes of two
    namespaces must be two blocks all the same.

    Args:
        digest: The namespace's, 32 bytes.
        packed: b"".join(hashes), of 32 bytes each.
    """
    mask = int.from_bytes(digest * (len(packed) // HASH_BYTES))
    return (int.from_bytes(packed) ^ mask).to_bytes(len(packed))


def weights_revision(paths: Iterable[Path], *, cache_dir: Path | None = None) -> str:
    """Digest of the weights' content: sha256 over sorted (name, content digest) pairs, in hex.

    Reading hundreds of gigabytes at every start would hurt, so a file's digest is remembered by
    (path, inode, size, mtime, ctime) in `cache_dir`. An unusable cache is not an error: the file is
    read.

    Args:
        paths: The weight files (safetensors shards). Order does not matter.
        cache_dir: Where content digests are remembered; $XDG_CACHE_HOME/kvtier, else
            ~/.cache/kvtier.

    Raises:
        InvalidRequest: no file given.
        OSError: a file can't be read.
    """
    files = sorted(paths, key=lambda path: path.name)
    if not files:
        raise InvalidRequest("no weight files: the model can't be identified")
    directory = cache_dir or _default_cache_dir()
    state = hashlib.sha256(b"kvtier.weights.v1\n")
    for path in files:
        state.update(_length_prefixed(path.name.encode()))
        state.update(_content_digest(path, directory))
    return state.hexdigest()


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtier"


def _content_digest(path: Path, cache_dir: Path) -> bytes:
    status = path.stat()
    # ctime, too: whoever writes in place may set mtime back.
    times = f"{status.st_mtime_ns}\n{status.st_ctime_ns}"
    identity = f"{path.resolve()}\n{status.st_ino}\n{status.st_size}\n{times}\n"
    entry = cache_dir / f"{hashlib.sha256(identity.encode()).hexdigest()}.sha256"
    try:
        cached = bytes.fromhex(entry.read_text())
        if len(cached) == HASH_BYTES:
            return cached
    except (OSError, ValueError):
        pass  # Absent or damaged: the content itself is the authority.
    with path.open("rb") as file:
        state = hashlib.sha256()
        while chunk := file.read(_READ_BYTES):
            state.update(chunk)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(state.hexdigest())
        temporary.replace(entry)
    except OSError:
        pass  # A read-only home only costs the next start some seconds.
    return state.digest()
