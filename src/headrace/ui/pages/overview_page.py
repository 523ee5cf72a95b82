"""The first page of a run, and what is new on it since a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.errors import count_text
from headrace.ui.findings import recent_lines, recent_waits
from headrace.ui.metrics_index import is_number, steps_of
from headrace.ui.pages.page_parts import BARS, bars, chart, facts, findings, header, verdict
from headrace.ui.run_view import SPEEDS, RunView

_CHARTS = ("reward/all/mean", "train/loss", "tokens_per_second", "cells_per_second", "train/grad_norm", "train/lr")
_MOST_NEW = 200
"""Most lines that are sent at once."""


def overview(view: RunView) -> dict[str, Any]:
    """Status, findings, figures, charts and bars of a run."""
    found = header(view)
    return found | _top(view, found["status"]) | {
        "charts": [chart(view, [key]) for key in _CHARTS if key in view.index], "lines": bars(view, view.index.sampled(BARS)),
        "targets": view.targets(), "facts": facts(view),
    }  # fmt: skip


def new_lines(view: RunView, after: int, keys: Sequence[str]) -> dict[str, Any]:
    """What a page that has the first `after` lines lacks: points of `keys`, bars, status and findings."""
    fresh = view.index.after(after)[-_MOST_NEW:]
    points: dict[str, list[Any]] = {key: [] for key in keys}
    for line in fresh:
        for key in keys:
            if key in line:
                value = line[key] if is_number(line[key]) else None
                per = steps_of(line) if view.is_counter(key) else 1
                points[key].append([line["step"], None if value is None else value / per])
    status = view.status()
    return {"status": status, **_top(view, status), "points": points, "lines": bars(view, fresh)}


def _top(view: RunView, status: dict[str, Any]) -> dict[str, Any]:
    """The part of the page that is sent again with new lines."""
    problems = findings(view, status)
    return {"verdict": verdict(status, problems), "findings": problems, "figures": _figures(view)}


def _figures(view: RunView) -> list[dict[str, Any]]:
    """The numbers at the top, each with a note."""
    last, found = view.last, []

    def add(label: str, key: str, value: Any, unit: str = "", note: str = "") -> None:
        if is_number(value):
            found.append({"label": label, "key": key, "value": value, "unit": unit, "note": note})

    add("Reward", "reward/all/mean", last.get("reward/all/mean"), note="mean over the last step's rollouts")
    extremes = view.index.extremes("train/loss")
    least = f"lowest {extremes[0]:.4g} at step {extremes[1]:,}" if extremes else ""
    add("Loss", "train/loss", last.get("train/loss"), note=least)
    for key, unit in SPEEDS:
        means = view.index.means(key)
        add("Throughput", key, last.get(key), unit, f"median {np.median(means):,.0f}" if len(means) else "")
    waits, total, steps = recent_waits(view)
    if total > 0:
        name, seconds = next(iter(waits.items()), ("", 0.0))
        note = f"mostly {name}" if seconds / total > 0.005 else f"of the last {steps:,} steps"
        add("Exposed wait", "waits/exposed/seconds", 100 * sum(waits.values()) / total, "%", note)
        mean = 1000 * total / max(steps, 1) / max(view.world_size, 1)
        add("Step time", "step/seconds", mean, "ms", f"mean over {count_text(len(recent_lines(view)), 'line')}")
    return found
