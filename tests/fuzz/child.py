"""One fuzzing process: changes files, reads them, and reports every answer that is not allowed.

    python tests/fuzz/child.py FOLDER SEED FIRST COUNT TARGET...      inputs FIRST to FIRST + COUNT of each target

Whatever lies there, the answer comes within 2 s of processor time and 256 MiB above idle, is exact or an error that names the
file, and nothing outside the folder is opened for writing. Lines on stdout: `at TARGET NUMBER` before an input, `bad {...}`,
and at the end `done TARGET INPUTS READ REFUSED`. A process that dies leaves its last `at` line.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from targets import TARGETS

from headrace.errors import HeadraceError

SECONDS = 2.0
MEMORY = 256 << 20
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 24, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
TOKENS = (b"9" * 30, b"-1", b"null", b"[" * 3000, b"{" * 3000, b'"', b"\xff\xfe", b"1e999", b"NaN", b"a." * 300, b"\0", b"\n", b"true", b"[]", b"{}")  # fmt: skip


def changed(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a flipped bit, a number of extreme size, a cut, a repeat, a token of another grammar."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        # Heads and tails of files hold the claims: half of the changes are there.
        place = rng.randrange(len(out) + 1) if rng.random() < 0.5 or len(out) < 600 else rng.choice((rng.randrange(300), len(out) - rng.randrange(300)))  # fmt: skip
        kind = rng.randrange(9)
        if kind <= 2 and out:
            out[min(place, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 3 and out:
            out[min(place, len(out) - 1)] = rng.randrange(256)
        elif kind == 4:
            width = rng.choice((1, 2, 4, 8))
            out[place : place + width] = (rng.choice(EXTREMES) & ((1 << 8 * width) - 1)).to_bytes(width, rng.choice(("little", "big")))  # fmt: skip
        elif kind == 5:
            del out[place : place + rng.choice((1, 2, 7, 100, len(out)))]
        elif kind == 6:
            start = rng.randrange(len(out) + 1)
            out[place:place] = out[start : start + rng.choice((1, 8, 100, 5000))]
        elif kind == 7:
            token = rng.choice(TOKENS)
            out[place : place + rng.choice((0, 1, len(token)))] = token
        else:
            out[place:place] = rng.randbytes(rng.choice((1, 4, 16)))
    return bytes(out)


def resident(key: bytes = b"VmRSS") -> int:
    with open("/proc/self/status", "rb") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(key))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "wb") as refs:
        refs.write(b"5")


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
outside: list[str] = []
watched: list[str] = []


def audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and watched and isinstance(args[0], str | bytes | os.PathLike) and isinstance(args[2], int):
        name = os.fsdecode(args[0])
        if args[2] & WRITING and name.startswith("/") and not name.startswith((watched[0], "/dev/", "/proc/self/")):
            outside.append(name)


def plain(value: Any) -> str:
    return repr(value)


def run(title: str, folder: Path, seed: int, first: int, count: int) -> None:
    target = TARGETS[title]
    path = folder / title.replace(" ", "_").replace(":", "") / target.name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        target.make(path)
    whole = path.read_bytes()
    expected = plain(target.read(path))
    read = refused = 0
    watched[:] = [str(folder)]
    for number in range(first, first + count):
        print("at", json.dumps([title, number]), flush=True)
        data = changed(whole, random.Random(f"{seed} {title} {number}"))
        path.write_bytes(data)
        forget_peak()
        before, began = resident(), time.process_time()
        problem, detail = "", ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = plain(target.read(path))
            read += 1
            if target.exact and answer != expected:
                problem = "another answer than the file's"
        except HeadraceError as error:
            refused += 1
            message = str(error)
            if path.name not in message and str(path.parent) not in message:
                problem, detail = "the error does not name the file", message[:300]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problem, detail = (
                f"{type(error).__name__} instead of an error of headrace's",
                traceback.format_exc()[-1500:],
            )
        took, grown = time.process_time() - began, resident(b"VmHWM") - before
        if took > SECONDS:
            problem = problem or f"{took:.1f} s"
        if grown > MEMORY:
            problem = problem or f"{grown >> 20} MiB above idle"
        if outside:
            problem = problem or f"opened for writing: {outside[0]}"
            outside.clear()
        if problem:
            kept = folder / f"bad-{path.parent.name}-{number}"
            kept.write_bytes(data)
            print("bad", json.dumps({"target": title, "number": number, "problem": problem, "detail": detail, "file": str(kept)}), flush=True)  # fmt: skip
    watched.clear()
    path.write_bytes(whole)
    print("done", json.dumps([title, count, read, refused]), flush=True)


def main() -> None:
    folder, seed, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    size = resident(b"VmSize") + (6 << 30)  # maps, arenas of allocators and stacks of threads are no memory yet
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(audit)
    for title in sys.argv[5:] or list(TARGETS):
        run(title, folder, seed, first, count)


if __name__ == "__main__":
    main()
