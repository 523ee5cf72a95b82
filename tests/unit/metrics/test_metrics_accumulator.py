import math

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.metrics import Accumulator, Mean, MetricSpec, Reducer, Reduction, reduce_values

SPECS = (
    MetricSpec("rows", Reduction.SUM, with_max=True),
    MetricSpec("low", Reduction.MIN, with_max=True),
    MetricSpec("high", Reduction.MAX),
    MetricSpec("loss", Reduction.MEAN, with_max=True),
    MetricSpec("picks/<m>", Reduction.SUM),
)


def test_sums_add_and_extremes_run_and_steps_are_counted() -> None:
    total = Accumulator(SPECS)
    assert total.drain() == {}
    total.add({"rows": 3, "low": 5, "high": 1, "loss": 2.0})
    total.add({})
    total.add({"rows": 4, "low": 7, "high": 9, "loss": Mean(10.0, 3), "picks/text": 1})
    assert total.drain() == {
        "rows": 7, "low": 5, "high": 9, "loss": Mean(12.0, 4), "picks/text": 1, "steps_in_interval": 3,
    }  # fmt: skip
    assert total.drain() == {}
    total.add({})
    assert total.drain() == {"steps_in_interval": 1}


def test_a_spike_between_two_lines_is_not_lost() -> None:
    total = Accumulator(SPECS)
    for value in (1, 1, 50, 1):
        total.add({"high": value})
    assert total.drain()["high"] == 50


@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_is_not_hidden_by_an_extreme(order: tuple[float, float]) -> None:
    total = Accumulator(SPECS)
    for value in order:
        total.add({"low": value, "high": value})
    row = total.drain()
    assert math.isnan(row["low"])
    assert math.isnan(row["high"])
    assert math.isnan(reduce_values(SPECS, [{"low": order[0]}, {"low": order[1]}])["low"])


def test_identities_are_taken_as_absent() -> None:
    assert reduce_values(SPECS, [{"low": math.inf, "high": -math.inf, "loss": Mean(0.0, 0)}, {}]) == {}
    assert Reducer(SPECS).reduce({"low": math.inf, "rows": 0}) == {"rows": 0, "rows_max": 0}


def test_an_empty_rank_biases_nothing() -> None:
    with_empty = reduce_values(SPECS, [{"low": 4, "high": -2, "loss": Mean(6.0, 2), "rows": 1}, {}])
    assert with_empty["low"] == 4
    assert with_empty["high"] == -2
    assert with_empty["loss"] == 3.0
    assert with_empty["rows"] == 1


def test_the_worst_rank_is_the_lowest_of_a_minimum_and_the_highest_of_the_rest() -> None:
    rows = [{"low": 4, "rows": 1, "loss": Mean(9.0, 9)}, {}, {"low": 3, "rows": 7, "loss": Mean(4.0, 1)}]
    assert reduce_values(SPECS, rows) == {
        "low": 3, "low/worst_rank": 2, "rows": 8, "rows_max": 7, "rows/worst_rank": 2,
        "loss": 1.3, "loss_max": 4.0, "loss/worst_rank": 2,
    }  # fmt: skip


def test_counts_are_exact_and_stay_integers_at_any_size() -> None:
    for big in (2**24 + 1, 2**53 + 1, 2**62 + 1):
        result = reduce_values(SPECS, [{"rows": big}] * 4)
        assert result["rows"] == 4 * big
        assert type(result["rows"]) is int
        assert result["rows_max"] == big


def test_one_rank_is_the_identity_with_itself_as_the_worst_rank() -> None:
    local = {"rows": 2**63 - 1, "low": -0.5, "loss": Mean(3.0, 2), "picks/text": np.int64(4), "high": True}
    result = Reducer(SPECS).reduce(local)
    assert result == {
        "rows": 2**63 - 1, "rows_max": 2**63 - 1, "low": -0.5, "loss": 1.5, "loss_max": 1.5, "picks/text": 4, "high": 1
    }  # fmt: skip
    assert {type(v) for v in result.values()} == {int, float}


def test_all_problems_of_a_row_are_told_at_once() -> None:
    row = {"row": 1, "low": "3", "high": Mean(1, 2), "loss": None, "rows": 1}
    for take in (Reducer(SPECS).reduce, Accumulator(SPECS).add):
        with pytest.raises(ConfigError) as caught:
            take(row)
        assert len(caught.value.problems) == 4
        assert "'row' was never declared" in caught.value.problems[0]
        assert "did you mean rows?" in caught.value.problems[0]
        assert "'low' (MIN) needs a number, got '3'" in caught.value.problems[1]
        assert "'loss' (MEAN) needs a number or a Mean" in caught.value.problems[3]


def test_a_step_with_a_problem_changes_nothing() -> None:
    total = Accumulator(SPECS)
    total.add({"rows": 1})
    with pytest.raises(ConfigError):
        total.add({"rows": 5, "unknown": 1})
    assert total.drain() == {"rows": 1, "steps_in_interval": 1}


def test_a_reducer_refuses_a_form_it_does_not_know_and_a_deadline_without_end() -> None:
    with pytest.raises(ConfigError, match="'all_gather' or 'all_reduce', got 'ring'"):
        Reducer(SPECS, collectives="ring")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="finite deadline"):
        Reducer(SPECS, deadline=math.inf)


def test_what_an_accumulator_drains_a_reducer_of_the_same_specs_takes() -> None:
    total = Accumulator(SPECS)
    total.add({"rows": 1})
    assert Reducer(SPECS).reduce(total.drain()) == {"rows": 1, "rows_max": 1, "steps_in_interval": 1}


def test_the_exposed_wait_of_every_rank_is_told_where_there_are_several() -> None:
    specs = [MetricSpec("waits/exposed/seconds", Reduction.SUM, True, "s")]
    rows = [{"waits/exposed/seconds": 0.5}, {}, {"waits/exposed/seconds": 2.0}]
    assert reduce_values(specs, rows)["waits/exposed/seconds/by_rank"] == [0.5, 0.0, 2.0]
    assert "waits/exposed/seconds/by_rank" not in reduce_values(specs, rows[:1])
