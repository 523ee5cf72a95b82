"""Forecast of a text run: how its mix goes with estimated lengths. Nothing is trained.

    plan_run(load_config(Path("run.toml")), steps=1000)        tokens, shares, epochs, repeats and ends of every source

The tokens of a source are estimated from a few chunks. They flow in the proportion of the weights, as the quota rule of a run has it, until
the weights change or a source runs dry. Lanes reach the end of a source at different steps; the forecast names the step of the average lane.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError
from headrace.loader import TextDataset
from headrace.runs.check import plan_of
from headrace.runs.config.schema import RunConfig
from headrace.runs.job import Job

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
    """The step at which it is read again."""
    dry_at: int | None
    """The step at which all of it is read that may be."""
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
    changes: tuple[tuple[int, tuple[float, ...]], ...]
    """(the first step that has them, weights)."""
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
        return _forecast(config, data)
    finally:
        data.close()


def _rates(weights: np.ndarray, left: np.ndarray, fill: np.ndarray, blocks: int) -> np.ndarray:
    """Tokens of every source a step of so many blocks; zeros if no source with a weight has any left.

    `left` are the tokens of each source that may still be delivered, `fill` those in a block of it.
    """
    active = np.where(left > 0, weights, 0.0)
    if not active.any():
        return active
    share = active / active.sum()
    return share * blocks / (share / fill).sum()


def _forecast(config: RunConfig, data: TextDataset) -> Forecast:
    began = time.perf_counter()
    sheet, plan, steps, size = plan_of(config, data), data.plan(0), config.run.steps, config.loader.global_batch_size
    available = np.array([float(s.tokens) for s in sheet.sources])
    epochs = [math.inf if e is None else e for e in plan.max_epochs]
    caps = [math.inf if cap is None else cap for cap in plan.max_tokens]
    left = np.array([min(n * e, cap) if n else 0.0 for n, e, cap in zip(available, epochs, caps, strict=True)])
    # The part of a small source that belongs to a lane does not fill its last block.
    parts = available / [max(min(data.lanes, deal.rows), 1) for deal in data.deals]
    fill = np.maximum(parts / np.maximum(np.ceil(parts / data.seq_len), 1), 1.0)
    changes = [
        (change.steps_before, data.weights_at(change.steps_before))
        for change in data.mix_changes
        if change.steps_before < steps
    ]
    delivered, bins = np.zeros(len(available)), np.zeros((BINS, len(available)))
    edges = np.linspace(0, steps, BINS + 1)
    repeats_at: list[int | None] = [None] * len(available)
    dry_at: list[int | None] = [None] * len(available)
    now, weights, pending = 0.0, np.array(data.weights), deque(changes)
    while now < steps:
        while pending and pending[0][0] <= now:
            weights = np.array(pending.popleft()[1])
        border = float(pending[0][0] if pending else steps)
        rates = _rates(weights, left, fill, size)
        if not rates.any():
            if not pending:
                break
            now = border
            continue
        flows = rates > 0
        lasts = np.divide(left, rates, out=np.full(len(rates), math.inf), where=flows)
        until = min(border, now + float(lasts.min()))
        before, delivered = delivered, delivered + rates * (until - now)
        overlap = np.clip(np.minimum(edges[1:], until) - np.maximum(edges[:-1], now), 0, None)
        bins += overlap[:, None] * rates
        left -= rates * (until - now)
        ended = flows & (now + lasts <= until)
        left[ended] = 0.0
        for source in np.flatnonzero(flows & (before <= available) & (delivered > available)):
            repeats_at[source] = int(now + (available[source] - before[source]) / rates[source]) + 1
        for source in np.flatnonzero(ended):
            dry_at[source] = math.ceil(until)
        now = until
        if plan.stop_first and ended.any():
            break
    tokens, blocks, last = float(delivered.sum()), float((delivered / fill).sum()), math.ceil(now)
    sums = bins.sum(axis=1, keepdims=True)
    shares = np.divide(bins, sums, out=np.zeros_like(bins), where=sums > 0)
    targets = data.mean_weights(last)
    # fmt: off
    return Forecast(
        config_hash=config.hash, steps=steps, global_batch_size=size, seq_len=data.seq_len, lanes=data.lanes, tokens=round(tokens),
        padding=max(1 - tokens / (blocks * data.seq_len), 0.0) if blocks else 0.0, ends_at=last if now < steps else None,
        changes=tuple((step + 1, new) for step, new in changes), warnings=sheet.warnings, seconds=time.perf_counter() - began,
        sources=tuple(
            SourceForecast(
                name=s.name, rows=s.rows, available=s.tokens, tokens=round(delivered[i]), share=delivered[i] / tokens if tokens else 0.0, target=targets[i],
                epochs=delivered[i] / s.tokens if s.tokens else 0.0, documents=round(delivered[i] / s.tokens * s.rows) if s.tokens else 0,
                repeats_at=repeats_at[i], dry_at=dry_at[i], shares=tuple(shares[:, i].tolist()),
            )
            for i, s in enumerate(sheet.sources)
        ),
    )
    # fmt: on
