"""The class that vLLM makes: one in its scheduler, one in each worker.

It translates vLLM's calls to SchedulerSide and WorkerSide and has no logic of its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapter.vllm import versions
from engine_adapter.vllm.model_identity import cache_geometry, model_namespace
from engine_adapter.vllm.paging import Geometry, PagedLayers
from engine_adapter.vllm.plan import Plan, Report
from engine_adapter.vllm.request_identity import RequestIdentifier, Unidentified
from engine_adapter.vllm.scheduler import SchedulerSide
from engine_adapter.vllm.settings import Settings, read_settings
from engine_adapter.vllm.stats import KvtierPromMetrics, KvtierStats
from engine_adapter.vllm.worker import WorkerSide
from kvtier.client import Client
from kvtier.errors import ConfigError
from kvtier.types import GROUP_BYTES, GroupId, MissReason, NamespaceSpec, Tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

versions.check(vllm.__version__)

log = logging.getLogger(__name__)

SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.SSD: CacheHitSource.DISK}


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """A plan, as vLLM carries it from its scheduler to its workers."""

    plan: Plan


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """A report, as vLLM carries it from its workers to its scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Of two workers."""
        assert isinstance(other, StepReport)
        return StepReport(self.report.with_other(other.report))


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads known prefixes from a kvtier daemon and stores new ones.

    Raises:
        ConfigError: the configuration can't work; the message says what to change.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kvtier needs a failed load to be computed again, not to end its request: set"
                ' "kv_load_failure_policy": "recompute" in --kv-transfer-config'
            )
        geometry = cache_geometry(vllm_config, kv_cache_config, settings.block_tokens)
        self._geometry = geometry
        self._settings = settings
        self._client = Client(
            settings.address,
            owner_group=_owner_group(vllm_config),
            name=f"vllm {role.name.lower()}",
            acquire_timeout_s=settings.acquire_timeout_ms / 1000,
        )
        self._misses: Counter[MissReason] = Counter()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            if not self._client.attached:
                where = settings.address or "the default places"
                log.warning("no kvtier daemon at %s: nothing is cached until it is there", where)
            self._scheduler = SchedulerSide(
                self._client,
                _namespace(vllm_config, kv_cache_config, geometry, settings),
                geometry,
                settings,
                RequestIdentifier(settings.block_tokens, kinds_of_extra_keys),
                loads=transfer.is_kv_consumer,
                stores=transfer.is_kv_producer,
            )
        else:
            alone = geometry.ranks == 1
            rank = 0 if alone else get_tp_group().rank_in_group
            agree = list if alone else _lowest
            self._worker = WorkerSide(self._client, geometry, settings, rank, agree)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is a miss later."""
        return False

    def shutdown(self) -> None:
        """End the session; leases end with it. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        self._client.close()

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that kvtier has behind vLLM's own, and whether they are loaded between steps."""
        tokens = self._scheduling.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0 and self._settings.async_load

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note where the tokens go; 0 for none, or that they are there."""
        [pages] = blocks.get_block_ids()
        self._scheduling.allocated(request, pages, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """The loaded tokens by tier."""
        hits = self._scheduling.hits_by_tier(request, num_external_tokens)
        return {SOURCES[tier]: tokens for tier, tokens in hits.items()}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's plan."""
        preempted = scheduler_output.preempted_req_ids or frozenset()
        pages_of = scheduler_output.kv_connector_block_state.resolve_block_ids
        scheduled = scheduler_output.num_scheduled_tokens
        return StepPlan(self._scheduling.plan(scheduled, preempted, pages_of))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers said about a step."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, StepReport) else None
        self._scheduling.reported(report, connector_output.invalid_block_ids)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Nothing keeps its blocks: they were copied when they were full."""
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished()."""
        self._scheduling.finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        """The weights change, or have changed: nothing stored before is hit again."""
        return self._scheduling.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Blocks that kvtier took, with their tokens; only with the setting kv_events.

        Where they are from then on, the daemon's own events say, by the same hashes.
        """
        return [
            BlockStored(
                block_hashes=[block.hash],
                parent_block_hash=block.parent,
                token_ids=list(block.token_ids),
                block_size=self._settings.block_tokens,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=block.lora_name,
            )
            for block in self._scheduling.take_taken()
        ]

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The tensors to copy from and to."""
        geometry = self._geometry
        tensors = [kv_caches[name] for name in geometry.layers]
        layers = PagedLayers(tensors, geometry.pages_per_block, geometry.page_bytes)
        self._working.use(layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward."""
        super().bind_connector_metadata(connector_metadata)
        self._working.begin(self._plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Before the forward where it needs a load, after it otherwise."""
        self._working.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads that a forward needs are finished before it."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Stored after the forward, all layers at once: a block has all of them."""

    def wait_for_save(self) -> None:
        """After the forward."""
        self._working.store()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads between steps that are over, whatever came of them."""
        return None, self._working.end(finished_req_ids) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Exactly the pages that were to be loaded and were not."""
        return self._working.take_bad_pages()

    def build_connector_worker_meta(self) -> StepReport | None:
        """For update_connector_output()."""
        return StepReport(self._working.report())

    # Statistics

    def get_kv_connector_stats(self) -> KvtierStats | None:
        """Counted since the last call."""
        side = self._scheduler if self._scheduler is not None else self._working
        misses = self._client.misses.copy()
        side.counts.add_misses(misses, self._misses)
        self._misses = misses
        counts = side.counts.take()
        return KvtierStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        """From what travelled between processes."""
        return KvtierStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> KvtierPromMetrics:
        """For vLLM's /metrics."""
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Parts

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a call for the scheduler's connector"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a call for a worker's connector"
        return self._worker

    @property
    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepPlan)
        return metadata.plan


def kinds_of_extra_keys(request: Any) -> Collection[str]:
    """What vLLM tells this request's blocks apart by, besides their tokens."""
    keys, _ = generate_block_hash_extra_keys(request, 0, request.num_tokens, 0)
    return {str(key[0]) for key in keys or ()}


def _namespace(
    vllm_config: VllmConfig, cache_config: KVCacheConfig, geometry: Geometry, settings: Settings
) -> NamespaceSpec | None:
    try:
        return model_namespace(vllm_config, cache_config, geometry, settings)
    except Unidentified as error:
        log.warning("this model runs without kvtier's cache: %s", error)
        return None


def _owner_group(vllm_config: VllmConfig) -> GroupId:
    """The same in all processes of this engine, and no other's."""
    identity = f"{vllm_config.instance_id}\n{vllm_config.kv_transfer_config.engine_id}"
    return GroupId(hashlib.sha256(identity.encode()).digest()[:GROUP_BYTES])


def _lowest(values: list[int]) -> list[int]:
    """Over the ranks of tensor parallelism, which all call this in the same step."""
    tensor = torch.tensor(values)
    torch.distributed.all_reduce(
        tensor, op=torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return [int(value) for value in tensor]
