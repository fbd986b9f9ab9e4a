"""fp8_ds_mla against torch's own float8, and against the record as its readers know it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.codec.base import Bytes
from kvtier.codec.floats import round_to
from kvtier.codec.fp8_ds_mla import Fp8DsMla
from kvtier.errors import CorruptBlock
from kvtier.types import Component, NamespaceSpec, RopeSpec

CODEC = Fp8DsMla()
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def spec(shape: tuple[int, ...], dtype: str = "bfloat16", rope: int = 64) -> NamespaceSpec:
    component = Component("latent_rope", dtype, shape)
    return NamespaceSpec("m", "r", (component,), RopeSpec("interleaved", rope))


def bytes_of(values: Tensor) -> Bytes:
    found: Bytes = values.contiguous().view(torch.uint8).flatten().numpy()
    return found


def records(seed: int, tokens: int = 150, spread: float = 3.0) -> Tensor:
    """(2, tokens, 576) float32 of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, 2, tokens, 576, generator=generator)
    return normal[0] * (spread * normal[1]).exp()


def by_torch(values: Tensor, latent: int = 512) -> tuple[Tensor, Tensor]:
    """vLLM's record by torch's conversions: bytes, and what they stand for as float32."""
    groups = values[..., :latent].float().reshape(*values.shape[:-1], -1, 128)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    scale = (largest / 448).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    rope = values[..., latent:].bfloat16()
    parts = (codes.flatten(-2), scale.squeeze(-1), rope)
    stored = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
    return stored, torch.cat([(codes.float() * scale).flatten(-2), rope.float()], dim=-1)


def decoded(stored: Bytes, layout: NamespaceSpec) -> Tensor:
    out = np.empty(layout.block_bytes, dtype=np.uint8)
    CODEC.decode_into(stored, layout, out)
    (component,) = layout.components
    return torch.from_numpy(out).view(DTYPES[component.dtype]).view(component.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_records_are_those_of_torch(dtype: str, seed: int) -> None:
    values = records(seed, spread=1.0 if dtype == "float16" else 3.0).to(DTYPES[dtype])
    values[0, 0] = 0
    values[0, 1, :128] = 1e-39 if dtype == "float32" else 1e-7
    layout = spec(tuple(values.shape), dtype)
    stored, restored = by_torch(values)
    encoded = CODEC.encode(bytes_of(values), layout)
    assert stored.shape[-1] == 656
    assert np.array_equal(encoded, bytes_of(stored))
    assert torch.equal(decoded(encoded, layout), restored.to(DTYPES[dtype]))


def test_other_widths_have_the_same_parts() -> None:
    """MiniCPM3: 256 + 32."""
    values = records(1)[..., :288].bfloat16()
    layout = spec(tuple(values.shape), rope=32)
    stored, _ = by_torch(values, latent=256)
    assert stored.shape[-1] == 328
    assert np.array_equal(CODEC.encode(bytes_of(values), layout), bytes_of(stored))


def test_a_last_group_may_be_short() -> None:
    values = records(1)[..., :200].bfloat16()
    layout = spec(tuple(values.shape), rope=0)
    encoded = CODEC.encode(bytes_of(values), layout)
    assert encoded.size == 2 * 150 * (200 + 8)
    error = (decoded(encoded, layout).float() - values.float()).abs()
    largest = torch.cat(
        [g.abs().amax(-1, keepdim=True).expand_as(g) for g in torch.split(values, 128, -1)], -1
    )
    assert bool((error <= largest.float() / 27).all())


def test_scales_that_are_powers_of_two_are_read() -> None:
    """FlashMLA rounds them up, and never below 1e-4."""
    values = records(4, spread=0.5).bfloat16()
    groups = values[..., :512].float().reshape(*values.shape[:-1], 4, 128)
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 448).clamp_min(1e-4).log2().ceil().exp2()
    codes = (groups / scale).to(torch.float8_e4m3fn)
    parts = (codes.flatten(-2), scale.squeeze(-1), values[..., 512:])
    stored = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
    got = decoded(bytes_of(stored), spec(tuple(values.shape)))
    assert torch.equal(got[..., :512], (codes.float() * scale).flatten(-2).bfloat16())
    assert torch.equal(got[..., 512:], values[..., 512:])


def test_records_that_are_fp8_already_pass_through() -> None:
    layout = spec((61, 64, 656), "uint8")
    block = np.random.default_rng(0).integers(0, 256, layout.block_bytes, dtype=np.uint8)
    encoded = CODEC.encode(block, layout)
    out = np.empty_like(block)
    CODEC.decode_into(encoded, layout, out)
    assert np.array_equal(encoded, block)
    assert np.array_equal(out, block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_leave_their_neighbours_alone(dtype: str) -> None:
    values = records(5, spread=0.5).to(DTYPES[dtype])
    layout = spec(tuple(values.shape), dtype)
    plain = decoded(CODEC.encode(bytes_of(values), layout), layout)
    strange = {(0, 3, 5): torch.nan, (1, 140, 511): -torch.inf, (1, 2, 129): torch.inf}
    for at, value in strange.items():
        values[at] = value
    got = decoded(CODEC.encode(bytes_of(values), layout), layout)
    for at, value in strange.items():
        assert torch.equal(got[at].isnan(), torch.tensor(value).isnan())
        assert got[at].isnan() or got[at] == value
        got[at] = plain[at]
    # The removed elements were not the largest of their groups, so scales stay.
    assert torch.equal(got, plain)


def test_a_place_for_infinity_that_is_none_is_corrupt() -> None:
    values = records(6).bfloat16()
    layout = spec(tuple(values.shape))
    values[0, 0, 0] = torch.inf
    encoded = CODEC.encode(bytes_of(values), layout)
    assert encoded.size == 2 * 150 * 656 + 9
    for at, value in ((-9, 1), (-2, 255), (-1, 0), (-1, 2)):
        hostile = encoded.copy()
        hostile[at] = value
        with pytest.raises(CorruptBlock):
            decoded(hostile, layout)


def test_only_latents_have_infinities() -> None:
    latent = Component("latent_rope", "bfloat16", (2, 80))
    indexer = Component("indexer_key", "bfloat16", (2, 80))
    layout = NamespaceSpec("m", "r", (latent, indexer), RopeSpec("interleaved", 64))
    block = torch.zeros(2, 2, 80, dtype=torch.bfloat16)
    block[0, 1, 3] = torch.inf
    encoded = CODEC.encode(bytes_of(block), layout)
    out = np.empty(layout.block_bytes, dtype=np.uint8)
    CODEC.decode_into(encoded, layout, out)
    assert np.array_equal(out, bytes_of(block))
    encoded[-9] = 1
    with pytest.raises(CorruptBlock):
        CODEC.decode_into(encoded, layout, out)


def test_rounding_is_that_of_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    source = bits.view(np.float32)
    out = np.empty(bits.shape, dtype=np.uint16)
    round_to(source, out)
    wanted = torch.from_numpy(source.copy()).bfloat16()
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    usual = torch.from_numpy(source.copy()).isfinite() & wanted.isfinite()
    assert torch.equal(got[usual], wanted[usual])
    assert torch.equal(got.isnan(), wanted.isnan())
    assert bool(got[torch.from_numpy(np.isfinite(source))].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_nothing_but_infinity_comes_back(dtype: str) -> None:
    """Longer than the block (encode_block stores it raw), but right."""
    values = torch.full((2, 150, 576), torch.inf, dtype=DTYPES[dtype])
    values[:, ::2] *= -1
    layout = spec(tuple(values.shape), dtype)
    encoded = CODEC.encode(bytes_of(values), layout)
    assert encoded.size == 2 * 150 * (656 + 512 * 9)
    assert torch.equal(decoded(encoded, layout), values)


def test_any_scale_is_read_without_a_warning() -> None:
    """Hostile scales: NaN, infinity, negative, denormal."""
    values = records(7).bfloat16()[:1, :6]
    layout = spec(tuple(values.shape))
    encoded = CODEC.encode(bytes_of(values), layout).copy()
    scales = encoded.reshape(-1, 656)[:, 512:528].view("<u4")
    scales[:] = np.array([0x7FC00000, 0x7F800000, 0xFF7FFFFF, 1, 0x80000000, 0], "<u4")[:, None]
    codes = torch.from_numpy(encoded.reshape(-1, 656)[:, :512].copy()).view(torch.float8_e4m3fn)
    numbers = torch.from_numpy(scales.repeat(128, axis=1).view("<f4"))
    wanted, got = (codes.float() * numbers), decoded(encoded, layout)[0, :, :512].float()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())
    assert torch.equal(got[3], wanted.bfloat16()[3].float())
