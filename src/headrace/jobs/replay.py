"""What a captured step costs the event loop: `replay`.

The rollouts of a dump go through a RolloutPipeline again, on a loop that a sampler looks at every millisecond and that may be kept busy by
background tasks as in a real orchestrator. Each phase is told with its wall time, its CPU time and how late the loop was during it,
and beside them an idle stretch of the same loop with the same tasks, because that is what lag has to be compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.metrics import EventLoopLagMonitor
from headrace.rollouts import AdvantageConfig, RolloutPipeline, ZeroAdvantageFilter
from headrace.rollouts.dumps import read_dump

__all__ = ["PHASES", "PhaseCost", "Replay", "replay"]

PHASES = ("idle", "arrival", "boundary")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """One phase of the replay; seconds."""

    phase: str
    wall: float
    cpu: float
    lag_mean: float
    lag_p99: float
    lag_max: float


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
    seq_len: int = 32_768, ranks: int = 2, folder: Path | None = None, idle: float = 1.0,
) -> Replay:  # fmt: skip
    """Take the rollouts of a dump through the pipeline once, and tell what it cost. The batch is written below `folder` and removed."""
    if synthetic_traffic < 0:
        raise ConfigError(f"synthetic_traffic is {synthetic_traffic}, expected 0 or more background tasks")
    rollouts = list(read_dump(dump))
    # All of the step lies in memory here, which it does not where it arrives: without this the collector walks through its lists again and again.
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="headrace-replay-", dir=folder) as scratch:
        work = _replay(rollouts, Path(scratch), mode, synthetic_traffic, gather_chunk_size, seq_len, ranks, idle)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(work)
        finally:
            gc.unfreeze()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed (`headrace[rl]`), asyncio's own otherwise."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _replay(
    rollouts: list[Any], folder: Path, mode: Literal["arrival", "boundary"], traffic: int, chunk: int | None, seq_len: int, ranks: int, idle: float
) -> Replay:  # fmt: skip
    costs: list[PhaseCost] = []
    monitor = EventLoopLagMonitor(interval=0.001, warn_above={})

    @contextlib.asynccontextmanager
    async def measured(name: str) -> AsyncGenerator[None]:
        await asyncio.sleep(0.005)  # the sample during which the last phase was summed up is none of this one's
        monitor.discard()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        await asyncio.sleep(0.002)  # so that a stall at the very end is sampled too
        lag = monitor.drain()
        costs.append(
            PhaseCost(
                phase=name, wall=wall, cpu=cpu, lag_mean=lag.get("event_loop_lag/mean", 0.0), lag_p99=lag.get("event_loop_lag/p99", 0.0),
                lag_max=lag.get("event_loop_lag/max", 0.0),
            )
        )  # fmt: skip

    total = len(rollouts)
    options: dict[str, Any] = {} if chunk is None else {"gather_chunk_size": chunk}
    pipeline = RolloutPipeline(
        folder, seq_len=seq_len, ranks=ranks, advantage=AdvantageConfig(), filters=[ZeroAdvantageFilter(enforce=False)], mode=mode,
        save_to=folder / "saved", **options,
    )  # fmt: skip
    async with _traffic(traffic), monitor, pipeline:
        async with measured("idle"):
            await asyncio.sleep(idle)
        async with measured("arrival"):
            rollouts.reverse()
            for number in range(total):
                # Let go of it here: the pipeline has the only reference, as when it came over a socket.
                pipeline.arrive(rollouts.pop(), step=0, key=(number, 0))
                await asyncio.sleep(0)
            await pipeline.settled(0)
        async with measured("boundary"):
            report = await pipeline.finish(0)
    size = sum(e.stat().st_size for e in os.scandir(folder) if e.is_file())
    return Replay(
        mode=mode, rollouts=report.rollouts, samples=report.samples, tokens=report.tokens, bytes=size, refused=dict(report.refused),
        synthetic_traffic=traffic, phases=tuple(costs), breakdown=report.phases.line(0),
    )  # fmt: skip
