"""What the demo makes of answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from io import StringIO

import pytest
from rich.console import Console

from kvtier.cli.demo import Outcome, Phase, Turn, show
from kvtier.types import Component, NamespaceSpec, Tier

ANSWER = (1, 2, 3, 4)
SPEC = NamespaceSpec("m", "r", (Component("latent_rope", "float32", (4, 64, 576)),))


@dataclass
class Completion:
    """What an engine answers, as far as the demo looks."""

    token_ids: tuple[int, ...]
    prompt_tokens: int = 10
    ttft_s: float = 0.1
    decode_tokens_per_s: float = 10.0
    cached_tokens: Counter[str] = field(default_factory=Counter)


def phase_of(*answers: tuple[int, ...], lossy: bool) -> Phase:
    phase = Phase("ssd", lossy=lossy)
    for answer in answers:
        phase.add(Turn("t", 0, 0, [1], ANSWER, "", 0.2, 20.0), Completion(answer))
    return phase


def test_agreement_counts_up_to_the_first_difference() -> None:
    """Behind it the engine answers another prompt."""
    phase = phase_of((1, 2, 9, 4), ANSWER, lossy=True)
    assert (phase.agreed, phase.compared) == (2 + 4, 3 + 4)
    assert phase.as_json()["top1"] == round(6 / 7, 4)


def test_lossy_phases_do_not_count_for_equal_tokens() -> None:
    turn = Turn("t", 0, 0, [1], ANSWER, "", 0.2, 20.0)
    for lossy in (True, False):
        phases = [phase_of((9, 2, 3, 4), lossy=lossy)]
        outcome = Outcome(phases, {}, {}, turn, "q6", SPEC)
        assert outcome.tokens_equal is lossy


def outcome(*, stored_blocks: int = 0) -> Outcome:
    """A demo with large figures, for wide cells."""
    phases = []
    for name in ("reference", "cold", "host", "ssd", "restart"):
        phase = phase_of(*[(1, 2, 9, 4)] * 12, lossy=name in ("ssd", "restart"))
        phase.name, phase.prompt_tokens, phase.ttft_s = name, 123_456, [1.2345] * 12
        phase.long_ttft_s = phase.ttft_s
        phase.cached_tokens = Counter({Tier.HOST: 123_456, Tier.SSD: 123_456})
        phase.block_bytes = stored_blocks * SPEC.block_bytes
        phase.stored_bytes = phase.block_bytes // 6
        phases.append(phase)
    turn = Turn("t", 0, 0, [1], ANSWER, "text", 0.2, 20.0)
    rates = {"host": 0.5, "ssd": 0.25}
    return Outcome(phases, rates, {"write_gbps": 1.0, "read_gbps": 1.0}, turn, "q6", SPEC)


def shown(outcome: Outcome) -> str:
    file = StringIO()
    show(outcome, Console(file=file, width=80))
    return file.getvalue()


def test_the_tables_are_whole_in_a_narrow_terminal() -> None:
    text = shown(outcome(stored_blocks=1700))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for cell in ("prompt tokens", "stored on SSD", "speed-up", "answers' tokens", "123,456"):
        assert cell in text
    for cell in ("reference", "restart", "1234.5", "differ", "66.7% top-1"):
        assert cell in text


def test_stored_bytes_are_told_by_token_and_layer() -> None:
    """This engine keeps float32, so the ratio alone says nothing of bfloat16 caches."""
    text = " ".join(shown(outcome(stored_blocks=6)).split())
    assert "384 of 2,304 bytes a token and layer" in text
    assert "blocks are float32" in text
    answer = outcome(stored_blocks=6).as_json()
    assert answer["bytes_per_token_layer"] == {"stored": 384.0, "delivered": 2304.0}
    assert answer["block_dtype"] == "float32"


def test_nothing_stored_is_no_crash() -> None:
    assert "Nothing is on the SSD" in shown(outcome())
    assert outcome().as_json()["bytes_per_token_layer"]["stored"] is None


def test_speedup_is_the_median_of_the_turns_ratios() -> None:
    phase = Phase("host", ttft_s=[0.1, 0.1, 0.2], reference_ttft_s=[0.2, 0.9, 0.8])
    assert phase.speedup == pytest.approx(4.0), "not 0.8 / 0.1, the ratio of the medians"
