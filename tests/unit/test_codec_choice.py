"""Which codec a namespace gets."""

from __future__ import annotations

from typing import get_args

import pytest

from kvtier import config
from kvtier.codec import _CODECS, choose_codec
from kvtier.errors import ConfigError
from kvtier.types import Component, NamespaceSpec


def spec(model: str, tenant: str = "") -> NamespaceSpec:
    return NamespaceSpec(model, "r", (Component("a", "uint8", (1, 64, 8)),), tenant=tenant)


def test_settings_know_every_codec() -> None:
    assert get_args(config.CodecName) == tuple(codec.name for codec in _CODECS)


def test_without_rules_all_get_the_default() -> None:
    assert choose_codec("q6")(spec("a/b")).name == "q6"


@pytest.mark.parametrize(
    ("model", "tenant", "name"),
    [
        ("deepseek-ai/DeepSeek-V3", "", "q6"),
        ("deepseek-ai/DeepSeek-V3", "acme", "raw"),
        ("deepseek-ai/DeepSeek-V2", "acme", "q6"),
        ("Deepseek-ai/DeepSeek-V2", "", "lossless"),
        ("local:7b=x", "other", "q8"),
        ("else", "", "lossless"),
    ],
)
def test_the_first_rule_that_matches_counts(model: str, tenant: str, name: str) -> None:
    rules = ("acme:*/DeepSeek-V3=raw", "deepseek-ai/*=q6", "*:local:7b=x=q8", "deepseek-ai/*=q4")
    assert choose_codec("lossless", rules)(spec(model, tenant)).name == name


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown codec 'q7'"):
        choose_codec("lossless", ("a=q7",))
