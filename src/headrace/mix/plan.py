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
from headrace.mix.pick import PICK_MODES, UNIT_BITS, PickMode, choose, due_time, promised_shares
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
    """One lane: its queue, its pool and its picks."""

    def __init__(self, plan: MixPlan, lane: int) -> None:
        settings = self._settings = plan.settings
        self._table, self._streams = plan.table, plan.dealt[lane]
        self._per_pick, self._picks = plan.per_pick, plan.picks
        self._queue_key = key("stream.queue", seed=settings.seed, lane=lane)
        self._pick_key = key("stream.pick", seed=settings.seed, lane=lane)
        self.lane = lane
        self.state = self._begin(0, step=0, ahead={})
        self._fill()

    # ---------------------------------------------------------------------------------------------- picking

    def __bool__(self) -> bool:
        """Whether there is anything to read, in any epoch."""
        return bool(self._streams)

    @property
    def over(self) -> bool:
        """Whether the epoch has ended."""
        return not self.state.slots

    def next_epoch(self) -> None:
        """Begin the next epoch; only at the end of one."""
        state = self.state
        if state.slots:
            raise RuntimeError(f"epoch {state.epoch} of lane {self.lane} still has {len(state.slots)} slices open")
        self.state = self._begin(state.epoch + 1, step=state.step, ahead=state.ahead)
        self._fill()

    def pick(self, index: int, after: int) -> PlanStep:
        """Draw `index`, from the slice whose turn it is. Refills the slot at once if the slice ends. `after`: `PlanStep.index`."""
        state, mode = self.state, self._settings.pick_mode
        slots = state.slots
        slot = choose(mode, slots, key=self._pick_key, step=state.step, turn=state.turn)
        one = slots[slot] = slots[slot]._replace(last=state.step)
        pool = slots.copy()
        if mode == "proportional":
            state.clock = one.due
        stop = min(one.position + one.per_pick, one.end)
        held = True
        if stop < one.end:
            left = one.remaining - 1
            slots[slot] = one._replace(position=stop, remaining=left, due=due_time(one, stop, left))
        elif (waiting := self._take()) is not None:
            slots[slot] = self._admitted(*waiting, state.clock)
        else:
            del slots[slot]
            held = False
        if mode == "round_robin":
            state.turn = slot + held
        state.step += 1
        draw = Draw(index, self.lane, one.stream, one.position, stop, one.ordinal, stop == one.end, state.epoch)
        return PlanStep(draw, after, pool, state.copy())

    def upcoming(self, count: int) -> list[int]:
        """The streams that come into the pool next, as far as this epoch has them: worth opening ahead."""
        state = self.state
        parked = [stream for stream, _ in state.parked[:count]]
        return parked + state.queue[state.index : state.index + count - len(parked)]

    # ------------------------------------------------------------------------------------------- the pool

    def _begin(self, epoch: int, *, step: int, ahead: dict[int, tuple[int, int]], band: int = 0) -> LaneState:
        """The lane at the beginning of an epoch, before any slice came into its pool."""
        band = band or self._settings.slots
        order = queue_order(
            self._streams, kinds=self._table.kind_of, picks=self._picks, queue=self._settings.queue, key=self._queue_key, epoch=epoch, band=band
        )  # fmt: skip
        queue = [s for s in order if ahead.get(s, (epoch, 0))[0] <= epoch]
        return LaneState(step=step, epoch=epoch, queue=queue, band=band, ahead=ahead)

    def _fill(self) -> None:
        state = self.state
        while len(state.slots) < self._settings.slots and (waiting := self._take()) is not None:
            state.slots.append(self._admitted(*waiting, state.clock))

    def _take(self) -> tuple[int, int] | None:
        """(stream, position) of the next slice that waits; None if none does."""
        state = self.state
        if state.parked:
            return state.parked.pop(0)
        if state.index == len(state.queue):
            return None
        stream = state.queue[state.index]
        state.index += 1
        epoch, position = state.ahead.pop(stream, (state.epoch, 0))
        return stream, position if epoch == state.epoch else 0

    def _admitted(self, stream: int, position: int, entry: int) -> Slice:
        """A slice that comes into the pool, at virtual time `entry`."""
        state = self.state
        phase = derive(derive(self._pick_key, ~state.epoch), stream) >> (64 - UNIT_BITS)
        state.admitted += 1
        rows, per_pick = self._table.rows[stream], self._per_pick[stream]
        one = Slice(
            stream, rows, position, per_pick, picks_of(rows - position, per_pick), entry=entry, phase=phase,
            ordinal=state.admitted - 1, last=state.step,
        )  # fmt: skip
        return one._replace(due=due_time(one, position, one.remaining))

    # ---------------------------------------------------------------------------------------------- state

    def load(self, body: Mapping[str, Any], *, slots: int, step: int, drop: bool = False) -> Reshard:
        """Become the lane that was saved with so many `slots`, with as many as this one has."""
        streams, positions = list(body["streams"]), list(body["positions"])
        entries = [-int(n) for n in body.get("entries", [0] * len(streams))]
        ahead = {int(s): (int(e), int(at)) for s, e, at in body.get("ahead", ())}
        band = int(body.get("band", slots))
        state = self.state = self._begin(int(body["epoch"]), step=step, ahead=ahead, band=band)
        state.index, state.turn = int(body["queue_index"]), int(body.get("turn", 0))
        if not len(streams) == len(positions) == len(entries) or not 0 <= state.index <= len(state.queue):
            raise CursorMismatch(
                f"lane {self.lane} of the state does not fit together: {len(streams)} streams, {len(positions)} positions, "
                f"{len(entries)} entries, place {state.index} in a queue of {len(state.queue)}"
            )
        surplus: list[tuple[int, int]] = []
        for stream, position, entry in zip(streams, positions, entries, strict=True):
            self._check(stream, position)
            if len(state.slots) < self._settings.slots:
                state.slots.append(self._admitted(stream, position, entry))
            else:
                surplus.append((stream, position))
        parked = [(stream, position) for stream, position in body.get("parked", ())]
        for stream, position in parked:
            self._check(stream, position)
        state.parked = ([] if drop else surplus) + parked
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
        state = self.state
        where = dict.fromkeys(self._streams, (state.epoch + 1, 0))
        where |= dict.fromkeys(state.queue[state.index :], (state.epoch, 0))
        where |= state.ahead
        half_read = [(one.stream, one.position) for one in state.slots] + state.parked
        where |= {stream: (state.epoch, position) for stream, position in half_read}
        return where

    def load_progress(self, where: Mapping[int, tuple[int, int]], *, step: int) -> None:
        """Begin where the lanes of another deal left this lane's streams: those half read first."""
        mine = {stream: where[stream] for stream in self._streams}
        epoch = min((at[0] for at in mine.values()), default=0)
        begun = sorted(stream for stream, (e, row) in mine.items() if e == epoch and row)
        ahead = {stream: at for stream, at in mine.items() if at[0] > epoch}
        ahead |= dict.fromkeys(begun, (epoch + 1, 0))  # not in this epoch's queue: they are parked at its head
        self.state = self._begin(epoch, step=step, ahead=ahead)
        self.state.parked = [(stream, mine[stream][1]) for stream in begun]
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
        if pool.over:
            if not self._rolls:
                raise IndexError(f"epoch {pool.state.epoch} has ended")
            if not pool:
                pool.state.step += 1
                return PlanStep(Draw(index, pool.lane, -1, 0, 0, 0, False), self.index, [], pool.state.copy())
            pool.next_epoch()
        return pool.pick(index, self.index)

    def catch_up(self, index: int, but: Collection[int] = ()) -> list[LanePool]:
        """Bring lanes, all but some, to where the draws before `index` of all ranks have brought them; those that moved."""
        moved = []
        for pool in self.lanes:
            steps = 0 if pool.lane in but else lane_steps(pool.lane, len(self.lanes), index) - pool.state.step
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
        self.index = state.index
        for pool, lane in zip(self.lanes, state.lanes, strict=True):
            pool.state = lane.copy()

    def load_body(self, body: Mapping[str, Any], *, drop: bool = False) -> Reshard:
        """Continue from a saved position, on any number of slots and lanes. `drop`: slices without a slot are dropped, not parked."""
        try:
            index, slots, saved = int(body["draw"]), int(body["slots"]), list(body["lanes"])
            if index < 0 or slots < 1 or not saved:
                raise ValueError(f"draw {index}, {slots} slots, {len(saved)} lanes")
            if len(saved) != len(self.lanes):
                return self._load_other_lanes(index, slots, saved)
            moved = [
                pool.load(lane, slots=slots, step=lane_steps(pool.lane, len(self.lanes), index), drop=drop)
                for pool, lane in zip(self.lanes, saved, strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CursorMismatch(f"the state is not one of a stream plan: {type(error).__name__} {error}") from error
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
        return Reshard(parked=sum(len(pool.state.parked) for pool in self.lanes), dropped=0)


class MixState:
    """The lanes after the draws that were delivered. The plan itself may have run ahead."""

    def __init__(self, plan: MixPlan) -> None:
        """The place where `plan` stands, all of whose lanes must have caught up."""
        self.settings, self._table = plan.settings, plan.table
        self._shares = promised_shares(plan.settings.pick_mode, plan.picks)
        self.index = plan.index
        """Draws delivered, by all ranks."""
        self.lanes = [pool.state.copy() for pool in plan.lanes]
        """Of device_per_stream the lanes of other ranks are where `catch_up` left them."""
        self._last: dict[int, PlanStep] = {}
        """By lane, the last draw."""
        self.exhausted = 0
        """Slices that ran dry by being read."""
        self.picks_by_kind = [0] * len(plan.table.kinds)

    def add(self, step: PlanStep) -> None:
        """The batch of this draw was delivered."""
        draw, self.index = step.draw, step.index
        self.lanes[draw.lane] = step.lane
        if draw.stream >= 0:
            self._last[draw.lane] = step
            self.exhausted += draw.dry
            self.picks_by_kind[self._table.kind_of[draw.stream]] += 1

    def catch_up(self, plan: MixPlan, own: Collection[int]) -> None:
        """Bring the lanes that are not the rank's `own` to where the draws of all ranks have brought them. `plan` makes those draws."""
        for pool in plan.catch_up(self.index, own):
            self.lanes[pool.lane] = pool.state.copy()

    def next_epoch(self, plan: MixPlan) -> None:
        """Begin the next epoch of per_stream, all of this one having been delivered."""
        plan.load(self)
        plan.next_epoch()
        self.lanes = [pool.state.copy() for pool in plan.lanes]

    def snapshots(self) -> dict[int, Snapshot]:
        """By lane, the pool at the last draw that was delivered."""
        return {lane: step.snapshot(self._table, self._shares) for lane, step in self._last.items()}

    def active_streams(self) -> list[int]:
        """The streams that are being read, in all lanes: in a pool, or half read and without a slot."""
        return sorted({s for lane in self.lanes for s, *_ in (*lane.slots, *lane.parked)})

    def to_body(self) -> dict[str, Any]:
        slots, proportional = self.settings.slots, self.settings.pick_mode == "proportional"
        lanes = [lane.to_body(slots=slots, with_entries=proportional) for lane in self.lanes]
        return {"draw": self.index, "slots": slots, "lanes": lanes}


def lane_steps(lane: int, lanes: int, index: int) -> int:
    """How many of the draws before `index` belong to a lane."""
    return max(0, -(-(index - lane) // lanes))


def worker_of(draw: Draw, workers: int) -> int:
    """Which worker process reads a draw: a slice stays with one of them, so that no part of it is decoded twice."""
    return (draw.ordinal + draw.lane) % workers
