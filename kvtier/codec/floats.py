"""bfloat16, float16 and float32 bytes to float32 numbers and back; numpy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.codec.base import Bytes

Floats = npt.NDArray[np.float32]
Elements = npt.NDArray[Any]
"""Bits of bfloat16 as uint16; float16 and float32 as themselves."""

_STORED: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
_FLOAT16_MAX = np.float32(65504)
_BFLOAT16_MAX = np.uint32(0x7F7F)


def elements(data: Bytes, dtype: str) -> Elements:
    """A view of bytes as elements of a Component's dtype."""
    found: Elements = data.view(_STORED[dtype])
    return found


def widen(source: Elements, out: Floats) -> None:
    """Exactly the same numbers as float32. `out` is contiguous, of source's shape."""
    if source.dtype == np.uint16:
        bits = out.view(np.uint32)
        np.copyto(bits, source)  # Copy and shift: twice as fast as a shift that also casts.
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(out, source)


def narrow(source: Floats, out: Elements) -> None:
    """Round to nearest; finite stays finite. NaN and infinity are the caller's to write.

    `source` is contiguous, finite, for bfloat16 below its largest number, and overwritten.
    """
    if out.dtype == np.uint16:
        bits = source.view(np.uint32)
        np.add(bits, np.uint32(0x8000), out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
    elif out.dtype == np.float16:
        np.clip(source, -_FLOAT16_MAX, _FLOAT16_MAX, out=source)
        np.copyto(out, source, casting="unsafe")
    else:
        np.copyto(out, source)


def round_to(source: Floats, out: Elements) -> None:
    """Round any float32 to nearest, ties to even; only infinity becomes infinity.

    Slower than narrow(). `source` is contiguous and kept.
    """
    if out.dtype == np.uint16:
        bits = source.view(np.uint32)
        rounded = (bits + (bits >> 16 & 1) + np.uint32(0x7FFF)) >> 16
        magnitude = np.minimum(rounded & 0x7FFF, _BFLOAT16_MAX)
        usual = np.isfinite(source)
        np.copyto(
            out, np.where(usual, magnitude | (bits >> 16 & 0x8000), bits >> 16), casting="unsafe"
        )
        out[np.isnan(source)] |= np.uint16(0x0040)  # Its payload may be in the bits that went.
    elif out.dtype == np.float16:
        finite = np.isfinite(source)
        np.copyto(
            out,
            np.where(finite, source.clip(-_FLOAT16_MAX, _FLOAT16_MAX), source),
            casting="unsafe",
        )
    else:
        np.copyto(out, source)
