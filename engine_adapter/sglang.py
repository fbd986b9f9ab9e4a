"""kvtier as a storage backend (L3) of SGLang's HiCache, with no patch to SGLang.

    --enable-hierarchical-cache --hicache-mem-layout page_first
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvtier", "module_path": "engine_adapter.sglang",
      "class_name": "KvtierHiCache", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true}'

Not stored, and why: pages of pools that keep only the tail of a sequence (Mamba states, sliding
windows: kvtier keeps prefixes), and so whole models that need them; MLA pages from other ranks than
the first of a TP group (all have the same). Everything else that is not stored has a reason in the
log, once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

# First: another version is to be told as such.
from engine_adapter.sglang_version import TransferStats, engine_facts, weights_in_use  # isort: split

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from engine_adapter.hicache.host_pages import HostPages, HostPool, Parts, tensor_bytes
from engine_adapter.hicache.identity import computation_digest
from engine_adapter.hicache.namespaces import (
    ModelIdentity,
    Placement,
    pool_namespace,
)
from engine_adapter.hicache.page_store import PageStore, drop_pages
from engine_adapter.hicache.settings import parse_extra_config
from kvtier.client import Client, GetResult, Missed
from kvtier.errors import ConfigError, InvalidRequest, KvtierError
from kvtier.types import Loss

log = logging.getLogger(__name__)

CLEAR_TIMEOUT_S = 5.0
INDEXERS = (PoolName.INDEXER, PoolName.DRAFT_INDEXER)
"""Sidecars of an MLA pool, replicated as it is."""


class KvtierHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang has no types.
    """HiCache pages in a kvtier daemon on this host.

    Whatever goes wrong at the daemon is a miss or a page not stored, and the client attaches again
    by itself. Called by SGLang from three threads (queries, prefetches, backups); thread-safe.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any]) -> None:
        """Identify the model and start attaching; there need not be a daemon yet.

        Args:
            storage_config: SGLang's.
            kwargs: The factory's; none are used.

        Raises:
            ConfigError: a setting is wrong, or this engine's pages can't be told from others'.
            OSError: a weight file can't be read.
        """
        self._settings = parse_extra_config(storage_config.extra_config or {})
        _refuse_unsupported(storage_config)
        facts = engine_facts()
        self._weights = weights_in_use()
        path = self._settings.model_path or (facts.model_path if facts is not None else None)
        name = storage_config.model_name or path
        if not name:
            raise ConfigError(
                'kvtier: SGLang gives no model name: put "model_path" into the extra config'
            )
        self._model = ModelIdentity(
            name=name,
            computation=computation_digest(
                facts,
                model_path=self._settings.model_path,
                named_revision=self._settings.weights_revision,
            ),
            tenant=self._settings.tenant,
        )
        self._placement = Placement(
            tp_rank=storage_config.tp_rank,
            tp_size=storage_config.tp_size,
            pp_rank=storage_config.pp_rank,
            pp_size=storage_config.pp_size,
            cp_rank=storage_config.attn_cp_rank,
            cp_size=storage_config.attn_cp_size,
        )
        self._is_mla = storage_config.is_mla_model
        self._is_writer = storage_config.is_storage_writer
        self._stores: dict[str, PageStore] = {}
        self._said: set[str] = set()
        self._guard = threading.Lock()
        self._stats = TransferStats() if storage_config.enable_storage_metrics else None
        self._client = Client(
            self._settings.address,
            name=f"sglang {name} tp {storage_config.tp_rank} pp {storage_config.pp_rank}"[:128],
            acquire_timeout_s=self._settings.acquire_timeout_ms / 1000,
        )

    # Pools

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """The pool of the KV pages.

        Raises:
            ConfigError: its layout can't be stored.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._open(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str) -> None:
        """A pool beside it, or again the same.

        One that can't be stored does not stop the start: models that need it miss.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name == PoolName.KV and PoolName.KV in self._stores:
            return
        try:
            self._open(host_pool_name, host_pool)
        except (ConfigError, InvalidRequest) as error:
            self._say_once(f"pool {host_pool_name} is not cached, nor what needs it: {error}")

    def _open(self, pool_name: str, pool: HostPool) -> None:
        pages = HostPages(pool)
        latent = getattr(pool, "kv_lora_rank", None) is not None
        replicated = self._is_mla and (pool_name == PoolName.KV or pool_name in INDEXERS or latent)
        namespace = pool_namespace(
            self._model,
            self._placement,
            pool,
            pages,
            pool_name=str(pool_name),
            replicated=replicated,
        )
        # How much a lossy form of other pages would cost was never measured.
        loss = self._settings.allowed_loss if pool_name == PoolName.KV and latent else Loss.EXACT
        self._stores[pool_name] = PageStore(self._client, namespace, pages, loss)

    # Zero copy (interface_v1)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """How many leading pages of `keys` are stored."""
        found = self._present(self._kv(), keys, self._known_prefix(extra_info))
        self._record(found, found.num_blocks, len(keys))
        return found.num_blocks

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Copy pages into the host pool; True for leading ones that came.

        Args:
            keys: Consecutive pages.
            host_indices: (len(keys) * page_size,) int64, where they go.
            extra_info: Has the pages before.

        Raises:
            InvalidRequest: host_indices are not as many pages of the pool.
        """
        return self._get(self._kv(), keys, host_indices, _prefix(extra_info))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the host pool; True for leading ones that kvtier has or is getting.

        MLA: on other ranks than the first, True without a copy. Arguments and errors as for
        batch_get_v1().
        """
        return self._set(self._kv(), keys, host_indices, _prefix(extra_info))

    # Several pools (v2)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many leading pages are stored in all pools: one with a part missing is no page."""
        kv = self._present(self._kv(), keys, self._known_prefix(extra_info))
        hits = {PoolName.KV: kv.num_blocks}
        for transfer in pool_transfers or ():
            store = self._sidecar(transfer)
            usable = min(hits.values())
            found = 0
            if store is not None and usable:
                found = self._present(store, keys[:usable], _prefix(extra_info)).num_blocks
            hits[transfer.name] = found
        usable = min(hits.values())
        self._record(kv, usable, len(keys))
        return PoolTransferResult(
            usable,
            {name: found for name, found in hits.items() if found},
            list(range(1, usable + 1)),
        )

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """batch_get_v1() for each of several pools."""
        return self._each(transfers, extra_info, self._get)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """batch_set_v1() for each of several pools."""
        return self._each(transfers, extra_info, self._set)

    # Generic: no prefix is told here, so pages are stored one by one (page_store.py)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """One page into `target_location`, a flat page; None for a miss.

        Args:
            key: The page.
            target_location: Contiguous host memory of a page's size; None makes one.
            target_sizes: Not used: the tensor has a size.

        Raises:
            InvalidRequest: target_location is no such tensor.
        """
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Pages into tensors; None from the first miss on. Arguments and errors as for get()."""
        store = self._kv()
        if target_locations is None:
            target_locations = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        parts = [self._flat(store, target) for target in target_locations]
        done = store.read(keys, None, parts) if self._identified() else 0
        return [*target_locations[:done], *[None] * (len(keys) - done)]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store one page.

        Args:
            key: The page.
            value: Its bytes, a flat page in host memory.
            target_location: Not used.
            target_sizes: Not used.

        Raises:
            InvalidRequest: value is no such tensor.
        """
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; whether kvtier has all of them. Arguments and errors as for set()."""
        store = self._kv()
        if values is None or len(values) != len(keys):
            raise InvalidRequest("kvtier: batch_set() needs one tensor a key")
        parts = [self._flat(store, value.contiguous()) for value in values]
        if not self._writes(store):
            return True
        return self._identified() and store.write(keys, None, parts) == len(keys)

    def exists(self, key: str) -> bool:
        """Whether this page is stored, and get() would find it."""
        return self._present(self._kv(), [key], None).num_blocks == 1

    # Administration

    def clear(self) -> None:
        """Drop the pages of this model, tenant and layout for all engines that share them.

        Raises:
            KvtierError: the daemon is not there or can't store the drop, so they may be hit again.
        """
        with Client(
            self._settings.address, name="sglang clear", shared_memory=False, raise_errors=True
        ) as client:
            client.wait_attached(CLEAR_TIMEOUT_S)
            try:
                for store in self._stores.values():
                    drop_pages(client, store.namespace)
            except Missed as error:
                raise KvtierError(
                    f"kvtier: the pages may still be there ({error}); repeat"
                ) from error

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since it last asked; None where it wants no metrics."""
        return None if self._stats is None else self._stats.take()

    def close(self) -> None:
        """End the session; every call misses from now on. Idempotent."""
        self._client.close()

    # Parts

    def _kv(self) -> PageStore:
        store = self._stores.get(PoolName.KV)
        if store is None:
            raise ConfigError("kvtier: call register_mem_pool_host() first")
        return store

    def _sidecar(self, transfer: PoolTransfer) -> PageStore | None:
        """A pool's pages; None, said once, if they are none that kvtier keeps."""
        if transfer.hit_policy is not PoolHitPolicy.ALL_PAGES:
            self._say_once(
                f"pool {transfer.name} keeps no whole prefixes: it is not cached, nor what needs it"
            )
            return None
        return self._stores.get(transfer.name)

    def _each(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
        action: Any,
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, store = transfer.keys or [], self._sidecar(transfer)
            if store is None or transfer.host_indices is None:
                results[transfer.name] = [False] * len(keys)
            else:
                prefix = _prefix(extra_info)
                results[transfer.name] = action(store, keys, transfer.host_indices, prefix)
        return results

    def _identified(self) -> bool:
        """False, said once, when the weights are no longer those that the namespace names.

        Which they are now, SGLang does not say: two engines may call different ones by one version.
        """
        if weights_in_use() == self._weights:
            return True
        self._say_once(
            "the weights were replaced while serving, so nothing is cached any more: detach the "
            'storage backend and attach it again with another "weights_revision"'
        )
        return False

    def _present(
        self, store: PageStore, keys: Sequence[str], prefix: Sequence[str] | None
    ) -> GetResult:
        return store.present(keys, prefix) if self._identified() else GetResult(0, answered=False)

    def _known_prefix(self, extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
        """Without interface_v1 SGLang tells no prefix when it gets: count what it can get then."""
        return _prefix(extra_info) if self._settings.zero_copy else None

    def _record(self, found: GetResult, usable: int, asked: int) -> None:
        """Tell the daemon's hit rate; of equal ranks one does."""
        if self._writes(self._kv()):
            self._kv().record(found, usable, asked)

    def _get(
        self,
        store: PageStore,
        keys: list[str],
        host_indices: torch.Tensor,
        prefix: list[str] | None,
    ) -> list[bool]:
        destinations = _as_many(keys, store.pages.pages(host_indices))
        started_s = time.perf_counter()
        done = store.read(keys, prefix, destinations) if self._identified() else 0
        if self._stats is not None:
            self._stats.read(done, store.pages.page_bytes, time.perf_counter() - started_s)
        return [True] * done + [False] * (len(keys) - done)

    def _set(
        self,
        store: PageStore,
        keys: list[str],
        host_indices: torch.Tensor,
        prefix: list[str] | None,
    ) -> list[bool]:
        sources = _as_many(keys, store.pages.pages(host_indices))
        if not self._writes(store):
            return [True] * len(keys)
        if prefix is None:
            self._say_once(
                "SGLang does not tell which pages come before those it stores, so each is stored "
                'for itself, which is slower: put "hicache_storage_pass_prefix_keys": true into '
                "the extra config"
            )
        started_s = time.perf_counter()
        done = store.write(keys, prefix, sources) if self._identified() else 0
        if self._stats is not None:
            self._stats.wrote(done, store.pages.page_bytes, time.perf_counter() - started_s)
        return [True] * done + [False] * (len(keys) - done)

    def _writes(self, store: PageStore) -> bool:
        """Whether this process stores its pages, or another rank equal ones."""
        return self._is_writer or not store.namespace.replicated

    def _flat(self, store: PageStore, tensor: torch.Tensor) -> Parts:
        data = tensor_bytes(tensor)
        if data.size != store.pages.page_bytes:
            raise InvalidRequest(
                f"kvtier: a tensor of {data.size} bytes for a page of {store.pages.page_bytes}"
            )
        return [data]

    def _say_once(self, text: str) -> None:
        with self._guard:
            if text in self._said:
                return
            self._said.add(text)
        log.warning("kvtier: %s", text)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """All pages before the call's; None if SGLang does not tell."""
    return None if extra_info is None else extra_info.prefix_keys


def _as_many(keys: Sequence[str], pages: list[Parts]) -> list[Parts]:
    if len(pages) != len(keys):
        raise InvalidRequest(f"host_indices: {len(pages)} pages for {len(keys)} keys")
    return pages


def _refuse_unsupported(config: HiCacheStorageConfig) -> None:
    if config.dcp_size > 1:
        raise ConfigError("kvtier: decode context parallelism is not supported: its pages are cut")
    if config.should_split_heads:
        raise ConfigError(
            "kvtier: pages split by heads are not supported: leave out tp_lcm_size, or use another "
            "layout than page_head"
        )
