"""The list of runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.metrics import SpecBook
from headrace.ui.metrics_index import is_number
from headrace.ui.pages.page_parts import findings, verdict
from headrace.ui.run_view import SPEEDS, RunView, find_runs, some_lines, spec_book


def runs(root: Path, book: SpecBook | None = None) -> dict[str, Any]:
    """Every run below a folder: those at work first, then by their last line.

    Args:
        root: A run's folder, or a folder of runs.
        book: Declarations of all metrics; made unless given.
    """
    book = book if book is not None else spec_book()
    rows = [_row(name, path, book) for name, path in find_runs(root).items()]
    return {"root": str(root), "runs": sorted(rows, key=lambda r: (r["state"] != "running", -(r["changed"] or 0)))}


def _row(name: str, path: Path, book: SpecBook) -> dict[str, Any]:
    """One run, by about a hundred of its lines."""
    lines = some_lines(path / "metrics.jsonl")
    view = RunView(name, path, book)
    view.index.load(lines)
    status, last = view.status(), view.last
    key = "reward/all/mean" if view.kind == "rl" else "train/loss"
    speed, unit = next(((last[k], unit) for k, unit in SPEEDS if is_number(last.get(k))), (None, None))
    seconds, waited = last.get("step/seconds"), last.get("waits/exposed/seconds")
    share = waited / seconds if is_number(waited) and is_number(seconds) and seconds > 0 else None
    values = [value if is_number(value := line.get(key)) else None for line in lines]
    row = {name: status[name] for name in ("run", "name", "kind", "state", "step", "steps", "changed")}
    return row | {
        "key": key, "value": values[-1] if values else None, "curve": values, "speed": speed, "speed_unit": unit, "wait_share": share,
        "verdict": verdict(status, findings(view, status)),
    }  # fmt: skip
