"""A subscriber of KV events, as a router has one: a picture of what a daemon holds, by medium.

It follows the numbers, and asks for a replay where it sees a gap. It insists that every event
changes its picture, so that one that counts references would be right, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import zmq

from tests.e2e.support import PATIENCE_S

END = 2**64 - 1


class Change(NamedTuple):
    """One event: its type, medium and hashes; the latter are empty for AllBlocksCleared."""

    type: str
    medium: str
    hashes: Sequence[bytes]


Decode = Callable[[bytes], Iterable[Change]]


def decode_plainly(batch: bytes) -> Iterable[Change]:
    """A batch without anybody's classes."""
    _, events, rank = msgspec.msgpack.decode(batch)
    assert rank is None
    for event in events:
        if event["type"] == "BlockStored":
            assert event["token_ids"] == []
            assert event["block_size"] > 0
        yield Change(event["type"], event.get("medium", ""), event.get("block_hashes", ()))


class Subscriber:
    """Connected to one daemon's events and replays. Context manager.

    Attributes:
        picture: Medium -> hashes.
        next: Number of the batch that should come next.
        gaps: How often it did not.
        batches: How many batches were taken in.
    """

    def __init__(
        self,
        events: str,
        replays: str,
        *,
        topic: str = "kvtier",
        decode: Decode = decode_plainly,
    ) -> None:
        """Connect to ZeroMQ endpoints; follow() learns what was before."""
        self.picture: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
        self.next = 0
        self.gaps = 0
        self.batches = 0
        self._topic = topic.encode()
        self._decode = decode
        self._context = zmq.Context()
        self._events, self._endpoint = self._context.socket(zmq.SUB), events
        self._events.connect(events)
        self._events.subscribe(self._topic)
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.connect(replays)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def leave(self) -> None:
        """Stop listening; what comes now is missed."""
        self._events.disconnect(self._endpoint)
        while self._events.poll(100):
            self._events.recv_multipart()

    def come_back(self) -> None:
        """Listen again."""
        self._events.connect(self._endpoint)

    def lose(self, batches: int) -> None:
        """Let messages be lost: receive that many and look at none."""
        for _ in range(batches):
            assert self._events.poll(round(PATIENCE_S * 1000))
            self._events.recv_multipart()

    def follow(self, wait_s: float = 0.0) -> None:
        """Take in what has come; waits for a first message as long as `wait_s`."""
        if not self.next:
            self.catch_up()
        while self._events.poll(round(wait_s * 1000)):
            topic, number_bytes, batch = self._events.recv_multipart()
            assert topic == self._topic
            number = int.from_bytes(number_bytes, "big")
            if number > self.next:
                self.gaps += 1
                self.catch_up()
            if number == self.next:
                self._take(number, batch)
            wait_s = 0.0

    def catch_up(self) -> None:
        """Ask for everything from `next` on, and take it in."""
        self._replays.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert self._replays.poll(round(PATIENCE_S * 1000)), "no end of the replay"
            empty, topic, number_bytes, batch = self._replays.recv_multipart()
            number = int.from_bytes(number_bytes, "big")
            assert empty == b""
            if number == END:
                assert (topic, batch) == (b"", b"")
                return
            assert topic == self._topic
            assert number >= self.next, "replays count up"
            self._take(number, batch)

    def _take(self, number: int, batch: bytes) -> None:
        self.next = number + 1
        self.batches += 1
        for change in self._decode(batch):
            self._apply(change)

    def _apply(self, change: Change) -> None:
        if change.type == "AllBlocksCleared":
            for blocks in self.picture.values():
                blocks.clear()
            return
        known, told = self.picture[change.medium], set(change.hashes)
        assert len(told) == len(change.hashes) > 0
        if change.type == "BlockStored":
            assert not told & known, "told twice"
            known |= told
        else:
            assert change.type == "BlockRemoved"
            assert told <= known, "removed what was not there"
            known -= told


def settings(directory: Any, **others: object) -> dict[str, object]:
    """Settings of a daemon that publishes in `directory`."""
    return {
        "kv_events_address": f"unix:{directory}/events",
        "kv_events_replay_address": f"unix:{directory}/replays",
        **others,
    }


def subscribe(directory: Any, **options: Any) -> Subscriber:
    """A subscriber of such a daemon."""
    return Subscriber(f"ipc://{directory}/events", f"ipc://{directory}/replays", **options)
