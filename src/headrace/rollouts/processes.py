"""Rollouts made samples in processes of their own: `RolloutProcesses`, what `use_process_pool` turns on.

    a rollout's lists, a turn at a time ──► process: checked, made columns, interleaved ──► columns, and which rows of experts go where
    its experts stay here, and are written from the chunks they came in

A thread shares the GIL with the event loop; a process does not. Processes pay where rollouts come as lists in JSON text or msgpack, which is then not
decoded here, and cost a copy of every number where rollouts come as dicts of lists: measure before you turn them on (`headrace replay --processes`).

Every process is asked one rollout at a time, so when one dies it is known over which. That rollout is asked again, of a new process,
`retries` times at most, and then refused under the cause `worker`; no other is touched by it. Nothing is written before an answer is whole,
so nothing is lost or written twice. Processes are spawned at the start, end with their pipe, and are killed at exit. What crosses
a pipe is plain values and arrays, never pickled.

A watch thread kills a process that has not answered within `deadline` seconds or when the rollout's step ends, and one that has used no CPU for a
quarter of the time that the step had left: it hangs, and a new process still has time for the rollouts behind it. The kill also ends a write
into the pipe of a stopped process, which no deadline of a pipe would.
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
from headrace.rollouts.checks import Limits, experts_from
from headrace.rollouts.interleave import Piece, expert_rows, interleave_planned
from headrace.rollouts.pretokenize import Render
from headrace.rollouts.records import Rollout, Step, StepTokens, TrainingSample, VersionSpan
from headrace.rollouts.sample_rollout import ENCODED, Processed, ingest_rollout, process_rollout
from headrace.rollouts.values import decode_value, encode_value
from headrace.rollouts.wire import check_count
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess

__all__ = ["RolloutProcesses"]

_log = logging.getLogger("headrace.rollouts")
_START_SECONDS = 120.0
_WATCH_SECONDS = 0.05
_PATIENCE = 0.25
"""Share of the time left that a process may use no CPU for before it counts as hung."""
_LEAST_PATIENCE = 0.5
_STEP_FIELDS = ("prompt", "completion", "tokens", "is_truncated")
_COLUMNS = (("completion_ids", np.int32), ("completion_mask", np.uint8), ("completion_logprobs", np.float32))
_SAMPLE_COLUMNS = (("ids", np.int32), ("mask", np.uint8), ("logprobs", np.float32))
_BULK = (bytes, bytearray, memoryview, str, np.ndarray)


class _Worker:
    """One process, and when the watch kills it."""

    def __init__(self, number: int, settings: dict[str, Any]) -> None:
        self.process = WorkerProcess(f"headrace-rollouts-{number}", _serve, settings)
        self.number, self.pid, self.pipe = number, self.process.pid, self.process.pipe
        self._asked = self._due = math.inf
        self._patience = math.inf
        self._cpu, self._moved = 0.0, 0.0
        self.killed = ""
        """Why the watch killed it; empty if it did not."""

    def watch_from_now(self, allowed: float, until: float) -> None:
        """It is asked something now: it may take `allowed` seconds, and no longer than `until` (monotonic)."""
        now = time.monotonic()
        self._patience = math.inf if until == math.inf else max(_LEAST_PATIENCE, _PATIENCE * (until - now))
        self._cpu, self._moved = _cpu_seconds(self.pid), now
        self._asked, self._due = now, min(now + allowed, until)

    def watch_no_more(self) -> None:
        """It has answered."""
        self._due = self._patience = math.inf

    def check(self, now: float) -> None:
        """Kill it if it is overdue, or has stood still for too long."""
        if self.killed or (now < self._due and now - self._moved < self._patience):
            return
        if now >= self._due:
            self.killed = f"no answer for {now - self._asked:.1f} s"
        else:
            cpu = _cpu_seconds(self.pid)
            if cpu != self._cpu or math.isnan(cpu):  # nan: the system does not tell
                self._cpu, self._moved = cpu, now
                return
            self.killed = f"it used no CPU for {now - self._moved:.1f} s"
        self.process.kill()

    def wait_until_ready(self) -> None:
        """Its imports are done. WorkerDied if it ended over them."""
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
    """CPU seconds of a process; nan where /proc does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class RolloutProcesses:
    """A few processes. `process` may be called from as many threads as there are processes."""

    def __init__(
        self, workers: int, *, seq_len: int, limits: Limits, render: Render | None = None, retries: int = 2, deadline: float = 60.0
    ) -> None:  # fmt: skip
        if workers < 1 or retries < 0 or not deadline > 0:
            raise ConfigError(
                f"worker processes: {workers} (at least 1), retries {retries} (0 or more), deadline {deadline} s (above 0)"
            )
        self.workers, self.seq_len, self.limits, self.retries, self.deadline = (
            workers,
            seq_len,
            limits,
            retries,
            deadline,
        )
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
        """Of the processes that are there now."""
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
        except (AttributeError, TypeError, ImportError) as error:  # what pickling a function that has no name raises
            self.close()
            raise ConfigError(
                f"the tokenizer's render function cannot be sent to a process ({error}): give one that a module defines"
            ) from error
        except BaseException:
            self.close()
            raise

    def _watched(self) -> None:
        """What the watch thread does until the processes are closed."""
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
        """End the processes. A thread that waits for an answer gets WorkerDied."""
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
        # Pipes that no thread reads. A thread that reads another pipe sees its end now, and closes it.
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().pipe.close()

    # -------------------------------------------------------------------------------------------- asking

    def process(self, raw: Any, about: Mapping[str, Any], *, until: float = math.inf) -> Processed:
        """A rollout as process_rollout makes it. RolloutRefused also after `retries` processes have died over it, or at `until` (monotonic: when its step
        ends)."""
        if isinstance(raw, Rollout):
            return process_rollout(raw, about, **self._settings)
        _refuse_oversize(raw, self.limits)
        try:
            frames = _question(raw, about)
        except ValueError:
            # What cannot be sent holds a number or a text that is no value: the checks say which.
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
                    raise  # it does not even start, which is no rollout's fault
                attempt += 1
                continue
            except BaseException:
                self._idle.put(worker)
                raise
            self._idle.put(worker)
            return _answered(answer, raw, self.seq_len)
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
    """A rollout as frames: JSON text and msgpack as they are, lists turn by turn, because an encoder keeps the interpreter for the whole of its call."""
    if isinstance(raw, ENCODED):
        whole = raw.encode() if isinstance(raw, str) else raw
        return [encode_value({"about": about, "encoded": True, "frames": 1}), whole]
    if not isinstance(raw, Mapping) or not isinstance(raw.get("trajectory"), (list, tuple)):
        return [encode_value({"about": about, "frames": 1}), encode_value(raw)]
    turns = [encode_value(_without_bulk(step)) for step in raw["trajectory"]]
    head = encode_value({k: v for k, v in raw.items() if k != "trajectory"})
    return [encode_value({"about": about, "turns": True, "frames": 1 + len(turns)}), head, *turns]


def _refuse_oversize(raw: Any, limits: Limits) -> None:
    """Refuse what is plainly too large before it is copied into a pipe; the process checks the rest."""
    if not isinstance(raw, Mapping):
        return
    for name, value in raw.items():
        if isinstance(value, str) and len(value) > limits.text:
            raise RolloutRefused("oversize", f"{name} holds more than {limits.text:,} characters")
    turns = raw.get("trajectory")
    for turn in turns if isinstance(turns, (list, tuple)) else ():
        tokens = turn.get("tokens") if isinstance(turn, Mapping) else None
        for name, value in tokens.items() if isinstance(tokens, Mapping) else ():
            if isinstance(value, (list, tuple)):
                check_count(len(value), name, limits.tokens)


def _without_bulk(step: Any) -> Any:
    """What ingest reads of a turn; experts stand there with their size only."""
    if not isinstance(step, Mapping):
        return step
    kept = {k: step[k] for k in _STEP_FIELDS if k in step}
    routed = _routed(step)
    data = routed.get("data") if isinstance(routed, Mapping) else routed
    if isinstance(data, _BULK):
        stand_in = _size_of(data)
        kept["tokens"] = dict(step["tokens"]) | {
            "routed_experts": {**routed, "data": stand_in} if isinstance(routed, Mapping) else stand_in
        }
    return kept


def _routed(step: Any) -> Any:
    tokens = step.get("tokens") if isinstance(step, Mapping) else None
    return tokens.get("routed_experts") if isinstance(tokens, Mapping) else None


def _size_of(data: Any) -> dict[str, Any]:
    if isinstance(data, np.ndarray):
        return {"bulk": "array", "dtype": data.dtype.str, "shape": data.shape}
    if isinstance(data, str):
        return {"bulk": "text", "ascii": data.isascii(), "size": len(data)}
    return {"bulk": "bytes", "size": memoryview(data).nbytes}


def _answered(frames: list[bytes], raw: Any, seq_len: int) -> Processed:
    """What a process made of a rollout, put together with the experts that stayed here."""
    head = decode_value(frames[0])
    if "error" in head:
        raise decode_error(head["error"], otherwise=RuntimeError)
    columns: dict[str, Any] = {n: np.frombuffer(f, t) for (n, t), f in zip(_COLUMNS, frames[1:4], strict=True)}
    steps, at = [], 0
    for told in head["steps"]:
        tokens = None
        if told["said"] is not None:
            part = slice(at, at := at + told["said"])
            nothing = (np.empty(0, np.int32), np.empty(0, np.uint8))
            tokens = StepTokens(
                prompt_ids=nothing[0], prompt_mask=nothing[1], **{n: c[part] for n, c in columns.items()},
                version_spans=tuple(VersionSpan(*span) for span in told["versions"]),
            )  # fmt: skip
            tokens = tokens.slim(context=told["context"])
        steps.append(
            Step(prompt=told["prompt"], completion=told["completion"], tokens=tokens, is_truncated=told["cut"])
        )
    fields = head["rollout"]
    if fields["error"] is not None:
        fields["error"] = tuple(fields["error"])
    rollout = Rollout(**fields, trajectory=tuple(steps))
    own: dict[str, Any] = {n: np.frombuffer(f, t) for (n, t), f in zip(_SAMPLE_COLUMNS, frames[4:7], strict=True)}
    rows = _rows_of(head, frames[7:], raw)
    samples, at, lost = [], 0, 0
    for told in head["samples"]:
        part = slice(at, at := at + told["length"])
        sample = TrainingSample(
            **{n: c[part] for n, c in own.items()}, prompt_length=told["prompt_length"], multimodal=told["multimodal"],
            env_name=rollout.env_name, example_id=rollout.example_id, draw=rollout.draw, reward=rollout.reward,
            temperature=rollout.temperature, policy_version=rollout.policy_version, run=rollout.run, mode=rollout.mode,
            experts=None if rows is None else expert_rows(told["pieces"], rows, head["kind"], told["length"]),
        )  # fmt: skip
        lost += told["length"] > seq_len
        samples.append(sample.truncated(seq_len))
    return Processed(rollout=rollout, samples=samples, truncated=lost)


def _rows_of(head: Mapping[str, Any], frames: list[bytes], raw: Any) -> list[Any] | None:
    """By turn: its routed experts. Those of rollouts that went whole came back; others never left."""
    if head["kind"] is None:
        return None
    if head["starts"] is not None:
        layers, topk = head["kind"]
        return [
            None if start is None else experts_from({"data": f, "shape": [len(f) // (layers * topk), layers, topk], "start": start})
            for start, f in zip(head["starts"], frames, strict=True)
        ]  # fmt: skip
    return [experts_from(_routed(step)) for step in raw["trajectory"]]


# ------------------------------------------------------------------------------------------- in the process


def _serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """What a process does until its pipe closes."""
    pipe.send_bytes(b"ready")
    while True:
        head = decode_value(pipe.recv_bytes())
        frames = [pipe.recv_bytes() for _ in range(head["frames"])]
        try:
            answer = _made(head, frames, **settings)
        except Exception as error:  # a bug must reach the caller and not end the process
            answer = [encode_value({"error": encode_error(error)})]
        pipe.send_bytes(msgspec.msgpack.encode(len(answer)))
        for frame in answer:
            pipe.send_bytes(frame)


def _made(
    head: Mapping[str, Any], frames: list[bytes], *, seq_len: int, limits: Limits, render: Render | None
) -> list[bytes | memoryview]:
    if head.get("encoded"):
        raw: Any = frames[0]
    elif head.get("turns"):
        raw = {**decode_value(frames[0]), "trajectory": [_with_stand_in(decode_value(f)) for f in frames[1:]]}
    else:
        raw = decode_value(frames[0])
    rollout = ingest_rollout(raw, head["about"], limits=limits, render=render)
    samples, pieces, kind = interleave_planned(rollout)
    columns = [s.tokens for s in rollout.trajectory if s.tokens is not None]
    starts, bulk = (None, [])
    if kind is not None and not head.get("turns"):
        starts, bulk = _needed_rows(rollout, pieces)
    told = {
        "rollout": {n: getattr(rollout, n) for n in Rollout.__struct_fields__ if n != "trajectory"},
        "steps": [
            {
                "prompt": s.prompt, "completion": s.completion, "cut": s.is_truncated,
                "said": None if s.tokens is None else len(s.tokens.completion_ids),
                "context": 0 if s.tokens is None else len(s.tokens.prompt_ids),
                "versions": () if s.tokens is None else s.tokens.version_spans,
            }
            for s in rollout.trajectory
        ],
        "samples": [
            {"length": len(s), "prompt_length": s.prompt_length, "pieces": p, "multimodal": s.multimodal}
            for s, p in zip(samples, pieces, strict=True)
        ],
        "kind": kind, "starts": starts,
    }  # fmt: skip
    return [
        encode_value(told),
        *(_joined([getattr(c, n) for c in columns], t) for n, t in _COLUMNS),
        *(_joined([getattr(s, n) for s in samples], t) for n, t in _SAMPLE_COLUMNS),
        *bulk,
    ]


def _with_stand_in(step: Any) -> Any:
    """A turn whose experts are zeros of the size that they have: enough to check and to plan with. The zeros are never touched."""
    routed = _routed(step)
    data = routed.get("data") if isinstance(routed, dict) and "bulk" not in routed else routed
    if not isinstance(data, dict) or "bulk" not in data:
        return step
    if data["bulk"] == "array":
        value: Any = np.zeros(data["shape"], np.dtype(data["dtype"]))
    elif data["bulk"] == "text":
        value = ("A" if data["ascii"] else "é") * data["size"]
    else:
        value = np.zeros(data["size"], np.uint8).data
    step["tokens"]["routed_experts"] = value if data is routed else {**routed, "data": value}
    return step


def _needed_rows(rollout: Rollout, pieces: list[list[Piece]]) -> tuple[list[int | None], list[bytes | memoryview]]:
    """By turn: the first token whose row is needed, and its rows from there on, decoded."""
    spans = {turn: (first, stop) for own in pieces for turn, first, stop in own}  # a turn is of one sample
    starts: list[int | None] = []
    rows: list[bytes | memoryview] = []
    for turn, step in enumerate(rollout.trajectory):
        routed = None if step.tokens is None else step.tokens.routed_experts
        starts.append(None if turn not in spans else spans[turn][0])
        rows.append(b"" if turn not in spans or routed is None else routed.rows(*spans[turn]).reshape(-1).data)
    return starts, rows


def _joined(columns: list[np.ndarray], dtype: Any) -> bytes | memoryview:
    whole = np.concatenate(columns) if columns else np.empty(0, dtype)
    return whole.view(np.uint8).data if whole.size else b""
