"""vLLM with two ranks: MLA's cache is the same on each, that of grouped heads is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.process import DaemonProcess
from tests.e2e.support import eventually
from tests.engines.conftest import Reference, StartEngine, noise, open_leases
from tests.engines.counting_daemon import Calls
from tests.engines.vllm_engine import EngineProcess, connector

GQA_BLOCK_TOKENS = 128


@pytest.fixture(scope="module")
def one_rank(
    deepseek_v3: Path,
    shared_daemon: DaemonProcess,
    start_shared_engine: StartEngine,
    reference: Reference,
) -> EngineProcess:
    """A vLLM without parallelism."""
    reference.prepare(deepseek_v3)
    return start_shared_engine(deepseek_v3, connector(shared_daemon.address))


@pytest.fixture(scope="module")
def two_ranks(
    one_rank: EngineProcess,
    deepseek_v3: Path,
    shared_daemon: DaemonProcess,
    start_shared_engine: StartEngine,
) -> EngineProcess:
    """A vLLM of two workers, in processes of their own."""
    transfer = connector(shared_daemon.address)
    return start_shared_engine(deepseek_v3, transfer, tensor_parallel_size=2)


def stored_blocks(engine: EngineProcess) -> float:
    """Blocks that all its workers have copied to kvtier."""
    return engine.metrics().get("kvtier_stored_blocks", 0)


def wait_stored(daemon: DaemonProcess) -> None:
    """Until what was computed is there for the next request.

    A commit is not waited for, and ranks that spin for each other on a small machine keep the
    daemon from running for longer than an answer takes.
    """
    eventually(lambda: not open_leases(daemon), "what was reserved is committed")


def test_mla_is_stored_once_and_loaded_by_every_rank(
    one_rank: EngineProcess,
    two_ranks: EngineProcess,
    deepseek_v3: Path,
    shared_daemon: DaemonProcess,
    calls: Calls,
    reference: Reference,
) -> None:
    """Also between engines of one and of two ranks: same namespace, same bytes."""
    by_one, by_two = noise(1, 200), noise(2, 200)
    one_rank.one(by_one)
    wait_stored(shared_daemon)
    answer = two_ranks.one(by_one)
    assert (answer.cached, answer.tokens) == (192, reference(deepseek_v3, by_one))
    before, called = stored_blocks(two_ranks), calls.so_far()
    answer = two_ranks.one(by_two)
    assert (answer.cached, answer.tokens) == (0, reference(deepseek_v3, by_two))
    assert stored_blocks(two_ranks) - before == 3
    assert (calls.so_far() - called)["Reserve"] == 1, "one of the two ranks stores"
    wait_stored(shared_daemon)
    for engine in (two_ranks, one_rank):
        answer = engine.one(by_two)
        assert (answer.cached, answer.tokens) == (192, reference(deepseek_v3, by_two))


def test_aborted_and_killed_ranks_leave_nothing(
    two_ranks: EngineProcess, deepseek_v3: Path, reference: Reference
) -> None:
    """The daemon is looked at after each test."""
    prompt = noise(3, 200)
    for steps in (0, 1, 3):
        two_ranks.start(f"{steps}", prompt, max_tokens=100)
        two_ranks.step(steps)
        two_ranks.ask("abort", name=f"{steps}")
        assert two_ranks.step() == {}
    assert two_ranks.one(prompt).tokens == reference(deepseek_v3, prompt)


def test_grouped_heads_are_each_ranks_own(
    one_rank: EngineProcess,
    two_ranks: EngineProcess,
    llama: Path,
    shared_daemon: DaemonProcess,
    reference: Reference,
) -> None:
    """Every rank has other heads: engines of another size share nothing, equal ones do."""
    prompt = noise(4, 300)
    transfer = connector(shared_daemon.address, block_tokens=GQA_BLOCK_TOKENS)
    right = reference(llama, prompt)
    one_rank.replace(llama, transfer)
    assert one_rank.one(prompt).cached == 0
    wait_stored(shared_daemon)
    two_ranks.replace(llama, transfer, tensor_parallel_size=2)
    before = stored_blocks(two_ranks)
    answer = two_ranks.one(prompt)
    assert (answer.cached, answer.tokens) == (0, right)
    assert stored_blocks(two_ranks) - before == 2 * 2, "both ranks store their own"
    wait_stored(shared_daemon)
    for engine in (two_ranks, one_rank):
        answer = engine.one(prompt)
        assert (answer.cached, answer.tokens) == (256, right)
