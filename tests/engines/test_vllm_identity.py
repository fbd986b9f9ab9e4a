"""What must never be a hit: other weights, other rope, another dtype, another tenant."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvtier.process import DaemonProcess
from tests.engines.conftest import Reference, StartEngine, noise
from tests.engines.vllm_engine import EngineProcess, connector


@pytest.fixture(scope="module")
def stored(
    deepseek_v3: Path, shared_daemon: DaemonProcess, start_shared_engine: StartEngine
) -> EngineProcess:
    """An engine of which the daemon has noise(1, 200)."""
    engine = start_shared_engine(deepseek_v3, connector(shared_daemon.address))
    assert engine.one(noise(1, 200)).cached == 0
    return engine


def edit_config(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json."""
    path = checkpoint / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def another_theta(checkpoint: Path) -> None:
    """Same weights, other positions."""
    edit_config(checkpoint, lambda values: values["rope_parameters"].update(rope_theta=5000.0))


def another_revision(checkpoint: Path) -> None:
    """One weight of one layer differs."""
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.input_layernorm.weight"][0] += 1.0
    save_file(weights, path, {"format": "pt"})


def test_never_a_hit(
    stored: EngineProcess,
    deepseek_v3: Path,
    shared_daemon: DaemonProcess,
    reference: Reference,
    tmp_path: Path,
) -> None:
    """User report 2: other revision, rope parameters, dtype, and equal-sized dtypes.

    All under the same model name: every checkpoint is in a directory of the same name. What is the
    same in all of it is hit, also from another place.
    """
    prompt = noise(1, 200)
    transfer = connector(shared_daemon.address)
    right = reference(deepseek_v3, prompt)

    def copy(name: str, change: Callable[[Path], None] | None = None) -> Path:
        place = tmp_path / name / deepseek_v3.name
        shutil.copytree(deepseek_v3, place)
        if change:
            change(place)
        return place

    stored.replace(copy("same"), transfer)
    answer = stored.one(prompt)
    assert (answer.cached, answer.tokens) == (192, right), "the very same model, elsewhere"
    for change in (another_theta, another_revision):
        stored.replace(copy(change.__name__, change), transfer)
        fresh = stored.one(prompt)
        assert fresh.cached == 0, change.__name__
        assert fresh.tokens != right, f"{change.__name__} must matter"
        assert stored.one(prompt).cached == 192, "its own blocks"
    for dtype in ("bfloat16", "float16"):
        stored.replace(deepseek_v3, transfer, dtype=dtype)
        assert stored.one(prompt).cached == 0, dtype
        assert stored.one(prompt).cached == 192, "its own blocks"
    stored.replace(deepseek_v3, connector(shared_daemon.address, tenant="other"))
    assert stored.one(prompt).cached == 0, "another tenant"
    stored.replace(deepseek_v3, connector(shared_daemon.address, block_tokens=32))
    assert stored.one(prompt).cached == 0, "another layout"
    stored.replace(deepseek_v3, transfer)
    assert stored.one(prompt).cached == 192, "and what there was is still there"


def test_weights_updated_in_place(
    deepseek_v3: Path, daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    """After reset_cache nothing older is hit, neither what it stored nor what others stored."""
    prompt, longer = noise(2, 200), noise(2, 200) + noise(3, 100).ids
    engine = start_engine(deepseek_v3, connector(daemon.address))
    before = engine.one(prompt)
    assert engine.one(prompt).cached == 192
    engine.ask("distort_weights")
    assert engine.ask("reset_cache") is True
    after = engine.one(prompt)
    assert after.cached == 0
    assert after.tokens != before.tokens, "the update must matter"
    again = engine.one(longer)
    assert again.cached == 192, "what it computed since is hit"
    assert engine.one(prompt).tokens == after.tokens
    engine.replace(deepseek_v3, connector(daemon.address))
    old = engine.one(prompt)
    assert old.tokens == before.tokens, "the old weights again: never what the new ones stored"
