"""`kvtier check`: it finds what is broken, changes nothing unless told to, and then repairs it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvtier.cli import main
from kvtier.codec import choose_codec
from kvtier.errors import AddressInUse, ConfigError, FormatError
from kvtier.tier import ssd_format as fmt
from kvtier.tier.base import Deletion
from kvtier.tier.ssd import SsdTier
from kvtier.tier.ssd_check import Report, check_directory
from kvtier.types import Loss, NamespaceDigest
from tests.contract.test_tier import LARGE, ROWS, SMALL, Shelf, block, block_hash, fill, meta
from tests.unit.test_ssd import FaultyIo, edit_header, edit_rows, occupied_bytes, zero_pages

CAPACITY_BYTES = 36 << 20


def open_shelf(home: Path) -> Shelf:
    return Shelf(
        SsdTier(
            home,
            capacity_bytes=CAPACITY_BYTES,
            codec_of=choose_codec("lossless"),
            durability="full",
            max_batch_bytes=1 << 20,
        )
    )


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    """LARGE blocks 0..4 and SMALL ones 5..8; close it before the check."""
    shelf = open_shelf(tmp_path / "ssd")
    shelf.tier.commit(namespaces=ROWS)
    shelf.put(LARGE, range(5))
    shelf.put(SMALL, range(5, 9))
    yield shelf
    shelf.tier.close()


@pytest.fixture
def home(shelf: Shelf, tmp_path: Path) -> Path:
    """The same, closed."""
    shelf.tier.close()
    return tmp_path / "ssd"


def data_of(home: Path, segment: int = 0) -> Path:
    return home / f"env-{segment:03}" / "data.mdb"


def checked(home: Path, *, repair: bool = False, io: FaultyIo | None = None) -> Report:
    return check_directory(home, repair=repair, progress=lambda *_: None, io=io)


def break_payload(shelf: Shelf, home: Path, number: int) -> None:
    payload = shelf.prepare(shelf.specs[number], number).payload.tobytes()
    content = data_of(home).read_bytes()
    at = content.index(payload) + len(payload) // 2
    data_of(home).write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])


def test_a_sound_store_is_clean_and_stays_as_it_is(home: Path) -> None:
    before = data_of(home).read_bytes()
    report = checked(home)
    assert report.clean
    assert (report.environments, report.blocks, report.problems) == (1, 9, {})
    assert report.stored_bytes > 3 * SMALL.block_bytes + 3 * LARGE.block_bytes // 2
    assert data_of(home).read_bytes() == before


def test_progress_is_told_in_bytes(home: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = check_directory(home, repair=False, progress=lambda *step: seen.append(step))
    assert seen[0] == ("tree of env-000", 0, 0)
    assert seen[-1] == ("blocks of env-000", report.stored_bytes, report.stored_bytes)


def test_broken_blocks_are_found_and_deleted(shelf: Shelf, home: Path) -> None:
    """User report 24, offline."""
    for number in (1, 6):
        break_payload(shelf, home, number)
    broken = data_of(home).read_bytes()
    report = checked(home)
    assert report.problems == {"checksum": 2}
    assert not report.clean
    assert {line.split()[3].rstrip(":") for line in report.first} == {
        block_hash(1).hex(),
        block_hash(6).hex(),
    }
    assert data_of(home).read_bytes() == broken, "without repair nothing changes"
    report = checked(home, repair=True)
    assert (report.problems, report.repaired, report.clean) == ({"checksum": 2}, 2, True)
    report = checked(home)
    assert (report.blocks, report.clean, report.problems) == (7, True, {})
    shelf.tier = open_shelf(home).tier
    for number in (1, 6):
        shelf.deletion(number)
    shelf.assert_all_read()
    shelf.put(LARGE, [1])
    shelf.assert_all_read()


def test_every_kind_has_its_name(home: Path) -> None:
    shelf = open_shelf(home)
    for number, change in (
        (20, {"codec_version": 77}),
        (21, {"size_bytes": SMALL.block_bytes + 2}),
        (22, {"checksum": bytes(16)}),
    ):
        wrong = replace(shelf.prepare(SMALL, number), **change)
        shelf.tier.commit(writes=[shelf.tier.write(wrong)])
    stranger = replace(meta(SMALL, 23), namespace=NamespaceDigest(bytes(32)))
    prepared = shelf.tier.prepare(stranger, block(SMALL, 23), Loss.EXACT)
    shelf.tier.commit(writes=[shelf.tier.write(prepared)])
    shelf.tier.close()
    edit_rows(data_of(home), lambda number, row: row[:-1] if number == 2 else row)
    report = checked(home, repair=True)
    assert report.problems == {"undecodable": 1, "layout": 2, "checksum": 1, "row": 1}
    assert (report.repaired, report.clean) == (5, True)
    assert checked(home).problems == {}


def test_blocks_that_can_not_be_read(home: Path) -> None:
    report = checked(home, io=FaultyIo(read_errno=errno.EIO))
    assert report.problems == {"unreadable": 9}
    assert not report.clean
    assert checked(home).clean


@pytest.mark.parametrize("damage", ["tree", "cut", "slab"])
def test_a_broken_environment_is_set_aside(home: Path, damage: str) -> None:
    content = bytearray(data_of(home).read_bytes())
    if damage == "tree":
        zero_pages(content, block_hash(0))
    elif damage == "slab":
        content = content.replace(b"kvtier slab", b"KVTIER slab")
    else:
        del content[len(content) // 2 :]
    data_of(home).write_bytes(content)
    report = checked(home)
    kind = "tree" if damage == "tree" else "environment"
    assert (report.problems, report.environments, report.blocks) == ({kind: 1}, 1, 0)
    assert data_of(home).exists()
    report = checked(home, repair=True)
    assert report.clean
    assert report.quarantined_bytes > 1 << 20
    assert (home / "quarantine-000" / "data.mdb").exists()
    assert not data_of(home).exists()
    assert checked(home).clean


def test_one_of_two_environments_is_broken(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path)
    shelf.tier.commit(namespaces=ROWS)
    fill(shelf)
    shelf.tier.close()
    os.truncate(data_of(tmp_path, 0), 1 << 20)
    report = checked(tmp_path, repair=True)
    assert (report.environments, report.problems) == (2, {"tree": 1})
    assert report.blocks == sum(segment == 1 for segment in shelf.where.values())
    assert occupied_bytes(tmp_path) <= CAPACITY_BYTES


def test_a_live_daemon_is_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(AddressInUse):
        checked(tmp_path / "ssd", repair=True)
    shelf.assert_all_read()
    shelf.tier.commit(deletes=[Deletion(block_hash(0), None)])


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="name an SSD directory"):
            checked(path)
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_not_judged(home: Path) -> None:
    edit_header(data_of(home), b"format", fmt.U32.pack(1))
    with pytest.raises(FormatError, match="format 1"):
        checked(home, repair=True)
    assert data_of(home).exists()


def test_a_killed_daemon_leaves_a_clean_store(shelf: Shelf, tmp_path: Path) -> None:
    assert isinstance(shelf.tier, SsdTier)
    shelf.write(LARGE, 100)  # Under way.
    shelf.tier._shut()
    assert checked(tmp_path / "ssd").clean


class TestCommand:
    def test_exit_codes(
        self, shelf: Shelf, home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main.run(["check", str(home)]) == 0
        assert "9 blocks" in capsys.readouterr().out
        break_payload(shelf, home, 3)
        assert main.run(["check", str(home)]) == 1
        out = capsys.readouterr().out
        assert "1 problems: 1 checksum" in out
        assert block_hash(3).hex() in out.replace("\n", "")
        assert main.run(["check", str(tmp_path / "absent"), str(home)]) == 2
        answer = capsys.readouterr()
        assert "absent: not checked" in answer.err
        assert "1 checksum" in answer.out
        assert main.run(["check", "--repair", str(home)]) == 0
        assert "1 repaired" in capsys.readouterr().out
        assert main.run(["check", str(home)]) == 0

    def test_json(self, shelf: Shelf, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        break_payload(shelf, home, 3)
        assert main.run(["check", "--json", str(home), str(home.parent)]) == 2
        first, second = json.loads(capsys.readouterr().out)["directories"]
        assert first["problems"] == {"checksum": 1}
        assert (first["clean"], first["blocks"], first["directory"]) == (False, 9, str(home))
        assert "no kvtier store" in second["error"]

    def test_a_live_daemon_says_who_has_it(self, shelf: Shelf, tmp_path: Path) -> None:
        """From another process, as a user would."""
        done = subprocess.run(
            [sys.executable, "-m", "kvtier", "check", str(tmp_path / "ssd")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "in use by another kvtier daemon" in " ".join(done.stderr.split())


def test_a_foreign_environment_is_not_judged(home: Path) -> None:
    path = home / "env-009"
    path.mkdir()
    with lmdb.open(str(path), map_size=1 << 20) as env, env.begin(write=True) as txn:
        txn.put(b"theirs", b"value")
    with pytest.raises(FormatError, match="not kvtier's"):
        checked(home, repair=True)
    assert (path / "data.mdb").exists()
