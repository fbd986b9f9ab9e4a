"""The decoder: embedding, layers, and the logits of each span's last token."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from engine_adapter.mla.attention import Attention
from engine_adapter.mla.batch import Batch
from engine_adapter.mla.config import ModelConfig
from engine_adapter.mla.mlp import build_mlp
from engine_adapter.mla.paged_cache import PagedCache
from engine_adapter.mla.rope import Rope


class Layer:
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self._eps = config.norm_eps
        self._attention_norm = weights[f"{prefix}.input_layernorm.weight"]
        self._mlp_norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        self._attention = Attention(config, weights, layer)
        self._mlp = build_mlp(config, weights, layer)

    def __call__(
        self, x: Tensor, rotation: Tensor, batch: Batch, cache: PagedCache, *, last_rows: bool
    ) -> Tensor:
        """Write the records of all tokens, compute the outputs that are wanted.

        Args:
            x: (tokens, hidden).
            rotation: (tokens, rope / 2) complex64.
            batch: What the rows are.
            cache: Read and written.
            last_rows: Only each span's last token goes on: (spans, hidden) is returned.

        Returns:
            (tokens, hidden), or (spans, hidden).
        """
        normed = F.rms_norm(x, x.shape[-1:], self._attention_norm, self._eps)
        self._attention.store(normed, rotation, batch, cache)
        spans = batch.spans
        if last_rows and len(spans) < len(x):
            rows = batch.last_rows
            x, normed, rotation = x[rows], normed[rows], rotation[rows]
            spans = [span.last() for span in spans]
        x = x + self._attention.attend(normed, rotation, spans, cache)
        return x + self._mlp(F.rms_norm(x, x.shape[-1:], self._mlp_norm, self._eps))


class Model:
    """An MLA language model on the CPU.

    Args:
        config: Sizes.
        weights: weights.load_weights' result; kept, not copied where it is used as it is.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [Layer(config, weights, layer) for layer in range(config.layers)]
        self._norm = weights["model.norm.weight"]
        self._norm_eps = config.norm_eps
        self._head = self._embedding if config.tied_embeddings else weights["lm_head.weight"]
        self._rope = Rope(config.rope, config.rope_width)

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedCache) -> Tensor:
        """Compute a batch and write its records to the cache.

        The last layer's queries and MLP are computed for each span's last token alone: nobody
        reads the others' outputs, only their records.

        Args:
            token_ids: (tokens,) int64.
            batch: Where each token belongs; all earlier records of its sequences are cached.
            cache: Read and written.

        Returns:
            (spans, vocabulary) float32, the logits behind each span's last token.
        """
        x = F.embedding(token_ids, self._embedding)
        rotation = self._rope.rotation(batch.positions)
        final = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation, batch, cache, last_rows=index == final)
        x = F.rms_norm(x, x.shape[-1:], self._norm, self._norm_eps)
        return F.linear(x, self._head).float()
