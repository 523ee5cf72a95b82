"""The long form: python tests/fuzz/run.py --inputs 200000 [--seed 1] [--jobs 2] [TARGET...]

Prints the number of inputs by target, how many were read and refused, and every answer that is not allowed. Exits with 1 if
there is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WALL = 60.0
"""Seconds without a line after which a child is taken for hung."""


@dataclass
class Outcome:
    """What the children reported."""

    inputs: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    bad: list[dict[str, Any]] = field(default_factory=list)


def fuzz(folder: Path, seed: int, first: int, count: int, titles: list[str], outcome: Outcome) -> None:
    """Inputs [first, first + count) of each target, in children; one that dies is reported, and the rest goes on behind it."""
    todo = [(title, first, count) for title in titles]
    while todo:
        title, start, many = todo[0]
        same = [t for t, s, m in todo if (s, m) == (start, many)]
        last, told = None, []
        command = [sys.executable, str(HERE / "child.py"), str(folder), str(seed), str(start), str(many), *same]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            seen, ended = [time.monotonic()], threading.Event()
            watch = threading.Thread(target=_kill_if_silent, args=(child, seen, ended))
            watch.start()
            errors: list[str] = []
            drain = threading.Thread(target=lambda pipe=child.stderr, kept=errors: kept.append(pipe.read()[-2000:]))
            drain.start()
            for line in child.stdout:
                seen[0] = time.monotonic()
                kind, _, rest = line.partition(" ")
                value = json.loads(rest)
                if kind == "at":
                    last = value
                elif kind == "bad":
                    outcome.bad.append(value)
                    print(line, end="", file=sys.stderr, flush=True)
                else:
                    told.append(value)
                    print(f"{value[0]}: {value[1]} inputs from {start} on, {value[2]} read, {value[3]} refused", file=sys.stderr, flush=True)  # fmt: skip
            code = child.wait()
            ended.set()
            watch.join()
            drain.join()
        for name, inputs, read, refused in told:
            outcome.inputs[name] += inputs
            outcome.read[name] += read
            outcome.refused[name] += refused
        done = {name for name, *_ in told}
        left = [item for item in todo if item[0] not in done]
        if code == 0 and len(left) < len(todo):
            todo = left
            continue
        if last is None or last[0] in done:
            outcome.bad.append({"target": title, "problem": f"the child ended with {code}", "detail": errors[0] if errors else ""})  # fmt: skip
            return
        name, number = last
        outcome.bad.append({"target": name, "number": number, "problem": f"the process ended with {code}", "detail": errors[0] if errors else ""})  # fmt: skip
        begin, size = next((s, m) for t, s, m in left if t == name)
        outcome.inputs[name] += number + 1 - begin
        behind = (name, number + 1, begin + size - number - 1)
        todo = [item for item in left if item[0] != name] + ([behind] if behind[2] else [])


def _kill_if_silent(child: subprocess.Popen[str], seen: list[float], ended: threading.Event) -> None:
    while not ended.wait(1.0):
        if time.monotonic() - seen[0] > WALL:
            child.kill()


def main() -> int:
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("targets", nargs="*")
    told = parser.parse_args()
    titles = told.targets or list(TARGETS)
    each, piece = -(-told.inputs // len(titles)), 5000
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as folder, ThreadPoolExecutor(told.jobs) as pool:
        for at in range(told.first, told.first + each, piece):
            for job in range(told.jobs):  # a child reads many targets: its imports take as long as thousands of inputs
                own = Path(folder) / f"{at}-{job}"
                own.mkdir()
                some = titles[job :: told.jobs]
                pool.submit(fuzz, own, told.seed, at, min(piece, told.first + each - at), some, outcome)
    for title in titles:
        print(
            f"{title:28} {outcome.inputs[title]:8,} inputs {outcome.read[title]:8,} read {outcome.refused[title]:8,} refused"
        )
    print(f"{'all':28} {sum(outcome.inputs.values()):8,} inputs, {len(outcome.bad)} answers that are not allowed")
    for bad in outcome.bad[:50]:
        print(json.dumps(bad))
    return 1 if outcome.bad else 0


if __name__ == "__main__":
    sys.exit(main())
