"""Questions that make windows again: the documents of a step, the steps of a document, where two runs part.

They are answered by `headrace.provenance`, as `headrace step`, `find` and `diff` answer them, in a worker process: one question at a time, at
low priority, with a deadline. A question that passes its deadline ends the worker, and the next question starts another.
This module is the only one of the page that imports `headrace.provenance`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.errors import DeadlineExceeded, HeadraceError, WorkerDied

__all__ = ["QUESTIONS", "Questions"]

DEADLINE = 60.0
_CHARS = 240
_AROUND = 8
"""Steps before and after the given one in which a text is looked for."""
_BLOCK_CHARS = 40_000


class Questions:
    """Asks the worker process. Safe to use from several threads: questions are answered one at a time."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Connection | None = None

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """The answer of one of `QUESTIONS`. HeadraceError with the worker's sentence, DeadlineExceeded, or WorkerDied."""
        if not self._lock.acquire(timeout=self._deadline):
            raise DeadlineExceeded(f"another question has taken {self._deadline:g} s: try again")
        try:
            pipe = self._start()
            pipe.send((question, arguments))
            if not pipe.poll(self._deadline):
                self._stop()
                raise DeadlineExceeded(
                    f"the question took longer than {self._deadline:g} s and was given up; `headrace {question}` has no such limit"
                )
            ok, answer = pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._stop()
            raise WorkerDied(
                "the process that makes documents again died: ask again, or see `headrace step` for its error"
            ) from error
        finally:
            self._lock.release()
        if not ok:
            raise HeadraceError(answer)
        return answer

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        if self._process is None or not self._process.is_alive() or self._pipe is None:
            self._stop()
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs,), name="headrace-ui-questions", daemon=True)
            self._process.start()
            theirs.close()
            self._pipe = ours
        return self._pipe

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


# ------------------------------------------------------------------------------------------- in the worker


def _work(pipe: Connection) -> None:
    """Answer questions until the server closes the pipe."""
    with contextlib.suppress(OSError):
        os.nice(10)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            question, arguments = pipe.recv()
            try:
                answer = True, QUESTIONS[question](**arguments)
            except HeadraceError as error:
                answer = False, str(error)
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                IndexError,
                AssertionError,
                RecursionError,
                MemoryError,
            ) as error:
                answer = False, f"the run's files make no sense: {type(error).__name__}: {error}"[:500]
            pipe.send(answer)


_opened: dict[str, Any] = {}
"""The run that was asked about last, and when its record was read."""


def _run(path: Path) -> Any:
    """The run's record. Kept open between questions, and opened again when the run has recorded more."""
    from headrace.provenance.steps import RunProvenance
    from headrace.runs.recorded import recorded_run

    status = (path / "flight.jsonl").stat() if (path / "flight.jsonl").exists() else None
    key = str(path), status and (status.st_size, status.st_mtime_ns)
    if _opened.get("key") != key:
        if "run" in _opened:
            _opened.pop("run").close()
        _opened.clear()
        _opened["run"] = RunProvenance(recorded_run(path))
        _opened["key"] = key
    return _opened["run"]


def step(path: Path, number: int, rank: int | None = None) -> dict[str, Any]:
    """The documents of a step, as `headrace step` tells them."""
    return _run(path).step(number, rank=rank, chars=_CHARS).to_dict()


def tokens(path: Path, sample: int) -> dict[str, Any]:
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
    """The text of each token. A character that is spread over several tokens belongs to the last of them."""
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


def find(path: Path, source: str, row: int, file: str | None = None) -> dict[str, Any]:
    """The steps that saw a document, as `headrace find` tells them."""
    return _run(path).find(source, row, file).to_dict()


def search(path: Path, text: str, around: int) -> dict[str, Any]:
    """Documents whose text, as far as the steps around `around` hold it, contains `text`."""
    run = _run(path)
    found, looked = [], []
    for number in range(max(around - _AROUND, 1), around + _AROUND + 1):
        try:
            story = run.step(number, chars=20_000).to_dict()
        except HeadraceError:
            if number == around:
                raise
            continue
        looked.append(number)
        for document in story["documents"]:
            at = (document["text"] or "").lower().find(text.lower())
            if at >= 0 and len(found) < 200:
                found.append(document | {"step": number, "text": document["text"][max(at - 60, 0) : at + 120]})
    return {"steps": looked, "documents": found}


def diff(a: Path, b: Path) -> dict[str, Any]:
    """Where the data of two runs parts, as `headrace diff` tells it."""
    from headrace.provenance.diff import diff_runs
    from headrace.runs.recorded import recorded_run

    return diff_runs(recorded_run(a), recorded_run(b)).to_dict()


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "step": step,
    "tokens": tokens,
    "find": find,
    "search": search,
    "diff": diff,
}
