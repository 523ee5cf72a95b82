import math
import threading

import numpy as np
import pytest

from headrace.metrics import Histogram, Metered, Reduction


def test_a_histogram_drains_to_percentiles_and_starts_again() -> None:
    h = Histogram("loop/lag")
    assert h.drain() == {}
    h.record_many([0.001] * 98 + [0.5, 2.0])
    drained = h.drain()
    assert set(drained) == {"loop/lag/p50", "loop/lag/p99", "loop/lag/max"}
    assert drained["loop/lag/p50"] == pytest.approx(0.001, rel=0.02)
    assert drained["loop/lag/p99"] == pytest.approx(0.5, rel=0.02)
    assert drained["loop/lag/max"] == 2.0
    assert h.drain() == {}
    assert {s.key: s.reduction for s in h.metric_specs()} == dict.fromkeys(drained, Reduction.MAX)
    assert isinstance(h, Metered)


def test_memory_does_not_grow_with_what_is_recorded() -> None:
    h = Histogram("x")
    size = h._counts.nbytes
    h.record_many(np.random.default_rng(0).lognormal(-5, 4, 100_000))
    assert h._counts.nbytes == size <= 5000
    assert h.count == 100_000


@pytest.mark.parametrize("value", [-1e-9, math.nan, -math.inf])
def test_what_is_no_duration_is_refused(value: float) -> None:
    h = Histogram("x")
    with pytest.raises(ValueError, match="'x' counts values of 0 or more"):
        h.record_many([1.0, value])
    assert h.count == 0


def test_values_outside_the_range_are_counted_and_bounded_by_what_was_seen() -> None:
    h = Histogram("x")
    h.record_many([0.0, 1e-9, 5e3, 1e4])
    assert h.count == 4
    assert h.drain() == {"x/p50": 0.0, "x/p99": 1e4, "x/max": 1e4}


def test_threads_that_record_at_once_lose_nothing() -> None:
    h = Histogram("x")
    threads = [threading.Thread(target=lambda: [h.record_many([0.01]) for _ in range(3000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert h.count == int(h._counts.sum()) == 12_000
