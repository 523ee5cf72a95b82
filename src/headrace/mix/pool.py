"""State of a lane: the slices in its pool, and how far each of them was read.

    state = LaneState(…)                 right after some draw
    state.advance(draw, n, change)       right after the next one, from what that draw changed
    state.snapshot(slot, n, …)           how evenly the pool drains

A slice is the rows [0, end) of one stream. The pool holds K of them in slots.

    remaining fractions   .41 .38 .44 .40      a tight cluster: the pool drains evenly
                          .02 .95 .90 .01      a wide one: some slices are starved
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace.mix.streams import StreamTable, picks_of


class Slice:
    """The rows [0, end) of one stream and how far they have been read. Mutable: it is the hot path of a plan."""

    __slots__ = ("due", "end", "entry", "ordinal", "per_pick", "phase", "position", "remaining", "slot", "stream")

    def __init__(self, *, stream: int, end: int, position: int, per_pick: int) -> None:
        if not 0 <= position <= end or per_pick < 1:
            raise ValueError(
                f"slice of stream {stream} needs 0 <= position <= end and per_pick >= 1, got position={position}, end={end}, "
                f"per_pick={per_pick}"
            )
        self.stream = stream
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


class PoolChange(NamedTuple):
    """What a draw changed in its lane, beside the position of the slice."""

    slot: int
    """Of the slice that was picked."""
    clock: int
    """The picker's virtual time."""
    turn: int
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

    def advance(self, draw: Draw, step: int, change: PoolChange) -> None:
        """Go from before a draw, which is the lane's number `step`, to after it."""
        slot = change.slot
        self.clock, self.turn = change.clock, change.turn
        if not draw.dry:
            self.positions[slot], self.last[slot] = draw.stop, step
        elif change.incoming is None:
            for column in (self.streams, self.positions, self.entries, self.last):
                del column[slot]
        else:
            self.streams[slot], self.positions[slot] = change.incoming
            self.entries[slot], self.last[slot] = change.clock, step
            if self.parked:
                del self.parked[0]
            else:
                self.index += 1
                self.ahead.pop(self.streams[slot], None)

    def snapshot(
        self, slot: int, step: int, table: StreamTable, per_pick: Sequence[int], shares: Sequence[int]
    ) -> Snapshot:
        """The pool at a pick of `slot`, which is the lane's number `step`, if this is the lane before that pick.

        `shares`: what share of the picks the slice of each stream is promised, in proportion to the others.
        """
        streams = self.streams
        ends = list(map(table.rows.__getitem__, streams))
        left = list(map(operator.sub, ends, self.positions))
        remaining = [-(-n // per_pick[s]) for n, s in zip(left, streams, strict=True)]
        fraction = list(map(operator.truediv, left, ends))
        last = self.last.copy()
        last[slot] = step
        weights = list(map(shares.__getitem__, streams))
        overdue = max([(step - at) * weight for at, weight in zip(last, weights, strict=True)])
        kinds = list(map(table.kind_of.__getitem__, streams))
        return Snapshot(
            min(remaining), max(remaining), min(fraction), max(fraction), step - min(last), overdue / (sum(weights) or 1),
            tuple(map(kinds.count, range(len(table.kinds)))),
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
    def from_body(cls, body: Mapping[str, Any], *, slots: int, step: int) -> LaneState:
        """`slots` as they were when the state was saved; `step`: draws of the lane until then."""
        streams = list(body["streams"])
        return cls(
            epoch=int(body["epoch"]), index=int(body["queue_index"]), band=int(body.get("band", slots)), turn=int(body.get("turn", 0)),
            streams=streams, positions=list(body["positions"]), entries=[-int(n) for n in body.get("entries", [0] * len(streams))],
            last=[step] * len(streams), parked=[(s, at) for s, at in body.get("parked", ())],
            ahead={int(s): (int(e), int(at)) for s, e, at in body.get("ahead", ())},
        )  # fmt: skip
