"""The batches of one split, for one rank.

    background thread      PartFiles.open_next()     opens, checks and judges file k (verdicts.py), and takes this rank's rows of it
                                 │  two files ahead (runtime/prefetch.py)
    trainer's thread       SplitReader.read(B)       the next B samples: slices of the open files' rows
                           SplitReader.advance()     counts them as delivered; files read to their end are finished

An open file holds this rank's rows without gaps, so a batch is a slice of them. There are two routes to these rows:

    view        arrays of the privately mapped file: a single rank on a local disk. Writing to a batch copies the pages written to
    gathered    rows that the background thread copies into memory of a pool: several ranks, a network file system, circular splits

The position is one number, the global sample; the (file, row) pairs beside it say where that sample lies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from headrace.batch import BatchSpec
from headrace.errors import CursorMismatch, DataError, EndOfData
from headrace.runtime.buffers import BufferPool
from headrace.runtime.prefetch import Prefetch
from headrace.spool.batch_file import BatchFile
from headrace.spool.channel import Channel
from headrace.spool.rows import Rows, Stripe, gather_rows, merge_rows, rows_before, slice_rows
from headrace.spool.verdicts import FileChecker


@dataclass(slots=True, eq=False)
class OpenFile:
    """A checked file, and this rank's rows of it."""

    seq: int
    start: int
    """Row of the part at which the file begins."""
    file: BatchFile
    rows: Rows
    """This rank's rows, without gaps."""
    first: int
    """The rank's first row in the file."""
    step: int
    """Distance between the rank's rows in the file."""
    last: bool
    """Whether the part ends with this file."""

    @property
    def end(self) -> int:
        """Row of the part at which the next file begins."""
        return self.start + self.file.rows

    def own_before(self, row: int) -> int:
        """How many of the rank's rows lie below row `row` of the part."""
        return max(0, -(-(min(row, self.end) - self.start - self.first) // self.step))


class PartFiles:
    """Opens the files of one part, one after the other. Used by the background thread."""

    def __init__(
        self,
        channel: Channel,
        checker: FileChecker,
        stripe: Stripe,
        pool: BufferPool | None,
        *,
        seq: int,
        start: int,
        circular: int = 0,
        keep: int = 1,
    ) -> None:
        """`pool`: memory that rows are gathered in; None: views of the mapped file. `seq`, `start`: the first file, and the row of the part at which
        it begins. `circular`: number of files that are read over and over, of which `keep` stay open; 0: each file is read once. A trainer may
        write to a view, so the rows of a circular part must be gathered."""
        self._channel, self._checker, self._stripe, self._pool = channel, checker, stripe, pool
        self._seq, self._start, self._circular = seq, start, circular
        self._open_again = lru_cache(keep)(lambda number: checker.open(channel, number, start))
        self._ended = False
        self._empty = 0
        """Number of consecutive files without rows."""

    def open_next(self) -> OpenFile | None:
        """The next file; None after the last. NotReady while it is missing or has no verdict."""
        if self._ended:
            return None
        file = self._next_file()
        own = self._stripe.rows_of(self._channel.part, self._channel.parts, self._start)
        first, step = own if own is not None else (file.rows, 1)
        rows: Rows = file.arrays
        if self._pool is not None or step > 1 or first:
            rows = gather_rows(file.header.schema, rows, first, step, self._pool.array if self._pool else None)
        opened = OpenFile(self._seq, self._start, file, rows, first, step, file.last and not self._circular)
        self._seq, self._start, self._ended = self._seq + 1, opened.end, opened.last
        return opened

    def _next_file(self) -> BatchFile:
        if not self._circular:
            return self._checker.open(self._channel, self._seq, self._start)
        file = self._open_again(self._seq % self._circular)
        self._empty = self._empty + 1 if not file.rows else 0
        if self._empty > self._circular:
            raise DataError(
                f"no file of {self._channel} in {self._channel.folder.path} holds a row: let its provider make them again"
            )
        return file


class PartReader:
    """The open files of one part, from the file that holds the next row on."""

    def __init__(self, number: int, files: Prefetch[OpenFile], seq: int, start: int) -> None:
        self.number, self.files = number, files
        self.seq, self.start = seq, start
        """The file that holds the next row, and the row of the part at which it begins."""
        self.open: deque[OpenFile] = deque()
        self.last: int | None = None
        """Rows of the part, once its last file is open."""
        self.entered = -1
        """The last file of which a row was delivered."""
        self._finished_last = False

    @property
    def reached(self) -> int:
        """The row of the part at which the open files end."""
        return self.open[-1].end if self.open else self.start

    def cover(self, row: int, until: float) -> int:
        """Open files until they reach `row` or the part ends; returns `row`, or where the part ends before it. `until`: time.monotonic."""
        while self.last is None and self.reached < row:
            opened = self.files.take(max(0.0, until - time.monotonic()))
            self.open.append(opened)
            if opened.last:
                self.last = opened.end
        return row if self.last is None else min(row, self.last)

    def pieces(self, begin: int, end: int) -> list[tuple[OpenFile, int, int]]:
        """The rank's rows among rows begin … end−1 of the part, as (file, first, stop) in `OpenFile.rows`."""
        overlapping = (opened for opened in self.open if opened.start < end and opened.end > begin)
        return [(opened, opened.own_before(begin), opened.own_before(end)) for opened in overlapping]

    def advance(self, row: int) -> list[OpenFile]:
        """Count rows below `row` as delivered; returns the files that are finished. The last file of a part stays open: its end must be known."""
        finished = []
        while self.open and self.open[0].end <= row and not self.open[0].last:
            finished.append(self.open.popleft())
            self.seq, self.start = finished[-1].seq + 1, finished[-1].end
        if self.last is not None and row >= self.last and not self._finished_last:
            self._finished_last = True
            finished.append(self.open[0])
        return finished


class SplitReader:
    """The samples of one split in global order, as batches of this rank's rows."""

    def __init__(
        self,
        split: str,
        schema: BatchSpec,
        stripe: Stripe,
        parts: list[PartReader],
        position: int,
        *,
        circular: int,
        deadline: float,
        pool: BufferPool,
        entered: Callable[[str, int, int], None],
        finished: Callable[[SplitReader, PartReader, OpenFile], None],
    ) -> None:
        """`position`: the next sample. `circular`: number of files that are read over and over; 0: each file is read once. `deadline`: the longest
        wait for a batch, in seconds. `pool`: memory of batches that are put together from several slices. `entered`: called with (split, number,
        end row of the file) before its first row is delivered. `finished`: called after its last row was delivered."""
        self.split, self.schema, self.parts, self.circular = split, schema, parts, circular
        self.position, self.batches = position, 0
        self._stripe, self._deadline, self._pool = stripe, deadline, pool
        self._entered, self._finished = entered, finished
        self._end = position
        """The sample at which the batch that was read last ends."""

    def cover(self, batch_size: int, deadline: float) -> int:
        """Open the files that hold the next batch; returns the sample at which it ends, which is earlier if the split ends.

        EndOfData if there is no sample left, DeadlineExceeded if the files were not there within `deadline` seconds."""
        begin, end, parts = self.position, self.position + batch_size, len(self.parts)
        until, limit = time.monotonic() + deadline, end
        for part in self.parts:
            wanted = rows_before(end, part.number, parts)
            reached = part.cover(wanted, until)
            if reached < wanted:
                limit = min(limit, reached * parts + part.number)
        if limit <= begin:
            raise EndOfData(
                f"{self.split} ended after {begin:,} samples; start a new spool to go on. What was not committed can be read again (reset_state)"
            )
        return limit

    def read(self, batch_size: int) -> dict[str, np.ndarray]:
        """The rank's share of the next `batch_size` samples. A short last batch repeats its samples. `advance` counts it as delivered."""
        begin, limit = self.position, self.cover(batch_size, self._deadline)
        self._end = limit
        if limit < begin + batch_size:
            return self._short_batch(begin, limit, batch_size)
        found: list[tuple[slice, Rows]] = []
        for part in self.parts:
            bounds = (rows_before(g, part.number, len(self.parts)) for g in (begin, limit))
            places = self._stripe.places_of(part.number, len(self.parts), begin)
            place, stride = places if places is not None else (0, 1)
            for opened, first, stop in part.pieces(*bounds):
                self._enter(part, opened)
                rows = slice_rows(self.schema, opened.rows, first, stop)
                if len(self.parts) == 1 and stop - first == batch_size // self._stripe.world_size:
                    return rows
                found.append((slice(place, place + (stop - first) * stride, stride), rows))
                place += (stop - first) * stride
        return merge_rows(self.schema, found, batch_size // self._stripe.world_size, self._pool.array)

    def _enter(self, part: PartReader, opened: OpenFile) -> None:
        if opened.seq > part.entered and not self.circular:
            part.entered = opened.seq
            self._entered(self.split, opened.seq, opened.end)

    def _short_batch(self, begin: int, limit: int, batch_size: int) -> dict[str, np.ndarray]:
        """The last batch, filled by repeating its samples. They may be rows of other ranks, which were not checked yet."""
        world, parts = self._stripe.world_size, len(self.parts)
        for part in self.parts:
            first, end = (rows_before(g, part.number, parts) for g in (begin, limit))
            for opened in part.open:
                opened.file.check(max(0, first - opened.start), end - opened.start)
        samples = [begin + i % (limit - begin) for i in range(batch_size) if (begin + i) % world == self._stripe.rank]
        found: list[tuple[slice, Rows]] = []
        for place, g in enumerate(samples):
            part, row = self.parts[g % parts], g // parts
            opened = next(opened for opened in part.open if row < opened.end)
            self._enter(part, opened)
            row -= opened.start
            found.append((slice(place, place + 1), slice_rows(self.schema, opened.file.arrays, row, row + 1)))
        return merge_rows(self.schema, found, len(samples), self._pool.array)

    def advance(self) -> None:
        """Count the batch that was read last as delivered."""
        self.position, parts = self._end, len(self.parts)
        self.batches += 1
        for part in self.parts:
            row = rows_before(self.position, part.number, parts)
            for opened in part.advance(row):
                self._finished(self, part, opened)

    def state(self) -> dict[str, Any]:
        """The next sample `g`; for each part, `at`: the file and row of its next sample, and `start`: the row at which that file begins."""
        numbers = [part.seq % self.circular if self.circular else part.seq for part in self.parts]
        rows = [rows_before(self.position, part.number, len(self.parts)) - part.start for part in self.parts]
        at = [[seq, row] for seq, row in zip(numbers, rows, strict=True)]
        return {"g": self.position, "at": at, "start": [part.start for part in self.parts]}

    def close(self) -> None:
        for part in self.parts:
            part.files.close()


def checked_position(split: str, value: Any, parts: int) -> dict[str, Any]:
    """A position of a split as `SplitReader.state` returns it; CursorMismatch if it is malformed or has not this many parts."""
    try:
        g, at, start = value["g"], [list(map(int, pair)) for pair in value["at"]], list(map(int, value["start"]))
        if type(g) is not int or min(g, *start, *(n for pair in at for n in pair)) < 0 or any(len(p) != 2 for p in at):
            raise ValueError("a negative number")
        if len(at) != parts or len(start) != len(at):
            raise ValueError(f"{len(at)} parts")
    except (KeyError, TypeError, ValueError) as error:
        raise CursorMismatch(
            f"spool state of {split!r} is malformed ({error}): it was not made by state_dict()"
        ) from error
    return {"g": g, "at": at, "start": start}
