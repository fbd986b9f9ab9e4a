"""All rows of an environment at once: a million of them must be read in about a second.

So rows are parsed as one array, and only what looks wrong is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from kvtier.errors import CorruptBlock
from kvtier.tier import ssd_format as fmt
from kvtier.tier.base import Piece
from kvtier.tier.ssd_room import Pages, conflicting
from kvtier.types import HASH_BYTES, BlockHash, Loss


@dataclass(frozen=True, slots=True)
class ReadableRows:
    """What an environment holds.

    Attributes:
        rows: (blocks,) of the blocks whose rows are sound; payloads were not looked at.
        pages: (runs,) first pages of their pieces.
        counts: (runs,) how many pages each has.
        unreadable: Keys of the other rows: broken, or of pages that are another block's.
    """

    rows: fmt.Rows
    pages: Pages
    counts: Pages
    unreadable: set[BlockHash]


@dataclass(frozen=True, slots=True)
class _Runs:
    """(runs,) arrays: first page, pages, and index of the row that says so."""

    pages: Pages
    counts: Pages
    owners: Pages


def read_rows(
    txn: lmdb.Transaction[bytes], table: Any, pieces_table: Any, slabs: Sequence[Piece]
) -> ReadableRows:
    """Read the rows table.

    Args:
        txn: Of the environment.
        table: Its rows.
        pieces_table: Its pieces.
        slabs: In the order of their offsets.

    Raises:
        lmdb.Error: the tables are broken.
    """
    rows, unreadable = _all_rows(txn, table)
    runs, bad = _runs(txn, pieces_table, rows)
    bad |= rows["loss"] > max(Loss)
    has = np.bincount(runs.owners, weights=runs.counts, minlength=len(rows))
    bad |= has * fmt.PAGE_BYTES - rows["stored_bytes"].astype(np.float64) >= fmt.PAGE_BYTES
    bad |= (rows["stored_bytes"] == 0) | (rows["stored_bytes"] > has * fmt.PAGE_BYTES)
    if suspects := _owners_in_conflict(runs, bad, slabs):
        for owner in suspects:
            bad[owner] = not _place_is_sound(txn, pieces_table, rows[owner])
        bad[_owners_in_conflict(runs, bad, slabs)] = True
    if not bad.any():
        return ReadableRows(rows, runs.pages, runs.counts, unreadable)
    unreadable.update(BlockHash(key.tobytes()) for key in rows["hash"][bad])
    kept = ~bad[runs.owners]
    return ReadableRows(rows[~bad], runs.pages[kept], runs.counts[kept], unreadable)


def _all_rows(txn: lmdb.Transaction[bytes], table: Any) -> tuple[fmt.Rows, set[BlockHash]]:
    """Rows of the right length as an array, and the keys of all others."""
    data = b"".join(chain.from_iterable(txn.cursor(table)))
    if len(data) == txn.stat(table)["entries"] * fmt.ROW_WITH_KEY.itemsize:
        return np.frombuffer(data, dtype=fmt.ROW_WITH_KEY), set()
    whole: list[bytes] = []
    broken: set[BlockHash] = set()
    for key, value in txn.cursor(table):
        if len(key) == HASH_BYTES and len(value) == fmt.ROW_BYTES:
            whole += (key, value)
        else:
            broken.add(BlockHash(key))
    return np.frombuffer(b"".join(whole), dtype=fmt.ROW_WITH_KEY), broken


def _runs(
    txn: lmdb.Transaction[bytes], table: Any, rows: fmt.Rows
) -> tuple[_Runs, npt.NDArray[np.bool_]]:
    """Where all blocks lie; and (rows,) bool, whose place is broken."""
    bad = rows["pieces"] == 0
    several = np.flatnonzero(rows["pieces"] > 1)
    single = np.flatnonzero(rows["pieces"] == 1)
    found: list[Pages] = []
    for index in several.tolist():
        row = rows[index]
        data = txn.get(row["hash"].tobytes(), b"", db=table)
        if len(data) != int(row["pieces"]) * fmt.RUN.size:
            bad[index] = True
            continue
        runs = np.frombuffer(data, dtype="<u4").reshape(-1, 2)
        found.append(np.column_stack([runs, np.full(len(runs), index)]).astype(np.int64))
    more = np.concatenate(found) if found else np.empty((0, 3), dtype=np.int64)
    return (
        _Runs(
            np.concatenate([rows["page"][single].astype(np.int64), more[:, 0]]),
            np.concatenate([rows["pages"][single].astype(np.int64), more[:, 1]]),
            np.concatenate([single, more[:, 2]]),
        ),
        bad,
    )


def _owners_in_conflict(
    runs: _Runs, bad: npt.NDArray[np.bool_], slabs: Sequence[Piece]
) -> list[int]:
    """Indices of rows, of those that are not bad yet, whose pages can't all be theirs."""
    rest = ~bad[runs.owners]
    conflict = conflicting(slabs, runs.pages[rest], runs.counts[rest])
    owners: list[int] = np.unique(runs.owners[rest][conflict]).tolist()
    return owners


def _place_is_sound(txn: lmdb.Transaction[bytes], table: Any, row: np.void) -> bool:
    key, data = row.tobytes()[:HASH_BYTES], row.tobytes()[HASH_BYTES:]
    try:
        fmt.parse_place(key, data, txn.get(key, b"", db=table))
    except CorruptBlock:
        return False
    return True
