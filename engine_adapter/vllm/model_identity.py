"""The namespace of the model that vLLM serves, and the shape of its cache.

Everything that decides the bytes of a block is in the namespace; where that is not possible, the
model is not cached (Unidentified) or kvtier is the wrong choice for it (ConfigError).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
import vllm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.transformers_utils.config import get_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
)

from engine_adapter.mla.config import checkpoint_name, rope_config
from engine_adapter.mla.fields import CheckpointError, Fields, read_json_object
from engine_adapter.mla.weights import checkpoint_files
from engine_adapter.namespaces import latent_rope, mla_namespace, rotary
from engine_adapter.vllm.paging import Geometry
from engine_adapter.vllm.request_identity import Unidentified
from engine_adapter.vllm.settings import Settings
from kvtier.errors import ConfigError
from kvtier.hashing import weights_revision
from kvtier.types import Component, NamespaceSpec, RopeSpec

_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer")
"""Values of --load-format that load the checkpoint's safetensors, unchanged."""

_NOT_COMPUTED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})
"""Keys of a resolved configuration that say where it is from; the dtype is in the component."""

_LENGTH_DEPENDENT_ROPE = "longrope"


def cache_geometry(
    vllm_config: VllmConfig, cache_config: KVCacheConfig, block_tokens: int
) -> Geometry:
    """What the cache looks like, on this rank.

    Raises:
        ConfigError: a cache that kvtier can't keep, or block sizes that don't fit; the message
            says what to change.
    """
    parallel = vllm_config.parallel_config
    for name, size in (
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise ConfigError(f"kvtier does not support {name} {size}: set it to 1")
    if len(cache_config.kv_cache_groups) != 1:
        raise ConfigError(
            f"kvtier keeps one kind of KV cache, and this model has"
            f" {len(cache_config.kv_cache_groups)} groups: if all its layers are attention, set"
            " --disable-hybrid-kv-cache-manager"
        )
    [group] = cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise ConfigError(f"kvtier does not support a KV cache of kind {type(spec).__name__}")
    if spec.tokens_per_state != 1 or spec.non_causal:
        raise ConfigError("kvtier does not support compressed or non-causal KV caches")
    if block_tokens % spec.block_size:
        fitting = -(-block_tokens // spec.block_size) * spec.block_size
        raise ConfigError(
            f"block_tokens {block_tokens} is not a multiple of vLLM's block size"
            f' {spec.block_size}: set "block_tokens": {fitting} in kv_connector_extra_config'
        )
    longest = vllm_config.model_config.max_model_len
    if block_tokens > longest:
        raise ConfigError(
            f"block_tokens {block_tokens} is more than --max-model-len {longest}: no request would"
            ' ever fill a block; set a smaller "block_tokens" in kv_connector_extra_config'
        )
    return Geometry(
        layers=tuple(sorted(group.layer_names, key=_layer_order)),
        page_tokens=spec.block_size,
        page_bytes=spec.unpadded_page_size_bytes,
        pages_per_block=block_tokens // spec.block_size,
        ranks=parallel.tensor_parallel_size,
        replicated=isinstance(spec, MLAAttentionSpec),
    )


def _layer_order(name: str) -> tuple[int, str]:
    return extract_layer_index(name), name


def model_namespace(
    vllm_config: VllmConfig, cache_config: KVCacheConfig, geometry: Geometry, settings: Settings
) -> NamespaceSpec:
    """The model's namespace; where the cache is sharded, namespaces.rank_namespace()
    makes it a rank's.

    Reads the checkpoint on a host's first call (kvtier.hashing.weights_revision remembers).

    Raises:
        Unidentified: the model can't be told from others by content.
    """
    model = vllm_config.model_config
    checkpoint = _checkpoint_dir(vllm_config)
    try:
        values = read_json_object(checkpoint / "config.json")
        revision = weights_revision(checkpoint_files(checkpoint))
    except (CheckpointError, OSError) as error:
        raise Unidentified(f"its checkpoint can't be identified: {error}") from error
    fields = Fields(values, str(checkpoint / "config.json"))
    local = Path(model.model).is_dir()
    name = checkpoint_name(fields, checkpoint) if local else model.model
    revision = _with_variation(revision, _variation(vllm_config, checkpoint))
    component = _component(vllm_config, cache_config, geometry, settings.block_tokens)
    if geometry.replicated:
        rope = _mla_rope(model, fields)
        return mla_namespace(name, revision, component, rope, settings.tenant)
    return NamespaceSpec(
        model_id=name,
        weights_revision=revision,
        components=(component,),
        rope=RopeSpec("none", 0, _raw_rope(values)),
        block_tokens=settings.block_tokens,
        tenant=settings.tenant,
    )


def _checkpoint_dir(vllm_config: VllmConfig) -> Path:
    """Where the weights are: a directory, or a repository's snapshot in the hub's cache."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    if load.load_format not in _FORMATS:
        raise Unidentified(f"--load-format {load.load_format} says nothing about its weights")
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=load.download_dir,
                local_files_only=True,
                allow_patterns=["*.safetensors", "*.json"],
            )
        )
    except (LocalEntryNotFoundError, ValueError) as error:
        raise Unidentified(f"{model.model} is no directory and no snapshot: {error}") from error


def _variation(vllm_config: VllmConfig, checkpoint: Path) -> dict[str, object]:
    """What vLLM was told that changes what it computes from the same checkpoint.

    Empty where vLLM computes what config.json says: then blocks are shared with other engines.
    """
    model = vllm_config.model_config
    variation: dict[str, object] = {}
    if model.hf_overrides:
        if not isinstance(model.hf_overrides, Mapping):
            raise Unidentified("hf_overrides is code")
        variation["hf_overrides"] = dict(model.hf_overrides)
    served = _computed(model.hf_config.to_dict())
    if served != _computed(_config_of(checkpoint, model)):
        variation["config"] = served
    if model.quantization is not None:
        told = model.quantization_config
        if told is not None and not isinstance(told, Mapping):
            told = dataclasses.asdict(told)
        # The checkpoint's own may be in a file beside config.json.
        variation["quantization"] = [model.quantization, told, served.get("quantization_config")]
    if vllm_config.speculative_config is not None:
        variation["speculative"] = _drafter(vllm_config)
    rope = served.get("rope_parameters"), model.hf_text_config.to_dict().get("rope_parameters")
    if _LENGTH_DEPENDENT_ROPE in _strings(rope):
        # vLLM takes the long or the short factors for all requests, by this.
        variation["max_model_len"] = model.max_model_len
    return variation | _other_options(vllm_config)


def _other_options(vllm_config: VllmConfig) -> dict[str, object]:
    """Options that are in no config.json, where they are not as they are by default."""
    model, lora, media = (
        vllm_config.model_config,
        vllm_config.lora_config,
        vllm_config.model_config.multimodal_config,
    )
    options: dict[str, tuple[object, object]] = {
        "model_impl": (model.model_impl, "auto"),
        "model_class_overrides": (model.model_class_overrides, {}),
        "disable_sliding_window": (model.disable_sliding_window, False),
        "skip_layers": (vllm_config.cache_config.kv_cache_dtype_skip_layers, []),
    }
    if lora is not None:
        options |= {
            "lora_dtype": (lora.lora_dtype, model.dtype),
            "lora_target_modules": (lora.target_modules, None),
            "lora_tower": (lora.enable_tower_connector_lora, False),
            "lora_moe_shared": (lora.enable_moe_shared_loras, False),
            "lora_moe_mixed": (lora.enable_mixed_moe_lora_format, False),
        }
    if media is not None:
        options |= {
            "mm_processor_kwargs": (media.mm_processor_kwargs or None, None),
            "mm_encoder_attn_dtype": (media.mm_encoder_attn_dtype, None),
            "video_pruning": (
                [media.video_pruning_rate or 0.0, media.video_pruning_method],
                [0.0, media.video_pruning_method],
            ),
        }
    return {name: value for name, (value, usual) in options.items() if value != usual}


def _config_of(checkpoint: Path, model: ModelConfig) -> dict[str, object]:
    """What vLLM makes of the checkpoint's config.json, if it is told nothing else."""
    try:
        config = get_config(checkpoint, model.trust_remote_code, config_format="hf")
    except (OSError, ValueError) as error:
        raise Unidentified(f"vLLM can't read its config.json: {error}") from error
    values: dict[str, object] = config.to_dict()
    return values


def _computed(config: Mapping[str, object]) -> dict[str, object]:
    """A model's configuration without the keys that say where it is from, or that are elsewhere."""
    return {
        key: _computed(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _NOT_COMPUTED
    }


def _strings(value: object) -> set[str]:
    """All texts in a value of JSON, without keys."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return set()
    return {text for item in value for text in _strings(item)}


def _drafter(vllm_config: VllmConfig) -> object:
    """What of speculative decoding is in the cache: the layers of the draft model."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    if draft is None:
        return speculative.method
    if not Path(draft.model).is_dir():
        raise Unidentified("its draft model is no directory")
    try:
        return [speculative.method, weights_revision(checkpoint_files(Path(draft.model)))]
    except (CheckpointError, OSError) as error:
        raise Unidentified(f"its draft model can't be identified: {error}") from error


def _with_variation(revision: str, variation: Mapping[str, object]) -> str:
    if not variation:
        return revision
    try:
        text = json.dumps(variation, sort_keys=True, default=_dtype_name)
    except TypeError as error:
        raise Unidentified(f"its configuration has values that are code: {error}") from error
    return hashlib.sha256(f"kvtier.vllm.variation.v1\n{revision}\n{text}".encode()).hexdigest()


def _dtype_name(value: object) -> str:
    """For JSON, of the one kind of value in configurations that has no form there."""
    if isinstance(value, torch.dtype):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _component(
    vllm_config: VllmConfig, cache_config: KVCacheConfig, geometry: Geometry, block_tokens: int
) -> Component:
    [group] = cache_config.kv_cache_groups
    spec, layers = group.kv_cache_spec, len(geometry.layers)
    compute = str(vllm_config.model_config.dtype).removeprefix("torch.")
    stored = vllm_config.cache_config.cache_dtype
    if geometry.replicated:
        plain = spec.head_size * spec.dtype.itemsize * spec.block_size == geometry.page_bytes
        if plain and spec.dtype == vllm_config.model_config.dtype:
            return latent_rope(layers, block_tokens, spec.head_size, spec.dtype)
        record_bytes = geometry.page_bytes // spec.block_size
        shape = (layers, block_tokens, record_bytes)
        return Component(f"latent_rope.{stored}.{compute}", "uint8", shape)
    # Opaque: how a page is packed is a matter of vLLM's version and the machine.
    backend = vllm_config.attention_config.backend
    packing = [
        f"vllm-{vllm.__version__}",
        _machine(),
        backend.name if backend is not None else "auto",
        str(cache_config.kv_cache_layout),
    ]
    kind = f"kv.{'.'.join(packing)}.{stored}.{compute}.{spec.num_kv_heads}x{spec.head_size}"
    shape = (layers, geometry.pages_per_block, geometry.page_bytes)
    return Component(kind, "uint8", shape)


def _machine() -> str:
    """What of the machine decides how vLLM packs keys and values."""
    if torch.cuda.is_available():
        return f"cuda{''.join(map(str, torch.cuda.get_device_capability()))}"
    return f"cpu-{torch.backends.cpu.get_cpu_capability()}"


def _mla_rope(model: ModelConfig, fields: Fields) -> RopeSpec:
    """As every MLA engine names it; a scaling that only vLLM computes by its raw keys."""
    width = model.hf_text_config.qk_rope_head_dim
    try:
        return rotary(width, rope_config(fields))
    except CheckpointError:
        scaling = fields.get("rope_parameters") or fields.get("rope_scaling")
        return RopeSpec("interleaved", width, (("raw", json.dumps(scaling, sort_keys=True)),))


def _raw_rope(values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    keys = ("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta")
    return tuple((key, json.dumps(values[key], sort_keys=True)) for key in keys if values.get(key))
