"""headrace report RUN: the page of a run, saved as one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.markup import escape

from headrace.cli.terminal import TEXT, Line, Output, facts, marked
from headrace.errors import short_number


def report(
    run: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The page; default: report.html in the run's folder.")] = None,
    output: Output = TEXT,
) -> int:
    """Save a run's page as one self-contained HTML file: findings first, curves to zoom into, every metric.

    It is the page of `headrace ui` with the data inside; it needs no network, no package beyond headrace, and works for every kind of run.

    ```
    headrace report runs/quickstart
    headrace report runs/quickstart --format json | jq '.findings[].sentence'
    ```
    """
    from headrace.ui import find_problems, pages, read_run, write_page

    view = read_run(run)
    path = out if out is not None else run / "report.html"
    size, status = write_page(view, path), view.status()
    findings = find_problems(view, status)

    def lines() -> Iterator[Line]:
        yield marked(f"[bold]{escape(view.name)}[/] ({view.kind})  {view.index.lines:,} lines")
        steps = f" of {status['steps']:,}" if status["steps"] else ""
        yield from facts([("state", f"{status['state']} at step {status['step']:,}{steps}")])
        for finding in findings:
            yield marked(f"[yellow]{finding.severity}[/] {escape(finding.sentence)}")
            if finding.remedy:
                yield f"      {finding.remedy}", "dim"
        if not findings:
            yield "nothing stands out", "dim"
        yield from facts([("page", f"{escape(str(path))} ({short_number(size)}B)")])

    panels = [
        {k: p[k] for k in ("title", "key", "healthy")} | {"curves": [c["key"] for c in p["curves"]]}
        for p in pages.metrics(view)["panels"]
    ]
    answer = {
        "path": str(run), "name": view.name, "kind": view.kind, "status": status, "findings": list(map(asdict, findings)),
        "panels": panels, "page": str(path),
    }  # fmt: skip
    output.answer(answer, lines())
    return 0
