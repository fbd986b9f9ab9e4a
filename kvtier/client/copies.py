"""Copies between an engine and the arena, as fast as memory lets them be."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from kvtier.codec.base import Bytes

PARALLEL_BYTES = 32 << 20
"""From here on a second thread pays: one core does not fill the memory bus, and starting a thread
costs about as much as copying 1 MiB."""


def copy_blocks(destinations: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copy sources[i] into destinations[i] for all i; the GIL is released meanwhile.

    Raises:
        ValueError: the sizes of a pair differ; nothing was copied.
    """
    pairs = list(zip(destinations, sources, strict=True))
    for destination, source in pairs:
        if destination.size != source.size:
            raise ValueError(f"a block of {source.size} bytes into one of {destination.size}")
    if sum(source.size for source in sources) < PARALLEL_BYTES or (os.cpu_count() or 1) < 2:
        _copy(pairs)
        return
    # A thread a call, and none that stays: a forked child would wait for it in vain.
    other = threading.Thread(target=_copy, args=(pairs[1::2],), name="kvtier-copy")
    other.start()
    try:
        _copy(pairs[::2])
    finally:
        other.join()


def _copy(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    for destination, source in pairs:
        np.copyto(destination, source)
