"""Whoever subscribes to a daemon's KV events knows what it has: after churn, gaps and restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.process import DaemonProcess
from tests.e2e.conftest import Connect
from tests.e2e.kv_churn import BLOCK_BYTES, SPECS, Churn, names_of, prompt, small_daemon
from tests.e2e.kv_subscriber import subscribe
from tests.e2e.support import contents, counter


@pytest.fixture
def churn(tmp_path: Path, _nothing_leaks: None) -> Iterator[Churn]:
    with small_daemon(tmp_path) as daemon, Churn(daemon, seed=1) as churn:
        yield churn


def test_every_way_in_and_out_of_a_tier(churn: Churn, tmp_path: Path) -> None:
    client, spec, hashes = churn.client, SPECS[0], prompt(0)
    told = [bytes(name) for name in names_of(spec, hashes)]
    with subscribe(tmp_path) as subscriber:
        client.put(spec, None, hashes, contents(hashes, BLOCK_BYTES))
        assert client.flush(spec, hashes, timeout_s=20.0)
        churn.check(subscriber)
        assert subscriber.picture == {"CPU": set(told), "STORAGE": set(told)}
        client.drop(spec, hashes[6:])
        churn.check(subscriber)
        assert subscriber.picture == {"CPU": set(told[:6]), "STORAGE": set(told[:6])}
        client.drop_namespace(spec)
        churn.check(subscriber)
        assert subscriber.picture == {"CPU": set(), "STORAGE": set()}
        assert subscriber.gaps == 0


def test_two_subscribers_through_churn_and_restarts(churn: Churn, tmp_path: Path) -> None:
    with subscribe(tmp_path) as steady, subscribe(tmp_path) as lazy:
        for kill in (False, True):
            for _ in range(10):
                churn.calls(50)
                steady.follow()
            churn.write_all()
            churn.settled()
            churn.check(steady)
            stored = len(steady.picture["STORAGE"])
            assert len(steady.picture["CPU"]) > 50
            assert stored > 50
            churn.restart(kill=kill)
            churn.check(steady)
            assert not steady.picture["CPU"]
            assert len(steady.picture["STORAGE"]) > stored / 2, "warm"
        churn.calls(50)
        churn.settled()
        churn.check(steady)
        churn.check(lazy)
        assert lazy.batches < steady.batches, "it came late, and took less"
    assert counter(churn.client, "kv_event_overflows") == 0


def test_what_was_lost_is_replayed(churn: Churn, tmp_path: Path) -> None:
    with subscribe(tmp_path) as subscriber:
        subscriber.follow()
        for _ in range(3):
            churn.calls(20)
            subscriber.lose(2)
            churn.calls(20)
            churn.settled()
            churn.check(subscriber)
        assert subscriber.gaps == 3
    assert counter(churn.client, "kv_event_replays") == 4
    assert counter(churn.client, "kv_event_pictures") == 0


@pytest.mark.usefixtures("_nothing_leaks")
def test_too_late_for_a_replay(tmp_path: Path) -> None:
    """What is not kept any more comes as one picture."""
    with (
        small_daemon(tmp_path, kv_events_buffer_bytes=1 << 20) as daemon,
        Churn(daemon, seed=2) as churn,
        subscribe(tmp_path) as subscriber,
    ):
        churn.calls(20)
        churn.settled()
        churn.check(subscriber)
        subscriber.leave()
        while counter(churn.client, "kv_event_blocks") < 12_000:
            churn.calls(100)
        subscriber.come_back()
        churn.settled()
        churn.check(subscriber)
        assert counter(churn.client, "kv_event_pictures") == subscriber.gaps == 1
        with subscribe(tmp_path) as newcomer:
            churn.check(newcomer)
            assert newcomer.picture == subscriber.picture
        assert counter(churn.client, "kv_event_pictures") == 2


def test_off_unless_asked_for(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    client.put(SPECS[0], None, prompt(0)[:4], contents(prompt(0)[:4], BLOCK_BYTES))
    assert counter(client, "kv_event_batches") == 0
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "zmq" not in maps
