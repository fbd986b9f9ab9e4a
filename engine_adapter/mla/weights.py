"""Loads a checkpoint's safetensors, after every tensor's name and shape has been checked.

Nothing is read before the whole checkpoint is known to fit the configuration, so a bad file is
reported in milliseconds, by name, and never as a shape error inside a matrix product.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_adapter.mla.config import ModelConfig
from engine_adapter.mla.fields import CheckpointError, read_json_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def weight_files(checkpoint_dir: Path) -> list[Path]:
    """The checkpoint's weight files: one, or the shards its index names.

    Raises:
        CheckpointError: neither file nor index, or a shard is missing.
    """
    index = checkpoint_dir / _INDEX
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{index}: no weight_map")
        files = sorted({checkpoint_dir / str(name) for name in weight_map.values()})
    else:
        files = [checkpoint_dir / _SINGLE]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such weight file")
    return files


def checkpoint_files(checkpoint_dir: Path) -> list[Path]:
    """The files whose content decides what a model computes: weights, and config.json.

    Both go into the namespace's weights revision: another epsilon or another number of experts a
    token, over the same weights, is another cache.

    Raises:
        CheckpointError: there are no safetensors, or one is missing.
    """
    return [*weight_files(checkpoint_dir), checkpoint_dir / "config.json"]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model needs."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in _attention_shapes(config).items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = shape
        for name, shape in _mlp_shapes(config, layer):
            shapes[f"{prefix}.mlp.{name}"] = shape
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.heads
    queries = heads * (config.nope_width + config.rope_width)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (config.record_width, hidden),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (heads * (config.nope_width + config.value_width), config.kv_lora_rank),
        "o_proj": (hidden, heads * config.value_width),
    }
    if config.q_lora_rank is None:
        shapes["q_proj"] = (queries, hidden)
    else:
        shapes["q_a_proj"] = (config.q_lora_rank, hidden)
        shapes["q_a_layernorm"] = (config.q_lora_rank,)
        shapes["q_b_proj"] = (queries, config.q_lora_rank)
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    moe = config.moe
    if moe is None or not moe.has_experts(layer):
        yield from _gated_mlp_shapes("", config.hidden_size, config.intermediate_size)
        return
    yield "gate.weight", (moe.experts, config.hidden_size)
    if moe.sigmoid:
        yield "gate.e_score_correction_bias", (moe.experts,)
    width = moe.intermediate_size
    for expert in range(moe.experts):
        yield from _gated_mlp_shapes(f"experts.{expert}.", config.hidden_size, width)
    if moe.shared_experts:
        width *= moe.shared_experts
        yield from _gated_mlp_shapes("shared_experts.", config.hidden_size, width)


def _gated_mlp_shapes(
    prefix: str, hidden: int, width: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)


def load_weights(
    checkpoint_dir: Path, config: ModelConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read every tensor the model needs.

    Args:
        checkpoint_dir: Holds model.safetensors, or model.safetensors.index.json and its shards.
        config: What the tensors must fit.
        dtype: What they are converted to. Routers stay float32: a rounded logit would send a
            token to another expert.

    Returns:
        Tensors by their name in the checkpoint.

    Raises:
        CheckpointError: a missing or damaged file; a missing, unexpected or quantised tensor; a
            wrong shape (with the expected and the found one).
    """
    expected = expected_shapes(config)
    homes = _locate(weight_files(checkpoint_dir), expected, config.layers)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, file in homes.items():
        by_file[file].append(name)
    weights: dict[str, Tensor] = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                keep = torch.float32 if ".mlp.gate." in name else dtype
                # Always a copy: a view of the file lies at any alignment, on which the bits of a
                # product may depend, and dies with the file.
                weights[name] = tensors.get_tensor(name).to(keep, copy=True)
    return weights


def _locate(
    files: list[Path], expected: Mapping[str, tuple[int, ...]], layers: int
) -> dict[str, Path]:
    """The file of each expected tensor, once all names, shapes and dtypes are right."""
    homes: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name in expected:
                        entry = tensors.get_slice(name)
                        found = tuple(entry.get_shape())
                        _check(file, name, expected[name], found, entry.get_dtype())
                        homes[name] = file
                    elif not _ignorable(name, layers):
                        raise CheckpointError(f"{file}: unexpected tensor {name}")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: can't be read: {error}") from error
    for name in expected:
        if name not in homes:
            raise CheckpointError(f"{files[0].parent}: missing tensor {name}")
    return homes


def _check(
    file: Path, name: str, expected: tuple[int, ...], found: tuple[int, ...], dtype: str
) -> None:
    if found != expected:
        raise CheckpointError(f"{file}: {name} has shape {found}, expected {expected}")
    if dtype not in _FLOATS:
        raise CheckpointError(f"{file}: {name} is {dtype}: quantised weights are not supported")


def _ignorable(name: str, layers: int) -> bool:
    """Stored by some exporters, not needed: MTP layers, rotary tables, a tied head's copy."""
    layer = _LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= layers
    return beyond or name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
