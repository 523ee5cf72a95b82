"""Grams in one process: of an array, or of batches as they come.

    result = gram(x)                                    an array, or a torch tensor
    result = gram(x, targets=y, weights=w, shift=mu)

    stream = GramStream(width=512)                      the number of rows is not known yet
    for batch in batches: stream.push(batch)
    result = stream.finish()

Both give the bits that any number of workers would give with the same chunk_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.errors import DataError
from headrace.reduce.assembler import ChunkAssembler, whole_chunk_size
from headrace.reduce.columns import Columns, RowBatch, as_given
from headrace.reduce.kernel import dtype_name
from headrace.reduce.partition import ARITHMETIC, default_chunk_size
from headrace.reduce.result import GramResult
from headrace.reduce.tree import StreamingBorderGram, all_finite, pairwise_sum


class GramStream:
    """Sums rows as they come; `finish` gives the result."""

    def __init__(
        self,
        *,
        width: int,
        targets: int = 0,
        weighted: bool = False,
        shift: Any = None,
        chunk_size: int | None = None,
        threads: int = 1,
    ) -> None:
        """Make an empty sum.

        Args:
            width: Columns of a row.
            targets: Columns of targets, which every `push` then needs; for `GramResult.ridge`.
            weighted: Whether every `push` brings a weight for each row.
            shift: A vector that is subtracted from every row; keeps digits where means are large.
            chunk_size: Rows a chunk, which the bits depend on; `default_chunk_size` unless given.
            threads: Threads that share the work. They never change the bits.
        """
        self.columns = Columns(width=width, targets=targets, weighted=weighted, shift=shift)
        self.chunk_size = whole_chunk_size(chunk_size) if chunk_size is not None else default_chunk_size(self.columns.k)
        self.threads = threads
        self.n_rows = 0
        self._rows: str | None = None
        widths = [width] + ([targets] if targets else []) + ([1] if weighted else [])
        self._parts = [ChunkAssembler.unbounded(k=n, chunk_size=self.chunk_size) for n in widths]
        self._fold = StreamingBorderGram(entries=self.columns.k * (self.columns.k + 1) // 2, n_chunks=None)
        self._failed: str | None = None
        """Why a chunk was refused: its rows are in no sum, so there is none any more."""

    def push(self, x: Any, targets: Any = None, weights: Any = None) -> None:
        """Add rows; those of a chunk that is not whole yet are held. Rows that do not fit the stream change nothing; a chunk that
        cannot be summed (NaN, infinity, a weight below zero) ends it."""
        rows = as_given(x, "rows")
        y = _beside(targets, len(rows), self.columns.targets, "targets") if self.columns.targets else None
        self._push(rows, y, _beside(weights, len(rows), 1, "weights") if self.columns.weighted else None)

    def _push(self, rows: np.ndarray, y: np.ndarray | None, w: np.ndarray | None) -> None:
        self._require_whole()
        name = dtype_name(rows.dtype)
        if self._rows is not None and name != self._rows:
            raise DataError(f"the stream began with {self._rows} rows, now {name} came: convert them first")
        given = [values for values in (rows, y, w) if values is not None]
        # All parts look at what they are given before one of them takes it.
        cuts = [part.push(values) for part, values in zip(self._parts, given, strict=True)]
        self._rows = name
        self.n_rows += len(rows)
        # zip pulls one chunk of every part at a time: all parts are cut at the same rows.
        for cut in zip(*cuts, strict=True):
            self._add(cut[0][0], [values for _, values in cut])

    def finish(self) -> GramResult:
        """The result over everything that was pushed."""
        return GramResult.of(self.packed(), self.columns, self.n_rows, self.about)

    def packed(self) -> np.ndarray:
        """The upper triangle of the sum, without a result around it; nothing can be pushed after."""
        self._require_whole()
        last = [part.finish() for part in self._parts]
        if last[0] is not None:
            self._add(last[0][0], [values for _, values in filter(None, last)])
        return self._fold.finish()

    @property
    def about(self) -> dict[str, Any]:
        """What the bits depend on beside the rows."""
        return {"chunk_size": self.chunk_size, "rows": self._rows or "f64", "arithmetic": ARITHMETIC}

    def _add(self, chunk: int, parts: list[np.ndarray]) -> None:
        x, rest = parts[0], parts[1:]
        y = rest.pop(0) if self.columns.targets else None
        w = rest.pop(0)[:, 0] if self.columns.weighted else None
        try:
            self._fold.submit_chunk_gram(chunk, self.columns.gram(RowBatch(x=x, y=y, w=w), self.threads))
        except DataError as error:
            start = chunk * self.chunk_size
            self._failed = f"rows {start:,} to {start + len(x):,}: {error}"
            raise DataError(self._failed) from None

    def _require_whole(self) -> None:
        if self._failed is not None:
            raise DataError(f"{self._failed}. Without those rows there is no sum: begin a new stream")


def streams_result(parts: Sequence[np.ndarray], columns: Columns, n_rows: int, about: Mapping[str, Any]) -> GramResult:
    """The result of streams that were summed apart: their packed sums added by number, pairwise."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.asarray(pairwise_sum(list(parts)))
    if not all_finite(total):
        raise DataError(f"the sum of {len(parts)} streams exceeds 1.8e308: scale the rows down")
    return GramResult.of(total, columns, n_rows, dict(about) | {"streams": len(parts)})


def gram(
    rows: Any,
    *,
    targets: Any = None,
    weights: Any = None,
    shift: Any = None,
    chunk_size: int | None = None,
    threads: int = 1,
) -> GramResult:
    """The sums over an array of rows that is in memory or mapped.

    `rows`: an array, a torch tensor or lists, [n, width]. `targets`: [n] or [n, targets], for `ridge`. `weights`: [n]. The other arguments are
    those of `GramStream`.
    """
    x = as_given(rows, "rows")
    if x.ndim != 2:
        raise DataError(f"rows are a matrix, got shape {x.shape}")
    y = None if targets is None else _beside(targets, len(x), None, "targets")
    stream = GramStream(
        width=x.shape[1], targets=0 if y is None else y.shape[1], weighted=weights is not None, shift=shift,
        chunk_size=chunk_size, threads=threads,
    )  # fmt: skip
    stream._push(x, y, None if weights is None else _beside(weights, len(x), 1, "weights"))
    return stream.finish()


def _beside(values: Any, n: int, width: int | None, what: str) -> np.ndarray:
    if values is None:
        raise DataError(f"this pass has {what}: give them with every batch of rows")
    array = as_given(values, what)
    array = array[:, None] if array.ndim == 1 else array
    if array.dtype.kind not in "fiub":
        raise DataError(f"{what} must be real numbers, got {array.dtype.name}")
    if array.dtype.kind in "iub" and array.dtype != np.uint16:  # uint16 is bfloat16 here: a tensor was given
        array = array.astype(np.float64)
    if array.ndim != 2 or len(array) != n or (width is not None and array.shape[1] != width):
        raise DataError(f"{what} of shape {array.shape} do not fit {n} rows")
    return array
