"""`kill_sweep`: a job survives being killed at any moment.

    sweep = kill_sweep(["python", "train.py"], ["python", "train.py", "--resume"], kills=3, seed=1)

Starts the job for real, kills it with SIGKILL after a keyed moment, continues it with the second command, and so on;
the last continuation runs to its end. Afterwards compare what the job left behind with an undisturbed run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.metrics import Wait
from headrace.order import derive, key


@dataclass(frozen=True, slots=True)
class KillSweep:
    """What happened."""

    moments: tuple[float, ...]
    """Seconds after its start at which each process was killed."""
    finished_early: bool
    """The job ended before all kills were used up."""
    output: str
    """What the last process printed."""


def kill_sweep(
    start: Sequence[str],
    resume: Sequence[str],
    *,
    kills: int,
    seed: int,
    longest: float,
    shortest: float = 0.0,
    ready: Callable[[], bool] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    deadline: float = 300.0,
) -> KillSweep:
    """Kill a job with SIGKILL `kills` times, each between `shortest` and `longest` seconds after its start (or after `ready()` becomes true), then let it finish.

    `start` is the command of the first life, `resume` that of every later one. `seed` chooses the moments. `env` and `cwd` are those of the processes.
    `deadline`: seconds that one life may take.
    """
    moments: list[float] = []
    command = list(start)
    for k in range(kills):
        moment = shortest + (derive(key("kill", seed=seed), k) >> 11) / (1 << 53) * (longest - shortest)
        code, output = _run(command, env, cwd, deadline, ready=ready, kill_after=moment)
        if code is None:
            moments.append(moment)
            command = list(resume)
            continue
        if code != 0:
            raise AssertionError(f"{' '.join(command)} exited with {code} before it was killed:\n{output}")
        return KillSweep(tuple(moments), True, output)
    code, output = _run(command, env, cwd, deadline)
    if code != 0:
        raise AssertionError(f"{' '.join(command)} exited with {code} after {kills} kills:\n{output}")
    return KillSweep(tuple(moments), False, output)


def _run(
    command: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: Path | None,
    deadline: float,
    *,
    ready: Callable[[], bool] | None = None,
    kill_after: float | None = None,
) -> tuple[int | None, str]:
    """Exit code (None: it was killed) and output. Whatever happens, nothing of the process group is left running."""
    with tempfile.TemporaryFile("w+") as said:  # a full pipe that no process reads would block the job
        process = subprocess.Popen(
            list(command), env=env, cwd=cwd, stdout=said, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        code: int | None = None
        try:
            _until_ready(process, ready, deadline)
            with Wait("kill.run", deadline=deadline + 1):
                code = process.wait(timeout=deadline if kill_after is None else kill_after)
        except subprocess.TimeoutExpired:
            if kill_after is None:
                raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()


def _until_ready(process: subprocess.Popen[str], ready: Callable[[], bool] | None, deadline: float) -> None:
    if ready is None:
        return
    with Wait("kill.ready", deadline=deadline) as wait:
        while not ready() and process.poll() is None:
            wait.check()
            time.sleep(0.005)
