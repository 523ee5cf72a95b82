"""Windows made ahead of need, by worker processes.

They pay for a tokenizer written in Python, and wherever the interpreter's lock is short: the trainer's own code needs it, or the fastest encoder
leaves it no time. A worker opens the dataset anew from its recipe and makes one window after the other. Each worker has the lanes that are its own,
and a `WindowPool` of one thread in the parent that asks it: so documents which one window encoded and did not use wait in the same process
for the next. Which process makes a window changes only the time it takes.

A window comes through the worker's pipe, as plain values and raw arrays. A worker that dies is an error with its name; one that hangs is an
error at the deadline of the waiting thread. A worker whose parent is gone ends by itself: its pipe has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from headrace.errors import TokenizerError, WorkerDied
from headrace.loader.pool import WindowKey, WindowPool
from headrace.loader.windows import Encoded, Window, WindowStart
from headrace.metrics import Meter
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess
from headrace.text import Blocks

_BLOCK_ARRAYS = {
    "tokens": np.int32, "piece_ptr": np.int64, "piece_doc": np.int64, "piece_start": np.int64, "piece_len": np.int32,
    "piece_next": np.int32, "real": np.int64, "row_count": np.int64, "hashes": np.uint64,
}  # fmt: skip


class WindowProcesses:
    """A few processes, each with the lanes that are its own: a `WindowSupply`."""

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
        self._processes = [_WindowProcess(f"headrace-worker-{i}", recipe, meter, found) for i in range(workers)]
        self._pools = [
            WindowPool(p.make, workers=1, meter=meter, deadline=deadline, look_ahead=p.look_ahead, maker=p.name)
            for p in self._processes
        ]

    def request(self, key: WindowKey, priority: float) -> None:
        """Say that a window will be wanted; the lowest priority is made first."""
        self._pools[key[1] % len(self._pools)].request(key, priority)

    def take(self, key: WindowKey, priority: float = float("-inf")) -> Window:
        """The window, made now or earlier. It is the caller's from here on."""
        return self._pools[key[1] % len(self._pools)].take(key, priority)

    def close(self, timeout: float = 2.0) -> None:
        """Stop the processes; one that does not go when it is asked to is killed."""
        for process in self._processes:
            process.stop()
        for process, pool in zip(self._processes, self._pools, strict=True):
            process.require_end(timeout / 2)
            pool.close(timeout / 2)  # before the pipe: its thread reads until the pipe ends
            process.worker.end()


class _WindowProcess:
    """One process, as the one thread that asks it sees it."""

    def __init__(
        self, name: str, recipe: Mapping[str, Any], meter: Meter, found: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self.worker = WorkerProcess(name, _serve, dict(recipe))
        self.name = f"Worker process {name} (pid {self.worker.pid})"
        self._meter, self._found = meter, found
        self._sending = threading.Lock()

    def look_ahead(self, key: WindowKey) -> None:
        """Have the process read ahead for a window that will be wanted."""
        with contextlib.suppress(OSError):  # a process that is gone is reported by `make`
            self._send(False, key)

    def make(self, key: WindowKey, carry: Encoded | None) -> tuple[Window, None]:
        """Have the process make a window. What it has left over stays there."""
        pipe = self.worker.pipe
        try:
            self._send(True, key)
            head = msgspec.msgpack.decode(pipe.recv_bytes())
            body = [pipe.recv_bytes() for _ in range(head["parts"])]
        except (EOFError, OSError, ValueError):
            raise WorkerDied(f"{self.worker.describe_end()}. Its windows cannot come; resume the run.") from None
        self.worker.has_answered = True
        for name, value in head["metrics"].items():
            self._meter.add(name, value)
        for source, hole in head["holes"]:
            self._found(source, hole)
        if "error" in head:
            raise decode_error(head["error"], otherwise=TokenizerError)
        return _unpacked(head, body), None

    def stop(self) -> None:
        """Ask the process to end."""
        with contextlib.suppress(OSError, ValueError), self._sending:
            self.worker.pipe.send_bytes(b"")

    def require_end(self, timeout: float) -> None:
        """Kill the process if it has not ended after `timeout` seconds."""
        if self.worker.exit_code(timeout) is None:
            self.worker.kill()

    def _send(self, make: bool, key: WindowKey) -> None:
        with self._sending:
            self.worker.pipe.send_bytes(msgspec.msgpack.encode((make, key)))


# ------------------------------------------------------------------------------------------- in the worker


def _serve(pipe: Connection, recipe: dict[str, Any]) -> None:
    """What a worker process does until its pipe closes."""
    from headrace.loader.dataset import TextDataset

    bound = recipe.pop("bound")
    try:
        data = TextDataset(**recipe)
        if bound:
            data.expect_recorded()
    except BaseException as error:  # every question is answered with the reason
        refusal = {"error": encode_error(error), "metrics": {}, "holes": [], "parts": 0}
        while message := pipe.recv_bytes():
            if _question(message)[0]:
                pipe.send_bytes(msgspec.msgpack.encode(refusal))
        return
    pool = WindowPool(data.make_window, workers=0, meter=data.meter, deadline=3600.0)
    reported = [0] * len(data.sources)
    while message := pipe.recv_bytes():
        make, key = _question(message)
        if not make:
            data.look_ahead(key)
            continue
        parts: list[bytes | memoryview] = []
        head: dict[str, Any] = {"holes": []}
        try:
            head |= _packed(pool.take(key), parts)
        except Exception as error:
            head["error"] = encode_error(error)
        totals = data.meter.drain()
        head["metrics"] = {k: v for k, v in totals.items() if k.startswith(("phase/", "text/"))}
        for i, opened in enumerate(data.sources):
            holes = opened.holes()
            head["holes"] += [(i, hole) for hole in holes[reported[i] :]]
            reported[i] = len(holes)
        head["parts"] = len(parts)
        pipe.send_bytes(msgspec.msgpack.encode(head))
        for part in parts:
            pipe.send_bytes(part)


def _question(message: bytes) -> tuple[bool, WindowKey]:
    """Whether a window is to be made or only read ahead for, and which."""
    make, (source, lane, start) = msgspec.msgpack.decode(message)
    return make, (source, lane, WindowStart(*start))


def _packed(window: Window, parts: list[bytes | memoryview]) -> dict[str, Any]:
    """A window as plain values, its arrays appended to `parts` as bytes: what crosses the pipe is never unpickled."""
    blocks = window.blocks
    arrays = [*(getattr(blocks, name) for name in _BLOCK_ARRAYS), window.doc_chunk, window.doc_row]
    parts.extend(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data if a.size else b"" for a in arrays)
    plain = {name: getattr(window, name) for name in ("source", "lane", "empty", "bad")}
    return {"plain": plain, "start": window.start, "end": window.end, "width": blocks.tokens.shape[1]}


def _unpacked(head: Mapping[str, Any], parts: list[bytes]) -> Window:
    dtypes = [*_BLOCK_ARRAYS.values(), np.int64, np.int64]
    *of_blocks, doc_chunk, doc_row = (np.frombuffer(part, dtype) for part, dtype in zip(parts, dtypes, strict=True))
    arrays = dict(zip(_BLOCK_ARRAYS, of_blocks, strict=True))
    arrays["tokens"] = arrays["tokens"].reshape(-1, head["width"])
    arrays["hashes"] = arrays["hashes"].reshape(-1, 2)
    start, end = WindowStart(*head["start"]), WindowStart(*head["end"])
    return Window(**head["plain"], start=start, end=end, blocks=Blocks(**arrays), doc_chunk=doc_chunk, doc_row=doc_row)
