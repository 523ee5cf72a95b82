"""headrace beside what one would use instead, on the same text, the same batches and the same cores.

    python benchmarks/bench_text.py --make-envs     one virtualenv a peer, under .bench-envs/
    python benchmarks/bench_text.py                 three tables: online, online with the same fast encoder, prepared
    python benchmarks/bench_text.py --quick         10 MB and 2 s, to try it

The work: jsonl → tokens (a 32k byte-level BPE) → [8, 2048] int64 batches, or the same batches from tokens prepared
before. Every contestant is a script of benchmarks/peers/, runs in its own process and is asked the same questions by
peers/measure.py. Rounds go through all contestants before the next begins, so that a slow minute of the machine hits
all of them; figures are medians over the rounds, ratios are taken within a round.

Peers deliver input_ids only and count every token; headrace packs whole documents, so its padding is not counted. A peer
whose environment or package is absent is skipped by name. The corpus is text of the Python installation that runs this:
its digest is printed, and figures of different digests should not be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
SHARDS = 16
VOCAB = 32_000
MEDIAN_BYTES, SPREAD = 2500, 1.0
TRAIN_BYTES = 12_000_000
UNEVEN = 0.13  # as in peers/measure.py
PAUSE = 0.5
"""Seconds for which nothing ran, above which a figure is taken again, and a sleep is worth a line."""

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "hf": ("datasets", "transformers", "torchdata", "tokenizers", "fastokens"),
    "grain": ("grain", "tokenizers", "fastokens"),
    "torchdata": ("torchdata", "tokenizers", "fastokens"),
    "zephon": ("zephon", "transformers", "tokenizers", "fastokens"),
    "litdata": ("litdata",),
    "mosaic": ("mosaicml-streaming",),
}
"""What each peer's virtualenv holds beside torch and numpy."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One row of a table: which script, where, and with which settings."""

    name: str
    table: str
    group: str
    """What --peers selects; `headrace` and `limit` always run."""
    script: str
    option: str = ""
    encoder: str = ""
    workers: int = 0
    role: str = "peer"
    """ours, ids (input_ids only), anew (files read anew in every epoch: the others keep 60 MB of text in memory), default (a default install), docs, peer, loop (by hand); the limits: limit (the fast
    encoder), core (the same on one core), reference (tokenizers), memcpy."""

    @property
    def env(self) -> str | None:
        """The name of its virtualenv; None for the one that runs this."""
        return self.group if self.group in ENVIRONMENTS else None

    @property
    def modes(self) -> tuple[str, ...]:
        return ("speed",) if self.group == "limit" else ("speed", "stalls", "halfway")

    @property
    def key(self) -> str:
        return f"{self.table}: {self.name}"


def online(table: str, encoder: str) -> list[Contestant]:
    """The peers, with the encoder given to them."""

    def row(name: str, group: str, script: str, option: str, workers: int = 0, role: str = "peer") -> Contestant:
        return Contestant(
            name=name,
            table=table,
            group=group,
            script=script,
            option=option,
            encoder=encoder,
            workers=workers,
            role=role,
        )

    return [
        row("HF datasets, as documented", "hf", "peer_hf", "docs", 0, "docs"),
        row("HF datasets, as documented, 2 workers", "hf", "peer_hf", "docs", 2, "docs"),
        row("HF datasets, tuned", "hf", "peer_hf", "tuned", 0),
        row("HF datasets, tuned, 2 workers", "hf", "peer_hf", "tuned", 2),
        row("Grain, threads", "grain", "peer_grain", "online", 0),
        row("Grain, 2 workers", "grain", "peer_grain", "online", 2),
        row("torchdata, no worker", "torchdata", "peer_torchdata", "online", 0),
        row("torchdata, 2 workers", "torchdata", "peer_torchdata", "online", 2),
        row("Zephon, threads", "zephon", "peer_zephon", "threads", 2),
        row("Zephon, mtp_mode", "zephon", "peer_zephon", "mtp", 2),
        row("Zephon, process runner", "zephon", "peer_zephon", "process", 2),
        row("bare loop", "by-hand", "peer_by_hand", "loop", 2, "loop"),
        row("bare loop, 2 threads", "by-hand", "peer_by_hand", "threads", 2, "loop"),
    ]


def contestants() -> list[Contestant]:
    """Everyone, table by table, in the order of the tables' rows."""

    def ours(table: str, name: str, option: str, encoder: str, role: str) -> Contestant:
        return Contestant(
            name=name, table=table, group="headrace", script="peer_headrace", option=option, encoder=encoder, role=role
        )

    def limit(table: str, name: str, option: str, encoder: str, role: str = "limit") -> Contestant:
        return Contestant(
            name=name, table=table, group="limit", script="limits", option=option, encoder=encoder, role=role
        )

    def prepared(name: str, group: str, script: str, option: str, workers: int = 0) -> Contestant:
        return Contestant(name=name, table="prepared", group=group, script=script, option=option, workers=workers)

    return [
        ours("online", "headrace", "whole", "auto", "ours"),
        ours("online", "headrace, input_ids only", "ids", "auto", "ids"),
        ours("online", "headrace, files read anew", "anew", "auto", "anew"),
        ours("online", "headrace, default install", "whole", "tokenizers", "default"),
        *online("online", "tokenizers"),
        limit("online", "tokenizers alone, 2 threads", "ours", "tokenizers", "reference"),
        limit("online", "fastokens alone, 2 threads", "ours", "fastokens"),
        limit("online", "fastokens alone, its own threads", "own", "fastokens"),
        limit("online", "fastokens alone, 1 core", "one", "fastokens", "core"),
        ours("same encoder", "headrace", "whole", "fastokens", "ours"),
        *online("same encoder", "fastokens"),
        ours("prepared", "headrace prepared, input_ids", "prepared-ids", "", "ids"),
        ours("prepared", "headrace prepared, whole", "prepared-whole", "", "ours"),
        prepared("np.memmap crops", "memmap", "peer_memmap", "crops"),
        prepared("Megatron-style index", "memmap", "peer_memmap", "index"),
        prepared("Megatron-style index, 2 workers", "memmap", "peer_memmap", "index", 2),
        prepared("litdata", "litdata", "peer_litdata", "prepared"),
        prepared("litdata, 2 workers", "litdata", "peer_litdata", "prepared", 2),
        prepared("MosaicML Streaming", "mosaic", "peer_mosaic", "prepared"),
        prepared("MosaicML Streaming, 2 workers", "mosaic", "peer_mosaic", "prepared", 2),
        prepared("Grain ArrayRecord, threads", "grain", "peer_grain", "prepared"),
        prepared("Grain ArrayRecord, 2 workers", "grain", "peer_grain", "prepared", 2),
        limit("prepared", "memcpy", "memcpy", "", "memcpy"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ the corpus


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Shards of jsonl and the tokenizer trained on a part of them."""

    folder: Path
    tokenizer: Path
    documents: int
    bytes: int
    tokens: int
    digest: str


def text_files() -> Iterator[Path]:
    """The text of the Python installation: the standard library, then the installed packages, in a fixed order."""
    paths = sysconfig.get_paths()
    for name in ("stdlib", "purelib"):
        root = Path(paths[name])
        found = (p for p in root.rglob("*") if p.suffix in (".py", ".md", ".rst", ".txt") and p.is_file())
        inside = ((p.relative_to(root).as_posix(), p) for p in found)
        yield from (p for rel, p in sorted(inside) if name == "purelib" or "site-packages/" not in rel)


def cut_documents(texts: Iterable[str], seed: int = 0) -> Iterator[str]:
    """Documents of log-normal length cut from files at line ends; none comes twice."""
    draw, seen = random.Random(seed), set()
    for text in texts:
        lines, at = text.splitlines(keepends=True), 0
        while at < len(lines):
            wanted, begun, size = draw.lognormvariate(math.log(MEDIAN_BYTES), SPREAD), at, 0
            while at < len(lines) and size < wanted:
                size += len(lines[at])
                at += 1
            document = "".join(lines[begun:at])
            digest = hashlib.blake2b(document.encode(), digest_size=12).digest()
            if document.strip() and digest not in seen:
                seen.add(digest)
                yield document


def make_corpus(folder: Path, megabytes: int) -> Corpus:
    """The corpus in `folder`: made once, then found there."""
    facts = folder / "corpus.json"
    if not facts.exists():
        folder.mkdir(parents=True, exist_ok=True)
        documents = _gather(megabytes * 1_000_000)
        for n in range(SHARDS):
            body = "".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents[n::SHARDS])
            (folder / f"part-{n:02}.jsonl").write_text(body)
        tokenizer = folder / "tokenizer.json"
        tokenizer.write_bytes(_train(documents))
        digest = hashlib.blake2b("\0".join(documents).encode(), digest_size=4).hexdigest()
        size = sum(p.stat().st_size for p in folder.glob("*.jsonl"))
        tokens = _count(tokenizer, documents)
        facts.write_text(json.dumps({"documents": len(documents), "bytes": size, "tokens": tokens, "digest": digest}))
    return Corpus(folder=folder, tokenizer=folder / "tokenizer.json", **json.loads(facts.read_text()))


def _gather(size: int) -> list[str]:
    def texts() -> Iterator[str]:
        for path in text_files():
            with contextlib.suppress(UnicodeDecodeError, OSError):
                yield path.read_text(encoding="utf-8")

    documents, taken = [], 0
    for document in cut_documents(texts()):
        documents.append(document)
        taken += len(document.encode())
    # From all over the installation rather than its first megabytes, so that the text is as mixed as there is.
    random.Random(1).shuffle(documents)
    kept, left = [], min(size, taken)
    for document in documents:
        if left <= 0:
            break
        kept.append(document)
        left -= len(document.encode())
    return kept


def _train(documents: Sequence[str]) -> bytes:
    from headrace.text import train_bpe

    part, left = [], TRAIN_BYTES
    for document in documents:
        part.append(document)
        left -= len(document)
        if left <= 0:
            break
    return train_bpe(part, VOCAB)


def _count(tokenizer: Path, documents: Sequence[str]) -> int:
    """The corpus's tokens, each document with its EOS, estimated from every twentieth document."""
    from tokenizers import Tokenizer

    sample = list(documents[::20])
    encodings = Tokenizer.from_file(str(tokenizer)).encode_batch(sample, add_special_tokens=False)
    share = sum(len(d) for d in sample) / sum(len(d) for d in documents)
    return round((sum(len(e) for e in encodings) + len(sample)) / share)


# ------------------------------------------------------------------------------------------ the environments


def make_environments(folder: Path, wanted: Sequence[str]) -> None:
    """One virtualenv a peer. torch comes first and alone: a range asked for by a peer could bring a CUDA build along."""
    torch = next(
        line for line in (HERE.parent / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    for name in wanted:
        env = folder / name
        print(f"==> {env}: {torch}, {', '.join(ENVIRONMENTS[name])}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
        _pip(env, torch)
        before = _cuda(env)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.write(torch + "\n")
            pins.flush()
            _pip(env, "-c", pins.name, torch, "numpy", *ENVIRONMENTS[name])
        if extra := _cuda(env) - before:
            raise SystemExit(f"the environment {name} brought CUDA packages along: {', '.join(sorted(extra))}")


def _pip(env: Path, *arguments: str) -> None:
    subprocess.run([str(env / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-qq", "install", *arguments], check=True)  # fmt: skip


def _cuda(env: Path) -> set[str]:
    listed = subprocess.run([str(env / "bin/python"), "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True)  # fmt: skip
    names = (line.partition("==")[0].lower() for line in listed.stdout.splitlines())
    return {name for name in names if name.startswith(("nvidia", "triton", "cuda"))}


# --------------------------------------------------------------------------------------------------- running


class Skipped(Exception):
    """A contestant could not take part; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Where and for how long contestants run."""

    corpus: Corpus
    envs: Path
    work: Path
    seconds: float

    def ask(self, who: Contestant, mode: str) -> dict[str, Any]:
        """One run of a contestant's script; its answer, with the peak memory of its process tree."""
        python = Path(sys.executable) if who.env is None else self.envs / who.env / "bin/python"
        if not python.exists():
            raise Skipped("no environment; make it with --make-envs")
        options = {
            "corpus": self.corpus.folder, "tokenizer": self.corpus.tokenizer, "prepared": self.work / "prepared",
            "mode": mode, "option": who.option, "encoder": who.encoder, "workers": who.workers,
            "seconds": self.seconds, "corpus-tokens": self.corpus.tokens,
            "state": self.work / f"{hashlib.blake2b(who.key.encode(), digest_size=6).hexdigest()}.state",
        }  # fmt: skip
        command = [str(python), str(PEERS / f"{who.script}.py"), *(f"--{k}={v}" for k, v in options.items())]
        limit = 180 + 15 * self.seconds
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = subprocess.Popen(
                [*command, f"--born={time.monotonic()}"], stdout=out, stderr=err, env=self._environment(), start_new_session=True
            )  # fmt: skip
            witness = Witness(child.pid)
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                raise Skipped(f"{mode} did not finish in {limit:.0f} s") from None
            finally:
                witness.stop()
                with contextlib.suppress(ProcessLookupError):  # what it left behind, too
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0)
            err.seek(0)
            lines, errors = out.read().splitlines(), err.read()
        if code != 0 or not lines:
            raise Skipped(f"{mode} failed: {_last_line(errors) or f'exit {code}'}")
        return json.loads(lines[-1]) | {"rss": witness.bytes, "pause": witness.pause}

    def _environment(self) -> dict[str, str]:
        cache = self.work / "caches"
        return os.environ | {
            "HEADRACE_CACHE": str(cache / "headrace"), "HF_HOME": str(cache / "hf"), "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip


class Witness:
    """What can only be seen from outside: the memory of a process tree, and whether the machine stood still.

    Looks five times a second. `bytes` is the largest sum of resident sets, shared pages counted in each process; `pause` is
    by how much the longest of its own naps was too long, which no contestant can cause but by taking all processors.
    """

    def __init__(self, pid: int) -> None:
        self.bytes, self.pause = 0, 0.0
        self._pid, self._done = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            if self._done.wait(0.2):
                return
            self.pause = max(self.pause, time.monotonic() - began - 0.2)
            self.bytes = max(self.bytes, sum(map(_resident, _tree(self._pid))))


def _tree(pid: int) -> list[int]:
    found, at = [pid], 0
    while at < len(found):
        with contextlib.suppress(OSError):  # a process may end while we look
            for children in Path(f"/proc/{found[at]}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        at += 1
    return found


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def run_all(
    arena: Arena, everyone: Sequence[Contestant], rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The answers by contestant, {key: {mode: [answer, …]}}, and the reasons of those that were skipped."""
    answers: dict[str, dict[str, Any]] = {who.key: {"speed": [], "restore": []} for who in everyone}
    skipped: dict[str, str] = {}

    def ask(who: Contestant, mode: str) -> dict[str, Any] | None:
        if who.key in skipped:
            return None
        try:
            answer = arena.ask(who, mode)
            for _ in range(2):
                if answer["pause"] < PAUSE:
                    break
                say(f"{who.key}: {mode} again, the machine stood still for {answer['pause']:.1f} s")
                answer = arena.ask(who, mode)
        except Skipped as reason:
            skipped[who.key] = str(reason)
            say(f"{who.key}: skipped, {reason}")
            return None
        shown = {k: round(v, 4) for k, v in answer.items() if isinstance(v, int | float)}
        say(f"{who.key}: {mode} {json.dumps(shown)}")
        return answer

    for who in to_prepare(everyone):
        if not (done := arena.work / "prepared" / f"{who.script}.done").exists() and ask(who, "prepare") is not None:
            done.touch()
    for _ in range(rounds):
        for who in everyone:
            if answer := ask(who, "speed"):
                answers[who.key]["speed"].append(answer)
    for who in everyone:
        for mode in who.modes[1:]:
            if answer := ask(who, mode):
                answers[who.key][mode] = answer
        if answers[who.key].get("halfway", {}).get("state") is not None:
            for _ in range(rounds):
                if answer := ask(who, "restore"):
                    answers[who.key]["restore"].append(answer)
    return {k: v for k, v in answers.items() if v["speed"]}, skipped


def to_prepare(everyone: Sequence[Contestant]) -> list[Contestant]:
    """One contestant a script that has something to prepare; first the flat file, from which the peers cut their blocks."""
    wanted = {w.script: w for w in reversed(everyone) if w.table == "prepared" and w.group != "limit"}
    flat = next(w for w in contestants() if w.script == "peer_memmap")
    return [flat, *(w for script, w in wanted.items() if script != flat.script)] if wanted else []


# --------------------------------------------------------------------------------------------------- reporting


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one contestant showed; None where it has no such figure."""

    who: Contestant
    speeds: tuple[float, ...]
    per_cpu_second: float | None = None
    """Tokens a second of processor time, over the process tree."""
    real: float | None = None
    uneven: float | None = None
    """How far its deliveries were from a steady stream; above .13 it worked in bursts too long for the time measured."""
    first_from_start: float | None = None
    first_from_construction: float | None = None
    restore: float | None = None
    exact: bool | None = None
    position: float | None = None
    state_bytes: int | None = None
    p50: float | None = None
    p99: float | None = None
    longest: float | None = None
    exposed: float | None = None
    """Points of exposed wait above a loader that returns the same tensor."""
    rss: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    overslept: float | None = None
    """The longest oversleep of the consumer, in the loader's walk or in the floor's."""

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def make_row(who: Contestant, answers: Mapping[str, Any]) -> Row:
    speeds = answers["speed"]
    stalls, halfway, restores = answers.get("stalls") or {}, answers.get("halfway") or {}, answers.get("restore") or []
    limit = who.group == "limit"

    def median(name: str) -> float | None:
        return None if limit else statistics.median(a[name] for a in speeds)

    return Row(
        who=who,
        speeds=tuple(a["tokens_per_s"] for a in speeds),
        per_cpu_second=statistics.median(a["tokens_per_cpu_s"] for a in speeds),
        real=median("real"),
        uneven=median("uneven"),
        first_from_start=median("first_from_start"),
        first_from_construction=median("first_from_construction"),
        restore=statistics.median(a["restore"] for a in restores) if restores else None,
        exact=all(a["exact"] for a in restores) if restores else None,
        position=halfway.get("position"),
        state_bytes=halfway.get("state"),
        p50=stalls.get("p50"),
        p99=stalls.get("p99"),
        longest=stalls.get("max"),
        exposed=stalls["exposed"] - stalls["floor"] if stalls else None,
        rss=None if limit else max(a["rss"] for a in speeds),
        versions=speeds[-1]["versions"],
        note=speeds[-1].get("note", ""),
        overslept=max(stalls["overslept"], stalls["floor_overslept"]) if stalls else None,
    )


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("", lambda r: r.who.name),
    ("M tokens/s", lambda r: ("~" if r.uneven and r.uneven > UNEVEN else "") + _speed(r.speed)),
    ("of rounds", lambda r: f"{_speed(min(r.speeds))}–{_speed(max(r.speeds))}"),
    ("a CPU s", lambda r: "–" if r.per_cpu_second is None else _speed(r.per_cpu_second)),
    ("first batch", lambda r: _seconds(r.first_from_start)),
    ("of it open", lambda r: _seconds(r.first_from_construction)),
    ("restore", lambda r: _restored(r)),
    ("state", lambda r: _bytes(r.state_bytes)),
    ("p50", lambda r: _seconds(r.p50)),
    ("p99", lambda r: _seconds(r.p99)),
    ("max", lambda r: _seconds(r.longest)),
    ("exposed", lambda r: "–" if r.exposed is None else f"{r.exposed * 100:+.1f}"),
    ("RSS", lambda r: _bytes(r.rss)),
)


def table(rows: Sequence[Row]) -> str:
    """Rows as text, columns aligned, the first to the left."""
    cells = [[head for head, _ in COLUMNS], *([show(row) for _, show in COLUMNS] for row in rows)]
    widths = [max(len(line[c]) for line in cells) for c in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in cells
    )  # fmt: skip


def _speed(tokens_per_s: float) -> str:
    millions = tokens_per_s / 1e6
    return f"{millions:.2f}" if millions < 10 else f"{millions:.1f}" if millions < 100 else f"{millions:.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 0.0001:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.2g} ms" if value < 0.01 else f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _bytes(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value} B" if value < 1000 else f"{value / 1e3:.1f} KB" if value < 1e6 else f"{value / 1e6:.0f} MB"


def _slept(row: Row) -> str:
    return (
        f"its consumer slept {_seconds(row.overslept)} too long once while the machine ran; its `exposed` says nothing"
    )


def _restored(row: Row) -> str:
    if row.restore is None:
        return "–"
    early = "" if row.position is None or row.position > 0.48 else f" at {row.position:.0%}"
    return _seconds(row.restore) + early + ("" if row.exact else " (not exact)")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One speed over another, within each round."""

    table: str
    what: str
    over: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.what} / {self.over}: {_ratio(statistics.median(self.values))} (of {len(self.values)}: {_ratio(low)}–{_ratio(high)})"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


AGAINST = (
    ("best as HF documents it", ("docs",)),
    ("best hand-tuned peer", ("peer",)),
    ("best bare loop", ("loop",)),
    ("reference encoder alone", ("reference",)),
    ("fast encoder alone", ("limit",)),
    ("memcpy", ("memcpy",)),
)


LEGEND = """M tokens/s: steady state, padding not counted; ~: its bursts were too long for the time measured. a CPU s: M tokens a second
of processor time of the process tree. first batch: since the process was started; of it open: since the loader was asked
for. restore: a fresh object and the state of half a pass → first batch. p50, p99, max: next() under a consumer that works
20 ms a step; exposed: points of wait above a loader that returns the same tensor. RSS: peak of the process tree, shared
pages counted in each process."""


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """headrace over the best of each kind in its table, round by round. The encoder's limits hold for both online tables."""
    found: list[Ratio] = []
    limits = [r for r in rows if r.who.group == "limit"]
    for name in dict.fromkeys(r.who.table for r in rows):
        own = [r for r in rows if r.who.table == name]
        rivals = own + [r for r in limits if name == "same encoder" and r.who.table == "online"]
        for ours in (r for r in own if r.who.group == "headrace"):
            for label, roles in AGAINST:
                rival = max((r for r in rivals if r.who.role in roles), key=lambda r: r.speed, default=None)
                if rival is None or (label.startswith("fast") and ours.who.role == "default"):
                    continue
                over = rival.who.name if len(roles) == 1 and label in ("memcpy",) else f"{label} ({rival.who.name})"
                pairs = zip(ours.speeds, rival.speeds, strict=False)
                found.append(Ratio(table=name, what=ours.who.name, over=over, values=tuple(a / b for a, b in pairs)))
    return found


def report(rows: Sequence[Row], skipped: Mapping[str, str], machine: Mapping[str, Any]) -> str:
    """Everything a reader needs to judge the figures."""
    parts = [" · ".join(f"{k} {v}" for k, v in machine.items())]
    versions: dict[str, str] = {}
    for row in rows:
        versions |= row.versions
    parts.append("versions: " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items())))
    found = ratios(rows)
    for name in dict.fromkeys(r.who.table for r in rows):
        own = [r for r in rows if r.who.table == name]
        parts.append(f"== {name}\n" + table(own))
        parts.append("\n".join(f"{r.who.name}: {r.note}" for r in own if r.note))
        parts.append("\n".join(f"{r.who.name}: {_slept(r)}" for r in own if (r.overslept or 0) > PAUSE))
        parts.append("\n".join(str(r) for r in found if r.table == name))
    parts.append(LEGEND)
    if skipped:
        parts.append("skipped\n" + "\n".join(f"  {who}: {why}" for who, why in skipped.items()))
    return "\n\n".join(p for p in parts if p)


def machine_facts(corpus: Corpus, rounds: int, seconds: float) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "CPU": model, "cores": cores, "Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
        "corpus": f"{corpus.bytes / 1e6:.0f} MB, {corpus.documents:,} documents, {corpus.tokens / 1e6:.1f} M tokens, digest {corpus.digest}",
        "rounds": f"{rounds} of {seconds:g} s",
    }  # fmt: skip


def as_json(rows: Sequence[Row], skipped: Mapping[str, str], machine: Mapping[str, Any]) -> dict[str, Any]:
    def plain(row: Row) -> dict[str, Any]:
        values = {k: getattr(row, k) for k in row.__dataclass_fields__ if k != "who"}
        return {"table": row.who.table, "name": row.who.name, "role": row.who.role, "speed": row.speed, **values}

    return {
        "machine": dict(machine),
        "rows": [plain(r) for r in rows],
        "ratios": [{"table": r.table, "what": r.what, "over": r.over, "values": r.values} for r in ratios(rows)],
        "skipped": dict(skipped),
    }


# ----------------------------------------------------------------------------------------------------- the command


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--make-envs", action="store_true", help="make the peers' virtualenvs, then stop")
    parser.add_argument(
        "--peers", default="", help="only these, such as hf,grain,by-hand; headrace and the limits always run"
    )
    parser.add_argument("--tables", default="", help='only these of online, "same encoder", prepared')
    parser.add_argument("--corpus-mb", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=8.0, help="of steady state, a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="10 MB, 2 s, one round: to see that all of it works")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--envs", type=Path, default=HERE.parent / ".bench-envs")
    found = parser.parse_args(argv)
    if found.quick:
        found.corpus_mb, found.seconds, found.rounds = 10, 2.0, 1
    for name in ("peers", "tables"):
        setattr(found, name, tuple(x.strip() for x in getattr(found, name).split(",") if x.strip()))
    known = {"peers": {w.group for w in contestants()}, "tables": {w.table for w in contestants()}}
    for name, values in known.items():
        if wrong := set(getattr(found, name)) - values:
            parser.error(f"--{name}: there is no {', '.join(sorted(wrong))}; there are {', '.join(sorted(values))}")
    return found


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    envs = asked.envs.resolve()
    if asked.make_envs:
        make_environments(envs, [name for name in ENVIRONMENTS if not asked.peers or name in asked.peers])
        return 0
    work = envs / f"work-{asked.corpus_mb}"
    corpus = make_corpus(work / "corpus", asked.corpus_mb)
    everyone = [
        who
        for who in contestants()
        if (not asked.tables or who.table in asked.tables)
        and (not asked.peers or who.group in (*asked.peers, "headrace", "limit"))
    ]
    arena = Arena(corpus=corpus, envs=envs, work=work, seconds=asked.seconds)
    answers, skipped = run_all(arena, everyone, asked.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    rows = [make_row(who, answers[who.key]) for who in everyone if who.key in answers]
    machine = machine_facts(corpus, asked.rounds, asked.seconds)
    body = json.dumps(as_json(rows, skipped, machine), indent=1)
    if asked.out:
        asked.out.write_text(body + "\n")
    print(body if asked.format == "json" else report(rows, skipped, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
