"""Deal of rows to lanes: which rows of a source a lane reads in an epoch, and in which order.

An epoch puts the chunks in keyed order and cuts them into groups of `shuffle_chunks`. The rows of each group, of all its chunks together, are in
keyed order: one long sequence of all rows. Lane l of L reads the l-th part of it.

    groups      [ c7 c2 c9 c0   | c4 c11 c1 c5     | …  ]        keyed by (seed, source, epoch)
    lanes       [ lane 0     | lane 1    | lane 2    | … ]        equal numbers of bytes, to within a row

Rows that follow each other come from all chunks of a group, so that documents which are neighbours in a file are rarely packed into one row of tokens.

Bytes rather than rows, because lanes should run dry together: with 21,000 documents of very unequal lengths and 48 lanes,
parts of equal rows made 10.8 % of a pass fillers and padding, parts of equal bytes make it 6.0 %. With many groups (16 a lane or
more) the borders move to the nearest group's edge, so that no chunk is decoded twice; with few, neighbouring lanes share a
group by rows. With few rows some lanes own none in an epoch; parts move on by one lane each epoch, so that over L epochs
every lane has had every part.

Everything is a function of (rows per chunk, key, lanes, epoch, position): there is no shuffle buffer to lose, and seeking
is a binary search. Opens no file, starts no thread.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.order import Permutation, derive

_SNAP_AT = 16
_EPOCHS_KEPT = 4


class Span(NamedTuple):
    """Consecutive rows of a lane that lie in one group of chunks, in reading order."""

    chunks: np.ndarray
    """int64: the chunk of each row."""
    rows: np.ndarray
    """int64: the row within its chunk."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    order: np.ndarray
    """Chunks in reading order; every `shuffle_chunks` of them are a group."""
    ends: np.ndarray
    """Rows up to and including each group."""
    borders: np.ndarray
    """Where each lane's part starts; L + 1 entries."""
    rows_key: int
    """Of the orders of rows in groups."""


class Deal:
    """The rows of one source, dealt to lanes."""

    def __init__(
        self,
        chunk_rows: np.ndarray,
        chunk_bytes: np.ndarray | None = None,
        *,
        key: int,
        lanes: int,
        shuffle: bool = True,
        shuffle_chunks: int = 1,
    ) -> None:
        """Deal rows to lanes.

        Args:
            chunk_rows: Rows of each chunk.
            chunk_bytes: Bytes of each chunk.
            key: Key of the shuffle.
            lanes: Number of parts.
            shuffle: Whether chunks and rows are put into keyed order; False leaves them in file order.
            shuffle_chunks: Chunks whose rows are shuffled together.
        """
        self.chunk_rows = np.asarray(chunk_rows, dtype=np.int64)
        sizes = np.zeros_like(self.chunk_rows) if chunk_bytes is None else np.asarray(chunk_bytes, dtype=np.int64)
        self._weights = np.where(self.chunk_rows > 0, sizes + self.chunk_rows, 0)  # a row counts even if it is empty
        self.rows = int(self.chunk_rows.sum())
        self.lanes = lanes
        self.shuffle = shuffle
        self._group = shuffle_chunks
        self._key = key
        self._layout = functools.lru_cache(_EPOCHS_KEPT)(self._new_layout)

    def lane_rows(self, lane: int, epoch: int) -> int:
        """How many rows a lane reads in an epoch."""
        start, end = self._borders_of(lane, epoch)
        return end - start

    def rows_owned(self, epochs: range) -> np.ndarray:
        """Rows per lane over some epochs."""
        return np.array([sum(self.lane_rows(lane, e) for e in epochs) for lane in range(self.lanes)], np.int64)

    def spans(self, lane: int, epoch: int, position: int, count: int) -> list[Span]:
        """Rows [position, position + count) of the lane's part (as many as there are), cut where groups of chunks end."""
        layout, at, stop = self._part(lane, epoch, position, count)
        spans = []
        for group in self._groups(layout, at, stop):
            end = int(layout.ends[group])
            first, upto = int(layout.ends[group - 1]) if group else 0, min(stop, end)
            if upto > at:
                spans.append(self._rows_of(layout.order, layout.rows_key, group, at - first, upto - first))
                at = upto
        return spans

    def chunks(self, lane: int, epoch: int, position: int, count: int) -> list[int]:
        """The chunks of the groups that `spans` reads, without working out the rows."""
        layout, at, stop = self._part(lane, epoch, position, count)
        groups = self._groups(layout, at, stop)
        found = layout.order[groups.start * self._group : groups.stop * self._group]
        return found[self.chunk_rows[found] > 0].tolist()

    def _part(self, lane: int, epoch: int, position: int, count: int) -> tuple[_Epoch, int, int]:
        start, end = self._borders_of(lane, epoch)
        return self._layout(epoch), start + position, min(start + position + count, end)

    def _groups(self, layout: _Epoch, at: int, stop: int) -> range:
        """Groups with rows [at, stop) of the epoch's sequence; some may have no rows."""
        if at >= stop:
            return range(0)
        first, last = np.searchsorted(layout.ends, (at, stop - 1), side="right").tolist()
        return range(first, last + 1)

    def find(self, epoch: int, chunk: int, row: int) -> tuple[int, int]:
        """(lane, position in its part) of a row of a chunk: the inverse of `spans`."""
        if not (0 <= chunk < len(self.chunk_rows) and 0 <= row < self.chunk_rows[chunk]):
            raise IndexError(f"row {row} of chunk {chunk} is not among the {self.rows} rows that are dealt")
        layout = self._layout(epoch)
        group, place = divmod(int(np.flatnonzero(layout.order == chunk)[0]), self._group)
        chunks, ends = self._members(layout.order, group)
        into = int(ends[place]) - int(self.chunk_rows[chunk]) + row
        if self.shuffle:
            into = Permutation(int(ends[-1]), derive(layout.rows_key, int(chunks[0]))).position(into)
        at = int(layout.ends[group]) - int(ends[-1]) + into
        # The last part that starts at or before the row: parts without rows start where the next one does.
        slot = int(np.searchsorted(layout.borders[:-1], at, side="right")) - 1
        return (slot - epoch) % self.lanes, at - int(layout.borders[slot])

    def _rows_of(self, order: np.ndarray, rows_key: int, group: int, start: int, stop: int) -> Span:
        """Rows [start, stop) of a group."""
        chunks, ends = self._members(order, group)
        if self.shuffle:
            rows = Permutation(int(ends[-1]), derive(rows_key, int(chunks[0]))).slice(start, stop)
        else:
            rows = np.arange(start, stop, dtype=np.int64)
        if len(chunks) == 1:
            return Span(np.full(len(rows), chunks[0]), rows)
        place = np.searchsorted(ends, rows, side="right")
        chunk = chunks[place]
        return Span(chunk, rows - (ends[place] - self.chunk_rows[chunk]))

    def _members(self, order: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The chunks of a group, and the rows up to and including each."""
        chunks = order[group * self._group : (group + 1) * self._group]
        return chunks, np.cumsum(self.chunk_rows[chunks])

    def _borders_of(self, lane: int, epoch: int) -> tuple[int, int]:
        borders = self._layout(epoch).borders
        slot = (lane + epoch) % self.lanes
        return int(borders[slot]), int(borders[slot + 1])

    def _new_layout(self, epoch: int) -> _Epoch:
        chunks = len(self.chunk_rows)
        if self.shuffle:
            order = Permutation(chunks, derive(derive(self._key, 0), epoch)).slice(0, chunks)
        else:
            order = np.arange(chunks, dtype=np.int64)
        rows_key = derive(derive(self._key, 1), epoch)
        firsts = np.arange(0, chunks, self._group)
        rows, weights = (np.add.reduceat(values[order], firsts) for values in (self.chunk_rows, self._weights))
        return _Epoch(order, np.cumsum(rows), self._borders(order, rows_key, rows, weights), rows_key)

    def _borders(self, order: np.ndarray, rows_key: int, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Where the lanes' parts start: the first row at or after each L-th of the bytes. `rows`, `weights`: of each group."""
        if self.rows == 0:
            return np.zeros(self.lanes + 1, np.int64)
        edges, upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)]), np.cumsum(weights)
        many = np.count_nonzero(rows) >= _SNAP_AT * self.lanes
        targets = [lane * int(upto[-1]) // self.lanes for lane in range(self.lanes)]
        starts: list[int] = []
        passed, of_group = np.empty(0, np.int64), -1
        for target, group in zip(targets, np.searchsorted(upto, targets, side="right").tolist(), strict=True):
            weight, count = int(weights[group]), int(rows[group])
            into = target - int(upto[group]) + weight
            if many or self._group == 1:
                row = into * count // weight
            else:  # a group may hold one long document and many short ones
                if of_group != group:
                    chunks = self._rows_of(order, rows_key, group, 0, count).chunks
                    passed, of_group = np.cumsum(self._weights[chunks] // self.chunk_rows[chunks]), group
                row = int(np.searchsorted(passed, into * int(passed[-1]) // weight, side="right"))
            starts.append(int(edges[group]) + row)
        borders = np.array([*starts, self.rows], np.int64)
        if not many:
            return borders
        above = np.searchsorted(edges, borders, side="left")
        below = np.maximum(above - 1, 0)
        return edges[np.where(borders - edges[below] < edges[above] - borders, below, above)]
