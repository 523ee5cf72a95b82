"""Row batches of any size, re-cut into chunks.

    assembler = ChunkAssembler.of(partition, rank=0)
    for batch in batches:
        for chunk, rows in assembler.push(batch): ...
    assembler.finish()                               refuses an end inside a chunk

    assembler = ChunkAssembler.unbounded(k=512, chunk_size=4096)      n_rows is known at the end: finish gives the last chunk

Where batches are cut does not reach the sum. It can be saved between two chunks only: rows inside one are not state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.errors import ConfigError, DataError
from headrace.reduce.partition import MOST_ROWS, CrossNodePartition


def whole_chunk_size(value: object) -> int:
    """`value` as a chunk size; ConfigError unless it is a whole number of 1 or more."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"chunk_size must be a whole number of at least 1, got {value!r}")
    return int(value)


class ChunkAssembler:
    """Collects rows until a chunk is whole. Made by `of` or `unbounded`."""

    def __init__(self, partition: CrossNodePartition, *, rank: int, ordinal: int, bounded: bool) -> None:
        self.k, self.chunk_size = partition.k, partition.chunk_size
        self._partition, self._rank, self._bounded = partition, rank, bounded
        self._ordinal = ordinal
        """Chunks given out."""
        self._buffer: np.ndarray | None = None
        self._filled = 0

    @classmethod
    def of(cls, partition: CrossNodePartition, *, rank: int = 0, ordinal: int = 0) -> ChunkAssembler:
        """For the rows of one rank's chunks, one after the other; `ordinal` chunks are done already."""
        if partition.span != 1:
            raise ConfigError("an assembler cuts single chunks: give it the partition with span=1")
        if not 0 <= rank < partition.n_ranks or not 0 <= ordinal <= partition.owned(rank):
            raise ConfigError(f"rank {rank} has no chunk number {ordinal} in a partition of {partition.n_ranks} ranks")
        return cls(partition, rank=rank, ordinal=ordinal, bounded=True)

    @classmethod
    def unbounded(cls, *, k: int, chunk_size: int, ordinal: int = 0) -> ChunkAssembler:
        """For rows whose number is not known yet."""
        endless = CrossNodePartition(k=k, n_rows=MOST_ROWS, chunk_size=whole_chunk_size(chunk_size), n_ranks=1)
        return cls(endless, rank=0, ordinal=ordinal, bounded=False)

    @property
    def next_chunk(self) -> int | None:
        """Index of the chunk being filled; None past the last."""
        at = self._partition.unit_of(self._rank, self._ordinal)
        return at if at < self._partition.n_chunks else None

    def push(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Take rows and give out the chunks that became whole. The arrays given out are the caller's."""
        if rows.ndim != 2 or rows.shape[1] != self.k:
            raise DataError(f"rows of {self.k} columns are expected, got an array of shape {rows.shape}")
        if self._buffer is not None and rows.dtype != self._buffer.dtype:
            raise DataError(
                f"the chunk began with rows of {self._buffer.dtype}, now {rows.dtype} came: convert them first"
            )
        return self._cut(rows)

    def _cut(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        while len(rows):
            chunk = self.next_chunk
            if chunk is None:
                raise DataError(
                    f"{len(rows)} rows came past the last chunk of rank {self._rank}: the partition has {self._partition.n_rows:,} rows"
                )
            wanted = self._length(chunk)
            taken, rows = rows[: wanted - self._filled], rows[wanted - self._filled :]
            if len(taken) < wanted:  # otherwise the whole chunk lies in the batch: no copy
                if self._buffer is None:
                    self._buffer = np.empty((wanted, self.k), taken.dtype)
                self._buffer[self._filled : self._filled + len(taken)] = taken
                self._filled += len(taken)
                if self._filled < wanted:
                    return
                taken = self._taken()
            self._ordinal += 1
            yield chunk, taken

    def _taken(self) -> np.ndarray:
        """The rows of the chunk being filled, which is empty then."""
        assert self._buffer is not None
        rows, self._buffer, self._filled = self._buffer[: self._filled], None, 0
        return rows

    def finish(self) -> tuple[int, np.ndarray] | None:
        """The last, short chunk of an unbounded sequence. With a partition everything must have been given out."""
        chunk = self.next_chunk
        if chunk is None or (not self._bounded and not self._filled):
            return None
        if self._bounded:
            raise DataError(
                f"the rows ended inside chunk {chunk}: it has {self._filled} of its {self._length(chunk)} rows. Give all rows of the "
                "partition, or make one with fewer"
            )
        self._ordinal += 1
        return chunk, self._taken()

    def checkpoint(self) -> int:
        """Chunks given out, to begin again from with `ordinal=`. Only between two chunks."""
        if self._filled:
            raise DataError(
                f"the assembler holds {self._filled} rows of chunk {self.next_chunk}: save it between two chunks"
            )
        return self._ordinal

    def _length(self, chunk: int) -> int:
        start, end = self._partition.chunk_rows(chunk)
        return end - start
