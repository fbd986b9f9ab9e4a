"""One environment of an SSD directory: LMDB for its tables, slabs for the payloads.

A slab is one large LMDB value, put once and never deleted, whose place in the file is known
(ssd_lmdb.py). Payloads are written and read there without LMDB: at the speed of the medium, with
errors that are errnos and not SIGBUS. A reader holds no transaction while it reads a payload: if
the block went meanwhile and its room was given to another one, the checksum says so.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import lmdb
import numpy as np
import structlog

from kvtier.errors import CorruptBlock, FormatError, SegmentDamaged
from kvtier.tier import ssd_format as fmt
from kvtier.tier import ssd_layout as layout
from kvtier.tier.base import NamespaceRow, Piece, StoredBlocks, WrittenBlock
from kvtier.tier.ssd_changes import Account, Changes, Step, size_bytes
from kvtier.tier.ssd_file import BlockIo, DataFile
from kvtier.tier.ssd_lmdb import (
    PAGE_HEADER,
    START_EMPTY,
    Tables,
    lmdb_errors,
    open_lmdb,
    put_large,
)
from kvtier.tier.ssd_room import Room
from kvtier.tier.ssd_rows import ReadableRows, read_rows
from kvtier.types import BlockHash

log = structlog.get_logger(__name__)


def create(path: Path, number: int, map_bytes: int, namespaces: Iterable[NamespaceRow]) -> None:
    """Make a new environment, on the medium.

    Args:
        path: A directory that is not there yet.
        number: As a segment.
        map_bytes: Length of its file.
        namespaces: What it remembers from the start.

    Raises:
        TierFull: the medium has no room.
        TierUnavailable: the medium failed.
    """
    with lmdb_errors(path, number):
        path.mkdir(mode=0o700)
        with open_lmdb(path, map_bytes, sync=True) as env, env.begin(write=True) as txn:
            tables = Tables(*(env.open_db(name, txn=txn) for name in fmt.TABLES))
            txn.put(b"identity", os.urandom(16), db=tables.header)
            txn.put(b"map_bytes", fmt.U64.pack(map_bytes), db=tables.header)
            txn.put(b"account", fmt.ACCOUNT.pack(0, 0), db=tables.header)
            txn.put(b"created_by", b"kvtier", db=tables.header)
            txn.put(b"format", fmt.pack_format(), db=tables.header)
            for row in namespaces:
                txn.put(row.digest, fmt.pack_namespace(row), db=tables.namespaces)
        with (path / "data.mdb").open("rb+") as file:
            file.truncate(map_bytes)
            os.fsync(file.fileno())


class Environment:
    """An open environment; the caller owns its directory alone.

    find(), next_key() and take() may run in any number of threads, commit() in one. Every use is
    inside held(), so that retire() can close it when the last one is over.

    Attributes:
        path: Its directory.
        number: Its number as a segment.
        identity: Random, of its creation.
        map_bytes: Length of its file.
        file: Where the payloads are.
        room: Who has which pages.
        namespaces: As of the last commit.
        account: As of the last commit.
    """

    def __init__(self, path: Path, number: int, *, sync: bool, io: BlockIo) -> None:
        """Open one that create() made; load() must follow before anything else.

        Args:
            path: Its directory.
            number: As a segment.
            sync: Whether a commit waits for the medium.
            io: What moves the payloads.

        Raises:
            FormatError: of another version, or not ours.
            SegmentDamaged: its file or its tables are broken, or were cut.
            TierUnavailable: the medium failed.
        """
        self.path, self.number = path, number
        self.account = Account()
        self.namespaces: dict[bytes, NamespaceRow] = {}
        self._io = io
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._uses = 0
        self._retired = False
        self._outgrown = False
        self._space_end = 0
        self._given_up: set[BlockHash] = set()  # Rows that mean nothing; commit() deletes them.
        with self.errors(), ExitStack() as stack:
            try:
                self.file = DataFile(path / "data.mdb", io)
            except FileNotFoundError as error:
                raise self._damaged("its data.mdb is gone") from error
            stack.callback(self.file.close)
            self._lmdb = open_lmdb(path, self.file.size_bytes(), sync=sync)
            stack.callback(self._lmdb.close)
            self._read_header()
            self._read_slabs()
            self._prefetch_tables()
            self._closing = stack.pop_all()
        self.room = Room(self.map_bytes)

    # ---- opening

    def _read_header(self) -> None:
        """Check that it is ours and whole.

        LMDB may leave its last pages unwritten, so only a file of a known length can show that it
        was cut; touching the map beyond its end is SIGBUS.
        """
        self.page_bytes: int = self._lmdb.stat()["psize"]
        file_bytes, used_bytes = self.file.size_bytes(), self._tree_end()
        if file_bytes < used_bytes:
            raise self._damaged(
                f"the file has {file_bytes} bytes and uses {used_bytes}: it was cut"
            )
        if not self._lmdb.stat()["entries"]:
            raise self._damaged("there is nothing in it")
        try:
            table = self._lmdb.open_db(b"header", create=False)
        except lmdb.NotFoundError as error:
            raise FormatError(f"{self.path} is not kvtier's; {START_EMPTY}") from error
        with self._lmdb.begin() as txn:
            found = {bytes(key): bytes(value) for key, value in txn.cursor(table)}
        version = fmt.parse_format(found.get(b"format", b""))
        if version not in (None, fmt.FORMAT_VERSION):
            raise FormatError(
                f"{self.path} has format {version}, this version of kvtier reads "
                f"{fmt.FORMAT_VERSION}: use the kvtier that wrote it, or {START_EMPTY}"
            )
        try:
            (self.map_bytes,) = fmt.U64.unpack(found[b"map_bytes"])
            stamp, written_bytes = fmt.ACCOUNT.unpack(found[b"account"])
            self.identity = found[b"identity"]
        except (KeyError, struct.error) as error:
            raise self._damaged(f"its header is broken: {error!r}") from error
        if version is None or self.map_bytes != file_bytes:
            raise self._damaged(f"the file has {file_bytes} bytes, its header {self.map_bytes}")
        self.account = Account(newest_stamp=stamp, written_bytes=written_bytes)

    def _read_slabs(self) -> None:
        self.tables = Tables(*(self._lmdb.open_db(name, create=False) for name in fmt.TABLES))
        with self._lmdb.begin() as txn:
            values = [bytes(value) for _, value in txn.cursor(self.tables.slabs)]
        try:
            runs = [fmt.RUN.unpack(value) for value in values]
        except struct.error as error:
            raise self._damaged(f"its list of slabs is broken: {error}") from error
        self._slabs = [Piece(page * fmt.PAGE_BYTES, n * fmt.PAGE_BYTES) for page, n in runs]
        if self._slabs:
            self.check_slabs((0, len(self._slabs) - 1))

    def check_slabs(self, numbers: Iterable[int] | None = None) -> None:
        """Whether slabs, by default all, are where they were put.

        Raises:
            SegmentDamaged: one is not.
            TierUnavailable: the medium failed.
        """
        for number in range(len(self._slabs)) if numbers is None else numbers:
            head = fmt.slab_head(self.identity, number)
            at = self._slabs[number].offset_bytes - self.page_bytes + PAGE_HEADER.size
            with self.errors():
                found = self.file.read_at(at, len(head))
            if found != head:
                raise self._damaged(f"slab {number} is not where it was put (a compacted copy?)")

    def load(self) -> StoredBlocks:
        """Read the namespaces and all rows, and account for them.

        Raises:
            SegmentDamaged: the tables are broken.
            TierUnavailable: the medium failed.
        """
        with self.errors():
            with self._lmdb.begin() as txn:
                for key, value in txn.cursor(self.tables.namespaces):
                    try:
                        row = fmt.parse_namespace(bytes(key), bytes(value))
                    except FormatError:
                        continue  # Other environments have it too, and commit() writes it again.
                    self.namespaces[row.digest] = row
            found = self._read_rows()
        self.room.restore(self._slabs, found.pages, found.counts)
        self.account.used_bytes = int(found.counts.sum()) * fmt.PAGE_BYTES
        self.account.live_bytes = int(found.rows["stored_bytes"].sum())
        self.account.blocks = len(found.rows)
        self._given_up = found.unreadable
        self._space_end = self._tree_end()
        self._take_space_ahead()
        return fmt.stored_blocks(found.rows, self.number)

    def _prefetch_tables(self) -> None:
        """All that is not slabs is LMDB's tree: the kernel reads it in order, ahead of load()."""
        at = 0
        for slab in [*sorted(self._slabs), Piece(self._tree_end(), 0)]:
            if slab.offset_bytes > at:
                self.file.prefetch(at, slab.offset_bytes - at)
            at = sum(slab)

    def _tree_end(self) -> int:
        return (int(self._lmdb.info()["last_pgno"]) + 1) * self.page_bytes

    def _read_rows(self) -> ReadableRows:
        with self._lmdb.begin() as txn:
            return read_rows(txn, self.tables.rows, self.tables.pieces, sorted(self._slabs))

    @property
    def unreadable(self) -> frozenset[BlockHash]:
        """Blocks whose rows are still there and mean nothing; the next commit deletes them."""
        return frozenset(self._given_up)

    def stored_blocks(self) -> StoredBlocks:
        """All readable blocks as they are now.

        Raises:
            SegmentDamaged: the tables are broken.
        """
        with self.errors():
            stored = fmt.stored_blocks(self._read_rows().rows, self.number)
        gone = np.array([bytes(key) for key in self._given_up], dtype="V32")
        return stored[~np.isin(stored["hash"], gone)] if len(gone) else stored

    def _take_space_ahead(self) -> None:
        """Space for LMDB's next pages, so that a commit succeeds when others have filled the disk.

        Slabs have their space, and pages that the tree has left are used again.
        """
        end = min(self._tree_end() + layout.ahead_bytes(self.map_bytes), self.map_bytes)
        if end > self._space_end:
            try:
                self.file.take_space(self._space_end, end - self._space_end)
            except OSError as error:
                log.debug("no space ahead", path=str(self.path), error=str(error))
                return
            self._space_end = end

    # ---- one block

    def find(self, key: BlockHash) -> fmt.Row:
        """Where a block lies and what it must be.

        Raises:
            CorruptBlock: absent, or no row.
            SegmentDamaged: the tables are broken.
        """
        runs = b""
        with self.errors(), self._reading() as txn:
            data = txn.get(key, db=self.tables.rows)
            if data is not None and fmt.in_pieces(data):
                runs = txn.get(key, b"", db=self.tables.pieces)
        if data is None or key in self._given_up:
            raise CorruptBlock(f"block {key.hex()} is not in {self.path}", "absent")
        return fmt.parse_row(key, data, runs)

    def next_key(self, key: bytes) -> BlockHash | None:
        """The first block behind `key`, in the order of the hashes.

        Raises:
            SegmentDamaged: the tables are broken.
        """
        with self.errors(), self._reading() as txn:
            cursor = txn.cursor(self.tables.rows)
            return BlockHash(cursor.key()) if cursor.set_range(key + b"\0") else None

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction[bytes]]:
        self._check_length()
        with self._lmdb.begin() as txn:
            yield txn

    def _check_length(self) -> None:
        """Touching the map behind the end of the file would end the process."""
        if self.file.size_bytes() < self.map_bytes:
            raise self._damaged("the file was cut")

    # ---- changing

    def commit(self, changes: Changes) -> None:
        """Apply `changes`; the payloads of its writes are there already.

        After an error some of them may have been applied: disown() the writes.

        Raises:
            TierFull: the medium or the tables have no room.
            SegmentDamaged: the tables are broken.
            TierUnavailable: the medium failed.
        """
        for part in changes.parts():
            given_up = self.unreadable
            with self.errors():
                self._check_length()
                self._lmdb.reader_check()  # Slots of killed readers would keep pages from reuse.
                with self._lmdb.begin(write=True) as txn:
                    step = Step.after(self.account, txn, self.tables)
                    step.take_out(given_up)
                    step.apply(part)
            self.account = step.account
            self._given_up = self._given_up - given_up
            self.namespaces.update((row.digest, row) for row in part.namespaces)
            for written in part.writes:
                self.room.commit(written.pieces)
            try:
                for pieces in step.freed:
                    self.room.free(pieces)
            except ValueError as error:  # Say, a flipped bit led to rows of another time.
                raise self._damaged(f"its rows are not what was stored: {error}") from error
            self._take_space_ahead()

    def missing(self, namespaces: Iterable[NamespaceRow]) -> list[NamespaceRow]:
        """Those that are not remembered here as they are."""
        return [row for row in namespaces if self.namespaces.get(row.digest) != row]

    def disown(self, writes: Iterable[WrittenBlock]) -> None:
        """Give the room of `writes` back, committed or not; nobody can read them any more."""
        for written in writes:
            if self.room.has_written(written.pieces):
                self.room.give_back(written.pieces)
                continue
            self._given_up = self._given_up | {written.block.meta.hash}
            with suppress(ValueError):  # What is damaged may have freed them.
                self.room.free(written.pieces)
            self.account.used_bytes -= size_bytes(written.pieces)
            self.account.live_bytes -= written.stored_bytes
            self.account.blocks -= 1

    def take(self, size_bytes: int, min_free_bytes: int) -> tuple[Piece, ...]:
        """Room for a payload, in one piece where a new slab makes that possible; () if full.

        Args:
            size_bytes: Of the payload.
            min_free_bytes: What a new slab must leave to the file system.

        Raises:
            SegmentDamaged: the tables are broken.
            TierUnavailable: the medium failed.
        """
        if self.account.blocks + self.room.written_blocks >= layout.most_rows(self.map_bytes):
            return ()
        most = 1 if size_bytes <= layout.slab_bytes(self.map_bytes) else fmt.MOST_PIECES
        pieces = self.room.take(size_bytes, most)
        while not pieces and self._grow(min_free_bytes):
            pieces = self.room.take(size_bytes, most)
        return pieces or self.room.take(size_bytes)

    @property
    def written_bytes(self) -> int:
        """Written to the medium since its creation: by commits, and slabs as they were put."""
        return self.account.written_bytes + self.room.size_bytes

    def growable_bytes(self) -> int:
        """Room of the slabs that may still come."""
        if self._outgrown:
            return 0
        return layout.slabs_bytes(self.map_bytes, self.page_bytes) - self.room.size_bytes

    def _grow(self, min_free_bytes: int) -> bool:
        """Put one more slab; False if there is none to put, or no room for it."""
        with self._growing, self.errors():
            number = len(self._slabs)
            size = layout.next_slab_bytes(
                self.map_bytes, number, self.room.size_bytes, self.page_bytes
            )
            free_bytes = self._io.free_bytes(self.path)
            if self._outgrown or not size or free_bytes - size < min_free_bytes:
                return False
            self._check_length()
            try:
                with self._lmdb.begin(write=True, buffers=True) as txn:
                    slab = self._put_slab(txn, number, size)
            except lmdb.MapFullError:
                self._outgrown = True  # The tables have taken more than their share.
                return False
            except lmdb.DiskError:
                return False
            self._slabs.append(slab)
            self.room.add_slab(slab)
            self._take_space_ahead()
            return True

    def _put_slab(self, txn: lmdb.Transaction[memoryview], number: int, size: int) -> Piece:
        head = np.frombuffer(fmt.slab_head(self.identity, number), dtype=np.uint8)
        before = self.page_bytes - PAGE_HEADER.size  # Its room begins on a page.
        value = np.zeros(before + size, dtype=np.uint8)
        value[: len(head)] = head
        key = fmt.number_key(number)
        slab = Piece(put_large(txn, key, value, self.tables.memory) + before, size)
        txn.put(key, fmt.pack_pieces([slab]), db=self.tables.slabs)
        return slab

    # ---- its end

    def hold(self) -> None:
        """Keep it open until release().

        Raises:
            CorruptBlock: it was retired: its blocks are gone.
        """
        with self._lock:
            if self._retired:
                raise CorruptBlock(f"{self.path} is gone, and its blocks with it", "absent")
            self._uses += 1

    def release(self) -> None:
        """Undo one hold()."""
        with self._lock:
            self._uses -= 1
        self._close_if_over()

    @contextmanager
    def held(self) -> Iterator[None]:
        """hold() and release()."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def retire(self) -> None:
        """Let nobody in any more, and close with the last use."""
        with self._lock:
            self._retired = True
        self._close_if_over()

    @property
    def closed(self) -> bool:
        """Whether the last use is over, after retire()."""
        with self._lock:
            return self._retired and not self._uses

    def _close_if_over(self) -> None:
        if self.closed:
            self._closing.close()

    def sync(self) -> None:
        """Wait until all of it is on the medium.

        Raises:
            TierUnavailable: the medium failed.
        """
        with self.errors():
            self._lmdb.sync(True)

    def errors(self) -> AbstractContextManager[None]:
        """Errors of LMDB and the system become ours, and name this segment."""
        return lmdb_errors(self.path, self.number)

    def _damaged(self, what: str) -> SegmentDamaged:
        return SegmentDamaged(f"{self.path}: {what}", self.number)
