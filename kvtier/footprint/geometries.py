"""What of a model decides the size of its KV cache: of known models, or from a config.json.

Known ones are as their public Hugging Face configurations say, without layers that only predict
further tokens (MTP).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError

_MOST = 1 << 16
"""No width or count of a real model is larger."""

_CONFIG_BYTES = 1 << 20
_EVERY_TOKEN = {
    "full_attention",
    "attention",
    "indexed_attention",
    "deepseek_sparse_attention",
}
"""Kinds of layers that keep a record of each token, by their names in `layer_types`."""

_OTHER_ATTENTION = ("linear_attn_config", "compress_rates", "compress_ratios")
"""Keys of models where some layers keep less than a record of each token."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a model decides the size of its KV cache.

    Attributes:
        name: The model.
        layers: All of them keep a record of each token.
        heads: Of the queries.
        kv_heads: Heads that have keys and values of their own; with a latent all have.
        key_width: Elements of one head's key, the rotary part included.
        value_width: Elements of one head's value.
        kv_lora_rank: Elements of the latent; 0 for a model without one.
        rope_width: Elements of the rotary key beside the latent.
        indexer_width: Elements of a sparse-attention indexer's key in each layer; 0 without one.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    kv_lora_rank: int = 0
    rope_width: int = 0
    indexer_width: int = 0


def _mla(
    name: str, layers: int, heads: int, nope: int = 128, value: int = 128, indexer: int = 0
) -> Geometry:
    """One of those whose records are 512 + 64."""
    return Geometry(name, layers, heads, heads, nope + 64, value, 512, 64, indexer)


KNOWN = {
    geometry.name: geometry
    for geometry in (
        _mla("deepseek-v2", 60, 128),
        _mla("v2-lite", 27, 16),
        _mla("v3", 61, 128),
        _mla("v3.2", 61, 128, indexer=128),
        _mla("kimi-k2", 61, 64),
        _mla("glm-5", 78, 64, nope=192, value=256, indexer=128),
    )
}
DEFAULT = "deepseek-v2"
_MAKER = "deepseek-"
"""Models of this maker go by their names with and without it."""


def geometry_of(model: str) -> Geometry:
    """A known model's geometry, or that of a Hugging Face config.json or its directory.

    Args:
        model: A name in KNOWN, in capitals or not, of DeepSeek's models with or without
            "deepseek-"; else a path.

    Raises:
        ConfigError: no such model or file, or not a configuration that gives a single figure; the
            message says which key is wrong.
    """
    known = _known().get(model.lower())
    if known is not None:
        return known
    if not model.strip():
        raise ConfigError(f"no model {model!r}: {_choices(model)}")
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    try:
        with path.open("rb") as file:
            data = file.read(_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"no model {model!r}: {_choices(model)}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return parse_config(data, str(path))


def _known() -> dict[str, Geometry]:
    """By every name that a known model goes by."""
    names = dict(KNOWN)
    for name, geometry in KNOWN.items():
        if name.startswith(_MAKER):
            names[name.removeprefix(_MAKER)] = geometry
        elif name.startswith("v"):
            names[_MAKER + name] = geometry
    return names


def _choices(model: str) -> str:
    """What may be given instead; first the name that is nearest."""
    text = f"give {', '.join(KNOWN)}, or the path of a config.json"
    nearest = difflib.get_close_matches(model.lower(), _known(), n=1)
    return f"did you mean {nearest[0]}? Else {text}" if nearest else text


def parse_config(data: bytes, name: str) -> Geometry:
    """The geometry that a Hugging Face config.json describes.

    Args:
        data: The file.
        name: What to call the model, also in errors.

    Raises:
        ConfigError: as geometry_of().
    """
    if len(data) > _CONFIG_BYTES:
        raise ConfigError(f"{name}: more than {_CONFIG_BYTES} bytes: not a config.json")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not JSON ({error})") from error
    if isinstance(found, dict) and isinstance(found.get("text_config"), dict):
        found = found["text_config"]  # A multimodal model: its language model has the cache.
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: not a JSON object with a model's configuration")
    config = _Config(found, name)
    config.refuse_other_attention()
    layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    if found.get("kv_lora_rank") is None:
        width = config.count("head_dim", otherwise=config.hidden_size_of_a_head)
        kv_heads = config.count("num_key_value_heads", otherwise=lambda: heads)
        return Geometry(name, layers, heads, kv_heads, width, width)
    rope_width = config.count("qk_rope_head_dim")
    return Geometry(
        name,
        layers,
        heads,
        kv_heads=heads,
        key_width=config.count("qk_nope_head_dim") + rope_width,
        value_width=config.count("v_head_dim", otherwise=config.hidden_size_of_a_head),
        kv_lora_rank=config.count("kv_lora_rank"),
        rope_width=rope_width,
        indexer_width=config.count("index_head_dim", otherwise=lambda: 0),
    )


class _Config:
    """A configuration whose errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self._name = name

    def count(self, key: str, *, otherwise: Callable[[], int] | None = None) -> int:
        """A positive whole number; `otherwise()` where the key is absent or null."""
        value = self._values.get(key)
        if value is None and otherwise is not None:
            return otherwise()
        if value is None:
            raise ConfigError(f"{self._name}: {key} is missing")
        if type(value) is not int or not 0 < value <= _MOST:
            shown = repr(value)[:40]
            raise ConfigError(f"{self._name}: {key} is {shown}, not a number from 1 to {_MOST}")
        return value

    def hidden_size_of_a_head(self) -> int:
        """What models have that name no width of a head."""
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise ConfigError(
                f"{self._name}: no head_dim, and hidden_size {hidden} is no multiple of"
                f" num_attention_heads {heads}"
            )
        return hidden // heads

    def refuse_other_attention(self) -> None:
        """Raise ConfigError if some layers keep less than a record of each token."""
        other = sorted({*self._names("layer_types")} - _EVERY_TOKEN)
        other += [key for key in _OTHER_ATTENTION if self._values.get(key)]
        if "shared" in self._names("indexer_types") or self._values.get("index_topk_pattern"):
            other.append("layers that share an indexer")
        if self._values.get("index_topk_freq") not in (None, 1):
            other.append("index_topk_freq")
        if other:
            raise ConfigError(
                f"{self._name}: {', '.join(other)}: layers that don't keep one record of each"
                " token are not supported"
            )

    def _names(self, key: str) -> list[str]:
        """A list of names; empty where the key is absent or null."""
        value = self._values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{self._name}: {key} is not a list of names")
        return value
