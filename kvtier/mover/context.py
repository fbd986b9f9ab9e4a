"""What the parts of a shard's mover share: the directory they work on, and their bounds.

shard       one SSD directory's jobs, and the threads that do them
health      whether the directory works; how it leaves and comes back
loads       blocks from it
writes      blocks to it, deletes, namespaces: all that is committed
scrubber    reads it through, slowly, while nobody else does
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.mover.progress import Progress
from kvtier.store import TieredStore
from kvtier.tier.base import BlockTier
from kvtier.tier.host import HostArena


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """Bounds of the mover, for each SSD directory.

    Attributes:
        read_threads: Reads at the same time.
        write_threads: Writes at the same time.
        batch_bytes: A commit takes no more than this many bytes of blocks; three times as much
            may be written and not committed.
        timeout_s: Longest that one read, write or commit should take.
        scrub_bytes_per_s: How fast stored blocks are checked; 0: not at all.
    """

    read_threads: int = 4
    write_threads: int = 4
    batch_bytes: int = 32 << 20
    timeout_s: float = 2.0
    scrub_bytes_per_s: int = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ShardContext:
    """One SSD directory.

    Attributes:
        number: The store's number for it.
        directory: Its name, for logs.
        tier: What is on it.
        store: Decides.
        arena: Where blocks are in RAM.
        config: Bounds.
        progress: Whom to tell after each change.
        pump: Hands out the jobs that the store has made. Call it after every call of the store.
        clock: Seconds, monotonic.
    """

    number: int
    directory: str
    tier: BlockTier
    store: TieredStore
    arena: HostArena
    config: MoverConfig
    progress: Progress
    pump: Callable[[], None]
    clock: Callable[[], float]

    def changed(self) -> None:
        """The store was told something: hand out what follows from it, and wake who waits."""
        self.pump()
        self.progress.notify()
