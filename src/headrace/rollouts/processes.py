"""Worker processes that make samples of rollouts: `RolloutProcesses`, which `use_process_pool` turns on.

    a rollout, a turn at a time ──► process: `process_rollout` ──► the rollout without its contexts, and its samples

A thread shares the GIL with the event loop; a process does not. Processes pay where rollouts come as lists in JSON text or msgpack, which are then decoded
in the process. They cost a copy of every number where rollouts come as dicts: measure before you turn them on (`headrace replay --processes`).

A process has one rollout at a time, so the rollout that it died over is known. That rollout is given to a new process,
`retries` times at most, and is then refused under the cause `worker`; other rollouts are not affected. Samples are written when an answer is whole,
so none is lost or written twice. Processes are spawned at the start, end with their pipe, and are killed at exit. Plain values and arrays cross
the pipes; nothing is pickled.

A watch thread kills a process that has not answered within `deadline` seconds or at the end of the rollout's step. It also kills a process that has used no CPU for
a quarter of the time that the step had left: it hangs, and a new process still has time for the next rollouts. The kill also ends a blocked write
into the pipe of a stopped process, which has no deadline of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError, RolloutRefused, WorkerDied
from headrace.metrics import Wait
from headrace.rollouts.checks import Limits
from headrace.rollouts.ingest import ENCODED
from headrace.rollouts.pretokenize import Render
from headrace.rollouts.records import ExpertRows, Rollout, Step, StepTokens, TrainingSample, VersionSpan
from headrace.rollouts.sample_rollout import Processed, process_rollout
from headrace.rollouts.values import decode_value, encode_value
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess

_log = logging.getLogger("headrace.rollouts")
_START_SECONDS = 120.0
_WATCH_SECONDS = 0.05
_PATIENCE = 0.25
"""Share of the time left that a process may use no CPU for before it counts as hung."""
_LEAST_PATIENCE = 0.5
_STEP_FIELDS = ("prompt", "completion", "tokens", "is_truncated")
_COLUMNS = ("completion_ids", "completion_mask", "completion_logprobs")


class _Worker:
    """One process, and the times at which the watch thread kills it."""

    def __init__(self, number: int, settings: dict[str, Any]) -> None:
        self.process = WorkerProcess(f"headrace-rollouts-{number}", _serve, settings)
        self.number, self.pid, self.pipe = number, self.process.pid, self.process.pipe
        self._asked = self._due = math.inf
        self._patience = math.inf
        self._cpu, self._moved = 0.0, 0.0
        self.killed = ""
        """Why the watch thread killed the process; empty if it did not."""

    def watch_from_now(self, allowed: float, until: float) -> None:
        """Start the clock of a question: the process may take `allowed` seconds, and no longer than `until` (monotonic)."""
        now = time.monotonic()
        self._patience = math.inf if until == math.inf else max(_LEAST_PATIENCE, _PATIENCE * (until - now))
        self._cpu, self._moved = _cpu_seconds(self.pid), now
        self._asked, self._due = now, min(now + allowed, until)

    def watch_no_more(self) -> None:
        """Stop the clock: the process has answered."""
        self._due = self._patience = math.inf

    def check(self, now: float) -> None:
        """Kill the process if it is overdue, or has used no CPU for too long."""
        if self.killed or (now < self._due and now - self._moved < self._patience):
            return
        if now >= self._due:
            self.killed = f"no answer for {now - self._asked:.1f} s"
        else:
            cpu = _cpu_seconds(self.pid)
            if cpu != self._cpu or math.isnan(cpu):  # nan: there is no /proc
                self._cpu, self._moved = cpu, now
                return
            self.killed = f"it used no CPU for {now - self._moved:.1f} s"
        self.process.kill()

    def wait_until_ready(self) -> None:
        """Wait until the process has done its imports. WorkerDied if it ended meanwhile."""
        if self.process.has_answered:
            return
        try:
            if not self.pipe.poll(_START_SECONDS):
                raise WorkerDied(f"{self.process.describe_end()} and did not start within {_START_SECONDS:g} s")
            self.pipe.recv_bytes()
            self.process.has_answered = True
        except (EOFError, OSError) as error:
            raise WorkerDied(f"{self.process.describe_end()} at its start") from error


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process; nan where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: dict[int, _Worker] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._stopped = threading.Event()
        self._watch: threading.Thread | None = None
        self.restarts = 0
        """Processes that died and were replaced."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        with self._lock:
            return tuple(w.pid for w in self._all.values())

    def start(self) -> None:
        """Spawn all and wait until they have imported what they need, so that the first rollout does not."""
        atexit.register(self.close)
        try:
            for number in range(self.workers):
                self._spawn(number)
            for worker in list(self._all.values()):
                worker.wait_until_ready()
                self._idle.put(worker)
            self._watch = threading.Thread(target=self._watched, name="headrace-rollouts-watch", daemon=True)
            self._watch.start()
        except (AttributeError, TypeError, ImportError) as error:  # raised when a lambda or a local function is pickled
            self.close()
            raise ConfigError(
                f"the tokenizer's render function cannot be sent to a process ({error}): give one that a module defines"
            ) from error
        except BaseException:
            self.close()
            raise

    def _watched(self) -> None:
        """The loop of the watch thread, until the processes are closed."""
        while True:
            with Wait("rollouts.watch", hidden=True):
                if self._stopped.wait(_WATCH_SECONDS):
                    return
            with self._lock:
                workers = list(self._all.values())
            now = time.monotonic()
            for worker in workers:
                worker.check(now)

    def _spawn(self, number: int) -> _Worker:
        with self._lock:
            if self._closing:
                raise WorkerDied("the worker processes were stopped")
            worker = self._all[number] = _Worker(number, self._settings)
        return worker

    def close(self) -> None:
        """End the processes. A thread that waits for an answer raises WorkerDied."""
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
            workers = list(self._all.values())
            self._all.clear()
        self._stopped.set()
        if self._watch is not None:
            self._watch.join()
        for worker in workers:
            worker.process.kill()
            worker.process.exit_code(60.0)
        # Pipes of idle processes. A thread that reads the pipe of a busy one sees its end now, and closes it.
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().pipe.close()

    # -------------------------------------------------------------------------------------------- asking

    def process(self, raw: Any, about: Mapping[str, Any], *, until: float = math.inf) -> Processed:
        """Call `process_rollout` in a process. RolloutRefused also if `retries` + 1 processes died over the rollout, or at `until` (monotonic, the end of
        its step)."""
        if isinstance(raw, Rollout):
            return process_rollout(raw, about, **self._settings)
        try:
            frames = _question(raw, about)
        except ValueError:
            # The rollout holds an object that cannot be sent: the checks name it.
            return process_rollout(raw, about, **self._settings)
        attempt = 0
        while attempt <= self.retries and time.monotonic() < until:
            with Wait("rollouts.process", deadline=self.deadline * (self.workers + 1)) as wait:
                worker = self._taken(wait)
            try:
                answer = self._asked(worker, frames, until)
            except (EOFError, OSError, WorkerDied) as error:
                self._replace(worker, attempt, error)
                if isinstance(error, WorkerDied) and attempt == self.retries:
                    raise  # the process does not start, which is not the rollout's fault
                attempt += 1
                continue
            except BaseException:
                self._idle.put(worker)
                raise
            self._idle.put(worker)
            return _answered(answer)
        if attempt <= self.retries:
            raise RolloutRefused("worker", "a rollout was given up at the end of its step")
        raise RolloutRefused(
            "worker",
            f"a rollout was given up after {self.retries + 1} worker processes had died or hung over it; look for what is so large or so odd in it",
        )

    def _taken(self, wait: Wait) -> _Worker:
        while True:
            try:
                return self._idle.get(timeout=min(0.5, max(wait.remaining(), 0.001)))
            except queue.Empty:
                if self._closing:
                    raise WorkerDied("the worker processes were stopped") from None
                wait.check()

    def _asked(self, worker: _Worker, frames: Sequence[bytes | memoryview], until: float) -> list[bytes]:
        worker.wait_until_ready()
        worker.watch_from_now(self.deadline, until)
        try:
            for frame in frames:
                worker.pipe.send_bytes(frame)
            count = msgspec.msgpack.decode(worker.pipe.recv_bytes())
            return [worker.pipe.recv_bytes() for _ in range(count)]
        finally:
            worker.watch_no_more()

    def _replace(self, worker: _Worker, attempt: int, error: Exception) -> None:
        if self._closing:
            worker.pipe.close()
            raise WorkerDied("the worker processes were stopped") from error
        told = worker.process.describe_end()
        worker.process.end(patience=0.0)
        self.restarts += 1
        _log.warning(
            "%s over a rollout (%s); try %d of %d",
            told, worker.killed or str(error) or type(error).__name__, attempt + 1, self.retries + 1,
        )  # fmt: skip
        self._idle.put(self._spawn(worker.number))


def _question(raw: Any, about: Mapping[str, Any]) -> list[bytes | memoryview]:
    """A rollout as frames: JSON text and msgpack as they are, dicts turn by turn, because an encoder holds the GIL for the whole of its call."""
    if isinstance(raw, ENCODED):
        whole = raw.encode() if isinstance(raw, str) else raw
        return [encode_value({"about": about, "encoded": True, "frames": 1}), whole]
    if not isinstance(raw, Mapping) or not isinstance(raw.get("trajectory"), (list, tuple)):
        return [encode_value({"about": about, "frames": 1}), encode_value(raw)]
    turns = [encode_value(_turn(step)) for step in raw["trajectory"]]
    head = encode_value({k: v for k, v in raw.items() if k != "trajectory"})
    return [encode_value({"about": about, "turns": True, "frames": 1 + len(turns)}), head, *turns]


def _turn(step: Any) -> Any:
    """The fields of a turn that ingest reads."""
    return {k: step[k] for k in _STEP_FIELDS if k in step} if isinstance(step, Mapping) else step


def _answered(frames: list[bytes]) -> Processed:
    """The rollout and samples in the answer of a process; raises the error in it."""
    head = decode_value(frames[0])
    if "error" in head:
        raise decode_error(head["error"], otherwise=RuntimeError)
    fields = head["rollout"]
    fields |= {name: tuple(fields[name]) for name in ("error", "split_at") if fields[name] is not None}
    samples = []
    for sample, rows in zip(head["samples"], frames[1:] or [None] * len(head["samples"]), strict=True):
        if rows is not None:
            chunk = np.frombuffer(rows, np.uint8).reshape(-1, *head["experts"])
            sample["experts"] = ExpertRows(chunks=(chunk,))
        samples.append(TrainingSample(**sample))
    steps = tuple(_step(told) for told in head["steps"])
    return Processed(rollout=Rollout(**fields, trajectory=steps), samples=samples, truncated=head["truncated"])


def _step(told: dict[str, Any]) -> Step:
    tokens = told.pop("tokens")
    if tokens is not None:
        tokens = StepTokens(
            prompt_ids=np.empty(0, np.int32),
            prompt_mask=np.empty(0, np.uint8),
            version_spans=tuple(VersionSpan(*span) for span in tokens["version_spans"]),
            **{name: tokens[name] for name in _COLUMNS},
        ).slim(context=tokens["context"])
    return Step(**told, tokens=tokens)


# ------------------------------------------------------------------------------------------- in the process


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """The loop of a worker process, until its pipe closes."""
    pipe.send_bytes(b"ready")
    while True:
        head = decode_value(pipe.recv_bytes())
        frames = [pipe.recv_bytes() for _ in range(head["frames"])]
        try:
            answer = _answer(process_rollout(_raw(head, frames), head["about"], **settings))
        except Exception as error:  # a bug must reach the caller, not end the process
            answer = [encode_value({"error": encode_error(error)})]
        pipe.send_bytes(msgspec.msgpack.encode(len(answer)))
        for frame in answer:
            pipe.send_bytes(frame)


def _raw(head: Mapping[str, Any], frames: list[bytes]) -> Any:
    if head.get("encoded"):
        return frames[0]
    record = decode_value(frames[0])
    return {**record, "trajectory": [decode_value(f) for f in frames[1:]]} if head.get("turns") else record


def _answer(made: Processed) -> list[bytes | memoryview]:
    """Everything but the experts in one frame, and the experts of each sample in a frame of their own."""
    shapes = [sample.experts.shape[1:] for sample in made.samples if sample.experts is not None]
    told = {
        "rollout": {n: getattr(made.rollout, n) for n in Rollout.__struct_fields__ if n != "trajectory"},
        "steps": [
            {
                "prompt": s.prompt,
                "completion": s.completion,
                "is_truncated": s.is_truncated,
                "tokens": _tokens(s.tokens),
            }
            for s in made.rollout.trajectory
        ],
        "samples": [
            {n: getattr(s, n) for n in TrainingSample.__struct_fields__ if n != "experts"} for s in made.samples
        ],
        "experts": shapes[0] if shapes else None,
        "truncated": made.truncated,
    }
    joined = [sample.experts.joined() for sample in made.samples if sample.experts is not None]
    return [encode_value(told), *(rows.reshape(-1).data for rows in joined)]


def _tokens(tokens: StepTokens | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    columns = {name: getattr(tokens, name) for name in _COLUMNS}
    return {**columns, "context": len(tokens.prompt_ids), "version_spans": tokens.version_spans}
