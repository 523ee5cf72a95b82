"""headrace check CONFIG: what a run would do, without doing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.app import Settings, overrides
from headrace.cli.terminal import console_for, short
from headrace.jobs.config_layers import load_config

__all__ = ["check"]


def check(
    config: Path,
    /,
    *,
    settings: Settings = (),
    ranks: Annotated[int, Parameter(help="Also check that this many ranks can share the run.")] = 1,
    full: Annotated[bool, Parameter(help="Compare everything ever read with its recorded hash.", negative=())] = False,
    format: Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")] = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False,
) -> int:
    """Validate a config, open its sources, and print the plan: rows, tokens, weights, lanes, epochs.

    ```
    headrace check examples/quickstart.toml
    headrace check run.toml --loader.global_batch_size 64 --ranks 8
    ```
    """
    from headrace.jobs.check import check_job

    plan = check_job(load_config(config, overrides(settings)), ranks=ranks, full_check=full)
    if quiet:
        return 0
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(plan.to_dict()))
        return 0
    from rich.table import Table

    console.print(f"[bold]{config}[/] is valid   config {plan.config_hash}   {plan.kind}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("source", "files", "rows", "~tokens", "weight", "delivers", "epochs"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for s in plan.sources:
        table.add_row(
            s.name,
            f"{s.files:,}",
            f"{s.rows:,}",
            short(s.tokens),
            f"{s.weight:.3f}",
            short(s.delivered),
            f"{s.epochs:.2f}",
        )
    console.print(table)
    console.print(
        f"{plan.steps:,} steps x {plan.global_batch_size} x {plan.seq_len} = {short(plan.total_tokens)} tokens; {plan.lanes} lanes, "
        f"world sizes that fit: {', '.join(map(str, plan.world_sizes))}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"tokenizer {plan.tokenizer} ({plan.vocab_size:,} ids)", highlight=False)
    for warning in plan.warnings:
        console.print(f"[yellow]note[/] {warning}", highlight=False, soft_wrap=True)
    return 0
