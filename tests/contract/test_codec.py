"""CodecContract: what every codec promises; a new codec is one subclass."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.codec import codec_by_id, codec_by_name, encode_block
from kvtier.codec.base import Bytes, Codec
from kvtier.codec.lossless import Lossless
from kvtier.codec.raw import Raw
from kvtier.errors import ConfigError, CorruptBlock
from kvtier.types import DTYPE_BYTES, Component, Loss, NamespaceSpec

LATENTS = NamespaceSpec(
    "tiny-mla",
    "rev",
    (Component("latent_rope", "bfloat16", (4, 16, 576)), Component("indexer", "uint8", (4, 16, 3))),
)
GOLDEN = NamespaceSpec("m", "r", (Component("a", "bfloat16", (64,)), Component("b", "uint8", (3,))))

components = st.builds(
    Component,
    st.just("c"),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
)
specs = st.lists(components, min_size=1, max_size=3).map(
    lambda found: NamespaceSpec(
        "m",
        "r",
        tuple(Component(f"c{i}", c.dtype, c.shape) for i, c in enumerate(found)),
    )
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
        if self.codec.loss is not Loss.EXACT:
            pytest.skip("lossy")
        size = spec.block_bytes
        plain = data.draw(st.binary(min_size=size, max_size=size) | st.just(bytes(size)))
        block = np.frombuffer(plain, dtype=np.uint8)
        assert self._decode(self.codec.encode(block, spec), spec).tobytes() == plain

    def test_latents_come_back_and_the_block_is_untouched(self) -> None:
        block = latents()
        before = block.copy()
        out = self._decode(self.codec.encode(block, LATENTS), LATENTS)
        assert np.array_equal(block, before)
        if self.codec.loss is Loss.EXACT:
            assert np.array_equal(out, before)

    @ours
    @given(specs)
    def test_the_stored_form_is_never_longer_than_the_block(self, spec: NamespaceSpec) -> None:
        block = np.random.default_rng(0).integers(0, 256, spec.block_bytes, dtype=np.uint8)
        used, encoded = encode_block(self.codec, block, spec)
        assert encoded.size <= block.size
        assert used.id == self.codec.id or (used.id == Raw.id and encoded is block)

    def test_every_truncation_and_any_tail_is_corrupt(self) -> None:
        spec = NamespaceSpec("m", "r", (Component("c", "bfloat16", (40,)),))
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

    def test_threads_share_it(self) -> None:
        blocks = [latents(seed=seed) for seed in range(8)]

        def round_trip(block: Bytes) -> Bytes:
            return self._decode(self.codec.encode(block, LATENTS), LATENTS)

        alone = [round_trip(block) for block in blocks]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(round_trip, blocks * 8))
        assert all(np.array_equal(got, alone[i % 8]) for i, got in enumerate(together))


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


def test_unknown_codecs_are_told_by_type() -> None:
    with pytest.raises(ConfigError, match="lossless"):
        codec_by_name("zip")
    for unknown in ((200, 1), (0, 9)):
        with pytest.raises(CorruptBlock):
            codec_by_id(*unknown)
