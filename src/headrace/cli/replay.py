"""headrace replay DUMP: what a captured step costs the event loop."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.terminal import TEXT, Output
from headrace.errors import ConfigError, short_number

Phase = Literal[
    "idle", "arrival", "boundary", "each", "ingest", "pretokenize", "interleave", "write_experts", "compute_advantages", "apply_filters",
    "result_collection_loop", "pack", "training_batch_send", "save_rollouts", "metrics_aggregation", "sinks",
]  # fmt: skip


def replay(
    dump: Annotated[Path, Parameter(help="The captured step: what dump_raw_rollouts wrote in your orchestrator, or --make.")], *,
    make: Annotated[Literal["r3", "text"] | None, Parameter(help="Write a synthetic dump to DUMP instead: r3 has 1.16 GB of routed experts, text 60 million token ids.")] = None,
    scale: Annotated[float | None, Parameter(help="With --make: shorten every turn by this factor; 1 if not given.")] = None,
    phase: Annotated[Phase | None, Parameter(help="Run this phase alone, in a thread beside the loop; `each` runs every phase in turn; idle, arrival and boundary are parts of the whole step.")] = None,
    quick: Annotated[bool, Parameter(help="An idle stretch and every phase alone, as --phase each.", negative=())] = False,
    form: Annotated[Literal["binary", "lists", "msgpack", "json"], Parameter(help="How rollouts arrive: in msgpack with binary columns, as dicts of lists, or as lists in msgpack or JSON text.")] = "lists",
    processes: Annotated[int, Parameter(help="Worker processes that make samples; 0 for a thread.")] = 0,
    gather_chunk_size: Annotated[int | None, Parameter(help="Accepted, and without effect: rollouts are processed when they arrive, so no gather is cut into chunks.")] = None,
    synthetic_traffic: Annotated[int, Parameter(help="Background tasks that keep the loop busy meanwhile.")] = 0,
    seq_len: Annotated[int, Parameter(help="Tokens of a micro batch.")] = 32_768,
    ranks: Annotated[int, Parameter(help="Ranks the batch is packed for.")] = 2,
    output: Output = TEXT,
) -> int:  # fmt: skip
    """Replay a captured step of rollouts and measure wall time, CPU time and the lag of the event loop.

    ```
    headrace replay r3.dump --make r3 --scale 0.1
    headrace replay r3.dump --synthetic-traffic 200
    headrace replay r3.dump --phase interleave
    headrace replay --dump r3.dump --gather-chunk-size 128 --synthetic-traffic 200 --quick
    ```
    """
    if quick and phase not in (None, "each"):
        raise ConfigError(f"--quick runs every phase alone: leave it or --phase {phase} out")
    phase = "each" if quick else phase
    alone = phase is not None and phase not in ("idle", "arrival", "boundary")
    if scale is not None and make is None:
        raise ConfigError("--scale is for --make: a dump that is there is replayed as it is")
    if alone and processes:
        raise ConfigError(f"--phase {phase} runs without a pipeline: leave --processes out, or --phase")

    say = output.say
    if gather_chunk_size is not None:
        say("--gather-chunk-size has no effect: rollouts are processed when they arrive")
    if make is not None:
        from headrace.rollouts.dumps import dump_raw_rollouts, synthetic_rollouts

        count = dump_raw_rollouts(dump, synthetic_rollouts(make, scale=1.0 if scale is None else scale))
        size = dump.stat().st_size
        output.answer(
            {"dump": str(dump), "rollouts": count, "bytes": size},
            [f"{dump}: {count} rollouts, {short_number(size)}B"],
        )
        return 0
    from headrace.rollouts.replay import ALONE, PhaseCost, replay_phase
    from headrace.rollouts.replay import replay as run

    header = f"{'phase':<22} {'wall s':>8} {'CPU s':>8}   loop lag, ms: {'mean':>7} {'p99':>7} {'max':>7}"

    def line(cost: PhaseCost) -> str:
        lags = "".join(f" {1e3 * lag:>7.2f}" for lag in (cost.lag_mean, cost.lag_p99, cost.lag_max))
        return f"{cost.phase:<22} {cost.wall:>8.3f} {cost.cpu:>8.3f}                {lags}"

    if alone:
        phases = []
        say(header)
        for name in ALONE if phase == "each" else (str(phase),):
            idle, cost = replay_phase(
                dump, name, synthetic_traffic=synthetic_traffic, seq_len=seq_len, ranks=ranks, form=form
            )
            phases.append({**asdict(cost), "idle": asdict(idle)})
            say(f"{line(cost)}   (idle p99 {1e3 * idle.lag_p99:.2f}, max {1e3 * idle.lag_max:.2f})")
        output.answer({"synthetic_traffic": synthetic_traffic, "phases": phases})
        return 0
    found = run(dump, synthetic_traffic=synthetic_traffic, seq_len=seq_len, ranks=ranks, processes=processes, form=form)
    costs = [c for c in found.phases if phase in (None, c.phase)]
    output.answer(asdict(found) | {"phases": [asdict(c) for c in costs]})
    sizes = f"{found.rollouts} rollouts, {found.samples} samples, {short_number(found.tokens)} tokens, {short_number(found.bytes)}B"
    say(f"{sizes}, {synthetic_traffic} background tasks")
    say(header)
    for cost in costs:
        say(line(cost))
    idle = found.phases[0]
    for cost in costs:
        if cost is not idle:
            p99, most = 1e3 * (cost.lag_p99 - idle.lag_p99), 1e3 * (cost.lag_max - idle.lag_max)
            say(f"{cost.phase} above idle: p99 {p99:+.2f} ms, max {most:+.2f} ms")
    say(found.breakdown)
    for cause, count in found.refused.items():
        say(f"refused: {count} for {cause}")
    return 0
