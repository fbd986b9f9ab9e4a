"""Leases: pins with an owner and a deadline.

A read lease keeps blocks where they are; a write lease is reserve, copy, then commit or abort; a
pin is a read lease without a session. The tables here answer who holds what until when. What a
lease does to blocks is for reads.py and writes.py to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier.extents import Extent
from kvtier.index import HostCopy
from kvtier.types import GroupId


@dataclass(slots=True, eq=False)
class ReadLease:
    """Blocks of one chain that stay readable at their extents.

    Attributes:
        copies: In prefix order.
        ready: Leading copies that can be read now.
        usable: Leading copies that are or may become ready; shrinks when a load fails.
        slot: Its slot in the control page.
        generation: The slot's generation while the lease lives.
        request_id: What makes Acquire idempotent; empty for none.
        ssd_blocks: Copies that the lease found on the SSD only.
    """

    id: int
    group: GroupId
    deadline_s: float
    copies: list[HostCopy]
    slot: int
    generation: int
    request_id: bytes = b""
    ready: int = 0
    usable: int = 0
    ssd_blocks: int = 0


@dataclass(slots=True, eq=False)
class WriteLease:
    """Extents that a client fills.

    Attributes:
        copies: The granted blocks, in chain order, all WRITING.
        records: Indices of its write records in the control page.
        writer: Whose lock says that somebody may be writing (arena.py).
    """

    id: int
    group: GroupId
    writer: bytes
    deadline_s: float
    copies: list[HostCopy]
    records: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix kept in RAM beyond any session."""

    id: bytes
    deadline_s: float
    copies: list[HostCopy]


@dataclass(slots=True, eq=False)
class Quarantine:
    """Extents of a write lease that ended while its writer may still be writing.

    Attributes:
        lease_id: The lease; its owner may still say that it has stopped.
        epoch: Daemon boot under which the lease was granted.
        writer: Whose lock says that somebody may be writing (arena.py).
        group: Its owner; empty for a lease of a former daemon, whose id nobody knows.
    """

    lease_id: int
    epoch: bytes
    writer: bytes
    group: GroupId
    extents: list[Extent]
    records: list[int]


class LeaseTable:
    """Live read and write leases, by id and by deadline."""

    def __init__(self, first_id: int, *, ttl_s: float, ttl_max_s: float) -> None:
        """Start without leases.

        Args:
            first_id: Ids are given out from here on; no two daemons of a host should share a range.
            ttl_s: Life of a lease whose request names none.
            ttl_max_s: Longest life of a lease.
        """
        self._ttl_s = ttl_s
        self._ttl_max_s = ttl_max_s
        self._next_id = first_id
        self._leases: dict[int, ReadLease | WriteLease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._requests: dict[tuple[GroupId, bytes], ReadLease] = {}

    def new_id(self) -> int:
        """A lease id that was never used."""
        self._next_id += 1
        return self._next_id

    def deadline_s(self, now_s: float, ttl_s: float) -> float:
        """Deadline of a new lease; ttl_s is what the request asks for, 0 for nothing."""
        return now_s + min(ttl_s or self._ttl_s, self._ttl_max_s)

    def add(self, lease: ReadLease | WriteLease) -> None:
        """Make a lease live."""
        self._leases[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.deadline_s, lease.id))
        if isinstance(lease, ReadLease) and lease.request_id:
            self._requests[lease.group, lease.request_id] = lease

    def remove(self, lease: ReadLease | WriteLease) -> None:
        """End a live lease."""
        del self._leases[lease.id]
        if isinstance(lease, ReadLease) and lease.request_id:
            del self._requests[lease.group, lease.request_id]

    def find(self, lease_id: int, group: GroupId) -> ReadLease | WriteLease | None:
        """The live lease of this id, if it is the group's."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.group == group else None

    def by_request(self, group: GroupId, request_id: bytes) -> ReadLease | None:
        """The live lease that an earlier Acquire of the same request made."""
        return self._requests.get((group, request_id)) if request_id else None

    def of_group(self, group: GroupId) -> list[ReadLease | WriteLease]:
        """All live leases of a group."""
        return [lease for lease in self._leases.values() if lease.group == group]

    def expired(self, now_s: float) -> Iterator[ReadLease | WriteLease]:
        """Yield live leases past their deadline; the caller removes them."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            lease = self._leases.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                yield lease

    def counts(self) -> tuple[int, int]:
        """(read leases, write leases) alive."""
        reads = sum(isinstance(lease, ReadLease) for lease in self._leases.values())
        return reads, len(self._leases) - reads

    def __iter__(self) -> Iterator[ReadLease | WriteLease]:
        return iter(self._leases.values())
