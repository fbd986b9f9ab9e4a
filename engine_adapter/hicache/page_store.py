"""Pages of one host pool in kvtier, by SGLang's keys.

kvtier keeps chains: a block is found behind the blocks before it, and leaves after those behind it.
SGLang names pages by hashes that contain their chain, but tells the chain itself only where it is
asked to (hicache_storage_pass_prefix_keys). So there are two namespaces:

* chained: pages whose prefix SGLang told and kvtier has. One call a batch.
* single: all others, each for itself: no prefix was told, or kvtier lost the prefix (a restart
  without an SSD, an eviction) while SGLang still has it and will not offer it again. One call a
  page, and in the order of eviction they are pages without a prefix.

A page is looked for in the first, and from where that ends, in the second. Its key names its whole
prefix, so bytes found in either are the right ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from engine_adapter.hicache.host_pages import HostPages, Parts
from engine_adapter.hicache.namespaces import PoolNamespace
from kvtier.client import Client, GetResult
from kvtier.client.copies import copy_blocks
from kvtier.codec.base import Bytes
from kvtier.errors import InvalidRequest
from kvtier.types import MAX_BLOCKS_PER_CALL, BlockHash, Loss, NamespaceSpec, Tier

STORE_WAIT_S = 1.0
"""How long a store may wait for room: SGLang's backup thread has time, and offers a page once."""

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


def block_hash(key: str) -> BlockHash:
    """The block of an SGLang key: its sha256 where it is one in hex, else a digest of the key.

    Other keys are those with a suffix, which some versions and pools append.
    """
    if _SHA256_HEX.fullmatch(key):
        return BlockHash(bytes.fromhex(key))
    return BlockHash(hashlib.sha256(b"kvtier.sglang.key.v1\n" + key.encode()).digest())


class PageStore:
    """The pages of one pool. Fails open, as the client does. Thread-safe."""

    def __init__(
        self, client: Client, namespace: PoolNamespace, pages: HostPages, allowed_loss: Loss
    ) -> None:
        """Nothing is sent yet.

        Args:
            client: The process's.
            namespace: Whose pages.
            pages: Where they lie.
            allowed_loss: What stored forms may lose.
        """
        self.pages = pages
        self.namespace = namespace
        self._client = client
        self._loss = allowed_loss

    def present(self, keys: Sequence[str], prefix: Sequence[str] | None) -> GetResult:
        """Leading pages that are stored; nothing is leased, touched or counted.

        Args:
            keys: Consecutive pages.
            prefix: All pages before; None if that is not known.
        """
        hashes = [block_hash(key) for key in keys]
        before = [block_hash(key) for key in prefix or ()]
        found = on_ssd = 0
        answered = True
        if hashes and len(before) + len(hashes) <= MAX_BLOCKS_PER_CALL:
            chained = self._lookup(self.namespace.chained, [*before, *hashes])
            found = max(0, chained.num_blocks - len(before))
            on_ssd = min(found, chained.blocks_by_tier.get(Tier.SSD, 0))
            answered = chained.answered
        while found < len(hashes):
            single = self._lookup(self.namespace.single, [hashes[found]])
            if not single.num_blocks:
                answered &= single.answered
                break
            found += 1
            on_ssd += single.blocks_by_tier.get(Tier.SSD, 0)
        by_tier = {Tier.HOST: found - on_ssd, Tier.SSD: on_ssd}
        return GetResult(found, by_tier, answered=answered)

    def record(self, found: GetResult, usable: int, asked: int) -> None:
        """Tell the daemon's hit rate what SGLang asked for.

        Args:
            found: What present() said.
            usable: As many of these pages SGLang can use.
            asked: Pages in all.
        """
        if asked and found.answered:
            on_host = min(usable, found.blocks_by_tier.get(Tier.HOST, 0))
            by_tier = {Tier.HOST: on_host, Tier.SSD: usable - on_host}
            self._client.record_hits(self.namespace.chained, by_tier, asked - usable)

    def read(
        self, keys: Sequence[str], prefix: Sequence[str] | None, destinations: Sequence[Parts]
    ) -> int:
        """Copy pages; leading destinations that hold theirs, the others are undefined.

        Args:
            keys: Consecutive pages.
            prefix: As for present(). kvtier touches these, and loads what of them is on the SSD
                only: it grants whole prefixes.
            destinations: One page each, as pages.pages() gives them.
        """
        hashes = [block_hash(key) for key in keys]
        before = [block_hash(key) for key in prefix or ()]
        done = 0
        if hashes and len(before) + len(hashes) <= MAX_BLOCKS_PER_CALL:
            done = self._read(self.namespace.chained, before, hashes, destinations)
        while done < len(hashes) and self._read(
            self.namespace.single, (), [hashes[done]], [destinations[done]]
        ):
            done += 1
        return done

    def write(
        self, keys: Sequence[str], prefix: Sequence[str] | None, sources: Sequence[Parts]
    ) -> int:
        """Store pages; leading ones that kvtier has then, or is getting from somebody else.

        Args:
            keys: Consecutive pages.
            prefix: As for present(); empty if keys[0] is a first page.
            sources: One page each.
        """
        hashes = [block_hash(key) for key in keys]
        before = None if prefix is None else [block_hash(key) for key in prefix]
        if hashes and before is not None and self._has(before):
            parent = before[-1] if before else None
            done = self._write(self.namespace.chained, parent, hashes, sources)
            if done:
                # The whole chain was used just now: it must not lose its head to colder ones.
                self._client.finish(self.namespace.chained, hashes[done - 1])
            return done
        done = 0
        while done < len(hashes) and self._write(
            self.namespace.single, None, [hashes[done]], [sources[done]]
        ):
            done += 1
        return done

    def _has(self, before: Sequence[BlockHash]) -> bool:
        if len(before) >= MAX_BLOCKS_PER_CALL:
            return False
        if not before:
            return True
        return self._lookup(self.namespace.chained, before).num_blocks == len(before)

    def _lookup(self, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> GetResult:
        return self._client.lookup(spec, hashes, allowed_loss=self._loss)

    def _read(
        self,
        spec: NamespaceSpec,
        before: Sequence[BlockHash],
        hashes: Sequence[BlockHash],
        destinations: Sequence[Parts],
    ) -> int:
        skipped = len(before)

        def take(first: int, blocks: Sequence[Bytes]) -> None:
            for number, block in enumerate(blocks, start=first - skipped):
                if number >= 0:  # Those before are SGLang's already.
                    parts = destinations[number]
                    copy_blocks(parts, _pieces(block, parts))

        with self._client.acquire(
            spec, [*before, *hashes], allowed_loss=self._loss, recorded=True
        ) as lease:
            if lease.num_blocks <= skipped:
                return 0
            return max(0, lease.read_with(take, lease.num_blocks) - skipped)

    def _write(
        self,
        spec: NamespaceSpec,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        sources: Sequence[Parts],
    ) -> int:
        def fill(index: int, extent: Bytes) -> None:
            parts = sources[index]
            copy_blocks(_pieces(extent, parts), parts)

        # What was computed behind lossy pages has lost as much; which those were, SGLang doesn't
        # say.
        with self._client.reserve(
            spec,
            parent,
            hashes,
            allowed_loss=self._loss,
            loss=self._loss,
            wait_s=STORE_WAIT_S,
        ) as lease:
            if not lease.indices:
                return lease.covered_blocks
            lease.write_with(fill)
            return lease.covered_blocks if lease.commit() else lease.indices[0]


def drop_pages(client: Client, namespace: PoolNamespace) -> None:
    """Nothing stored in these namespaces before is ever hit again, by any engine."""
    for spec in (namespace.chained, namespace.single):
        client.drop_namespace(spec)


def _pieces(block: Bytes, parts: Parts) -> list[Bytes]:
    """A block cut as a page is.

    Raises:
        InvalidRequest: they are not of the same size.
    """
    pieces: list[Bytes] = []
    at = 0
    for part in parts:
        pieces.append(block[at : at + part.size])
        at += part.size
    if at != block.size:
        raise InvalidRequest(f"a page of {at} bytes for a block of {block.size}")
    return pieces
