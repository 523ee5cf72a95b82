"""JSON lines as rows of columns: one object a line, none on a line of blanks. What a column holds follows from the first row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from headrace.errors import DataError
from headrace.formats.byte_file import ByteFile, Undecodable, first_line
from headrace.formats.lines import line_ends
from headrace.formats.rows import Column, Ragged, chosen

_MAX_LINE = 16 << 20


class JsonRows:
    """The rows of one file."""

    def __init__(self, file: ByteFile, columns: Sequence[str] | None = None) -> None:
        self._file = file
        found = [(np.empty(0, np.int64), np.empty(0, np.bool_)), *line_ends(file, 0)]
        ends, is_row = (np.concatenate(parts) for parts in zip(*found, strict=True))
        starts = np.concatenate(([0], ends))[:-1]
        self._starts, self._ends, self._lines = starts[is_row], ends[is_row], np.flatnonzero(is_row)
        self.rows = rows = len(self._starts)
        first = self._objects(0, 1)[0] if rows else {}
        names = chosen(file.path, list(first), columns if rows else None)
        self.schema = {name: _column(file.path, name, first[name], rows) for name in names}

    def _objects(self, start: int, stop: int) -> list[dict[str, Any]]:
        if start == stop:
            return []
        begin = int(self._starts[start])
        longest = start + int(np.argmax(self._ends[start:stop] - self._starts[start:stop]))
        if self._ends[longest] - self._starts[longest] > _MAX_LINE:
            raise Undecodable(
                self._file.path, f"line {int(self._lines[longest]) + 1:,} has more than {_MAX_LINE:,} bytes"
            )
        data = memoryview(self._file.read(begin, int(self._ends[stop - 1]) - begin))
        rows = []
        for i in range(start, stop):
            try:
                row = orjson.loads(data[int(self._starts[i]) - begin : int(self._ends[i]) - begin])
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, expected an object")
            except ValueError as error:
                raise Undecodable(
                    self._file.path, f"line {int(self._lines[i]) + 1:,} cannot be used: {first_line(error)}"
                ) from error
            rows.append(row)
        return rows

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        rows = self._objects(start, stop)
        return {name: self._column(name, rows, start) for name in columns}

    def _column(self, name: str, rows: list[dict[str, Any]], start: int) -> np.ndarray:
        column = self.schema[name]
        dtype, length = column.dtype, column.shape[0] if column.shape else None
        for i, row in enumerate(rows):
            value = row.get(name)
            fits = (
                isinstance(value, list) and len(value) == length if length is not None else not isinstance(value, list)
            )
            if not fits or value is None:
                wanted = f"{length:,} numbers" if length is not None else "one value"
                found = f"{len(value):,} numbers" if isinstance(value, list) else type(value).__name__
                raise Undecodable(
                    self._file.path,
                    f"line {int(self._lines[start + i]) + 1:,} has {found} in {name!r} where the first row has {wanted}",
                    "Give all rows one shape (ragged columns: parquet or arrow)",
                )
        shape = (len(rows),) if length is None else (len(rows), length)
        try:
            values = [row[name] for row in rows]
            array = np.empty(shape, dtype=dtype)
            array[...] = np.array(values, dtype=dtype).reshape(shape) if values else array
            if dtype == np.int64 and any(isinstance(v, float) for v in _flat(values)):
                raise ValueError("a fraction, where the first row has a whole number")
        except (ValueError, TypeError, OverflowError) as error:
            raise Undecodable(
                self._file.path, f"rows from {start:,} on do not fit column {name!r}: {first_line(error)}"
            ) from error
        return array


def _flat(values: list[Any]) -> list[Any]:
    return [v for value in values for v in value] if values and isinstance(values[0], list) else values


def _column(path: object, name: str, value: Any, rows: int) -> Column:
    """Describe a column by its value in the first row."""
    inside = value if isinstance(value, list) else [value]
    shape = (len(value),) if isinstance(value, list) else ()
    if all(isinstance(v, bool) for v in inside):
        return Column(dtype=np.dtype(np.bool_), shape=shape, rows=rows)
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in inside):
        whole = all(isinstance(v, int) for v in inside)
        dtype = np.int64 if whole else np.float32 if shape else np.float64
        return Column(dtype=np.dtype(dtype), shape=shape, rows=rows)
    if isinstance(value, str):
        return Column(dtype=np.dtype(object), shape=(), rows=rows)
    raise DataError(
        f"column {name!r} of {path} holds {type(value).__name__} in the first row; numbers, lists of numbers and strings are "
        "read. Change the file, or leave the column out with columns=."
    )
