"""What each page shows, as JSON: one function a page. The server sends it, the static report holds it.

overview(view)      status, findings, figures, loss, time budget, mix, throughput, ranks
metrics(view)       every metric: title, key, unit, meaning, healthy range, last value
streams(view)       the pool over time, picks, evictions
spool(view)         files, backlog, commit point, lag of ranks, providers, quarantine
rl(view)            rewards, groups, staleness, event-loop lag, rollouts
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from headrace.errors import DataError, HeadraceError
from headrace.files import read_json
from headrace.metrics import SpecBook
from headrace.ui.findings import find_problems, healthy_range, recent_lines, recent_waits, title_of
from headrace.ui.metrics_index import Line, is_number, open_metrics, thinned
from headrace.ui.run_view import RunView, find_runs, run_lines, run_summary, spec_book, tail_lines

__all__ = ["curves", "metrics", "new_lines", "overview", "rl", "rollout", "runs", "spool", "streams"]

_POINTS = 600
_BARS = 120
_MAX_CURVES = 60
_MAX_DRAWS = 300_000
_SLICES = 400
_MAX_ARRIVALS = 64 << 20
_MAX_ROLLOUTS = 1024
_GROUP_STEPS = 12
"""Steps in the table of groups."""
_MAX_GROUP_BYTES = 16 << 20


def runs(root: Path, book: SpecBook | None = None) -> dict[str, Any]:
    """Every run below a folder, the one that changed last first."""
    book = book if book is not None else spec_book()
    found: list[dict[str, Any]] = []
    for name, path in find_runs(root).items():
        view = RunView.outline(name, path, book, run_lines(path))
        status = view.status()
        found.append(
            run_summary(name, path) | {"verdict": _verdict(status, [f.to_dict() for f in find_problems(view, status)])}
        )
    return {
        "root": str(root),
        "runs": sorted(found, key=lambda run: (run["state"] != "running", -(run["changed"] or 0))),
    }


# ---------------------------------------------------------------------------------------------------- overview


def overview(view: RunView) -> dict[str, Any]:
    """The first page of a run."""
    status = view.status()
    findings = [f.to_dict() for f in find_problems(view, status)]
    lines = view.index.sampled(_BARS)
    charts = [
        key
        for key in (
            "reward/all/mean",
            "train/loss",
            "tokens_per_second",
            "cells_per_second",
            "train/grad_norm",
            "train/lr",
        )
        if key in view.index
    ]
    return {
        "status": status, "verdict": _verdict(status, findings), "findings": findings, "figures": _figures(view, status),
        "charts": [panel(view, [key]) for key in charts], "lines": [line_view(view, line) for line in lines], "targets": view.targets(),
        "marks": view.marks(), "tabs": tabs(view), "facts": _facts(view),
    }  # fmt: skip


def tabs(view: RunView) -> list[str]:
    """Which pages have something to show for this run."""
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


def _verdict(status: dict[str, Any], findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    bad = sum(f["severity"] == "bad" for f in findings)
    if not status["lines"] and not status["sketched"]:
        return {"level": "quiet", "text": "No line of metrics yet"}
    if bad:
        return {"level": "bad", "text": findings[0]["title"]}
    if findings:
        return {"level": "warn", "text": findings[0]["title"]}
    return {"level": "good", "text": "Healthy"}


def _figures(view: RunView, status: dict[str, Any]) -> list[dict[str, Any]]:
    """The numbers at the top: few, with what they mean beside them."""
    last, found = view.last, []
    if is_number(last.get("reward/all/mean")):
        found.append(
            {
                "label": "Reward",
                "key": "reward/all/mean",
                "value": last["reward/all/mean"],
                "unit": "",
                "note": "mean over the last step's rollouts",
            }
        )
    extremes = view.index.extremes("train/loss")
    if is_number(last.get("train/loss")):
        least = f"lowest {extremes[0]:.4g} at step {extremes[1]:,}" if extremes else ""
        found.append({"label": "Loss", "key": "train/loss", "value": last["train/loss"], "unit": "", "note": least})
    for key, unit in (("tokens_per_second", "tokens/s"), ("cells_per_second", "cells/s")):
        if is_number(last.get(key)):
            _, means = view.index.means(key)
            note = f"median {float(sorted(means)[len(means) // 2]):,.0f}" if len(means) else ""
            found.append({"label": "Throughput", "key": key, "value": last[key], "unit": unit, "note": note})
    waits, total, steps = recent_waits(view)
    if total > 0:
        name, seconds = next(iter(waits.items()), ("", 0.0))
        note = f"mostly {name}" if seconds / total > 0.005 else f"of the last {steps:,} steps"
        found.append(
            {
                "label": "Exposed wait",
                "key": "waits/exposed/seconds",
                "value": 100 * sum(waits.values()) / total,
                "unit": "%",
                "note": note,
            }
        )
        lines = recent_lines(view)
        ranks = max(view.world_size, 1)
        found.append(
            {
                "label": "Step time",
                "key": "step/seconds",
                "value": 1000 * total / max(steps, 1) / ranks,
                "unit": "ms",
                "note": f"mean over {_lines(len(lines))}",
            }
        )
    return found


def _lines(count: int) -> str:
    return f"{count:,} line" + ("" if count == 1 else "s")


def line_view(view: RunView, line: Line) -> dict[str, Any]:
    """One line as bars: the parts of a step in ms, the share of each source, the exposed wait of ranks."""
    steps = line.get("steps_in_interval")
    per = (steps if is_number(steps) and steps > 0 else 1) * max(view.world_size, 1)
    parts: dict[str, float] = {}
    for key, value in line.items():
        if (
            key.startswith(("step/phase/", "step/wait/"))
            and key.endswith("/seconds")
            and is_number(value)
            and value > 0
        ):
            parts[key[5:-8]] = 1000 * value / per
    other = line.get("step/other/seconds")
    if is_number(other) and other > 0:
        parts["other"] = 1000 * other / per
    tokens = {
        k.removeprefix("data/source_tokens/"): v
        for k, v in line.items()
        if k.startswith("data/source_tokens/") and is_number(v)
    }
    if not tokens:
        tokens = {
            k.removeprefix("data/modality_total_tokens/"): v
            for k, v in line.items()
            if k.startswith("data/modality_total_tokens/") and is_number(v)
        }
    found: dict[str, Any] = {"step": line["step"], "parts": parts, "tokens": tokens}
    by_rank = line.get("waits/exposed/seconds/by_rank")
    total = line.get("step/seconds")
    share = max(view.world_size, 1) / total if is_number(total) and total > 0 else None
    if share is not None and isinstance(by_rank, list) and all(is_number(v) for v in by_rank):
        found["ranks"] = [v * share for v in by_rank[:1024]]
    elif (
        share is not None
        and is_number(line.get("waits/exposed/seconds/worst_rank"))
        and is_number(line.get("waits/exposed/seconds_max"))
    ):
        found["worst"] = [line["waits/exposed/seconds/worst_rank"], line["waits/exposed/seconds_max"] * share]
    return found


def new_lines(view: RunView, after: int, keys: Sequence[str]) -> dict[str, Any]:
    """What a page that has the first `after` lines lacks: points of `keys`, bars, status and findings."""
    fresh = view.index.after(after)[-200:]
    status = view.status()
    findings = [f.to_dict() for f in find_problems(view, status)]
    points: dict[str, list[Any]] = {key: [] for key in keys}
    for line in fresh:
        steps = line.get("steps_in_interval")
        for key in keys:
            value = line.get(key)
            if is_number(value):
                points[key].append(
                    [line["step"], value / steps if view.is_counter(key) and is_number(steps) and steps > 0 else value]
                )
            elif key in line:
                points[key].append([line["step"], None])
    return {
        "status": status, "verdict": _verdict(status, findings), "findings": findings, "figures": _figures(view, status),
        "points": points, "lines": [line_view(view, line) for line in fresh],
    }  # fmt: skip


def _facts(view: RunView) -> list[list[str]]:
    about, found = view.about, []
    for label, value in (
        ("folder", str(view.path)), ("config", about.get("config_hash")), ("headrace", about.get("headrace")), ("started", about.get("created")),
        ("ranks", view.world_size),
    ):  # fmt: skip
        if value is not None:
            found.append([label, str(value)[:300]])
    return found


# ----------------------------------------------------------------------------------------------------- metrics


def panel(
    view: RunView, keys: Sequence[str], *, title: str | None = None, points: int = _POINTS, data: bool = True
) -> dict[str, Any]:
    """Curves with one axis."""
    spec = view.spec(keys[0])
    healthy = healthy_range(view, keys[0])
    counter = view.is_counter(keys[0])
    unit = spec.unit if spec is not None else ""
    found: dict[str, Any] = {
        "title": title or title_of(view, keys[0]), "key": spec.key if spec is not None and len(keys) > 1 else keys[0],
        "unit": (f"{unit or 'count'} per step" if counter else unit), "help": spec.help if spec is not None else "",
        "healthy": [v if math.isfinite(v) else None for v in healthy] if healthy else None, "over_ranks": spec.reduction.value if spec is not None else "",
        "curves": [{"key": key, "name": _short(view, key, keys)} for key in keys],
    }  # fmt: skip
    if data:
        found["curves"] = [curve | view.index.curve(curve["key"], points=points) for curve in found["curves"]]
    return found


def _short(view: RunView, key: str, keys: Sequence[str]) -> str:
    """What tells a curve from the others of its panel."""
    if len(keys) == 1:
        return title_of(view, key)
    split = [k.split("/") for k in keys]
    if len({len(parts) for parts in split}) == 1:
        varying = [i for i in range(len(split[0])) if len({parts[i] for parts in split}) > 1]
        return " ".join(key.split("/")[i] for i in varying)
    return key


def metrics(view: RunView) -> dict[str, Any]:
    """Every metric by family. Curves are asked for by key, when they come into view."""
    families: dict[str, list[str]] = {}
    known = set(view.index.known_keys())
    siblings = {f"{key}{tail}" for key in known for tail in ("/worst_rank", "/by_rank")}
    siblings |= {f"{key}_max" for key in known if (spec := view.book.find(key)) is not None and spec.with_max}
    zero = []
    for key in view.index.known_keys():
        if key in siblings or key.startswith("step/"):
            continue
        extremes = view.index.extremes(key)
        if extremes is not None and extremes[0] == extremes[2] == 0:
            zero.append(key)
            continue
        spec = view.book.find(key)
        family = spec.key if spec is not None else key
        stem = family.removesuffix("_min").removesuffix("_max") if family.endswith(("_min", "_max")) else family
        families.setdefault(stem if {f"{stem}_min", f"{stem}_max"} <= known else family, []).append(key)
    panels = []
    for family, keys in families.items():
        described = panel(view, sorted(keys)[:12], title=_family_title(view, family, keys), data=False)
        described |= {
            "group": _group(family),
            "key": family,
            "last": view.last.get(keys[0]) if len(keys) == 1 else None,
        }
        panels.append(described)
    order = {
        name: i
        for i, name in enumerate(("Training", "Data", "Streams", "Ledger", "Rollouts", "Spool", "Waits", "Phases"))
    }
    panels.sort(key=lambda p: (order.get(p["group"], 99), p["key"]))
    status = view.status()
    return {
        "status": status,
        "panels": panels,
        "zero": zero,
        "tabs": tabs(view),
        "marks": view.marks(),
        "findings": [f.to_dict() for f in find_problems(view, status)],
    }


def _family_title(view: RunView, family: str, keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return title_of(view, keys[0])
    words = [w for w in family.split("/") if not w.startswith("<")]
    text = " ".join(words[-2:] if words[-1] in ("seconds", "count") else words[-1:]).replace("_", " ").replace(".", " ")
    varying = [w.strip("<>") for w in family.split("/") if w.startswith("<")]
    return text[:1].upper() + text[1:] + (f" by {', '.join(varying)}" if varying else "")


def _group(family: str) -> str:
    head = family.partition("/")[0]
    return {
        "train": "Training", "tokens_per_second": "Training", "cells_per_second": "Training", "seconds": "Training", "data": "Data", "text": "Data", "loader": "Data",
        "stream_mixing": "Streams", "ledger": "Ledger", "ledger_wipe_count": "Ledger", "spool": "Spool", "wait": "Waits", "waits": "Waits", "phase": "Phases",
        "reward": "Rollouts", "rollouts": "Rollouts", "solve_all": "Rollouts", "solve_none": "Rollouts", "event_loop_lag": "Rollouts", "turns": "Rollouts",
        "completion_length": "Rollouts", "is_truncated": "Rollouts", "error": "Rollouts", "filter": "Rollouts", "staleness": "Rollouts",
    }.get(head, "Other")  # fmt: skip


def curves(
    view: RunView, keys: Sequence[str], *, first: int | None = None, last: int | None = None, points: int = _POINTS
) -> dict[str, Any]:
    """Points of some keys, over the whole run or between two steps."""
    known = [key for key in keys[:_MAX_CURVES] if key in view.index]
    points = max(50, min(points, 4000))
    return {"curves": {key: view.index.curve(key, points=points, first=first, last=last) for key in known}}


def config(view: RunView) -> dict[str, Any]:
    """The config of a run and the events of its journal."""
    status = view.status()
    events = [{str(k): _plain(v) for k, v in list(event.items())[:20]} for event in view.events[-200:]]
    return {"status": status, "tabs": tabs(view), "config": flat(view.config), "events": events, "facts": _facts(view)}


def _plain(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:300]


def flat(value: Any, prefix: str = "") -> list[list[str]]:
    """A config as [key, value] pairs."""
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flat(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [pair for i, item in enumerate(value[:200]) for pair in flat(item, f"{prefix}.{i}")]
    return [[prefix, _plain(value)]]


def compare(a: RunView, b: RunView) -> dict[str, Any]:
    """Two runs: their curves over each other, and what differs in their configs. Where their data parts is asked separately."""
    shared = [
        key
        for key in (
            "train/loss",
            "reward/all/mean",
            "tokens_per_second",
            "cells_per_second",
            "train/grad_norm",
            "waits/exposed/seconds",
        )
        if key in a.index or key in b.index
    ]
    one, other = dict(map(tuple, flat(a.config))), dict(map(tuple, flat(b.config)))
    differing = [
        [k, one.get(k), other.get(k)]
        for k in dict.fromkeys((*one, *other))
        if one.get(k) != other.get(k) and k not in ("run.dir", "run.name")
    ]
    charts = []
    for key in shared:
        drawn = panel(a if key in a.index else b, [key], data=False)
        drawn["curves"] = [
            {"key": key, "name": f"{side} {view.name}", **view.index.curve(key, points=_POINTS)}
            for side, view in (("A", a), ("B", b))
        ]
        charts.append(drawn)
    return {
        "a": a.status(),
        "b": b.status(),
        "charts": charts,
        "config": differing,
        "provenance": all((v.path / "flight.jsonl").exists() for v in (a, b)),
    }


# ---------------------------------------------------------------------------------------------- streams, ledger


def streams(view: RunView) -> dict[str, Any]:
    """The pool as lanes over time, worked out from the plan; picks by modality; evictions."""
    status = view.status()
    wanted = (
        ("What is left of the open files", ["stream_mixing/active/remaining_fraction_min", "stream_mixing/active/remaining_fraction_max"]),
        ("Files that ran dry", ["stream_mixing/refill/exhaust_events"]),
        ("Longest wait for a pick", ["stream_mixing/active/steps_since_pick_max"]),
        ("Open files by modality", list(view.members("stream_mixing/active/modalities/<modality>").values())),
        ("Evictions", ["ledger/evictions/stale", "ledger/evictions/lru"]),
        ("Evicted while still in use", ["ledger/false_evictions/stale", "ledger/false_evictions/lru"]),
        ("Steps until a forgotten group came back", ["ledger/refault_distance_max"]),
        ("Groups in the ledger", ["ledger/occupancy"]),
    )  # fmt: skip
    charts = [
        panel(view, there, title=title) for title, keys in wanted if (there := [k for k in keys if _moves(view, k)])
    ]
    members = view.members("stream_mixing/picks/<modality>")
    picks = {name: view.index.total(key) for name, key in members.items()}
    if picks:
        charts.insert(0, _shares(view, members))
    findings = [f.to_dict() for f in find_problems(view, status) if f.key.startswith(("stream_mixing/", "ledger"))]
    return {
        "status": status,
        "tabs": tabs(view),
        "charts": charts,
        "picks": picks,
        "pool": pool_lanes(view),
        "findings": findings,
        "marks": view.marks(),
    }


def _shares(view: RunView, members: Mapping[str, str]) -> dict[str, Any]:
    """The share of each modality in all picks up to a step."""
    sums = {name: view.index.cumulative(key) for name, key in members.items()}
    total = np.maximum(sum((values for _, values in sums.values()), np.zeros(1)), 1e-9)
    drawn = panel(view, list(members.values()), title="Share of picks so far", data=False)
    drawn |= {"key": "stream_mixing/picks_so_far/<modality>", "unit": "%", "help": "share of each modality in all batches drawn up to here", "curves": [
        {"key": f"stream_mixing/picks_so_far/{name}", "name": name, **thinned(steps, 100 * values / total, _POINTS)} for name, (steps, values) in sums.items()
    ]}  # fmt: skip
    return drawn


def _moves(view: RunView, key: str) -> bool:
    """Whether a curve is more than a constant zero."""
    extremes = view.index.extremes(key)
    return extremes is not None and not extremes[0] == extremes[2] == 0


def pool_lanes(view: RunView) -> dict[str, Any]:
    """Which file was open when and how far it was read: the newest slices up to the run's step, by the run's own plan.

    The order of picks is a function of the files, their rows, the config and the seed, so nothing is read but streams.json.
    """
    from headrace.mix import MixPlan, MixSettings, StreamTable

    if any(e.get("event") == "resumed" and (e.get("dropped") or e.get("parked")) for e in view.events):
        return {
            "refused": "The pool changed its size at a resume, so its past cannot be worked out from the config alone."
        }
    try:
        listing = read_json(view.path / "streams.json", 64 << 20)
        section, seed = view.section("streams"), view.section("run").get("seed", 0)
        names, rows = [str(f["name"]) for f in listing], [int(f["rows"]) for f in listing]
        modalities = [name.partition("/")[0] if "/" in name else name for name in names]
        rolls = section.get("batching_mode") == "device_per_stream"
        sizes = {m: section.get("batch_sizes", {}).get(m, section["batch_size"]) for m in set(modalities)}
        ranks = int(section.get("global_ranks", 1))
        lanes = int(section.get("lanes") or ranks) if rolls else 1
        plan = MixPlan(
            StreamTable(paths=tuple(names), rows=tuple(rows), modalities=tuple(modalities)),
            MixSettings(
                batch_size=sizes, slots=int(section["num_streams_mixed"]), seed=int(seed), queue=section["queue"], pick_mode=section["pick_mode"],
                batching_mode=section["batching_mode"], global_ranks=ranks, lanes=lanes,
            ),
        )  # fmt: skip
    except (DataError, HeadraceError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        return {"refused": f"The pool cannot be worked out: {error or type(error).__name__}"[:500]}
    last = view.index.last_step
    if last * lanes > _MAX_DRAWS:
        return {
            "refused": f"The pool is worked out for runs of up to {_MAX_DRAWS:,} picks; this one has {last * lanes:,}."
        }
    slices: dict[tuple[int, int, int], dict[str, Any]] = {}
    until = time.monotonic() + 10
    for step in range(1, last + 1):
        for _ in range(lanes):
            if plan.over:
                plan.next_epoch()
            draw = plan.next()
            if draw.stream < 0:
                continue
            one = slices.setdefault(
                (draw.lane, draw.epoch, draw.ordinal),
                {
                    "lane": draw.lane,
                    "file": names[draw.stream],
                    "modality": modalities[draw.stream],
                    "rows": rows[draw.stream],
                    "from": step,
                    "picks": 0,
                },
            )
            one |= {"to": step, "read": draw.stop, "dry": draw.dry}
            one["picks"] += 1
        if step % 1000 == 0 and time.monotonic() > until:
            return {"refused": "Working out the pool took longer than 10 s."}
    newest = sorted(slices.values(), key=lambda s: s["to"])[-_SLICES:]
    return {
        "slices": sorted(newest, key=lambda s: s["from"]),
        "lanes": lanes,
        "slots": int(section["num_streams_mixed"]),
        "first": min((s["from"] for s in newest), default=0),
        "last": last,
    }


# ------------------------------------------------------------------------------------------------------- spool


def spool_folder(view: RunView) -> Path | None:
    """The spool that a run reads, where its config names one that is there."""
    section = view.section("spool")
    if not section.get("enabled"):
        return None
    named = section.get("dir")
    base = Path(str(view.about.get("base", ".")))
    for path in [base / named] if isinstance(named, str) and named else [view.path / "spool"]:
        if (path / "meta.json").is_file():
            return path
    return None


def spool(view: RunView) -> dict[str, Any]:
    """Where the run's spool stands."""
    status = view.status()
    found: dict[str, Any] = {"status": status, "tabs": tabs(view), "marks": view.marks()}
    keys = [
        key
        for key in view.index.known_keys()
        if key.startswith("spool/") and _moves(view, key) and not key.endswith(("_max", "worst_rank"))
    ]
    found["charts"] = [panel(view, [key]) for key in keys[:12]]
    path = spool_folder(view)
    if path is None:
        return found | {"refused": "The run's spool is not there (any more)."}
    from headrace.spool.folder import SpoolFolder
    from headrace.spool.survey import describe, list_files, quarantined

    try:
        described = describe(path)
        files = [f.to_dict() for f in list_files(path)]
        aside = list(quarantined(path))
        ranks = SpoolFolder(path).read_positions()
    except (HeadraceError, OSError, KeyError, TypeError, ValueError) as error:
        return found | {"refused": f"The spool cannot be read: {error}"[:500]}
    return found | {
        "spool": _jsonable(described),
        "files": _jsonable(files[-300:]),
        "quarantine": _jsonable(aside[-100:]),
        "ranks": _jsonable(ranks[:1024]),
    }


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


# ---------------------------------------------------------------------------------------------------------- RL


def rl(view: RunView) -> dict[str, Any]:
    """Rewards, groups, staleness, loop lag, phases, and which steps have rollouts to read."""
    status = view.status()
    rewards = []
    envs = sorted(view.members("reward/<env>/mean"), key=lambda name: (name != "all", name))
    if len(envs) == 2 and envs[0] == "all":  # of one environment, "all" says the same again
        envs = envs[1:]

    def by_env(pattern: str) -> list[str]:
        return [key for name, key in view.members(pattern).items() if name in envs or not envs]

    for env in envs:
        drawn = panel(
            view, [f"reward/{env}/mean"], title="Reward, all environments" if env == "all" else f"Reward: {env}"
        )
        band = [
            view.index.curve(f"reward/{env}/{s}", points=_POINTS)
            for s in ("mean", "std")
            if f"reward/{env}/{s}" in view.index
        ]
        if len(band) == 2 and band[0]["steps"] == band[1]["steps"]:
            pairs = list(zip(band[0]["steps"], band[0]["values"], band[1]["values"], strict=True))
            drawn["band"] = [[s, m - d, m + d] for s, m, d in pairs if m is not None and d is not None]
        rewards.append(drawn)
    groups = (
        ("Groups solved by all members, by none", [*by_env("solve_all/<env>"), *by_env("solve_none/<env>")]),
        ("Held-out tasks solved", [*by_env("eval/<env>/greedy"), *by_env("eval/<env>/pass_at_k")]),
        ("Rollouts that failed or were refused", _starting(view, "rollouts/failed/", "rollouts/refused/", "failures/")),
        ("Filters that fired", list(view.members("filter/<name>").values())),
        ("Staleness of the policy", _starting(view, "staleness", "rollouts/staleness", "rollouts/lag")),
        ("Event-loop lag", [k for k in ("event_loop_lag/median", "event_loop_lag/p99", "event_loop_lag/max") if k in view.index]),
        ("Length of completions", by_env("completion_length/<env>/mean")),
        ("Turns", by_env("turns/<env>/mean")),
        ("Entropy of the policy", by_env("entropy/<env>/mean")),
        ("Divergence between engine and trainer", by_env("mismatch_kl/<env>/mean")),
    )  # fmt: skip
    charts = [
        panel(view, there[:12], title=title)
        for title, keys in groups
        if (there := [k for k in keys if _moves(view, k)])
    ]
    findings = [f.to_dict() for f in find_problems(view, status)]
    lines = [line_view(view, line) for line in view.index.sampled(_BARS)]
    return {
        "status": status,
        "tabs": tabs(view),
        "rewards": rewards,
        "charts": charts,
        "findings": findings,
        "lines": lines,
        "marks": view.marks(),
        "steps": rollout_steps(view),
        "groups": rollout_groups(view),
        "answers": answers(view),
    }


def _starting(view: RunView, *heads: str) -> list[str]:
    return [k for k in view.index.known_keys() if k.startswith(heads) and not k.endswith(("_max", "/worst_rank"))]


def arrival_logs(view: RunView) -> dict[int, Path]:
    """Logs of finished rollouts by the run's step. Batch n makes step n + 1. Logs that a checkpoint covers are deleted unless the run keeps them."""
    found: dict[int, Path] = {}
    try:
        with os.scandir(view.path / "arrivals") as entries:
            for entry in entries:
                digits = entry.name.removeprefix("step_").removesuffix(".log")
                if (
                    entry.name == f"step_{digits}.log"
                    and digits.isdecimal()
                    and len(digits) < 16
                    and entry.is_file(follow_symlinks=False)
                ):
                    found[int(digits) + 1] = Path(entry.path)
                if len(found) > 20_000:
                    break
    except OSError:
        pass
    return found


def rollout_steps(view: RunView) -> list[int]:
    """Steps whose rollouts can be read."""
    return sorted(arrival_logs(view))[-5000:]


def rollout(view: RunView, step: int) -> dict[str, Any]:
    """The rollouts of a step as they arrived: task, environment, reward, turns."""
    path = arrival_logs(view).get(step)
    if path is None:
        raise DataError(
            f"{view.path} has no rollouts of step {step}: they are deleted once a checkpoint covers the step"
        )
    found, damaged = _records(path, _MAX_ARRIVALS, lambda payload: _rollout(msgspec.msgpack.decode(payload)))
    if len(found) > _MAX_ROLLOUTS:
        damaged = (
            damaged or f"The step has {len(found):,} rollouts; the first {_MAX_ROLLOUTS:,} that arrived are shown."
        )
        found = found[:_MAX_ROLLOUTS]
    groups: dict[Any, list[float]] = {}
    for one in found:
        if not one["error"]:
            groups.setdefault(one["example_id"], []).append(one["reward"])
    drops_equal = view.section("rollouts").get("drop_equal") is True
    for one in found:
        if not one["error"]:
            rewards = groups[one["example_id"]]
            equal = min(rewards) == max(rewards)
            one["advantage"] = 0.0 if equal else one["reward"] - sum(rewards) / len(rewards)
            one["filters"] = ["zero_advantage"] if equal and drops_equal else []
    found.sort(key=lambda one: (str(one["env_name"]), one["example_id"], one["draw"]))
    return {
        "status": view.status(),
        "tabs": tabs(view),
        "step": step,
        "rollouts": found,
        "steps": rollout_steps(view),
        "damaged": damaged,
    }


def _records(path: Path, limit: int, decode: Callable[[bytes], Any]) -> tuple[list[Any], str]:
    """Records of an arrival log (rollouts/arrival_log.py) within its first `limit` bytes, up to damage; and what is damaged, or ""."""
    found: list[Any] = []
    with open_metrics(path) as handle:
        data = handle.read(limit)
    at = 0
    while at + 12 <= len(data):
        length, total = int.from_bytes(data[at : at + 4], "little"), int.from_bytes(data[at + 4 : at + 12], "little")
        payload = data[at + 12 : at + 12 + length]
        if len(payload) < length:
            break  # a record that is being written
        try:
            if xxhash.xxh3_64_intdigest(payload) != total:
                raise ValueError("it fails its checksum")
            found.append(decode(payload))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgspec.DecodeError) as error:
            return found, f"The record at byte {at:,} is damaged ({error}); rollouts after it are not shown."
        at += 12 + length
    return found, ""


class _Arrived(msgspec.Struct, frozen=True):
    """What the table of groups needs of a record."""

    task: int
    member: int
    env: str = ""
    failed: str = ""


_decode_arrived = msgspec.msgpack.Decoder(_Arrived).decode


def rollout_groups(view: RunView) -> list[dict[str, Any]]:
    """Groups of the newest steps: complete, open, and requests that failed by cause. The newest step first."""
    sizes = {
        str(env.get("name")): env.get("group_size") for env in _list(view.config.get("env")) if isinstance(env, dict)
    }
    wanted, trained, logs = view.section("rollouts").get("groups_per_step"), view.index.last_step, arrival_logs(view)
    found = []
    for step in sorted(logs, reverse=True)[:_GROUP_STEPS]:
        try:
            status = logs[step].stat()
            members, failed, damaged = _members(logs[step], status.st_size, status.st_mtime_ns)
        except (OSError, DataError):
            continue
        complete = sum(
            len(finished) >= size for (env, _), finished in members.items() if isinstance(size := sizes.get(env), int)
        )
        found.append({
            "step": step, "trained": step <= trained, "rollouts": sum(map(len, members.values())), "complete": complete,
            "open": max(wanted - complete, 0) if isinstance(wanted, int) and step > trained else 0, "failed": failed, "damaged": damaged,
        })  # fmt: skip
    return found


@functools.lru_cache(maxsize=4 * _GROUP_STEPS)
def _members(path: Path, size: int, changed: int) -> tuple[dict[tuple[str, int], frozenset[int]], dict[str, int], bool]:
    """Finished members by (environment, task), failures by cause, and whether the log is damaged. `size` and `changed` (ns) are those of the file."""
    members: dict[tuple[str, int], set[int]] = {}
    failed: dict[str, int] = {}
    records, damaged = _records(path, _MAX_GROUP_BYTES, _decode_arrived)
    for record in records:
        if record.failed:
            failed[record.failed[:80]] = failed.get(record.failed[:80], 0) + 1
        else:
            members.setdefault((record.env, record.task), set()).add(record.member)
    return {key: frozenset(found) for key, found in members.items()}, failed, bool(damaged)


def _rollout(record: Mapping[str, Any]) -> dict[str, Any]:
    """One record of an arrival log. TypeError where the numbers that it is sorted by are none."""
    task, member = record["task"], record["member"]
    if not (isinstance(task, int) and isinstance(member, int)):
        raise TypeError("task and member are no integers")
    turns = []
    for turn in _list(record.get("turns"))[:200]:
        ids = np.frombuffer(turn["ids"], "<i4").tolist()[:4000]
        logprobs = np.frombuffer(turn["logprobs"], "<f4").tolist()[:4000]
        completion = str(turn["completion"])[:20_000]
        turns.append({
            "messages": [{"role": "prompt", "text": str(turn["prompt"])[:20_000]}, {"role": "completion", "text": completion}],
            "ids": ids, "logprobs": [v if is_number(v) else None for v in logprobs],
            "tokens": list(completion) if len(completion) == len(ids) else [], "spans": [[str(name)[:80], int(a), int(b)] for name, a, b in _list(turn.get("spans"))[:50]],
        })  # fmt: skip
    values = record.get("metrics")
    reward = record.get("reward")
    return {
        "example_id": task, "env_name": str(record.get("env", ""))[:200], "draw": member, "reward": reward if is_number(reward) else 0.0,
        "error": str(record.get("failed") or "")[:1000], "policy_version": record.get("version"), "attempt": record.get("attempt"),
        "metrics": {str(k): v for k, v in list(values.items())[:30] if is_number(v)} if isinstance(values, dict) else {}, "turns": turns,
    }  # fmt: skip


def answers(view: RunView) -> list[dict[str, Any]]:
    """Held-out answers of the newest evaluation, and of the first."""
    lines = [line for line in tail_lines(view.path / "answers.jsonl") if isinstance(line.get("step"), int)]
    if not lines:
        return []
    wanted = {lines[0]["step"], lines[-1]["step"]}
    keep = ("step", "env", "task", "prompt", "answer", "reward")
    return [
        {k: v if is_number(v := line.get(k)) else str(v)[:2000] for k in keep}
        for line in lines
        if line["step"] in wanted
    ][:24]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
