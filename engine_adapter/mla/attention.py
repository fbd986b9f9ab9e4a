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
from engine_adapter.mla.paged_cache import PAGE_TOKENS, PagedCache
from engine_adapter.mla.rope import rotate

_LATENT_NORM_EPS = 1e-6
"""DeepSeek's code and transformers norm both latents with this, whatever rms_norm_eps says."""

_QUERY_BLOCK = 128
"""Queries attended at once in the expanded form.

It bounds the scores' memory and skips most of the triangle behind the diagonal; on a 2-core CPU
this is 20 % faster than torch's fused kernel (2,000 tokens, 5 heads, float32).
"""


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
            records = cache.read(self._layer, span.pages)
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
        """(heads, queries, nope | rope) and (pages, 64, width) -> (heads, queries, value)."""
        q = torch.cat((q_nope @ self._key_up, q_rope), dim=-1) * self._config.softmax_scale
        # All heads share the records, so heads and queries make the rows of one plain product.
        rows = len(q) * span.length
        scores = torch.matmul(q.view(rows, -1), records.transpose(1, 2))
        scores = scores.transpose(0, 1).reshape(len(q), span.length, -1)[..., : span.end]
        weights = _softmax(scores, span.start)
        latents = self._weighted_sum(weights.view(rows, -1), records)
        return torch.bmm(latents.view(len(q), span.length, -1), self._value_up)

    def _weighted_sum(self, weights: Tensor, records: Tensor) -> Tensor:
        """(rows, end) and (pages, 64, width) -> (rows, latent).

        Page by page, because a view of the pages has gaps. The last page's unwritten records stay
        out of it: they may hold anything, and zero times NaN is NaN.
        """
        rank = self._config.kv_lora_rank
        full, rest = divmod(weights.shape[1], PAGE_TOKENS)
        head = weights[:, : full * PAGE_TOKENS].view(len(weights), full, PAGE_TOKENS)
        latents = torch.bmm(head.transpose(0, 1), records[:full, :, :rank]).sum(dim=0)
        if rest:
            latents += weights[:, -rest:] @ records[full, :rest, :rank]
        return latents

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, records: Tensor, span: Span) -> Tensor:
        """The same shapes as _absorbed."""
        heads, rank, nope = self._config.heads, self._config.kv_lora_rank, self._config.nope_width
        records = records.flatten(0, 1)[: span.end]
        expanded = F.linear(records[:, :rank], self._kv_b)
        expanded = expanded.view(len(records), heads, -1).transpose(0, 1)
        keys = torch.cat((expanded[..., :nope], records[:, rank:].expand(heads, -1, -1)), dim=-1)
        values = expanded[..., nope:]
        queries = torch.cat((q_nope, q_rope), dim=-1) * self._config.softmax_scale
        outputs: list[Tensor] = []
        for row in range(0, span.length, _QUERY_BLOCK):
            block = queries[:, row : row + _QUERY_BLOCK]
            start = span.start + row
            end = start + block.shape[1]
            scores = torch.bmm(block, keys[:, :end].transpose(1, 2))
            outputs.append(torch.bmm(_softmax(scores, start), values[:, :end]))
        return torch.cat(outputs, dim=1)


def _softmax(scores: Tensor, start: int) -> Tensor:
    """Probabilities of (heads, queries, end) scores, the first query at position `start`.

    The scores are overwritten.
    """
    count = scores.shape[1]
    if count > 1:
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores[..., start:].masked_fill_(future, -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
