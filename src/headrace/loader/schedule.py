"""Schedule of prepared blocks: the source and the block of sample g.

    schedule = Schedule([0.7, 0.3], limits=[None, 1000])
    source, pick = schedule.at(np.array([0, 1, 2, 10**9]))       the pick-th block taken from that source

A pure function of the weights, so ranks need not talk and there is nothing to save: O(1) for a sample, wherever it lies.
The weights become shares of a period (exact for decimal weights where the period stays below 2**20, else rounded to units of
2**-20) and one period is laid out by Tijdeman's rule for the chairman assignment problem. So at every sample the number
of blocks taken from a source differs from weight x samples by less than one block, however many sources there are and
however small they are (1 − 1/(2S − 2) of a block for S sources; the proof is R. Tijdeman's, 1980).

A source that has given all of its blocks leaves, and the rest go on with their weights in a new segment; the bound
then holds in each segment. Reads no clock, opens no file, starts no thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from headrace.runtime.compiled import kernel, wait_for_kernels

_PERIOD = 1 << 20
_PLAIN_TURNS = 1 << 16
"""Turns times sources from which on plain Python takes longer than the compiler."""


@kernel("void(int64[::1], int32[::1], int32[::1])")
def lay_period(shares, pick, rank):
    """Fill one period: pick[t] is the source of turn t, rank[t] how often it was picked before. `shares` sum to the period.

    Tijdeman's rule for the chairman assignment problem, on integers. With S sources, owed = share·(t + 1) − period·picks: of
    the sources that are owed at least period/(2S − 2) the one whose deadline comes first, ties to the lower index.
    """
    period = len(pick)
    count = len(shares)
    parts = max(2 * count - 2, 1)
    picks = np.zeros(count, np.int64)
    for t in range(period):
        best = -1
        best_late = 0
        for i in range(count):
            owed = shares[i] * (t + 1) - period * picks[i]
            if owed * parts >= period:
                late = period * (parts - 1) - owed * parts  # over shares[i]: the turns that are left
                if best < 0 or late * shares[best] < best_late * shares[i]:
                    best, best_late = i, late
        pick[t] = best
        rank[t] = picks[best]
        picks[best] += 1


@dataclass(frozen=True, slots=True)
class _Segment:
    """Turns [start, end) with one set of sources. `taken` is what each source gave before."""

    start: int
    end: int | None
    taken: np.ndarray
    shares: np.ndarray
    active: np.ndarray
    """The sources' numbers, as `pick` counts them."""
    pick: np.ndarray
    rank: np.ndarray

    def at(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        periods, place = np.divmod(turns - self.start, len(self.pick))
        local = self.pick[place]
        source = self.active[local]
        return source, self.taken[source] + periods * self.shares[local] + self.rank[place]

    def counts(self, turns: int) -> list[int]:
        """How many of the first `turns` turns of all, which reach into or beyond this segment, each source has."""
        periods, rest = divmod((turns if self.end is None else min(turns, self.end)) - self.start, len(self.pick))
        taken = self.taken.copy()
        taken[self.active] += periods * self.shares + np.bincount(self.pick[:rest], minlength=len(self.active))
        return taken.tolist()


class Schedule:
    """The order in which sources take turns, by weights of 0 or more, not all 0. `limits` says how many blocks each can give; None: for ever."""

    def __init__(self, weights: Sequence[float], *, limits: Sequence[int | None], stop_first: bool = False) -> None:
        self.weights = tuple(weights)
        self.limits = tuple(limits)
        self._stop_first = stop_first
        self._segments: list[_Segment] = []
        self._done = False
        self._grow()

    @property
    def total(self) -> int | None:
        """How many turns there are; None: for ever."""
        while not self._done:
            self._grow()
        return self._segments[-1].end if self._segments else 0

    def reaches(self, turn: int) -> bool:
        """Whether there is a turn `turn`. Builds no segment beyond it."""
        self._cover(turn)
        return bool(self._segments) and (self._segments[-1].end is None or turn < self._segments[-1].end)

    def at(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how often it was taken before) of many turns, int64. Source -1 beyond the last turn."""
        turns = np.asarray(turns, np.int64)
        segments = self._segments
        if turns.size == 0 or not segments:
            return np.full(turns.shape, -1, np.int64), np.zeros(turns.shape, np.int64)
        self._cover(int(turns.max()))
        source, taken = np.full(turns.shape, -1, np.int64), np.zeros(turns.shape, np.int64)
        which = np.searchsorted([s.start for s in segments], turns, side="right") - 1
        for n in np.unique(which).tolist():
            end = segments[n].end
            mine = (which == n) if end is None else (which == n) & (turns < end)
            source[mine], taken[mine] = segments[n].at(turns[mine])
        return source, taken

    def counts(self, turns: int) -> tuple[int, ...]:
        """How many of the first `turns` turns each source has."""
        self._cover(turns)
        before = [s for s in self._segments if s.start < turns]
        return tuple(before[-1].counts(turns)) if before else (0,) * len(self.weights)

    def _cover(self, turn: int) -> None:
        while not self._done and (end := self._segments[-1].end) is not None and end <= turn:
            self._grow()

    def _grow(self) -> None:
        """Add the next segment, or find that there is none."""
        before = self._segments[-1] if self._segments else None
        start = 0
        taken = np.zeros(len(self.weights), np.int64)
        if before is not None:
            assert before.end is not None
            start, taken = before.end, np.array(before.counts(before.end), np.int64)
        left = [None if limit is None else limit - int(t) for limit, t in zip(self.limits, taken, strict=True)]
        active = [i for i, w in enumerate(self.weights) if w > 0 and left[i] != 0]
        gone = any(w > 0 and left[i] == 0 for i, w in enumerate(self.weights))
        if not active or (self._stop_first and before is not None and gone):
            self._done = True
            return
        finite = [left[i] for i in active]
        turns = None if None in finite else sum(n for n in finite if n is not None)
        shares = _shares([self.weights[i] for i in active], turns)
        period = int(shares.sum())
        pick, rank = np.empty(period, np.int32), np.empty(period, np.int32)
        if period * len(shares) > _PLAIN_TURNS:
            wait_for_kernels(lay_period)
        lay_period(shares, pick, rank)
        ends = []
        for n, i in enumerate(active):
            if (remaining := left[i]) is not None:
                periods, place = divmod(remaining - 1, int(shares[n]))
                ends.append(start + periods * period + int(np.flatnonzero(pick == n)[place]) + 1)
        end = min(ends, default=None)
        self._segments.append(_Segment(start, end, taken, shares, np.array(active, np.int64), pick, rank))
        self._done = end is None or self._stop_first


def _shares(weights: Sequence[float], turns: int | None) -> np.ndarray:
    """Weights as integers of a period, each at least 1: exact if that needs no period beyond the longest, else rounded.

    The longest is 2**20 turns, or for a segment of few turns eight times as many: rounding then adds a sixteenth of a block.
    """
    longest = _PERIOD if turns is None else min(_PERIOD, max(1 << (8 * turns).bit_length(), 1 << 10))
    exact = [Fraction(repr(float(w))) for w in weights]
    whole = sum(exact)
    parts = [e / whole for e in exact]
    period = math.lcm(*(p.denominator for p in parts))
    if period <= longest:
        return np.array([int(p * period) for p in parts], np.int64)
    floors = [max(int(p * longest), 1) for p in parts]
    missing = longest - sum(floors)
    if missing < 0:  # what was raised to 1 is paid for by the largest
        floors[max(range(len(floors)), key=lambda i: (floors[i], -i))] += missing
    else:
        for i in sorted(range(len(parts)), key=lambda i: (floors[i] - parts[i] * longest, i))[:missing]:
            floors[i] += 1
    return np.array(floors, np.int64)
