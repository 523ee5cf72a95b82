"""Worker processes that make samples of rollouts: `RolloutProcesses`, which `use_process_pool` turns on.

    a rollout in JSON text or msgpack ──► process: `process_rollout` ──► the rollout without its contexts, and its samples

A thread shares the GIL with the event loop; a process does not. Processes pay where rollouts come as lists in JSON text or msgpack, which are then decoded
in the process: measure before you turn them on (`headrace replay --processes`). Rollouts that come as dicts stay in the pipeline's thread, because
every number would be copied to reach a process.

A process has one rollout at a time, so the rollout that it died over is known. That rollout is given to a new process,
`retries` times at most, and is then refused under the cause `worker`; other rollouts are not affected. Samples are written when an answer is whole,
so none is lost or written twice. A process that has not answered within `deadline` seconds, or within a quarter of the time that the rollout's step has left, is
killed: the rest is for further tries. The kill also ends a blocked write into the pipe of a stopped process. Values and arrays cross the
pipes; nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from headrace.errors import ConfigError, FileCorrupt, RolloutRefused, WorkerDied
from headrace.rollouts.checks import Limits
from headrace.rollouts.pretokenize import Render
from headrace.rollouts.sample_rollout import Processed, process_rollout
from headrace.rollouts.values import decode_value, encode_value
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess

_log = logging.getLogger("headrace.rollouts")
_START_SECONDS = 120.0


class _Answer(msgspec.Struct):
    """What a process answers: the samples, or the error."""

    made: Processed | None = None
    error: dict[str, str] | None = None


class RolloutProcesses:
    """A pool of processes. `process` may be called from as many threads as there are processes."""

    def __init__(
        self, workers: int, *, seq_len: int, limits: Limits, render: Render | None = None, retries: int = 2, deadline: float = 60.0
    ) -> None:  # fmt: skip
        """`retries`: further processes that a rollout is given to. `deadline`: seconds that one may take. The other arguments are those of `process_rollout`."""
        if workers < 1 or retries < 0 or not deadline > 0:
            raise ConfigError(
                f"worker processes: {workers} (at least 1), retries {retries} (0 or more), deadline {deadline} s (above 0)"
            )
        self.workers, self.retries, self.deadline = workers, retries, deadline
        self._settings: dict[str, Any] = {"seq_len": seq_len, "limits": limits, "render": render}
        self._idle: deque[WorkerProcess] = deque()
        """Processes without a rollout: at least one for each thread that has none."""
        self._all: dict[str, WorkerProcess] = {}
        self._lock = threading.Lock()
        self._closing = False
        self.restarts = 0
        """Processes that died and were replaced."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        with self._lock:
            return tuple(worker.pid for worker in self._all.values())

    def start(self) -> None:
        """Spawn all and wait until they have imported what they need, so that the first rollout does not."""
        try:
            for number in range(self.workers):
                self._idle.append(self._spawn(f"headrace-rollouts-{number}"))
            for worker in self._idle:
                try:
                    _wait_until_ready(worker)
                except (EOFError, OSError) as error:
                    raise WorkerDied(f"{worker.describe_end()} at its start") from error
        except (AttributeError, TypeError, ImportError) as error:  # raised when a lambda or a local function is pickled
            self.close()
            raise ConfigError(
                f"the tokenizer's render function cannot be sent to a process ({error}): give one that a module defines"
            ) from error
        except BaseException:
            self.close()
            raise

    def _spawn(self, name: str) -> WorkerProcess:
        with self._lock:
            if self._closing:
                raise WorkerDied("the worker processes were stopped")
            worker = self._all[name] = WorkerProcess(name, _serve, self._settings)
        return worker

    def close(self) -> None:
        """End the processes. A thread that waits for an answer raises WorkerDied."""
        with self._lock:
            self._closing = True
        for worker in self._all.values():
            worker.kill()
            worker.exit_code(60.0)
        self._all.clear()

    # -------------------------------------------------------------------------------------------- asking

    def process(self, raw: bytes | bytearray | memoryview | str, about: Mapping[str, Any], *, until: float = math.inf) -> Processed:  # fmt: skip
        """Call `process_rollout` in a process. RolloutRefused also if `retries` + 1 processes died over the rollout, or at `until` (monotonic, the end of
        its step)."""
        whole = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw  # the process refuses surrogates
        worker = self._idle.pop()
        try:
            for attempt in range(self.retries + 1):
                if time.monotonic() >= until:
                    raise RolloutRefused("worker", "a rollout was given up at the end of its step")
                try:
                    answer = self._asked(worker, (encode_value(about), whole), until)
                except (EOFError, OSError, FileCorrupt) as error:
                    worker = self._replaced(worker, attempt, error)
                    continue
                if answer.made is None:
                    raise decode_error(answer.error or {}, otherwise=RuntimeError)
                return dataclasses.replace(answer.made, rollout=answer.made.rollout.slim())
        finally:
            self._idle.append(worker)
        raise RolloutRefused(
            "worker",
            f"a rollout was given up after {self.retries + 1} worker processes had died or hung over it; look for what is so large or so odd in it",
        )

    def _asked(self, worker: WorkerProcess, question: tuple[Any, Any], until: float) -> _Answer:
        _wait_until_ready(worker)
        seconds = min(self.deadline, max(0.5, (until - time.monotonic()) / 4))
        overdue = threading.Timer(seconds, _kill_overdue, (worker, seconds))
        overdue.daemon = True
        overdue.start()
        try:
            for frame in question:
                worker.pipe.send_bytes(frame)
            return decode_value(worker.pipe.recv_bytes(), _Answer)
        finally:
            overdue.cancel()

    def _replaced(self, worker: WorkerProcess, attempt: int, error: Exception) -> WorkerProcess:
        """A new process in the place of one that died or hangs."""
        if self._closing:
            raise WorkerDied("the worker processes were stopped") from error
        told = worker.describe_end()
        worker.end(patience=0.0)
        self.restarts += 1
        _log.warning("%s over a rollout; try %d of %d", told, attempt + 1, self.retries + 1)
        return self._spawn(worker.name)


def _wait_until_ready(worker: WorkerProcess) -> None:
    """Wait until a process has done its imports. EOFError or OSError if it ended meanwhile."""
    if not worker.has_answered:
        if not worker.pipe.poll(_START_SECONDS):
            raise OSError(f"{worker.name} did not start within {_START_SECONDS:g} s")
        worker.pipe.recv_bytes()
        worker.has_answered = True


def _kill_overdue(worker: WorkerProcess, seconds: float) -> None:
    _log.warning("%s has not answered for %.1f s and is killed", worker.name, seconds)
    worker.kill()


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """The loop of a worker process, until its pipe closes."""
    pipe.send_bytes(b"ready")
    while True:
        about, raw = decode_value(pipe.recv_bytes()), pipe.recv_bytes()
        try:
            answer = _Answer(made=process_rollout(raw, about, **settings))
        except Exception as error:  # a bug must reach the caller, not end the process
            answer = _Answer(error=encode_error(error))
        pipe.send_bytes(encode_value(answer))
