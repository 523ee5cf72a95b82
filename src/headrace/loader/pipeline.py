"""Batches made ahead of need.

A thread asks the lanes for the samples of the next step and writes their blocks into memory that nothing refers to. Every batch
carries the state of the lanes right after it; that state counts only once the batch is handed over (loader.py), so
prefetching can never leak into a checkpoint. A pipeline lives from one load of a state to the next.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import HeadraceError
from headrace.loader.ahead import Ahead
from headrace.loader.ends import Ends, Share
from headrace.loader.lanes import LEFT_OUT, SKIPPED_MADE, BatchBuffers, LaneTable, Taken
from headrace.loader.pool import WindowSupply
from headrace.metrics import Meter, phase

__all__ = ["After", "Made", "Pipeline", "Shape"]

_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads that are still in a tokenizer when the interpreter goes away can abort the process: stop them first."""
    for pipeline in list(_pipelines):
        pipeline.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a batch of this rank looks like."""

    global_batch_size: int
    rank: int
    world_size: int
    lanes: int


class After(NamedTuple):
    """What counts once a batch is handed over."""

    step: int
    next_sample: int
    totals: np.ndarray
    """What this pipeline has counted, this batch and all before: as in LaneTable."""
    lanes: np.ndarray
    """The state of the lanes."""
    skipped: tuple[int, ...]
    """The steps that were passed over on request on the way to this one."""
    empty_steps: int
    """How many steps of the run until now were passed over because no rank had anything to learn in them."""


class Passed(NamedTuple):
    """A step that was passed over."""

    first: int
    """Its first global sample."""
    taken: Taken | None
    """This rank's samples; None: nothing to learn in any of them, on any rank."""


class Made(NamedTuple):
    """A batch on its way: its tensors, what it was made of, and the state after it."""

    batch: dict[str, Any]
    taken: Taken
    after: After
    passed: tuple[Passed, ...] = ()
    """The steps that were passed over on the way to it."""


class Pipeline:
    """Lanes in motion, and the thread that turns their samples into batches."""

    def __init__(
        self,
        shape: Shape,
        table: LaneTable,
        supply: WindowSupply,
        ends: Ends,
        buffers: BatchBuffers,
        *,
        finite: bool,
        step: int,
        sample: int,
        empty_steps: int,
        skip: Sequence[tuple[int, int]],
        prefetch: int,
        meter: Meter,
    ) -> None:
        self._shape = shape
        self._table = table
        self._supply = supply
        self._ends = ends
        self._buffers = buffers
        self._finite = finite
        self._closed = False
        self._step, self._sample, self._empty_steps = step, sample, empty_steps
        self._skip = tuple(skip)
        self._assembling = phase("assemble", meter=meter)
        table.announce(sample)
        _pipelines.add(self)
        self._ahead: Ahead[Made] = Ahead(self._assemble, depth=prefetch, name="headrace-batches", meter=meter)
        self.ready = self._ahead.ready
        """The next batch, if it is there and nothing has to be waited for."""
        self.next = self._ahead.next
        """The next batch, or None at the end."""

    def left_out_at_the_end(self) -> np.ndarray:
        """What was left out in all, also after the last batch. To be called once there is no next one."""
        return self._table.totals[-len(LEFT_OUT) :]

    def close(self, timeout: float = 2.0) -> None:
        until = time.monotonic() + timeout
        self._closed = True
        self._supply.close(timeout)
        self._ahead.close(until - time.monotonic())

    def _assemble(self) -> Made | None:
        """The next step that is not passed over, or None when no rank has anything more to deliver."""
        passed: list[Passed] = []
        skipped: list[int] = []
        totals, buffers = self._table.totals, self._buffers
        with self._assembling:
            buffers.renew()
            while not self._closed:
                step, first = self._step, self._sample
                after = first + self._shape.global_batch_size
                skip = bool(self._skip) and any(a <= step < b for a, b in self._skip)
                before = totals[: -len(LEFT_OUT)].copy()
                taken = self._take(None if skip else buffers)
                own = Share(taken.real, taken.real or self._any_lane_has_more(after))
                others = self._ends.others(step, range(first, after), own, self._is_closed)
                if not (own.more or others.more):
                    return self._end()
                self._step += 1
                self._sample = after
                if skip:
                    skipped.append(step)
                    passed.append(Passed(first, taken))
                    totals[SKIPPED_MADE] += len(taken.samples)
                elif own.real or others.real:
                    made = After(
                        step, after, totals.copy(), self._table.state.copy(), tuple(skipped), self._empty_steps
                    )
                    return Made(buffers.batch(taken.facts), taken, made, tuple(passed))
                else:
                    # No rank learns anything from this step: it keeps its number, and is neither delivered nor counted.
                    totals[: -len(LEFT_OUT)] = before
                    self._empty_steps += 1
                    passed.append(Passed(first, None))
        return None

    def _take(self, buffers: BatchBuffers | None) -> Taken:
        """This rank's samples of the step."""
        shape, first = self._shape, self._sample
        mine = range(first + (shape.rank - first) % shape.world_size, first + shape.global_batch_size, shape.world_size)
        return self._table.take(mine, buffers)

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
