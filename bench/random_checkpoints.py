"""Checkpoints and adapters with random weights: real code paths, without a download.

    python -m bench.random_checkpoints DIR '{"name": {"kind": "deepseek_v3", "hidden_size": 128}}'

Needs transformers, which writes config.json and the weights' public names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048
SEED = 0
SPREAD = 0.15
"""Standard deviation of the weights: enough that answers depend on every token before."""


def deepseek_v3(directory: Path, **sizes: Any) -> None:
    """Write a DeepSeek-V3: MLA of 512 + 64, the first layer dense, then mixtures of experts.

    Args:
        directory: Made, and filled with config.json and model.safetensors.
        sizes: What shall differ from the small default, by the name in config.json.
    """
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": 4096,
    }
    config = DeepseekV3Config(
        **{
            **small,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "initializer_range": SPREAD,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            **sizes,
        }
    )
    config.num_key_value_heads = config.num_attention_heads
    _save(DeepseekV3ForCausalLM, config, directory)
    # vLLM takes V3's router for V2's without these two, which transformers does not write.
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(values, indent=2))


def llama(directory: Path, **sizes: Any) -> None:
    """Write a Llama with grouped-query attention; arguments as for deepseek_v3()."""
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    config = LlamaConfig(
        **{
            **small,
            "initializer_range": SPREAD,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            **sizes,
        }
    )
    _save(LlamaForCausalLM, config, directory)


def lora(directory: Path, *, base: str, seed: int, rank: int = 8) -> None:
    """Write a LoRA adapter of the attention's query and value projections, in PEFT's format.

    Args:
        directory: Made, and filled with adapter_config.json and adapter_model.safetensors.
        base: The Llama checkpoint's directory.
        seed: Other seeds are other adapters.
        rank: Of the update.
    """
    config: Any = LlamaConfig.from_pretrained(base)
    widths = {
        "q_proj": config.num_attention_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
    }
    torch.manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = SPREAD * torch.randn(rank, config.hidden_size)
            weights[f"{path}.lora_B.weight"] = SPREAD * torch.randn(width, rank)
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(values))


def _save(model: Any, config: Any, directory: Path) -> None:
    torch.manual_seed(SEED)
    directory.mkdir(parents=True)
    model(config).float().save_pretrained(directory)


if __name__ == "__main__":
    kinds: dict[str, Callable[..., None]] = {
        write.__name__: write for write in (deepseek_v3, llama, lora)
    }
    for directory, job in json.loads(sys.argv[2]).items():
        kinds[job.pop("kind")](Path(sys.argv[1]) / directory, **job)
