"""Writes the golden files of codec versions that have none; never overwrites one.

    python -m tests.golden.codecs.write

block-DTYPE.bin is a block of golden_spec(DTYPE) with means, spreads, outliers, NaN and infinity.
CODEC-vVERSION-DTYPE.stored.bin is its stored form, .decoded.bin what a lossy one decodes to.
"""

from __future__ import annotations

import numpy as np

from kvtier.codec import codec_by_name
from kvtier.codec.base import Bytes
from kvtier.codec.floats import elements, round_to
from kvtier.types import Loss, NamespaceSpec
from tests.contract.test_codec import GOLDENS, golden_spec

DTYPES = ("bfloat16", "float16", "float32")
CODECS = ("raw", "lossless", "fp8_ds_mla", "q8", "q6", "q4")


def block_of(spec: NamespaceSpec) -> Bytes:
    """A small block with a bit of everything."""
    latent, indexer = spec.components
    rng = np.random.default_rng(4)
    shape = latent.shape
    channels = rng.standard_normal((2, shape[0], 1, shape[-1]))
    values = (rng.standard_normal(shape) * np.exp(channels[0]) + channels[1]).astype(np.float32)
    values[0, 3, 5], values[1, 7, 20], values[1, 8, 2] = np.nan, -np.inf, 5000
    values[0, :, 7] = 0
    block = np.empty(spec.block_bytes, dtype=np.uint8)
    round_to(values.reshape(-1), elements(block[: latent.size_bytes], latent.dtype))
    block[latent.size_bytes :] = np.arange(indexer.size_bytes)
    return block


def main() -> None:
    """Write what is missing."""
    for dtype in DTYPES:
        spec = golden_spec(dtype)
        block = block_of(spec)
        files = {f"block-{dtype}": block}
        for codec in map(codec_by_name, CODECS):
            stem = f"{codec.name}-v{codec.version}-{dtype}"
            stored = files[f"{stem}.stored"] = codec.encode(block, spec)
            if codec.loss is not Loss.EXACT:
                decoded = files[f"{stem}.decoded"] = np.empty_like(block)
                codec.decode_into(stored, spec, decoded)
        for name, data in files.items():
            path = GOLDENS / f"{name}.bin"
            if not path.exists():
                data.tofile(path)


if __name__ == "__main__":
    main()
