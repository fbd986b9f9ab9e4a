"""What the demo makes of answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvtier.cli.demo import Outcome, Phase, Turn

ANSWER = (1, 2, 3, 4)


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
        outcome = Outcome(phases, {}, {}, turn, "q6")
        assert outcome.tokens_equal is lossy
