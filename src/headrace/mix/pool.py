"""Which slices are being read, how far each of them is, and how evenly they drain.

A slice is the rows [start, end) of one stream. The pool holds K of them in slots; the gauges beside it answer at every
pick what the metrics ask: least and most picks left, least and most of a slice left, who has waited longest.

    remaining fractions   .41 .38 .44 .40      a tight cluster: the pool drains evenly
                          .02 .95 .90 .01      a wide one: some slices are starved

Up to 32 slots plain lists are fastest (a snapshot takes 3.5 us at K=8, a numpy table 8); beyond, one numpy table is (8.9 us at
K=512, lists 84).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.mix.streams import picks_of

__all__ = ["Gauges", "Slice", "Snapshot", "gauges_for"]

_LISTS_UP_TO = 32


class Slice:
    """The rows [start, end) of one stream and how far they have been read. Mutable: it is the hot path of a plan."""

    __slots__ = (
        "due",
        "end",
        "entry",
        "last",
        "ordinal",
        "per_pick",
        "phase",
        "position",
        "remaining",
        "slot",
        "start",
        "stream",
    )

    def __init__(self, *, stream: int, start: int, end: int, position: int, per_pick: int) -> None:
        if not 0 <= start <= position <= end or per_pick < 1:
            raise ValueError(
                f"slice of stream {stream} needs 0 <= start <= position <= end and per_pick >= 1, got start={start}, "
                f"position={position}, end={end}, per_pick={per_pick}"
            )
        self.stream = stream
        self.start = start
        self.end = end
        self.position = position
        """Next row to read. Equal to `end` once the slice is dry."""
        self.per_pick = per_pick
        self.remaining = picks_of(end - position, per_pick)
        """Picks left."""
        self.entry = 0
        """Virtual time at which it came into the pool (pick.py)."""
        self.phase = 0
        """Where between two picks its first one lies, in fixed point (pick.py)."""
        self.due = 0
        """Virtual time of its next pick."""
        self.slot = -1
        self.ordinal = 0
        """How many slices came into the pool before it: worker processes are dealt out by it."""
        self.last = 0
        """Step of its last pick, or of its admission."""

    @property
    def taken(self) -> int:
        """Picks so far, also of a slice whose rows a pick were changed half-way."""
        return picks_of(self.position - self.start, self.per_pick)

    @property
    def picks(self) -> int:
        """Picks of the whole slice."""
        return self.taken + self.remaining


class Snapshot(NamedTuple):
    """What the pool looked like at one pick: readers as they were before it, waiting times as they are after it."""

    remaining_min: int
    remaining_max: int
    fraction_min: float
    fraction_max: float
    since_max: int
    """Steps since the pick of the slice that has waited longest. The picked one has waited 0."""
    overdue_max: float
    """The longest wait as a multiple of what the slice's share of the picks promises: scale-free."""
    kinds: tuple[int, ...]
    """Slices in the pool, by modality."""


class Gauges:
    """Numbers of every slot, in lists; answers by walking them."""

    def __init__(self, slots: int) -> None:
        self.remaining: list[int] = []
        self.fraction: list[float] = []
        self.last: list[int] = []
        self.weight: list[int] = []
        self._total = 0

    def put(self, one: Slice, weight: int) -> None:
        """A slice came into its slot, which is a new one or held a slice that is dry."""
        if one.slot == len(self.remaining):
            for column in (self.remaining, self.fraction, self.last, self.weight):
                column.append(0)
        self._total += weight - self.weight[one.slot]
        self.weight[one.slot] = weight
        self.last[one.slot] = one.last
        self.read_on(one)

    def remove(self, slot: int) -> None:
        self._total -= self.weight[slot]
        for column in (self.remaining, self.fraction, self.last, self.weight):
            del column[slot]

    def read_on(self, one: Slice) -> None:
        """A slice was read; its numbers follow."""
        self.remaining[one.slot] = one.remaining
        self.fraction[one.slot] = (one.end - one.position) / ((one.end - one.start) or 1)

    def picked(self, slot: int, step: int) -> None:
        self.last[slot] = step

    def snapshot(self, step: int, kinds: tuple[int, ...]) -> Snapshot:
        remaining, fraction, last = self.remaining, self.fraction, self.last
        overdue = max([(step - at) * weight for at, weight in zip(last, self.weight, strict=True)])
        return Snapshot(
            min(remaining),
            max(remaining),
            min(fraction),
            max(fraction),
            step - min(last),
            overdue / (self._total or 1),
            kinds,
        )


_REMAINING, _FRACTION, _LAST, _WEIGHT = range(4)


class _Table(Gauges):
    """The same numbers in one table of float64 (counts are exact below 2**53), for pools of more than a few slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._table = np.zeros((4, slots), dtype=np.float64)
        self._used = 0
        self._total = 0
        self._scratch = np.empty(slots, dtype=np.float64)

    def put(self, one: Slice, weight: int) -> None:
        if one.slot == self._used:
            self._used += 1
            self._table[_WEIGHT, one.slot] = 0
        self._total += weight - int(self._table[_WEIGHT, one.slot])
        self._table[_WEIGHT, one.slot] = weight
        self._table[_LAST, one.slot] = one.last
        self.read_on(one)

    def remove(self, slot: int) -> None:
        self._total -= int(self._table[_WEIGHT, slot])
        self._used -= 1
        self._table[:, slot : self._used] = self._table[:, slot + 1 : self._used + 1]

    def read_on(self, one: Slice) -> None:
        self._table[_REMAINING, one.slot] = one.remaining
        self._table[_FRACTION, one.slot] = (one.end - one.position) / ((one.end - one.start) or 1)

    def picked(self, slot: int, step: int) -> None:
        self._table[_LAST, slot] = step

    def snapshot(self, step: int, kinds: tuple[int, ...]) -> Snapshot:
        table = self._table if self._used == self._slots else self._table[:, : self._used]
        low = np.minimum.reduce(table, axis=1)
        high = np.maximum.reduce(table[:_LAST], axis=1)
        waited = np.subtract(step, table[_LAST], out=self._scratch[: self._used])
        waited *= table[_WEIGHT]
        remaining_min, fraction_min, last_min, _ = low.tolist()
        remaining_max, fraction_max = high.tolist()
        return Snapshot(
            int(remaining_min),
            int(remaining_max),
            fraction_min,
            fraction_max,
            step - int(last_min),
            float(np.maximum.reduce(waited)) / (self._total or 1),
            kinds,
        )


def gauges_for(slots: int) -> Gauges:
    """Gauges for a pool of this size."""
    return Gauges(slots) if slots <= _LISTS_UP_TO else _Table(slots)
