"""The pages of an SGLang host pool, as bytes that are copied in place.

A pool says where a page lies as addresses and sizes (HostKVCache.get_page_buffer_meta). No view is
made from an address: each is looked up in the pool's own tensors, so a wrong one is an error here
and not a read or write somewhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from kvtier.codec.base import Bytes
from kvtier.errors import ConfigError, InvalidRequest

BUFFERS = (
    "kv_buffer",
    "k_buffer",
    "v_buffer",
    "index_k_buffer",
    "index_k_scale_buffer",
    "index_k_with_scale_buffer",
)
"""Where the pools of SGLang keep their memory; no pool has all of them."""

Parts: TypeAlias = Sequence[Bytes]
"""A page: (n,) uint8 views of the pool that make it up one after the other."""


class HostPool(Protocol):
    """What is used of sglang.srt.mem_cache.pool_host.HostKVCache."""

    page_size: int
    size: int
    layout: str

    def get_page_buffer_meta(
        self, indices: torch.Tensor
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """Addresses and sizes of the pages that start at every page_size-th index."""


class HostPages:
    """One pool.

    Attributes:
        page_tokens: Tokens a page.
        page_bytes: Bytes a page.
        parts_per_page: In how many pieces a page lies; one is copied in a single stroke.
    """

    def __init__(self, pool: HostPool) -> None:
        """Find the pool's memory.

        Raises:
            ConfigError: the pool's layout has no pages in host memory that could be stored.
        """
        self.page_tokens = pool.page_size
        self._pool = pool
        self._buffers = _buffers_of(pool)
        first = self._pages_at(list(range(self.page_tokens)))
        if not first:
            raise ConfigError(f"kvtier: {type(pool).__name__} keeps no pages in host memory")
        self.parts_per_page = len(first[0])
        self.page_bytes = sum(part.size for part in first[0])

    def pages(self, host_indices: torch.Tensor) -> list[Parts]:
        """The pages at `host_indices`: page_tokens consecutive ones a page.

        Raises:
            InvalidRequest: no whole pages, or not this pool's.
        """
        indices = host_indices.detach().cpu().to(torch.int64)
        if indices.ndim != 1 or indices.numel() % self.page_tokens:
            raise InvalidRequest(
                f"host_indices: shape {tuple(indices.shape)} is not whole pages of "
                f"{self.page_tokens} tokens"
            )
        rows = indices.view(-1, self.page_tokens)
        starts = rows[:, :1]
        whole = bool((rows == starts + torch.arange(self.page_tokens)).all())
        aligned = bool((starts % self.page_tokens == 0).all())
        inside = bool(((rows >= 0) & (rows < self._pool.size)).all())
        if not (whole and aligned and inside):
            raise InvalidRequest(
                f"host_indices: not whole pages of {self.page_tokens} tokens in a pool of "
                f"{self._pool.size} tokens"
            )
        return self._pages_at(indices.tolist())

    def _pages_at(self, indices: list[int]) -> list[Parts]:
        try:
            meta = self._pool.get_page_buffer_meta(torch.tensor(indices, dtype=torch.int64))
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"kvtier: pages of {type(self._pool).__name__} in layout {self._pool.layout!r} "
                f"can't be stored ({error}): start SGLang with --hicache-mem-layout page_first"
            ) from error
        if meta is None:
            return []
        addresses, sizes = meta
        count = len(indices) // self.page_tokens
        if not count or len(addresses) % count or len(addresses) != len(sizes):
            raise InvalidRequest(f"{len(addresses)} addresses for {count} pages")
        per_page = len(addresses) // count
        # Buffer by buffer and upwards: for every layout that has a flat page at all, these are
        # exactly the bytes of HostKVCache.get_data_page(flat=True), so both interfaces share pages.
        places = [
            self._place(address, size) for address, size in zip(addresses, sizes, strict=True)
        ]
        return [
            [
                self._buffers[number][1][offset : offset + size]
                for number, offset, size in sorted(places[at : at + per_page])
            ]
            for at in range(0, len(places), per_page)
        ]

    def _place(self, address: int, size_bytes: int) -> tuple[int, int, int]:
        """Which buffer, where in it, and how much."""
        for number, (start, data) in enumerate(self._buffers):
            if start <= address and address + size_bytes <= start + data.size:
                return number, address - start, size_bytes
        raise InvalidRequest(
            f"{size_bytes} bytes at {address:#x} are outside {type(self._pool).__name__}'s memory"
        )


def _buffers_of(pool: Any) -> list[tuple[int, Bytes]]:
    """Address and bytes of each of the pool's tensors, each piece of memory once."""
    found: list[tuple[int, Bytes]] = []
    for name in BUFFERS:
        held = getattr(pool, name, None)  # SGLang's object: which it has depends on its class.
        for tensor in held if isinstance(held, (list, tuple)) else (held,):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            address = tensor.data_ptr()
            # k_buffer and v_buffer may be views of kv_buffer.
            if not any(start <= address < start + data.size for start, data in found):
                found.append((address, tensor_bytes(tensor)))
    if not found:
        raise ConfigError(f"kvtier: {type(pool).__name__} keeps no pages in host memory")
    return found


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """A tensor's own memory, (n,) uint8.

    Raises:
        InvalidRequest: it is not in host memory, or not C-contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise InvalidRequest(
            f"a tensor on {tensor.device} with strides {tensor.stride()} is not plain host memory"
        )
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat if flat.dtype == np.uint8 else flat.view(np.uint8)
