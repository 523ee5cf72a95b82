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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.batch import (
    DEFAULT_LM_FIELDS,
    DEFAULT_PREFETCH_BATCHES,
    BatchSpec,
    Labels,
    label_problems,
    lm_batch_spec,
    lm_field_problems,
)
from headrace.errors import ConfigError
from headrace.loader.batch_fill import BatchFill
from headrace.loader.dataset import TextDataset
from headrace.loader.ends import AloneEnds, Ends, ReplayEnds, StoreEnds
from headrace.loader.lanes import LEFT_OUT, BatchPlan, LanePlan, LaneTable, WeightChange
from headrace.loader.pipeline import LaneShare, PassedStep, Pipeline, ReadyBatch
from headrace.loader.pool import WindowPool, WindowSupply
from headrace.loader.rank_loader import TIMES_AT_ONCE, RankLoader, rank_and_world
from headrace.loader.state import LoaderState, accepts_data, load_states, merge_states
from headrace.loader.windows import Piece
from headrace.metrics import Histogram, Meter, Wait
from headrace.order import Digest
from headrace.runtime.buffers import TensorMemory
from headrace.runtime.processors import tokenizer_threads

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Loader"]

"""The whole contract; `max_seqlen` comes with cu_seqlens, `sample_index` always."""

_numbers = itertools.count()


class _Flown(NamedTuple):
    """A delivered batch, for the flight record."""

    step: int
    """Which of the delivered steps it is, from 1."""
    next_sample: int
    plan: BatchPlan
    passed: tuple[PassedStep, ...]


class Loader(RankLoader):
    """Delivers this rank's share of each global batch of a dataset, as dicts of tensors.

    - `global_batch_size`: rows of a step, over all ranks. Any world size that divides it works, and may change from one resume to the next. One that does not
      divide the dataset's lanes has several ranks make the same windows (`headrace check` shows how many).
    - `dp_rank`, `dp_world_size`: this rank; from torch.distributed unless given.
    - `mesh`, `dp_dims`: a DeviceMesh in place of both. Ranks that differ only outside of `dp_dims` get the same rows.
    - `tokenizer_workers`: threads that make windows; this rank's share of the processors (2 to 16) unless given. `data_loader_workers`: processes in their place, for tokenizers or trainers that hold the GIL.
    - `prefetch_batches`: batches made ahead of need.
    - `labels`: `"shifted"`, the default: the token after each position, so compare them with the logits of the same position. `"hf"`: equal to input_ids, for
      transformers' models, which shift by themselves.
    - `fields`: which of the fields a batch has. `segment_ids=True` adds that field.
    - `skip`: ranges of steps (from, to) that are skipped, counted from 1, `to` excluded. [(5, 8)] skips steps 5, 6 and 7, whose documents count as read.
    - `record`: keep what `drain_flight` returns.
    - `pin_memory`, `device`: put batches into pinned memory, or onto a device.
    - `deadline`: seconds that a wait may take.
    - `copy`: has no effect; earlier versions had it.

    A batch belongs to its receiver: its memory is reused only when nothing refers to it any more. Near the end of finite sources some lanes are dry before others.
    A step in which no rank has anything to learn is skipped, and steps keep their numbers. A rank of several may still get a batch with nothing to learn, at
    a step that teaches other ranks something.
    """

    def __init__(
        self,
        data: TextDataset,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        dp_dims: Sequence[str] = ("dp",),
        tokenizer_workers: int | None = None,
        data_loader_workers: int = 0,
        prefetch_batches: int = DEFAULT_PREFETCH_BATCHES,
        labels: Labels = "shifted",
        fields: Sequence[str] = DEFAULT_LM_FIELDS,
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
        self.rank, self.world_size, self._distributed = rank_and_world(dp_rank, dp_world_size, mesh, dp_dims)
        self.global_batch_size = global_batch_size
        self._fields = (*fields, "segment_ids") if segment_ids and "segment_ids" not in fields else tuple(fields)
        self._skip = _step_ranges(skip)
        self._check(tokenizer_workers or 0, data_loader_workers, prefetch_batches, labels)
        if device is not None:
            _check_device(device)
        self._workers = (
            tokenizer_workers if tokenizer_workers is not None else 0 if data_loader_workers else tokenizer_threads()
        )
        self._processes = data_loader_workers
        self._prefetch = prefetch_batches
        self._unshifted = labels == "hf"
        self._pin = pin_memory
        self._device = device
        self._deadline = deadline
        self._share = LaneShare(lanes=data.lanes, rank=self.rank, world_size=self.world_size)
        self._own = tuple(self._share.followed_lanes)
        # Only loaders that all ranks make are counted: a rank may have others of its own.
        self._number = next(_numbers) if self._distributed else -1
        self._state = LoaderState(source_tokens=np.zeros(len(data.sources), np.int64), lane_ids=self._own)
        self._left_out = np.zeros(len(LEFT_OUT), np.int64)
        """Of the windows opened since this loader was made or loaded a state."""
        self._bad_shards = data.bad_shards
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
        self._last: tuple[BatchPlan, int] | None = None
        """The samples of the batch that was delivered last, and what they added to the digest."""
        self._record = record
        self._flight: list[_Flown] = []

    # -------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._state.ended:
            self._begin_pass(self._state.number + 1)
        return self

    @property
    def spec(self) -> BatchSpec:
        """The fields of this loader's batches: names, dtypes, shapes and roles."""
        return lm_batch_spec(self.data.seq_len, self._fields)

    def __next__(self) -> dict[str, Any]:
        if self._state.ended:
            raise StopIteration
        if self._running is None:
            self._running = self._new_pipeline()
        if self._started is None:
            self._started = time.perf_counter()
            self._begun_tokens = self._state.delivered["tokens"]
        with self._wait as wait:
            try:
                ready = self._running.next(wait.deadline)
            except BaseException:
                self.close()
                raise
        if ready is None:
            self._state.ended = True
            self._left_out += self._running.left_out_at_the_end()
            self.close()
            raise StopIteration
        self._deliver(ready)
        self._seconds.append(wait.seconds)
        if len(self._seconds) == TIMES_AT_ONCE:
            self._record_times()
        return ready.batch if self._device is None else self._moved(ready.batch)

    def _deliver(self, ready: ReadyBatch) -> None:
        """From here on the batch is delivered: this is the only place where the saved state moves."""
        state = self._state
        state.step, state.sample, state.lanes = ready.step + 1, ready.next_sample, ready.lanes
        state.empty_steps = ready.empty_steps
        state.counts += ready.counts
        state.source_tokens += ready.source_tokens
        state.digest.add(ready.digest)
        self._left_out += ready.left_out
        self._last = (ready.plan, ready.digest)
        if ready.skipped:
            self._pass_over(ready.skipped)
        if self._record:  # without the tensors: they belong to the receiver alone
            self._flight.append(_Flown(self.delivered_steps, ready.next_sample, ready.plan, ready.passed))

    def _pass_over(self, steps: Sequence[int]) -> None:
        skipped = self._state.skipped
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
        share = (self.rank, self.world_size)
        return self._state.to_cursor(fingerprint, self.data.lanes, self.data.names, share).to_dict()

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
            world_size=self.world_size,
            skip=self._skip,
            accept=accept,
            fixed=fixed or {},
            fresh=lambda number, step: dict(enumerate(data.plan(number, step - 1).starts)),
        )
        self._state = loaded
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
        return str(Digest() if self._last is None else Digest(self._last[1]))

    # ---------------------------------------------------------------------------------------- insight

    def pieces(self, batch: Mapping[str, Any]) -> list[Piece]:
        """Where the tokens of the batch that was delivered last come from."""
        first, plan = int(batch["sample_index"][0]), None if self._last is None else self._last[0]
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
        """What was delivered since the last call, as one line of a flight record (provenance/record.py); None if nothing was.

        It tells of this rank's own samples; lines of several ranks are put together by their sample indices.
        """
        records, self._flight = self._flight, []
        if not records:
            return None
        size = self.global_batch_size
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
            "samples": [*(one.next_sample - size for one in records), records[-1].next_sample],
            "picks": _picks([plan.sources for plan in delivered]),
            "opened": sorted(opened),
        }
        if passed:
            nothing = np.full(size // self.world_size, -1)
            line["skipped"] = [[step.first, step.first + size] for step in passed]
            line["skipped_picks"] = _picks([nothing if s.plan is None else s.plan.sources for s in passed])
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
        size, world = self.global_batch_size, self.world_size
        if not isinstance(size, int) or size < 1:
            problems.append(f"global_batch_size must be a positive integer, got {size!r}")
        elif size % world:
            problems.append(
                f"global_batch_size {size} cannot be shared by {world} ranks: use a world size that divides it, such as "
                f"{_divisors(size)}"
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
        if not isinstance(prefetch, int) or prefetch < 0:
            problems.append(f"prefetch_batches must be 0 or more, got {prefetch!r}")
        problems += label_problems(labels) + lm_field_problems(self._fields)
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
        table = LaneTable(plan, supply, dict(zip(self._own, state.lanes, strict=True)), changes)
        pipeline = Pipeline(
            table, supply, self._new_ends(plan, changes), self._new_fill(), global_batch_size=size, share=self._share,
            sources=len(data.sources), finite=plan.finite(), step=state.step, sample=state.sample,
            empty_steps=state.empty_steps, skip=self._skip, prefetch=self._prefetch, meter=self.meter,
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

    def _new_fill(self) -> BatchFill:
        memory = TensorMemory(depth=len(self._fields) * (self._prefetch + 4), pin=self._pin)
        packing = self.data.packing
        return BatchFill(self.data.seq_len, self._fields, pad=packing.pad_id, unshifted=self._unshifted, memory=memory)

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


def _divisors(size: int) -> str:
    return ", ".join(str(w) for w in range(1, size + 1) if size % w == 0)
