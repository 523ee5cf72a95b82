"""Histogram with a bounded relative error, in memory that does not grow.

    lag = Histogram("loop/lag", unit="s")
    lag.record_many([0.0021])
    lag.drain()       ->  {"loop/lag/p50": .0021, "loop/lag/p99": .0021, "loop/lag/max": .0021}

Buckets are spaced by a constant ratio, so the relative error is the same everywhere: at most 2 % between 1 us
and 1 h, in 558 counts (4.4 KiB). Values below or above are counted in the first and the last bucket; the smallest and
the largest value are kept exactly and bound every answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

import numpy as np

from headrace.metrics.spec import MetricSpec, Number, Reduction

_RATIO = 1.02
_EDGES = 1e-6 * _RATIO ** (2 * np.arange(557))
"""Upper ends of the buckets; values above the last have one more bucket. A bucket (x, x·r²] is answered by x·r, which is within a factor of r
of everything in it."""


class Histogram:
    """Counts by log-spaced bucket. Any thread may record; `drain` loses nothing. `key`: prefix of the metrics."""

    def __init__(self, key: str, *, unit: str = "s") -> None:
        self.key = key
        self.unit = unit
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._counts = np.zeros(len(_EDGES) + 1, dtype=np.int64)
        self.count = 0
        self.min = math.inf
        self.max = -math.inf

    def record_many(self, values: Iterable[float] | np.ndarray) -> None:
        """Count values, a few ns each."""
        array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64).ravel()
        if not array.size:
            return
        if not (array >= 0.0).all():
            raise ValueError(f"histogram {self.key!r} counts values of 0 or more, got {array[~(array >= 0.0)][0]}")
        with self._lock:
            self._counts += np.bincount(np.searchsorted(_EDGES, array), minlength=len(_EDGES) + 1)
            self.count += array.size
            self.min = min(self.min, float(array.min()))
            self.max = max(self.max, float(array.max()))

    def _percentile(self, q: float) -> float:
        rank = max(1, math.ceil(q * self.count / 100 - 1e-9))
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        if at == 0:
            return self.min
        if at == len(_EDGES):
            return self.max
        return min(max(float(_EDGES[at]) / _RATIO, self.min), self.max)

    def drain(self) -> dict[str, Number]:
        """p50, p99 and max since the last drain, under `<key>/…`; {} if nothing was recorded."""
        with self._lock:
            if not self.count:
                return {}
            drained: dict[str, Number] = {
                f"{self.key}/p50": self._percentile(50),
                f"{self.key}/p99": self._percentile(99),
                f"{self.key}/max": self.max,
            }
            self._clear()
        return drained

    drain_metrics = drain

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """Over ranks the worst counts: the percentile of the rank where it is highest."""
        return tuple(
            MetricSpec(
                f"{self.key}/{name}", Reduction.MAX, True, self.unit, None, f"{what} on the rank where it is highest"
            )
            for name, what in (("p50", "median"), ("p99", "99th percentile"), ("max", "largest value"))
        )
