"""Declaration of metrics: key, reduction over ranks, unit and healthy range.

    MetricSpec("data/rows", Reduction.SUM, unit="rows", help="rows delivered since the last line")

A metric is declared once, with its reduction, and is always on. The declarations are the documentation: the command
prints `registered_specs()`, the page draws the healthy range behind the curve, and the Reducer takes its layout from
them.

A key may hold markers, `wait/<name>/seconds`: then it declares a family, one member for each name that occurs. A
plain key wins over a family that would also match it.
"""

from __future__ import annotations

import enum
import math
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Protocol, runtime_checkable

from headrace.errors import ConfigError

Number = int | float

_MARKER = re.compile(r"<[a-z_]+>")
_KEY = re.compile(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)*")


class Reduction(enum.Enum):
    """How values of one key become one value, over the steps of an interval and over the ranks alike."""

    MIN = "min"
    MAX = "max"
    SUM = "sum"
    MEAN = "mean"
    """SUM / SUM: the mean over all observations of all ranks, so a rank with none of them biases nothing."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric, or with `<markers>` in its key one family of them."""

    key: str
    reduction: Reduction
    with_max: bool = False
    """Also emit `<key>_max` (of a SUM or MEAN: the largest value of a single rank) and `<key>/worst_rank` (who has it)."""
    unit: str = ""
    healthy: tuple[float, float] | None = None
    """The range [lo, hi] of healthy values; None if no range is known."""
    help: str = ""

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(_MARKER.sub("x", self.key)):
            raise ValueError(
                f"metric key {self.key!r} needs parts of letters, digits and _.- joined by '/', "
                "with <name> where a family varies"
            )
        if not isinstance(self.reduction, Reduction):
            raise TypeError(f"metric {self.key!r} needs a Reduction, got {self.reduction!r}")
        if self.healthy is not None:
            lo, hi = self.healthy
            if not lo <= hi or math.isnan(lo) or math.isnan(hi):
                raise ValueError(f"metric {self.key!r} needs a healthy range lo <= hi, got {self.healthy}")

    @property
    def is_family(self) -> bool:
        """Whether the key stands for many."""
        return "<" in self.key

    def matches(self, key: str) -> bool:
        """Whether `key` is this metric, or a member of this family."""
        return _pattern(self.key).fullmatch(key) is not None if self.is_family else key == self.key


@lru_cache(maxsize=1024)
def _pattern(key: str) -> re.Pattern[str]:
    literal = _MARKER.split(key)
    return re.compile(r"[^/]+".join(re.escape(part) for part in literal))


@runtime_checkable
class Metered(Protocol):
    """An object with metrics: it declares their keys, and hands over what was counted since the last drain."""

    def metric_specs(self) -> Iterable[MetricSpec]:
        """Every key this object may emit."""
        ...

    def drain_metrics(self) -> dict[str, Number]:
        """What happened since the last call, cleared; {} if nothing did. Bounded, and never blocks."""
        ...


class SpecBook(dict[str, MetricSpec]):
    """Specs by key, in which a concrete key finds its spec: the plain one first, then the family it belongs to."""

    def __init__(self, specs: Iterable[MetricSpec] = ()) -> None:
        super().__init__()
        self._found: dict[str, MetricSpec | None] = {}
        self.add(*specs)

    def add(self, *specs: MetricSpec) -> None:
        """Declare specs. An equal spec may be declared again; conflicts are reported all at once, and then nothing is added."""
        merged = dict(self)
        problems: list[str] = []
        for spec in specs:
            known = merged.setdefault(spec.key, spec)
            if known != spec:
                problems.append(_conflict(known, spec))
        if problems:
            raise ConfigError(problems)
        self.update(merged)
        self._found = {}

    def find(self, key: str) -> MetricSpec | None:
        """The spec that covers `key`; None if the key is not declared."""
        try:
            return self._found[key]
        except KeyError:
            spec = self.get(key)
        if spec is None:
            spec = next((s for s in self.values() if s.is_family and s.matches(key)), None)
        if len(self._found) >= 10_000:  # a cache, and keys come from callers
            self._found = {}
        self._found[key] = spec
        return spec


def _conflict(known: MetricSpec, spec: MetricSpec) -> str:
    differing = [f.name for f in fields(MetricSpec) if getattr(known, f.name) != getattr(spec, f.name)]
    differences = ", ".join(f"{n} {_shown(getattr(known, n))} and {_shown(getattr(spec, n))}" for n in differing)
    return f"metric {spec.key!r} is declared twice, with {differences}. Give the second one another key, or make them agree."


def _shown(value: object) -> str:
    return value.name if isinstance(value, Reduction) else repr(value)


_registry = SpecBook()
_registry_lock = threading.Lock()


def register(*specs: MetricSpec) -> None:
    """Declare metrics for the whole process. An equal spec may be declared again; another one under the same key is a ConfigError."""
    with _registry_lock:
        _registry.add(*specs)


def registered_specs() -> tuple[MetricSpec, ...]:
    """Everything declared so far, sorted by key."""
    with _registry_lock:
        return tuple(sorted(_registry.values(), key=lambda spec: spec.key))
