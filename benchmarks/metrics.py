"""What measuring costs, beside what one would write by hand. Run: python benchmarks/metrics.py (about 10 s)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orjson

from headrace.metrics import Accumulator, Histogram, JsonlSink, Meter, MetricSpec, Reducer, Reduction, Wait, phase

RECORD = {"step": 1000, **{f"train/metric_{i}": 0.1 * i for i in range(11)}}
SPECS = [
    MetricSpec(f"bench/{kind.value}/{i}", kind, with_max=kind is Reduction.SUM)
    for kind in (Reduction.SUM, Reduction.MIN, Reduction.MAX)
    for i in range(8)
]
ROW = {spec.key: 3 if i % 2 else 0.5 for i, spec in enumerate(SPECS)}


def microseconds(call: Callable[[], object], number: int = 20_000) -> float:
    """The best of several rounds: the machine is shared, and noise only adds."""
    return 1e6 * min(timeit.repeat(call, number=number, repeat=7)) / number


def compare(name: str, ours: float, other_name: str, other: float, unit: str = "us") -> None:
    print(f"{name:<34} {ours:8.2f} {unit}   {other_name:<28} {other:8.2f} {unit}   ratio {ours / other:6.2f}")


def hot_path() -> None:
    meter = Meter()

    def bare() -> None:
        began = time.perf_counter()
        _ = time.perf_counter() - began

    def wait() -> None:
        with Wait("bench", meter=meter):
            ...

    def part() -> None:
        with phase("bench", meter=meter):
            ...

    clock = microseconds(bare)
    compare("Wait, enter + exit", microseconds(wait), "bare perf_counter pair", clock)
    compare("phase, enter + exit", microseconds(part), "bare perf_counter pair", clock)
    with meter.step():
        compare("Wait inside a step", microseconds(wait), "bare perf_counter pair", clock)
    counter = {"rows": 0}

    def add() -> None:
        counter["rows"] += 1

    compare("Meter.add", microseconds(lambda: meter.add("rows")), "a dict's +=", microseconds(add))
    compare("Meter.drain", microseconds(meter.drain, 2000), "bare perf_counter pair", clock)
    total = Accumulator(SPECS)
    compare(
        "Accumulator.add, 24 keys",
        microseconds(lambda: total.add(ROW), 2000),
        "dict(row)",
        microseconds(lambda: dict(ROW)),
    )
    histogram, kept = Histogram("bench"), []
    compare(
        "Histogram.record_many of one",
        microseconds(lambda: histogram.record_many((0.01,))),
        "list.append",
        microseconds(lambda: kept.append(0.01)),
    )
    values = sorted(np.random.default_rng(0).lognormal(-5, 2, 20_000).tolist())
    histogram.record_many(values)
    compare(
        "Histogram p99 of 20,000", microseconds(lambda: histogram._percentile(99), 500),
        "np.percentile of the list", microseconds(lambda: np.percentile(values, 99), 5),
    )  # fmt: skip


def lines() -> None:
    with tempfile.TemporaryDirectory() as folder, JsonlSink(Path(folder) / "metrics.jsonl") as sink:
        compare(
            "JsonlSink.write, 12 scalars", microseconds(lambda: sink.write(RECORD), 5000),
            "orjson.dumps alone", microseconds(lambda: orjson.dumps(RECORD)),
        )  # fmt: skip


def rank(number: int, store: str) -> None:
    """One of two ranks; rank 0 prints the milliseconds of both forms, measured in turns."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    reducer = Reducer(SPECS, deadline=60.0)

    def three_all_reduce() -> None:
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            dist.all_reduce(torch.tensor(list(ROW.values()), dtype=torch.float64), operation)

    forms = {"all_gather": lambda: reducer.reduce(ROW), "all_reduce": three_all_reduce}
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(200):
        for form, reduce in forms.items():
            began = time.perf_counter()
            reduce()
            times[form].append(time.perf_counter() - began)
    if number == 0:
        print(orjson.dumps({form: 1e3 * sorted(t)[len(t) // 2] for form, t in times.items()}).decode())
    dist.destroy_process_group()


def across_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank"]
        store = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen([*command, str(n), store], stdout=subprocess.PIPE if n == 0 else subprocess.DEVNULL)
            for n in range(2)
        ]
        out, _ = ranks[0].communicate(timeout=60)
        ranks[1].wait(60)
    medians = orjson.loads(out)
    compare("Reducer packed, 2 ranks, 24 keys", medians["all_gather"], "three all_reduce", medians["all_reduce"], "ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        hot_path()
        lines()
        across_ranks()
