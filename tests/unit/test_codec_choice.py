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


@pytest.mark.parametrize(
    "rule",
    ["acme : big model=q6", " acme:big model =q6", "acme:big model= q6 ", "\tacme :big model=q6"],
)
def test_white_space_around_parts_is_not_theirs(rule: str) -> None:
    for rules in ((rule,), config.load({"ssd_codec_rules": rule}).settings.ssd_codec_rules):
        choose = choose_codec("lossless", rules)
        assert choose(spec("big model", "acme")).name == "q6"
        assert choose(spec("big model", "other")).name == "lossless"


def test_only_stars_and_question_marks_are_wildcards() -> None:
    choose = choose_codec("lossless", ("a[bc]?=q6", "team[1]:*]=q8"))
    assert choose(spec("a[bc]1")).name == "q6"
    assert choose(spec("ab1")).name == "lossless"
    assert choose(spec("[x]", "team[1]")).name == "q8"
    assert choose(spec("[x]", "team1")).name == "lossless"


def test_a_rule_without_a_tenant_is_for_all_of_them() -> None:
    """So one for a tenant has to come before it."""
    rules = ("deepseek-ai/*=q6", "acme:*=raw")
    model = spec("deepseek-ai/DeepSeek-V3", "acme")
    assert choose_codec("lossless", rules)(model).name == "q6"
    assert choose_codec("lossless", rules[::-1])(model).name == "raw"


@pytest.mark.parametrize("rule", ["acme:=q6", ":=q6", ":m=q6", " : m=q6", "=q6", " =q6", "q6"])
def test_an_empty_part_is_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="is not MODEL=CODEC or TENANT:MODEL=CODEC"):
        choose_codec("lossless", (rule,))
    with pytest.raises(ConfigError, match="is not MODEL=CODEC or TENANT:MODEL=CODEC"):
        config.load({"ssd_codec_rules": rule})


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown codec 'q7'"):
        choose_codec("lossless", ("a=q7",))
