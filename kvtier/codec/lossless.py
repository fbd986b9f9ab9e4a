"""Byte planes, each entropy-coded by zstd: smaller than the block, bit for bit the block.

The bytes of a latent's elements are not alike: the one that holds the exponent takes few values,
a mantissa byte is noise. So every component is split into one plane a byte of its element, and a
plane that zstd can't shrink is stored as it is.

Stored form, version 1, integers little-endian, planes in the order component by component, the
element's least significant byte first:

    an entry a plane: u8 mode (0 as it is, 1 one zstd frame with content size), u32 stored bytes
    the planes' stored bytes, one after the other, nothing behind them
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import zstandard

from kvtier.codec.base import Bytes, Codec
from kvtier.errors import CorruptBlock
from kvtier.types import Component, Loss, NamespaceSpec

_ENTRY = struct.Struct("<BI")
_AS_IS, _ZSTD = 0, 1
# Latents hold no repeats worth a search: with a tiny match table zstd is twice as fast as plain
# level 1 on their exponents, and 8 % smaller, for it leaves them to its entropy coder.
_LEVEL = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=8)


class Lossless(Codec):
    """Typical bf16 latents shrink to two thirds. Thread-safe: contexts live for one call."""

    id = 1
    version = 1
    name = "lossless"
    loss = Loss.EXACT

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        compressor = zstandard.ZstdCompressor(compression_params=_LEVEL)
        header: list[bytes] = []
        stored: list[bytes | memoryview] = []
        for component, data in _components(block, spec):
            for plane in _split(data, component.itemsize_bytes):
                packed = compressor.compress(plane.data)
                smaller = len(packed) < plane.size
                header.append(_ENTRY.pack(_ZSTD, len(packed)) if smaller else _as_is(plane))
                stored.append(packed if smaller else plane.data)
        return np.frombuffer(b"".join([*header, *stored]), dtype=np.uint8)

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        planes = sum(component.itemsize_bytes for component in spec.components)
        at = planes * _ENTRY.size
        if encoded.size < at:
            raise CorruptBlock(f"lossless: {encoded.size} bytes do not hold {planes} entries")
        entries = _ENTRY.iter_unpack(encoded[:at].data)
        for component, data in _components(out, spec):
            width = component.itemsize_bytes
            merged: list[Bytes] = []
            for mode, stored_bytes in [next(entries) for _ in range(width)]:
                stored = encoded[at : at + stored_bytes]
                at += stored_bytes
                merged.append(_plane(mode, stored, stored_bytes, data.size // width))
            _merge(merged, data)
        if at != encoded.size:
            raise CorruptBlock(f"lossless: {encoded.size - at} bytes behind the last plane")


def _as_is(plane: Bytes) -> bytes:
    return _ENTRY.pack(_AS_IS, plane.size)


def _components(block: Bytes, spec: NamespaceSpec) -> Iterator[tuple[Component, Bytes]]:
    at = 0
    for component in spec.components:
        yield component, block[at : at + component.size_bytes]
        at += component.size_bytes


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


def _plane(mode: int, stored: Bytes, stored_bytes: int, plane_bytes: int) -> Bytes:
    """Undo one plane; allocates at most plane_bytes, whatever `stored` says."""
    if stored.size != stored_bytes:
        raise CorruptBlock(f"lossless: a plane of {stored_bytes} bytes has only {stored.size}")
    if mode == _AS_IS and stored_bytes == plane_bytes:
        return stored
    if mode != _ZSTD:
        raise CorruptBlock(f"lossless: mode {mode} with {stored_bytes} bytes for {plane_bytes}")
    try:
        if zstandard.frame_content_size(stored.data) != plane_bytes:
            raise CorruptBlock(f"lossless: a frame does not hold {plane_bytes} bytes")
        plain = zstandard.ZstdDecompressor().decompress(stored.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptBlock(f"lossless: {error}") from error
    if len(plain) != plane_bytes:
        raise CorruptBlock(f"lossless: a frame gave {len(plain)} bytes for {plane_bytes}")
    return np.frombuffer(plain, dtype=np.uint8)
