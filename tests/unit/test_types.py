"""Values that can't be wrong once they exist."""

from __future__ import annotations

import pytest

from kvtier.types import DTYPE_BYTES, Component, Loss, NamespaceSpec, RopeSpec

LATENT = Component("latent_rope", "bfloat16", (61, 64, 576))
INDEXER = Component("indexer_key", "float8_e4m3", (61, 64, 132))


def test_a_block_is_its_components_one_after_the_other() -> None:
    assert LATENT.itemsize_bytes == 2
    assert LATENT.size_bytes == 61 * 64 * 576 * 2
    spec = NamespaceSpec("model", "revision", (LATENT, INDEXER))
    assert spec.block_bytes == LATENT.size_bytes + INDEXER.size_bytes
    assert spec.block_tokens == 64


def test_every_dtype_has_a_size() -> None:
    for name, size_bytes in DTYPE_BYTES.items():
        assert Component("x", name, (3,)).size_bytes == 3 * size_bytes


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("", "bfloat16", (1,), "name"),
        ("x", "bf16", (1,), "unknown dtype 'bf16'"),
        ("x", "bfloat16", (), "positive"),
        ("x", "bfloat16", (4, 0), "positive"),
        ("x", "bfloat16", (-1,), "positive"),
    ],
)
def test_a_wrong_component_is_refused(
    name: str, dtype: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Component(name, dtype, shape)


@pytest.mark.parametrize(
    ("layout", "width", "parameters", "message"),
    [
        ("neox", 64, (), "unknown rope layout"),
        ("half", -1, (), "negative"),
        ("half", 64, (("theta", "1"), ("scale", "2")), "sorted"),
    ],
)
def test_a_wrong_rope_is_refused(
    layout: str, width: int, parameters: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RopeSpec(layout, width, parameters)


@pytest.mark.parametrize(
    ("model_id", "revision", "components", "block_tokens", "message"),
    [
        ("", "r", (LATENT,), 64, "model id"),
        ("m", "", (LATENT,), 64, "revision"),
        ("m", "r", (), 64, "component"),
        ("m", "r", (LATENT,), 0, "positive"),
        ("m", "r", (LATENT, LATENT), 64, "differ"),
    ],
)
def test_a_wrong_namespace_is_refused(
    model_id: str,
    revision: str,
    components: tuple[Component, ...],
    block_tokens: int,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        NamespaceSpec(model_id, revision, components, block_tokens=block_tokens)


def test_an_exact_copy_serves_every_request() -> None:
    assert Loss.EXACT < Loss.BOUNDED
