"""Deal of rows to lanes: which rows of a source a lane reads in an epoch, and in which order.

An epoch puts the chunks in keyed order and the rows of each chunk in keyed order: one long sequence of all rows. Lane l
of L reads the l-th part of it.

    chunks      [ c7      | c2   | c9       | c0    | …  ]        keyed by (seed, source, epoch)
    lanes       [ lane 0     | lane 1    | lane 2     | … ]        equal numbers of bytes, to within a row

Bytes rather than rows, because lanes should run dry together: with 21,000 documents of very unequal lengths and 48 lanes,
parts of equal rows made 10.8 % of a pass fillers and padding, parts of equal bytes make it 6.0 %. With many chunks (16 a lane or
more) the borders move to the nearest chunk's edge, so that no chunk is decoded twice; with few, neighbouring lanes share a
chunk by rows. With few rows some lanes own none in an epoch; parts move on by one lane each epoch, so that over L epochs
every lane has had every part.

Everything is a function of (rows per chunk, key, lanes, epoch, position): there is no shuffle buffer to lose, and seeking
is a binary search. Opens no file, starts no thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.order import Permutation, derive

_SNAP_AT = 16
_EPOCHS_KEPT = 4


class Span(NamedTuple):
    """Consecutive rows of a lane that lie in one chunk."""

    chunk: int
    rows: np.ndarray
    """int64: rows within the chunk, in reading order."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    order: np.ndarray
    """Chunks in reading order."""
    ends: np.ndarray
    """Rows up to and including each of them."""
    borders: np.ndarray
    """Where each lane's part starts; L + 1 entries."""
    rows_key: int
    """Of the orders of rows in chunks."""


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
    ) -> None:
        """`chunk_rows`, `chunk_bytes`: rows and bytes of each chunk. `key`: of the shuffle. `lanes`: how many parts. `shuffle=False`: file order."""
        self.chunk_rows = np.asarray(chunk_rows, dtype=np.int64)
        sizes = np.zeros_like(self.chunk_rows) if chunk_bytes is None else np.asarray(chunk_bytes, dtype=np.int64)
        self._weights = np.where(self.chunk_rows > 0, sizes + self.chunk_rows, 0)  # a row counts even if it is empty
        self.rows = int(self.chunk_rows.sum())
        self.lanes = lanes
        self.shuffle = shuffle
        self._key = key
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()

    def lane_rows(self, lane: int, epoch: int) -> int:
        """How many rows a lane reads in an epoch."""
        start, end = self._borders_of(lane, epoch)
        return end - start

    def rows_owned(self, epochs: range) -> np.ndarray:
        """Rows per lane over some epochs."""
        return np.array([sum(self.lane_rows(lane, e) for e in epochs) for lane in range(self.lanes)], np.int64)

    def spans(self, lane: int, epoch: int, position: int, count: int) -> list[Span]:
        """Rows [position, position + count) of the lane's part (as many as there are), cut at chunk borders."""
        layout, at, stop = self._part(lane, epoch, position, count)
        spans = []
        for chunk, end in self._chunks(layout, at, stop):
            first, upto = end - int(self.chunk_rows[chunk]), min(stop, end)
            if upto > at:
                spans.append(Span(chunk, self._rows_in_chunk(layout, chunk, at - first, upto - first)))
                at = upto
        return spans

    def chunks(self, lane: int, epoch: int, position: int, count: int) -> list[int]:
        """The chunks of `spans`, without working out the rows."""
        return [chunk for chunk, _ in self._chunks(*self._part(lane, epoch, position, count)) if self.chunk_rows[chunk]]

    def _part(self, lane: int, epoch: int, position: int, count: int) -> tuple[_Epoch, int, int]:
        start, end = self._borders_of(lane, epoch)
        return self._layout(epoch), start + position, min(start + position + count, end)

    def _chunks(self, layout: _Epoch, at: int, stop: int) -> Iterator[tuple[int, int]]:
        """Chunks with rows [at, stop) of the epoch's sequence, and the rows up to and including each; some may have no rows."""
        if at >= stop:
            return iter(())
        first, last = np.searchsorted(layout.ends, (at, stop - 1), side="right").tolist()
        places = slice(first, last + 1)
        return zip(layout.order[places].tolist(), layout.ends[places].tolist(), strict=True)

    def find(self, epoch: int, chunk: int, row: int) -> tuple[int, int]:
        """(lane, position in its part) of a row of a chunk: the inverse of `spans`."""
        if not (0 <= chunk < len(self.chunk_rows) and 0 <= row < self.chunk_rows[chunk]):
            raise IndexError(f"row {row} of chunk {chunk} is not among the {self.rows} rows that are dealt")
        layout = self._layout(epoch)
        place = int(np.flatnonzero(layout.order == chunk)[0])
        into = self._order_in_chunk(layout, chunk).position(row) if self.shuffle else row
        at = int(layout.ends[place]) - int(self.chunk_rows[chunk]) + into
        # The last part that starts at or before the row: parts without rows start where the next one does.
        slot = int(np.searchsorted(layout.borders[:-1], at, side="right")) - 1
        return (slot - epoch) % self.lanes, at - int(layout.borders[slot])

    def _rows_in_chunk(self, layout: _Epoch, chunk: int, start: int, stop: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return self._order_in_chunk(layout, chunk).slice(start, stop)

    def _order_in_chunk(self, layout: _Epoch, chunk: int) -> Permutation:
        return Permutation(int(self.chunk_rows[chunk]), derive(layout.rows_key, chunk))

    def _borders_of(self, lane: int, epoch: int) -> tuple[int, int]:
        borders = self._layout(epoch).borders
        slot = (lane + epoch) % self.lanes
        return int(borders[slot]), int(borders[slot + 1])

    def _layout(self, epoch: int) -> _Epoch:
        found = self._epochs.get(epoch)
        if found is not None:
            return found
        chunks = len(self.chunk_rows)
        if self.shuffle:
            order = Permutation(chunks, derive(derive(self._key, 0), epoch)).slice(0, chunks)
        else:
            order = np.arange(chunks, dtype=np.int64)
        ends = np.cumsum(self.chunk_rows[order])
        borders = self._borders(order, ends)
        if np.count_nonzero(self.chunk_rows) >= _SNAP_AT * self.lanes:
            edges = np.concatenate([np.zeros(1, np.int64), ends])
            above = np.searchsorted(edges, borders, side="left")
            below = np.maximum(above - 1, 0)
            nearer = np.where(borders - edges[below] < edges[above] - borders, below, above)
            borders = edges[nearer]
        layout = _Epoch(order, ends, borders, derive(derive(self._key, 1), epoch))
        self._epochs[epoch] = layout
        while len(self._epochs) > _EPOCHS_KEPT:  # two threads may both compute an epoch: same arrays, nothing lost
            self._epochs.popitem(last=False)
        return layout

    def _borders(self, order: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Where the lanes' parts start: the first row at or after each L-th of the bytes."""
        if self.rows == 0:
            return np.zeros(self.lanes + 1, np.int64)
        weights, rows = self._weights[order], self.chunk_rows[order]
        upto = np.cumsum(weights)
        total = int(upto[-1])
        targets = np.array([lane * total // self.lanes for lane in range(self.lanes)], np.int64)
        chunk = np.searchsorted(upto, targets, side="right")
        into = targets - (upto[chunk] - weights[chunk])
        share = np.array(
            [int(i) * int(r) // int(w) for i, r, w in zip(into, rows[chunk], weights[chunk], strict=True)], np.int64
        )
        return np.concatenate([ends[chunk] - rows[chunk] + share, [self.rows]])
