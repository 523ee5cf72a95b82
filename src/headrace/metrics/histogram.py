"""Histogram with a bounded relative error, in memory that does not grow.

    lag = Histogram("loop/lag", unit="s")
    lag.record_many([0.0021])
    lag.drain()       ->  {"loop/lag/p50": .0021, "loop/lag/p99": .0021, "loop/lag/max": .0021}

Buckets are spaced by a constant ratio, so the relative error is the same everywhere: at most 2 % between 1 us
and 1 h, in 559 counts (4.4 KiB). Values below or above are counted in the first and the last bucket; the smallest and
the largest value are kept exactly and bound every answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

import numpy as np

from headrace.metrics.spec import MetricSpec, Number, Reduction

_LEAST, _MOST, _ERROR = 1e-6, 3600.0, 0.02
# A bucket (x, x·(1+e)²] is answered by x·(1+e), which is within a factor of 1+e of everything in it.
_STEP = 2.0 * math.log1p(_ERROR)
_LAST = int(math.log(_MOST / _LEAST) / _STEP) + 2
"""The bucket of values above the range. Bucket 0 has those below it."""


class Histogram:
    """Counts by log-spaced bucket. Any thread may record; `drain` loses nothing. `key`: prefix of the metrics."""

    def __init__(self, key: str, *, unit: str = "s") -> None:
        self.key = key
        self.unit = unit
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._counts = np.zeros(_LAST + 1, dtype=np.int64)
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
        at = (np.log(np.clip(array, _LEAST, _MOST) / _LEAST) / _STEP).astype(np.int64) + 1
        at[array <= _LEAST] = 0
        at[array > _MOST] = _LAST
        with self._lock:
            self._counts += np.bincount(at, minlength=_LAST + 1)
            self.count += array.size
            self.min = min(self.min, float(array.min()))
            self.max = max(self.max, float(array.max()))

    def _percentile(self, q: float) -> float:
        rank = max(1, math.ceil(q * self.count / 100 - 1e-9))
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        if at == 0:
            answer = self.min
        elif at == _LAST:
            answer = self.max
        else:
            answer = _LEAST * math.exp((at - 0.5) * _STEP)
        return min(max(answer, self.min), self.max)

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
