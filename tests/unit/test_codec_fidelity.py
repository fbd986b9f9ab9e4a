"""What codecs cost a really trained model, and that the benchmark would notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch

from bench import fidelity_smollm2
from bench.codecs import (
    ROUNDS,
    cosine_error,
    latents,
    plot,
    rounded,
    show,
    speeds,
    v3_block,
    wall_seconds,
)
from bench.fidelity import Comparison, compare, passed_through, read_exactly, windows
from bench.fidelity_tiny_mla import TinyMla
from kvtier.codec import codec_by_name
from kvtier.codec.base import Bytes, Codec
from kvtier.types import Loss, NamespaceSpec


class Forgets(Codec):
    """FAKE: everything comes back as zeros."""

    id = 255
    version = 1
    name = "forgets"
    loss = Loss.BOUNDED

    def encode(self, block: Bytes, spec: NamespaceSpec) -> Bytes:
        return block[:1]

    def decode_into(self, encoded: Bytes, spec: NamespaceSpec, out: Bytes) -> None:
        out[:] = 0


@pytest.fixture(scope="module")
def model() -> Iterator[TinyMla]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Many small products: more threads wait for each other.
    yield TinyMla(sequences=4, tokens=512)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def comparisons(model: TinyMla) -> dict[str, Comparison]:
    names = ("raw", "lossless", "fp8_ds_mla", "q6")
    return compare(model, [*map(codec_by_name, names), Forgets()])


def test_q6_reaches_the_headline(comparisons: dict[str, Comparison]) -> None:
    """A tenth of GQA-8's 4096 bytes (409) with room, at no more loss than FP8."""
    q6, fp8 = (comparisons[name].results() for name in ("q6", "fp8_ds_mla"))
    assert fp8["bytes_per_token_layer"] == 656
    assert q6["bytes_per_token_layer"] <= 375
    assert q6["kl_mean"] <= fp8["kl_mean"]
    assert q6["top1"] > 0.98


def test_lossless_shrinks_real_latents(comparisons: dict[str, Comparison]) -> None:
    raw, lossless = (comparisons[name].results() for name in ("raw", "lossless"))
    assert raw["bytes_per_token_layer"] == 1152
    assert lossless["bytes_per_token_layer"] <= 0.7 * 1152
    assert (lossless["kl_mean"], lossless["top1"]) == (0, 1)


def test_loss_is_noticed(comparisons: dict[str, Comparison]) -> None:
    forgets = comparisons["forgets"].results()
    assert forgets["kl_mean"] > 1
    assert forgets["kl_p99"] > forgets["kl_mean"]
    assert forgets["ppl_change"] > 1
    assert forgets["top1"] < 0.5


def test_every_record_goes_through(model: TinyMla) -> None:
    ids = model.sequences[0][:128]
    seen = []

    def through(layer: int, records: torch.Tensor) -> torch.Tensor:
        seen.append((layer, tuple(records.shape)))
        return passed_through(model, codec_by_name("raw"))(layer, records)

    same = model.log_probabilities(ids, through)
    exact, blocks = read_exactly(model, ids)
    assert seen == [(layer, (128, 576)) for layer in range(4)]
    assert torch.equal(same, exact)
    assert [block.size for block in blocks] == [4 * 64 * 1152] * 2


def test_windows_take_turns_and_never_repeat() -> None:
    texts = {"a": list(range(10)), "b": list(range(100, 104))}
    assert list(windows(texts, 3, 4)) == [[0, 1, 2, 3], [100, 101, 102, 103], [4, 5, 6, 7]]
    with pytest.raises(SystemExit, match="too short"):
        list(windows(texts, 4, 4))


def test_speed_is_measured_on_as_many_layers_as_v3_has() -> None:
    records = torch.arange(4 * 16 * 64 * 2).view(4, -1, 2).to(torch.bfloat16)
    assert v3_block(records).size == 61 * 64 * 2 * 2


def test_speed_is_told_for_a_core_and_for_all(model: TinyMla) -> None:
    block = v3_block(latents(model))
    figures = speeds([codec_by_name("lossless")], block, runs=1)["lossless"]
    assert figures["threads"] == os.cpu_count()
    for way in ("encode", "decode"):
        assert set(figures) >= {f"{way}_gbps", f"{way}_threads_gbps", f"{way}_scaling"}
        assert all(figures[f"{way}_{what}"] > 0 for what in ("gbps", "threads_gbps", "scaling"))


def test_an_encode_that_copies_nothing_has_no_speed(
    model: TinyMla, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = speeds([codec_by_name("raw")], v3_block(latents(model)), runs=1)["raw"]
    assert [figures[f"encode_{what}"] for what in ("gbps", "threads_gbps", "scaling")] == [None] * 3
    assert figures["decode_gbps"] > 0
    zeros = {"bytes_per_token_layer": 1152.0, "ratio": 1.0, "latent_error": 0.0}
    show({"raw": {**figures, **zeros}})
    assert "raw" in capsys.readouterr().out


def test_threads_work_at_the_same_time_each_with_an_array_of_its_own() -> None:
    both = Barrier(2, timeout=30)
    seen: list[int] = []

    def work(out: Bytes) -> None:
        both.wait()  # Breaks if one waits for the other to be done.
        seen.append(id(out))

    outs = [np.empty(1, dtype=np.uint8) for _ in range(2)]
    assert wall_seconds(work, outs) > 0
    assert sorted(seen) == sorted([*map(id, outs)] * ROUNDS)


def test_cosine_error_is_of_the_outputs() -> None:
    records = torch.randn(2, 64, 24, generator=torch.Generator().manual_seed(1))
    assert cosine_error(records, records, 16) < 1e-12
    assert 0.001 < cosine_error(records, records + 0.3 * torch.randn(2, 64, 24), 16) < 0.5


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_smollm2, "NEEDED", ("json", "no_such_package"))
    assert "no_such_package not installed" in fidelity_smollm2.missing()
    monkeypatch.setattr(fidelity_smollm2, "NEEDED", ("json",))
    assert fidelity_smollm2.missing() == ""


def test_figures_have_four_digits() -> None:
    assert rounded({"a": 1.23456e-7, "b": {"c": 12345.6}, "d": 3}) == {
        "a": 1.235e-7,
        "b": {"c": 12350.0},
        "d": 3,
    }


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "codecs.svg"
    figures = {"bits_per_element": 5.0, "kl_mean": 1e-3}
    plot({"raw": {"tiny_mla": {**figures, "kl_mean": 0.0}}, "q6": {"tiny_mla": figures}}, path)
    text = path.read_text()
    assert "</svg>" in text
    assert "q6" in text
