"""What a lane delivers next, and where it stands.

A lane is one of L fixed virtual consumers: sample g belongs to lane g mod L, for any number of ranks. It knows nothing of
other lanes, so ranks need not talk. Its whole state is six numbers per source:

    lane 5   prose  epoch 0, row 1,204, token 0, block 17 of its window, 5.1 M tokens delivered, credit +812
             code   epoch 2, row    88, token 0, block  3 of its window, 2.2 M tokens delivered, credit −812

Everything that happens to a lane happens at one of its own samples, so it does not matter which other lanes a rank has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.loader.batch_fill import BatchRows
from headrace.loader.pool import WindowKey, WindowSupply
from headrace.loader.windows import Window, WindowStart
from headrace.mix import Deal, LaneMix, fixed_point, starting_credits
from headrace.order import content_hash, sample_term

DRY = -1
"""The epoch of a source that has nothing more for a lane."""
EPOCH, POSITION, OFFSET, BLOCK, TOKENS, CREDIT = range(6)
WIDTH = 6
"""Numbers of a lane's state for each source, in this order."""
LaneState = tuple[int, ...]
"""A lane's whole state: WIDTH numbers for each source, one source after the other."""

LEFT_OUT = ("empty_documents", "bad_rows")
"""What is counted of windows: documents without a token, and rows that cannot be used."""

FILLER_HASH = content_hash(b"filler")
"""The content of a sample with nothing to learn, as the digest has it."""


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
    def starts(self) -> tuple[LaneState, ...]:
        """The state of every lane before its first sample."""
        return tuple(self._start(lane) for lane in range(self.lanes))

    def _start(self, lane: int) -> LaneState:
        epochs = [self.first_epoch(i) if deal.rows else DRY for i, deal in enumerate(self.deals)]
        if self.stop_first and any(e == DRY and w > 0 for e, w in zip(epochs, self.weights[lane], strict=True)):
            epochs = [DRY] * len(epochs)
        weights = self.active_weights(self.weights[lane], epochs)
        credits = starting_credits(weights, block=self.seq_len, lane=lane, lanes=self.lanes, seed=self.seed)
        return tuple(n for epoch, credit in zip(epochs, credits, strict=True) for n in (epoch, 0, 0, 0, 0, credit))

    def active_weights(self, weights: Sequence[float], epochs: Sequence[int]) -> tuple[int, ...]:
        """Fixed-point weights of the sources that have something left. `epochs`: the epoch of each, or DRY."""
        return fixed_point([w if e != DRY else 0.0 for w, e in zip(weights, epochs, strict=True)])

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


class OpenWindow:
    """A window that lanes deliver. What is needed of a block is here as Python values and memory views: numpy takes longer for one
    number, and gives up the GIL for the copy of one row, which takes 40 us to get back from tokenizer threads."""

    __slots__ = ("contents", "documents", "following", "lengths", "piece_ptr", "real", "tokens", "window")

    def __init__(self, window: Window) -> None:
        blocks = window.blocks
        self.window = window
        self.real: list[int] = blocks.real.tolist()
        self.documents: list[int] = blocks.row_count.tolist()
        self.piece_ptr: list[int] = blocks.piece_ptr.tolist()
        self.contents = blocks.hashes.tobytes()
        """The content hashes of the blocks, 16 bytes each."""
        self.tokens, self.lengths, self.following = map(_as_bytes, (blocks.tokens, blocks.piece_len, blocks.piece_next))


def _as_bytes(array: np.ndarray) -> memoryview:
    return array.data.cast("B")


class BlockOf(NamedTuple):
    """The block that a sample is."""

    opened: OpenWindow
    block: int

    @property
    def window(self) -> Window:
        return self.opened.window

    @property
    def content(self) -> bytes:
        """The block's content hash."""
        return self.opened.contents[16 * self.block : 16 * self.block + 16]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which block each sample of a batch is. Holds the windows that the blocks lie in."""

    samples: range
    """Their global indices."""
    blocks: list[BlockOf | None]
    """None: a sample with nothing to learn, because its lane is dry."""

    @property
    def has_text(self) -> bool:
        """Whether any sample has something to learn."""
        return any(self.blocks)

    @property
    def sources(self) -> np.ndarray:
        """int64: the source of each sample, -1 for one with nothing to learn."""
        return np.array([-1 if at is None else at.window.source for at in self.blocks], np.int64)

    def every(self, step: int, first: int) -> BatchPlan:
        """The plan of every `step`-th sample, beginning with number `first` of this plan."""
        return self if step == 1 else BatchPlan(self.samples[first::step], self.blocks[first::step])

    def digest(self) -> int:
        """What these samples add to the digest, not reduced modulo 2**128."""
        contents = [FILLER_HASH if at is None else at.content for at in self.blocks]
        return sum(map(sample_term, self.samples, contents))

    def gather(self, rows: BatchRows) -> None:
        """Copy the blocks into the rows of a batch."""
        width = rows.tokens.itemsize * rows.tokens.shape[1]
        tokens, lengths, following = map(_as_bytes, (rows.tokens, rows.lengths, rows.following))
        facts = []
        for r, at in enumerate(self.blocks):
            if at is None:
                facts.append((0, 0, 0))
                continue
            opened, b = at
            row, first, last = r * width, 4 * opened.piece_ptr[b], 4 * opened.piece_ptr[b + 1]
            tokens[row : row + width] = opened.tokens[b * width : (b + 1) * width]
            lengths[row : row + last - first] = opened.lengths[first:last]
            following[row : row + last - first] = opened.following[first:last]
            facts.append((opened.real[b], (last - first) // 4, opened.documents[b]))
        rows.facts[:] = facts


class _Reading:
    """Where a lane stands in a source."""

    __slots__ = ("block", "cap", "opened", "start", "tokens")

    def __init__(self, state: Sequence[int], cap: int | None) -> None:
        self.start = WindowStart(*state[:BLOCK])
        """The start of the window that is delivered; its epoch is DRY once nothing is left."""
        self.block = state[BLOCK]
        """The next block of that window."""
        self.tokens = state[TOKENS]
        """Tokens delivered of the source."""
        self.cap = cap
        """The tokens after which the source counts as dry."""
        self.opened: OpenWindow | None = None

    def move_to(self, start: WindowStart, block: int = 0, opened: OpenWindow | None = None) -> None:
        self.start, self.block, self.opened = start, block, opened


class _Lane:
    """One lane in motion: its credits, and how far each source is read."""

    __slots__ = ("change_at", "mix", "number", "readings", "weights")

    def __init__(self, number: int, plan: LanePlan, state: LaneState) -> None:
        self.number = number
        rows = [state[i : i + WIDTH] for i in range(0, len(state), WIDTH)]
        self.readings = [_Reading(row, plan.token_cap(source, number)) for source, row in enumerate(rows)]
        self.weights = plan.weights[number]
        """Those that were asked for; sources that are dry have none in `mix`."""
        active = plan.active_weights(self.weights, self.epochs())
        self.mix = LaneMix(active, [row[CREDIT] for row in rows], block=plan.seq_len)
        self.change_at = -1
        """The sample from which on other weights may hold."""

    def epochs(self) -> list[int]:
        return [reading.start.epoch for reading in self.readings]

    def take(self, source: int) -> BlockOf:
        """The next block of a source whose window is open."""
        reading = self.readings[source]
        opened, b = reading.opened, reading.block
        assert opened is not None
        tokens = opened.real[b]
        self.mix.deliver(source, tokens)
        reading.tokens += tokens
        reading.block = b + 1
        if b + 1 == len(opened.real):  # a resume from here need not make this window again to learn where it ended
            reading.move_to(opened.window.end)
        return BlockOf(opened, b)

    def state(self) -> LaneState:
        numbers: list[int] = []
        for reading, credit in zip(self.readings, self.mix.credits, strict=True):
            numbers += (*reading.start, reading.block, reading.tokens, credit)
        return tuple(numbers)


class LaneTable:
    """Some lanes in motion. Owned by one thread."""

    def __init__(
        self,
        plan: LanePlan,
        supply: WindowSupply,
        states: Mapping[int, LaneState],
        changes: Sequence[WeightChange] = (),
    ) -> None:
        """`changes` in the order of their samples; the plan's weights hold before the first of them."""
        self._plan = plan
        self._supply = supply
        self.lanes = tuple(states)
        self.states = dict(states)
        """The lanes' states, after the last `take`."""
        self._lanes = {lane: _Lane(lane, plan, state) for lane, state in states.items()}
        # The weights that hold now are a change before all others, so that a lane takes them up at its next sample: of
        # several that lie between two of its samples only the last is made, whether or not the run was resumed in between.
        self._changes = (WeightChange(-1, plan.weights), *changes)
        self._left_out = (0,) * len(LEFT_OUT)
        self._peeked: dict[WindowKey, Window] = {}
        """Windows that `has_more` took from the supply, until they are opened."""

    def announce(self, origin: int) -> None:
        """Ask for the windows that these lanes will open, those of the very next samples first."""
        total = self._plan.lanes
        for number in sorted(self.lanes, key=lambda lane: (lane - origin) % total):
            lane, now = self._lanes[number], float(self.next_sample(number, origin))
            following = lane.mix.next_source()
            for i, (weight, reading) in enumerate(zip(lane.mix.weights, lane.readings, strict=True)):
                if weight == 0 or reading.start.epoch == DRY:
                    continue
                start = self._settle(number, i, reading.start)
                if start is not None:
                    priority = now if i == following else self._needed_at(lane, i, now, 0)
                    self._supply.request((i, number, start), priority)

    def take(self, samples: range) -> BatchPlan:
        """The samples of a batch, all of them in lanes of this table."""
        lanes, total, states = self._lanes, self._plan.lanes, self.states
        blocks: list[BlockOf | None] = []
        for g in samples:
            lane = lanes[g % total]
            source = self._open_next(lane, g)
            blocks.append(None if source < 0 else lane.take(source))
            states[lane.number] = lane.state()
        return BatchPlan(samples, blocks)

    def drain_left_out(self) -> tuple[int, ...]:
        """What the windows that were opened since the last call left out, as LEFT_OUT counts it."""
        left_out, self._left_out = self._left_out, (0,) * len(LEFT_OUT)
        return left_out

    def has_more(self, number: int, sample: int) -> bool:
        """Whether the lane has another block with something to learn, at `sample` (its next one) or after a later change.

        Changes nothing: what a lane's state looks like must not depend on who asked, so not on the number of ranks.
        """
        table = LaneTable(self._plan, self._supply, {number: self.states[number]}, self._changes[1:])
        table._peeked, lane = self._peeked, table._lanes[number]
        for reading, own in zip(lane.readings, self._lanes[number].readings, strict=True):
            reading.opened = own.opened
        source = table._open_next(lane, sample)
        if source >= 0:
            reading = lane.readings[source]
            if reading.opened is not None:
                self._peeked[source, number, reading.start] = reading.opened.window
            return True
        dry = [epoch == DRY for epoch in lane.epochs()]
        later = [c.weights[number] for c in self._changes if c.sample > sample]
        return any(w > 0 and not d for weights in later for w, d in zip(weights, dry, strict=True))

    def next_sample(self, lane: int, sample: int) -> int:
        """The first sample of a lane at or after `sample`."""
        return sample + (lane - sample) % self._plan.lanes

    # ---------------------------------------------------------------------------------------- private

    def _open_next(self, lane: _Lane, g: int) -> int:
        """Have a window open for the lane's next sample; its source, or -1 if nothing is left for the lane."""
        if g >= lane.change_at:
            self._change_weights(lane, g)
        while (source := lane.mix.next_source()) >= 0:
            reading = lane.readings[source]
            if reading.opened is not None and reading.cap is None:
                return source
            if self._has_open_window(lane, source, g):
                return source
            self._drop(lane, source)
        return -1

    def _has_open_window(self, lane: _Lane, source: int, g: int) -> bool:
        """Have a window of the source with a block left in it; False: the source is dry."""
        reading, plan = lane.readings[source], self._plan
        if reading.cap is not None and 2 * (reading.cap - reading.tokens) < plan.seq_len:
            return False
        if reading.opened is not None:
            return True
        start, block = reading.start, reading.block
        barren = 0
        while True:
            settled = self._settle(lane.number, source, start)
            if settled is None:
                return False
            if settled != start:
                block = 0
            key = (source, lane.number, settled)
            window = self._peeked.pop(key, None) or self._supply.take(key, float(g))
            if block == 0:  # else a resumed run opens it again
                self._left_out = (self._left_out[0] + window.empty, self._left_out[1] + window.bad)
            following = self._settle(lane.number, source, window.end)
            if following is not None:
                self._supply.request(
                    (source, lane.number, following),
                    self._needed_at(lane, source, float(g), len(window.blocks) - block),
                )
            if block < len(window.blocks):
                reading.move_to(settled, block, OpenWindow(window))
                return True
            if len(window.blocks) == 0:
                barren += max(window.end.position - settled.position, 1)
                if barren > 2 * plan.deals[source].rows:  # a source of empty documents must not spin for ever
                    return False
            start, block = window.end, 0

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

    def _drop(self, lane: _Lane, source: int) -> None:
        for reading in lane.readings if self._plan.stop_first else (lane.readings[source],):
            reading.move_to(WindowStart(DRY, 0, 0))
        self._reweight(lane)

    def _change_weights(self, lane: _Lane, g: int) -> None:
        due = [c for c in self._changes if c.sample <= g]
        later = [c.sample for c in self._changes if c.sample > g]
        lane.weights = due[-1].weights[lane.number]
        lane.change_at = later[0] if later else sys.maxsize
        self._reweight(lane)

    def _reweight(self, lane: _Lane) -> None:
        lane.mix.reweight(self._plan.active_weights(lane.weights, lane.epochs()))

    def _needed_at(self, lane: _Lane, source: int, now: float, blocks: int) -> float:
        """About the global index at which the source's next window will be opened."""
        share = lane.mix.weights[source] / (1 << 24)
        return now + self._plan.lanes * blocks / max(share, 1e-9) + self._plan.lanes
