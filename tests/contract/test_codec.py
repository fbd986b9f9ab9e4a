"""CodecContract: what every codec promises; a new codec is one subclass."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.codec import codec_by_id, codec_by_name, encode_block
from kvtier.codec.base import Bytes, Codec
from kvtier.codec.floats import elements, widen
from kvtier.codec.fp8_ds_mla import Fp8DsMla
from kvtier.codec.layout import pieces
from kvtier.codec.lossless import Lossless
from kvtier.codec.raw import Raw
from kvtier.codec.scaled_integers import Q4, Q6, Q8
from kvtier.errors import ConfigError, CorruptBlock
from kvtier.types import DTYPE_BYTES, Component, Loss, NamespaceSpec, RopeSpec

GOLDENS = Path(__file__).parents[1] / "golden" / "codecs"
LATENTS = NamespaceSpec(
    "tiny-mla",
    "rev",
    (Component("latent_rope", "bfloat16", (4, 16, 576)), Component("indexer", "uint8", (4, 16, 3))),
    RopeSpec("interleaved", 64),
)
GOLDEN = NamespaceSpec("m", "r", (Component("a", "bfloat16", (64,)), Component("b", "uint8", (3,))))

names = st.sampled_from(["latent_", "latent.", "key", "index_k"])
"""Of components: the first two are latents' names, the others not."""
components = st.builds(
    Component,
    names,
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
)
latent_components = st.builds(
    Component,
    names,
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(16, 24)),
)
ropes = st.sampled_from([RopeSpec(), RopeSpec("interleaved", 1), RopeSpec("half", 16)])


def spec_of(found: list[Component], rope: RopeSpec) -> NamespaceSpec:
    named = (Component(f"{c.name}{i}", c.dtype, c.shape) for i, c in enumerate(found))
    return NamespaceSpec("m", "r", tuple(named), rope)


specs = st.builds(spec_of, st.lists(components, min_size=1, max_size=3), ropes)
latent_specs = st.builds(
    spec_of, st.lists(latent_components | components, min_size=1, max_size=3), ropes
)
ours = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.differing_executors],
)


def latents(spec: NamespaceSpec = LATENTS, seed: int = 0) -> Bytes:
    """A block whose bytes are those of normal bf16 numbers."""
    normal = np.random.default_rng(seed).standard_normal(spec.block_bytes, dtype=np.float32)
    high = (normal.view(np.uint32) >> 16).astype("<u2")
    return high.view(np.uint8)[: spec.block_bytes].copy()


def numbers(data: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """The numbers that bytes of this dtype stand for."""
    bits = elements(data, dtype)
    found = np.empty(bits.shape, dtype=np.float32)
    with np.errstate(invalid="ignore"):  # Signalling NaN.
        widen(bits, found)
    return found


def check_loss(block: Bytes, out: Bytes, spec: NamespaceSpec) -> None:
    """What every lossy codec promises of any bits."""
    for before, after in zip(pieces(block, spec), pieces(out, spec), strict=True):
        if not before.is_latent:
            assert np.array_equal(after.data, before.data)
            continue
        wanted, got = (numbers(piece.data, piece.component.dtype) for piece in (before, after))
        assert np.array_equal(np.isnan(got), np.isnan(wanted))
        assert np.array_equal(got[np.isinf(got)], wanted[np.isinf(wanted)])
        assert np.array_equal(np.isinf(got), np.isinf(wanted))
        finite = np.isfinite(wanted)
        largest = np.abs(wanted[finite], dtype=np.float64).max(initial=0)
        assert np.abs(got[finite], dtype=np.float64).max(initial=0) <= 1.5 * largest + 2.0**-60


class CodecContract:
    """Give the codec; an exact one comes back bit for bit, any comes back or raises."""

    codec: Codec

    def _decode(self, encoded: Bytes, spec: NamespaceSpec) -> Bytes:
        out = np.full(spec.block_bytes, 0xA5, dtype=np.uint8)
        self.codec.decode_into(encoded, spec, out)
        return out

    def test_its_name_and_id_find_it(self) -> None:
        assert type(codec_by_name(self.codec.name)) is type(self.codec)
        assert type(codec_by_id(self.codec.id, self.codec.version)) is type(self.codec)

    @ours
    @given(specs, st.data())
    def test_any_bit_pattern_of_any_layout_comes_back(
        self, spec: NamespaceSpec, data: st.DataObject
    ) -> None:
        size = spec.block_bytes
        plain = data.draw(st.binary(min_size=size, max_size=size) | st.just(bytes(size)))
        block = np.frombuffer(plain, dtype=np.uint8)
        self._check(block, self._decode(self.codec.encode(block, spec), spec), spec)

    @ours
    @given(latent_specs, st.integers(0, 2**32), st.floats(0, 1))
    def test_any_latent_comes_back(self, spec: NamespaceSpec, seed: int, strange: float) -> None:
        """Normal numbers of all sizes, among them random bits: NaN, infinity, denormals, huge."""
        rng = np.random.default_rng(seed)
        parts = []
        for component in spec.components:
            noise = rng.integers(0, 256, component.size_bytes, dtype=np.uint8)
            if component.dtype in ("bfloat16", "float16", "float32"):
                bits = elements(noise, component.dtype)
                normal = rng.standard_normal(bits.shape, dtype=np.float32) * 10 ** rng.uniform(
                    -4, 4
                )
                wide = normal.view(np.uint32) >> 16 if component.dtype == "bfloat16" else normal
                usual = rng.random(bits.shape) >= strange
                np.copyto(bits, wide.astype(bits.dtype), where=usual)
            parts.append(noise)
        block = np.concatenate(parts)
        self._check(block, self._decode(self.codec.encode(block, spec), spec), spec)

    def _check(self, block: Bytes, out: Bytes, spec: NamespaceSpec) -> None:
        if self.codec.loss is Loss.EXACT:
            assert np.array_equal(out, block)
        else:
            check_loss(block, out, spec)

    def test_latents_come_back_and_the_block_is_untouched(self) -> None:
        block = latents()
        before = block.copy()
        out = self._decode(self.codec.encode(block, LATENTS), LATENTS)
        assert np.array_equal(block, before)
        self._check(before, out, LATENTS)

    @ours
    @given(latent_specs)
    def test_the_stored_form_is_never_longer_than_the_block(self, spec: NamespaceSpec) -> None:
        block = np.random.default_rng(0).integers(0, 256, spec.block_bytes, dtype=np.uint8)
        used, encoded = encode_block(self.codec, block, spec)
        assert encoded.size <= block.size
        assert used.id == self.codec.id or (used.id == Raw.id and encoded is block)

    def test_every_truncation_and_any_tail_is_corrupt(self) -> None:
        spec = NamespaceSpec(
            "m", "r", (Component("latent", "bfloat16", (2, 20)),), RopeSpec("half", 4)
        )
        encoded = self.codec.encode(np.zeros(80, dtype=np.uint8), spec)
        for size in range(encoded.size):
            with pytest.raises(CorruptBlock):
                self._decode(encoded[:size], spec)
        with pytest.raises(CorruptBlock):
            self._decode(np.append(encoded, np.uint8(0)), spec)

    @ours
    @given(st.integers(0), st.integers(1, 255))
    def test_a_flipped_byte_decodes_or_is_corrupt_but_never_crashes(
        self, at: int, mask: int
    ) -> None:
        encoded = self.codec.encode(latents(), LATENTS).copy()
        # Headers and frame headers are at the front: half of the flips go there.
        reach = 64 if at % 2 else encoded.size
        encoded[at % reach] ^= mask
        try:
            self._decode(encoded, LATENTS)
        except CorruptBlock as error:
            assert self.codec.name in str(error)  # noqa: PT017 - either outcome is right

    @ours
    @given(st.binary(max_size=300))
    def test_arbitrary_bytes_decode_or_are_corrupt(self, hostile: bytes) -> None:
        try:
            self._decode(np.frombuffer(hostile, dtype=np.uint8), LATENTS)
        except CorruptBlock as error:
            assert self.codec.name in str(error)  # noqa: PT017 - either outcome is right

    @ours
    @given(st.data())
    def test_a_forged_plane_decodes_or_is_corrupt_in_bounded_memory(
        self, data: st.DataObject
    ) -> None:
        encoded = self.codec.encode(latents(), LATENTS)
        planes = planes_of(encoded) or [(0, encoded.tobytes())]
        at = data.draw(st.integers(0, len(planes) - 1))
        forged = data.draw(st.sampled_from(FORGERIES))(unpacked(planes[at]))
        mode = data.draw(st.sampled_from([1, 0, 2]))
        if len(planes) == 1:
            hostile = np.frombuffer(forged, dtype=np.uint8)
        else:
            hostile = packed([*planes[:at], (mode, forged), *planes[at + 1 :]])
        tracemalloc.start()
        try:
            self._decode(hostile, LATENTS)
        except CorruptBlock as error:
            assert self.codec.name in str(error)  # noqa: PT017 - either outcome is right
        finally:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak_bytes < 4 * LATENTS.block_bytes + (2 << 20) < BOMB_BYTES

    @ours
    @given(st.data())
    def test_an_entry_that_lies_decodes_or_is_corrupt(self, data: st.DataObject) -> None:
        encoded = self.codec.encode(latents(), LATENTS).copy()
        planes = planes_of(encoded)
        if not planes:
            return  # No entries. Flipped bytes are tested above.
        at = data.draw(st.integers(0, len(planes) - 1))
        size = data.draw(st.integers(0, 2**32 - 1) | st.integers(0, 70_000))
        if size == len(planes[at][1]):
            return
        encoded[5 * at + 1 : 5 * at + 5] = np.frombuffer(struct.pack("<I", size), dtype=np.uint8)
        with pytest.raises(CorruptBlock):
            self._decode(encoded, LATENTS)

    def test_threads_share_it(self) -> None:
        blocks = [latents(seed=seed) for seed in range(8)]

        def round_trip(block: Bytes) -> Bytes:
            return self._decode(self.codec.encode(block, LATENTS), LATENTS)

        alone = [round_trip(block) for block in blocks]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(round_trip, blocks * 8))
        assert all(np.array_equal(got, alone[i % 8]) for i, got in enumerate(together))

    def test_scratch_memory_is_bounded(self) -> None:
        block = latents()
        stored = self.codec.encode(block, LATENTS)
        out = np.empty_like(block)
        tracemalloc.start()
        self.codec.encode(block, LATENTS)
        self.codec.decode_into(stored, LATENTS, out)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 3 * block.size + (2 << 20)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_golden_files(self, dtype: str) -> None:
        """These bytes are on disks: whoever changes one gives the codec a new version.

        The frames of zstd are its own affair and may change with its version: their contents count.
        """
        spec = golden_spec(dtype)
        block = golden(f"block-{dtype}")
        stem = f"{self.codec.name}-v{self.codec.version}-{dtype}"
        stored = golden(f"{stem}.stored")
        wanted = block if self.codec.loss is Loss.EXACT else golden(f"{stem}.decoded")
        assert np.array_equal(self._decode(stored, spec), wanted)
        encoded = self.codec.encode(block, spec)
        assert contents(encoded) == contents(stored)


def golden_spec(dtype: str) -> NamespaceSpec:
    """Of the blocks in tests/golden/codecs."""
    parts = (Component("latent_rope", dtype, (2, 30, 24)), Component("indexer_key", "uint8", (9,)))
    return NamespaceSpec("golden", "r", parts, RopeSpec("interleaved", 8))


def golden(name: str) -> Bytes:
    """A file of tests/golden/codecs."""
    return np.fromfile(GOLDENS / f"{name}.bin", dtype=np.uint8)


Plane = tuple[int, bytes]
"""Mode and stored bytes."""


def planes_of(stored: Bytes) -> list[Plane]:
    """The planes of a stored form; none if it is not made of planes."""
    data, entries = stored.tobytes(), []
    for entry in struct.iter_unpack("<BI", data[: len(data) // 5 * 5]):
        entries.append(entry)
        ends = [5 * len(entries), *(size for _, size in entries)]
        if sum(ends) > len(data):
            break
        if sum(ends) == len(data):
            bounds = np.cumsum(ends).tolist()
            bodies = [data[start:end] for start, end in pairwise(bounds)]
            return [(mode, body) for (mode, _), body in zip(entries, bodies, strict=True)]
    return []


def packed(planes: list[Plane]) -> Bytes:
    """The opposite of planes_of()."""
    header = b"".join(struct.pack("<BI", mode, len(body)) for mode, body in planes)
    return np.frombuffer(header + b"".join(body for _, body in planes), dtype=np.uint8)


def unpacked(plane: Plane) -> bytes:
    """What a plane holds."""
    mode, body = plane
    return zstandard.ZstdDecompressor().decompress(body) if mode else body


def contents(stored: Bytes) -> list[bytes]:
    """What the planes of a stored form hold; the stored form itself if it has none."""
    return [unpacked(plane) for plane in planes_of(stored)] or [stored.tobytes()]


def frame_of(data: bytes) -> bytes:
    """A zstd frame."""
    return zstandard.ZstdCompressor().compress(data)


def lying_frame(claimed_bytes: int, actual_bytes: int) -> bytes:
    """A zstd frame whose header claims another length than it has (RFC 8878, 3.1.1.1)."""
    frame = frame_of(bytes(actual_bytes))
    # Frame content size follows the descriptor (bit 5: no window byte), in 1, 2, 4 or 8 bytes.
    rest = frame[5 + (1, 2, 4, 8)[frame[4] >> 6] :]
    return frame[:4] + b"\xa0" + struct.pack("<I", claimed_bytes) + rest


BOMB_BYTES = 8 << 20
FORGERIES: list[Callable[[bytes], bytes]] = [
    lambda plain: np.random.default_rng(0).bytes(len(plain)),
    lambda plain: b"\xff" * len(plain),
    lambda plain: b"\x80" * len(plain),
    lambda plain: frame_of(plain) * 2,
    lambda plain: frame_of(plain)[:-1],
    lambda plain: zstandard.ZstdCompressor(write_content_size=False).compress(plain),
    lambda plain: struct.pack("<II", 0x184D2A50, len(plain)) + plain,  # A frame to be skipped.
    lambda plain: b"",
    lambda plain: frame_of(b""),
    lambda plain: frame_of(plain[:-1]),
    lambda plain: frame_of(plain + b"x"),
    lambda plain: frame_of(bytes(BOMB_BYTES)),
    lambda plain: lying_frame(len(plain), 0),
    lambda plain: lying_frame(len(plain), len(plain) // 2),
    lambda plain: lying_frame(len(plain), BOMB_BYTES),
    lambda plain: lying_frame(BOMB_BYTES, len(plain)),
]
"""Stored bytes that nobody wrote for a plane of these."""


class TestRaw(CodecContract):
    codec = Raw()

    def test_encode_copies_nothing(self) -> None:
        block = latents()
        assert self.codec.encode(block, LATENTS) is block

    def test_golden_bytes(self) -> None:
        block = np.arange(6, dtype=np.uint8)
        spec = NamespaceSpec("m", "r", (Component("c", "bfloat16", (3,)),))
        assert self.codec.encode(block, spec).tobytes() == bytes([0, 1, 2, 3, 4, 5])
        assert (self.codec.id, self.codec.version) == (0, 1)


class TestLossless(CodecContract):
    codec = Lossless()

    def test_golden_bytes(self) -> None:
        """Written by version 1: what reads them otherwise is another version."""
        stored = (
            bytes.fromhex("00 40000000")  # Low plane of a bf16 component: 64 bytes as they are.
            + bytes.fromhex("01 11000000")  # Its high plane: one zstd frame of 17 bytes.
            + bytes.fromhex("00 03000000")  # The only plane of a uint8 component.
            + bytes(range(64))
            + bytes.fromhex("28b52ffd 2040 450000 103f3f 0100 930016")
            + b"abc"
        )
        out = self._decode(np.frombuffer(stored, dtype=np.uint8), GOLDEN)
        assert out.tobytes() == b"".join(bytes([low, 0x3F]) for low in range(64)) + b"abc"
        assert (self.codec.id, self.codec.version) == (1, 1)

    def test_header_is_as_documented(self) -> None:
        """The frames' bytes are zstd's affair and may change with its version."""
        block = np.frombuffer(bytes(128) + b"abc", dtype=np.uint8)
        encoded = self.codec.encode(block, GOLDEN).tobytes()
        (low, high, third) = struct.iter_unpack("<BI", encoded[:15])
        assert (low[0], high[0], third) == (1, 1, (0, 3))
        assert len(encoded) == 15 + low[1] + high[1] + 3

    def test_latents_shrink_to_seven_tenths(self) -> None:
        assert self.codec.encode(latents(), LATENTS).size < 0.7 * LATENTS.block_bytes

    def test_a_bomb_allocates_no_more_than_a_block(self) -> None:
        bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
        spec = NamespaceSpec("m", "r", (Component("c", "uint8", (1 << 16,)),))
        encoded = np.frombuffer(struct.pack("<BI", 1, len(bomb)) + bomb, dtype=np.uint8)
        tracemalloc.start()
        with pytest.raises(CorruptBlock):
            self._decode(encoded, spec)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 * spec.block_bytes

    def test_a_frame_that_lies_about_its_size_is_corrupt(self) -> None:
        """No content size, several frames, or a mode nobody wrote."""
        spec = NamespaceSpec("m", "r", (Component("c", "uint8", (64,)),))
        plain = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64))
        frame = zstandard.ZstdCompressor().compress(bytes(64))
        for mode, body in ((1, plain), (1, frame + frame), (2, frame), (0, bytes(63)), (1, b"")):
            encoded = np.frombuffer(struct.pack("<BI", mode, len(body)) + body, dtype=np.uint8)
            with pytest.raises(CorruptBlock):
                self._decode(encoded, spec)


class TestFp8DsMla(CodecContract):
    codec = Fp8DsMla()


class TestQ8(CodecContract):
    codec = Q8()


class TestQ6(CodecContract):
    codec = Q6()


class TestQ4(CodecContract):
    codec = Q4()


def test_ids_are_what_disks_know() -> None:
    names = ("raw", "lossless", "fp8_ds_mla", "q8", "q6", "q4")
    assert [codec_by_name(name).id for name in names] == [0, 1, 2, 3, 4, 5]


def test_unknown_codecs_are_told_by_type() -> None:
    with pytest.raises(ConfigError, match="lossless"):
        codec_by_name("zip")
    for unknown in ((200, 1), (0, 9)):
        with pytest.raises(CorruptBlock):
            codec_by_id(*unknown)
