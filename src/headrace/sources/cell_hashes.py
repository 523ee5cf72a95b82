"""Content hashes of cells: rows that are read again are compared with the rows that were read first.

A stream file is cut into units of consecutive rows, 64 to 128 KiB of the file each. A unit is hashed whenever it is read. The first hash is
recorded (`records.ChunkRecords`: one append-only file for all ranks, workers and later runs); every later one is compared with it. So a value
that changes in a file of the same size and time of modification is refused when it is read again, and a resume never goes on over it in silence.

The hash covers the cells as they are delivered: names, dtypes, shapes and values of the chosen columns. It works for every format,
registered ones included, and does not depend on which rows a rank asks for. A unit's id is made of its file's name, size, rows and
fingerprint and its place in it: a file that was replaced as a whole has other units.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from headrace.order import fingerprint_json, mix64_array
from headrace.sources.cells import Cells
from headrace.sources.records import ChunkRecords
from headrace.sources.stream_files import StreamFile

UNIT_BYTES = 64 << 10
_MAX_UNITS = 1 << 20
"""Larger listings have larger units: every reader holds 17 bytes for each unit, and a million records load in 0.7 s."""
_VERSION = 1


def record_name(columns: Sequence[str] | None, *more: str) -> str:
    """Return the name of the record file for these columns. `more` tells apart listings that share a folder."""
    return f"streams-{fingerprint_json([_VERSION, columns, *more])}.chunks"


class CellHashes:
    """The recorded hashes of all units of a listing. Safe to share between threads."""

    def __init__(self, path: Path, files: Sequence[StreamFile], *, accept: bool = False) -> None:
        """Args:
        path: The record file.
        files: The listing.
        accept: Record a hash that differs instead of refusing it.
        """
        self._accept = accept
        unit = UNIT_BYTES
        total = sum(f.size for f in files)
        while total > unit * _MAX_UNITS:
            unit *= 2
        self.unit_rows = [1 << (unit * f.rows // max(f.size, 1)).bit_length() for f in files]
        """By stream, the rows of a unit; the last unit of a file may have fewer. Powers of two, as batch sizes mostly are: a batch that begins
        and ends with a unit is read without the rows beside it."""
        units = np.array([-(-f.rows // n) for f, n in zip(files, self.unit_rows, strict=True)], dtype=np.int64)
        self._first = np.concatenate(([0], np.cumsum(units)))
        names = [int(fingerprint_json([f.name, f.size, f.rows, f.fingerprint]), 16) for f in files]
        stream = np.repeat(np.arange(len(files)), units)
        place = (np.arange(len(stream)) - self._first[stream]).astype(np.uint64)
        length = np.array(self.unit_rows, dtype=np.uint64)[stream]
        ids = mix64_array(np.array(names, dtype=np.uint64)[stream] ^ mix64_array(place))
        self._records = ChunkRecords(path, mix64_array(ids ^ length))

    def is_same(self, stream: int, unit: int, cells: Cells, *, keep: bool) -> bool:
        """Return whether the cells of a unit fit its record; without one they are recorded. `keep`: on disk, not only in memory."""
        chunk, value = int(self._first[stream]) + unit, cells_hash(cells)
        recorded = self._records.recorded(chunk)
        if recorded is None or (recorded != value and self._accept):
            self._records.add(chunk, value, on_disk=keep or recorded is not None)
            return True
        return recorded == value

    def close(self) -> None:
        self._records.close()


def cells_hash(cells: Cells) -> int:
    """Return 64 bits over names, dtypes, shapes and values. Of objects other than strings, bytes and arrays only the number counts."""
    hasher = xxhash.xxh3_64()
    for name, column in cells.items():
        hasher.update(f"{name}\0{column.dtype.str}\0{column.shape}\0".encode())
        if column.dtype != object:
            _update(hasher, column)
            continue
        for item in column.tolist():
            if isinstance(item, np.ndarray):
                hasher.update(f"{item.dtype.str}\0{item.shape}\0".encode())
                _update(hasher, item)
            elif isinstance(item, str | bytes):
                data = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
                hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.intdigest()


def _update(hasher: xxhash.xxh3_64, array: np.ndarray) -> None:
    if array.nbytes and array.dtype != object:
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
