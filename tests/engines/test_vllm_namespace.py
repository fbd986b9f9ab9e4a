"""What vLLM's model is called in kvtier, from vLLM's own configuration; no engine is started."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_adapter.mla.config import load_config
from engine_adapter.mla.prefix_cache import namespace_spec
from engine_adapter.mla.weights import checkpoint_files
from engine_adapter.vllm.request_identity import Unidentified
from engine_adapter.vllm.settings import Settings
from kvtier.errors import ConfigError
from kvtier.hashing import namespace_digest
from kvtier.types import NamespaceSpec
from tests.engines.vllm_engine import TINY_MLA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, and torch's.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from engine_adapter.vllm.model_identity import cache_geometry, model_namespace

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = Settings()


def config_of(model: Path, **options: Any) -> Any:
    """vLLM's configuration for a checkpoint, as its engine would make it."""
    values = {"dtype": "float32", "max_model_len": 1024, "skip_tokenizer_init": True, **options}
    return EngineArgs(model=str(model), **values).create_engine_config()


def groups(*specs: Any) -> KVCacheConfig:
    """A cache of one group for each spec, of four layers, whose names vLLM gives in any order."""
    names = [f"model.layers.{index}.self_attn.attn" for index in (2, 0, 3, 1)]
    return KVCacheConfig(8, [], [KVCacheGroupSpec(names, spec) for spec in specs])


def mla(dtype: torch.dtype = torch.float32, **options: Any) -> KVCacheConfig:
    """MLA's cache: pages of 16 records."""
    return groups(
        MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=dtype, **options)
    )


def gqa(block_size: int = 64, **options: Any) -> KVCacheConfig:
    """Two heads of keys and values."""
    sizes = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return groups(FullAttentionSpec(block_size=block_size, **{**sizes, **options}))


def named(config: Any, cache: KVCacheConfig, settings: Settings = SETTINGS) -> NamespaceSpec:
    geometry = cache_geometry(config, cache, settings.block_tokens)
    return model_namespace(config, cache, geometry, settings)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return config_of(TINY_MLA)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """tiny-mla in a directory of the same name."""
    return Path(shutil.copytree(TINY_MLA, tmp_path / TINY_MLA.name))


def edit(checkpoint: Path, **values: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_mla_model_is_called_as_by_kvtiers_own_engine(tiny: Any) -> None:
    own = namespace_spec(load_config(TINY_MLA), checkpoint_files(TINY_MLA), torch.float32)
    assert named(tiny, mla()) == own
    geometry = cache_geometry(tiny, mla(), 64)
    assert [name.split(".")[2] for name in geometry.layers] == ["0", "1", "2", "3"]
    assert geometry.pages_per_block == 4
    assert geometry.replicated


def test_whatever_changes_the_bytes_changes_the_name(tiny: Any, copy: Path) -> None:
    """User report 2."""
    specs = {
        "as it is": named(tiny, mla()),
        "compute dtype": named(config_of(TINY_MLA, dtype="bfloat16"), mla(torch.bfloat16)),
        "half of it": named(config_of(TINY_MLA, dtype="float16"), mla(torch.float16)),
        "cache dtype": named(tiny, mla(torch.uint8, cache_dtype_str="fp8_ds_mla")),
        "overrides": named(config_of(TINY_MLA, hf_overrides={"rms_norm_eps": 1e-3}), mla()),
        "tenant": named(tiny, mla(), Settings(tenant="red")),
        "block tokens": named(tiny, mla(), Settings(block_tokens=128)),
        "layout": named(tiny, gqa()),
        "heads": named(tiny, gqa(num_kv_heads=4)),
        "page": named(tiny, gqa(block_size=32)),
    }
    edit(copy, rms_norm_eps=1e-5)
    specs["config.json"] = named(config_of(copy), mla())
    edit(copy, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    specs["rope"] = named(config_of(copy), mla())
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    specs["rope and weights"] = named(config_of(copy), mla())
    digests = {namespace_digest(spec) for spec in specs.values()}
    assert len(digests) == len(specs), specs


def served_as(checkpoint: Path, **options: Any) -> Any:
    """tiny-mla with the config.json of another directory."""
    return config_of(TINY_MLA, hf_config_path=str(checkpoint), **options)


def test_what_vllm_is_told_beside_the_checkpoint_changes_the_name(tiny: Any, copy: Path) -> None:
    fp8, other = {"linear": "fp8_per_tensor"}, {"linear": "fp8_per_block"}
    online = {"dtype": "bfloat16", "quantization": "online"}
    lora = {"enable_lora": True, "max_lora_rank": 8}
    specs = {
        "as it is": named(tiny, mla()),
        "quantized": named(config_of(TINY_MLA, **online, quantization_config=fp8), mla()),
        "otherwise": named(config_of(TINY_MLA, **online, quantization_config=other), mla()),
        "but for some": named(
            config_of(TINY_MLA, **online, quantization_config={**fp8, "ignore": ["*.0.*"]}), mla()
        ),
        "modules": named(config_of(TINY_MLA, **lora, lora_target_modules=["q_proj"]), mla()),
        "adapter dtype": named(config_of(TINY_MLA, **lora, lora_dtype="bfloat16"), mla()),
        "implementation": named(config_of(TINY_MLA, model_impl="transformers"), mla()),
    }
    edit(copy, rms_norm_eps=1e-3)
    specs["another config.json"] = named(served_as(copy), mla())
    edit(copy, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    specs["and other rope"] = named(served_as(copy), mla())
    digests = {namespace_digest(spec) for spec in specs.values()}
    assert len(digests) == len(specs), specs


def test_an_equal_config_json_elsewhere_and_lora_as_usual_change_nothing(
    tiny: Any, copy: Path
) -> None:
    assert named(served_as(copy), mla()) == named(tiny, mla())
    lora = config_of(TINY_MLA, enable_lora=True, max_lora_rank=16, max_loras=2)
    assert named(lora, mla()) == named(tiny, mla())


def test_the_longest_request_counts_where_rope_depends_on_it(copy: Path) -> None:
    """longrope: vLLM takes the long factors for every request as soon as one may need them."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 512,
        "factor": 8.0,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
    }
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
        "head_dim": 64,
    }
    config = copy / "config.json"

    def specs() -> set[bytes]:
        lengths = (config_of(copy, max_model_len=tokens) for tokens in (512, 1024))
        return {namespace_digest(named(of_length, gqa())) for of_length in lengths}

    config.write_text(json.dumps({**llama, "rope_parameters": rope}))
    assert len(specs()) == 2
    config.write_text(json.dumps(llama))
    assert len(specs()) == 1


def test_where_a_checkpoint_lies_does_not_matter(tiny: Any, copy: Path) -> None:
    assert named(config_of(copy), mla()) == named(tiny, mla())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"load_format": "dummy"}, "dummy"),
        ({"hf_overrides": lambda config: config}, "code"),
    ],
)
def test_what_can_not_be_named_is_unidentified(options: dict[str, Any], word: str) -> None:
    with pytest.raises(Unidentified, match=word):
        named(config_of(TINY_MLA, **options), mla())


def test_a_checkpoint_without_safetensors_is_unidentified(copy: Path) -> None:
    config = config_of(copy)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(Unidentified, match=r"model\.safetensors"):
        named(config, mla())


def test_blocks_that_do_not_divide_are_refused_with_the_fix(tiny: Any) -> None:
    with pytest.raises(ConfigError, match='set "block_tokens": 128'):
        cache_geometry(tiny, gqa(block_size=128), 64)
    with pytest.raises(ConfigError, match='set "block_tokens": 80'):
        cache_geometry(tiny, mla(), 70)
    assert cache_geometry(tiny, gqa(block_size=128), 256).pages_per_block == 2


def test_blocks_that_no_request_fills_are_refused(tiny: Any) -> None:
    assert cache_geometry(tiny, mla(), 1024).pages_per_block == 64
    with pytest.raises(ConfigError, match="more than --max-model-len 1024"):
        cache_geometry(tiny, mla(), 1024 + 16)


def test_caches_that_kvtier_can_not_keep_stop_the_start(tiny: Any) -> None:
    window = SlidingWindowSpec(
        block_size=64, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=128
    )
    full = gqa().kv_cache_groups[0].kv_cache_spec
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        cache_geometry(tiny, groups(window), 64)
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        cache_geometry(tiny, groups(full, window), 64)
    with pytest.raises(ConfigError, match="non-causal"):
        cache_geometry(tiny, gqa(non_causal=True), 64)


@pytest.mark.parametrize(
    "option",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_parallelism_that_divides_a_block_stops_the_start(tiny: Any, option: str) -> None:
    before = getattr(tiny.parallel_config, option)
    setattr(tiny.parallel_config, option, 2)
    try:
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} 2"):
            cache_geometry(tiny, mla(), 64)
    finally:
        setattr(tiny.parallel_config, option, before)
