"""What a codec does to a model's answers: every cached record goes through it, text stays given.

Teacher forced: the model reads real text, and behind each token its distribution of the next one is
compared with that of the exact run, whose records are bfloat16 as they come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bench.common import progress
from kvtier.codec import encode_block
from kvtier.codec.base import Bytes, Codec
from kvtier.types import Component, Loss, NamespaceSpec, RopeSpec

PAGE_TOKENS = 64
Through = Callable[[int, Tensor], Tensor]
"""What becomes of one layer's records: (layer, (tokens, width) float32) -> the same shape."""


class ReferenceModel(ABC):
    """A model, real text that it has not seen, and a hook in its cache.

    Attributes:
        name: Key of its results.
        layers: How many have a cache.
        width: Elements of a record.
        rope_width: Of these, the rotary key, at the end.
        sequences: Token ids, all of equal length, a multiple of 64.
    """

    name: str
    layers: int
    width: int
    rope_width: int
    sequences: Sequence[Sequence[int]]

    @abstractmethod
    def log_probabilities(self, token_ids: Sequence[int], through: Through) -> Tensor:
        """Read a sequence with all records passed through `through`.

        Returns:
            (tokens, vocabulary) float32, of the token behind each.
        """

    def spec(self, layers: int) -> NamespaceSpec:
        """Blocks of 64 tokens' bfloat16 records."""
        rope = RopeSpec("interleaved", self.rope_width) if self.rope_width else RopeSpec()
        shape = (layers, PAGE_TOKENS, self.width)
        component = Component("latent_rope", "bfloat16", shape)
        return NamespaceSpec(self.name, "benchmark", (component,), rope)


@dataclass
class Comparison:
    """What is known of one codec on one model so far.

    Attributes:
        kl: For each sequence, (tokens,) Kullback-Leibler divergence from the exact run, nats.
        same_top: For each sequence, (tokens,) bool: the most likely token is the same.
        nll_change: Mean change of the text's negative log likelihood, one number a sequence.
        stored_bytes: Of each block.
        spec: Of a block.
    """

    spec: NamespaceSpec
    kl: list[Tensor] = field(default_factory=list)
    same_top: list[Tensor] = field(default_factory=list)
    nll_change: list[float] = field(default_factory=list)
    stored_bytes: list[int] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], exact: Tensor, lossy: Tensor) -> None:
        """Take one sequence's log probabilities, (tokens, vocabulary) each."""
        self.kl.append((exact.exp() * (exact - lossy)).sum(dim=-1))
        self.same_top.append(exact.argmax(dim=-1) == lossy.argmax(dim=-1))
        following = torch.tensor(token_ids[1:])[:, None]
        self.nll_change.append(float((exact - lossy)[:-1].gather(1, following).mean()))

    def results(self) -> dict[str, float]:
        """The figures of the benchmark."""
        (component,) = self.spec.components
        layers, tokens, width = component.shape
        token_bytes = float(np.mean(self.stored_bytes)) / (layers * tokens)
        kl = torch.cat(self.kl)
        return {
            "bytes_per_token_layer": token_bytes,
            "bits_per_element": 8 * token_bytes / width,
            "kl_mean": float(kl.mean()),
            "kl_p99": float(kl.quantile(0.99)),
            "ppl_change": float(np.expm1(np.mean(self.nll_change))),
            "top1": float(torch.cat(self.same_top).float().mean()),
        }


def compare(model: ReferenceModel, codecs: Sequence[Codec]) -> dict[str, Comparison]:
    """Read the model's text exactly once and once through every lossy codec."""
    found = {codec.name: Comparison(model.spec(model.layers)) for codec in codecs}
    progress(f"{model.name}: {len(model.sequences)} sequences, each through {len(codecs)} codecs")
    for token_ids in model.sequences:
        exact, blocks = read_exactly(model, token_ids)
        for codec in codecs:
            comparison = found[codec.name]
            comparison.stored_bytes += [
                encode_block(codec, block, comparison.spec)[1].size for block in blocks
            ]
            lossy = exact
            if codec.loss is Loss.EXACT:
                for block in blocks:
                    if not np.array_equal(round_trip(codec, block, comparison.spec), block):
                        raise SystemExit(f"{codec.name}: wrong bytes")
            else:
                lossy = model.log_probabilities(token_ids, passed_through(model, codec))
            comparison.add(token_ids, exact, lossy)
    return found


def read_exactly(model: ReferenceModel, token_ids: Sequence[int]) -> tuple[Tensor, list[Bytes]]:
    """Log probabilities of a sequence, and its blocks as an engine would store them."""
    layers: dict[int, Tensor] = {}

    def keep(layer: int, records: Tensor) -> Tensor:
        layers[layer] = records.bfloat16()
        return layers[layer].float()

    exact = model.log_probabilities(token_ids, keep)
    records = torch.stack([layers[layer] for layer in range(model.layers)])
    return exact, [bytes_of(block) for block in torch.split(records, PAGE_TOKENS, dim=1)]


def passed_through(model: ReferenceModel, codec: Codec) -> Through:
    """Each layer's records become blocks of one layer, are encoded and decoded."""

    def through(_: int, records: Tensor) -> Tensor:
        spec = model.spec(len(records) // PAGE_TOKENS)  # Pages are like layers: independent.
        restored = round_trip(codec, bytes_of(records.bfloat16()), spec)
        return torch.from_numpy(restored).view(torch.bfloat16).view(records.shape).float()

    return through


def round_trip(codec: Codec, block: Bytes, spec: NamespaceSpec) -> Bytes:
    """Encode and decode."""
    out = np.empty_like(block)
    codec.decode_into(codec.encode(block, spec), spec, out)
    return out


def bytes_of(values: Tensor) -> Bytes:
    """(n,) uint8, a copy if `values` is not contiguous."""
    flat: Bytes = values.contiguous().view(torch.uint8).flatten().numpy()
    return flat


def windows(texts: Mapping[str, Sequence[int]], count: int, length: int) -> Iterator[list[int]]:
    """`count` windows of `length` token ids, from each text in turn, none twice."""
    at = 0
    while count:
        fitting = [ids[at : at + length] for ids in texts.values() if len(ids) >= at + length]
        if not fitting:
            raise SystemExit(f"the texts are too short: {count} windows of {length} tokens missing")
        for window in fitting[:count]:
            yield list(window)
        count -= len(fitting[:count])
        at += length
