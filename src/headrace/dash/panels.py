"""Which curves belong together, what is healthy, and what stands out?

A panel holds the curves of one metric: the members of a family (`stream_mixing/picks/<modality>`), a pair that ends in _min and
_max, or one alone. Bands come from the specs; where what is healthy depends on the run (a wait of a few pool sizes), it is worked
out from its config. A finding is a sentence for the reader who has a minute.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dash.series import Series, read_series
from headrace.errors import DataError
from headrace.metrics import MetricSpec, Reduction, SpecBook, registered_specs

__all__ = ["Curve", "Finding", "Panel", "Report", "read_report"]

_FIRST = ("stream_mixing/", "train/", "data/", "ledger/", "rollouts/", "spool/", "waits/", "wait/", "step/")
_OUTSIDE = 0.1
"""A metric outside its healthy range for more than this share of the lines stands out."""
_SPREAD = MetricSpec(
    "stream_mixing/active/remaining_fraction_spread", Reduction.MAX, healthy=(0.0, 0.3), help="remaining_fraction_max - remaining_fraction_min: how unevenly the pool drains"
)  # fmt: skip
_PICKED = MetricSpec(
    "stream_mixing/picks_so_far/<modality>",
    Reduction.MEAN,
    help="share of this modality in all batches drawn up to here",
)
"""Not measured but worked out here, from what was."""
_SINCE = "stream_mixing/active/steps_since_pick_max"
_FALSE = "ledger/false_evictions/"
_EXHAUSTED = "stream_mixing/refill/exhaust_events"
_MODALITIES = "stream_mixing/active/modalities/"
_LOPSIDED = 10.0
"""Largest over smallest share of the batches from which on a mix is called lopsided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a panel."""

    key: str
    name: str
    worst_rank: str | None = None
    """The key that says which rank was worst, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves with one axis."""

    title: str
    group: str
    curves: tuple[Curve, ...]
    unit: str = ""
    help: str = ""
    healthy: tuple[float, float] | None = None
    over_ranks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to look at."""

    key: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run as a page shows it."""

    path: str
    name: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    series: Series
    panels: tuple[Panel, ...]
    findings: tuple[Finding, ...]
    marks: tuple[tuple[int, str], ...] = field(default=())
    """Steps at which something happened: resumed, weights changed."""

    def to_dict(self) -> dict[str, Any]:
        """For machines: facts, findings, and of every panel its curves."""
        return {
            "path": self.path,
            "name": self.name,
            "kind": self.kind,
            "facts": dict(self.facts),
            "findings": [{"key": f.key, "sentence": f.sentence} for f in self.findings],
            "panels": [
                {
                    "title": p.title,
                    "curves": [c.key for c in p.curves],
                    "healthy": list(p.healthy) if p.healthy else None,
                }
                for p in self.panels
            ],
            "steps": len(self.series.steps),
        }


def read_report(path: Path, specs: Iterable[MetricSpec] | None = None) -> Report:
    """Read a run folder. Nothing in it is trusted: what is missing or damaged is left out."""
    if not path.is_dir():
        raise DataError(f"{path} is no run folder; give the --run.dir of a run that was started")
    series = read_series(path / "metrics.jsonl")
    if not len(series.steps):
        raise DataError(
            f"{path / 'metrics.jsonl'} holds no line yet; wait for the first, or look at the run's own output"
        )
    config, summary = _toml(path / "config.toml"), _json(path / "summary.json")
    derived = _with_derived(series)
    book = SpecBook((*(registered_specs() if specs is None else specs), _SPREAD, _PICKED))
    panels = _panels(derived, book, _own_bands(config))
    run = config.get("run")
    named = run.get("name") if isinstance(run, dict) else None
    return Report(
        path=str(path),
        name=named if isinstance(named, str) else path.name,
        kind="streams" if "streams" in config else "rollouts" if "rollouts" in config else "lm",
        facts=tuple(_facts(derived, config, summary)),
        series=derived,
        panels=tuple(panels),
        findings=tuple(_findings(derived, panels)),
        marks=tuple(_marks(path / "journal.jsonl")),
    )


# ------------------------------------------------------------------------------------------------- panels


def _with_derived(series: Series) -> Series:
    columns = dict(series)
    low = series.get("stream_mixing/active/remaining_fraction_min")
    high = series.get("stream_mixing/active/remaining_fraction_max")
    if low is not None and high is not None:
        columns[_SPREAD.key] = high - low
    picks = {k: np.nancumsum(series[k]) for k in series if k.startswith("stream_mixing/picks/")}
    total = np.maximum(sum(picks.values(), np.zeros(len(series.steps))), 1)
    columns |= {_PICKED.key.replace("<modality>", k.rpartition("/")[2]): v / total for k, v in picks.items()}
    return Series(series.steps, columns)


def _own_bands(config: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Healthy ranges that depend on the run: a wait of up to five pool sizes."""
    streams = config.get("streams")
    size = streams.get("num_streams_mixed", 8) if isinstance(streams, dict) else None
    return {_SINCE: (0.0, 5.0 * size)} if isinstance(size, int) else {}


def _panels(series: Series, book: SpecBook, bands: dict[str, tuple[float, float]]) -> list[Panel]:
    grouped: dict[str, list[str]] = {}
    siblings = {f"{key}/worst_rank" for key in series} | {f"{key}_max" for key in series if _has_max(book, key)}
    for key in series:
        if key in ("time",) or key in siblings or key.startswith("step/"):
            continue
        spec = book.find(key)
        family = spec.key if spec is not None else key
        stem = family.removesuffix("_min").removesuffix("_max") if family.endswith(("_min", "_max")) else family
        paired = {f"{stem}_min", f"{stem}_max"} <= set(series)
        grouped.setdefault(stem if paired else family, []).append(key)
    panels = []
    for title, keys in grouped.items():
        spec = book.find(keys[0])
        own = next((bands[k] for k in keys if k in bands), None)
        healthy = own or (spec.healthy if spec is not None else None)
        curves = tuple(
            Curve(
                key=key,
                name=_short(key, title, len(keys)),
                worst_rank=f"{key}/worst_rank" if f"{key}/worst_rank" in series else None,
            )
            for key in sorted(keys)
        )
        panels.append(
            Panel(
                title=title,
                group=title.partition("/")[0] if "/" in title else "run",
                curves=curves,
                unit=spec.unit if spec is not None else "",
                help=spec.help if spec is not None else _HELP.get(title, ""),
                healthy=healthy,
                over_ranks=spec.reduction.value if spec is not None else "",
            )
        )
    return sorted(panels, key=lambda p: (_place(p.title), p.title))


_HELP = {
    "cells_per_second": "cells delivered to all ranks, per second",
    "tokens_per_second": "tokens delivered to all ranks, per second",
    "seconds": "wall time of the interval",
}


def _has_max(book: SpecBook, key: str) -> bool:
    spec = book.find(key)
    return spec is not None and spec.with_max and spec.reduction.value in ("sum", "mean")


def _short(key: str, title: str, count: int) -> str:
    if count == 1:
        return key.rpartition("/")[2]
    if "<" in title:
        head, _, tail = title.partition("<")
        return key[len(head) : len(key) - len(tail.partition(">")[2])]
    return key.rpartition("_")[2]


def _place(title: str) -> int:
    return next((i for i, head in enumerate(_FIRST) if title.startswith(head)), len(_FIRST))


# ------------------------------------------------------------------------------------------- what stands out


def _findings(series: Series, panels: list[Panel]) -> list[Finding]:
    found = []
    for panel in panels:
        if panel.healthy is None or panel.title.startswith(_FALSE):
            continue
        low, high = panel.healthy
        for curve in panel.curves:
            values = series[curve.key][~np.isnan(series[curve.key])]
            outside = (values < low) | (values > high)
            if len(values) and outside.mean() > _OUTSIDE:
                at = series[curve.key]
                worst = int(np.nanargmax(np.maximum(at - high, low - at)))
                found.append(
                    Finding(
                        key=curve.key,
                        sentence=f"{curve.key} is outside {low:g} to {high:g} in {outside.mean():.0%} of the lines, furthest at step "
                        f"{int(series.steps[worst]):,} with {at[worst]:g}",
                    )
                )
    return found + _ledger_findings(series) + _stream_findings(series)


def _ledger_findings(series: Series) -> list[Finding]:
    """One false eviction is one too many: it need not last to be told."""
    found = []
    for mode, remedy in (("stale", "raise stale_threshold by so much"), ("lru", "raise capacity")):
        counts = series.get(f"{_FALSE}{mode}")
        total = 0 if counts is None else int(np.nansum(counts))
        if counts is None or not total:
            continue
        first = int(series.steps[int(np.flatnonzero(np.nan_to_num(counts) > 0)[0])])
        away = series.get("ledger/refault_distance_max")
        late = "" if away is None else f", up to {int(np.nanmax(away)):,} steps after they were forgotten"
        found.append(
            Finding(
                key=f"{_FALSE}{mode}",
                sentence=f"{total:,} groups were evicted while their files were still read (first seen at step {first:,}) and came back without their "
                f"state{late}: {remedy}, or set protect_active",
            )
        )
    return found


def _stream_findings(series: Series) -> list[Finding]:
    found = []
    if _EXHAUSTED in series:
        steps = series.get("steps_in_interval")
        dry = np.nanmean(series[_EXHAUSTED] > 0)
        if dry > 0.5 and (steps is None or np.nanmedian(steps) <= 1 or np.nanmean(series[_EXHAUSTED] / steps) > 0.5):
            found.append(
                Finding(
                    key=_EXHAUSTED,
                    sentence=f"slices run dry in {dry:.0%} of the lines, {np.nanmean(series[_EXHAUSTED]):.2f} of them a line: the run opens files "
                    "instead of reading them",
                )
            )
    picks = {k: float(np.nansum(series[k])) for k in series if k.startswith("stream_mixing/picks/")}
    total = sum(picks.values())
    for key, count in picks.items():
        if len(picks) > 1 and total and count / total < 0.1 / len(picks):
            found.append(
                Finding(
                    key=key,
                    sentence=f"{key.rpartition('/')[2]} gets {count / total:.1%} of the batches, {count:,.0f} of {total:,.0f}",
                )
            )
    found += _flat_modalities(series, {key.rpartition("/")[2]: count / total for key, count in picks.items() if total})
    for key in series:
        if key.startswith(_MODALITIES):
            absent = float(np.nanmean(series[key] == 0))
            if absent > 0.25:
                found.append(
                    Finding(
                        key=key,
                        sentence=f"no file of {key.rpartition('/')[2]} is in the pool in {absent:.0%} of the lines: it starves",
                    )
                )
    return found


def _flat_modalities(series: Series, shares: Mapping[str, float]) -> list[Finding]:
    """Why the counts of open files say nothing about a lopsided mix."""
    counts = {key.removeprefix(_MODALITIES): series[key] for key in sorted(series) if key.startswith(_MODALITIES)}
    if len(counts) < 2 or len(shares) < 2 or max(shares.values()) < _LOPSIDED * min(shares.values()):
        return []
    ends = [(np.nanmin(values), np.nanmax(values)) for values in counts.values()]
    if any(low != high for low, high in ends) or max(high for _, high in ends) >= _LOPSIDED * min(
        low for low, _ in ends
    ):
        return []
    most = max(shares, key=lambda name: shares[name])
    flat = ", ".join(f"{low:g} {name}" for name, (low, _) in zip(counts, ends, strict=True))
    return [
        Finding(
            key=f"{_MODALITIES}{most}",
            sentence=f"{_MODALITIES}* stays flat ({flat}) while {most} gets {shares[most]:.0%} of the batches: it counts open files, and batch sizes change "
            "how often a file is picked, not how many are open. stream_mixing/picks/* shows the mix",
        )
    ]


# -------------------------------------------------------------------------------------------------- facts


def _facts(series: Series, config: dict[str, Any], summary: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if summary:
        yield "state", f"{summary.get('state', '?')} at step {summary.get('step', '?')} of {summary.get('steps', '?')}"
        yield "ranks", str(summary.get("world_size", "?"))
        yield "config", str(summary.get("config_hash", "?"))
    yield "lines", f"{len(series.steps):,}, steps {int(series.steps[0]):,} to {int(series.steps[-1]):,}"
    if "train/loss" in series:
        loss = series["train/loss"][~np.isnan(series["train/loss"])]
        if len(loss):
            yield "loss", f"{loss[0]:.4g} to {loss[-10:].mean():.4g} (first line, mean of the last 10)"
    for key, unit in (("tokens_per_second", "tokens/s"), ("cells_per_second", "cells/s")):
        if key in series:
            yield "speed", f"{np.nanmedian(series[key]):,.0f} {unit} (median line)"
    streams = config.get("streams")
    if isinstance(streams, dict):
        yield (
            "streams",
            " ".join(str(streams.get(key, "")) for key in ("batching_mode", "pick_mode", "queue") if streams.get(key)),
        )
        yield "pool", str(streams.get("num_streams_mixed", 8))
    for source in config.get("source", ()) if isinstance(config.get("source"), list) else ():
        if isinstance(source, dict):
            yield "source", f"{source.get('spec', '?')} weight {source.get('weight', 1.0)}"


def _marks(path: Path) -> Iterable[tuple[int, str]]:
    try:
        lines = path.read_bytes().splitlines()[-10_000:]
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if (
            isinstance(event, dict)
            and event.get("event") in ("resumed", "weights", "skipped")
            and isinstance(event.get("step"), int)
        ):
            yield event["step"], str(event["event"])


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):  # a report of what is there, not a check of it
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
