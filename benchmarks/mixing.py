"""Stream mixing: what a pick, its metrics and a batch cost, beside what one would write by hand. Run: make bench-mixing (about 60 s)."""

from __future__ import annotations

import itertools
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from headrace.metrics import Reducer
from headrace.mix import MixPlan, MixSettings, MixState, StreamTable
from headrace.mix.pick import choose
from headrace.mix.pool import Slice

FILES, CELLS, BATCH = 24, 1 << 20, 64


def microseconds(call: Callable[[], object], number: int, repeat: int = 9) -> float:
    """The best of several rounds: the machine is shared, and noise only adds."""
    return 1e6 * min(timeit.repeat(call, number=number, repeat=repeat)) / number


def compare(name: str, ours: float, other_name: str, other: float, unit: str, goal: str) -> None:
    print(
        f"{name:<42} {ours:9.2f} {unit:<6} {other_name:<34} {other:9.2f} {unit:<6} ratio {ours / other:5.2f}   goal {goal}"
    )


def table(streams: int, median: int) -> StreamTable:
    rng = np.random.default_rng(0)
    paths = tuple(sorted(f"m{i % 4}/{i:05d}" for i in range(streams)))
    rows = tuple(int(n) + 1 for n in rng.lognormal(np.log(median), 1.0, streams))
    return StreamTable(paths=paths, rows=rows, modalities=tuple(p[:2] for p in paths))


# --------------------------------------------------------------------------------------------------- pick


def by_hand(slots: int) -> Callable[[], object]:
    """The document's form: weights from an array, rng.choice, and the seven numbers by numpy."""
    rng = np.random.default_rng(0)
    remaining = rng.integers(50_000, 100_000, slots)
    total = remaining.copy()
    last = np.zeros(slots, dtype=np.int64)
    kinds = [f"m{i % 4}" for i in range(slots)]
    step = 0

    def call() -> dict[str, Any]:
        nonlocal step
        at = rng.choice(slots, p=remaining / remaining.sum())
        last[at] = step
        fraction = remaining / total
        counts: dict[str, int] = {}
        for kind in kinds:
            counts[kind] = counts.get(kind, 0) + 1
        out = {
            "remaining_min": remaining.min(), "remaining_max": remaining.max(), "fraction_min": fraction.min(), "fraction_max": fraction.max(),
            "since": step - last.min(), **counts,
        }  # fmt: skip
        remaining[at] -= 1
        step += 1
        return out

    return call


def picked(plan: MixPlan, state: MixState) -> object:
    """A draw is made and delivered, and its metrics are asked for."""
    if plan.over:
        plan.next_epoch()
    state.add(plan.next_step())
    return state.snapshots()


def picks() -> None:
    for slots, goal in ((8, "<= 15 us"), (64, ""), (512, "")):
        number = 4000
        for mode in ("proportional", "weighted"):
            plan = MixPlan(table(4 * slots, 4000), MixSettings(batch_size=dict.fromkeys(("m0", "m1", "m2", "m3"), 1), slots=slots, pick_mode=mode))  # fmt: skip
            ours = microseconds(partial(picked, plan, MixState(plan)), number)
            compare(f"pick + snapshot, {mode}, K={slots}", ours, "rng.choice + numpy, by hand", microseconds(by_hand(slots), 400), "us", goal)  # fmt: skip
        bare = MixPlan(table(4 * slots, 4000), MixSettings(batch_size=dict.fromkeys(("m0", "m1", "m2", "m3"), 1), slots=slots))  # fmt: skip
        print(f"{f'pick alone, proportional, K={slots}':<42} {microseconds(bare.next, number):9.2f} us")


def weighted() -> None:
    for slots in (8, 512):
        pool = [Slice(stream=i, end=1000 + i, position=0, per_pick=1, remaining=1000 + i) for i in range(slots)]
        steps = itertools.count()
        ours = microseconds(
            lambda pool=pool, steps=steps: choose("weighted", pool, key=7, step=next(steps), turn=0), 4000
        )
        rng = np.random.default_rng(0)
        weights = np.array([one.remaining for one in pool])
        theirs = microseconds(lambda w=weights, n=slots, rng=rng: rng.choice(n, p=w / w.sum()), 1000)
        compare(f"weighted draw, K={slots}", ours, "rng.choice(K, p=w / w.sum())", theirs, "us", "<= 0.33")


# --------------------------------------------------------------------------------------------------- batches


class Nothing:
    """A file that costs nothing to read: what is left is the overhead of a step."""

    rows = 100_000

    def __init__(self, path: Path, columns: Any) -> None:
        self._cells = {"x": np.zeros((BATCH, 8), np.float32)}

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return {"x": self._cells["x"][: stop - start]}

    def close(self) -> None:
        return None


def overhead(folder: Path) -> None:
    from headrace.loader.streams import StreamMixingDataset

    for i in range(32):
        path = folder / "nothing" / f"m{i % 4}" / f"{i}.nothing"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for slots in (8, 512):
        if slots > 32:
            for i in range(32, 2 * slots):
                (folder / "nothing" / f"m{i % 4}" / f"{i}.nothing").touch()
        data = StreamMixingDataset(folder / "nothing", batch_size=BATCH, num_streams_mixed=slots, readers={".nothing": Nothing}, collate=lambda cells: cells, prefetch_batches=0, cache=folder)  # fmt: skip
        batches = iter(data)

        def step(batches: Any = batches, data: Any = data) -> None:
            next(batches)
            data.drain_step_metrics()

        cost = microseconds(step, 2000, 5)
        print(
            f"{f'whole step with metrics, K={slots}':<42} {cost:9.2f} us     {'goal < 50 us, ' if slots == 8 else ''}reading not counted"
        )
        data.close()


def make_files(folder: Path, suffix: str, width: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = folder / f"{suffix.lstrip('.')}-{width}"
    rows = (8 if suffix == ".npy" else 2) * CELLS // width  # long enough that opening files is not what is timed
    rng = np.random.default_rng(1)
    for i in range(FILES):
        path = root / f"m{i % 4}" / f"{i:03d}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        x = rng.normal(size=(rows, width)).astype(np.float32)
        if suffix == ".npy":
            np.save(path, x)
        else:
            table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), width)})
            pq.write_table(table, path, row_group_size=1024, use_dictionary=False, compression="zstd")
    return root


def alone(data: Any, hashed: bool = False) -> int:
    """The batches of a dataset in its order, by the readers alone; `hashed`: and by the hash that finds cells which changed."""
    from headrace.sources.cells import open_cells

    plan = MixPlan(data.table, data.settings)
    files: dict[int, Any] = {}
    total = 0
    while not plan.over:
        draw = plan.next()
        if draw.stream not in files:
            files[draw.stream] = open_cells(Path(data.stream_paths[draw.stream]))
        batch = files[draw.stream].read(draw.start, draw.stop)  # held while the next is read, as in a training loop
        total += batch["x"].shape[0]
        if hashed:
            xxhash.xxh3_64_intdigest(batch["x"])
        if draw.dry:
            files.pop(draw.stream).close()
    return total


def whole(data: Any, drained: bool = False) -> int:
    """The same through the dataset; `drained`: with the metrics of every step."""
    total = 0
    for batch in data:
        total += batch["x"].shape[0]
        if drained:
            data.drain_step_metrics()
    return total


def throughput(folder: Path) -> None:
    """The same batches in the same order, through the dataset and by the readers alone."""
    from headrace.loader.streams import StreamMixingDataset

    for suffix, width in ((".npy", 256), (".npy", 2048), (".parquet", 256), (".parquet", 2048)):
        root = make_files(folder, suffix, width)
        inline, ahead = (
            StreamMixingDataset(root, batch_size=BATCH, cache=folder, prefetch_batches=n, collate=lambda c: c)
            for n in (0, 2)
        )
        rows = sum(inline.table.rows)
        forms: dict[str, Callable[[], int]] = {
            "alone": partial(alone, inline), "hashed": partial(alone, inline, True), "inline": partial(whole, inline), "drained": partial(whole, inline, True),
            "ahead": partial(whole, ahead),
        }  # fmt: skip
        rounds: dict[str, list[float]] = {}
        for _ in range(
            12 if suffix == ".npy" else 5
        ):  # the best of each: noise only adds, and a batch takes 20 us there
            for name, form in forms.items():
                began = time.perf_counter()
                assert form() == rows
                rounds.setdefault(name, []).append(rows / BATCH / (time.perf_counter() - began))
        best = {name: max(found) for name, found in rounds.items()}
        for name, shown, beside, by, goal in (
            ("inline", "made when asked", "alone", "the readers alone", ">= 0.7"),
            ("inline", "made when asked", "hashed", "the readers and a hash", ""),
            ("drained", "and drained", "alone", "the readers alone", ""),
            ("ahead", "made ahead", "alone", "the readers alone", ""),
        ):
            compare(f"{suffix} 64 x {width}, {shown}", best[name] / 1e3, by, best[beside] / 1e3, "k/s", goal)


# ----------------------------------------------------------------------------------------------------- ranks


def rank(number: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from headrace.loader.stream_metrics import stream_specs

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=world)
    specs = stream_specs(("m0", "m1", "m2", "m3"))
    row = {s.key: 3 if s.unit else 0.5 for s in specs}
    reducer = Reducer(specs, deadline=60.0)

    def three_all_reduce() -> None:
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            dist.all_reduce(torch.tensor(list(row.values()), dtype=torch.float64), operation)

    forms = {"all_gather": lambda: reducer.reduce(row), "all_reduce": three_all_reduce}
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(150):
        for form, reduce in forms.items():
            began = time.perf_counter()
            reduce()
            times[form].append(time.perf_counter() - began)
    if number == 0:
        print(orjson.dumps({form: 1e3 * statistics.median(t) for form, t in times.items()}).decode())
    dist.destroy_process_group()


def across_ranks(world: int = 4) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank"]
        store = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen(
                [*command, str(n), str(world), store], stdout=subprocess.PIPE if n == 0 else subprocess.DEVNULL
            )
            for n in range(world)
        ]
        out, _ = ranks[0].communicate(timeout=120)
        for process in ranks[1:]:
            process.wait(60)
    medians = orjson.loads(out)
    compare(
        f"Reducer packed, {world} ranks, 15 keys",
        medians["all_gather"],
        "three all_reduce",
        medians["all_reduce"],
        "ms",
        "<= 0.33",
    )


if __name__ == "__main__":
    logging.disable()
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        picks()
        weighted()
        with tempfile.TemporaryDirectory() as scratch:
            overhead(Path(scratch))
            throughput(Path(scratch))
        across_ranks()
