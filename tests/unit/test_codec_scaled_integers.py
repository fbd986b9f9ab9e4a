"""q8, q6, q4: how far off they may be, what stays exact, and what hostile planes do."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from kvtier.codec import codec_by_name
from kvtier.codec.base import Bytes
from kvtier.codec.fp8_ds_mla import Fp8DsMla
from kvtier.codec.scaled_integers import Q4, Q6, Q8, ScaledIntegers
from kvtier.errors import CorruptBlock
from kvtier.types import Component, NamespaceSpec, RopeSpec

CODECS = [Q8(), Q6(), Q4()]
Array = npt.NDArray[np.float32]


def spec(shape: tuple[int, ...], rope: int = 64, dtype: str = "float32") -> NamespaceSpec:
    component = Component("latent_rope", dtype, shape)
    return NamespaceSpec("m", "r", (component,), RopeSpec("interleaved", rope))


def latents(shape: tuple[int, ...] = (3, 64, 576), rope: int = 64, seed: int = 0) -> Array:
    """Channels of different means and spreads, the rotary ones ten times as large."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal((shape[0], 1, shape[-1]))) * 0.5
    mean = rng.standard_normal((shape[0], 1, shape[-1])) * spread
    values = rng.standard_normal(shape) * spread + mean
    values[..., shape[-1] - rope :] *= 10
    return values.astype(np.float32)


def encode(codec: ScaledIntegers | Fp8DsMla, values: Array, rope: int = 64) -> Bytes:
    return codec.encode(values.reshape(-1).view(np.uint8), spec(values.shape, rope))


def round_trip(codec: ScaledIntegers | Fp8DsMla, values: Array, rope: int = 64) -> Array:
    out = np.empty_like(values)
    layout = spec(values.shape, rope)
    codec.decode_into(encode(codec, values, rope), layout, out.reshape(-1).view(np.uint8))
    return out


def relative(values: Array, restored: Array) -> float:
    return float(np.linalg.norm(restored - values) / np.linalg.norm(values))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_the_error_is_half_a_step(codec: ScaledIntegers) -> None:
    """The bound that the module's text states."""
    values = latents()
    error = np.abs(round_trip(codec, values) - values).max(axis=1)
    centred = values - values.mean(axis=1, keepdims=True)
    spread = np.sqrt(np.square(centred).mean(axis=1))
    for part, k, peak in (
        (slice(0, 512), codec.latent_step, 124),
        (slice(512, 576), codec.rope_step, 248),
    ):
        overall = np.sqrt(np.square(spread[:, part]).mean(axis=1, keepdims=True))
        wanted = k * np.sqrt(spread[:, part] * overall)
        least = np.abs(centred[..., part]).max(axis=1) / peak
        step = 2**0.5 * np.maximum(wanted, least)
        assert (error[:, part] <= 0.5001 * step).all()
        assert (error[:, part] >= 0.2 * np.minimum(wanted, step)).mean() > 0.9  # No free lunch.


def test_q6_beats_fp8_per_byte() -> None:
    values = np.concatenate([latents(seed=seed) for seed in range(4)])
    latent = (..., slice(0, 512))
    mine, theirs = (round_trip(codec, values)[latent] for codec in (Q6(), Fp8DsMla()))
    assert relative(values[latent], mine) < relative(values[latent], theirs)
    assert encode(Q6(), values).size < 0.58 * encode(Fp8DsMla(), values).size


def test_widths_are_in_order() -> None:
    values = latents(seed=2)
    sizes = [encode(codec, values).size for codec in CODECS]
    errors = [relative(values, round_trip(codec, values)) for codec in CODECS]
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38, -1e6])
def test_an_outlier_is_exact_and_leaves_the_others_alone(codec: ScaledIntegers, odd: float) -> None:
    values = latents()
    plain = np.abs(round_trip(codec, values) - values)
    values[1, 10, 5] = values[2, 63, 575] = odd
    restored = round_trip(codec, values)
    assert restored[1, 10, 5].tobytes() == values[1, 10, 5].tobytes()
    assert restored[2, 63, 575].tobytes() == values[2, 63, 575].tobytes()
    values[1, 10, 5] = values[2, 63, 575] = restored[1, 10, 5] = restored[2, 63, 575] = 0
    error = np.abs(restored - values)
    assert np.array_equal(error[0], plain[0])
    assert (error.max(axis=1) <= 3 * plain.max(axis=1) + 1e-6).all()


def test_a_channel_full_of_huge_numbers_is_exact_there() -> None:
    values = latents((1, 64, 80))
    plain = np.abs(round_trip(Q6(), values) - values)
    values[0, :40:2, 5], values[0, 1:40:2, 5] = 3e38, -3e38
    restored = round_trip(Q6(), values)
    assert np.array_equal(restored[0, :40, 5], values[0, :40, 5])
    assert np.abs(restored - values)[0, 40:, 5].max() <= 3 * plain[0, :, 5].max()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_nan_payloads_stay(codec: ScaledIntegers) -> None:
    values = latents((1, 64, 80))
    values.view(np.uint32)[0, 3, 4:6] = (0x7F800001, 0xFFC12345)
    restored = round_trip(codec, values)
    assert restored.view(np.uint32)[0, 3, 4:6].tolist() == [0x7F800001, 0xFFC12345]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1.0, -3.7e5, 1e30])
def test_constant_channels(value: float) -> None:
    values = np.full((2, 64, 80), value, dtype=np.float32)
    assert np.abs(round_trip(Q6(), values) - values).max() <= 1e-5 * abs(value) + 2.0**-64


@pytest.mark.parametrize(
    "shape", [(61, 1, 80), (2, 15, 80), (2, 16, 80), (3, 65, 80), (130, 80), (1, 1, 80)]
)
def test_rows_of_any_number(shape: tuple[int, ...]) -> None:
    """Short, long, and not a multiple of a tile."""
    values = latents(shape) if len(shape) == 3 else latents((1, *shape))[0]
    assert relative(values, round_trip(Q6(), values)) < 0.1


def test_many_of_the_largest_numbers_keep_their_signs() -> None:
    """The sum of their variances is no float32."""
    values = np.full((1, 64, 576), 1.1e18, dtype=np.float32)
    values[0, ::2] *= -1
    restored = round_trip(Q6(), values)
    assert np.abs(restored / values - 1).max() < 0.1


def test_layers_do_not_influence_each_other() -> None:
    """So a model's cache may be passed through a codec layer by layer."""
    values = latents((5, 64, 576))
    whole = round_trip(Q6(), values)
    for layer in range(5):
        one = np.ascontiguousarray(values[layer : layer + 1])
        assert np.array_equal(round_trip(Q6(), one)[0], whole[layer])


def test_float16_stays_finite() -> None:
    layout = spec((1, 64, 80), dtype="float16")
    values = np.full((1, 64, 80), 65504, dtype=np.float16)
    values[0, ::2] = -65504
    out = np.empty_like(values)
    encoded = Q4().encode(values.reshape(-1).view(np.uint8), layout)
    Q4().decode_into(encoded, layout, out.reshape(-1).view(np.uint8))
    assert np.isfinite(out).all()
    assert np.array_equal(np.sign(out), np.sign(values))


def planes_of(encoded: Bytes, count: int) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Entries and bodies of a stored form."""
    data = encoded.tobytes()
    entries = list(struct.iter_unpack("<BI", data[: 5 * count]))
    bodies, at = [], 5 * count
    for _, size in entries:
        bodies.append(data[at : at + size])
        at += size
    return entries, bodies


def stored(entries: list[tuple[int, int]], bodies: list[bytes]) -> Bytes:
    header = b"".join(
        struct.pack("<BI", mode, len(body)) for (mode, _), body in zip(entries, bodies, strict=True)
    )
    return np.frombuffer(header + b"".join(bodies), dtype=np.uint8)


def test_exceptions_must_be_as_many_as_codes_say() -> None:
    values = latents((1, 64, 80))
    values[0, 3, 4] = np.nan
    layout, out = spec(values.shape), np.empty(values.nbytes, dtype=np.uint8)
    entries, bodies = planes_of(encode(Q6(), values), 14)
    assert [len(body) for body in bodies[6:10]] == [1, 1, 1, 1]  # The latent part's, a byte each.
    Q6().decode_into(stored(entries, bodies), layout, out)
    for wrong in (b"", b"ab"):
        with pytest.raises(CorruptBlock):
            Q6().decode_into(stored(entries, [*bodies[:6], wrong, *bodies[7:]]), layout, out)


def test_a_bomb_allocates_no_more_than_a_block() -> None:
    values = latents((1, 64, 576))
    entries, bodies = planes_of(encode(Q6(), values), 14)
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    layout, out = spec(values.shape), np.empty(values.nbytes, dtype=np.uint8)
    for at in range(14):
        hostile = stored(
            [*entries[:at], (1, 0), *entries[at + 1 :]], [*bodies[:at], bomb, *bodies[at + 1 :]]
        )
        tracemalloc.start()
        with pytest.raises(CorruptBlock):
            Q6().decode_into(hostile, layout, out)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 * values.nbytes


def test_any_step_and_mean_is_finite() -> None:
    """Hostile planes of the right lengths decode to numbers, not to warnings."""
    values = latents((1, 64, 80))
    entries, bodies = planes_of(encode(Q6(), values), 14)
    for at in range(3):
        for byte in (b"\0", b"\x7f", b"\x80", b"\xff"):
            hostile = stored(
                [*entries[:at], (0, 0), *entries[at + 1 :]],
                [*bodies[:at], byte * 80, *bodies[at + 1 :]],
            )
            out = np.empty_like(values)
            Q6().decode_into(hostile, spec(values.shape), out.reshape(-1).view(np.uint8))
            assert np.isfinite(out).all()


def test_other_components_stay_exact() -> None:
    rng = np.random.default_rng(0)
    latent = Component("latent_rope", "bfloat16", (2, 64, 80))
    indexer = Component("indexer_key", "bfloat16", (2, 64, 128))
    layout = NamespaceSpec("m", "r", (indexer, latent), RopeSpec("interleaved", 64))
    block = rng.integers(0, 256, layout.block_bytes, dtype=np.uint8)
    out = np.empty_like(block)
    codec = codec_by_name("q4")
    codec.decode_into(codec.encode(block, layout), layout, out)
    assert np.array_equal(out[: indexer.size_bytes], block[: indexer.size_bytes])
