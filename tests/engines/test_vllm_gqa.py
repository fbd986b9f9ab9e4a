"""vLLM and kvtier with a model that has no MLA: keys and values of grouped heads, and LoRA.

The CPU build packs them for its instruction set, 128 tokens a block, so kvtier keeps them as bytes.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from kvtier.process import DaemonProcess
from tests.engines.conftest import Reference, StartEngine, noise
from tests.engines.vllm_engine import EngineProcess, Lora, Prompt, connector

LORA_OPTIONS = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
GQA_BLOCK_TOKENS = 128


@pytest.fixture(scope="module")
def first(
    llama: Path, shared_daemon: DaemonProcess, start_shared_engine: StartEngine
) -> EngineProcess:
    """A vLLM that serves adapters."""
    transfer = connector(shared_daemon.address, block_tokens=GQA_BLOCK_TOKENS)
    return start_shared_engine(llama, transfer, **LORA_OPTIONS)


@pytest.fixture(scope="module")
def second(
    first: EngineProcess,
    llama: Path,
    shared_daemon: DaemonProcess,
    start_shared_engine: StartEngine,
    reference: Reference,
) -> EngineProcess:
    """Another one."""
    reference.prepare(llama, **LORA_OPTIONS)
    transfer = connector(shared_daemon.address, block_tokens=GQA_BLOCK_TOKENS)
    return start_shared_engine(llama, transfer, **LORA_OPTIONS)


@pytest.fixture(scope="module")
def adapters(checkpoints: Path) -> dict[str, Path]:
    """Two adapters of llama."""
    return {name: checkpoints / f"lora_{name}" for name in "ab"}


def test_a_fresh_process_hits(
    first: EngineProcess, second: EngineProcess, llama: Path, reference: Reference
) -> None:
    """256 of 300 tokens, a longer prompt on the same prefix, and both in one batch."""
    short = noise(1, 300)
    long = short + noise(2, 150).ids
    answer = first.one(short)
    assert (answer.cached, answer.tokens) == (0, reference(llama, short, **LORA_OPTIONS))
    answers = second.generate(short, long)
    assert [a.cached for a in answers] == [256, 256]
    assert [a.tokens for a in answers] == [
        reference(llama, prompt, **LORA_OPTIONS) for prompt in (short, long)
    ]
    assert first.one(long).cached == 384


def test_adapters_share_nothing(
    first: EngineProcess,
    second: EngineProcess,
    llama: Path,
    adapters: dict[str, Path],
    reference: Reference,
) -> None:
    """User report 1: the same prompt under LoRA A, then B, then the base model: all miss."""
    base = noise(3, 300)
    under_a = Prompt(base.ids, lora=Lora("a", 1, adapters["a"]))
    under_b = Prompt(base.ids, lora=Lora("b", 2, adapters["b"]))
    prompts = [under_a, under_b, base]
    right = [reference(llama, prompt, **LORA_OPTIONS) for prompt in prompts]
    assert right[0] != right[1] != right[2] != right[0], "the adapters must matter"
    for engine, cached in ((first, 0), (second, 256)):
        for prompt, tokens in zip(prompts, right, strict=True):
            answer = engine.one(prompt)
            assert (answer.cached, answer.tokens) == (cached, tokens)


def test_an_adapter_of_the_same_name_with_other_weights(
    first: EngineProcess,
    second: EngineProcess,
    llama: Path,
    adapters: dict[str, Path],
    reference: Reference,
    tmp_path: Path,
) -> None:
    """User report 1: its content is its identity. Same name and number: a miss.

    And where name and number differ but the content does not: a hit. What was written while the
    engines ran is not cached: they may have loaded it before it was overwritten.
    """
    prompt = Prompt(noise(4, 300).ids, lora=Lora("c", 3, adapters["a"]))
    assert first.one(prompt).cached == 0
    other = dataclasses.replace(prompt, lora=Lora("c", 3, adapters["b"]))
    answer = second.one(other)
    of_a, of_b = (
        reference(llama, dataclasses.replace(prompt, lora=lora), **LORA_OPTIONS)
        for lora in (Lora("a", 1, adapters["a"]), Lora("b", 2, adapters["b"]))
    )
    assert (answer.cached, answer.tokens) == (0, of_b)
    elsewhere = dataclasses.replace(prompt, lora=Lora("other name", 9, adapters["a"]))
    assert second.one(elsewhere).cached == 256
    fresh = tmp_path / "adapter"
    shutil.copytree(adapters["a"], fresh)
    written_later = dataclasses.replace(prompt, lora=Lora("fresh", 10, fresh))
    answer = second.one(written_later)
    assert (answer.cached, answer.tokens) == (0, of_a)
