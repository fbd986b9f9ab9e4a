"""What the tests with real engines share: daemons, vLLM processes, checkpoints, right answers.

Chooses the tests of the engine that this virtual environment has (make test-engines). Starting a
vLLM costs ten seconds or more, so tests of a module share engines where that can't hide anything;
the daemon must be clean after each test: no lease, nothing pinned.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from kvtier.client import Client
from kvtier.process import DaemonProcess
from tests.e2e.conftest import StartDaemon, daemons
from tests.e2e.support import eventually
from tests.engines.counting_daemon import Calls
from tests.engines.vllm_engine import MAX_TOKENS, ROOT, TINY_MLA, EngineProcess, Prompt, environment

collect_ignore_glob = [
    *([] if find_spec("sglang") else ["test_sglang*.py"]),
    *([] if find_spec("vllm") else ["test_vllm*.py", "test_kv_events*.py"]),
]

TEST_TIMEOUT_S = 300
"""Each; reached only by what is broken."""

DAEMON: dict[str, object] = {"host_capacity_bytes": 192 << 20}
CHECKPOINT_TIMEOUT_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines take long to start, and the tests' usual timeout is for those that start none."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


class StartEngine(Protocol):
    """Starts a vLLM; see EngineProcess."""

    def __call__(
        self, model: Path, kv_transfer: Mapping[str, Any] | None = None, **options: Any
    ) -> EngineProcess: ...


def open_leases(daemon: DaemonProcess) -> dict[str, int]:
    """What the daemon still holds for somebody; empty if all was given back."""
    with Client(daemon.address, acquire_timeout_s=5.0, raise_errors=True) as client:
        stats = client.stats()
    held = {
        "read leases": stats.read_leases,
        "write leases": stats.write_leases,
        "pinned bytes": stats.pinned_bytes,
        "quarantined bytes": stats.quarantined_bytes,
    }
    return {name: count for name, count in held.items() if count}


@contextmanager
def watched_daemons(
    directory: Path, running: list[DaemonProcess], **settings: object
) -> Iterator[StartDaemon]:
    """As daemons(), and while they run _daemons_are_clean looks at them."""
    mine: list[DaemonProcess] = []
    with daemons(directory) as start:

        def begin(name: str = "d", **more: object) -> DaemonProcess:
            mine.append(start(name, **{**DAEMON, **settings, **more}))
            running.append(mine[-1])
            return mine[-1]

        try:
            yield begin
        finally:
            for daemon in mine:
                running.remove(daemon)


@contextmanager
def engines(directory: Path) -> Iterator[StartEngine]:
    """Start vLLMs, each a process of its own; at the end each must shut down well."""
    started: list[EngineProcess] = []
    with ExitStack() as stack:

        def start(
            model: Path, kv_transfer: Mapping[str, Any] | None = None, **options: Any
        ) -> EngineProcess:
            log = directory / f"engine{len(started)}.log"
            started.append(EngineProcess(model, log, kv_transfer, **options))
            return stack.enter_context(started[-1])

        yield start
        for engine in started:
            engine.hang_up()  # All at once: shutting down takes seconds.


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weight digests are remembered under the user's home; tests leave no trace there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """As the engines' processes (vllm_engine.environment)."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def running_daemons() -> list[DaemonProcess]:
    """All daemons that tests of any scope have now."""
    return []


@pytest.fixture(autouse=True)
def _daemons_are_clean(running_daemons: list[DaemonProcess]) -> Iterator[None]:
    """After each test: zero leases, zero pinned bytes, although the engines still run."""
    yield
    for daemon in running_daemons:
        eventually(lambda daemon=daemon: not open_leases(daemon), f"clean: {open_leases(daemon)}")  # type: ignore[misc]


@pytest.fixture
def start_daemon(tmp_path: Path, running_daemons: list[DaemonProcess]) -> Iterator[StartDaemon]:
    """Starts daemons of this test's own."""
    with watched_daemons(tmp_path, running_daemons) as start:
        yield start


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    """A daemon of this test's own."""
    return start_daemon()


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """What reaches the module's daemon."""
    return Calls(tmp_path_factory.mktemp("calls") / "calls")


@pytest.fixture(scope="module")
def shared_daemon(
    calls: Calls, tmp_path_factory: pytest.TempPathFactory, running_daemons: list[DaemonProcess]
) -> Iterator[DaemonProcess]:
    """A daemon for the tests of one module."""
    with watched_daemons(tmp_path_factory.mktemp("daemon"), running_daemons) as start:
        yield start(program=calls.program)


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines of this test's own."""
    with engines(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts engines for the tests of one module."""
    with engines(tmp_path_factory.mktemp("engines")) as start:
        yield start


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random checkpoints and adapters, one directory each."""
    home = tmp_path_factory.mktemp("checkpoints")
    jobs: dict[str, dict[str, Any]] = {
        "deepseek_v3": {"kind": "deepseek_v3"},
        "llama": {"kind": "llama"},
        "lora_a": {"kind": "lora", "base": str(home / "llama"), "seed": 1},
        "lora_b": {"kind": "lora", "base": str(home / "llama"), "seed": 2},
    }
    subprocess.run(
        [sys.executable, "-m", "bench.random_checkpoints", home, json.dumps(jobs)],
        cwd=ROOT,
        env=environment(),
        check=True,
        capture_output=True,
        timeout=CHECKPOINT_TIMEOUT_S,
    )
    return home


@pytest.fixture(scope="session")
def deepseek_v3(checkpoints: Path) -> Path:
    """A random DeepSeek-V3: MLA, mixture of experts; two heads, so that two ranks can share it."""
    return checkpoints / "deepseek_v3"


@pytest.fixture(scope="session")
def llama(checkpoints: Path) -> Path:
    """A random Llama with grouped-query attention."""
    return checkpoints / "llama"


@pytest.fixture(scope="session")
def text() -> Callable[[int, int], Prompt]:
    """text(at, tokens): real text, which tiny-mla was not trained on, from token `at` on."""
    from engine_adapter.mla.tokenizer import Tokenizer

    source = Path(sysconfig.get_path("stdlib")) / "socket.py"
    ids = Tokenizer(TINY_MLA, None).encode(source.read_text(encoding="utf-8"))

    def prompt(at: int, tokens: int) -> Prompt:
        assert at + tokens < len(ids)
        return Prompt((ids[0], *ids[at + 1 : at + tokens]))

    return prompt


def noise(seed: int, tokens: int) -> Prompt:
    """A prompt for the random models."""
    generator = random.Random(seed)
    return Prompt(tuple(generator.randrange(2, 2048) for _ in range(tokens)))


class Reference:
    """What a vLLM without any connector answers; one engine a model, started when first asked."""

    def __init__(self, start: StartEngine) -> None:
        self._start = start
        self._engines: dict[tuple[Path, str], EngineProcess] = {}
        self._known: dict[tuple[Path, Prompt, int, str], list[int]] = {}

    def prepare(self, model: Path, **options: Any) -> EngineProcess:
        """Start the engine that will be asked, unless it is there."""
        which = (model, json.dumps(options, sort_keys=True))
        if which not in self._engines:
            self._engines[which] = self._start(model, **options)
        return self._engines[which]

    def __call__(
        self, model: Path, prompt: Prompt, max_tokens: int = MAX_TOKENS, **options: Any
    ) -> list[int]:
        """The right tokens."""
        key = (model, prompt, max_tokens, json.dumps(options, sort_keys=True))
        if key not in self._known:
            answer = self.prepare(model, **options).one(prompt, max_tokens)
            assert not answer.cached
            self._known[key] = answer.tokens
        return self._known[key]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Right answers, for the whole run."""
    with engines(tmp_path_factory.mktemp("reference")) as start:
        yield Reference(start)
