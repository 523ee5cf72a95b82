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


def time_of_a_file(folder: Path) -> float:
    """Seconds that a durable file takes here and now: on a busy disk a kill after 4 ms would always come before the first."""
    began = time.perf_counter()
    for number in range(5):
        write_container(folder / f"{number}", {"a": np.zeros(1000, np.int64)}, {}, durable=True)
    return (time.perf_counter() - began) / 5


def test_no_kill_tears_a_file(tmp_path):
    (tmp_path / "timed").mkdir()
    span = min(max(4e-3, 3 * time_of_a_file(tmp_path / "timed")), 0.2)
    tmp_path = tmp_path / "killed"
    tmp_path.mkdir()
    number, checked = 0, 0
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
