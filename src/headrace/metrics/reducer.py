"""Reduction of metrics over steps and ranks: one value per key for the whole cluster, and the worst rank.

    accumulator = Accumulator(specs)                     every step, on every rank, no communication
    accumulator.add({"data/rows": 32, "loader/depth_min": 2})
    reducer = Reducer(specs)                             at log cadence, all ranks together, about 1 ms on gloo
    line = reducer.reduce(accumulator.drain())

Each value travels with a tag: absent, int64 or float64. So a rank without a value takes no part in a minimum
or a mean, identities such as +inf are never emitted, and counts stay exact (packed as float32 they would be wrong
above 2^24). A NaN anywhere makes the value NaN: it is never hidden by a minimum.

One packed all_gather brings every rank the rows of all ranks, and each rank does the same arithmetic on them, so each knows the worst
rank. On gloo with 2 processes this costs 0.2 to 0.4 of one all_reduce for each kind of reduction (benchmarks/metrics.py).

The layout of the packed row comes from the specs; its hash is compared once, before anything is added up, so that ranks
with other keys are refused by name instead of summing different columns. Members of a family (`wait/<name>/seconds`)
join the layout when the first rank has one: that rank sets a flag in its row, and all ranks add the new keys together.
Problems of one rank travel the same way, so all ranks stop with the same error, instead of one leaving the others waiting.

A rank that is killed or stopped ends the reduction on the others with an error that names it: see ranks.py.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from headrace.errors import ConfigError, HeadraceError, did_you_mean
from headrace.metrics.ranks import Ranks, ranks_text
from headrace.metrics.spec import MetricSpec, Number, Reduction, SpecBook, register
from headrace.metrics.wait import Meter, Wait
from headrace.order import fingerprint_json

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

STEPS_IN_INTERVAL = MetricSpec(
    "steps_in_interval", Reduction.MAX, help="steps that were accumulated into this line, on the rank with the most"
)
register(STEPS_IN_INTERVAL)

MAX_COLUMNS = 20_000
"""Columns a layout may grow to. Names that vary without end (a path, an index) must not be part of a key."""

BY_RANK = frozenset({"waits/exposed/seconds"})
"""Keys whose value on each rank is also emitted, as the list `<key>/by_rank`: the live page shows the worst rank at once."""
MAX_BY_RANK = 1024

_ABSENT, _INT, _FLOAT = 0, 1, 2
_HEAD = 2
"""Numbers of a packed row that come before its columns."""
_NO_STEP = -1
_INT64 = range(-(2**63), 2**63)
# Looking a member up in its Enum costs as much as the rest of adding a value.
_MIN, _MAX, _SUM, _MEAN = Reduction.MIN, Reduction.MAX, Reduction.SUM, Reduction.MEAN


class Mean(NamedTuple):
    """A value of a MEAN metric: what was added up, and by how much to divide. A bare number counts as one observation."""

    total: Number
    weight: Number


Value = int | float | Mean


# ------------------------------------------------------------------------------------------ one rank, many steps


class Accumulator:
    """Values of many steps become one row, each by its own kind, so that no delta and no spike is lost between lines."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        self._book = SpecBook(specs)
        self._values: dict[str, Value] = {}
        self.steps = 0

    def add(self, values: Mapping[str, Any]) -> None:
        """Take in one step. An empty one still counts as a step."""
        clean = _checked(self._book, values)
        held, find = self._values, self._book.find
        for key, value in clean.items():
            if key in held:
                value = _combined(find(key), held[key], value)
            held[key] = value
        self.steps += 1

    def drain(self) -> dict[str, Value]:
        """The row since the last drain, `steps_in_interval` beside it; {} if there was no step."""
        if not self.steps:
            return {}
        values, self._values = self._values, {}
        values[STEPS_IN_INTERVAL.key], self.steps = self.steps, 0
        return values


def _combined(spec: Any, a: Any, b: Any) -> Any:
    reduction = spec.reduction
    if reduction is _SUM:
        return a + b
    if reduction is _MEAN:
        return Mean(a.total + b.total, a.weight + b.weight)
    if a != a or b != b:
        return math.nan
    return min(a, b) if reduction is _MIN else max(a, b)


def _checked(book: SpecBook, values: Mapping[str, Any]) -> dict[str, Value]:
    """Plain ints, floats and Means of declared keys, without identities; every problem at once otherwise."""
    clean: dict[str, Value] = {}
    problems: list[str] = []
    for key, value in values.items():
        spec = book.find(key)
        if spec is None:
            problems.append(
                f"metric {key!r} was never declared, so it is not known how ranks combine it. Declare it with a MetricSpec"
                f"{did_you_mean(key, book) or '.'}"
            )
            continue
        reduction = spec.reduction
        if reduction is _MEAN:
            mean = value if isinstance(value, Mean) else Mean(value, 1)
            total, weight = _plain(mean.total), _plain(mean.weight)
            if total is None or weight is None:
                problems.append(f"metric {key!r} (MEAN) needs a number or a Mean, got {value!r}.")
            elif weight != 0:
                clean[key] = Mean(total, weight)
            continue
        number = _plain(value)
        if number is None:
            problems.append(f"metric {key!r} ({reduction.name}) needs a number, got {value!r}.")
        # A caller without a value may give the identity of the reduction: taken as absent. (A SUM of 0 is a value.)
        elif not ((reduction is _MIN and number == math.inf) or (reduction is _MAX and number == -math.inf)):
            clean[key] = number
    if problems:
        raise ConfigError(problems)
    return clean


def _plain(value: Any) -> Number | None:
    kind = type(value)
    if kind is int or kind is float:
        return value
    if kind is bool:
        return int(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy scalars, tensors of one element
        return _plain(value.item())
    return None


# -------------------------------------------------------------------------------------------- columns and rows


class _Column(NamedTuple):
    key: str
    reduction: Reduction
    with_max: bool


class _Layout:
    """Which column of a packed row belongs to which key. Equal on all ranks, because it is made from equal keys alone.

    A row of int64: [1 if this rank has new keys or a problem | step | payload per column | tags, one byte per column];
    a MEAN takes a second column for its weights.
    """

    def __init__(self, book: SpecBook, members: Iterable[str]) -> None:
        keys = [key for key, spec in book.items() if not spec.is_family]
        self.columns: list[_Column] = []
        for key in sorted({*keys, *members}):
            spec = book.find(key)
            assert spec is not None
            self.columns.append(_Column(key, spec.reduction, spec.with_max))
        self.index = {column.key: i for i, column in enumerate(self.columns)}
        means = [i for i, column in enumerate(self.columns) if column.reduction is Reduction.MEAN]
        self.weights = {self.columns[i].key: len(self.columns) + n for n, i in enumerate(means)}
        self.width = len(self.columns) + len(means)
        self.length = _HEAD + self.width + (self.width + 7) // 8

    def pack(self, values: Mapping[str, Value]) -> np.ndarray:
        row = np.zeros(self.length, dtype=np.int64)
        ints = row[_HEAD : _HEAD + self.width]
        floats = ints.view(np.float64)
        tags = row[_HEAD + self.width :].view(np.uint8)

        def put(at: int, value: Number) -> None:
            if isinstance(value, int) and value in _INT64:
                ints[at], tags[at] = value, _INT
            else:
                floats[at], tags[at] = value, _FLOAT

        for key, value in values.items():
            if isinstance(value, Mean):
                put(self.index[key], value.total)
                put(self.weights[key], value.weight)
            else:
                put(self.index[key], value)
        return row

    def reduce(self, rows: np.ndarray, ranks: Sequence[int]) -> dict[str, Number]:
        """The rows of all ranks, [ranks, length], as one dict. Pure, and in a fixed order: the same bits everywhere."""
        ints = np.ascontiguousarray(rows[:, _HEAD : _HEAD + self.width])
        tags = np.ascontiguousarray(rows[:, _HEAD + self.width :]).view(np.uint8)[:, : self.width]
        there = tags != _ABSENT
        floats = np.where(tags == _FLOAT, ints.view(np.float64), ints.astype(np.float64))
        floats[~there] = 0.0
        sums = floats.sum(axis=0)
        whole = ~(tags == _FLOAT).any(axis=0)
        exact = ints.sum(axis=0)

        def total(at: int) -> Number:
            if not whole[at]:
                return sums[at].item()
            # numpy's int64 wraps around silently; near its end Python's integers take over
            return exact[at].item() if abs(sums[at]) < 2.0**62 else sum(ints[:, at].tolist())

        result: dict[str, Any] = {}
        for at in np.flatnonzero(there.any(axis=0)[: len(self.columns)]).tolist():
            key, reduction, with_max = self.columns[at]
            if reduction is Reduction.SUM and not with_max:
                result[key] = total(at)
                continue
            here = np.flatnonzero(there[:, at])
            values = (ints if whole[at] else floats)[here, at]
            if reduction is Reduction.MEAN:
                second = self.weights[key]
                weight = total(second)
                if weight == 0:  # weights that cancel out; a rank with weight 0 sends no value
                    continue
                result[key] = total(at) / weight
                values = values / (ints if whole[second] else floats)[here, second]
            worst = int(values.argmin() if reduction is Reduction.MIN else values.argmax())
            if reduction in (Reduction.MIN, Reduction.MAX):
                result[key] = values[worst].item()
            elif reduction is Reduction.SUM:
                result[key] = total(at)
            if with_max:
                if reduction in (Reduction.SUM, Reduction.MEAN):
                    result[f"{key}_max"] = values[worst].item()
                result[f"{key}/worst_rank"] = ranks[int(here[worst])]
                if key in BY_RANK and 1 < len(ranks) <= MAX_BY_RANK:
                    result[f"{key}/by_rank"] = floats[:, at].tolist()
        return result


def reduce_values(specs: Iterable[MetricSpec], rows: Sequence[Mapping[str, Any]]) -> dict[str, Number]:
    """What `Reducer.reduce` gives when rank i reduces `rows[i]`: the same arithmetic with no process group."""
    book = SpecBook((*specs, STEPS_IN_INTERVAL))
    clean = [_checked(book, row) for row in rows]
    layout = _Layout(book, {key for row in clean for key in row})
    if not rows:
        return {}
    return layout.reduce(np.stack([layout.pack(row) for row in clean]), range(len(rows)))


# -------------------------------------------------------------------------------------------------- all ranks


class Reducer:
    """Reduces rows over the ranks of a process group. Every rank calls `reduce` the same number of times.

    Values travel through the memory of `device`, which `group` must reach. By default that is CPU memory where the group reaches it
    (gloo), else the group's own device (nccl). With `torch.distributed` not initialised, or one rank, nothing is sent.

    `specs` declare the keys that a row may have. `deadline`: seconds that one reduction may take. `collectives`: the collective that carries the
    rows; `"all_reduce"` gives the same result and sends more. `meter` counts the waits; the process's own unless given.
    """

    def __init__(
        self,
        specs: Iterable[MetricSpec],
        group: ProcessGroup | None = None,
        *,
        deadline: float = 300.0,
        collectives: Literal["all_gather", "all_reduce"] = "all_gather",
        meter: Meter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if collectives not in ("all_gather", "all_reduce"):
            raise ConfigError(f"collectives must be 'all_gather' or 'all_reduce', got {collectives!r}")
        if not 0 < deadline <= threading.TIMEOUT_MAX:
            raise ConfigError(f"a Reducer needs a finite deadline of more than 0 seconds, got {deadline}")
        self._book = SpecBook((*specs, STEPS_IN_INTERVAL))
        self._group = group
        self._device = device
        self._deadline = deadline
        self._collectives = collectives
        self._meter = meter
        self._layout = _Layout(self._book, ())
        self._ranks: Ranks | None = None

    def reduce(self, local: Mapping[str, Any], *, step: int | None = None) -> dict[str, Number]:
        """One value per key over all ranks; keys that no rank has are not in it. Collective: every rank must call it.

        `step` is the caller's step. It travels with the values, and ranks that bring different steps are refused on every
        rank: without it the values of a rank that skipped a call are added to those of another step.
        """
        if self._ranks is None and not _distributed(self._group):
            return self._of_one_rank(_checked(self._book, local))
        with Wait("metrics.reduce", meter=self._meter, deadline=self._deadline) as wait:
            ranks = self._ranks
            if ranks is None:
                ranks = Ranks(self._group, device=self._device)
                ranks.begin()
                self._require_one_layout(ranks, wait)
                self._ranks = ranks
            else:
                ranks.begin()
            at_step = _NO_STEP if step is None else step
            problem = ""
            values: dict[str, Value] = {}
            try:
                values = _checked(self._book, local)
            except ConfigError as error:  # sent to all ranks first: raising here would leave them waiting
                problem = str(error)
            for _ in range(2):
                members = [key for key in values if key not in self._layout.index]
                row = self._layout.pack({} if members else values)
                row[:_HEAD] = bool(members or problem), at_step
                result = self._attempt(ranks, row, wait)
                if result is not None:
                    return result
                self._take_in(ranks, members, problem, at_step, wait)
            raise AssertionError("a layout that has just taken in every rank's keys lacks one")

    def _of_one_rank(self, values: Mapping[str, Value]) -> dict[str, Number]:
        """Its own values, and `<key>_max` as several ranks have it."""
        result: dict[str, Number] = {}
        for key, value in values.items():
            result[key] = _finished(value)
            spec = self._book.find(key)
            if spec is not None and spec.with_max and spec.reduction in (Reduction.SUM, Reduction.MEAN):
                result[f"{key}_max"] = result[key]
        return result

    def _attempt(self, ranks: Ranks, row: np.ndarray, wait: Wait) -> dict[str, Number] | None:
        """The reduced row; None if a rank has new keys or a problem, or another step."""
        rows = ranks.gather(row, wait) if self._collectives == "all_gather" else ranks.gather_by_sum(row, wait)
        if rows[:, 0].any() or (rows[:, 1] != rows[0, 1]).any():
            return None
        return self._layout.reduce(rows, ranks.names)

    def _take_in(self, ranks: Ranks, members: Sequence[str], problem: str, step: int, wait: Wait) -> None:
        """Exchange new family members and add them to the layout, or raise the problem of any rank on all of them."""
        rows = ranks.exchange({"members": members, "problem": problem, "step": step}, wait)
        if len({row["step"] for row in rows}) > 1:
            raise HeadraceError(_step_differences(ranks.names, [row["step"] for row in rows]))
        problems = [
            f"rank {name}: {line}"
            for name, row in zip(ranks.names, rows, strict=True)
            for line in row["problem"].splitlines()
        ]
        if problems:
            raise ConfigError(problems)
        known = {*self._layout.index, *(key for row in rows for key in row["members"])}
        if len(known) > MAX_COLUMNS:
            raise ConfigError(
                f"the ranks have {len(known):,} metric keys, more than {MAX_COLUMNS:,}; the last are {sorted(known)[-2:]}. "
                "Take what varies without end (a path, an index) out of the key."
            )
        self._layout = _Layout(self._book, known)

    def _described(self) -> list[str]:
        return sorted(f"{s.key} {s.reduction.name}{' with_max' if s.with_max else ''}" for s in self._book.values())

    def _require_one_layout(self, ranks: Ranks, wait: Wait) -> None:
        ours = int(fingerprint_json([self._described(), self._collectives]), 16)
        hashes = ranks.gather(np.array([ours], dtype=np.uint64).view(np.int64), wait)
        if (hashes == hashes[0]).all():
            return
        rows = ranks.exchange({"keys": self._described(), "collectives": self._collectives}, wait)
        raise ConfigError(_layout_differences(ranks.names, rows))


def _finished(value: Value) -> Number:
    return value.total / value.weight if isinstance(value, Mean) else value


def _step_differences(names: Sequence[int], steps: Sequence[int]) -> str:
    having = {step: [n for n, s in zip(names, steps, strict=True) if s == step] for step in sorted(set(steps))}
    fewest_first = sorted(having.items(), key=lambda item: len(item[1]))
    listed = ", ".join(f"{ranks_text(n)} at {'no step' if s == _NO_STEP else f'step {s}'}" for s, n in fewest_first)
    return (
        f"cannot reduce metrics over {len(names)} ranks, because they are at different steps: {listed}. Their values would be "
        "added up over different steps. Every rank must call the reduction at every step, with {} if it has no values; look "
        f"for the step at which {ranks_text(fewest_first[0][1])} left a call out or made one too many."
    )


def _layout_differences(names: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines: list[str] = []
    for collectives in sorted({row["collectives"] for row in rows}):
        having = [n for n, row in zip(names, rows, strict=True) if row["collectives"] == collectives]
        if len(having) < len(names):
            lines.append(f"collectives={collectives!r} on {ranks_text(having)} only")
    for entry in sorted({entry for row in rows for entry in row["keys"]}):
        having = [n for n, row in zip(names, rows, strict=True) if entry in row["keys"]]
        if len(having) < len(names):
            key, _, kind = entry.partition(" ")
            lines.append(f"{key!r} ({kind}) is declared on {ranks_text(having)} only")
    shown = lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])
    return [
        f"cannot reduce metrics over {len(names)} ranks, because they declare different ones: {'; '.join(shown)}. Adding "
        "them up would mix different columns; give every rank the same specs."
    ]


def _distributed(group: ProcessGroup | None) -> bool:
    if "torch" not in sys.modules:  # a process that never imported torch has no process group
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
