"""A small MLA inference engine for DeepSeek-V2 and V3 checkpoints, on the CPU, with kvtier.

engine = MlaEngine(Path("checkpoints/tiny-mla"), prefix_cache=PrefixCache(client))
[completion] = engine.generate(["import os\\n"], SamplingParams(max_tokens=64))
"""

from engine_adapter.mla.engine import EngineConfig, MlaEngine, PromptError
from engine_adapter.mla.fields import CheckpointError
from engine_adapter.mla.prefix_cache import BlockClient, PrefixCache
from engine_adapter.mla.request import Completion, Request, Token
from engine_adapter.mla.sampling import FinishReason, SamplingParams

__all__ = [
    "BlockClient",
    "CheckpointError",
    "Completion",
    "EngineConfig",
    "FinishReason",
    "MlaEngine",
    "PrefixCache",
    "PromptError",
    "Request",
    "SamplingParams",
    "Token",
]
