"""A writer that is killed at any moment leaves whole files, nothing, or names that start with .tmp-."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from headrace.files import TEMP_PREFIX, open_container, sweep_temporaries, write_container
from headrace.order import derive, key

KILLS = 3000 if os.environ.get("HEADRACE_FAULTS", "long") == "long" else 150


def write_for_ever(folder: Path, start: int) -> None:
    """Publish container after container: new ones, and one that is replaced again and again."""
    number = start
    while True:
        arrays = {"a": np.full(500 + number % 700, number, np.int64)}
        write_container(folder / f"{number:08d}", arrays, {"number": number}, durable=number % 4 == 0)
        write_container(folder / "latest", arrays, {"number": number}, replace=True, durable=False)
        number += 1


def test_no_kill_tears_a_file(tmp_path):
    number, checked = 0, 0
    span = 4e-3  # longer while nothing gets done: on a busy disk the first durable file alone takes 50 ms
    for kill in range(KILLS):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(tmp_path, number)
            finally:
                os._exit(1)
        pause = span * (derive(key("publish.kill"), kill) % 4000) / 4000
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            continue  # too short to sleep
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer failed before it was killed"
        names = sorted(p.name for p in tmp_path.iterdir())
        span = max(4e-3, 0.9 * span) if any(n.isdecimal() for n in names) else min(1.3 * span, 0.5)
        whole = [n for n in names if not n.startswith(TEMP_PREFIX)]
        for name in whole:
            opened = open_container(tmp_path / name)
            assert (opened.arrays["a"] == opened.meta["number"]).all()
            checked += 1
        numbered = [int(n) for n in whole if n != "latest"]
        assert numbered == list(range(number, number + len(numbered))), "files appear in order, none is skipped"
        number += len(numbered)
        sweep_temporaries(tmp_path)
        for name in numbered:
            (tmp_path / f"{name:08d}").unlink()
    assert checked > KILLS / 4, "the kills came too early to mean anything"
