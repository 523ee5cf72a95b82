"""Coordinator of a reduction: takes the partials of all ranks and folds them into one sum.

    reduction = CrossNodeGramReduction(partition)
    receipt = reduction.receive(partial)          TAKEN, DUPLICATE (equal bits, counted) or WAIT (the rank is too far ahead)
    reduction.checkpoint().save(files)
    reduction.checkpoint().to_bytes()             for a store of the caller's; CrossNodeCheckpoint.from_bytes reads it
    gram = reduction.finish()                     the upper triangle; finish(full=True): the k x k matrix

Each rank sends its partials in order; ranks may be as far apart as the window allows. What is refused, in this order:
another pass or partition, a rank out of range, a rank that does not own the chunk, a chunk that is not the rank's next, then
what the fold refuses. A refused message changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import Container
from headrace.metrics import MetricSpec, Reduction, default_meter, register
from headrace.reduce.checkpoints import SavedState, state_arrays, state_from
from headrace.reduce.partial import NodePartial
from headrace.reduce.partition import CrossNodePartition, Provenance
from headrace.reduce.tree import BorderState, StreamingBorderGram

DEFAULT_WINDOW = 4
"""Partials a rank may be ahead of the fold: pending memory is at most window · ranks partials."""

register(MetricSpec("reduce/duplicates", Reduction.SUM, help="partials that came again with equal bits"))


class Receipt(enum.Enum):
    """What became of a partial."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    """It was taken before, with the same bits: the sender may go on."""
    WAIT = "wait"
    """Its rank is a whole window ahead of the slowest: send it again once the fold has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossNodeCheckpoint(SavedState):
    """The coordinator's whole state, as it was when it was asked for."""

    kind = "reduce-coordinator"
    partition: CrossNodePartition
    provenance: Provenance
    received_per_rank: tuple[int, ...]
    fold: BorderState
    digests: tuple[np.ndarray, ...]
    """64 bits of every partial received, by rank: what a late retry is compared with."""
    entries: tuple[int, int]
    """The part of the triangle that this coordinator folds."""

    def _content(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, fold = state_arrays(self.fold)
        arrays["digests"] = np.concatenate(self.digests)
        received = list(self.received_per_rank)
        return arrays, {"received_per_rank": received, "entries": list(self.entries), "fold": fold}

    @classmethod
    def _read(cls, container: Container) -> CrossNodeCheckpoint:
        meta, partition, provenance = cls._about(container)
        received, entries, digests = meta.get("received_per_rank"), meta.get("entries"), container.arrays.get("digests")
        if (
            not _whole_numbers(received) or len(received) != partition.n_ranks or min(received) < 0
            or not _whole_numbers(entries) or len(entries) != 2
            or digests is None or digests.dtype != np.uint64 or digests.shape != (sum(received),)
        ):  # fmt: skip
            raise DataError(f"{container.path} does not say what was received of {partition.n_ranks} ranks")
        saved = cls(
            partition=partition,
            provenance=provenance,
            received_per_rank=tuple(received),
            fold=state_from(container, meta.get("fold")),
            digests=tuple(np.split(digests, np.cumsum(received)[:-1])),
            entries=(entries[0], entries[1]),
        )
        CrossNodeGramReduction.resume(saved)  # refuses numbers that do not add up, while an older generation is at hand
        return saved


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)


class CrossNodeGramReduction:
    """Folds the partials of all ranks into one sum. Its bits do not depend on the ranks."""

    def __init__(
        self,
        partition: CrossNodePartition,
        *,
        provenance: Provenance | None = None,
        window: int = DEFAULT_WINDOW,
        entries: tuple[int, int] | None = None,
    ) -> None:
        """Begin an empty sum.

        Args:
            partition: The chunks of the pass, and their ranks.
            provenance: Which pass; partials of another are refused.
            window: Partials that a rank may be ahead of the fold.
            entries: (start, end): fold that part of the triangle only; several coordinators then share a wide matrix.
        """
        start, end = entries if entries is not None else (0, partition.entries)
        if window < 1:
            raise ConfigError(f"a window of {window} would let no rank send anything; give 1 or more")
        if not 0 <= start < end <= partition.entries:
            raise ConfigError(f"entries {start} … {end} lie outside a triangle of {partition.entries:,}")
        self.partition, self.window, self.entries = partition, window, (start, end)
        self.provenance = provenance if provenance is not None else Provenance()
        self._fingerprint = partition.fingerprint
        self._fold = StreamingBorderGram(entries=end - start, n_chunks=partition.n_chunks, span=partition.span)
        self._received = [0] * partition.n_ranks
        self._digests: list[list[int]] = [[] for _ in range(partition.n_ranks)]

    # ------------------------------------------------------------------------------------------ receive

    @property
    def frontier(self) -> int:
        """Chunks folded."""
        return self._fold.frontier

    @property
    def pending(self) -> int:
        """Partials parked until the ones before them are there."""
        return self._fold.pending

    @property
    def received_per_rank(self) -> tuple[int, ...]:
        return tuple(self._received)

    def credit(self, rank: int) -> int:
        """How many more partials a rank may send before the fold has to move."""
        ahead = self._received[rank] - self.partition.owned_below(rank, self.frontier)
        left = self.partition.owned(rank) - self._received[rank]
        return min(self.window - ahead, left)

    def receive(self, partial: NodePartial) -> Receipt:
        """Take one partial. DUPLICATE: it was taken before, with equal bits. WAIT: its rank is too far ahead. Anything else is a DataError."""
        chunk, rank, partition = partial.chunk, partial.rank, self.partition
        self._require_same_pass(partial)
        if not 0 <= rank < partition.n_ranks:
            raise DataError(f"a partial came from rank {rank}; this pass has ranks 0 to {partition.n_ranks - 1}")
        if chunk < 0 or chunk % partition.span or partition.owner(chunk) != rank:
            owner = (
                f"it belongs to rank {partition.owner(chunk)}"
                if chunk >= 0 and not chunk % partition.span
                else "no partial starts there"
            )
            raise DataError(f"rank {rank} sent chunk {chunk}: {owner}")
        ordinal, cursor = partition.ordinal_of(chunk), self._received[rank]
        if ordinal < cursor:
            return self._compare(partial, ordinal)
        if ordinal != cursor or chunk >= partition.n_chunks:
            if cursor >= partition.owned(rank):
                raise DataError(f"rank {rank} sent chunk {chunk}: it is past the end of its {cursor} partials")
            expected = partition.unit_of(rank, cursor) * partition.span
            raise DataError(f"rank {rank} sent chunk {chunk}: its cursor expects chunk {expected}")
        count = min(partition.span, partition.n_chunks - chunk)
        if partial.chunks != count or partial.first_entry != self.entries[0]:
            raise DataError(
                f"rank {rank} sent chunk {chunk} as a sum of {partial.chunks} chunks from entry {partial.first_entry} on; expected {count} "
                f"chunks from entry {self.entries[0]} on"
            )
        if self.credit(rank) < 1:
            return Receipt.WAIT
        try:
            self._fold.submit_chunk_gram(chunk, partial.gram)
        except DataError as error:
            raise DataError(f"rank {rank}: {error}") from None
        self._digests[rank].append(partial.digest)
        self._received[rank] += 1
        return Receipt.TAKEN

    def _require_same_pass(self, partial: NodePartial) -> None:
        differences = self.provenance.differences(partial.provenance)
        if partial.partition != self._fingerprint:
            differences["partition"] = (partial.partition, self._fingerprint)
        if differences:
            listed = "; ".join(f"{name}: theirs {theirs}, ours {ours}" for name, (theirs, ours) in differences.items())
            raise DataError(
                f"rank {partial.rank} sent chunk {partial.chunk} of another pass ({listed}); it was not added"
            )

    def _compare(self, partial: NodePartial, ordinal: int) -> Receipt:
        if partial.digest == self._digests[partial.rank][ordinal]:
            default_meter().add("reduce/duplicates")
            return Receipt.DUPLICATE
        raise DataError(
            f"rank {partial.rank} sent chunk {partial.chunk} again with other bits than the first time: its rows changed, or its memory "
            "is failing. The first answer stands; find out which is right before you trust the sum"
        )

    # ------------------------------------------------------------------------------------------- finish

    @property
    def complete(self) -> bool:
        return self._fold.complete

    def missing(self, limit: int = 8) -> list[int]:
        """The first chunks that did not arrive."""
        return self._fold.missing(limit)

    def finish(self, *, full: bool = False) -> np.ndarray:
        """The sum of everything: its upper triangle row by row, or with `full` the whole k x k matrix. DataError names the first
        missing chunks while some are missing."""
        start, end = self.entries
        if full and (start, end) != (0, self.partition.entries):
            raise DataError(
                f"this coordinator folds entries {start:,} to {end:,} of {self.partition.entries:,} only: join the packed sums of all, and "
                "unpack_upper them"
            )
        return self._fold.finish(full=full)

    # -------------------------------------------------------------------------------------------- state

    def checkpoint(self) -> CrossNodeCheckpoint:
        return CrossNodeCheckpoint(
            partition=self.partition, provenance=self.provenance, received_per_rank=self.received_per_rank,
            fold=self._fold.state(), digests=tuple(np.array(d, np.uint64) for d in self._digests), entries=self.entries,
        )  # fmt: skip

    @classmethod
    def resume(
        cls,
        saved: CrossNodeCheckpoint,
        *,
        provenance: Provenance | None = None,
        window: int = DEFAULT_WINDOW,
        n_ranks: int | None = None,
    ) -> CrossNodeGramReduction:
        """Continue from a checkpoint. On another number of ranks (`n_ranks`) what was parked is computed again.

        `provenance`: the pass now; CursorMismatch if the checkpoint is of another.
        """
        if provenance is not None:
            provenance.require_same_as(saved.provenance, "the reduction")
        partition = saved.partition
        reduction = cls(partition, provenance=saved.provenance, window=window, entries=saved.entries)
        _check_cursors(saved)
        width = saved.entries[1] - saved.entries[0]
        fold = StreamingBorderGram.resume(saved.fold, entries=width, n_chunks=partition.n_chunks, span=partition.span)
        reduction._fold = fold
        reduction._received = list(saved.received_per_rank)
        reduction._digests = [d.tolist() for d in saved.digests]
        if n_ranks is None or n_ranks == partition.n_ranks:
            return reduction
        return reduction._redealt(n_ranks)

    def _redealt(self, n_ranks: int) -> CrossNodeGramReduction:
        """The same sum on other ranks. Digests are kept for what is folded; what was parked goes."""
        old = self.partition
        new = CrossNodePartition(**(old.to_dict() | {"n_ranks": n_ranks}))
        other = CrossNodeGramReduction(new, provenance=self.provenance, window=self.window, entries=self.entries)
        kept = replace(self._fold.state(), pending=())
        width = self.entries[1] - self.entries[0]
        other._fold = StreamingBorderGram.resume(kept, entries=width, n_chunks=new.n_chunks, span=new.span)
        other._received = [new.owned_below(rank, self.frontier) for rank in range(n_ranks)]
        for rank, count in enumerate(other._received):
            units = (new.unit_of(rank, ordinal) for ordinal in range(count))
            other._digests[rank] = [self._digests[u % old.n_ranks][u // old.n_ranks] for u in units]
        return other


def _check_cursors(saved: CrossNodeCheckpoint) -> None:
    """What was received of each rank must be what is folded and parked of it, without a hole."""
    partition, frontier = saved.partition, saved.fold.frontier
    shapes = [digests.shape for digests in saved.digests]
    if len(saved.received_per_rank) != partition.n_ranks or shapes != [(count,) for count in saved.received_per_rank]:
        raise FileCorrupt(
            f"the saved reduction does not add up: {partition.n_ranks} ranks, partials received of {len(saved.received_per_rank)} and digests of "
            f"{len(shapes)} ranks, or more of the one than of the other. Go on from the generation before it"
        )
    parked: list[list[int]] = [[] for _ in range(partition.n_ranks)]
    for chunk, _ in saved.fold.pending:
        parked[partition.owner(chunk)].append(partition.ordinal_of(chunk))
    for rank, received in enumerate(saved.received_per_rank):
        folded = partition.owned_below(rank, min(frontier, partition.n_chunks))
        if parked[rank] != list(range(folded, received)):
            raise FileCorrupt(
                f"the saved reduction does not add up: {received} partials received of rank {rank}, but {folded} are folded and "
                f"{_shown(parked[rank])} parked. Go on from the generation before it"
            )


def _shown(ordinals: Sequence[int]) -> str:
    return f"its numbers {', '.join(map(str, ordinals[:8]))}" if ordinals else "none"
