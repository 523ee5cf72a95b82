"""What a lane delivers next, and where it stands.

A lane is one of L fixed virtual consumers: sample g belongs to lane g mod L, for any number of ranks. It knows nothing of
other lanes, so ranks need not talk. Its whole state is one `Entry` and one credit per source:

    lane 5   prose  epoch 0, row 1,204, block 17 of its window, 5.1 M tokens delivered     credit +812
             code   epoch 2, row    88, block  3 of its window, 2.2 M tokens delivered     credit −812

`take` decides by the quota rule, opens windows as it goes (the pool has usually made them by then) and returns the
block. A source that has run dry leaves the lane, and its share goes to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.loader.pool import WindowPool
from headrace.loader.windows import Window, WindowStart
from headrace.mix import Deal, LaneMix, fixed_point, starting_credits

__all__ = ["DRY", "Entry", "Lane", "LanePlan", "Sample"]

DRY = -1
"""The epoch of an entry whose source has nothing more for this lane."""


class Entry(NamedTuple):
    """Where a lane stands in one source: the open window's start, the next block in it, and tokens delivered so far."""

    epoch: int
    position: int
    offset: int
    block: int
    tokens: int


class Sample(NamedTuple):
    """What a lane delivered, and its state right after."""

    lane: int
    source: int
    """-1: nothing left, a block without anything to learn."""
    window: Window | None
    block: int
    tokens: int
    entries: tuple[Entry, ...]
    credits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
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

    def start(self, lane: int) -> tuple[tuple[Entry, ...], tuple[int, ...]]:
        """The state of a lane before its first sample."""
        entries = tuple(
            Entry(self.first_epoch(i), 0, 0, 0, 0) if deal.rows else Entry(DRY, 0, 0, 0, 0)
            for i, deal in enumerate(self.deals)
        )
        if self.stop_first and any(e.epoch == DRY and w > 0 for e, w in zip(entries, self.weights[lane], strict=True)):
            entries = tuple(Entry(DRY, 0, 0, 0, 0) for _ in entries)
        weights = self.active_weights(lane, entries)
        return entries, tuple(
            starting_credits(weights, block=self.seq_len, lane=lane, lanes=self.lanes, seed=self.seed)
        )

    def active_weights(self, lane: int, entries: Sequence[Entry]) -> tuple[int, ...]:
        """Fixed-point weights of the sources that have something left."""
        return fixed_point([w if e.epoch != DRY else 0.0 for w, e in zip(self.weights[lane], entries, strict=True)])

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


class Lane:
    """One lane in motion. Owned by one thread."""

    def __init__(
        self, index: int, plan: LanePlan, pool: WindowPool, entries: Sequence[Entry], credits: Sequence[int]
    ) -> None:
        self.index = index
        self._plan = plan
        self._pool = pool
        self._entries = list(entries)
        self._windows: list[Window | None] = [None] * len(plan.deals)
        weights = plan.active_weights(index, entries)
        self._mix = LaneMix(weights, credits, block=plan.seq_len)
        self._mix.reweight(weights)  # changes nothing unless weights were changed at a resume
        self._caps = [plan.token_cap(i, index) for i in range(len(plan.deals))]

    def announce(self, now: float) -> None:
        """Ask the pool for the windows this lane will open, the one of its very next sample first."""
        following = self._mix.next_source()
        for i, entry in enumerate(self._entries):
            if entry.epoch == DRY or self._mix.weights[i] == 0 or self._windows[i] is not None:
                continue
            start = self._settle(i, WindowStart(entry.epoch, entry.position, entry.offset))
            if start is not None:
                self._pool.request((i, self.index, start), now if i == following else self._needed_at(i, now, 0))

    def has_more(self, now: float) -> bool:
        """Whether the lane has another block with something to learn."""
        return self._next(now) is not None

    def take(self, now: float) -> Sample:
        """The lane's next sample. `now` is its global index: it orders the requests for windows."""
        found = self._next(now)
        if found is None:
            return Sample(self.index, -1, None, 0, 0, tuple(self._entries), tuple(self._mix.credits))
        source, window = found
        entry = self._entries[source]
        tokens = int(window.blocks.real[entry.block])
        self._mix.deliver(source, tokens)
        if entry.block + 1 < len(window.blocks):
            self._entries[source] = entry._replace(block=entry.block + 1, tokens=entry.tokens + tokens)
        else:  # a resume from here need not make the old window again to learn where it ended
            self._entries[source] = Entry(*window.end, 0, entry.tokens + tokens)
            self._windows[source] = None
        return Sample(self.index, source, window, entry.block, tokens, tuple(self._entries), tuple(self._mix.credits))

    def _next(self, now: float) -> tuple[int, Window] | None:
        while True:
            source = self._mix.next_source()
            if source < 0:
                return None
            window = self._open(source, now)
            if window is not None:
                return source, window
            self._drop(source)

    def _open(self, source: int, now: float) -> Window | None:
        """A window of the source with a block left in it, or None when the source is dry."""
        entry = self._entries[source]
        cap = self._caps[source]
        if cap is not None and 2 * (cap - entry.tokens) < self._plan.seq_len:
            return None
        window = self._windows[source]
        barren = 0
        while window is None or entry.block >= len(window.blocks):
            start = WindowStart(entry.epoch, entry.position, entry.offset) if window is None else window.end
            block = entry.block if window is None else 0
            settled = self._settle(source, start)
            if settled is None:
                return None
            if settled != start:
                block = 0
            window = self._pool.take((source, self.index, settled), now)
            entry = Entry(*settled, block, entry.tokens)
            if len(window.blocks) == 0:
                barren += max(window.end.position - settled.position, 1)
                if barren > 2 * self._plan.deals[source].rows:  # a source of empty documents must not spin for ever
                    return None
            following = self._settle(source, window.end)
            if following is not None:
                self._pool.request(
                    (source, self.index, following), self._needed_at(source, now, len(window.blocks) - block)
                )
        self._windows[source] = window
        self._entries[source] = entry
        return window

    def _settle(self, source: int, start: WindowStart) -> WindowStart | None:
        """A start past the end of the lane's part moves to the next epoch in which it owns rows; None: no such epoch."""
        deal, limit = self._plan.deals[source], self._plan.epoch_limit(source)
        epoch = start.epoch
        while start.position >= deal.lane_rows(self.index, epoch):
            epoch += 1
            if limit is not None and epoch >= limit:
                return None
            start = WindowStart(epoch, 0, 0)
        return start

    def _drop(self, source: int) -> None:
        dropped = range(len(self._entries)) if self._plan.stop_first else (source,)
        for i in dropped:
            self._entries[i] = Entry(DRY, 0, 0, 0, self._entries[i].tokens)
            self._windows[i] = None
        self._mix.reweight(self._plan.active_weights(self.index, self._entries))

    def _needed_at(self, source: int, now: float, blocks: int) -> float:
        """About the global index at which the source's next window will be opened."""
        share = self._mix.weights[source] / (1 << 24)
        return now + self._plan.lanes * blocks / max(share, 1e-9) + self._plan.lanes
