"""Metrics of a step, over all environments and for each: `rollout_metrics`.

reward/all/mean, reward/<env>/mean, …      also std, max and min; `all` is why no environment may be called that
solve_all/<env>, solve_none/<env>          shares of groups, each by its own size
filter/<name>                              rollouts that a filter detected
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.metrics import MetricSpec, Reduction, register
from headrace.rollouts.filters import Filtered
from headrace.rollouts.groups import solve_rates
from headrace.rollouts.records import ALL_ENVS, Rollout, rollouts_by_group

_MEASURES = ("reward", "completion_length", "turns", "is_truncated", "error")
register(
    *(
        MetricSpec(f"{name}/<env>/{statistic}", Reduction.MAX if statistic != "min" else Reduction.MIN, help=f"{statistic} of {name} over a step's rollouts")
        for name in _MEASURES
        for statistic in ("mean", "std", "max", "min")
    ),
    MetricSpec("solve_all/<env>", Reduction.MAX, healthy=(0, 1), help="share of groups whose members all have full reward"),
    MetricSpec("solve_none/<env>", Reduction.MAX, healthy=(0, 1), help="share of groups none of whose members has full reward"),
    MetricSpec("filter/<name>", Reduction.SUM, unit="rollouts", help="rollouts that a filter detected"),
    MetricSpec("rollouts/refused/<cause>", Reduction.SUM, unit="rollouts", healthy=(0, 0), help="rollouts that could not become samples"),
    MetricSpec("rollouts/worker_restarts", Reduction.SUM, unit="processes", healthy=(0, 0), help="worker processes that died and were replaced"),
    MetricSpec("rollouts/late", Reduction.SUM, unit="rollouts", healthy=(0, 0), help="rollouts that came after their step had ended, or were not samples by then"),
    MetricSpec("rollouts/split_samples", Reduction.SUM, unit="samples", help="samples beyond a rollout's first: its context did not begin with what came before (a branch, or text that was tokenised again)"),
)  # fmt: skip


def rollout_metrics(rollouts: Sequence[Rollout], filtered: Filtered | None = None) -> dict[str, float]:
    """The metrics of a step's rollouts, filtered ones included."""
    measured = np.empty((len(rollouts), len(_MEASURES)), np.float64)
    for row, r in zip(measured, rollouts, strict=True):
        row[:] = r.reward, r.completion_length, len(r.trajectory), r.is_truncated, r.error is not None
    columns = dict(zip(_MEASURES, np.ascontiguousarray(measured.T), strict=True))
    envs = np.array([r.env_name for r in rollouts])
    groups = rollouts_by_group(rollouts)
    found: dict[str, float] = {}
    for env in (ALL_ENVS, *sorted(set(envs.tolist()))) if len(rollouts) else ():
        chosen = slice(None) if env == ALL_ENVS else envs == env
        for name, column in columns.items():
            values = column[chosen]
            for statistic in ("mean", "std", "max", "min"):
                found[f"{name}/{env}/{statistic}"] = float(getattr(values, statistic)())
        own = {key: [rollouts[at].reward for at in at_] for key, at_ in groups.items() if env in (ALL_ENVS, key[0])}
        found[f"solve_all/{env}"], found[f"solve_none/{env}"] = solve_rates(own)
    return found | {f"filter/{name}": float(count) for name, count in (filtered.counts if filtered else {}).items()}
