"""headrace report RUN: the page of a run, saved as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from headrace.cli.terminal import Format, Quiet, console_for, facts, print_json, short


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
            show_default=False,
            help="Panels for --png: those whose name contains this. May be repeated.",
        ),
    ] = (),
    format: Format = "text",
    quiet: Quiet = False,
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
    if format == "json":
        panels = [
            {k: p[k] for k in ("title", "key", "healthy")} | {"curves": [c["key"] for c in p["curves"]]}
            for p in pages.metrics(view)["panels"]
        ]
        print_json(
            {
                "path": str(run), "name": view.name, "kind": view.kind, "status": status, "findings": [f.to_dict() for f in findings],
                "panels": panels, "page": str(path), "picture": str(png) if png else None,
            }
        )  # fmt: skip
        return 0
    console = console_for()
    console.print(f"[bold]{escape(view.name)}[/] ({view.kind})  {view.index.lines:,} lines")
    steps = f" of {status['steps']:,}" if status["steps"] else ""
    facts(console, [("state", f"{status['state']} at step {status['step']:,}{steps}")])
    for finding in findings:
        console.print(f"[yellow]{finding.severity}[/] {escape(finding.sentence)}")
        if finding.remedy:
            console.print(f"      {finding.remedy}", style="dim", markup=False)
    if not findings:
        console.print("nothing stands out", style="dim")
    facts(console, [("page", f"{escape(str(path))} ({short(size)}B)")])
    if png is not None:
        facts(console, [("picture", f"{escape(str(png))} ({drawn} panels)")])
    return 0
