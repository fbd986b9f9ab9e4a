"""The environments of one SSD directory: they come and go as a whole, within the capacity.

They are opened, made when the others are full, retired when they are damaged or there is no room
for all, and set aside or deleted then. `du` of the directory stays within the capacity throughout:
the lengths of all files, and what was set aside, never add up to more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import structlog

from kvtier.errors import CapacityError, SegmentDamaged, TierError, TierFull, TierUnavailable
from kvtier.tier import ssd_layout as layout
from kvtier.tier.base import STORED_BLOCK, NamespaceRow, Piece, StoredBlocks
from kvtier.tier.ssd_directory import StoreDirectory
from kvtier.tier.ssd_env import Environment, create
from kvtier.tier.ssd_file import BlockIo, medium_errors
from kvtier.tier.ssd_walk import tree_problems
from kvtier.types import NamespaceDigest

log = structlog.get_logger(__name__)

_MOST_NUMBERS = 1 << 16


class Segments:
    """All environments of a directory.

    place() may be called by any number of threads; the rest belongs to one.

    Attributes:
        open: By number; never changed in place.
        lingering_bytes: Evicted blocks that may keep their pages for a while.
    """

    def __init__(
        self,
        home: StoreDirectory,
        *,
        capacity_bytes: int,
        batch_bytes: int,
        min_free_bytes: int,
        sync: bool,
        io: BlockIo,
    ) -> None:
        """Nothing is open yet.

        Args:
            home: The directory, ours.
            capacity_bytes: Bound of its `du`.
            batch_bytes: The most payload of one commit.
            min_free_bytes: What the file system must keep free.
            sync: Whether a commit waits for the medium.
            io: What moves the payloads.

        Raises:
            CapacityError: too small for the batches, or larger than the file system.
            TierUnavailable: the medium failed.
        """
        self.open: dict[int, Environment] = {}
        self._home = home
        self._budget_bytes = layout.budget_bytes(capacity_bytes)
        self._new_map_bytes = layout.map_bytes(capacity_bytes, batch_bytes)
        self.lingering_bytes = layout.lingering_bytes(capacity_bytes, batch_bytes)
        self._batch_bytes = batch_bytes
        self._least_map_bytes = layout.least_map_bytes(batch_bytes)
        self._min_free_bytes = min_free_bytes
        self._sync = sync
        self._io = io
        self._placing = threading.Lock()
        self._current = -1
        self._leaving: list[Environment] = []
        self._aside_bytes = 0
        self._next_number = 0
        if (size_bytes := home.size_bytes()) < self._budget_bytes + min_free_bytes:
            raise CapacityError(
                f"{home.path}: the SSD tier may grow to {capacity_bytes} bytes and must leave "
                f"{min_free_bytes} free, the file system has {size_bytes} in all: lower "
                "ssd_capacity_bytes or ssd_min_free_bytes"
            )

    # ---- opening

    def open_all(self, *, walk: bool) -> list[StoredBlocks]:
        """Open what is there, fit it into the capacity, and read all rows.

        What is damaged is set aside. With `walk`, trees are walked before they are trusted.

        Raises:
            FormatError: an environment is of another version, or not ours.
            TierUnavailable: the medium failed.
        """
        paths = self._home.environments()
        self._next_number = (max(paths, default=-1) + 1) % _MOST_NUMBERS
        found: dict[int, Environment] = {}
        try:
            for number, path in paths.items():
                if (env := self._try_open(number, path, walk=walk)) is not None:
                    found[number] = env
            self._fit(found)
            stored = [rows for env in list(found.values()) if (rows := self._load(env, found))]
        except BaseException:
            for env in found.values():
                env.retire()
            raise
        self._aside_bytes = self._home.quarantined_bytes()
        self.open = found
        self._make_room_for_one()
        return [rows for _, rows in stored]

    def _try_open(self, number: int, path: Path, *, walk: bool) -> Environment | None:
        try:
            with medium_errors(path):
                problems = tree_problems(path) if walk else []
            if problems:
                raise SegmentDamaged(f"{path}: {problems[0]}", number)
            return Environment(path, number, sync=self._sync, io=self._io)
        except SegmentDamaged as error:
            self._set_aside(path, str(error))
            return None

    def _load(
        self, env: Environment, found: dict[int, Environment]
    ) -> tuple[Environment, StoredBlocks] | None:
        try:
            return env, env.load()
        except SegmentDamaged as error:
            del found[env.number]
            env.retire()
            self._set_aside(env.path, str(error))
            return None

    def _fit(self, found: dict[int, Environment]) -> None:
        """A lower capacity costs what was set aside, and then whole environments, coldest first."""
        while True:
            aside_bytes = self._home.quarantined_bytes()
            if sum(_maps(found.values())) + aside_bytes <= self._budget_bytes:
                return
            if self._drop_quarantine() or not found:
                continue
            env = min(found.values(), key=_warmth)
            del found[env.number]
            env.retire()
            self._home.remove(env.path)
            log.warning("ssd environment deleted: the capacity was lowered", path=str(env.path))

    def _set_aside(self, path: Path, why: str) -> None:
        aside = self._home.quarantine(path)
        log.warning("ssd environment damaged, set aside", path=str(aside), error=why)

    def _make_room_for_one(self) -> None:
        """What was set aside goes, oldest first, when it leaves no room for any environment."""
        while not self.open and not self.planned_maps() and self._drop_quarantine():
            self._aside_bytes = self._home.quarantined_bytes()

    def _drop_quarantine(self) -> bool:
        gone = self._home.drop_oldest_quarantine()
        if gone is not None:
            log.warning("quarantined ssd environment deleted, to make room", path=str(gone))
        return gone is not None

    def stored_blocks(self) -> StoredBlocks:
        """All readable blocks.

        Raises:
            SegmentDamaged: tables are broken.
        """
        return joined([env.stored_blocks() for env in self.open.values()])

    def namespaces(
        self, known: Mapping[NamespaceDigest, NamespaceRow]
    ) -> dict[NamespaceDigest, NamespaceRow]:
        """What is known, and what the environments remember; of each the latest generation."""
        latest = dict(known)
        for env in self.open.values():
            for row in env.namespaces.values():
                if row.digest not in latest or latest[row.digest].generation < row.generation:
                    latest[row.digest] = row
        return latest

    # ---- room

    def planned_maps(self) -> list[int]:
        """Sizes of the environments that may still be made."""
        used_bytes = sum(env.map_bytes for env in self.open.values())
        left_bytes = layout.whole_pages(self._budget_bytes - used_bytes - self._aside_bytes)
        maps: list[int] = []
        while left_bytes >= self._least_map_bytes:
            maps.append(min(self._new_map_bytes, left_bytes))
            left_bytes -= maps[-1]
        return maps

    def limit_bytes(self) -> int:
        """TierUsage.limit_bytes: what slabs hold, now and in time, less what must stay free.

        That is what lingers, the batches under way, and a batch for every further environment:
        what is left in one is no use to a block that fits only in another. It shrinks while others
        fill the file system, so that the store makes room among its own blocks. And it shrinks when
        blocks are so small that their rows fill the tables before they fill the slabs. What it says
        of a file system that does not answer, the next write will tell.
        """
        envs, planned = list(self.open.values()), self.planned_maps()
        page_bytes = envs[0].page_bytes if envs else layout.LMDB_PAGE_BYTES
        growth_bytes = sum(env.growable_bytes() for env in envs)
        growth_bytes += sum(layout.slabs_bytes(size, page_bytes) for size in planned)
        with contextlib.suppress(TierUnavailable):
            growth_bytes = min(growth_bytes, max(0, self._free_bytes()))
        room_bytes = sum(env.room.size_bytes for env in envs) + growth_bytes
        blocks = sum(env.account.blocks for env in envs)
        if blocks:
            most = sum(layout.most_rows(size) for size in [*_maps(envs), *planned])
            mean_bytes = sum(env.account.used_bytes for env in envs) // blocks
            room_bytes = min(room_bytes, most * mean_bytes)
        spare = layout.BATCHES_UNDER_WAY + max(0, len(envs) + len(planned) - 1)
        return max(0, room_bytes - spare * self._batch_bytes - self.lingering_bytes)

    def place(
        self, size_bytes: int, namespaces: Iterable[NamespaceRow]
    ) -> tuple[Environment, tuple[Piece, ...]]:
        """Find room for a payload: fill one environment, then go on with the one of most room.

        The environment is held; release() it.

        Args:
            size_bytes: Of the payload.
            namespaces: For an environment that has to be made.

        Raises:
            TierFull: there is none, or the file system has less free than it must keep.
            SegmentDamaged: tables are broken.
            TierUnavailable: the medium failed.
        """
        with self._placing:
            for env in self._by_preference():
                if pieces := env.take(size_bytes, self._min_free_bytes):
                    self._current = env.number
                    env.hold()
                    return env, pieces
            made = self._make(namespaces, with_slab=True)
            if made is not None and (pieces := made.take(size_bytes, self._min_free_bytes)):
                self._current = made.number
                made.hold()
                return made, pieces
        raise TierFull(f"{self._home.path}: no room for {size_bytes} bytes")

    def _by_preference(self) -> list[Environment]:
        others = sorted(self.open.values(), key=lambda env: -env.room.free_bytes)
        return sorted(others, key=lambda env: env.number != self._current)

    def make_first(self, namespaces: Iterable[NamespaceRow]) -> None:
        """Have at least one environment, to remember namespaces.

        Raises:
            TierFull: the file system has no room for it.
            TierUnavailable: the medium failed.
        """
        with self._placing:
            if not self.open and self._make(namespaces, with_slab=False) is None:
                raise TierFull(f"{self._home.path}: no room for an environment")

    def _make(self, namespaces: Iterable[NamespaceRow], *, with_slab: bool) -> Environment | None:
        """Make an environment, if the capacity and the file system have room for it."""
        planned = self.planned_maps()
        if not planned:
            return None
        need_bytes = layout.slab_bytes(planned[0]) + layout.tables_bytes(planned[0])
        if with_slab and self._free_bytes() < need_bytes:
            return None
        number = self._new_number()
        path = self._home.fresh_path(number)
        try:
            create(path, number, planned[0], namespaces)
        except TierError:
            with contextlib.suppress(TierError):
                self._home.fresh_path(number)
            raise
        env = Environment(self._home.finish(number), number, sync=self._sync, io=self._io)
        env.load()
        self.open = {**self.open, number: env}
        self._next_number = (number + 1) % _MOST_NUMBERS
        return env

    def _new_number(self) -> int:
        """One that no job can mean: the longest unused."""
        while self._next_number in self.open:
            self._next_number = (self._next_number + 1) % _MOST_NUMBERS
        return self._next_number

    def _free_bytes(self) -> int:
        """What the file system has beyond what it must keep; may be negative."""
        with medium_errors(self._home.path):
            return self._io.free_bytes(self._home.path) - self._min_free_bytes

    # ---- retiring

    def coldest(self) -> Environment | None:
        """The one to give up for room, if that gains any."""
        holding = [env for env in self.open.values() if env.room.size_bytes]
        return min(holding, key=_warmth, default=None)

    def lacks_bytes(self) -> int:
        """How much more the file system must have free; 0 if it has enough, or will soon.

        Raises:
            TierUnavailable: the medium failed.
        """
        self._leaving = [env for env in self._leaving if not env.closed]
        coming_bytes = sum(env.room.size_bytes for env in self._leaving)
        return max(0, -self._free_bytes() - coming_bytes)

    def retire(self, number: int, *, damaged: bool) -> None:
        """Give an environment up; harmless if it is not there.

        Raises:
            TierUnavailable: the medium failed.
        """
        with self._placing:
            env = self.open.get(number)
            if env is None:
                return
            self.open = {n: other for n, other in self.open.items() if n != number}
        env.retire()
        self._leaving.append(env)
        if damaged:
            self._set_aside(env.path, "its tables are broken")
            self._aside_bytes = self._home.quarantined_bytes()
            self._make_room_for_one()
        else:
            self._home.remove(env.path)
            log.warning("ssd environment deleted", path=str(env.path))

    # ---- the end

    def sync(self) -> None:
        """Wait until everything is on the medium.

        Raises:
            TierUnavailable: the medium failed.
        """
        for env in self.open.values():
            env.sync()

    def close(self) -> None:
        """Close all environments; one that is in use follows when that is over."""
        with self._placing:
            envs, self.open = self.open, {}
        for env in envs.values():
            env.retire()


def joined(parts: Sequence[StoredBlocks]) -> StoredBlocks:
    """One array of several."""
    return np.concatenate(parts) if parts else np.empty(0, dtype=STORED_BLOCK)


def _warmth(env: Environment) -> tuple[int, int]:
    return env.account.newest_stamp, env.number


def _maps(envs: Iterable[Environment]) -> list[int]:
    return [env.map_bytes for env in envs]
