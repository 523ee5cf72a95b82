"""headrace check CONFIG: what a run would do, without doing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.app import Settings, names_sources, no_config, overrides
from headrace.cli.terminal import TEXT, Line, Output, facts, marked, notes, table_of
from headrace.errors import short_number
from headrace.runs.config.loading import load_any_config
from headrace.runs.config.rl import RLConfig
from headrace.runs.config.schema import RunConfig

if TYPE_CHECKING:
    from headrace.runs.check import Plan
    from headrace.runs.streams_check import StreamForecast


def check(
    config: Path | None = None,
    /,
    *,
    settings: Settings = (),
    ranks: Annotated[int, Parameter(help="Also check that this many ranks can share the run.")] = 1,
    full: Annotated[bool, Parameter(help="Compare everything ever read with its recorded hash.")] = False,
    hashes: Annotated[
        Path | None,
        Parameter(help="Read all data and compare it with the hashes in this folder; record there what has none yet."),
    ] = None,
    stale_threshold: Annotated[
        int | None,
        Parameter(help="Of a stream job: would a ledger that evicts groups after so many steps do so falsely?"),
    ] = None,
    output: Output = TEXT,
) -> int:
    """Validate a config, open its sources, and print the plan: rows, tokens, weights, lanes, epochs.

    Of a stream job the plan is played through, step by step and without reading a row: picks, absences, how often slices run
    dry, the longest wait from pick to pick; and it warns of runs that would starve a modality or spike.

    ```
    headrace check examples/quickstart.toml
    headrace check examples/stream_mixing/diag_exhaust_spike.toml
    headrace check run.toml --loader.global_batch_size 64 --ranks 8
    headrace check run.toml --hashes data.hashes
    DATASET_SPECS="jsonl:web/*.jsonl" headrace check
    ```
    """
    changed = overrides(settings)
    if config is None and not names_sources(changed):
        return no_config("check")
    checked = load_any_config(config, changed)
    named = str(config) if config is not None else "the environment"
    if isinstance(checked, RunConfig):
        from headrace.runs.check import check_hashes, check_job

        counted = check_hashes(checked, hashes) if hashes is not None else {}
        plan = check_job(checked, ranks=ranks, full_check=full)
        lines = [
            f"source {name}: {compared:,} chunks compared, {recorded:,} recorded in {hashes}"
            for name, (compared, recorded) in counted.items()
        ]
        output.answer(plan, _plan_lines(named, plan, lines))
    elif isinstance(checked, RLConfig):
        rl_plan = _rl_plan(checked)
        output.answer(rl_plan, _rl_lines(named, rl_plan))
    else:
        from headrace.runs.config.streams import StreamsConfig
        from headrace.runs.streams_check import check_streams

        assert isinstance(checked, StreamsConfig)
        found = check_streams(checked, ranks=ranks, stale_threshold=stale_threshold)
        output.answer(found, _stream_lines(named, found))
    return 0


def _plan_lines(named: str, plan: Plan, hash_lines: list[str]) -> Iterator[Line]:
    yield marked(f"[bold]{named}[/] is valid   config {plan.config_hash}   {plan.kind}")
    table = table_of("source", "files", "rows", "~tokens", "~median", "weight", "delivers", "epochs")
    for s in plan.sources:
        table.add_row(
            s.name, f"{s.files:,}", f"{s.rows:,}", short_number(s.tokens), short_number(s.median_tokens), f"{s.weight:.3f}", short_number(s.delivered), f"{s.epochs:.2f}"
        )  # fmt: skip
    yield table
    for s in plan.sources:
        if s.first_document:
            text = ascii(s.first_document[:60]) + ("…" if len(s.first_document) > 60 else "")
            yield f"first document of {s.name}: {text}", "dim"
    size = (
        f"{plan.steps:,} steps x {plan.global_batch_size} x {plan.seq_len} = {short_number(plan.total_tokens)} tokens"
    )
    yield f"{size}; {plan.lanes} lanes"
    yield from _world_sizes_text(plan).splitlines()
    yield from hash_lines
    yield f"tokenizer {plan.tokenizer} ({plan.vocab_size:,} ids)"
    yield from notes(plan.warnings)


def _world_sizes_text(plan: Plan) -> str:
    """Numbers of ranks that a run can have; for those at which ranks share lanes, how often each window is made."""
    sizes = list(zip(plan.world_sizes, plan.lanes_followed, strict=True))
    alone = [str(n) for n, followed in sizes if followed * n == plan.lanes]
    shared = [f"{n} (x{followed * n / plan.lanes:.3g})" for n, followed in sizes if followed * n != plan.lanes]
    text = f"world sizes that make every window once: {', '.join(alone)}"
    if shared:
        more = ", …" if len(shared) > 12 else ""
        text += f"; that make windows on several ranks: {', '.join(shared[:12])}{more}"
    if plan.lane_bytes:
        ranks, fewest = min(sizes, key=lambda size: size[1])
        text += f"\nwindows in memory: {short_number(plan.lane_bytes * plan.lanes)}B with 1 rank"
        text += f", {short_number(plan.lane_bytes * fewest)}B a rank with {ranks}" if ranks > 1 else ""
    return text


def _rl_plan(config: RLConfig) -> dict[str, object]:
    """Import the environments of an RL config and work out what a run would do."""
    from headrace.rollouts.environments import load_environment

    for env in config.env:
        load_environment(env.spec, name=env.name, base=Path(), seed=config.run.seed, options=env.options)
    mean_size = sum(e.weight * e.group_size for e in config.env) / sum(e.weight for e in config.env)
    return {
        "kind": config.kind, "config_hash": config.hash, "steps": config.run.steps, "environments": [e.name for e in config.env],
        "rollouts_per_step": round(mean_size * config.rollouts.groups_per_step), "lag": config.rollouts.lag, "engine": config.engine.kind,
        "model": config.policy.model,
    }  # fmt: skip


def _rl_lines(named: str, plan: dict[str, object]) -> Iterator[Line]:
    yield marked(f"[bold]{named}[/]: an RL run")
    yield from facts((key, str(value)) for key, value in plan.items() if key != "kind")


def _stream_lines(named: str, plan: StreamForecast) -> Iterator[Line]:
    yield marked(f"[bold]{named}[/] is valid   config {plan.config_hash}   {plan.kind}")
    table = table_of("modality", "files", "rows", "batch", "picks", "share", "absent", "longest absence")
    for m in plan.modalities:
        table.add_row(
            m.name, f"{m.files:,}", f"{m.rows:,}", f"{m.batch_size:,}", f"{m.picks:,}", f"{m.share:.3f}", f"{m.absent:.0%}", f"{m.longest_absence:,} steps"
        )  # fmt: skip
    yield table
    lanes = f" in each of {plan.lanes} lanes" if plan.lanes > 1 else ""
    yield f"{plan.steps:,} steps, {plan.epochs:.2f} epochs of {plan.picks_an_epoch:,} picks; pool of {plan.pool}{lanes}"
    yield (
        f"slices run dry at {plan.exhaust_rate:.1%} of the steps ({plan.exhausts_a_step:.2f} a step); what is left of them differs by {plan.spread_mean:.2f}"
    )
    stream = f" ({plan.worst_gap_stream})" if plan.worst_gap_stream else ""
    wait = f"longest wait from pick to pick: {plan.worst_pick_gap:,} steps{stream}"
    yield f"{wait}; overdue at most {plan.overdue_max:.1f}"
    yield f"played {plan.played:,} steps in {plan.seconds:.1f} s", "dim"
    yield from notes(plan.warnings)
