"""Time to first token of vLLM with kvtier, and what kvtier costs where nothing is hit.

    .venv-vllm/bin/python -m bench.vllm [--json] [--runs 5] [--pairs 15] [--base DIR]

A random MLA model of about 100 million parameters (DeepSeek-V3's architecture), real vLLM on a CPU,
a daemon of its own. For 1,000 and 4,000 prompt tokens: `ttft_cold_ms` without kvtier,
`ttft_host_ms` with all blocks in RAM, `ttft_ssd_ms` after a restart of the daemon, read from the
disk. `overhead_percent`: requests that hit nothing, looked up and stored, over requests that the
same engine keeps from kvtier; paired, in alternating order, TTFT plus 16 tokens, median of the
paired differences. The same engine, because two processes of one engine differ by up to 40 % for as
long as they live.

Answers in JSON are by prompt length: {"ttft_cold_ms": {"1000": ..., "4000": ...}, ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import drop_page_cache, percentile, progress, report, scratch_directory
from bench.random_checkpoints import VOCABULARY
from bench.vllm_engine import EngineProcess
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.process import DaemonProcess

LENGTHS = (1000, 4000)
OVERHEAD_TOKENS = 1000
ANSWER_TOKENS = 16
BLOCK_TOKENS = 64
ATTACH_TIMEOUT_S = 30.0
MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "q_lora_rank": 256,
    "initializer_range": 0.05,
    "max_position_embeddings": 8192,
}
"""About 100 million parameters."""


def checkpoint() -> Path:
    """The model, written on the first call and kept among the temporary files."""
    home = Path(tempfile.gettempdir()) / "kvtier-bench-vllm-model"
    if not home.exists():
        progress("writing a random checkpoint")
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            jobs = {"model": {"kind": "deepseek_v3", **MODEL}}
            subprocess.run(
                [sys.executable, "-m", "bench.random_checkpoints", scratch, json.dumps(jobs)],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            shutil.move(Path(scratch) / "model", home)
    return home


def options(model: Path, address: str | None) -> dict[str, Any]:
    """Arguments of LLM(), with kvtier where there is an address."""
    longest = max(LENGTHS) + 4 * ANSWER_TOKENS
    values: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 256 << 20,
        "attention_config": {"backend": "CPU_MLA"},
        # The CPU's rotary operation is wrong for MLA's queries.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
    if address is not None:
        values["kv_transfer_config"] = {
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "engine_adapter.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"address": address, "block_tokens": BLOCK_TOKENS},
        }
    return values


class Bench:
    """Two engines and a daemon."""

    def __init__(self, directory: Path, daemon: DaemonProcess, stack: ExitStack) -> None:
        model = checkpoint()
        self._daemon = daemon
        self._rng = np.random.default_rng(0)
        progress("starting two engines")
        self.without = stack.enter_context(
            EngineProcess(options(model, None), directory / "without.log")
        )
        self.with_kvtier = stack.enter_context(
            EngineProcess(options(model, daemon.address), directory / "with.log")
        )
        for tokens in (*LENGTHS, OVERHEAD_TOKENS):  # Warms kernels, pools and the namespace.
            prompt = self.fresh_prompt(tokens)
            for engine in (self.without, self.with_kvtier, self.with_kvtier):
                engine.run(prompt, ANSWER_TOKENS)

    def fresh_prompt(self, tokens: int) -> list[int]:
        """Tokens that were never asked before."""
        return [int(token) for token in self._rng.integers(2, VOCABULARY, tokens)]

    def ttft_ms(self, runs: int) -> dict[str, dict[str, float]]:
        """Medians by key and length."""
        prompts = {tokens: [self.fresh_prompt(tokens) for _ in range(runs)] for tokens in LENGTHS}
        found: dict[str, dict[str, float]] = {
            "ttft_cold_ms": {},
            "ttft_host_ms": {},
            "ttft_ssd_ms": {},
        }
        for tokens, of_length in prompts.items():
            progress(f"{tokens} tokens: cold, then from RAM")
            cold, host = [], []
            for prompt in of_length:
                cold.append(self.without.run(prompt, 1).ttft_s)
                self.require_hit(prompt, hit=False)
                host.append(self.require_hit(prompt, hit=True))
            found["ttft_cold_ms"][str(tokens)] = 1e3 * statistics.median(cold)
            found["ttft_host_ms"][str(tokens)] = 1e3 * statistics.median(host)
        self.restart()
        for tokens, of_length in prompts.items():
            progress(f"{tokens} tokens: from the SSD")
            ssd = [self.require_hit(prompt, hit=True) for prompt in of_length]
            found["ttft_ssd_ms"][str(tokens)] = 1e3 * statistics.median(ssd)
        return found

    def require_hit(self, prompt: Sequence[int], *, hit: bool) -> float:
        """Its TTFT with kvtier, in seconds; all of it must be hit that can be, or nothing."""
        done = self.with_kvtier.run(prompt, 1)
        wanted = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if hit else 0
        if done.cached_tokens != wanted:
            raise SystemExit(f"{done.cached_tokens} tokens were cached, not {wanted}")
        return done.ttft_s

    def restart(self) -> None:
        """Everything to the SSD, nothing in RAM nor in the page cache."""
        progress("restarting the daemon")
        self._daemon.stop()
        drop_page_cache(self._daemon.ssd_directory)
        self._daemon.start()
        with Client(self._daemon.address, acquire_timeout_s=1.0) as client:
            deadline_s = time.monotonic() + ATTACH_TIMEOUT_S
            while time.monotonic() < deadline_s:
                # Each request of the engine is a try; a fresh one hits nothing and costs nothing.
                self.with_kvtier.run(self.fresh_prompt(BLOCK_TOKENS // 2), 1)
                if client.wait_attached(1.0) and client.stats().sessions > 2:
                    return
        raise SystemExit("the engine did not attach to the restarted daemon")

    def overhead_percent(self, pairs: int) -> list[float]:
        """Percent that requests without a hit take longer with kvtier, by pair."""
        found = []
        for pair in range(pairs):
            progress(f"overhead: pair {pair + 1}/{pairs}")
            prompt = self.fresh_prompt(OVERHEAD_TOKENS)
            taken_s = {}
            for kvtier in (False, True) if pair % 2 else (True, False):
                fresh = prompt if kvtier else prompt[::-1]
                done = self.with_kvtier.run(fresh, ANSWER_TOKENS, kvtier=kvtier)
                if done.cached_tokens:
                    raise SystemExit("a prompt that should miss was hit")
                taken_s[kvtier] = done.total_s
            found.append(100 * (taken_s[True] / taken_s[False] - 1))
        return found


def flat(results: Mapping[str, Any]) -> dict[str, float]:
    """For the table."""
    rows: dict[str, float] = {}
    for key, value in results.items():
        if isinstance(value, dict):
            rows |= {f"{key} {tokens}": each for tokens, each in value.items()}
        else:
            rows[key] = value
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--runs", type=int, default=5, help="prompts a length (median)")
    parser.add_argument("--pairs", type=int, default=15, help="pairs for the overhead (median)")
    parser.add_argument("--base", type=Path, help="where the SSD tier goes")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory(arguments.base))
        daemon = stack.enter_context(DaemonProcess(directory, host_capacity_bytes="2GiB"))
        bench = Bench(directory, daemon, stack)
        results: dict[str, Any] = bench.ttft_ms(arguments.runs)
        overhead = bench.overhead_percent(arguments.pairs)
    longest = str(max(LENGTHS))
    cold_ms = results["ttft_cold_ms"][longest]
    results |= {
        "host_speedup": cold_ms / results["ttft_host_ms"][longest],
        "ssd_speedup": cold_ms / results["ttft_ssd_ms"][longest],
        "overhead_percent": statistics.median(overhead),
        "overhead_p25_percent": percentile(overhead, 25),
        "overhead_p75_percent": percentile(overhead, 75),
    }
    if arguments.json:
        print(json.dumps(results))
    else:
        report(f"vLLM with kvtier, {os.cpu_count()} cores", flat(results), as_json=False)


if __name__ == "__main__":
    try:
        main()
    except KvtierError as error:  # A daemon that can't start.
        raise SystemExit(str(error)) from error
