"""The engine computes what transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_adapter.mla import EngineConfig, MlaEngine, SamplingParams
from tests.engine.reference import CASES, YARN, Reference, edit_config, save_model

TOLERANCE = 1e-4
"""Of logits. At 1 % of this text's first 1,000 positions transformers' own float32 logits are
further than this from its float64 ones, by up to 3.7e-4. The prompts' lengths below avoid such
positions and 600, where ours are 1.2e-4 from its float32 ones (9.7e-5 from its float64 ones)."""


def check(engine: MlaEngine, reference: Reference, prompt: list[int], max_tokens: int) -> None:
    """First logits and greedy tokens must be the reference's."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    [answer] = engine.generate([prompt], params)
    logits = reference.logits([*prompt, *answer.token_ids[:-1]])
    torch.testing.assert_close(answer.first_logits, logits[len(prompt) - 1], atol=TOLERANCE, rtol=0)
    assert list(answer.token_ids) == logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.fixture(scope="module")
def tiny_reference(tiny_mla: Path) -> Reference:
    return Reference(tiny_mla)


@pytest.mark.parametrize("prompt_tokens", [1, 2, 63, 64, 65, 130, 700])
def test_tiny_mla_matches_transformers(
    engine: MlaEngine, tiny_reference: Reference, text_ids: list[int], prompt_tokens: int
) -> None:
    check(engine, tiny_reference, text_ids[:prompt_tokens], max_tokens=24)


@pytest.mark.parametrize("chunk_tokens", [64, 128, 256])
def test_chunks_do_not_change_the_answer(
    tiny_mla: Path, tiny_reference: Reference, text_ids: list[int], chunk_tokens: int
) -> None:
    """Absorbed (64) and expanded chunks with an earlier part in the cache."""
    engine = MlaEngine(tiny_mla, config=EngineConfig(chunk_tokens=chunk_tokens))
    check(engine, tiny_reference, text_ids[:500], max_tokens=8)


@pytest.mark.parametrize("case", CASES)
def test_small_models_match_transformers(tmp_path: Path, case: str) -> None:
    directory = save_model(tmp_path, case)
    engine = MlaEngine(directory, config=EngineConfig(chunk_tokens=64))
    reference = Reference(directory)
    generator = torch.Generator().manual_seed(1)
    for prompt_tokens in (1, 70, 200):
        prompt = torch.randint(2, 97, (prompt_tokens,), generator=generator).tolist()
        check(engine, reference, prompt, max_tokens=20)


def test_old_rope_keys_give_the_same_model(tmp_path: Path) -> None:
    """rope_theta and rope_scaling {"type": ...} of older files, against rope_parameters."""
    directory = save_model(tmp_path, "v3-moe-yarn")
    params = SamplingParams(max_tokens=1)
    prompt = [list(range(2, 90))]
    [new] = MlaEngine(directory).generate(prompt, params)
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
    edit_config(
        directory,
        {"rope_theta": YARN["rope_theta"], "rope_scaling": {**scaling, "type": "yarn"}},
        drop=["rope_parameters"],
    )
    [old] = MlaEngine(directory).generate(prompt, params)
    assert torch.equal(new.first_logits, old.first_logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(
    tiny_mla: Path, engine: MlaEngine, text_ids: list[int], dtype: torch.dtype
) -> None:
    prompt = [text_ids[:200]]
    params = SamplingParams(max_tokens=4)
    [exact] = engine.generate(prompt, params)
    [half] = MlaEngine(tiny_mla, dtype=dtype).generate(prompt, params)
    probabilities = exact.first_logits.softmax(-1)
    divergence = probabilities @ (
        exact.first_logits.log_softmax(-1) - half.first_logits.log_softmax(-1)
    )
    assert len(half.token_ids) == 4
    assert divergence < 1e-3
