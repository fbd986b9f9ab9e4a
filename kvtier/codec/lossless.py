"""Byte planes, each entropy-coded by zstd: smaller than the block, bit for bit the block.

Stored form, version 1: planes.py's, with the planes of every component, one after the other.
"""

from __future__ import annotations

from kvtier.codec.base import Bytes, Codec
from kvtier.codec.layout import pieces
from kvtier.codec.planes import FEW_REPEATS, PlaneReader, PlaneWriter
from kvtier.types import Loss, NamespaceSpec


class Lossless(Codec):
    """Typical bf16 latents shrink to two thirds. Thread-safe: contexts live for one call."""

    id = 1
    version = 1
    name = "lossless"
    loss = Loss.EXACT

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        planes = PlaneWriter(FEW_REPEATS)
        for piece in pieces(block, spec):
            planes.add_elements(piece.data, piece.component.itemsize_bytes)
        return planes.finish()

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        count = sum(component.itemsize_bytes for component in spec.components)
        planes = PlaneReader(encoded, count, self.name)
        for piece in pieces(out, spec):
            planes.read_elements(piece.data, piece.component.itemsize_bytes)
        planes.finish()
