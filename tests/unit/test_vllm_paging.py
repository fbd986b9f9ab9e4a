"""Blocks in and out of paged tensors: every byte to its place, in its layer, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_adapter.vllm.paging import PagedLayers
from kvtier.errors import ConfigError

LAYERS, PAGES, PER_BLOCK = 3, 12, 4
TOKENS, WIDTH = 2, 8
PAGE_BYTES = TOKENS * WIDTH * 2


def tensors(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """(PAGES, 1, TOKENS, WIDTH) each, every element another number."""
    count = PAGES * TOKENS * WIDTH
    return [
        (torch.arange(count) + layer * count)
        .view(PAGES, 1, TOKENS, WIDTH)
        .to(torch.int16)
        .view(dtype)
        for layer in range(LAYERS)
    ]


def test_a_block_is_its_pages_layer_by_layer() -> None:
    layers = tensors()
    paged = PagedLayers(layers, PER_BLOCK, PAGE_BYTES)
    assert paged.block_bytes == LAYERS * PER_BLOCK * PAGE_BYTES
    block = np.zeros(paged.block_bytes, dtype=np.uint8)
    pages = [7, 2, 11, 3]  # vLLM's ids come in any order.
    paged.read_block(pages, block)
    expected = torch.stack([layer[pages] for layer in layers])
    assert block.tobytes() == expected.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_a_block_goes_back_without_the_pages_that_are_there(skip: int) -> None:
    layers = tensors()
    before = [layer.clone() for layer in layers]
    paged = PagedLayers(layers, PER_BLOCK, PAGE_BYTES)
    source = np.random.default_rng(1).integers(0, 256, paged.block_bytes, dtype=np.uint8)
    pages = [5, 9, 0, 4][skip:]
    paged.write_block(source, pages, skip)
    parts = source.reshape(LAYERS, PER_BLOCK, PAGE_BYTES)
    for layer, old, part in zip(layers, before, parts, strict=True):
        for index, page in enumerate(pages, skip):
            assert layer[page].view(torch.uint8).numpy().tobytes() == part[index].tobytes()
        others = [page for page in range(PAGES) if page not in pages]
        assert torch.equal(layer[others].view(torch.int16), old[others].view(torch.int16))


def test_pages_may_be_apart_in_memory() -> None:
    """Layers that share one tensor: (pages, layers, ...)."""
    shared = torch.arange(PAGES * LAYERS * WIDTH, dtype=torch.int16).view(PAGES, LAYERS, WIDTH)
    paged = PagedLayers([shared[:, layer] for layer in range(LAYERS)], 1, WIDTH * 2)
    block = np.zeros(paged.block_bytes, dtype=np.uint8)
    paged.read_block([5], block)
    assert block.tobytes() == shared[5].numpy().tobytes()
    paged.write_block(block, [6], 0)
    assert torch.equal(shared[6], shared[5])


def test_another_layout_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="--attention-backend"):
        PagedLayers(tensors(), PER_BLOCK, PAGE_BYTES + 2)
    keys_and_values_apart = torch.zeros(2, PAGES, TOKENS, WIDTH).transpose(0, 1)
    with pytest.raises(ConfigError, match="contiguous"):
        PagedLayers([keys_and_values_apart], PER_BLOCK, 2 * TOKENS * WIDTH * 4)
