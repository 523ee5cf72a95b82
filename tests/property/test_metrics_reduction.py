"""Accumulating over steps and reducing over ranks is one reduction of everything, however it is split."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.metrics import Accumulator, Histogram, Mean, MetricSpec, Reduction, reduce_values

SPECS = (
    MetricSpec("sum", Reduction.SUM, with_max=True),
    MetricSpec("min", Reduction.MIN, with_max=True),
    MetricSpec("max", Reduction.MAX, with_max=True),
    MetricSpec("mean", Reduction.MEAN),
    MetricSpec("by/<name>", Reduction.SUM),
)
counts = st.integers(-(2**50), 2**50)
values = st.one_of(counts, st.floats(-1e6, 1e6))
rows = st.fixed_dictionaries(
    {},
    optional={
        "sum": counts,
        "min": values,
        "max": values,
        "mean": st.one_of(counts, st.builds(Mean, counts, st.integers(0, 9))),
        "by/a": counts,
        "by/b": counts,
    },
)


def everything(observations: list[dict]) -> dict:
    """The same by hand, over one flat list of what was observed anywhere, at any time."""
    found: dict = {}
    for key in ("sum", "by/a", "by/b"):
        if any(key in o for o in observations):
            found[key] = sum(o[key] for o in observations if key in o)
    for key, best in (("min", min), ("max", max)):
        if any(key in o for o in observations):
            found[key] = best(o[key] for o in observations if key in o)
    means = [o["mean"] if isinstance(o["mean"], Mean) else Mean(o["mean"], 1) for o in observations if "mean" in o]
    means = [m for m in means if m.weight]
    if means:
        found["mean"] = sum(m.total for m in means) / sum(m.weight for m in means)
    return found


@settings(deadline=None)
@given(ranks=st.lists(st.lists(rows, max_size=4), min_size=1, max_size=5))
def test_accumulating_and_reducing_equals_reducing_everything_for_any_split(ranks: list[list[dict]]) -> None:
    drained = []
    for steps in ranks:
        total = Accumulator(SPECS)
        for row in steps:
            total.add(row)
        drained.append(total.drain())
    result = reduce_values(SPECS, drained)
    expected = everything([row for steps in ranks for row in steps])
    plain = {k: v for k, v in result.items() if not k.endswith(("_max", "worst_rank", "steps_in_interval"))}
    assert plain.keys() == expected.keys()
    for key, value in plain.items():
        # a minimum over ints and floats travels as float64, which holds every count below 2^53 exactly
        assert value == expected[key], key
    if any(ranks):
        assert result["steps_in_interval"] == max(map(len, ranks))


@settings(deadline=None)
@given(ranks=st.lists(rows, min_size=1, max_size=6), data=st.data())
def test_the_order_of_ranks_changes_nothing_but_their_names(ranks: list[dict], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(ranks))
    a, b = reduce_values(SPECS, ranks), reduce_values(SPECS, shuffled)
    assert {k: v for k, v in a.items() if "worst" not in k} == {k: v for k, v in b.items() if "worst" not in k}
    for key in ("sum", "min", "max"):
        if key in a:
            extreme = a["sum_max"] if key == "sum" else a[key]
            assert ranks[a[f"{key}/worst_rank"]][key] == extreme
            assert shuffled[b[f"{key}/worst_rank"]][key] == extreme


durations = st.floats(1e-6, 3600.0)


@settings(deadline=None)
@given(observed=st.lists(durations, min_size=1, max_size=200), cut=st.integers(0, 200))
def test_every_percentile_is_within_its_error(observed: list[float], cut: int) -> None:
    histogram = Histogram("x")
    histogram.record_many(observed[:cut])
    histogram.record_many(observed[cut:])
    assert histogram.count == len(observed)
    found = histogram.drain()
    for q in (50, 99):
        rank = max(1, math.ceil(q * len(observed) / 100 - 1e-9))
        assert found[f"x/p{q}"] == pytest.approx(sorted(observed)[rank - 1], rel=0.02 + 1e-9)
    assert found["x/max"] == max(observed)
