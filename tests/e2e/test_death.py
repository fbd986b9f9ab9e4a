"""Clients and daemons that are killed or stopped in the middle of something."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvtier.client import Client
from kvtier.errors import ConfigError
from kvtier.process import DaemonProcess
from kvtier.types import MissReason
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import (
    BLOCK_BYTES,
    Child,
    PausingSequence,
    chain,
    cont_daemon,
    content,
    contents,
    eventually,
    get_checked,
    put,
    spec_of,
    stop_daemon,
    used_bytes,
)

SPEC = spec_of()
SHORT_LEASES = {"lease_ttl_s": 0.3, "session_timeout_s": 0.8, "heartbeat_s": 0.2}
PRESSURE = 500
"""Blocks; 32 MiB hold 512."""


def is_quiet(client: Client) -> bool:
    """No lease, no pin and no quarantine is left."""
    stats = client.stats()
    held = stats.read_leases + stats.write_leases + stats.pins
    return not held + stats.pinned_bytes + stats.quarantined_bytes


def resident_bytes(pid: int) -> int:
    """Private memory of a process: the arena is shared and not counted."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def _open_files() -> list[str]:
    return [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


# Clients


def test_killed_while_writing(daemon: DaemonProcess, connect: Connect) -> None:
    """Its room comes back, and the daemon answers the next call (user report 16)."""
    client = connect(daemon)
    put(client, SPEC, chain("before", 4))
    before = used_bytes(client)
    with Child("write", daemon.address, name="half", count=64, pause_at=32) as child:
        child.expect("midway")
        assert client.stats().write_leases == 1
        child.kill()
        assert get_checked(client, SPEC, chain("before", 4)) == 4
        eventually(lambda: is_quiet(client), "the dead client's lease and quarantine end")
    assert used_bytes(client) == before
    assert get_checked(client, SPEC, chain("half", 64)) == 0
    assert put(client, SPEC, chain("half", 64)) == 64
    assert get_checked(client, SPEC, chain("half", 64)) == 64


def test_killed_while_reading(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 16: the daemon answers at once, and the lease is given back."""
    client = connect(daemon)
    put(client, SPEC, chain("read", 8))
    with Child("read", daemon.address, name="read", count=8, pause_at=4) as child:
        child.expect("midway")
        assert client.stats().read_leases == 1
        child.kill()
        eventually(lambda: is_quiet(client), "the dead client's lease ends")
    assert get_checked(client, SPEC, chain("read", 8)) == 8


def test_fifty_dead_clients_leave_nothing(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 17: start, use, kill -9; memory, pins and /dev/shm are as before."""
    client = connect(daemon)
    put(client, SPEC, chain("shared", 4))
    (locks,) = [path for path in map(Path, _open_files()) if path.parent.name == "locks"]
    with Child("killed_over_and_over", daemon.address, times=50) as child:
        for _ in range(10):  # Until the daemon's own buffers have their size.
            child.expect(".")
        before = resident_bytes(daemon.pid)
        for _ in range(40):
            child.expect(".")
    eventually(lambda: is_quiet(client), "all of it comes back")
    assert client.stats().sessions == 1
    assert used_bytes(client) == 4 * BLOCK_BYTES
    eventually(lambda: len(list(locks.parent.iterdir())) == 1, "dead clients' lock files go")
    assert resident_bytes(daemon.pid) - before < 8 << 20


def test_stopped_while_writing(start_daemon: StartDaemon, connect: Connect) -> None:
    """Its lease is long over, others store and read; it wakes up and harms nobody's block."""
    daemon = start_daemon(**SHORT_LEASES)
    client = connect(daemon)
    with Child("write", daemon.address, name="half", count=64, pause_at=32) as child:
        child.expect("midway")
        child.stop()
        held = 64 * BLOCK_BYTES
        eventually(lambda: client.stats().quarantined_bytes == held, "its room is quarantined")
        eventually(lambda: client.stats().sessions == 1, "its session is over")
        for number in range(3):  # More than everything else in RAM.
            hashes = chain(f"others {number}", PRESSURE - 64)
            assert put(client, SPEC, hashes, wait_s=20.0) == PRESSURE - 64
            assert get_checked(client, SPEC, hashes) == PRESSURE - 64
        assert client.stats().quarantined_bytes == held
        assert put(client, SPEC, chain("half", 8), wait_s=20.0) == 8
        child.cont()
        child.say()
        assert child.line()["committed"] is False
        assert get_checked(client, SPEC, hashes) == PRESSURE - 64
        assert get_checked(client, SPEC, chain("half", 64)) == 8
        eventually(lambda: client.stats().quarantined_bytes == 0, "it said that it has stopped")
        child.say()
        assert child.line() == {"stored": 64}, "it is a client like any other again"
        assert get_checked(client, SPEC, chain("half again", 64)) == 64
        child.say()
        assert child.wait() == 0


def test_expired_while_writing(start_daemon: StartDaemon, connect: Connect) -> None:
    """The lease is over and the session is not: commit fails, and frees the quarantine."""
    daemon = start_daemon(lease_ttl_s=0.2)
    client = connect(daemon)
    with Child("write", daemon.address, name="slow", count=8, pause_at=4) as child:
        child.expect("midway")
        eventually(lambda: client.stats().quarantined_bytes > 0, "its lease is over")
        child.say()
        answer = child.line()
        assert answer == {"committed": False, "misses": {"lease_lost": 1}}
        assert is_quiet(client)
        assert get_checked(client, SPEC, chain("slow", 8)) == 0


def test_stopped_while_reading(start_daemon: StartDaemon, connect: Connect) -> None:
    """What it read of extents that have new owners by now counts for nothing."""
    daemon = start_daemon(ssd=False, **SHORT_LEASES)
    client = connect(daemon)
    put(client, SPEC, chain("read", 64))
    with Child("read", daemon.address, name="read", count=64, pause_at=32) as child:
        child.expect("midway")
        child.stop()
        eventually(lambda: client.stats().read_leases == 0, "its lease is over")
        for number in range(3):
            put(client, SPEC, chain(f"others {number}", 512))
        assert client.lookup(SPEC, chain("read", 64)).num_blocks == 0
        child.cont()
        child.say()
        answer = child.line()
        assert answer["granted"] == 64
        assert answer["got"] == 0
        put(client, SPEC, chain("read", 64))
        child.say()
        assert child.line() == {"got": 64}
        child.say()
        assert child.wait() == 0


@pytest.mark.parametrize("shared_memory", [True, False], ids=["mapped", "streamed"])
def test_a_lease_that_ended_reads_nothing(
    start_daemon: StartDaemon, connect: Connect, shared_memory: bool
) -> None:
    daemon = start_daemon(ssd=False)
    client = connect(daemon, shared_memory=shared_memory)
    put(client, SPEC, chain("short", 4))
    lease = client.acquire(SPEC, chain("short", 4), ttl_s=0.05)
    eventually(lambda: client.stats().read_leases == 0, "the lease is over")
    assert lease.read_into([np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in range(4)]) == 0
    lease.release()


def test_ending_without_close(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    with Child("left_open", daemon.address) as child:
        assert child.line() == 2
        assert child.wait() == 0
    eventually(lambda: client.stats().sessions == 1, "its session is over")
    assert get_checked(client, SPEC, chain("left open", 2)) == 2


# The daemon


def test_killed_while_clients_copy(daemon: DaemonProcess, connect: Connect) -> None:
    """User reports 13 and 14: never a wrong byte, never an error, attached again by itself."""
    client, streamed = connect(daemon), connect(daemon, shared_memory=False)
    hashes = chain("durable", 64)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    over = threading.Event()
    errors: list[BaseException] = []
    rounds = [0, 0, 0]

    def keep_reading(at: int, reader: Client) -> None:
        try:
            while not over.is_set():
                rounds[at] += get_checked(reader, SPEC, hashes) == 64
        except BaseException as error:
            errors.append(error)
            raise

    def keep_writing(writer: Client) -> None:
        try:
            number = 0
            while not over.is_set():
                mine = chain(f"written {number % 20}", 32)
                put(writer, SPEC, mine, wait_s=0.1)
                get_checked(writer, SPEC, mine)
                number += 1
        except BaseException as error:
            errors.append(error)
            raise

    threads = [
        threading.Thread(target=keep_reading, args=(0, client)),
        threading.Thread(target=keep_reading, args=(1, streamed)),
        threading.Thread(target=keep_writing, args=(client,)),
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(4):
            rounds[:2] = [0, 0]
            eventually(lambda: min(rounds[:2]) > 2 or errors, f"both read it all, boot {number}")
            daemon.kill()
            daemon.start()
    finally:
        over.set()
        for thread in threads:
            thread.join(60.0)
    assert not errors
    assert client.wait_attached(20.0)
    assert client.mapped
    assert get_checked(client, SPEC, hashes) == 64
    eventually(lambda: is_quiet(client), "nothing stays behind")


def test_killed_under_a_writer(daemon: DaemonProcess, connect: Connect) -> None:
    """What it may still be writing stays out of the new daemon's use until it moves on."""
    with Child("write", daemon.address, name="half", count=64, pause_at=32) as child:
        child.expect("midway")
        child.stop()
        daemon.kill()
        daemon.start()
        client = connect(daemon)
        held = 64 * BLOCK_BYTES
        assert client.stats().quarantined_bytes == held
        for number in range(3):
            hashes = chain(f"others {number}", PRESSURE - 64)
            assert put(client, SPEC, hashes, wait_s=20.0) == PRESSURE - 64
        assert client.stats().quarantined_bytes == held
        child.cont()
        child.say()
        assert child.line()["committed"] is False
        assert get_checked(client, SPEC, hashes) == PRESSURE - 64
        eventually(lambda: client.stats().quarantined_bytes == 0, "it writes no more")
        child.say()
        assert child.line() == {"stored": 64}
        assert get_checked(client, SPEC, chain("half again", 64)) == 64
        child.say()
        assert child.wait() == 0


def test_killed_together_with_a_writer(daemon: DaemonProcess, connect: Connect) -> None:
    with Child("write", daemon.address, name="half", count=64, pause_at=32) as child:
        child.expect("midway")
        daemon.kill()
        child.kill()
        daemon.start()
        client = connect(daemon)
        assert client.stats().quarantined_bytes == 0
        assert used_bytes(client) == 0


def test_killed_under_a_reader(daemon: DaemonProcess, connect: Connect) -> None:
    """The copy in flight is not counted, although not a byte of it has changed yet."""
    client = connect(daemon)
    put(client, SPEC, chain("read", 8))
    assert all(client.flush(SPEC, chain("read", 8), timeout_s=20.0))

    def restart() -> None:
        daemon.kill()
        daemon.start()

    lease = client.acquire(SPEC, chain("read", 8))
    destinations = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in range(8)]
    assert lease.read_into(PausingSequence(destinations, 4, restart)) == 0
    assert client.misses[MissReason.LEASE_LOST] == 1
    lease.release()
    assert client.wait_attached(20.0)
    eventually(lambda: get_checked(client, SPEC, chain("read", 8)) == 8, "the SSD has it")


def test_restarted_twice_at_once(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 13: in under a second, and the client finds the newest."""
    client = connect(daemon)
    epochs = {client.stats().epoch}
    for _ in range(2):
        daemon.kill()
        daemon.start()
        daemon.kill()
        daemon.start()
        epochs.add(eventually(lambda: client.stats().epoch, "attached again"))
    assert len(epochs) == 3
    assert put(client, SPEC, chain("a", 4)) == 4


def test_restarts_leave_no_descriptor_and_no_memory(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect(daemon)

    def restart() -> int:
        daemon.kill()
        daemon.start()
        assert client.wait_attached(20.0)
        eventually(lambda: put(client, SPEC, chain("a", 2)) == 2, "it stores again")
        return len(os.listdir("/proc/self/fd"))

    first = restart()
    for _ in range(9):
        last = restart()
    assert last <= first + 2
    maps = Path("/proc/self/maps").read_text()
    assert maps.count("/arena") == 1, "only the live arena is mapped"


def test_a_clean_stop_lets_go_of_the_memory(daemon: DaemonProcess, connect: Connect) -> None:
    """A client that idles must not keep the room that the next daemon needs."""
    client = connect(daemon)
    put(client, SPEC, chain("a", 2))
    lease = client.acquire(SPEC, chain("a", 2))
    assert daemon.stop() == 0
    eventually(lambda: not client.attached, "the session is over")
    assert lease.read_into([np.zeros(BLOCK_BYTES, dtype=np.uint8)]) == 0
    lease.release()
    eventually(lambda: "/arena" not in Path("/proc/self/maps").read_text(), "it is unmapped")
    daemon.start()
    assert client.wait_attached(20.0)
    assert get_checked(client, SPEC, chain("a", 2)) == 2


def test_a_dead_daemon_is_a_miss_at_once(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    put(client, SPEC, chain("a", 2))
    daemon.kill()
    for _ in range(100):
        assert get_checked(client, SPEC, chain("a", 2)) == 0
        assert put(client, SPEC, chain("a", 2)) == 0
        client.finish(SPEC, chain("a", 2)[-1])
    assert client.stats().epoch == b""
    assert client.flush(SPEC, chain("a", 2), timeout_s=5.0) == [False, False]
    assert client.misses[MissReason.NO_SESSION] > 300
    assert client.misses[MissReason.TIMEOUT] == 0
    daemon.start()
    assert client.wait_attached(20.0)


@pytest.mark.parametrize("timeout_s", [0, -1, 60.1, 1e20, float("inf"), float("nan")])
def test_a_deadline_that_grpc_would_raise_at_is_refused(timeout_s: float) -> None:
    """Before a call of the engine's meets it."""
    with pytest.raises(ConfigError, match="at most 60 seconds"):
        Client("unix:/nowhere", acquire_timeout_s=timeout_s)


def test_a_client_that_was_there_first(start_daemon: StartDaemon, tmp_path: Path) -> None:
    path = tmp_path / "d" / "kvtier.sock"
    with Client(f"unix:{path}", acquire_timeout_s=5.0) as client:
        assert not client.attached
        assert put(client, SPEC, chain("a", 2)) == 0
        start_daemon()
        assert client.wait_attached(20.0)
        assert put(client, SPEC, chain("a", 2)) == 2


def test_a_hung_daemon_costs_one_deadline(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 12: a miss at the deadline, then at once, until it answers again."""
    client = connect(daemon, acquire_timeout_s=0.05)
    patient = connect(daemon)
    hashes = chain("a", 4)
    put(patient, SPEC, hashes)
    eventually(lambda: get_checked(client, SPEC, hashes) == 4, "it works")
    client.misses.clear()
    stop_daemon(daemon)
    try:
        assert get_checked(client, SPEC, hashes) == 0
        assert client.misses == {MissReason.TIMEOUT: 1}
        for _ in range(100):
            assert get_checked(client, SPEC, hashes) == 0
        assert client.misses[MissReason.TIMEOUT] <= 2
        assert client.misses[MissReason.BREAKER_OPEN] >= 99
    finally:
        cont_daemon(daemon)
    eventually(lambda: get_checked(client, SPEC, hashes) == 4, "it works again")


def test_threads_open_the_breaker_once(daemon: DaemonProcess, connect: Connect) -> None:
    """Eight calls that time out together are one slow daemon, not eight: it is asked again soon."""
    client = connect(daemon, acquire_timeout_s=0.2)
    hashes = chain("a", 4)
    put(client, SPEC, hashes)
    stop_daemon(daemon)
    try:
        threads = [
            threading.Thread(target=get_checked, args=(client, SPEC, hashes)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert client._calls._breaker_s == 2.0
    finally:
        cont_daemon(daemon)
    eventually(lambda: get_checked(client, SPEC, hashes) == 4, "it works again")


def test_what_a_hung_daemon_missed_is_made_up_for(
    start_daemon: StartDaemon, connect: Connect
) -> None:
    """A reservation granted too late and a commit that timed out: nothing stays reserved, although
    the client lives and holds its lock."""
    daemon = start_daemon(lease_ttl_s=0.5, heartbeat_s=0.2)
    client = connect(daemon)
    put(client, SPEC, chain("opens the namespace", 1))
    before = used_bytes(client)
    lease = client.reserve(SPEC, None, chain("late commit", 8))
    lease.write_from(contents(chain("late commit", 8)))
    stop_daemon(daemon)
    try:
        late = client.reserve(SPEC, None, chain("late grant", 8))
        assert list(late.indices) == []
        client._calls.close_breaker()
        assert not lease.commit()
        assert client.misses[MissReason.TIMEOUT] == 2
    finally:
        cont_daemon(daemon)
    eventually(lambda: client.stats().epoch, "it answers")
    eventually(lambda: client.stats().write_leases == 0, "leases end")
    eventually(lambda: is_quiet(client), "nothing stays in quarantine")
    kept = get_checked(client, SPEC, chain("late commit", 8))
    assert kept in (0, 8), "all or none"
    assert used_bytes(client) == before + kept * BLOCK_BYTES


def test_closing_while_a_daemon_hangs(daemon: DaemonProcess) -> None:
    """Neither attaching nor closing waits for it for long."""
    stop_daemon(daemon)
    try:
        client = Client(daemon.address)
        assert not client.attached
        started_s = time.monotonic()
        client.close()
        assert time.monotonic() - started_s < 10.0, "far below gRPC's own 20 s"
    finally:
        cont_daemon(daemon)


def test_attaching_to_a_daemon_that_hung(daemon: DaemonProcess) -> None:
    stop_daemon(daemon)
    client = Client(daemon.address)
    cont_daemon(daemon)
    with client:
        assert client.wait_attached(20.0)
        assert put(client, SPEC, chain("a", 2)) == 2


def test_silence_ends_a_session(start_daemon: StartDaemon, connect: Connect) -> None:
    daemon = start_daemon(**SHORT_LEASES)
    client = connect(daemon)
    put(client, SPEC, chain("a", 2))
    lease = client.acquire(SPEC, chain("a", 2), ttl_s=60.0)
    with Child("group_member", daemon.address, group="00" * 16) as child:
        child.expect("attached")
        child.stop()
        eventually(lambda: client.stats().sessions == 1, "the silent one's session is over")
        assert client.stats().read_leases == 1, "heartbeats keep ours"
        child.cont()
        eventually(lambda: client.stats().sessions == 2, "it has attached again")
        child.say()
        assert child.line() is True
    lease.release()
    assert content(chain("a", 1)[0]).size == BLOCK_BYTES


def test_an_operator_is_told_that_the_daemon_went_and_came(
    daemon: DaemonProcess, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(daemon)
    for _ in range(2):
        daemon.kill()
        eventually(lambda: not client.attached, "the client has noticed")
        daemon.start()
        assert client.wait_attached(20.0)
    said = [record.getMessage() for record in caplog.records if "daemon at" in record.getMessage()]
    assert len(said) == 4
    assert ["lost" in line for line in said] == [True, False] * 2
