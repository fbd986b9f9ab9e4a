"""vLLM and kvtier with tiny-mla, a trained MLA model: hits, right answers, other engines.

Two vLLM processes and, in this process, kvtier's own MLA engine share a daemon. The MLA backend of
vLLM's CPU build has no prefix cache of its own, so all that is not computed came from kvtier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from engine_adapter.mla import MlaEngine, PrefixCache, SamplingParams
from kvtier.client import Client
from kvtier.process import DaemonProcess
from tests.e2e.support import PATIENCE_S, eventually
from tests.engines.conftest import Reference, StartEngine
from tests.engines.counting_daemon import Calls
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    TINY_MLA,
    EngineProcess,
    Prompt,
    connector,
)

Text = Callable[[int, int], Prompt]


@pytest.fixture(scope="module")
def first(shared_daemon: DaemonProcess, start_shared_engine: StartEngine) -> EngineProcess:
    """A vLLM."""
    return start_shared_engine(TINY_MLA, connector(shared_daemon.address))


@pytest.fixture(scope="module")
def second(
    first: EngineProcess,
    shared_daemon: DaemonProcess,
    start_shared_engine: StartEngine,
    reference: Reference,
) -> EngineProcess:
    """Another vLLM on the same daemon, a process of its own with another hash seed."""
    reference.prepare(TINY_MLA)
    return start_shared_engine(TINY_MLA, connector(shared_daemon.address))


@pytest.fixture
def client(shared_daemon: DaemonProcess) -> Iterator[Client]:
    """To look at the daemon."""
    with Client(shared_daemon.address, acquire_timeout_s=5.0, raise_errors=True) as client:
        yield client


class MetricsOf:
    """How vLLM's counters grow inside a `with`."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.grown: Counter[str] = Counter()

    def __enter__(self) -> MetricsOf:
        self._before = self._engine.metrics()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._engine.metrics()
        self.grown = Counter({k: int(v - self._before.get(k, 0)) for k, v in after.items()})


def test_a_fresh_process_hits(
    first: EngineProcess, second: EngineProcess, reference: Reference, text: Text
) -> None:
    """192 of 200 tokens, their prefill skipped, exactly the tokens of a run without kvtier.

    User report 5: the two processes hash alike, whatever their PYTHONHASHSEED.
    """
    prompt = text(0, 200)
    cold = first.one(prompt)
    with MetricsOf(second) as metrics:
        warm = second.one(prompt)
    right = reference(TINY_MLA, prompt)
    assert (cold.cached, cold.tokens) == (0, right)
    assert (warm.cached, warm.tokens) == (192, right)
    assert metrics.grown["prompt_tokens_by_source{local_compute}"] == 200 - 192
    assert metrics.grown["prompt_tokens_by_source{external_kv_transfer}"] == 192
    assert metrics.grown["external_prefix_cache_hits"] == 192


def test_the_daemon_counts_what_vllm_asked_for(
    first: EngineProcess, second: EngineProcess, client: Client, text: Text
) -> None:
    """User report 33, with an engine: a prompt that misses and hits once is a rate of 50 %."""
    prompt = text(10_000, 200)
    before = client.stats().counters
    assert first.one(prompt).cached == 0
    assert second.one(prompt).cached == 192

    def rate() -> tuple[float, float]:
        now = client.stats().counters
        hits = now["host_hit_blocks"] - before["host_hit_blocks"]
        return hits, now["requested_blocks"] - before["requested_blocks"]

    eventually(lambda: rate() == (3, 6), "three of six blocks")


def test_a_longer_prompt_on_the_same_prefix(
    first: EngineProcess, second: EngineProcess, reference: Reference, text: Text
) -> None:
    """What is shared is hit, what follows is computed, stored, and hit by the other engine."""
    short, long = text(300, 200), text(300, 420)
    first.one(short)
    answer = second.one(long)
    assert (answer.cached, answer.tokens) == (192, reference(TINY_MLA, long))
    again = first.one(long)
    assert (again.cached, again.tokens) == (384, reference(TINY_MLA, long))


def test_a_whole_prompt_in_blocks_leaves_one_to_compute(
    first: EngineProcess, second: EngineProcess, reference: Reference, text: Text
) -> None:
    """vLLM has to compute at least the last token, although its block is there."""
    prompt = text(777, 4 * BLOCK_TOKENS)
    first.one(prompt)
    answer = second.one(prompt)
    assert 3 * BLOCK_TOKENS <= answer.cached < 4 * BLOCK_TOKENS
    assert answer.tokens == reference(TINY_MLA, prompt)


def test_a_conversation_of_three_turns(
    first: EngineProcess, second: EngineProcess, reference: Reference, text: Text
) -> None:
    """Each turn is served by the other engine, and hits the answers of those before, too."""
    conversation, engines = text(1200, 100), [first, second, first]
    known = 0
    for turn, engine in enumerate(engines):
        answer = engine.one(conversation, max_tokens=70)
        assert answer.tokens == reference(TINY_MLA, conversation, max_tokens=70)
        assert answer.cached == known // BLOCK_TOKENS * BLOCK_TOKENS
        # The last token of an answer was never computed with.
        known = len(conversation.ids) + 70 - 1
        conversation += [*answer.tokens, *text(1500 + 100 * turn, 41).ids[1:]]


def test_a_batch_with_and_without_hits(
    first: EngineProcess, second: EngineProcess, reference: Reference, text: Text
) -> None:
    """In one batch: two that share a stored prefix, one that is new, one too short for a block."""
    stored = text(1800, 256)
    first.one(stored)
    prompts = [text(1800, 300), text(1800, 280), text(2300, 200), text(2600, 30)]
    answers = second.generate(*prompts)
    assert [answer.cached for answer in answers] == [256, 256, 0, 0]
    assert [a.tokens for a in answers] == [reference(TINY_MLA, prompt) for prompt in prompts]


def test_salts_share_nothing(
    first: EngineProcess, second: EngineProcess, reference: Reference, text: Text
) -> None:
    """User report 4: a tenant's salt separates in RAM and on the SSD; equal salts share."""
    plain = text(2700, 200)
    salted, other = Prompt(plain.ids, salt="a"), Prompt(plain.ids, salt="b")
    right = reference(TINY_MLA, plain)
    for prompt in (salted, other, plain):
        answer = first.one(prompt)
        assert (answer.cached, answer.tokens) == (0, right), "nobody's blocks but its own"
    for prompt in (plain, other, salted):
        answer = second.one(prompt)
        assert (answer.cached, answer.tokens) == (192, right)


def test_hits_say_from_which_tier(
    first: EngineProcess,
    second: EngineProcess,
    shared_daemon: DaemonProcess,
    client: Client,
    reference: Reference,
    text: Text,
) -> None:
    """In vLLM's own metrics: RAM is "host", the SSD "disk"; after a restart all is on the SSD.

    User report 23, with an engine: after the restart the same prompt hits fully. User report 13:
    both engines are attached again by themselves.
    """
    prompt = text(3000, 200)
    first.one(prompt)
    with MetricsOf(first) as metrics:
        assert first.one(prompt).cached == 192
    assert metrics.grown["prompt_tokens_cached_by_source{host}"] == 192
    assert metrics.grown["prompt_tokens_cached_by_source{disk}"] == 0
    shared_daemon.stop()
    shared_daemon.start()
    assert client.wait_attached(PATIENCE_S)
    for engine in (second, first):
        with MetricsOf(engine) as metrics:
            answer = eventually(
                lambda engine=engine: hit_of(engine, prompt),  # type: ignore[misc]
                "attached again",
            )
        assert answer == (192, reference(TINY_MLA, prompt))
    assert metrics.grown["prompt_tokens_cached_by_source{host}"] == 192, "promoted by the first"


def hit_of(engine: EngineProcess, prompt: Prompt) -> tuple[int, list[int]] | None:
    """What it gives once it hits."""
    answer = engine.one(prompt)
    return (answer.cached, answer.tokens) if answer.cached else None


def test_aborted_requests_leave_nothing(
    first: EngineProcess, second: EngineProcess, client: Client, reference: Reference, text: Text
) -> None:
    """Aborted before its first step, while it loads a hit, while it computes, while it answers."""
    stored = text(3300, 300)
    first.one(stored)
    for steps in (0, 1, 2, 5):
        fresh = text(3700 + 30 * steps, 250)
        first.start(f"hit {steps}", stored, max_tokens=100)
        first.start(f"fresh {steps}", fresh, max_tokens=100)
        first.step(steps)
        first.ask("abort", name=f"hit {steps}")
        first.ask("abort", name=f"fresh {steps}")
        assert first.step() == {}
        assert client.stats().read_leases == 0, f"after {steps} steps"
        for engine in (second, first):
            assert engine.one(fresh).tokens == reference(TINY_MLA, fresh)
    assert first.one(stored).tokens == reference(TINY_MLA, stored)


def test_kvtiers_own_engine_hits_what_vllm_stored(
    first: EngineProcess, client: Client, text: Text
) -> None:
    """And the other way round: same namespace, same bytes, same tokens."""
    by_vllm, by_mla = text(4200, 200), text(4500, 200)
    engine = MlaEngine(TINY_MLA, prefix_cache=PrefixCache(client))
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    stored = first.one(by_vllm)
    [hit] = engine.generate([list(by_vllm.ids)], params)
    assert sum(hit.cached_tokens.values()) == 192
    assert list(hit.token_ids) == stored.tokens
    [computed] = engine.generate([list(by_mla.ids)], params)
    assert not sum(computed.cached_tokens.values())
    answer = first.one(by_mla)
    assert (answer.cached, answer.tokens) == (192, list(computed.token_ids))


def test_steps_that_fill_no_block_say_nothing_to_the_daemon(
    first: EngineProcess, calls: Calls, text: Text
) -> None:
    """User report 29: with no hits, the daemon hears of a request at its blocks, not at its steps.

    bench/vllm.py measures the time.
    """
    for at, answer_tokens, blocks in ((4700, 60, 1), (4800, 64, 2)):
        before = calls.so_far()
        first.one(text(at, 66), max_tokens=answer_tokens)
        grown = eventually(
            lambda before=before, blocks=blocks: since(calls, before, commits=blocks),  # type: ignore[misc]
            "all is committed",
        )
        # Finish goes with vLLM's next step, so it may be the one of the request before.
        assert grown - Counter(Finish=1) == {"Lookup": 1, "Reserve": blocks, "Commit": blocks}


def since(calls: Calls, before: Counter[str], *, commits: int) -> Counter[str]:
    """What has reached the daemon; nothing until that are so many commits."""
    grown = calls.so_far() - before
    return grown if grown["Commit"] >= commits else Counter()
