"""The block itself."""

from __future__ import annotations

import numpy as np

from kvtier.codec.base import Bytes, Codec
from kvtier.errors import CorruptBlock
from kvtier.types import Loss, NamespaceSpec


class Raw(Codec):
    """Stores a block as the engine delivered it; encode copies nothing."""

    id = 0
    version = 1
    name = "raw"
    loss = Loss.EXACT

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        return block

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        if encoded.size != out.size:
            raise CorruptBlock(f"raw: {encoded.size} bytes stored, a block has {out.size}")
        np.copyto(out, encoded)
