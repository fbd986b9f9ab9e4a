"""kill -9 a daemon again and again while clients store, flush, drop and read; count the damage.

    python -m bench.torture --kills N [--seed S] [--directory DIR] [--json]

Real daemons (durability `full`), clients in processes of their own. A client notes in a journal on
the disk what it is about to do and what the daemon has acknowledged (torture_journal.py); after
each restart it compares every byte of what it is owed, and sees that nothing dropped comes back
(torture_client.py). The daemon is killed at work, at the very moment when it has acknowledged a
block as durable or a drop, while it starts and while it drains; now and then a client is killed,
too. There are two runs:

    keeping     what is stored stays below a third of the capacity, so the store has no reason to
                evict: every block that Flush acknowledged and nobody dropped is owed
    evicting    the SSD is full: owed is what Flush acknowledged since the last restart, less than a
                third of the capacity and the newest there is, so that eviction must not take it

    wrong_bytes     bytes that came and were not those last stored under this hash
    lost_durable    blocks that were owed and did not come
    leaked_files    what is left after a clean stop beside the log and the store's own files, and
                    descriptors that the last daemon gained while clients worked
    over_cap        looks at an SSD directory (its `du`, every few milliseconds) that found more
                    than the capacity

Ends with 1 if one of these is not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.common import DuSampler, report, scratch_directory, ssd_settings
from bench.torture_client import Findings
from kvtier.errors import KvtierError
from kvtier.process import DaemonProcess

FAULTS = ("wrong_bytes", "lost_durable", "leaked_files", "over_cap", "tracebacks")
CLIENTS = 3
ANSWER_S = 90.0
SETTLE_S = 5.0
START_KILLS = 0.25
"""How often a restart is killed while it starts."""
CLIENT_KILLS = 0.1
STORE_FILES = re.compile(r"kvtier\.(lock|boot)|env-\d+(/(data|lock)\.mdb)?")
"""What a store that was never damaged has in its directory after a clean close."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One of the two runs.

    Attributes:
        name: For people.
        share: Of the kills.
        directories: SSD directories.
        capacity_bytes: Of each of them.
        codec: Stored form.
        slots: Prompts that a client has in each of its namespaces.
        evicts: Whether the SSD is full.
    """

    name: str
    share: float
    directories: int
    capacity_bytes: int
    codec: str
    slots: int
    evicts: bool


SCENARIOS = (
    Scenario("keeping", 0.6, 2, 160 << 20, "lossless", slots=5, evicts=False),
    Scenario("evicting", 0.4, 1, 128 << 20, "raw", slots=2, evicts=True),
)


class ClientProcess:
    """bench.torture_client as a child that can be killed."""

    def __init__(self, name: str, address: str, journal: Path, scenario: Scenario, seed: str):
        self._name = name
        self._seed = seed
        self._starts = 0
        self._command = [
            *(sys.executable, "-m", "bench.torture_client", name, address, str(journal)),
            *(str(scenario.slots), *(["--evicts"] if scenario.evicts else [])),
        ]
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self._process = subprocess.Popen(
            [*self._command, "--seed", f"{self._seed}/{self._starts}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},  # It tells of every lost daemon.
        )

    def say(self, *command: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")

    def answer(self) -> list[Findings]:
        """What it tells until the command is over.

        Raises:
            KvtierError: it ended, or did not answer in ANSWER_S.
        """
        assert self._process.stdout is not None
        told: list[Findings] = []
        patience = threading.Timer(ANSWER_S, self._process.kill)
        patience.start()
        try:
            while not told or not told[-1].done:
                line = self._process.stdout.readline()
                if not line:
                    raise KvtierError(f"client {self._name} ended, or hung for {ANSWER_S} s")
                told.append(Findings(**json.loads(line)))
        finally:
            patience.cancel()
            patience.join()
        return told

    def kill(self) -> list[Findings]:
        """kill -9; what it had told before."""
        self._process.kill()
        assert self._process.stdout is not None
        told = [Findings(**json.loads(line)) for line in self._process.stdout if line[-1] == "\n"]
        self.close()
        return told

    def restart(self) -> list[Findings]:
        """kill -9, and start again from its journal; what it had told before."""
        told = self.kill()
        self._start()
        return told

    def close(self) -> None:
        """End it. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(SETTLE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Run:
    """One scenario: a daemon, its clients, and what was found. Context manager: ends them all.

    Attributes:
        counts: Sums of what the clients told, and what was found from outside.
        notes: What was wrong, in words.
    """

    def __init__(self, scenario: Scenario, directory: Path, seed: int) -> None:
        """`directory` is empty."""
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._scenario = scenario
        self._rng = random.Random(f"{seed}/{scenario.name}")
        self._home = directory / "daemon"
        self._home.mkdir()
        self._stores = [self._home / f"ssd-{number}" for number in range(scenario.directories)]
        self._shm = Path(tempfile.mkdtemp(prefix="kvtier-torture-", dir="/dev/shm"))
        self._arena = self._shm / "arena"
        self._closing = ExitStack()
        self._closing.callback(shutil.rmtree, self._shm)
        try:
            self._du = DuSampler(self._stores, scenario.capacity_bytes)
            self._closing.enter_context(self._du)
            started_s = time.monotonic()
            self._daemon = self._closing.enter_context(self._start_daemon())
            self._start_s = time.monotonic() - started_s
            self._clients = []
            for number in range(CLIENTS):
                client = ClientProcess(
                    str(number),
                    self._daemon.address,
                    directory / f"journal-{number}",
                    scenario,
                    f"{seed}/{scenario.name}/{number}",
                )
                self._clients.append(client)
                self._closing.callback(client.close)
        except BaseException:
            self._closing.close()
            raise

    def _start_daemon(self) -> DaemonProcess:
        return DaemonProcess(
            self._home,
            **ssd_settings(self._stores, self._scenario.capacity_bytes),
            arena_dir=self._arena,
            host_capacity_bytes=32 << 20,
            ssd_codec=self._scenario.codec,
            ssd_durability="full",
            ssd_batch_bytes=2 << 20,
            write_queue_bytes=16 << 20,
            ssd_min_free_bytes=0,  # Others may have filled the disk more than that.
            idle_write_after_s=0.05,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def torture(self, kills: int, advance: Callable[[], None]) -> None:
        """Kill the daemon so many times, check after each restart, and stop it cleanly at last."""
        self._all("verify")
        if self._scenario.evicts:
            self._all("fill")
        done = 0
        while done < kills:
            done += self._count(self._end_boot(), advance)
            while done < kills and self._rng.random() < START_KILLS:
                self._kill_while_starting()
                done += self._count(True, advance)
            self._daemon.start()
            self._all("verify")
        self._look_for_descriptors()
        self._all("verify")
        self._stop()
        self._note_log()
        self.counts["over_cap"] += self._du.over
        if self._du.over:
            self.notes.append(
                f"du of an SSD directory reached {self._du.highest_bytes} bytes, "
                f"the capacity is {self._scenario.capacity_bytes}"
            )
        self.counts["du_samples"] += self._du.samples

    def _count(self, killed: bool, advance: Callable[[], None]) -> int:
        self.counts["kills" if killed else "clean_stops"] += 1
        if killed:
            advance()
        return int(killed)

    # One boot's end

    def _end_boot(self) -> bool:
        """Let the clients work and end the daemon in the middle of it; False if it was not killed:
        it had stopped before."""
        end = self._rng.choices(("work", "durable", "dropped", "drain"), (40, 25, 15, 20))[0]
        pid = self._daemon.pid
        for client in self._clients[1:]:
            client.say("work")
        if end in ("durable", "dropped"):
            self._clients[0].say("work", pid, end)
            wait_for(lambda: has_ended(pid), SETTLE_S)
        else:
            self._clients[0].say("work")
            time.sleep(self._rng.uniform(0.02, 0.8))
        if end == "drain":
            os.kill(pid, signal.SIGTERM)
            time.sleep(self._rng.uniform(0, 0.25))
        stopped = end == "drain" and has_ended(pid)
        if not stopped:
            os.kill(pid, signal.SIGKILL)
        self._stop_clients()
        self._daemon.kill()  # Reaps it; before that its pid is nobody else's.
        if stopped:
            self._look_for_files()
        return not stopped

    def _stop_clients(self) -> None:
        for client in self._clients:
            if self._rng.random() < CLIENT_KILLS:
                self._note(client.restart())
                self.counts["client_kills"] += 1
            else:
                client.say("stop")
                self._note(client.answer())

    def _kill_while_starting(self) -> None:
        timer = threading.Timer(self._rng.uniform(0, 1.3) * self._start_s, self._daemon.kill)
        timer.start()
        with suppress(KvtierError):  # If it can't start at all, the next start says so.
            self._daemon.start()
        timer.join()
        self._daemon.kill()

    # What clients tell

    def _all(self, *command: object) -> None:
        for client in self._clients:
            client.say(*command)
        for client in self._clients:
            self._note(client.answer())

    def _note(self, told: Sequence[Findings]) -> None:
        for findings in told:
            for field in fields(findings):
                value = getattr(findings, field.name)
                if field.name == "notes":
                    self.notes += value
                elif field.name == "evicted_blocks":
                    self.counts[field.name] = max(self.counts[field.name], value)
                elif field.name != "done":
                    self.counts[field.name] += value

    # What is seen from outside

    def _look_for_descriptors(self) -> None:
        """Let the clients work for a second: what has the daemon open then that it had not?"""
        before = open_files(self._daemon.pid)
        for client in self._clients:
            client.say("work")
        time.sleep(1.0)
        for client in self._clients:
            client.say("stop")
            self._note(client.answer())

        def gained() -> Counter[str]:
            now = open_files(self._daemon.pid)
            return Counter({n: c for n, c in (now - before).items() if not self._is_new(n, before)})

        wait_for(lambda: not gained(), SETTLE_S)
        for name, count in gained().items():
            self.counts["leaked_files"] += count
            self.notes.append(f"the daemon has {name} open {count} times more than before the work")

    def _is_new(self, name: str, before: Counter[str]) -> bool:
        """A file of the store that was made meanwhile."""
        return name not in before and name.startswith(str(self._home)) and Path(name).exists()

    def _stop(self) -> None:
        code = self._daemon.stop()
        if code:
            raise KvtierError(f"the daemon ended with {code}:\n{self._daemon.log_tail()}")
        self.counts["clean_stops"] += 1
        self._look_for_files()

    def _look_for_files(self) -> None:
        """After a clean stop."""
        found = leftovers(self._home, self._stores) + [str(p) for p in self._shm.rglob("*")]
        self.counts["leaked_files"] += len(found)
        self.notes += [f"{name} is left after a clean stop" for name in found]

    def _note_log(self) -> None:
        errors = tracebacks((self._home / "kvtier.log").read_text(errors="replace"))
        self.counts["tracebacks"] += errors.total()
        self.notes += [f"{count} tracebacks: {error}" for error, count in errors.most_common(3)]


def tracebacks(log: str) -> Counter[str]:
    """How often a log has a traceback, by the line that ends it."""
    endings: Counter[str] = Counter()
    inside = False
    for line in log.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line[0].isspace():
            endings[line] += 1
            inside = False
    endings["cut off by a kill"] += inside
    return +endings


def leftovers(home: Path, stores: Sequence[Path]) -> list[str]:
    """What a clean stop should not have left in a daemon's home, but for its log and its stores."""
    known = {home / "kvtier.log", *stores}
    for store in stores:
        known |= {p for p in store.rglob("*") if STORE_FILES.fullmatch(str(p.relative_to(store)))}
    return sorted(str(path) for path in home.rglob("*") if path not in known)


def open_files(pid: int) -> Counter[str]:
    """How often a process has what open. Sockets and pipes are one name each; what gRPC polls with
    is left out, for it keeps that for good."""
    names: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if not name.startswith("anon_inode:"):
            names[name.split(":")[0] if name.startswith(("socket:", "pipe:")) else name] += 1
    return names


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it stays to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    """Until it holds, or the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.002)


def torture(
    kills: int, seed: int, directory: Path, console: Console | None = None
) -> tuple[dict[str, int], list[str]]:
    """All scenarios, one after the other.

    Args:
        kills: In all.
        seed: Of every choice; when exactly something is killed is up to the machine.
        directory: An empty one, on the disk to be used.
        console: For the progress bar; None for none.

    Returns:
        Counts by name, and what was wrong in words.

    Raises:
        KvtierError: a daemon did not start or stop, or a client gave up.
    """
    counts = Counter(dict.fromkeys((*FAULTS, "evicted_blocks"), 0))
    notes: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console or Console(quiet=True),
        disable=console is None,
        transient=True,
    ) as bar:
        task = bar.add_task("torture", total=kills)
        for scenario, part in zip(SCENARIOS, parts_of(kills), strict=True):
            bar.update(task, description=scenario.name)
            home = directory / scenario.name
            home.mkdir()
            with Run(scenario, home, seed) as run:
                run.torture(part, lambda: bar.advance(task))
            counts.update(run.counts)
            notes += [f"{scenario.name}: {note}" for note in run.notes]
    return dict(counts), notes


def parts_of(kills: int) -> list[int]:
    """How many of the kills each scenario gets."""
    first = round(kills * SCENARIOS[0].share)
    return [first, kills - first]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="of the daemon")
    parser.add_argument("--seed", type=int, default=0, help="of every choice")
    parser.add_argument("--directory", type=Path, help="where on the SSD; default: temporary files")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    arguments = parser.parse_args()
    if arguments.kills < 1:
        parser.error("--kills must be at least 1")
    console = Console(stderr=True)
    started_s = time.monotonic()
    with scratch_directory(arguments.directory) as directory:
        try:
            counts, notes = torture(arguments.kills, arguments.seed, directory, console)
        except KvtierError as error:
            raise SystemExit(str(error)) from error
    results: dict[str, float] = {**counts, "seconds": time.monotonic() - started_s}
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    report(f"torture, seed {arguments.seed}", results, as_json=arguments.json)
    if any(counts[fault] for fault in FAULTS):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
