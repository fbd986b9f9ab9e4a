"""`kvtier demo`: the main job for real, on a small trained model, in under a minute.

A real daemon with small capacities; source files of the running Python's standard library as long
shared contexts; several questions about each, then follow-ups. Every turn is first answered
without kvtier, and every later phase must generate exactly the same tokens, unless it is lossy:

    cold      the first question about each file: nothing cached
    host      more turns about the same file: its prefix is in RAM
    ssd       all turns again, after other files have pushed theirs out of RAM
    restart   the same after kill -9 of the daemon

With a lossy --ssd-codec the last two read blocks that are not quite what was stored: they tell how
often the engine chose the reference's token instead (top-1 agreement).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from kvtier.client import Client
from kvtier.codec import codec_by_name
from kvtier.codec.base import Codec
from kvtier.errors import ConfigError
from kvtier.hashing import block_hashes, namespace_digest, root_hash
from kvtier.process import DaemonProcess
from kvtier.sizes import rounded_size
from kvtier.types import BlockHash, Loss, NamespaceSpec, Tier

FILES = ("socket.py", "queue.py", "shelve.py", "sched.py", "contextlib.py", "selectors.py")
DOCUMENTS = 4
CONTEXT_TOKENS = 3000
QUESTIONS = (
    "\n\n# Question: which class is the most important one in this file?\nclass ",
    "\n\n# Question: how is this module used?\n>>> import ",
)
FOLLOW_UP = "\n# And one more example, please:\n>>> "
ANSWER_TOKENS = 24
HOST_CAPACITY_BYTES = 80 << 20
SSD_CAPACITY_BYTES = 1 << 30
FLUSH_TIMEOUT_S = 30.0
HOST_SPEEDUP = 8.0
SSD_SPEEDUP = 5.0
LONG_PROMPT_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt, and the answer that every phase must give.

    Attributes:
        document: Which file it is about.
        kind: Which of the turns about that file.
    """

    name: str
    document: int
    kind: int
    prompt: list[int]
    answer: tuple[int, ...]
    text: str
    ttft_s: float
    tokens_per_s: float


@dataclass(slots=True)
class Phase:
    """What a phase served."""

    name: str
    prompt_tokens: int = 0
    cached_tokens: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    long_ttft_s: list[float] = field(default_factory=list)
    reference_ttft_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    differing_turns: list[str] = field(default_factory=list)
    lossy: bool = False
    stored_bytes: int = 0
    block_bytes: int = 0
    agreed: int = 0
    compared: int = 0

    @property
    def top1(self) -> float:
        """How often the engine chose the reference's token, wherever both had the same context."""
        return self.agreed / self.compared if self.compared else 1.0

    @property
    def speedup(self) -> float:
        """Median over the turns of each one's TTFT without kvtier over its TTFT here."""
        pairs = zip(self.reference_ttft_s, self.ttft_s, strict=True)
        return _median([reference / here for reference, here in pairs])

    def add(self, turn: Turn, completion: Any) -> None:
        """Note one answer."""
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens.update(completion.cached_tokens)
        self.ttft_s.append(completion.ttft_s)
        if completion.prompt_tokens >= LONG_PROMPT_TOKENS:
            self.long_ttft_s.append(completion.ttft_s)
        self.reference_ttft_s.append(turn.ttft_s)
        self.tokens_per_s.append(completion.decode_tokens_per_s)
        pairs = list(zip(completion.token_ids, turn.answer, strict=True))
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.agreed += same
        self.compared += min(same + 1, len(pairs))  # Behind a difference the contexts differ, too.
        if same < len(pairs):
            self.differing_turns.append(turn.name)

    def note_stored(self, client: Client) -> None:
        """What the blocks on the SSD take there, and take as the engine delivered them."""
        shards = client.stats().shards
        self.stored_bytes = sum(shard.stored_bytes for shard in shards)
        self.block_bytes = sum(shard.block_bytes for shard in shards)

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "prompts": len(self.ttft_s),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": {t.value: self.cached_tokens[t] for t in (Tier.HOST, Tier.SSD)},
            "ttft_ms": round(1000 * statistics.median(self.ttft_s), 2),
            "speedup_of_turns": round(self.speedup, 2),
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 1),
            "tokens_equal": not self.differing_turns,
            "lossy": self.lossy,
            "top1": round(self.top1, 4),
            "stored_bytes": self.stored_bytes,
            "block_bytes": self.block_bytes,
        }


@dataclass(slots=True)
class Outcome:
    """The whole demo; `spec` is the layout of the engine's blocks."""

    phases: list[Phase]
    hit_rate: dict[str, float]
    ssd: dict[str, float]
    shown: Turn
    ssd_codec: str
    spec: NamespaceSpec

    @property
    def tokens_equal(self) -> bool:
        """Every phase that reads exact bytes generated exactly the reference's tokens."""
        return not any(phase.differing_turns for phase in self.phases if not phase.lossy)

    def speedup(self, name: str) -> float:
        """Median TTFT of long prompts, cold over `name`."""
        by_name = {phase.name: phase for phase in self.phases}
        return _median(by_name["cold"].long_ttft_s) / _median(by_name[name].long_ttft_s)

    def bytes_per_token_layer(self) -> tuple[float, float]:
        """What is on the SSD at the end: stored there, and as the engine delivers it."""
        token_layers = self.spec.block_tokens * self.spec.components[0].shape[0]
        delivered = self.spec.block_bytes / token_layers
        last = self.phases[-1]
        ratio = last.stored_bytes / last.block_bytes if last.block_bytes else float("nan")
        return ratio * delivered, delivered

    def problems(self) -> list[str]:
        """Why the demo failed; empty if all of it holds."""
        found = [
            f"phase {phase.name}: other tokens than the reference in {', '.join(turns)}"
            for phase in self.phases
            if not phase.lossy and (turns := phase.differing_turns)
        ]
        for phase in self.phases:
            tier = {"host": Tier.HOST, "ssd": Tier.SSD, "restart": Tier.SSD}.get(phase.name)
            if tier is not None and phase.cached_tokens[tier] < 0.5 * phase.prompt_tokens:
                found.append(f"phase {phase.name}: less than half of its tokens came from {tier}")
        for name, least in (("host", HOST_SPEEDUP), ("ssd", SSD_SPEEDUP)):
            if self.speedup(name) < least:
                found.append(f"TTFT from {name} is only {self.speedup(name):.1f}x lower than cold")
        return found

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        stored, delivered = self.bytes_per_token_layer()
        return {
            "ok": not self.problems(),
            "tokens_equal": self.tokens_equal,
            "phases": [phase.as_json() for phase in self.phases],
            "speedup": {n: round(self.speedup(n), 1) for n in ("host", "ssd", "restart")},
            "hit_rate": self.hit_rate,
            "ssd": self.ssd,
            "ssd_codec": self.ssd_codec,
            "block_dtype": self.spec.components[0].dtype,
            "bytes_per_token_layer": {
                "stored": round(stored, 1) if self.phases[-1].block_bytes else None,
                "delivered": delivered,
            },
            "problems": self.problems(),
        }


def demo(
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON line.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="An MLA checkpoint directory; default: tiny-mla.")
    ] = None,
    ssd_codec: Annotated[
        str, typer.Option(help="Stored form of blocks on the SSD, as the setting ssd_codec.")
    ] = "lossless",
) -> None:
    """Serve real prompts cold, from RAM, from SSD and after kill -9, and compare every token."""
    codec = codec_by_name(ssd_codec)
    checkpoint = checkpoint or default_checkpoint()
    console = Console(stderr=json_output)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        outcome = Demo(checkpoint, codec, Path(directory), progress).run()
    show(outcome, console)
    if json_output:
        print(json.dumps(outcome.as_json()))
    if outcome.problems():
        raise typer.Exit(1)


def default_checkpoint() -> Path:
    """The checkpoint that the repository carries.

    Raises:
        ConfigError: kvtier runs from somewhere else.
    """
    path = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mla"
    if not (path / "config.json").exists():
        raise ConfigError("no checkpoints/tiny-mla beside kvtier: give one with --checkpoint DIR")
    return path


class Demo:
    """One run: an engine without kvtier, an engine with it, and a daemon."""

    def __init__(self, checkpoint: Path, codec: Codec, directory: Path, progress: Progress) -> None:
        # Daemon and engine share the cores: threads that spin while they wait would starve both.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # Engines need torch; the daemon and every other command do not.
        from engine_adapter.mla import MlaEngine, SamplingParams

        self._engine_class = MlaEngine
        self._params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        self._checkpoint = checkpoint
        self._codec = codec
        self._directory = directory
        self._progress = progress

    def run(self) -> Outcome:
        """All phases."""
        turns = self._reference()
        first = [turn for turn in turns if turn.kind == 0]
        later = [turn for turn in turns if turn.kind > 0]
        # Round robin over more than RAM holds: a file is out of it when its turn comes.
        round_robin = sorted(turns, key=lambda turn: turn.kind)
        reference = Phase("reference")
        for turn in turns:
            reference.prompt_tokens += len(turn.prompt)
            reference.ttft_s.append(turn.ttft_s)
            reference.reference_ttft_s.append(turn.ttft_s)
            reference.tokens_per_s.append(turn.tokens_per_s)
        lossy = self._codec.loss is not Loss.EXACT
        phases = {name: Phase(name) for name in ("cold", "host")}
        phases |= {name: Phase(name, lossy=lossy) for name in ("ssd", "restart")}
        with (
            DaemonProcess(
                self._directory,
                host_capacity_bytes=HOST_CAPACITY_BYTES,
                ssd_capacity_bytes=SSD_CAPACITY_BYTES,
                ssd_codec=self._codec.name,
            ) as daemon,
            Client(daemon.address, name="demo", acquire_timeout_s=1.0) as client,
        ):
            engine = self._engine(client)
            task = self._task("cold and host", len(turns))
            for document in range(DOCUMENTS):
                self._serve(engine, phases["cold"], _about(document, first), task)
                self._serve(engine, phases["host"], _about(document, later), task)
                self._flush(client, engine, _about(document, turns))
            phases["host"].note_stored(client)
            task = self._task("ssd", len(turns))
            self._serve(engine, phases["ssd"], round_robin, task)
            phases["ssd"].note_stored(client)
            stats = [client.stats()]
            daemon.kill()
            daemon.start()
            if not client.wait_attached(10.0):
                raise ConfigError("the client did not attach to the restarted daemon")
            task = self._task("restart", len(turns))
            self._serve(engine, phases["restart"], round_robin, task)
            phases["restart"].note_stored(client)
            stats.append(client.stats())
        counters: Counter[str] = Counter()
        for stat in stats:
            counters.update(dict(stat.counters))
        return Outcome(
            [reference, *phases.values()],
            _hit_rates(counters),
            _ssd_rates(counters),
            turns[0],
            self._codec.name,
            engine.namespace,
        )

    def _engine(self, client: Client | None) -> Any:
        from engine_adapter.mla import PrefixCache

        cache = None
        if client is not None:
            cache = PrefixCache(client, allowed_loss=self._codec.loss)
        engine = self._engine_class(self._checkpoint, prefix_cache=cache)
        engine.generate([[1, 2, 3]], self._params)  # Thread pools and kernels warm up once.
        return engine

    def _reference(self) -> list[Turn]:
        """Answer every turn without kvtier."""
        engine = self._engine(None)
        turns: list[Turn] = []
        contexts = _contexts(engine, self._checkpoint)
        task = self._task("reference", DOCUMENTS * (len(QUESTIONS) + 1))
        for document, (name, context) in enumerate(contexts):
            for kind, question in enumerate((*QUESTIONS, FOLLOW_UP)):
                if question == FOLLOW_UP:  # Goes on where the last answer ended.
                    prompt = [*turns[-1].prompt, *turns[-1].answer]
                    title = f"follow-up on {name}"
                else:
                    prompt = context
                    title = f"question {kind + 1} on {name}"
                prompt = prompt + engine.tokenizer.encode(question)[1:]
                turns.append(self._answer(engine, title, document, kind, prompt))
                self._progress.advance(task)
        return turns

    def _answer(self, engine: Any, name: str, document: int, kind: int, prompt: list[int]) -> Turn:
        [done] = engine.generate([prompt], self._params)
        return Turn(
            name,
            document,
            kind,
            prompt,
            done.token_ids,
            done.text,
            done.ttft_s,
            done.decode_tokens_per_s,
        )

    def _serve(self, engine: Any, phase: Phase, turns: Iterable[Turn], task: TaskID) -> None:
        for turn in turns:
            [completion] = engine.generate([turn.prompt], self._params)
            phase.add(turn, completion)
            self._progress.advance(task)

    def _flush(self, client: Client, engine: Any, turns: Iterable[Turn]) -> None:
        """Make everything the turns stored durable, as an operator would before a restart."""
        spec = engine.namespace
        root = root_hash(namespace_digest(spec))
        for turn in turns:
            hashes: Sequence[BlockHash] = block_hashes(
                root, [*turn.prompt, *turn.answer[:-1]], spec.block_tokens
            )
            if not all(client.flush(spec, hashes, timeout_s=FLUSH_TIMEOUT_S)):
                self._progress.console.print(f"not all of {turn.name} became durable")

    def _task(self, name: str, total: int) -> TaskID:
        if not self._progress.console.is_terminal:  # No bars in a log; a line a phase.
            self._progress.console.print(f"{name}: {total} turns")
        return self._progress.add_task(name, total=total)


def _contexts(engine: Any, checkpoint: Path) -> list[tuple[str, list[int]]]:
    """Long prompts: (file name, tokens) of standard library files that are long enough."""
    room = engine.model_config.max_tokens - 8 * ANSWER_TOKENS - 200
    wanted = min(CONTEXT_TOKENS, room)
    stdlib = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, list[int]]] = []
    for name in [*FILES, *sorted(path.name for path in stdlib.glob("*.py"))]:
        tokens = engine.tokenizer.encode((stdlib / name).read_text(errors="replace"))[:wanted]
        if len(tokens) == wanted and all(name != known for known, _ in found):
            found.append((name, tokens))
        if len(found) == DOCUMENTS:
            return found
    raise ConfigError(f"{stdlib} has too few source files of {wanted} tokens for {checkpoint}")


def _about(document: int, turns: Iterable[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.document == document]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def _hit_rates(counters: Counter[str]) -> dict[str, float]:
    requested = counters["requested_blocks"] or 1
    return {
        tier.value: round(counters[f"{tier.value}_hit_blocks"] / requested, 4)
        for tier in (Tier.HOST, Tier.SSD)
    }


def _ssd_rates(counters: Counter[str]) -> dict[str, float]:
    return {
        f"{verb}_gbps": round(
            counters[f"ssd_{done}_bytes"] / 1e9 / (counters[f"ssd_{verb}_seconds"] or 1e-9), 3
        )
        for verb, done in (("write", "written"), ("read", "read"))
    }


def _answers(phase: Phase) -> str:
    if phase.lossy:
        return f"{phase.top1:.1%} top-1"
    return "differ" if phase.differing_turns else "equal"


def show(outcome: Outcome, console: Console) -> None:
    """The tables and what they mean, for people with 80 columns."""
    console.print(_served(outcome.phases))
    console.print(_answered(outcome.phases))
    for line in _explanations(outcome):
        console.print(f"* {line}", markup=False, highlight=False)
    console.print(f"{outcome.shown.name}, as answered without kvtier:", style="bold")
    console.print(outcome.shown.text, markup=False, highlight=False)
    for problem in outcome.problems():
        console.print(f"FAILED: {problem}", style="red")
    sys.stdout.flush()


def _served(phases: Iterable[Phase]) -> Table:
    table = Table(title="where prompts came from", title_justify="left")
    table.add_column("phase")
    for column in ("prompts", "prompt tokens", "from host", "from SSD", "stored on SSD"):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in phases:
        table.add_row(
            phase.name,
            str(len(phase.ttft_s)),
            f"{phase.prompt_tokens:,}",
            f"{phase.cached_tokens[Tier.HOST]:,}",
            f"{phase.cached_tokens[Tier.SSD]:,}",
            rounded_size(phase.stored_bytes) if phase.stored_bytes else "",
        )
    return table


def _answered(phases: Iterable[Phase]) -> Table:
    table = Table(title="how fast, and whether the answers are the same", title_justify="left")
    table.add_column("phase")
    for column in ("TTFT ms", "speed-up", "tokens/s", "answers' tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in phases:
        table.add_row(
            phase.name,
            f"{1000 * _median(phase.ttft_s):.1f}",
            f"{phase.speedup:.1f}x",
            f"{_median(phase.tokens_per_s):.0f}",
            _answers(phase),
        )
    return table


def _explanations(outcome: Outcome) -> list[str]:
    """What the tables do not say by themselves."""
    long = ", ".join(f"{n} {outcome.speedup(n):.1f}x" for n in ("host", "ssd", "restart"))
    lines = [
        "TTFT and tokens/s: medians. speed-up: of each turn, its TTFT without kvtier (reference)"
        " over its TTFT in the phase; the median of these ratios.",
        f"What must hold: cold's median TTFT over theirs, prompts of {LONG_PROMPT_TOKENS:,} tokens"
        f" and more: {long} (at least {HOST_SPEEDUP:.0f}x from host, {SSD_SPEEDUP:.0f}x from ssd).",
        f"Hit rate: host {outcome.hit_rate['host']:.1%}, SSD {outcome.hit_rate['ssd']:.1%}; SSD"
        f" write {outcome.ssd['write_gbps']:.2f} GB/s, read {outcome.ssd['read_gbps']:.2f} GB/s.",
    ]
    if any(phase.lossy for phase in outcome.phases):
        lines.append(
            f"top-1: how often the engine, behind blocks that went through {outcome.ssd_codec},"
            " chose the token that it chose without kvtier; up to the first other one of an answer."
        )
    last = outcome.phases[-1]
    if not last.block_bytes:
        return [*lines, "Nothing is on the SSD."]
    stored, delivered = outcome.bytes_per_token_layer()
    lines.append(
        f"On the SSD as {outcome.ssd_codec}: {rounded_size(last.stored_bytes)} for"
        f" {rounded_size(last.block_bytes)} of blocks ({last.stored_bytes / last.block_bytes:.3f});"
        f" {stored:,.0f} of {delivered:,.0f} bytes a token and layer. This engine's blocks are"
        f" {outcome.spec.components[0].dtype}; GPUs keep bfloat16, 2 bytes an element."
    )
    return lines
