"""What kvtier costs an engine that gets no hit.

    python -m bench.overhead [--json] [--runs 15] [--checkpoint DIR]

The in-process MLA engine answers 2,000-token prompts that nobody asked before, TTFT plus 16 tokens,
with kvtier and without it: paired runs of the same prompt, in alternating order, median of the
paired differences. `overhead_percent` is one request on a quiet daemon. In `sustained_percent` the
requests follow each other without a pause, so the daemon's writes to the SSD run beside them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

from bench.common import percentile, progress, report, scratch_directory, seconds
from engine_adapter.mla import MlaEngine, PrefixCache, SamplingParams
from kvtier.cli.demo import default_checkpoint
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.process import DaemonProcess

PROMPT_TOKENS = 2000
ANSWER_TOKENS = 16
BURST = 5
QUIET_S = 0.5
"""Time in which the daemon reclaims what was dropped."""

PARAMS = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)


class Pair:
    """The same engine twice: with kvtier and without."""

    def __init__(self, checkpoint: Path, client: Client) -> None:
        self._client = client
        self.without = MlaEngine(checkpoint)
        self.with_kvtier = MlaEngine(checkpoint, prefix_cache=PrefixCache(client))
        self._rng = np.random.default_rng(0)

    def fresh_prompt(self) -> list[int]:
        """Tokens that were never asked before."""
        vocabulary = self.without.model_config.vocab_size
        return [int(t) for t in self._rng.integers(2, vocabulary, PROMPT_TOKENS)]

    def compare(self, requests: int, *, kvtier_first: bool) -> float:
        """Percent that `requests` fresh prompts take longer with kvtier."""
        prompts = [self.fresh_prompt() for _ in range(requests)]
        engines = [self.without, self.with_kvtier]
        if kvtier_first:
            engines.reverse()
        taken_s = {}
        for engine in engines:
            self.settle()
            taken_s[engine] = seconds(serve, engine, prompts)
        return 100 * (taken_s[self.with_kvtier] / taken_s[self.without] - 1)

    def settle(self) -> None:
        """Forget what was asked before, so that the daemon has nothing left to write."""
        assert self.with_kvtier.namespace is not None
        self._client.drop_namespace(self.with_kvtier.namespace)
        time.sleep(QUIET_S)


def serve(engine: MlaEngine, prompts: list[list[int]]) -> None:
    """One request after the other."""
    for prompt in prompts:
        [done] = engine.generate([prompt], PARAMS)
        if sum(done.cached_tokens.values()):
            raise SystemExit("a prompt that should miss was hit")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--runs", type=int, default=31, help="pairs (median)")
    parser.add_argument("--checkpoint", type=Path, help="an MLA checkpoint; default: tiny-mla")
    arguments = parser.parse_args()
    with (
        scratch_directory(None) as directory,
        DaemonProcess(directory, host_capacity_bytes="512MiB") as daemon,
        Client(daemon.address, acquire_timeout_s=1.0) as client,
    ):
        pair = Pair(arguments.checkpoint or default_checkpoint(), client)
        pair.compare(1, kvtier_first=False)  # Warms kernels, pools and the namespace.
        single, sustained = [], []
        for run in range(arguments.runs):
            progress(f"pair {run + 1}/{arguments.runs}")
            single.append(pair.compare(1, kvtier_first=run % 2 == 1))
            if run % 3 == 0:
                sustained.append(pair.compare(BURST, kvtier_first=run % 2 == 1))
    results = {
        "overhead_percent": statistics.median(single),
        "overhead_p25_percent": percentile(single, 25),
        "overhead_p75_percent": percentile(single, 75),
        "sustained_percent": statistics.median(sustained),
    }
    report(f"overhead without hits, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    try:
        main()
    except KvtierError as error:  # A checkpoint that can't be served, a daemon that can't start.
        raise SystemExit(str(error)) from error
