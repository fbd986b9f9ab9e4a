"""`kvtier footprint`: real figures, of whole blocks, and no model that it can't size."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import footprint_latents
from kvtier.cli import main
from kvtier.cli.footprint import stored_by
from kvtier.cli.status import DaemonStatus, ShardStatus
from kvtier.codec import codec_by_name, encode_block
from kvtier.errors import ConfigError, KvtierError
from kvtier.footprint import report, sizes
from kvtier.footprint.geometries import KNOWN, Geometry, geometry_of, parse_config

Output = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
TEXT_SHA256 = "c631c2681f9c5933666b9a12b19b8c90c8261220d697e4311634cceb6c8ab038"
"""Of Python 3.11.7's socket.py and queue.py, one after the other."""

V3_CONFIG = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@cache
def forms(model: str) -> dict[str, sizes.Form]:
    return {form.name: form for form in sizes.forms(geometry_of(model))}


def parsed(**changes: Any) -> Geometry:
    """DeepSeek-V3's configuration, changed; None takes a key out."""
    config = {key: value for key, value in {**V3_CONFIG, **changes}.items() if value is not None}
    return parse_config(json.dumps(config).encode(), "some.json")


# Figures


@pytest.mark.parametrize(
    ("model", "bf16", "fp8", "gqa8", "indexer_bf16", "indexer_fp8"),
    [
        ("deepseek-v2", 69_120, 39_360, 245_760, 0, 0),
        ("v2-lite", 31_104, 17_712, 110_592, 0, 0),
        ("v3", 70_272, 40_016, 249_856, 0, 0),
        ("v3.2", 70_272, 40_016, 249_856, 61 * 256, 61 * 132),
        ("kimi-k2", 70_272, 40_016, 249_856, 0, 0),
        ("glm-5", 89_856, 51_168, 319_488, 78 * 256, 78 * 132),
    ],
)
def test_records_have_their_published_sizes(
    model: str, bf16: int, fp8: int, gqa8: int, indexer_bf16: int, indexer_fp8: int
) -> None:
    found = forms(model)
    assert found["gqa8"].bytes_per_token == gqa8
    assert found["mla_bf16"].bytes_per_token == bf16 + indexer_bf16
    assert found["raw"].bytes_per_token == bf16 + indexer_fp8
    assert found["fp8_ds_mla"].bytes_per_token == fp8 + indexer_fp8
    assert found["q6"].indexer_bytes_per_token == indexer_fp8


def test_the_headline_is_reached_on_real_latents() -> None:
    """DeepSeek-V2's 93.3 %, and the fractions of a conventional cache on each tier."""
    found = forms("deepseek-v2")
    assert sizes.DEEPSEEK_67B_BYTES == 389_120
    assert found["q6"].reduction_vs_deepseek_67b >= 0.933
    assert found["q6"].bytes_per_token <= report.HEADLINE_BYTES == 25_920
    assert found["q6"].ratio_to_gqa8 <= 1 / 10
    assert found["fp8_ds_mla"].ratio_to_gqa8 <= 1 / 6.2
    assert found["lossless"].bytes_per_token <= 0.70 * found["raw"].bytes_per_token
    assert found["mha"].bytes_per_token == 60 * 128 * (192 + 128) * 2


def test_smaller_codes_are_smaller() -> None:
    found = forms("v3")
    order = ["mha", "gqa8", "raw", "lossless", "fp8_ds_mla", "q8", "q6", "q4"]
    sizes_found = [found[name].bytes_per_token for name in order]
    assert sizes_found == sorted(sizes_found, reverse=True)
    assert found["q4"].bytes_per_token_layer > 576 * 3 / 8, "less than 3 bits: not real latents"


def test_every_codec_there_is_is_shown() -> None:
    with pytest.raises(ConfigError) as error:
        codec_by_name("?")
    known = re.search(r"known: ([^)]*)", str(error.value))
    assert known is not None
    assert {form.name for form in forms("v3").values() if form.measured} == {*known[1].split(", ")}


def test_a_tier_has_what_it_keeps() -> None:
    found = forms("deepseek-v2")
    assert found["gqa8"].tokens_per_gib == dict.fromkeys(sizes.TIERS, (1 << 30) // 245_760)
    assert found["fp8_ds_mla"].tokens_per_gib == dict.fromkeys(sizes.TIERS, (1 << 30) // 39_360)
    assert found["raw"].tokens_per_gib["hbm"] is None
    q6 = found["q6"].tokens_per_gib
    assert q6 == {"hbm": None, "ram": None, "ssd": int((1 << 30) / found["q6"].bytes_per_token)}


# Blocks


def per_layer(codec: str, geometry: Geometry) -> float:
    form = next(form for form in sizes.measured(geometry) if form.name == codec)
    return form.bytes_per_token_layer


@pytest.mark.parametrize("codec", ["lossless", "q6"])
def test_layers_do_not_repeat_for_the_codecs(codec: str) -> None:
    """More layers are more of the same kind, not the same bytes once more."""
    some, more = per_layer(codec, parsed()), per_layer(codec, parsed(num_hidden_layers=244))
    assert some == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize("codec", ["lossless", "q8", "q6", "q4"])
def test_the_order_of_channels_is_nothing_to_the_codecs(codec: str) -> None:
    """So what block_of() shuffles costs what tiny-mla's own block costs."""
    geometry = parsed(num_hidden_layers=4)
    spec = sizes.block_spec(geometry)
    for latents in sizes.load_latents():
        own = np.ascontiguousarray(latents).reshape(-1).view(np.uint8)
        sizes_found = [
            encode_block(codec_by_name(codec), block, spec)[1].size
            for block in (own, sizes.block_of(geometry, latents))
        ]
        assert sizes_found[0] == pytest.approx(sizes_found[1], rel=0.02)


def test_only_the_first_layer_is_a_first_layer() -> None:
    """Its records repeat with the tokens, which is what codecs gain most from."""
    latents = sizes.load_latents()[0]
    block = sizes.block_of(parsed(), latents).view(np.uint16).reshape(61, 64, 576)
    assert np.array_equal(np.sort(block[0]), np.sort(latents[0]))
    for layer in range(1, 61):
        assert np.array_equal(
            np.sort(block[layer, :, :512]), np.sort(latents[1 + (layer - 1) % 3, :, :512])
        )


@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (256, 64), (1024, 128), (700, 64)])
def test_other_widths_take_as_many_bits_an_element(rank: int, rope: int) -> None:
    geometry = parsed(kv_lora_rank=rank, qk_rope_head_dim=rope)
    for codec in ("lossless", "q6"):
        bits = per_layer(codec, geometry) / (rank + rope)
        assert bits == pytest.approx(per_layer(codec, parsed()) / 576, rel=0.1)
    assert any(f"Records of {rank} + {rope}" in note for note in report.notes(geometry))
    assert not any("Records of" in note for note in report.notes(KNOWN["v3"]))


def test_the_latents_are_what_tiny_mla_computes() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / name).read_bytes() for name in ("socket.py", "queue.py"))
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        pytest.skip("this Python's socket.py or queue.py is another version's")
    made, kept = footprint_latents.latents(), sizes.load_latents()
    assert made.shape == kept.shape == (2, 4, 64, 576)
    numbers = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (made, kept)]
    assert np.linalg.norm(numbers[0] - numbers[1]) < 1e-2 * np.linalg.norm(numbers[1])


def test_the_package_carries_the_latents() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["kvtier"]
    name = str(sizes.LATENTS.relative_to(ROOT / "kvtier"))
    assert any(fnmatchcase(name, pattern) for pattern in patterns)


# Configurations


def test_a_configuration_is_the_known_model() -> None:
    v3 = parsed()
    assert v3 == Geometry("some.json", 61, 128, 128, 192, 128, 512, 64)
    assert parsed(index_head_dim=128).indexer_width == KNOWN["v3.2"].indexer_width


def test_a_file_a_directory_or_a_part_of_a_multimodal_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": V3_CONFIG}))
    assert geometry_of(str(tmp_path)).kv_lora_rank == 512
    assert geometry_of(str(tmp_path / "config.json")).layers == 61
    assert geometry_of(str(ROOT / "checkpoints" / "tiny-mla")).key_width == 128


def test_heads_without_a_width_share_the_hidden_size() -> None:
    """MiniCPM3's configuration: value heads have no width of their own."""
    found = parsed(
        hidden_size=2560,
        num_attention_heads=40,
        v_head_dim=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        kv_lora_rank=256,
    )
    assert (found.key_width, found.value_width) == (96, 64)


def test_a_model_without_a_latent(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "llama.json"
    path.write_text(
        json.dumps(
            {
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 4,
                "hidden_size": 8192,
            }
        )
    )
    assert main.run(["footprint", "--model", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {name: form["bytes_per_token"] for name, form in answer["forms"].items()} == {
        "mha": 80 * 64 * 128 * 4,
        "gqa8": 80 * 4096,
        "kv_bf16": 80 * 4 * 128 * 4,
    }
    assert answer["measured_on"] is None
    assert main.run(["footprint", "--model", str(path)]) == 0
    assert "no latent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim is missing"),
        ({"v_head_dim": None}, "hidden_size is missing"),
        ({"kv_lora_rank": None}, "hidden_size is missing"),
        ({"v_head_dim": None, "hidden_size": 1000}, "no multiple of num_attention_heads 128"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a number from 1"),
        ({"num_hidden_layers": -61}, "num_hidden_layers is -61"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 61.0}, "num_hidden_layers is 61.0"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank is '512'"),
        ({"kv_lora_rank": 1 << 40}, "not a number from 1 to 65536"),
        ({"index_head_dim": []}, r"index_head_dim is \[\]"),
        ({"layer_types": "full_attention"}, "layer_types is not a list"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention: layers"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config: layers"),
        ({"indexer_types": ["full", "shared"]}, "share an indexer"),
        ({"indexer_types": 3}, "indexer_types is not a list"),
        ({"index_topk_freq": 4}, "index_topk_freq"),
    ],
)
def test_a_wrong_configuration_is_told_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"some.json: .*{message}"):
        parsed(**changes)


def test_layers_of_known_kinds_are_fine() -> None:
    kinds = ["full_attention", "indexed_attention", "deepseek_sparse_attention"]
    assert parsed(layer_types=kinds, index_topk_freq=1, compress_rates=None).layers == 61


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{}", "num_hidden_layers is missing"),
        (b" " * (1 << 20) + b"{}", "not a config.json"),
    ],
)
def test_a_file_that_is_none(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"some.json: .*{message}"):
        parse_config(data, "some.json")


def test_a_model_of_no_real_size_is_not_built() -> None:
    with pytest.raises(ConfigError, match="no real model"):
        sizes.forms(parsed(num_hidden_layers=65_536, kv_lora_rank=65_536))


@pytest.mark.parametrize("name", ["nonsense", "nowhere/config.json", "", " "])
def test_an_unknown_model_is_told_the_known_ones(name: str, capsys: Output) -> None:
    assert main.run(["footprint", "--model", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvtier: no model {name!r}: give deepseek-v2, v2-lite, v3, v3.2")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("DeepSeek-V2", "deepseek-v2"),
        ("V2", "deepseek-v2"),
        ("deepseek-v2-lite", "v2-lite"),
        ("deepseek-v3", "v3"),
        ("DeepSeek-V3.2", "v3.2"),
        ("Kimi-K2", "kimi-k2"),
        ("GLM-5", "glm-5"),
    ],
)
def test_names_in_their_makers_spelling(name: str, known: str) -> None:
    assert geometry_of(name) is KNOWN[known]


@pytest.mark.parametrize(("name", "nearest"), [("Deepseek-V33", "deepseek-v3"), ("GLM5", "glm-5")])
def test_a_misspelt_model_is_told_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {nearest}\? Else give deepseek-v2, "):
        geometry_of(name)


# The command


def test_json_has_every_figure_as_a_number(capsys: Output) -> None:
    assert main.run(["footprint", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == "deepseek-v2"
    assert answer["reduction_vs_deepseek_67b"]["q6"] >= 0.933
    assert set(answer["reduction_vs_deepseek_67b"]) == set(answer["forms"])
    assert "tiny-mla" in answer["measured_on"]
    fp8 = answer["forms"]["fp8_ds_mla"]
    assert fp8["bytes_per_token"] == 39_360
    assert fp8["bytes_per_token_layer"] == 656
    assert fp8["ratio_to_gqa8"] == 656 / 4096
    assert fp8["tokens_per_gib"] == {"hbm": 27_280, "ram": 27_280, "ssd": 27_280}
    assert "stored" not in answer
    notes = " ".join(answer["notes"])
    for part in ("By arithmetic", "Measured", "blank where", "Tokens in a GiB of SSD", "93.3 %"):
        assert part in notes


@pytest.mark.parametrize("model", KNOWN)
def test_the_table_fits_a_narrow_terminal(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run(["footprint", "--model", model]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(form in text for form in ("mha", "gqa8", "mla_bf16", "fp8_ds_mla", "q6"))
    assert all(f"GiB {tier}" in text for tier in ("HBM", "RAM", "SSD"))
    row = next(line for line in text.splitlines() if line.split()[:1] == ["q4"])
    assert row.split()[-1] == f"{forms(model)['q4'].tokens_per_gib['ssd']:,}", "the last column"
    assert "latents of tiny-mla" in " ".join(text.split())


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from kvtier.cli import main; assert main.run(['footprint']) == 0;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'lmdb')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, timeout=100, capture_output=True
    )
    assert done.returncode == 0, done.stderr


# A daemon


def daemon(*shards: tuple[int, int], **counters: float) -> DaemonStatus:
    return DaemonStatus(
        address="unix:/x",
        serving=True,
        version="0.1.0",
        epoch="",
        uptime_s=1.0,
        sessions=0,
        read_leases=0,
        write_leases=0,
        pins=0,
        pinned_bytes=0,
        quarantined_bytes=0,
        namespaces=0,
        tiers=[],
        shards=[
            ShardStatus(f"/{stored}", True, 0, 0, 0, 0, 0, 0.0, stored, of_blocks)
            for stored, of_blocks in shards
        ],
        counters=counters,
    )


def test_the_two_ratios_have_nothing_in_common() -> None:
    found = stored_by(daemon((60, 100), (20, 100), ssd_written_bytes=50.0, logical_bytes=1000.0))
    assert (found.ssd_stored_bytes, found.ssd_block_bytes) == (80, 200)
    assert (found.codec_ratio, found.end_to_end_ratio) == (0.4, 0.05)


def test_nothing_stored_is_no_ratio() -> None:
    fresh = stored_by(daemon((0, 0), ssd_written_bytes=0.0, logical_bytes=0.0))
    assert (fresh.codec_ratio, fresh.end_to_end_ratio) == (None, None)
    warm = stored_by(daemon((60, 100), ssd_written_bytes=0.0, logical_bytes=100.0))
    assert (warm.codec_ratio, warm.end_to_end_ratio) == (0.6, None)
    without_ssd = stored_by(daemon(ssd_written_bytes=0.0, logical_bytes=5.0))
    assert (without_ssd.codec_ratio, without_ssd.end_to_end_ratio) == (None, None)


def test_an_older_daemon_is_told_apart() -> None:
    with pytest.raises(KvtierError, match="restart it with this version"):
        stored_by(daemon((60, 100), ssd_written_bytes=50.0))


def test_stored_without_a_daemon(capsys: Output) -> None:
    assert main.run(["footprint", "--stored", "--address", "unix:/nowhere/x.sock"]) == 1
    assert "no daemon answers" in capsys.readouterr().err
