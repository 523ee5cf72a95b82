"""Every metric of a run, and the points of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.ui.findings import key_words, title_of
from headrace.ui.pages.page_parts import POINTS, chart, findings, header, is_drawn
from headrace.ui.run_view import RunView

_MAX_KEYS = 60
"""Most keys of one request for points."""
_GROUPS = {
    "Training": ("train", "tokens_per_second", "cells_per_second", "seconds"),
    "Data": ("data", "text", "loader"),
    "Streams": ("stream_mixing",),
    "Ledger": ("ledger", "ledger_wipe_count"),
    "Rollouts": ("reward", "rollouts", "solve_all", "solve_none", "event_loop_lag", "turns", "completion_length", "is_truncated", "error", "filter", "staleness"),
    "Spool": ("spool",),
    "Waits": ("wait", "waits"),
    "Phases": ("phase",),
    "Other": (),
}  # fmt: skip
"""Groups of the page in their order, with the first words of their keys."""


def metrics(view: RunView) -> dict[str, Any]:
    """Every metric by family. Points are asked for by key, when a chart comes into view."""
    known = view.index.known_keys()
    shown = set(known) - {f"{key}{tail}" for key in known for tail in ("/worst_rank", "/by_rank")}
    shown -= {f"{key}_max" for key in known if (spec := view.book.find(key)) is not None and spec.with_max}
    families: dict[str, list[str]] = {}
    zero = []
    for key in known:
        if key not in shown or key.startswith("step/"):
            continue
        if view.index.extremes(key) is not None and not is_drawn(view, key):
            zero.append(key)
            continue
        spec = view.book.find(key)
        family = spec.key if spec is not None else key
        stem = family.removesuffix("_min").removesuffix("_max") if family.endswith(("_min", "_max")) else family
        families.setdefault(stem if {f"{stem}_min", f"{stem}_max"} <= set(known) else family, []).append(key)
    panels: list[dict[str, Any]] = [
        chart(view, sorted(keys)[:12], title=_family_title(view, family, keys), data=False)
        | {"group": _group(family), "key": family, "last": view.last.get(keys[0]) if len(keys) == 1 else None}
        for family, keys in families.items()
    ]
    order = list(_GROUPS)
    panels.sort(key=lambda p: (order.index(p["group"]), p["key"]))
    found = header(view)
    return found | {"panels": panels, "zero": zero, "findings": findings(view, found["status"])}


def curves(
    view: RunView, keys: Sequence[str], *, first: int | None = None, last: int | None = None, points: int = POINTS
) -> dict[str, Any]:
    """Points of some keys, over the whole run or between two steps.

    Args:
        view: The run.
        keys: The keys. Those that the run does not have are left out.
        first, last: The steps; None: the first or the last of the run.
        points: Most points of a curve, about.
    """
    known = [key for key in keys[:_MAX_KEYS] if key in view.index]
    points = max(50, min(points, 4000))
    return {"curves": {key: view.index.curve(key, points=points, first=first, last=last) for key in known}}


def _family_title(view: RunView, family: str, keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return title_of(view, keys[0])
    varying = [w.strip("<>") for w in family.split("/") if w.startswith("<")]
    return key_words(family) + (f" by {', '.join(varying)}" if varying else "")


def _group(family: str) -> str:
    head = family.partition("/")[0]
    return next((group for group, heads in _GROUPS.items() if head in heads), "Other")
