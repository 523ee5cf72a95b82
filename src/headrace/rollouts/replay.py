"""Replays of a captured step, which measure what it costs the event loop: `replay`, and `replay_phase` for one phase alone.

The rollouts of a dump go through a RolloutPipeline again. A sampler looks at the loop every millisecond, and background tasks may keep it busy as in a real
orchestrator. Rollouts arrive in one of four forms (`Form`). Each phase is reported with its wall time, its CPU time and the lag of the loop. An idle stretch
of the same loop with the same tasks is reported beside them, because lag has to be compared with it. A phase alone runs in a thread of its own, after its inputs
were made, so that a stall can be traced to one phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from headrace.errors import ConfigError, RolloutRefused
from headrace.metrics import EventLoopLagMonitor, JsonlSink
from headrace.rollouts import (
    AdvantageConfig,
    BatchWriter,
    GibberishFilter,
    RepetitionFilter,
    Rollout,
    RolloutPipeline,
    ZeroAdvantageFilter,
    apply_filters,
    compute_advantages,
    interleave_rollout,
    needs_tokens,
    pack_samples,
    rollout_from_verifiers,
    rollout_metrics,
    save_rollouts,
)
from headrace.rollouts.dumps import read_dump
from headrace.rollouts.loop_yield import LoopYield
from headrace.rollouts.pipeline import collected_samples
from headrace.rollouts.wire import encode_rollout

_log = logging.getLogger("headrace.rollouts")
Form = Literal["binary", "lists", "msgpack", "json"]
"""How rollouts arrive: in msgpack with binary columns, as dicts of lists, or as lists in msgpack or JSON text."""
_FORMS: dict[Form, Callable[[Any], Any]] = {
    "binary": encode_rollout, "lists": lambda rollout: rollout, "msgpack": msgspec.msgpack.encode, "json": msgspec.json.encode
}  # fmt: skip
_LOOK = 0.001
"""Seconds between two looks at the loop."""

ALONE = (
    "ingest", "pretokenize", "interleave", "write_experts", "compute_advantages", "apply_filters", "result_collection_loop", "pack",
    "training_batch_send", "save_rollouts", "metrics_aggregation", "sinks",
)  # fmt: skip
"""Phases that can be run alone, in the order of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """What one phase of a replay took, in seconds."""

    phase: str
    wall: float
    cpu: float
    """CPU of the whole process."""
    loop: float
    """CPU of the event loop's own thread."""
    lag_mean: float
    lag_p99: float
    lag_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step that was replayed."""

    rollouts: int
    samples: int
    tokens: int
    bytes: int
    """Size of the batch's files."""
    refused: dict[str, int]
    synthetic_traffic: int
    phases: tuple[PhaseCost, ...]
    breakdown: str
    """Seconds of the worker thread by phase, the costliest first."""


@contextlib.asynccontextmanager
async def _traffic(tasks: int) -> AsyncGenerator[None]:
    """Background tasks that wake up every few milliseconds and do a little, as clients of inference servers do."""

    async def one(number: int) -> None:
        while True:
            await asyncio.sleep(0.005 + 0.00001 * number)
            sum(range(50))

    running = [asyncio.get_running_loop().create_task(one(n)) for n in range(tasks)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def replay(
    dump: Path, *, synthetic_traffic: int = 0, seq_len: int = 32_768, ranks: int = 2, folder: Path | None = None, idle: float = 1.0,
    processes: int = 0, form: Form = "lists",
) -> Replay:  # fmt: skip
    """Take the rollouts of a dump through the pipeline once.

    Args:
        dump: a file of `dump_raw_rollouts`.
        synthetic_traffic: background tasks that keep the loop busy.
        seq_len, ranks: tokens of a micro batch, and ranks the batch is packed for.
        folder: where the batch is written and removed again; the system's temporary folder unless given.
        idle: seconds of the idle stretch.
        processes: worker processes that make samples; 0 for a thread.
        form: how rollouts arrive.
    """
    with _prepared(dump, synthetic_traffic, folder, form) as (rollouts, scratch):
        return _on_a_loop(_replay(rollouts, scratch, synthetic_traffic, seq_len, ranks, idle, processes))


def replay_phase(
    dump: Path, phase: str, *, synthetic_traffic: int = 0, seq_len: int = 32_768, ranks: int = 2, folder: Path | None = None,
    idle: float = 1.0, form: Form = "lists",
) -> tuple[PhaseCost, PhaseCost]:  # fmt: skip
    """Run one phase of ALONE in a thread beside the loop. Returns the costs of an idle stretch and of the phase. Arguments as for `replay`."""
    if phase not in ALONE:
        raise ConfigError(f"no phase is called {phase!r}; those that can be run alone are {', '.join(ALONE)}")
    with _prepared(dump, synthetic_traffic, folder, form) as (rollouts, scratch):
        work = _phase_work(phase, rollouts, scratch, seq_len, ranks)
        gc.collect()
        gc.freeze()
        return _on_a_loop(_replay_phase(phase, work, synthetic_traffic, idle))


@contextlib.contextmanager
def _prepared(dump: Path, traffic: int, folder: Path | None, form: Form) -> Generator[tuple[list[Any], Path]]:
    if traffic < 0:
        raise ConfigError(f"synthetic_traffic is {traffic}, expected 0 or more background tasks")
    if form not in _FORMS:
        raise ConfigError(f"form is {form!r}, expected one of {', '.join(_FORMS)}")
    rollouts = [_FORMS[form](rollout) for rollout in read_dump(dump)]
    # The whole step is in memory here, unlike where it arrives: without the freeze the garbage collector would walk its lists again and again.
    gc.collect()
    gc.freeze()
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-replay-", dir=folder) as scratch:
            yield rollouts, Path(scratch)
    finally:
        gc.unfreeze()


_Result = TypeVar("_Result")


def _on_a_loop(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine on uvloop's loop where it is installed (`headrace[rl]`), on asyncio's own otherwise."""
    factory = None
    with contextlib.suppress(ImportError):
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def _measured(
    traffic: int, idle: float, parts: Mapping[str, Callable[[], Awaitable[Any]]]
) -> tuple[list[PhaseCost], dict[str, Any]]:
    """Run an idle stretch and then the parts, in order, beside background tasks. Returns what each cost, and the results of the parts."""
    monitor = EventLoopLagMonitor(interval=_LOOK, warn_above={})
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    costs: list[PhaseCost] = []
    results: dict[str, Any] = {}  # kept: in a real step they are not freed in the phase either
    async with _traffic(traffic), monitor:
        for name, part in {"idle": lambda: asyncio.sleep(idle), **parts}.items():
            await asyncio.sleep(0.005)  # the sample during which the last phase was summed up is none of this one's
            monitor.drain()
            before = [clock() for clock in clocks]
            results[name] = await part()
            wall, cpu, loop = (clock() - start for clock, start in zip(clocks, before, strict=True))
            await asyncio.sleep(0.002)  # so that a stall at the very end is sampled too
            found = monitor.drain()
            lag = {f"lag_{which}": found.get(f"event_loop_lag/{which}", 0.0) for which in ("mean", "p99", "max")}
            costs.append(PhaseCost(phase=name, wall=wall, cpu=cpu, loop=loop, **lag))
    return costs, results


async def _replay(
    rollouts: list[Any], folder: Path, traffic: int, seq_len: int, ranks: int, idle: float, processes: int
) -> Replay:
    (folder / "saved").mkdir()
    sink = JsonlSink(folder / "saved" / "metrics.jsonl")
    pipeline = RolloutPipeline(
        folder, seq_len=seq_len, ranks=ranks, advantage=AdvantageConfig(), filters=[ZeroAdvantageFilter(enforce=False)],
        save_to=folder / "saved", sinks=[sink], use_process_pool=processes,
    )  # fmt: skip

    async def arrival() -> None:
        rollouts.reverse()
        for number in range(len(rollouts)):
            # `pop` leaves the pipeline the only reference, as when a rollout came over a socket.
            # A dump does not say which task a rollout belongs to: all get task 0, and groups are by example.
            pipeline.arrive(rollouts.pop(), step=0, key=(0, number))
            await asyncio.sleep(0)
        await pipeline.settled(0)

    with contextlib.closing(sink):
        async with pipeline:
            phases, results = await _measured(
                traffic, idle, {"arrival": arrival, "boundary": lambda: pipeline.finish(0)}
            )
    report = results["boundary"]
    with os.scandir(folder) as entries:
        size = sum(e.stat().st_size for e in entries if e.is_file())
    return Replay(
        rollouts=report.rollouts, samples=report.samples, tokens=report.tokens, bytes=size, refused=dict(report.refused),
        synthetic_traffic=traffic, phases=tuple(phases), breakdown=report.phases.line(0),
    )  # fmt: skip


async def _replay_phase(
    name: str, work: Callable[[LoopYield], Any], traffic: int, idle: float
) -> tuple[PhaseCost, PhaseCost]:
    pause = LoopYield(asyncio.get_running_loop())
    (alone, cost), _ = await _measured(traffic, idle, {name: lambda: asyncio.to_thread(work, pause)})
    return alone, cost


def _phase_work(phase: str, raw: list[Any], folder: Path, seq_len: int, ranks: int) -> Callable[[LoopYield], Any]:
    """A function that runs one phase of a step; its inputs are made here."""
    if phase == "ingest":
        return lambda pause: _ingested(pause.between(raw))
    rollouts = _ingested(raw)
    if phase == "pretokenize":
        return lambda _: needs_tokens(rollouts)
    if phase == "interleave":
        return lambda pause: [interleave_rollout(r) for r in pause.between(rollouts)]
    if phase == "compute_advantages":
        return lambda _: compute_advantages(rollouts, AdvantageConfig())
    if phase == "apply_filters":
        filters = (GibberishFilter(vocab_size=160_000), RepetitionFilter(), ZeroAdvantageFilter())
        return lambda _: apply_filters(filters, rollouts, [1.0] * len(rollouts))
    if phase == "save_rollouts":
        slim = [r.slim() for r in rollouts]
        return lambda pause: save_rollouts(folder / "step_0.jsonl", pause.between(slim), durable=False)
    if phase == "metrics_aggregation":
        return lambda _: rollout_metrics(rollouts)
    if phase == "sinks":
        metrics, sink = rollout_metrics(rollouts), JsonlSink(folder / "metrics.jsonl")
        return lambda _: (sink.write({"step": 0, **metrics}), sink.close())
    by_rollout = [[s.truncated(seq_len) for s in interleave_rollout(r)] for r in rollouts]
    samples = [s for some in by_rollout for s in some]
    if phase == "pack":
        return lambda _: pack_samples(samples, seq_len=seq_len, ranks=ranks)
    writer = BatchWriter(folder, step=0)
    if phase == "write_experts":
        return lambda _: [writer.add([s]) for s in samples]
    if phase == "result_collection_loop":
        written = [writer.add(some) for some in by_rollout]
        n = len(written)
        return lambda _: collected_samples(written, [1.0] * n, [True] * n)
    slots = writer.add(samples)
    packed = pack_samples([s.sample for s in slots], seq_len=seq_len, ranks=ranks)
    return lambda _: writer.publish(packed, slots, seq_len=seq_len, policy_version=0)


def _ingested(raws: Iterable[Any]) -> list[Rollout]:
    """The rollouts that can be taken. Others are left out with a warning."""
    taken = []
    for number, raw in enumerate(raws):
        try:
            taken.append(rollout_from_verifiers(raw))
        except RolloutRefused as error:
            _log.warning("rollout %d of the dump is left out: %s", number, error)
    return taken
