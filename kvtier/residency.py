"""Which blocks RAM holds, and in what room: the arena's extents. (The SSD's: shards.py.)

What leaves RAM is for tiers.py to say. No I/O, one thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from kvtier.extents import Extent, ExtentAllocator
from kvtier.index import Block, BlockIndex, HostCopy, HostState
from kvtier.metrics import Counters
from kvtier.policy.base import EvictionPolicy
from kvtier.types import Tier


class HostResidency:
    """Blocks in the arena: extents, pins, order of leaving.

    Attributes:
        pinned_bytes: Extents of copies that leases, pins or jobs use.
        quarantined_bytes: Extents without a copy, whose writer may still be writing.
    """

    def __init__(
        self,
        index: BlockIndex,
        policy: EvictionPolicy[Block],
        capacity_bytes: int,
        counters: Counters,
    ) -> None:
        self.extents = ExtentAllocator(capacity_bytes)
        self.pinned_bytes = 0
        self.quarantined_bytes = 0
        self._index = index
        self._policy = policy
        self._counters = counters

    def touch(self, blocks: list[Block]) -> None:
        """Note a use of READY blocks; they have their new stamps."""
        self._policy.touch(blocks, [block.stamp for block in blocks])

    def pin(self, copy: HostCopy) -> None:
        """Keep a copy where it is."""
        if not copy.pins:
            self.pinned_bytes += copy.extent.size_bytes
        copy.pins += 1

    def pin_all(self, copies: Iterable[HostCopy]) -> None:
        """Pin many: the hot path of Acquire, so without a call each."""
        newly_bytes = 0
        for copy in copies:
            if not copy.pins:
                newly_bytes += copy.extent.size_bytes
            copy.pins += 1
        self.pinned_bytes += newly_bytes

    def unpin_all(self, copies: Iterable[HostCopy]) -> None:
        """Undo pin_all(); a copy that left its block meanwhile gives its extent back."""
        freed_bytes = 0
        for copy in copies:
            copy.pins -= 1
            if not copy.pins:
                freed_bytes += copy.extent.size_bytes
                if copy.block.host is not copy:
                    self.extents.free(copy.extent)
        self.pinned_bytes -= freed_bytes

    def unpin(self, copy: HostCopy) -> None:
        """Undo one pin."""
        self.unpin_all((copy,))

    def make_ready(self, copy: HostCopy) -> None:
        """The copy's bytes are complete: readers may have them, and it may be evicted."""
        copy.state = HostState.READY
        if copy.current:
            self._policy.insert(copy.block, copy.block.stamp)
            self._index.watcher.changed(copy.block, Tier.HOST)

    def detach(self, block: Block) -> None:
        """Take the copy off its block; the extent is free once nobody pins it."""
        copy = block.host
        if copy is None:
            return
        if copy.state is HostState.READY:
            self._policy.remove(block)
            self._index.watcher.changed(block, Tier.HOST)
        block.host = None
        if not copy.pins:
            self.extents.free(copy.extent)

    def discard(self, copy: HostCopy, *, keep_extent: bool) -> None:
        """End a copy that was never READY; its writer was its only pin.

        With keep_extent the writer may go on: quarantine until free_quarantined().
        """
        assert copy.pins == 1
        block, was_current = copy.block, copy.current
        if was_current:
            self.detach(block)
        copy.pins = 0
        self.pinned_bytes -= copy.extent.size_bytes
        if keep_extent:
            self.quarantined_bytes += copy.extent.size_bytes
        else:
            self.extents.free(copy.extent)
        if was_current:
            self._index.prune(block)

    def keep_out(self, extent: Extent) -> None:
        """Quarantine an extent that a former daemon gave to a writer."""
        self.extents.claim(extent)
        self.quarantined_bytes += extent.size_bytes

    def free_quarantined(self, extent: Extent) -> None:
        """Nobody writes there any more."""
        self.extents.free(extent)
        self.quarantined_bytes -= extent.size_bytes

    def coldest(self) -> Generator[Block, None, None]:
        """READY blocks in the order in which they should leave (policy/base.py)."""
        return self._policy.coldest()

    def evict(self, block: Block) -> None:
        """A READY, unpinned block leaves RAM."""
        assert block.host is not None
        self._counters.host_evicted_blocks += 1
        self._counters.host_evicted_bytes += block.host.extent.size_bytes
        self.detach(block)
        self._index.prune(block)

    def allocate(self, size_bytes: int, evictions: Iterator[None]) -> Extent | None:
        """An extent, evicting as long as none fits and something may leave."""
        while (extent := self.extents.allocate(size_bytes)) is None:
            if next(evictions, self) is self:
                return None
        return extent

    def __len__(self) -> int:
        return len(self._policy)
