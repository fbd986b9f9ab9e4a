"""A vLLM engine in a process of its own, as EngineProcess (vllm_engine.py) starts it.

Reads one JSON line with what LLM() shall get, says {"ready": true}, or {"refused": why}, then
carries out one JSON line after the other; "next engine" ends the engine, and another one's options
follow. Everything but the answers goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.metrics.reader import Counter

from kvtier.errors import KvtierError


def sampling(max_tokens: int) -> SamplingParams:
    """Greedy, so that the same cache gives the same tokens."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=None
    )


def prompt_of(job: dict[str, Any]) -> dict[str, Any]:
    """The prompt as vLLM takes it."""
    prompt: dict[str, Any] = {"prompt_token_ids": job["ids"]}
    if job.get("salt"):
        prompt["cache_salt"] = job["salt"]
    return prompt


def lora_of(job: dict[str, Any]) -> LoRARequest | None:
    """The adapter that a prompt asks for."""
    return LoRARequest(**job["lora"]) if job.get("lora") else None


def answer_of(output: RequestOutput) -> dict[str, Any]:
    """What a test wants to know of a request that is over."""
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens or 0,
        "reason": output.outputs[0].finish_reason,
    }


def distort(model: torch.nn.Module) -> None:
    """Other weights, in place: what a trainer does to an engine between two rollouts.

    Those of the norms, for the CPU build keeps packed copies of all matrices.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layernorm" in name:
                weight.mul_(torch.linspace(0.5, 2.0, weight.numel()))


class Commands:
    """What a test can ask for; every method is one command and its result the answer."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._names: dict[str, str] = {}

    def generate(self, prompts: list[dict[str, Any]], max_tokens: int) -> list[dict[str, Any]]:
        """All prompts at once, to their ends."""
        outputs = self._llm.generate(
            [prompt_of(job) for job in prompts],
            sampling(max_tokens),
            use_tqdm=False,
            lora_request=[lora_of(job) for job in prompts],
        )
        return [answer_of(output) for output in outputs]

    def start(self, name: str, prompt: dict[str, Any], max_tokens: int) -> None:
        """Queue a request; step() works on it."""
        self._names[name] = self._llm.llm_engine.add_request(
            name,
            prompt_of(prompt),
            sampling(max_tokens),
            lora_request=lora_of(prompt),
        )

    def step(self, times: int) -> dict[str, dict[str, Any]]:
        """Steps of the engine; the requests that are over then. Negative: until all are."""
        engine = self._llm.llm_engine
        done = {}
        while times and engine.has_unfinished_requests():
            times -= 1
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = answer_of(output)
        return done

    def abort(self, name: str) -> None:
        """The user of this request went away."""
        self._llm.llm_engine.abort_request([name])

    def reset_cache(self) -> bool:
        """What a trainer calls after it has updated the weights."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def distort_weights(self) -> None:
        """Update the weights in place."""
        self._llm.apply_model(distort)

    def metrics(self) -> dict[str, float]:
        """Counters of vLLM, "name" or "name{label,...}", zero ones left out."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counter) and metric.value:
                labels = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
                name = metric.name.removeprefix("vllm:")
                found[f"{name}{{{','.join(labels)}}}" if labels else name] = metric.value
        return found


def lines() -> Iterator[Any]:
    """What the test asks for."""
    for line in sys.stdin:
        yield json.loads(line)


def serve(llm: LLM, jobs: Iterator[Any], answers: TextIO) -> None:
    """Carry out commands until the test wants another engine, or nothing more."""
    commands = Commands(llm)
    for job in jobs:
        do = job.pop("do")
        if do == "next engine":
            return
        answers.write(json.dumps(getattr(commands, do)(**job)) + "\n")


def main() -> None:
    """Serve one test."""
    jobs = lines()
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # vLLM and its libraries may print.
        for options in jobs:
            try:
                llm = LLM(**options)
            except (KvtierError, ValueError) as error:  # What a configuration may be answered with.
                answers.write(json.dumps({"refused": f"{type(error).__name__}: {error}"}) + "\n")
                next(jobs, None)  # "next engine": there is none to end.
                continue
            answers.write(json.dumps({"ready": True}) + "\n")
            try:
                serve(llm, jobs, answers)
            finally:
                llm.llm_engine.engine_core.shutdown()  # As a server does.


if __name__ == "__main__":
    main()
