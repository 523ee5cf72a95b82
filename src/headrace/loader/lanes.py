"""What a lane delivers next, and where it stands.

A lane is one of L fixed virtual consumers: sample g belongs to lane g mod L, for any number of ranks. It knows nothing of
other lanes, so ranks need not talk. Its whole state is six numbers per source:

    lane 5   prose  epoch 0, row 1,204, token 0, block 17 of its window, 5.1 M tokens delivered, credit +812
             code   epoch 2, row    88, token 0, block  3 of its window, 2.2 M tokens delivered, credit −812

The lanes of a rank are one table, so that a whole batch is decided in one compiled call. What is rare (a window to open,
a source that has run dry, weights that change) is done here, in Python, between two such calls. Everything that happens
to a lane happens at one of its own samples, so it does not matter which other lanes a rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.compiled import CompiledLoops, address
from headrace.loader.pool import WindowKey, WindowSupply
from headrace.loader.windows import Window, WindowStart
from headrace.mix import Deal, LaneMix, fixed_point, starting_credits
from headrace.order import content_hash
from headrace.runtime.buffers import TensorMemory

__all__ = [
    "DRY",
    "FILLER_HASH",
    "LEFT_OUT",
    "TOKEN_FIELDS",
    "BatchBuffers",
    "LanePlan",
    "LaneTable",
    "Taken",
    "WeightChange",
    "kernels",
]

DRY = -1
"""The epoch of a source that has nothing more for a lane."""
EPOCH, POSITION, OFFSET, BLOCK, TOKENS, CREDIT = range(6)
_NEVER = np.iinfo(np.int64).max

# What is counted of a batch: real tokens, padding, documents, samples, samples without anything to learn, (skipped ones: a batch
# has none); the borders of its pieces, the longest of them; its digest; then tokens per source.
(
    TOKENS_MADE, PADDING_MADE, DOCUMENTS_MADE, SAMPLES_MADE, FILLERS_MADE, SKIPPED_MADE, BORDERS, LONGEST, DIGEST_LOW, DIGEST_HIGH,
    SOURCES_MADE,
) = range(11)  # fmt: skip

LEFT_OUT = ("empty_documents", "bad_rows")
"""What is counted of windows: documents without a token, and rows that cannot be used."""

TOKEN_FIELDS = ("input_ids", "labels", "position_ids", "segment_ids")
"""What a batch may hold of [b, T] each."""
FILLER_HASH = content_hash(b"filler")
"""The content of a sample with nothing to learn, as the digest has it."""
_FILLER_WORDS = np.frombuffer(bytearray(FILLER_HASH), np.uint64)
_INT64 = np.dtype(np.int64)

kernels = CompiledLoops("headrace.loader.kernels")


class WeightChange(NamedTuple):
    """Other weights from a sample on."""

    sample: int
    weights: tuple[tuple[float, ...], ...]
    """Per lane, per source."""


@dataclass(frozen=True)
class LanePlan:
    """What all lanes of a dataset have in common."""

    deals: tuple[Deal, ...]
    weights: tuple[tuple[float, ...], ...]
    """Per lane, per source; a lane that owns nothing of a finite source has weight 0 for it."""
    lanes: int
    seq_len: int
    seed: int
    max_epochs: tuple[int | None, ...]
    """Per source; None: for ever."""
    max_tokens: tuple[int | None, ...]
    stop_first: bool
    number: int = 0
    """Which pass over finite sources this is: a loader that has ended and is iterated again starts the next one."""

    def finite(self) -> bool:
        """Whether every lane ends some day."""
        bounded = [e is not None or t is not None for e, t in zip(self.max_epochs, self.max_tokens, strict=True)]
        return any(bounded) if self.stop_first else all(bounded)

    @functools.cached_property
    def starts(self) -> tuple[np.ndarray, ...]:
        """The state of every lane before its first sample: int64 [sources, 6] each."""
        return tuple(self._start(lane) for lane in range(self.lanes))

    def _start(self, lane: int) -> np.ndarray:
        state = np.zeros((len(self.deals), 6), np.int64)
        for i, deal in enumerate(self.deals):
            state[i, EPOCH] = self.first_epoch(i) if deal.rows else DRY
        if self.stop_first and ((state[:, EPOCH] == DRY) & (np.asarray(self.weights[lane]) > 0)).any():
            state[:, EPOCH] = DRY
        weights = self.active_weights(self.weights[lane], state)
        state[:, CREDIT] = starting_credits(weights, block=self.seq_len, lane=lane, lanes=self.lanes, seed=self.seed)
        return state

    def active_weights(self, weights: Sequence[float], state: np.ndarray) -> tuple[int, ...]:
        """Fixed-point weights of the sources that have something left."""
        return fixed_point([w if e != DRY else 0.0 for w, e in zip(weights, state[:, EPOCH].tolist(), strict=True)])

    def first_epoch(self, source: int) -> int:
        epochs = self.max_epochs[source]
        # Without a number of epochs a pass ends by its tokens; the next one starts far beyond, in another order.
        return self.number << 20 if epochs is None else self.number * epochs

    def epoch_limit(self, source: int) -> int | None:
        epochs = self.max_epochs[source]
        return None if epochs is None else (self.number + 1) * epochs

    def token_cap(self, source: int, lane: int) -> int | None:
        """A lane's share of `max_tokens`, in whole blocks: a cap below one block a lane is served by some lanes only."""
        cap = self.max_tokens[source]
        if cap is None:
            return None
        blocks = -(-cap // self.seq_len)
        return (blocks * (lane + 1) // self.lanes - blocks * lane // self.lanes) * self.seq_len


class BatchBuffers:
    """The tensors that the next batch is laid out in, and their addresses for the compiled loop."""

    __slots__ = ("_borders", "_memory", "_places", "_tensors", "_with_borders", "where")

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        memory: TensorMemory,
        *,
        pad: int,
        unshifted: bool,
        borders: bool,
    ) -> None:
        """`shapes` are those of the int64 fields; `borders`: batches have cu_seqlens and max_seqlen."""
        k = kernels()
        self._memory = memory
        self._with_borders = borders
        places = {"sample_index": k.AT_INDEX, "row_count": k.AT_DOCUMENTS}
        places |= {name: k.AT_FIELDS + i for i, name in enumerate(TOKEN_FIELDS)}
        self._places = [(name, places[name], shape) for name, shape in shapes.items()]
        self._tensors: dict[str, Any] = {}
        self.where = np.zeros(k.BATCH_WORDS, np.int64)
        """Arguments of the compiled loop: addresses, and the two settings."""
        self.where[k.PAD_WITH], self.where[k.UNSHIFTED] = pad, unshifted
        self.make_room(16 * shapes["sample_index"][0])

    def renew(self) -> None:
        """Take tensors that nothing refers to, for the next batch."""
        tensors = {}
        for name, place, shape in self._places:
            tensors[name] = tensor = self._memory.tensor(shape, _INT64)
            self.where[place] = tensor.data_ptr()
        self._tensors = tensors

    def batch(self, facts: np.ndarray) -> dict[str, Any]:
        """The batch that was laid out here. It belongs to its receiver, and nothing here refers to it any more: `renew` before the next one."""
        tensors, self._tensors = self._tensors, {}
        if self._with_borders:
            tensors["cu_seqlens"] = self._memory.copy(self._borders[: facts[BORDERS]])
            tensors["max_seqlen"] = int(facts[LONGEST])
        return tensors

    def make_room(self, borders: int) -> None:
        """Have room for so many borders of pieces."""
        k = kernels()
        self._borders = np.empty(borders, np.int32)
        self.where[k.AT_BORDERS], self.where[k.BORDER_ROOM] = address(self._borders), borders


class Taken(NamedTuple):
    """The samples of one batch."""

    samples: range
    """Their global indices."""
    rows: np.ndarray
    """int64 [samples, ROW_FIELDS]."""
    facts: np.ndarray
    """int64: what is counted of them."""
    live: Mapping[int, Window]
    """The windows that were open at the end, by serial number."""
    left: Mapping[int, Window]
    """Those that were left on the way. The rows point into both; they live as long as this does."""

    @property
    def sources(self) -> np.ndarray:
        """-1: nothing left, a block without anything to learn."""
        return self.rows[:, 0]

    @property
    def real(self) -> bool:
        """Whether any sample has something to learn."""
        return bool(self.facts[SAMPLES_MADE] > self.facts[FILLERS_MADE])

    def window(self, i: int) -> Window | None:
        serial = int(self.rows[i, 4])
        return None if self.rows[i, 0] < 0 else self.left.get(serial) or self.live[serial]

    def block(self, i: int) -> int:
        return int(self.rows[i, 1])


class LaneTable:
    """Some lanes in motion. Owned by one thread."""

    def __init__(
        self,
        plan: LanePlan,
        supply: WindowSupply,
        states: Mapping[int, np.ndarray],
        changes: Sequence[WeightChange] = (),
    ) -> None:
        """`changes` in the order of their samples; the plan's weights hold before the first of them."""
        self._plan = plan
        self._supply = supply
        self._kernels = kernels()
        self.lanes = tuple(states)
        count, sources = len(states), len(plan.deals)
        self.state = np.ascontiguousarray(
            np.stack([states[lane] for lane in self.lanes]) if count else np.zeros((0, sources, 6)), np.int64
        )
        self._slots = np.full(plan.lanes, -1, np.int64)
        self._slots[list(self.lanes)] = np.arange(count)
        self._weights = np.zeros((count, sources), np.int64)
        self._table = np.zeros((count, sources, self._kernels.WINDOW_FIELDS), np.int64)
        self._windows: list[list[Window | None]] = [[None] * sources for _ in range(count)]
        self._caps = np.full((count, sources), -1, np.int64)
        # The weights that hold now are a change before all others, so that a lane takes them up at its next sample: of
        # several that lie between two of its samples only the last is made, whether or not the run was resumed in between.
        self._changes = (WeightChange(-1, plan.weights), *changes)
        self._current: list[tuple[float, ...]] = [plan.weights[lane] for lane in self.lanes]
        self._change_at = np.full(count, -1, np.int64)
        self.totals = np.zeros(SOURCES_MADE + sources + len(LEFT_OUT), np.int64)
        """What was counted of all batches so far, as of one; then what was left out of the windows that were opened."""
        self._peeking = False
        self._peeked: dict[WindowKey, Window] = {}
        """Windows that `has_more` took from the supply, until they are opened."""
        self._serial = 0
        self._live: dict[int, Window] = {}
        """Replaced, never changed: batches hold on to the one of their time."""
        k = self._kernels
        places = {
            k.AT_SLOTS: self._slots, k.AT_STATE: self.state, k.AT_WEIGHTS: self._weights, k.AT_WINDOWS: self._table,
            k.AT_CAPS: self._caps, k.AT_CHANGE: self._change_at, k.AT_FILLER: _FILLER_WORDS,
            k.AT_TOTALS: self.totals,
        }  # fmt: skip
        self._where, self._nowhere = np.zeros(k.TABLE_WORDS, np.int64), np.zeros(k.BATCH_WORDS, np.int64)
        for place, array in places.items():
            self._where[place] = address(array)
        self._where[k.LANES_ALL], self._where[k.LANES_OWN] = plan.lanes, count
        self._where[k.SOURCES_ALL], self._where[k.WIDTH_OF_ROW] = sources, plan.seq_len
        for slot, lane in enumerate(self.lanes):
            for i in range(sources):
                cap = plan.token_cap(i, lane)
                self._caps[slot, i] = -1 if cap is None else cap
            self._weights[slot] = plan.active_weights(self._current[slot], self.state[slot])

    def announce(self, origin: int) -> None:
        """Ask for the windows that these lanes will open, those of the very next samples first."""
        total = self._plan.lanes
        for slot, lane in sorted(enumerate(self.lanes), key=lambda sl: (sl[1] - origin) % total):
            now = float(origin + (lane - origin) % total)
            following = self._kernels.next_source(self._weights[slot], self.state[slot], self._plan.seq_len)
            for i in range(len(self._plan.deals)):
                if self.state[slot, i, EPOCH] == DRY or self._weights[slot, i] == 0:
                    continue
                start = self._settle(lane, i, self._start(slot, i))
                if start is not None:
                    priority = now if i == following else self._needed_at(slot, i, now, 0)
                    self._supply.request((i, lane, start), priority)

    def take(self, samples: range, buffers: BatchBuffers | None = None) -> Taken:
        """The samples of a batch, all of them in lanes of this table; laid out in `buffers` and counted in `totals` if there are any."""
        k, count = self._kernels, len(samples)
        rows, facts = (
            np.empty((count, k.ROW_FIELDS), np.int64),
            np.empty(SOURCES_MADE + len(self._plan.deals), np.int64),
        )
        left: dict[int, Window] = {}
        into, at = self._nowhere if buffers is None else buffers.where, 0
        while True:
            at = k.next_batch(self._where, into, samples.start, samples.step, at, count, rows, facts)
            if at == count:
                return Taken(samples, rows, facts, self._live, left)
            if at > count:
                assert buffers is not None
                buffers.make_room(2 * (at - count))
                at = count
            else:
                g = samples[at]
                self._ready(int(self._slots[g % self._plan.lanes]), g, left)

    def has_more(self, lane: int, sample: int) -> bool:
        """Whether the lane has another block with something to learn, at `sample` (its next one) or after a later change.

        Changes nothing: what a lane's state looks like must not depend on who asked, so not on the number of ranks.
        """
        slot = int(self._slots[lane])
        arrays = (self.state[slot], self._weights[slot], self._table[slot], self.totals)
        before = [array.copy() for array in arrays]
        lists = self._windows[slot].copy(), self._current[slot], self._change_at[slot], self._live
        self._peeking = True
        try:
            if self._ready(slot, sample, {}):
                return True
            dry = self.state[slot, :, EPOCH] == DRY
        finally:
            self._peeking = False
            for array, old in zip(arrays, before, strict=True):
                array[...] = old
            self._windows[slot], self._current[slot], self._change_at[slot], self._live = lists
        later = [c.weights[lane] for c in self._changes if c.sample > sample]
        return any(w > 0 and not d for weights in later for w, d in zip(weights, dry.tolist(), strict=True))

    def next_sample(self, lane: int, sample: int) -> int:
        """The first sample of a lane at or after `sample`."""
        return sample + (lane - sample) % self._plan.lanes

    # ---------------------------------------------------------------------------------------- private

    def _ready(self, slot: int, g: int, left: dict[int, Window]) -> bool:
        """Bring a lane to where its next sample can be taken; False: there is nothing left for it."""
        if g >= self._change_at[slot]:
            self._change_weights(slot, g)
        while True:
            source = self._kernels.next_source(self._weights[slot], self.state[slot], self._plan.seq_len)
            if source < 0:
                return False
            if self._open(slot, source, g, left):
                return True
            self._drop(slot, source)

    def _open(self, slot: int, source: int, g: int, left: dict[int, Window]) -> bool:
        """Have a window of the source with a block left in it; False: the source is dry."""
        entry, table, plan = self.state[slot, source], self._table[slot, source], self._plan
        cap = int(self._caps[slot, source])
        if cap >= 0 and 2 * (cap - int(entry[TOKENS])) < plan.seq_len:
            return False
        if entry[BLOCK] < table[0]:
            return True
        lane = self.lanes[slot]
        start, block = self._start(slot, source), int(entry[BLOCK])
        barren = 0
        while True:
            settled = self._settle(lane, source, start)
            if settled is None:
                return False
            if settled != start:
                block = 0
            window = self._window((source, lane, settled), g)
            if block == 0:  # else a resumed run opens it again
                self.totals[-len(LEFT_OUT) :] += (window.empty, window.bad)
            following = self._settle(lane, source, window.end)
            if following is not None:
                self._supply.request(
                    (source, lane, following), self._needed_at(slot, source, float(g), len(window.blocks) - block)
                )
            if block < len(window.blocks):
                entry[EPOCH], entry[POSITION], entry[OFFSET] = settled
                entry[BLOCK] = block
                self._install(slot, source, window, left)
                return True
            if len(window.blocks) == 0:
                barren += max(window.end.position - settled.position, 1)
                if barren > 2 * plan.deals[source].rows:  # a source of empty documents must not spin for ever
                    return False
            start, block = window.end, 0

    def _window(self, key: WindowKey, g: int) -> Window:
        window = self._peeked.pop(key, None) or self._supply.take(key, float(g))
        if self._peeking:
            self._peeked[key] = window
        return window

    def _install(self, slot: int, source: int, window: Window, left: dict[int, Window]) -> None:
        before, live = self._windows[slot][source], dict(self._live)
        if before is not None:  # rows of the batch in the making may still point into it
            old = int(self._table[slot, source, 1])
            left[old] = live.pop(old)
        self._serial += 1
        blocks = window.blocks
        self._windows[slot][source] = window
        live[self._serial] = window
        self._live = live
        arrays = (
            blocks.tokens, blocks.piece_ptr, blocks.piece_len, blocks.piece_next, blocks.real, blocks.row_count, blocks.hashes,
        )  # fmt: skip
        self._table[slot, source] = (len(blocks), self._serial, *window.end, *map(address, arrays))

    def _start(self, slot: int, source: int) -> WindowStart:
        epoch, position, offset = self.state[slot, source, :3].tolist()
        return WindowStart(epoch, position, offset)

    def _settle(self, lane: int, source: int, start: WindowStart) -> WindowStart | None:
        """A start past the end of the lane's part moves to the next epoch in which it owns rows; None: no such epoch."""
        deal, limit = self._plan.deals[source], self._plan.epoch_limit(source)
        epoch = start.epoch
        while start.position >= deal.lane_rows(lane, epoch):
            epoch += 1
            if limit is not None and epoch >= limit:
                return None
            start = WindowStart(epoch, 0, 0)
        return start

    def _drop(self, slot: int, source: int) -> None:
        dropped = range(len(self._plan.deals)) if self._plan.stop_first else (source,)
        for i in dropped:
            self.state[slot, i, :4] = (DRY, 0, 0, 0)
            self._table[slot, i, 0] = 0
        self._reweigh(slot, self._current[slot])

    def _change_weights(self, slot: int, g: int) -> None:
        due = [c for c in self._changes if c.sample <= g]
        later = [c.sample for c in self._changes if c.sample > g]
        self._current[slot] = due[-1].weights[self.lanes[slot]]
        self._change_at[slot] = later[0] if later else _NEVER
        self._reweigh(slot, self._current[slot])

    def _reweigh(self, slot: int, weights: Sequence[float]) -> None:
        state = self.state[slot]
        fixed = self._plan.active_weights(weights, state)
        mix = LaneMix(fixed, state[:, CREDIT].tolist(), block=self._plan.seq_len)
        mix.reweight(fixed)
        self._weights[slot], state[:, CREDIT] = mix.weights, mix.credits

    def _needed_at(self, slot: int, source: int, now: float, blocks: int) -> float:
        """About the global index at which the source's next window will be opened."""
        share = int(self._weights[slot, source]) / (1 << 24)
        return now + self._plan.lanes * blocks / max(share, 1e-9) + self._plan.lanes
