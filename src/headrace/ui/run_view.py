"""A run folder as the pages see it: what it is, how it stands, its metrics. Nothing in the folder is trusted or changed.

    runs = find_runs(Path("runs"))          {"quickstart": Path("runs/quickstart"), ...}
    view = RunView("quickstart", path)
    view.refresh()                          read what the run has written since
    view.status()                           {"state": "running", "step": 120, "steps": 200, ...}

Whether a run goes on is asked of the kernel: its process holds a lock on run.lock, which ends with the process.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from headrace.errors import DataError, HeadraceError
from headrace.files import decode_toml, read_json, read_regular, read_tail
from headrace.metrics import MetricSpec, Reduction, SpecBook, registered_specs
from headrace.runtime.locks import lock_holder
from headrace.ui.metrics_index import SKETCH_BYTES, Line, MetricsIndex, is_number, sampled_lines

__all__ = ["RunView", "find_runs", "read_object", "run_lines", "run_summary", "spec_book"]

_MAX_SMALL = 4 << 20
_MAX_EVENTS = 2000
_MAX_RUNS = 500
_CARD_LINES = 120
"""Lines that are read for a row of the list of runs."""
_MAX_VISITED = 20_000
_MARKED = ("started", "resumed", "weights", "skipped", "stopped", "hole", "data_ended")


def spec_book() -> SpecBook:
    """Every metric that some room declares, whether or not this process uses the room."""
    import headrace.ledger.gauges
    import headrace.loader.data_stats
    import headrace.loader.loader
    import headrace.loader.stream_metrics
    import headrace.metrics.lag
    import headrace.rollouts.pipeline
    import headrace.runs.rl
    import headrace.runs.run_loop
    import headrace.spool.consumer
    import headrace.spool.provider  # noqa: F401

    return SpecBook((*registered_specs(), *DERIVED))


DERIVED = (
    MetricSpec("tokens_per_second", Reduction.SUM, unit="tokens/s", help="tokens delivered to all ranks, per second"),
    MetricSpec("cells_per_second", Reduction.SUM, unit="cells/s", help="cells delivered to all ranks, per second"),
    MetricSpec("seconds", Reduction.MAX, unit="s", help="wall time of the interval"),
    MetricSpec("stream_mixing/picks_so_far/<modality>", Reduction.MEAN, unit="%", help="share of this modality in all batches drawn up to here"),
)  # fmt: skip
_GAUGES = ("data/tokens_seen/", "stream_mixing/active/", "tokens_per_second", "cells_per_second")
"""Keys that ranks add up and that are no counts of an interval."""


def find_runs(root: Path) -> dict[str, Path]:
    """Run folders by name: `root` itself, or those at most three levels below it. Links are not followed."""
    if _is_run(root):
        return {root.resolve().name or "run": root}
    if not root.is_dir():
        raise DataError(f"{root} is no folder; give a run's folder, or a folder of runs")
    found: dict[str, Path] = {}
    level, visited = [root], 0
    for _ in range(3):
        below: list[Path] = []
        for folder in level:
            try:
                with os.scandir(folder) as entries:
                    names = sorted(
                        e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
                    )
            except OSError:
                continue
            for name in names:
                visited += 1
                if visited > _MAX_VISITED or len(found) >= _MAX_RUNS:
                    return found
                path = folder / name
                if _is_run(path):
                    found[path.relative_to(root).as_posix()] = path
                else:
                    below.append(path)
        level = below
    return found


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("metrics.jsonl", "config.toml", "run.json"))


def read_object(path: Path) -> dict[str, Any]:
    """A small JSON or TOML file; {} where it is missing, damaged, too large or no regular file."""
    try:
        value = (
            decode_toml(read_regular(path, _MAX_SMALL).decode(), path)
            if path.suffix == ".toml"
            else read_json(path, _MAX_SMALL)
        )
    except (HeadraceError, OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def tail_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects at the end of an append-only file; lines that are torn or foreign are passed over."""
    try:
        lines = read_tail(path)
    except (HeadraceError, OSError):
        return
    for line in lines:
        try:
            value = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def run_holder(path: Path) -> str | None:
    """Which process holds the lock of a run; None if none does, or the system cannot tell."""
    try:
        return lock_holder(path / "run.lock")
    except HeadraceError:
        return None


def kind_of(config: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """What a run trains: `text`, `streams` or `rl`."""
    if "streams" in config:
        return "streams"
    if any(name in config for name in ("rollouts", "environment", "engine", "policy")) or any(
        k.startswith("reward/") for k in last
    ):
        return "rl"
    return "text"


def state_of(path: Path, summary: Mapping[str, Any], last_step: int, running: bool) -> str:
    """running, completed, stopped, data_ended, or dead: it neither goes on nor said how it ended."""
    if running:
        return "running"
    step = summary.get("step")
    # A summary of an earlier stop is left over when the run was resumed and killed.
    if isinstance(summary.get("state"), str) and isinstance(step, int) and step >= last_step:
        return summary["state"]
    if not (path / "run.lock").exists():
        return "recorded"  # a folder that something else than `headrace run` wrote
    return "dead"


_cards: dict[Path, tuple[tuple[int, int], list[Line]]] = {}
_cards_lock = threading.Lock()


def run_lines(path: Path) -> list[Line]:
    """About a hundred lines of a run, however many it has; read again when the file changed."""
    metrics = path / "metrics.jsonl"
    lines: list[Line] = []
    try:
        status = metrics.stat()
        key = status.st_size, status.st_mtime_ns
        with _cards_lock:
            known = _cards.get(metrics)
        if known is not None and known[0] == key:
            lines = known[1]
        else:
            lines = sampled_lines(metrics, _CARD_LINES)
            with _cards_lock:
                if len(_cards) > 2 * _MAX_RUNS:
                    _cards.clear()
                _cards[metrics] = key, lines
    except (OSError, DataError):
        pass
    return lines


def run_summary(name: str, path: Path) -> dict[str, Any]:
    """One row of the list of runs."""
    lines = run_lines(path)
    last = lines[-1] if lines else {}
    config, summary = read_object(path / "config.toml"), read_object(path / "summary.json")
    running = run_holder(path) is not None
    step = last.get("step", 0)
    kind = kind_of(config, last)
    curve_key = "reward/all/mean" if kind == "rl" else "train/loss"
    speed = next((k for k in ("tokens_per_second", "cells_per_second") if is_number(last.get(k))), None)
    seconds, waited = last.get("step/seconds"), last.get("waits/exposed/seconds")
    share = waited / seconds if is_number(waited) and is_number(seconds) and seconds > 0 else None
    changed = last.get("time")
    return {
        "run": name, "name": _run_name(config, path), "kind": kind, "state": state_of(path, summary, step, running), "step": step,
        "steps": _number(_section(config, "run").get("steps")), "key": curve_key,
        "value": _number(last.get(curve_key)), "curve": [_number(line.get(curve_key)) for line in lines],
        "speed": _number(last.get(speed)) if speed else None, "speed_unit": {"tokens_per_second": "tokens/s", "cells_per_second": "cells/s"}.get(speed or ""),
        "wait_share": _number(share), "changed": _number(changed), "config_hash": read_object(path / "run.json").get("config_hash"),
    }  # fmt: skip


def _run_name(config: Mapping[str, Any], path: Path) -> str:
    name = _section(config, "run").get("name")
    return name[:200] if isinstance(name, str) else path.resolve().name


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | int | None:
    return value if is_number(value) else None


class RunView:
    """One run, read again as it grows. Safe to use from several threads."""

    def __init__(self, run: str, path: Path, book: SpecBook | None = None) -> None:
        """`run` is the name by which pages ask for it."""
        self.run = run
        self.path = path
        self.book = book if book is not None else spec_book()
        self.index = MetricsIndex(path / "metrics.jsonl", per_step=self.is_counter)
        self._lock = threading.Lock()
        self._read: dict[str, tuple[tuple[int, int] | None, Any]] = {}

    # ------------------------------------------------------------------------------------------- metrics

    def spec(self, key: str) -> MetricSpec | None:
        """The declaration of a key; of `<key>_max` that of the key."""
        found = self.book.find(key)
        if found is None and key.endswith("_max"):
            found = self.book.find(key.removesuffix("_max"))
        return found

    def is_counter(self, key: str) -> bool:
        """Whether a key counts what happened since the last line."""
        spec = self.spec(key)
        return spec is not None and spec.reduction is Reduction.SUM and not key.startswith(_GAUGES)

    @classmethod
    def outline(cls, run: str, path: Path, book: SpecBook, lines: list[Line]) -> RunView:
        """A run as some of its lines show it: enough for a verdict."""
        view = cls(run, path, book)
        view.index.load(lines)
        return view

    def refresh(self, seconds: float = 0.2) -> None:
        """Take in what was written since, for at most about `seconds`. A long file is sketched first.

        Returns at once, with what is known, if another thread has been refreshing for half a second.
        """
        if not self._lock.acquire(timeout=0.5):
            return
        try:
            size = (self.path / "metrics.jsonl").stat().st_size
            if size > SKETCH_BYTES and self.index.lines == 0 and not self.index.sketched:
                self.index.sketch()
            else:
                self.index.update(seconds)
        except (OSError, DataError):
            return  # not there yet, or no file: pages say that there is no line
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------- the folder

    def _cached(self, name: str, read: Any) -> Any:
        """What `read` makes of a file, read again only when the file changed."""
        path = self.path / name
        try:
            status = path.stat()
            key = (status.st_size, status.st_mtime_ns)
        except OSError:
            key = None
        known = self._read.get(name)
        if known is None or known[0] != key:
            known = self._read[name] = key, read(path)
        return known[1]

    @property
    def config(self) -> dict[str, Any]:
        return self._cached("config.toml", read_object)

    @property
    def summary(self) -> dict[str, Any]:
        return self._cached("summary.json", read_object)

    @property
    def about(self) -> dict[str, Any]:
        return self._cached("run.json", read_object)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The newest events of the journal."""
        return self._cached("journal.jsonl", lambda path: list(deque(tail_lines(path), maxlen=_MAX_EVENTS)))

    @property
    def name(self) -> str:
        return _run_name(self.config, self.path)

    @property
    def last(self) -> Line:
        """The newest line of metrics; {} before the first."""
        return self.index.recent[-1] if self.index.recent else {}

    @property
    def kind(self) -> str:
        return kind_of(self.config, self.last)

    def section(self, name: str) -> dict[str, Any]:
        return _section(self.config, name)

    @property
    def world_size(self) -> int:
        """Ranks of the newest start that the journal tells of."""
        for event in reversed(self.events):
            ranks = event.get("world_size")
            if isinstance(ranks, int) and not isinstance(ranks, bool) and 0 < ranks < 1 << 20:
                return ranks
        return 1

    def status(self) -> dict[str, Any]:
        """How the run stands."""
        holder = run_holder(self.path)
        last, summary = self.last, self.summary
        step = self.index.last_step
        steps = _number(self.section("run").get("steps"))
        state = state_of(self.path, summary, step, holder is not None)
        started = next(
            (e["time"] for e in self.events if e.get("event") in ("started", "resumed") and is_number(e.get("time"))),
            None,
        )
        lines = [r for r in list(self.index.recent)[-30:] if is_number(r.get("time"))]
        pace = None
        if len(lines) > 1 and lines[-1]["time"] > lines[0]["time"]:
            pace = (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])
        left = (steps - step) / pace if state == "running" and pace and is_number(steps) and steps > step else None
        return {
            "state": state, "holder": holder, "step": step, "steps": steps, "ranks": self.world_size, "started": started,
            "changed": _number(last.get("time")), "now": time.time(), "steps_per_second": pace, "seconds_left": left, "lines": self.index.lines,
            "generation": self.index.generation, "progress": round(self.index.progress, 4), "sketched": self.index.sketched,
            "resume": _text(summary.get("resume")), "path": str(self.path), "name": self.name, "kind": self.kind, "run": self.run,
            "damaged": self.index.damaged, "keys_left_out": self.index.keys_left_out,
        }  # fmt: skip

    def marks(self) -> list[list[Any]]:
        """Steps at which something happened: [step, what]."""
        found = []
        for event in self.events:
            what, step = event.get("event"), event.get("step")
            if isinstance(step, int) and not isinstance(step, bool) and what in _MARKED and step > 0:
                found.append([step, what])
        return found[-200:]

    def targets(self) -> dict[str, float]:
        """Share of the tokens that each source or modality should have, from the config; {} where none is given."""
        events = [e for e in self.events if e.get("event") == "weights" and isinstance(e.get("weights"), dict)]
        if events:
            weights = {str(k): v for k, v in events[-1]["weights"].items()}
        elif isinstance(self.config.get("source"), list):
            weights = {str(s.get("name")): s.get("weight", 1.0) for s in self.config["source"] if isinstance(s, dict)}
        else:
            weights = dict(self.section("streams").get("targets") or {})
        weights = {k: float(v) for k, v in weights.items() if is_number(v) and v >= 0}
        total = sum(weights.values())
        return {k: v / total for k, v in weights.items()} if total > 0 else {}

    def members(self, pattern: str) -> dict[str, str]:
        """Keys of a family by their varying part: `data/source_tokens/<source>` -> {"web": "data/source_tokens/web"}."""
        shape = re.compile("([^/]+)".join(re.escape(p) for p in re.split(r"<[a-z_]+>", pattern)))
        return {m[1]: key for key in self.index.known_keys() if (m := shape.fullmatch(key))}


def _text(value: Any) -> str | None:
    return value[:2000] if isinstance(value, str) else None
