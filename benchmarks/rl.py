"""The RL loop measured: the orchestrator beside bare asyncio with thousands of fake environments, and `sort.toml` to its accuracy.

    python benchmarks/rl.py orchestrator [--environments 4000] [--steps 4]
    python benchmarks/rl.py sort [--seeds 0 1 2]

Orchestrator: each fake environment sleeps for a moment and returns a rollout of 5 + 4 tokens; what is left is the scheduler, the arrival log, the pipeline and the batch
file. Figures are CPU seconds of the process, so that a busy machine does not change them much; loop lag is sampled every millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from headrace.metrics import EventLoopLagMonitor
from headrace.rollouts import AdvantageConfig, EnvPolicy, GroupBook, RolloutPipeline, RolloutScheduler
from headrace.rollouts.arrival_log import ArrivalLog
from headrace.rollouts.records import Rollout, Step, StepTokens

GROUP = 16


def made_rollout(task: int, member: int, prompt: int = 5, completion: int = 4) -> Rollout:
    """A rollout of so many tokens, as an environment makes it."""
    tokens = StepTokens(
        prompt_ids=np.arange(prompt, dtype=np.int32), prompt_mask=np.zeros(prompt, np.uint8), completion_ids=np.arange(completion, dtype=np.int32),
        completion_mask=np.ones(completion, np.uint8), completion_logprobs=np.full(completion, -0.5, np.float32),
    )  # fmt: skip
    turn = Step(prompt="1" * prompt, completion="6" * completion, tokens=tokens)
    return Rollout(example_id=task, env_name="fake", reward=float(member % 2), trajectory=(turn,))


def seconds_of(number: int) -> float:
    """How long an environment takes: spread over a second, as real ones are; all at once would measure one long turn of the loop."""
    return (number * 7919 % 1000) / 1000


async def bare(rollouts: int, environments: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of the same sleeps and rollouts under nothing but a semaphore, and the loop's lag."""
    limit = asyncio.Semaphore(environments)

    async def one(number: int) -> Rollout:
        async with limit:
            await asyncio.sleep(seconds_of(number))
            return made_rollout(number // GROUP, number % GROUP)

    async with EventLoopLagMonitor(interval=0.001, warn_above={}) as lag:
        started = time.process_time()
        for first in range(0, rollouts, environments):
            await asyncio.gather(*(one(n) for n in range(first, first + environments)))
        return time.process_time() - started, lag.drain()


async def orchestrated(folder: Path, steps: int, environments: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of `steps` steps of `environments` rollouts each, and the loop's lag."""
    log = ArrivalLog(folder / "arrivals")

    async def play(request) -> Rollout:
        await asyncio.sleep(seconds_of(request.task * GROUP + request.member))
        rollout = made_rollout(request.task, request.member)
        log.append(request, rollout)
        return rollout

    book = GroupBook([EnvPolicy(env_name="fake", group_size=GROUP)], groups_per_step=environments // GROUP, lag=1)
    async with RolloutPipeline(folder / "batches", seq_len=4096, advantage=AdvantageConfig(kind="std")) as pipeline:
        scheduler = RolloutScheduler(
            book, pipeline, environments={"fake": play}, env_of=lambda task: "fake", concurrency=environments
        )
        async with EventLoopLagMonitor(interval=0.001, warn_above={}) as lag:
            started = time.process_time()
            async for report in scheduler.run(steps):
                scheduler.policy_is(report.step + 1)
            return time.process_time() - started, lag.drain()


def held_bytes(count: int = 2000) -> float:
    """Bytes that a rollout of 640 tokens takes while it waits for its step."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    held = [made_rollout(i, 0, prompt=40, completion=600) for i in range(count)]
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / len(held)


def orchestrator(environments: int, steps: int) -> None:
    """Print CPU per rollout, rollouts per second and core, and loop lag."""
    rollouts = steps * environments
    bare_seconds, idle = asyncio.run(bare(rollouts, environments))
    with tempfile.TemporaryDirectory() as folder:
        seconds, lag = asyncio.run(orchestrated(Path(folder), steps, environments))
    print(f"orchestrator, {environments:,} environments, {steps} steps, {rollouts:,} rollouts of 9 tokens")
    print(
        f"  CPU a rollout      {1e3 * seconds / rollouts:.3f} ms   bare asyncio {1e3 * bare_seconds / rollouts:.3f} ms"
    )
    print(f"  rollouts/s/core    {rollouts / seconds:,.0f}")
    print(f"  memory a rollout   {held_bytes() / 1e3:.1f} KB   buffered, 640 tokens")
    for name, found in (("orchestrator", lag), ("bare asyncio", idle)):
        p99, largest = (1e3 * found[f"event_loop_lag/{statistic}"] for statistic in ("p99", "max"))
        print(f"  loop lag           p99 {p99:.1f} ms   max {largest:.1f} ms   {name}")


def sort(seeds: list[int]) -> None:
    """Print accuracy, wall and CPU seconds of examples/rl/sort.toml."""
    example = Path(__file__).parents[1] / "examples" / "rl" / "sort.toml"
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "headrace",
                "run",
                str(example),
                "--run.dir",
                f"{folder}/sort",
                "--run.seed",
                str(seed),
            ]
            before, started = _children(), time.perf_counter()
            subprocess.run([*command, "--quiet"], check=True)
            wall, cpu = time.perf_counter() - started, _children() - before
            summary = json.loads((Path(folder) / "sort" / "summary.json").read_text())
        print(
            f"sort.toml, seed {seed}: {summary['accuracy']:.1%} held out, {wall:.1f} s wall, {cpu:.1f} s CPU, {summary['steps']} steps",
            flush=True,
        )


def _children() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["orchestrator", "sort"])
    parser.add_argument("--environments", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    if args.part in (None, "orchestrator"):
        orchestrator(args.environments, args.steps)
    if args.part in (None, "sort"):
        sort(args.seeds)


if __name__ == "__main__":
    main()
