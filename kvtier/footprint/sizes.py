"""Bytes a token in each form of the KV cache: records by arithmetic, codecs by encoding latents.

Of noise a codec makes nothing, so real latents come with the package: tiny_mla_latents.npy, made by
bench/footprint_latents.py: (blocks, 4 layers, 64 tokens, 512 + 64) bfloat16 bits. Other models have
more layers than tiny-mla. So a whole block of their size is put together from its records, and that
is what the codecs encode:

* The first layer is tiny-mla's first, the others are its other layers in turn. Records of a first
  layer depend on the token alone, so they repeat as tokens do, and codecs make use of that: in a
  quarter of tiny-mla (bench/codecs.py: about 6 % fewer bytes for q6), but in a sixtieth of
  DeepSeek-V2.
* Each layer has its channels in another order, so that none repeats another; otherwise zstd finds
  whole layers again, and 60 take a fifteenth of what they should. To codecs channels are alike:
  their order changes a size by about 1 %.
* A model of other widths gets as many of the 512 and of the 64 channels as it has, some of them
  twice if it has more.

Indexer keys are random bytes: there are no real ones here, so they count in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.codec import codec_by_name, encode_block
from kvtier.codec.base import Bytes
from kvtier.errors import ConfigError
from kvtier.footprint.geometries import Geometry
from kvtier.types import Component, NamespaceSpec, RopeSpec

LATENTS = Path(__file__).with_name("tiny_mla_latents.npy")
SOURCE = (
    "latents of tiny-mla (DeepSeek-V2 architecture, 4 layers, 512 + 64, bf16) over text it was not"
    " trained on, socket.py and queue.py of Python's standard library"
)
RANK, ROPE_WIDTH = 512, 64
BLOCK_TOKENS = 64
TIERS = ("hbm", "ram", "ssd")

GQA8_LAYER_BYTES = 2 * 8 * 128 * 2
"""A token and layer of a conventional model: keys and values of 8 heads of 128, bfloat16."""

DEEPSEEK_67B_BYTES = 95 * GQA8_LAYER_BYTES
"""A token of DeepSeek 67B, the baseline of the DeepSeek-V2 report: 389,120."""

_LARGEST_BLOCK_BYTES = 256 << 20
_BFLOAT16_BYTES = 2
_INDEXER_GROUP = 128

Latents = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a model's KV cache.

    Attributes:
        name: Of the record or the codec.
        meaning: For people.
        layers: Of the model.
        bytes_per_token: In all layers, what the form itself costs included.
        indexer_bytes_per_token: Of these, the indexer's keys.
        measured: By encoding blocks; False: by arithmetic.
        tiers: Which tiers keep it: HBM and RAM what the engine has, SSDs what a codec makes.
    """

    name: str
    meaning: str
    layers: int
    bytes_per_token: float
    indexer_bytes_per_token: float
    measured: bool
    tiers: tuple[str, ...]

    @property
    def bytes_per_token_layer(self) -> float:
        """Mean over the layers."""
        return self.bytes_per_token / self.layers

    @property
    def ratio_to_gqa8(self) -> float:
        """To 8 heads of 128 in bfloat16, at as many layers."""
        return self.bytes_per_token_layer / GQA8_LAYER_BYTES

    @property
    def reduction_vs_deepseek_67b(self) -> float:
        """Share of DeepSeek 67B's bytes that is saved; below 0: this takes more."""
        return 1 - self.bytes_per_token / DEEPSEEK_67B_BYTES

    @property
    def tokens_per_gib(self) -> dict[str, int | None]:
        """Whole tokens in 2^30 bytes of each tier; None where the tier does not keep this form."""
        tokens = int((1 << 30) / self.bytes_per_token)
        return {tier: tokens if tier in self.tiers else None for tier in TIERS}


def forms(geometry: Geometry) -> list[Form]:
    """Every form of a model's KV cache, records first.

    Raises:
        ConfigError: a block of this model is too large to be real.
    """
    heads, kv_heads = geometry.heads, geometry.kv_heads
    head_bytes = (geometry.key_width + geometry.value_width) * _BFLOAT16_BYTES
    expanded = [
        _computed(geometry, "mha", f"keys, values of all {heads} heads, bf16", heads * head_bytes),
        _computed(geometry, "gqa8", "8 heads of 128, bf16", GQA8_LAYER_BYTES),
    ]
    if not geometry.kv_lora_rank:
        meaning = f"this model: {kv_heads} heads of {geometry.key_width}, bf16"
        return [*expanded, _computed(geometry, "kv_bf16", meaning, kv_heads * head_bytes)]
    record_bytes = (geometry.kv_lora_rank + geometry.rope_width) * _BFLOAT16_BYTES
    indexer_bytes = geometry.indexer_width * _BFLOAT16_BYTES
    latent = _computed(
        geometry, "mla_bf16", "latent and rotary key, bf16", record_bytes, indexer_bytes
    )
    return [*expanded, latent, *measured(geometry)]


def _computed(
    geometry: Geometry, name: str, meaning: str, layer_bytes: int, indexer_layer_bytes: int = 0
) -> Form:
    indexer_bytes = geometry.layers * indexer_layer_bytes
    token_bytes = geometry.layers * layer_bytes + indexer_bytes
    return Form(name, meaning, geometry.layers, token_bytes, indexer_bytes, False, TIERS)


_CODECS = {
    "raw": ("what the engine has, as it is", TIERS[1:]),
    "lossless": ("the same bits in less room", TIERS[2:]),
    "fp8_ds_mla": ("latent fp8, rotary key bf16", TIERS),  # Engines keep such records as well.
    "q8": ("scaled integers, finest", TIERS[2:]),
    "q6": ("scaled integers, about fp8's loss", TIERS[2:]),
    "q4": ("scaled integers, visible loss", TIERS[2:]),
}


def measured(geometry: Geometry) -> list[Form]:
    """What each codec makes of blocks of a model with a latent, mean over the blocks.

    Raises:
        ConfigError: a block of this model is too large to be real.
    """
    spec = block_spec(geometry)
    if spec.block_bytes > _LARGEST_BLOCK_BYTES:
        raise ConfigError(
            f"{geometry.name}: a block of {BLOCK_TOKENS} tokens would have {spec.block_bytes:,}"
            " bytes: no real model has these widths and layers"
        )
    indexer_bytes = geometry.layers * indexer_record_bytes(geometry.indexer_width)
    blocks = [block_of(geometry, latents) for latents in load_latents()]
    found = []
    for name, (meaning, tiers) in _CODECS.items():
        codec = codec_by_name(name)
        stored_bytes = sum(encode_block(codec, block, spec)[1].size for block in blocks)
        token_bytes = stored_bytes / (len(blocks) * BLOCK_TOKENS)
        found.append(Form(name, meaning, geometry.layers, token_bytes, indexer_bytes, True, tiers))
    return found


def load_latents() -> Latents:
    """(blocks, layers, tokens, width) bfloat16 bits of tiny-mla."""
    latents: Latents = np.load(LATENTS, allow_pickle=False)
    return latents


def block_spec(geometry: Geometry) -> NamespaceSpec:
    """The layout of a block: a bfloat16 latent, and an indexer's keys if the model has one."""
    shape = (geometry.layers, BLOCK_TOKENS)
    width = geometry.kv_lora_rank + geometry.rope_width
    components = [Component("latent_rope", "bfloat16", (*shape, width))]
    if geometry.indexer_width:
        record_bytes = indexer_record_bytes(geometry.indexer_width)
        components.append(Component("indexer_key", "uint8", (*shape, record_bytes)))
    rope = RopeSpec("interleaved", geometry.rope_width)
    return NamespaceSpec(
        geometry.name, "footprint", tuple(components), rope, block_tokens=BLOCK_TOKENS
    )


def block_of(geometry: Geometry, latents: Latents) -> Bytes:
    """A block of a model's layout from records of tiny-mla; see the module's text.

    Args:
        geometry: Of the model.
        latents: (layers, tokens, 512 + 64) bfloat16 bits.

    Returns:
        (block_spec(geometry).block_bytes,) uint8.
    """
    random = np.random.default_rng(0)
    width = geometry.kv_lora_rank + geometry.rope_width
    block = np.empty((geometry.layers, latents.shape[1], width), dtype=np.uint16)
    for layer, records in enumerate(block):
        source = 0 if layer == 0 else 1 + (layer - 1) % (len(latents) - 1)
        order = np.concatenate(
            [
                _some_of(RANK, geometry.kv_lora_rank, random),
                RANK + _some_of(ROPE_WIDTH, geometry.rope_width, random),
            ]
        )
        np.take(latents[source], order, axis=1, out=records)
    indexer_bytes = block_spec(geometry).block_bytes - block.nbytes
    indexer = random.integers(0, 256, indexer_bytes, dtype=np.uint8)
    return np.concatenate([block.reshape(-1).view(np.uint8), indexer])


def _some_of(have: int, wanted: int, random: np.random.Generator) -> npt.NDArray[Any]:
    """`wanted` numbers below `have` in random order, none twice before all were there once."""
    rounds = -(-wanted // have)
    return np.concatenate([random.permutation(have) for _ in range(rounds)])[:wanted]


def indexer_record_bytes(width: int) -> int:
    """Of an indexer's key as engines keep it: float8, and a float32 scale for each 128."""
    return width + 4 * -(-width // _INDEXER_GROUP)
