"""State of a lane: the slices in its pool, and how far each of them was read.

A slice is the rows [0, end) of one stream. The pool holds K of them in slots.

    remaining fractions   .41 .38 .44 .40      a tight cluster: the pool drains evenly
                          .02 .95 .90 .01      a wide one: some slices are starved
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.mix.streams import StreamTable


class Slice(NamedTuple):
    """The rows [0, end) of one stream, and how far they have been read."""

    stream: int
    end: int
    position: int
    """Next row to read."""
    per_pick: int
    remaining: int
    """Picks left."""
    entry: int = 0
    """Virtual time at which it came into the pool (pick.py)."""
    phase: int = 0
    """Where between two picks its first one lies, in fixed point (pick.py)."""
    ordinal: int = 0
    """How many slices came into the pool before it: worker processes are dealt out by it."""
    last: int = 0
    """Number of the lane's draw that picked it last, or that brought it into the pool. Not saved: waiting times begin anew at a resume."""
    due: int = 0
    """Virtual time of its next pick."""


class Draw(NamedTuple):
    """One pick: the rows [start, stop) of a stream."""

    index: int
    lane: int
    stream: int
    """-1: the lane has no streams, and delivers batches without rows so that its rank takes part."""
    start: int
    stop: int
    ordinal: int
    """The slice's number among those of its lane: workers are dealt out by it."""
    dry: bool
    """The slice ends here."""
    epoch: int = 0
    """The lane's."""


class Snapshot(NamedTuple):
    """What the pool looked like at one pick: slices as they were before it, waiting times as they are after it."""

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


@dataclass(slots=True, kw_only=True)
class LaneState:
    """Everything that a lane's next draws depend on."""

    step: int
    """Draws of the lane, over all epochs."""
    epoch: int
    queue: list[int]
    """The streams of this epoch in their order. Never changed."""
    band: int
    """Width of bands in the queue: another pool size at a resume must not change its order."""
    index: int = 0
    """Place in the queue."""
    admitted: int = 0
    """Slices that came into the pool in this epoch."""
    clock: int = 0
    """Virtual time of the last pick; it moves in mode proportional only."""
    turn: int = 0
    """The slot that is picked next; it moves in mode round_robin only."""
    slots: list[Slice] = field(default_factory=list)
    parked: list[tuple[int, int]] = field(default_factory=list)
    """(stream, position) of slices without a slot; they come before the queue."""
    ahead: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Streams whose next row is not the first of this epoch: (epoch, row). From a resume on other lanes."""

    def copy(self) -> LaneState:
        return LaneState(
            step=self.step, epoch=self.epoch, queue=self.queue, band=self.band, index=self.index, admitted=self.admitted, clock=self.clock,
            turn=self.turn, slots=self.slots.copy(), parked=self.parked.copy(), ahead=self.ahead.copy(),
        )  # fmt: skip

    def to_body(self, *, slots: int, with_entries: bool) -> dict[str, Any]:
        """The state as JSON. Entries are relative to the virtual clock, so equal places give equal states."""
        body: dict[str, Any] = {
            "epoch": self.epoch,
            "queue_index": self.index,
            "streams": [one.stream for one in self.slots],
            "positions": [one.position for one in self.slots],
        }
        if with_entries:
            body["entries"] = [self.clock - one.entry for one in self.slots]
        if self.turn:
            body["turn"] = self.turn
        if self.band != slots:
            body["band"] = self.band
        if self.parked:
            body["parked"] = [list(one) for one in self.parked]
        if self.ahead:
            body["ahead"] = [[stream, *where] for stream, where in sorted(self.ahead.items())]
        return body


class PlanStep(NamedTuple):
    """One draw of a plan."""

    draw: Draw
    index: int
    """Draws of all ranks, this one and those that belong to the same step included."""
    pool: list[Slice]
    """The lane's slices: how far they were read before the draw, and when they were picked last, this draw included."""
    lane: LaneState
    """The lane after the draw."""

    def snapshot(self, table: StreamTable, shares: Sequence[int]) -> Snapshot:
        """The pool at this draw. `shares`: what share of the picks the slice of each stream is promised, in proportion to the others."""
        pool, number = self.pool, self.lane.step - 1
        remaining = [one.remaining for one in pool]
        fractions = [(one.end - one.position) / one.end for one in pool]
        promised = [shares[one.stream] for one in pool]
        waited = [number - one.last for one in pool]
        overdue = max(share * steps for share, steps in zip(promised, waited, strict=True)) / (sum(promised) or 1)
        kinds = [0] * len(table.kinds)
        for one in pool:
            kinds[table.kind_of[one.stream]] += 1
        return Snapshot(
            min(remaining), max(remaining), min(fractions), max(fractions), max(waited), overdue, tuple(kinds)
        )
