"""Cells of a stream file: rows with named columns, read by ranges of rows.

    with open_cells(Path("rna/0.parquet")) as file:
        file.rows                    4000
        file.read(64, 128)           {"x": float32[64, 200], "group_id": int64[64]}

Fixed-size columns become arrays of one dtype and shape for the whole file; strings and ragged lists become object arrays,
for a collator to pad. The file's schema (of jsonl: its first row) decides which of the two a column is, never the rows that are read.

The formats are those of `headrace.formats.rows`, without safetensors. `register_cells(".h5ad", open_h5ad)` adds one: a
function from (path, columns) to an object with `rows`, `read` and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from headrace.errors import ConfigError, DataError
from headrace.formats.byte_file import RawFile
from headrace.formats.rows import FORMATS, Ragged, open_rows

Cells = dict[str, np.ndarray]

_MAX_ROWS = 1 << 40
_BUILT_IN = tuple(suffix for suffix in FORMATS if suffix != ".safetensors")


@runtime_checkable
class CellFile(Protocol):
    """An open stream file. Used by one thread at a time."""

    rows: int

    def read(self, start: int, stop: int) -> Cells:
        """Return the cells of rows [start, stop) within [0, rows]; no rows give empty arrays of the right dtype and shape."""
        ...

    def close(self) -> None: ...


CellOpener = Callable[[Path, Sequence[str] | None], CellFile]

_registered: dict[str, CellOpener] = {}


def register_cells(suffix: str, opener: CellOpener) -> None:
    """Read files that end in `suffix` with `opener`. It must be importable by name, so that worker processes find it."""
    if not suffix.startswith(".") or len(suffix) < 2 or "/" in suffix:
        raise ConfigError(f"a suffix is such as '.h5ad', got {suffix!r}")
    if not callable(opener):
        raise ConfigError(f"the reader of {suffix} must be a function of (path, columns), got {opener!r}")
    _registered[suffix] = opener


def cell_openers(readers: Mapping[str, CellOpener] | None = None) -> dict[str, CellOpener]:
    """Return the openers of all formats by suffix: built-in ones, registered ones and `readers`, of which the last named wins."""
    return {**dict.fromkeys(_BUILT_IN, _CellRows), **_registered, **(readers or {})}


def open_cells(
    path: Path, columns: Sequence[str] | None = None, *, readers: Mapping[str, CellOpener] | None = None
) -> CellFile:
    """Open a stream file by its suffix, the longest first.

    Args:
        path: The file.
        columns: Columns to read; all unless given.
        readers: Openers of further formats, by suffix.
    """
    known = cell_openers(readers)
    found = [suffix for suffix in known if path.name.endswith(suffix)]
    if not found:
        raise DataError(
            f"{path} ends in none of {', '.join(known)}. Rename it, or teach headrace its format with register_cells."
        )
    suffix = max(found, key=len)
    opened = known[suffix](path, columns)
    rows = getattr(opened, "rows", None)
    if not (isinstance(rows, int) and 0 <= rows <= _MAX_ROWS):
        said = "does not say how many rows it has" if rows is None else f"says it has {rows!r} rows"
        raise DataError(
            f"{path}: its reader ({suffix}) {said}. The order is made from row counts before anything is read: have the reader "
            "count the rows when it opens a file."
        )
    return opened


class _CellRows:
    """A file of a built-in format, kept open."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        self._file = RawFile(path)
        self._file.__enter__()
        try:
            self._rows = open_rows(self._file, columns)
            self._names = list(self._rows.schema)
            self.rows = self._rows.rows
        except BaseException:
            self.close()
            raise

    def read(self, start: int, stop: int) -> Cells:
        if not 0 <= start <= stop <= self.rows:
            raise DataError(
                f"{self._file.path} has {self.rows:,} rows; rows {start:,} to {stop:,} were asked of it. Restore the file."
            )
        found = self._rows.read(start, stop, self._names)
        return {name: _objects(column) if isinstance(column, Ragged) else column for name, column in found.items()}

    def close(self) -> None:
        self._file.close()


def _objects(lists: Ragged) -> np.ndarray:
    """Lists of any length as an array of arrays, each a view of the same values."""
    offsets = lists.offsets.tolist()
    out = np.empty(len(offsets) - 1, dtype=object)
    for i in range(len(out)):
        out[i] = lists.values[offsets[i] : offsets[i + 1]]
    return out
