"""What a lane delivers next, and where it stands.

A lane is one of L fixed virtual consumers: sample g belongs to lane g mod L, for any number of ranks. It knows nothing of
other lanes, so ranks need not talk. Its whole state is six numbers per source:

    lane 5   prose  epoch 0, row 1,204, token 0, block 17 of its window, 5.1 M tokens delivered, credit +812
             code   epoch 2, row    88, token 0, block  3 of its window, 2.2 M tokens delivered, credit −812

Everything that happens to a lane happens at one of its own samples, so it does not matter which other lanes a rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.loader.batch_fill import BatchRows, gather_block
from headrace.loader.pool import WindowKey, WindowSupply
from headrace.loader.windows import Window, WindowStart
from headrace.mix import Deal, LaneMix, fixed_point, starting_credits
from headrace.order import content_hash, sample_term

DRY = -1
"""The epoch of a source that has nothing more for a lane."""
EPOCH, POSITION, OFFSET, BLOCK, TOKENS, CREDIT = range(6)
_NEVER = np.iinfo(np.int64).max

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


class BlockOf(NamedTuple):
    """The block that a sample is."""

    window: Window
    block: int
    content: bytes
    """The block's content hash."""


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
        tokens, lengths, following, facts = rows.tokens, rows.lengths, rows.following, rows.facts
        for r, at in enumerate(self.blocks):
            if at is None:
                facts[r] = 0
                continue
            blocks = at.window.blocks
            gather_block(
                tokens, lengths, following, facts, r, blocks.tokens, blocks.piece_ptr, blocks.piece_len, blocks.piece_next,
                blocks.real, blocks.row_count, at.block,
            )  # fmt: skip


class _OpenWindow:
    """A window that a lane delivers. What is needed of every block is here as Python values: numpy takes longer for one number."""

    __slots__ = ("block", "contents", "real", "window")

    def __init__(self, window: Window, block: int) -> None:
        self.window, self.block = window, block
        self.real: list[int] = window.blocks.real.tolist()
        self.contents: bytes = window.blocks.hashes.tobytes()
        """The content hashes of the blocks, 16 bytes each."""


class _Lane:
    """One lane in motion: its credits, and the window that is open of each source."""

    __slots__ = ("caps", "change_at", "mix", "number", "slot", "state", "tokens", "weights", "windows")

    def __init__(self, number: int, slot: int, plan: LanePlan, state: np.ndarray) -> None:
        self.number, self.slot = number, slot
        self.state = state
        """int64 [sources, 6], row `slot` of the table's state. Credits, tokens and the block of an open window are as of the last `take`."""
        self.tokens: list[int] = state[:, TOKENS].tolist()
        """Delivered of each source."""
        self.caps = [plan.token_cap(source, number) for source in range(len(state))]
        self.weights = plan.weights[number]
        """Those that were asked for; sources that are dry have none in `mix`."""
        self.mix = LaneMix(plan.active_weights(self.weights, state), state[:, CREDIT].tolist(), block=plan.seq_len)
        self.windows: list[_OpenWindow | None] = [None] * len(state)
        self.change_at = -1
        """The sample from which on other weights may hold."""

    def start(self, source: int) -> WindowStart:
        epoch, position, offset = self.state[source, :3].tolist()
        return WindowStart(epoch, position, offset)

    def progress(self, source: int) -> tuple[int, int]:
        """The next block of the source's window, and the tokens delivered of the source."""
        opened = self.windows[source]
        return (0 if opened is None else opened.block, self.tokens[source])

    def snapshot(self) -> tuple:
        mix = self.mix
        return self.state.copy(), list(mix.weights), list(mix.credits), list(self.windows), self.weights, self.change_at

    def restore(self, snapshot: tuple) -> None:
        self.state[:], self.mix.weights, self.mix.credits, self.windows, self.weights, self.change_at = snapshot


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
        self.lanes = tuple(states)
        sources = len(plan.deals)
        self.state = np.array([states[lane] for lane in self.lanes], np.int64).reshape(len(states), sources, 6)
        self._lanes = {lane: _Lane(lane, slot, plan, self.state[slot]) for slot, lane in enumerate(self.lanes)}
        # The weights that hold now are a change before all others, so that a lane takes them up at its next sample: of
        # several that lie between two of its samples only the last is made, whether or not the run was resumed in between.
        self._changes = (WeightChange(-1, plan.weights), *changes)
        self._left_out = np.zeros(len(LEFT_OUT), np.int64)
        self._peeking = False
        self._peeked: dict[WindowKey, Window] = {}
        """Windows that `has_more` took from the supply, until they are opened."""

    def announce(self, origin: int) -> None:
        """Ask for the windows that these lanes will open, those of the very next samples first."""
        total = self._plan.lanes
        for number in sorted(self.lanes, key=lambda lane: (lane - origin) % total):
            lane, now = self._lanes[number], float(self.next_sample(number, origin))
            following = lane.mix.next_source()
            for i, weight in enumerate(lane.mix.weights):
                if weight == 0 or lane.state[i, EPOCH] == DRY:
                    continue
                start = self._settle(number, i, lane.start(i))
                if start is not None:
                    priority = now if i == following else self._needed_at(lane, i, now, 0)
                    self._supply.request((i, number, start), priority)

    def take(self, samples: range) -> BatchPlan:
        """The samples of a batch, all of them in lanes of this table."""
        total = self._plan.lanes
        taken = [self._lanes[g % total] for g in samples]
        delivered: list[tuple[_Lane, int]] = []
        blocks = [self._take_one(lane, g, delivered) for lane, g in zip(taken, samples, strict=True)]
        # The state is written here, a batch at a time: numpy takes longer for each number than the lane for its block.
        if taken:
            self.state[[lane.slot for lane in taken], :, CREDIT] = [lane.mix.credits for lane in taken]
        if delivered:
            slots, sources = [lane.slot for lane, _ in delivered], [source for _, source in delivered]
            self.state[slots, sources, BLOCK:CREDIT] = [lane.progress(source) for lane, source in delivered]
        return BatchPlan(samples, blocks)

    def drain_left_out(self) -> np.ndarray:
        """What the windows that were opened since the last call left out, as LEFT_OUT counts it."""
        left_out, self._left_out = self._left_out, np.zeros(len(LEFT_OUT), np.int64)
        return left_out

    def has_more(self, number: int, sample: int) -> bool:
        """Whether the lane has another block with something to learn, at `sample` (its next one) or after a later change.

        Changes nothing: what a lane's state looks like must not depend on who asked, so not on the number of ranks.
        """
        lane = self._lanes[number]
        before, left_out = lane.snapshot(), self._left_out.copy()
        self._peeking = True
        try:
            if self._open_next(lane, sample) >= 0:
                return True
            dry = (lane.state[:, EPOCH] == DRY).tolist()
        finally:
            self._peeking = False
            lane.restore(before)
            self._left_out = left_out
        later = [c.weights[number] for c in self._changes if c.sample > sample]
        return any(w > 0 and not d for weights in later for w, d in zip(weights, dry, strict=True))

    def next_sample(self, lane: int, sample: int) -> int:
        """The first sample of a lane at or after `sample`."""
        return sample + (lane - sample) % self._plan.lanes

    # ---------------------------------------------------------------------------------------- private

    def _take_one(self, lane: _Lane, g: int, delivered: list[tuple[_Lane, int]]) -> BlockOf | None:
        """The lane's next block, which is sample g; adds (lane, source) to `delivered`."""
        source = self._open_next(lane, g)
        if source < 0:
            return None
        opened = lane.windows[source]
        assert opened is not None
        window, b = opened.window, opened.block
        tokens = opened.real[b]
        lane.mix.deliver(source, tokens)
        lane.tokens[source] += tokens
        opened.block = b + 1
        if b + 1 == len(opened.real):  # a resume from here need not make this window again to learn where it ended
            lane.state[source, :4] = (*window.end, 0)
            lane.windows[source] = None
        delivered.append((lane, source))
        return BlockOf(window, b, opened.contents[16 * b : 16 * b + 16])

    def _open_next(self, lane: _Lane, g: int) -> int:
        """Have a window open for the lane's next sample; its source, or -1 if nothing is left for the lane."""
        if g >= lane.change_at:
            self._change_weights(lane, g)
        while (source := lane.mix.next_source()) >= 0:
            if lane.windows[source] is not None and lane.caps[source] is None:
                return source
            if self._has_open_window(lane, source, g):
                return source
            self._drop(lane, source)
        return -1

    def _has_open_window(self, lane: _Lane, source: int, g: int) -> bool:
        """Have a window of the source with a block left in it; False: the source is dry."""
        cap, plan = lane.caps[source], self._plan
        if cap is not None and 2 * (cap - lane.tokens[source]) < plan.seq_len:
            return False
        if lane.windows[source] is not None:
            return True
        start, block = lane.start(source), int(lane.state[source, BLOCK])
        barren = 0
        while True:
            settled = self._settle(lane.number, source, start)
            if settled is None:
                return False
            if settled != start:
                block = 0
            window = self._window((source, lane.number, settled), g)
            if block == 0:  # else a resumed run opens it again
                self._left_out += (window.empty, window.bad)
            following = self._settle(lane.number, source, window.end)
            if following is not None:
                self._supply.request(
                    (source, lane.number, following),
                    self._needed_at(lane, source, float(g), len(window.blocks) - block),
                )
            if block < len(window.blocks):
                lane.state[source, :4] = (*settled, block)
                lane.windows[source] = _OpenWindow(window, block)
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
        dropped = range(len(self._plan.deals)) if self._plan.stop_first else (source,)
        for i in dropped:
            lane.state[i, :4] = (DRY, 0, 0, 0)
            lane.windows[i] = None
        self._reweight(lane)

    def _change_weights(self, lane: _Lane, g: int) -> None:
        due = [c for c in self._changes if c.sample <= g]
        later = [c.sample for c in self._changes if c.sample > g]
        lane.weights = due[-1].weights[lane.number]
        lane.change_at = later[0] if later else _NEVER
        self._reweight(lane)

    def _reweight(self, lane: _Lane) -> None:
        lane.mix.reweight(self._plan.active_weights(lane.weights, lane.state))

    def _needed_at(self, lane: _Lane, source: int, now: float, blocks: int) -> float:
        """About the global index at which the source's next window will be opened."""
        share = lane.mix.weights[source] / (1 << 24)
        return now + self._plan.lanes * blocks / max(share, 1e-9) + self._plan.lanes
