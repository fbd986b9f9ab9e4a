"""What nobody should do and somebody will."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.arena import ArenaMapping
from kvtier.client import Client
from kvtier.process import DaemonProcess
from kvtier.types import MissReason
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import (
    BLOCK_BYTES,
    Child,
    Raw,
    chain,
    content,
    eventually,
    get_checked,
    put,
    spec_of,
)

SPEC = spec_of()


def test_many_threads_on_one_client(daemon: DaemonProcess, connect: Connect) -> None:
    """They store and read the same few prompts, in RAM that is too small for all of them."""
    client, streamed = connect(daemon), connect(daemon, shared_memory=False)
    errors: list[BaseException] = []
    hits = [0]

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).integers(0, 12, 30)
        try:
            for number in order:
                hashes = chain(f"prompt {number}", 64)
                one = streamed if seed == 0 else client
                put(one, SPEC, hashes, wait_s=0.2)
                hits[0] += get_checked(one, SPEC, hashes)
                one.finish(SPEC, hashes[-1])
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    assert not errors
    assert hits[0] > 1000
    eventually(lambda: not client.stats().pinned_bytes, "nothing stays pinned")
    assert client.stats().write_leases == 0


def test_closing_during_calls(daemon: DaemonProcess) -> None:
    """Whatever is under way becomes a miss."""
    errors: list[BaseException] = []
    for shared_memory in (True, False):
        client = Client(daemon.address, shared_memory=shared_memory, acquire_timeout_s=5.0)
        assert client.wait_attached(20.0)
        started = threading.Barrier(5)

        def work(
            number: int, client: Client = client, started: threading.Barrier = started
        ) -> None:
            try:
                put(client, SPEC, chain(f"{number}", 16))
                started.wait(20.0)
                while not client.misses[MissReason.CLOSED]:
                    put(client, SPEC, chain(f"{number}", 16))
                    get_checked(client, SPEC, chain(f"{number}", 16))
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        started.wait(20.0)
        client.close()
        client.close()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()
    assert not errors


def test_a_lock_directory_that_vanished(start_daemon: StartDaemon, connect: Connect) -> None:
    """Nobody can tell who lives any more, so nothing half-written is reused; all else works."""
    daemon = start_daemon(lease_ttl_s=0.2)
    client = connect(daemon)
    with Raw(daemon.address) as raw:
        lock_dir = Path(raw.welcome.lock_dir)
    with Child("write", daemon.address, name="half", count=8, pause_at=4) as child:
        child.expect("midway")
        shutil.rmtree(lock_dir)
        eventually(lambda: client.stats().quarantined_bytes, "its lease is over")
        assert put(client, SPEC, chain("a", 4)) == 4
        assert get_checked(client, SPEC, chain("a", 4)) == 4
        assert client.stats().quarantined_bytes == 8 * BLOCK_BYTES
        late = connect(daemon)
        assert not late.mapped, "without a lock it must not write through the map"
        assert get_checked(late, SPEC, chain("a", 4)) == 4
        child.say()
        assert child.line()["committed"] is False
        assert client.stats().quarantined_bytes == 0, "it said that it has stopped"


@pytest.mark.parametrize("how", ["copy", "truncated", "garbage", "gone"])
def test_another_file_at_the_arenas_path(daemon: DaemonProcess, connect: Connect, how: str) -> None:
    """Another mount namespace may show anything there: such a client streams."""
    client = connect(daemon)
    put(client, SPEC, chain("a", 4))
    with Raw(daemon.address) as raw:
        arena = Path(raw.welcome.arena_path)
    kept = arena.rename(arena.with_suffix(".kept"))
    if how == "copy":
        shutil.copy(kept, arena)
        ArenaMapping(arena).control.epoch = b"another daemon's"
    elif how == "truncated":
        arena.write_bytes(kept.read_bytes()[: 4 << 20])
    elif how == "garbage":
        arena.write_bytes(b"?" * kept.stat().st_size)
    late = connect(daemon)
    assert not late.mapped
    assert get_checked(late, SPEC, chain("a", 4)) == 4
    assert put(late, SPEC, chain("b", 4)) == 4
    assert get_checked(client, SPEC, chain("b", 4)) == 4
    kept.rename(arena)
    assert connect(daemon).mapped


def test_a_refused_client_says_why(start_daemon: StartDaemon) -> None:
    """It misses, and the reason is there for who asks."""
    daemon = start_daemon(max_sessions=1)
    with Raw(daemon.address), Client(daemon.address, raise_errors=True) as client:
        with pytest.raises(Exception, match="max_sessions"):
            client.acquire(SPEC, chain("a", 1))
        assert client.misses == {MissReason.NO_SESSION: 1}


def test_source_arrays_that_change_early(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 8: what the engine overwrites after put() returned is not what is stored."""
    client = connect(daemon)
    hashes = chain("reused", 8)
    sources = [content(key).copy() for key in hashes]
    assert client.put(SPEC, None, hashes, sources) == 8
    for source in sources:
        source[:] = 0
    assert get_checked(client, SPEC, hashes) == 8
