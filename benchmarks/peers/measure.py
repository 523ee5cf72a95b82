"""How every contestant is measured: the same clock, the same batches, the same questions.

A contestant is a script that says how to open its loader and hands the rest to `run`:

    def open_loader(task, state):                 # state: what Feed.state() gave in another process, or None
        return Feed(batches=iter(loader), state=loader.state_dict)

    run(open_loader, versions=("torchdata", "torch"))

It runs in its own process and, but for headrace itself, in its own virtualenv, and prints one JSON line:

    speed     tokens/s after the start; the first batch since the process was started and since the loader was asked for
    stalls    the times of next() under a consumer that works 20 ms a step, beside a loader that returns the same tensor
    halfway   walks to the middle of the corpus and saves the state and the digest of the batch that follows
    restore   a fresh object + that state → first batch, and whether it is the batch that would have followed
    prepare   writes the tokens in the contestant's own format (prepared table only)

Imports nothing but the standard library and numpy: it runs in every environment.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SEQ_LEN = 8, 2048
TOKENS = BATCH * SEQ_LEN
WORK = 0.02
WARM_UP = 5.0
"""Seconds of batches before anything is measured: a loader may still import, compile and fill its queues behind the first batch."""
UNEVEN = 0.13
"""Above this fewer than four bursts were seen, and the rate is a rough one."""
FEWEST = 128
"""Batches that a rate is taken over: datasets.map takes 1,000 documents at once, some 45 batches."""
WALK_LIMIT = 60.0
"""Seconds a slow contestant may walk towards the middle; how far it came is reported."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the driver asks of a contestant."""

    corpus: Path
    tokenizer: Path
    prepared: Path
    mode: str
    option: str
    encoder: str
    workers: int
    seconds: float
    corpus_tokens: int
    state: Path
    born: float
    """CLOCK_MONOTONIC when the driver started this process."""

    @property
    def shards(self) -> list[Path]:
        return sorted(self.corpus.glob("*.jsonl"))


@dataclass(frozen=True, kw_only=True)
class Feed:
    """An opened loader: an endless iterator, and where it has one, its state and its own count of real tokens."""

    batches: Iterator[Any]
    state: Callable[[], Any] | None = None
    tokens: Callable[[], int] | None = None
    note: str = ""
    """What the table should say about it, such as the engine it chose."""


Opener = Callable[[Task, Any], Feed]
Encode = Callable[[Sequence[str]], np.ndarray]


def encoder(task: Task, threads: int) -> Encode:
    """Texts → one flat array of ids with EOS after every document, by the encoder the task names."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    if task.encoder == "fastokens":
        import fastokens

        fast = fastokens.Tokenizer.from_file(str(task.tokenizer))
        eos = fast.token_to_id("<|endoftext|>")

        def encode_flat(texts: Sequence[str]) -> np.ndarray:
            ids, offsets = fast.encode_batch_flat(list(texts))
            return np.insert(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64)[1:].astype(np.int64), eos)

        return encode_flat
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(task.tokenizer))
    end = reference.token_to_id("<|endoftext|>")

    def encode_lists(texts: Sequence[str]) -> np.ndarray:
        flat: list[int] = []
        for encoding in reference.encode_batch_fast(list(texts), add_special_tokens=False):
            flat += encoding.ids
            flat.append(end)
        return np.array(flat, np.uint32)

    return encode_lists


class Cutter:
    """Concatenate and chunk: flat ids go in, whole [n, SEQ_LEN] int64 blocks come out, the rest is held."""

    def __init__(self, held: Sequence[int] = ()) -> None:
        self.held = np.array(held, np.int64)

    def cut(self, ids: np.ndarray) -> np.ndarray:
        joined = np.concatenate([self.held, ids.astype(np.int64)])
        whole = len(joined) // SEQ_LEN * SEQ_LEN
        self.held = joined[whole:]
        return joined[:whole].reshape(-1, SEQ_LEN)


def steady_rate(ends: Sequence[float], tokens_each: float) -> tuple[float, float]:
    """Tokens/s from the times at which batches were delivered, and how uneven the delivery was (0 to 1).

    A loader that tokenises 40 batches at once delivers one after a long gap and the others for nothing. From the first
    batch to the last it would gain or lose most of a burst; so this is the slope of the line through the staircase of their
    count, which over four bursts is right within about 6 %. Unevenness is the largest distance of the staircase from that
    line as a share of all batches: over k bursts about 1 / 2k.
    """
    if len(ends) < 2:
        raise ValueError("a rate needs two batches or more")
    grid = np.linspace(ends[0], ends[-1], 2000)
    delivered = np.searchsorted(np.asarray(ends), grid, side="right")
    line = np.polynomial.Polynomial.fit(grid, delivered, 1)
    uneven = float(np.abs(delivered - line(grid)).max() / len(ends))
    return float(line.deriv()(grid[0]) * tokens_each), uneven


def run(open_loader: Opener, *, versions: Sequence[str], prepare: Callable[[Task], object] | None = None) -> None:
    """Do what the command line asks and print the answer as one line of JSON."""
    task = _task()
    if task.mode == "prepare":
        assert prepare is not None
        prepare(task)
        answer: dict[str, Any] = {}
    else:
        answer = {"speed": _speed, "stalls": _stalls, "halfway": _halfway, "restore": _restore}[task.mode](
            open_loader, task
        )
    answer["versions"] = {
        name: metadata.version(name) for name in (*versions, task.encoder) if name not in ("", "auto")
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # some peers' threads and children hold up a normal exit; the answer is out


def _first(open_loader: Opener, task: Task, state: Any = None) -> tuple[Feed, Any, float]:
    began = time.monotonic()
    feed = open_loader(task, state)
    batch = next(feed.batches)
    done = time.monotonic()
    shape, dtype = tuple(batch.shape), str(batch.dtype).removeprefix("torch.")
    if (shape, dtype) != ((BATCH, SEQ_LEN), "int64"):
        raise SystemExit(f"its first batch is {dtype} {list(shape)}, not int64 [{BATCH}, {SEQ_LEN}]")
    return feed, batch, done - began


def _warm_up(feed: Feed) -> None:
    until = time.perf_counter() + WARM_UP
    while time.perf_counter() < until:
        next(feed.batches)


def _speed(open_loader: Opener, task: Task) -> dict[str, Any]:
    feed, _, from_construction = _first(open_loader, task)
    from_start = time.monotonic() - task.born
    _warm_up(feed)
    before = feed.tokens() if feed.tokens else 0
    spent = cpu_seconds()
    ends = [time.perf_counter()]
    for part in range(2, 12):  # up to 5.5 times as long, until a loader that works in bursts was seen over four of them
        until = ends[0] + part * task.seconds / 2
        while ends[-1] < until or len(ends) < 3:
            next(feed.batches)
            ends.append(time.perf_counter())
        if len(ends) > FEWEST and steady_rate(ends, TOKENS)[1] < UNEVEN:
            break
    spent = cpu_seconds() - spent
    each = (feed.tokens() - before) / (len(ends) - 1) if feed.tokens else TOKENS
    rate, uneven = steady_rate(ends, each)
    return {
        "tokens_per_s": rate,
        "uneven": uneven,
        "tokens_per_cpu_s": each * (len(ends) - 1) / spent,
        "real": each / TOKENS,
        "batches": len(ends) - 1,
        "first_from_start": from_start,
        "first_from_construction": from_construction,
        "note": feed.note,
    }


def cpu_seconds() -> float:
    """Processor time of this process and its living descendants: what a busy machine distorts least."""
    found, at, ticks = [os.getpid()], 0, 0
    while at < len(found):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{found[at]}/stat").read_text().rpartition(")")[2].split()[11:13]))
        for children in Path(f"/proc/{found[at]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
        at += 1
    return ticks / os.sysconf("SC_CLK_TCK")


def _stalls(open_loader: Opener, task: Task) -> dict[str, Any]:
    steps = max(50, round(task.seconds / WORK))
    # Before the loader exists: its threads and processes would be felt in the floor too.
    _, floor, floor_overslept = _walk(itertools.repeat(np.zeros((BATCH, SEQ_LEN), np.int64)), steps, 3 * task.seconds)
    feed, _, _ = _first(open_loader, task)
    _warm_up(feed)
    gc.collect()
    times, share, overslept = _walk(feed.batches, steps, 3 * task.seconds)
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "p50": p50, "p99": p99, "max": max(times), "exposed": share, "floor": floor, "steps": len(times),
        "overslept": overslept, "floor_overslept": floor_overslept,
    }  # fmt: skip


def _walk(batches: Iterator[Any], steps: int, limit: float) -> tuple[list[float], float, float]:
    """The times of next(), the share of the time that was not the consumer's own 20 ms, and its longest oversleep."""
    times: list[float] = []
    overslept, began = 0.0, time.perf_counter()
    while len(times) < steps and time.perf_counter() - began < limit:
        asked = time.perf_counter()
        next(batches)
        given = time.perf_counter()
        time.sleep(WORK)  # a step on the device: the host waits and holds no lock
        times.append(given - asked)
        overslept = max(overslept, time.perf_counter() - given - WORK)
    return times, 1 - len(times) * WORK / (time.perf_counter() - began), overslept


def _halfway(open_loader: Opener, task: Task) -> dict[str, Any]:
    feed, _, _ = _first(open_loader, task)
    if feed.state is None:
        return {"state": None}
    wanted, taken, until = task.corpus_tokens // (2 * TOKENS), 1, time.monotonic() + WALK_LIMIT
    while taken < wanted and time.monotonic() < until:
        next(feed.batches)
        taken += 1
    began = time.perf_counter()
    state = feed.state()
    saving = time.perf_counter() - began
    body = pickle.dumps((state, _digest(next(feed.batches))))
    task.state.write_bytes(body)
    return {"state": _size(state), "position": taken * TOKENS / task.corpus_tokens, "saving": saving}


def _restore(open_loader: Opener, task: Task) -> dict[str, Any]:
    state, expected = pickle.loads(task.state.read_bytes())  # noqa: S301 - written by this script a moment ago
    _, batch, seconds = _first(open_loader, task, state)
    return {"restore": seconds, "exact": _digest(batch) == expected}


def _digest(batch: Any) -> str:
    return hashlib.blake2b(np.ascontiguousarray(batch).tobytes(), digest_size=16).hexdigest()


def _size(state: Any) -> int:
    """Bytes as JSON, or pickled where JSON cannot say it."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))


def _task() -> Task:
    parser = argparse.ArgumentParser()
    for name, kind in (("corpus", Path), ("tokenizer", Path), ("prepared", Path), ("mode", str), ("option", str),
                       ("encoder", str), ("workers", int), ("seconds", float), ("corpus-tokens", int),
                       ("state", Path), ("born", float)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, required=True)
    return Task(**vars(parser.parse_args(sys.argv[1:])))
