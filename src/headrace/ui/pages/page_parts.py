"""Parts that several pages share: header, tabs, findings, verdict, charts, and one line of metrics as bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.ui.findings import find_problems, healthy_range, title_of
from headrace.ui.metrics_index import Line, family, is_number, steps_of
from headrace.ui.run_view import RunView

POINTS = 600
"""Most points of a curve."""
BARS = 120
"""Most bars of a chart that draws whole lines."""
_MAX_CURVES = 12
"""Most curves of a chart."""


def header(view: RunView) -> dict[str, Any]:
    """What every page of a run begins with: status, tabs, and marks on the time axis."""
    return {"status": view.status(), "tabs": tabs(view), "marks": view.marks()}


def tabs(view: RunView) -> list[str]:
    """Names of the pages that have content for this run."""
    found = ["overview"]
    if (view.path / "flight.jsonl").exists():
        found += ["step", "find"]
    if view.kind == "streams":
        found.append("streams")
    if spool_folder(view) is not None:
        found.append("spool")
    if view.kind == "rl":
        found.append("rl")
    return [*found, "metrics", "config"]


def spool_folder(view: RunView) -> Path | None:
    """The spool that the run's config names; None if there is none."""
    section = view.section("spool")
    if not section.get("enabled"):
        return None
    named = section.get("dir")
    base = Path(str(view.about.get("base", ".")))
    path = base / named if isinstance(named, str) and named else view.path / "spool"
    return path if (path / "meta.json").is_file() else None


def findings(view: RunView, status: dict[str, Any]) -> list[dict[str, Any]]:
    """The problems of a run, the worst first."""
    return [asdict(finding) for finding in find_problems(view, status)]


def verdict(status: dict[str, Any], problems: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Level and sentence that sum up a run, from its `findings`."""
    if not status["lines"] and not status["sketched"]:
        return {"level": "quiet", "text": "No line of metrics yet"}
    if not problems:
        return {"level": "good", "text": "Healthy"}
    is_bad = any(problem["severity"] == "bad" for problem in problems)
    return {"level": "bad" if is_bad else "warn", "text": problems[0]["title"]}


def facts(view: RunView) -> list[list[str]]:
    """[label, value] pairs of what the run is."""
    about = view.about
    found = {"folder": view.path, "config": about.get("config_hash"), "headrace": about.get("headrace"), "started": about.get("created"), "ranks": view.world_size}  # fmt: skip
    return [[label, str(value)[:300]] for label, value in found.items() if value is not None]


# ------------------------------------------------------------------------------------------------------ charts


def chart(view: RunView, keys: Sequence[str], *, title: str | None = None, data: bool = True) -> dict[str, Any]:
    """Curves with one axis.

    Args:
        view: The run.
        keys: Keys of the curves. The first one decides unit, meaning and healthy range.
        title: Title of the chart; the first key in words unless given.
        data: Whether the points are included.
    """
    spec, healthy, counter = view.spec(keys[0]), healthy_range(view, keys[0]), view.is_counter(keys[0])
    unit = spec.unit if spec is not None else ""
    curves = [{"key": key, "name": _curve_name(view, key, keys)} for key in keys]
    return {
        "title": title or title_of(view, keys[0]), "key": spec.key if spec is not None and len(keys) > 1 else keys[0],
        "unit": f"{unit or 'count'} per step" if counter else unit, "help": spec.help if spec is not None else "",
        "healthy": [v if math.isfinite(v) else None for v in healthy] if healthy else None, "over_ranks": spec.reduction.value if spec is not None else "",
        "curves": [curve | view.index.curve(curve["key"], points=POINTS) for curve in curves] if data else curves,
    }  # fmt: skip


def charts(view: RunView, wanted: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Charts from (title, keys). A key that is missing or always zero is left out, and so is a chart without keys."""
    found = ((title, [key for key in keys if is_drawn(view, key)][:_MAX_CURVES]) for title, keys in wanted)
    return [chart(view, keys, title=title) for title, keys in found if keys]


def is_drawn(view: RunView, key: str) -> bool:
    """Whether a curve is more than a constant zero."""
    extremes = view.index.extremes(key)
    return extremes is not None and not extremes[0] == extremes[2] == 0


def _curve_name(view: RunView, key: str, keys: Sequence[str]) -> str:
    """The part of a key in which it differs from the other keys of its chart."""
    if len(keys) == 1:
        return title_of(view, key)
    split = [k.split("/") for k in keys]
    if len({len(parts) for parts in split}) == 1:
        varying = [i for i in range(len(split[0])) if len({parts[i] for parts in split}) > 1]
        return " ".join(key.split("/")[i] for i in varying)
    return key


# ------------------------------------------------------------------------------------------------- whole lines


def bars(view: RunView, lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Lines as bars: the parts of a step in ms, the tokens of each source, the exposed wait of ranks as a share of their time."""
    ranks = max(view.world_size, 1)
    return [_bar(line, ranks) for line in lines]


def _bar(line: Line, ranks: int) -> dict[str, Any]:
    per = steps_of(line) * ranks
    parts = {name: 1000 * v / per for name, v in family(line, "step/", "/seconds").items() if name and v > 0}
    tokens = family(line, "data/source_tokens/") or family(line, "data/modality_total_tokens/")
    found: dict[str, Any] = {"step": line["step"], "parts": parts, "tokens": tokens}
    total = line.get("step/seconds")
    if not is_number(total) or total <= 0:
        return found
    by_rank = line.get("waits/exposed/seconds/by_rank")
    worst, most = line.get("waits/exposed/seconds/worst_rank"), line.get("waits/exposed/seconds_max")
    if isinstance(by_rank, list) and all(is_number(v) for v in by_rank):
        found["ranks"] = [v * ranks / total for v in by_rank[:1024]]
    elif is_number(worst) and is_number(most):
        found["worst"] = [worst, most * ranks / total]
    return found
