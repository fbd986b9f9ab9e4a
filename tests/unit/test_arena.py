"""The arena's format, and the locks that say which writers may still be alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.arena import (
    DATA_OFFSET,
    FORMAT_VERSION,
    LEASE_SLOTS,
    NO_EPOCH,
    WRITE_RECORDS,
    ArenaMapping,
    ClientLock,
    ControlPage,
    WriteRecord,
    live_owners,
)
from kvtier.errors import FormatError
from kvtier.extents import Extent
from kvtier.types import GroupId

EPOCH = bytes(range(16))
GROUP = GroupId(bytes(range(100, 116)))
SIZE_BYTES = DATA_OFFSET + (64 << 10)


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """An arena file as a daemon makes it."""
    path = tmp_path / "arena"
    path.write_bytes(bytes(SIZE_BYTES))
    ArenaMapping(path).control.format(SIZE_BYTES)
    return path


def in_a_child(work: Callable[[], bool]) -> bool:
    """Fork, run `work` there, and tell what it answered; False if the child died of a signal."""
    child = os.fork()
    if child == 0:
        answer = 2
        try:
            answer = 0 if work() else 1
        finally:
            os._exit(answer)
    return os.waitpid(child, 0)[1] == 0


# The control page


def test_fields_come_back_as_they_were_written() -> None:
    page = ControlPage(bytearray(DATA_OFFSET))
    page.format(SIZE_BYTES)
    page.check_format()
    assert (page.epoch, page.arena_bytes) == (NO_EPOCH, SIZE_BYTES)
    page.epoch = EPOCH
    assert page.epoch == EPOCH
    for slot in (0, 7, LEASE_SLOTS - 1):
        assert (page.generation(slot), page.counts(slot)) == (0, (0, 0))
        page.publish(slot, generation=(1 << 40) + slot, ready_blocks=3, usable_blocks=16_384)
        assert page.generation(slot) == (1 << 40) + slot
        assert page.counts(slot) == (3, 16_384)
    assert page.generation(8) == 0
    page.check_format()


def test_open_writes_are_those_that_were_not_cleared() -> None:
    page = ControlPage(bytearray(DATA_OFFSET))
    records = [
        WriteRecord(number, Extent(4096 * number, 8192), EPOCH, GROUP)
        for number in (0, 5, WRITE_RECORDS - 1)
    ]
    for record in records:
        page.record_write(record)
    assert page.open_writes() == records
    page.clear_write(5)
    assert page.open_writes() == [records[0], records[2]]


def test_slots_records_and_blocks_do_not_overlap() -> None:
    """Filling one area leaves the others alone; all of it is in front of the first block."""
    buffer = bytearray(DATA_OFFSET + 4096)
    page = ControlPage(buffer)
    page.format(SIZE_BYTES)
    page.epoch = EPOCH
    most = (1 << 32) - 1
    for slot in range(LEASE_SLOTS):
        page.publish(slot, generation=(1 << 64) - 1, ready_blocks=most, usable_blocks=most)
    assert page.open_writes() == []
    last = WriteRecord(WRITE_RECORDS - 1, Extent((1 << 64) - 1, (1 << 64) - 1), EPOCH, GROUP)
    page.record_write(last)
    assert page.open_writes() == [last]
    assert page.epoch == EPOCH
    page.check_format()
    assert buffer[DATA_OFFSET:] == bytes(4096)
    assert DATA_OFFSET % (2 << 20) == 0


# The mapping


def test_two_mappings_see_the_same_bytes(arena: Path) -> None:
    daemon, client = ArenaMapping(arena), ArenaMapping(arena)
    daemon.control.epoch = EPOCH
    client.control.check_format()
    assert client.control.epoch == EPOCH
    assert client.data.shape == (SIZE_BYTES,)
    client.data[DATA_OFFSET + 5] = 42
    assert daemon.data[DATA_OFFSET + 5] == 42
    assert arena.read_bytes()[DATA_OFFSET + 5] == 42


def test_a_foreign_or_newer_file_is_refused(arena: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(os.urandom(64) + bytes(SIZE_BYTES))
    with pytest.raises(FormatError, match="magic"):
        ArenaMapping(foreign).control.check_format()
    mapping = ArenaMapping(arena)
    mapping.data[8:16] = np.frombuffer((FORMAT_VERSION + 1).to_bytes(8, "little"), dtype=np.uint8)
    with pytest.raises(FormatError, match="version"):
        ArenaMapping(arena).control.check_format()


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    for size_bytes in (0, 1, DATA_OFFSET - 1):
        path = tmp_path / f"short-{size_bytes}"
        path.write_bytes(bytes(size_bytes))
        with pytest.raises(FormatError, match="too short"):
            ArenaMapping(path)


def test_a_link_in_place_of_the_arena_is_not_followed(arena: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(arena)
    with pytest.raises(OSError, match="symbolic links"):
        ArenaMapping(link)


def test_a_forked_child_does_not_inherit_the_map(arena: Path) -> None:
    """Touching it there is a fault, so no child can scribble over blocks by accident."""
    mapping = ArenaMapping(arena)
    code = f"""
import faulthandler, os, resource, signal
from pathlib import Path
from kvtier.arena import ArenaMapping
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
mapping = ArenaMapping(Path({str(arena)!r}))
mapping.data[-1] = 1
child = os.fork()
if child == 0:
    mapping.data[-1] = 2
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert mapping.data[-1] == 1


# Locks

HOLDER = """
import sys
from pathlib import Path
from kvtier.arena import ClientLock
from kvtier.types import GroupId
epoch, group = map(bytes.fromhex, sys.argv[2:])
lock = ClientLock(Path(sys.argv[1]), epoch, GroupId(group))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_held_until_its_process_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), EPOCH.hex(), GROUP.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert live_owners(tmp_path) == {(EPOCH, GROUP)}
        assert live_owners(tmp_path) == {(EPOCH, GROUP)}, "looking took the lock away"
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    assert live_owners(tmp_path) == set()
    assert list(tmp_path.iterdir()) == [], "a dead client's file stays"


def test_a_group_lives_as_long_as_one_of_its_processes(tmp_path: Path) -> None:
    other = GroupId(bytes(16))
    locks = [ClientLock(tmp_path, EPOCH, GROUP) for _ in range(2)]
    stranger = ClientLock(tmp_path, EPOCH, other)
    locks[0].release()
    locks[0].release()
    assert live_owners(tmp_path) == {(EPOCH, GROUP), (EPOCH, other)}
    locks[1].release()
    assert live_owners(tmp_path) == {(EPOCH, other)}
    stranger.release()
    assert live_owners(tmp_path) == set()


def test_a_forked_child_that_forgets_does_not_keep_its_parent_alive(tmp_path: Path) -> None:
    """The child of a client outlives it: the lock goes with the client."""
    lock = ClientLock(tmp_path, EPOCH, GROUP)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        lock.forget_in_child()
        os.write(from_child, b"forgot")
        os.close(from_parent)
        os.read(to_child, 1)  # Until the parent closes its end.
        os._exit(0)
    try:
        assert os.read(to_parent, 6) == b"forgot"
        assert live_owners(tmp_path) == {(EPOCH, GROUP)}, "the child gave the parent's lock away"
        os.close(lock._descriptor)  # As the kernel does for a killed process.
        lock._descriptor = -1
        assert live_owners(tmp_path) == set()
    finally:
        os.close(from_parent)
        os.waitpid(child, 0)
        for descriptor in (to_child, to_parent, from_child):
            os.close(descriptor)


def test_a_forked_child_that_forgets_can_lock_for_itself(tmp_path: Path) -> None:
    lock = ClientLock(tmp_path, EPOCH, GROUP)

    def work() -> bool:
        lock.forget_in_child()
        own = ClientLock(tmp_path, EPOCH, GROUP)
        own.release()
        return True

    assert in_a_child(work)
    assert live_owners(tmp_path) == {(EPOCH, GROUP)}
    lock.release()


def test_foreign_files_in_the_lock_directory_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a lock")
    (tmp_path / "zz-zz-zz").write_text("not hex")
    (tmp_path / "aa-bb-directory").mkdir()
    (tmp_path / "aa-bb-link").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "aa-bb-dangling").symlink_to(tmp_path / "nowhere")
    lock = ClientLock(tmp_path, EPOCH, GROUP)
    assert live_owners(tmp_path) == {(EPOCH, GROUP)}
    assert (tmp_path / "notes.txt").exists()
    lock.release()
