"""What was measured at every step?

    series = read_series(run / "metrics.jsonl")
    series.steps, series["train/loss"]                       a float64 column each; NaN where a line had no value

Of two lines for a step the later counts: a run that was killed and resumed trains some steps twice. A column longer than a
screen is wide is thinned to the least and the greatest of each stretch, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import orjson

from headrace.errors import DataError

__all__ = ["Series", "read_series"]

_MAX_LINE = 1 << 20
_MAX_KEYS = 5000


class Series(Mapping[str, np.ndarray]):
    """Columns by key, all as long as `steps`."""

    def __init__(self, steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        self.steps = steps
        self._columns = dict(columns)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def thinned(self, key: str, points: int) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) where there is a value, at most about `points` of them, with every extreme kept."""
        there = np.flatnonzero(~np.isnan(self[key]))
        if len(there) > points:
            stretches = np.array_split(there, points // 2)
            values = self[key]
            picked = {int(s[i]) for s in stretches for i in (values[s].argmin(), values[s].argmax())}
            there = np.array(sorted(picked | {int(there[0]), int(there[-1])}))
        return self.steps[there], self[key][there]


def read_series(path: Path) -> Series:
    """The numbers of a metrics file. What is no number, and lines that are torn or not ours, are passed over."""
    rows: dict[int, dict[str, float]] = {}
    keys: dict[str, None] = {}
    try:
        with open(path, "rb") as handle:
            for line in handle:
                if len(line) > _MAX_LINE:
                    continue
                try:
                    record = orjson.loads(line)
                except ValueError:
                    continue
                step = record.get("step") if isinstance(record, dict) else None
                if not isinstance(step, int) or isinstance(step, bool) or abs(step) >= 1 << 62:
                    continue
                row = {
                    key: float(value)
                    for key, value in record.items()
                    if isinstance(value, int | float) and not isinstance(value, bool) and key != "step"
                }
                rows.pop(step, None)
                rows[step] = row
                if len(keys) < _MAX_KEYS:
                    keys.update(dict.fromkeys(row))
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: the run has written no metrics yet, or this is no run folder"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    steps = np.array(sorted(rows), dtype=np.int64)
    columns = {key: np.array([rows[s].get(key, math.nan) for s in steps.tolist()], dtype=np.float64) for key in keys}
    return Series(steps, columns)
