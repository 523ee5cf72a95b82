"""Forecast of a text run: its mix is played through with estimated lengths, and nothing is trained.

    plan_run(load_config(Path("run.toml")), steps=1000)        tokens, shares, epochs, repeats and ends of every source

The lanes take their picks by the same quota rule as in a run (`headrace.mix`). The tokens of a source are estimated from a few chunks, and
every lane is taken to have an equal part of them. A run too long to be played pick by pick is played in picks of several blocks
(`Forecast.blocks_a_pick`); then shares are right to within that many blocks a lane.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError
from headrace.loader import LanePlan, TextDataset
from headrace.mix import LaneMix, fixed_point, starting_credits
from headrace.runs.check import Plan, plan_of
from headrace.runs.config.schema import RunConfig
from headrace.runs.job import Job

_VISITS = 1_000_000
"""Sources looked at while picking: about a second of work."""
_EPOCHS_COUNTED = 64
_MAX_STEPS = 1 << 40
BINS = 40
"""Parts of a run for which shares are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceForecast:
    """One source over a run. All numbers of tokens are estimates."""

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
    """A text run, played through."""

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


def plan_run(config: RunConfig, *, steps: int | None = None, ranks: int = 1) -> Forecast:
    """Forecast a run.

    Args:
        config: The run.
        steps: Steps to play; those of the config unless given.
        ranks: Number of ranks that must be able to share the batch; ConfigError otherwise.
    """
    count = config.run.steps if steps is None else steps
    if not 1 <= count <= _MAX_STEPS:
        raise ConfigError(f"--steps must be between 1 and 2**40, got {count}")
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": count})})
    config.check_world_size(ranks)
    data = Job(config).dataset()
    try:
        return _Play(config, plan_of(config, data), data).forecast()
    finally:
        data.close()


@dataclass(slots=True)
class _Lane:
    """Tokens of every source that a lane has left and has delivered."""

    mix: LaneMix
    weights: tuple[float, ...]
    left: list[float | None]
    """None: without end."""
    epoch: list[float]
    """Tokens of the first epoch that belong to the lane."""
    owned: list[bool]
    delivered: list[float]
    picks: int = 0
    last: int = -1
    """The last sample that held something to learn."""


class _Play:
    """Plays the lanes one after the other: no lane depends on another."""

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
        # The part of a small source that belongs to a lane does not fill its last block.
        parts = [t / max(min(data.lanes, d.rows), 1) for t, d in zip(self.tokens, data.deals, strict=True)]
        self.fill = [max(p / max(-(-p // seq_len), 1), 1.0) for p in parts]
        self.changes = [(step * self.size, weights) for step, weights in data.changes_from(0, 0)]
        self.bins = np.zeros((BINS, sources))
        self.repeats: list[int | None] = [None] * sources
        self.dry: list[list[int]] = [[] for _ in range(sources)]

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
            blocks_a_pick=self.grain, warnings=self.sheet.warnings, seconds=time.perf_counter() - self.began,
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
        """Tokens of a source that a lane owns in some epochs: those of its rows, at the mean length."""
        deal, lanes = self.data.deals[source], self.data.lanes
        if deal.rows == 0:
            return 0.0
        # Parts are cut by bytes, to within a row; with few rows some lanes own none, in turn from epoch to epoch.
        if deal.rows >= 2 * lanes or len(epochs) > _EPOCHS_COUNTED:
            rows = deal.rows * len(epochs) / lanes
        else:
            rows = float(sum(deal.lane_rows(lane, e) for e in epochs))
        return self.tokens[source] / deal.rows * rows

    def _is_dry(self, lane: _Lane, source: int) -> bool:
        # As in a run, the rest of a cap is delivered if it is at least half a block.
        rest = lane.left[source]
        return rest is not None and rest <= (self.data.seq_len / 2 if self.plan.max_tokens[source] is not None else 0)

    def _drop(self, lane: _Lane, source: int) -> None:
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
        if whole and before < whole + 1 <= lane.delivered[source]:  # the first token of the next epoch is in this pick
            step = int(g + max(whole - before, 0.0) / tokens * self.grain * self.data.lanes) // self.size + 1
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
