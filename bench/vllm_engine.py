"""A vLLM engine in a process of its own, which times its requests; bench/vllm.py drives it.

    python -m bench.vllm_engine         (JSON lines in and out; bench/vllm.py starts it)

A process each, for a process has room for one KV connector only: an engine without one beside it
would get the other's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
"""For shutting down."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One request.

    Attributes:
        ttft_s: Until its first token.
        total_s: Until its last.
        cached_tokens: Leading prompt tokens that were not computed.
    """

    ttft_s: float
    total_s: float
    cached_tokens: int


class EngineProcess:
    """The parent's side. Context manager: ends it."""

    def __init__(self, options: Mapping[str, Any], log: Path) -> None:
        """Start.

        Args:
            options: Arguments of LLM().
            log: Where what vLLM says goes.
        """
        self._log = log
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.vllm_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                text=True,
                bufsize=1,
            )
        self._say(options)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def run(self, prompt: Sequence[int], answer_tokens: int, *, kvtier: bool = True) -> Timed:
        """One request by itself, greedily.

        Args:
            prompt: Its tokens.
            answer_tokens: How many to generate.
            kvtier: False: the engine's connector, if it has one, neither looks up nor stores.

        Raises:
            SystemExit: the engine ended; the message has the end of its log.
        """
        self._say({"prompt": list(prompt), "answer_tokens": answer_tokens, "kvtier": kvtier})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(TIMEOUT_S)
            tail = self._log.read_text(errors="replace").splitlines()[-30:]
            raise SystemExit("\n".join(["vLLM ended:", *tail]))
        return Timed(**json.loads(line))

    def _say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")


def serve() -> None:
    """The child's side."""
    from vllm import LLM, SamplingParams

    def use(*, kvtier: bool) -> None:
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        if connector is not None:  # No user needs this switch, so it is none of the connector's.
            connector._scheduling._loads = connector._scheduling._stores = kvtier

    def timed(prompt: Sequence[int], answer_tokens: int, *, kvtier: bool) -> Timed:
        use(kvtier=kvtier)
        params = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        engine = llm.llm_engine
        started_s = time.perf_counter()
        engine.add_request("timed", {"prompt_token_ids": prompt}, params)
        ttft_s, cached_tokens = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                ttft_s = ttft_s or time.perf_counter() - started_s
                cached_tokens = output.num_cached_tokens or 0
        return Timed(ttft_s, time.perf_counter() - started_s, cached_tokens)

    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # vLLM and its libraries may print.
        llm = LLM(**json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            answers.write(json.dumps(asdict(timed(**json.loads(line)))) + "\n")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve()
