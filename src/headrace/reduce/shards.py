"""Rows at rest: .npy, .safetensors and .parquet files as one long matrix.

    shards = RowShards.open(["acts/*.npy"])
    shards = RowShards.open(["acts/"], field="hidden", targets="label", weights="w", rows="f32")
    shards = RowShards.open(["s3://bucket/acts/*.npy"])
    shards.n_rows, shards.width, shards.dtype
    shards.read(start, end)            a RowBatch of those rows

Files are taken in the order of their names (the order is part of the sum). npy and safetensors are mapped, parquet is read by
row groups; nothing is unpickled, and a header is compared with the file's size before it is believed. Results of headrace's that lie
among the shards are no shards: a folder or a glob leaves them out.

Objects of a store are read by ranges: the rows of a chunk, or the row groups they lie in. An object is known by its size and entity
tag, and every read compares the tag; a file on disk is known by its size and sampled blocks.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.errors import ConfigError, DataChanged, DataError, FileCorrupt
from headrace.files import publish
from headrace.order import file_fingerprint, fingerprint_json
from headrace.reduce.columns import RowBatch
from headrace.reduce.kernel import dtype_name, row_dtype_name
from headrace.reduce.partition import ROW_DTYPES
from headrace.reduce.result import is_result, is_result_header
from headrace.stores import STORES, StoredObject, find_objects, open_object, store_of

__all__ = ["RowShards", "ShardSpec"]

_SUFFIXES = (".npy", ".safetensors", ".parquet")
_MAX_HEADER = 100 << 20
_NPY_HEADER = 16 << 10
"""Bytes of a .npy object that are fetched for its header; numpy itself believes no header of more than 10,000."""
_SAFE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_OF_NAME = {"f64": np.float64, "f32": np.float32, "f16": np.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """Which files, and what of them: everything a worker needs to open the same rows."""

    paths: tuple[str, ...]
    field: str | None = None
    """Tensor or column (or columns, with commas) that holds the rows; may be left out where there is only one."""
    targets: str | None = None
    weights: str | None = None
    rows: str | None = None
    """Convert rows to this type; as they are stored unless given."""

    def to_dict(self) -> dict[str, Any]:
        return {"paths": list(self.paths), "field": self.field, "targets": self.targets, "weights": self.weights, "rows": self.rows}  # fmt: skip

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> ShardSpec:
        return cls(
            paths=tuple(value["paths"]),
            field=value["field"],
            targets=value["targets"],
            weights=value["weights"],
            rows=value["rows"],
        )


class _File(Protocol):
    """One shard. `shape` of a field is (rows, width)."""

    @property
    def path(self) -> Path | str: ...
    @property
    def place(self) -> _Place: ...

    def find(self, field: str | None, what: str) -> str: ...
    def shape(self, field: str) -> tuple[int, int]: ...
    def dtype(self, field: str) -> str: ...
    def read(self, field: str, start: int, end: int) -> np.ndarray: ...


class RowShards:
    """Shards in order, read by global row."""

    def __init__(self, spec: ShardSpec, files: Sequence[_File]) -> None:
        self.spec = spec
        self._files = files
        self._fields = [f.find(spec.field, "rows") for f in files]
        counts = [f.shape(name)[0] for f, name in zip(files, self._fields, strict=True)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.n_rows = int(self._ends[-1])
        self.width = _same_width(files, [f.shape(n) for f, n in zip(files, self._fields, strict=True)], "columns")
        stored = [f.dtype(n) for f, n in zip(files, self._fields, strict=True)]
        _require_said(files, stored, spec.rows)
        self.dtype: str = spec.rows or _same(files, stored, "rows", "; choose one type with --rows")
        self.n_targets = 0
        if spec.targets is not None:
            shapes = [f.shape(f.find(spec.targets, "targets")) for f in files]
            self.n_targets = _same_width(files, shapes, "targets")
        for f, count in zip(files, counts, strict=True):
            for name, what in ((spec.targets, "targets"), (spec.weights, "weights")):
                if name is not None and f.shape(f.find(name, what))[0] != count:
                    raise DataError(f"{f.path} has {count:,} rows and {f.shape(f.find(name, what))[0]:,} {what}")
        if spec.weights is not None and any(f.shape(f.find(spec.weights, "weights"))[1] > 1 for f in files):
            raise DataError(f"weights are one number a row; {spec.weights!r} has more")

    @classmethod
    def open(
        cls,
        paths: Sequence[str | Path],
        *,
        field: str | None = None,
        targets: str | None = None,
        weights: str | None = None,
        rows: str | None = None,
        out: Path | None = None,
    ) -> RowShards:
        """Files, folders and globs, on disk or in a store (s3://, gs://, az://, https://). Folders give all shards in them. `out`: a
        result to be written, never one of the shards."""
        if rows is not None and rows not in ROW_DTYPES:
            raise ConfigError(f"rows must be one of {', '.join(ROW_DTYPES)}, got {rows!r}")
        found = _matching([str(p) for p in paths], out)
        return cls.of(ShardSpec(paths=tuple(found), field=field, targets=targets, weights=weights, rows=rows))

    @classmethod
    def of(cls, spec: ShardSpec) -> RowShards:
        """The files of a spec, opened."""
        return cls(spec, [_opened(p) for p in spec.paths])

    @property
    def weighted(self) -> bool:
        return self.spec.weights is not None

    def fingerprint(self) -> str:
        """16 hex digits over sizes and sampled blocks (of objects: entity tags) of all files, in order, and over what is read of them."""
        return fingerprint_json(
            [
                [f.place.fingerprint() for f in self._files],
                self._fields,
                self.spec.targets,
                self.spec.weights,
                self.dtype,
            ]
        )

    def stamps(self) -> dict[str, list[int | str]]:
        """Size and time of writing (of an object: entity tag) of each file, as they are now, by its path: what a later look at the same
        files is compared with. No part of the fingerprint, because copies on other machines have other times."""
        stamps = {str(f.path).encode("utf-8", "backslashreplace").decode(): f.place.stamp() for f in self._files}
        return {path: stamp for path, stamp in stamps.items() if stamp is not None}

    def read(self, start: int, end: int) -> RowBatch:
        """The rows [start, end). Inside one file, and as they are stored, without a copy."""
        if not 0 <= start <= end <= self.n_rows:
            raise DataError(f"rows {start:,} to {end:,} were asked of shards with {self.n_rows:,}")
        parts: list[tuple[_File, str, int, int]] = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            begin = int(self._ends[at - 1]) if at else 0
            stop = min(end, int(self._ends[at]))
            parts.append((self._files[at], self._fields[at], start - begin, stop - begin))
            start, at = stop, at + 1
        x = _joined([self._converted(f.read(name, a, b)) for f, name, a, b in parts], self.width, self.dtype)
        y = w = None
        if self.spec.targets is not None:
            name = self.spec.targets
            y = _joined([_as_f64(f.read(f.find(name, "targets"), a, b)) for f, _, a, b in parts], self.n_targets, "f64")
        if self.spec.weights is not None:
            name = self.spec.weights
            w = _joined([_as_f64(f.read(f.find(name, "weights"), a, b)) for f, _, a, b in parts], 1, "f64")[:, 0]
        return RowBatch(x=x, y=y, w=w)

    def first_unusable(self, start: int, end: int) -> str | None:
        """Where the first NaN, infinity or weight below zero among the rows [start, end) stands: file and row. For a sentence: reads them
        again."""
        batch = self.read(start, end)
        bad = np.zeros(end - start, bool)
        for values in (batch.x, batch.y, batch.w):
            if values is not None:
                bad |= ~np.isfinite(_as_f64(values).reshape(end - start, -1)).all(axis=1)
        if batch.w is not None:
            bad |= batch.w < 0
        if not bad.any():
            return None
        row = start + int(np.argmax(bad))
        at = int(np.searchsorted(self._ends, row, side="right"))
        return f"row {row - (int(self._ends[at - 1]) if at else 0):,} of {self.spec.paths[at]}"

    def _converted(self, rows: np.ndarray) -> np.ndarray:
        if row_dtype_name(rows) == self.dtype:
            return rows
        return _as_f64(rows).astype(_OF_NAME[self.dtype])


def _as_f64(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def _joined(parts: list[np.ndarray], width: int, dtype: str) -> np.ndarray:
    if not parts:
        return np.empty((0, width), np.uint16 if dtype == "bf16" else _OF_NAME[dtype])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _same(files: Sequence[_File], values: Sequence[Any], what: str, remedy: str = "") -> Any:
    for file, value in zip(files, values, strict=True):
        if value != values[0]:
            raise DataError(f"{files[0].path} has {values[0]} {what}, {file.path} has {value}{remedy}")
    return values[0]


def _same_width(files: Sequence[_File], shapes: Sequence[tuple[int, int]], what: str) -> int:
    """The width of all. An empty file may not know its own: 0."""
    known = [(file, width) for file, (rows, width) in zip(files, shapes, strict=True) if rows or width]
    if not known:
        raise DataError(
            f"{files[0].path} has no rows, and nothing says how many {what} they would have: give a shard with rows"
        )
    return _same([file for file, _ in known], [width for _, width in known], what)


def _require_said(files: Sequence[_File], stored: Sequence[str], rows: str | None) -> None:
    """bfloat16 is what a file, or the user, says it is; nothing else becomes it."""
    for file, dtype in zip(files, stored, strict=True):
        if rows == "bf16" and dtype != "bf16":
            raise ConfigError(f"{file.path} holds {dtype} rows: they can be converted to f64, f32 or f16, not to bf16")
        if rows != "bf16" and dtype == "bf16" and isinstance(file, _Npy):
            raise DataError(
                f"{file.path} holds uint16, which may be whole numbers: save them as float32, or say with --rows bf16 that they are the "
                "bits of bfloat16"
            )


def _matching(patterns: Sequence[str], out: Path | None) -> list[str]:
    found: list[Path | str] = []
    for pattern in patterns:
        if (store := store_of(pattern)) is not None:
            found += _in_store(pattern, store)
            continue
        path = Path(pattern)
        if path.is_dir():
            inside = _shards_of(p for p in path.iterdir() if p.suffix in _SUFFIXES)
        elif path.exists():
            # A shell that expands a glob names the result of the run before among the shards.
            inside = [path] if out is None or len(patterns) == 1 or not _same_file(path, out) else None
            if inside is None:
                continue
        else:
            inside = _shards_of(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))
        if not inside:
            raise ConfigError(f"no shards match {pattern}: give .npy, .safetensors or .parquet files, folders or globs")
        found += inside
    wrong = [p for p in found if not str(p).endswith(_SUFFIXES)]
    if wrong:
        raise ConfigError(f"{wrong[0]} is none of {', '.join(_SUFFIXES)}")
    return [p if isinstance(p, str) else str(p.absolute()) for p in found]


def _in_store(pattern: str, store: str) -> list[str]:
    """The URLs of the objects that a URL names. Results among them are left out of a prefix or a glob, as on disk."""
    if store not in STORES:
        raise ConfigError(
            f"{pattern}: there is no store {store}://. There are {', '.join(f'{name}://' for name in STORES)}, and plain paths"
        )
    opened, _, objects = find_objects(pattern, suffixes=_SUFFIXES, what=f"shards {pattern}")
    found = [f"{opened.root}/{o.key}" for o in objects]
    if found == [pattern]:
        return found
    return [url for url in found if not (url.endswith(".safetensors") and is_result_header(_InStore(url).read))]


def _shards_of(found: Iterable[Path]) -> list[Path]:
    return sorted(p for p in found if not (p.suffix == ".safetensors" and is_result(p)))


def _same_file(path: Path, out: Path) -> bool:
    return out.exists() and path.samefile(out) and is_result(path)


def _opened(path: str) -> _File:
    place = _OnDisk(Path(path)) if store_of(path) is None else _InStore(path)
    return {".npy": _Npy, ".safetensors": _Safetensors, ".parquet": _Parquet}[Path(path).suffix](place)


# -------------------------------------------------------------------------------------------------- places


class _OnDisk:
    """A regular file, mapped."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"{path} is no regular file")
        self.path = path
        self.size = path.stat().st_size

    def read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def array(self, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.memmap(self.path, dtype, "r", offset, shape)

    def for_arrow(self) -> Path:
        return self.path

    def fingerprint(self) -> str:
        return file_fingerprint(self.path, self.path.stat().st_size)

    def stamp(self) -> list[int | str] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None  # it is gone: the reader that opens it names it
        return [status.st_size, status.st_mtime_ns]


class _InStore:
    """An object of a store. Not to be shared between threads."""

    def __init__(self, url: str) -> None:
        self.path = url
        self._object = open_object(url)
        self.size = self._object.size
        self.read = self._object.read

    def array(self, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> _StoredArray:
        return _StoredArray(self._object, dtype, offset, shape)

    def for_arrow(self) -> Any:
        import pyarrow as pa

        return pa.PythonFile(_Stream(self._object), mode="r")

    def fingerprint(self) -> list[int | str]:
        return [self.size, str(self._object.version)]

    def stamp(self) -> list[int | str]:
        now = open_object(self.path)
        return [now.size, str(now.version)]


class _StoredArray:
    """An array in C order within an object; rows of it are fetched when they are asked for."""

    def __init__(self, stored: StoredObject, dtype: np.dtype, offset: int, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self.ndim = dtype, shape, len(shape)
        self._stored, self._offset = stored, offset
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        start, end, _ = rows.indices(self.shape[0])
        data = self._stored.read(self._offset + start * self._row_bytes, max(end - start, 0) * self._row_bytes)
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])


_Place = _OnDisk | _InStore
"""Where the bytes of a shard lie."""
_Matrix = np.ndarray | _StoredArray
"""Rows of a shard that are fetched when they are sliced."""


class _Stream(io.RawIOBase):
    """An object as a file that can be sought in, for pyarrow."""

    def __init__(self, stored: StoredObject) -> None:
        self._stored, self._at = stored, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._stored.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._stored.size - self._at, 0)
        data = bytes(self._stored.read(self._at, left if size < 0 else min(size, left)))
        self._at += len(data)
        return data


# ------------------------------------------------------------------------------------------------- formats


class _Npy:
    """A .npy file: one matrix, mapped."""

    def __init__(self, place: _Place) -> None:
        self.place, self.path = place, place.path
        path = place.path
        try:
            head = bytes(place.read(0, min(6, place.size)))
            if head != b"\x93NUMPY":  # np.load would take it for a pickle and advise to load it unsafely
                raise ValueError(f"it begins with {head!r}. Give files that numpy.save wrote")
            array = (
                np.load(path, mmap_mode="r", allow_pickle=False) if isinstance(place, _OnDisk) else _stored_npy(place)
            )
        except (ValueError, OSError, EOFError, OverflowError, TypeError, SyntaxError) as error:
            raise DataError(f"{path} cannot be read as .npy: {error}") from error
        if array.ndim != 2 or array.shape[1] < 1:
            raise DataError(f"{path} holds an array of shape {array.shape}; rows are a matrix")
        if not array.dtype.isnative or (
            isinstance(array, np.ndarray) and array.flags.f_contiguous and not array.flags.c_contiguous
        ):
            raise DataError(f"{path} is stored in another byte order, or by columns: save it as plain C order")
        self._array = array
        try:
            self._dtype = dtype_name(array.dtype)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def find(self, field: str | None, what: str) -> str:
        if field is not None:
            raise ConfigError(
                f"{self.path} is a .npy file and has no field {field!r} for {what}; only .safetensors and .parquet do"
            )
        return ""

    def shape(self, field: str) -> tuple[int, int]:
        rows, width = self._array.shape
        return rows, width

    def dtype(self, field: str) -> str:
        return self._dtype

    def read(self, field: str, start: int, end: int) -> np.ndarray:
        return self._array[start:end]


def _stored_npy(place: _Place) -> _Matrix:
    """The matrix of a .npy object: its header is read, its rows are not."""
    head = io.BytesIO(place.read(0, min(place.size, _NPY_HEADER)))
    version = np.lib.format.read_magic(head)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"it is of version {version[0]}.{version[1]}, and matrices of numbers are of 1.0 or 2.0")
    shape, by_columns, dtype = read(head)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects")
    if by_columns and len(shape) == 2 and min(shape) > 1:
        raise DataError(f"{place.path} is stored in another byte order, or by columns: save it as plain C order")
    if head.tell() + math.prod(shape) * dtype.itemsize > place.size:
        raise ValueError(f"its header announces more than its {place.size:,} bytes")
    return place.array(dtype, head.tell(), shape)


class _Safetensors:
    """A .safetensors file: named tensors, mapped."""

    def __init__(self, place: _Place) -> None:
        self.place, self.path = place, place.path
        path, size = place.path, place.size
        length = int.from_bytes(place.read(0, min(8, size)), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise DataError(
                f"{path} is no .safetensors file: its header claims {length:,} bytes, the file has {size:,}"
            )
        header = place.read(8, length)
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            self._tensors = {
                str(n): self._mapped(e, 8 + length, size) for n, e in entries.items() if e["dtype"] in _SAFE
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} has a damaged header: {error}") from error

    def _mapped(self, entry: Mapping[str, Any], base: int, size: int) -> _Matrix:
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not all(type(n) is int for n in (start, end, *shape)):
            raise ValueError("a shape or an offset is no whole number")
        dtype = np.dtype(_SAFE[entry["dtype"]])
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if min((start, *shape), default=0) < 0 or end - start != count * dtype.itemsize or base + end > size:
            raise ValueError("a tensor lies outside the file")
        if count == 0:
            return np.empty(shape, dtype)
        return self.place.array(dtype, base + start, shape)

    def find(self, field: str | None, what: str) -> str:
        wide = sorted(n for n, t in self._tensors.items() if t.ndim == 2)
        if field is None:
            if len(wide) != 1:
                raise ConfigError(
                    f"{self.path} holds {len(wide)} matrices ({', '.join(wide[:8])}): name one with --field"
                )
            return wide[0]
        if field not in self._tensors or self._tensors[field].ndim not in (1, 2):
            raise ConfigError(
                f"{self.path} has no float matrix {field!r} for {what}; it has {', '.join(sorted(self._tensors)[:8])}"
            )
        return field

    def shape(self, field: str) -> tuple[int, int]:
        shape = self._tensors[field].shape
        return (shape[0], shape[1] if len(shape) == 2 else 1)

    def dtype(self, field: str) -> str:
        return dtype_name(self._tensors[field].dtype)

    def read(self, field: str, start: int, end: int) -> np.ndarray:
        part = self._tensors[field][start:end]
        return part.reshape(end - start, -1)


class _Parquet:
    """A .parquet file: a column of lists of equal length, or several columns of numbers."""

    def __init__(self, place: _Place) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.place, self.path = place, place.path
        path = place.path
        try:
            self._file = pq.ParquetFile(place.for_arrow())
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as .parquet: {error}") from error
        groups = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        self._first = next((g for g, rows in enumerate(groups) if rows), None)
        """The first row group with rows."""
        self._ends = np.cumsum([0, *groups])
        self._held: tuple[int, tuple[str, ...], Any] | None = None
        self._widths: dict[str, int] = {}

    def find(self, field: str | None, what: str) -> str:
        schema = self._file.schema_arrow
        if field is None:
            lists = [f.name for f in schema if _is_list(f.type)]
            if len(lists) != 1:
                raise ConfigError(
                    f"{self.path} has {len(lists)} columns of lists: name the rows with --field (several columns: a,b,c)"
                )
            return lists[0]
        missing = [n for n in field.split(",") if n not in schema.names]
        if missing:
            raise ConfigError(
                f"{self.path} has no column {missing[0]!r} for {what}; it has {', '.join(schema.names[:8])}"
            )
        return field

    def shape(self, field: str) -> tuple[int, int]:
        if field not in self._widths:
            first = self._first
            self._widths[field] = self._empty(field)[1] if first is None else self._matrix(field, first).shape[1]
        return int(self._ends[-1]), self._widths[field]

    def dtype(self, field: str) -> str:
        return self._empty(field)[0] if self._first is None else row_dtype_name(self._matrix(field, self._first))

    def _empty(self, field: str) -> tuple[str, int]:
        """Type and width of rows that are not there, as the schema has them; lists of any length leave the width open: 0."""
        import pyarrow as pa

        kinds = [self._file.schema_arrow.field(name).type for name in field.split(",")]
        widths = [k.list_size if pa.types.is_fixed_size_list(k) else 0 if _is_list(k) else 1 for k in kinds]
        inner = [k.value_type if _is_list(k) else k for k in kinds]
        floats = [np.dtype(k.to_pandas_dtype()) if pa.types.is_floating(k) else np.dtype("f8") for k in inner]
        return dtype_name(np.result_type(*floats)), sum(widths) if all(widths) else 0

    def read(self, field: str, start: int, end: int) -> np.ndarray:
        width = self.shape(field)[1]
        parts = []
        group = int(np.searchsorted(self._ends, start, side="right")) - 1
        while start < end:
            first, stop = int(self._ends[group]), min(end, int(self._ends[group + 1]))
            if first == stop:  # a group without rows
                group += 1
                continue
            matrix = self._matrix(field, group)
            if matrix.shape[1] != width:
                raise DataError(
                    f"row group {group} of {self.path} has rows of {matrix.shape[1]} numbers, the first one has {width}"
                )
            parts.append(matrix[start - first : stop - first])
            start, group = stop, group + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty((0, width))

    def _matrix(self, field: str, group: int) -> np.ndarray:
        names = tuple(field.split(","))
        if self._held is None or self._held[:2] != (group, names):
            self._held = (group, names, self._decoded(names, group))
        return self._held[2]

    def _decoded(self, names: tuple[str, ...], group: int) -> np.ndarray:
        import pyarrow as pa

        try:
            table = self._file.read_row_group(group, columns=list(names))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"row group {group} of {self.path} cannot be read: {error}") from error
        columns = [table.column(name).combine_chunks() for name in names]
        if any(c.null_count for c in columns):
            raise DataError(
                f"row group {group} of {self.path} has nulls in {', '.join(names)}: fill or leave out those rows"
            )
        flat = [self._flat(c, group, n) for c, n in zip(columns, names, strict=True)]
        return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)

    def _flat(self, column: Any, group: int, name: str) -> np.ndarray:
        import pyarrow as pa

        kind = column.type
        rows = len(column)
        if _is_list(kind):
            values = column.flatten()
            width = kind.list_size if pa.types.is_fixed_size_list(kind) else len(values) // max(rows, 1)
            even = (
                pa.types.is_fixed_size_list(kind)
                or (np.diff(column.offsets.to_numpy(zero_copy_only=False)) == width).all()
            )
            if not even or values.null_count:
                raise DataError(
                    f"row group {group} of {self.path}: the lists of {name!r} are not of one length, or hold nulls"
                )
        else:
            values, width = column, 1
        array = values.to_numpy(zero_copy_only=False)
        if array.dtype.kind in "iub":
            array = array.astype(np.float64)
        if array.dtype.kind != "f":
            raise DataError(f"column {name!r} of {self.path} holds {kind}, not numbers")
        return array.reshape(rows, width)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def first_written(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first file whose size or time of writing is another; files under other paths are left to the fingerprint."""
    return next((path for path, stamp in now.items() if path in then and list(then[path]) != list(stamp)), None)


def save_stamps(path: Path, stamps: Mapping[str, Any]) -> None:
    """Write down how the shards stood when a pass was begun."""
    publish(path, json.dumps(dict(stamps)).encode(), replace=True)


def saved_stamps(path: Path) -> dict[str, Any]:
    """How they stood; empty where nobody wrote it down."""
    try:
        told = json.loads(path.read_bytes())
        if not isinstance(told, dict) or not all(isinstance(stamp, list) for stamp in told.values()):
            raise ValueError("it names no files")
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise FileCorrupt(
            f"{path} does not say how the shards of the pass stood ({error}): remove {path.parent}, or give --replace to begin again"
        ) from error
    return told


def require_unwritten(then: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on where a shard was written to."""
    if (path := first_written(then, now)) is not None:
        raise DataChanged(
            f"{path} was written since the pass in {folder} was begun, and what was summed before may be of other rows: remove {folder} or give "
            "--replace to begin again, or give another --out"
        )


def require_unchanged(shards: RowShards, fingerprint: str) -> None:
    """A worker's files must be the coordinator's."""
    if shards.fingerprint() != fingerprint:
        raise DataChanged(
            f"the shards are not those the pass was begun with ({shards.spec.paths[0]} and {len(shards.spec.paths) - 1} more): they changed, "
            "or this host sees others. Restore them, or begin again with another --out"
        )
