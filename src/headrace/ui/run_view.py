"""A run folder as the pages see it: state, config, journal, metrics. Nothing in the folder is trusted or changed.

    runs = find_runs(Path("runs"))          {"quickstart": Path("runs/quickstart"), ...}
    view = RunView("quickstart", path)
    view.refresh()                          read what the run has appended
    view.status()                           {"state": "running", "step": 120, "steps": 200, ...}

A run is running if a process holds the lock on run.lock. The kernel releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import DataError, HeadraceError
from headrace.files import decode_toml, json_objects, read_json, read_regular, read_tail
from headrace.metrics import MetricSpec, Reduction, SpecBook, registered_specs
from headrace.runtime.locks import lock_holder
from headrace.ui.metrics_index import Line, MetricsIndex, is_number, sampled_lines

T = TypeVar("T")
_MAX_SMALL = 4 << 20
_MAX_EVENTS = 2000
_MAX_RUNS = 500
_LISTED_LINES = 120
"""Lines that are read of a run for the list of runs."""
_OUTLINE_BYTES, _OUTLINE_LINES = 24 << 20, 600
"""Of a longer file, this many lines are shown until it is read."""
_MAX_VISITED = 20_000
_MARKED = ("started", "resumed", "weights", "skipped", "stopped", "hole", "data_ended")
"""Events of the journal that are marked on the time axis."""
SPEEDS = (("tokens_per_second", "tokens/s"), ("cells_per_second", "cells/s"))
"""Keys and units of a run's throughput; a run has one of them."""


def spec_book() -> SpecBook:
    """The declarations of all metrics of headrace. Imports every module that registers some."""
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
"""Keys with Reduction.SUM that do not count what happened in an interval."""


def find_runs(root: Path) -> dict[str, Path]:
    """Run folders by name: `root` itself, or those at most three levels below it. Links are not followed."""
    if _is_run(root):
        return {root.resolve().name or "run": root}
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give a run's folder, or a folder of runs")
    found: dict[str, Path] = {}
    for visited, (folder, names, _) in enumerate(os.walk(root)):
        path = Path(folder)
        if _is_run(path):
            found[path.relative_to(root).as_posix()] = path
            names.clear()
        depth = len(path.relative_to(root).parts)
        names[:] = sorted(name for name in names if depth < 3 and not name.startswith("."))
        if visited >= _MAX_VISITED or len(found) >= _MAX_RUNS:
            break
    return found


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("metrics.jsonl", "config.toml", "run.json"))


def cached_by_file(most: int) -> Callable[[Callable[[Path], T]], Callable[[Path], T]]:
    """Decorator of a function of a file's path: it is called again only when size or time of the file changed. Keeps `most` results."""

    def decorate(read: Callable[[Path], T]) -> Callable[[Path], T]:
        remembered = functools.lru_cache(most)(lambda path, identity: read(path))

        @functools.wraps(read)
        def cached(path: Path) -> T:
            try:
                status = path.stat()
            except OSError:
                return remembered(path, None)
            return remembered(path, (status.st_size, status.st_mtime_ns))

        return cached

    return decorate


@cached_by_file(4 * _MAX_RUNS)
def read_object(path: Path) -> dict[str, Any]:
    """A small JSON or TOML file; {} if it is missing, damaged, too large or not a regular file."""
    try:
        value = (
            decode_toml(read_regular(path, _MAX_SMALL).decode(), path)
            if path.suffix == ".toml"
            else read_json(path, _MAX_SMALL)
        )
    except (HeadraceError, OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def tail_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects at the end of an append-only file. Torn and foreign lines are left out."""
    try:
        return list(json_objects(read_tail(path)))
    except (HeadraceError, OSError):
        return []


@cached_by_file(32)
def read_events(path: Path) -> list[dict[str, Any]]:
    """The newest events of a journal."""
    return tail_lines(path)[-_MAX_EVENTS:]


@cached_by_file(2 * _MAX_RUNS)
def some_lines(path: Path) -> list[Line]:
    """About a hundred lines of a metrics file, however many it has; none if it cannot be read."""
    try:
        return sampled_lines(path, _LISTED_LINES)
    except (OSError, DataError):
        return []


def _number(value: Any) -> float | int | None:
    return value if is_number(value) else None


class RunView:
    """One run, read again as it grows. Safe to use from several threads."""

    def __init__(self, run: str, path: Path, book: SpecBook | None = None) -> None:
        """Nothing is read before `refresh`.

        Args:
            run: The name by which pages ask for the run.
            path: Its folder.
            book: Declarations of all metrics; made unless given.
        """
        self.run = run
        self.path = path
        self.book = book if book is not None else spec_book()
        self._whole = self.index = MetricsIndex(path / "metrics.jsonl", per_step=self.is_counter)
        """`index` is what the pages show: the index of the file or, until a long file is read, that of some of its lines."""
        self._lock = threading.Lock()

    # ------------------------------------------------------------------------------------------- metrics

    def spec(self, key: str) -> MetricSpec | None:
        """The declaration of a key; for `<key>_max` the declaration of `<key>`."""
        found = self.book.find(key)
        if found is None and key.endswith("_max"):
            found = self.book.find(key.removesuffix("_max"))
        return found

    def is_counter(self, key: str) -> bool:
        """Whether a key counts what happened since the last line."""
        spec = self.spec(key)
        return spec is not None and spec.reduction is Reduction.SUM and not key.startswith(_GAUGES)

    def refresh(self, seconds: float = 0.2) -> None:
        """Index what was appended, for at most about `seconds`. Of a long file some lines are read first.

        Returns without reading if another thread has been refreshing for half a second.
        """
        if not self._lock.acquire(timeout=0.5):
            return
        try:
            path, whole = self._whole.path, self._whole
            if self.index is whole and whole.lines == 0 and path.stat().st_size > _OUTLINE_BYTES:
                outline = MetricsIndex(path, per_step=self.is_counter)
                outline.load(sampled_lines(path, _OUTLINE_LINES))
                self.index = outline
            elif whole.update(seconds):
                self.index = whole
        except (OSError, DataError):
            return  # not there yet, or not a file: pages say that there is no line
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------------------- the folder

    @property
    def is_outline(self) -> bool:
        """Whether the pages show some lines of the file, because it is not read yet."""
        return self.index is not self._whole

    @property
    def config(self) -> dict[str, Any]:
        return read_object(self.path / "config.toml")

    @property
    def summary(self) -> dict[str, Any]:
        return read_object(self.path / "summary.json")

    @property
    def about(self) -> dict[str, Any]:
        return read_object(self.path / "run.json")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.path / "journal.jsonl")

    @property
    def name(self) -> str:
        name = self.section("run").get("name")
        return name[:200] if isinstance(name, str) else self.path.resolve().name

    @property
    def last(self) -> Line:
        """The newest line of metrics; {} before the first."""
        return self.index.recent[-1] if self.index.recent else {}

    @property
    def kind(self) -> str:
        """What the run trains: `text`, `streams` or `rl`."""
        if "streams" in self.config:
            return "streams"
        configured = any(name in self.config for name in ("rollouts", "environment", "engine", "policy"))
        return "rl" if configured or any(key.startswith("reward/") for key in self.last) else "text"

    def section(self, name: str) -> dict[str, Any]:
        """A table of the config; {} if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def world_size(self) -> int:
        """Ranks of the newest start in the journal."""
        for event in reversed(self.events):
            ranks = event.get("world_size")
            if isinstance(ranks, int) and not isinstance(ranks, bool) and 0 < ranks < 1 << 20:
                return ranks
        return 1

    def _state(self, running: bool) -> str:
        """running, completed, stopped, data_ended; dead: the process ended without a summary; recorded: `headrace run` did not write the folder."""
        if running:
            return "running"
        state, step = self.summary.get("state"), self.summary.get("step")
        # After a resume that was killed, the summary of the earlier stop is still there.
        if isinstance(state, str) and isinstance(step, int) and step >= self.index.last_step:
            return state
        return "dead" if (self.path / "run.lock").exists() else "recorded"

    def status(self) -> dict[str, Any]:
        """State, progress and pace of the run."""
        holder = None
        with contextlib.suppress(HeadraceError):
            holder = lock_holder(self.path / "run.lock")
        last, step = self.last, self.index.last_step
        steps = _number(self.section("run").get("steps"))
        state = self._state(holder is not None)
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
            "generation": self.index.generation, "progress": round(self._whole.progress, 4), "sketched": self.is_outline,
            "resume": resume[:2000] if isinstance(resume := self.summary.get("resume"), str) else None, "path": str(self.path), "name": self.name, "kind": self.kind, "run": self.run,
            "damaged": self.index.damaged, "keys_left_out": self.index.keys_left_out,
        }  # fmt: skip

    def marks(self) -> list[list[Any]]:
        """Events of the journal to mark on the time axis: [step, event]."""
        found = []
        for event in self.events:
            what, step = event.get("event"), event.get("step")
            if isinstance(step, int) and not isinstance(step, bool) and what in _MARKED and step > 0:
                found.append([step, what])
        return found[-200:]

    def targets(self) -> dict[str, float]:
        """Share of the tokens that each source or modality should have, from the config; {} if it has no weights."""
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
