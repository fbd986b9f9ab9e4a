"""A checkpoint that can't be served is refused by name, before anything is computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_adapter.mla import CheckpointError, MlaEngine, SamplingParams
from engine_adapter.mla.config import load_config
from tests.engine.reference import edit_config, save_model

KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.fixture
def checkpoint(tiny_mla: Path, tmp_path: Path) -> Path:
    """A copy of tiny-mla to damage."""
    directory = tmp_path / "copy"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_mla / name, directory)
    return directory


def rewrite(directory: Path, changes: dict[str, Tensor], drop: Sequence[str] = ()) -> None:
    """Change and drop tensors of model.safetensors."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
    path.unlink()  # load_file's tensors are views of the old file.
    save_file({**kept, **changes}, path)


def test_tiny_mla_is_read_as_its_readme_says(tiny_mla: Path) -> None:
    config = load_config(tiny_mla)
    assert (config.layers, config.hidden_size, config.heads) == (4, 320, 5)
    assert (config.kv_lora_rank, config.rope_width, config.record_width) == (512, 64, 576)
    assert config.max_tokens == 4096
    assert config.name == "tiny-mla"
    assert not any(config.has_experts(layer) for layer in range(4))


def test_softmax_scale_is_deepseek_v3s(checkpoint: Path) -> None:
    """0.13523 with V3's widths and YaRN; the break-even of its sizes is 171 tokens."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "mscale": 1.0}
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    edit_config(
        checkpoint,
        {"qk_nope_head_dim": 128, "v_head_dim": 128, "rope_parameters": yarn},
    )
    config = load_config(checkpoint)
    assert config.softmax_scale == pytest.approx(0.13523, abs=1e-5)
    assert config.absorbed_below_tokens == pytest.approx(171, abs=0.5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is absent: not a multi-head latent attention"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers must be an integer"),
        ({"v_head_dim": None}, "v_head_dim must be an integer of at least 1, found None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"first_k_dense_replace": 2, "num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_configuration_it_cannot_compute_is_refused(
    checkpoint: Path, changes: dict[str, object], complaint: str
) -> None:
    edit_config(checkpoint, changes)
    with pytest.raises(CheckpointError, match=complaint):
        MlaEngine(checkpoint)


def test_missing_and_damaged_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: can't be read"):
        MlaEngine(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such weight file"):
        MlaEngine(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read"):
        MlaEngine(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: can't be read"):
        MlaEngine(checkpoint)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    rewrite(checkpoint, {}, drop=[KV_B])
    with pytest.raises(CheckpointError, match=f"missing tensor {KV_B}"):
        MlaEngine(checkpoint)


def test_wrong_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    rewrite(checkpoint, {KV_B: torch.zeros(640, 511)})
    with pytest.raises(CheckpointError) as caught:
        MlaEngine(checkpoint)
    assert f"{KV_B} has shape (640, 511), expected (640, 512)" in str(caught.value)


def test_unexpected_and_quantised_tensors_are_refused(checkpoint: Path) -> None:
    bias = "model.layers.0.self_attn.o_proj.bias"
    rewrite(checkpoint, {bias: torch.zeros(320)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor {bias}"):
        MlaEngine(checkpoint)
    quantised = torch.zeros(640, 512, dtype=torch.int8)
    rewrite(checkpoint, {KV_B: quantised}, drop=[bias])
    with pytest.raises(CheckpointError, match=f"{KV_B} is I8"):
        MlaEngine(checkpoint)


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    """A multi-token prediction layer beyond the last layer is left alone."""
    directory = save_model(tmp_path / "whole", "v2-dense")
    prompt = [[5, 6, 7]]
    [whole] = MlaEngine(directory).generate(prompt, SamplingParams(max_tokens=1))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(3):
        part = {name: tensors[name] for name in names[shard::3]}
        save_file(part, directory / f"part-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{shard}.safetensors")
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    [sharded] = MlaEngine(directory).generate(prompt, SamplingParams(max_tokens=1))
    assert torch.equal(whole.first_logits, sharded.first_logits)
    (directory / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1\.safetensors: no such weight file"):
        MlaEngine(directory)


def test_unknown_dtype_is_refused(tiny_mla: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        MlaEngine(tiny_mla, dtype=torch.float64)
