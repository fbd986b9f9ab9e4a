"""vLLM's OpenAI server with the connector: two requests, and what it says about them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.process import DaemonProcess
from tests.e2e.support import eventually
from tests.engines.conftest import Reference
from tests.engines.vllm_engine import (
    MAX_TOKENS,
    ROOT,
    START_TIMEOUT_S,
    TINY_MLA,
    Prompt,
    connector,
    environment,
)

Text = Callable[[int, int], Prompt]


def free_port() -> int:
    """A port that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def server(daemon: DaemonProcess, log: Path) -> Iterator[str]:
    """Its URL; engine and server are processes of their own, as in production."""
    port = free_port()
    arguments = {
        "model": TINY_MLA,
        "served-model-name": "tiny-mla",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 1024,
        "max-num-seqs": 4,
        "kv-cache-memory-bytes": 64 << 20,
        "attention-config": json.dumps({"backend": "CPU_MLA"}),
        "compilation-config": json.dumps({"custom_ops": ["all", "-rotary_embedding"]}),
        "kv-transfer-config": json.dumps(connector(daemon.address)),
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    flags += ["--enforce-eager", "--enable-prompt-tokens-details"]
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: healthy(url, process, log), "the server answers", START_TIMEOUT_S)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether it answers yet."""
    assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def complete(url: str, prompt: Prompt) -> dict[str, Any]:
    """POST /v1/completions."""
    body = {
        "model": "tiny-mla",
        "prompt": list(prompt.ids),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def metric(url: str, name: str) -> float:
    """A counter of /metrics, over all its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}_total\S* (\S+)$", text, re.M))


def test_two_requests(
    daemon: DaemonProcess, tmp_path: Path, reference: Reference, text: Text
) -> None:
    """The second one hits, says so in its usage, and both have the right tokens."""
    prompt = text(0, 200)
    reference.prepare(TINY_MLA)
    with server(daemon, tmp_path / "server.log") as url:
        answers = [complete(url, prompt) for _ in range(2)]
        right = reference(TINY_MLA, prompt)
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [right, right]
        details = [answer["usage"]["prompt_tokens_details"] or {} for answer in answers]
        assert [each.get("cached_tokens") or 0 for each in details] == [0, 192]
        assert metric(url, "external_prefix_cache_hits") == 192
        assert metric(url, "kvtier_loaded_host_blocks") == 3
        assert metric(url, "kvtier_stored_blocks") == 3
