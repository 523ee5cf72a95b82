"""Rows at rest: .npy, .safetensors and .parquet files as one long matrix.

    shards = RowShards.open(["acts/*.npy"])
    shards = RowShards.open(["acts/"], field="hidden", targets="label", weights="w", rows="f32")
    shards.n_rows, shards.width, shards.dtype
    shards.read(start, end)            a RowBatch of those rows

Files are taken in the order of their names (the order is part of the sum). npy and safetensors are mapped, parquet is read by
row groups; nothing is unpickled, and a header is compared with the file's size before it is believed. Results of headrace's that lie
among the shards are no shards: a folder or a glob leaves them out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.errors import ConfigError, DataChanged, DataError, FileCorrupt
from headrace.files import publish
from headrace.order import file_fingerprint, fingerprint_json
from headrace.reduce.columns import RowBatch
from headrace.reduce.kernel import row_dtype_name
from headrace.reduce.partition import ROW_DTYPES
from headrace.reduce.result import is_result

__all__ = ["RowShards", "ShardSpec"]

_SUFFIXES = (".npy", ".safetensors", ".parquet")
_MAX_HEADER = 100 << 20
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

    path: Path

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
        """Files, folders and globs. Folders give all shards in them. `out`: a result to be written, never one of the shards."""
        if rows is not None and rows not in ROW_DTYPES:
            raise ConfigError(f"rows must be one of {', '.join(ROW_DTYPES)}, got {rows!r}")
        found = _matching([str(p) for p in paths], out)
        return cls.of(ShardSpec(paths=tuple(found), field=field, targets=targets, weights=weights, rows=rows))

    @classmethod
    def of(cls, spec: ShardSpec) -> RowShards:
        """The files of a spec, opened."""
        return cls(spec, [_opened(Path(p)) for p in spec.paths])

    @property
    def weighted(self) -> bool:
        return self.spec.weights is not None

    def fingerprint(self) -> str:
        """16 hex digits over sizes and sampled blocks of all files, in order, and over what is read of them."""
        told = [file_fingerprint(Path(p), Path(p).stat().st_size) for p in self.spec.paths]
        return fingerprint_json([told, self._fields, self.spec.targets, self.spec.weights, self.dtype])

    def stamps(self) -> dict[str, list[int]]:
        """Size and time of writing of each file, by its path: what a later look at the same files is compared with. No part of the
        fingerprint, because copies on other machines have other times."""
        told = {}
        for path in self.spec.paths:
            try:
                status = Path(path).stat()
            except OSError:
                continue  # it is gone: whoever reads it says so
            told[path.encode("utf-8", "backslashreplace").decode()] = [status.st_size, status.st_mtime_ns]
        return told

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
    found: list[Path] = []
    for pattern in patterns:
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
    wrong = [p for p in found if p.suffix not in _SUFFIXES]
    if wrong:
        raise ConfigError(f"{wrong[0]} is none of {', '.join(_SUFFIXES)}")
    return [str(p.absolute()) for p in found]


def _shards_of(found: Iterable[Path]) -> list[Path]:
    return sorted(p for p in found if not (p.suffix == ".safetensors" and is_result(p)))


def _same_file(path: Path, out: Path) -> bool:
    return out.exists() and path.samefile(out) and is_result(path)


def _opened(path: Path) -> _File:
    if not path.is_file():
        raise DataError(f"{path} is no regular file")
    return {".npy": _Npy, ".safetensors": _Safetensors, ".parquet": _Parquet}[path.suffix](path)


# ------------------------------------------------------------------------------------------------- formats


class _Npy:
    """A .npy file: one matrix, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(6)
            if head != b"\x93NUMPY":  # np.load would take it for a pickle and advise to load it unsafely
                raise ValueError(f"it begins with {head!r}. Give files that numpy.save wrote")
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError, OverflowError, TypeError, SyntaxError) as error:
            raise DataError(f"{path} cannot be read as .npy: {error}") from error
        if array.ndim != 2 or array.shape[1] < 1:
            raise DataError(f"{path} holds an array of shape {array.shape}; rows are a matrix")
        if not array.dtype.isnative or (array.flags.f_contiguous and not array.flags.c_contiguous):
            raise DataError(f"{path} is stored in another byte order, or by columns: save it as plain C order")
        self._array = array
        try:
            self._dtype = row_dtype_name(array)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def find(self, field: str | None, what: str) -> str:
        if field is not None:
            raise ConfigError(
                f"{self.path} is a .npy file and has no field {field!r} for {what}; only .safetensors and .parquet do"
            )
        return ""

    def shape(self, field: str) -> tuple[int, int]:
        return self._array.shape

    def dtype(self, field: str) -> str:
        return self._dtype

    def read(self, field: str, start: int, end: int) -> np.ndarray:
        return self._array[start:end]


class _Safetensors:
    """A .safetensors file: named tensors, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise DataError(
                    f"{path} is no .safetensors file: its header claims {length:,} bytes, the file has {size:,}"
                )
            header = handle.read(length)
        try:
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            self._tensors = {
                str(n): self._mapped(e, 8 + length, size) for n, e in entries.items() if e["dtype"] in _SAFE
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} has a damaged header: {error}") from error

    def _mapped(self, entry: Mapping[str, Any], base: int, size: int) -> np.ndarray:
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
        return np.memmap(self.path, dtype, "r", base + start, shape)

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
        return row_dtype_name(self._tensors[field])

    def read(self, field: str, start: int, end: int) -> np.ndarray:
        part = self._tensors[field][start:end]
        return part.reshape(end - start, -1)


class _Parquet:
    """A .parquet file: a column of lists of equal length, or several columns of numbers."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file = pq.ParquetFile(path)
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
        return row_dtype_name(np.empty(0, np.result_type(*floats))), sum(widths) if all(widths) else 0

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
