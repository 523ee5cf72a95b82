"""Metrics: declarations, waits and phases, reduction over steps and ranks, sinks.

    spec.py       what a metric is: key, reduction over ranks, healthy range; the registry of all of them
    wait.py       times: Wait, phase, step, Meter
    histogram.py  median, 99th percentile and maximum in fixed memory
    lag.py        lag of an event loop: EventLoopLagMonitor
    reducer.py    many steps and many ranks become one line: Accumulator, Reducer
    loss.py       a training loop's own numbers over ranks: means, and sums with the worst rank
    ranks.py      collectives that name the missing rank when one is killed or stopped
    sinks.py      files and services that records go to: JSONL always; wandb and TensorBoard from threads

A loop that uses all of it:

    meter, total, reducer = default_meter(), Accumulator(specs), Reducer(specs)
    for step in range(steps):
        with meter.step():
            with Wait("loader.next", deadline=60): ...
            with phase("forward"): ...
        total.add(meter.drain())
        if step % log_every == 0 and (line := reducer.reduce(total.drain())) and rank == 0:
            log.write({"step": step, **line})
"""

from headrace.metrics.histogram import Histogram
from headrace.metrics.lag import EventLoopLagMonitor
from headrace.metrics.loss import reduce_loss_metrics
from headrace.metrics.reducer import STEPS_IN_INTERVAL, Accumulator, Mean, Reducer, reduce_values
from headrace.metrics.sinks import SINKS, BackgroundSinks, JsonlSink, Sink, SinkContext, TensorboardSink, WandbSink
from headrace.metrics.spec import Metered, MetricSpec, Reduction, SpecBook, register, registered_specs
from headrace.metrics.wait import Meter, Wait, default_meter, phase

__all__ = [
    "SINKS",
    "STEPS_IN_INTERVAL",
    "Accumulator",
    "BackgroundSinks",
    "EventLoopLagMonitor",
    "Histogram",
    "JsonlSink",
    "Mean",
    "Meter",
    "Metered",
    "MetricSpec",
    "Reducer",
    "Reduction",
    "Sink",
    "SinkContext",
    "SpecBook",
    "TensorboardSink",
    "Wait",
    "WandbSink",
    "default_meter",
    "phase",
    "reduce_loss_metrics",
    "reduce_values",
    "register",
    "registered_specs",
]
