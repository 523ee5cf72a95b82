"""headrace report RUN: what a run looked like, as one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.terminal import console_for, facts, short

__all__ = ["report"]


def report(
    run: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The page; default: report.html in the run's folder.")] = None,
    png: Annotated[Path | None, Parameter(help="Also draw the main panels as a picture, for documents.")] = None,
    only: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=False,
            negative=(),
            show_default=False,
            help="Panels for --png: those whose name contains this. May be repeated.",
        ),
    ] = (),
    format: Annotated[
        Literal["text", "json"], Parameter(help="json: facts, findings and panels for machines.")
    ] = "text",
    quiet: Annotated[bool, Parameter(help="Only the exit code.", negative=())] = False,
) -> int:
    """Draw a run's metrics as one self-contained HTML page: interactive curves, the healthy range behind each.

    What stands out is said in words first. The page needs no network and works for every kind of run.

    ```
    headrace report runs/quickstart
    headrace report runs/streams-healthy --png healthy.png --only stream_mixing
    ```
    """  # fmt: skip
    import headrace.jobs.running  # declares what every run measures
    import headrace.ledger.gauges
    import headrace.loader.data_stats
    import headrace.loader.stream_metrics
    import headrace.rollouts.step_metrics  # noqa: F401
    from headrace.dash import read_report, write_page, write_picture

    found = read_report(run)
    path = out if out is not None else run / "report.html"
    size = write_page(found, path)
    drawn = write_picture(found, png, keys=only) if png is not None else 0
    if quiet:
        return 0
    console = console_for()
    if format == "json":
        console.print_json(json.dumps({**found.to_dict(), "page": str(path), "picture": str(png) if png else None}))
        return 0
    console.print(f"[bold]{found.name}[/] ({found.kind})  {len(found.panels)} panels of {len(found.series.steps):,} lines", highlight=False)  # fmt: skip
    facts(console, found.facts)
    for finding in found.findings:
        console.print(f"[yellow]note[/] {finding.sentence}", highlight=False, soft_wrap=True)
    if not found.findings:
        console.print("nothing stands out", style="dim")
    console.print(f"  [dim]page[/]     {path} ({short(size)}B)", highlight=False, soft_wrap=True)
    if png is not None:
        console.print(f"  [dim]picture[/]  {png} ({drawn} panels)", highlight=False, soft_wrap=True)
    return 0
