"""What a captured step costs the event loop: `replay`, and `replay_phase` for one part of it alone.

The rollouts of a dump go through a RolloutPipeline again, on a loop that a sampler looks at every millisecond and that may be kept busy by
background tasks as in a real orchestrator. They arrive in one of four forms (`Form`). Each phase is told with its wall time, its CPU time and how late the loop was during it,
and beside them an idle stretch of the same loop with the same tasks, because that is what lag has to be compared with. A phase alone is
run in a thread of its own, after everything it needs was made, so that what stalls the loop has a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
import numpy as np

from headrace.errors import ConfigError, RolloutRefused
from headrace.metrics import JsonlSink
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
    rollout_from_msgpack,
    rollout_from_verifiers,
    rollout_metrics,
    save_rollouts,
)
from headrace.rollouts.dumps import read_dump, read_encoded
from headrace.rollouts.loop_yield import LoopYield
from headrace.rollouts.pipeline import collected_samples
from headrace.rollouts.wire import encode_rollout

_log = logging.getLogger("headrace.rollouts")
Form = Literal["binary", "lists", "msgpack", "json"]
"""How rollouts arrive: in msgpack with binary columns, as dicts of lists, or as lists in msgpack or JSON text."""
_LOOK = 0.001
"""Seconds between two looks at the loop."""
__all__ = ["ALONE", "PhaseCost", "Replay", "replay", "replay_phase"]

ALONE = (
    "ingest", "pretokenize", "interleave", "write_experts", "compute_advantages", "apply_filters", "result_collection_loop", "pack",
    "training_batch_send", "save_rollouts", "metrics_aggregation", "sinks",
)  # fmt: skip
"""Phases that can be run alone, in the order of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """One phase of the replay; seconds."""

    phase: str
    wall: float
    cpu: float
    """Of the whole process."""
    loop: float
    """CPU of the event loop's own thread."""
    lag_mean: float
    lag_p99: float
    lag_max: float
    blocked_p99: float = 0.0
    """Lag without the time for which the loop's thread was ready and had no core: what this process did to it. The same as lag where /proc does not tell."""
    blocked_max: float = 0.0
    stolen: float = 0.0
    """CPU seconds that the host of a virtual machine gave to other guests (steal time). 0 where /proc does not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step that was replayed."""

    mode: str
    rollouts: int
    samples: int
    tokens: int
    bytes: int
    """Of the batch's files."""
    refused: dict[str, int]
    synthetic_traffic: int
    phases: tuple[PhaseCost, ...]
    breakdown: str
    """Where the worker's time went, the costliest first."""
    rss_before: int
    """Resident bytes when all rollouts lay in memory and none had arrived."""
    rss_peak: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    dump: Path, *, mode: Literal["arrival", "boundary"] = "arrival", synthetic_traffic: int = 0, gather_chunk_size: int | None = None,
    seq_len: int = 32_768, ranks: int = 2, folder: Path | None = None, idle: float = 1.0, processes: int = 0, form: Form = "lists",
) -> Replay:  # fmt: skip
    """Take the rollouts of a dump through the pipeline once, and tell what it cost. The batch is written below `folder` and removed."""
    options: dict[str, Any] = {"mode": mode, "gather_chunk_size": gather_chunk_size, "use_process_pool": processes}
    with _prepared(dump, synthetic_traffic, folder, form) as (rollouts, scratch):
        return _on_a_loop(_replay(rollouts, scratch, synthetic_traffic, seq_len, ranks, idle, options))


def replay_phase(
    dump: Path, phase: str, *, synthetic_traffic: int = 0, seq_len: int = 32_768, ranks: int = 2, folder: Path | None = None,
    idle: float = 1.0, form: Form = "lists", gather_chunk_size: int | None = None,
) -> tuple[PhaseCost, PhaseCost]:  # fmt: skip
    """One of ALONE by itself, in a thread beside the loop: what an idle stretch cost, and what the phase did. With `gather_chunk_size` the phase
    interleave is a gather of threads, one a rollout and so many at a time."""
    if phase not in ALONE:
        raise ConfigError(f"no phase is called {phase!r}; those that can be run alone are {', '.join(ALONE)}")
    if gather_chunk_size is not None and (gather_chunk_size < 1 or phase != "interleave"):
        raise ConfigError(
            f"gather_chunk_size is {gather_chunk_size}: it is at least 1, and for the phase interleave only"
        )
    with _prepared(dump, synthetic_traffic, folder, form) as (rollouts, scratch):
        stages = _Stages(rollouts, scratch, seq_len, ranks)
        work = stages.work(phase)
        if gather_chunk_size is None:
            body: Callable[[LoopYield], Coroutine[Any, Any, Any]] = functools.partial(asyncio.to_thread, work)
        else:
            body = functools.partial(_gathered, stages.rollouts, gather_chunk_size)
        gc.collect()
        gc.freeze()
        return _on_a_loop(_replay_phase(phase, body, synthetic_traffic, idle))


async def _gathered(rollouts: list[Rollout], size: int, _: LoopYield) -> list[Any]:
    """Samples of all rollouts, a thread for each, `size` at a time."""
    made: list[Any] = []
    for at in range(0, len(rollouts), size):
        made += await asyncio.gather(*(asyncio.to_thread(interleave_rollout, r) for r in rollouts[at : at + size]))
        await asyncio.sleep(0)
    return made


@contextlib.contextmanager
def _prepared(dump: Path, traffic: int, folder: Path | None, form: Form) -> Generator[tuple[list[Any], Path]]:
    if traffic < 0:
        raise ConfigError(f"synthetic_traffic is {traffic}, expected 0 or more background tasks")
    if form == "lists":
        rollouts: list[Any] = list(read_dump(dump))
    elif form == "msgpack":
        rollouts = [bytes(raw) for raw in read_encoded(dump)]
    elif form in ("binary", "json"):
        rollouts = [encode_rollout(r) if form == "binary" else msgspec.json.encode(r) for r in read_dump(dump)]
    else:
        raise ConfigError(f"form is {form!r}, expected one of {', '.join(get_args(Form))}")
    # All of the step lies in memory here, which it does not where it arrives: without this the collector walks through its lists again and again.
    gc.collect()
    gc.freeze()
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-replay-", dir=folder) as scratch:
            yield rollouts, Path(scratch)
    finally:
        gc.unfreeze()


_Result = TypeVar("_Result")


def _on_a_loop(work: Coroutine[Any, Any, _Result]) -> _Result:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed (`headrace[rl]`), asyncio's own otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _CoreWaits:
    """A lag monitor that also notes, sample by sample, for how long its thread was ready to run and had no core."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._sample())

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sample(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
            except OSError:
                fd = -1
            while True:
                ready, due = _queued(fd), time.perf_counter() + _LOOK
                await asyncio.sleep(_LOOK)
                lag = max(0.0, time.perf_counter() - due)
                self._samples.append((lag, max(0.0, lag - (_queued(fd) - ready))))

    def discard(self) -> None:
        """Forget what was sampled so far."""
        self._samples = []

    def drain(self) -> dict[str, float]:
        """What the lags were since the last call; zeros if nothing was sampled."""
        samples, self._samples = np.sort(np.array(self._samples or [(0.0, 0.0)]), axis=0), []
        at = math.ceil(0.99 * len(samples)) - 1  # by rank: the first np.quantile of a process takes 15 ms
        return {
            "lag_mean": float(samples[:, 0].mean()), "lag_p99": float(samples[at, 0]), "lag_max": float(samples[-1, 0]),
            "blocked_p99": float(samples[at, 1]), "blocked_max": float(samples[-1, 1]),
        }  # fmt: skip


def _queued(fd: int) -> float:
    """Seconds for which the thread that a schedstat is of was ready and had no core."""
    return 1e-9 * int(os.pread(fd, 100, 0).split()[1]) if fd >= 0 else 0.0


class _Costs:
    """Measures phases on the running loop."""

    def __init__(self) -> None:
        self.found: list[PhaseCost] = []
        self.monitor = _CoreWaits()

    @contextlib.asynccontextmanager
    async def measured(self, name: str) -> AsyncGenerator[None]:
        await asyncio.sleep(0.005)  # the sample during which the last phase was summed up is none of this one's
        self.monitor.discard()
        clocks = (time.perf_counter, time.process_time, time.thread_time)
        stolen, before = _stolen(), [clock() for clock in clocks]
        yield
        wall, cpu, loop = (clock() - start for clock, start in zip(clocks, before, strict=True))
        await asyncio.sleep(0.002)  # so that a stall at the very end is sampled too
        lag = self.monitor.drain()
        self.found.append(
            PhaseCost(
                phase=name,
                wall=wall,
                cpu=cpu,
                loop=loop,
                stolen=_stolen() - stolen,
                **lag,
            )
        )


async def _replay(
    rollouts: list[Any], folder: Path, traffic: int, seq_len: int, ranks: int, idle: float, options: dict[str, Any]
) -> Replay:
    costs, total = _Costs(), len(rollouts)
    (folder / "saved").mkdir()
    sink = JsonlSink(folder / "saved" / "metrics.jsonl")
    pipeline = RolloutPipeline(
        folder, seq_len=seq_len, ranks=ranks, advantage=AdvantageConfig(), filters=[ZeroAdvantageFilter(enforce=False)],
        save_to=folder / "saved", sinks=[sink], **options,
    )  # fmt: skip
    with contextlib.closing(sink):
        async with _traffic(traffic), costs.monitor, pipeline:
            async with costs.measured("idle"):
                await asyncio.sleep(idle)
            before = _resident(reset_peak=True)
            async with costs.measured("arrival"):
                rollouts.reverse()
                for number in range(total):
                    # Let go of it here: the pipeline has the only reference, as when it came over a socket.
                    # A dump does not say which task a rollout was of: all are of one, and groups are by example.
                    pipeline.arrive(rollouts.pop(), step=0, key=(0, number))
                    await asyncio.sleep(0)
                await pipeline.settled(0)
            async with costs.measured("boundary"):
                report = await pipeline.finish(0)
            peak = _resident()
    with os.scandir(folder) as entries:
        size = sum(e.stat().st_size for e in entries if e.is_file())
    return Replay(
        mode=pipeline.mode, rollouts=report.rollouts, samples=report.samples, tokens=report.tokens, bytes=size, refused=dict(report.refused),
        synthetic_traffic=traffic, phases=tuple(costs.found), breakdown=report.phases.line(0), rss_before=before, rss_peak=peak,
    )  # fmt: skip


async def _replay_phase(
    name: str, body: Callable[[LoopYield], Coroutine[Any, Any, Any]], traffic: int, idle: float
) -> tuple[PhaseCost, PhaseCost]:
    costs = _Costs()
    pause = LoopYield(asyncio.get_running_loop())
    async with _traffic(traffic), costs.monitor:
        async with costs.measured("idle"):
            await asyncio.sleep(idle)
        async with costs.measured(name):
            made = await body(pause)
        del made  # after the phase: what a user keeps is not freed in it
    return costs.found[0], costs.found[1]


class _Stages:
    """Everything that the phases of a step need, made when it is asked for."""

    def __init__(self, raw: list[Any], folder: Path, seq_len: int, ranks: int) -> None:
        self._raw, self._folder, self._seq_len, self._ranks = raw, folder, seq_len, ranks

    def work(self, phase: str) -> Callable[[LoopYield], Any]:
        """The phase, ready to run."""
        if phase == "ingest":
            return lambda pause: _ingested(pause.between(self._raw))
        rollouts = self.rollouts
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
            return lambda pause: save_rollouts(self._folder / "step_0.jsonl", pause.between(slim), durable=False)
        if phase == "metrics_aggregation":
            return lambda _: rollout_metrics(rollouts)
        if phase == "sinks":
            metrics, sink = rollout_metrics(rollouts), JsonlSink(self._folder / "metrics.jsonl")
            return lambda _: (sink.write({"step": 0, **metrics}), sink.close())
        by_rollout = [[s.truncated(self._seq_len) for s in interleave_rollout(r)] for r in rollouts]
        samples = [s for some in by_rollout for s in some]
        if phase == "pack":
            return lambda _: pack_samples(samples, seq_len=self._seq_len, ranks=self._ranks)
        writer = BatchWriter(self._folder, step=0)
        if phase == "write_experts":
            return lambda _: [writer.add([s]) for s in samples]
        if phase == "result_collection_loop":
            written = [writer.add(some) for some in by_rollout]
            n = len(written)
            return lambda _: collected_samples(written, [1.0] * n, [True] * n)
        slots = writer.add(samples)
        packed = pack_samples([s.sample for s in slots], seq_len=self._seq_len, ranks=self._ranks)
        return lambda _: writer.publish(packed, slots, seq_len=self._seq_len, policy_version=0)

    @functools.cached_property
    def rollouts(self) -> list[Rollout]:
        return _ingested(self._raw)


def _ingested(raws: Iterable[Any]) -> list[Rollout]:
    """Those that can be taken; a step with others in it has phases too."""
    taken = []
    for number, raw in enumerate(raws):
        take = rollout_from_msgpack if isinstance(raw, bytes) else rollout_from_verifiers
        try:
            taken.append(take(raw))
        except RolloutRefused as error:
            _log.warning("rollout %d of the dump is left out: %s", number, error)
    return taken


def _stolen() -> float:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


def _resident(*, reset_peak: bool = False) -> int:
    """Resident bytes of this process: now, having begun to note the peak anew, or at the peak. 0 where /proc does not tell."""
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    name = "VmRSS:" if reset_peak else "VmHWM:"
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
