"""headrace plan CONFIG: how a run's mix, epochs and repeats would go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.app import Settings, overrides
from headrace.cli.terminal import console_for, short
from headrace.runs.config.loading import load_config

__all__ = ["plan"]

_LEVELS = "▁▂▃▄▅▆▇█"


def plan(
    config: Path,
    /,
    *,
    settings: Settings = (),
    steps: Annotated[int | None, Parameter(help="How many steps; default: run.steps.")] = None,
    ranks: Annotated[int, Parameter(help="Also check that this many ranks can share the run.")] = 1,
    format: Annotated[Literal["text", "json"], Parameter(help="json: one object for machines.")] = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False,
) -> int:
    """Play the mix of a run through with estimated lengths: tokens, shares, epochs, when sources repeat or run dry.

    A few chunks of every source are tokenised to estimate its size; nothing else is, and nothing is trained.

    ```
    headrace plan examples/quickstart.toml
    headrace plan examples/quickstart.toml --steps 1000 --source.0.weight 0.5
    ```
    """
    from headrace.runs.plan import plan_run

    found = plan_run(load_config(config, overrides(settings)), steps=steps, ranks=ranks)
    if quiet:
        return 0
    console = console_for()
    if format == "json":
        console.print_json(json.dumps(found.to_dict()), ensure_ascii=True)
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("source", "~tokens", "share", "target", "epochs", "~documents", "repeats", "dry"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for s in found.sources:
        table.add_row(
            s.name,
            short(s.tokens),
            f"{s.share:.3f}",
            f"{s.target:.3f}",
            f"{s.epochs:.2f}",
            short(s.documents),
            f"step {s.repeats_at:,}" if s.repeats_at is not None else "–",
            f"step {s.dry_at:,}" if s.dry_at is not None else "–",
        )
    console.print(table)
    console.print("share over the run", style="dim")
    width = max(len(s.name) for s in found.sources)
    for s in found.sources:
        spread = f"{min(s.shares):.3f} to {max(s.shares):.3f}"
        console.print(
            f"  {s.name:<{width}}  {sparkline(s.shares)}  {spread}", highlight=False, markup=False, soft_wrap=True
        )
    for step, weights in found.changes:
        mix = ", ".join(f"{s.name} {w:.3g}" for s, w in zip(found.sources, weights, strict=True))
        console.print(f"from step {step:,}: {mix}", highlight=False, markup=False, soft_wrap=True)
    end = f"the data ends at step {found.ends_at:,}" if found.ends_at is not None else "the data lasts"
    console.print(
        f"{found.steps:,} steps x {found.global_batch_size} x {found.seq_len}: ~{short(found.tokens)} tokens, padding ~{found.padding:.1%}, "
        f"{found.fillers:,} blocks with nothing to learn; {end}",
        highlight=False,
        soft_wrap=True,
    )
    grain = "" if found.blocks_a_pick == 1 else f", in picks of {found.blocks_a_pick} blocks"
    console.print(f"played in {found.seconds:.1f} s{grain}", style="dim", highlight=False)
    for warning in found.warnings:
        console.print(f"[yellow]note[/] {warning}", highlight=False, soft_wrap=True)
    return 0


def sparkline(values: Sequence[float]) -> str:
    """A line of bars, the highest value full; nothing at all is a space."""
    most, top = max(values, default=0.0), len(_LEVELS) - 1
    return "".join(_LEVELS[round(v / most * top)] if v > 0 else " " for v in values)
