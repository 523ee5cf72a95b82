"""headrace report RUN: the page of a run, saved as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.markup import escape

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
    """Save a run's page as one self-contained HTML file: findings first, curves to zoom into, every metric.

    It is the page of `headrace ui` with the data inside; it needs no network, no package beyond headrace, and works for every kind of run.

    ```
    headrace report runs/quickstart
    headrace report runs/streams-healthy --png healthy.png --only stream_mixing
    ```
    """  # fmt: skip
    from headrace.ui import find_problems, pages, read_run, write_page, write_picture

    view = read_run(run)
    path = out if out is not None else run / "report.html"
    size = write_page(view, path)
    drawn = write_picture(view, png, keys=only) if png is not None else 0
    if quiet:
        return 0
    status = view.status()
    findings = find_problems(view, status)
    console = console_for()
    if format == "json":
        panels = [
            {k: p[k] for k in ("title", "key", "healthy")} | {"curves": [c["key"] for c in p["curves"]]}
            for p in pages.metrics(view)["panels"]
        ]
        value = {
            "path": str(run),
            "name": view.name,
            "kind": view.kind,
            "status": status,
            "findings": [f.to_dict() for f in findings],
            "panels": panels,
        }
        console.print_json(json.dumps({**value, "page": str(path), "picture": str(png) if png else None}))
        return 0
    console.print(f"[bold]{escape(view.name)}[/] ({view.kind})  {view.index.lines:,} lines", highlight=False)
    facts(
        console,
        [
            (
                "state",
                f"{status['state']} at step {status['step']:,}"
                + (f" of {status['steps']:,}" if status["steps"] else ""),
            )
        ],
    )
    for finding in findings:
        console.print(f"[yellow]{finding.severity}[/] {escape(finding.sentence)}", highlight=False, soft_wrap=True)
        if finding.remedy:
            console.print(f"      {finding.remedy}", style="dim", highlight=False, soft_wrap=True, markup=False)
    if not findings:
        console.print("nothing stands out", style="dim")
    console.print(f"  [dim]page[/]     {escape(str(path))} ({short(size)}B)", highlight=False, soft_wrap=True)
    if png is not None:
        console.print(f"  [dim]picture[/]  {escape(str(png))} ({drawn} panels)", highlight=False, soft_wrap=True)
    return 0
