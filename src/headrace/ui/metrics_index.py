"""Index of a metrics.jsonl: bounded memory, every spike kept, updated while a run appends to the file.

    index = MetricsIndex(run / "metrics.jsonl")
    index.update()                                    read what was appended since the last call
    index.curve("train/loss", points=800)             {"steps": [...], "values": [...]}, at most about 800 of them
    index.curve("train/loss", first=4000, last=4500)  the same between two steps, read again from the file if buckets are coarse

Lines are collected in buckets of `stride` lines. A bucket keeps, for every key, the least and the greatest value with their steps,
the sum and the count. When all buckets are full, pairs of them are merged and the stride doubles, so the memory depends on the number of keys
alone. A bucket has the file offset of its first line, so any range of steps can be read again line by line.

A run that was killed and resumed trains some steps twice. A line whose step is not above the last one replaces all lines from that
step on; the bucket in which that step lies is read again.

A counter (Reduction.SUM) is indexed per step: its value divided by `steps_in_interval`. Otherwise the first line of a run, which covers one step,
would look like a collapse beside lines that cover ten.

A long file takes seconds to read whole: `update` reads it in slices, and `progress` is the share that was read. Until it is 1, an index of
lines at evenly spaced offsets (`sampled_lines`, `load`) shows the outline.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import orjson

from headrace.errors import DataError, HeadraceError
from headrace.files import open_regular

BUCKETS = 2048
MAX_KEYS = 1500
"""Most keys that are indexed. Further keys of a file are only counted."""
MAX_LINE = 1 << 20
RECENT = 1024
"""Newest lines that are kept whole, for findings and for clients that follow the run."""
_READ = 4 << 20
_MAX_BYTES = 4 << 30
_MAX_STEP = 1 << 53
_RANGE_BYTES = 48 << 20
"""Most bytes of the file that are read again for one range of steps."""

_NOT_JSON = re.compile(rb"(?<=[:,\[ ])-?(?:NaN|Infinity)(?=[ ,}\]])")

Line = dict[str, Any]


def parse_line(line: bytes) -> Line | None:
    """The record of a line; None if the line is torn or foreign."""
    if len(line) > MAX_LINE:
        return None
    try:
        record = orjson.loads(line)
    except ValueError:
        # Python's json writes NaN and Infinity, which are not JSON. The line is valid; the value is read as null.
        try:
            record = orjson.loads(_NOT_JSON.sub(b"null", line))
        except ValueError:
            return None
    return record if _is_record(record) else None


def _is_record(value: Any) -> bool:
    step = value.get("step") if isinstance(value, dict) else None
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MAX_STEP


def _column(records: Sequence[Line], key: str) -> np.ndarray:
    """The values of a key as float64; NaN if a record has no finite number."""
    values = [r.get(key) for r in records]
    if set(map(type, values)) <= _PLAIN:
        try:
            found = np.array(values, np.float64)
        except OverflowError:  # an integer beyond float64
            pass
        else:
            found[~np.isfinite(found)] = math.nan
            return found
    return np.array([v if is_number(v) else math.nan for v in values], np.float64)


_PLAIN = {int, float, type(None)}


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value can be drawn: a finite int or float, not a bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def open_metrics(path: Path) -> BinaryIO:
    """Open a metrics file for reading. DataError if it is missing, cannot be read, is not a regular file or is too large."""
    try:
        handle = os.fdopen(open_regular(path), "rb", buffering=0)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: the run has written no metrics yet, or this is not a run folder"
        ) from None
    except (HeadraceError, OSError) as error:
        raise DataError(str(error)) from error
    size = os.fstat(handle.fileno()).st_size
    if size > _MAX_BYTES:
        handle.close()
        raise DataError(
            f"{path} has {size:,} bytes; metrics of at most {_MAX_BYTES:,} are read. Log less often, or cut the file"
        )
    return handle


def sampled_lines(path: Path, count: int) -> list[Line]:
    """About `count` records at evenly spaced offsets of a file, the last record included; all records of a short file."""
    with open_metrics(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size <= max(count, 1) * 4096:
            text = os.pread(handle.fileno(), size, 0)
            found = [r for line in text.split(b"\n") if (r := parse_line(line))]
            return found[:: max(len(found) // count, 1)] + found[-1:] if len(found) > count else found
        offsets = [i * size // count for i in range(count)] + [max(size - (64 << 10), 0)]
        found = []
        for at in offsets[:-1]:
            # The first piece is the end of a line that begins before the offset.
            pieces = os.pread(handle.fileno(), 32 << 10, at).split(b"\n")
            pieces = pieces[0 if at == 0 else 1 : -1]
            record = next((r for line in pieces[:3] if (r := parse_line(line))), None)
            if record is not None:
                found.append(record)
        tail = [
            r for line in os.pread(handle.fileno(), 64 << 10, offsets[-1]).split(b"\n")[1:] if (r := parse_line(line))
        ]
    return found + tail[-1:]


class MetricsIndex:
    """The content of a metrics file by key. One thread at a time may call `update`; any thread may read."""

    def __init__(
        self, path: Path, *, per_step: Callable[[str], bool] = lambda key: False, buckets: int = BUCKETS
    ) -> None:
        """Nothing is read before `update`.

        Args:
            path: The file. It need not exist yet.
            per_step: Whether a key is a counter, which is divided by the steps of its line.
            buckets: Number of buckets, even.
        """
        self.path = path
        self._per_step = per_step
        self._buckets = buckets
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._columns: dict[str, np.ndarray] = {}
        self._layout = np.zeros((self._buckets, 4), np.int64)
        """For each bucket: first step, last step, offset of its first line, number of lines."""
        self._used = 0
        self._stride = 1
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._size = 0
        self._skipping = False
        self.lines = 0
        """Number of lines indexed so far. A client asks for lines after this number."""
        self.generation = getattr(self, "generation", -1) + 1
        """Changes when indexed lines are no longer valid: the run went back to an earlier step, or the file was replaced."""
        self.keys_left_out = 0
        self.damaged = 0
        """Number of torn or foreign lines."""
        self.recent: deque[Line] = deque(maxlen=RECENT)

    # ------------------------------------------------------------------------------------------ reading

    @property
    def progress(self) -> float:
        """Share of the file that is indexed, 0 to 1."""
        return 1.0 if self._size == 0 else min(self._offset / self._size, 1.0)

    @property
    def last_step(self) -> int:
        with self._lock:
            return int(self._layout[self._used - 1, 1]) if self._used else 0

    def update(self, seconds: float = math.inf) -> bool:
        """Index what was appended, for at most about `seconds`; returns whether the end of the file was reached."""
        until = time.monotonic() + seconds
        with self._lock, open_metrics(self.path) as handle:
            status = os.fstat(handle.fileno())
            identity = (status.st_dev, status.st_ino)
            if self._identity not in (None, identity) or status.st_size < self._offset:
                self._reset()
            self._identity, self._size = identity, status.st_size
        while self._slice():
            if time.monotonic() > until:
                return False
        return True

    def _slice(self) -> bool:
        """Index up to `_READ` bytes of whole lines; False at the end of the file."""
        with self._lock, open_metrics(self.path) as handle:
            text = os.pread(handle.fileno(), _READ, self._offset)
            end = text.rfind(b"\n") + 1
            if not end:
                if len(text) < _READ:
                    return False  # a line that is being written
                # No line of metrics is longer than a slice: continue after it.
                self._skipping = True
                self._offset += len(text)
                self.damaged += 1
                return True
            at, pieces = self._offset, text[:end].split(b"\n")[:-1]
            if self._skipping:
                self._skipping = False
                at += len(pieces[0]) + 1
                pieces = pieces[1:]
            self._take(pieces, at)
            self._offset += end
            return len(text) == _READ

    def load(self, records: Sequence[Line]) -> None:
        """Index some records in place of a file. Of two records for a step the later counts."""
        kept = _rising(records)
        with self._lock:
            self._reset()
            self._add(kept, [0] * len(kept))

    def _take(self, pieces: Sequence[bytes], at: int) -> None:
        records: list[Line] = []
        offsets: list[int] = []
        for piece in pieces:
            record = parse_line(piece)
            if record is None:
                self.damaged += bool(piece.strip())
            else:
                records.append(record)
                offsets.append(at)
            at += len(piece) + 1
        start, last = 0, self.last_step if self._used else -1
        for i, record in enumerate(records):
            if record["step"] <= last:
                self._add(records[start:i], offsets[start:i])
                self._rewind(record["step"])
                start = i
            last = record["step"]
        self._add(records[start:], offsets[start:])

    def _rewind(self, step: int) -> None:
        """Remove all lines from `step` on: the run was resumed before it."""
        self.generation += 1
        keep = int(np.searchsorted(self._layout[: self._used, 1], step))
        self.recent = deque((r for r in self.recent if r["step"] < step), maxlen=RECENT)
        if keep == self._used:
            return
        first, _, offset, _ = self._layout[keep].tolist()
        for column in self._columns.values():
            column[keep : self._used] = _EMPTY
        self._layout[keep : self._used] = 0
        self._used = keep
        if first < step:
            lines = self._lines(offset, offset + _READ)
            before = list(itertools.takewhile(lambda entry: entry[1]["step"] < step, lines))
            self._add([record for _, record in before], [at for at, _ in before], fresh=False)

    def _lines(self, offset: int, stop: int) -> Iterator[tuple[int, Line]]:
        """(offset, record) of the lines in a part of the file."""
        with open_metrics(self.path) as handle:
            text = os.pread(handle.fileno(), stop - offset, offset)
        for piece in text.split(b"\n"):
            record = parse_line(piece)
            if record is not None:
                yield offset, record
            offset += len(piece) + 1

    def _add(self, records: Sequence[Line], offsets: Sequence[int], fresh: bool = True) -> None:
        """Append records with rising steps. `fresh`: they are new, not read again."""
        if not records:
            return
        if fresh:
            self.lines += len(records)
            self.recent.extend(records[-RECENT:])
        count = len(records)
        while self._used and self._room() < count:
            self._merge()
        while self._room() < count:  # an empty index, and more lines than buckets
            self._stride *= 2
        steps = np.array([r["step"] for r in records], np.int64)
        # The lines fill up the last bucket, then buckets of `stride` lines each.
        begun = int(self._layout[self._used - 1, 3]) if self._used else self._stride
        last_bucket = self._used - 1 if begun < self._stride else self._used
        begun %= self._stride
        buckets = last_bucket + (np.arange(count) + begun) // self._stride
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        ends = np.append(starts[1:], count)
        touched = buckets[starts]
        opened = touched >= self._used
        self._layout[touched[opened], 0] = steps[starts[opened]]
        self._layout[touched[opened], 2] = np.array(offsets, np.int64)[starts[opened]]
        self._layout[touched, 1] = steps[ends - 1]
        self._layout[touched, 3] += ends - starts
        self._used = int(touched[-1]) + 1
        spans = _spans(records)
        keys = dict.fromkeys(records[0])
        for key in (*keys, *sorted(set().union(*records) - keys.keys())):
            if key in ("step", "time"):
                continue
            values = _column(records, key)
            if key not in self._columns:
                if np.isnan(values).all() and not any(key in r and r[key] is None for r in records):
                    continue  # text, a list, a bool
                if len(self._columns) >= MAX_KEYS:
                    self.keys_left_out += 1
                    continue
                self._columns[key] = np.tile(_EMPTY, (self._buckets, 1))
            there = ~np.isnan(values)
            if there.any():
                drawn = values / spans if self._per_step(key) else values
                self._fill(self._columns[key], buckets[there], steps[there], drawn[there], values[there])

    def _room(self) -> int:
        """Number of lines that fit before buckets have to be merged."""
        free = (self._buckets - self._used) * self._stride
        return free + (self._stride - int(self._layout[self._used - 1, 3]) if self._used else 0)

    @staticmethod
    def _fill(column: np.ndarray, buckets: np.ndarray, steps: np.ndarray, drawn: np.ndarray, raw: np.ndarray) -> None:
        """Add values to their buckets, which are in ascending order. `drawn`: the values per step for a counter. `raw`: the values as written."""
        starts = np.flatnonzero(np.diff(buckets, prepend=-1))
        touched = buckets[starts]
        sizes = np.diff(np.append(starts, len(buckets)))
        for best, value, step, better in (
            (np.minimum, _LOW, _LOW_STEP, np.less),
            (np.maximum, _HIGH, _HIGH_STEP, np.greater),
        ):
            extreme = best.reduceat(drawn, starts)
            equal = np.flatnonzero(drawn == np.repeat(extreme, sizes))
            at = equal[np.searchsorted(equal, starts)]
            wins = (column[touched, _COUNT] == 0) | better(extreme, column[touched, value])
            column[touched[wins], value] = extreme[wins]
            column[touched[wins], step] = steps[at[wins]]
        column[touched, _SUM] += np.add.reduceat(drawn, starts)
        column[touched, _TOTAL] += np.add.reduceat(raw, starts)
        column[touched, _COUNT] += sizes

    def _merge(self) -> None:
        """Merge pairs of buckets and double the stride."""
        half = self._buckets // 2
        layout = self._layout.reshape(half, 2, 4)
        merged = np.stack([layout[:, 0, 0], layout[:, :, 1].max(1), layout[:, 0, 2], layout[:, :, 3].sum(1)], axis=1)
        self._layout = np.vstack([merged, np.zeros((self._buckets - half, 4), np.int64)])
        for key, column in self._columns.items():
            pairs = column.reshape(half, 2, len(_EMPTY))
            a, b = pairs[:, 0], pairs[:, 1]
            low = np.where(_less(b[:, _LOW], a[:, _LOW])[:, None], b[:, :2], a[:, :2])
            high = np.where(_less(-b[:, _HIGH], -a[:, _HIGH])[:, None], b[:, 2:4], a[:, 2:4])
            joined = np.hstack([low, high, a[:, 4:] + b[:, 4:]])
            self._columns[key] = np.vstack([joined, np.tile(_EMPTY, (self._buckets - half, 1))])
        self._used, self._stride = (self._used + 1) // 2, self._stride * 2

    # ---------------------------------------------------------------------------------------- questions

    def known_keys(self) -> list[str]:
        """Every key that has a number, in the order of first appearance."""
        with self._lock:
            return list(self._columns)

    def __contains__(self, key: str) -> bool:
        return key in self._columns

    def total(self, key: str) -> float:
        """Sum of a key over all lines."""
        with self._lock:
            column = self._columns.get(key)
            return 0.0 if column is None else float(column[: self._used, _TOTAL].sum())

    def extremes(self, key: str) -> tuple[float, int, float, int] | None:
        """(least value, its step, greatest value, its step); None if the key has no value."""
        with self._lock:
            column = self._columns.get(key)
            if column is None or not column[: self._used, _COUNT].any():
                return None
            low, high = np.nanargmin(column[: self._used, _LOW]), np.nanargmax(column[: self._used, _HIGH])
            return (
                float(column[low, _LOW]), int(column[low, _LOW_STEP]), float(column[high, _HIGH]), int(column[high, _HIGH_STEP])
            )  # fmt: skip

    def means(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(last step, mean value) of every bucket that has values."""
        with self._lock:
            column = self._columns.get(key)
            if column is None:
                return np.empty(0, np.int64), np.empty(0)
            there = np.flatnonzero(column[: self._used, _COUNT])
            return self._layout[there, 1].copy(), column[there, _SUM] / column[there, _COUNT]

    def cumulative(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(last step, sum of all lines up to that step) of every bucket."""
        with self._lock:
            column = self._columns.get(key)
            if column is None:
                return np.empty(0, np.int64), np.empty(0)
            return self._layout[: self._used, 1].copy(), np.cumsum(column[: self._used, _TOTAL])

    def curve(
        self, key: str, *, points: int = 800, first: int | None = None, last: int | None = None
    ) -> dict[str, list[Any]]:
        """Steps and values of a key. A value is None if a line had no finite number.

        Args:
            key: The key.
            points: Most points, about. Extremes are kept.
            first, last: Range of steps; the whole run unless given.
        """
        with self._lock:
            if first is not None or last is not None:
                steps, values = self._between(key, first or 0, last if last is not None else _MAX_STEP)
            else:
                steps, values = self._points(key, 0, self._used)
        return thinned(steps, values, points)

    def _points(self, key: str, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The extremes of buckets, in the order of their steps; NaN for a bucket in which the key has no number."""
        column = self._columns.get(key)
        if column is None:
            return np.empty(0, np.int64), np.empty(0)
        part = column[begin:end]
        counts = part[:, _COUNT]
        if not counts.any():
            return self._layout[begin:end, 1].copy(), np.full(end - begin, math.nan)
        steps = np.where(counts > 0, part[:, _LOW_STEP], self._layout[begin:end, 1]).astype(np.int64)
        low = steps, np.where(counts > 0, part[:, _LOW], math.nan)
        two = np.flatnonzero((counts > 0) & (part[:, _LOW_STEP] != part[:, _HIGH_STEP]))
        steps = np.concatenate([low[0], part[two, _HIGH_STEP].astype(np.int64)])
        values = np.concatenate([low[1], part[two, _HIGH]])
        order = np.argsort(steps, kind="stable")
        return steps[order], values[order]

    def _between(self, key: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        begin = int(np.searchsorted(self._layout[: self._used, 1], first))
        end = int(np.searchsorted(self._layout[: self._used, 0], last, side="right"))
        if end <= begin:
            return np.empty(0, np.int64), np.empty(0)
        offset = int(self._layout[begin, 2])
        stop = int(self._layout[end, 2]) if end < self._used else self._offset
        if self._stride > 1 and stop - offset <= _RANGE_BYTES:
            # Of two lines for a step the later counts.
            by_step = {r["step"]: r for _, r in self._lines(offset, stop) if first <= r["step"] <= last}
            found = [by_step[step] for step in sorted(by_step)]
            steps = np.array([r["step"] for r in found], np.int64)
            values = _column(found, key)
            if self._per_step(key):
                values = values / _spans(found)
        else:
            steps, values = self._points(key, begin, end)
        inside = (steps >= first) & (steps <= last)
        return steps[inside], values[inside]

    def sampled(self, count: int) -> list[Line]:
        """At most about `count` whole lines, evenly spaced over the run, for charts that draw several keys of one line together."""
        with self._lock:
            found = list(self.recent)
            if len(found) < self.lines:
                found = _rising([*sampled_lines(self.path, count), *found[-1:]])
        return found[:: max(math.ceil(len(found) / count), 1)]

    def after(self, line: int) -> list[Line]:
        """The lines after the first `line`, at most the `RECENT` newest."""
        with self._lock:
            new = self.lines - line
            return list(self.recent)[-new:] if new > 0 else []


_LOW, _LOW_STEP, _HIGH, _HIGH_STEP, _SUM, _TOTAL, _COUNT = range(7)
"""Columns of a bucket: extremes with their steps, sum of the drawn values, sum of the values as written, count."""
_EMPTY = np.array([math.nan, 0, math.nan, 0, 0, 0, 0], np.float64)


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether a < b, or b is NaN (no value) and a is not."""
    return (a < b) | (np.isnan(b) & ~np.isnan(a))


def _rising(records: Sequence[Line]) -> list[Line]:
    """The records with rising steps: a record replaces all before it whose steps are not below its own."""
    kept: list[Line] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def _spans(records: Sequence[Line]) -> np.ndarray:
    """How many steps each record covers."""
    found = _column(records, "steps_in_interval")
    return np.where(found > 0, found, 1.0)


def thinned(steps: np.ndarray, values: np.ndarray, points: int) -> dict[str, list[Any]]:
    """At most about `points` points of a curve: the least and the greatest of each stretch, the first and the last. NaN becomes None."""
    if len(steps) > points:
        there = np.flatnonzero(~np.isnan(values))
        if len(there) > points:
            stretches = np.array_split(there, max(points // 2, 1))
            picked = {int(s[i]) for s in stretches for i in (values[s].argmin(), values[s].argmax())}
            there = np.array(sorted(picked | {int(there[0]), int(there[-1])}))
        steps, values = steps[there], values[there]
    return {"steps": steps.tolist(), "values": [None if v != v else v for v in values.tolist()]}
