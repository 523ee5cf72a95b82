"""What happened, how long it took, and which rank was worst.

    spec.py       what a metric is: key, reduction over ranks, healthy range; the registry of all of them
    wait.py       where the time went: Wait, phase, step, Meter
    histogram.py  what was usual and what was bad, in fixed memory
    lag.py        how late the event loop is: EventLoopLagMonitor
    reducer.py    many steps and many ranks become one line: Accumulator, Reducer
    loss.py       a loop's own numbers over ranks: means, and sums with the worst rank
    ranks.py      collectives that end: who is missing when a rank is killed or stopped
    sinks.py      where lines go: JSONL always; wandb and TensorBoard from threads

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
from headrace.metrics.wait import Meter, OpenWait, StepTimes, Wait, default_meter, phase

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
    "OpenWait",
    "Reducer",
    "Reduction",
    "Sink",
    "SinkContext",
    "SpecBook",
    "StepTimes",
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
