"""Rows [a, b) of named columns of a file of numbers, for all formats.

    with open_rows(RawFile("a.parquet")) as rows:
        rows.schema                        {"x": Column(dtype=float32, shape=(200,), rows=4000), ...}
        rows.read(64, 128, ["x"])          {"x": float32[64, 200]}

Cells and Gram shards are read through it. `FORMATS` is the registry: a new format is a class with `schema`, `rows` and `read`, and a line here.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np

from headrace.errors import DataError, nearest
from headrace.formats.byte_file import ByteFile

FORMATS: dict[str, str] = {
    ".parquet": "headrace.formats.parquet:ParquetRows",
    ".pq": "headrace.formats.parquet:ParquetRows",
    ".arrow": "headrace.formats.arrow:ArrowRows",
    ".npy": "headrace.formats.numpy_arrays:NpyRows",
    ".npz": "headrace.formats.numpy_arrays:NpzRows",
    ".safetensors": "headrace.formats.safetensors:SafetensorsRows",
    ".jsonl": "headrace.formats.json_rows:JsonRows",
    ".ndjson": "headrace.formats.json_rows:JsonRows",
}
"""Suffix of a file → module and class that read it. Imported on first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Type and shape of a column."""

    dtype: np.dtype
    """Type of its numbers; object for strings, and for values that cannot be read."""
    shape: tuple[int, ...] | None
    """Shape of one row; None for lists of any length."""
    rows: int
    stored_as: str = ""
    """The file's own name of the dtype, where it has one: "BF16", which is uint16 to numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Lists of any length: row i is values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, rows: slice) -> Ragged:
        """Return the lists of some consecutive rows; the values are a view."""
        start, stop, _ = rows.indices(len(self.offsets) - 1)
        offsets = self.offsets[start : stop + 1]
        return Ragged(values=self.values[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])


class RowFile(Protocol):
    """An open file of rows. Used by one thread at a time."""

    @property
    def schema(self) -> Mapping[str, Column]: ...

    @property
    def rows(self) -> int:
        """Rows of every column. DataError where columns have different numbers."""
        ...

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        """Return rows [start, stop) of these columns. The caller stays within [0, rows]."""
        ...


def open_rows(file: ByteFile, columns: Sequence[str] | None = None) -> RowFile:
    """Open a file by its suffix.

    Args:
        file: The file. It must stay usable as long as rows are read.
        columns: Columns to read; all unless given.
    """
    suffix = PurePath(str(file.path)).suffix
    if suffix not in FORMATS:
        raise DataError(f"{file.path} ends in none of {', '.join(FORMATS)}. Rename it, or convert it.")
    module, _, name = FORMATS[suffix].partition(":")
    return getattr(importlib.import_module(module), name)(file, columns)


def read_array(file: ByteFile, offset: int, dtype: np.dtype, shape: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Read rows [start, stop) of an array whose first row is at byte `offset`. `shape` is that of a row."""
    out = np.empty((stop - start, *shape), dtype)
    if out.nbytes:
        file.read_into(out.reshape(-1).view(np.uint8).data, offset + start * (out.nbytes // len(out)))
    return out


def chosen(path: object, names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    """Return the wanted column names, all unless given. DataError if one is missing, or several columns have it."""
    missing = [name for name in columns or () if name not in names]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(nearest(missing[0], names)[:8]) or 'none at all'}. Change "
            "columns, or the file."
        )
    wanted = list(names if columns is None else dict.fromkeys(columns))
    counts = Counter(names)
    double = next((name for name in wanted if counts[name] > 1), None)
    if double is not None:
        raise DataError(f"{path} has several columns called {double!r}. Write it with one.")
    return wanted


def common_rows(path: object, schema: Mapping[str, Any]) -> int:
    """Return the number of rows that all columns have; DataError if they have different numbers."""
    lengths = {name: column.rows for name, column in schema.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {n:,}" for name, n in list(lengths.items())[:8])
        raise DataError(f"{path}: its arrays have different numbers of rows ({listed}). A row of each is one cell.")
    return next(iter(lengths.values()), 0)
