"""What do a pool's numbers tell, and how do ranks combine them?

    remaining_min, remaining_max            picks left of the slices in the pool: when the next and the last will run dry
    remaining_fraction_min, _max            the same as parts of each slice: close together while the pool drains evenly
    modalities/<modality>                   slices in the pool
    steps_since_pick_max                    the slice that has waited longest
    exhaust_events                          slices that ran dry since the last drain
    picks/<modality>                        batches drawn since the last drain; the modalities' counts stay flat where these part
    overdue_max                             the longest wait as a multiple of what the slice's share of the picks promises

`remaining_*` and `modalities/*` are those of the pool before the pick took its batch, `steps_since_pick_max` and `overdue_max`
those after it. Counts are summed over ranks: with per_stream every rank has a reader of its own on each slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.metrics import MetricSpec, Reduction, register
from headrace.mix import LanePool

__all__ = ["PoolMetrics", "stream_specs", "without_states"]

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


def stream_specs(modalities: Sequence[str]) -> tuple[MetricSpec, ...]:
    """The exact keys of a dataset, fixed from its manifest: ranks with another one are refused, not summed."""
    return (
        *_SCALARS,
        *(
            MetricSpec(
                family.key.replace("<modality>", m), family.reduction, family.with_max, family.unit, None, family.help
            )
            for family in _FAMILIES
            for m in modalities
        ),
    )


class PoolMetrics:
    """Reads the pools of a rank's lanes: the last snapshot of each, and what was added since the last drain."""

    def __init__(self, modalities: Sequence[str]) -> None:
        self._modalities = [f"{_ACTIVE}/modalities/{m}" for m in modalities]
        self._picks = [f"stream_mixing/picks/{m}" for m in modalities]
        self._seen: dict[int, tuple[int, int, list[int]]] = {}

    def forget(self, lanes: Sequence[LanePool]) -> None:
        """Start counting here: what happened before belongs to another run, or to nobody."""
        self._seen = {pool.lane: (pool.step, pool.exhausted, list(pool.picks_by_kind)) for pool in lanes}

    def drain(self, lanes: Sequence[LanePool]) -> dict[str, float]:
        """{} if nothing was picked since the last drain."""
        shots = [pool.snapshot for pool in lanes if pool.snapshot is not None]
        exhausted = picked = 0
        picks = [0] * len(self._picks)
        for pool in lanes:
            step, dry, kinds = self._seen.get(pool.lane, (0, 0, [0] * len(picks)))
            if pool.step == step:
                continue
            picked += 1
            exhausted += pool.exhausted - dry
            for i, count in enumerate(pool.picks_by_kind):
                picks[i] += count - kinds[i]
            self._seen[pool.lane] = (pool.step, pool.exhausted, pool.picks_by_kind.copy())
        if not picked or not shots:
            return {}
        if len(shots) == 1:
            shot = shots[0]
            remaining_min, remaining_max, fraction_min, fraction_max, since, overdue, kinds = shot
        else:
            columns = list(zip(*shots, strict=True))
            remaining_min, fraction_min = min(columns[0]), min(columns[2])
            remaining_max, fraction_max, since, overdue = (max(columns[i]) for i in (1, 3, 4, 5))
            kinds = [sum(counts) for counts in zip(*columns[6], strict=True)]
        values: dict[str, float] = {
            REMAINING_MIN: remaining_min,
            REMAINING_MAX: remaining_max,
            FRACTION_MIN: fraction_min,
            FRACTION_MAX: fraction_max,
            SINCE_MAX: since,
            OVERDUE_MAX: overdue,
            EXHAUSTED: exhausted,
        }
        values.update(zip(self._modalities, kinds, strict=True))
        values.update(zip(self._picks, picks, strict=True))
        return values
