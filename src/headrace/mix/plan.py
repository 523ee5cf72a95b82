"""What comes next, without reading it.

    plan = MixPlan(table, batch_size={"rna": 64, "atac": 32}, slots=8, seed=7)
    draw = plan.next()          Draw(index=0, lane=0, stream=12, start=0, stop=64, ...)
    plan.to_body()              where it stands: small JSON

A lane is a queue, a pool of K slices and a pick mode. `per_stream` has one lane, and all ranks share the rows of each of its
draws; `device_per_stream` has L of them, each with streams of its own, and lane l belongs to rank l mod W. Draw d belongs to
lane d mod L. A lane of the second kind that ends its epoch begins the next at once, so no rank ever lacks a draw.

A plan needs row counts only and costs under a microsecond or two a draw, so every rank and every worker process runs all of
it, and no process has to send another what comes next. Reads no clock, opens no file, starts no thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from headrace.errors import ConfigError, CursorMismatch
from headrace.mix.pick import PICK_MODES, UNIT_BITS, PickMode, picker_for
from headrace.mix.pool import Gauges, Slice, Snapshot, gauges_for
from headrace.mix.queue import QUEUES, Queue, queue_order
from headrace.mix.streams import StreamTable, dealt_to_lanes, picks_of
from headrace.order import derive, key

__all__ = ["BATCHING_MODES", "BatchingMode", "Draw", "LanePool", "MixPlan", "MixSettings", "Reshard"]

BatchingMode = Literal["per_stream", "device_per_stream"]
BATCHING_MODES: tuple[BatchingMode, ...] = get_args(BatchingMode)


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


class Reshard(NamedTuple):
    """What became of slices that a smaller pool had no slot for."""

    parked: int
    dropped: int

    def lines(self) -> list[str]:
        """What is logged of it; nothing if every slice kept its slot."""
        counted = (
            (self.dropped, f"dropped {self.dropped} still-active readers"),
            (self.parked, f"parked {self.parked} still-active readers at the head of the queue"),
        )
        return [f"[stream_mixing] resume reshard {line}" for count, line in counted if count]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSettings:
    """What an order depends on besides the table. `slots` may change at a resume; the rest belongs to the run."""

    batch_size: Mapping[str, int] = field(default_factory=dict)
    """Rows a pick and rank, by modality."""
    slots: int = 8
    seed: int = 0
    queue: Queue = "stratified"
    pick_mode: PickMode = "proportional"
    batching_mode: BatchingMode = "per_stream"
    global_ranks: int = 1
    """per_stream: a pick covers batch_size x global_ranks rows, whatever the number of ranks that share them today."""
    lanes: int = 1
    """device_per_stream: how many lanes there are. May change at a resume; the number of ranks must divide it."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be {wanted}, got {getattr(self, name)!r}"
            for name, wanted, holds in (
                ("slots", "1 to 65,536 streams", 1 <= self.slots <= 1 << 16),
                ("queue", f"one of {', '.join(QUEUES)}", self.queue in QUEUES),
                ("pick_mode", f"one of {', '.join(PICK_MODES)}", self.pick_mode in PICK_MODES),
                ("batching_mode", f"one of {', '.join(BATCHING_MODES)}", self.batching_mode in BATCHING_MODES),
                ("global_ranks", "1 or more", self.global_ranks >= 1),
                ("lanes", "1 to 65,536", 1 <= self.lanes <= 1 << 16),
            )
            if not holds
        ]
        if self.batching_mode == "per_stream" and self.lanes != 1:
            problems.append(f"lanes belong to device_per_stream; per_stream has one plan, got lanes={self.lanes}")
        problems += [
            f"batch_size of {modality} must be a whole number of rows, 1 or more, got {size!r}"
            for modality, size in self.batch_size.items()
            if type(size) is not int or size < 1
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def rows_factor(self) -> int:
        """How many batch sizes a pick covers."""
        return self.global_ranks if self.batching_mode == "per_stream" else 1


class LanePool:
    """One lane: its queue, its pool and its picks. `step` counts the lane's picks over all epochs."""

    def __init__(
        self,
        table: StreamTable,
        streams: Sequence[int],
        *,
        per_pick: Sequence[int],
        settings: MixSettings,
        lane: int,
        watch: bool,
    ) -> None:
        self._table = table
        self._streams = streams
        self._per_pick = per_pick
        self._picks = [picks_of(n, g) for n, g in zip(table.rows, per_pick, strict=True)]
        self._settings = settings
        self._queue_key = key("stream.queue", seed=settings.seed, lane=lane)
        self._pick_key = key("stream.pick", seed=settings.seed, lane=lane)
        self._watch = watch
        self.lane = lane
        self.step = 0
        self.epoch = 0
        self.exhausted = 0
        """Slices that ran dry by being read, since the plan was made."""
        self.snapshot: Snapshot | None = None
        """The pool at the last pick, if the plan is watched."""
        self.picks_by_kind = [0] * len(table.kinds)
        self.ahead: dict[int, tuple[int, int]] = {}
        """Streams whose next row is not the first of this epoch: (epoch, row). From a resume on other lanes."""
        self._start_epoch(0)
        self._fill()

    # ---------------------------------------------------------------------------------------------- picking

    def __bool__(self) -> bool:
        """Whether there is anything to read, in any epoch."""
        return bool(self._streams)

    @property
    def over(self) -> bool:
        """Whether the epoch has ended."""
        return not self.slots

    def next_epoch(self) -> None:
        """Begin the next epoch; only at the end of one."""
        if self.slots:
            raise RuntimeError(f"epoch {self.epoch} of lane {self.lane} still has {len(self.slots)} slices open")
        self._start_epoch(self.epoch + 1)
        self._fill()

    def pick(self, look: bool = True) -> tuple[Slice, int, int]:
        """The slice that gives the next batch, and the rows it gives. Refills its slot at once if that was the last.

        `look`: take the snapshot of a watched pool. A caller that picks again before the snapshot is read passes False.
        """
        picker, slots, step = self.picker, self.slots, self.step
        one = picker.choose(slots, step)
        one.last = step
        stream = one.stream
        if self._watch:
            if look:
                if self._unread:
                    self._read_gauges()
                self._gauges.picked(one.slot, step)
                self.snapshot = self._gauges.snapshot(step, self._kinds)
            else:
                self._unread.add(one)
            self.picks_by_kind[self._table.kind_of[stream]] += 1
        start = one.position
        stop = start + one.per_pick
        one.remaining -= 1
        self.step = step + 1
        if one.remaining:
            one.position = stop
            picker.read_on(one)
            if look and self._watch:
                self._gauges.read_on(one)
        else:
            stop = one.position = one.end
            self.exhausted += 1
            self._replace(one)
        return one, start, stop

    def _read_gauges(self) -> None:
        """Bring the gauges to where the slices are: those that were picked since, each once."""
        gauges = self._gauges
        for one in self._unread:
            gauges.picked(one.slot, one.last)
            gauges.read_on(one)
        self._unread.clear()

    def follow(self, other: LanePool) -> bool:
        """Stand where `other` stands, a copy that has picked on; False, and nothing is done, if a slice came or went meanwhile.

        Takes no snapshot: only for a caller that picks again before the snapshot is read. 64 picks are followed in 4 us; to make them again
        takes 100, among reads of half a megabyte 170.
        """
        slots = self.slots
        if (self.epoch, self.admitted, len(slots)) != (other.epoch, other.admitted, len(other.slots)):
            return False
        moved: list[Slice] = []
        for one, there in zip(slots, other.slots, strict=True):
            if one.remaining != there.remaining:
                self.picks_by_kind[self._table.kind_of[one.stream]] += one.remaining - there.remaining
                one.remaining, one.position, one.last = there.remaining, there.position, there.last
                moved.append(one)
        self.picker.follow(other.picker, slots, moved)
        if self._watch:
            self._unread.update(moved)
        self.step = other.step
        return True

    def upcoming(self, count: int) -> list[int]:
        """The streams that come into the pool next, as far as this epoch has them: worth opening ahead."""
        parked = [one.stream for one in self.parked[:count]]
        return parked + self.queue[self.index : self.index + count - len(parked)]

    # ------------------------------------------------------------------------------------------- the pool

    def _start_epoch(self, epoch: int, band: int = 0) -> None:
        self.epoch = epoch
        self._phase_key = derive(self._pick_key, ~epoch)
        self.band = band or self._settings.slots
        """The width of bands in this epoch: another pool size at a resume must not change its order."""
        self.slots: list[Slice] = []
        self.parked: list[Slice] = []
        """Slices without a slot, with their positions; they come before the queue."""
        self.admitted = 0
        """Slices that came into the pool in this epoch."""
        self.index = 0
        self.queue = self._order(epoch)
        self._fresh_pool()

    def _fresh_pool(self) -> None:
        self.picker = picker_for(self._settings.pick_mode, self._pick_key)
        self._gauges: Gauges = gauges_for(self._settings.slots)
        self._unread: set[Slice] = set()
        """Slices whose numbers the gauges do not show yet."""
        self._count: list[int] = [0] * len(self._table.kinds)
        self._kinds = tuple(self._count)

    def _order(self, epoch: int) -> list[int]:
        order = queue_order(
            self._streams, kinds=self._table.kind_of, picks=self._picks, queue=self._settings.queue, key=self._queue_key, epoch=epoch, band=self.band
        )  # fmt: skip
        if not self.ahead:
            return order
        return [s for s in order if self.ahead.get(s, (epoch, 0))[0] <= epoch]

    def _fill(self) -> None:
        while len(self.slots) < self._settings.slots and (one := self._take()) is not None:
            one.slot = len(self.slots)
            self.slots.append(one)
            self._admit(one, at=self.step)

    def _take(self) -> Slice | None:
        """The next slice that waits; None if none does."""
        if self.parked:
            return self.parked.pop(0)
        if self.index == len(self.queue):
            return None
        stream = self.queue[self.index]
        self.index += 1
        epoch, position = self.ahead.pop(stream, (self.epoch, 0))
        return self._slice(stream, position if epoch == self.epoch else 0)

    def _slice(self, stream: int, position: int) -> Slice:
        return Slice(
            stream=stream, start=0, end=self._table.rows[stream], position=position, per_pick=self._per_pick[stream]
        )

    def _admit(self, one: Slice, *, at: int, entry: int | None = None) -> None:
        """`at` is the step of the admission: a slice that was never picked has waited since then."""
        one.entry = self.picker.clock if entry is None else entry
        one.last = at
        one.phase = derive(self._phase_key, one.stream) >> (64 - UNIT_BITS)
        one.ordinal = self.admitted
        self.admitted += 1
        self.picker.admitted(one)
        if self._watch:
            self._gauges.put(one, self.picker.weight(one))
            self._count[self._table.kind_of[one.stream]] += 1
            self._kinds = tuple(self._count)

    def _replace(self, dry: Slice) -> None:
        slot = dry.slot
        if self._watch:
            self._read_gauges()  # while slots are where they were
            self._count[self._table.kind_of[dry.stream]] -= 1
        following = self._take()
        if following is not None:
            following.slot = slot
            self.slots[slot] = following
            self.picker.passed(slot)
            self._admit(following, at=self.step - 1)
            return
        del self.slots[slot]
        for one in self.slots[slot:]:
            one.slot -= 1
        self.picker.removed(self.slots, slot)
        if self._watch:
            self._gauges.remove(slot)
            self._kinds = tuple(self._count)

    # ---------------------------------------------------------------------------------------------- state

    def to_body(self) -> dict[str, Any]:
        """Where the lane stands. Entries are relative to the virtual clock, so equal places give equal states."""
        body: dict[str, Any] = {
            "epoch": self.epoch,
            "queue_index": self.index,
            "streams": [one.stream for one in self.slots],
            "positions": [one.position for one in self.slots],
        }
        if self._settings.pick_mode == "proportional":
            body["entries"] = [self.picker.clock - one.entry for one in self.slots]
        if self.picker.turn:
            body["turn"] = self.picker.turn
        if self.band != self._settings.slots:
            body["band"] = self.band
        if self.parked:
            body["parked"] = [[one.stream, one.position] for one in self.parked]
        if self.ahead:
            body["ahead"] = [[stream, *where] for stream, where in sorted(self.ahead.items())]
        return body

    def load_body(self, body: Mapping[str, Any], *, step: int, saved_slots: int, drop: bool) -> Reshard:
        """Become the lane that gave `body`, with as many slots as this one has."""
        self.ahead = {int(s): (int(e), int(p)) for s, e, p in body.get("ahead", ())}
        self._start_epoch(int(body["epoch"]), int(body.get("band", saved_slots)))
        self.step = step
        self.snapshot = None
        self.index = int(body["queue_index"])
        streams, positions = body["streams"], body["positions"]
        entries = body.get("entries", [0] * len(streams))
        if not len(streams) == len(positions) == len(entries) or not 0 <= self.index <= len(self.queue):
            raise CursorMismatch(
                f"lane {self.lane} of the state does not fit together: {len(streams)} streams, {len(positions)} positions, "
                f"{len(entries)} entries, place {self.index} in a queue of {len(self.queue)}"
            )
        surplus: list[Slice] = []
        for stream, position, behind in zip(streams, positions, entries, strict=True):
            one = self._checked(stream, position)
            if len(self.slots) == self._settings.slots:
                surplus.append(one)
                continue
            one.slot = len(self.slots)
            self.slots.append(one)
            self._admit(one, at=step, entry=-int(behind))
        self.parked = [] if drop else list(surplus)
        self.parked += [self._checked(stream, position) for stream, position in body.get("parked", ())]
        self.picker.turn = int(body.get("turn", 0))
        self._fill()
        return Reshard(parked=0 if drop else len(surplus), dropped=len(surplus) if drop else 0)

    def _checked(self, stream: Any, position: Any) -> Slice:
        if not (type(stream) is int and 0 <= stream < len(self._table)) or stream not in self._streams:
            raise CursorMismatch(f"the state has stream {stream!r} in lane {self.lane}, which does not read it")
        if type(position) is not int or not 0 <= position < self._table.rows[stream]:
            raise CursorMismatch(
                f"the state stands at row {position!r} of {self._table.paths[stream]}, which has {self._table.rows[stream]:,}"
            )
        return self._slice(stream, position)

    def progress(self) -> dict[int, tuple[int, int]]:
        """(epoch, row) of every stream's next row."""
        where = dict.fromkeys(self._streams, (self.epoch + 1, 0))
        where |= dict.fromkeys(self.queue[self.index :], (self.epoch, 0))
        where |= self.ahead
        where |= {one.stream: (self.epoch, one.position) for one in (*self.slots, *self.parked)}
        return where

    def load_progress(self, where: Mapping[int, tuple[int, int]], *, step: int) -> None:
        """Begin where the lanes of another deal left this lane's streams: those half read first."""
        mine = {stream: where[stream] for stream in self._streams}
        epoch = min((at[0] for at in mine.values()), default=0)
        begun = sorted(stream for stream, (e, row) in mine.items() if e == epoch and row)
        self.ahead = {stream: at for stream, at in mine.items() if at[0] > epoch}
        for stream in begun:  # not in this epoch's queue: they are parked at its head
            self.ahead[stream] = (epoch + 1, 0)
        self._start_epoch(epoch)
        self.step = step
        self.snapshot = None
        self.parked = [self._slice(stream, mine[stream][1]) for stream in begun]
        self._fill()


class MixPlan:
    """All lanes, in the order of draws. `watch` keeps the gauges that metrics are taken from."""

    def __init__(self, table: StreamTable, settings: MixSettings, *, watch: bool = True) -> None:
        self.table = table
        self.settings = settings
        self.per_pick = table.rows_per_pick(settings.batch_size, settings.rows_factor)
        self.picks = table.picks(settings.batch_size, settings.rows_factor)
        self.index = 0
        """The next draw."""
        self.dealt = dealt_to_lanes(self.picks, settings.lanes)
        self.lanes = [
            LanePool(table, streams, per_pick=self.per_pick, settings=settings, lane=lane, watch=watch)
            for lane, streams in enumerate(self.dealt)
        ]
        self._rolls = settings.batching_mode == "device_per_stream"

    @property
    def over(self) -> bool:
        """Whether the epoch has ended; lanes of device_per_stream never do."""
        return not self._rolls and self.lanes[0].over

    def next_epoch(self) -> None:
        """Begin the next epoch of per_stream."""
        self.lanes[0].next_epoch()

    def next(self) -> Draw:
        """The next draw of all. IndexError at the end of an epoch."""
        index = self.index
        lane = index % len(self.lanes)
        self.index = index + 1
        return self._draw(self.lanes[lane], index)

    def next_of_rank(self, rank: int, world_size: int, look: bool = True) -> Draw:
        """The next draw that a rank delivers, all other ranks having delivered as many: for per_stream the next of all.

        The lanes of other ranks are left behind and catch up when the state is asked for. `look` is pick's.
        """
        if not self._rolls:
            index = self.index
            self.index = index + 1
            return self._draw(self.lanes[0], index, look)
        index = self.index + (rank - self.index) % world_size
        self.index += world_size
        return self._draw(self.lanes[index % len(self.lanes)], index, look)

    def _draw(self, pool: LanePool, index: int, look: bool = True) -> Draw:
        if not pool.slots:
            if not self._rolls:
                raise IndexError(f"epoch {pool.epoch} has ended")
            if not pool:
                pool.step += 1
                return Draw(index, pool.lane, -1, 0, 0, 0, False)
            pool.next_epoch()
        one, start, stop = pool.pick(look)
        return Draw(index, pool.lane, one.stream, start, stop, one.ordinal, stop == one.end, pool.epoch)

    def follow(self, other: MixPlan) -> bool:
        """Stand where `other` stands, a copy that has drawn on; False, and nothing is done, if only drawing leads there (LanePool)."""
        if len(self.lanes) > 1 or not self.lanes[0].follow(other.lanes[0]):
            return False
        self.index = other.index
        return True

    def catch_up(self) -> None:
        """Bring every lane to where the draws of all ranks have brought it."""
        for pool in self.lanes:
            for _ in range(lane_steps(pool.lane, len(self.lanes), self.index) - pool.step):
                self._draw(pool, -1)

    def active_streams(self) -> list[int]:
        """The streams that are being read, in all lanes: in a pool, or half read and without a slot."""
        self.catch_up()
        return sorted({one.stream for pool in self.lanes for one in (*pool.slots, *pool.parked)})

    def lanes_of(self, rank: int, world_size: int) -> list[LanePool]:
        """The lanes whose draws a rank delivers."""
        return [p for p in self.lanes if p.lane % world_size == rank] if self._rolls else self.lanes

    # ---------------------------------------------------------------------------------------------- state

    def to_body(self) -> dict[str, Any]:
        """Where the plan stands, as JSON. The same on every rank."""
        self.catch_up()
        return {"draw": self.index, "slots": self.settings.slots, "lanes": [pool.to_body() for pool in self.lanes]}

    def load_body(self, body: Mapping[str, Any], *, drop: bool = False) -> Reshard:
        """Go on from a saved place, on any number of slots and lanes."""
        try:
            index, slots, saved = int(body["draw"]), int(body["slots"]), list(body["lanes"])
            if index < 0 or slots < 1 or not saved:
                raise ValueError(f"draw {index}, {slots} slots, {len(saved)} lanes")
            if len(saved) != len(self.lanes):
                return self._load_other_lanes(index, slots, saved)
            moved = [
                pool.load_body(one, step=lane_steps(pool.lane, len(self.lanes), index), saved_slots=slots, drop=drop)
                for pool, one in zip(self.lanes, saved, strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorMismatch(f"the state is not one of a stream plan: {type(error).__name__} {error}") from error
        self.index = index
        return Reshard(*(sum(column) for column in zip(*moved, strict=True)))

    def _load_other_lanes(self, index: int, slots: int, saved: Sequence[Mapping[str, Any]]) -> Reshard:
        before = MixPlan(self.table, replace(self.settings, lanes=len(saved), slots=slots), watch=False)
        before.load_body({"draw": index, "slots": slots, "lanes": saved})
        where: dict[int, tuple[int, int]] = {}
        for pool in before.lanes:
            where |= pool.progress()
        for pool in self.lanes:
            pool.load_progress(where, step=lane_steps(pool.lane, len(self.lanes), index))
        self.index = index
        return Reshard(parked=sum(len(pool.parked) for pool in self.lanes), dropped=0)


def lane_steps(lane: int, lanes: int, index: int) -> int:
    """How many of the draws before `index` belong to a lane."""
    return max(0, -(-(index - lane) // lanes))


def worker_of(draw: Draw, workers: int) -> int:
    """Which worker process reads a draw: a slice stays with one of them, so that no part of it is decoded twice."""
    return (draw.ordinal + draw.lane) % workers


def batch_sizes(table: StreamTable, size: int | Mapping[str, int]) -> dict[str, int]:
    """One number for all, or one for each modality."""
    return dict.fromkeys(table.kinds, size) if isinstance(size, int) else dict(size)
