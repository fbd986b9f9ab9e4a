"""Lossy stored forms: only for who asked for them, by a real daemon."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.client import Client
from kvtier.codec.base import Bytes
from kvtier.process import DaemonProcess
from kvtier.types import BlockHash, Component, Loss, NamespaceSpec, RopeSpec, Tier
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import chain, counter


def latents_of(tenant: str = "") -> NamespaceSpec:
    """Two layers of DeepSeek's records."""
    components = (Component("latent_rope", "float32", (2, 64, 576)),)
    return NamespaceSpec("deep/model", "r", components, RopeSpec("interleaved", 64), tenant=tenant)


SPEC = latents_of()


def latents(count: int) -> list[Bytes]:
    """Blocks of normal numbers, as normed latents are."""
    random = np.random.default_rng(7)
    blocks = random.standard_normal((count, SPEC.block_bytes // 4)).astype(np.float32)
    return [block.view(np.uint8) for block in blocks]


def floats(blocks: Sequence[Bytes]) -> npt.NDArray[np.float32]:
    return np.stack([block.view(np.float32) for block in blocks])


def got(
    client: Client, spec: NamespaceSpec, hashes: Sequence[BlockHash], allowed: Loss
) -> tuple[list[Bytes], Loss]:
    """What a get copies, and what it says that it lost."""
    room = [np.zeros(spec.block_bytes, dtype=np.uint8) for _ in hashes]
    result = client.get(spec, hashes, room, allowed_loss=allowed)
    return room[: result.num_blocks], result.loss


def stored(client: Client, spec: NamespaceSpec, hashes: Sequence[BlockHash]) -> None:
    assert all(client.flush(spec, hashes, timeout_s=20.0))


def restarted(daemon: DaemonProcess, connect: Connect) -> Client:
    daemon.kill()
    daemon.start()
    return connect(daemon)


def test_lossy_bytes_are_for_who_allows_them(start_daemon: StartDaemon, connect: Connect) -> None:
    daemon = start_daemon(ssd_codec="q6")
    client = connect(daemon)
    hashes, blocks = chain("lossy", 4), latents(4)
    client.put(SPEC, None, hashes, blocks, allowed_loss=Loss.BOUNDED, wait_s=20.0)
    in_ram, loss = got(client, SPEC, hashes, Loss.EXACT)
    assert (len(in_ram), loss) == (4, Loss.EXACT), "RAM holds what the engine delivered"
    assert np.array_equal(floats(in_ram), floats(blocks))
    stored(client, SPEC, hashes)
    assert counter(client, "ssd_written_bytes") < 0.3 * 4 * SPEC.block_bytes

    client = restarted(daemon, connect)
    assert got(client, SPEC, hashes, Loss.EXACT) == ([], Loss.EXACT)
    lossy, loss = got(client, SPEC, hashes, Loss.BOUNDED)
    assert (len(lossy), loss) == (4, Loss.BOUNDED)
    assert not np.array_equal(floats(lossy), floats(blocks))
    error = np.linalg.norm(floats(lossy) - floats(blocks)) / np.linalg.norm(floats(blocks))
    assert error < 0.06
    assert got(client, SPEC, hashes, Loss.EXACT) == ([], Loss.EXACT), "also while RAM has them"

    # A client that wants exact bytes computes them again, and its store replaces the lossy copy.
    assert client.put(SPEC, None, hashes, blocks, wait_s=20.0) == 4
    stored(client, SPEC, hashes)
    client = restarted(daemon, connect)
    for allowed in Loss:
        exact, loss = got(client, SPEC, hashes, allowed)
        assert (len(exact), loss) == (4, Loss.EXACT)
        assert np.array_equal(floats(exact), floats(blocks))


def test_what_was_computed_behind_lossy_blocks_is_lossy(
    start_daemon: StartDaemon, connect: Connect
) -> None:
    """Be it stored in an exact form, and through a restart."""
    daemon = start_daemon(ssd_codec="lossless")
    client = connect(daemon)
    hashes, blocks = chain("behind", 4), latents(4)
    client.put(SPEC, None, hashes[:2], blocks[:2], wait_s=20.0)
    lossy = client.put(SPEC, hashes[1], hashes[2:], blocks[2:], loss=Loss.BOUNDED, wait_s=20.0)
    assert lossy == 2
    for _ in range(2):
        assert len(got(client, SPEC, hashes, Loss.EXACT)[0]) == 2
        both, loss = got(client, SPEC, hashes, Loss.BOUNDED)
        assert (len(both), loss) == (4, Loss.BOUNDED)
        assert np.array_equal(floats(both), floats(blocks))
        assert got(client, SPEC, hashes[:2], Loss.BOUNDED)[1] is Loss.EXACT
        stored(client, SPEC, hashes)
        client = restarted(daemon, connect)


def test_exact_stores_stay_exact_under_a_lossy_codec(
    start_daemon: StartDaemon, connect: Connect
) -> None:
    daemon = start_daemon(ssd_codec="q4")
    client = connect(daemon)
    hashes, blocks = chain("exact", 4), latents(4)
    client.put(SPEC, None, hashes, blocks, wait_s=20.0)
    stored(client, SPEC, hashes)
    client = restarted(daemon, connect)
    assert client.lookup(SPEC, hashes).blocks_by_tier == {Tier.HOST: 0, Tier.SSD: 4}
    exact, _ = got(client, SPEC, hashes, Loss.EXACT)
    assert np.array_equal(floats(exact), floats(blocks))


@pytest.mark.parametrize(("tenant", "most"), [("acme", 0.3), ("other", 1.0)])
def test_a_rule_chooses_the_codec_of_a_namespace(
    start_daemon: StartDaemon, connect: Connect, tenant: str, most: float
) -> None:
    daemon = start_daemon(ssd_codec="raw", ssd_codec_rules="acme:deep/*=q6")
    client = connect(daemon)
    spec, hashes = latents_of(tenant), chain("rule", 4)
    client.put(spec, None, hashes, latents(4), allowed_loss=Loss.BOUNDED, wait_s=20.0)
    stored(client, spec, hashes)
    written = counter(client, "ssd_written_bytes") / (4 * spec.block_bytes)
    assert most - 0.15 < written <= most


def test_what_no_codec_changes_is_exact(start_daemon: StartDaemon, connect: Connect) -> None:
    """Records that an engine has quantised itself: nothing in them is a latent of ours."""
    daemon = start_daemon(ssd_codec="q6")
    client = connect(daemon)
    component = Component("latent_rope", "uint8", (2, 64, 656))
    spec = NamespaceSpec("deep/model", "r", (component,))
    hashes = chain("records", 2)
    blocks = [np.full(spec.block_bytes, number, dtype=np.uint8) for number in (1, 2)]
    client.put(spec, None, hashes, blocks, allowed_loss=Loss.BOUNDED, wait_s=20.0)
    stored(client, spec, hashes)
    client = restarted(daemon, connect)
    found, loss = got(client, spec, hashes, Loss.EXACT)
    assert (len(found), loss) == (2, Loss.EXACT)
    assert all(map(np.array_equal, found, blocks))
