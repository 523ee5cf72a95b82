"""Means of a training loop's own numbers over all ranks, without a declaration.

    reduce_loss_metrics({"loss": 2.5, "ledger/evictions/lru": 3}, counts={"loss": tokens}, sum_keys={"ledger/evictions/lru"})

    loss                        the mean over ranks; with a count the mean over everything counted
    ledger/evictions/lru        the sum over ranks
    ledger/evictions/lru_max    the worst rank

One packed all_gather a call, as the Reducer has it: any rank may leave a key out, and is then not part of its mean.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.metrics.reducer import Mean, Reducer
from headrace.metrics.spec import MetricSpec, Number, Reduction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Families, so that a key may be new at any step and on one rank only. A marker stands for one part of a key: '/' is written as '-s'.
_SPECS = (MetricSpec("mean/<key>", Reduction.MEAN), MetricSpec("sum/<key>", Reduction.SUM, with_max=True))


def reduce_loss_metrics(
    metrics: Mapping[str, Number],
    *,
    counts: Mapping[str, Number] | None = None,
    sum_keys: Collection[str] | None = None,
    group: ProcessGroup | None = None,
    deadline: float = 300.0,
    step: int | None = None,
) -> dict[str, Number]:
    """The metrics of all ranks as one dict. Collective, unless there is one rank.

    A key of `sum_keys` gives `<key>`, summed, and `<key>_max`, the largest of a rank. Any other is averaged: each rank alike, or by
    `counts[key]`, which a rank that has nothing sets to 0. Ranks that bring a different `step` are refused. `group`: the process group, the
    whole world unless given; `deadline`: seconds that the first call allows each reduction.
    """
    summed, weights = sum_keys or (), counts or {}
    both = sorted(key for key in weights if key in summed)
    if both:
        raise ConfigError(f"{', '.join(both)} cannot be averaged by a count and summed as well; name each once")
    row: dict[str, Any] = {}
    for key, value in metrics.items():
        if key in summed:
            row[f"sum/{_one_part(key)}"] = value
        else:
            count = weights.get(key, 1)
            row[f"mean/{_one_part(key)}"] = Mean(value * count, count)
    reduced = _reducer(group, deadline).reduce(row, step=step)
    return {_as_given(key): value for key, value in reduced.items() if not key.endswith("/worst_rank")}


def _one_part(key: str) -> str:
    return key.replace("-", "-d").replace("/", "-s")


def _as_given(key: str) -> str:
    return key.partition("/")[2].replace("-s", "/").replace("-d", "-")


_reducers: dict[Any, Reducer] = {}


def _reducer(group: ProcessGroup | None, deadline: float) -> Reducer:
    """The reducer of this group, whose layout is agreed on once."""
    if group is None and "torch" in sys.modules:
        import torch.distributed as dist

        group = dist.group.WORLD if dist.is_available() else None
    if group not in _reducers:
        _reducers.clear()  # of groups that ended; one that goes on agrees again, as all its ranks do
        _reducers[group] = Reducer(_SPECS, group, deadline=deadline)
    return _reducers[group]
