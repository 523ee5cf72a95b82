"""Summation tree: the fixed order in which chunk Grams are added.

    chunks   0 … 127 | 128 … 255 | 256 … 383 | 384 … 400        left fold within 128
                 b0        b1          b2        short
                  └── + ──┘             │          │            forest: equal weights merge, so b0+b1 is one tree
                       └───────── + ────┴──── + ───┘            finish: right to left

Entry by entry this is `pairwise_sum` over the chunks in index order. A chunk that comes early is parked until the ones
before it are there; so any arrival order gives the same additions, and the same bits. Partials are the upper triangle as one
flat f64 vector (row i holds columns i … k−1): half the memory and half the wire of a full matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from headrace.errors import DataError, FileCorrupt
from headrace.reduce.kernel import unpack_upper
from headrace.reduce.partition import CROSS_CHUNK_BASE

_NAMED_MISSING = 8


def pairwise_sum(items: Sequence[np.ndarray] | np.ndarray) -> np.ndarray | float:
    """The sum of items in the fixed order of this package: a left fold of up to 128 items, seeded from the first; longer sequences are split
    at the largest 128·2^p strictly below their length. Empty: +0.0."""
    count = len(items)
    if count == 0:
        return 0.0
    if count <= CROSS_CHUNK_BASE:
        total = items[0]
        for item in items[1:]:
            total = total + item
        return total
    half = CROSS_CHUNK_BASE
    while half * 2 < count:
        half *= 2
    return pairwise_sum(items[:half]) + pairwise_sum(items[half:])


def all_finite(values: np.ndarray) -> bool:
    """Whether no entry is NaN or infinite."""
    return bool(np.isfinite(values).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderState:
    """Everything a fold needs to go on. Its arrays are its own: the fold that it is of goes on without them, and one that resumes
    from it copies them."""

    frontier: int
    """Chunks folded: the next one to fold has this index."""
    block_len: int = 0
    block_partial: np.ndarray | None = None
    forest: tuple[tuple[int, np.ndarray], ...] = ()
    """(weight in blocks of 128 chunks, sum), heaviest first."""
    pending: tuple[tuple[int, np.ndarray], ...] = ()
    """(first chunk, partial) of what came early, in order."""
    tail: np.ndarray | None = None
    """The sum of a last span that is short; only once everything is folded."""


class StreamingBorderGram:
    """Folds the partials of chunks 0, 1, 2, … in that order, whatever the order they come in.

    `n_chunks=None`: not known; the sum is over all that were submitted when it is finished. `entries` is the length of a partial: k(k+1)/2, or fewer where
    several coordinators share the matrix. `span`: chunks that a partial sums.
    """

    def __init__(self, *, entries: int, n_chunks: int | None, span: int = 1) -> None:
        if n_chunks is None and span != 1:
            raise DataError("spans need to know how many chunks there will be")
        self.entries, self.n_chunks, self.span = entries, n_chunks, span
        self.frontier = 0
        self._block: np.ndarray | None = None
        self._block_len = 0
        self._forest: list[tuple[int, np.ndarray]] = []
        self._pending: dict[int, np.ndarray] = {}
        self._tail: np.ndarray | None = None
        self._failed: str | None = None
        """Why there is no sum any more."""

    # ------------------------------------------------------------------------------------------- submit

    @property
    def pending(self) -> int:
        """Partials that are parked."""
        return len(self._pending)

    def has(self, chunk: int) -> bool:
        """Whether a partial that starts at this chunk was submitted."""
        return chunk < self.frontier or chunk in self._pending

    def submit_chunk_gram(self, chunk: int, gram: np.ndarray) -> None:
        """Take the partial of one chunk (of the span that starts at it). Refused in this order: no such chunk, already
        submitted, wrong shape, not finite; a refused one changes nothing. One whose addition overflows ends the fold."""
        self._require_whole()
        if chunk < 0 or (self.n_chunks is not None and chunk >= self.n_chunks):
            there = "chunks are numbered from 0 on" if self.n_chunks is None else f"there are {self.n_chunks:,} chunks"
            raise DataError(f"chunk {chunk} was submitted, but {there}")
        if chunk % self.span:
            raise DataError(f"chunk {chunk} was submitted, but spans of {self.span} chunks start at multiples of that")
        if self.has(chunk):
            raise DataError(f"chunk {chunk} was already submitted")
        if gram.shape != (self.entries,) or gram.dtype != np.float64:
            raise DataError(
                f"the partial of chunk {chunk} is {gram.dtype} of shape {gram.shape}, expected float64 of shape ({self.entries},)"
            )
        if not all_finite(gram):
            raise DataError(
                f"the partial of chunk {chunk} holds NaN or infinity: one of its rows does, or its squares exceed 1.8e308. Mend or "
                "leave out that row; nothing was added"
            )
        if chunk != self.frontier:
            self._pending[chunk] = np.array(gram)  # its owner may receive the next one in the same memory
            return
        self._fold(gram)
        self._drain()

    def _drain(self) -> None:
        while (gram := self._pending.pop(self.frontier, None)) is not None:
            self._fold(gram)

    def _require_whole(self) -> None:
        if self._failed is not None:
            raise DataError(self._failed)

    def _fold(self, gram: np.ndarray) -> None:
        try:
            self._add(gram)
        except FloatingPointError:
            self._overflown(self.frontier)

    def _overflown(self, end: int) -> NoReturn:
        self._failed = (
            f"the sum of chunks 0 to {end - 1} exceeds 1.8e308, although each of them is finite. Scale the rows down, or leave out "
            "the largest"
        )
        raise DataError(self._failed) from None

    # numpy looks at the processor's flags after every addition anyway. To raise costs 0.5 us; to look at the sums costs as much as to add.
    @np.errstate(over="raise", invalid="raise")
    def _add(self, gram: np.ndarray) -> None:
        if self.span == 1:
            self._block_len += 1
            self.frontier += 1
            if self._block is None:
                self._block = np.array(gram)
            else:
                np.add(self._block, gram, out=self._block)
            if self._block_len == CROSS_CHUNK_BASE:
                self._absorb(self._block, 1, owned=True)
                self._block, self._block_len = None, 0
            return
        assert self.n_chunks is not None
        count = min(self.span, self.n_chunks - self.frontier)
        self.frontier += count
        if count == self.span:
            self._absorb(gram, self.span // CROSS_CHUNK_BASE, owned=False)
        else:
            self._tail = np.array(gram)

    def _absorb(self, gram: np.ndarray, weight: int, *, owned: bool) -> None:
        forest = self._forest
        while forest and forest[-1][0] == weight:
            _, total = forest.pop()
            gram, owned, weight = np.add(total, gram, out=total), True, weight * 2
        forest.append((weight, gram if owned else np.array(gram)))

    # ------------------------------------------------------------------------------------------- finish

    def missing(self, limit: int = _NAMED_MISSING) -> list[int]:
        """The first chunks that no submitted partial starts at."""
        absent = (chunk for chunk in range(self.frontier, self._end, self.span) if chunk not in self._pending)
        return list(itertools.islice(absent, limit))

    @property
    def _end(self) -> int:
        """How many chunks there are; as far as was submitted, where their number is not known."""
        return self.n_chunks if self.n_chunks is not None else max(self._pending, default=self.frontier - 1) + 1

    @property
    def complete(self) -> bool:
        return self.n_chunks is not None and self.frontier == self.n_chunks

    def finish(self, *, full: bool = False) -> np.ndarray:
        """The sum over all chunks: the upper triangle row by row, or with `full` the whole square matrix. DataError names the first
        missing chunks while some are missing."""
        self._require_whole()
        k = (math.isqrt(8 * self.entries + 1) - 1) // 2
        if full and k * (k + 1) // 2 != self.entries:
            raise DataError(
                f"{self.entries:,} entries are no whole triangle, so there is no square matrix: finish without full"
            )
        if missing := self.missing():
            left = -(-(self._end - self.frontier) // self.span) - self.pending
            more = f" and {left - len(missing):,} more" if left > len(missing) else ""
            raise DataError(
                f"{left:,} partials are still missing, the first at chunks {', '.join(map(str, missing))}{more}: "
                "wait for them before finishing"
            )
        last = self._tail if self._tail is not None else self._block
        total = None if last is None else np.array(last)
        with np.errstate(over="ignore", invalid="ignore"):
            for _, node in reversed(self._forest):
                total = np.array(node) if total is None else np.add(node, total, out=total)
        if total is not None and not all_finite(total):
            self._overflown(self.frontier)
        total = np.zeros(self.entries) if total is None else total
        return unpack_upper(total, k) if full else total

    # -------------------------------------------------------------------------------------------- state

    def state(self) -> BorderState:
        """What is needed to go on, as it is now: later submits do not change it."""
        self._require_whole()
        return BorderState(
            frontier=self.frontier,
            block_len=self._block_len,
            block_partial=None if self._block is None else np.array(self._block),
            forest=tuple((weight, np.array(total)) for weight, total in self._forest),
            pending=tuple(sorted(self._pending.items(), key=lambda item: item[0])),
            tail=self._tail,
        )

    @classmethod
    def resume(cls, state: BorderState, *, entries: int, n_chunks: int | None, span: int = 1) -> StreamingBorderGram:
        """Go on from a state whose numbers add up; any other is refused."""
        _check_state(state, entries, n_chunks, span)
        fold = cls(entries=entries, n_chunks=n_chunks, span=span)
        fold.frontier = state.frontier
        fold._block_len = state.block_len
        fold._block = None if state.block_partial is None else np.array(state.block_partial)
        fold._forest = [(weight, np.array(total)) for weight, total in state.forest]
        fold._pending = {chunk: np.array(gram) for chunk, gram in state.pending}
        fold._tail = None if state.tail is None else np.array(state.tail)
        fold._drain()  # a partial parked right at the frontier would otherwise wait for ever
        return fold


def _check_state(state: BorderState, entries: int, n_chunks: int | None, span: int) -> None:
    """Refuse a state that no run of the fold could have left behind."""
    weights = [weight for weight, _ in state.forest]
    arrays = [g for _, g in state.forest] + [g for _, g in state.pending]
    arrays += [g for g in (state.block_partial, state.tail) if g is not None]
    end = n_chunks if n_chunks is not None else 1 << 62
    tail_len = state.frontier % span if state.tail is not None else 0
    folded = CROSS_CHUNK_BASE * sum(weights) + state.block_len + tail_len
    starts = [chunk for chunk, _ in state.pending]
    problem = ""
    if not 0 <= state.frontier <= end:
        problem = f"frontier {state.frontier} is outside 0 … {end}"
    elif folded != state.frontier:
        problem = f"the forest and the open block hold {folded} chunks, the frontier says {state.frontier}"
    elif any(w < 1 or w & (w - 1) for w in weights) or any(a <= b for a, b in itertools.pairwise(weights)):
        problem = f"forest weights {weights} are not falling powers of two"
    elif not 0 <= state.block_len < CROSS_CHUNK_BASE or (state.block_len == 0) != (state.block_partial is None):
        problem = f"an open block of {state.block_len} chunks"
    elif span > 1 and (state.block_len or any(w * CROSS_CHUNK_BASE < span for w in weights)):
        problem = f"blocks lighter than the span of {span} chunks"
    elif state.tail is not None and (state.frontier != end or tail_len == 0):
        problem = "a short last span before the end"
    elif starts != sorted(set(starts)) or any(not state.frontier <= c < end or c % span for c in starts):
        problem = f"pending chunks {starts[:8]} are not in order between frontier {state.frontier} and {end}"
    elif any(a.shape != (entries,) or a.dtype != np.float64 for a in arrays):
        problem = f"a partial that is not {entries} float64 numbers"
    elif not all(all_finite(a) for a in arrays):
        problem = "NaN or infinity in a partial"
    if problem:
        raise FileCorrupt(f"the saved fold does not add up: {problem}. Go on from the generation before it")
