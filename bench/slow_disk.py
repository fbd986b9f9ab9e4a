"""A prompt on a slow disk is computed again, not loaded: TTFT against an engine without kvtier.

    python -m bench.slow_disk [--json] [--runs 9] [--bytes-per-s 2000000]

The in-process MLA engine answers 2,000-token prompts that are on the SSD of a daemon whose reads
are throttled (bench/throttled_daemon.py), and the same prompts without kvtier: paired, in
alternating order, median of the pairs. The daemon starts with its RAM empty and knows from a few
blocks that it read by itself how slow the disk is; the engine says how fast it prefills.
`loading_ttft_ratio` is one prompt by an engine that does not say: what loading would have cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

from bench.common import progress, report, scratch_directory
from engine_adapter.mla import MlaEngine, PrefixCache, SamplingParams
from kvtier.cli.demo import default_checkpoint
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.process import DaemonProcess

PROMPT_TOKENS = 2000
PROBE_TIMEOUT_S = 30.0
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


def prompts(engine: MlaEngine, count: int) -> list[list[int]]:
    """Random ones, all different."""
    rng = np.random.default_rng(7)
    vocabulary = engine.model_config.vocab_size
    return [rng.integers(2, vocabulary, PROMPT_TOKENS).tolist() for _ in range(count)]


def store(client: Client, checkpoint: Path, chosen: list[list[int]]) -> None:
    """Have all prompts' blocks on the SSD."""
    engine = MlaEngine(checkpoint, prefix_cache=PrefixCache(client))
    assert engine.namespace is not None
    root = root_hash(namespace_digest(engine.namespace))
    for number, prompt in enumerate(chosen):
        progress(f"storing prompt {number + 1}/{len(chosen)}")
        engine.generate([prompt], PARAMS)
        hashes = block_hashes(root, prompt, engine.namespace.block_tokens)
        if not all(client.flush(engine.namespace, hashes, timeout_s=60.0)):
            raise SystemExit("the prompts did not reach the SSD")


def wait_for_probe(client: Client) -> None:
    """Until the daemon has measured its disk."""
    deadline_s = time.monotonic() + PROBE_TIMEOUT_S
    while not client.stats().counters["scrubbed_blocks"]:
        if time.monotonic() > deadline_s:
            raise SystemExit("the daemon did not measure its disk")
        time.sleep(0.1)


def ttft_s(engine: MlaEngine, prompt: list[int]) -> tuple[float, int]:
    """Of one request; and how many of its tokens were loaded."""
    [done] = engine.generate([prompt], PARAMS)
    return done.ttft_s, sum(done.cached_tokens.values())


def measure(checkpoint: Path, directory: Path, runs: int, bytes_per_s: float) -> dict[str, float]:
    """All pairs, one daemon."""
    program = ("bench.throttled_daemon", str(bytes_per_s))
    with DaemonProcess(
        directory, program=program, host_capacity_bytes="1GiB", ssd_load_timeout_s=60
    ) as daemon:
        plain = MlaEngine(checkpoint)
        chosen = prompts(plain, runs + 1)
        with Client(daemon.address, acquire_timeout_s=1.0) as client:
            store(client, checkpoint, chosen)
        daemon.kill()  # RAM is empty, the SSD has everything.
        daemon.start()
        with Client(daemon.address, acquire_timeout_s=1.0) as client:
            wait_for_probe(client)
            engine = MlaEngine(checkpoint, prefix_cache=PrefixCache(client))
            for warm in (engine, plain):
                warm.generate([chosen[0][::-1]], PARAMS)  # Kernels, and how fast they are.
            ratios, loaded = [], 0
            for run, prompt in enumerate(chosen[1:]):
                progress(f"pair {run + 1}/{runs}")
                taken_s = {}
                for each in (engine, plain) if run % 2 else (plain, engine):
                    taken_s[each], tokens = ttft_s(each, prompt)
                    loaded += tokens
                ratios.append(taken_s[engine] / taken_s[plain])
            progress("one prompt by an engine that does not know its speed")
            silent = MlaEngine(checkpoint, prefix_cache=PrefixCache(client))
            loading_s, loading_tokens = ttft_s(silent, chosen[0])
            counters = client.stats().counters
    return {
        "ttft_ratio": statistics.median(ratios),
        "loaded_tokens": loaded,
        "declined_blocks": counters["declined_blocks"],
        "loading_ttft_ratio": loading_s / taken_s[plain],
        "loading_tokens": loading_tokens,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--runs", type=int, default=9, help="pairs (median)")
    parser.add_argument("--bytes-per-s", type=float, default=2e6, help="of the throttled disk")
    parser.add_argument("--checkpoint", type=Path, help="an MLA checkpoint; default: tiny-mla")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or default_checkpoint()
    with scratch_directory(None) as directory:
        results = measure(checkpoint, directory, arguments.runs, arguments.bytes_per_s)
    report(f"a slow disk, {os.cpu_count()} cores", results, as_json=arguments.json)


if __name__ == "__main__":
    try:
        main()
    except KvtierError as error:
        raise SystemExit(str(error)) from error
