"""Planes: arrays of bytes, each entropy-coded by zstd where that makes it smaller.

What stored forms are made of. The reader knows each plane's length beforehand, so hostile bytes
can't make it allocate more. Stored form, integers little-endian:

    an entry a plane: u8 mode (0 as it is, 1 one zstd frame with content size), u32 stored bytes
    the planes' stored bytes, one after the other, nothing behind them

A component that is stored without loss has one plane a byte of its element, the least significant
byte first: the byte that holds the exponent takes few values, a mantissa byte is noise.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

from kvtier.codec.base import Bytes
from kvtier.errors import CorruptBlock

_ENTRY = struct.Struct("<BI")
_AS_IS, _ZSTD = 0, 1

FEW_REPEATS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)
"""For bytes of latents: no repeats worth a search, and with a tiny match table zstd leaves
their exponents to its entropy coder: twice as fast as plain level 1, and 8 % smaller."""

WHOLE_RECORDS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=12)
"""For codes, 10 % slower: finds the records of a token that occurs twice in a block, which are
equal in a model's first layer (4 % of the bytes of a model with four layers)."""


class PlaneWriter:
    """Collects the planes of one stored form."""

    def __init__(self, parameters: zstandard.ZstdCompressionParameters) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._entries: list[bytes] = []
        self._stored: list[bytes | memoryview] = []

    def add(self, plane: Bytes) -> None:
        """Append a plane; it is read until finish() and must not change before."""
        packed = self._compressor.compress(plane.data)
        smaller = len(packed) < plane.size
        self._entries.append(_ENTRY.pack(*((_ZSTD, len(packed)) if smaller else (0, plane.size))))
        self._stored.append(packed if smaller else plane.data)

    def add_elements(self, data: Bytes, itemsize_bytes: int) -> None:
        """Append one plane a byte of the element, the least significant first."""
        for plane in _split(data, itemsize_bytes):
            self.add(plane)

    def finish(self) -> Bytes:
        """The stored form."""
        return np.frombuffer(b"".join([*self._entries, *self._stored]), dtype=np.uint8)


class PlaneReader:
    """Gives the planes of a stored form back, in their order.

    Args:
        encoded: (n,) uint8, possibly hostile.
        planes: How many there must be.
        codec: Its name, for messages.

    Raises:
        CorruptBlock: from every call, whatever does not fit.
    """

    def __init__(self, encoded: Bytes, planes: int, codec: str) -> None:
        self._codec = codec
        self._encoded = encoded
        self._at = planes * _ENTRY.size
        if encoded.size < self._at:
            raise CorruptBlock(f"{codec}: {encoded.size} bytes do not hold {planes} entries")
        self._entries = _ENTRY.iter_unpack(encoded[: self._at].data)

    def read(self, plane_bytes: int) -> Bytes:
        """The next plane, read-only; allocates at most plane_bytes, whatever is stored."""
        mode, stored_bytes = next(self._entries)
        stored = self._encoded[self._at : self._at + stored_bytes]
        self._at += stored_bytes
        if stored.size != stored_bytes:
            raise self._corrupt(f"a plane of {stored_bytes} bytes has only {stored.size}")
        if mode == _AS_IS and stored_bytes == plane_bytes:
            return stored
        if mode != _ZSTD:
            raise self._corrupt(f"mode {mode} with {stored_bytes} bytes for {plane_bytes}")
        try:
            if zstandard.frame_content_size(stored.data) != plane_bytes:
                raise self._corrupt(f"a frame does not hold {plane_bytes} bytes")
            plain = zstandard.ZstdDecompressor().decompress(stored.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._corrupt(str(error)) from error
        if len(plain) != plane_bytes:
            raise self._corrupt(f"a frame gave {len(plain)} bytes for {plane_bytes}")
        return np.frombuffer(plain, dtype=np.uint8)

    def read_elements(self, out: Bytes, itemsize_bytes: int) -> None:
        """Fill `out` from one plane a byte of the element."""
        plane_bytes = out.size // itemsize_bytes
        _merge([self.read(plane_bytes) for _ in range(itemsize_bytes)], out)

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._at != self._encoded.size:
            raise self._corrupt(f"{self._encoded.size - self._at} bytes behind the last plane")

    def _corrupt(self, what: str) -> CorruptBlock:
        return CorruptBlock(f"{self._codec}: {what}")


def _split(data: Bytes, width: int) -> list[Bytes]:
    """One contiguous plane a byte of the element; for width 1 the data itself."""
    if width == 1:
        return [data]
    if width == 2:  # Shifts vectorise, strided copies do not: 22 GB/s against 4.
        words = data.view("<u2")
        return [words.astype(np.uint8), (words >> 8).astype(np.uint8)]
    return list(np.ascontiguousarray(data.reshape(-1, width).T))


def _merge(planes: list[Bytes], out: Bytes) -> None:
    width = len(planes)
    if width == 2:
        words = out.view("<u2")
        np.multiply(planes[1], np.uint16(256), out=words, dtype=np.uint16)
        np.add(words, planes[0], out=words)
    else:
        np.stack(planes, axis=1, out=out.reshape(-1, width))
