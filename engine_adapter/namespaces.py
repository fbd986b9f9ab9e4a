"""What an MLA cache is called: the same for every engine, so that engines share blocks.

Two engines that compute the same checkpoint in the same dtype must arrive at the same namespace to
the last byte; so this is the only place where one is put together from a Hugging Face checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import torch

from kvtier.types import Component, NamespaceSpec, RopeSpec

if TYPE_CHECKING:  # The engine imports this module.
    from engine_adapter.mla.config import RopeConfig


def latent_rope(layers: int, block_tokens: int, record_width: int, dtype: torch.dtype) -> Component:
    """The one component of an MLA block: (layers, block_tokens, record_width), C-contiguous.

    A record is the normed latent, then the rotated key.
    """
    name = str(dtype).removeprefix("torch.")
    return Component("latent_rope", name, (layers, block_tokens, record_width))


def rotary(width: int, rope: RopeConfig) -> RopeSpec:
    """Rotation of pairs side by side, as DeepSeek's models have it.

    Args:
        width: Elements of the rotated key.
        rope: How it is rotated.
    """
    parameters: dict[str, object] = {"rope_type": "default", "theta": rope.theta}
    if rope.yarn is not None:
        parameters |= {"rope_type": "yarn", **dataclasses.asdict(rope.yarn)}
    pairs = sorted((name, json.dumps(value)) for name, value in parameters.items())
    return RopeSpec("interleaved", width, tuple(pairs))


def mla_namespace(
    model_id: str, weights_revision: str, component: Component, rope: RopeSpec, tenant: str
) -> NamespaceSpec:
    """The namespace of one model's MLA blocks.

    Args:
        model_id: The model's public name (mla.config.checkpoint_name).
        weights_revision: hashing.weights_revision of mla.weights.checkpoint_files().
        component: As latent_rope() makes it.
        rope: As rotary() makes it.
        tenant: Blocks are shared only within a tenant.
    """
    return NamespaceSpec(
        model_id=model_id,
        weights_revision=weights_revision,
        components=(component,),
        rope=rope,
        block_tokens=component.shape[1],
        tenant=tenant,
    )


def rank_namespace(spec: NamespaceSpec, rank: int, ranks: int) -> NamespaceSpec:
    """The namespace of one rank's shard, where tensor parallelism divides the cache.

    Args:
        spec: The namespace with one rank's shapes.
        rank: From 0.
        ranks: How many; 1 leaves the namespace as it is.
    """
    if ranks == 1:
        return spec
    components = tuple(
        dataclasses.replace(component, name=f"{component.name}.rank{rank}of{ranks}")
        for component in spec.components
    )
    return dataclasses.replace(spec, components=components)
