"""q8, q6, q4: integers times a step, entropy-coded. Smaller than FP8 at the same error.

A *tile* is up to 64 consecutive records of one layer; a *channel* is one element of them. What
varies least is what compresses best, so a channel's mean over the tile is taken out first (in real
latents it carries a third to two thirds of the energy), and the rest is rounded to multiples of

    step = k * sqrt(spread of the channel * spread of all channels)        (spread: rms around mean)

A loud channel gets a coarser step than a quiet one, but less than in proportion. Between one step
for all (the least squared error) and a step in proportion to the spread (the same error everywhere
relative to what is there), the square root was the best or within noise of it on both models
measured, and it makes all codes so alike that one Huffman table (zstd's) serves. k differs for the
latent and for the rotary key, which is the more sensitive of the two. bench/codecs.py has figures.

What a code can't express comes back bit for bit: NaN, infinity, and elements that lie far outside
their channel's range. These *exceptions* are stored as they are and don't influence the steps of
the other records. A channel where no element is further than 5 spreads from the mean, nor beyond
2^60, has none, and errs by half a step at most, where, with peak the furthest element's distance,

    step <= max(2^-64, sqrt(2) * max(k * sqrt(...), peak / 124, |mean| / 128,000))

and peak / 248 in the rotary part, whose codes have a ninth bit.

Stored form, version 1: planes as in planes.py, integers little-endian. A component that is no
latent (layout.py) has its planes as in `lossless`. A latent is taken as (layers, rows, width):
width is the record, rows is shape[-2], layers what is before that; if rows is less than 16, all
records are rows of one layer. Each layer is cut into tiles of 64 rows, the last one of the rest.
The latent part and, if there is one, the rotary part of the record are called parts. The planes:

    steps     layers * tiles * width   u8 b: the step is 2^((b - 128) / 2), as float32
    means     layers * tiles * width   i16 m: the mean is m times 4 steps. Two planes, of the u16
                                       2 * m if m >= 0, else -2 * m - 1: few have a high byte
    codes     layers * rows * part     i8, a plane a part: -128 an exception, else -127..127
    low bits  layers * rows * rotary part / 8, rounded up: one bit l a code, the first in bit 7
    exceptions of each part, as many planes as an element has bytes: their bits, in order

    latent element = float32(code) * step + float32(m) * (4 * step)
    rotary element = float32(2 * code + l) * step + float32(m) * (4 * step)

in float32, then rounded to the dtype (bfloat16: half away from zero).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtier.codec.base import Bytes, Codec
from kvtier.codec.floats import Elements, Floats, elements, narrow, widen
from kvtier.codec.layout import Piece, pieces
from kvtier.codec.planes import WHOLE_RECORDS, PlaneReader, PlaneWriter
from kvtier.types import DTYPE_BYTES, Loss, NamespaceSpec

TILE_ROWS = 64
_FEW_ROWS = 16
_BATCH_ELEMENTS = 300_000  # Fewer: calls cost more than L2 saves. More: out of L3.
_EXCEPTION = -128
_LARGEST = 127
_MEAN_STEPS = np.float32(4)
_PEAK_SPREADS = np.float32(5)
_HUGE = np.float32(2.0**60)
_PEAK_CODE = 124  # What is left of 127 after half a mean's step.
# Squares of steps are rounded to the nearest power of 2, this never to less than it must be: 32,000
# steps fit an int16.
_LEAST_BY_MEAN = np.float32(2**0.5 / (4 * 32_000) ** 2)
_WHOLE = np.float32(3 * 2.0**22)  # Its low 16 bits are 0, and numbers around it are whole.
_SQRT_2_TO_2 = np.int32(0x40000000 - 0x3FB504F3)

_HALVES = np.arange(-128, 128)
_STEPS: Floats = np.ldexp(
    np.where(_HALVES % 2, np.float32(2**0.5), np.float32(1)), _HALVES // 2
).astype(np.float32)

Codes = npt.NDArray[np.int8] | npt.NDArray[np.int16]
_Places = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]


class ScaledIntegers(Codec):
    """What the three widths share. Scratch memory: two bytes an element, and 3 MiB.

    Attributes:
        latent_step: k of the latent part.
        rope_step: k of the rotary part.
    """

    version = 1
    loss = Loss.BOUNDED
    latent_step: ClassVar[float]
    rope_step: ClassVar[float]

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        planes = PlaneWriter(WHOLE_RECORDS)
        for piece in pieces(block, spec):
            if piece.is_latent:
                grid = _Grid.of(piece)
                with np.errstate(all="ignore"):  # NaN and infinity are among the numbers.
                    latent = _quantise(_records(piece, grid), grid, _Rule.of(grid, self._k))
                latent.write(planes, grid, piece.component.itemsize_bytes)
            else:
                planes.add_elements(piece.data, piece.component.itemsize_bytes)
        return planes.finish()

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        planes = PlaneReader(encoded, sum(map(_planes_of, pieces(out, spec))), self.name)
        for piece in pieces(out, spec):
            if piece.is_latent:
                grid = _Grid.of(piece)
                latent = _Latent.read(planes, grid, piece.component.dtype)
                _restore(latent, grid, _records(piece, grid))
            else:
                planes.read_elements(piece.data, piece.component.itemsize_bytes)
        planes.finish()

    @property
    def _k(self) -> tuple[float, float]:
        return self.latent_step, self.rope_step


class Q8(ScaledIntegers):
    """About 7 bits an element: the finest that 8-bit codes give."""

    id = 3
    name = "q8"
    latent_step = 0.02
    rope_step = 0.01


class Q6(ScaledIntegers):
    """The error of fp8_ds_mla in 6 tenths of its bytes."""

    id = 4
    name = "q6"
    latent_step = 0.115
    rope_step = 0.014


class Q4(ScaledIntegers):
    """About 4 bits an element: visible loss."""

    id = 5
    name = "q4"
    latent_step = 0.25
    rope_step = 0.05


@dataclass(frozen=True, slots=True)
class _Part:
    """The latent or the rotary part of records.

    Attributes:
        columns: Which elements of a record.
        low_bits: Bits of a code beyond the eight of its plane: 0, for the rotary part 1.
    """

    columns: slice
    low_bits: int

    @property
    def width(self) -> int:
        """Elements."""
        width: int = self.columns.stop - self.columns.start
        return width

    @property
    def largest(self) -> int:
        """The largest code."""
        return _LARGEST << self.low_bits

    @property
    def exception(self) -> int:
        """The code that stands for an exception."""
        return _EXCEPTION << self.low_bits

    def room(self, layers: int, rows: int) -> Codes:
        """An array for the codes."""
        shape = (layers, rows, self.width)
        return np.empty(shape, np.int16) if self.low_bits else np.empty(shape, np.int8)

    def write(self, codes: Codes, planes: PlaneWriter) -> None:
        """Append the planes of the codes."""
        if not self.low_bits:
            planes.add(_bytes_of(codes))
            return
        planes.add(_bytes_of((codes >> 1).astype(np.int8)))
        planes.add(np.packbits((codes & 1).astype(np.uint8)))

    def read(self, planes: PlaneReader, layers: int, rows: int) -> Codes:
        """Take the planes of the codes."""
        shape = (layers, rows, self.width)
        count = prod(shape)
        codes: Codes = planes.read(count).view(np.int8).reshape(shape)
        if not self.low_bits:
            return codes
        codes = np.multiply(codes, 2, dtype=np.int16)
        codes += np.unpackbits(planes.read(-(-count // 8)), count=count).reshape(shape)
        return codes


@dataclass(frozen=True, slots=True)
class _Grid:
    """A latent as (layers, rows, width).

    Attributes:
        layers: What comes before shape[-2]; 1 if that is short.
        rows: Records of a layer.
        parts: The latent part, and the rotary part if there is one.
    """

    layers: int
    rows: int
    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, piece: Piece) -> _Grid:
        """The grid of a latent."""
        records = piece.elements // piece.record_width
        rows = piece.component.shape[-2]
        if rows < _FEW_ROWS:
            rows = records
        latent = piece.record_width - piece.rope_width
        parts = [_Part(slice(0, latent), 0)]
        if piece.rope_width:
            parts.append(_Part(slice(latent, piece.record_width), 1))
        return cls(records // rows, rows, tuple(parts))

    @property
    def width(self) -> int:
        """Elements of a record."""
        return sum(part.width for part in self.parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the elements."""
        return self.layers, self.rows, self.width

    @property
    def tiles(self) -> int:
        """Tiles of a layer."""
        return -(-self.rows // TILE_ROWS)

    def batches(self) -> Iterator[tuple[slice, slice, int]]:
        """Tiles to work on together: layers, rows, and the tile's number in each layer."""
        for tile in range(self.tiles):
            rows = slice(tile * TILE_ROWS, min((tile + 1) * TILE_ROWS, self.rows))
            together = max(1, _BATCH_ELEMENTS // ((rows.stop - rows.start) * self.width))
            for layer in range(0, self.layers, together):
                yield slice(layer, min(layer + together, self.layers)), rows, tile

    def scratch(self) -> Floats:
        """Room for any batch."""
        most = max(_BATCH_ELEMENTS, TILE_ROWS * self.width)
        return np.empty(min(most, prod(self.shape)), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Latent:
    """A latent in its stored form.

    Attributes:
        steps: (layers, tiles, width) uint8, what names the step.
        means: (layers, tiles, width) int16, in 4 steps.
        codes: (layers, rows, its width) for each part.
        exceptions: (n,) elements for each part, in the order of their codes.
    """

    steps: npt.NDArray[np.uint8]
    means: npt.NDArray[np.int16]
    codes: list[Codes]
    exceptions: list[Elements]

    @classmethod
    def empty(cls, grid: _Grid) -> _Latent:
        """Room for what encoding finds."""
        shape = (grid.layers, grid.tiles, grid.width)
        codes = [part.room(grid.layers, grid.rows) for part in grid.parts]
        return cls(np.empty(shape, dtype=np.uint8), np.empty(shape, dtype="<i2"), codes, [])

    @classmethod
    def read(cls, planes: PlaneReader, grid: _Grid, dtype: str) -> _Latent:
        """Take a latent's planes; raises CorruptBlock."""
        shape = (grid.layers, grid.tiles, grid.width)
        steps = planes.read(grid.layers * grid.tiles * grid.width).reshape(shape)
        means = np.empty(shape, dtype="<i2")
        planes.read_elements(_bytes_of(means), 2)
        means = (means >> 1 & 0x7FFF) ^ -(means & 1)
        codes = [part.read(planes, grid.layers, grid.rows) for part in grid.parts]
        exceptions = []
        for part, found in zip(grid.parts, codes, strict=True):
            count = np.count_nonzero(found < -part.largest)
            bits = np.empty(count * DTYPE_BYTES[dtype], dtype=np.uint8)
            planes.read_elements(bits, DTYPE_BYTES[dtype])
            exceptions.append(elements(bits, dtype))
        return cls(steps, means, codes, exceptions)

    def write(self, planes: PlaneWriter, grid: _Grid, itemsize_bytes: int) -> None:
        """Append a latent's planes."""
        planes.add(_bytes_of(self.steps))
        planes.add_elements(_bytes_of(self.means << 1 ^ self.means >> 15), 2)
        for part, codes in zip(grid.parts, self.codes, strict=True):
            part.write(codes, planes)
        for exceptions in self.exceptions:
            planes.add_elements(_bytes_of(exceptions), itemsize_bytes)


def _bytes_of(array: npt.NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _records(piece: Piece, grid: _Grid) -> Elements:
    return elements(piece.data, piece.component.dtype).reshape(grid.shape)


def _planes_of(piece: Piece) -> int:
    itemsize = piece.component.itemsize_bytes
    if not piece.is_latent:
        return itemsize
    return 3 + sum(1 + part.low_bits + itemsize for part in _Grid.of(piece).parts)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How steps are chosen.

    Attributes:
        factor: (parts,) float64, of the product of the channel's spread and the root of its part's
            summed variance.
        least_by_peak: (width,) float32, of the squared peak: below it the squared step would need
            larger codes.
    """

    factor: npt.NDArray[np.float64]
    least_by_peak: Floats

    @classmethod
    def of(cls, grid: _Grid, k: Sequence[float]) -> _Rule:
        """The rule for the parts' k."""
        factor, least = np.empty(len(grid.parts)), np.empty(grid.width, dtype=np.float32)
        for number, (part, part_k) in enumerate(zip(grid.parts, k, strict=False)):
            factor[number] = part_k * part_k / part.width**0.5
            least[part.columns] = 2**0.5 / (_PEAK_CODE << part.low_bits) ** 2
        return cls(factor, least)


def _quantise(source: Elements, grid: _Grid, rule: _Rule) -> _Latent:
    """Encode (layers, rows, width) elements."""
    latent = _Latent.empty(grid)
    any_odd = False
    scratch, more_scratch = grid.scratch(), grid.scratch()
    for layers, rows, number in grid.batches():
        batch = source[layers, rows]
        tiles = scratch[: batch.size].reshape(batch.shape)
        widen(batch, tiles)
        channels = _describe(tiles, more_scratch[: batch.size].reshape(batch.shape))
        if channels.odd[0].size:
            any_odd = True
            _describe_odd(channels, tiles)
        steps, means = _choose_steps(channels, grid, rule)
        latent.steps[layers, number], latent.means[layers, number] = steps, means
        found = _to_codes(tiles, channels.odd, steps, means, grid.parts)
        for part, codes in zip(grid.parts, latent.codes, strict=True):
            np.copyto(codes[layers, rows], found[..., part.columns], casting="unsafe")
    for part, codes in zip(grid.parts, latent.codes, strict=True):
        elsewhere = source[..., part.columns]
        none = elsewhere[:0].reshape(-1)
        latent.exceptions.append(elsewhere[codes == part.exception] if any_odd else none)
    return latent


@dataclass(frozen=True, slots=True)
class _Channels:
    """Statistics of some tiles' channels.

    Attributes:
        mean: (tiles, width) float32, the middle of each channel.
        variance: (tiles, width) float32, around it.
        peak_square: (tiles, width) float32: how far from the middle codes must reach, squared.
        odd: Tile and column numbers, each (n,), of channels that may have exceptions.
    """

    mean: Floats
    variance: Floats
    peak_square: Floats
    odd: _Places


def _describe(tiles: Floats, scratch: Floats) -> _Channels:
    """Statistics of (tiles, rows, width); `scratch` has the same shape."""
    one_row = np.float32(1 / tiles.shape[1])
    mean = np.add.reduce(tiles, axis=1)
    mean *= one_row
    np.subtract(tiles, mean[:, None], out=scratch)
    np.multiply(scratch, scratch, out=scratch)
    variance = np.add.reduce(scratch, axis=1)
    variance *= one_row
    peak_square = np.maximum.reduce(scratch, axis=1)
    usual = peak_square <= _PEAK_SPREADS**2 * variance
    usual &= peak_square + np.square(mean) < _HUGE**2
    tile, column = np.nonzero(~usual)
    return _Channels(mean, variance, peak_square, (tile, column))


def _describe_odd(channels: _Channels, tiles: Floats) -> None:
    """Replace the statistics of odd channels by some that outliers don't move."""
    tile, column = channels.odd
    mean, variance = _middle(tiles[tile, :, column])
    channels.mean[channels.odd] = mean
    channels.variance[channels.odd] = variance
    channels.peak_square[channels.odd] = _PEAK_SPREADS**2 * variance


def _middle(values: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of each row of (n, rows) that outliers don't move: from its quartiles."""
    ordered = np.sort(np.where(np.abs(values) < _HUGE, values, np.float32(np.nan)), axis=1)
    count = np.count_nonzero(ordered == ordered, axis=1)  # NaN is last.
    at = np.arange(len(values))
    lower, middle, upper = (ordered[at, count * quarter // 4] for quarter in (1, 2, 3))
    none = count == 0
    spread = (upper - lower) / np.float32(1.349)  # That of a normal distribution.
    return np.where(none, np.float32(0), middle), np.where(none, np.float32(0), spread * spread)


def _choose_steps(
    channels: _Channels, grid: _Grid, rule: _Rule
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int16]]:
    """Names of the steps, and the means in 4 steps, both (tiles, width)."""
    starts = [part.columns.start for part in grid.parts]
    # The sum of some hundred of the largest variances is no float32. Their mean is, and a spread
    # is 2^61 at most, so no square is beyond 2^122.
    energy = np.add.reduceat(channels.variance, starts, axis=1, dtype=np.float64)
    overall = (np.sqrt(energy) * rule.factor).astype(np.float32)
    square = np.sqrt(channels.variance)  # Becomes the square of the step.
    for number, part in enumerate(grid.parts):
        square[:, part.columns] *= overall[:, number, None]
    np.maximum(square, channels.peak_square * rule.least_by_peak, out=square)
    np.maximum(square, np.square(channels.mean) * _LEAST_BY_MEAN, out=square)
    # The nearest whole log2 is in the exponent, once numbers from sqrt(2) on have that of 2.
    halves = (square.view(np.int32) + _SQRT_2_TO_2) >> 23
    steps = (halves + (128 - 127)).astype(np.uint8)
    means = np.rint(channels.mean / (_MEAN_STEPS * _STEPS[steps])).astype(np.int16)
    return steps, means


def _to_codes(
    tiles: Floats,
    odd: _Places,
    steps: npt.NDArray[np.uint8],
    means: npt.NDArray[np.int16],
    parts: Sequence[_Part],
) -> npt.NDArray[np.int32]:
    """Numbers whose low 16 bits are the codes, (tiles, rows, width); overwrites `tiles`.

    A mean is a whole number of steps, so one addition subtracts it and rounds: to whole numbers,
    as every float32 from 2^23 to 2^24 is.
    """
    per_step = 1 / _STEPS[steps]
    shift = _WHOLE - _MEAN_STEPS * means.astype(np.float32)
    tile, column = odd
    values = tiles[tile, :, column]
    np.multiply(tiles, per_step[:, None], out=tiles)
    np.add(tiles, shift[:, None], out=tiles)
    found = tiles.view(np.int32)
    if tile.size:
        codes = np.rint(values * per_step[odd][:, None] + (shift[odd] - _WHOLE)[:, None])
        for part in parts:
            inside = (part.columns.start <= column) & (column < part.columns.stop)
            codes[inside] = np.where(
                np.abs(codes[inside]) <= part.largest, codes[inside], part.exception
            )
        found[tile, :, column] = codes
    return found


def _restore(latent: _Latent, grid: _Grid, target: Elements) -> None:
    """Decode into (layers, rows, width) elements."""
    scratch = grid.scratch()
    for layers, rows, number in grid.batches():
        batch = target[layers, rows]
        tiles = scratch[: batch.size].reshape(batch.shape)
        for part, codes in zip(grid.parts, latent.codes, strict=True):
            np.copyto(tiles[..., part.columns], codes[layers, rows])
        step = _STEPS[latent.steps[layers, number]]
        offset = latent.means[layers, number] * (_MEAN_STEPS * step)
        np.multiply(tiles, step[:, None], out=tiles)
        np.add(tiles, offset[:, None], out=tiles)
        narrow(tiles, batch)
    for part, codes, exceptions in zip(grid.parts, latent.codes, latent.exceptions, strict=True):
        if exceptions.size:
            target[..., part.columns][codes < -part.largest] = exceptions
