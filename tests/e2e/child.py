"""Clients in processes of their own, as Child (support.py) starts them.

A role prints JSON lines and waits for lines on standard input. What it prints last is what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.client import Client
from kvtier.types import GroupId
from tests.e2e.support import (
    BLOCK_BYTES,
    PausingSequence,
    chain,
    content,
    contents,
    get_checked,
    put,
    spec_of,
)


def say(value: object) -> None:
    """One line to the test."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def listen() -> Any:
    """One line from the test."""
    return json.loads(sys.stdin.readline())


def pause() -> None:
    """In the middle of a copy."""
    say("midway")
    listen()


def attached(address: str, **options: Any) -> Client:
    """A client with a session."""
    client = Client(address, acquire_timeout_s=5.0, **options)
    assert client.wait_attached(20.0)
    return client


def sees(client: Client) -> dict[str, int]:
    """Its misses by reason."""
    return {str(reason): count for reason, count in client.misses.items()}


def put_and_get(address: str, *, store: str, load: str, count: int) -> None:
    """Store one prompt and read another."""
    with attached(address) as client:
        say(put(client, spec_of(), chain(store, count)))
        listen()
        say(get_checked(client, spec_of(), chain(load, count)))


def write(address: str, *, name: str, count: int, pause_at: int, ttl_s: float = 0.0) -> None:
    """Stop in the middle of writing; afterwards say whether it was committed, and go on living.

    The second half of what it writes is not the block's bytes, so that any of it in another's
    block is seen.
    """
    with attached(address) as client:
        hashes = chain(name, count)
        lease = client.reserve(spec_of(), None, hashes, ttl_s=ttl_s, wait_s=5.0)
        poison = [np.full(BLOCK_BYTES, 0xEE, dtype=np.uint8) for _ in hashes]
        lease.write_from(PausingSequence(poison, pause_at, pause))
        committed = lease.commit()
        say({"committed": committed, "misses": sees(client)})
        listen()
        client.wait_attached(20.0)
        say({"stored": put(client, spec_of(), chain(name + " again", count), wait_s=5.0)})
        listen()


def read(address: str, *, name: str, count: int, pause_at: int, ttl_s: float = 0.0) -> None:
    """Stop in the middle of reading; afterwards say how much came and how much of it is right."""
    with attached(address) as client:
        hashes = chain(name, count)
        destinations = [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in hashes]
        lease = client.acquire(spec_of(), hashes, ttl_s=ttl_s)
        got = lease.read_into(PausingSequence(destinations, pause_at, pause))
        lease.release()
        right = sum(
            np.array_equal(destinations[at], content(key)) for at, key in enumerate(hashes[:got])
        )
        say({"granted": lease.num_blocks, "got": got, "right": right, "misses": sees(client)})
        listen()
        client.wait_attached(20.0)
        say({"got": get_checked(client, spec_of(), hashes)})
        listen()


def killed_over_and_over(address: str, *, times: int) -> None:
    """Processes that attach, lease, write, pin nothing away and are killed in the middle of it."""
    for number in range(times):
        ready, done = os.pipe()
        process = os.fork()
        if not process:
            client = attached(address)
            spec, hashes = spec_of(), chain("shared", 4)
            put(client, spec, hashes)
            held = [client.acquire(spec, hashes), client.acquire(spec, hashes[:2])]
            writing = client.reserve(spec, None, chain(f"half {number}", 8))
            writing.write_from(contents(chain(f"half {number}", 8)))
            os.write(done, b"." if held[0].num_blocks == 4 and len(writing.indices) == 8 else b"!")
            signal.pause()
        os.close(done)
        answer = os.read(ready, 1)
        os.close(ready)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        say(answer.decode())


def group_member(address: str, *, group: str) -> None:
    """Another process of an engine: reads what the scheduler leased, then ends it."""
    with attached(address, owner_group=GroupId(bytes.fromhex(group))) as client:
        say("attached")
        listen()
        say(client.attached)


def left_open(address: str) -> None:
    """Ends without closing its client."""
    client = attached(address)
    say(put(client, spec_of(), chain("left open", 2)))


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role
    for role in (put_and_get, write, read, killed_over_and_over, group_member, left_open)
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](sys.argv[2], **json.loads(sys.argv[3]))
