"""How an SSD directory's capacity is divided: sizes only, no I/O.

    capacity = environments + lock files, directories and the file system's own extent trees
    environment = slabs + room for LMDB's tables

A directory has about eight environments, so that giving one up costs an eighth, each at least 16
batches large, so that a batch is a small part of it.
"""

from __future__ import annotations

from functools import cache

from kvtier.errors import CapacityError
from kvtier.tier.ssd_format import PAGE_BYTES

SLAB_BYTES = 32 << 20
LMDB_PAGE_BYTES = 4096
"""On most machines; only forecasts rely on it."""

ROW_COST_BYTES = 512
"""Of table room a block: twice what its row takes on pages that are two thirds full."""

_ENVIRONMENTS = 8
_ENVIRONMENT_BATCHES = 16
_LEAST_BATCHES = 8
_FIXED_BYTES = 1 << 20
"""For lock files and directories."""

_TABLES_SHARE = 16
_TABLES_EXTRA_BYTES = 8 << 20
_AHEAD_BYTES = 1 << 20

_LINGERING_BATCHES = 8

BATCHES_UNDER_WAY = 3
"""One committed, one written, one encoded: their deletes have not given back any room yet."""


def whole_pages(size_bytes: int) -> int:
    """size_bytes rounded down to whole pages."""
    return size_bytes - size_bytes % PAGE_BYTES


def budget_bytes(capacity_bytes: int) -> int:
    """What all environments together may take."""
    return whole_pages(capacity_bytes - (capacity_bytes >> 10) - _FIXED_BYTES)


def lingering_bytes(capacity_bytes: int, batch_bytes: int) -> int:
    """How much may be evicted and still have its pages (ssd_lingering.py)."""
    return whole_pages(min(_LINGERING_BATCHES * batch_bytes, capacity_bytes // 32))


def least_map_bytes(batch_bytes: int) -> int:
    """An environment smaller than this is of no use."""
    return budget_bytes(_LEAST_BATCHES * batch_bytes)


def map_bytes(capacity_bytes: int, batch_bytes: int) -> int:
    """Size of a new environment: half the capacity has room for half of them.

    Raises:
        CapacityError: the capacity is too small for the batches.
    """
    if capacity_bytes < _LEAST_BATCHES * batch_bytes:
        raise CapacityError(
            f"ssd_capacity_bytes {capacity_bytes} is below {_LEAST_BATCHES * batch_bytes}, "
            f"{_LEAST_BATCHES} batches of {batch_bytes}: raise it, or lower ssd_batch_bytes"
        )
    fitting = capacity_bytes // (_ENVIRONMENT_BATCHES * batch_bytes)
    return budget_bytes(capacity_bytes // min(_ENVIRONMENTS, max(1, fitting)))


def tables_bytes(map_bytes: int) -> int:
    """What an environment keeps for LMDB's tables: a share, doubled for small ones."""
    share = map_bytes // _TABLES_SHARE
    return share + min(share, _TABLES_EXTRA_BYTES)


def ahead_bytes(map_bytes: int) -> int:
    """Space behind LMDB's last page that is taken beforehand: a full disk must allow deletes."""
    return whole_pages(min(_AHEAD_BYTES, tables_bytes(map_bytes) // 4))


def most_rows(map_bytes: int) -> int:
    """Blocks that an environment's tables have room for, copy-on-write included."""
    return map_bytes // _TABLES_SHARE // ROW_COST_BYTES


def slab_bytes(map_bytes: int) -> int:
    """Room of a slab, but for the last one of an environment."""
    return whole_pages(min(SLAB_BYTES, map_bytes // 8))


def next_slab_bytes(map_bytes: int, slabs: int, have_bytes: int, lmdb_page_bytes: int) -> int:
    """Room of the next slab, where `slabs` of have_bytes in all are there; 0 if there is none."""
    whole = slab_bytes(map_bytes)
    left_bytes = map_bytes - tables_bytes(map_bytes) - have_bytes - slabs * lmdb_page_bytes
    size_bytes = whole_pages(min(whole, left_bytes - lmdb_page_bytes))
    return size_bytes if size_bytes >= whole // 4 else 0


@cache
def slabs_bytes(map_bytes: int, lmdb_page_bytes: int) -> int:
    """Room of all slabs that an environment can hold."""
    slabs = total_bytes = 0
    while size_bytes := next_slab_bytes(map_bytes, slabs, total_bytes, lmdb_page_bytes):
        slabs, total_bytes = slabs + 1, total_bytes + size_bytes
    return total_bytes
