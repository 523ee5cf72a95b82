"""Which rows make the next batch, and where they lie.

Sample g of a split lies in part g mod P, there in row g // P, and belongs to rank g mod W. A batch is the samples G … G+B−1,
whatever P and W are; a rank copies only its own of them, out of files that somebody has judged and whose rows it has
checked itself. The position is one number, G; the (file, row) pairs beside it only say where to look.

    QueueReader    files in order, each read once; a finite one ends with EndOfData
    RingReader     a fixed number of files, read again and again
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.buffers import BufferPool
from headrace.errors import EndOfData
from headrace.spool.batch_file import OFFSETS, BatchFile, numpy_dtype
from headrace.spool.meta import FieldSpec

__all__ = ["Part", "QueueReader", "RingReader", "Stripe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """Which samples a rank takes."""

    rank: int = 0
    world_size: int = 1

    def rows_of(self, part: int, parts: int, first: int) -> tuple[int, int] | None:
        """(start, step) of the rank's rows in a file of a part whose row 0 is row `first` of the part; None if it has none."""
        common = math.gcd(parts, self.world_size)
        if (part - self.rank) % common:
            return None
        step = self.world_size // common
        for row in range(step):
            if ((first + row) * parts + part) % self.world_size == self.rank:
                return row, step
        return None


@dataclass(slots=True)
class _Open:
    seq: int
    start: int
    """Row of the part at which it begins."""
    file: BatchFile

    @property
    def end(self) -> int:
        return self.start + self.file.rows


class Files(Protocol):
    """Where files come from: whoever prepares and checks them."""

    def want(self, part: int, seq: int, start: int) -> None:
        """Have this file prepared."""
        ...

    def take(self, part: int, seq: int, start: int) -> BatchFile: ...
    def entered(self, part: int, seq: int) -> None:
        """A row of this file is about to be delivered."""
        ...

    def finished(self, part: int, seq: int, file: BatchFile | None) -> None:
        """All rows of this file were delivered. Whoever drops the last reference unmaps it, and 32 MiB take a millisecond."""
        ...


class Part:
    """The open files of one part, from the one that holds the next row on."""

    def __init__(self, number: int, files: Files, seq: int, row: int, start: int) -> None:
        self.number, self._files = number, files
        self.seq, self.row = seq, row
        self.start = start
        """Row of the part at which file `seq` begins."""
        self._open: deque[_Open] = deque()
        self.last: int | None = None
        """Rows of the part, once its last file is open."""
        self.being_read: _Open | None = None
        """The file rows were delivered from last, as long as it has more."""

    @property
    def first(self) -> _Open | None:
        """The file that holds the next row, if it is open."""
        return self._open[0] if self._open else None

    def prefetch(self) -> None:
        self._files.want(self.number, self.seq, self.start)

    def enter(self, entry: _Open) -> None:
        """Rows of it are about to be delivered, the first ones first."""
        self._files.entered(self.number, entry.seq)
        self.being_read = entry

    def cover(self, end: int) -> int:
        """Open files until they reach row `end`, or the part's end; how far they reach."""
        while self.beyond(end) is not None:
            self.open_next()
        return min(end, self.last) if self.last is not None else end

    def open_next(self) -> None:
        """Open the file after the open ones."""
        seq, start = (self._open[-1].seq + 1, self._open[-1].end) if self._open else (self.seq, self.start)
        file = self._files.take(self.number, seq, start)
        self._open.append(_Open(seq, start, file))
        if file.last:
            self.last = self._open[-1].end

    def beyond(self, end: int) -> tuple[int, int] | None:
        """(number, first row) of the next file to open on the way to row `end`; None if the open ones reach it, or are all there are."""
        if self.last is not None or (self._open and self._open[-1].end >= end):
            return None
        return (self._open[-1].seq + 1, self._open[-1].end) if self._open else (self.seq, self.start)

    def spans(self, first: int, count: int, step: int) -> list[tuple[BatchFile, int, int]]:
        """Rows first, first + step, … (`count` of them) as (file, row in it, how many)."""
        found: list[tuple[BatchFile, int, int]] = []
        for entry in self._open:
            if count <= 0:
                break
            if first >= entry.end:
                continue
            many = min(count, -(-(entry.end - first) // step))
            self._files.entered(self.number, entry.seq)
            self.being_read = entry if entry is self._open[0] else None
            found.append((entry.file, first - entry.start, many))
            first += many * step
            count -= many
        return found

    def advance(self, row: int) -> None:
        """Rows below `row` of the part were delivered."""
        while self._open and self._open[0].end <= row and not (self.last is not None and len(self._open) == 1):
            self.being_read = None
            done = self._open.popleft()
            self.seq, self.start = done.seq + 1, done.end
            self._files.finished(self.number, done.seq, done.file)
        if self._open and self.last is not None and row >= self.last:
            self._files.finished(self.number, self._open[0].seq, None)
        self.row = row - self.start

    def look_ahead(self) -> None:
        """Let the file after the open ones be prepared."""
        if self.last is None:
            last = self._open[-1] if self._open else None
            self._files.want(self.number, last.seq + 1 if last else self.seq, last.end if last else self.start)


class QueueReader:
    """Samples of one split in global order."""

    def __init__(
        self,
        split: str,
        schema: Sequence[FieldSpec],
        stripe: Stripe,
        pool: BufferPool,
        parts: list[Part],
        position: int,
        views: bool = False,
    ) -> None:
        """`views`: batches may be views of the files' memory. Parts interleave rows, so theirs are copies all the same."""
        self.split, self.schema, self.stripe, self.pool, self.parts = split, tuple(schema), stripe, pool, parts
        self._views = views and len(parts) == 1
        self._position, self._batches = position, 0
        """Both without what was taken of `_stock`."""
        self._stock: Iterator[tuple[np.ndarray, ...]] = iter(())
        """Batches of the file that is being read, cut in advance."""
        self.cut = self._stocked = self._left = 0
        """Samples of each, over all ranks, 0 once none is left; how many there were, and how many are left."""
        self.made = False
        """Whether these are tensors already."""
        self.turn = 0
        """Grows whenever there are others."""
        self.cut_bytes = 0
        """Of each, for this rank."""
        self.names = tuple(f.name for f in self.schema)
        self._fixed = [(f.name, f.shape, numpy_dtype(f.dtype)) for f in self.schema if not f.ragged]
        self._ragged = [f for f in self.schema if f.ragged]
        self._row_bytes = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self._fixed)

    @property
    def position(self) -> int:
        """Global index of the next sample."""
        return self._position + self._taken

    @property
    def _taken(self) -> int:
        """Samples of the stock that were delivered."""
        return (self._stocked - self._left) * self.cut

    @property
    def batches(self) -> int:
        """How many were delivered."""
        return self._batches + self._stocked - self._left

    def prefetch(self) -> None:
        """Let the first files be opened in the background."""
        for part in self.parts:
            part.prefetch()

    def next(self, batch_size: int) -> dict[str, np.ndarray]:
        """The rank's share of the next batch_size samples. A short last batch is filled by repeating its samples."""
        if batch_size != self.cut and not self.begin_cut(batch_size):
            return self.uncut(batch_size)
        return dict(zip(self.names, self.next_cut(), strict=True))

    def uncut(self, batch_size: int) -> dict[str, np.ndarray]:
        """The same where `begin_cut` found nothing."""
        begin, parts = self.position, len(self.parts)
        end = begin + batch_size
        if parts == 1:
            part = self.parts[0]
            arrays = self._straight(part, begin, end) if not self._ragged else None
            if arrays is not None:
                return arrays
        limit = end
        for part in self.parts:
            wanted = _rows_before(end, part.number, parts)
            reached = part.cover(wanted)
            if reached < wanted:
                limit = min(limit, reached * parts + part.number)
        if limit <= begin:
            raise EndOfData(
                f"{self.split} ended after {begin:,} samples; start a new spool to go on. What was not committed can be read again (reset_state)"
            )
        arrays = self._gather(begin, end, self.stripe) if limit == end else self._filled(begin, limit, batch_size)
        self._position = limit
        self._batches += 1
        for part in self.parts:
            part.advance(_rows_before(limit, part.number, parts))
        for part in self.parts:
            part.look_ahead()
        return arrays

    def missing(self, batch_size: int) -> tuple[int, int, int] | None:
        """(part, number, first row) of a file that must be open before the next batch is whole; None if none is, or nothing comes any more."""
        for part in self.parts:
            wanted = part.beyond(_rows_before(self.position + batch_size, part.number, len(self.parts)))
            if wanted is not None:
                return part.number, *wanted
        return None

    def open_file(self, part: int) -> None:
        """Open the file that `missing` named, which is ready."""
        self.parts[part].open_next()

    @property
    def ended(self) -> bool:
        """Whether all there is was delivered, as far as the open files tell."""
        ends = [part.last for part in self.parts]
        return all(
            end is not None and _rows_before(self.position, part.number, len(self.parts)) >= end
            for part, end in zip(self.parts, ends, strict=True)
        )

    def begin_cut(self, batch_size: int) -> bool:
        """Whether the next batch is the first of a file that was cut into such ones in advance: it, and the others, then come from `next_cut`."""
        self._put_back()  # if there is any, it was cut for other batches than this
        if len(self.parts) > 1:
            return False
        part = self.parts[0]
        part.cover(self._position + 1)
        entry = part.first
        if entry is None or not self._fits(entry, batch_size):
            return False
        part.enter(entry)
        assert entry.file.stock is not None
        self._stock, entry.file.stock, self.made = entry.file.stock, None, entry.file.made
        self.cut = batch_size
        self.turn += 1
        self._stocked = self._left = entry.file.rows // batch_size
        self.cut_bytes = self._row_bytes * (batch_size // self.stripe.world_size)
        part.look_ahead()
        return True

    def next_cut(self) -> tuple[np.ndarray, ...]:
        """The next batch of a file that was cut in advance, one array a field; only while `cut` is not 0."""
        row = next(self._stock)
        self._left -= 1
        if not self._left:
            self._put_back()
            self.parts[0].advance(self._position)
        return row

    def _put_back(self) -> None:
        """Let what was not taken of the stock be."""
        self.parts[0].row += self._taken
        self._position, self._batches = self.position, self.batches
        self.cut = self._stocked = self._left = 0
        self._stock = iter(())

    def _fits(self, entry: _Open, batch_size: int) -> bool:
        """Whether a file's stock is what comes next. Not that of a file that does not end with a batch, or that is the last."""
        file = entry.file
        if file.stock is None or file.stock_of != batch_size or entry.start != self.position:
            return False
        return file.rows >= batch_size and not file.rows % batch_size and not file.last

    def _straight(self, part: Part, begin: int, end: int) -> dict[str, np.ndarray] | None:
        """The same where all rows lie in the file that is being read: most batches, at a third of the cost."""
        entry = part.being_read
        if entry is None or entry.end <= end:
            return None
        world, start = self.stripe.world_size, entry.start
        first, stop = begin + (self.stripe.rank - begin) % world - start, end - start
        count = -(-(stop - first) // world)
        arrays: Mapping[str, np.ndarray] = entry.file.arrays
        if self._views:
            out = {name: arrays[name][first:stop:world] for name, _, _ in self._fixed}
        else:
            out = {}
            for name, shape, dtype in self._fixed:
                array = out[name] = self.pool.array((count, *shape), dtype)
                np.copyto(array, arrays[name][first:stop:world])
        self._position = end
        self._batches += 1
        part.row = stop
        return out

    def _gather(self, begin: int, end: int, stripe: Stripe, check: bool = False) -> dict[str, np.ndarray]:
        world, parts = stripe.world_size, len(self.parts)
        own = begin + (stripe.rank - begin) % world
        count = max(0, -(-(end - own) // world))
        if self._views and not check and (world == 1 or not self._ragged):
            spans = self.parts[0].spans(own, count, world)
            if len(spans) == 1:
                return self._viewed(*spans[0], world)
        out = {name: self.pool.array((count, *shape), dtype) for name, shape, dtype in self._fixed}
        pieces: dict[str, dict[int, np.ndarray]] = {f.name: {} for f in self._ragged}
        common = math.lcm(parts, world)
        for part in self.parts:
            first = _first_common(own, world, part.number, parts)
            if first is None or first >= end:
                continue
            many = -(-(end - first) // common)
            place, stride = (first - own) // world, common // world
            step = common // parts
            for file, row, here in part.spans(first // parts, many, step):
                stop = row + (here - 1) * step + 1
                if check:
                    file.check(row, stop, step)
                for name, array in out.items():
                    array[place : place + (here - 1) * stride + 1 : stride] = file.arrays[name][row:stop:step]
                for name, rows in pieces.items():
                    offsets = file.arrays[name + OFFSETS]
                    for k in range(here):
                        at = row + k * step
                        rows[place + k * stride] = file.arrays[name][offsets[at] : offsets[at + 1]]
                place += here * stride
        for field in self._ragged:
            _put_ragged(out, field, [pieces[field.name][i] for i in range(count)])
        return out

    def _viewed(self, file: BatchFile, row: int, count: int, step: int) -> dict[str, np.ndarray]:
        stop = row + (count - 1) * step + 1
        out = {name: file.arrays[name][row:stop:step] for name, _, _ in self._fixed}
        for field in self._ragged:
            borders = file.arrays[field.name + OFFSETS][row : row + count + 1]
            out[field.name] = file.arrays[field.name][borders[0] : borders[-1]]
            out[field.name + OFFSETS] = borders - borders[0]
        return out

    def _filled(self, begin: int, limit: int, batch_size: int) -> dict[str, np.ndarray]:
        """A short last batch: position i holds sample i mod (what is left). Other ranks' rows are checked here, as they are read."""
        whole = self._gather(begin, limit, Stripe(), check=True)
        own = [
            (i % (limit - begin)) for i in range(batch_size) if (begin + i) % self.stripe.world_size == self.stripe.rank
        ]
        out: dict[str, np.ndarray] = {f.name: whole[f.name][own] for f in self.schema if not f.ragged}
        for field in self.schema:
            if field.ragged:
                offsets = whole[field.name + OFFSETS]
                _put_ragged(out, field, [whole[field.name][offsets[i] : offsets[i + 1]] for i in own])
        return out

    def state(self) -> dict[str, Any]:
        return {
            "g": self.position,
            "at": [[part.seq, part.row + self._taken] for part in self.parts],
            "start": [part.start for part in self.parts],
        }


class RingReader:
    """A fixed number of files, over and over: for validation. Nothing is ever deleted."""

    def __init__(
        self,
        split: str,
        schema: Sequence[FieldSpec],
        stripe: Stripe,
        pool: BufferPool,
        files: Files,
        count: int,
        keep: int,
    ) -> None:
        self.split, self.schema, self.stripe, self.pool = split, tuple(schema), stripe, pool
        self._files, self._count, self._keep = files, count, max(1, keep)
        self._kept: OrderedDict[int, BatchFile] = OrderedDict()
        self.seq = self.row = self.batches = self.position = 0

    def prefetch(self) -> None:
        self._files.want(0, self.seq, 0)

    def next(self, batch_size: int) -> dict[str, np.ndarray]:
        """The rank's share of the next batch_size rows; the last file is followed by the first."""
        spans: list[tuple[BatchFile, int, int]] = []
        need, seq, row = batch_size, self.seq, self.row
        while need:
            file = self._file(seq)
            here = min(need, file.rows - row)
            if here:
                spans.append((file, row, here))
            need, row = need - here, row + here
            if row >= file.rows:
                seq, row = (seq + 1) % self._count, 0
        world, rank = self.stripe.world_size, self.stripe.rank
        count = batch_size // world
        out = {f.name: self.pool.array((count, *f.shape), numpy_dtype(f.dtype)) for f in self.schema if not f.ragged}
        pieces: dict[str, list[np.ndarray]] = {f.name: [] for f in self.schema if f.ragged}
        place, index = 0, 0
        for file, start, here in spans:
            skip = (rank - index) % world
            rows = range(start + skip, start + here, world)
            for name, array in out.items():
                array[place : place + len(rows)] = file.arrays[name][rows.start : rows.stop : world]
            for name, found in pieces.items():
                offsets = file.arrays[name + OFFSETS]
                found += [file.arrays[name][offsets[r] : offsets[r + 1]] for r in rows]
            place, index = place + len(rows), index + here
        for field in self.schema:
            if field.ragged:
                _put_ragged(out, field, pieces[field.name])
        self.seq, self.row = seq, row
        self.position += batch_size
        self.batches += 1
        if self._count > self._keep:
            self._files.want(0, (seq + (row > 0)) % self._count, 0)
        return out

    def _file(self, seq: int) -> BatchFile:
        if seq not in self._kept:
            self._files.want(0, seq, 0)
            self._kept[seq] = self._files.take(0, seq, 0)
            while len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return self._kept[seq]

    def state(self) -> dict[str, Any]:
        return {"g": self.position, "at": [[self.seq, self.row]], "start": [0]}

    def load(self, state: Mapping[str, Any]) -> None:
        (self.seq, self.row), self.position = state["at"][0], state["g"]


def _rows_before(g: int, part: int, parts: int) -> int:
    """Samples of a part whose global index is below g."""
    return max(0, -(-(g - part) // parts))


def _first_common(at_least: int, world: int, part: int, parts: int) -> int | None:
    """The first g = at_least, at_least + world, … that lies in the part; None if none does."""
    for g in range(at_least, at_least + world * parts, world):
        if g % parts == part:
            return g
    return None


def _put_ragged(out: dict[str, np.ndarray], field: FieldSpec, rows: list[np.ndarray]) -> None:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    out[field.name] = np.concatenate(rows) if rows else np.empty(0, numpy_dtype(field.dtype))
    out[field.name + OFFSETS] = offsets
