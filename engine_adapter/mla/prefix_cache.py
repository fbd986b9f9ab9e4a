"""The only module that knows kvtier: what the engine loads from it and stores into it.

Blocks go between the engine's pages and the daemon through the kvtier client, one memcpy each.
The client turns every failure into a miss, so nothing here can fail a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_adapter.mla.config import ModelConfig
from engine_adapter.mla.paged_cache import PAGE_TOKENS, PagedCache
from engine_adapter.namespaces import latent_rope, mla_namespace, rotary
from kvtier.hashing import block_hashes, namespace_digest, root_hash, weights_revision
from kvtier.types import BlockHash, Loss, NamespaceSpec, Tier

Buffer = npt.NDArray[np.uint8]


class Loaded(Protocol):
    """What a get() copied: the longest cached prefix, and where it came from."""

    @property
    def num_blocks(self) -> int:
        """Leading destinations that hold their block; later ones are undefined."""

    @property
    def blocks_by_tier(self) -> Mapping[Tier, int]:
        """Of these, how many came from each tier."""

    @property
    def loss(self) -> Loss:
        """What some of them may have lost."""


class Room(Protocol):
    """Room for new blocks, as kvtier.client.WriteLease."""

    @property
    def covered_blocks(self) -> int:
        """Leading blocks asked for that kvtier has, or has once this is committed."""

    def write_from(self, sources: Sequence[Buffer]) -> None:
        """Copy the blocks that are wanted; one source for each block asked for."""

    def commit_later(self) -> None:
        """Make them visible, without waiting for the answer."""

    def abort(self) -> None:
        """Give the room back; harmless after commit_later()."""


class BlockClient(Protocol):
    """The calls of kvtier.client.Client that the engine makes. None of them raises."""

    def get(
        self,
        spec: NamespaceSpec,
        hashes: Sequence[BlockHash],
        destinations: Sequence[Buffer],
        *,
        allowed_loss: Loss,
        prefill_tokens_per_s: float,
    ) -> Loaded:
        """Copy the longest cached prefix of `hashes` into the destinations.

        What takes longer to load than to compute at that speed is left out; 0: nothing is.
        """

    def reserve(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        *,
        allowed_loss: Loss,
        loss: Loss,
    ) -> Room:
        """Room for blocks that follow `parent` (None: the first block), which have lost `loss`."""

    def finish(self, spec: NamespaceSpec, tail: BlockHash) -> None:
        """The request whose last block is `tail` is over."""


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """A client, and with whom its blocks are shared. Give one to MlaEngine.

    Attributes:
        client: kvtier.client.Client, or a stand-in.
        tenant: Blocks are shared only within a tenant; part of the namespace.
        lora_digest: Content digest of the adapter merged into the weights, if any.
        cache_salt: Blocks are shared only between equal salts.
        allowed_loss: Whether blocks may come back from, and go into, lossy stored forms.
    """

    client: BlockClient
    tenant: str = ""
    lora_digest: bytes = b""
    cache_salt: bytes = b""
    allowed_loss: Loss = Loss.EXACT

    def open(self, spec: NamespaceSpec) -> PrefixNamespace:
        """The cache of one model."""
        root = root_hash(
            namespace_digest(spec), lora_digest=self.lora_digest, cache_salt=self.cache_salt
        )
        return PrefixNamespace(self.client, spec, root, self.allowed_loss)


@dataclass(frozen=True, slots=True)
class PrefixNamespace:
    """The cached blocks of one model."""

    client: BlockClient
    spec: NamespaceSpec
    root: BlockHash
    allowed_loss: Loss


class SequenceBlocks:
    """The blocks of one request, from its lookup to its end.

    Args:
        namespace: Whose blocks.
        cache: The engine's pages.
        pages: The request's pages, enough for its prompt and answer.
        prompt: Its token ids; hashed once, here.
    """

    def __init__(
        self,
        namespace: PrefixNamespace,
        cache: PagedCache,
        pages: Sequence[int],
        prompt: Sequence[int],
    ) -> None:
        self._namespace = namespace
        self._cache = cache
        self._pages = pages
        self._hashes = block_hashes(namespace.root, prompt, PAGE_TOKENS)
        self._present = 0
        self._offered = 0
        self._room: Room | None = None
        self._loss = Loss.EXACT

    @property
    def present_tokens(self) -> int:
        """Leading tokens whose blocks kvtier has."""
        return self._present * PAGE_TOKENS

    def load(self, prompt_tokens: int, prefill_tokens_per_s: float) -> dict[str, int]:
        """Copy the longest cached prefix into the pages, leaving at least one token to compute.

        Args:
            prompt_tokens: Tokens of the prompt.
            prefill_tokens_per_s: The engine's own speed; 0 while it is unknown.

        Returns:
            Tokens loaded, by tier.
        """
        wanted = self._hashes[: (prompt_tokens - 1) // PAGE_TOKENS]
        if not wanted:
            return {}
        destinations = [self._cache.page_bytes(page) for page in self._pages[: len(wanted)]]
        loaded = self._namespace.client.get(
            self._namespace.spec,
            wanted,
            destinations,
            allowed_loss=self._namespace.allowed_loss,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        self._present = self._offered = loaded.num_blocks
        self._loss = loaded.loss
        return {
            tier.value: blocks * PAGE_TOKENS
            for tier, blocks in loaded.blocks_by_tier.items()
            if blocks
        }

    def expect(self, computed: int) -> None:
        """The engine's first step will compute up to this many tokens: reserve their blocks.

        Now and not in store(): right after a step, the engine's own threads still keep the cores
        busy, and the daemon's answer takes two to three times as long.
        """
        full = computed // PAGE_TOKENS
        if full > self._present:
            self._room = self._reserve(full)

    def store(self, token_ids: Sequence[int], computed: int) -> None:
        """Offer the full blocks that kvtier does not have, in one put, if a block became full.

        Not beside the engine's next step: on a CPU that step needs all cores, and a thread that
        takes one of them away costs more than the put. Blocks that kvtier refused (no room, out of
        reach) are offered again with the next one: without them nobody could find those that
        follow.

        Args:
            token_ids: Prompt and answer so far.
            computed: How many of them have their records in the pages.
        """
        full = computed // PAGE_TOKENS
        if full <= self._offered:
            return
        self._offered = full
        self._extend_hashes(token_ids, full)
        room = self._room if self._room is not None else self._reserve(full)
        self._room = None
        pages = self._pages[self._present : full]
        room.write_from([self._cache.page_bytes(page) for page in pages])
        room.commit_later()
        self._present += room.covered_blocks

    def _reserve(self, full: int) -> Room:
        """Room for the blocks from the first that kvtier lacks up to `full`."""
        parent = self._hashes[self._present - 1] if self._present else None
        fresh = self._hashes[self._present : full]
        namespace = self._namespace
        return namespace.client.reserve(
            namespace.spec,
            parent,
            fresh,
            allowed_loss=namespace.allowed_loss,
            loss=self._loss,
        )

    def finish(self) -> None:
        """The request is over; its chain was used just now."""
        if self._room is not None:
            self._room.abort()
        if self._present:
            self._namespace.client.finish(self._namespace.spec, self._hashes[self._present - 1])

    def _extend_hashes(self, token_ids: Sequence[int], blocks: int) -> None:
        """Hash the blocks of the answer, each of which has the one before as its parent."""
        known = len(self._hashes)
        if known < blocks:
            parent = self._hashes[-1] if known else self._namespace.root
            tokens = token_ids[known * PAGE_TOKENS : blocks * PAGE_TOKENS]
            self._hashes += block_hashes(parent, tokens, PAGE_TOKENS)


def namespace_spec(
    config: ModelConfig, files: Sequence[Path], dtype: torch.dtype, tenant: str = ""
) -> NamespaceSpec:
    """What must be equal for two engines to share blocks.

    Reads the files on a host's first call (kvtier.hashing.weights_revision remembers).

    Args:
        config: The model.
        files: Its checkpoint (weights.checkpoint_files); their content is the revision.
        dtype: Of the cache and of all computing.
        tenant: See PrefixCache.

    Raises:
        OSError: a file can't be read.
    """
    return mla_namespace(
        config.name,
        weights_revision(files),
        latent_rope(config.layers, PAGE_TOKENS, config.record_width, dtype),
        rotary(config.rope_width, config.rope),
        tenant,
    )
