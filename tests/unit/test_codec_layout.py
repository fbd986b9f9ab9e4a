"""What of a block the lossy codecs may touch."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.codec.layout import MIN_RECORD, is_latent, pieces
from kvtier.types import Component, NamespaceSpec, RopeSpec


def spec(*components: Component, rope: int = 64) -> NamespaceSpec:
    return NamespaceSpec("m", "r", components, RopeSpec("interleaved", rope))


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (Component("latent_rope", "bfloat16", (61, 64, 576)), True),
        (Component("latent", "float16", (64, 65)), True),
        (Component("latent.0", "float32", (2, 3, 4, 65)), True),
        (Component("latent_rope", "bfloat16", (61, 64, 64)), False),  # Nothing but the rope.
        (Component("latent_rope", "bfloat16", (576,)), False),
        (Component("latent_rope", "uint8", (61, 64, 656)), False),
        (Component("latent_rope", "float8_e4m3", (61, 64, 576)), False),
        (Component("indexer_key", "bfloat16", (61, 64, 128)), False),
        (Component("index_k", "bfloat16", (61, 64, 128)), False),
        (Component("conv_state", "float32", (61, 64, 128)), False),
        (Component("key", "bfloat16", (61, 64, 128)), False),
        (Component("values", "float16", (61, 64, 128)), False),
        (Component("latents", "bfloat16", (61, 64, 576)), False),
        (Component("Latent", "bfloat16", (61, 64, 576)), False),
        (Component("my_latent_rope", "bfloat16", (61, 64, 576)), False),
    ],
)
def test_what_is_a_latent(component: Component, expected: bool) -> None:
    assert is_latent(component, spec(component)) is expected


def test_narrow_records_are_no_latents() -> None:
    for width in (MIN_RECORD - 1, MIN_RECORD):
        component = Component("latent", "bfloat16", (4, width))
        assert is_latent(component, spec(component, rope=0)) is (width == MIN_RECORD)


def test_pieces_are_views_in_order() -> None:
    latent = Component("latent_rope", "bfloat16", (2, 3, 80))
    other = Component("indexer_key", "uint8", (5,))
    block = np.arange(latent.size_bytes + 5, dtype=np.uint8)
    first, second = pieces(block, spec(latent, other))
    assert (first.rope_width, first.record_width, first.elements) == (64, 80, 480)
    assert (second.is_latent, second.rope_width) == (False, 0)
    second.data[:] = 7
    assert block[-5:].tolist() == [7] * 5
    assert first.data.base is block
