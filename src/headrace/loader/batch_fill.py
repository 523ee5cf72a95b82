"""Batch fill: blocks of tokens become the tensors of a batch. One kernel for packed text and for prepared blocks.

fill = BatchFill(seq_len=2048, fields=("input_ids", "labels"), pad=0, unshifted=False, memory=memory)
rows = fill.rows(8)                        gather the blocks of a batch here, one block a row
batch = fill.batch(rows, samples)          input_ids, labels, position_ids, segment_ids, cu_seqlens, max_seqlen, row_count, sample_index

row    | piece 1: a b c d | piece 2: e f g | padding |
labels   b c d next(1)      f g next(2)      -100           next: the token that follows the piece in its document, or -100
positions 0 1 2 3           0 1 2            0 1 …
segments  1 1 1 1           2 2 2            0 0 …
borders  0                 4              7         T       padding is a piece of its own
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.runtime.buffers import TensorMemory
from headrace.runtime.compiled import kernel
from headrace.text.block_layout import copy_run

TOKEN_FIELDS = ("input_ids", "labels", "position_ids", "segment_ids")
"""Fields of one number per token, in the order in which `fill_batch` takes them."""
REAL, PIECES, DOCUMENTS = range(3)
"""Columns of `BatchRows.facts`: tokens that are not padding, pieces, documents that end in the row."""
COUNTS = ("tokens", "padding", "rows", "samples", "fillers")
"""What is counted of a batch; rows are documents that end in it."""
_INT64 = np.dtype(np.int64)


widen = copy_run.variant("void(int64[::1], int64, int32[::1], int64, int64)")
"""out[at : at + count] = values[start : start + count]"""


def _set_slice(out, start, stop, value):
    out[start:stop] = value


@kernel("void(int64[::1], int64, int64, int64)", python=_set_slice)
def set_run(out, start, stop, value):
    """out[start:stop] = value"""
    to = out[start:stop]
    for i in range(len(to)):
        to[i] = value


def _count_slice(out, start, stop):
    out[start:stop] = np.arange(stop - start)


@kernel("void(int64[::1], int64, int64)", python=_count_slice)
def count_run(out, start, stop):
    """out[start:stop] = 0, 1, 2 …"""
    to = out[start:stop]
    for i in range(len(to)):
        to[i] = i


@kernel(
    "UniTuple(int64, 2)(int32[:, ::1], int32[:, ::1], int32[:, ::1], int64[:, ::1], int64, boolean,"
    " int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int32[::1])"
)
def fill_batch(
    tokens, lengths, following, facts, pad, unshifted, input_ids, labels, position_ids, segment_ids, borders
):
    """Write every row of a batch; returns how many borders there are and the longest piece.

    tokens, lengths, following, facts: as in `BatchRows`.
    unshifted: labels repeat input_ids (transformers' convention), with -100 at the first token of every piece.
    input_ids, labels, position_ids, segment_ids: int64 [rows, seq_len]; one without rows is left out.
    borders: where pieces begin and end, over all rows in sequence; must hold rows · seq_len + 1 entries.
    """
    width = tokens.shape[1]
    border = 0
    longest = 0
    borders[0] = 0
    for r in range(len(facts)):
        real = facts[r, REAL]
        widen(input_ids[r], 0, tokens[r], 0, real)
        set_run(input_ids[r], real, width, pad)
        if len(labels):
            if unshifted:
                widen(labels[r], 0, tokens[r], 0, real)
            elif real > 0:
                widen(labels[r], 0, tokens[r], 1, real - 1)
            set_run(labels[r], real, width, -100)
        column = 0
        for p in range(facts[r, PIECES]):
            end = column + np.int64(lengths[r, p])
            if len(labels):
                if unshifted:
                    labels[r, column] = -100
                else:
                    labels[r, end - 1] = following[r, p]
            if len(position_ids):
                count_run(position_ids[r], column, end)
            if len(segment_ids):
                set_run(segment_ids[r], column, end, p + 1)
            longest = max(longest, end - column)
            border += 1
            borders[border] = r * width + end
            column = end
        if real < width:
            if len(position_ids):
                count_run(position_ids[r], real, width)
            if len(segment_ids):
                set_run(segment_ids[r], real, width, 0)
            longest = max(longest, width - real)
            border += 1
            borders[border] = (r + 1) * width
    return border + 1, longest


_INT64S = "Array(int64, 1, 'C', readonly=True)"


@kernel(f"void(int64[:, ::1], {_INT64S}, int64, int64[::1])", nogil=False)
def count_rows(facts, sources, width, totals):
    """Add the counts of a batch to `totals`: COUNTS, then the tokens of each source. `sources`: of each row, -1 for a filler."""
    for r in range(len(facts)):
        real = facts[r, REAL]
        totals[0] += real
        totals[1] += width - real
        totals[2] += facts[r, DOCUMENTS]
        if sources[r] >= 0:
            totals[5 + sources[r]] += real
        else:
            totals[4] += 1
    totals[3] += len(facts)


FILL_KERNELS = (widen, set_run, count_run, fill_batch, count_rows)
"""What a batch fill compiles."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The blocks of one batch, gathered: block r in row r of every array. Values beyond those that `facts` counts are undefined."""

    tokens: np.ndarray
    """int32 [rows, seq_len]."""
    lengths: np.ndarray
    """int32 [rows, seq_len]: tokens of each piece of the row."""
    following: np.ndarray
    """int32 [rows, seq_len]: the token that follows each piece in its document, or -100."""
    facts: np.ndarray
    """int64 [rows, 3]: REAL, PIECES, DOCUMENTS. A row of zeros has nothing to learn."""

    def totals(self, sources: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """What the batch adds to COUNTS, and to the tokens of each of `count` sources.

        `sources`: int64, the source of each row, -1 for a row with nothing to learn.
        """
        totals = np.zeros(len(COUNTS) + count, np.int64)
        count_rows(self.facts, sources, self.tokens.shape[1], totals)
        return totals[: len(COUNTS)], totals[len(COUNTS) :]


class BatchFill:
    """Memory to gather blocks in, and the tensors of the next batch. Owned by one thread."""

    def __init__(
        self, seq_len: int, fields: Collection[str], *, pad: int, unshifted: bool, memory: TensorMemory | None = None
    ) -> None:
        """`memory`: where tensors come from; without one, batches are numpy arrays."""
        self._width, self._fields, self._memory = seq_len, frozenset(fields), memory
        self._pad, self._unshifted = pad, unshifted
        self._held = self._new_rows(0)
        self._borders = np.empty(1, np.int32)
        self._left_out = np.empty((0, seq_len), np.int64)

    def rows(self, count: int) -> BatchRows:
        """Memory for `count` blocks, valid until the next call."""
        if len(self._held.facts) != count:
            self._held = self._new_rows(count)
            self._borders = np.empty(count * self._width + 1, np.int32)
        return self._held

    def batch(self, rows: BatchRows, samples: range) -> dict[str, Any]:
        """The batch of the gathered rows. `samples`: the global index of each row. The batch belongs to its receiver."""
        fields, memory, shape = self._fields, self._memory, (len(samples), self._width)
        batch: dict[str, Any] = {}
        arrays = []
        for name in TOKEN_FIELDS:
            if name not in fields:
                arrays.append(self._left_out)
            elif memory is None:
                batch[name] = array = np.empty(shape, np.int64)
                arrays.append(array)
            else:
                batch[name], array = memory.tensor_and_array(shape, _INT64)
                arrays.append(array)
        borders, longest = fill_batch(
            rows.tokens, rows.lengths, rows.following, rows.facts, self._pad, self._unshifted, *arrays, self._borders
        )
        own = _unchanged if memory is None else memory.adopt
        batch["sample_index"] = own(np.arange(samples.start, samples.stop, samples.step))
        if "row_count" in fields:
            batch["row_count"] = own(rows.facts[:, DOCUMENTS].copy())
        if "cu_seqlens" in fields:
            batch["cu_seqlens"] = own(self._borders[:borders].copy())
            batch["max_seqlen"] = int(longest)
        return batch

    def _new_rows(self, count: int) -> BatchRows:
        tokens, lengths, following = (np.empty((count, self._width), np.int32) for _ in range(3))
        return BatchRows(tokens, lengths, following, np.zeros((count, 3), np.int64))


def _unchanged(array: np.ndarray) -> np.ndarray:
    return array
