"""Windows made ahead of need, by worker processes.

They pay for a tokenizer written in Python, and wherever the interpreter's lock is short: the trainer's own code needs it, or the
fastest encoder leaves it no time. A worker opens the dataset anew from its recipe and
answers requests for windows; which worker makes a window changes only the time it takes. The lanes are shared out, so
that documents which one window encoded and did not use wait in the same process for the next.

A window comes through the worker's pipe, as plain values and raw arrays.

A worker that dies is an error with its name as soon as the kernel closes its pipe; one that hangs is an error at the
deadline of the waiting thread. A worker whose parent is gone ends by itself: its requests end too.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from headrace.errors import TokenizerError, WorkerDied
from headrace.loader.pool import WindowKey, WindowPool
from headrace.loader.windows import Window, WindowStart
from headrace.metrics import Meter, Wait
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess
from headrace.text import Blocks

_BLOCK_ARRAYS = {
    "tokens": np.int32, "piece_ptr": np.int64, "piece_doc": np.int64, "piece_start": np.int64, "piece_len": np.int32,
    "piece_next": np.int32, "real": np.int64, "row_count": np.int64, "hashes": np.uint64,
}  # fmt: skip


class _Task:
    __slots__ = ("answer", "error", "worker")

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.answer: Window | None = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class WindowProcesses:
    """A few processes, each with the lanes that are its own."""

    def __init__(
        self,
        recipe: Mapping[str, Any],
        *,
        workers: int,
        meter: Meter,
        deadline: float,
        found: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """`found` is called with every hole that a worker meets: the source's index, and the hole."""
        self._meter = meter
        self._deadline = deadline
        self._changed = threading.Condition()
        self._tasks: dict[WindowKey, _Task] = {}
        self._numbers = itertools.count()
        self._asked: dict[int, WindowKey] = {}
        self._dead: dict[int, str] = {}
        self._closed = False
        self._found = found
        self._processes = [WorkerProcess(f"headrace-worker-{i}", _serve, dict(recipe)) for i in range(workers)]
        self._sending = [threading.Lock() for _ in self._processes]
        self._threads = [
            threading.Thread(target=self._listen, args=(i,), name=f"headrace-worker-{i}-answers", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def request(self, key: WindowKey, priority: float) -> None:
        """Say that a window will be wanted; the lowest priority is made first."""
        with self._changed:
            if key in self._tasks or self._closed:
                return
            worker = key[1] % len(self._processes)
            task = self._tasks[key] = _Task(worker)
            if worker in self._dead:
                task.error = WorkerDied(self._dead[worker])
                return
            number = next(self._numbers)
            self._asked[number] = key
        self._send(worker, number, priority, key)

    def take(self, key: WindowKey, priority: float = float("-inf")) -> Window:
        """The window, made now or earlier. It is the caller's from here on."""
        self.request(key, priority)
        with self._changed:
            task = self._tasks[key]
            if not task.done:
                name = self._processes[task.worker].name
                with Wait(
                    "loader.window", meter=self._meter, deadline=self._deadline, hidden=True,
                    remedy=f"Worker process {name} (pid {self._processes[task.worker].pid}) hangs or is far too slow.",
                ) as wait:  # fmt: skip
                    while not task.done:
                        if self._closed:
                            raise WorkerDied("the worker processes were stopped while a window was being waited for")
                        wait.check()
                        self._changed.wait(min(0.5, max(wait.remaining(), 0.001)))
            del self._tasks[key]
        if task.error is not None:
            raise task.error
        assert task.answer is not None
        return task.answer

    def close(self, timeout: float = 2.0) -> None:
        """Stop the processes; one that does not go when its pipe is closed is killed."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + timeout
        for process, sending in zip(self._processes, self._sending, strict=True):
            with contextlib.suppress(OSError, ValueError), sending:
                process.pipe.send_bytes(b"")
        for process in self._processes:
            if process.exit_code(max(until - 0.5 - time.monotonic(), 0.05)) is None:
                process.kill()
        for thread in self._threads:  # before the pipes: a thread listens until its pipe ends
            thread.join(max(until - time.monotonic(), 0.05))
        for process in self._processes:
            process.end()

    def _send(self, worker: int, number: int, priority: float, key: WindowKey) -> None:
        try:
            with self._sending[worker]:
                self._processes[worker].pipe.send_bytes(msgspec.msgpack.encode((number, priority, key)))
        except (OSError, ValueError):  # the process is gone: the thread that reads its pipe reports that
            return

    def _listen(self, worker: int) -> None:
        pipe = self._processes[worker].pipe
        while True:
            try:
                head = msgspec.msgpack.decode(pipe.recv_bytes())
                body = [pipe.recv_bytes() for _ in range(head["parts"])]
            except (EOFError, OSError, ValueError):
                self._bury(worker)
                return
            self._processes[worker].has_answered = True
            for name, value in head["metrics"].items():
                self._meter.add(name, value)
            window, error = None, None
            if "error" in head:
                error = decode_error(head["error"], otherwise=TokenizerError)
            else:
                window = _unpacked(head, body)
            for i, hole in head["holes"]:
                self._found(i, hole)
            with self._changed:
                task = self._tasks.get(self._asked.pop(head["number"]))
                if task is not None:
                    task.answer, task.error = window, error
                self._changed.notify_all()

    def _bury(self, worker: int) -> None:
        """A worker is gone: everything that was asked of it fails with its name."""
        reason = f"{self._processes[worker].describe_end()}. Its windows cannot come; resume the run."
        with self._changed:
            self._dead[worker] = reason
            for task in self._tasks.values():
                if task.worker == worker and not task.done and not self._closed:
                    task.error = WorkerDied(reason)
            self._changed.notify_all()


# ------------------------------------------------------------------------------------------- in the worker


def _serve(pipe: Connection, recipe: dict[str, Any]) -> None:
    """What a worker process does until its pipe closes."""
    from headrace.loader.dataset import TextDataset

    bound = recipe.pop("bound")
    try:
        data = TextDataset(**recipe)
        if bound:
            data.expect_recorded()
    except BaseException as error:
        _refuse_all(pipe, error)
        return
    pool = WindowPool(data.make_window, workers=0, meter=data.meter, deadline=recipe.get("deadline", 3600.0))
    waiting: list[tuple[float, int, WindowKey]] = []
    reported: list[int] = [0] * len(data.sources)
    while True:
        try:
            while not waiting or pipe.poll():
                message = pipe.recv_bytes()
                if not message:
                    return
                number, priority, (source, lane, start) = msgspec.msgpack.decode(message)
                wanted = (source, lane, WindowStart(*start))
                data.look_ahead(wanted)
                waiting.append((priority, number, wanted))
            waiting.sort(reverse=True)
            _, number, key = waiting.pop()
            parts: list[bytes | memoryview] = []
            head: dict[str, Any] = {"number": number}
            try:
                window = pool.take(key)
            except Exception as error:
                head["error"] = encode_error(error)
            else:
                head |= _packed(window, parts)
            totals = data.meter.drain()
            head["metrics"] = {k: v for k, v in totals.items() if k.startswith(("phase/", "text/"))}
            head["holes"] = []
            for i, opened in enumerate(data.sources):
                holes = opened.holes()
                head["holes"] += [(i, hole) for hole in holes[reported[i] :]]
                reported[i] = len(holes)
            head["parts"] = len(parts)
            pipe.send_bytes(msgspec.msgpack.encode(head))
            for part in parts:
                pipe.send_bytes(part)
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
            return


def _refuse_all(pipe: Connection, error: BaseException) -> None:
    """The dataset could not be opened here: every request is answered with the reason."""
    head = {"error": encode_error(error), "metrics": {}, "holes": [], "parts": 0}
    while True:
        try:
            message = pipe.recv_bytes()
            if not message:
                return
            number = msgspec.msgpack.decode(message)[0]
            pipe.send_bytes(msgspec.msgpack.encode(head | {"number": number}))
        except (EOFError, OSError):
            return


def _packed(window: Window, parts: list[bytes | memoryview]) -> dict[str, Any]:
    """A window as plain values, its arrays appended to `parts` as bytes: what crosses the pipe is never unpickled."""
    blocks = window.blocks
    arrays = [*(getattr(blocks, name) for name in _BLOCK_ARRAYS), window.doc_chunk, window.doc_row]
    parts.extend(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data if a.size else b"" for a in arrays)
    return {
        "source": window.source, "lane": window.lane, "start": window.start, "end": window.end,
        "width": blocks.tokens.shape[1], "documents": window.documents, "empty": window.empty, "bad": window.bad,
        "cut": window.cut,
    }  # fmt: skip


def _unpacked(head: Mapping[str, Any], parts: list[bytes]) -> Window:
    dtypes = [*_BLOCK_ARRAYS.values(), np.int64, np.int64]
    *of_blocks, doc_chunk, doc_row = (np.frombuffer(part, dtype) for part, dtype in zip(parts, dtypes, strict=True))
    arrays = dict(zip(_BLOCK_ARRAYS, of_blocks, strict=True))
    arrays["tokens"] = arrays["tokens"].reshape(-1, head["width"])
    arrays["hashes"] = arrays["hashes"].reshape(-1, 2)
    return Window(
        source=head["source"],
        lane=head["lane"],
        start=WindowStart(*head["start"]),
        end=WindowStart(*head["end"]),
        blocks=Blocks(**arrays),
        doc_chunk=doc_chunk,
        doc_row=doc_row,
        documents=head["documents"],
        empty=head["empty"],
        bad=head["bad"],
        cut=head["cut"],
    )
