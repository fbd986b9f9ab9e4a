"""fp8_ds_mla: the 656-byte record that vLLM and FlashMLA keep in GPU memory.

A record of `latent` + `rope` elements (512 + 64 in all of DeepSeek's models; other widths likewise)
becomes, little-endian:

    latent bytes             float8 e4m3 (no infinity; 0x7f and 0xff are NaN), value = e4m3 * scale
    ceil(latent / 128) * 4   float32 scales, one for each 128 elements
    rope * 2                 bfloat16, as they are

As vLLM writes it: scale = max(largest magnitude / 448, 2^-126), elements divided by it in float32,
saturated, rounded to nearest even. Any scale is read, so FlashMLA's, rounded up to powers of two,
are too. Layout: FlashMLA README and tests/quant.py; vLLM, cache_kernels.cu.

Stored form, version 1, component by component:

    a latent (layout.py)        its records; float16 and float32 rope is rounded to bfloat16
    anything else               its bytes: uint8 components that are such records already pass
                                through here and are never quantised again
    behind the last component   an entry an infinity: u32 component, u32 element, i8 sign (1, -1)

An infinity does not count for its scale; its place in the record holds the largest number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.codec.base import Bytes, Codec
from kvtier.codec.floats import Elements, Floats, elements, round_to, widen
from kvtier.codec.layout import Piece, pieces
from kvtier.errors import CorruptBlock
from kvtier.types import Loss, NamespaceSpec

_GROUP = 128
_E4M3_MAX = np.float32(448)
_SMALLEST_SCALE = np.float32(2.0**-126)
_E4M3_NAN = 0x7F
_BATCH_RECORDS = 64
_INFINITY = np.dtype([("component", "<u4"), ("element", "<u4"), ("sign", "i1")])


def _e4m3_values() -> Floats:
    """The number behind each of the 256 bytes."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value[code & 0x7F == _E4M3_NAN] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


_VALUES = _e4m3_values()


class Fp8DsMla(Codec):
    """656 instead of 1152 bytes a record. Scratch memory: a few hundred KiB."""

    id = 2
    version = 1
    name = "fp8_ds_mla"
    loss = Loss.BOUNDED

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        found = list(pieces(block, spec))
        stored = np.empty(sum(map(_stored_bytes, found)), dtype=np.uint8)
        infinities = []
        with np.errstate(all="ignore"):  # NaN and infinity are among the numbers.
            for number, (piece, target) in enumerate(_in_turn(found, stored)):
                if piece.is_latent:
                    infinities.append(_encode(piece, number, target))
                else:
                    np.copyto(target, piece.data)
        tail = b"".join(entries.tobytes() for entries in infinities)
        return np.concatenate([stored, np.frombuffer(tail, dtype=np.uint8)]) if tail else stored

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        found = list(pieces(out, spec))
        records_bytes = sum(map(_stored_bytes, found))
        tail_bytes = encoded.size - records_bytes
        if tail_bytes < 0 or tail_bytes % _INFINITY.itemsize:
            raise CorruptBlock(f"{self.name}: {encoded.size} bytes for {records_bytes} of records")
        with np.errstate(all="ignore"):  # Hostile scales overflow.
            for piece, source in _in_turn(found, encoded):
                if piece.is_latent:
                    _decode(source, piece)
                else:
                    np.copyto(piece.data, source)
        if tail_bytes:
            self._write_infinities(found, encoded[records_bytes:].view(_INFINITY))

    def _write_infinities(self, found: list[Piece], entries: npt.NDArray[np.void]) -> None:
        left = entries.size
        for number, piece in enumerate(found):
            here = entries[entries["component"] == number]
            places, signs = here["element"], here["sign"]
            if piece.is_latent and bool(
                np.all((places < piece.elements) & (np.abs(signs, dtype=np.int16) == 1))
            ):
                values = np.empty(
                    here.size, dtype=elements(piece.data, piece.component.dtype).dtype
                )
                round_to(signs * np.float32(np.inf), values)
                elements(piece.data, piece.component.dtype)[places] = values
                left -= here.size
        if left:
            raise CorruptBlock(f"{self.name}: {left} infinities have no place or no sign")


@dataclass(frozen=True, slots=True)
class _Record:
    """Where the parts of a record begin. Widths are in elements, `scales` and `size` in bytes."""

    latent: int
    rope: int

    @classmethod
    def of(cls, piece: Piece) -> _Record:
        """The record of a latent."""
        return cls(piece.record_width - piece.rope_width, piece.rope_width)

    @property
    def groups(self) -> int:
        """Scales."""
        return -(-self.latent // _GROUP)

    @property
    def rope_at(self) -> int:
        """Bytes before the rotary part."""
        return self.latent + 4 * self.groups

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole."""
        return self.rope_at + 2 * self.rope


def _stored_bytes(piece: Piece) -> int:
    if not piece.is_latent:
        return piece.data.size
    return piece.elements // piece.record_width * _Record.of(piece).size_bytes


def _in_turn(found: list[Piece], stored: Bytes) -> Iterator[tuple[Piece, Bytes]]:
    """Each component and its stored bytes."""
    at = 0
    for piece in found:
        yield piece, stored[at : at + _stored_bytes(piece)]
        at += _stored_bytes(piece)


def _batches(piece: Piece, stored: Bytes) -> Iterator[tuple[int, Elements, Bytes]]:
    """Number of the first record; some (n, width) elements; their (n, size_bytes) records."""
    source = elements(piece.data, piece.component.dtype).reshape(-1, piece.record_width)
    records = stored.reshape(-1, _Record.of(piece).size_bytes)
    for row in range(0, len(source), _BATCH_RECORDS):
        rows = slice(row, row + _BATCH_RECORDS)
        yield row, source[rows], records[rows]


def _encode(piece: Piece, number: int, stored: Bytes) -> npt.NDArray[np.void]:
    """Write the records of component `number`; returns the entries of its infinities."""
    record = _Record.of(piece)
    infinities = []
    scratch = np.empty((_BATCH_RECORDS, piece.record_width), dtype=np.float32)
    for row, source, target in _batches(piece, stored):
        values = scratch[: len(source)]
        widen(source, values)
        latent = np.ascontiguousarray(values[:, : record.latent])
        found = np.flatnonzero(np.isinf(latent))
        if found.size:
            entries = np.empty(found.size, dtype=_INFINITY)
            rows, columns = np.divmod(found, record.latent)
            entries["component"] = number
            entries["element"] = (row + rows) * piece.record_width + columns
            entries["sign"] = np.sign(latent.reshape(-1)[found])
            infinities.append(entries)
        scales = _scales(latent, record)
        np.divide(latent, _each(scales, record), out=latent)
        target[:, : record.latent] = _to_e4m3(latent)
        target[:, record.latent : record.rope_at] = scales.view(np.uint8)
        rope = np.empty((len(source), record.rope), dtype=np.uint16)
        if source.dtype == np.uint16:
            np.copyto(rope, source[:, record.latent :])
        else:
            round_to(np.ascontiguousarray(values[:, record.latent :]), rope)
        target[:, record.rope_at :] = rope.view(np.uint8)
    return np.concatenate(infinities) if infinities else np.empty(0, dtype=_INFINITY)


def _scales(latent: Floats, record: _Record) -> Floats:
    """(n, groups) float32 scales of (n, latent) numbers; what is not finite does not count."""
    magnitude = np.abs(latent)
    magnitude[~(magnitude < np.inf)] = 0
    starts = np.arange(0, record.latent, _GROUP)
    largest: Floats = np.maximum.reduceat(magnitude, starts, axis=1)
    scales: Floats = np.maximum(largest / _E4M3_MAX, _SMALLEST_SCALE)
    return scales


def _each(scales: Floats, record: _Record) -> Floats:
    """The scale of every latent element."""
    return np.repeat(scales, _GROUP, axis=1)[:, : record.latent]


def _to_e4m3(values: Floats) -> npt.NDArray[np.uint8]:
    """Nearest float8 e4m3, ties to even, saturated; NaN stays NaN."""
    magnitude = np.minimum(np.abs(values), _E4M3_MAX)
    bits = magnitude.view(np.uint32)
    # 20 of float32's 23 mantissa bits go; its exponent is biased by 127, e4m3's by 7.
    normal = ((bits + (bits >> 20 & 1) + 0x7FFFF) >> 20) - np.uint32(120 << 3)
    # Added to 2^14, whose last bit is worth 2^-9, the hardware rounds to e4m3's smallest step.
    shifted = magnitude + np.float32(2.0**14)
    small = shifted.view(np.uint32) - np.float32(2.0**14).view(np.uint32)
    codes = np.where(magnitude < np.float32(2.0**-6), small, normal).astype(np.uint8)
    codes[np.isnan(magnitude)] = _E4M3_NAN
    codes |= np.signbit(values).astype(np.uint8) << 7
    return codes


def _decode(stored: Bytes, piece: Piece) -> None:
    """Write the elements of a latent."""
    record = _Record.of(piece)
    for _, target, source in _batches(piece, stored):
        scales = np.ascontiguousarray(source[:, record.latent : record.rope_at]).view("<f4")
        latent = _VALUES[source[:, : record.latent]]
        np.multiply(latent, _each(scales, record), out=latent)
        round_to(latent, target[:, : record.latent])
        rope = np.ascontiguousarray(source[:, record.rope_at :]).view("<u2")
        if target.dtype == np.uint16:
            np.copyto(target[:, record.latent :], rope)
        else:
            wide = np.empty(rope.shape, dtype=np.float32)
            widen(rope, wide)
            round_to(wide, target[:, record.latent :])
