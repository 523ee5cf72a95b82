"""Worker of a reduction: turns the rows of one rank's chunks into partials.

    worker = NodeWorker(partition, rank=3)
    while (rows := worker.next_rows) is not None:         (start, end) of the chunk to compute
        partial = worker.compute(read(*rows))             None inside a span
        if partial is not None:
            send(partial); worker.acknowledge(partial)    only what was received counts as done

The cursor is a position in a fixed sequence of chunks, so a replacement on any host goes on from a NodeWorkerCheckpoint, or
from the coordinator's own count of what it received. With spans the checkpoint carries the partial sum of the open span.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import ConfigError, DataError
from headrace.files import Container
from headrace.reduce.checkpoints import SavedFold, SavedMeta, SavedState, read_meta, state_arrays, state_from
from headrace.reduce.kernel import as_rows, chunk_gram_packed, dtype_name
from headrace.reduce.partial import NodePartial
from headrace.reduce.partition import CrossNodePartition, Provenance
from headrace.reduce.tree import BorderState, StreamingBorderGram, all_finite


class _Meta(SavedMeta, kw_only=True, tag="reduce-worker"):
    rank: int
    next_ordinal: int
    span: SavedFold | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorkerCheckpoint(SavedState):
    """Where a rank stands: what was received of it, and the sum of the span it is in."""

    partition: CrossNodePartition
    provenance: Provenance
    rank: int
    next_ordinal: int
    open_span: BorderState | None = None

    def _saved(self) -> tuple[dict[str, np.ndarray], _Meta]:
        arrays, span = state_arrays(self.open_span) if self.open_span is not None else ({}, None)
        return arrays, _Meta(
            partition=self.partition,
            provenance=self.provenance,
            rank=self.rank,
            next_ordinal=self.next_ordinal,
            span=span,
        )

    @classmethod
    def _read(cls, container: Container) -> NodeWorkerCheckpoint:
        meta = read_meta(container, _Meta)
        saved = cls(
            partition=meta.partition,
            provenance=meta.provenance,
            rank=meta.rank,
            next_ordinal=meta.next_ordinal,
            open_span=None if meta.span is None else state_from(container, meta.span),
        )
        NodeWorker.resume(saved)  # refuses numbers that do not add up, while an older generation is at hand
        return saved


class NodeWorker:
    """Turns the rows of one rank's chunks into partials, in order."""

    def __init__(
        self,
        partition: CrossNodePartition,
        *,
        rank: int,
        provenance: Provenance | None = None,
        threads: int = 1,
        next_ordinal: int = 0,
        compute: Callable[[Any, int], np.ndarray] | None = None,
    ) -> None:
        """Begin at a unit of a rank.

        Args:
            partition: The chunks of the pass.
            rank: Whose chunks.
            provenance: Which pass; it travels with every partial.
            threads: Threads for a chunk.
            next_ordinal: How many of the rank's partials were received already.
            compute: `compute(rows, threads)` gives the packed Gram of a chunk whose rows are not plain (shifted, weighted, with targets);
                `chunk_gram_packed` unless given.
        """
        if not 0 <= rank < partition.n_ranks:
            raise ConfigError(f"rank {rank} is outside the partition's {partition.n_ranks} ranks")
        if not 0 <= next_ordinal <= partition.owned(rank):
            raise DataError(
                f"rank {rank} owns {partition.owned(rank)} partials and cannot go on from its {next_ordinal}th"
            )
        self.partition, self.rank, self.threads = partition, rank, threads
        self.provenance = provenance if provenance is not None else Provenance()
        self._fingerprint = partition.fingerprint
        self._compute = compute
        self._done = next_ordinal
        self._made = next_ordinal
        self._span: StreamingBorderGram | None = None

    @property
    def next_chunk(self) -> int | None:
        """The chunk whose rows `compute` takes next; None at the end."""
        if self._made >= self.partition.owned(self.rank):
            return None
        first, _ = self.partition.unit_chunks(self.partition.unit_of(self.rank, self._made))
        return first + (self._span.frontier if self._span is not None else 0)

    @property
    def next_rows(self) -> tuple[int, int] | None:
        """The rows [start, end) of it."""
        chunk = self.next_chunk
        return None if chunk is None else self.partition.chunk_rows(chunk)

    @property
    def next_ordinal(self) -> int:
        """How many partials were received of this rank."""
        return self._done

    def compute(self, rows: Any) -> NodePartial | None:
        """The partial of the next chunk, from its rows (or from whatever the given `compute` takes that has their number as its
        length); inside a span None until its last chunk."""
        chunk = self.next_chunk
        if chunk is None:
            raise DataError(f"rank {self.rank} is past the end: all of its {self._made} partials are made")
        start, end = self.partition.chunk_rows(chunk)
        what = f"chunk {chunk} (rows {start:,} to {end:,})"
        if len(rows) != end - start:
            raise DataError(f"{what} of rank {self.rank} needs {end - start:,} rows, got {len(rows):,}")
        if self._compute is None:
            rows = as_rows(rows)
            if rows.ndim != 2 or rows.shape[1] != self.partition.k:
                raise DataError(f"{what} needs rows of {self.partition.k} columns, got shape {rows.shape}")
            if dtype_name(rows.dtype) != self.provenance.rows:
                raise DataError(f"{what} needs rows of {self.provenance.rows}, got {dtype_name(rows.dtype)}")
            gram = chunk_gram_packed(rows, threads=self.threads)
        else:
            try:
                gram = self._compute(rows, self.threads)
            except DataError as error:
                raise DataError(f"{what}: {error}") from None
        if not all_finite(gram):
            raise DataError(
                f"{what} gives NaN or infinity: one of its rows holds one, or squares beyond 1.8e308. Mend or leave out that row"
            )
        first, count = self.partition.unit_chunks(self.partition.unit_of(self.rank, self._made))
        if self.partition.span > 1:
            if self._span is None:
                self._span = StreamingBorderGram(entries=self.partition.entries, n_chunks=count)
            try:
                self._span.submit_chunk_gram(chunk - first, gram)
                if not self._span.complete:
                    return None
                gram, self._span = self._span.finish(), None
            except DataError as error:
                raise DataError(
                    f"the span of {count} chunks from chunk {first} on, counted from there: {error}"
                ) from None
        self._made += 1
        return NodePartial(
            chunk=first,
            chunks=count,
            rank=self.rank,
            partition=self._fingerprint,
            provenance=self.provenance,
            gram=gram,
        )

    def acknowledge(self, partial: NodePartial) -> None:
        """Count a partial as received by the coordinator."""
        ordinal = self.partition.ordinal_of(partial.chunk)
        if partial.rank != self.rank or ordinal != self._done or ordinal >= self._made:
            raise DataError(
                f"chunk {partial.chunk} of rank {partial.rank} was acknowledged; rank {self.rank} waits for partial {self._done}"
            )
        self._done += 1

    # -------------------------------------------------------------------------------------------- state

    def checkpoint(self) -> NodeWorkerCheckpoint:
        """What was received so far. The open span is in it if nothing that was made is still on its way."""
        whole = self._made == self._done
        return NodeWorkerCheckpoint(
            partition=self.partition, provenance=self.provenance, rank=self.rank, next_ordinal=self._done,
            open_span=self._span.state() if whole and self._span is not None else None,
        )  # fmt: skip

    @classmethod
    def resume(
        cls,
        saved: NodeWorkerCheckpoint,
        *,
        provenance: Provenance | None = None,
        threads: int = 1,
        compute: Callable[[Any, int], np.ndarray] | None = None,
    ) -> NodeWorker:
        """Continue after the last partial that was received. `provenance`: the pass now; CursorMismatch if the state is of another."""
        if provenance is not None:
            provenance.require_same_as(saved.provenance, f"the state of rank {saved.rank}")
        worker = cls(
            saved.partition, rank=saved.rank, provenance=saved.provenance, threads=threads,
            next_ordinal=saved.next_ordinal, compute=compute,
        )  # fmt: skip
        if saved.open_span is not None:
            first = saved.partition.unit_of(saved.rank, saved.next_ordinal)
            if saved.partition.span == 1 or saved.next_ordinal >= saved.partition.owned(saved.rank):
                raise DataError(f"the state of rank {saved.rank} holds the sum of a span where there is none")
            worker._span = StreamingBorderGram.resume(
                saved.open_span, entries=saved.partition.entries, n_chunks=saved.partition.unit_chunks(first)[1]
            )
        return worker
