"""Serving: batches, streams, sampling, limits, and requests that can't be served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_adapter.mla import (
    EngineConfig,
    FinishReason,
    MlaEngine,
    PrefixCache,
    PromptError,
    SamplingParams,
)
from tests.engine.fake_kvtier import FakeClient
from tests.engine.reference import edit_config, save_model

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def test_together_gives_the_same_tokens_as_one_by_one(
    tiny_mla: Path, engine: MlaEngine, text_ids: list[int]
) -> None:
    """Prompts of many lengths, more than run at once, so that they come and go."""
    small = MlaEngine(tiny_mla, config=EngineConfig(chunk_tokens=128, max_running=3))
    prompts = [
        text_ids[start : start + length]
        for start, length in [(0, 1), (10, 300), (500, 63), (700, 65), (900, 129), (1500, 500)]
    ]
    together = small.generate(prompts, LONG)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], LONG)
        assert answer.token_ids == alone.token_ids
        assert answer.prompt_tokens == len(prompt)


def test_requests_wait_for_pages_and_all_pages_come_back(
    tiny_mla: Path, engine: MlaEngine, text_ids: list[int]
) -> None:
    """Five requests on seven pages; the third gets pages 0, 1, 2 and 6."""
    tight = MlaEngine(tiny_mla, config=EngineConfig(num_pages=7))
    prompts = [text_ids[start : start + 100] for start in range(0, 500, 100)]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (30, 80, 100, 30, 30)]
    requests = [tight.add_request(*pair) for pair in zip(prompts, params, strict=True)]
    while tight.busy:
        tight.step()
    for request, prompt, param in zip(requests, prompts, params, strict=True):
        assert request.completion().token_ids == engine.generate([prompt], param)[0].token_ids
    whole = SamplingParams(max_tokens=7 * 64 - 100, ignore_eos=True)
    assert len(tight.generate([prompts[0]], whole)[0].token_ids) == 7 * 64 - 100


def test_stream_equals_generate(engine: MlaEngine) -> None:
    prompt = "def parse(text):\n"
    tokens = list(engine.stream(prompt, LONG))
    [answer] = engine.generate([prompt], LONG)
    assert tuple(token.id for token in tokens) == answer.token_ids
    assert "".join(token.text for token in tokens) == answer.text
    assert [token.finish_reason for token in tokens] == [None] * 39 + [FinishReason.LENGTH]
    assert answer.ttft_s > 0
    assert answer.decode_tokens_per_s > 0


def test_closed_stream_frees_its_pages(tiny_mla: Path, text_ids: list[int]) -> None:
    client = FakeClient()
    engine = MlaEngine(tiny_mla, prefix_cache=PrefixCache(client), config=EngineConfig(num_pages=3))
    stream = engine.stream(text_ids[:130], LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # It is a generator.
    assert not engine.busy
    assert len(client.finished) == 1
    assert len(engine.generate([text_ids[:130]], LONG)[0].token_ids) == 40


def test_waiting_request_can_be_aborted(engine: MlaEngine, text_ids: list[int]) -> None:
    request = engine.add_request(text_ids[:10], LONG)
    engine.abort(request)
    assert request.finish_reason is FinishReason.ABORT
    assert not engine.busy


def test_seeds_reproduce_and_differ(engine: MlaEngine, text_ids: list[int]) -> None:
    def draw(seed: int, *others: list[int]) -> tuple[int, ...]:
        params = SamplingParams(24, temperature=1.0, top_p=0.95, seed=seed, ignore_eos=True)
        return engine.generate([text_ids[:50], *others], params)[0].token_ids

    assert draw(1) == draw(1)
    assert draw(1) == draw(1, text_ids[60:90]), "a neighbour must not change the draws"
    assert draw(1) != draw(2)
    unseeded = SamplingParams(24, temperature=1.0, ignore_eos=True)
    answers = engine.generate([text_ids[:50]] * 2, unseeded)
    assert answers[0].token_ids != answers[1].token_ids


def test_answer_ends_at_eos(tmp_path: Path) -> None:
    """Whatever token the model says first is declared to be the end."""
    directory = save_model(tmp_path, "v2-dense")
    [free] = MlaEngine(directory).generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    edit_config(directory, {"eos_token_id": [90_000, free.token_ids[0]]})
    [stopped] = MlaEngine(directory).generate([[5, 6, 7]], SamplingParams(max_tokens=5))
    assert stopped.token_ids == free.token_ids[:1]
    assert stopped.finish_reason is FinishReason.STOP
    ignoring = SamplingParams(max_tokens=5, ignore_eos=True)
    [ignored] = MlaEngine(directory).generate([[5, 6, 7]], ignoring)
    assert len(ignored.token_ids) == 5
    assert ignored.finish_reason is FinishReason.LENGTH


def test_answer_ends_at_the_context(tmp_path: Path) -> None:
    engine = MlaEngine(save_model(tmp_path, "v2-dense"))
    prompt = [2 + index % 90 for index in range(511)]
    for length, room in ((511, 1), (500, 12)):
        [answer] = engine.generate([prompt[:length]], SamplingParams(100, ignore_eos=True))
        assert len(answer.token_ids) == room
        assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "empty"),
        ("", "empty"),
        ([0] * 4096, "4096 tokens; the model's context of 4096 leaves room for at most 4095"),
        ([0, 2048], r"token ids are in \[0, 2048\)"),
        ([0, -1], r"token ids are in \[0, 2048\)"),
        ([0, 1.5], "must be integers"),
    ],
)
def test_bad_prompt_is_refused_before_any_work(
    engine: MlaEngine, prompt: list[int] | str, complaint: str
) -> None:
    with pytest.raises(PromptError, match=complaint):
        engine.generate([[0, 5], prompt])
    with pytest.raises(PromptError, match=complaint):
        engine.stream(prompt)
    assert not engine.busy


def test_answer_larger_than_the_cache_is_refused(tiny_mla: Path) -> None:
    engine = MlaEngine(tiny_mla, config=EngineConfig(num_pages=2))
    with pytest.raises(PromptError, match="need 3 pages, the engine has 2"):
        engine.add_request([0] * 100, SamplingParams(max_tokens=29))


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    engine = MlaEngine(save_model(tmp_path, "v2-dense"))
    with pytest.raises(PromptError, match=r"no tokenizer\.json"):
        engine.generate(["hello"])
    assert engine.generate([[5]])[0].text == ""


@pytest.mark.parametrize(
    "values",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}],
)
def test_bad_sampling_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SamplingParams(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"chunk_tokens": 100}, {"num_pages": 0}, {"max_running": 0}])
def test_bad_engine_configuration_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        EngineConfig(**values)


def test_logits_are_float32_in_every_dtype(tiny_mla: Path) -> None:
    [answer] = MlaEngine(tiny_mla, dtype=torch.bfloat16).generate([[0, 5]])
    assert answer.first_logits.shape == (2048,)
    assert answer.first_logits.dtype is torch.float32
