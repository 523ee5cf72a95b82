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
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.loader.ahead import Ahead
from headrace.loader.ends import Ends
from headrace.loader.lanes import LaneTable, Taken, kernels
from headrace.loader.pool import WindowSupply
from headrace.metrics import Meter, Wait, phase
from headrace.order import content_hash, sample_term

__all__ = ["FILLER_HASH", "TOKEN_FIELDS", "Made", "Pipeline", "Shape", "Slot"]

TOKEN_FIELDS = ("input_ids", "labels", "position_ids", "segment_ids")
"""What a batch may hold of [b, T] each."""
FILLER_HASH = content_hash(b"filler")
"""The content of a sample with nothing to learn, as the digest has it."""
_NO_ROWS, _NONE = np.empty((0, 0), np.int64), np.empty(0, np.int64)
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
    seq_len: int
    lanes: int
    sources: int
    pad_id: int
    unshifted: bool
    borders: bool
    """Whether cu_seqlens is wanted."""


@dataclass(slots=True)
class Slot:
    """One set of buffers of the ring."""

    arrays: dict[str, np.ndarray]
    tensors: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Made:
    """A batch on its way: its arrays, what it was made of, and the state of the lanes after it."""

    step: int
    taken: Taken
    slot: Slot
    digest: int
    tokens: int
    documents: int
    fillers: int
    source_tokens: Sequence[int]
    max_seqlen: int
    borders: np.ndarray | None
    next_sample: int
    lanes: np.ndarray
    skipped: tuple[tuple[int, Taken], ...] = ()
    """Steps that were passed over on the way to this one."""
    ready: Any = None
    """A CUDA event: the copy to the device has been made."""


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
        self._kernels = kernels()
        self._handed_over: Made | None = None
        table.announce(sample)
        _pipelines.add(self)
        self._ahead: Ahead[Slot, Made] = Ahead(
            self._assemble, new_slot, depth=prefetch, name="headrace-batches", meter=meter
        )

    def next(self, wait: Wait) -> Made | None:
        """The next batch, or None at the end. Gives the buffers of the one before back to the ring."""
        before = self._handed_over
        if before is not None:
            if before.ready is not None:
                with Wait("loader.copy", meter=self._meter):
                    before.ready.synchronize()
            self._handed_over = None
            self._ahead.release(before.slot)
        made = self._handed_over = self._ahead.next(wait)
        return made

    def close(self, timeout: float = 2.0) -> None:
        until = time.monotonic() + timeout
        self._closed = True
        self._supply.close(timeout)
        self._ahead.close(until - time.monotonic())

    def _assemble(self, slot: Slot) -> Made | None:
        """The next step that is not passed over, or None when no rank has anything more to deliver."""
        skipped: list[tuple[int, Taken]] = []
        while True:
            with phase("lanes", meter=self._meter):
                taken = self._take()
            if taken is None:
                return None
            step = self._step
            self._step += 1
            self._sample += self._shape.global_batch_size
            if not any(a <= step < b for a, b in self._skip):
                break
            skipped.append((step, taken))
        with phase("assemble", meter=self._meter):
            return self._fill(slot, step, taken, tuple(skipped))

    def _take(self) -> Taken | None:
        """This rank's samples of the step, or None at the end of all ranks' data."""
        shape, first = self._shape, self._sample
        mine = range(first + (shape.rank - first) % shape.world_size, first + shape.global_batch_size, shape.world_size)
        taken = self._table.take(mine)
        own = any(row[0] >= 0 for row in taken.listed) or self._any_lane_has_more(first)
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

    def _fill(self, slot: Slot, step: int, taken: Taken, skipped: tuple[tuple[int, Taken], ...]) -> Made:
        shape, rows, k = self._shape, taken.rows, self._kernels
        arrays, samples = slot.arrays, taken.samples
        borders = np.empty(k.count_borders(rows), np.int32)
        sums = np.empty(k.SUM_SOURCES + shape.sources, np.int64)
        k.fill_rows(
            rows, samples.start, samples.step, shape.seq_len, shape.pad_id, shape.unshifted,
            arrays["sample_index"], arrays.get("row_count", _NONE), *(arrays.get(name, _NO_ROWS) for name in TOKEN_FIELDS),
            borders, sums,
        )  # fmt: skip
        tokens, documents, fillers, count, longest, *source_tokens = sums.tolist()
        windows = taken.windows
        digest = 0
        for g, (source, block, _, _, serial, *_) in zip(samples, taken.listed, strict=True):
            digest += sample_term(g, windows[serial].blocks.hashes[block] if source >= 0 else FILLER_HASH)
        return Made(
            step=step,
            taken=taken,
            slot=slot,
            digest=digest,
            tokens=tokens,
            documents=documents,
            fillers=fillers,
            source_tokens=source_tokens,
            max_seqlen=longest,
            borders=borders[:count] if shape.borders else None,
            next_sample=self._sample,
            lanes=self._table.state.copy(),
            skipped=skipped,
        )
