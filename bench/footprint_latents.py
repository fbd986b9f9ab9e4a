"""Makes the latents that `kvtier footprint` encodes: kvtier/footprint/tiny_mla_latents.npy.

    python -m bench.footprint_latents [FILE]

The middle block of the first 512 tokens of two modules of the standard library that tiny-mla was
not trained on: (2, 4, 64, 576) bfloat16 bits as little-endian uint16, 590 kB. They stand for the 64
blocks that bench/codecs.py reads: in blocks of 60 layers, q6 took 406.7 bytes a token and layer of
these two and 406.1 of all, from 377 to 410. The file in the repository is of Python 3.11.7's text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.fidelity import read_exactly
from bench.fidelity_tiny_mla import HELD_OUT, TinyMla
from kvtier.footprint.sizes import BLOCK_TOKENS, LATENTS

MODULES = 2
TOKENS = 512


def latents() -> npt.NDArray[Any]:
    """(modules, layers, tokens, width) bfloat16 bits."""
    torch.set_num_threads(1)
    model = TinyMla(sequences=MODULES, tokens=TOKENS)  # The first window of as many modules.
    read = [read_exactly(model, ids)[1] for ids in model.sequences]
    shape = (MODULES, model.layers, BLOCK_TOKENS, model.width)
    return np.concatenate([blocks[len(blocks) // 2] for blocks in read]).view("<u2").reshape(shape)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=LATENTS)
    file: Path = parser.parse_args().file
    found = latents()
    np.save(file, found, allow_pickle=False)
    print(f"{file}: {found.shape} of {', '.join(HELD_OUT[:MODULES])}, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
