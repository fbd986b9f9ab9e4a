"""Leases as a client holds them: where the copies happen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import numpy as np

from kvtier.arena import ArenaMapping
from kvtier.client.attachment import Attachment
from kvtier.client.calls import Calls
from kvtier.client.copies import copy_blocks
from kvtier.client.fork import gate
from kvtier.codec.base import Bytes
from kvtier.types import Loss, MissReason
from kvtier.v1 import cache_pb2 as pb

READ_TIMEOUT_S = 10.0
WAIT_SLICE_S = 0.5
"""Longest single Wait: so long at most may a fork wait, or a daemon that hangs go unnoticed."""
CHUNK_BYTES = 1 << 20

Take = Callable[[int, Sequence[Bytes]], None]
"""Copies consecutive blocks of a read lease: (index of the first,
(block bytes,) uint8 array for each).

Must not keep the arrays: they are the daemon's memory.
"""

Fill = Callable[[int, Bytes], None]
"""Writes one block of a write lease: (its index among the asked hashes, (block bytes,) uint8)."""


class ReadLease:
    """The longest cached prefix, pinned until release(); zero blocks is a miss. Context manager.

    Attributes:
        num_blocks: Blocks granted.
        ssd_blocks: How many of them were on the SSD only.
        loss: What some of them may have lost.
    """

    def __init__(
        self, calls: Calls, attachment: Attachment | None, answer: pb.AcquireResponse
    ) -> None:
        self.num_blocks = answer.blocks
        self.ssd_blocks = answer.ssd_blocks
        self.loss = Loss(answer.loss)
        self._calls = calls
        self._attachment = attachment
        self._mapping = attachment.mapping if attachment is not None else None
        self._answer = answer
        self._ready = answer.ready_blocks

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def read_into(self, destinations: Sequence[Bytes], *, timeout_s: float = READ_TIMEOUT_S) -> int:
        """Copy blocks as they become ready, in prefix order.

        Args:
            destinations: One (block bytes,) uint8 array a block wanted, at most num_blocks count.
            timeout_s: For those that are still on the SSD.

        Returns:
            Leading destinations that hold their blocks; later ones are undefined.
        """

        def take(first: int, blocks: Sequence[Bytes]) -> None:
            copy_blocks(destinations[first : first + len(blocks)], blocks)

        return self.read_with(take, len(destinations), timeout_s=timeout_s)

    def read_with(self, take: Take, blocks: int, *, timeout_s: float = READ_TIMEOUT_S) -> int:
        """Let `take` copy blocks as they become ready, in prefix order.

        For engines whose blocks are not one array each: every byte is still copied once.

        Args:
            take: Copies blocks; what it has copied counts only as far as the answer says.
            blocks: How many are wanted, at most.
            timeout_s: For those that are still on the SSD.

        Returns:
            Leading blocks that were copied right; what `take` copied beyond is undefined.
        """
        wanted = min(blocks, self.num_blocks)
        attachment = self._attachment
        if not wanted or attachment is None:
            return 0
        mapping = self._mapping
        if mapping is not None:
            deadline_s = time.monotonic() + timeout_s
            done = self._copy(attachment, mapping, take, wanted, deadline_s)
        elif attachment.mapped:
            done = 0  # Lost before the lease was here.
        else:
            done = self._fetch(attachment, take, wanted, timeout_s)
        if done < wanted:
            self._calls.count_miss(
                MissReason.LEASE_LOST if attachment.lost.is_set() else MissReason.LOAD_FAILED
            )
        return done

    def wait(self, blocks: int, *, timeout_s: float = READ_TIMEOUT_S) -> int:
        """Wait until the first `blocks` are ready, or can't be; how many are."""
        attachment, wanted = self._attachment, min(blocks, self.num_blocks)
        deadline_s = time.monotonic() + timeout_s
        while attachment is not None and self._ready < wanted:
            left_s = deadline_s - time.monotonic()
            slice_s = max(0.0, min(left_s, WAIT_SLICE_S))
            request = pb.WaitRequest(
                session_id=attachment.session_id,
                lease_id=self._answer.lease_id,
                blocks=wanted,
                timeout_ms=round(slice_s * 1000),
            )
            usable = 0
            with self._calls.failing_open():
                call = attachment.stub.Wait
                answer = self._calls.call(
                    attachment, call, request, slice_s + self._calls.timeout_s
                )
                self._ready, usable = answer.ready_blocks, answer.usable_blocks
            if self._ready >= min(wanted, usable) or left_s <= slice_s:
                break
        return self._ready

    def release(self) -> None:
        """Let the blocks go. Does not wait for the answer. Idempotent."""
        attachment, self._attachment, self._mapping = self._attachment, None, None
        if attachment is None or attachment.lost.is_set():
            return
        request = pb.ReleaseRequest(
            session_id=attachment.session_id, lease_id=self._answer.lease_id
        )
        with self._calls.failing_open():
            self._calls.send(attachment, attachment.stub.Release, request)

    def _copy(
        self,
        attachment: Attachment,
        mapping: ArenaMapping,
        take: Take,
        wanted: int,
        deadline_s: float,
    ) -> int:
        answer, done = self._answer, 0
        while done < wanted:
            ready = min(wanted, self._ready)
            if ready == done:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.wait(done + 1, timeout_s=left_s) <= done:
                    return done
                continue
            if attachment.lost.is_set():
                return done
            offsets = answer.offsets[done:ready]
            sources = [mapping.data[at : at + answer.block_bytes] for at in offsets]
            take(done, sources)
            if not attachment.shows(mapping, answer.slot, answer.slot_generation):
                return done  # The lease ended under the copies: they count for nothing.
            done = ready
        return done

    def _fetch(self, attachment: Attachment, take: Take, wanted: int, timeout_s: float) -> int:
        request = pb.FetchRequest(
            session_id=attachment.session_id,
            lease_id=self._answer.lease_id,
            blocks=wanted,
        )
        received, size_bytes = 0, self._answer.block_bytes
        block = np.empty(size_bytes, dtype=np.uint8)
        try:
            with gate:
                for chunk in attachment.stub.Fetch(request, timeout=timeout_s):
                    data = np.frombuffer(chunk.data, dtype=np.uint8)
                    index, inside = divmod(received, size_bytes)
                    np.copyto(block[inside : inside + data.size], data)
                    received += data.size
                    if received % size_bytes == 0:
                        take(index, [block])
        except grpc.RpcError:
            pass  # What has arrived whole is good: chunks come in order, copied under the lease.
        except ValueError:
            if not attachment.lost.is_set():
                raise  # A destination of another size; a closed channel raises the same.
        return received // size_bytes


class WriteLease:
    """Room for new blocks: write them, then commit() or abort(). Context manager: aborts on exit
    unless committed.

    Attributes:
        indices: Which of the asked hashes want writing; the others are present or had no room.
        covered_blocks: Leading asked hashes that are present, being written, or granted here.
    """

    def __init__(
        self, calls: Calls, attachment: Attachment | None, answer: pb.ReserveResponse
    ) -> None:
        self.indices: Sequence[int] = answer.indices
        self.covered_blocks = answer.covered_blocks
        self._calls = calls
        self._answer = answer
        self._attachment = attachment if answer.lease_id else None
        self._mapping = attachment.mapping if attachment is not None else None
        self._streamed: list[Bytes] = []
        if self._attachment is not None:
            self._attachment.start_write()

    def __enter__(self) -> WriteLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write_from(self, sources: Sequence[Bytes]) -> None:
        """Copy sources[i] for each i of `indices`.

        Args:
            sources: One (block bytes,) uint8 array for each asked hash. Without shared memory
                they must not change before commit().
        """
        attachment, answer = self._attachment, self._answer
        if attachment is None or attachment.lost.is_set():
            return
        if not attachment.mapped:
            self._streamed = [sources[index] for index in answer.indices]
            return
        mapping = self._mapping
        if mapping is None:
            return  # Lost before the lease was here.
        extents = [mapping.data[at : at + answer.block_bytes] for at in answer.offsets]
        copy_blocks(extents, [sources[index] for index in answer.indices])

    def write_with(self, fill: Fill) -> None:
        """Let `fill` write each block of `indices`, in their order.

        For engines whose blocks are not one array each: every byte is still copied once.
        """
        attachment, answer = self._attachment, self._answer
        if attachment is None or attachment.lost.is_set():
            return
        if not attachment.mapped:
            self._streamed = [np.empty(answer.block_bytes, dtype=np.uint8) for _ in answer.indices]
            extents: Sequence[Bytes] = self._streamed
        elif self._mapping is not None:
            data = self._mapping.data
            extents = [data[at : at + answer.block_bytes] for at in answer.offsets]
        else:
            return  # Lost before the lease was here.
        for index, extent in zip(answer.indices, extents, strict=True):
            fill(index, extent)

    def commit(self) -> bool:
        """Make the blocks visible, all or none; False if they are not."""
        attachment, self._attachment, self._mapping = self._attachment, None, None
        if attachment is None:
            return not self._answer.reason and not self._answer.lease_id
        committed = False
        try:
            with self._calls.failing_open():
                if attachment.mapped:
                    request = pb.CommitRequest(
                        session_id=attachment.session_id, lease_id=self._answer.lease_id
                    )
                    call = attachment.stub.Commit
                    self._calls.call(attachment, call, request, self._calls.timeout_s)
                else:
                    self._store(attachment)
                committed = True
        finally:
            attachment.end_write()
            if not committed:
                self._abort_later(attachment)
        return committed

    def commit_later(self) -> None:
        """Like commit(), without waiting for the answer: visible in a moment, or never."""
        attachment = self._attachment
        if attachment is None or not attachment.mapped:
            self.commit()  # Streamed blocks have not even been sent.
            return
        self._attachment, self._mapping = None, None
        attachment.end_write()
        request = pb.CommitRequest(session_id=attachment.session_id, lease_id=self._answer.lease_id)
        with self._calls.failing_open():
            self._calls.send(attachment, attachment.stub.Commit, request)

    def abort(self) -> None:
        """Give the room back; our copies have stopped. Idempotent, harmless after commit()."""
        attachment, self._attachment, self._mapping = self._attachment, None, None
        if attachment is None:
            return
        attachment.end_write()
        if attachment.lost.is_set():
            return
        aborted = False
        with self._calls.failing_open():
            try:
                request = abort_request(attachment, self._answer)
                self._calls.call(attachment, attachment.stub.Abort, request, self._calls.timeout_s)
                aborted = True
            finally:
                if not aborted:
                    self._abort_later(attachment)

    def _abort_later(self, attachment: Attachment) -> None:
        """Else the extents would wait for this whole process to be gone."""
        attachment.settle_later(attachment.stub.Abort, abort_request(attachment, self._answer))

    def _store(self, attachment: Attachment) -> None:
        def chunks() -> Iterator[pb.StoreChunk]:
            yield pb.StoreChunk(session_id=attachment.session_id, lease_id=self._answer.lease_id)
            for source in self._streamed:
                for at in range(0, source.size, CHUNK_BYTES):
                    yield pb.StoreChunk(data=source[at : at + CHUNK_BYTES].tobytes())

        self._calls.call(attachment, attachment.stub.Store, chunks(), READ_TIMEOUT_S)


def abort_request(attachment: Attachment, answer: pb.ReserveResponse) -> pb.AbortRequest:
    """What gives back the room of a write lease."""
    return pb.AbortRequest(session_id=attachment.session_id, lease_id=answer.lease_id)
