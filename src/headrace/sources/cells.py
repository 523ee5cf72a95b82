"""What cells does a stream file hold, and what are rows [a, b) of it?

    with open_cells(Path("rna/0.parquet")) as file:
        file.rows                    4000
        file.read(64, 128)           {"x": float32[64, 200], "group_id": int64[64]}

A cell is a row with named columns. Fixed-size columns become arrays of one dtype and shape for the whole file; strings and
ragged lists become object arrays, for a collator to pad. Which of the two it is follows from the file's schema (of jsonl:
from its first row), never from the rows that happen to be asked for.

    .parquet .pq     a row group is decoded once, when its first row is asked for
    .arrow           Arrow IPC files and streams; a record batch at a time
    .npy .npz        read in place; a compressed .npz is unpacked when it is opened
    .jsonl .ndjson   one object a line

`register_cells(".h5ad", open_h5ad)` adds a format: a function from (path, columns) to an object with `rows`, `read` and
`close`. Bytes are read with pread, never through a map, as in raw.py; nothing is unpickled; sizes that a file claims are
held against its length and against caps before memory is taken for them.
"""

from __future__ import annotations

import io
import math
import re
import threading
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import orjson

from headrace.errors import ConfigError, DataError
from headrace.sources.batches import batch_of, messages_of
from headrace.sources.messages import BATCH
from headrace.sources.raw import RawFile
from headrace.sources.reader import Undecodable, first_line
from headrace.sources.spec import nearest

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["CellFile", "CellOpener", "Cells", "cell_suffixes", "open_cells", "register_cells", "registered_cells"]

Cells = dict[str, np.ndarray]

_MAX_PIECE = 4 << 30
"""Bytes that one row group or record batch may have in memory."""
_MAX_UNPACKED = 1 << 30
"""Bytes that an array of a compressed .npz may have: it stays in memory as long as its file is open."""
_MAX_ROWS = 1 << 40
_HEAD = 1 << 16


@runtime_checkable
class CellFile(Protocol):
    """An open stream file. Used by one thread at a time."""

    rows: int

    def read(self, start: int, stop: int) -> Cells:
        """The cells of rows [start, stop) within [0, rows]; no rows give empty arrays of the right dtype and shape."""
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


def registered_cells() -> dict[str, CellOpener]:
    """What was registered beside the built-in formats."""
    return dict(_registered)


def cell_suffixes(more: Mapping[str, CellOpener] | None = None) -> tuple[str, ...]:
    """Every suffix that can be read."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_registered, *(more or ()))))


def open_cells(
    path: Path, columns: Sequence[str] | None = None, *, readers: Mapping[str, CellOpener] | None = None
) -> CellFile:
    """Open a stream file by its suffix, the longest first. `columns` leaves out the others."""
    known = {**_BUILT_IN, **_registered, **(readers or {})}
    found = [suffix for suffix in known if path.name.endswith(suffix)]
    if not found:
        raise DataError(
            f"{path} ends in none of {', '.join(known)}. Rename it, or teach headrace its format with register_cells."
        )
    suffix = max(found, key=len)
    if suffix not in _registered and suffix not in (readers or {}):
        with RawFile(path):  # refuses a FIFO, a device and a link before anything else touches it
            pass
    opened = known[suffix](path, columns)
    rows = getattr(opened, "rows", None)
    if not (isinstance(rows, int) and 0 <= rows <= _MAX_ROWS):
        said = "does not say how many rows it has" if rows is None else f"says it has {rows!r} rows"
        raise DataError(
            f"{path}: its reader ({suffix}) {said}. The order is made from the numbers of rows before anything is read: have the reader "
            "count them when it opens a file whose format does not tell."
        )
    return opened


def _chosen(path: Path, names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        return list(names)
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(nearest(missing[0], names)[:8]) or 'none at all'}. Change "
            "columns, or the file."
        )
    return list(columns)


def _within(path: Path, rows: int, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= rows:
        raise DataError(f"{path} has {rows:,} rows; rows {start:,} to {stop:,} were asked of it. Restore the file.")


# --------------------------------------------------------------------------------------------------- numpy


_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|=][a-zA-Z]\d*)', 'fortran_order': (True|False), 'shape': \(((?:\d{1,19},? ?)*)\), \}\s*"
)
_parsing = threading.Lock()


def _npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, is Fortran order, dtype, where the data begins) of a .npy; ValueError if it is none.

    numpy's own parser goes through `ast`, which two threads may not do at once in Python 3.11: one of them gets a
    SystemError. (A sweep of 900 resumes met it.) Plain dtypes are read here, structured ones by numpy under a lock.
    """
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise ValueError(f"it begins with {head[:6]!r}")
    wide = head[6] >= 2
    length = int.from_bytes(head[8 : 12 if wide else 10], "little")
    began = (12 if wide else 10) + length
    plain = _NPY_HEADER.fullmatch(head[began - length : began])
    if plain is not None:
        shape = tuple(int(n) for n in plain[3].decode().replace(",", " ").split())
        return shape, plain[2] == b"True", np.dtype(plain[1].decode()), began
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"version {version}")
    with _parsing:
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    return shape, fortran, dtype, stream.tell()


class _Array:
    """One array of a file that can be read in place: dtype, shape and where its bytes begin."""

    def __init__(self, path: Path, what: str, head: bytes, offset: int, limit: int) -> None:
        try:
            shape, fortran, dtype, began = _npy_header(head)
        except (ValueError, TypeError) as error:
            raise Undecodable(path, f"{what} is no numpy array: {first_line(error)}") from error
        if dtype.hasobject:
            raise DataError(
                f"{path}: {what} holds Python objects, which only unpickling could read. Save it with a numeric dtype."
            )
        if not shape or (fortran and len(shape) > 1):
            raise DataError(
                f"{path}: {what} has shape {shape}{' in Fortran order' if fortran else ''}; expected one row a cell, in C order. "
                "Save np.ascontiguousarray of it."
            )
        self.dtype, self.shape = dtype, shape
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.offset = offset + began
        self.nbytes = shape[0] * self.row_bytes
        if self.nbytes > limit - began:
            raise Undecodable(
                path, f"is cut short: {what} claims {self.nbytes:,} bytes, {max(limit - began, 0):,} are there"
            )

    def read(self, file: RawFile, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        if out.nbytes:  # straight into the array: a bytearray would be cleared first
            file.read_into(out.reshape(-1).view(np.uint8).data, self.offset + start * self.row_bytes)
        return out


class _Numpy:
    """Arrays side by side, a row of each being a cell."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        self._path = path
        self._file = RawFile(path)
        self._file.__enter__()
        self._in_place: dict[str, _Array] = {}
        self._unpacked: dict[str, np.ndarray] = {}
        try:
            self._find(columns)
            lengths = {n: a.shape[0] for n, a in (*self._in_place.items(), *self._unpacked.items())}
            if len(set(lengths.values())) > 1:
                told = ", ".join(f"{name} {n:,}" for name, n in lengths.items())
                raise DataError(
                    f"{path}: its arrays have different numbers of rows ({told}). A row of each is one cell."
                )
            self.rows = next(iter(lengths.values()), 0)
        except BaseException:
            self.close()
            raise

    def _find(self, columns: Sequence[str] | None) -> None:
        array = _Array(self._path, "it", bytes(self._file.read(0, min(_HEAD, self._file.size))), 0, self._file.size)
        self._in_place = {"x": array}
        _chosen(self._path, array.dtype.names or ("x",), columns)
        self._fields = columns if array.dtype.names else None

    def read(self, start: int, stop: int) -> Cells:
        _within(self._path, self.rows, start, stop)
        cells = {name: array.read(self._file, start, stop) for name, array in self._in_place.items()}
        cells |= {name: array[start:stop] for name, array in self._unpacked.items()}
        only = cells.get("x")
        if only is not None and only.dtype.names:  # a structured array: its fields are the columns
            return {name: np.ascontiguousarray(only[name]) for name in (self._fields or only.dtype.names)}
        return cells

    def close(self) -> None:
        if self._file._fd >= 0:
            self._file.__exit__(None, None, None)


class _Npz(_Numpy):
    """An archive of arrays. Stored ones are read in place, compressed ones are unpacked here, under the cap."""

    _fields: Sequence[str] | None = None

    def _find(self, columns: Sequence[str] | None) -> None:
        path = self._path
        try:
            archive = zipfile.ZipFile(_Whole(self._file))
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise Undecodable(path, f"is no .npz archive: {first_line(error)}") from error
        with archive:
            members = {i.filename.removesuffix(".npy"): i for i in archive.infolist() if i.filename.endswith(".npy")}
            if not members:
                raise DataError(f"{path} holds no array; expected names such as x and group_id")
            for name in _chosen(path, list(members), columns):
                info = members[name]
                what = f"array {name!r}"
                try:
                    if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                        head = bytes(self._file.read(info.header_offset, 30))
                        at = info.header_offset + 30 + sum(np.frombuffer(head[26:30], "<u2").tolist())
                        size = min(info.file_size, self._file.size - at)
                        opening = bytes(self._file.read(at, max(min(_HEAD, size), 0)))
                        self._in_place[name] = _Array(path, what, opening, at, size)
                        continue
                    if info.file_size > _MAX_UNPACKED:
                        raise Undecodable(
                            path,
                            f"{what} unpacks to {info.file_size:,} bytes, more than {_MAX_UNPACKED:,}",
                            "Save it uncompressed",
                        )
                    with archive.open(info) as packed:
                        data = packed.read(info.file_size + 1)
                except (
                    zipfile.BadZipFile,
                    NotImplementedError,
                    RuntimeError,
                    EOFError,
                    OSError,
                    zlib.error,
                ) as error:
                    raise Undecodable(path, f"{what} cannot be unpacked: {first_line(error)}") from error
                array = _Array(path, what, data[:_HEAD], 0, len(data))
                self._unpacked[name] = np.frombuffer(
                    data, dtype=array.dtype, count=math.prod(array.shape), offset=array.offset
                ).reshape(array.shape)


class _Whole(io.RawIOBase):
    """A RawFile as zipfile and pyarrow want one."""

    def __init__(self, file: RawFile) -> None:
        super().__init__()
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        if self._at < 0:
            raise ValueError(f"place {self._at} of a file")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._file.size - self._at, 0)
        data = bytes(self._file.read(self._at, left if size is None or size < 0 else min(size, left)))
        self._at += len(data)
        return data


# --------------------------------------------------------------------------------------------------- arrow


class _Pieces:
    """Rows in pieces of which each is decoded whole: row groups, record batches. The one in use is kept."""

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        self._path = path
        self._ends = list(accumulate(sizes))
        self.rows = self._ends[-1] if self._ends else 0
        self._held: tuple[int, Cells] = (-1, {})
        self._nothing: Cells | None = None

    def decode(self, piece: int) -> Cells:
        raise NotImplementedError

    def empty(self) -> Cells:
        raise NotImplementedError

    def read(self, start: int, stop: int) -> Cells:
        _within(self._path, self.rows, start, stop)
        if start == stop:
            if self._nothing is None:
                self._nothing = self.empty()
            return dict(self._nothing)
        first = piece = bisect_right(self._ends, start)
        parts: list[Cells] = []
        while start < stop:
            begins = self._ends[piece - 1] if piece else 0
            cells = self._piece(piece)
            end = min(stop, self._ends[piece])
            parts.append({name: column[start - begins : end - begins] for name, column in cells.items()})
            start = end
            piece += 1
        if piece == first + 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _piece(self, piece: int) -> Cells:
        if self._held[0] != piece:
            try:
                cells = self.decode(piece)
            except MemoryError as error:
                raise Undecodable(self._path, f"piece {piece} needs more memory than there is") from error
            self._held = (piece, cells)
        return self._held[1]

    def close(self) -> None:
        self._held = (-1, {})


class _Parquet(_Pieces):
    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._errors: tuple[type[Exception], ...] = (pa.ArrowException, OSError, ValueError)
        try:
            self._file = pq.ParquetFile(path, memory_map=False, pre_buffer=False, page_checksum_verification=True)
            self._schema = self._file.schema_arrow
            groups = [self._file.metadata.row_group(i) for i in range(self._file.metadata.num_row_groups)]
        except self._errors as error:
            raise Undecodable(path, f"is no parquet file, or is damaged: {first_line(error)}") from error
        for i, group in enumerate(groups):
            if group.num_rows < 0 or group.total_byte_size > _MAX_PIECE:
                raise Undecodable(
                    path,
                    f"has a row group {i} of {group.num_rows:,} rows and {group.total_byte_size:,} bytes; at most {_MAX_PIECE:,} are read",
                    "Write it with smaller row groups",
                )
        self._names = _chosen(path, self._schema.names, columns)
        super().__init__(path, [group.num_rows for group in groups])

    def decode(self, piece: int) -> Cells:
        try:
            table = self._file.read_row_group(piece, columns=self._names, use_threads=False)
        except self._errors as error:
            raise Undecodable(self._path, f"row group {piece} cannot be decoded: {first_line(error)}") from error
        return _columns(self._path, table, self._names)

    def empty(self) -> Cells:
        return _columns(self._path, self._schema.empty_table(), self._names)

    def close(self) -> None:
        super().close()
        self._file.close()


class _Arrow(_Pieces):
    """A piece is a record batch: the schema's bytes, the dictionaries' and its own, put together as a short stream."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        import pyarrow as pa

        self._errors: tuple[type[Exception], ...] = (pa.ArrowException, OSError, ValueError)
        self._raw = RawFile(path)
        self._raw.__enter__()
        try:
            found: list[tuple[int, int, int]] = []
            opening: list[bytearray] = []
            for at, end, body, kind, metadata in messages_of(self._raw):
                if body > _MAX_PIECE:
                    raise Undecodable(
                        path, f"has a record batch of {body:,} bytes at byte {at:,}", "Write smaller ones"
                    )
                if kind == BATCH:
                    found.append((at, end, batch_of(self._raw, at, metadata).rows))
                else:
                    opening.append(self._raw.read(at, end - at))
            self._places = found
            self._opening = b"".join(opening)
            with self._stream(b"") as stream:
                self._schema = stream.schema
            self._names = _chosen(path, self._schema.names, columns)
        except BaseException:
            self._raw.__exit__(None, None, None)
            raise
        super().__init__(path, [rows for _, _, rows in found])

    def decode(self, piece: int) -> Cells:
        import pyarrow as pa

        start, end, rows = self._places[piece]
        try:
            with self._stream(self._raw.read(start, end - start)) as stream:
                batch = stream.read_next_batch()
            batch.validate(full=True)
            if batch.num_rows != rows:
                raise ValueError(f"{batch.num_rows:,} rows where its head says {rows:,}")
        except (*self._errors, StopIteration) as error:
            raise Undecodable(self._path, f"record batch {piece} is damaged: {first_line(error)}") from error
        return _columns(self._path, pa.Table.from_batches([batch]), self._names)

    def _stream(self, batch: bytes | bytearray) -> pa.RecordBatchStreamReader:
        from pyarrow import ipc

        try:
            return ipc.open_stream(b"".join((self._opening, batch)))
        except self._errors as error:
            raise Undecodable(self._raw.path, f"has no schema that can be read: {first_line(error)}") from error

    def empty(self) -> Cells:
        return _columns(self._path, self._schema.empty_table(), self._names)

    def close(self) -> None:
        super().close()
        if self._raw._fd >= 0:
            self._raw.__exit__(None, None, None)


def _columns(path: Path, table: pa.Table, names: Sequence[str]) -> Cells:
    return {name: _column(path, name, table.column(name)) for name in names}


def _column(path: Path, name: str, chunked: pa.ChunkedArray) -> np.ndarray:
    import pyarrow as pa

    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        if array.null_count and not pa.types.is_floating(kind):
            raise _bad_column(path, name, f"has {array.null_count:,} nulls, and {kind} has no value for one")
        return array.to_numpy(zero_copy_only=False)
    if array.null_count:
        raise _bad_column(path, name, f"has {array.null_count:,} nulls")
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        values = array.flatten()
        if values.null_count:
            raise _bad_column(path, name, f"has {values.null_count:,} nulls in its lists")
        return values.to_numpy(zero_copy_only=False).reshape(len(array), kind.list_size)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
        return _ragged(array)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return np.array([*array.to_pylist(), None], dtype=object)[:-1]
    raise _bad_column(path, name, f"is {kind}, which has no place in a batch")


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _ragged(array: Any) -> np.ndarray:
    """Lists of any length as an array of arrays, each a view of the same values."""
    values = array.flatten().to_numpy(zero_copy_only=False)
    offsets = np.asarray(array.offsets)
    offsets = (offsets - offsets[0]).tolist() if len(offsets) else [0]
    out = np.empty(len(array), dtype=object)
    for i in range(len(array)):
        out[i] = values[offsets[i] : offsets[i + 1]]
    return out


def _bad_column(path: Path, name: str, why: str) -> DataError:
    return DataError(f"column {name!r} of {path} {why}. Change the file, or leave the column out with columns=.")


# --------------------------------------------------------------------------------------------------- jsonl


class _Lines:
    """One JSON object a line. What a column holds follows from the first row."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        self._path = path
        self._file = RawFile(path)
        self._file.__enter__()
        try:
            ends = self._line_ends()
            starts = np.concatenate(([0], ends[:-1] + 1)).astype(np.int64)
            kept = ends - starts > 0
            self._starts, self._ends = starts[kept], ends[kept]
            self._lines = np.flatnonzero(kept)
            self.rows = len(self._starts)
            first = self._objects(0, 1)[0] if self.rows else {}
            self._kinds = {name: _kind(path, name, first[name]) for name in _chosen(path, list(first), columns if self.rows else None)}  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _line_ends(self) -> np.ndarray:
        found: list[np.ndarray] = []
        size, at = self._file.size, 0
        last = b"\n"
        while at < size:
            block = self._file.read(at, min(1 << 20, size - at))
            found.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + at)
            last = bytes(block[-1:])
            at += len(block)
        if last != b"\n":
            found.append(np.array([size]))
        return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)

    def _objects(self, start: int, stop: int) -> list[dict[str, Any]]:
        if start == stop:
            return []
        begin = int(self._starts[start])
        data = memoryview(self._file.read(begin, int(self._ends[stop - 1]) - begin))
        rows = []
        for i in range(start, stop):
            try:
                row = orjson.loads(data[int(self._starts[i]) - begin : int(self._ends[i]) - begin])
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__}, expected an object")
            except ValueError as error:
                raise Undecodable(
                    self._path, f"line {int(self._lines[i]) + 1:,} cannot be used: {first_line(error)}"
                ) from error
            rows.append(row)
        return rows

    def read(self, start: int, stop: int) -> Cells:
        _within(self._path, self.rows, start, stop)
        rows = self._objects(start, stop)
        return {name: self._column(name, rows, start) for name in self._kinds}

    def _column(self, name: str, rows: list[dict[str, Any]], start: int) -> np.ndarray:
        dtype, length = self._kinds[name]
        for i, row in enumerate(rows):
            value = row.get(name)
            fits = (
                isinstance(value, list) and len(value) == length if length is not None else not isinstance(value, list)
            )
            if not fits or value is None:
                wanted = f"{length:,} numbers" if length is not None else "one value"
                found = f"{len(value):,} numbers" if isinstance(value, list) else type(value).__name__
                raise Undecodable(
                    self._path,
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
                self._path, f"rows from {start:,} on do not fit column {name!r}: {first_line(error)}"
            ) from error
        return array

    def close(self) -> None:
        if self._file._fd >= 0:
            self._file.__exit__(None, None, None)


def _flat(values: list[Any]) -> list[Any]:
    return [v for value in values for v in value] if values and isinstance(values[0], list) else values


def _kind(path: Path, name: str, value: Any) -> tuple[Any, int | None]:
    """(dtype, length of its lists or None) of a column, from its value in the first row."""
    inside = value if isinstance(value, list) else [value]
    length = len(value) if isinstance(value, list) else None
    if all(isinstance(v, bool) for v in inside):
        return np.bool_, length
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in inside):
        whole = all(isinstance(v, int) for v in inside)
        return (np.int64 if whole else np.float32 if length is not None else np.float64), length
    if length is None and isinstance(value, str):
        return object, None
    raise _bad_column(
        path, name, f"holds {type(value).__name__} in the first row; numbers, lists of numbers and strings are read"
    )


_BUILT_IN: dict[str, CellOpener] = {
    ".parquet": _Parquet,
    ".pq": _Parquet,
    ".arrow": _Arrow,
    ".npy": _Numpy,
    ".npz": _Npz,
    ".jsonl": _Lines,
    ".ndjson": _Lines,
}
