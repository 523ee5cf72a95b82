"""Plan of stream mixing: the sequence of draws, from row counts alone.

    plan = MixPlan(table, MixSettings(batch_size={"rna": 64, "atac": 32}, slots=8, seed=7))
    delivered = MixState(plan)
    step = plan.next_step()     step.draw: Draw(index=0, lane=0, stream=12, start=0, stop=64, ...)
    delivered.add(step)         once the batch is handed over
    delivered.to_body()         the position as small JSON

A lane is a queue, a pool of K slices and a pick mode. `per_stream` has one lane, and all ranks share the rows of each of its
draws; `device_per_stream` has L of them, each with streams of its own, and lane l belongs to rank l mod W. Draw d belongs to
lane d mod L. A lane of the second kind that ends its epoch begins the next at once, so no rank ever lacks a draw.

A plan needs row counts only and costs a few microseconds a draw, so every rank and every worker process runs all of it, and no
process has to send another what comes next. Reads no clock, opens no file, starts no thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from headrace.errors import ConfigError, CursorMismatch
from headrace.mix.pick import PICK_MODES, UNIT_BITS, Picker, PickMode, due_time, promised_shares
from headrace.mix.pool import Draw, LaneState, PlanStep, Slice, Snapshot
from headrace.mix.queue import QUEUES, Queue, queue_order
from headrace.mix.streams import StreamTable, dealt_to_lanes, picks_of
from headrace.order import derive, key

BatchingMode = Literal["per_stream", "device_per_stream"]
BATCHING_MODES: tuple[BatchingMode, ...] = get_args(BatchingMode)


class Reshard(NamedTuple):
    """How many slices a smaller pool had no slot for, and what became of them."""

    parked: int
    dropped: int

    def lines(self) -> list[str]:
        """Lines for the log; none if every slice kept its slot."""
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

    def __init__(self, plan: MixPlan, lane: int) -> None:
        settings = self._settings = plan.settings
        self._table, self._streams = plan.table, plan.dealt[lane]
        self._per_pick, self._picks = plan.per_pick, plan.picks
        self._queue_key = key("stream.queue", seed=settings.seed, lane=lane)
        self._pick_key = key("stream.pick", seed=settings.seed, lane=lane)
        self.lane = lane
        self.step = 0
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
        self._begun = self.state()

    def pick(self, index: int, after: int) -> PlanStep:
        """Draw `index`, from the slice whose turn it is. Refills the slot at once if the slice ends. `after`: `PlanStep.index`."""
        picker = self.picker
        slot = picker.choose(self.slots, self.step)
        one = self.slots[slot]
        self.step += 1
        begun, self._begun = self._begun, None
        start, incoming = one.position, None
        one.remaining -= 1
        if one.remaining:
            one.position += one.per_pick
            one.due = due_time(one)
            picker.pass_on(slot)
        else:
            one.position = one.end
            incoming = self._take()
            if incoming is None:
                del self.slots[slot]
            else:
                self.slots[slot] = self._admitted(*incoming, picker.clock)
                picker.pass_on(slot)
        draw = Draw(index, self.lane, one.stream, start, one.position, one.ordinal, not one.remaining, self.epoch)
        return PlanStep(draw, after, slot, picker.clock, picker.turn, incoming, begun)

    def upcoming(self, count: int) -> list[int]:
        """The streams that come into the pool next, as far as this epoch has them: worth opening ahead."""
        parked = [stream for stream, _ in self.parked[:count]]
        return parked + self.queue[self.index : self.index + count - len(parked)]

    # ------------------------------------------------------------------------------------------- the pool

    def _start_epoch(self, epoch: int, band: int = 0) -> None:
        self.epoch = epoch
        self._phase_key = derive(self._pick_key, ~epoch)
        self.band = band or self._settings.slots
        self.slots: list[Slice] = []
        self.parked: list[tuple[int, int]] = []
        """(stream, position) of slices that wait before the queue."""
        self.admitted = 0
        """Slices that came into the pool in this epoch."""
        self.index = 0
        order = queue_order(
            self._streams, kinds=self._table.kind_of, picks=self._picks, queue=self._settings.queue, key=self._queue_key, epoch=epoch, band=self.band
        )  # fmt: skip
        self.queue = [s for s in order if self.ahead.get(s, (epoch, 0))[0] <= epoch] if self.ahead else order
        self.picker = Picker(self._settings.pick_mode, self._pick_key)
        self._begun: LaneState | None = None
        """The lane as it is, if nothing was picked since the epoch began."""

    def _fill(self) -> None:
        while len(self.slots) < self._settings.slots and (waiting := self._take()) is not None:
            self.slots.append(self._admitted(*waiting, self.picker.clock))

    def _take(self) -> tuple[int, int] | None:
        """(stream, position) of the next slice that waits; None if none does."""
        if self.parked:
            return self.parked.pop(0)
        if self.index == len(self.queue):
            return None
        stream = self.queue[self.index]
        self.index += 1
        epoch, position = self.ahead.pop(stream, (self.epoch, 0))
        return stream, position if epoch == self.epoch else 0

    def _admitted(self, stream: int, position: int, entry: int) -> Slice:
        """A slice that comes into the pool, at virtual time `entry`."""
        one = Slice(
            stream, self._table.rows[stream], position, self._per_pick[stream], entry=entry, ordinal=self.admitted
        )
        one.phase = derive(self._phase_key, stream) >> (64 - UNIT_BITS)
        self.admitted += 1
        one.due = due_time(one)
        return one

    # ---------------------------------------------------------------------------------------------- state

    def state(self) -> LaneState:
        """The state of the lane. Every slice counts as picked now."""
        slots = self.slots
        return LaneState(
            epoch=self.epoch, index=self.index, band=self.band, clock=self.picker.clock, turn=self.picker.turn,
            streams=[one.stream for one in slots], positions=[one.position for one in slots], entries=[one.entry for one in slots],
            last=[self.step] * len(slots), parked=self.parked.copy(), ahead=self.ahead.copy(),
        )  # fmt: skip

    def load(self, state: LaneState, *, step: int, drop: bool = False) -> Reshard:
        """Become the lane that gave `state`, with as many slots as this one has."""
        self.ahead = state.ahead.copy()
        self._start_epoch(state.epoch, state.band)
        self.step, self.index = step, state.index
        if not len(state.streams) == len(state.positions) == len(state.entries) or not 0 <= self.index <= len(
            self.queue
        ):
            raise CursorMismatch(
                f"lane {self.lane} of the state does not fit together: {len(state.streams)} streams, {len(state.positions)} positions, "
                f"{len(state.entries)} entries, place {self.index} in a queue of {len(self.queue)}"
            )
        self.picker.clock = state.clock
        surplus: list[tuple[int, int]] = []
        for stream, position, entry in zip(state.streams, state.positions, state.entries, strict=True):
            self._check(stream, position)
            if len(self.slots) < self._settings.slots:
                self.slots.append(self._admitted(stream, position, entry))
            else:
                surplus.append((stream, position))
        for stream, position in state.parked:
            self._check(stream, position)
        self.parked = ([] if drop else surplus) + state.parked
        self.picker.turn = state.turn
        self._fill()
        return Reshard(parked=0 if drop else len(surplus), dropped=len(surplus) if drop else 0)

    def _check(self, stream: Any, position: Any) -> None:
        if not (type(stream) is int and 0 <= stream < len(self._table)) or stream not in self._streams:
            raise CursorMismatch(f"the state has stream {stream!r} in lane {self.lane}, which does not read it")
        if type(position) is not int or not 0 <= position < self._table.rows[stream]:
            raise CursorMismatch(
                f"the state stands at row {position!r} of {self._table.paths[stream]}, which has {self._table.rows[stream]:,}"
            )

    def progress(self) -> dict[int, tuple[int, int]]:
        """(epoch, row) of every stream's next row."""
        where = dict.fromkeys(self._streams, (self.epoch + 1, 0))
        where |= dict.fromkeys(self.queue[self.index :], (self.epoch, 0))
        where |= self.ahead
        half_read = [(one.stream, one.position) for one in self.slots] + self.parked
        where |= {stream: (self.epoch, position) for stream, position in half_read}
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
        self.parked = [(stream, mine[stream][1]) for stream in begun]
        self._fill()


class MixPlan:
    """All lanes, in the order of draws."""

    def __init__(self, table: StreamTable, settings: MixSettings) -> None:
        self.table = table
        self.settings = settings
        self.per_pick = table.rows_per_pick(settings.batch_size, settings.rows_factor)
        self.picks = tuple(map(picks_of, table.rows, self.per_pick))
        """How many picks each stream lasts."""
        self.index = 0
        """The next draw."""
        self.dealt = dealt_to_lanes(self.picks, settings.lanes)
        self.lanes = [LanePool(self, lane) for lane in range(settings.lanes)]
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
        return self.next_step().draw

    def next_step(self, rank: int = 0, world_size: int = 1) -> PlanStep:
        """The next draw that a rank delivers, all other ranks having delivered as many: for per_stream the next of all.

        The lanes of other ranks are left where they are: see `catch_up`. IndexError at the end of an epoch.
        """
        if not self._rolls:
            rank, world_size = 0, 1
        index = self.index + (rank - self.index) % world_size
        self.index += world_size
        return self._draw(self.lanes[index % len(self.lanes)], index)

    def _draw(self, pool: LanePool, index: int) -> PlanStep:
        if not pool.slots:
            if not self._rolls:
                raise IndexError(f"epoch {pool.epoch} has ended")
            if not pool:
                pool.step += 1
                return PlanStep(Draw(index, pool.lane, -1, 0, 0, 0, False), self.index)
            pool.next_epoch()
        return pool.pick(index, self.index)

    def catch_up(self, index: int, but: Collection[int] = ()) -> list[LanePool]:
        """Bring lanes, all but some, to where the draws before `index` of all ranks have brought them; those that moved."""
        moved = []
        for pool in self.lanes:
            steps = 0 if pool.lane in but else lane_steps(pool.lane, len(self.lanes), index) - pool.step
            for _ in range(steps):
                self._draw(pool, -1)
            if steps > 0:
                moved.append(pool)
        return moved

    def lanes_of(self, rank: int, world_size: int) -> list[int]:
        """The lanes whose draws a rank delivers."""
        return [lane for lane in range(len(self.lanes)) if not self._rolls or lane % world_size == rank]

    # ---------------------------------------------------------------------------------------------- state

    def to_body(self) -> dict[str, Any]:
        """The position of the plan as JSON. The same on every rank."""
        self.catch_up(self.index)
        return MixState(self).to_body()

    def load(self, state: MixState) -> None:
        """Continue after the draws that were delivered."""
        self._load(state.index, state.lanes)

    def load_body(self, body: Mapping[str, Any], *, drop: bool = False) -> Reshard:
        """Continue from a saved position, on any number of slots and lanes. `drop`: slices without a slot are dropped, not parked."""
        try:
            index, slots, saved = int(body["draw"]), int(body["slots"]), list(body["lanes"])
            if index < 0 or slots < 1 or not saved:
                raise ValueError(f"draw {index}, {slots} slots, {len(saved)} lanes")
            if len(saved) != len(self.lanes):
                return self._load_other_lanes(index, slots, saved)
            return self._load(index, [LaneState.from_body(lane, slots=slots) for lane in saved], drop=drop)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorMismatch(f"the state is not one of a stream plan: {type(error).__name__} {error}") from error

    def _load(self, index: int, lanes: Sequence[LaneState], *, drop: bool = False) -> Reshard:
        moved = [
            pool.load(lane, step=lane_steps(pool.lane, len(self.lanes), index), drop=drop)
            for pool, lane in zip(self.lanes, lanes, strict=True)
        ]
        self.index = index
        return Reshard(*(sum(column) for column in zip(*moved, strict=True)))

    def _load_other_lanes(self, index: int, slots: int, saved: Sequence[Mapping[str, Any]]) -> Reshard:
        before = MixPlan(self.table, replace(self.settings, lanes=len(saved), slots=slots))
        before.load_body({"draw": index, "slots": slots, "lanes": saved})
        where: dict[int, tuple[int, int]] = {}
        for pool in before.lanes:
            where |= pool.progress()
        for pool in self.lanes:
            pool.load_progress(where, step=lane_steps(pool.lane, len(self.lanes), index))
        self.index = index
        return Reshard(parked=sum(len(pool.parked) for pool in self.lanes), dropped=0)


class MixState:
    """The lanes after the draws that were delivered. The plan itself may have run ahead.

    Each draw changes a few numbers, which travel with it (`PlanStep`).
    """

    def __init__(self, plan: MixPlan) -> None:
        """The place where `plan` stands, all of whose lanes must have caught up."""
        self.settings, self._table, self._per_pick = plan.settings, plan.table, plan.per_pick
        self._shares = promised_shares(plan.settings.pick_mode, plan.picks)
        self.index = plan.index
        """Draws delivered, by all ranks."""
        self.lanes = [pool.state() for pool in plan.lanes]
        """Of device_per_stream the lanes of other ranks are where `catch_up` left them."""
        self._last: dict[int, tuple[PlanStep, LaneState]] = {}
        """By lane, the last draw and the lane after it, which stays as it is when `lanes` gets another one: that of the next epoch."""
        self.exhausted = 0
        """Slices that ran dry by being read."""
        self.picks_by_kind = [0] * len(plan.table.kinds)

    def add(self, step: PlanStep) -> None:
        """The batch of this draw was delivered."""
        draw, self.index = step.draw, step.index
        if draw.stream < 0:
            return
        if step.begun is not None:
            self.lanes[draw.lane] = step.begun
        lane = self.lanes[draw.lane]
        lane.advance(step, self._number(draw))
        self._last[draw.lane] = step, lane
        self.exhausted += draw.dry
        self.picks_by_kind[self._table.kind_of[draw.stream]] += 1

    def catch_up(self, plan: MixPlan, own: Collection[int]) -> None:
        """Bring the lanes that are not the rank's `own` to where the draws of all ranks have brought them. `plan` makes those draws."""
        for pool in plan.catch_up(self.index, own):
            self.lanes[pool.lane] = pool.state()

    def next_epoch(self, plan: MixPlan) -> None:
        """Begin the next epoch of per_stream, all of this one having been delivered."""
        plan.load(self)
        plan.next_epoch()
        self.lanes = [pool.state() for pool in plan.lanes]

    def snapshots(self) -> dict[int, Snapshot]:
        """By lane, the pool at the last draw that was delivered."""
        return {
            at: lane.snapshot(step, self._number(step.draw), self._table, self._per_pick, self._shares)
            for at, (step, lane) in self._last.items()
        }

    def active_streams(self) -> list[int]:
        """The streams that are being read, in all lanes: in a pool, or half read and without a slot."""
        return sorted({s for lane in self.lanes for s in (*lane.streams, *(stream for stream, _ in lane.parked))})

    def to_body(self) -> dict[str, Any]:
        slots, proportional = self.settings.slots, self.settings.pick_mode == "proportional"
        lanes = [lane.to_body(slots=slots, with_entries=proportional) for lane in self.lanes]
        return {"draw": self.index, "slots": slots, "lanes": lanes}

    def _number(self, draw: Draw) -> int:
        """Which of its lane's draws it is, from 0."""
        return draw.index // len(self.lanes)


def lane_steps(lane: int, lanes: int, index: int) -> int:
    """How many of the draws before `index` belong to a lane."""
    return max(0, -(-(index - lane) // lanes))


def worker_of(draw: Draw, workers: int) -> int:
    """Which worker process reads a draw: a slice stays with one of them, so that no part of it is decoded twice."""
    return (draw.ordinal + draw.lane) % workers
