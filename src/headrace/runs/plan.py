"""What would a run deliver, step by step? The mix is played through with estimated lengths; nothing is trained.

    plan_run(load_config(Path("run.toml")), steps=1000)        tokens, shares, epochs, repeats and ends of every source

The lanes take their picks by the same quota rule as in a run (`headrace.mix`), from supplies of the size that a few chunks of
each source let expect: no more than those are tokenised. A source is dealt to the lanes by bytes; how far their parts differ
all the same, and so how many blocks have nothing to learn while the last lanes finish, is judged from how much the
documents of those chunks differ. A run too long to be played pick by pick is played in picks of several blocks, which is said; then shares are
right to within that many blocks a lane.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.loader import LanePlan, TextDataset
from headrace.mix import LaneMix, fixed_point, starting_credits
from headrace.order import Permutation, key
from headrace.runs.check import Plan, ends_with, plan_of
from headrace.runs.config.schema import RunConfig
from headrace.runs.job import Job

__all__ = ["Forecast", "SourceForecast", "plan_run"]

_VISITS = 1_000_000
"""Sources looked at while picking: about a second of work."""
_EPOCHS_COUNTED = 64
_SAMPLED_CHUNKS = 3
_MAX_STEPS = 1 << 40
BINS = 40
"""Parts of the run whose shares are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceForecast:
    """One source over the run. All numbers of tokens are estimates."""

    name: str
    rows: int
    available: int
    """Tokens in one epoch."""
    tokens: int
    """Tokens delivered."""
    share: float
    target: float
    """Its weight, averaged over the steps if it changes."""
    epochs: float
    documents: int
    repeats_at: int | None
    """The step at which a lane first reads it again."""
    dry_at: int | None
    """The step at which the last lane has read all of it that it may."""
    shares: tuple[float, ...]
    """Share of the tokens over the run, in equal parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A run, played through on paper."""

    config_hash: str
    steps: int
    global_batch_size: int
    seq_len: int
    lanes: int
    tokens: int
    padding: float
    ends_at: int | None
    """The last step, if the data ends before the steps do."""
    fillers: int
    """Blocks with nothing to learn, while some lanes are dry and others are not."""
    changes: tuple[tuple[int, tuple[float, ...]], ...]
    """(the first step that has them, weights)."""
    blocks_a_pick: int
    sources: tuple[SourceForecast, ...]
    warnings: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_run(config: RunConfig, *, steps: int | None = None, ranks: int = 1) -> Forecast:
    """Play a run of `steps` steps (default: those of the config) through on paper."""
    count = config.run.steps if steps is None else steps
    if not 1 <= count <= _MAX_STEPS:
        raise ConfigError(f"--steps must be between 1 and 2**40, got {count}")
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": count})})
    config.check_world_size(ranks)
    data = Job(config).dataset()
    try:
        return _Play(config, plan_of(config, data, note_end=False), data).forecast()
    finally:
        data.close()


@dataclass(slots=True)
class _Lane:
    """What a lane has left and has delivered, per source, in tokens."""

    mix: LaneMix
    weights: tuple[float, ...]
    left: list[float | None]
    """None: without end."""
    epoch: list[float]
    """What it owns of the first epoch."""
    owned: list[bool]
    delivered: list[float]
    picks: int = 0
    last: int = -1
    """The last sample that held something to learn."""


class _Play:
    """All lanes in turn: no lane depends on another lane."""

    def __init__(self, config: RunConfig, sheet: Plan, data: TextDataset) -> None:
        self.began = time.perf_counter()
        self.config, self.sheet, self.data = config, sheet, data
        self.size = config.loader.global_batch_size
        self.total = config.run.steps * self.size
        self.plan: LanePlan = data.plan(0)
        sources = len(data.sources)
        self.grain = max(-(-self.total * sources // _VISITS), 1)
        self.tokens = [s.tokens for s in sheet.sources]
        seq_len = data.seq_len
        # What a lane has of a small source does not fill its last block.
        parts = [t / max(min(data.lanes, d.rows), 1) for t, d in zip(self.tokens, data.deals, strict=True)]
        self.fill = [max(p / max(-(-p // seq_len), 1), 1.0) for p in parts]
        self.spread = [_spread(data, i) for i in range(sources)]
        orders = [Permutation(data.lanes, key(f"plan.luck/{name}", seed=data.seed)) for name in data.names]
        self.luck = [[NormalDist().inv_cdf((o[lane] + 0.5) / data.lanes) for lane in range(data.lanes)] for o in orders]
        self.changes = [(step * self.size, weights) for step, weights in data.changes_from(0, 0)]
        self.bins = np.zeros((BINS, sources))
        self.repeats: list[int | None] = [None] * sources
        self.dry: list[list[int]] = [[] for _ in range(sources)]
        self.stopped_by: Counter[int] = Counter()
        """How many lanes each source has ended, with exhausted = "stop_first"."""

    def forecast(self) -> Forecast:
        lanes = [self._played(lane) for lane in range(min(self.data.lanes, self.total))]
        delivered: list[float] = np.sum([lane.delivered for lane in lanes], axis=0).tolist()
        end = -(-(max(lane.last for lane in lanes) + 1) // self.size) * self.size
        ended = (
            end
            if end < self.total and all(lane.last + self.grain * self.data.lanes < self.total for lane in lanes)
            else None
        )
        within = self.total if ended is None else ended
        blocks = sum(min(lane.picks * self.grain, -(-(within - i) // self.data.lanes)) for i, lane in enumerate(lanes))
        tokens = sum(delivered)
        owners = [sum(lane.owned[i] for lane in lanes) for i in range(len(self.tokens))]
        steps = within // self.size
        # fmt: off
        return Forecast(
            config_hash=self.config.hash, steps=self.config.run.steps, global_batch_size=self.size, seq_len=self.data.seq_len,
            lanes=self.data.lanes, tokens=round(tokens), padding=max(1 - tokens / (blocks * self.data.seq_len), 0.0) if blocks else 0.0,
            ends_at=None if ended is None else ended // self.size, fillers=max(within - blocks, 0), changes=self._weights_over_time(),
            blocks_a_pick=self.grain, warnings=(*self.sheet.warnings, *self._end_note(ended)), seconds=time.perf_counter() - self.began,
            sources=tuple(
                SourceForecast(
                    name=s.name, rows=s.rows, available=s.tokens, tokens=round(delivered[i]), share=delivered[i] / tokens if tokens else 0.0,
                    target=self._target(i, steps), epochs=delivered[i] / s.tokens if s.tokens else 0.0,
                    documents=round(delivered[i] / s.tokens * s.rows) if s.tokens else 0, repeats_at=self.repeats[i],
                    dry_at=max(self.dry[i]) if self.dry[i] and len(self.dry[i]) >= owners[i] else None, shares=self._shares(i),
                )
                for i, s in enumerate(self.sheet.sources)
            ),
        )
        # fmt: on

    def _end_note(self, ended: int | None) -> list[str]:
        if ended is None or not self.stopped_by:
            return []
        source = self.stopped_by.most_common(1)[0][0]
        return [ends_with(self.sheet.sources[source].name, ended // self.size)]

    def _played(self, index: int) -> _Lane:
        lane = self._start(index)
        pending = list(self.changes)
        stride = self.data.lanes * self.grain
        for g in range(index, self.total, stride):
            due = None
            while pending and pending[0][0] <= g:
                due = pending.pop(0)[1]
            if due is not None:
                lane.weights = due[index]
                self._reweigh(lane)
            source = lane.mix.next_source()
            while source >= 0 and self._is_dry(lane, source):
                self._drop(lane, source)
                source = lane.mix.next_source()
            if source < 0:
                if not pending:
                    break
                continue
            self._deliver(lane, source, g)
        return lane

    def _start(self, index: int) -> _Lane:
        plan, sources = self.plan, range(len(self.tokens))
        epoch = [self._part(i, index, range(1)) for i in sources]
        left: list[float | None] = []
        for i in sources:
            epochs, cap = plan.max_epochs[i], plan.token_cap(i, index)
            supply = None if epochs is None else self._part(i, index, range(epochs))
            if self.tokens[i] == 0:
                supply = 0.0
            left.append(supply if cap is None else min(float(cap), supply if supply is not None else float(cap)))
        weights = plan.weights[index]
        fixed = fixed_point([w if rest != 0 else 0.0 for w, rest in zip(weights, left, strict=True)])
        block = self.data.seq_len * self.grain
        credits = starting_credits(fixed, block=block, lane=index, lanes=self.data.lanes, seed=self.data.seed)
        return _Lane(
            LaneMix(fixed, credits, block=block), weights, left, epoch, [r != 0 for r in left], [0.0] * len(left)
        )

    def _part(self, source: int, lane: int, epochs: range) -> float:
        """Tokens of a source that a lane owns in some epochs."""
        deal, lanes = self.data.deals[source], self.data.lanes
        if deal.rows == 0:
            return 0.0
        # Parts are cut by bytes, to within a row; with few rows some lanes own none, in turn from epoch to epoch.
        if deal.rows >= 2 * lanes or len(epochs) > _EPOCHS_COUNTED:
            rows = deal.rows * len(epochs) / lanes
        else:
            rows = float(sum(deal.lane_rows(lane, e) for e in epochs))
        luck = 1 + self.spread[source] * self.luck[source][lane] / math.sqrt(rows) if rows else 0.0
        return self.tokens[source] / deal.rows * rows * max(luck, 0.0)

    def _is_dry(self, lane: _Lane, source: int) -> bool:
        # As in a run, what is left of a cap is delivered if it is at least half a block.
        rest = lane.left[source]
        return rest is not None and rest <= (self.data.seq_len / 2 if self.plan.max_tokens[source] is not None else 0)

    def _drop(self, lane: _Lane, source: int) -> None:
        self.stopped_by[source] += self.plan.stop_first
        for i in range(len(lane.left)) if self.plan.stop_first else (source,):
            lane.left[i] = 0.0
        self._reweigh(lane)

    def _reweigh(self, lane: _Lane) -> None:
        lane.mix.reweight(fixed_point([w if r != 0 else 0.0 for w, r in zip(lane.weights, lane.left, strict=True)]))

    def _deliver(self, lane: _Lane, source: int, g: int) -> None:
        rest, tokens = lane.left[source], self.fill[source] * self.grain
        if rest is not None:
            tokens = min(tokens, rest)
            lane.left[source] = rest - tokens if rest - tokens >= 1 else 0.0
        lane.mix.deliver(source, max(round(tokens), 1))
        lane.delivered[source] += tokens
        lane.picks += 1
        lane.last = min(g + (self.grain - 1) * self.data.lanes, self.total - 1)
        self.bins[g * BINS // self.total, source] += tokens
        if self._is_dry(lane, source):
            self.dry[source].append(g // self.size + 1)
        before, whole = lane.delivered[source] - tokens, lane.epoch[source]
        if before <= whole < lane.delivered[source] - 1 and whole:
            step = int(g + (whole - before) / tokens * self.grain * self.data.lanes) // self.size + 1
            earliest = self.repeats[source]
            self.repeats[source] = step if earliest is None else min(earliest, step)

    def _shares(self, source: int) -> tuple[float, ...]:
        sums = self.bins.sum(axis=1)
        return tuple(float(b) for b in np.divide(self.bins[:, source], sums, out=np.zeros(BINS), where=sums > 0))

    def _weights_over_time(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        steps = (g // self.size for g, _ in self.changes if g < self.total)
        return tuple((step + 1, self.data.weights_at(step)) for step in steps)

    def _target(self, source: int, steps: int) -> float:
        """The weight that a source has on average over the steps."""
        borders = [0, *(min(step - 1, steps) for step, _ in self._weights_over_time()), steps]
        weights: Sequence[tuple[float, ...]] = [self.data.weights, *(w for _, w in self._weights_over_time())]
        if steps == 0:
            return weights[0][source]
        return sum((b - a) * w[source] for a, b, w in zip(borders, borders[1:], weights, strict=False)) / steps


def _spread(data: TextDataset, source: int) -> float:
    """How much the documents within a chunk differ: standard deviation over mean of their lengths, in a few chunks.

    Differences between chunks do not count, because lanes are cut by the chunks' bytes.
    """
    filled = np.flatnonzero(data.deals[source].chunk_rows)
    if not filled.size:
        return 0.0
    chunks = filled[np.unique(np.linspace(0, filled.size - 1, _SAMPLED_CHUNKS).astype(np.int64))].tolist()
    read = [data.chunks.texts(source, data.sources[source], chunk) for chunk in chunks]
    lengths = [np.array([len(t) if t else 0 for t in texts], np.float64) for texts in read]
    mean = float(np.concatenate(lengths).mean())
    inside = np.concatenate([x - x.mean() for x in lengths])
    return float(inside.std()) / mean if mean else 0.0
