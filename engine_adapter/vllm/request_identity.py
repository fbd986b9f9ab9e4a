"""What besides its tokens makes a request's cache: adapter, salt, images.

Whatever can't be named by its content is not cached: a miss costs time, a wrong hit costs trust.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_adapter.vllm.chain import HashChain
from kvtier.errors import KvtierError
from kvtier.hashing import namespace_digest, root_hash, weights_revision
from kvtier.types import NamespaceSpec

log = logging.getLogger(__name__)

KNOWN_KINDS = frozenset({"lora", "mm", "cache_salt"})
"""Kinds of extra keys in vLLM's own block hashes that this module covers."""


class Unidentified(KvtierError):
    """Something that can't be named by its content; the message says what."""


class Adapter(Protocol):
    """vllm.lora.request.LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


class Span(Protocol):
    """Where a medium's placeholder tokens are."""

    offset: int
    length: int


class Medium(Protocol):
    """vllm.multimodal.inputs.MultiModalFeatureSpec."""

    identifier: str | None

    @property
    def mm_position(self) -> Span:
        """Its placeholder tokens."""


class IdentifiedRequest(Protocol):
    """What of vllm.v1.request.Request says whose cache it is."""

    request_id: str
    cache_salt: str | None
    prompt_embeds: object | None
    resumable: bool

    @property
    def lora_request(self) -> Adapter | None:
        """The adapter it runs with."""

    @property
    def mm_features(self) -> Sequence[Medium]:
        """Its images, sounds and so on, by position."""


class RequestIdentifier:
    """Names requests.

    Args:
        block_tokens: Tokens a kvtier block.
        kinds_of: The kinds of extra keys that vLLM itself hashes for a request.

    Attributes:
        adapters: What is known of LoRA adapters. Made with this object: the engine starts now.
    """

    def __init__(
        self, block_tokens: int, kinds_of: Callable[[IdentifiedRequest], Collection[str]]
    ) -> None:
        self._block_tokens = block_tokens
        self._kinds_of = kinds_of
        self.adapters = AdapterDigests()
        self._said: set[str] = set()

    def chain(self, spec: NamespaceSpec, request: IdentifiedRequest) -> HashChain | None:
        """The request's block hashes in a namespace; None if it can't be identified.

        That is logged, once for each reason.
        """
        try:
            self._require_known(request)
            keys = media_keys(request.mm_features, self._block_tokens)
            adapter = request.lora_request
            lora = self.adapters.digest(adapter) if adapter is not None else b""
        except Unidentified as error:
            reason = str(error)
            if reason not in self._said:
                self._said.add(reason)
                log.warning(
                    "requests like %s run without kvtier's cache: %s (said once)",
                    request.request_id,
                    reason,
                )
            return None
        salt = (request.cache_salt or "").encode()
        root = root_hash(namespace_digest(spec), lora_digest=lora, cache_salt=salt)
        return HashChain(root, self._block_tokens, keys)

    def _require_known(self, request: IdentifiedRequest) -> None:
        if request.prompt_embeds is not None:
            raise Unidentified("its prompt has embeddings that are no token's")
        if request.resumable:
            raise Unidentified("its tokens may still change (a streaming session)")
        unknown = set(self._kinds_of(request)) - KNOWN_KINDS
        if unknown:
            raise Unidentified(f"vLLM tells its blocks apart by {sorted(unknown)}")


def media_keys(media: Sequence[Medium], block_tokens: int) -> Mapping[int, Sequence[bytes]]:
    """Extra keys of the blocks that media reach into: identifier, and where it starts from there.

    Args:
        media: By position.
        block_tokens: Tokens a block.

    Raises:
        Unidentified: one has no hash.
    """
    keys: dict[int, list[bytes]] = {}
    for medium in media:
        if not medium.identifier:
            raise Unidentified("it has an image, video or sound without a hash")
        start, length = medium.mm_position.offset, medium.mm_position.length
        if length < 1:
            continue
        last = (start + length - 1) // block_tokens
        for block in range(start // block_tokens, last + 1):
            key = json.dumps(["mm", medium.identifier, start - block * block_tokens])
            keys.setdefault(block, []).append(key.encode())
    return keys


@dataclass(frozen=True, slots=True)
class _Content:
    """What an adapter's files were when its content was read."""

    files: tuple[Path, ...]
    state: tuple[tuple[str, int, int, int], ...]
    digest: bytes


class AdapterDigests:
    """Content digests of LoRA adapters.

    vLLM keeps an adapter by its id and reads its files when it likes. So the digest belongs to the
    id, taken when the id is first seen; files that changed since then, or since the engine started,
    make it unknown what vLLM computes with. An adapter that is to be loaded in place of an older
    one is read again.

    Args:
        started_ns: When the engine started, since the epoch; None for now.
    """

    def __init__(self, started_ns: int | None = None) -> None:
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._known: dict[int, _Content] = {}
        self._lost: set[int] = set()
        self._versions: Counter[int] = Counter()
        self._of_name: dict[str, bytes] = {}
        self._mixed: set[str] = set()

    def digest(self, adapter: Adapter) -> bytes:
        """32 bytes that name the adapter's content. Reads its files once (weights_revision).

        Raises:
            Unidentified: its files can't be read, or may not be those that vLLM has loaded.
        """
        try:
            digest = self._digest(adapter)
        except Unidentified:
            self._mixed.add(adapter.lora_name)
            raise
        if self._of_name.setdefault(adapter.lora_name, digest) != digest:
            self._mixed.add(adapter.lora_name)
        return digest

    def recheck(self, adapter: Adapter) -> None:
        """Look whether its files are as they were; if not, its content is unknown from now on."""
        known = self._known.get(adapter.lora_int_id)
        if known is None or adapter.lora_int_id in self._lost:
            return
        try:
            changed = _state(known.files) != known.state
        except OSError:
            changed = True
        if changed:
            self._lose(adapter)

    def version(self, adapter: Adapter) -> int:
        """Another one after each change of the id's content; for comparison only."""
        return self._versions[adapter.lora_int_id]

    def mixed(self, adapter: Adapter) -> bool:
        """Whether pages in vLLM's own cache, which knows an adapter by name, may be of others."""
        return adapter.lora_name in self._mixed

    def _lose(self, adapter: Adapter) -> None:
        self._lost.add(adapter.lora_int_id)
        self._versions[adapter.lora_int_id] += 1
        self._mixed.add(adapter.lora_name)

    def _digest(self, adapter: Adapter) -> bytes:
        path, number = adapter.lora_path, adapter.lora_int_id
        try:
            files = _adapter_files(path)
            state = _state(files)
            known = self._known.get(number)
            if known is not None and known.state == state and number not in self._lost:
                return known.digest
            if not adapter.load_inplace:
                self._require_loaded(adapter, known, state)
            digest = bytes.fromhex(weights_revision(files))
        except OSError as error:
            raise Unidentified(f"adapter {path} can't be read: {error}") from error
        if known is not None and (known.digest != digest or number in self._lost):
            self._versions[number] += 1
        self._lost.discard(number)
        self._known[number] = _Content(files, state, digest)
        return digest

    def _require_loaded(
        self, adapter: Adapter, known: _Content | None, state: tuple[tuple[str, int, int, int], ...]
    ) -> None:
        """These files are what vLLM has loaded, or will load."""
        if known is not None:
            if adapter.lora_int_id not in self._lost:
                self._lose(adapter)
            raise Unidentified(
                f"the files of adapter {adapter.lora_path} changed under it: load it under another"
                " id and from another directory, before the engine starts"
            )
        if any(max(times) >= self._started_ns for _, _, *times in state):
            raise Unidentified(
                f"adapter {adapter.lora_path} changed after the engine started; which content vLLM"
                " loaded can't be known"
            )


def _adapter_files(path: str) -> tuple[Path, ...]:
    patterns = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
    files = sorted(file for pattern in patterns for file in Path(path).glob(pattern))
    if len(files) < 2:
        raise Unidentified(f"adapter {path}: no adapter_config.json and weights there")
    return tuple(files)


def _state(files: Sequence[Path]) -> tuple[tuple[str, int, int, int], ...]:
    """Name, size and both times; the time of status changes can't be set back, as by cp -p."""
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats)
