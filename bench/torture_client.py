"""A client of bench.torture, in a process of its own: stores, drops and reads what it can check.

    python -m bench.torture_client NAME ADDRESS JOURNAL SLOTS --seed SEED [--evicts]

Takes JSON commands on standard input, one a line, and answers each with Findings on standard output
(`done` in the last of an answer; what is wrong is told at once, for this process may be killed):

    ["fill"]        store until the SSD evicts
    ["verify"]      after a restart: all that is owed must come back, nothing that was dropped may
    ["work", PID, EVENT]
                    store, flush, read and drop at random until ["stop"]; with a PID, kill that
                    process as soon as the daemon has acknowledged an EVENT (durable, dropped)

A block's bytes are a function of its hash and of how often it was dropped, so bytes that were
dropped before a restart are as wrong as any others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.torture_journal import Event, Journal, Slot
from kvtier.client import Client
from kvtier.client.calls import Missed
from kvtier.codec.base import Bytes
from kvtier.types import BlockHash, Component, MissReason, NamespaceSpec

BLOCK_BYTES = (4096, 40_016, 300_000, 1_000_000)
"""Of the namespaces: smaller than a page and larger, most of them not whole pages."""
MAX_BLOCKS = (12, 12, 5, 2)
"""The longest prompt of each."""

PATIENCE_S = 20.0
RESIGNED_S = 2.0
"""Patience once a block was lost: what is lost now does not come either."""
FILL_S = 60.0
FLUSH_S = 5.0
RETRY_S = 0.02
T = TypeVar("T")


@dataclass(slots=True)
class Findings:
    """What a client did and saw since it last told.

    Attributes:
        wrong_bytes: Bytes that came and should not.
        lost_durable: Blocks that were owed and did not come.
        checked_blocks: Blocks whose bytes were compared.
        stored_blocks: Blocks offered.
        durable_blocks: Blocks acknowledged as durable.
        evicted_blocks: What this boot's daemon has evicted from the SSD.
        notes: What was wrong, in words.
        done: The command is over.
    """

    wrong_bytes: int = 0
    lost_durable: int = 0
    checked_blocks: int = 0
    stored_blocks: int = 0
    durable_blocks: int = 0
    evicted_blocks: int = 0
    notes: list[str] = field(default_factory=list)
    done: bool = False


@lru_cache(maxsize=256)
def prompt(namespace: str, slot: int, serial: int) -> tuple[BlockHash, ...]:
    """Block hashes of the longest prompt of a slot."""
    hashes = []
    parent = f"{namespace}/{slot}/{serial}".encode()
    for _ in range(max(MAX_BLOCKS)):
        parent = hashlib.sha256(parent).digest()
        hashes.append(BlockHash(parent))
    return tuple(hashes)


def content(key: BlockHash, drops: int, size_bytes: int) -> Bytes:
    """(size_bytes,) uint8: the only right bytes of a block. Every second one can be compressed."""
    seed = int.from_bytes(key[:8], "little") + drops
    data = np.frombuffer(np.random.Generator(np.random.PCG64(seed)).bytes(size_bytes), np.uint8)
    return data & np.uint8(0x0F) if key[-1] % 2 else data


class TortureClient:
    """The prompts of one client, and what may be said of them."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Client],
        journal: Journal,
        rng: random.Random,
        *,
        evicts: bool,
    ) -> None:
        """Make no client yet; verify() does.

        Args:
            name: Of this client; its prompts are nobody else's.
            connect: Makes clients that raise where a call fails.
            journal: What is known of the prompts.
            rng: Of every choice.
            evicts: Only what was stored since the last verify() is owed.
        """
        self.findings = Findings()
        self._connect = connect
        self._journal = journal
        self._rng = rng
        self._evicts = evicts
        self._client: Client | None = None
        self._name = name
        self._patience_s = PATIENCE_S
        self._kill: tuple[int, Event] | None = None
        self._specs = [
            NamespaceSpec(
                "torture",
                "revision",
                (Component("latent_rope", "uint8", (1, 16, size_bytes // 16)),),
                block_tokens=16,
                tenant=f"{name}/{number}",
            )
            for number, size_bytes in enumerate(BLOCK_BYTES)
        ]

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()

    def tell(self, *, done: bool) -> None:
        """Send the findings, and start anew."""
        self.findings.done = done
        sys.stdout.write(json.dumps(asdict(self.findings)) + "\n")
        sys.stdout.flush()
        self.findings = Findings()

    # Commands

    def fill(self) -> None:
        """Store until the SSD evicts; nothing of it is owed."""
        self._attach()
        deadline_s = time.monotonic() + FILL_S
        while not self.findings.evicted_blocks and time.monotonic() < deadline_s:
            for namespace, number in self._places():
                self._store(namespace, number)
                self._flush(namespace, number)
            self._journal.append(Event.RELEASE)
            self._note_evictions()

    def verify(self) -> None:
        """Check every slot. A call that fails is tried again: only a miss says anything."""
        self._kill = None  # That process is gone, and its number may be another's.
        self._attach()
        deadline_s = time.monotonic() + self._patience_s
        for drop in list(self._journal.pending_drops()):
            self._patiently(partial(self._drop, *drop), deadline_s)
        for namespace, number in self._places():
            slot = self._slot(namespace, number)
            while True:
                got = self._patiently(partial(self._read, namespace, number), deadline_s)
                if got >= slot.durable or time.monotonic() > deadline_s:
                    break
                time.sleep(RETRY_S)  # A read that was late, RAM that was full.
            if got < slot.durable:
                self.findings.lost_durable += slot.durable - got
                self._patience_s = RESIGNED_S
                self._say(namespace, number, f"{got} of {slot.durable} durable blocks came")
        if self._evicts:
            self._journal.append(Event.RELEASE)

    def work(self, stop: queue.SimpleQueue[object]) -> None:
        """Until told to stop. After a call that failed there is nothing left to do.

        Raises:
            SystemExit: the daemon lives and finds a call wrong: that is no miss.
        """
        try:
            while stop.empty():
                self._act()
            self._note_evictions()
        except Missed as error:
            if error.reason is MissReason.RPC_ERROR and self._answers():
                raise SystemExit(f"client {self._name}: a call was refused: {error}") from error

    def kill_after(self, pid: int, event: Event) -> None:
        """Once such an event is acknowledged, kill this process before anything else."""
        self._kill = (pid, event)

    def _act(self) -> None:
        namespace, number = self._rng.choice(self._places())
        slot = self._slot(namespace, number)
        action = self._rng.choices(
            ("store", "store and flush", "read", "flush", "drop", "drop all", "pause"),
            (15, 30, 35, 5, 8, 2, 5),
        )[0]
        if action == "pause":
            self._note_evictions()
            time.sleep(self._rng.uniform(0, 0.2))  # Idle time is for writing.
        elif slot.dropping or (slot.released and action == "flush"):
            pass  # Nothing can be said of it; it may be evicted, whatever Flush answers.
        elif action == "read":
            got = self._read(namespace, number)
            # After a miss that is the last block: a tail that nobody knows is harmless.
            self._daemon.finish(self._specs[namespace], self._hashes(namespace, number)[got - 1])
        elif action == "drop":
            self._journal.append(Event.DROP, namespace, number)
            self._drop(Event.DROP, namespace, number)
        elif action == "drop all":
            self._journal.append(Event.DROP_ALL, namespace)
            self._drop(Event.DROP_ALL, namespace, number)
        else:
            if action != "flush":
                self._store(namespace, number)
            if action != "store":
                self._flush(namespace, number)

    # What it does to a slot

    def _store(self, namespace: int, number: int) -> None:
        """Offer the first blocks of the slot's prompt, or of a new one if this may be gone."""
        if self._evicts and self._slot(namespace, number).released:
            self._journal.append(Event.RENEW, namespace, number)
        blocks = self._rng.randint(1, MAX_BLOCKS[namespace])
        self._journal.append(Event.STORE, namespace, number, blocks)
        spec, slot = self._specs[namespace], self._slot(namespace, number)
        hashes = self._hashes(namespace, number)[:blocks]
        sources = [content(key, slot.drops, spec.block_bytes) for key in hashes]
        self._daemon.put(spec, None, hashes, sources, wait_s=1.0)
        self.findings.stored_blocks += blocks

    def _flush(self, namespace: int, number: int) -> None:
        """Have made durable what is there: the rest of it was refused, or lost with RAM."""
        spec, slot = self._specs[namespace], self._slot(namespace, number)
        hashes = self._hashes(namespace, number)[: slot.blocks]
        found = self._daemon.lookup(spec, hashes).num_blocks if hashes else 0
        flags = self._daemon.flush(spec, hashes[:found], timeout_s=FLUSH_S)
        durable = [*flags, False].index(False)
        if durable > slot.durable:
            self._acknowledged(Event.DURABLE)
            self.findings.durable_blocks += durable - slot.durable
            self._journal.append(Event.DURABLE, namespace, number, durable)

    def _read(self, namespace: int, number: int) -> int:
        """Get whatever comes of the slot's prompt and compare it; the number of blocks."""
        spec, slot = self._specs[namespace], self._slot(namespace, number)
        hashes = self._hashes(namespace, number)
        destinations = [np.full(spec.block_bytes, 0xA5, dtype=np.uint8) for _ in hashes]
        got = self._daemon.get(spec, hashes, destinations).num_blocks
        for index in range(got):
            if index >= slot.blocks:
                wrong_bytes = spec.block_bytes  # Nobody stored it, or not since it was dropped.
            else:
                right = content(hashes[index], slot.drops, spec.block_bytes)
                wrong_bytes = int(np.count_nonzero(destinations[index] != right))
            if wrong_bytes:
                self.findings.wrong_bytes += wrong_bytes
                self._say(namespace, number, f"block {index} has {wrong_bytes} wrong bytes")
        self.findings.checked_blocks += got
        return got

    def _drop(self, event: Event, namespace: int, number: int) -> None:
        spec = self._specs[namespace]
        if event is Event.DROP_ALL:
            self._daemon.drop_namespace(spec)
            self._acknowledged(Event.DROPPED)
            self._journal.append(Event.DROPPED_ALL, namespace)
        else:
            self._daemon.drop(spec, self._hashes(namespace, number))
            self._acknowledged(Event.DROPPED)
            self._journal.append(Event.DROPPED, namespace, number)

    def _acknowledged(self, event: Event) -> None:
        """Kill the daemon at this very moment, if that was asked for."""
        if self._kill is not None and self._kill[1] is event:
            os.kill(self._kill[0], signal.SIGKILL)
            self._kill = None

    # Inside

    @property
    def _daemon(self) -> Client:
        assert self._client is not None
        return self._client

    def _answers(self) -> bool:
        try:
            self._daemon.stats()
        except Missed:
            return False
        return True

    def _attach(self) -> None:
        """To the new boot: with another client, or with the one whose daemon was killed."""
        if self._client is not None and self._rng.random() < 0.75:
            self._client.close()
            self._client = None
        if self._client is None:
            self._client = self._connect()
        if not self._client.wait_attached(PATIENCE_S):
            raise SystemExit(f"client {self._name}: no session after {PATIENCE_S} s")

    def _patiently(self, call: Callable[[], T], deadline_s: float) -> T:
        """Call until it does not fail, or the time is up."""
        while True:
            try:
                return call()
            except Missed as error:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"client {self._name}: the daemon fails: {error}") from error
                time.sleep(RETRY_S)

    def _slot(self, namespace: int, number: int) -> Slot:
        return self._journal.slots[namespace][number]

    def _places(self) -> list[tuple[int, int]]:
        """(namespace, slot) of all slots."""
        return [(n, s) for n, slots in enumerate(self._journal.slots) for s in range(len(slots))]

    def _hashes(self, namespace: int, number: int) -> Sequence[BlockHash]:
        serial = self._slot(namespace, number).serial
        return prompt(self._specs[namespace].tenant, number, serial)[: MAX_BLOCKS[namespace]]

    def _note_evictions(self) -> None:
        evicted = int(self._daemon.stats().counters["ssd_evicted_blocks"])
        self.findings.evicted_blocks = evicted

    def _say(self, namespace: int, number: int, what: str) -> None:
        slot = self._slot(namespace, number)
        where = f"client {self._name}, {BLOCK_BYTES[namespace]} B blocks, slot {number}"
        self.findings.notes.append(f"{where}: {what} ({slot})")
        self.tell(done=False)


def read_commands(commands: queue.SimpleQueue[object]) -> None:
    """Queue what comes on standard input; None at its end."""
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)


def main() -> None:
    """Run commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("address")
    parser.add_argument("journal", type=Path)
    parser.add_argument("slots", type=int)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--evicts", action="store_true")
    arguments = parser.parse_args()
    commands: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    with Journal(arguments.journal, len(BLOCK_BYTES), arguments.slots) as journal:
        client = TortureClient(
            arguments.name,
            partial(Client, arguments.address, raise_errors=True, acquire_timeout_s=5.0),
            journal,
            random.Random(arguments.seed),
            evicts=arguments.evicts,
        )
        while True:
            match commands.get():
                case ["fill"]:
                    client.fill()
                case ["verify"]:
                    client.verify()
                case ["work"]:
                    client.work(commands)
                case ["work", int() as pid, str() as event]:
                    client.kill_after(pid, Event(event))
                    client.work(commands)
                case ["stop"]:
                    continue  # Of the work before.
                case _:
                    break
            client.tell(done=True)
        client.close()


if __name__ == "__main__":
    main()
