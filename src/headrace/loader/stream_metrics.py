"""Metrics of a stream pool, and how ranks combine them.

    remaining_min, remaining_max            picks left of the slices in the pool: when the next and the last will run dry
    remaining_fraction_min, _max            the same as parts of each slice: close together while the pool drains evenly
    modalities/<modality>                   slices in the pool
    steps_since_pick_max                    the slice that has waited longest
    exhaust_events                          slices that ran dry since the last drain
    picks/<modality>                        batches drawn since the last drain; the modalities' counts stay flat where these part
    overdue_max                             the longest wait as a multiple of what the slice's share of the picks promises

`remaining_*` and `modalities/*` are those of the pool before the pick took its batch, `steps_since_pick_max` and `overdue_max`
those after it. Counts are summed over ranks. With per_stream all ranks share every draw and drain the same counts; rank 0 alone adds
them to the sum, so a draw counts once.

    extra = extra_metrics(data, world_size=world, device=device)         in a training loop, once a step
    processor.log(step, loss, extra_metrics=extra)

`extra_metrics` is the one place where a trainer asks. A dataset that has step metrics (StreamMixingDataset, bare or inside a DataLoader) is drained
and its ranks are put together; anything else has none, and gets no collective either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.metrics import MetricSpec, Reduction, register
from headrace.mix import MixState, Snapshot

_ACTIVE = "stream_mixing/active"
REMAINING_MIN = f"{_ACTIVE}/remaining_min"
REMAINING_MAX = f"{_ACTIVE}/remaining_max"
FRACTION_MIN = f"{_ACTIVE}/remaining_fraction_min"
FRACTION_MAX = f"{_ACTIVE}/remaining_fraction_max"
SINCE_MAX = f"{_ACTIVE}/steps_since_pick_max"
OVERDUE_MAX = f"{_ACTIVE}/overdue_max"
EXHAUSTED = "stream_mixing/refill/exhaust_events"

_SCALARS = (
    MetricSpec(REMAINING_MIN, Reduction.MIN, True, "picks", None, "picks left of the slice that runs dry next; near 0 for many steps: it is stuck"),
    MetricSpec(REMAINING_MAX, Reduction.MAX, True, "picks", None, "picks left of the slice that runs dry last"),
    MetricSpec(FRACTION_MIN, Reduction.MIN, True, "", (0, 1), "what is left of the slice that is read furthest; close to _max while the pool drains evenly"),
    MetricSpec(FRACTION_MAX, Reduction.MAX, True, "", (0, 1), "what is left of the slice that is read least; above _min by .3 for long: draining is uneven"),
    MetricSpec(SINCE_MAX, Reduction.MAX, True, "steps", None, "steps since the pick of the slice that has waited longest; about as many as there are slices"),
    MetricSpec(OVERDUE_MAX, Reduction.MAX, True, "", (0, 3), "the longest wait, as a multiple of what the slice's share of the picks promises"),
    MetricSpec(EXHAUSTED, Reduction.SUM, False, "slices", None, "slices that ran dry and were replaced; a spike is churn, 0 for long is an epoch that drags"),
)  # fmt: skip
_FAMILIES = (
    MetricSpec(f"{_ACTIVE}/modalities/<modality>", Reduction.SUM, False, "slices", None, "slices of this modality in the pools; 0: it is starved"),
    MetricSpec("stream_mixing/picks/<modality>", Reduction.SUM, False, "batches", None, "batches drawn from this modality"),
)  # fmt: skip
register(*_SCALARS, *_FAMILIES)


def without_states(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """(what may be added up over the steps of an interval, what may not): how many slices of a modality are in the pool is
    summed over ranks, but over steps the last count stands."""
    states = {key: value for key, value in values.items() if key.startswith(f"{_ACTIVE}/modalities/")}
    return {key: value for key, value in values.items() if key not in states}, states


def without_counts(values: Mapping[str, float]) -> dict[str, float]:
    """The values that are not summed over ranks: what a rank of per_stream adds to those of rank 0, which counts the draws of all."""
    counts = (EXHAUSTED, f"{_ACTIVE}/modalities/", "stream_mixing/picks/")
    return {key: value for key, value in values.items() if not key.startswith(counts)}


def stream_specs(modalities: Sequence[str]) -> tuple[MetricSpec, ...]:
    """The exact keys of a dataset, fixed from its manifest: ranks with another one are refused, not summed."""
    return (*_SCALARS, *for_modalities(_FAMILIES, modalities))


def for_modalities(families: Sequence[MetricSpec], modalities: Sequence[str]) -> list[MetricSpec]:
    """The members of families whose keys have a `<modality>`."""
    return [replace(family, key=family.key.replace("<modality>", m)) for family in families for m in modalities]


class PoolMetrics:
    """The pools of a rank's lanes at their last draws, and what was counted since the last drain."""

    def __init__(self, modalities: Sequence[str]) -> None:
        # In the order of a Snapshot's fields, then what is counted.
        self._keys = (
            REMAINING_MIN, REMAINING_MAX, FRACTION_MIN, FRACTION_MAX, SINCE_MAX, OVERDUE_MAX,
            *(f"{_ACTIVE}/modalities/{m}" for m in modalities), EXHAUSTED, *(f"stream_mixing/picks/{m}" for m in modalities),
        )  # fmt: skip
        self._exhausted = 0
        self._picks = [0] * len(modalities)

    def drain(self, state: MixState) -> dict[str, float]:
        """{} if no draw was delivered since the last drain."""
        picks = [now - before for now, before in zip(state.picks_by_kind, self._picks, strict=True)]
        if not any(picks):
            return {}
        counts = [state.exhausted - self._exhausted, *picks]
        self._exhausted, self._picks = state.exhausted, state.picks_by_kind.copy()
        shots = list(state.snapshots().values())
        shot = shots[0]
        if len(shots) > 1:
            columns = list(zip(*shots, strict=True))
            kinds = tuple(map(sum, zip(*columns[6], strict=True)))
            shot = Snapshot(
                min(columns[0]), max(columns[1]), min(columns[2]), *(max(columns[i]) for i in (3, 4, 5)), kinds
            )
        return dict(zip(self._keys, (*shot[:6], *shot.kinds, *counts), strict=True))


def _source(data: Any) -> Any:
    """The dataset itself, or the one inside a DataLoader."""
    return data if hasattr(data, "drain_step_metrics") else getattr(data, "dataset", None)


def drained_metrics(data: Any) -> dict[str, float]:
    """This rank's step metrics, drained; {} for data that has none."""
    source = _source(data)
    return source.drain_step_metrics() if hasattr(source, "drain_step_metrics") else {}


def extra_metrics(data: Any, *, world_size: int = 1, device: Any = None) -> dict[str, float]:
    """The step metrics of all ranks: a collective for data that has them, {} for other data.

    `data` is a loader or dataset, `world_size` the number of ranks, `device` where the values are reduced (the CPU unless given).
    """
    source = _source(data)
    if not (hasattr(source, "drain_step_metrics") and hasattr(source, "aggregate_step_metrics")):
        return {}
    return source.aggregate_step_metrics(source.drain_step_metrics(), world_size, device)
