"""The vLLM connector's settings and versions: a wrong one stops the start and names the fix."""

from __future__ import annotations

import re

import pytest

from engine_adapter.vllm import settings, versions
from engine_adapter.vllm.settings import Settings, read_settings
from engine_adapter.vllm.versions import UntestedVersion
from kvtier.errors import ConfigError
from kvtier.types import Loss


def test_defaults() -> None:
    assert read_settings({}) == Settings()
    assert Settings().block_tokens == 64
    assert Settings().store_decode
    assert not Settings().async_load
    assert Settings().acquire_timeout_ms == 200


def test_every_setting_is_read() -> None:
    values = {
        "address": "unix:/run/k.sock",
        "block_tokens": 128,
        "store_decode": False,
        "async_load": True,
        "tenant": "red",
        "allowed_loss": "bounded",
        "kv_events": True,
        "acquire_timeout_ms": 70,
    }
    expected = Settings("unix:/run/k.sock", 128, False, True, "red", Loss.BOUNDED, True, 70)
    assert read_settings(values) == expected


@pytest.mark.parametrize(
    ("key", "near"),
    [("adress", "address"), ("block_size", "block_tokens"), ("async", "async_load")],
)
def test_a_misspelt_key_is_answered_with_the_nearest(key: str, near: str) -> None:
    """User report 32, in the engine's own configuration."""
    with pytest.raises(ConfigError, match=re.escape(f"{key!r}; did you mean {near!r}?")):
        read_settings({key: 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("address", 1),
        ("address", "http://host"),
        ("block_tokens", 0),
        ("block_tokens", True),
        ("block_tokens", "64"),
        ("store_decode", "yes"),
        ("acquire_timeout_ms", 0),
        ("acquire_timeout_ms", 60_001),
        ("acquire_timeout_ms", 10**400),
        ("async_load", 1),
        ("tenant", ["red"]),
        ("tenant", "r" * 257),
        ("tenant", "é" * 129),
        ("tenant", "\ud800"),
        ("allowed_loss", "some"),
        ("allowed_loss", 1),
        ("kv_events", "on"),
    ],
)
def test_a_wrong_value_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({key: value})
    assert key in str(caught.value) or str(value) in str(caught.value)


def test_the_longest_tenant() -> None:
    assert read_settings({"tenant": "é" * 128}).tenant == "é" * 128


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1"])
def test_tested_versions_of_vllm(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.320.0", "dev", "0.3"])
def test_other_versions_are_refused_with_both_named(version: str) -> None:
    with pytest.raises(UntestedVersion, match=re.escape(f"this is vLLM {version}")) as caught:
        versions.check(version)
    assert "vllm>=0.32,<0.33" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_the_package_has_nothing_else() -> None:
    import engine_adapter.vllm as package

    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        _ = package.Connector
    assert settings.__name__ == "engine_adapter.vllm.settings", "the pure parts need no vLLM"
