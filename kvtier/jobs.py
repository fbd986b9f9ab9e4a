"""What the store wants done: values that the mover runs and answers.

Jobs for the SSD writer (WriteJob, DeleteJob, RememberJob) take effect in the order in which they
were made. A job's `copy` is the store's own handle; the mover reads its extent and hands it back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.index import HostCopy
from kvtier.tier.base import BlockMeta, NamespaceRow
from kvtier.types import BlockHash, Loss


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Read a block from the SSD into copy.extent; answered by store.reads.loaded()."""

    copy: HostCopy
    hash: BlockHash
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Write a block from copy.extent to the SSD; answered by store.tiers.written().

    Attributes:
        urgent: Somebody waits for it, or will soon: it may compete with the engine for a core.
    """

    id: int
    copy: HostCopy
    meta: BlockMeta
    size_bytes: int
    allowed_loss: Loss
    urgent: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeleteJob:
    """Forget a block on the SSD; answered by store.tiers.deleted()."""

    hash: BlockHash
    stored_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class RememberJob:
    """Keep a namespace's spec and generation on the SSD; needs no answer."""

    row: NamespaceRow


Job = LoadJob | WriteJob | DeleteJob | RememberJob
