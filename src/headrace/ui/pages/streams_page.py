"""The pool of open files over time, the picks by modality, and the evictions of the ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.errors import DataError, HeadraceError
from headrace.files import read_json
from headrace.mix import MixPlan, StreamTable
from headrace.ui.metrics_index import thinned
from headrace.ui.pages.page_parts import POINTS, chart, charts, findings, header
from headrace.ui.run_view import RunView

_MAX_DRAWS = 300_000
_MAX_SECONDS = 10
_MAX_SLICES = 400


def streams(view: RunView) -> dict[str, Any]:
    """Pool, picks, charts and findings of a run over streams."""
    found = header(view)
    drawn = charts(view, (
        ("What is left of the open files", ["stream_mixing/active/remaining_fraction_min", "stream_mixing/active/remaining_fraction_max"]),
        ("Files that ran dry", ["stream_mixing/refill/exhaust_events"]),
        ("Longest wait for a pick", ["stream_mixing/active/steps_since_pick_max"]),
        ("Open files by modality", list(view.members("stream_mixing/active/modalities/<modality>").values())),
        ("Evictions", ["ledger/evictions/stale", "ledger/evictions/lru"]),
        ("Evicted while still in use", ["ledger/false_evictions/stale", "ledger/false_evictions/lru"]),
        ("Steps until a forgotten group came back", ["ledger/refault_distance_max"]),
        ("Groups in the ledger", ["ledger/occupancy"]),
    ))  # fmt: skip
    members = view.members("stream_mixing/picks/<modality>")
    if members:
        drawn.insert(0, _shares(view, members))
    problems = [f for f in findings(view, found["status"]) if f["key"].startswith(("stream_mixing/", "ledger"))]
    picks = {name: view.index.total(key) for name, key in members.items()}
    return found | {"charts": drawn, "picks": picks, "pool": _pool(view), "findings": problems}


def _shares(view: RunView, members: Mapping[str, str]) -> dict[str, Any]:
    """The share of each modality in all picks up to a step."""
    sums = {name: view.index.cumulative(key) for name, key in members.items()}
    total = np.maximum(sum((values for _, values in sums.values()), np.zeros(1)), 1e-9)
    pattern = "stream_mixing/picks_so_far"
    return chart(view, list(members.values()), title="Share of picks so far", data=False) | {
        "key": f"{pattern}/<modality>", "unit": "%", "help": "share of each modality in all batches drawn up to here",
        "curves": [{"key": f"{pattern}/{name}", "name": name, **thinned(steps, 100 * values / total, POINTS)} for name, (steps, values) in sums.items()],
    }  # fmt: skip


def _pool(view: RunView) -> dict[str, Any]:
    """Which file was open when, and how far it was read: the newest slices, computed again by the run's own plan.

    The order of picks is a function of the files, their rows, the config and the seed, so no file is read but streams.json.
    """
    if any(e.get("event") == "resumed" and (e.get("dropped") or e.get("parked")) for e in view.events):
        return {"refused": "The pool changed its size at a resume, so its past does not follow from the config alone."}
    try:
        plan = _plan(view)
    except (HeadraceError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        return {"refused": f"The pool cannot be worked out: {error or type(error).__name__}"[:500]}
    table, last = plan.table, view.index.last_step
    lanes = plan.settings.lanes
    if last * lanes > _MAX_DRAWS:
        return {"refused": f"The pool is worked out for runs of up to {_MAX_DRAWS:,} picks; this one has {last * lanes:,}."}  # fmt: skip
    slices: dict[tuple[int, int, int], dict[str, Any]] = {}
    until = time.monotonic() + _MAX_SECONDS
    for step in range(1, last + 1):
        for _ in range(lanes):
            if plan.over:
                plan.next_epoch()
            draw = plan.next()
            if draw.stream < 0:
                continue
            at = draw.stream
            opened = {"lane": draw.lane, "file": table.paths[at], "modality": table.modalities[at], "rows": table.rows[at], "from": step, "picks": 0}  # fmt: skip
            one = slices.setdefault((draw.lane, draw.epoch, draw.ordinal), opened)
            one |= {"to": step, "read": draw.stop, "dry": draw.dry, "picks": one["picks"] + 1}
        if step % 1000 == 0 and time.monotonic() > until:
            return {"refused": f"Working out the pool took longer than {_MAX_SECONDS} s."}
    newest = sorted(slices.values(), key=lambda s: s["to"])[-_MAX_SLICES:]
    newest.sort(key=lambda s: s["from"])
    first = newest[0]["from"] if newest else 0
    return {"slices": newest, "lanes": lanes, "slots": plan.settings.slots, "first": first, "last": last}


def _plan(view: RunView) -> MixPlan:
    """The run's plan at its first step. Raises where streams.json or the config is missing or damaged."""
    from headrace.runs.config.loading import load_any_config
    from headrace.runs.config.streams import StreamsConfig
    from headrace.runs.streams import mix_plan

    config = load_any_config(view.path / "config.toml", env={})
    if not isinstance(config, StreamsConfig):
        raise DataError("config.toml describes another kind of run")
    listing = read_json(view.path / "streams.json", 64 << 20)
    names = tuple(str(file["name"]) for file in listing)
    modalities = tuple(name.partition("/")[0] if "/" in name else name for name in names)
    rows = tuple(int(file["rows"]) for file in listing)
    return mix_plan(config, StreamTable(paths=names, rows=rows, modalities=modalities))
