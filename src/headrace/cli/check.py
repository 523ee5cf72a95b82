"""headrace check CONFIG: what a run would do, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from headrace.cli.app import Settings, names_sources, no_config, overrides
from headrace.cli.terminal import console_for, facts, print_plain, short
from headrace.runs.config.loading import load_any_config
from headrace.runs.config.rl import RLConfig
from headrace.runs.config.schema import RunConfig

if TYPE_CHECKING:
    from headrace.runs.check import Plan
    from headrace.runs.config.streams import StreamsConfig

__all__ = ["check"]


def check(
    config: Path | None = None,
    /,
    *,
    settings: Settings = (),
    ranks: Annotated[int, Parameter(help="Also check that this many ranks can share the run.")] = 1,
    full: Annotated[bool, Parameter(help="Compare everything ever read with its recorded hash.", negative=())] = False,
    hashes: Annotated[
        Path | None,
        Parameter(help="Read all data and compare it with the hashes in this folder; record there what has none yet."),
    ] = None,
    stale_threshold: Annotated[
        int | None,
        Parameter(help="Of a stream job: would a ledger that forgets groups after so many steps do so falsely?"),
    ] = None,
    format: Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")] = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False,
) -> int:
    """Validate a config, open its sources, and print the plan: rows, tokens, weights, lanes, epochs.

    Of a stream job the plan is played through, step by step and without reading a row: picks, absences, how often slices run
    dry, how long the unluckiest waits; and it warns of runs that would starve a modality or spike.

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
    if isinstance(checked, RLConfig):
        return _check_rl(named, checked, format=format, quiet=quiet)
    if not isinstance(checked, RunConfig):
        return _check_streams(named, checked, ranks=ranks, stale_threshold=stale_threshold, format=format, quiet=quiet)
    from headrace.runs.check import check_hashes, check_job

    counted = check_hashes(checked, hashes) if hashes is not None else {}
    plan = check_job(checked, ranks=ranks, full_check=full)
    if quiet:
        return 0
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(plan.to_dict()))
        return 0
    from rich.table import Table

    console.print(f"[bold]{named}[/] is valid   config {plan.config_hash}   {plan.kind}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("source", "files", "rows", "~tokens", "~median", "weight", "delivers", "epochs"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for s in plan.sources:
        table.add_row(
            s.name,
            f"{s.files:,}",
            f"{s.rows:,}",
            short(s.tokens),
            short(s.median_tokens),
            f"{s.weight:.3f}",
            short(s.delivered),
            f"{s.epochs:.2f}",
        )
    console.print(table)
    for s in plan.sources:
        if s.first_document:
            print_plain(console, f"first document of {s.name}: {_first_words(s.first_document)}", "dim")
    console.print(
        f"{plan.steps:,} steps x {plan.global_batch_size} x {plan.seq_len} = {short(plan.total_tokens)} tokens; {plan.lanes} lanes",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_world_sizes_text(plan), highlight=False, soft_wrap=True)
    for name, (compared, recorded) in counted.items():
        console.print(
            f"source {name}: {compared:,} chunks compared, {recorded:,} recorded in {hashes}", highlight=False
        )
    console.print(f"tokenizer {plan.tokenizer} ({plan.vocab_size:,} ids)", highlight=False)
    for warning in plan.warnings:
        console.print(f"[yellow]note[/] {warning}", highlight=False, soft_wrap=True)
    return 0


def _first_words(text: str, most: int = 60) -> str:
    """The beginning of a text in one line, quoted as it is written in Python."""
    return ascii(text[:most]) + ("…" if len(text) > most else "")


def _world_sizes_text(plan: Plan) -> str:
    """Numbers of ranks that a run can have, and what those cost at which ranks share lanes."""
    sizes = list(zip(plan.world_sizes, plan.lanes_followed, strict=True))
    alone = [n for n, followed in sizes if followed * n == plan.lanes]
    shared = [f"{n} (x{followed * n / plan.lanes:.3g})" for n, followed in sizes if followed * n != plan.lanes]
    text = f"world sizes that make every window once: {', '.join(map(str, alone))}"
    return text + (
        f"; that make windows on several ranks: {', '.join(shared[:12])}{', …' if len(shared) > 12 else ''}"
        if shared
        else ""
    )


def _check_rl(named: str, config: RLConfig, *, format: str, quiet: bool) -> int:
    """Import the environments of an RL config and say what a run would do."""
    from headrace.rollouts.environments import load_environment

    for env in config.env:
        load_environment(env.spec, name=env.name, base=Path(), seed=config.run.seed, options=env.options)
    rollouts = (
        sum(e.weight * e.group_size for e in config.env)
        / sum(e.weight for e in config.env)
        * config.rollouts.groups_per_step
    )
    plan = {
        "kind": config.kind, "config_hash": config.hash, "steps": config.run.steps, "environments": [e.name for e in config.env],
        "rollouts_per_step": round(rollouts), "lag": config.rollouts.lag, "engine": config.engine.kind, "model": config.policy.model,
    }  # fmt: skip
    if quiet:
        return 0
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(plan))
        return 0
    console.print(f"[bold]{named}[/]: an RL run", highlight=False)
    facts(console, [(key, str(value)) for key, value in plan.items() if key != "kind"])
    return 0


def _check_streams(
    name: str, config: StreamsConfig, *, ranks: int, stale_threshold: int | None, format: str, quiet: bool
) -> int:
    from headrace.runs.streams_check import check_streams

    plan = check_streams(config, ranks=ranks, stale_threshold=stale_threshold)
    if quiet:
        return 0
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(plan.to_dict()))
        return 0
    from rich.table import Table

    console.print(f"[bold]{name}[/] is valid   config {plan.config_hash}   {plan.kind}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("modality", "files", "rows", "batch", "picks", "share", "absent", "longest absence"):
        table.add_column(name, justify="left" if name == "modality" else "right")
    for m in plan.modalities:
        table.add_row(
            m.name, f"{m.files:,}", f"{m.rows:,}", f"{m.batch_size:,}", f"{m.picks:,}", f"{m.share:.3f}", f"{m.absent:.0%}", f"{m.longest_absence:,} steps"
        )  # fmt: skip
    console.print(table)
    lines = (
        f"{plan.steps:,} steps, {plan.epochs:.2f} epochs of {plan.picks_an_epoch:,} picks; pool of {plan.pool}"
        + (f" in each of {plan.lanes} lanes" if plan.lanes > 1 else ""),
        f"slices run dry at {plan.exhaust_rate:.1%} of the steps ({plan.exhausts_a_step:.2f} a step); what is left of them differs by {plan.spread_mean:.2f}",
        f"longest wait from pick to pick: {plan.worst_pick_gap:,} steps" + (f" ({plan.worst_gap_stream})" if plan.worst_gap_stream else "")
        + f"; overdue at most {plan.overdue_max:.1f}",
    )  # fmt: skip
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"played {plan.played:,} steps in {plan.seconds:.1f} s", style="dim", highlight=False)
    for warning in plan.warnings:
        console.print(f"[yellow]note[/] {warning}", highlight=False, soft_wrap=True)
    return 0
