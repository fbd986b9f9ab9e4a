"""The publisher of KV events: bytes, numbers, replays, and subscribers that misbehave.

Real sockets and the real events of an index; only what the blocks hold is made up.
"""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvtier.config import Settings, load
from kvtier.daemon import kv_events
from kvtier.daemon.kv_event_format import encode
from kvtier.daemon.kv_events import KvEventPublisher, RecentBatches
from kvtier.errors import AddressInUse, ConfigError
from kvtier.events import ResidencyEvents
from kvtier.extents import Extent
from kvtier.index import Block, BlockIndex, HostCopy, HostState
from kvtier.metrics import Counters
from kvtier.types import BlockHash, Loss, Tier
from tests.e2e.kv_subscriber import Subscriber
from tests.golden.kv_events import GOLDEN, WALL_S
from tests.sim.world import digest_of, spec_of

SPEC = spec_of(4096)


def key(number: int) -> BlockHash:
    """The name of a block of Source's."""
    return BlockHash(number.to_bytes(32, "big"))


class Source:
    """A daemon reduced to its events: blocks come and go as a test says."""

    def __init__(self, directory: Path, **settings: object) -> None:
        values = {
            "address": f"unix:{directory}/kvtier",
            "kv_events_address": f"unix:{directory}/events",
            "kv_events_replay_address": f"unix:{directory}/replays",
            **settings,
        }
        self.settings = Settings.model_validate(values)
        self.counters = Counters()
        self.index = BlockIndex()
        self.namespace = self.index.open(digest_of(SPEC), SPEC)
        self.events = ResidencyEvents(self.index, 1 << 17, self.counters)
        self.directory = directory

    def put(self, *numbers: int) -> None:
        """Blocks come to RAM."""
        for number in numbers:
            block = self._block(number)
            block.host = HostCopy(block, Extent(0, 4096), HostState.READY, Loss.EXACT)
            self.events.changed(block, Tier.HOST)

    def drop(self, *numbers: int) -> None:
        """Blocks leave it."""
        for number in numbers:
            block = self._block(number)
            block.host = None
            self.events.changed(block, Tier.HOST)

    def flood(self, publisher: KvEventPublisher, batches: int) -> None:
        """Publish so many batches of 200 blocks at once; all of them are there in the end."""
        for _ in range(batches // 2):
            self.drop(*range(200))
            publisher._publish(self.events.take(300))
            self.put(*range(200))
            publisher._publish(self.events.take(300))

    def _block(self, number: int) -> Block:
        known = self.namespace.blocks.get(key(number))
        return known or self.index.add(self.namespace, key(number), None, 0)

    @asynccontextmanager
    async def published(self) -> AsyncIterator[KvEventPublisher]:
        """The publisher at work."""
        publisher = KvEventPublisher(self.settings, self.events, self.counters)
        tasks = [asyncio.create_task(publisher.publish()), asyncio.create_task(publisher.replay())]
        try:
            yield publisher
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            publisher.close()
            assert all(isinstance(result, asyncio.CancelledError) for result in results), results

    def subscribe(self) -> Subscriber:
        """A subscriber of it."""
        return Subscriber(f"ipc://{self.directory}/events", f"ipc://{self.directory}/replays")

    async def told(self) -> None:
        """Wait until nothing waits to be told."""
        for _ in range(2_000):
            if not self.events.waiting:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still not told")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


async def follow(subscriber: Subscriber, *numbers: int) -> None:
    """The subscriber comes to have exactly these blocks."""
    wanted = {key(number) for number in numbers}
    async with asyncio.timeout(20):
        while True:
            await asyncio.to_thread(subscriber.follow, 0.05)
            if subscriber.picture["CPU"] == wanted:
                return


class TestFormat:
    @pytest.mark.parametrize("name", GOLDEN)
    def test_golden_bytes(self, name: str) -> None:
        events, expected = GOLDEN[name]
        assert encode(events, WALL_S) == expected


class TestRecentBatches:
    def test_numbers_go_up_by_one(self) -> None:
        recent = RecentBatches(100, 1 << 20)
        assert [recent.add(b"a"), recent.add(b"b"), recent.add(b"c")] == [100, 101, 102]
        assert (recent.first, recent.next) == (100, 103)
        assert [recent.get(number) for number in range(99, 104)] == [None, b"a", b"b", b"c", None]

    def test_the_oldest_go_first_and_one_always_stays(self) -> None:
        recent = RecentBatches(7, 1_000)
        for number in range(7, 20):
            assert recent.add(bytes([number]) * 300) == number
            assert recent.get(number) == bytes([number]) * 300
        assert (recent.first, recent.next) == (18, 20)
        assert recent.get(17) is None
        recent.add(bytes(5_000))
        assert (recent.first, recent.next) == (20, 21)
        assert recent.get(20) == bytes(5_000)


class TestSettings:
    def test_off_by_default(self) -> None:
        assert Settings().kv_events_address == ""

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            ({"kv_events_replay_address": "tcp:127.0.0.1:1"}, "no use without"),
            ({"kv_events_address": "ipc:///somewhere"}, "neither unix:"),
            ({"kv_events_address": "tcp:nowhere"}, "is not <host>:<port>"),
            ({"kv_events_address": "unix:/k", "kv_events_replay_address": "unix:/k"}, "differ"),
            ({"kv_events_address": "unix:/k", "address": "unix:/k"}, "differ"),
            ({"kv_events_buffer_bytes": "1KiB"}, "at least 1MiB"),
            ({"kv_events_topic": "x" * 256}, "255"),
        ],
    )
    def test_refused(self, flags: dict[str, str], says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            load(flags)


class TestListening:
    def test_a_socket_file_is_its_owners(self, source: Source) -> None:
        publisher = KvEventPublisher(source.settings, source.events, source.counters)
        modes = [
            stat.S_IMODE((source.directory / name).stat().st_mode) for name in ("events", "replays")
        ]
        publisher.close()
        assert modes == [0o600, 0o600]

    def test_a_live_daemons_socket_is_not_taken(self, source: Source) -> None:
        publisher = KvEventPublisher(source.settings, source.events, source.counters)
        with pytest.raises(AddressInUse, match="a live daemon answers"):
            KvEventPublisher(source.settings, source.events, source.counters)
        publisher.close()

    def test_a_file_is_not_removed(self, source: Source) -> None:
        (source.directory / "replays").write_text("precious")
        with pytest.raises(AddressInUse, match="not a socket"):
            KvEventPublisher(source.settings, source.events, source.counters)
        assert (source.directory / "replays").read_text() == "precious"

    def test_a_dead_daemons_socket_is(self, source: Source) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(source.directory / "events"))
        KvEventPublisher(source.settings, source.events, source.counters).close()

    def test_a_taken_port(self, tmp_path: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
            source = Source(tmp_path, kv_events_address=address)
            with pytest.raises(AddressInUse, match=r"kv_events_address .*choose another"):
                KvEventPublisher(source.settings, source.events, source.counters)

    def test_an_address_of_another_machine(self, tmp_path: Path) -> None:
        source = Source(tmp_path, kv_events_address="tcp:192.0.2.1:5557")
        with pytest.raises(ConfigError, match="an IP address of this machine"):
            KvEventPublisher(source.settings, source.events, source.counters)

    async def test_over_tcp(self, tmp_path: Path) -> None:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in (probe, other)]
        events, replays = (f"127.0.0.1:{port}" for port in ports)
        source = Source(
            tmp_path,
            kv_events_address=f"tcp:{events}",
            kv_events_replay_address=f"tcp:{replays}",
            kv_events_topic="kv@here@model",
        )
        async with source.published():
            source.put(1, 2)
            with Subscriber(
                f"tcp://{events}", f"tcp://{replays}", topic="kv@here@model"
            ) as subscriber:
                await follow(subscriber, 1, 2)


class TestFollowing:
    async def test_from_the_start(self, source: Source) -> None:
        async with source.published():
            with source.subscribe() as subscriber:
                await follow(subscriber)
                source.put(1, 2, 3)
                await follow(subscriber, 1, 2, 3)
                source.drop(2)
                await follow(subscriber, 1, 3)
                assert subscriber.gaps == 0
        assert source.counters.kv_event_pictures == 0
        assert source.counters.kv_event_blocks == 4

    async def test_the_end_clears_everything(self, source: Source) -> None:
        with source.subscribe() as subscriber:
            async with source.published():
                source.put(1)
                await follow(subscriber, 1)
            await asyncio.to_thread(subscriber.follow, 20.0)
            assert not subscriber.picture["CPU"]

    async def test_a_restart_is_a_gap(self, source: Source) -> None:
        with source.subscribe() as subscriber:
            async with source.published():
                source.put(1, 2)
                await follow(subscriber, 1, 2)
            again = Source(source.directory)
            async with again.published():
                again.put(3)
                subscriber.gaps = 0
                await follow(subscriber, 3)
                assert subscriber.gaps == 1

    async def test_a_heartbeat_shows_what_was_lost_last(
        self, source: Source, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_events, "HEARTBEAT_S", 0.1)
        async with source.published():
            with source.subscribe() as subscriber:
                await follow(subscriber)
                source.put(1)
                await source.told()
                await asyncio.to_thread(subscriber.lose, 1)
                await follow(subscriber, 1)

    async def test_a_subscriber_of_before_a_clock_went_back(self, source: Source) -> None:
        async with source.published():
            source.put(1)
            await source.told()
            with source.subscribe() as subscriber:
                subscriber.next = 1 << 62
                monotonic = subscriber.next
                subscriber._replays.send_multipart((b"", monotonic.to_bytes(8, "big")))
                await asyncio.to_thread(subscriber._replays.poll, 20_000)
                _, _, number, _ = subscriber._replays.recv_multipart()
                assert int.from_bytes(number, "big") < monotonic, "it begins anew"


class TestSlowSubscribers:
    async def test_drops_are_replayed_and_hold_up_nobody(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One reads nothing while thousands of batches come; the other follows all the time."""
        monkeypatch.setattr(kv_events, "QUEUE_BATCHES", 10)
        source = Source(tmp_path, kv_events_buffer_bytes=4 << 20)
        async with source.published() as publisher:
            with source.subscribe() as slow, source.subscribe() as quick:
                await follow(slow)
                for _ in range(80):
                    source.flood(publisher, 40)
                    await follow(quick, *range(200))
                source.put(200)
                await follow(quick, *range(201))
                await follow(slow, *range(201))
                assert slow.gaps > 0, "its queue was short"
                assert slow.batches < 1_600, "it missed more than is kept"
                assert slow.next >= quick.next
        assert source.counters.kv_event_pictures > 0

    async def test_who_does_not_fetch_a_replay_is_given_up(
        self, source: Source, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_events, "QUEUE_BATCHES", 10)
        monkeypatch.setattr(kv_events, "ANSWER_S", 0.2)
        async with source.published() as publisher, AsyncExitStack() as stack:
            source.flood(publisher, 4_000)
            dead = stack.enter_context(zmq.Context()).socket(zmq.DEALER)
            stack.callback(dead.close, linger=0)
            dead.set(zmq.RCVHWM, 1)
            dead.connect(f"ipc://{source.directory}/replays")
            dead.send_multipart((b"", bytes(8)))
            await asyncio.to_thread(dead.poll, 20_000)  # Its answer is under way.
            quick = stack.enter_context(source.subscribe())
            await follow(quick, *range(200))
            assert source.counters.kv_event_replays == 2

    async def test_nonsense_is_not_answered(self, source: Source) -> None:
        async with source.published():
            with source.subscribe() as subscriber:
                for frames in ((b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"")):
                    subscriber._replays.send_multipart(frames)
                source.put(1)
                await follow(subscriber, 1)
        assert source.counters.kv_event_replays == 1


class TestPictures:
    @pytest.fixture
    def small(self, tmp_path: Path) -> Source:
        return Source(tmp_path, kv_events_buffer_bytes=1 << 20)

    async def test_numbers_stay_below_those_that_follow(self, small: Source) -> None:
        """A vLLM subscriber takes in what has a higher number than the last, and stops at a gap."""
        async with small.published() as publisher:
            small.put(*range(1_000, 11_000))
            await small.told()
            small.flood(publisher, 2)
            assert publisher._recent.first > publisher._born
            kept = publisher._recent.next - publisher._recent.first
            assert kept * kv_events.BATCH_BLOCKS < 10_000, "fewer numbers than full batches"
            missed = publisher._recent.first - 1  # Only the newest of what is gone.
            with small.subscribe() as subscriber:
                subscriber.next = missed
                await asyncio.to_thread(subscriber.catch_up)
                assert small.counters.kv_event_pictures == 1
                assert subscriber.next == publisher._recent.next
                small.put(200)
                await follow(subscriber, *range(201), *range(1_000, 11_000))
                assert subscriber.gaps == 0

    async def test_a_newcomer_gets_one(self, small: Source) -> None:
        async with small.published() as publisher:
            small.put(1, 2)
            for _ in range(10_000):
                publisher._publish([])
            assert publisher._recent.first > publisher._born
            with small.subscribe() as subscriber:
                await follow(subscriber, 1, 2)
        assert small.counters.kv_event_pictures == 1
        assert small.counters.kv_event_replays == 1
