"""How an operator configures the connector: roles, options, and what stops the start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.process import DaemonProcess
from tests.engines.conftest import Reference, StartEngine, noise
from tests.engines.vllm_engine import (
    TINY_MLA,
    EngineProcess,
    EngineRefused,
    Prompt,
    connector,
)

Text = Callable[[int, int], Prompt]


@pytest.fixture(scope="module")
def engine(start_shared_engine: StartEngine, reference: Reference) -> EngineProcess:
    """The process; each test replaces its engine."""
    reference.prepare(TINY_MLA)
    return start_shared_engine(TINY_MLA)


def test_roles(
    engine: EngineProcess, daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """A producer stores only, a consumer loads only."""
    a, b = text(0, 200), text(400, 200)
    both = connector(daemon.address)
    engine.replace(TINY_MLA, both | {"kv_role": "kv_producer"})
    for _ in range(2):
        answer = engine.one(a)
        assert (answer.cached, answer.tokens) == (0, reference(TINY_MLA, a))
    engine.replace(TINY_MLA, both | {"kv_role": "kv_consumer"})
    for prompt, cached in ((a, 192), (b, 0), (b, 0)):
        answer = engine.one(prompt)
        assert (answer.cached, answer.tokens) == (cached, reference(TINY_MLA, prompt))
    engine.replace(TINY_MLA, both)
    assert engine.one(a).cached == 192
    assert engine.one(b).cached == 0, "the consumer stored nothing"


def test_prompts_only(
    engine: EngineProcess, daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """store_decode false: blocks that an answer fills are not stored."""
    prompt = text(800, 100)
    engine.replace(TINY_MLA, connector(daemon.address, store_decode=False))
    answer = engine.one(prompt, max_tokens=100)
    whole = prompt + answer.tokens
    assert engine.one(whole).cached == 64
    engine.replace(TINY_MLA, connector(daemon.address))
    assert engine.one(whole).tokens == reference(TINY_MLA, whole)


def test_vllms_own_prefix_cache_comes_first(
    engine: EngineProcess, daemon: DaemonProcess, llama: Path, reference: Reference
) -> None:
    """What vLLM still has is not loaded; kvtier gives what follows it, and what it lost."""
    short, long = noise(1, 300), noise(1, 300) + noise(2, 300).ids
    transfer = connector(daemon.address, block_tokens=256)
    engine.replace(llama, transfer, enable_prefix_caching=True)
    assert engine.one(long).cached == 0
    before = engine.metrics()
    assert engine.one(long).cached == 512
    after = engine.metrics()
    assert after.get("external_prefix_cache_hits") == before.get("external_prefix_cache_hits")
    engine.replace(llama, transfer, enable_prefix_caching=True)
    assert engine.one(short + noise(3, 90).ids).cached == 256, "and vLLM's own has 384 of it now"
    answer = engine.one(long)
    assert answer.cached == 512, "one half of it vLLM's own, the rest kvtier's"
    assert answer.tokens == reference(llama, long)
    assert engine.metrics()["external_prefix_cache_hits"] < 256 + 512


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("failed loads would end requests", {"kv_load_failure_policy": "fail"}, "recompute"),
    ("blocks do not divide", {"extra": {"block_tokens": 40}}, "16"),
    ("an unknown key", {"extra": {"adress": "unix:/nowhere"}}, "'address'"),
    ("a key that is near another", {"extra": {"block_token": 64}}, "'block_tokens'"),
    ("a value of another type", {"extra": {"store_decode": "yes"}}, "true or false"),
    ("no address", {"extra": {"address": "http://localhost"}}, "unix:"),
    ("an unknown loss", {"extra": {"allowed_loss": "any"}}, "'bounded'"),
]


def test_wrong_configurations_stop_the_start(engine: EngineProcess, daemon: DaemonProcess) -> None:
    """User report 32, with an engine: each is answered with what to change."""
    engine.wait_ready()
    for what, change, word in REFUSED:
        transfer = connector(daemon.address)
        transfer["kv_connector_extra_config"] |= change.get("extra", {})
        transfer |= {key: value for key, value in change.items() if key != "extra"}
        assert re.search(word, refusal(engine, transfer)), what
    default = {k: v for k, v in connector(daemon.address).items() if k != "kv_load_failure_policy"}
    assert "recompute" in refusal(engine, default), "vLLM's default is to end requests"
    engine.replace(TINY_MLA, connector(daemon.address))


def refusal(engine: EngineProcess, transfer: dict[str, Any]) -> str:
    """Why it does not start."""
    with pytest.raises(EngineRefused) as caught:
        engine.replace(TINY_MLA, transfer)
    return str(caught.value)
