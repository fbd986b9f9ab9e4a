"""What one torture client knows of its prompts, kept so that its own death does not matter either.

A journal is a file of JSON lines [event, namespace, slot, blocks]. A line is on the disk before the
client goes on: before it tries what it names, or once the daemon has acknowledged it.

    store              so many leading blocks of the slot's prompt are about to be stored
    renew              the slot gets another prompt
    durable            Flush said that so many leading blocks are durable
    drop, dropped      the slot's blocks are about to be dropped; Drop answered
    drop_all, dropped_all
                       the same of the whole namespace (the slot means nothing)
    release            nothing is owed any more (namespace and slot mean nothing)
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


class Event(enum.StrEnum):
    """What a line tells."""

    STORE = "store"
    RENEW = "renew"
    DURABLE = "durable"
    DROP = "drop"
    DROPPED = "dropped"
    DROP_ALL = "drop_all"
    DROPPED_ALL = "dropped_all"
    RELEASE = "release"


@dataclass(slots=True)
class Slot:
    """A place for one prompt of a namespace.

    Attributes:
        serial: Prompts it had before this one.
        drops: How often this prompt was dropped; its bytes depend on it.
        blocks: Leading blocks that may be cached: at most so many were stored since the last drop.
        durable: Leading blocks that must be cached.
        dropping: A drop was sent, and no answer has come: nothing can be said of the prompt.
        released: It was stored before the last release: it may be evicted.
    """

    serial: int = 0
    drops: int = 0
    blocks: int = 0
    durable: int = 0
    dropping: bool = False
    released: bool = False

    def start_drop(self) -> None:
        """Of this prompt or of its namespace."""
        self.dropping, self.durable = True, 0

    def end_drop(self) -> None:
        """It was acknowledged."""
        self.dropping, self.released = False, False
        self.blocks = self.durable = 0
        self.drops += 1


class Journal:
    """Slots, and the file from which they come back. Context manager: closes the file.

    Attributes:
        slots: By namespace and slot.
    """

    def __init__(self, path: Path, namespaces: int, slots: int) -> None:
        """Open the file, or create it, and apply what is in it."""
        self.slots = [[Slot() for _ in range(slots)] for _ in range(namespaces)]
        self._dropping_all: set[int] = set()
        if path.exists():
            for line in path.read_text().splitlines():
                event, *numbers = json.loads(line)
                self._apply(Event(event), *numbers)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def append(self, event: Event, namespace: int = 0, slot: int = 0, blocks: int = 0) -> None:
        """Note an event; it is on the disk when this returns."""
        line = json.dumps([event, namespace, slot, blocks]) + "\n"
        os.write(self._descriptor, line.encode())
        os.fdatasync(self._descriptor)
        self._apply(event, namespace, slot, blocks)

    def pending_drops(self) -> Iterator[tuple[Event, int, int]]:
        """(DROP or DROP_ALL, namespace, slot) of the drops that must be tried again."""
        for namespace in sorted(self._dropping_all):
            yield Event.DROP_ALL, namespace, 0
        for namespace, slots in enumerate(self.slots):
            if namespace not in self._dropping_all:
                for number, slot in enumerate(slots):
                    if slot.dropping:
                        yield Event.DROP, namespace, number

    def _apply(self, event: Event, namespace: int, number: int, blocks: int) -> None:
        slot = self.slots[namespace][number]
        match event:
            case Event.STORE:
                slot.blocks = max(slot.blocks, blocks)
            case Event.RENEW:
                self.slots[namespace][number] = Slot(serial=slot.serial + 1)
            case Event.DURABLE:
                slot.durable = max(slot.durable, blocks)
            case Event.DROP:
                slot.start_drop()
            case Event.DROPPED:
                slot.end_drop()
            case Event.DROP_ALL:
                self._dropping_all.add(namespace)
                for slot in self.slots[namespace]:
                    slot.start_drop()
            case Event.DROPPED_ALL:
                self._dropping_all.discard(namespace)
                for slot in self.slots[namespace]:
                    slot.end_drop()
            case Event.RELEASE:
                self._release()

    def _release(self) -> None:
        for slots in self.slots:
            for slot in slots:
                slot.durable, slot.released = 0, slot.blocks > 0
