"""The oracle: transformers' own DeepSeek models, eager attention, float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 40,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
}
MOE = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 36,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-dense": ("v2", {}),
    "v2-tied": ("v2", {"tie_word_embeddings": True}),
    "v2-moe-greedy": ("v2", {**MOE, "topk_method": "greedy", "routed_scaling_factor": 1.7}),
    "v2-moe-groups": ("v2", {**MOE, "topk_method": "group_limited_greedy"}),
    "v2-yarn": ("v2", {"rope_parameters": {**YARN, "mscale_all_dim": 0}}),
    "v3-dense": ("v3", {}),
    "v3-moe": ("v3", {**MOE, "routed_scaling_factor": 2.5, "norm_topk_prob": True}),
    "v3-moe-unnormalised": ("v3", {**MOE, "norm_topk_prob": False}),
    "v3-moe-yarn": ("v3", {**MOE, "rope_parameters": YARN}),
}
"""Random small models: family, and what differs from SMALL."""


def save_model(directory: Path, case: str, seed: int = 0) -> Path:
    """Write a random model's checkpoint and return its directory."""
    family, changes = CASES[case]
    settings = {**SMALL, **changes}
    torch.manual_seed(seed)
    model: DeepseekV2ForCausalLM | DeepseekV3ForCausalLM
    if family == "v2":
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**settings))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**settings))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Larger than transformers' own start, so that every part moves the logits.
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.2)
            elif tensor.ndim == 1 and "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim > 1:
                tensor.normal_(std=2.0 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, changes: dict[str, object], drop: Sequence[str] = ()) -> None:
    """Change and drop keys of a saved config.json."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    values.update(changes)
    for key in drop:
        del values[key]
    path.write_text(json.dumps(values))


class Reference:
    """transformers' model of a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """(tokens, vocabulary) float32."""
        with torch.no_grad():
            logits: Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits
