"""vLLM short of memory: requests lose their blocks and get others', while kvtier copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.process import DaemonProcess
from tests.engines.conftest import Reference, StartEngine
from tests.engines.vllm_engine import BLOCK_TOKENS, TINY_MLA, EngineProcess, Prompt, connector

Text = Callable[[int, int], Prompt]

PAGE_BYTES = 4 * 16 * 576 * 4
"""Layers, tokens, elements, float32."""

ANSWER_TOKENS = 120
TIGHT = {
    "kv_cache_memory_bytes": 6 << 20,
    "max_model_len": 512,
}
"""Room for about 650 tokens, of which four requests want over 1,200."""


@pytest.fixture(scope="module")
def engine(start_shared_engine: StartEngine, reference: Reference) -> EngineProcess:
    """The process; each test replaces its engine."""
    reference.prepare(TINY_MLA)
    return start_shared_engine(TINY_MLA)


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_preempted_requests(
    async_load: bool,
    engine: EngineProcess,
    daemon: DaemonProcess,
    reference: Reference,
    text: Text,
) -> None:
    """User report 8: vLLM reuses blocks at once; what is stored is the original or absent.

    The first round stores under pressure, the second loads under pressure, and a third engine,
    with room enough, reads everything that the two have stored.
    """
    prompts = [text(400 * i, 170 + 10 * i) for i in range(4)]
    right = [reference(TINY_MLA, prompt, ANSWER_TOKENS) for prompt in prompts]
    transfer = connector(daemon.address, async_load=async_load)
    engine.replace(TINY_MLA, transfer, **TIGHT)
    for turn in ("stores", "loads"):
        before = engine.metrics().get("num_preemptions", 0)
        answers = engine.generate(*prompts, max_tokens=ANSWER_TOKENS)
        assert [answer.tokens for answer in answers] == right, turn
        assert engine.metrics()["num_preemptions"] > before, turn
    engine.replace(TINY_MLA, transfer)
    for prompt, tokens in zip(prompts, right, strict=True):
        whole = prompt + tokens
        answer = engine.one(whole)
        assert answer.tokens == reference(TINY_MLA, whole)
        assert answer.cached == (len(whole.ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_pages_that_are_reused_in_the_next_step(
    engine: EngineProcess, daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """User report 8, with nothing left to chance: the cache has room for one request only.

    A prompt fills its blocks and is aborted; the next step computes another one in their pages.
    """
    prompts = [text(1700 + 300 * i, 200) for i in range(3)]
    engine.replace(
        TINY_MLA,
        connector(daemon.address),
        kv_cache_memory_bytes=17 * PAGE_BYTES,
        max_model_len=256,
    )
    for i, prompt in enumerate(prompts):
        engine.start(f"{i}", prompt)
        assert engine.step(1) == {}
        engine.ask("abort", name=f"{i}")
    engine.replace(TINY_MLA, connector(daemon.address))
    for prompt in prompts:
        answer = engine.one(prompt)
        assert (answer.cached, answer.tokens) == (192, reference(TINY_MLA, prompt))


def test_loads_between_steps(
    engine: EngineProcess, daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """async_load: hits, one longer prompt, a batch, and aborts while a load is under way."""
    known, longer, fresh = text(2000, 200), text(2000, 300), text(2400, 200)
    engine.replace(TINY_MLA, connector(daemon.address, async_load=True))
    assert engine.one(known).cached == 0
    answers = engine.generate(known, longer, fresh)
    assert [answer.cached for answer in answers] == [192, 192, 0]
    assert [a.tokens for a in answers] == [reference(TINY_MLA, p) for p in (known, longer, fresh)]
    for steps in (0, 1, 2):
        engine.start(f"{steps}", longer, max_tokens=100)
        engine.step(steps)
        engine.ask("abort", name=f"{steps}")
        assert engine.step() == {}
    assert engine.one(longer).tokens == reference(TINY_MLA, longer)
