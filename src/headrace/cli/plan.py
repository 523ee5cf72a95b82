"""headrace plan CONFIG: how a run's mix, epochs and repeats would go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace.cli.app import Settings, overrides
from headrace.cli.terminal import TEXT, Line, Output, notes, table_of
from headrace.errors import short_number
from headrace.runs.config.loading import load_config

if TYPE_CHECKING:
    from headrace.runs.plan import Forecast

_LEVELS = "▁▂▃▄▅▆▇█"


def plan(
    config: Path,
    /,
    *,
    settings: Settings = (),
    steps: Annotated[int | None, Parameter(help="How many steps; default: run.steps.")] = None,
    ranks: Annotated[int, Parameter(help="Also check that this many ranks can share the run.")] = 1,
    output: Output = TEXT,
) -> int:
    """Work out how the mix of a run goes with estimated lengths: tokens, shares, epochs, when sources repeat or run dry.

    A few chunks of every source are tokenised to estimate its size; nothing else is, and nothing is trained.

    ```
    headrace plan examples/quickstart.toml
    headrace plan examples/quickstart.toml --steps 1000 --source.0.weight 0.5
    ```
    """
    from headrace.runs.plan import plan_run

    found = plan_run(load_config(config, overrides(settings)), steps=steps, ranks=ranks)
    output.answer(found, _forecast_lines(found))
    return 0


def _forecast_lines(found: Forecast) -> Iterator[Line]:
    table = table_of("source", "~tokens", "share", "target", "epochs", "~documents", "repeats", "dry")
    for s in found.sources:
        steps = [f"step {step:,}" if step is not None else "–" for step in (s.repeats_at, s.dry_at)]
        share = f"{s.share:.3f}", f"{s.target:.3f}", f"{s.epochs:.2f}"
        table.add_row(s.name, short_number(s.tokens), *share, short_number(s.documents), *steps)
    yield table
    yield "share over the run", "dim"
    width = max(len(s.name) for s in found.sources)
    for s in found.sources:
        spread = f"{min(s.shares):.3f} to {max(s.shares):.3f}"
        yield f"  {s.name:<{width}}  {sparkline(s.shares)}  {spread}"
    for step, weights in found.changes:
        mix = ", ".join(f"{s.name} {w:.3g}" for s, w in zip(found.sources, weights, strict=True))
        yield f"from step {step:,}: {mix}"
    end = f"the data ends at step {found.ends_at:,}" if found.ends_at is not None else "the data lasts"
    size = f"{found.steps:,} steps x {found.global_batch_size} x {found.seq_len}"
    yield f"{size}: ~{short_number(found.tokens)} tokens, padding ~{found.padding:.1%}; {end}"
    yield from notes(found.warnings)


def sparkline(values: Sequence[float]) -> str:
    """A line of bars, the highest value full; nothing at all is a space."""
    most, top = max(values, default=0.0), len(_LEVELS) - 1
    return "".join(_LEVELS[round(v / most * top)] if v > 0 else " " for v in values)
