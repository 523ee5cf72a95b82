"""Batches made ahead of need.

A background thread asks the lanes for the samples of the next step and writes their blocks into memory that nothing refers to. Every batch
carries the state of the lanes right after it; that state counts only once the batch is handed over (loader.py), so
prefetching can never leak into a checkpoint. A pipeline lives from one load of a state to the next.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import EndOfData, HeadraceError
from headrace.loader.batch_fill import COUNTS, BatchFill
from headrace.loader.ends import Ends, Share
from headrace.loader.lanes import BatchPlan, LaneTable
from headrace.loader.pool import WindowSupply
from headrace.metrics import Meter, phase
from headrace.runtime.background import BackgroundThread
from headrace.runtime.prefetch import Prefetch

__all__ = ["LaneShare", "PassedStep", "Pipeline", "ReadyBatch"]

_log = logging.getLogger(__name__)
_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads that are still in a tokenizer when the interpreter goes away can abort the process: stop them first."""
    for pipeline in list(_pipelines):
        pipeline.close()


class PassedStep(NamedTuple):
    """A step that was passed over."""

    first: int
    """Its first global sample."""
    plan: BatchPlan | None
    """This rank's samples; None: nothing to learn in any of them, on any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyBatch:
    """A batch, what it was made of, and what counts once it is handed over."""

    batch: dict[str, Any]
    plan: BatchPlan
    step: int
    next_sample: int
    counts: np.ndarray
    """What the batch adds to the counts of a run, as in state.COUNTS."""
    source_tokens: np.ndarray
    """What it adds to the tokens of each source."""
    left_out: np.ndarray
    """What the windows that were opened for it left out, as in lanes.LEFT_OUT."""
    digest: int
    """What it adds to the digest."""
    lanes: np.ndarray
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


class Pipeline:
    """Lanes in motion, and the thread that turns their samples into batches."""

    def __init__(
        self,
        table: LaneTable,
        supply: WindowSupply,
        ends: Ends,
        fill: BatchFill,
        *,
        global_batch_size: int,
        share: LaneShare,
        sources: int,
        finite: bool,
        step: int,
        sample: int,
        empty_steps: int,
        skip: Sequence[tuple[int, int]],
        prefetch: int,
        meter: Meter,
    ) -> None:
        self._size, self._share = global_batch_size, share
        self._table = table
        self._supply = supply
        self._ends = ends
        self._fill = fill
        self._sources = sources
        self._finite = finite
        self._closed = False
        self._step, self._sample, self._empty_steps = step, sample, empty_steps
        self._skip = tuple(skip)
        self._assembling = phase("assemble", meter=meter)
        table.announce(sample)
        _pipelines.add(self)
        self._thread = BackgroundThread("batches", on_error=_log.error, meter=meter)
        self._batches = Prefetch(
            self._thread, self._assemble, depth=prefetch, wait_name="loader.batch", take_makes=True, meter=meter
        )

    def next(self, deadline: float) -> ReadyBatch | None:
        """The next batch, or None at the end."""
        try:
            return self._batches.take(deadline)
        except EndOfData:
            return None

    def left_out_at_the_end(self) -> np.ndarray:
        """What was left out after the last batch. To be called once there is no next one."""
        return self._drain_left_out()

    def close(self, timeout: float = 2.0) -> None:
        until = time.monotonic() + timeout
        self._closed = True
        self._batches.close()
        self._supply.close(timeout)
        self._thread.close(until - time.monotonic())

    def _assemble(self) -> ReadyBatch | None:
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
                others = self._ends.others(step, range(first, after), own, self._is_closed)
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
        count = len(plan.samples)
        rows = self._fill.rows(count)
        plan.gather(rows)
        totals = rows.totals(plan.sources, self._sources)
        return ReadyBatch(
            batch=self._fill.batch(rows, plan.samples),
            plan=plan,
            step=step,
            next_sample=self._sample,
            counts=np.array([*totals[: len(COUNTS)].tolist(), len(skipped) * count], np.int64),
            source_tokens=totals[len(COUNTS) :],
            left_out=self._drain_left_out(),
            digest=plan.digest(),
            lanes=self._table.state.copy(),
            passed=passed,
            skipped=skipped,
            empty_steps=self._empty_steps,
        )

    def _drain_left_out(self) -> np.ndarray:
        """What the windows of this rank's lanes left out; of a lane that several ranks follow, the first of them counts."""
        return self._table.drain_left_out() * self._share.is_first_follower

    def _end(self) -> None:
        if not self._finite and not self._closed:
            raise HeadraceError(
                "no source has a single document with text left to read: repeating would go on for ever without "
                "delivering anything. Check the files, or text_key."
            )

    def _is_closed(self) -> bool:
        return self._closed

    def _any_lane_has_more(self, after: int) -> bool:
        """Whether a lane of this rank has anything to learn from global sample `after` on."""
        table = self._table
        return any(table.has_more(lane, table.next_sample(lane, after)) for lane in table.lanes)
