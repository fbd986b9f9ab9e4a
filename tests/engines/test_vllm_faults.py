"""vLLM goes on with right answers whatever happens to the daemon, and finds it again by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from engine_adapter.mla import MlaEngine, PrefixCache
from kvtier.client import Client
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.process import DaemonProcess
from tests.e2e.conftest import StartDaemon
from tests.e2e.faulty_daemon import Fault, Faults
from tests.e2e.support import PATIENCE_S, Content, cont_daemon, eventually, stop_daemon
from tests.engines.conftest import (
    Reference,
    StartEngine,
    open_leases,
    watched_daemons,
)
from tests.engines.vllm_engine import TINY_MLA, EngineProcess, Prompt, connector

Text = Callable[[int, int], Prompt]


class Place:
    """Where the module's daemon is, or will be."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"unix:{directory}/d/kvtier.sock"
        self.faults = Faults(directory / "faults")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Nothing listens there yet."""
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def engine(place: Place, start_shared_engine: StartEngine) -> EngineProcess:
    """A vLLM that was started before its daemon, and waits a second for its answers."""
    transfer = connector(place.address, acquire_timeout_ms=1000)
    return start_shared_engine(TINY_MLA, transfer)


@pytest.fixture(scope="module")
def faulty_daemon(
    engine: EngineProcess, place: Place, running_daemons: list[DaemonProcess]
) -> Iterator[DaemonProcess]:
    """The daemon, whose SSD fails on command; it comes after the engine."""
    with watched_daemons(place.directory, running_daemons) as start:
        daemon = start(
            "d",
            program=place.faults.program,
            ssd_scrub_bytes_per_s=0,
            ssd_codec="raw",
            ssd_load_timeout_s=1.0,
        )
        assert daemon.address == place.address
        yield daemon


def hits(engine: EngineProcess, prompt: Prompt, right: list[int]) -> int:
    """Ask once; how many tokens were hit. The answer must be right."""
    answer = engine.one(prompt)
    assert answer.tokens == right
    return answer.cached


def wait_for_hits(engine: EngineProcess, prompt: Prompt, right: list[int]) -> None:
    """Ask until it is attached, has stored the prompt and hits it."""
    eventually(lambda: hits(engine, prompt, right) == 192, "it hits", 3 * PATIENCE_S)


def test_an_engine_that_was_there_first(
    engine: EngineProcess,
    place: Place,
    reference: Reference,
    text: Text,
    request: pytest.FixtureRequest,
) -> None:
    """Without a daemon: right answers, no hits. Then one comes, and it attaches by itself."""
    prompt = text(5000, 200)
    right = reference(TINY_MLA, prompt)
    assert not Path(place.address.removeprefix("unix:")).exists()
    assert hits(engine, prompt, right) == hits(engine, prompt, right) == 0
    request.getfixturevalue("faulty_daemon")
    wait_for_hits(engine, prompt, right)


def test_killed_while_requests_run(
    engine: EngineProcess, faulty_daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """User reports 13 and 14: an error inside, a miss outside; back after the restart."""
    known, fresh = text(5300, 200), text(5600, 220)
    right = reference(TINY_MLA, known)
    wait_for_hits(engine, known, right)
    engine.start("known", known, max_tokens=80)
    engine.start("fresh", fresh, max_tokens=80)
    assert engine.step(5) == {}
    faulty_daemon.kill()
    done = engine.step()
    assert done["known"].tokens == reference(TINY_MLA, known, max_tokens=80)
    assert done["fresh"].tokens == reference(TINY_MLA, fresh, max_tokens=80)
    assert hits(engine, known, right) == 0
    faulty_daemon.start()
    wait_for_hits(engine, known, right)


def test_killed_between_lookup_and_load(
    engine: EngineProcess, faulty_daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """Requests wait while others run; the daemon that knew them is gone when their turn comes."""
    prompts = [text(5900 + 10 * i, 200) for i in range(6)]
    right = [reference(TINY_MLA, prompt, max_tokens=30) for prompt in prompts]
    for prompt in prompts:
        engine.one(prompt, max_tokens=30)
    for i, prompt in enumerate(prompts):  # Two more than run at once.
        engine.start(f"{i}", prompt, max_tokens=30)
    engine.step(2)
    faulty_daemon.kill()
    done = engine.step()
    assert [done[f"{i}"].tokens for i in range(6)] == right
    faulty_daemon.start()


def test_a_daemon_that_hangs(
    engine: EngineProcess, faulty_daemon: DaemonProcess, reference: Reference, text: Text
) -> None:
    """User report 12: a reply that never comes is a miss at the deadline."""
    prompt = text(6300, 200)
    right = reference(TINY_MLA, prompt)
    wait_for_hits(engine, prompt, right)
    stop_daemon(faulty_daemon)
    try:
        assert hits(engine, prompt, right) == 0
        assert hits(engine, text(6400, 100), reference(TINY_MLA, text(6400, 100))) == 0
    finally:
        cont_daemon(faulty_daemon)
    wait_for_hits(engine, prompt, right)


@pytest.mark.parametrize("kind", ["error", "hang"])
@pytest.mark.parametrize("block", [0, 2])
def test_a_load_that_fails_is_computed(
    block: int,
    kind: Literal["error", "hang"],
    engine: EngineProcess,
    place: Place,
    faulty_daemon: DaemonProcess,
    reference: Reference,
    text: Text,
) -> None:
    """User report 6: FAULT INJECTION in the SSD, at one block of three.

    vLLM takes the daemon's word for 192 tokens, the load falls short, and exactly what is missing
    is computed: the good head is kept, the answer is right.
    """
    prompt = text(6700, 200)
    right = reference(TINY_MLA, prompt)
    wait_for_hits(engine, prompt, right)
    sample = content_of(faulty_daemon, prompt)[block].tobytes()[:4096]
    faulty_daemon.stop()  # All of it is on the SSD then, and nothing in RAM.
    faulty_daemon.start()
    at = place_of(faulty_daemon.ssd_directory, sample)
    before = engine.metrics()
    with Client(faulty_daemon.address, acquire_timeout_s=5.0, raise_errors=True) as client:
        eventually(lambda: client.attached and client.stats().sessions == 3, "all are attached")
        with place.faults.broken(Fault("preadv", kind, first=at, end=at + 1)):
            assert hits(engine, prompt, right) == 192, "as vLLM was told"
    after = engine.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvtier_failed_loads"] == 1
    assert grown.get("kvtier_loaded_ssd_blocks", 0) == block, "the good head"
    wait_for_hits(engine, prompt, right)


def content_of(daemon: DaemonProcess, prompt: Prompt) -> list[Content]:
    """The prompt's full blocks, under the namespace that all engines of tiny-mla share."""
    with Client(daemon.address, acquire_timeout_s=5.0, raise_errors=True) as client:
        spec = MlaEngine(TINY_MLA, prefix_cache=PrefixCache(client)).namespace
        assert spec is not None
        hashes = block_hashes(root_hash(namespace_digest(spec)), prompt.ids, spec.block_tokens)
        contents = [np.zeros(spec.block_bytes, dtype=np.uint8) for _ in hashes]
        assert client.get(spec, hashes, contents).num_blocks == len(hashes)
    return contents


def place_of(directory: Path, sample: bytes) -> int:
    """Where in the SSD's only data file this is."""
    [path] = directory.glob("env-*/data.mdb")
    at = path.read_bytes().find(sample)
    assert at >= 0, "the block is not on the medium"
    return at


def test_a_daemon_without_room(
    engine: EngineProcess, start_daemon: StartDaemon, reference: Reference, text: Text
) -> None:
    """User report 18, with an engine: it goes on storing into what is full; nobody waits."""
    small = start_daemon("small", host_capacity_bytes=16 << 20, ssd=False)
    engine.replace(TINY_MLA, connector(small.address))
    prompts = [text(at, 900) for at in (7300, 8300, 9300)]  # 25 MB of blocks.
    for prompt in prompts:
        assert hits(engine, prompt, reference(TINY_MLA, prompt)) == 0
    assert hits(engine, prompts[-1], reference(TINY_MLA, prompts[-1])) == 896, "the newest"


def test_an_engine_that_is_killed(
    start_engine: StartEngine, daemon: DaemonProcess, text: Text
) -> None:
    """User report 16: kill -9 with requests in flight; the daemon answers, and holds nothing."""
    engine = start_engine(TINY_MLA, connector(daemon.address))
    engine.one(text(8600, 200))
    engine.start("hit", text(8600, 300), max_tokens=100)
    engine.start("fresh", text(9000, 250), max_tokens=100)
    engine.tell("step", times=3)
    engine.kill()
    eventually(lambda: not open_leases(daemon), "all is given back")
