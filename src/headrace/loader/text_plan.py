"""Packed text as a plan of the loader: lanes deal out the blocks of windows, ahead of need.

Step t is samples t·B … t·B+B−1; rank r of W delivers those with g mod W = r; sample g is made by lane g mod L. A `TextMaker` asks the lanes for the
samples of the next step and writes their blocks into memory that nothing refers to. It lives from one load of a state to the next.
"""

from __future__ import annotations

import base64
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import ConfigError, HeadraceError
from headrace.loader.dataset import TextDataset
from headrace.loader.ends import AloneEnds, Ends, ReplayEnds, Share, StoreEnds
from headrace.loader.lanes import LEFT_OUT, BatchPlan, LanePlan, LaneState, LaneTable, WeightChange
from headrace.loader.loader_plan import BatchMaker, Rank, States, TokenPlan, batch_fill
from headrace.loader.pool import WindowPool, WindowSupply
from headrace.loader.state import LoaderState, accepts_data, load_states, merge_states, saved_sizes
from headrace.loader.windows import Piece
from headrace.metrics import phase
from headrace.runtime.processors import tokenizer_threads
from headrace.settings import LoaderSettings

_numbers = itertools.count()
"""Counts plans whose ranks are connected: all ranks make those in the same order. A rank may have others of its own."""


class PassedStep(NamedTuple):
    """A step that was passed over."""

    first: int
    """Its first global sample."""
    plan: BatchPlan | None
    """This rank's samples; None: nothing to learn in any of them, on any rank."""


class ReadyBatch(NamedTuple):
    """A batch, what it was made of, and what counts once it is handed over."""

    batch: dict[str, Any]
    plan: BatchPlan
    step: int
    next_sample: int
    counts: np.ndarray
    """What the batch adds to the counts of a run, as in batch_fill.COUNTS."""
    source_tokens: np.ndarray
    """What it adds to the tokens of each source."""
    left_out: tuple[int, ...]
    """What the windows that were opened for it left out, as in lanes.LEFT_OUT."""
    digest: int
    """What it adds to the digest."""
    lanes: tuple[LaneState, ...]
    """The state of the lanes after it."""
    passed: tuple[PassedStep, ...]
    """The steps that were passed over on the way to it."""
    skipped: tuple[int, ...]
    """Those of them that were passed over on request."""
    empty_steps: int
    """How many steps of the run until now were passed over because no rank had anything to learn in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """Which lanes a rank follows, and which of their samples it delivers.

    Sample g belongs to lane g mod L and to rank g mod W. With d = gcd(L, W), rank r's samples lie in the lanes l with
    l mod d = r mod d, which it shares with the ranks r + d, r + 2d, … mod W. Each of these ranks walks over every sample of those lanes
    and delivers its own: so lanes stand alike on all of them, and no rank needs to ask another.
    Where W divides L, d is W and every lane has one rank.
    """

    lanes: int
    rank: int
    world_size: int

    @property
    def stride(self) -> int:
        """Distance between two lanes that the rank follows, and between two samples in those lanes."""
        return math.gcd(self.lanes, self.world_size)

    @property
    def followed_lanes(self) -> range:
        return range(self.rank % self.stride, self.lanes, self.stride)

    @property
    def is_first_follower(self) -> bool:
        """Whether this rank is the one of those that follow its lanes that counts what belongs to a lane."""
        return self.rank < self.stride

    def followed_samples(self, first: int, stop: int) -> range:
        """The samples of [first, stop) that lie in followed lanes."""
        return range(first + (self.rank - first) % self.stride, stop, self.stride)

    def own_of_followed(self, first: int) -> tuple[int, int]:
        """(step, start): the rank delivers every step-th of `followed_samples(first, …)`, beginning with number `start`."""
        own = (self.rank - first) % self.world_size
        return self.world_size // self.stride, own // self.stride


class _FlownStep(NamedTuple):
    """A delivered step, for the flight record."""

    step: int
    """Which of the delivered steps it is, from 1."""
    next_sample: int
    plan: BatchPlan
    passed: tuple[PassedStep, ...]


class TextPlan(TokenPlan):
    """Packed text. The state is that of the lanes that the rank follows."""

    patience = 2
    data: TextDataset

    def __init__(self, data: TextDataset, settings: LoaderSettings, rank: Rank, *, record: bool = False) -> None:
        """`record`: keep what `drain_flight` returns."""
        super().__init__(data, settings, rank)
        self.skip = _step_ranges(settings.skip)
        self._check()
        workers = settings.tokenizer_workers
        self._workers = workers if workers is not None else 0 if settings.data_loader_workers else tokenizer_threads()
        self._number = next(_numbers) if rank.connected else -1
        self.state = LoaderState(source_tokens=np.zeros(len(data.sources), np.int64))
        self._left_out = (0,) * len(LEFT_OUT)
        """Of the windows opened since this plan was made or loaded a state."""
        self._bad_shards = data.bad_shards
        self._foreign: dict[int, LaneState] | None = None
        """All lanes at sample `origin`, if they are known: `ReplayEnds` walks those of other ranks from there."""
        self.origin = 0
        self._start_lanes()
        self._last: BatchPlan | None = None
        """The samples of the batch that was delivered last."""
        self._record = record
        self._flight: list[_FlownStep] = []
        self.ends_alone = False
        """Whether this rank ends by itself, before or after the others: a worker of a torch DataLoader."""

    # -------------------------------------------------------------------------------------- delivery

    def start(self) -> TextMaker:
        state, data = self.state, self.data
        lanes = data.plan(state.number, state.step - 1)
        size = self.settings.global_batch_size or 0
        changes = [
            WeightChange(state.sample + (step - state.step) * size, weights)
            for step, weights in data.changes_from(state.step, state.number)
        ]
        supply = self._new_supply()
        table = LaneTable(lanes, supply, dict(zip(state.lane_ids, state.lanes, strict=True)), changes)
        return TextMaker(self, table, supply, self.new_ends(lanes, changes), finite=lanes.finite())

    def deliver(self, ready: ReadyBatch) -> dict[str, Any]:
        state = self.state
        state.step, state.sample, state.lanes = ready.step + 1, ready.next_sample, ready.lanes
        state.empty_steps = ready.empty_steps
        state.count(ready.counts, ready.source_tokens, ready.digest)
        self._add_left_out(ready.left_out)
        self._last = ready.plan
        for step in ready.skipped:
            state.pass_over(step, len(ready.plan.samples))
        if self._record:  # without the tensors: they belong to the receiver alone
            self._flight.append(_FlownStep(self.delivered_steps, ready.next_sample, ready.plan, ready.passed))
        return ready.batch

    def end(self, maker: BatchMaker) -> None:
        super().end(maker)
        assert isinstance(maker, TextMaker)
        self._add_left_out(maker.drain_left_out())

    def _add_left_out(self, counts: Sequence[int]) -> None:
        self._left_out = tuple(a + b for a, b in zip(self._left_out, counts, strict=True))

    def next_pass(self) -> None:
        self.state.number, self.state.ended = self.state.number + 1, False
        self._start_lanes()
        self.origin = self.state.sample

    def skip_to_pass(self, number: int) -> None:
        state = self.state
        if state.ended and number > state.number + 1:
            state.number = number - 1
        elif not state.ended and state.sample == 0 and number > 0:
            state.number, state.ended = number - 1, True

    @property
    def share(self) -> LaneShare:
        """The lanes of this rank."""
        return LaneShare(lanes=self.data.lanes, rank=self.rank.rank, world_size=self.rank.world_size)

    def _start_lanes(self) -> None:
        """Have every lane stand before its first sample of the pass."""
        self._foreign = dict(enumerate(self.data.plan(self.state.number, self.state.step - 1).starts))
        self.state.lane_ids = tuple(self.share.followed_lanes)
        self.state.lanes = tuple(self._foreign[lane] for lane in self.state.lane_ids)

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        fingerprint = self.data.fingerprint(self.state.step)
        share = (self.rank.rank, self.rank.world_size)
        return self.state.to_cursor(fingerprint, self.data.lanes, self.data.names, share).to_dict()

    def load_state_dict(self, state: States, *, accept: Collection[str], fixed: Mapping[str, str]) -> None:
        data = self.data
        data.expect_recorded(accept_changes=accepts_data(accept))
        self._bad_shards = data.bad_shards
        sizes = data.sizes
        data.keep_sizes(saved_sizes(state))
        try:
            loaded, known = load_states(state, data, self.share, skip=self.skip, accept=accept, fixed=fixed)
        except BaseException:  # a refused state changes nothing
            data.keep_sizes(sizes)
            raise
        self.state = loaded
        self._foreign = known if len(known) == data.lanes else None
        self.origin = loaded.sample
        self._left_out = (0,) * len(LEFT_OUT)
        self._drained = self.totals() | {"text/bad_shards": 0}
        self._last = None
        self._flight.clear()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return merge_states(states)

    # ---------------------------------------------------------------------------------------- insight

    def targets(self) -> Sequence[float]:
        before, data, step = self.state.asked_before, self.data, self.state.step
        if before is None:
            return data.mean_weights(step)
        asked = [n + before[1].get(name, 0.0) for name, n in data.weight_sums(before[0], step).items()]
        return tuple(n / sum(asked) for n in asked) if any(asked) else data.mean_weights(step)

    def left_out(self) -> dict[str, int]:
        return dict(zip(LEFT_OUT, self._left_out, strict=True)) | {"bad_shards": self._bad_shards}

    def totals(self) -> dict[str, int]:
        out = self.left_out()
        if self.rank.rank:  # every rank knows of the same shards: one of them counts
            out["bad_shards"] = 0
        return super().totals() | {f"text/{name}": count for name, count in out.items()}

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        first, plan = int(batch["sample_index"][0]), self._last
        if plan is None or plan.samples.start != first:
            raise ValueError(
                f"the batch with sample {first} is not the one this loader delivered last: ask before taking the next"
            )
        return [
            piece
            for g, at in zip(plan.samples, plan.blocks, strict=True)
            if at is not None
            for piece in self.data.makers[at.window.source].pieces(at.window, at.block, g)
        ]

    def drain_flight(self) -> dict[str, Any] | None:
        """As in provenance/record.py, of this rank's own samples; lines of several ranks are put together by their sample indices."""
        records, self._flight = self._flight, []
        if not records:
            return None
        size = self.settings.global_batch_size or 0
        delivered = [one.plan for one in records]
        passed = [step for one in records for step in one.passed]
        opened = [
            [g, g % self.data.lanes, at.window.source, *at.window.start]
            for plan in [*delivered, *(step.plan for step in passed)]
            if plan is not None
            for g, at in zip(plan.samples, plan.blocks, strict=True)
            if at is not None and at.block == 0
        ]
        line: dict[str, Any] = {
            "first": records[0].step,
            "sources": list(self.data.names),
            **self.data.sizes,
            "samples": [*(one.next_sample - size for one in records), records[-1].next_sample],
            "picks": _picks([plan.sources for plan in delivered]),
            "opened": sorted(opened),
        }
        if passed:
            nothing = np.full(size // self.rank.world_size, -1)
            line["skipped"] = [[step.first, step.first + size] for step in passed]
            line["skipped_picks"] = _picks([nothing if s.plan is None else s.plan.sources for s in passed])
        return line

    # ---------------------------------------------------------------------------------------- private

    def _check(self) -> None:
        chosen, world = self.settings, self.rank.world_size
        size, workers, processes = chosen.global_batch_size, chosen.tokenizer_workers or 0, chosen.data_loader_workers
        problems = chosen.problems()
        if not isinstance(size, int) or size < 1:
            problems.append(f"global_batch_size must be a positive integer, got {size!r}")
        elif size % world:
            fitting = ", ".join(str(w) for w in range(1, size + 1) if size % w == 0)
            problems.append(
                f"global_batch_size {size} cannot be shared by {world} ranks: use a world size that divides it, such as {fitting}"
            )
        if not isinstance(workers, int) or workers < 0:
            problems.append(f"tokenizer_workers must be 0 or more, got {workers!r}")
        if not isinstance(processes, int) or processes < 0:
            problems.append(f"data_loader_workers must be 0 or more, got {processes!r}")
        elif processes and workers:
            problems.append(
                f"data_loader_workers={processes} and tokenizer_workers={workers} cannot both be above 0: nested process and "
                "thread pools can lead to oversubscription or stalls. Choose one of the two"
            )
        problems += [
            f"skip: a range of steps is (from, to) with 1 <= from < to, counted from 1, got ({a + 1}, {b + 1})"
            for a, b in self.skip
            if not 0 <= a < b
        ]
        if problems:
            raise ConfigError(problems)

    def _new_supply(self) -> WindowSupply:
        processes, deadline = self.settings.data_loader_workers, self.settings.deadline
        if processes:
            from headrace.loader.processes import WindowProcesses

            return WindowProcesses(
                self.data.recipe | self.data.sizes | {"bound": self.data.records_bound},
                workers=processes,
                meter=self.meter,
                deadline=deadline,
                found=self.data.note_hole,
            )
        return WindowPool(
            self.data.make_window,
            workers=self._workers,
            meter=self.meter,
            deadline=deadline,
            look_ahead=self.data.look_ahead,
        )

    def new_ends(self, plan: LanePlan, changes: Sequence[WeightChange]) -> Ends:
        """How this rank learns what the others have."""
        if self.rank.world_size == 1 or self.ends_alone:
            return AloneEnds()
        if self.rank.connected:
            from torch.distributed import distributed_c10d

            store = distributed_c10d._get_default_store()
            name = f"headrace/ends/{self._number}/{self.state.number}/{self.origin}"
            return StoreEnds(store, name, self.rank.rank, self.rank.world_size, self.meter)
        others = {lane: s for lane, s in (self._foreign or {}).items() if lane not in self.state.lane_ids}
        alone = WindowPool(self.data.make_window, workers=0, meter=self.meter, deadline=self.settings.deadline)
        return ReplayEnds(
            LaneTable(plan, alone, others, changes),
            origin=self.origin,
            missing=self._foreign is None,
            meter=self.meter,
        )


class TextMaker(BatchMaker):
    """Lanes in motion, and what turns their samples into batches."""

    def __init__(
        self,
        plan: TextPlan,
        table: LaneTable,
        supply: WindowSupply,
        ends: Ends,
        *,
        finite: bool,
    ) -> None:
        state, data = plan.state, plan.data
        self._size, self._share, self._sources = plan.settings.global_batch_size or 0, plan.share, len(data.sources)
        self._table, self._supply, self._ends = table, supply, ends
        self._fill = batch_fill(plan.settings, data.seq_len, data.packing.pad_id)
        self._finite, self._skip = finite, plan.skip
        self._closed = False
        self._step, self._sample, self._empty_steps = state.step, state.sample, state.empty_steps
        self._assembling = phase("assemble", meter=plan.meter)
        table.announce(state.sample)

    def interrupt(self, timeout: float) -> None:
        self._closed = True
        self._supply.close(timeout)

    def make_next(self) -> ReadyBatch | None:
        """The next step that is not passed over, or None when no rank has anything more to deliver."""
        passed: list[PassedStep] = []
        skipped: list[int] = []
        with self._assembling:
            while not self._closed:
                step, first = self._step, self._sample
                after = first + self._size
                followed = self._table.take(self._share.followed_samples(first, after))
                plan = followed.every(*self._share.own_of_followed(first))
                # What other ranks have in lanes that this rank follows too counts as its own: all of these ranks know it.
                own = Share(followed.has_text, followed.has_text or self._any_lane_has_more(after))
                others = self._ends.others(step, range(first, after), own, lambda: self._closed)
                if not (own.more or others.more):
                    return self._end()
                self._step += 1
                self._sample = after
                if any(a <= step < b for a, b in self._skip):
                    skipped.append(step)
                    passed.append(PassedStep(first, plan))
                elif own.real or others.real:
                    return self._ready_batch(step, plan, tuple(passed), tuple(skipped))
                else:
                    # No rank learns anything from this step: it keeps its number, and is neither delivered nor counted.
                    self._empty_steps += 1
                    passed.append(PassedStep(first, None))
        return None

    def _ready_batch(
        self, step: int, plan: BatchPlan, passed: tuple[PassedStep, ...], skipped: tuple[int, ...]
    ) -> ReadyBatch:
        rows = self._fill.rows(len(plan.samples))
        plan.gather(rows)
        counts, source_tokens = rows.totals(plan.sources, self._sources)
        return ReadyBatch(
            batch=self._fill.batch(rows, plan.samples),
            plan=plan,
            step=step,
            next_sample=self._sample,
            counts=counts,
            source_tokens=source_tokens,
            left_out=self.drain_left_out(),
            digest=plan.digest(),
            lanes=tuple(self._table.states.values()),
            passed=passed,
            skipped=skipped,
            empty_steps=self._empty_steps,
        )

    def drain_left_out(self) -> tuple[int, ...]:
        """What the windows of this rank's lanes left out; of a lane that several ranks follow, the first of them counts."""
        left_out = self._table.drain_left_out()
        return left_out if self._share.is_first_follower else (0,) * len(LEFT_OUT)

    def _end(self) -> None:
        if not self._finite and not self._closed:
            raise HeadraceError(
                "no source has a single document with text left to read: repeating would go on for ever without "
                "delivering anything. Check the files, or text_key."
            )

    def _any_lane_has_more(self, after: int) -> bool:
        """Whether a lane of this rank has anything to learn from global sample `after` on."""
        table = self._table
        return any(table.has_more(lane, table.next_sample(lane, after)) for lane in table.lanes)


def _step_ranges(skip: Any) -> tuple[tuple[int, int], ...]:
    """Ranges of steps as the state keeps them: by the number of steps before them, so from 0."""
    try:
        if isinstance(skip, str):
            raise TypeError
        return tuple((operator.index(a) - 1, operator.index(b) - 1) for a, b in skip)
    except (TypeError, ValueError):
        raise ConfigError(
            f"skip takes ranges of steps (from, to), such as [(3, 5)] for steps 3 and 4, got {skip!r}"
        ) from None


def _picks(sources: Sequence[np.ndarray]) -> str:
    """The source of every sample, 0xFFFF for a filler, as text."""
    return base64.b64encode(np.concatenate(sources).astype("<i2").astype("<u2").tobytes()).decode()
