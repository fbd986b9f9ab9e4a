"""Between vLLM's paged cache and kvtier's blocks: one copy, page by page.

vLLM keeps a layer's cache as pages of `page_tokens` tokens; a kvtier block is the pages of
consecutive tokens, for all layers, side by side: (layers, pages a block, page bytes). Which bytes
are in a page is the attention backend's business (MLA: one record after the other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of vLLM's cache.

    Attributes:
        layers: Names of the attention layers, first layer first.
        page_tokens: Tokens a page (vLLM's block).
        page_bytes: Bytes of a page in one layer.
        pages_per_block: Pages that make a kvtier block.
        ranks: Workers that compute a token together (tensor parallelism).
        replicated: True for MLA: every rank has the same bytes.
    """

    layers: tuple[str, ...]
    page_tokens: int
    page_bytes: int
    pages_per_block: int
    ranks: int
    replicated: bool

    @property
    def shards(self) -> int:
        """Parts of a block, each of which a rank has: 1 where all ranks have all of it."""
        return 1 if self.replicated else self.ranks


class PagedLayers:
    """vLLM's cache tensors, seen as pages of bytes. Copies only, and only whole pages.

    Args:
        layers: Each layer's tensor, first layer first: (pages, ...), a page contiguous in memory.
        pages_per_block: Pages that make a kvtier block.
        page_bytes: Bytes that a page of one layer must have.

    Raises:
        ConfigError: a tensor has another layout.
    """

    def __init__(
        self, layers: Sequence[torch.Tensor], pages_per_block: int, page_bytes: int
    ) -> None:
        self._layers = [_as_pages(layer, page_bytes) for layer in layers]
        self._pages_per_block = pages_per_block
        self._shape = (len(layers), pages_per_block, page_bytes)
        self._on_cpu = all(layer.device.type == "cpu" for layer in layers)
        self._arrays = [layer.numpy() for layer in self._layers] if self._on_cpu else []
        self.block_bytes = len(layers) * pages_per_block * page_bytes

    def read_block(self, pages: Sequence[int], block: Bytes) -> None:
        """Copy a block out of the cache.

        Args:
            pages: Its pages' numbers, in the order of their tokens.
            block: (block bytes,) uint8, overwritten.
        """
        parts = block.reshape(self._shape)
        if self._on_cpu:
            rows = np.asarray(pages)
            for array, part in zip(self._arrays, parts, strict=True):
                np.take(array, rows, axis=0, out=part, mode="clip")
            return
        # One transfer for all layers: gathered on the device first.
        index = torch.tensor(pages, device=self._layers[0].device)
        gathered = torch.stack([layer.index_select(0, index) for layer in self._layers])
        torch.from_numpy(parts).copy_(gathered)

    def write_block(self, block: Bytes, pages: Sequence[int], skip: int) -> None:
        """Copy a block into the cache.

        Args:
            block: (block bytes,) uint8.
            pages: Numbers of its last pages, in the order of their tokens.
            skip: How many first pages of the block are left out.
        """
        parts = block.reshape(self._shape)
        if self._on_cpu:
            rows = np.asarray(pages)
            for array, part in zip(self._arrays, parts, strict=True):
                array[rows] = part[skip:]
            return
        device = self._layers[0].device
        indices = torch.tensor(pages, device=device)
        moved = torch.from_numpy(np.ascontiguousarray(parts[:, skip:])).to(device)
        for layer, part in zip(self._layers, moved, strict=True):
            layer.index_copy_(0, indices, part)
        # A load between steps is over only when the device is: its stream is not the engine's.
        torch.accelerator.current_stream(device).synchronize()


def _as_pages(layer: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """(pages, page bytes) uint8, the same memory."""
    page = layer[0]
    size_bytes = page.numel() * page.element_size()
    if not page.is_contiguous() or size_bytes != page_bytes:
        raise ConfigError(
            f"kvtier needs a KV cache whose pages are contiguous and have {page_bytes} bytes a"
            f" layer; this attention backend has {tuple(layer.shape)} of {layer.dtype} with strides"
            f" {layer.stride()}: choose another one with --attention-backend"
        )
    stride = layer.stride(0) * layer.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=layer.device)
    offset = layer.storage_offset() * layer.element_size()
    return flat.set_(layer.untyped_storage(), offset, (layer.shape[0], page_bytes), (stride, 1))
