"""What must be equal for two host pools to exchange pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_adapter.hicache.host_pages import HostPages
from kvtier.types import DTYPE_BYTES, Component, NamespaceSpec, RopeSpec

CHAINED = "sglang-page-sha256-v1"
"""Blocks are SGLang's pages, their hashes SGLang's (sha256 of the parent's and the tokens)."""
SINGLE = "sglang-page-sha256-v1/single"
"""The same pages, each of them a first block: those whose chain nobody told."""

DTYPES = {"float8_e4m3fn": "float8_e4m3"}
"""torch's names of kvtier's dtypes, where they differ."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which part of the model's cache a process holds.

    Attributes:
        tp_rank: Of the group that shares a request's attention; likewise the others.
        tp_size: See tp_rank.
        pp_rank: Which stage of the layers.
        pp_size: See pp_rank.
        cp_rank: Which slice of a page's tokens.
        cp_size: See cp_rank.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Whose pages these are.

    Attributes:
        name: The served model's.
        computation: identity.computation_digest.
        tenant: Pages are shared only within a tenant.
    """

    name: str
    computation: str
    tenant: str


@dataclass(frozen=True, slots=True)
class PoolNamespace:
    """The two namespaces of one pool.

    Attributes:
        chained: Pages behind pages.
        single: Pages for themselves.
        replicated: Every rank of the TP group holds the same pages.
    """

    chained: NamespaceSpec
    single: NamespaceSpec
    replicated: bool


def pool_namespace(
    model: ModelIdentity,
    placement: Placement,
    pool: Any,
    pages: HostPages,
    *,
    pool_name: str,
    replicated: bool,
) -> PoolNamespace:
    """The namespaces of a host pool's pages.

    Args:
        model: Whose they are.
        placement: Which part of the model this process has.
        pool: The HostKVCache.
        pages: Its pages.
        pool_name: SGLang's name for it, "kv" or a sidecar's.
        replicated: The TP rank makes no difference (MLA).
    """
    latent = pool_name == "kv" and getattr(pool, "kv_lora_rank", None) is not None
    where = [
        str(pool.layout),
        str(pool.dtype).removeprefix("torch."),
        f"{pages.parts_per_page} parts",
        f"layers {pool.start_layer}-{pool.end_layer} of pp {placement.pp_rank}/{placement.pp_size}",
        f"cp {placement.cp_rank}/{placement.cp_size}",
        "any tp" if replicated else f"tp {placement.tp_rank}/{placement.tp_size}",
    ]
    kind = "latent_rope" if latent else pool_name
    dtype, shape = _elements(pool, pages) if latent else ("uint8", (pages.page_bytes,))
    # SGLang's rotary layout is the model's, which its weights and config name: "none" says nothing
    # here. The width tells lossy codecs what to keep exact.
    rope = RopeSpec("none", pool.qk_rope_head_dim) if latent else RopeSpec()

    def spec(hash_scheme: str) -> NamespaceSpec:
        return NamespaceSpec(
            model_id=model.name,
            weights_revision=model.computation,
            components=(Component(f"{kind} ({', '.join(where)})", dtype, shape),),
            rope=rope,
            block_tokens=pages.page_tokens,
            tenant=model.tenant,
            hash_scheme=hash_scheme,
        )

    return PoolNamespace(spec(CHAINED), spec(SINGLE), replicated)


def _elements(pool: Any, pages: HostPages) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of an MLA page, last dimension one token's record in one layer."""
    name = str(pool.dtype).removeprefix("torch.")
    dtype = DTYPES.get(name, name)
    width = int(pool.kv_cache_dim)
    layers = int(pool.layer_num)
    records = layers * pages.page_tokens
    known = DTYPE_BYTES.get(dtype)
    if known is None or records * width * known != pages.page_bytes:
        return "uint8", (pages.page_bytes,)  # Packed or split records: opaque bytes.
    if pool.layout == "page_first":
        return dtype, (pages.page_tokens, layers, width)
    return dtype, (layers, pages.page_tokens, width)
