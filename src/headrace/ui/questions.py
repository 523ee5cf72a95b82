"""Questions that make windows of a run again: the documents of a step, the steps of a document, where the data of two runs parts.

They are answered by `headrace.provenance`, as `headrace step`, `find` and `diff` answer them, in a worker process: one question at a time, at
low priority, with a deadline. A question that passes its deadline ends the worker, and the next question starts another.
This module is the only one of the page that imports `headrace.provenance.steps`, which imports torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson

from headrace.errors import DeadlineExceeded, HeadraceError, WorkerDied
from headrace.runtime.workers import WorkerProcess

DEADLINE = 60.0
_CHARS = 240
_AROUND = 8
"""Steps before and after the given one in which a text is looked for."""
_BLOCK_CHARS = 40_000


class Questions:
    """Asks the worker process. Safe to use from several threads: questions are answered one at a time."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        """`deadline`: seconds for one question."""
        self._deadline = deadline
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one of `QUESTIONS`. HeadraceError with the worker's sentence, DeadlineExceeded, or WorkerDied."""
        if not self._lock.acquire(timeout=self._deadline):
            raise DeadlineExceeded(f"another question has taken {self._deadline:g} s: try again")
        try:
            if self._worker is None or not self._worker.is_alive():
                self._stop()
                self._worker = WorkerProcess("headrace-ui-questions", _work, imports_main=False)
            pipe = self._worker.pipe
            pipe.send_bytes(orjson.dumps([question, arguments], default=str))
            if not pipe.poll(self._deadline):
                self._stop()
                raise DeadlineExceeded(
                    f"the question took longer than {self._deadline:g} s and was given up; `headrace {question}` has no such limit"
                )
            answer = orjson.loads(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._stop()
            raise WorkerDied(
                "the process that makes documents again died: ask again, or see `headrace step` for its error"
            ) from error
        finally:
            self._lock.release()
        if "error" in answer:
            raise HeadraceError(answer["error"])
        return answer["answer"]

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.end()
            self._worker = None


# ------------------------------------------------------------------------------------------- in the worker


def _work(pipe: Connection) -> None:
    """Answer questions until the server closes the pipe."""
    with contextlib.suppress(OSError):
        os.nice(10)
    while True:
        question, arguments = orjson.loads(pipe.recv_bytes())
        try:
            answer = to_json({"answer": QUESTIONS[question](**arguments)})
        except HeadraceError as error:
            answer = to_json({"error": str(error)})
        except (OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError, MemoryError) as error:
            answer = to_json({"error": f"the run's files make no sense: {type(error).__name__}: {error}"[:500]})
        pipe.send_bytes(answer)


def to_json(value: Any) -> bytes:
    """The value as JSON. orjson writes null for NaN."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY, default=str)


_opened: dict[str, Any] = {}
"""The run that was asked about last, and size and time of its record when it was opened."""


def _run(path: str) -> Any:
    """The record of the run in a folder. Kept open between questions, and opened again when the run has recorded more."""
    from headrace.provenance.steps import RunProvenance
    from headrace.runs.recorded import recorded_run

    flight = Path(path) / "flight.jsonl"
    status = flight.stat() if flight.exists() else None
    key = path, status and (status.st_size, status.st_mtime_ns)
    if _opened.get("key") != key:
        if "run" in _opened:
            _opened.pop("run").close()
        _opened.clear()
        _opened["run"] = RunProvenance(recorded_run(Path(path)))
        _opened["key"] = key
    return _opened["run"]


def step(path: str, number: int, rank: int | None = None) -> Any:
    """The documents of a step, as `headrace step` shows them."""
    return _run(path).step(number, rank=rank, chars=_CHARS)


def tokens(path: str, sample: int) -> dict[str, Any]:
    """The block of one sample with the text of every token, document by document."""
    run = _run(path)
    (rebuilt,) = run.rebuild(range(sample, sample + 1))
    pieces = []
    left = _BLOCK_CHARS
    for piece, _ in run.pieces(rebuilt, 1):
        ids = rebuilt.window.blocks.tokens[rebuilt.place.block, piece.column : piece.column + piece.length]
        texts = []
        for one in token_texts(run.data.tokenizer.decode, ids.tolist()):
            left -= len(one)
            if left < 0:
                break
            texts.append(one)
        pieces.append(
            {"source": piece.source, "file": piece.file, "row": piece.row, "start": piece.start, "length": piece.length, "column": piece.column,
             "texts": texts, "ids": ids[: len(texts)].tolist()}
        )  # fmt: skip
    return {"sample": sample, "pieces": pieces}


def token_texts(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
    """The text of each token. A character of several tokens belongs to the last of them."""
    texts: list[str] = []
    held: list[int] = []
    for one in ids:
        held.append(one)
        text = decode(held)
        if "\ufffd" in text and len(held) < 8:
            texts.append("")
        else:
            texts.append(text)
            held = []
    return texts


def find(path: str, source: str, row: int, file: str | None = None) -> Any:
    """The steps that saw a document, as `headrace find` shows them."""
    return _run(path).find(source, row, file)


def search(path: str, text: str, around: int) -> dict[str, Any]:
    """Documents of the steps around `around` that contain `text`."""
    run = _run(path)
    found, looked = [], []
    for number in range(max(around - _AROUND, 1), around + _AROUND + 1):
        try:
            documents = run.step(number, chars=20_000).documents
        except HeadraceError:
            if number == around:
                raise
            continue
        looked.append(number)
        for document in documents:
            at = (document.text or "").lower().find(text.lower())
            if document.text and at >= 0 and len(found) < 200:
                found.append(asdict(document) | {"step": number, "text": document.text[max(at - 60, 0) : at + 120]})
    return {"steps": looked, "documents": found}


def diff(a: str, b: str) -> Any:
    """Where the data of two runs parts, as `headrace diff` shows it."""
    from headrace.provenance.diff import diff_runs
    from headrace.runs.recorded import recorded_run

    return diff_runs(recorded_run(Path(a)), recorded_run(Path(b)))


QUESTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (step, tokens, find, search, diff)
}
