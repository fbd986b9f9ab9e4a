"""`kvtier footprint --stored` of a real daemon: two ratios, each from its own bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvtier.cli import main
from kvtier.codec import codec_by_name
from kvtier.footprint.sizes import load_latents
from kvtier.process import DaemonProcess
from kvtier.types import Component, NamespaceSpec, RopeSpec
from tests.e2e.conftest import Connect, StartDaemon
from tests.e2e.support import chain, eventually, get_checked, put, spec_of

Output = pytest.CaptureFixture[str]
LATENTS = load_latents()
SPEC = NamespaceSpec(
    "tiny-mla",
    "revision",
    (Component("latent_rope", "bfloat16", LATENTS.shape[1:]),),
    RopeSpec("interleaved", 64),
)
BLOCKS = [np.ascontiguousarray(latents).reshape(-1).view(np.uint8) for latents in LATENTS]


@pytest.fixture
def ask(capsys: Output) -> Any:
    """What --stored --json says of a daemon."""

    def asked(daemon: DaemonProcess) -> dict[str, Any]:
        capsys.readouterr()
        assert main.run(["footprint", "--stored", "--json", "--address", daemon.address]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert set(answer) == {"stored"}
        return dict(answer["stored"])

    return asked


def test_codec_and_end_to_end_ratio_are_kept_apart(
    daemon: DaemonProcess,
    connect: Connect,
    ask: Any,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests of the same prompt, a restart, a drop."""
    client, hashes = connect(daemon), chain("shared", len(BLOCKS))
    empty = ask(daemon)
    assert (empty["codec_ratio"], empty["end_to_end_ratio"]) == (None, None)

    client.put(SPEC, None, hashes, BLOCKS)
    assert all(client.flush(SPEC, hashes, timeout_s=20.0))
    block_bytes = sum(block.size for block in BLOCKS)
    lossless = codec_by_name("lossless")
    stored_bytes = sum(lossless.encode(block, SPEC).size for block in BLOCKS)
    first = ask(daemon)
    assert first["ssd_stored_bytes"] == first["ssd_written_bytes"] == stored_bytes
    assert first["ssd_block_bytes"] == first["logical_bytes"] == block_bytes
    assert first["codec_ratio"] == first["end_to_end_ratio"] == stored_bytes / block_bytes

    # The same prompt again takes nothing more: only the end-to-end ratio halves.
    got = client.get(SPEC, hashes, [np.empty_like(block) for block in BLOCKS])
    assert got.num_blocks == len(BLOCKS)
    second = ask(daemon)
    assert second["codec_ratio"] == stored_bytes / block_bytes
    assert second["end_to_end_ratio"] == stored_bytes / (2 * block_bytes)
    # And so it does where Reserve finds the blocks there.
    client.put(SPEC, None, hashes, BLOCKS)
    assert ask(daemon)["logical_bytes"] == 3 * block_bytes

    # What is on the SSD outlives the daemon; what requests would have taken is counted anew.
    daemon.kill()
    daemon.start()
    client = connect(daemon)
    warm = ask(daemon)
    assert warm["codec_ratio"] == stored_bytes / block_bytes
    assert (warm["logical_bytes"], warm["end_to_end_ratio"]) == (0, None)

    # What is read after that was written before: no ratio, instead of one of zero.
    client.get(SPEC, hashes, [np.empty_like(block) for block in BLOCKS])
    assert ask(daemon)["logical_bytes"] == block_bytes
    assert ask(daemon)["end_to_end_ratio"] is None
    monkeypatch.setenv("COLUMNS", "200")  # Wide: cells in one line.
    assert main.run(["footprint", "--stored", "--address", daemon.address]) == 0
    assert "nothing written since the start" in capsys.readouterr().out

    client.drop(SPEC, hashes[1:])
    eventually(lambda: ask(daemon)["ssd_block_bytes"] == BLOCKS[0].size, "a block is gone")
    client.drop(SPEC, hashes[:1])
    eventually(lambda: ask(daemon)["codec_ratio"] is None, "all are gone")


def test_blocks_that_were_not_worth_a_write_count_end_to_end_only(
    start_daemon: StartDaemon, connect: Connect, ask: Any
) -> None:
    """Admission: with second_touch the first use of a block writes nothing."""
    daemon = start_daemon(ssd_write_policy="second_touch")
    client, spec = connect(daemon), spec_of()
    used_once, used_twice = chain("once", 6), chain("twice", 2)
    put(client, spec, used_once)
    put(client, spec, used_twice)
    assert get_checked(client, spec, used_twice) == 2
    eventually(lambda: ask(daemon)["ssd_block_bytes"] == 2 * spec.block_bytes, "two are written")
    found = ask(daemon)
    assert found["codec_ratio"] == 1.0, "random bytes do not shrink"
    assert found["logical_bytes"] == 10 * spec.block_bytes
    assert found["end_to_end_ratio"] == 0.2


def test_in_words_and_without_an_ssd(start_daemon: StartDaemon, capsys: Output) -> None:
    daemon = start_daemon(ssd_directories="")
    arguments = ["footprint", "--stored", "--address", daemon.address]
    assert main.run(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("nothing yet") == 2
    assert "mla_bf16" not in text
    assert main.run([*arguments, "--model", "v3"]) == 0
    text = capsys.readouterr().out
    assert "mla_bf16" in text
    assert "end to end" in text
