"""Real SGLang on a CPU, as far as a storage backend meets it: host pools, page hashes, controller.

SGLang's pools import torchvision, of which there is no build for the torch that the tests have.
What they take from it is for images; a stand-in of empty classes satisfies the imports, and none of
them is ever used here. And SGLang compiles its page hash from C++ in every process, which takes a
compiler and half a minute: a stand-in computes the same, and a test holds it against the original.
Everything else is SGLang's own code.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import json
import struct
import sys
import threading
import types
import warnings
from array import array
from collections.abc import MutableSequence, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tests.e2e.support import PATIENCE_S


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

    from sglang.srt.mem_cache import utils as hashing
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
        HybridCacheController,
    )
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.runtime_context import get_context, get_parallel

native_hash = hashing.get_native_hash


def plain_hash(tokens: Any, prior: bytes | None, page_tokens: int) -> list[str]:
    """Stand-in for get_native_hash: sha256(digest before || ids of the page as u32, LE), in hex."""
    ids, digest, digests = list(tokens), prior or b"", []
    for at in range(0, len(ids), page_tokens):
        page = ids[at : at + page_tokens]
        digest = hashlib.sha256(digest + struct.pack(f"<{len(page)}I", *page)).digest()
        digests.append(digest.hex())
    return digests


hashing.get_native_hash = plain_hash

PAGE_TOKENS = 16
LAYERS = 3
POOL_TOKENS = 512
MEMORY_BYTES = 1 << 30
"""What pools may take. Else SGLang wants 10 GB of the machine to stay free."""


def mla_pool(
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
    layers: int = LAYERS,
    tokens: int = POOL_TOKENS,
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
            info, target_layer_num=layers, **_capacity(layout, layers, tokens)
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
        return MHATokenToKVPoolHost(info, **_capacity(layout, LAYERS, POOL_TOKENS))


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _capacity(layout: str, layers: int, tokens: int) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": tokens,
        "start_layer": 0,
        "end_layer": layers,
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


def extra_config(**settings: object) -> dict[str, object]:
    """The extra config of the README, with these settings."""
    return {
        "backend_name": "kvtier",
        "module_path": "engine_adapter.sglang",
        "class_name": "KvtierHiCache",
        "interface_v1": 1,
        **settings,
    }


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
        "extra_config": extra_config(**extra),
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
    """SGLang's own cache controller, its storage threads running. Context manager.

    What it is given instead of a server: one rank, and an allocator that only has a device pool.
    """

    def __init__(self, extra: dict[str, object], pool: Any) -> None:
        """Attach the backend as a server does at its start.

        Args:
            extra: The extra config, as an operator writes it.
            pool: The host pool.
        """
        self._stack = ExitStack()
        self._stack.enter_context(get_context().override_server_args())
        self._stack.enter_context(get_parallel().override(tp_rank=0, pp_rank=0, attn_dcp_rank=0))
        device_pool = MLATokenToKVPool(
            PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=pool.dtype,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=pool.layer_num,
            device="cpu",
            enable_memory_saver=False,
        )
        entry = PoolEntry(
            PoolName.KV, pool, device_pool, lambda layer: layer, is_primary_index_anchor=True
        )
        parsed, threshold, *_, self._tells_prefixes = (
            HybridCacheController.parse_storage_backend_extra_config(json.dumps(extra))
        )
        allocator = types.SimpleNamespace(get_kvcache=lambda: device_pool)
        try:
            self._inner = HybridCacheController(
                allocator,
                HostPoolGroup([entry]),
                PAGE_TOKENS,
                None,
                threading.Event(),
                storage_backend="dynamic",
                prefetch_threshold=threshold,
                model_name="tiny-mla",
                storage_backend_extra_config=parsed,
                io_backend="direct",
            )
        except BaseException:
            self._stack.close()
            raise
        self._pool = pool
        self.backend: HiCacheStorage = self._inner.storage_backend

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._inner.detach_storage_backend()
        finally:
            self._stack.close()

    def backup(self, keys: list[str], indices: torch.Tensor, before: list[str]) -> int:
        """Hand pages to the backup thread; how many it stored."""
        prefix = before if self._tells_prefixes else None
        self._inner.write_storage(indices, [], hash_value=keys, prefix_keys=prefix)
        operation = self._inner.ack_backup_queue.get(timeout=PATIENCE_S)
        return int(operation.completed_tokens) // PAGE_TOKENS

    def prefetch(self, tokens: Sequence[int], before: list[str]) -> torch.Tensor:
        """Let the prefetch threads query and load a prompt behind known pages.

        Returns:
            The host indices of the leading pages that were loaded; they are this caller's.
        """
        operation = self._inner.prefetch(
            CacheRequestHandle("request", 0),
            RadixKey(array("q", tokens)),
            last_hash=before[-1] if before else None,
            prefix_keys=before if self._tells_prefixes else None,
        )
        assert self._inner.prefetch_hit_queue.get(timeout=PATIENCE_S) is operation
        operation.host_indices = self._pool.alloc(operation.storage_hit_count)
        self._inner.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := self._inner.ack_prefetch_queue.get(timeout=PATIENCE_S)).completed_req:
            completed = max(completed, ack.completed_tokens or 0)
        loaded: torch.Tensor = operation.host_indices[:completed]
        return loaded
