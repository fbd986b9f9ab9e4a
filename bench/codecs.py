"""What every codec stores, how fast, and what it costs in fidelity.

    python -m bench.codecs [--json] [--runs 9] [--only tiny_mla] [--results bench/results]

One entry a codec. Of real latents (tiny-mla, 512 + 64, bfloat16, blocks of 64 tokens and all
layers): `ratio` of stored to bf16 bytes, `bytes_per_token_layer`, and the relative error of the
latent and the rotary part (root of squares). `attention_cosine_error`: 128 heads of DeepSeek-V3's
geometry attend in the absorbed form from random queries to those records; mean of 1 - cosine of
their outputs. `encode_gbps` and `decode_gbps`: GB/s of bf16 bytes a core by CPU time, one block of
61 layers. `encode_scaling` and `decode_scaling`: how many times as fast `threads` threads (one a
core) are together as one alone, by the clock; `..._threads_gbps` is their rate. raw's encode copies
nothing, so it has no speed: null. Under each model: Kullback-Leibler divergence from the exact run
(mean and 99th percentile over tokens), relative change of perplexity, share of tokens whose most
likely successor stays the same. See fidelity.py. A model that is not installed is left out, and
said how to install.

Writes codecs.json and codecs.svg (rate against divergence) to the results folder.

What was tried for q6, in bytes a token and layer on tiny-mla at fp8_ds_mla's divergence: what zstd
gave, moved to that divergence at 6 dB a bit. Of 8 windows of text above the line, of 16 to 40 below
it; good to about 4 bytes, so small differences mean nothing. k was chosen on text that is measured
here too.

    one step a token and group of 128, from its largest magnitude (int7, int8 for the rope)    442
    channel means over 64 tokens taken out, one step a tile from its spread                    418
    ... steps in proportion to the channel's spread                                            424
    ... steps in proportion to its square root                                                 401
    ------------------------------------------------------------------------------------------
    ... and repeated tokens found by zstd, means in 8 steps, steps in half octaves             385
    ... and a ninth bit for the rotary part                                                    369
    ... and means in 4 steps: no worse here, and half as coarse for q4                         370
    ... and the means' sign in one of their planes, not in both (this is q6)                   368

    exponent 0.25 instead of the square root                                                   364
        but on SmolLM2, with equal bytes, a tenth more divergence (16 windows)
    exponent 0.4 or 0.6 instead of the square root                                        366, 371
    steps relative to the tile's energy, means included: as good, but at one k for both models
        twice the divergence against FP8's on SmolLM2                                          367
    Not built: Huffman tables for four classes of channels. Entropies promise 5 bytes, but their
        permutation costs as much time as all the arithmetic of decoding.
    Not built: differences to the token before. They have twice the energy that means leave.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.common import GB, progress, v3_spec
from bench.fidelity import ReferenceModel, bytes_of, compare, read_exactly, round_trip
from bench.fidelity_smollm2 import SmolLm2, missing
from bench.fidelity_tiny_mla import TinyMla
from kvtier.codec import codec_by_name
from kvtier.codec.base import Bytes, Codec

CODECS = ("raw", "lossless", "fp8_ds_mla", "q8", "q6", "q4")
RESULTS = Path(__file__).parent / "results"
HEADS = 128
SOFTMAX_SCALE = 0.13523  # DeepSeek-V3's, YaRN included.
SCORE_SPREAD = 3.0
ROUNDS = 3  # Of work a thread: its start and its end count less.
ENCODE_SPEED = ("encode_gbps", "encode_threads_gbps", "encode_scaling")
Figures = dict[str, Any]  # Numbers, and under a model's name more figures.


def latents(model: ReferenceModel) -> Tensor:
    """(layers, tokens, 576) bfloat16 of all the model's text."""
    shape = (model.layers, -1, model.width)
    blocks = [block for ids in model.sequences for block in read_exactly(model, ids)[1]]
    return torch.cat([torch.from_numpy(b).view(torch.bfloat16).view(shape) for b in blocks], 1)


def v3_block(records: Tensor) -> Bytes:
    """A block of 61 layers of real latents: other tokens' stand in for the layers missing."""
    width = records.shape[-1]
    layers = records.view(len(records), -1, 64, width).transpose(0, 1)
    return bytes_of(layers.reshape(-1, 64, width)[:61])


def errors(codec: Codec, records: Tensor, rope_width: int, model: ReferenceModel) -> Figures:
    """Relative errors of the parts, and of attention outputs."""
    pages = records.flatten(0, 1)
    spec = model.spec(len(pages) // 64)
    restored = torch.from_numpy(round_trip(codec, bytes_of(pages), spec)).view(torch.bfloat16)
    after = restored.view(records.shape).float()
    before = records.float()
    rank = model.width - rope_width
    return {
        "latent_error": relative(before[..., :rank], after[..., :rank]),
        "rope_error": relative(before[..., rank:], after[..., rank:]),
        "attention_cosine_error": cosine_error(before, after, rank),
    }


def relative(before: Tensor, after: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((after - before).norm() / before.norm())


def cosine_error(before: Tensor, after: Tensor, rank: int) -> float:
    """Mean of 1 - cosine between the outputs of 128 heads, over layers, from random queries."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for exact, lossy in zip(before, after, strict=True):
        queries = torch.randn(HEADS, exact.shape[1], generator=generator)
        # Scores of real heads differ by a few units: scale the queries until these do.
        queries *= SCORE_SPREAD / (queries @ exact.T * SOFTMAX_SCALE).std()
        wanted, got = (
            torch.softmax(queries.double() @ keys.T * SOFTMAX_SCALE, dim=-1) @ keys[:, :rank]
            for keys in (exact.double(), lossy.double())
        )
        found.append(1 - torch.cosine_similarity(wanted, got, dim=-1))
    return float(torch.cat(found).mean())


def speeds(codecs: Sequence[Codec], block: Bytes, runs: int) -> dict[str, Figures]:
    """GB/s and scaling, medians of interleaved runs; None of an encode that copies nothing."""
    spec = v3_spec("bench/codecs")
    threads = os.cpu_count() or 1
    outs: list[Bytes] = [np.empty_like(block) for _ in range(threads)]
    samples: dict[str, list[Figures]] = {codec.name: [] for codec in codecs}
    progress(f"speed: {runs} runs")
    for run in range(runs + 1):
        for codec in codecs:
            stored = codec.encode(block, spec)

            def encode(_: Bytes, codec: Codec = codec) -> object:
                return codec.encode(block, spec)

            def decode(out: Bytes, codec: Codec = codec, stored: Bytes = stored) -> object:
                return codec.decode_into(stored, spec, out)

            sample: Figures = {}
            for name, work in (("encode", encode), ("decode", decode)):
                sample[f"{name}_gbps"] = block.size / GB / cpu_seconds(work, outs[0])
                one_s, all_s = wall_seconds(work, outs[:1]), wall_seconds(work, outs)
                sample[f"{name}_threads_gbps"] = threads * block.size / GB / all_s
                sample[f"{name}_scaling"] = threads * one_s / all_s
            if run:  # The first run warms caches and page tables.
                samples[codec.name].append(sample)
    results = {name: {"threads": threads, **median(found)} for name, found in samples.items()}
    for codec in codecs:
        if codec.encode(block, spec) is block:
            results[codec.name].update(dict.fromkeys(ENCODE_SPEED))
    return results


def median(samples: Sequence[Figures]) -> Figures:
    """Of each key."""
    return {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}


def cpu_seconds(work: Callable[[Bytes], object], out: Bytes) -> float:
    """CPU time of this thread; at least a nanosecond."""
    started_s = time.thread_time()
    work(out)
    return max(time.thread_time() - started_s, 1e-9)


def wall_seconds(work: Callable[[Bytes], object], outs: Sequence[Bytes]) -> float:
    """Time a round until threads, each with an array of its own, have done some at once."""
    start = Barrier(len(outs) + 1, timeout=60)

    def rounds(out: Bytes) -> None:
        start.wait()
        for _ in range(ROUNDS):
            work(out)

    with ThreadPoolExecutor(len(outs)) as pool:
        running = [pool.submit(rounds, out) for out in outs]
        start.wait()
        started_s = time.perf_counter()
        for future in running:
            future.result()
        return (time.perf_counter() - started_s) / ROUNDS


def measure(codecs: Sequence[Codec], runs: int, only: str | None) -> dict[str, Figures]:
    """All figures of all codecs."""
    torch.set_num_threads(1)
    tiny = TinyMla()
    records = latents(tiny)
    results: dict[str, Figures] = {}
    fast = speeds(codecs, v3_block(records), runs)
    for codec in codecs:
        found = errors(codec, records, tiny.rope_width, tiny)
        results[codec.name] = {
            "id": codec.id,
            "version": codec.version,
            **fast[codec.name],
            **found,
        }
    for model in models(tiny, only):
        # tiny-mla's products are so small that more threads would wait for each other.
        torch.set_num_threads(1 if model is tiny else min(4, os.cpu_count() or 1))
        for name, comparison in compare(model, codecs).items():
            results[name][model.name] = {**comparison.results()}
    for figures in results.values():
        stored = figures["tiny_mla"]["bytes_per_token_layer"]
        figures["bytes_per_token_layer"] = stored
        figures["ratio"] = stored / (2 * tiny.width)
    return results


def models(tiny: TinyMla, only: str | None) -> list[ReferenceModel]:
    """Those that are installed."""
    if only == tiny.name:
        return [tiny]
    if missing():
        progress(missing())
        return [tiny]
    return [tiny, SmolLm2()]


def rounded(figures: Mapping[str, object]) -> dict[str, object]:
    """Four significant digits."""
    return {
        key: rounded(value)
        if isinstance(value, dict)
        else float(f"{value:.4g}")
        if isinstance(value, float)
        else value
        for key, value in figures.items()
    }


def show(results: Mapping[str, Figures]) -> None:
    """A table for people."""
    table = Table(title="codecs")
    speed = ("encode_gbps", "encode_scaling", "decode_gbps", "decode_scaling")
    columns = ("bytes_per_token_layer", "ratio", *speed, "latent_error")
    for name in ("codec", *columns, "KL tiny_mla", "top-1", "KL smollm2", "top-1"):
        table.add_column(name, justify="left" if name == "codec" else "right")
    for name, figures in results.items():
        values = [figures[column] for column in columns]
        cells = ["" if value is None else f"{value:.4g}" for value in values]
        for model in ("tiny_mla", "smollm2"):
            found = figures.get(model)
            cells.append(f"{found['kl_mean']:.1e}" if isinstance(found, dict) else "")
            cells.append(f"{found['top1']:.4f}" if isinstance(found, dict) else "")
        table.add_row(name, *cells)
    Console().print(table)


def plot(results: Mapping[str, Figures], path: Path) -> None:
    """Rate against divergence, a panel a model, as SVG."""
    if importlib.util.find_spec("matplotlib") is None:
        progress("no plot: matplotlib is not installed (pip install -e '.[fidelity]')")
        return
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "kvtier"  # The same figures give the same file.
    names = [name for name in ("tiny_mla", "smollm2") if name in results["raw"]]
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for name, panel in zip(names, panels, strict=True):
        for codec, figures in results.items():
            found = figures[name]
            if found["kl_mean"]:
                panel.plot(found["bits_per_element"], found["kl_mean"], "o", color="C0")
                at = (found["bits_per_element"], found["kl_mean"])
                panel.annotate(codec, at, xytext=(5, 4), textcoords="offset points")
        panel.set(title=name, xlabel="bits an element", ylabel="mean KL from the exact run (nats)")
        panel.set_yscale("log")
        panel.set_ylim(auto=True)
        panel.margins(x=0.3, y=0.15)  # Room for the names.
        panel.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=9, help="interleaved speed runs (median)")
    parser.add_argument("--only", choices=("tiny_mla",), help="leave the other model out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    arguments = parser.parse_args()
    codecs = [codec_by_name(name) for name in CODECS]
    results = measure(codecs, arguments.runs, arguments.only)
    arguments.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(results), indent=1)
    (arguments.results / "codecs.json").write_text(text + "\n")
    plot(results, arguments.results / "codecs.svg")
    if arguments.json:
        print(json.dumps(rounded(results)))
    else:
        show(results)


if __name__ == "__main__":
    main()
