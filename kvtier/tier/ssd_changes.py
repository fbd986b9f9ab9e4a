"""What a commit changes in an environment's tables, and what that means for its pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import lmdb

from kvtier.errors import CorruptBlock
from kvtier.tier import ssd_format as fmt
from kvtier.tier.base import NamespaceRow, Piece, Restamp, WrittenBlock
from kvtier.tier.ssd_lmdb import Tables
from kvtier.types import BlockHash

MOST_ROWS = 2048
"""Changed in one transaction: bounds the pages that copy-on-write keeps from reuse."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Changes:
    """What one commit does to one environment, in this order."""

    deletes: Sequence[BlockHash] = ()
    restamps: Sequence[Restamp] = ()
    namespaces: Sequence[NamespaceRow] = ()
    writes: Sequence[WrittenBlock] = ()

    @property
    def rows(self) -> int:
        """How many rows it touches."""
        return len(self.deletes) + len(self.restamps) + len(self.writes)

    def parts(self) -> Iterator[Changes]:
        """The same in steps of at most MOST_ROWS."""
        if self.rows <= MOST_ROWS:
            yield self
            return
        for deletes in _chunks(self.deletes):
            yield Changes(deletes=deletes)
        for restamps in _chunks(self.restamps):
            yield Changes(restamps=restamps)
        yield Changes(namespaces=self.namespaces)
        for writes in _chunks(self.writes):
            yield Changes(writes=writes)


@dataclass(slots=True)
class Account:
    """What an environment holds and has seen.

    Attributes:
        used_bytes: Pages of its blocks.
        live_bytes: Stored bytes of its blocks.
        blocks: How many.
        newest_stamp: Of all that were ever written or restamped; the coldest has the lowest.
        written_bytes: Written to the medium since its creation.
    """

    used_bytes: int = 0
    live_bytes: int = 0
    blocks: int = 0
    newest_stamp: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class Step:
    """Changes inside one transaction; they count once it is committed.

    Attributes:
        txn: A write transaction.
        tables: Of the environment.
        account: As it will be.
        freed: Pages that will be free.
    """

    txn: lmdb.Transaction[bytes]
    tables: Tables
    account: Account
    freed: list[tuple[Piece, ...]] = field(default_factory=list)

    @classmethod
    def after(cls, account: Account, txn: lmdb.Transaction[bytes], tables: Tables) -> Step:
        """A step from `account`, which stays as it is."""
        return cls(txn, tables, replace(account))

    def take_out(self, keys: Iterable[BlockHash]) -> None:
        """Delete rows that mean nothing: their pages are not theirs."""
        for key in keys:
            self._take_out(key)

    def apply(self, changes: Changes) -> None:
        """Change the tables.

        Raises:
            lmdb.Error: they are broken or full, or the medium failed.
        """
        txn, tables = self.txn, self.tables
        for key in changes.deletes:
            self._delete(key)
        for restamp in changes.restamps:
            data = txn.get(restamp.hash, db=tables.rows)
            if data is not None:
                txn.put(restamp.hash, fmt.restamped(data, restamp.stamp), db=tables.rows)
                self._stamped(restamp.stamp)
        for row in changes.namespaces:
            txn.put(row.digest, fmt.pack_namespace(row), db=tables.namespaces)
        for written in changes.writes:
            self._write(written)
        self._count_table_pages(changes.rows)
        account = fmt.ACCOUNT.pack(self.account.newest_stamp, self.account.written_bytes)
        txn.put(b"account", account, db=tables.header)

    def _take_out(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Delete a row, and return it with its runs."""
        data = self.txn.get(key, db=self.tables.rows)
        if data is None:
            return None
        runs = self.txn.get(key, b"", db=self.tables.pieces)
        self.txn.delete(key, db=self.tables.rows)
        if runs:
            self.txn.delete(key, db=self.tables.pieces)
        return data, runs

    def _delete(self, key: bytes) -> None:
        found = self._take_out(key)
        if found is None:
            return
        self.account.blocks -= 1
        self.account.live_bytes -= fmt.stored_bytes_of(found[0])
        try:
            pieces = fmt.parse_place(key, *found)
        except CorruptBlock:
            return  # Nothing tells any more which pages were its: lost until the next open.
        self.freed.append(pieces)
        self.account.used_bytes -= size_bytes(pieces)

    def _write(self, written: WrittenBlock) -> None:
        key = written.block.meta.hash
        self._delete(key)
        row, runs = fmt.pack_row(written)
        self.txn.put(key, row, db=self.tables.rows)
        if runs:
            self.txn.put(key, runs, db=self.tables.pieces)
        account, room_bytes = self.account, size_bytes(written.pieces)
        account.blocks += 1
        account.live_bytes += written.stored_bytes
        account.used_bytes += room_bytes
        account.written_bytes += room_bytes
        self._stamped(written.block.meta.stamp)

    def _stamped(self, stamp: int) -> None:
        self.account.newest_stamp = max(self.account.newest_stamp, stamp)

    def _count_table_pages(self, rows: int) -> None:
        """What LMDB will write, about: a leaf a row at most, the way there, and a meta page."""
        stat = self.txn.stat(self.tables.rows)
        pages = min(rows, stat["leaf_pages"]) + 2 * stat["depth"] + 2
        self.account.written_bytes += pages * stat["psize"]


def size_bytes(pieces: Iterable[Piece]) -> int:
    """Of all pieces."""
    return sum(piece.size_bytes for piece in pieces)


def _chunks(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for at in range(0, len(items), MOST_ROWS):
        yield items[at : at + MOST_ROWS]
