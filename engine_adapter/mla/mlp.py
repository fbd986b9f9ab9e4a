"""The gated MLP, and the mixture of such MLPs with DeepSeek's two routers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.mla.config import ModelConfig, MoeConfig


class Mlp:
    """down(silu(gate(x)) * up(x)).

    Args:
        weights: The checkpoint's tensors.
        prefix: The MLP's name in the checkpoint.
    """

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        # One product instead of two: the difference is felt in decoding, where calls cost most.
        self._gate_up = torch.cat(
            (weights[f"{prefix}.gate_proj.weight"], weights[f"{prefix}.up_proj.weight"])
        )
        self._down = weights[f"{prefix}.down_proj.weight"]

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        gate, up = F.linear(x, self._gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._down)


class Router:
    """Chooses each token's experts and their weights, in float32.

    Softmax scores (V2) or sigmoid scores with a bias that only takes part in the choice (V3,
    arXiv 2412.19437, section 2.1.2). With groups, the best groups are chosen first.
    """

    def __init__(self, config: MoeConfig, weights: Mapping[str, Tensor], prefix: str) -> None:
        self._config = config
        self._weight = weights[f"{prefix}.weight"]
        self._bias = weights[f"{prefix}.e_score_correction_bias"] if config.sigmoid else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, hidden) -> weights float32 and experts int64, both (tokens, per token)."""
        logits = F.linear(x.float(), self._weight)
        scores = logits.sigmoid() if self._config.sigmoid else logits.softmax(dim=-1)
        choice = scores if self._bias is None else scores + self._bias
        if self._config.groups > 1:
            choice = self._within_best_groups(choice)
        experts = choice.topk(self._config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self._config.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self._config.scale, experts

    def _within_best_groups(self, choice: Tensor) -> Tensor:
        grouped = choice.view(len(choice), self._config.groups, -1)
        group_scores = grouped.topk(self._config.group_score_experts, dim=-1).values.sum(dim=-1)
        best = group_scores.topk(self._config.groups_per_token, dim=-1).indices
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        return torch.masked_fill(grouped, excluded[..., None], -torch.inf).flatten(1)


class MixtureOfExperts:
    """Routed experts, weighted, plus the shared one."""

    def __init__(self, config: MoeConfig, weights: Mapping[str, Tensor], prefix: str) -> None:
        self._router = Router(config, weights, f"{prefix}.gate")
        self._experts = [Mlp(weights, f"{prefix}.experts.{n}") for n in range(config.experts)]
        self._shared = Mlp(weights, f"{prefix}.shared_experts") if config.shared_experts else None

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden)."""
        weights, experts = self._router(x)
        out = torch.zeros_like(x) if self._shared is None else self._shared(x)
        for expert in sorted(set(experts.flatten().tolist())):
            rows, slots = torch.where(experts == expert)
            result = self._experts[expert](x[rows]) * weights[rows, slots, None]
            out.index_add_(0, rows, result.to(x.dtype))
        return out


def build_mlp(
    config: ModelConfig, weights: Mapping[str, Tensor], layer: int
) -> Mlp | MixtureOfExperts:
    """The MLP of a layer, dense or mixed as the configuration says."""
    prefix = f"model.layers.{layer}.mlp"
    if config.moe is not None and config.moe.has_experts(layer):
        return MixtureOfExperts(config.moe, weights, prefix)
    return Mlp(weights, prefix)
