"""Batches leave for the trainer.

    loader = Loader(data, global_batch_size=32)
    for batch in loader:                      # dict of tensors, the rank's share of the global batch
        ...
        saved = loader.state_dict()           # what was delivered, not what was prefetched; local, needs no other rank
    loader.load_state_dict(saved)             # or the list of all ranks' states, at any world size that divides the lanes

Step t is samples t·B … t·B+B−1; rank r of W delivers those with g mod W = r; sample g is made by lane g mod L. Batches
are made ahead of need (pipeline.py); what is saved moves only here, when one is handed over.
"""

from __future__ import annotations

import base64
import itertools
import operator
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from headrace.errors import ConfigError
from headrace.loader.dataset import TextDataset
from headrace.loader.ends import AloneEnds, Ends, ReplayEnds, StoreEnds
from headrace.loader.lanes import (
    DIGEST_HIGH,
    DIGEST_LOW,
    LEFT_OUT,
    SOURCES_MADE,
    TOKEN_FIELDS,
    BatchBuffers,
    LanePlan,
    LaneTable,
    Taken,
    WeightChange,
)  # fmt: skip
from headrace.loader.pipeline import After, Passed, Pipeline, Shape
from headrace.loader.pool import WindowPool, WindowSupply
from headrace.loader.rank_loader import TIMES_AT_ONCE, RankLoader, rank_and_world
from headrace.loader.state import COUNTS, LoaderState, accepts_data, load_states, merge_states
from headrace.loader.windows import Piece
from headrace.metrics import Histogram, Meter, Wait
from headrace.order import Digest
from headrace.runtime.buffers import TensorMemory

if TYPE_CHECKING:
    import torch

__all__ = ["FIELDS", "Loader"]

FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens", "row_count")
"""The whole contract; `max_seqlen` comes with cu_seqlens, `sample_index` always."""

_numbers = itertools.count()


class _Flown(NamedTuple):
    """A delivered batch, for the flight record."""

    step: int
    """Which of the delivered steps it is, from 1."""
    next_sample: int
    taken: Taken
    passed: tuple[Passed, ...]


class Loader(RankLoader):
    """Walks over a dataset and delivers this rank's share of each global batch.

    Windows are made by `tokenizer_workers` threads (4), or by `data_loader_workers` processes, which pay where a tokenizer or the
    trainer holds Python's lock. A batch belongs to its receiver: its memory is used again only when nothing refers to it any more. `fields` leaves parts of
    the contract out. `skip` passes over ranges of steps (from, to), `to` excluded, counted from 1: [(5, 8)] leaves out steps 5, 6 and 7, whose documents count as read.
    `record` keeps what `drain_flight` tells. `copy` has no effect any more; it is accepted because earlier versions had it.

    Near the end of finite sources some lanes are dry before others. A step in which no rank has anything to learn is passed over like a skipped one: steps keep their
    numbers. A rank of several may still get a batch with nothing to learn, at a step that teaches other ranks something.
    """

    def __init__(
        self,
        data: TextDataset,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        tokenizer_workers: int | None = None,
        data_loader_workers: int = 0,
        prefetch_batches: int = 2,
        labels: Literal["shifted", "hf"] = "shifted",
        fields: Sequence[str] = FIELDS,
        segment_ids: bool = False,
        skip: Sequence[tuple[int, int]] = (),
        record: bool = False,
        copy: bool = False,
        pin_memory: bool = False,
        device: str | torch.device | None = None,
        deadline: float = 300.0,
    ) -> None:
        self.data = data
        self.meter: Meter = data.meter
        self.rank, self.world_size, self._distributed = rank_and_world(dp_rank, dp_world_size)
        self.global_batch_size = global_batch_size
        self._fields = (*fields, "segment_ids") if segment_ids and "segment_ids" not in fields else tuple(fields)
        self._borders = "cu_seqlens" in self._fields
        self._skip = _step_ranges(skip)
        self._check(tokenizer_workers or 0, data_loader_workers, prefetch_batches, labels)
        if device is not None:
            _check_device(device)
        self._workers = tokenizer_workers if tokenizer_workers is not None else 0 if data_loader_workers else 4
        self._processes = data_loader_workers
        self._prefetch = prefetch_batches
        self._unshifted = labels == "hf"
        self._pin = pin_memory
        self._device = device
        self._deadline = deadline
        self._own = tuple(range(self.rank, data.lanes, self.world_size))
        # Only loaders that all ranks make are counted: a rank may have others of its own.
        self._number = next(_numbers) if self._distributed else -1
        self._settled = LoaderState(source_tokens=np.zeros(len(data.sources), np.int64), lane_ids=self._own)
        self._left_out = np.zeros(len(LEFT_OUT), np.int64)
        """Of the windows opened since this loader was made or loaded a state."""
        self._bad_shards = data.bad_shards
        self._after: After | None = None
        """What follows from the batch that was delivered last, until the state knows of it."""
        self._counted = np.zeros(0, np.int64)
        """What the state knows of the totals of the pipeline that runs."""
        self._seconds = []
        self._foreign: dict[int, np.ndarray] | None = None
        self._start_pass(0)
        self._origin = 0
        self._started: float | None = None
        self._begun_tokens = 0
        self._wait = Wait("loader.next", meter=self.meter, deadline=deadline * 2)
        self._next_times = Histogram("loader/next")
        self._drained: dict[str, int] = {}
        self._running: Pipeline | None = None
        self._forgotten: weakref.finalize | None = None
        self._last: Taken | None = None
        """The samples of the batch that was delivered last."""
        self._record = record
        self._flight: list[_Flown] = []

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._state.ended:
            self._begin_pass(self._state.number + 1)
        return self

    def __next__(self) -> dict[str, Any]:
        if self._settled.ended:
            raise StopIteration
        if self._running is None:
            self._running = self._new_pipeline()
        if self._started is None:
            self._started = time.perf_counter()
            self._begun_tokens = self._state.delivered["tokens"]
        asked = time.perf_counter()
        made = self._running.ready()
        if made is not None:
            seconds = self._wait.over(asked)
        else:
            with self._wait as wait:
                try:
                    made = self._running.next(wait)
                except BaseException:
                    self.close()
                    raise
            seconds = wait.seconds
        if made is None:
            self._state.ended = True
            self._left_out += self._running.left_out_at_the_end() - self._counted[-len(LEFT_OUT) :]
            self.close()
            raise StopIteration
        # From here on the batch is delivered; what follows from that is worked out when somebody asks.
        self._after, self._last = made.after, made.taken
        if made.after.skipped:
            self._pass_over(made.after.skipped)
        if self._record:  # without the tensors: they belong to the receiver alone
            self._flight.append(_Flown(self.delivered_steps, made.after.next_sample, made.taken, made.passed))
        self._seconds.append(seconds)
        if len(self._seconds) == TIMES_AT_ONCE:
            self._record_times()
        return made.batch if self._device is None else self._moved(made.batch)

    @property
    def _state(self) -> LoaderState:
        """What was delivered until now."""
        if self._after is not None:
            self._settle(self._after)
        return self._settled

    def _settle(self, after: After) -> None:
        """Count what was delivered. The saved state moves only here, and where steps are passed over."""
        self._after = None
        self._count(after.totals)
        state = self._settled
        state.step, state.sample, state.lanes = after.step + 1, after.next_sample, after.lanes
        state.empty_steps = after.empty_steps

    def _count(self, totals: np.ndarray) -> None:
        """Bring the counts to where the pipeline's are."""
        state, new = self._settled, totals - self._counted
        state.counts += new[: len(COUNTS)]
        state.source_tokens += new[SOURCES_MADE : -len(LEFT_OUT)]
        self._left_out += new[-len(LEFT_OUT) :]
        state.digest.add(_digest(totals) - _digest(self._counted))
        self._counted = totals.copy()

    def _pass_over(self, steps: Sequence[int]) -> None:
        skipped = self._settled.skipped
        for step in steps:
            if skipped and skipped[-1][1] == step:
                skipped[-1][1] = step + 1
            else:
                skipped.append([step, step + 1])

    def _moved(self, batch: dict[str, Any]) -> dict[str, Any]:
        """On its way to the device."""
        return {
            name: value if name == "max_seqlen" else value.to(self._device, non_blocking=self._pin)
            for name, value in batch.items()
        }

    def _begin_pass(self, number: int) -> None:
        self.close()
        self._state.number, self._state.ended = number, False
        self._start_pass(number)
        self._origin = self._state.sample

    def _start_pass(self, number: int) -> None:
        plan = self.data.plan(number, self._state.step - 1)
        self._foreign = dict(enumerate(plan.starts))
        self._state.lanes = np.stack([self._foreign[lane] for lane in self._own])

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What this rank has delivered, as a plain JSON-able dict. Not collective."""
        fingerprint = self.data.fingerprint(self._state.step)
        return self._state.to_cursor(fingerprint, self.data.lanes, self.data.names).to_dict()

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        accept: Collection[str] = (),
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        """Go on where a state was saved: one state, or the list of all ranks' states.

        Refuses a state of other data, another tokenizer, other settings or other steps passed over, naming what differs;
        `accept` takes the names (such as {"weights"}) that may differ. With "data" the sources are counted anew and their bytes
        taken as they are now; without it a chunk that differs from what was read before is refused when it is read. `fixed`
        names what may not be accepted, and why: {"config:seq_len": "the model has 2,048 positions"}.
        """
        self.close()
        data = self.data
        data.expect_recorded(accept_changes=accepts_data(accept))
        self._bad_shards = data.bad_shards
        loaded, known = load_states(
            state,
            fingerprint=data.fingerprint,
            names=data.names,
            empty=[source.name for source in data.sources if not source.manifest.rows],
            lanes=data.lanes,
            own=self._own,
            rank=self.rank,
            skip=self._skip,
            accept=accept,
            fixed=fixed or {},
            fresh=lambda number, step: dict(enumerate(data.plan(number, step - 1).starts)),
        )
        self._settled = loaded
        self._after = None
        self._foreign = known if len(known) == self.data.lanes else None
        self._origin = loaded.sample
        self._started = None
        self._left_out = np.zeros(len(LEFT_OUT), np.int64)
        self._drained = self._totals() | {"text/bad_shards": 0}
        self._last = None
        self._flight.clear()

    @property
    def _now(self) -> LoaderState:
        return self._state

    @property
    def _names(self) -> Sequence[str]:
        return self.data.names

    def _totals(self) -> dict[str, int]:
        out = self.left_out()
        if self.rank:  # every rank knows of the same shards: one of them counts
            out["bad_shards"] = 0
        return super()._totals() | {f"text/{name}": count for name, count in out.items()}

    def left_out(self) -> dict[str, int]:
        """What this rank left out since it was made or loaded a state: `empty_documents` and `bad_rows` of the windows it opened,
        and `bad_shards`, files of which nothing could be read (the same on every rank)."""
        if self._after is not None:
            self._settle(self._after)
        return dict(zip(LEFT_OUT, self._left_out.tolist(), strict=True)) | {"bad_shards": self._bad_shards}

    def _targets(self) -> Sequence[float]:
        before, data, step = self._state.asked_before, self.data, self._state.step
        if before is None:
            return data.mean_weights(step)
        asked = data.weight_sums(before[0], step) + [before[1].get(name, 0.0) for name in data.names]
        return tuple((asked / asked.sum()).tolist()) if asked.any() else data.mean_weights(step)

    def _merged(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return merge_states(states)

    @property
    def skipped_steps(self) -> int:
        """How many steps were passed over on request (`skip`)."""
        return self._state.skipped_steps

    @property
    def empty_steps(self) -> int:
        """How many steps were passed over because no rank had anything to learn in them."""
        return self._state.empty_steps

    @property
    def delivered_steps(self) -> int:
        """How many steps were delivered: `step` without those that were passed over."""
        return self._state.delivered_steps

    @property
    def skipped(self) -> list[list[int]]:
        """The ranges of steps [from, to) that were passed over on request, counted from 1."""
        return [[a + 1, b + 1] for a, b in self._state.skipped]

    @property
    def digest(self) -> str:
        """Over everything this rank delivered. The sum over ranks is the run's digest: see `gather_state`."""
        return str(self._state.digest)

    @property
    def step_digest(self) -> str:
        """The part of the digest that the last batch added."""
        return str(Digest() if self._last is None else Digest(_digest(self._last.facts)))

    # ---------------------------------------------------------------------------------------- insight

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        """Where the tokens of the batch that was delivered last come from."""
        first, taken = int(batch["sample_index"][0]), self._last
        if taken is None or taken.samples.start != first:
            raise ValueError(
                f"the batch with sample {first} is not the one this loader delivered last: ask before taking the next"
            )
        return [
            piece
            for i, g in enumerate(taken.samples)
            if (window := taken.window(i)) is not None
            for piece in self.data.makers[window.source].pieces(window, taken.block(i), g)
        ]

    def drain_flight(self) -> dict[str, Any] | None:
        """What was delivered since the last call, as one line of a flight record (jobs/flight.py); None if nothing was.

        It tells of this rank's own samples; lines of several ranks are put together by their sample indices.
        """
        records, self._flight = self._flight, []
        if not records:
            return None
        size = self.global_batch_size
        delivered = [one.taken for one in records]
        passed = [step for one in records for step in one.passed]
        opened = [
            [taken.samples[i], taken.samples[i] % self.data.lanes, window.source, *window.start]
            for taken in [*delivered, *(step.taken for step in passed)]
            if taken is not None
            for i in np.flatnonzero((taken.rows[:, 1] == 0) & (taken.sources >= 0)).tolist()
            if (window := taken.window(i)) is not None
        ]
        line: dict[str, Any] = {
            "first": records[0].step,
            "sources": list(self.data.names),
            "samples": [*(one.next_sample - size for one in records), records[-1].next_sample],
            "picks": _picks([taken.sources for taken in delivered]),
            "opened": sorted(opened),
        }
        if passed:
            nothing = np.full(size // self.world_size, -1)
            line["skipped"] = [[step.first, step.first + size] for step in passed]
            line["skipped_picks"] = _picks([nothing if s.taken is None else s.taken.sources for s in passed])
        return line

    def __repr__(self) -> str:
        return f"Loader(rank {self.rank} of {self.world_size}, global_batch_size {self.global_batch_size}, step {self.step})"

    def close(self) -> None:
        """Stop the threads. What was prefetched and not delivered is forgotten; iterating again makes it anew."""
        if self._forgotten is not None:
            self._forgotten.detach()  # it would keep the pipeline and its buffers for as long as the loader lives
            self._forgotten = None
        if self._running is not None:
            self._running.close()
            self._running = None

    # ---------------------------------------------------------------------------------------- private

    def _check(self, workers: int, processes: int, prefetch: int, labels: str) -> None:
        problems = []
        size, world, lanes = self.global_batch_size, self.world_size, self.data.lanes
        if not isinstance(size, int) or size < 1:
            problems.append(f"global_batch_size must be a positive integer, got {size!r}")
        elif size % world:
            problems.append(
                f"global_batch_size {size} cannot be shared by {world} ranks: use a world size that divides it, such as "
                f"{_divisors(size, lanes)}"
            )
        if lanes % world:
            problems.append(f"{lanes} lanes cannot be shared by {world} ranks: use a world size that divides them")
        if not isinstance(workers, int) or workers < 0:
            problems.append(f"tokenizer_workers must be 0 or more, got {workers!r}")
        if not isinstance(processes, int) or processes < 0:
            problems.append(f"data_loader_workers must be 0 or more, got {processes!r}")
        elif processes and workers:
            problems.append(
                f"data_loader_workers={processes} and tokenizer_workers={workers} cannot both be above 0: nested process and "
                "thread pools can lead to oversubscription or stalls. Choose one of the two"
            )
        if not isinstance(prefetch, int) or prefetch < 0:
            problems.append(f"prefetch_batches must be 0 or more, got {prefetch!r}")
        if labels not in ("shifted", "hf"):
            problems.append(f'labels must be "shifted" or "hf", got {labels!r}')
        known = (*FIELDS, "segment_ids")
        problems += [
            f"fields: there is no field {f!r}; there are {', '.join(known)}" for f in self._fields if f not in known
        ]
        if "input_ids" not in self._fields:
            problems.append("fields must hold 'input_ids'")
        problems += [
            f"skip: a range of steps is (from, to) with 1 <= from < to, counted from 1, got ({a + 1}, {b + 1})"
            for a, b in self._skip
            if not 0 <= a < b
        ]
        if problems:
            raise ConfigError(problems)

    def _new_pipeline(self) -> Pipeline:
        state, data, size = self._state, self.data, self.global_batch_size
        plan = data.plan(state.number, state.step - 1)
        changes = [
            WeightChange(state.sample + (step - state.step) * size, weights)
            for step, weights in data.changes_from(state.step, state.number)
        ]
        supply = self._new_supply()
        self._counted = np.zeros(SOURCES_MADE + len(data.sources) + len(LEFT_OUT), np.int64)
        table = LaneTable(plan, supply, dict(zip(self._own, state.lanes, strict=True)), changes)
        shape = Shape(
            global_batch_size=size,
            rank=self.rank,
            world_size=self.world_size,
            lanes=data.lanes,
        )
        pipeline = Pipeline(
            shape, table, supply, self._new_ends(plan, changes), self._new_buffers(), finite=plan.finite(), step=state.step,
            sample=state.sample, empty_steps=state.empty_steps, skip=self._skip, prefetch=self._prefetch, meter=self.meter,
        )  # fmt: skip
        # A loader that is let go without close() takes its threads along: they hold the pipeline, which does not hold it.
        self._forgotten = weakref.finalize(self, pipeline.close)
        self._forgotten.atexit = False
        return pipeline

    def _new_supply(self) -> WindowSupply:
        if self._processes:
            from headrace.loader.processes import WindowProcesses

            return WindowProcesses(
                self.data.recipe | {"bound": self.data.records_bound},
                workers=self._processes,
                meter=self.meter,
                deadline=self._deadline,
                found=self.data.note_hole,
                windows=2 * len(self._own) * len(self.data.sources),  # of every lane and source one open, and the next
                window_tokens=self.data.packing.budget,
            )
        return WindowPool(
            self.data.make_window,
            workers=self._workers,
            meter=self.meter,
            deadline=self._deadline,
            look_ahead=self.data.look_ahead,
        )

    def _new_buffers(self) -> BatchBuffers:
        rows = self.global_batch_size // self.world_size
        shapes: dict[str, tuple[int, ...]] = {
            name: (rows, self.data.seq_len) for name in TOKEN_FIELDS if name in self._fields
        }
        shapes["sample_index"] = (rows,)
        if "row_count" in self._fields:
            shapes["row_count"] = (rows,)
        memory = TensorMemory(depth=len(shapes) * (self._prefetch + 4), pin=self._pin)
        return BatchBuffers(
            shapes, memory, pad=self.data.packing.pad_id, unshifted=self._unshifted, borders=self._borders
        )

    def _new_ends(self, plan: LanePlan, changes: Sequence[WeightChange]) -> Ends:
        if self.world_size == 1:
            return AloneEnds()
        if self._distributed:
            from headrace.loader.exchange import process_group_store

            name = f"headrace/ends/{self._number}/{self._state.number}/{self._origin}"
            return StoreEnds(process_group_store(), name, self.rank, self.world_size, self.meter)
        others = {lane: s for lane, s in (self._foreign or {}).items() if lane not in self._own}
        alone = WindowPool(self.data.make_window, workers=0, meter=self.meter, deadline=self._deadline)
        return ReplayEnds(
            LaneTable(plan, alone, others, changes),
            origin=self._origin,
            missing=self._foreign is None,
            meter=self.meter,
        )


def _digest(facts: np.ndarray) -> int:
    low, high = facts[DIGEST_LOW : DIGEST_HIGH + 1].view(np.uint64).tolist()
    return low | high << 64


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


def _check_device(device: Any) -> None:
    """A device that is not there is refused now, not with the first batch."""
    import torch

    try:
        wanted = torch.device(device)
        if wanted.type == "cuda":
            if (wanted.index or 0) >= torch.cuda.device_count():
                raise RuntimeError(f"torch sees {torch.cuda.device_count()} CUDA devices here")
        else:
            torch.empty(0, device=wanted)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device={device!r} cannot be used: {reason}. Leave it out to have batches in memory"
        ) from error


def _picks(sources: Sequence[np.ndarray]) -> str:
    """The source of every sample, 0xFFFF for a filler, as text."""
    return base64.b64encode(np.concatenate(sources).astype("<i2").astype("<u2").tobytes()).decode()


def _divisors(size: int, lanes: int) -> str:
    return ", ".join(str(w) for w in range(1, min(size, lanes) + 1) if size % w == 0 and lanes % w == 0)
