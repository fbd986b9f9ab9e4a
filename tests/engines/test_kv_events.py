"""vLLM's own event classes and its own publisher, against what the daemon publishes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtier.daemon import kv_events as ours
from kvtier.daemon.kv_event_format import MEDIA, encode
from kvtier.types import Tier
from tests.e2e.kv_churn import Churn, small_daemon
from tests.e2e.kv_subscriber import Change, Subscriber, subscribe
from tests.e2e.support import counter, eventually
from tests.golden.kv_events import GOLDEN, NAMESPACE, WALL_S, key

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # What vLLM still uses of torch is not ours to mend.
    from vllm.distributed import kv_events as theirs

DECODER = msgspec.msgpack.Decoder(type=theirs.KVEventBatch)


def decode(batch: bytes) -> Iterable[Change]:
    """A batch by vLLM's classes alone."""
    for event in DECODER.decode(batch).events:
        if isinstance(event, theirs.BlockStored):
            assert event.token_ids == []
            yield Change("BlockStored", str(event.medium), event.block_hashes)
        elif isinstance(event, theirs.BlockRemoved):
            yield Change("BlockRemoved", str(event.medium), event.block_hashes)
        else:
            assert isinstance(event, theirs.AllBlocksCleared)
            yield Change("AllBlocksCleared", "", ())


def stored(first: int, last: int, parent: int | None, tokens: int, medium: str) -> object:
    return theirs.BlockStored(
        block_hashes=[bytes(key(number)) for number in range(first, last + 1)],
        parent_block_hash=None if parent is None else bytes(key(parent)),
        token_ids=[],
        block_size=tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


EXPECTED = {
    "heartbeat": [],
    "cleared": [theirs.AllBlocksCleared()],
    "first blocks in RAM": [stored(1, 2, None, 64, theirs.MEDIUM_CPU)],
    "a later block on SSD": [stored(3, 3, 2, 16, theirs.MEDIUM_STORAGE)],
    "removed": [theirs.BlockRemoved([bytes(key(3))], theirs.MEDIUM_STORAGE)],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_vllm_reads_what_we_write(name: str) -> None:
    batch = DECODER.decode(GOLDEN[name][1])
    assert batch == theirs.KVEventBatch(ts=WALL_S, events=EXPECTED[name])


@pytest.mark.parametrize("name", GOLDEN)
def test_vllm_writes_the_same_but_for_the_namespace(name: str) -> None:
    batch = theirs.KVEventBatch(ts=WALL_S, events=EXPECTED[name])
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    mine = msgspec.msgpack.decode(encode(GOLDEN[name][0], WALL_S))
    for event in mine[1]:
        if event["type"] != "AllBlocksCleared":
            assert event.pop("namespace") == NAMESPACE
    assert mine == written


def test_media_are_named_as_vllm_names_them() -> None:
    assert MEDIA == {Tier.HOST: theirs.MEDIUM_CPU, Tier.SSD: theirs.MEDIUM_STORAGE}


def test_messages_are_those_of_vllms_publisher(tmp_path: Path) -> None:
    """Frame by frame: what a subscriber gets live, and as a replay."""
    publisher = theirs.ZmqEventPublisher(
        0,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replays",
        topic="kvtier",
    )
    try:
        with Subscriber(
            f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays", decode=decode
        ) as subscriber:
            deadline_s = time.monotonic() + 20
            while not subscriber.picture["CPU"]:
                assert time.monotonic() < deadline_s
                event = stored(1, 2, None, 64, theirs.MEDIUM_CPU)
                batch = [theirs.AllBlocksCleared(), event]
                publisher.publish(theirs.KVEventBatch(ts=WALL_S, events=batch))
                subscriber.follow(0.2)
            assert subscriber.picture["CPU"] == {key(1), key(2)}
    finally:
        publisher.shutdown()
    assert theirs.ZmqEventPublisher.END_SEQ == ours.END


@pytest.fixture
def churn(tmp_path: Path) -> Iterator[Churn]:
    with small_daemon(tmp_path) as daemon, Churn(daemon, seed=5) as churn:
        yield churn


def test_vllms_classes_rebuild_the_daemons_content_after_10000_operations(
    churn: Churn, tmp_path: Path
) -> None:
    """Stored, demoted, loaded, evicted, dropped; one subscriber that keeps up, one that reads
    nothing until the end, and one that came late. A clean restart and a kill in between."""
    with (
        subscribe(tmp_path, decode=decode) as steady,
        subscribe(tmp_path, decode=decode) as slow,
        subscribe(tmp_path, decode=decode) as late,
    ):
        slow.follow()
        for part in range(5):
            for _ in range(20):
                churn.calls(100)
                steady.follow()
            churn.write_all()
            churn.settled()
            churn.check(steady)
            assert len(steady.picture["CPU"]) > 50
            assert len(steady.picture["STORAGE"]) > 50
            if part in (1, 3):
                churn.restart(kill=part == 3)
                churn.check(steady)
        assert counter(churn.client, "host_evicted_blocks") > 100
        assert counter(churn.client, "ssd_evicted_blocks") > 100
        churn.check(slow)
        churn.check(late)

        def equal() -> bool:
            for subscriber in (steady, slow, late):  # The SSD tier may still make room.
                subscriber.follow(0.05)
            return steady.picture == slow.picture == late.picture

        eventually(equal, "all have the same, block by block")
        churn.check(steady)


def test_a_subscriber_that_follows_vllms_example(churn: Churn, tmp_path: Path) -> None:
    """It knows nothing of kvtier: it asks from the number after its last one, takes in higher
    numbers only, and stops as soon as the gap is closed."""
    picture: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
    context = zmq.Context()
    events, replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    events.connect(f"ipc://{tmp_path}/events")
    events.subscribe(b"")
    replays.connect(f"ipc://{tmp_path}/replays")
    last = -1

    def take(batch: bytes) -> None:
        for change in decode(batch):
            if change.type == "AllBlocksCleared":
                picture["CPU"].clear()
                picture["STORAGE"].clear()
            elif change.type == "BlockStored":
                picture[change.medium].update(change.hashes)
            else:
                picture[change.medium].difference_update(change.hashes)

    def listen(wait_ms: int) -> None:
        nonlocal last
        while events.poll(wait_ms):
            _, number_bytes, batch = events.recv_multipart()
            number = int.from_bytes(number_bytes, "big")
            if number > last + 1:
                replays.send_multipart((b"", (last + 1).to_bytes(8, "big")))
                while replays.poll(5_000):
                    _, _, replayed_bytes, replayed = replays.recv_multipart()
                    replayed_number = int.from_bytes(replayed_bytes, "big")
                    if not replayed:
                        break
                    if replayed_number > last:
                        take(replayed)
                        last = replayed_number
            if number > last:
                take(batch)
                last = number

    class Example(Subscriber):
        """Only its picture is asked for."""

        def __init__(self) -> None:
            self.picture = picture

        def follow(self, wait_s: float = 0.0) -> None:
            listen(round(wait_s * 1000))

    try:
        example = Example()
        for kill in (False, True):
            churn.calls(300)
            churn.write_all()
            churn.settled()
            churn.check(example)
            churn.restart(kill=kill)
            churn.check(example)
    finally:
        context.destroy(linger=0)
