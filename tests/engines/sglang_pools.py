"""Real SGLang on a CPU, as far as a storage backend meets it: host pools, page hashes, controller.

SGLang's pools import torchvision, of which there is no build for the torch that the tests have.
What they take from it is for images; a stand-in of empty classes satisfies the imports, and none of
them is ever used here. Everything else is SGLang's own code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from array import array
from collections.abc import MutableSequence, Sequence
from queue import Queue
from typing import Any

import torch


class _StandIn(types.ModuleType):
    """A fake module: every name in it is an empty class."""

    __path__: MutableSequence[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision where there is none."""

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's own, at import.
    import transformers  # noqa: F401 - before the stand-in, for it asks torchvision's version

    sys.meta_path.append(_Finder())

    from sglang.srt.managers.cache_controller import HiCacheController, StorageOperation
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
        HybridCacheController,
        PrefetchOperation,
    )
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGE_TOKENS = 16
LAYERS = 3
POOL_TOKENS = 512
MEMORY_BYTES = 1 << 30
"""What pools may take. Else SGLang wants 10 GB of the machine to stay free."""


def mla_pool(
    layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS
) -> Any:
    """A real host pool of latents of 512 and rotary keys of 64 elements."""
    buffers = tuple(torch.zeros(1, 1, 576, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_addresses(buffers),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE_TOKENS,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dim=576,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(MEMORY_BYTES):
        return MLATokenToKVPoolHost(
            info, target_layer_num=layers, **_capacity(layout, start_layer=0, end_layer=layers)
        )


def mha_pool(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A real host pool of keys and values, two heads of 64 elements."""
    keys = tuple(torch.zeros(1, 2, 64, dtype=dtype) for _ in range(LAYERS))
    values = tuple(torch.zeros(1, 2, 64, dtype=dtype) for _ in range(LAYERS))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=_addresses(keys),
            v_data_ptrs=_addresses(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE_TOKENS,
        head_num=2,
        head_dim=64,
        v_head_dim=64,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(MEMORY_BYTES):
        return MHATokenToKVPoolHost(info, **_capacity(layout, start_layer=0, end_layer=LAYERS))


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _capacity(layout: str, **layers: int) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": POOL_TOKENS,
        **layers,
    }


def fill_randomly(pool: Any, seed: int) -> None:
    """Every byte of the pool, so that no page is like another."""
    generator = torch.Generator().manual_seed(seed)
    data = pool.kv_buffer.view(torch.uint8)
    data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))


def page_hashes(
    tokens: Sequence[int],
    *,
    prior: str | None = None,
    salt: str | None = None,
    extra_key: str | None = None,
) -> list[str]:
    """The keys that SGLang itself gives the pages of these tokens."""
    key = RadixKey(array("q", tokens), extra_key=extra_key, cache_salt=salt)
    hashes: list[str] = get_storage_hash_str(key, prior, page_size=PAGE_TOKENS)
    return hashes


def storage_config(extra: dict[str, object], **changes: Any) -> Any:
    """What the controller gives a backend, of a single MLA rank unless changed."""
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": True,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny-mla",
        "extra_config": {
            "backend_name": "kvtier",
            "module_path": "engine_adapter.sglang",
            "class_name": "KvtierHiCache",
            "interface_v1": 1,
            **extra,
        },
    }
    return HiCacheStorageConfig(**{**values, **changes})


def create_backend(config: Any, pool: Any) -> HiCacheStorage:
    """As HiCacheController.attach_storage_backend does it."""
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    try:
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
    except BaseException:
        backend.close()
        raise
    return backend


class Controller:
    """The real cache controller's ways to a backend, without a device, groups and threads.

    Made without its constructor, which wants all of these; the methods that run are SGLang's.
    """

    def __init__(self, backend: HiCacheStorage, pool: Any, *, zero_copy: bool = True) -> None:
        self.pool = pool
        self._inner = HybridCacheController.__new__(HybridCacheController)
        self._inner.storage_backend = backend
        self._inner.storage_host_pool = self._inner.mem_pool_host = pool
        self._inner.page_size = PAGE_TOKENS
        self._inner.prefetch_sync_queue = Queue()
        kind = "zero_copy" if zero_copy else ""
        self._inner.page_set_func = (
            self._inner._page_set_zero_copy if kind else self._inner._generic_page_set
        )
        self._inner.page_get_func = (
            self._inner._page_get_zero_copy if kind else self._inner._generic_page_get
        )

    def backup(self, keys: list[str], indices: torch.Tensor, prefix: list[str] | None) -> int:
        """Store pages as the backup thread does; how many."""
        operation = StorageOperation(indices, [], hash_value=keys, prefix_keys=prefix)
        HiCacheController._page_backup(self._inner, operation)
        return int(operation.completed_tokens) // PAGE_TOKENS

    def query(
        self, tokens: Sequence[int], *, prior: str | None = None, prefix: list[str] | None = None
    ) -> list[str]:
        """The stored leading pages of a prompt, as the prefetch thread asks for them."""
        operation = self._operation(tokens, prior, prefix)
        hits, hit_tokens = HybridCacheController._storage_hit_query(self._inner, operation)
        assert hit_tokens == len(hits) * PAGE_TOKENS
        return list(hits)

    def prefetch(self, keys: list[str], indices: torch.Tensor, prefix: list[str] | None) -> int:
        """Load pages as the prefetch thread does; how many came."""
        operation = self._operation([], None, prefix)
        operation.hash_value, operation.host_indices = keys, indices
        return int(HiCacheController._page_transfer(self._inner, operation))

    @staticmethod
    def _operation(
        tokens: Sequence[int], prior: str | None, prefix: list[str] | None
    ) -> PrefetchOperation:
        key = RadixKey(array("q", tokens))
        return PrefetchOperation(
            CacheRequestHandle("request", 0), key, last_hash=prior, prefix_keys=prefix
        )
