"""Clients that share one daemon: same bytes for all, leases that know their owner, full tiers."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kvtier.client import Client
from kvtier.process import DaemonProcess
from kvtier.types import Component, GroupId, MissReason, NamespaceSpec, Tier
from kvtier.v1 import cache_pb2 as pb
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import (
    BLOCK_BYTES,
    Child,
    Content,
    Raw,
    chain,
    content,
    contents,
    counter,
    eventually,
    get_checked,
    put,
    spec_of,
    used_bytes,
)

SPEC = spec_of()


def test_two_processes_share_a_prefix(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    assert client.mapped
    with Child("put_and_get", daemon.address, store="theirs", load="ours", count=8) as child:
        assert child.line() == 8
        assert put(client, SPEC, chain("ours", 8)) == 8
        child.say()
        assert child.line() == 8
        assert get_checked(client, SPEC, chain("theirs", 12)) == 8


def test_equal_blocks_are_stored_once(daemon: DaemonProcess, connect: Connect) -> None:
    """By two clients at once, one of which fails midway (user report 7)."""
    one, two = connect(daemon), connect(daemon)
    hashes = chain("same", 8)
    failing = one.reserve(SPEC, None, hashes)
    assert list(failing.indices) == list(range(8))
    assert put(two, SPEC, hashes) == 8, "they are being written by somebody"
    assert get_checked(two, SPEC, hashes) == 0
    failing.abort()
    assert put(two, SPEC, hashes) == 8
    assert get_checked(one, SPEC, hashes) == 8
    assert used_bytes(one) == 8 * BLOCK_BYTES


def test_a_block_of_several_components(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 10: a latent without its indexer key is not visible; with it, both are right."""
    writer, reader = connect(daemon), connect(daemon)
    latent = Component("latent_rope", "uint8", (4, 16, 576))
    indexer = Component("indexer_key", "uint8", (4, 16, 128))
    spec = NamespaceSpec("e2e", "two components", (latent, indexer), block_tokens=16)
    hashes = chain("indexed", 3)
    whole = contents(hashes, spec.block_bytes)
    half = writer.reserve(spec, None, hashes)
    half.write_with(lambda index, block: write_first(latent.size_bytes, whole[index], block))
    assert reader.lookup(spec, hashes).num_blocks == 0, "the indexer keys are missing"
    half.abort()
    assert get_checked(reader, spec, hashes) == 0, "its writer gave up between the components"
    assert put(writer, spec, hashes) == 3
    assert get_checked(reader, spec, hashes) == 3


def write_first(size_bytes: int, source: Content, block: Content) -> None:
    """The first so many bytes of a block."""
    block[:size_bytes] = source[:size_bytes]


def test_a_write_lease_skips_what_is_present(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    hashes = chain("grows", 12)
    put(client, SPEC, hashes[:4])
    with client.reserve(SPEC, None, hashes) as lease:
        assert list(lease.indices) == list(range(4, 12))
        assert lease.covered_blocks == 12
        lease.write_from(contents(hashes))
        assert lease.commit()
    assert get_checked(client, SPEC, hashes) == 12


def test_all_leased_is_full_at_once(daemon: DaemonProcess, connect: Connect) -> None:
    """Neither call waits for a lease of somebody else to end (user report 18)."""
    client, other = connect(daemon), connect(daemon)
    capacity = (32 << 20) // BLOCK_BYTES
    hashes = chain("all", capacity)
    assert put(client, SPEC, hashes) == capacity
    with client.acquire(SPEC, hashes) as lease:
        assert lease.num_blocks == capacity
        more = chain("more", 4)
        refused = other.reserve(SPEC, None, more)
        assert list(refused.indices) == []
        assert refused.covered_blocks == 0
        assert not refused.commit()
        assert other.misses[MissReason.FULL] == 1
        assert get_checked(other, SPEC, hashes) == capacity
    assert put(other, SPEC, more, wait_s=10.0) == 4
    assert get_checked(other, SPEC, more) == 4


def test_acquire_from_ssd_is_full_at_once(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    capacity = (32 << 20) // BLOCK_BYTES
    cold, hot = chain("cold", 8), chain("hot", capacity)
    put(client, SPEC, cold)
    assert all(client.flush(SPEC, cold, timeout_s=20.0))
    assert put(client, SPEC, hot, wait_s=20.0) == capacity
    assert client.lookup(SPEC, cold).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 8}
    with client.acquire(SPEC, hot), client.acquire(SPEC, cold) as lease:
        assert lease.num_blocks == 0
        assert client.misses[MissReason.FULL] == 1
    eventually(lambda: get_checked(client, SPEC, cold) == 8, "what is in the way gets written")


def test_two_large_prompts_share_what_there_is(daemon: DaemonProcess, connect: Connect) -> None:
    """Each is two thirds of the RAM, all on the SSD; both get a prefix, nobody waits for ever."""
    client = connect(daemon)
    count = (32 << 20) // BLOCK_BYTES * 2 // 3
    prompts = [chain("left", count), chain("right", count)]
    for hashes in prompts:
        assert put(client, SPEC, hashes, wait_s=20.0) == count
        assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    got = [0, 0]
    start = threading.Barrier(2)

    def load(at: int) -> None:
        reader = connect(daemon)
        start.wait()
        for _ in range(5):
            got[at] = max(got[at], get_checked(reader, SPEC, prompts[at]))

    threads = [threading.Thread(target=load, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert all(got), got
    eventually(lambda: client.stats().pinned_bytes == 0, "no lease is left")


def test_eight_readers_and_an_eviction(daemon: DaemonProcess, connect: Connect) -> None:
    """The first reader finishes, then RAM is needed: seven still read right bytes (report 9)."""
    client = connect(daemon)
    hashes = chain("popular", 16)
    put(client, SPEC, hashes)
    leases = [client.acquire(SPEC, hashes) for _ in range(8)]
    leases[0].release()
    for number in range(3):
        put(client, SPEC, chain(f"pressure {number}", 400), wait_s=20.0)
    for lease in leases[1:]:
        destinations = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in hashes]
        assert lease.read_into(destinations) == 16
        assert all(np.array_equal(d, content(k)) for d, k in zip(destinations, hashes, strict=True))
        lease.release()
    eventually(lambda: client.stats().pinned_bytes == 0, "no lease is left")


def test_streamed_bytes_are_the_same(daemon: DaemonProcess, connect: Connect) -> None:
    """A client without shared memory, both directions, from RAM and from the SSD."""
    spec = spec_of(3 << 19)  # A block and a half of what a chunk carries.
    mapped, streamed = connect(daemon), connect(daemon, shared_memory=False)
    assert not streamed.mapped
    ours, theirs = chain("mapped", 4), chain("streamed", 4)
    assert put(mapped, spec, ours) == 4
    assert put(streamed, spec, theirs) == 4
    assert get_checked(streamed, spec, [*ours, *chain("x", 1)]) == 4
    assert get_checked(mapped, spec, theirs) == 4
    for hashes in (ours, theirs):
        assert all(mapped.flush(spec, hashes, timeout_s=20.0))
    put(mapped, spec, chain("pressure", 20), wait_s=20.0)
    assert all(mapped.flush(spec, chain("pressure", 20), timeout_s=20.0))
    assert streamed.lookup(spec, ours).blocks_by_tier[Tier.SSD] == 4
    assert get_checked(streamed, spec, ours) == 4
    assert get_checked(streamed, spec, theirs) == 4
    assert counter(mapped, "ssd_hit_blocks") > 0


def test_a_group_ends_with_its_last_member(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    hashes = chain("grouped", 4)
    put(client, SPEC, hashes)
    group = os.urandom(16)
    with Child("group_member", daemon.address, group=group.hex()) as member:
        member.expect("attached")
        with Client(daemon.address, owner_group=GroupId(group)) as scheduler:
            lease = scheduler.acquire(SPEC, hashes)
            assert lease.num_blocks == 4
        eventually(lambda: client.stats().sessions == 2, "the scheduler's session is over")
        assert client.stats().read_leases == 1, "the group lives in the other process"
        member.kill()
        eventually(lambda: client.stats().read_leases == 0, "the group's leases end")
    assert client.stats().pinned_bytes == 0


def test_a_worker_uses_what_the_scheduler_leased(daemon: DaemonProcess, connect: Connect) -> None:
    """One session of a group acquires and reserves, another commits and releases."""
    client = connect(daemon)
    put(client, SPEC, chain("scheduled", 4))
    with Raw(daemon.address) as scheduler, Raw(daemon.address, scheduler.group) as worker:
        digest = scheduler.open(SPEC)
        granted = scheduler.stub.Acquire(
            pb.AcquireRequest(
                session_id=scheduler.session_id,
                namespace=digest,
                hashes=b"".join(chain("scheduled", 4)),
            )
        )
        room = scheduler.stub.Reserve(
            pb.ReserveRequest(
                session_id=scheduler.session_id,
                namespace=digest,
                hashes=b"".join(chain("by a worker", 1)),
            )
        )
        worker.stub.Store(
            iter(
                [
                    pb.StoreChunk(
                        session_id=worker.session_id,
                        lease_id=room.lease_id,
                        data=content(chain("by a worker", 1)[0]).tobytes(),
                    )
                ]
            )
        )
        worker.stub.Release(
            pb.ReleaseRequest(session_id=worker.session_id, lease_id=granted.lease_id)
        )
        assert client.stats().read_leases == 0
        assert client.stats().write_leases == 0
    assert get_checked(client, SPEC, chain("by a worker", 1)) == 1


def test_tenants_share_nothing(daemon: DaemonProcess, connect: Connect) -> None:
    """Equal hashes in two namespaces are two blocks (user reports 2 and 4)."""
    client = connect(daemon)
    hashes = chain("secret", 4)
    put(client, spec_of(tenant="a"), hashes)
    assert get_checked(client, spec_of(tenant="b"), hashes) == 0
    assert get_checked(client, spec_of(), hashes) == 0
    assert get_checked(client, spec_of(tenant="a"), hashes) == 4


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_equal_hashes_of_two_namespaces_are_two_blocks_on_every_tier(
    start_daemon: StartDaemon, connect: Connect, codec: str
) -> None:
    """User report 4. Some engines' hashes cover tokens only: ranks and models have equal ones."""
    daemon = start_daemon(ssd_codec=codec)
    client = connect(daemon)
    hashes = chain("tokens", 6)
    specs = [spec_of(tenant="a"), spec_of(tenant="b"), spec_of(2 * BLOCK_BYTES)]
    blocks = {
        spec: [np.full(spec.block_bytes, 16 * n + m, dtype=np.uint8) for m in range(6)]
        for n, spec in enumerate(specs)
    }
    for spec in specs:  # In one batch, as far as the writer is concerned.
        assert client.put(spec, None, hashes, blocks[spec], wait_s=20.0) == 6
    for spec in specs:
        assert client.flush(spec, hashes, timeout_s=20.0) == [True] * 6
    for _ in range(2):
        daemon.kill()
        daemon.start()
        client = connect(daemon)
        for spec in specs:
            room = [np.zeros(spec.block_bytes, dtype=np.uint8) for _ in hashes]
            found = client.get(spec, hashes, room)
            assert found.blocks_by_tier == {Tier.HOST: 0, Tier.SSD: len(blocks[spec])}
            assert all(map(np.array_equal, room, blocks[spec]))
        assert client.drop(specs[1], hashes) == len(blocks[specs[1]])
        blocks[specs[1]] = []


@pytest.mark.parametrize("kill", [False, True], ids=["running", "killed"])
def test_a_dropped_namespace_stays_dropped(
    daemon: DaemonProcess, connect: Connect, kill: bool
) -> None:
    client = connect(daemon)
    hashes = chain("old weights", 8)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    put(client, SPEC, hashes + chain("only in RAM", 8))
    assert client.drop_namespace(SPEC).num_blocks >= 8
    assert get_checked(client, SPEC, hashes) == 0
    if kill:
        daemon.kill()
        daemon.start()
        client = connect(daemon)
        assert get_checked(client, SPEC, hashes) == 0
    assert put(client, SPEC, hashes) == 8
    assert get_checked(client, SPEC, hashes) == 8


def test_dropped_blocks_are_gone(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon)
    hashes = chain("dropped", 8)
    put(client, SPEC, hashes)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    assert client.drop(SPEC, hashes[4:]) == 4
    daemon.kill()
    daemon.start()
    assert get_checked(connect(daemon), SPEC, hashes) == 4


def test_a_pin_outlives_its_session(start_daemon: StartDaemon, connect: Connect) -> None:
    daemon = start_daemon(ssd=False)
    client = connect(daemon)
    hashes = chain("system prompt", 4)
    put(client, SPEC, hashes)
    with Client(daemon.address) as pinning:
        pin_id, blocks = pinning.pin(SPEC, hashes, ttl_s=600.0)
    assert blocks == 4
    for number in range(3):
        put(client, SPEC, chain(f"pressure {number}", 400))
    assert get_checked(client, SPEC, hashes) == 4
    client.unpin(pin_id)
    client.unpin(pin_id)
    assert client.stats().pins == 0
    put(client, SPEC, chain("pressure", 512))
    assert get_checked(client, SPEC, hashes) == 0


def test_lookups_pin_nothing(daemon: DaemonProcess, connect: Connect) -> None:
    """User report 19."""
    client = connect(daemon)
    hashes = chain("looked up", 16)
    put(client, SPEC, hashes)
    for _ in range(1000):
        assert client.lookup(SPEC, hashes).num_blocks == 16
    assert client.stats().pinned_bytes == 0
