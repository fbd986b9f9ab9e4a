"""Multi-head latent attention over the paged cache, expanded and absorbed.

Both forms read the same cached records and differ only in the order of the same products
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C). Expanded: the latents become keys
and values of every head; cheaper for many queries. Absorbed: the queries are taken into the
latent space, where all heads share the record as key and value; cheaper for few queries.
The number of a span's queries alone chooses, so equal splits of a prompt give equal bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.mla.batch import Batch, Span
from engine_adapter.mla.config import ModelConfig
from engine_adapter.mla.paged_cache import PagedCache
from engine_adapter.mla.rope import rotate

_LATENT_NORM_EPS = 1e-6
"""DeepSeek's code and transformers norm both latents with this, whatever rms_norm_eps says."""


class Attention:
    """One layer's attention.

    Args:
        config: Sizes and softmax scale.
        weights: The checkpoint's tensors.
        layer: Index of the layer.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._config = config
        self._layer = layer
        self._kv_a = weights[f"{prefix}.kv_a_proj_with_mqa.weight"]
        self._kv_norm = weights[f"{prefix}.kv_a_layernorm.weight"]
        self._kv_b = weights[f"{prefix}.kv_b_proj.weight"]
        self._out = weights[f"{prefix}.o_proj.weight"]
        self._q_lora: tuple[Tensor, Tensor] | None = None
        if config.q_lora_rank is None:
            self._q = weights[f"{prefix}.q_proj.weight"]
        else:
            self._q = weights[f"{prefix}.q_b_proj.weight"]
            self._q_lora = (
                weights[f"{prefix}.q_a_proj.weight"],
                weights[f"{prefix}.q_a_layernorm.weight"],
            )
        per_head = self._kv_b.view(config.heads, -1, config.kv_lora_rank)
        self._key_up = per_head[:, : config.nope_width]  # (heads, nope, latent)
        self._value_up = per_head[:, config.nope_width :].transpose(1, 2)  # (heads, latent, value)

    def store(self, x: Tensor, rotation: Tensor, batch: Batch, cache: PagedCache) -> None:
        """Compute the records of all tokens of `batch` and write them to the cache.

        Args:
            x: (tokens, hidden), normed.
            rotation: (tokens, rope / 2) complex64.
            batch: Where each token's record belongs.
            cache: Written.
        """
        rank = self._config.kv_lora_rank
        projected = F.linear(x, self._kv_a)
        latent = F.rms_norm(projected[:, :rank], (rank,), self._kv_norm, _LATENT_NORM_EPS)
        records = torch.cat((latent, rotate(projected[:, rank:], rotation)), dim=-1)
        cache.write(self._layer, batch.pages, batch.offsets, records)

    def attend(
        self, x: Tensor, rotation: Tensor, spans: Sequence[Span], cache: PagedCache
    ) -> Tensor:
        """Attend from every token of `spans` to its sequence's records, its own included.

        Args:
            x: (tokens, hidden), normed; the rows of `spans`, one span after the other.
            rotation: (tokens, rope / 2) complex64.
            spans: What the rows are.
            cache: Read.

        Returns:
            (tokens, hidden).
        """
        nope = self._config.nope_width
        queries = self._queries(x).view(len(x), self._config.heads, -1).transpose(0, 1)
        q_nope, q_rope = queries[..., :nope], rotate(queries[..., nope:], rotation)
        outputs = []
        row = 0
        for span in spans:
            rows = slice(row, row + span.length)
            records = cache.read(self._layer, span.pages, span.end)
            absorb = span.length < self._config.absorbed_below_tokens
            form = self._absorbed if absorb else self._expanded
            outputs.append(form(q_nope[:, rows], q_rope[:, rows], records, span))
            row += span.length
        heads = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return F.linear(heads.transpose(0, 1).flatten(1), self._out)

    def _queries(self, x: Tensor) -> Tensor:
        if self._q_lora is not None:
            down, norm = self._q_lora
            x = F.rms_norm(F.linear(x, down), norm.shape, norm, _LATENT_NORM_EPS)
        return F.linear(x, self._q)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, records: Tensor, span: Span) -> Tensor:
        """Shapes (heads, queries, nope or rope) and (end, width) -> (heads, queries, value)."""
        q = torch.cat((q_nope @ self._key_up, q_rope), dim=-1) * self._config.softmax_scale
        # All heads share the records, so heads and queries make the rows of one plain product.
        scores = q.flatten(0, 1) @ records.T
        if span.length > 1:
            by_head = scores.view(len(q), span.length, span.end)
            by_head[..., span.start :].masked_fill_(span.future, -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(records.dtype)
        latents = weights @ records[:, : self._config.kv_lora_rank]
        return torch.bmm(latents.view(len(q), span.length, -1), self._value_up)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, records: Tensor, span: Span) -> Tensor:
        """The same shapes as _absorbed."""
        heads, value_width = self._config.heads, self._config.value_width
        rank, nope = self._config.kv_lora_rank, self._config.nope_width
        expanded = F.linear(records[:, :rank], self._kv_b)
        expanded = expanded.view(len(records), heads, -1).transpose(0, 1)
        queries = torch.cat((q_nope, q_rope), dim=-1)
        key_rope = records[:, rank:].expand(heads, -1, -1)
        keys = torch.cat((expanded[..., :nope], key_rope), dim=-1)
        # torch's fused CPU kernel wants values as wide as keys; zeros cost less than its fallback.
        values = F.pad(expanded[..., nope:], (0, max(0, keys.shape[-1] - value_width)))
        # It takes a fourth dimension, and skips the upper triangle only if told "causal".
        out = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=span.mask.to(queries.dtype) if span.start else None,
            is_causal=span.start == 0,
            scale=self._config.softmax_scale,
        )
        return out[0, ..., :value_width]
