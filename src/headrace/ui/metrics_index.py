"""Index of a metrics.jsonl: bounded memory, every spike kept, updated while a run appends to the file.

    index = MetricsIndex(run / "metrics.jsonl")
    index.update()                                    read what was appended since the last call
    index.curve("train/loss", points=800)             {"steps": [...], "values": [...]}, at most about 800 of them
    index.curve("train/loss", first=4000, last=4500)  the same between two steps, read again from the file if buckets are coarse

Lines are collected in buckets of `stride` lines. A bucket keeps, for every key, the least and the greatest value with their steps,
the sum and the count. When there are too many buckets, the stride doubles and pairs of them are joined, so the memory depends on the number
of keys alone. A bucket has the file offset of its first line, so any range of steps can be read again line by line.

A run that was killed and resumed trains some steps twice. A line whose step is not above the last one replaces all lines from that
step on; the bucket in which that step lies is read again.

A counter (Reduction.SUM) is indexed per step: its value divided by `steps_in_interval`. Otherwise the first line of a run, which covers one step,
would look like a collapse beside lines that cover ten.

A long file takes seconds to read whole: `update` reads it in slices, and `progress` is the share that was read. Until it is 1, an index of
lines at evenly spaced offsets (`sampled_lines`, `load`) shows the outline.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
_LOW, _LOW_STEP, _HIGH, _HIGH_STEP, _SUM, _TOTAL, _COUNT = range(7)
"""What a bucket keeps of a key: extremes with their steps, sum of the drawn values, sum of the values as written, count."""
_EMPTY = np.array([math.nan, math.nan, math.nan, math.nan, 0, 0, 0])
_NOT_JSON = re.compile(rb"(?<=[:,\[ ])-?(?:NaN|Infinity)(?=[ ,}\]])")
_PLAIN = {int, float, type(None)}

Line = dict[str, Any]
Entry = tuple[int, Line]
"""A line and its offset in the file."""


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
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MAX_STEP else None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value can be drawn: a finite int or float, not a bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def steps_of(line: Line) -> float:
    """How many steps a line covers."""
    steps = line.get("steps_in_interval")
    return steps if is_number(steps) and steps > 0 else 1


def numbers(lines: Iterable[Line], key: str) -> list[float]:
    """The values of a key in the lines that have a number."""
    return [line[key] for line in lines if is_number(line.get(key))]


def family(line: Line, head: str, tail: str = "") -> dict[str, float]:
    """Numbers of the keys with this beginning and end, by what is between."""
    return {
        key[len(head) : len(key) - len(tail)]: value
        for key, value in line.items()
        if key.startswith(head) and key.endswith(tail) and is_number(value)
    }


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
        found = []
        for at in (i * size // count for i in range(count)):
            # The first piece is the end of a line that begins before the offset.
            pieces = os.pread(handle.fileno(), 32 << 10, at).split(b"\n")[at > 0 : -1]
            found += [r for line in pieces[:3] if (r := parse_line(line))][:1]
        tail = os.pread(handle.fileno(), 64 << 10, max(size - (64 << 10), 0)).split(b"\n")[1:]
    return found + [r for line in tail if (r := parse_line(line))][-1:]


class MetricsIndex:
    """The content of a metrics file by key. One thread at a time may call `update`; any thread may read."""

    def __init__(
        self, path: Path, *, per_step: Callable[[str], bool] = lambda key: False, buckets: int = BUCKETS
    ) -> None:
        """Nothing is read before `update`.

        Args:
            path: The file. It need not exist yet.
            per_step: Whether a key is a counter, which is divided by the steps of its line.
            buckets: Most buckets.
        """
        self.path = path
        self._per_step = per_step
        self._buckets = buckets
        self._lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self._keys: dict[str, int] = {}
        """Every key that is indexed, with its place in `_cells`."""
        self._lines = np.zeros((0, 4), np.int64)
        """For each bucket: first step, last step, offset of its first line, number of lines."""
        self._cells = np.zeros((7, 0, 0))
        """What a bucket (second axis) keeps of a key (third axis): see _LOW and the names beside it."""
        self._stride = 1
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._size = 0
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
            return int(self._lines[-1, 1]) if len(self._lines) else 0

    def update(self, seconds: float = math.inf) -> bool:
        """Index what was appended, for at most about `seconds`; returns whether the end of the file was reached."""
        until = time.monotonic() + seconds
        with open_metrics(self.path) as handle:
            status = os.fstat(handle.fileno())
            identity = (status.st_dev, status.st_ino)
            with self._lock:
                if self._identity not in (None, identity) or status.st_size < self._offset:
                    self._reset()
                self._identity, self._size = identity, status.st_size
            while self._slice(handle):
                if time.monotonic() > until:
                    return False
        return True

    def _slice(self, handle: BinaryIO) -> bool:
        """Index up to `_READ` bytes of whole lines; False at the end of the file."""
        with self._lock:
            text = os.pread(handle.fileno(), _READ, self._offset)
            end = text.rfind(b"\n") + 1
            if not end and len(text) < _READ:
                return False  # a line that is being written
            # A line longer than a slice is none of metrics: each of its parts counts as damaged.
            entries, damaged = _parsed(text[: end or None], self._offset)
            self.damaged += damaged
            kept = _rising(entries)
            if kept and len(self._lines) and kept[0][1]["step"] <= self.last_step:
                self._rewind(kept[0][1]["step"])
            self._add(kept)
            self._offset += end or len(text)
            return len(text) == _READ

    def load(self, records: Sequence[Line]) -> None:
        """Index some records in place of a file. Of two records for a step the later counts."""
        with self._lock:
            self._reset()
            self._add(_rising([(0, record) for record in records]))

    def _rewind(self, step: int) -> None:
        """Remove all lines from `step` on: the run was resumed before it."""
        self.generation += 1
        self.recent = deque((r for r in self.recent if r["step"] < step), maxlen=RECENT)
        keep = int(np.searchsorted(self._lines[:, 1], step))
        begun = self._lines[keep:].tolist()
        self._lines, self._cells = self._lines[:keep], self._cells[:, :keep]
        if begun and begun[0][0] < step:
            before = self._read_lines(begun[0][2], min(self._offset, begun[0][2] + _RANGE_BYTES))
            self._add([(at, record) for at, record in before if record["step"] < step], fresh=False)

    def _read_lines(self, offset: int, stop: int) -> list[Entry]:
        """The lines that count in a part of the file."""
        with open_metrics(self.path) as handle:
            return _rising(_parsed(os.pread(handle.fileno(), stop - offset, offset), offset)[0])

    def _add(self, entries: Sequence[Entry], fresh: bool = True) -> None:
        """Append lines with rising steps. `fresh`: they are new, not read again."""
        if not entries:
            return
        records = [record for _, record in entries]
        if fresh:
            self.lines += len(records)
            self.recent.extend(records[-RECENT:])
        self._find_keys(records)
        held = int(self._lines[:, 3].sum())
        while held + len(records) > self._stride * self._buckets:
            self._stride *= 2
            starts = _starts(self._lines, self._stride)
            self._lines, self._cells = _joined_lines(self._lines, starts), _joined(self._cells, starts)
        # The lines fill up the last bucket, then buckets of `stride` lines each.
        last = max(len(self._lines) - 1, 0)
        steps, spans = np.array([r["step"] for r in records], np.int64), _spans(records)
        lines = np.stack([steps, steps, np.array([at for at, _ in entries], np.int64), np.ones_like(steps)], axis=1)
        lines = np.concatenate([self._lines[last:], lines])
        starts = _starts(lines, self._stride)
        cells = np.empty((7, len(starts), len(self._keys)))
        for key, at in self._keys.items():
            raw = _column(records, key)
            drawn = raw / spans if self._per_step(key) else raw
            there = ~np.isnan(raw)
            when = np.where(there, steps, math.nan)
            each = np.stack([drawn, when, drawn, when, np.where(there, drawn, 0), np.where(there, raw, 0), there])
            cells[:, :, at] = _joined(np.concatenate([self._cells[:, last:, at], each], 1), starts)
        self._lines = np.concatenate([self._lines[:last], _joined_lines(lines, starts)])
        self._cells = np.concatenate([self._cells[:, :last], cells], 1)

    def _find_keys(self, records: Sequence[Line]) -> None:
        """Give the new keys of some records a place each."""
        first = dict.fromkeys(records[0])
        for key in (*first, *sorted(set().union(*records) - first.keys())):
            if key in self._keys or key in ("step", "time"):
                continue
            if all(type(r[key]) not in _PLAIN for r in records if key in r):
                continue  # text, a list, a bool
            if len(self._keys) >= MAX_KEYS:
                self.keys_left_out += 1
                continue
            self._keys[key] = len(self._keys)
        new = len(self._keys) - self._cells.shape[2]
        if new:
            empty = np.broadcast_to(_EMPTY[:, None, None], (7, len(self._lines), new))
            self._cells = np.concatenate([self._cells, empty], 2)

    # ---------------------------------------------------------------------------------------- questions

    def known_keys(self) -> list[str]:
        """Every key that has a number, in the order of first appearance."""
        with self._lock:
            return list(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def _of(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """The last step of every bucket, and what the buckets keep of a key; nothing if the key is not known."""
        with self._lock:
            if key not in self._keys:
                return np.empty(0, np.int64), np.empty((7, 0))
            return self._lines[:, 1], self._cells[:, :, self._keys[key]]

    def total(self, key: str) -> float:
        """Sum of a key over all lines."""
        return float(self._of(key)[1][_TOTAL].sum())

    def extremes(self, key: str) -> tuple[float, int, float, int] | None:
        """(least value, its step, greatest value, its step); None if the key has no value."""
        _, cells = self._of(key)
        if not cells[_COUNT].any():
            return None
        low, high = np.nanargmin(cells[_LOW]), np.nanargmax(cells[_HIGH])
        return (
            float(cells[_LOW, low]),
            int(cells[_LOW_STEP, low]),
            float(cells[_HIGH, high]),
            int(cells[_HIGH_STEP, high]),
        )

    def means(self, key: str) -> np.ndarray:
        """The mean value of every bucket that has values."""
        _, cells = self._of(key)
        there = cells[_COUNT] > 0
        return cells[_SUM, there] / cells[_COUNT, there]

    def cumulative(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(last step, sum of all lines up to that step) of every bucket."""
        steps, cells = self._of(key)
        return steps, np.cumsum(cells[_TOTAL])

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
            if first is None and last is None:
                steps, values = self._points(key)
            else:
                steps, values = self._between(key, first or 0, last if last is not None else _MAX_STEP)
        return thinned(steps, values, points)

    def _points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """The extremes of buckets, in the order of their steps; NaN for a bucket in which the key has no number."""
        ends, cells = self._of(key)
        there = cells[_COUNT] > 0
        two = there & (cells[_LOW_STEP] != cells[_HIGH_STEP])
        steps = np.concatenate([np.where(there, cells[_LOW_STEP], ends), cells[_HIGH_STEP, two]]).astype(np.int64)
        order = np.argsort(steps, kind="stable")
        return steps[order], np.concatenate([cells[_LOW], cells[_HIGH, two]])[order]

    def _between(self, key: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        begin = int(np.searchsorted(self._lines[:, 1], first))
        end = int(np.searchsorted(self._lines[:, 0], last, side="right"))
        if end <= begin:
            return np.empty(0, np.int64), np.empty(0)
        offset = int(self._lines[begin, 2])
        stop = int(self._lines[end, 2]) if end < len(self._lines) else self._offset
        if self._stride > 1 and stop - offset <= _RANGE_BYTES:
            found = [record for _, record in self._read_lines(offset, stop)]
            steps, values = np.array([r["step"] for r in found], np.int64), _column(found, key)
            if self._per_step(key):
                values = values / _spans(found)
        else:
            steps, values = self._points(key)
        inside = (steps >= first) & (steps <= last)
        return steps[inside], values[inside]

    def sampled(self, count: int) -> list[Line]:
        """At most about `count` whole lines, evenly spaced over the run, for charts that draw several keys of one line together."""
        with self._lock:
            found = list(self.recent)
            if len(found) < self.lines:
                some = [(0, record) for record in (*sampled_lines(self.path, count), *found[-1:])]
                found = [record for _, record in _rising(some)]
        return found[:: max(math.ceil(len(found) / count), 1)]

    def after(self, line: int) -> list[Line]:
        """The lines after the first `line`, at most the `RECENT` newest."""
        with self._lock:
            new = self.lines - line
            return list(self.recent)[-new:] if new > 0 else []


def _starts(lines: np.ndarray, stride: int) -> np.ndarray:
    """Where those begin of some buckets that become one bucket of `stride` lines. A line is a bucket of one."""
    before = np.cumsum(lines[:, 3]) - lines[:, 3]
    return np.flatnonzero(np.diff(before // stride, prepend=-1))


def _joined_lines(lines: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """First step, last step, offset and number of lines of buckets that are joined."""
    ends = np.append(starts, len(lines))[1:] - 1
    return np.stack([lines[starts, 0], lines[ends, 1], lines[starts, 2], np.add.reduceat(lines[:, 3], starts)], axis=1)


def _joined(cells: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """What joined buckets keep, of one key or of all."""
    found = np.add.reduceat(cells, starts, axis=1)
    sizes = np.diff(starts, append=cells.shape[1])
    for value, step, best in ((_LOW, _LOW_STEP, np.fmin), (_HIGH, _HIGH_STEP, np.fmax)):
        found[value] = best.reduceat(cells[value], starts)
        # The first step at which the extreme was reached.
        reached = cells[value] == np.repeat(found[value], sizes, axis=0)
        found[step] = np.fmin.reduceat(np.where(reached, cells[step], math.nan), starts)
    return found


def _parsed(text: bytes, at: int) -> tuple[list[Entry], int]:
    """The lines of a text that begins at offset `at` of the file, and the number of torn and foreign ones."""
    found, damaged = [], 0
    for piece in text.split(b"\n"):
        if (record := parse_line(piece)) is not None:
            found.append((at, record))
        else:
            damaged += bool(piece.strip())
        at += len(piece) + 1
    return found, damaged


def _rising(entries: Sequence[Entry]) -> list[Entry]:
    """The lines with rising steps: a line replaces all before it whose steps are not below its own."""
    kept: list[Entry] = []
    for entry in entries:
        while kept and kept[-1][1]["step"] >= entry[1]["step"]:
            kept.pop()
        kept.append(entry)
    return kept


def _spans(records: Sequence[Line]) -> np.ndarray:
    """How many steps each record covers."""
    return np.array([steps_of(r) for r in records], np.float64)


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
