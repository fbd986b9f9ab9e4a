"""Is everything in an SSD directory what it should be? Offline, with repair if wanted.

First every environment's tree is walked (ssd_walk.py), its header, slabs and rows are checked, then
every block is read, verified and decoded. To repair is to forget: a broken environment is set
aside, a broken block is deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import ConfigError, CorruptBlock, SegmentDamaged, TierUnavailable
from kvtier.tier.base import NamespaceRow, StoredBlocks
from kvtier.tier.ssd_changes import Changes
from kvtier.tier.ssd_directory import StoreDirectory
from kvtier.tier.ssd_env import Environment
from kvtier.tier.ssd_file import BlockIo
from kvtier.tier.ssd_read import verify_block
from kvtier.tier.ssd_walk import tree_problems
from kvtier.types import BlockHash, NamespaceDigest

READ_THREADS = 4
SHOWN_PROBLEMS = 10
_SLICE_BLOCKS = 256

Progress = Callable[[str, int, int], None]
"""Told what is looked at, and how many stored bytes of how many have been."""


@dataclass(slots=True)
class Report:
    """What check_directory() found.

    Attributes:
        directory: Which.
        environments: How many there were.
        blocks: Whose rows were sound.
        stored_bytes: Of these.
        quarantined_bytes: Occupied by what was set aside, before or now.
        problems: How many of each kind: "tree" or "environment" (a whole one is broken), "row",
            "layout", "short", "checksum", "undecodable" (CorruptBlock.reason), "unreadable" (the
            medium failed).
        first: The first few in words.
        repaired: How many of them were.
    """

    directory: str
    environments: int = 0
    blocks: int = 0
    stored_bytes: int = 0
    quarantined_bytes: int = 0
    problems: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)
    repaired: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong, or not any more."""
        return self.repaired == self.found

    @property
    def found(self) -> int:
        """How many problems there are."""
        return sum(self.problems.values())

    def add(self, kind: str, what: str) -> None:
        """Note a problem."""
        self.problems[kind] = self.problems.get(kind, 0) + 1
        if len(self.first) < SHOWN_PROBLEMS:
            self.first.append(f"{kind}: {what}")


def check_directory(
    directory: Path, *, repair: bool, progress: Progress, io: BlockIo | None = None
) -> Report:
    """Check one SSD directory. Blocks for as long as it takes to read it.

    Args:
        directory: That no daemon has open.
        repair: Delete and set aside what is broken; else nothing is changed.
        progress: See Progress.
        io: What moves the payloads; the system's calls, if not given.

    Raises:
        ConfigError: there is no store.
        AddressInUse: a live daemon owns it.
        FormatError: of another version, or not ours.
        TierUnavailable: the medium failed.
    """
    if not any(directory.glob("env-*/data.mdb")) and not (directory / "kvtier.boot").exists():
        raise ConfigError(f"{directory}: there is no kvtier store here: name an SSD directory")
    with ExitStack() as stack:
        home = StoreDirectory(directory)
        stack.callback(home.close)
        check = _Check(home, Report(str(directory)), repair, progress, io or BlockIo())
        stack.callback(check.close)
        check.environments()
        check.blocks()
        check.report.quarantined_bytes = home.quarantined_bytes()
        return check.report


class _Check:
    def __init__(
        self, home: StoreDirectory, report: Report, repair: bool, progress: Progress, io: BlockIo
    ) -> None:
        self.report = report
        self._home = home
        self._repair = repair
        self._progress = progress
        self._io = io
        self._open: list[tuple[Environment, StoredBlocks]] = []
        self._known: dict[NamespaceDigest, NamespaceRow] = {}

    def environments(self) -> None:
        """Walk the trees, open what is sound and read its rows."""
        for number, path in self._home.environments().items():
            self.report.environments += 1
            self._progress(f"tree of {path.name}", 0, 0)
            if problems := tree_problems(path):
                self._broken(path, "tree", f"{path.name}: {problems[0]}")
                continue
            try:
                env = Environment(path, number, sync=True, io=self._io)
                self._read_rows(env)
            except SegmentDamaged as error:
                self._broken(path, "environment", str(error))

    def _read_rows(self, env: Environment) -> None:
        try:
            env.check_slabs()
            stored = env.load()
        except BaseException:
            env.retire()
            raise
        self._open.append((env, stored))
        for row in env.namespaces.values():
            known = self._known.get(row.digest)
            if known is None or known.generation < row.generation:
                self._known[row.digest] = row
        self.report.blocks += len(stored)
        self.report.stored_bytes += env.account.live_bytes
        for key in sorted(env.unreadable):
            self.report.add("row", f"{env.path.name}: block {key.hex()}: its row is broken")

    def _broken(self, path: Path, kind: str, what: str) -> None:
        self.report.add(kind, what)
        if self._repair:
            self._home.quarantine(path)
            self.report.repaired += 1

    def blocks(self) -> None:
        """Read and verify every block."""
        done_bytes = 0
        with ThreadPoolExecutor(READ_THREADS, "check") as pool:
            for env, stored in self._open:
                bad: list[BlockHash] = []
                for at in range(0, len(stored), _SLICE_BLOCKS):
                    part = stored[at : at + _SLICE_BLOCKS]
                    keys = [BlockHash(key.tobytes()) for key in part["hash"]]
                    found = pool.map(lambda key, env=env: self._trouble(env, key), keys)
                    for key, trouble in zip(keys, found, strict=True):
                        if trouble is not None:
                            self.report.add(*trouble)
                            bad.append(key)
                    done_bytes += int(part["stored_bytes"].sum())
                    self._progress(
                        f"blocks of {env.path.name}", done_bytes, self.report.stored_bytes
                    )
                self._delete(env, bad)

    def _trouble(self, env: Environment, key: BlockHash) -> tuple[str, str] | None:
        try:
            verify_block(env, env.find(key), self._known, self._io)
        except CorruptBlock as error:
            return error.reason, f"{env.path.name}: {error}"
        except TierUnavailable as error:
            return "unreadable", f"block {key.hex()}: {error}"
        return None

    def _delete(self, env: Environment, bad: list[BlockHash]) -> None:
        count = len(bad) + len(env.unreadable)
        if self._repair and count:
            env.commit(Changes(deletes=bad))
            self.report.repaired += count

    def close(self) -> None:
        """Close the environments."""
        for env, _ in self._open:
            env.retire()
