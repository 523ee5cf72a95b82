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
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np

from headrace.errors import ConfigError, DataError, FileCorrupt
from headrace.files import Container
from headrace.metrics import MetricSpec, Reduction, default_meter, register
from headrace.reduce.checkpoints import SavedFold, SavedMeta, SavedState, read_meta, state_arrays, state_from
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


class _Meta(SavedMeta, kw_only=True, tag="reduce-coordinator"):
    received_per_rank: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    entries: tuple[int, int]
    fold: SavedFold


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossNodeCheckpoint(SavedState):
    """The coordinator's whole state, as it was when it was asked for."""

    partition: CrossNodePartition
    provenance: Provenance
    received_per_rank: tuple[int, ...]
    fold: BorderState
    digests: tuple[np.ndarray, ...]
    """64 bits of every partial received, by rank: what a late retry is compared with."""
    entries: tuple[int, int]
    """The part of the triangle that this coordinator folds."""

    def _saved(self) -> tuple[dict[str, np.ndarray], _Meta]:
        arrays, fold = state_arrays(self.fold)
        arrays["digests"] = np.concatenate(self.digests)
        return arrays, _Meta(
            partition=self.partition,
            provenance=self.provenance,
            received_per_rank=self.received_per_rank,
            entries=self.entries,
            fold=fold,
        )

    @classmethod
    def _read(cls, container: Container) -> CrossNodeCheckpoint:
        meta, digests = read_meta(container, _Meta), container.arrays.get("digests")
        received = meta.received_per_rank
        if digests is None or digests.dtype != np.uint64 or digests.shape != (sum(received),):
            raise DataError(f"{container.path} does not say what was received of {meta.partition.n_ranks} ranks")
        saved = cls(
            partition=meta.partition,
            provenance=meta.provenance,
            received_per_rank=received,
            fold=state_from(container, meta.fold),
            digests=tuple(np.split(digests, np.cumsum(received)[:-1])),
            entries=meta.entries,
        )
        CrossNodeGramReduction.resume(saved)  # refuses numbers that do not add up, while an older generation is at hand
        return saved


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
        self._digests: list[list[int]] = [[] for _ in range(partition.n_ranks)]
        """Of every partial received, by rank."""

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
        return tuple(map(len, self._digests))

    def credit(self, rank: int) -> int:
        """How many more partials a rank may send before the fold has to move."""
        received = len(self._digests[rank])
        ahead = received - self.partition.owned_below(rank, self.frontier)
        return min(self.window - ahead, self.partition.owned(rank) - received)

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
        ordinal, cursor = partition.ordinal_of(chunk), len(self._digests[rank])
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
        _check_cursors(saved)
        if n_ranks is not None and n_ranks != saved.partition.n_ranks:
            saved = _redealt(saved, n_ranks)
        partition, (start, end) = saved.partition, saved.entries
        reduction = cls(partition, provenance=saved.provenance, window=window, entries=saved.entries)
        reduction._fold = StreamingBorderGram.resume(
            saved.fold, entries=end - start, n_chunks=partition.n_chunks, span=partition.span
        )
        reduction._digests = [digests.tolist() for digests in saved.digests]
        return reduction


def _redealt(saved: CrossNodeCheckpoint, n_ranks: int) -> CrossNodeCheckpoint:
    """The same sum on other ranks. Digests are kept for what is folded; what was parked goes."""
    old = saved.partition
    digests: list[list[int]] = [[] for _ in range(n_ranks)]
    for unit in range(-(-saved.fold.frontier // old.span)):
        digests[unit % n_ranks].append(saved.digests[unit % old.n_ranks][unit // old.n_ranks])
    return replace(
        saved,
        partition=replace(old, n_ranks=n_ranks),
        received_per_rank=tuple(map(len, digests)),
        fold=replace(saved.fold, pending=()),
        digests=tuple(np.array(of_rank, np.uint64) for of_rank in digests),
    )


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
            numbers = ", ".join(map(str, parked[rank][:8])) or "none"
            raise FileCorrupt(
                f"the saved reduction does not add up: {received} partials received of rank {rank}, but {folded} are folded and {numbers} "
                "parked. Go on from the generation before it"
            )
