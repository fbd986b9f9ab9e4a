"""vLLM's connector to kvtier: a prefix computed once is loaded, not computed again.

One flag is all that vLLM needs:

    --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "engine_adapter.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "unix:/run/kvtier/kvtier.sock"}}'

The path of a request: scheduler.py looks its prompt up and notes what to load and to store
(chain.py hashes it, request_identity.py says what besides its tokens makes it), plan.py carries
that to the workers, worker.py leases and copies (paging.py). model_identity.py names the model's
namespace, versions.py is the only place that knows one vLLM from another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_adapter.vllm.connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> object:
    """KvtierConnector, on its first use: the pure modules here can be had without vLLM."""
    if name != "KvtierConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine_adapter.vllm.connector import KvtierConnector

    return KvtierConnector
