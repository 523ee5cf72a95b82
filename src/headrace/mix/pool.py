"""State of a lane: the slices in its pool, and how far each of them was read.

    state = LaneState(…)                 right after some draw
    state.advance(step, n)               right after the next one, from what that draw changed
    state.snapshot(step, n, …)           how evenly the pool drained at that draw

A slice is the rows [0, end) of one stream. The pool holds K of them in slots.

    remaining fractions   .41 .38 .44 .40      a tight cluster: the pool drains evenly
                          .02 .95 .90 .01      a wide one: some slices are starved
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.mix.streams import StreamTable, picks_of


@dataclass(slots=True, eq=False)
class Slice:
    """The rows [0, end) of one stream and how far they have been read. Mutable: it is the hot path of a plan."""

    stream: int
    end: int
    position: int
    """Next row to read. Equal to `end` once the slice is dry."""
    per_pick: int
    remaining: int = field(init=False)
    """Picks left."""
    entry: int = 0
    """Virtual time at which it came into the pool (pick.py)."""
    phase: int = 0
    """Where between two picks its first one lies, in fixed point (pick.py)."""
    due: int = 0
    """Virtual time of its next pick."""
    ordinal: int = 0
    """How many slices came into the pool before it: worker processes are dealt out by it."""

    def __post_init__(self) -> None:
        self.remaining = picks_of(self.end - self.position, self.per_pick)


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


class PlanStep(NamedTuple):
    """One draw of a plan, and what it changed in its lane beside the position of the slice."""

    draw: Draw
    index: int
    """Draws of all ranks, this one and those that belong to the same step included."""
    slot: int = -1
    """Of the slice that was picked."""
    clock: int = 0
    """The picker's virtual time."""
    turn: int = 0
    """The picker's next slot."""
    incoming: tuple[int, int] | None = None
    """(stream, position) of the slice that took the slot of one that ran dry."""
    begun: LaneState | None = None
    """The lane right before the draw, if the draw is the first of an epoch."""


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
    """Everything that a lane's next draws depend on, and when each slice was picked last."""

    epoch: int
    index: int
    """Place in the epoch's queue."""
    band: int
    """Width of bands in this epoch's queue: another pool size at a resume must not change its order."""
    clock: int = 0
    turn: int = 0
    streams: list[int]
    """One for each slot, as in the three lists that follow."""
    positions: list[int]
    entries: list[int]
    """Virtual times at which the slices came into the pool."""
    last: list[int]
    """Steps of the slices' last picks, or of their admissions. Not saved: waiting times begin anew at a resume."""
    parked: list[tuple[int, int]] = field(default_factory=list)
    """(stream, position) of slices without a slot; they come before the queue."""
    ahead: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Streams whose next row is not the first of this epoch: (epoch, row). From a resume on other lanes."""

    def advance(self, step: PlanStep, number: int) -> None:
        """Go from before a draw, which is the lane's number `number`, to after it."""
        slot = step.slot
        self.clock, self.turn = step.clock, step.turn
        if not step.draw.dry:
            self.positions[slot], self.last[slot] = step.draw.stop, number
        elif step.incoming is None:
            for column in (self.streams, self.positions, self.entries, self.last):
                del column[slot]
        else:
            self.streams[slot], self.positions[slot] = step.incoming
            self.entries[slot], self.last[slot] = step.clock, number
            if self.parked:
                del self.parked[0]
            else:
                self.index += 1
                self.ahead.pop(self.streams[slot], None)

    def snapshot(
        self, step: PlanStep, number: int, table: StreamTable, per_pick: Sequence[int], shares: Sequence[int]
    ) -> Snapshot:
        """The pool at its last draw `step`, which is the lane's number `number`.

        `shares`: what share of the picks the slice of each stream is promised, in proportion to the others.
        """
        pool = list(zip(self.streams, self.positions, self.last, strict=True))
        picked = (step.draw.stream, step.draw.start, number)
        if step.draw.dry and step.incoming is None:
            pool.append(picked)
        else:
            pool[step.slot] = picked
        rows, kind_of = table.rows, table.kind_of
        remaining, fractions, waits, overdue = [], [], [], []
        promised, kinds = 0, [0] * len(table.kinds)
        for stream, position, last in pool:
            end, share, waited = rows[stream], shares[stream], number - last
            left = end - position
            remaining.append(-(-left // per_pick[stream]))
            fractions.append(left / end)
            waits.append(waited)
            overdue.append(waited * share)
            promised += share
            kinds[kind_of[stream]] += 1
        return Snapshot(
            min(remaining), max(remaining), min(fractions), max(fractions), max(waits), max(overdue) / (promised or 1), tuple(kinds)
        )  # fmt: skip

    def to_body(self, *, slots: int, with_entries: bool) -> dict[str, Any]:
        """The state as JSON. Entries are relative to the virtual clock, so equal places give equal states."""
        body: dict[str, Any] = {
            "epoch": self.epoch,
            "queue_index": self.index,
            "streams": self.streams.copy(),
            "positions": self.positions.copy(),
        }
        if with_entries:
            body["entries"] = [self.clock - entry for entry in self.entries]
        if self.turn:
            body["turn"] = self.turn
        if self.band != slots:
            body["band"] = self.band
        if self.parked:
            body["parked"] = [list(one) for one in self.parked]
        if self.ahead:
            body["ahead"] = [[stream, *where] for stream, where in sorted(self.ahead.items())]
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, slots: int) -> LaneState:
        """`slots` as they were when the state was saved."""
        streams = list(body["streams"])
        return cls(
            epoch=int(body["epoch"]), index=int(body["queue_index"]), band=int(body.get("band", slots)), turn=int(body.get("turn", 0)),
            streams=streams, positions=list(body["positions"]), entries=[-int(n) for n in body.get("entries", [0] * len(streams))],
            last=[0] * len(streams), parked=[(s, at) for s, at in body.get("parked", ())],
            ahead={int(s): (int(e), int(at)) for s, e, at in body.get("ahead", ())},
        )  # fmt: skip
