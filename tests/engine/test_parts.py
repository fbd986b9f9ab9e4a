"""The engine's parts by themselves: attention's two forms, pages, tokenizer, sampler."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine_adapter.mla.attention import Attention
from engine_adapter.mla.batch import Batch, Span
from engine_adapter.mla.config import ModelConfig, load_config
from engine_adapter.mla.fields import CheckpointError
from engine_adapter.mla.paged_cache import OutOfPages, PagedCache, PageTable
from engine_adapter.mla.rope import Rope
from engine_adapter.mla.sampling import Sampler, SamplingParams
from engine_adapter.mla.tokenizer import Tokenizer
from engine_adapter.mla.weights import load_weights


class ForcedForm(ModelConfig):
    """A configuration whose break-even always chooses one form."""

    __slots__ = ()
    below = 0.0

    @property
    def absorbed_below_tokens(self) -> float:
        return self.below


class AlwaysAbsorbed(ForcedForm):
    __slots__ = ()
    below = float("inf")


@pytest.mark.parametrize("pages", [[0, 1, 2, 3, 4, 5], [5, 1, 0, 7, 3, 2]])
@pytest.mark.parametrize("length", [1, 2, 130, 300])
def test_absorbed_equals_expanded(tiny_mla: Path, length: int, pages: list[int]) -> None:
    """On the trained weights of one layer, over consecutive and scattered pages."""
    config = load_config(tiny_mla)
    weights = load_weights(tiny_mla, config, torch.float32)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    start, end = 370 - length, 370
    x = torch.randn(end, config.hidden_size, generator=torch.Generator().manual_seed(length))
    outputs = []
    for kind in (ForcedForm, AlwaysAbsorbed):
        attention = Attention(kind(**values), weights, 2)
        cache = PagedCache(8, config.layers, config.record_width, torch.float32)
        cache.pages.fill_(torch.nan)
        table = PageTable.of(pages)
        batch = Batch.of([Span(table, 0, end)])
        rotation = Rope(config.rope, config.rope_width).rotation(batch.positions)
        attention.store(x, rotation, batch, cache)
        span = Span(table, start, length)
        outputs.append(attention.attend(x[start:], rotation[start:], [span], cache))
    expanded, absorbed = outputs
    assert (expanded - absorbed).norm() / expanded.norm() < 1e-5


def test_pages_are_handed_out_in_runs_and_come_back() -> None:
    cache = PagedCache(8, 1, 4, torch.float32)
    first, second, third = cache.allocate(2), cache.allocate(3), cache.allocate(2)
    assert (first, second, third) == ([0, 1], [2, 3, 4], [5, 6])
    cache.release(first)
    assert cache.allocate(1) == [0]
    cache.release(third)
    assert cache.allocate(3) == [5, 6, 7], "a run is preferred to the lowest pages"
    cache.release([5, 6, 7])
    assert cache.allocate(4) == [1, 5, 6, 7], "without a run the pages are scattered"
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 of 8 free"):
        cache.allocate(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_page_bytes_are_the_page(dtype: torch.dtype) -> None:
    cache = PagedCache(3, 2, 4, dtype)
    source = torch.randn(2, 64, 4).to(dtype)
    view = cache.page_bytes(1)
    assert view.shape == (2 * 64 * 4 * dtype.itemsize,)
    view[:] = source.view(torch.uint8).flatten().numpy()
    assert torch.equal(cache.pages[1], source)


def test_detokenizer_never_splits_a_character(tiny_mla: Path) -> None:
    tokenizer = Tokenizer(tiny_mla, None)
    text = "naïve = 'π≈3 — 日本語 🙂'\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 0, "prompts start with bos"
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token, last=token is ids[-1]) for token in ids]
    assert "".join(pieces) == text
    assert "" in pieces[1:], "bytes of a character wait for the rest"
    assert not any("\ufffd" in piece for piece in pieces)


def test_detokenizer_gives_out_an_unfinished_character_at_the_end(tiny_mla: Path) -> None:
    tokenizer = Tokenizer(tiny_mla, None)
    ids = tokenizer.encode("a🙂")[:-1]
    detokenizer = tokenizer.detokenizer()
    pieces = [
        detokenizer.push(token, last=index == len(ids) - 1) for index, token in enumerate(ids)
    ]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1].endswith("\ufffd")


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: can't be read"):
        Tokenizer(tmp_path, None)


def test_sampler_draws_from_the_nucleus_in_proportion() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.7, seed=7))
    counts = torch.bincount(
        torch.tensor([sampler.sample(logits) for _ in range(2000)]), minlength=4
    )
    assert counts[0] == counts[2] == 0, "0.5 + 0.3 already reach 0.7"
    assert counts[1] / 2000 == pytest.approx(0.5 / 0.8, abs=0.05)
    assert Sampler(SamplingParams()).sample(logits) == 1
