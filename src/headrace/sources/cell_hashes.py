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

    def first_changed(self, stream: int, start: int, cells: Cells, *, keep_from: int) -> int | None:
        """Compare whole units, from row `start` of a stream on, with their records; units without one are recorded.

        Return the first row of the first unit that differs, or None. Units that begin before row `keep_from` are recorded in memory only.
        """
        size = self.unit_rows[stream]
        first, values = int(self._first[stream]) + start // size, unit_hashes(cells, size)
        recorded = self._records.recorded_range(first, first + len(values))
        if recorded == values:
            return None
        for i, (value, known) in enumerate(zip(values, recorded, strict=True)):
            if known is None or (known != value and self._accept):
                self._records.add(first + i, value, on_disk=start + i * size >= keep_from or known is not None)
            elif known != value:
                return start + i * size
        return None

    def close(self) -> None:
        self._records.close()


def unit_hashes(cells: Cells, size: int) -> list[int]:
    """Return 64 bits over names, dtypes, shapes and values for every `size` rows. Of objects other than strings, bytes and arrays only the
    number counts."""
    rows = len(next(iter(cells.values()), ()))
    hashers = [xxhash.xxh3_64() for _ in range(0, rows, size)]
    for name, column in cells.items():
        heads = [f"{name}\0".encode() + _head(column[:size])] * len(hashers)
        if rows % size:
            heads[-1] = f"{name}\0".encode() + _head(column[: rows % size])
        plain = None if column.dtype == object else _bytes_of(column)
        step = size if plain is None else len(plain) // rows * size
        for i, (hasher, head) in enumerate(zip(hashers, heads, strict=True)):
            hasher.update(head)
            if plain is not None:
                hasher.update(plain[i * step : (i + 1) * step])
                continue
            for item in column[i * step : (i + 1) * step].tolist():
                if isinstance(item, np.ndarray):
                    hasher.update(_head(item))
                    hasher.update(_bytes_of(item) if item.dtype != object else b"")
                elif isinstance(item, str | bytes):
                    data = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
                    hasher.update(len(data).to_bytes(8, "little") + data)
    return [hasher.intdigest() for hasher in hashers]


def _head(array: np.ndarray) -> bytes:
    return f"{array.dtype.str}\0{array.shape}\0".encode()


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
