"""Blocks on an SSD: rows in LMDB, payloads beside them (ssd_env.py), in several environments.

A payload is written first, on pages that nobody has; the transaction that names it comes second;
its deletion makes the pages free, once committed. So nothing is ever copied or moved, and what the
tier holds is known exactly. Whoever reads pages that were given away meanwhile sees a checksum that
does not match.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import structlog

from kvtier.codec import LOSSLESS, RAW, CodecChoice, encode_block
from kvtier.codec.base import Bytes, Codec
from kvtier.codec.layout import is_latent
from kvtier.errors import CorruptBlock, TierError, TierFull, TierUnavailable
from kvtier.tier import ssd_format as fmt
from kvtier.tier import ssd_layout as layout
from kvtier.tier.base import (
    BlockMeta,
    BlockTier,
    Deletion,
    NamespaceRow,
    PreparedBlock,
    Restamp,
    Scrubbed,
    StoredBlocks,
    TierUsage,
    Wanted,
    WrittenBlock,
)
from kvtier.tier.ssd_changes import Changes
from kvtier.tier.ssd_directory import Mark, StoreDirectory, this_boot
from kvtier.tier.ssd_env import Environment
from kvtier.tier.ssd_file import BlockIo, medium_errors
from kvtier.tier.ssd_lingering import Lingering
from kvtier.tier.ssd_read import check_wanted, read_block, verify_block
from kvtier.tier.ssd_segments import Segments, joined
from kvtier.types import BlockHash, Loss, NamespaceDigest

log = structlog.get_logger(__name__)

MAX_BATCH_BYTES = 32 << 20
STEADY_AFTER_S = 60.0
MOST_DEATHS = 3
"""Daemons that died in a row without running for STEADY_AFTER_S: then the trees are walked."""

_SEGMENT_BYTES = 2


class SsdTier(BlockTier):
    """One directory on one SSD.

    With durability "full" a batch is on the medium when commit() returns. With "relaxed" it
    survives the process but not a power cut, which may cost the whole store; the next open notices
    and walks the trees before it trusts them, and payloads are checked like everything else.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        codec_of: CodecChoice,
        durability: Literal["relaxed", "full"],
        max_batch_bytes: int = MAX_BATCH_BYTES,
        min_free_bytes: int = 0,
        io: BlockIo | None = None,
    ) -> None:
        """Open the store, or create it. What is damaged in it is set aside.

        Args:
            directory: Its home, for one daemon at a time; created 0700.
            capacity_bytes: Bound of `du` of the directory.
            codec_of: Stored form of a namespace's new blocks; those already there keep theirs.
            durability: When a commit is safe from a power cut.
            max_batch_bytes: The most payload one commit() may carry.
            min_free_bytes: What the file system must keep free, whoever fills it.
            io: What moves the payloads; the system's calls, if not given.

        Raises:
            AddressInUse: a live daemon owns the directory.
            CapacityError: too small for the batches, or larger than the file system.
            FormatError: of another version, or not ours.
            TierUnavailable: the medium failed.
        """
        self.directory = directory
        self.max_batch_bytes = max_batch_bytes
        self._capacity_bytes = capacity_bytes
        self._codec_of = codec_of
        self._relaxed = durability == "relaxed"
        self._min_free_bytes = min_free_bytes
        self._io = io or BlockIo()
        self._known: dict[NamespaceDigest, NamespaceRow] = {}
        self._ours: dict[bytes, int] = {}  # Identities of environments, and their numbers.
        self._lingering = Lingering(layout.lingering_bytes(capacity_bytes, max_batch_bytes))
        self._retired: set[bytes] = set()
        self._retired_written_bytes = 0
        self._home: StoreDirectory | None = None
        self._open(None)

    # ---- opening and closing

    def _open(self, own_mark: Mark | None) -> None:
        """Open everything; `own_mark` is ours if we had it open before."""
        with ExitStack() as stack:
            home = StoreDirectory(self.directory)
            stack.callback(home.close)
            segments = Segments(
                home,
                capacity_bytes=self._capacity_bytes,
                batch_bytes=self.max_batch_bytes,
                min_free_bytes=self._min_free_bytes,
                sync=not self._relaxed,
                io=self._io,
            )
            stack.callback(segments.close)
            left = home.mark()
            mark = own_mark or _next_mark(left, self._relaxed)
            # A medium that failed may have lost what was written, like one that lost its power.
            walk = own_mark is not None or mark.deaths >= MOST_DEATHS or _lost_power(left)
            # Should opening kill us, the next one counts it, and still knows of the lost power.
            home.set_mark(replace(mark, boot_id=left.boot_id) if _lost_power(left) else mark)
            try:
                scanned = segments.open_all(walk=walk)
            except TierFull as error:
                raise TierUnavailable(f"{error}: make room") from error
            if not left.clean:
                segments.sync()  # What a killed, relaxed owner left in the page cache.
            self._mark = replace(mark, deaths=0) if walk else mark
            home.set_mark(self._mark)
            stack.pop_all()
        self._home, self._segments = home, segments
        self._scanned: list[StoredBlocks] | None = scanned
        self._opened_s = time.monotonic()
        self._known = segments.namespaces(self._known)
        self._usage = self._measure(segments)

    def close(self) -> None:
        if self._home is None:
            return
        try:
            self._segments.sync()
            self._home.set_mark(replace(self._mark, clean=True))
        except TierError as error:
            log.warning(
                "ssd tier closed uncleanly", directory=str(self.directory), error=str(error)
            )
        finally:
            self._shut()

    def _shut(self) -> None:
        """Close all files as they are; what is still in use follows when that is over."""
        if self._home is not None:
            self._ours = {env.identity: env.number for env in self._segments.open.values()}
            self._segments.close()
            self._home.close()
            self._home = None

    def reopen(self) -> Sequence[int]:
        self._shut()
        ours, known, usage = self._ours, self._known, self._usage
        self._open(self._mark)
        envs = list(self._segments.open.values())
        if any(env.identity not in {*ours, *self._retired} for env in envs):
            self._shut()
            self._ours, self._known, self._usage = ours, known, usage
            raise TierUnavailable(f"{self.directory}: another store is there now: restart kvtier")
        for env in envs:
            if env.identity in self._retired:
                self._segments.retire(env.number, damaged=False)
        self._scanned = None
        self._usage = self._measure(self._segments)
        same = [env.number for env in envs if ours.get(env.identity) == env.number]
        self._lingering.keep_only(same)
        self._usage = self._measure(self._segments)
        return same

    def _live(self) -> Segments:
        if self._home is None:
            raise TierUnavailable(f"{self.directory}: not open")
        return self._segments

    def _note_steady(self) -> None:
        """Once we have run for a while, our death is no sign of a store that kills daemons."""
        if self._mark.steady or time.monotonic() - self._opened_s < STEADY_AFTER_S:
            return
        assert self._home is not None
        self._mark = replace(self._mark, steady=True)
        self._home.set_mark(self._mark)

    # ---- what is there

    def namespaces(self) -> Sequence[NamespaceRow]:
        return list(self._known.values())

    def scan(self) -> StoredBlocks:
        if self._scanned is None:
            return self._live().stored_blocks()
        scanned, self._scanned = self._scanned, None
        return joined(scanned)

    def usage(self) -> TierUsage:
        if self._home is None:
            return self._usage
        # Others may have filled the file system meanwhile.
        return replace(self._usage, limit_bytes=self._segments.limit_bytes())

    def _measure(self, segments: Segments) -> TierUsage:
        envs = list(segments.open.values())
        return TierUsage(
            used_bytes=sum(env.account.used_bytes for env in envs) - self._lingering.size_bytes,
            live_bytes=sum(env.account.live_bytes for env in envs),
            limit_bytes=segments.limit_bytes(),
            blocks=sum(env.account.blocks for env in envs),
            written_bytes=sum(env.written_bytes for env in envs) + self._retired_written_bytes,
        )

    # ---- writing

    def prepare(
        self, meta: BlockMeta, block: Bytes, allowed_loss: Loss, *, loss: Loss = Loss.EXACT
    ) -> PreparedBlock:
        known = self._known.get(meta.namespace)
        used: Codec = RAW
        payload = block
        if known is not None:
            codec = self._codec_of(known.spec)
            if codec.loss > allowed_loss or not any(
                is_latent(each, known.spec) for each in known.spec.components
            ):
                codec = LOSSLESS
            used, payload = encode_block(codec, block, known.spec)
        lost = max(loss, used.loss)
        unsigned = PreparedBlock(
            meta, block.size, payload, used.id, used.version, lost, checksum=b""
        )
        return replace(unsigned, checksum=fmt.checksum(unsigned, payload))

    def write(self, block: PreparedBlock) -> WrittenBlock:
        env, pieces = self._live().place(block.payload.size, self._known.values())
        try:
            with medium_errors(env.path):
                env.file.write(pieces, block.payload)
        except BaseException:
            env.room.give_back(pieces)
            raise
        finally:
            env.release()
        return WrittenBlock(block, block.payload.size, env.number, pieces)

    def discard(self, written: WrittenBlock) -> None:
        env = self._segments.open.get(written.segment)
        if env is not None:
            env.room.give_back(written.pieces)

    def commit(
        self,
        *,
        deletes: Sequence[Deletion] = (),
        writes: Sequence[WrittenBlock] = (),
        namespaces: Sequence[NamespaceRow] = (),
        restamps: Sequence[Restamp] = (),
    ) -> TierUsage:
        names = {written.block.meta.hash for written in writes}
        assert len(names) == len(writes), "a block twice in a batch"
        segments = self._live()
        self._check_written(writes)
        lingering = self._lingering
        due = lingering.add(deletes)
        all_due = lingering.too_many or not writes
        known = self._known | {row.digest: row for row in namespaces}
        try:
            self._note_steady()
            if namespaces:
                # Without an environment nothing is stored that a namespace could be owed for; the
                # first one, once there is room, remembers all of them.
                with suppress(TierFull):
                    segments.make_first(known.values())
            self._pass_on_account()
            self._scanned = None
            for env in segments.open.values():
                mine = [written for written in writes if written.segment == env.number]
                gone = {each.hash for each in due if each.segment in (None, env.number)}
                if mine or all_due:
                    gone.update(lingering.of(env.number))
                changes = Changes(
                    list(gone),
                    [restamp for restamp in restamps if restamp.segment == env.number],
                    env.missing(known.values()),
                    mine,
                )
                if changes.rows or namespaces:
                    env.commit(changes)
                    lingering.over(env.number, gone)
        except TierError:
            for env in segments.open.values():
                env.disown([written for written in writes if written.segment == env.number])
            self._usage = self._measure(segments)
            raise
        self._known = known
        self._usage = self._measure(segments)
        return self._usage

    def _check_written(self, writes: Sequence[WrittenBlock]) -> None:
        """Of before a reopen, or of a segment that was retired since, nothing is left."""
        open_now = self._segments.open
        for written in writes:
            env = open_now.get(written.segment)
            if env is None or not env.room.has_written(written.pieces):
                for lost in writes:
                    self.discard(lost)
                raise TierFull(f"{self.directory}: what was written is gone; write it again")

    def _pass_on_account(self) -> None:
        """What retired segments have written is remembered by one that is there."""
        heir = next(iter(self._segments.open.values()), None)
        if heir is not None:
            heir.account.written_bytes += self._retired_written_bytes
            self._retired_written_bytes = 0

    # ---- reading

    def read_into(self, wanted: Wanted, out: Bytes) -> int:
        env = self._live().open.get(wanted.segment)
        if env is None:
            name, segment = wanted.hash.hex(), wanted.segment
            raise CorruptBlock(f"block {name}: its segment {segment} is gone", "absent")
        with env.held():
            row = env.find(wanted.hash)
            check_wanted(row, wanted)
            read_block(env, row, self._known, out, self._io)
        return row.stored_bytes

    def scrub(self, position: bytes) -> Scrubbed:
        segment, key = position[:_SEGMENT_BYTES], position[_SEGMENT_BYTES:]
        number = int.from_bytes(segment, "big")
        for env in sorted(self._live().open.values(), key=lambda env: env.number):
            if env.number < number:
                continue
            try:
                with env.held():
                    found = env.next_key(key if env.number == number else b"")
                    if found is not None:
                        return self._scrub(env, found)
            except CorruptBlock:
                continue  # It was retired meanwhile.
        return Scrubbed(b"", None, number, 0, None)

    def _scrub(self, env: Environment, key: BlockHash) -> Scrubbed:
        position = env.number.to_bytes(_SEGMENT_BYTES, "big") + key
        row: fmt.Row | None = None
        try:
            row = env.find(key)
            verify_block(env, row, self._known, self._io)
        except CorruptBlock as error:
            if row is not None and not _is_still(env, row):
                return Scrubbed(position, row.meta, env.number, row.stored_bytes, None)
            stored_bytes = row.stored_bytes if row else 0
            return Scrubbed(position, row.meta if row else None, env.number, stored_bytes, error)
        return Scrubbed(position, row.meta, env.number, row.stored_bytes, None)

    # ---- segments

    def excess(self) -> int | None:
        segments = self._live()
        self._note_steady()
        if not segments.lacks_bytes():
            return None
        coldest = segments.coldest()
        return None if coldest is None else coldest.number

    def retire(self, segment: int, *, damaged: bool) -> TierUsage:
        segments = self._live()
        env = segments.open.get(segment)
        if env is not None:
            self._lingering.keep_only(segments.open.keys() - {segment})
            self._retired.add(env.identity)
            self._retired_written_bytes += env.written_bytes
            try:
                segments.retire(segment, damaged=damaged)
            finally:
                self._usage = self._measure(segments)
        return self._usage


def _next_mark(left: Mark, relaxed: bool) -> Mark:
    deaths = 0 if left.clean or left.steady else left.deaths + 1
    return Mark(clean=False, boot_id=this_boot(), relaxed=relaxed, deaths=deaths)


def _lost_power(left: Mark) -> bool:
    """Whether the machine went down with the store open, so that unsynced writes are gone."""
    return not left.clean and left.relaxed and left.boot_id != this_boot()


def _is_still(env: Environment, row: fmt.Row) -> bool:
    """Whether the block is still where it was; else its pages may be another's by now."""
    try:
        return env.find(row.meta.hash).pieces == row.pieces
    except CorruptBlock:
        return False
