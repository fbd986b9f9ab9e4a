"""The contract of a codec: the stored form of one block on a tier.

A codec is pure, thread-safe and knows nothing of tiers. Its id and version are saved beside the
bytes and never change meaning: a changed byte is a new version. Every implementation passes
tests/contract/test_codec.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.types import Loss, NamespaceSpec

Bytes = npt.NDArray[np.uint8]
"""A 1-D, C-contiguous array of bytes."""


class Codec(ABC):
    """Turns a block into its stored form and back.

    Attributes:
        id: Stable number on disk, 0..255. 0 is raw.
        version: Version of the stored form, 0..255.
        name: The word used in configuration and metrics.
        loss: How far a decoded block may differ from the encoded one.
    """

    id: ClassVar[int]
    version: ClassVar[int]
    name: ClassVar[str]
    loss: ClassVar[Loss]

    @abstractmethod
    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        """Return the stored form of `block`; may be longer than the block (see encode_block).

        Runs on a codec thread and releases the GIL for the heavy part. Does not keep or change
        `block`; the result may be a view of it.

        Args:
            block: (spec.block_bytes,) uint8: the components one after the other.
            spec: Layout the bytes were produced with.
        """

    @abstractmethod
    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        """Write the block into `out`, all of it or raise.

        Args:
            encoded: (n,) uint8, what encode() returned; hostile bytes are possible.
            spec: Layout given to encode().
            out: (spec.block_bytes,) uint8; undefined after an error.

        Raises:
            CorruptBlock: `encoded` is not a stored form of a block of this layout.
        """
