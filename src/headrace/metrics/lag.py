"""Lag of an event loop: `EventLoopLagMonitor`.

    monitor = EventLoopLagMonitor()          ten times a second; interval=0.001 in benchmarks
    async with monitor: ...
    monitor.drain()                          event_loop_lag/min, mean, median, p90, p99, max (seconds) since the last drain

A task sleeps for the interval and notes by how much it woke up late: that long, every other task waited too. At ten samples a second
every stall above 0.1 s is seen, and a share of the shorter ones.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import numpy as np

from headrace.metrics.spec import MetricSpec, Reduction, register

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger("headrace.lag")
_MAX_SAMPLES = 1 << 20
_STATISTICS = ("min", "mean", "median", "p90", "p99", "max")
_SPECS = tuple(
    MetricSpec(
        f"event_loop_lag/{name}",
        Reduction.MIN if name == "min" else Reduction.MAX,
        unit="s",
        healthy=(0, 0.015) if name == "max" else (0, 0.003) if name == "p99" else None,
        help=f"{name} of how late the event loop woke up",
    )
    for name in _STATISTICS
)
register(*_SPECS)


class EventLoopLagMonitor:
    """Samples the lag of the loop it was started on."""

    def __init__(self, *, interval: float = 0.1, warn_above: Mapping[str, float] | None = None) -> None:
        """`interval`: seconds between samples. `warn_above`: thresholds in seconds, by statistic (min, mean, median, p90, p99, max)."""
        if not 0 < interval < math.inf:
            raise ValueError(f"a lag monitor looks every so many seconds, got {interval}")
        self.interval = interval
        self.warn_above = dict(warn_above if warn_above is not None else {"mean": 0.05, "p99": 0.5, "max": 1.0})
        if unknown := set(self.warn_above) - set(_STATISTICS):
            raise ValueError(f"a lag has {', '.join(_STATISTICS)}, a threshold was given for {sorted(unknown)}")
        self._samples: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return _SPECS

    def start(self) -> None:
        """Begin, on the running loop."""
        import asyncio  # 40 ms that a process without an event loop need not pay

        if self._task is not None:
            raise RuntimeError("this lag monitor has been started already")
        self._task = asyncio.get_running_loop().create_task(self._sample(), name="headrace-lag")

    async def stop(self) -> None:
        import asyncio

        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _sample(self) -> None:
        import asyncio

        while True:
            due = time.perf_counter() + self.interval
            await asyncio.sleep(self.interval)
            if len(self._samples) < _MAX_SAMPLES:
                self._samples.append(max(0.0, time.perf_counter() - due))

    def drain(self) -> dict[str, float]:
        """The statistics since the last call, in seconds; {} if nothing was sampled. Warns of what is above its threshold."""
        samples, self._samples = np.sort(self._samples), []
        if not len(samples):
            return {}
        # By rank: the first np.quantile of a process takes 15 ms, which would be lag of our own making.
        median, p90, p99 = (samples[math.ceil(q * len(samples)) - 1] for q in (0.5, 0.9, 0.99))
        found = dict(zip(_STATISTICS, (samples[0], samples.mean(), median, p90, p99, samples[-1]), strict=True))
        for name, limit in self.warn_above.items():
            if found[name] > limit:
                text = "the event loop was late: %s %.3f s, above %g s; something on it does not yield"
                _log.warning(text, name, found[name], limit)
        return {f"event_loop_lag/{name}": float(value) for name, value in found.items()}

    drain_metrics = drain
