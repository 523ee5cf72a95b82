"""Two runs: their curves over each other, and what differs in their configs."""

from __future__ import annotations

from typing import Any

from headrace.ui.pages.config_page import config_pairs
from headrace.ui.pages.page_parts import POINTS, chart
from headrace.ui.run_view import RunView

_CHARTS = ("train/loss", "reward/all/mean", "tokens_per_second", "cells_per_second", "train/grad_norm", "waits/exposed/seconds")  # fmt: skip


def compare(a: RunView, b: RunView) -> dict[str, Any]:
    """Curves and config differences of two runs. Where their data parts is a question of its own (questions.py)."""
    charts = []
    for key in _CHARTS:
        if key in a.index or key in b.index:
            curves = [
                {"key": key, "name": f"{side} {view.name}", **view.index.curve(key, points=POINTS)}
                for side, view in (("A", a), ("B", b))
            ]
            charts.append(chart(a if key in a.index else b, [key], data=False) | {"curves": curves})
    one, other = dict(map(tuple, config_pairs(a.config))), dict(map(tuple, config_pairs(b.config)))
    differing = [
        [key, one.get(key), other.get(key)]
        for key in dict.fromkeys((*one, *other))
        if one.get(key) != other.get(key) and key not in ("run.dir", "run.name")
    ]
    recorded = all((view.path / "flight.jsonl").exists() for view in (a, b))
    return {"a": a.status(), "b": b.status(), "charts": charts, "config": differing, "provenance": recorded}
