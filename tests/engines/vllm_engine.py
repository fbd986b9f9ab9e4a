"""The test's side of a vLLM engine in a process of its own (vllm_child.py)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY_MLA = ROOT / "checkpoints" / "tiny-mla"
BLOCK_TOKENS = 64
START_TIMEOUT_S = 200.0
ANSWER_TIMEOUT_S = 100.0
MAX_TOKENS = 12
PATIENCE_MS = 10_000


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter as vLLM is told of it."""

    name: str
    number: int
    path: Path

    def job(self) -> dict[str, Any]:
        """Arguments of LoRARequest."""
        return {
            "lora_name": self.name,
            "lora_int_id": self.number,
            "lora_path": str(self.path),
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: token ids, and what else makes its cache its own."""

    ids: tuple[int, ...]
    salt: str = ""
    lora: Lora | None = None

    def __add__(self, ids: Sequence[int]) -> Prompt:
        """The conversation goes on."""
        return Prompt((*self.ids, *ids), self.salt, self.lora)

    def job(self) -> dict[str, Any]:
        """For the child."""
        lora = self.lora.job() if self.lora else None
        return {"ids": list(self.ids), "salt": self.salt, "lora": lora}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gave.

    Attributes:
        tokens: Its answer.
        cached: Leading prompt tokens that vLLM did not compute (num_cached_tokens).
        reason: Why it ended, in vLLM's words.
    """

    tokens: list[int]
    cached: int
    reason: str


def llm_options(model: Path, **more: Any) -> dict[str, Any]:
    """Arguments of LLM() with which the CPU build computes right, in float32."""
    config = json.loads((model / "config.json").read_text())
    values: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,
        # The CPU's rotary operation is wrong for MLA's queries.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
        # So that what comes from the cache came through the connector.
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    if config.get("kv_lora_rank"):
        values["attention_config"] = {"backend": "CPU_MLA"}
    return {**values, **more}


def connector(address: str, **extra: Any) -> dict[str, Any]:
    """kv_transfer_config as README gives it; `extra` goes into kv_connector_extra_config.

    The deadline is far away: what is tested is not this machine's speed, and two ranks that spin
    for each other keep a whole small machine from running anything else, for up to a second.
    """
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "engine_adapter.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "address": address,
            "block_tokens": BLOCK_TOKENS,
            "acquire_timeout_ms": PATIENCE_MS,
            **extra,
        },
    }


def environment(**more: str) -> dict[str, str]:
    """Of a child: quiet, offline, without settings of whoever runs the tests.

    One thread each: those of two engines, spinning for each other on two cores, cost twenty times
    what these models take.
    """
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIER_", "VLLM_"))}
    return {
        **mine,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        **more,
    }


class EngineRefused(Exception):
    """LLM() raised; the message is what it says."""


class EngineProcess:
    """A vLLM engine. Context manager: ends it.

    It comes up while the test goes on; the first command waits for that.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        kv_transfer: Mapping[str, Any] | None = None,
        *,
        program: str = "tests.engines.vllm_child",
        **options: Any,
    ) -> None:
        """Start.

        Args:
            model: The checkpoint's directory.
            log: Where what the engine says goes.
            kv_transfer: connector(...), or None for an engine without one.
            program: The module that is the child.
            options: More arguments of LLM().
        """
        self.log = log
        self._starting = self._killed = False
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment(),
                cwd=ROOT,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        try:
            self._begin(model, kv_transfer, options)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replace(
        self, model: Path, kv_transfer: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """End the engine, and start another one in the same process, which is much quicker."""
        self.wait_ready()
        self._say({"do": "next engine"})
        self._begin(model, kv_transfer, options)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            EngineRefused: it does not; replace() may start another one.
        """
        if not self._starting:
            return
        answer = self._line(START_TIMEOUT_S)
        self._starting = False
        if "refused" in answer:
            raise EngineRefused(answer["refused"])
        assert answer == {"ready": True}

    def _begin(
        self, model: Path, kv_transfer: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        values = llm_options(model, **options)
        if kv_transfer is not None:
            values["kv_transfer_config"] = kv_transfer
        self._say(values)
        self._starting = True

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def generate(self, *prompts: Prompt, max_tokens: int = MAX_TOKENS) -> list[Answer]:
        """All prompts in one batch, greedily."""
        jobs = [prompt.job() for prompt in prompts]
        return [Answer(**a) for a in self.ask("generate", prompts=jobs, max_tokens=max_tokens)]

    def one(self, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> Answer:
        """One prompt by itself."""
        [answer] = self.generate(prompt, max_tokens=max_tokens)
        return answer

    def start(self, name: str, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> None:
        """Queue a request."""
        self.ask("start", name=name, prompt=prompt.job(), max_tokens=max_tokens)

    def step(self, times: int = -1) -> dict[str, Answer]:
        """Work so many steps (default: until all are done); what is over then, by name."""
        return {name: Answer(**a) for name, a in self.ask("step", times=times).items()}

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters that are not zero."""
        found: dict[str, float] = self.ask("metrics")
        return found

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have the child carry out a command of its Commands; the answer."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """The first half of ask(): does not wait for the answer."""
        self.wait_ready()
        self._say({"do": do, **arguments})

    def answer(self) -> Any:
        """The second half of ask()."""
        return self._line(ANSWER_TIMEOUT_S)

    def hang_up(self) -> None:
        """The first half of close(): does not wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Let it shut down as a server does; it must end well, unless it was killed."""
        if self._killed:
            return
        try:
            self.hang_up()
            code = self._process.wait(ANSWER_TIMEOUT_S)
        finally:
            self.kill()
        assert code == 0, f"the engine ended with {code}:\n{self.log_tail()}"

    def kill(self) -> None:
        """kill -9 it and its workers. Idempotent."""
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(ANSWER_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def log_text(self) -> str:
        """All it said."""
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """The last it said."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def _say(self, value: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _line(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"the engine said nothing for {timeout_s} s:\n{self.log_tail()}"
        text = self._process.stdout.readline()
        if not text:  # Let it say why.
            code = self._process.wait(ANSWER_TIMEOUT_S)
            raise AssertionError(f"the engine ended with {code}:\n{self.log_tail()}")
        return json.loads(text)
