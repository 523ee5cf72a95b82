"""Readers of rows of files of cells.

`CellReaders` keeps the files of a pool open and opens the next ones ahead in a thread, with their first rows decoded: slices of a pool
end close together, up to K within K steps, and a row group takes longer to decode than a batch to train on.

`CellProcesses` reads in worker processes. A worker receives requests for rows and answers with rows. The plan decides which worker reads a
slice, a slice stays with one worker, and answers are taken in the order of the plan. So the number of workers changes nothing but
the time, and a worker holds no state that a resume would need.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from headrace import errors
from headrace.errors import DataError, HeadraceError, WorkerDied
from headrace.metrics import Meter, Wait, default_meter
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess
from headrace.sources.cell_hashes import CellHashes
from headrace.sources.cells import CellFile, CellOpener, Cells, open_cells
from headrace.sources.stream_files import StreamFile


class _Request(NamedTuple):
    worker: int
    stream: int
    start: int
    stop: int


def rows_text(path: str, start: int, stop: int) -> str:
    """`rows 64 to 128 of rna/0.npz`: the rows [64, 128)."""
    return f"rows {start:,} to {stop:,} of {path}"


class CellReaders:
    """Open files, by stream. One thread reads; another opens ahead."""

    def __init__(
        self,
        files: Sequence[StreamFile],
        *,
        hashes: CellHashes,
        columns: Sequence[str] | None = None,
        readers: Mapping[str, CellOpener] | None = None,
        units_at_once: int = 1,
        meter: Meter | None = None,
        deadline: float = 300.0,
    ) -> None:
        """Args:
        files: The files, by stream. One with another number of rows than when it was listed is refused.
        hashes: Recorded hashes that the rows are compared with.
        columns: Columns to read; all unless given.
        readers: Openers of further formats, by suffix.
        units_at_once: Units of the hashes to read in one go, if the rows after those that are asked for will be asked for next.
        meter: Meter of the waits.
        deadline: Seconds that a wait may take.
        """
        self._files = files
        self._columns = columns
        self._readers = readers
        self._hashes = hashes
        self._units_at_once = units_at_once
        self._held: dict[int, tuple[int, int, Cells]] = {}
        """By stream, the rows [first, last) of the units that were read last."""
        self._meter = meter if meter is not None else default_meter()
        self._deadline = deadline
        self._open: dict[int, CellFile] = {}
        self._coming: dict[int, Future[CellFile]] = {}
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="headrace-open-ahead")  # starts no thread yet

    def read(self, stream: int, start: int, stop: int, *, dry: bool = False) -> Cells:
        """Return the cells of rows [start, stop) of a stream. `dry`: they are the last, so the file is closed."""
        file = self._open.get(stream)
        if file is None:
            file = self._open[stream] = self._arrived(stream)
        if start >= stop:
            cells = file.read(start, stop)
        else:
            first, last, held = self._held.get(stream, (0, 0, {}))
            if not first <= start < stop <= last:
                # The units before these are freed only now. Freed at the end of their rows, at about the same time for all files, they would be
                # given back to the system, and 512 KiB of new pages cost more than the read.
                first, last, held = self._held[stream] = self._read_units(file, stream, start, stop)
            if (first, last) == (start, stop):
                del self._held[stream]
            cells = {name: column[start - first : stop - first] for name, column in held.items()}
        if dry:
            self._held.pop(stream, None)
            self._open.pop(stream).close()
        return cells

    def _read_units(self, file: CellFile, stream: int, start: int, stop: int) -> tuple[int, int, Cells]:
        """The whole units that hold rows [start, stop), compared with their hashes."""
        size = self._hashes.unit_rows[stream]
        first = start // size * size
        last = min(max(-(-stop // size) * size, first + self._units_at_once * size), file.rows)
        cells = file.read(first, max(stop, last))  # a file that is too short is refused there
        # Of all ranks that read parts of a unit, the one that is given its first row records it.
        changed = self._hashes.first_changed(stream, first, cells, keep_from=start)
        if changed is not None:
            raise errors.DataChanged(
                f"{rows_text(self._files[stream].path, changed, min(changed + size, last))} are not the cells that were read there first: the "
                "file changed, though not in size. The run would train on other cells than it says; restore the file, or accept the change with "
                '--accept data (load_state_dict(..., accept={"data"})).'
            )
        return first, last, cells

    def expect(self, streams: Sequence[int]) -> None:
        """Open these streams ahead, if they are not open yet."""
        for stream in streams:
            if stream not in self._open and stream not in self._coming:
                self._coming[stream] = self._opener.submit(self._opened_ahead, stream)

    def close(self) -> None:
        with Wait("streams.close", meter=self._meter, deadline=self._deadline):  # for the file that is being opened
            self._opener.shutdown(wait=True, cancel_futures=True)
        for future in self._coming.values():
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().close()
        for file in self._open.values():
            file.close()
        self._coming, self._open, self._held = {}, {}, {}

    def _arrived(self, stream: int) -> CellFile:
        future = self._coming.pop(stream, None)
        if future is None:
            return self._opened(stream)
        if future.done():
            return future.result()
        opening = f"It is opening {self._files[stream].path}: look at the disk or the mount, or give a longer deadline."
        with Wait("streams.open", meter=self._meter, deadline=self._deadline, remedy=opening) as wait:
            try:
                return future.result(timeout=wait.remaining())
            except TimeoutError:
                wait.check()
                raise

    def _opened(self, stream: int) -> CellFile:
        listed = self._files[stream]
        file = open_cells(Path(listed.path), self._columns, readers=self._readers)
        if file.rows != listed.rows:
            found = file.rows
            file.close()
            raise errors.DataChanged(
                f"{listed.path} has {found:,} rows; it had {listed.rows:,} when it was listed. The plan was made on those; restore the "
                "file, or start again with the new one."
            )
        return file

    def _opened_ahead(self, stream: int) -> CellFile:
        """The file with its first rows decoded."""
        file = self._opened(stream)
        if file.rows:
            file.read(0, 1)
        return file


class CellProcesses:
    """Worker processes that read rows. `ask` and `answer` are called by one thread, answers come in the order asked."""

    def __init__(
        self,
        files: Sequence[StreamFile],
        *,
        workers: int,
        hashes: Mapping[str, Any],
        meter: Meter | None = None,
        deadline: float = 300.0,
        **options: Any,
    ) -> None:
        """`hashes` are the further arguments of a CellHashes: every process has its own. `options`: further ones of `CellReaders`."""
        self._meter = meter if meter is not None else default_meter()
        self._deadline = deadline
        self._files = files
        self._asked: deque[_Request] = deque()
        self._workers = [
            WorkerProcess(f"headrace-cells-{i}", _serve, files, dict(hashes), options) for i in range(workers)
        ]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def ask(self, worker: int, stream: int, start: int, stop: int, *, dry: bool) -> None:
        """Ask for rows. `dry`: they are the last, so the file is closed."""
        self._asked.append(_Request(worker, stream, start, stop))
        try:
            self._workers[worker].pipe.send((stream, start, stop, dry))
        except OSError as error:
            raise self._lost(worker) from error

    def answer(self) -> Cells:
        """The rows that were asked for first."""
        worker = self._asked[0].worker
        pipe = self._workers[worker].pipe
        with Wait("streams.worker", meter=self._meter, deadline=self._deadline) as wait:
            try:
                while not pipe.poll(wait.remaining()):
                    wait.remedy = (
                        f"{self._process_text(worker)} still reads {self._rows_text(worker)}: look at the disk or the mount, or give "
                        "a longer deadline."
                    )
                    wait.check()
                cells, failure = pipe.recv()
            except (EOFError, ConnectionError) as error:
                raise self._lost(worker) from error
        # Only now: the answer to a request that was given up at its deadline must not be taken for that of the next one.
        self._asked.popleft()
        if failure is not None:
            raise decode_error(failure)
        return cells

    def forget(self) -> None:
        """Take in and throw away what was asked for and is no longer wanted."""
        while self._asked:
            with contextlib.suppress(DataError):
                self.answer()

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        with Wait("streams.close", meter=self._meter, deadline=3.0 * len(self._workers) + 1):
            for worker in self._workers:
                worker.end()
        self._workers = []
        self._asked.clear()

    def _process_text(self, worker: int) -> str:
        return f"reader process {worker} (pid {self._workers[worker].pid}) of {len(self._workers)}"

    def _rows_text(self, worker: int) -> str:
        """The first rows that a worker was asked for and has not sent."""
        first = next((r for r in self._asked if r.worker == worker), None)
        return "no rows" if first is None else rows_text(self._files[first.stream].path, first.start, first.stop)

    def _lost(self, worker: int) -> WorkerDied:
        return WorkerDied(
            f"{self._process_text(worker)} {self._workers[worker].how_it_ended()} while it read {self._rows_text(worker)}. Look at the system's "
            "log (out of memory?); the run can be resumed from its last checkpoint, with any num_workers."
        )


def _serve(
    pipe: Connection, files: Sequence[StreamFile], recorded: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """A worker: rows for requests, until the pipe is closed."""
    hashes = CellHashes(files=files, **recorded)
    readers = CellReaders(files, hashes=hashes, **options)
    try:
        while True:
            stream, start, stop, dry = pipe.recv()
            try:
                cells = readers.read(stream, start, stop, dry=dry)
            except HeadraceError as error:
                pipe.send((None, encode_error(error)))
                continue
            pipe.send((cells, None))
    finally:
        readers.close()
        hashes.close()
