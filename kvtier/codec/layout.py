"""Which bytes of a block are latents, and which of a latent's elements are the rotary key.

The one place that decides what the lossy codecs may touch. A component is a *latent* if

* its name is "latent", or begins with "latent_" or "latent." (as "latent_rope"),
* its dtype is bfloat16, float16 or float32,
* it has at least two dimensions, and its last one, the record, at least MIN_RECORD elements, and
* the record is wider than the namespace's rope.width.

The last rope.width elements of such a record are the rotary key, those before them the latent.
Everything else is stored without loss: other names (an indexer's keys choose tokens, and a small
error there changes which ones; keys, values and states of other kinds were never measured), uint8,
float8, one dimension, narrow records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.codec.base import Bytes
from kvtier.types import Component, NamespaceSpec

MIN_RECORD = 16
_FLOATS = ("bfloat16", "float16", "float32")
_LATENT = "latent"


@dataclass(frozen=True, slots=True)
class Piece:
    """One component of a block.

    Attributes:
        component: Its layout.
        data: (component.size_bytes,) uint8, a view of the block.
        is_latent: Whether a lossy codec may change it.
        rope_width: Elements at the end of each record that are the rotary key; 0 if none.
    """

    component: Component
    data: Bytes
    is_latent: bool
    rope_width: int

    @property
    def record_width(self) -> int:
        """Elements of a record."""
        return self.component.shape[-1]

    @property
    def elements(self) -> int:
        """Elements of the component."""
        return self.component.size_bytes // self.component.itemsize_bytes


def is_latent(component: Component, spec: NamespaceSpec) -> bool:
    """Whether lossy codecs may change this component; see the module's text for the rule."""
    named = component.name == _LATENT or component.name.startswith((f"{_LATENT}_", f"{_LATENT}."))
    return (
        named
        and component.dtype in _FLOATS
        and len(component.shape) > 1
        and component.shape[-1] >= MIN_RECORD
        and component.shape[-1] > spec.rope.width
    )


def pieces(block: Bytes, spec: NamespaceSpec) -> Iterator[Piece]:
    """The components of a block, in the order of their bytes.

    Args:
        block: (spec.block_bytes,) uint8.
        spec: Its layout.
    """
    at = 0
    for component in spec.components:
        latent = is_latent(component, spec)
        data = block[at : at + component.size_bytes]
        yield Piece(component, data, latent, spec.rope.width if latent else 0)
        at += component.size_bytes
