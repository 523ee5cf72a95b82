"""Batches made ahead of need.

A thread asks the lanes for the samples of the next step and writes their blocks into a ring of buffers. Every batch
carries the state of the lanes right after it; that state counts only once the batch is handed over (loader.py), so
prefetching can never leak into a checkpoint. A pipeline lives from one load of a state to the next.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import HeadraceError
from headrace.loader.ahead import Ahead
from headrace.loader.ends import Ends
from headrace.loader.lanes import LEFT_OUT, SKIPPED_MADE, LaneTable, Slot, Taken
from headrace.loader.pool import WindowSupply
from headrace.metrics import Meter, Wait, phase

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
    """The steps that were passed over on the way to this one."""


class Made(NamedTuple):
    """A batch on its way: its tensors and their buffers, what it was made of, and the state after it."""

    batch: dict[str, Any]
    slot: Slot
    taken: Taken
    after: After
    skipped: tuple[tuple[int, Taken], ...] = ()


class Pipeline:
    """Lanes in motion, and the thread that turns their samples into batches."""

    def __init__(
        self,
        shape: Shape,
        table: LaneTable,
        supply: WindowSupply,
        ends: Ends | None,
        new_slot: Callable[[], Slot],
        *,
        step: int,
        sample: int,
        skip: Sequence[tuple[int, int]],
        prefetch: int,
        meter: Meter,
    ) -> None:
        self._shape = shape
        self._table = table
        self._supply = supply
        self._ends = ends
        self._closed = False
        self._step, self._sample = step, sample
        self._skip = tuple(skip)
        self._meter = meter
        self._assembling = phase("assemble", meter=meter)
        self._handed_over: Made | None = None
        self.copied: Any = None
        """A CUDA event, set by whoever copies the batch: the buffers may be reused once it has happened."""
        table.announce(sample)
        _pipelines.add(self)
        self._ahead: Ahead[Slot, Made] = Ahead(
            self._assemble, new_slot, depth=prefetch, name="headrace-batches", meter=meter
        )

    def ready(self) -> Made | None:
        """The next batch, if it is there and nothing has to be waited for."""
        before = self._handed_over
        if before is None or self.copied is not None:
            return None
        made = self._ahead.ready(before.slot)
        if made is not None:
            self._handed_over = made
        return made

    def next(self, wait: Wait) -> Made | None:
        """The next batch, or None at the end. Gives the buffers of the one before back to the ring."""
        before = self._handed_over
        if before is not None:
            if self.copied is not None:
                with Wait("loader.copy", meter=self._meter):
                    self.copied.synchronize()
                self.copied = None
            self._handed_over = None
        made = self._handed_over = self._ahead.exchange(None if before is None else before.slot, wait)
        return made

    def left_out_at_the_end(self) -> np.ndarray:
        """What was left out in all, also after the last batch. To be called once there is no next one."""
        return self._table.totals[-len(LEFT_OUT) :]

    def close(self, timeout: float = 2.0) -> None:
        until = time.monotonic() + timeout
        self._closed = True
        self._supply.close(timeout)
        self._ahead.close(until - time.monotonic())

    def _assemble(self, slot: Slot) -> Made | None:
        """The next step that is not passed over, or None when no rank has anything more to deliver."""
        skipped: list[tuple[int, Taken]] = []
        with self._assembling:
            while True:
                step = self._step
                passed_over = bool(self._skip) and any(a <= step < b for a, b in self._skip)
                taken = self._take(None if passed_over else slot)
                if taken is None:
                    return None
                self._step += 1
                self._sample += self._shape.global_batch_size
                if not passed_over:
                    passed = tuple(step for step, _ in skipped) if skipped else ()
                    after = After(step, self._sample, self._table.totals.copy(), self._table.state.copy(), passed)
                    return Made(slot.batch(taken.facts), slot, taken, after, tuple(skipped))
                skipped.append((step, taken))
                self._table.totals[SKIPPED_MADE] += len(taken.samples)

    def _take(self, slot: Slot | None) -> Taken | None:
        """This rank's samples of the step, or None at the end of all ranks' data."""
        shape, first = self._shape, self._sample
        mine = range(first + (shape.rank - first) % shape.world_size, first + shape.global_batch_size, shape.world_size)
        taken = self._table.take(mine, slot)
        own = taken.real or self._any_lane_has_more(first)
        if self._ends is None:
            if not own:
                raise HeadraceError(
                    "no source has a single document with text left to read: repeating would go on for ever without "
                    "delivering anything. Check the files, or text_key."
                )
            return taken
        others = self._ends.others_have_data(self._step, first, own, lambda: self._closed)
        return taken if own or others else None

    def _any_lane_has_more(self, first: int) -> bool:
        table, after = self._table, first + self._shape.global_batch_size
        taken = {g % self._shape.lanes for g in range(first, min(after, first + self._shape.lanes))}
        return any(
            table.has_more(lane, table.next_sample(lane, after if lane in taken else first)) for lane in table.lanes
        )
