"""Row shards: .npy, .safetensors and .parquet files as one long matrix.

    shards = RowShards.open(["acts/*.npy"])
    shards = RowShards.open(["acts/"], field="hidden", targets="label", weights="w", rows="f32")
    shards = RowShards.open(["s3://bucket/acts/*.npy"])
    shards.n_rows, shards.width, shards.dtype
    shards.read(start, end)            a RowBatch of those rows

Files are taken in the order of their names (the order is part of the sum). They are read by `headrace.formats`: the rows of a
chunk, or the row groups they lie in. A folder or a glob leaves out saved Gram results.

An object of a store is known by its size and entity tag, and every read compares the tag; a file on disk is known by its size
and sampled blocks, and every read compares the size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError, DataChanged, DataError, FileCorrupt
from headrace.files import read_json
from headrace.formats.byte_file import ByteFile, RawFile, Undecodable
from headrace.formats.object_store import STORES, find_objects, open_object, store_of
from headrace.formats.rows import Ragged, open_rows
from headrace.order import file_fingerprint, fingerprint_json
from headrace.reduce.columns import RowBatch
from headrace.reduce.kernel import as_f64, dtype_name
from headrace.reduce.partition import ROW_DTYPES
from headrace.reduce.result import is_result

_SUFFIXES = (".npy", ".safetensors", ".parquet")
_FLOATS = ("F64", "F32", "F16", "BF16")
_ROWS_LOOKED_AT = 4096
"""Rows whose lists are compared when a shard is opened; those of the others are when they are read."""
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


class RowShards:
    """Shards in order, read by global row."""

    def __init__(self, spec: ShardSpec, files: Sequence[_Shard]) -> None:
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
        shapes = self._found("targets", spec.targets, counts)
        self.n_targets = _same_width(files, shapes, "targets") if shapes else 0
        if any(width > 1 for _, width in self._found("weights", spec.weights, counts)):
            raise DataError(f"weights are one number a row; {spec.weights!r} has more")

    def _found(self, what: str, name: str | None, counts: Sequence[int]) -> list[tuple[int, int]]:
        """The shapes of the targets or the weights of each file; none where the pass has none."""
        shapes = [f.shape(f.find(name, what)) for f in self._files] if name is not None else []
        for f, count, (rows, _) in zip(self._files, counts, shapes, strict=False):
            if rows != count:
                raise DataError(f"{f.path} has {count:,} rows and {rows:,} {what}")
        return shapes

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
        return cls(spec, [_Shard(p) for p in spec.paths])

    @property
    def weighted(self) -> bool:
        return self.spec.weights is not None

    def fingerprint(self) -> str:
        """16 hex digits over sizes and sampled blocks (of objects: entity tags) of all files, in order, and over what is read of them."""
        return fingerprint_json(
            [
                [f.fingerprint() for f in self._files],
                self._fields,
                self.spec.targets,
                self.spec.weights,
                self.dtype,
            ]
        )

    def stamps(self) -> dict[str, list[int | str]]:
        """Size and time of writing (of an object: entity tag) of each file, as they are now, by its path: what a later look at the same
        files is compared with. No part of the fingerprint, because copies on other machines have other times."""
        stamps = {str(f.path).encode("utf-8", "backslashreplace").decode(): f.stamp() for f in self._files}
        return {path: stamp for path, stamp in stamps.items() if stamp is not None}

    def read(self, start: int, end: int) -> RowBatch:
        """The rows [start, end). Inside one file, and as they are stored, without a copy."""
        if not 0 <= start <= end <= self.n_rows:
            raise DataError(f"rows {start:,} to {end:,} were asked of shards with {self.n_rows:,}")
        parts: list[tuple[_Shard, str, int, int]] = []
        at = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            begin = int(self._ends[at - 1]) if at else 0
            stop = min(end, int(self._ends[at]))
            parts.append((self._files[at], self._fields[at], start - begin, stop - begin))
            start, at = stop, at + 1

        def beside(what: str, name: str | None, width: int) -> np.ndarray | None:
            if name is None:
                return None
            return _joined([as_f64(f.read(f.find(name, what), a, b)) for f, _, a, b in parts], width, "f64")

        x = _joined([self._converted(f.read(name, a, b)) for f, name, a, b in parts], self.width, self.dtype)
        w = beside("weights", self.spec.weights, 1)
        return RowBatch(x=x, y=beside("targets", self.spec.targets, self.n_targets), w=None if w is None else w[:, 0])

    def first_unusable(self, start: int, end: int) -> str | None:
        """Where the first NaN, infinity or weight below zero among the rows [start, end) stands: file and row. For a sentence: reads them
        again."""
        batch = self.read(start, end)
        bad = np.zeros(end - start, bool)
        for values in (batch.x, batch.y, batch.w):
            if values is not None:
                bad |= ~np.isfinite(as_f64(values).reshape(end - start, -1)).all(axis=1)
        if batch.w is not None:
            bad |= batch.w < 0
        if not bad.any():
            return None
        row = start + int(np.argmax(bad))
        at = int(np.searchsorted(self._ends, row, side="right"))
        return f"row {row - (int(self._ends[at - 1]) if at else 0):,} of {self.spec.paths[at]}"

    def _converted(self, rows: np.ndarray) -> np.ndarray:
        if dtype_name(rows.dtype) == self.dtype:
            return rows
        return as_f64(rows).astype(_OF_NAME[self.dtype])


def _joined(parts: list[np.ndarray], width: int, dtype: str) -> np.ndarray:
    if not parts:
        return np.empty((0, width), np.uint16 if dtype == "bf16" else _OF_NAME[dtype])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _same(files: Sequence[_Shard], values: Sequence[Any], what: str, remedy: str = "") -> Any:
    for file, value in zip(files, values, strict=True):
        if value != values[0]:
            raise DataError(f"{files[0].path} has {values[0]} {what}, {file.path} has {value}{remedy}")
    return values[0]


def _same_width(files: Sequence[_Shard], shapes: Sequence[tuple[int, int]], what: str) -> int:
    """The width of all. An empty file may not know its own: 0."""
    known = [(file, width) for file, (rows, width) in zip(files, shapes, strict=True) if rows or width]
    if not known:
        raise DataError(
            f"{files[0].path} has no rows, and nothing says how many {what} they would have: give a shard with rows"
        )
    return _same([file for file, _ in known], [width for _, width in known], what)


def _require_said(files: Sequence[_Shard], stored: Sequence[str], rows: str | None) -> None:
    """Rows count as bfloat16 only where the file or the user says so; other rows are not converted to it."""
    for file, dtype in zip(files, stored, strict=True):
        if rows == "bf16" and dtype != "bf16":
            raise ConfigError(f"{file.path} holds {dtype} rows: they can be converted to f64, f32 or f16, not to bf16")
        if rows != "bf16" and dtype == "bf16" and not file.says_bfloat16:
            raise DataError(
                f"{file.path} holds uint16, which may be whole numbers: save them as float32, or say with --rows bf16 that they are the "
                "bits of bfloat16"
            )


def _matching(patterns: Sequence[str], out: Path | None) -> list[str]:
    """The shards that files, folders, globs and URLs name. A folder, a prefix or a glob leaves out results."""
    found: list[str] = []
    for pattern in patterns:
        path, store = Path(pattern), store_of(pattern)
        if store is not None:
            inside = _in_store(pattern, store)
        elif path.is_dir():
            inside = [str(p) for p in sorted(path.iterdir()) if p.suffix in _SUFFIXES]
        elif path.exists():
            inside = [pattern]
            # A shell that expands a glob names the result of the run before among the shards.
            if out is not None and len(patterns) > 1 and out.exists() and path.samefile(out) and _is_result(pattern):
                continue
        else:
            inside = [str(p) for p in sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))))]
        if inside != [pattern]:
            inside = [place for place in inside if not _is_result(place)]
        if not inside:
            raise ConfigError(f"no shards match {pattern}: give .npy, .safetensors or .parquet files, folders or globs")
        found += inside
    wrong = [place for place in found if not place.endswith(_SUFFIXES)]
    if wrong:
        raise ConfigError(f"{wrong[0]} is none of {', '.join(_SUFFIXES)}")
    return [place if store_of(place) is not None else str(Path(place).absolute()) for place in found]


def _in_store(pattern: str, store: str) -> list[str]:
    """The URLs of the objects that a URL names."""
    if store not in STORES:
        raise ConfigError(
            f"{pattern}: there is no store {store}://. There are {', '.join(f'{name}://' for name in STORES)}, and plain paths"
        )
    _, root, objects = find_objects(pattern, suffixes=_SUFFIXES, what=f"shards {pattern}")
    return [f"{root}/{path}" for path, _, _ in objects]


def _is_result(place: str) -> bool:
    return place.endswith(".safetensors") and is_result(_opened(place))


def _opened(place: str) -> ByteFile:
    """A file at the size that it has now, without a descriptor, or an object."""
    if store_of(place) is not None:
        return open_object(place)
    with RawFile(place, follow=True) as now:
        file = RawFile(place, follow=True, size=now.size)
        file.size, file.version = now.size, now.version
    return file


# -------------------------------------------------------------------------------------------------- shards


class _Shard:
    """One shard: a matrix of rows in a file or an object, and where there are columns the targets and weights beside it.

    Holds no descriptor. A `field` is a column, several joined by commas, or "" for the one array of a .npy.
    """

    def __init__(self, path: str) -> None:
        self.path: str = path
        self._stored = store_of(path) is not None
        self._suffix = Path(path).suffix
        self._widths: dict[str, int] = {}
        self._file = _opened(path)
        try:
            self._rows = open_rows(self._file)
        except Undecodable as error:
            raise DataError(f"{path} cannot be read as {self._suffix}: it {error.reason}") from error
        self._check()

    def _check(self) -> None:
        if self._suffix != ".npy":
            return
        dtype, shape = next((c.dtype, (c.rows, *(c.shape or ()))) for c in self._rows.schema.values())
        if len(self._rows.schema) != 1 or len(shape) != 2 or shape[1] < 1:
            raise DataError(f"{self.path} holds an array of shape {shape}; rows are a matrix")
        if not dtype.isnative:
            raise DataError(f"{self.path} is stored in another byte order, or by columns: save it as plain C order")
        try:
            dtype_name(dtype)
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from None

    @property
    def says_bfloat16(self) -> bool:
        """Whether the file itself tells bfloat16 from whole numbers of 16 bits."""
        return self._suffix == ".safetensors"

    def find(self, field: str | None, what: str) -> str:
        """The field that holds the rows, the targets or the weights. ConfigError asks for what was meant."""
        if self._suffix == ".npy":
            if field is not None:
                raise ConfigError(
                    f"{self.path} is a .npy file and has no field {field!r} for {what}; only .safetensors and .parquet do"
                )
            return ""
        schema = self._rows.schema
        if self._suffix == ".safetensors":
            floats = sorted(n for n, column in schema.items() if column.stored_as in _FLOATS)
            wide = [n for n in floats if len(schema[n].shape or ()) == 1]
            if field is None:
                if len(wide) != 1:
                    raise ConfigError(
                        f"{self.path} holds {len(wide)} matrices ({', '.join(wide[:8])}): name one with --field"
                    )
                return wide[0]
            if field not in floats or len(schema[field].shape or ()) > 1:
                raise ConfigError(
                    f"{self.path} has no float matrix {field!r} for {what}; it has {', '.join(floats[:8])}"
                )
            return field
        if field is None:
            lists = [n for n, column in schema.items() if column.shape != ()]
            if len(lists) != 1:
                raise ConfigError(
                    f"{self.path} has {len(lists)} columns of lists: name the rows with --field (several columns: a,b,c)"
                )
            return lists[0]
        missing = [n for n in field.split(",") if n not in schema]
        if missing:
            raise ConfigError(
                f"{self.path} has no column {missing[0]!r} for {what}; it has {', '.join(list(schema)[:8])}"
            )
        return field

    def shape(self, field: str) -> tuple[int, int]:
        """Rows and width. Lists of any length have the width of the first row; 0 where there is none."""
        columns = [self._rows.schema[name] for name in _names(field)]
        widths = [math.prod(c.shape) if c.shape is not None else 0 for c in columns]
        if all(widths) or not columns[0].rows:
            return columns[0].rows, sum(widths) if all(widths) else 0
        if field not in self._widths:
            self._widths[field] = self.read(field, 0, min(columns[0].rows, _ROWS_LOOKED_AT)).shape[1]
        return columns[0].rows, self._widths[field]

    def dtype(self, field: str) -> str:
        if self._suffix != ".parquet":
            return dtype_name(self._rows.schema[_names(field)[0]].dtype)
        floats = [self._rows.schema[name].dtype for name in _names(field)]
        return dtype_name(np.result_type(*(d if d.kind == "f" else np.dtype("f8") for d in floats)))

    def read(self, field: str, start: int, end: int) -> np.ndarray:
        """The rows [start, end) as a matrix."""
        try:
            found = self._rows.read(start, end, _names(field))
        except Undecodable as error:
            raise DataError(f"{self.path} cannot be read as {self._suffix}: it {error.reason}") from error
        parts = [self._matrix(name, column, end - start) for name, column in found.items()]
        matrix = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if matrix.shape[1] != self._widths.get(field, matrix.shape[1]):
            raise DataError(
                f"{self.path} has rows of {matrix.shape[1]} numbers from row {start:,} on, the first one has {self._widths[field]}"
            )
        return matrix

    def _matrix(self, name: str, column: np.ndarray | Ragged, rows: int) -> np.ndarray:
        if isinstance(column, Ragged):
            width = len(column.values) // max(rows, 1)
            if (np.diff(column.offsets) != width).any():
                raise DataError(f"{self.path}: the lists of {name!r} are not of one length")
            column = column.values
        if self._suffix == ".parquet" and column.dtype.kind in "iub":
            column = column.astype(np.float64)
        if column.dtype.kind not in "fu":
            raise DataError(f"column {name!r} of {self.path} holds {self._rows.schema[name].dtype}, not numbers")
        return column.reshape(rows, -1) if column.size else np.empty((rows, self._widths.get(name, 0)), column.dtype)

    def fingerprint(self) -> str | list[int | str]:
        """Of a file: 16 hex digits over its size and sampled blocks. Of an object: its size and entity tag."""
        if self._stored:
            return [self._file.size, str(self._file.version)]
        return file_fingerprint(Path(self.path), Path(self.path).stat().st_size)

    def stamp(self) -> list[int | str] | None:
        """Size and time of writing (of an object: entity tag) as they are now."""
        if self._stored:
            now = open_object(self.path)
            return [now.size, str(now.version)]
        try:
            status = Path(self.path).stat()
        except OSError:
            return None  # it is gone: the reader that opens it names it
        return [status.st_size, status.st_mtime_ns]


def _names(field: str) -> list[str]:
    return field.split(",") if field else ["x"]


def first_written(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first file whose size or time of writing is another; files under other paths are left to the fingerprint."""
    return next((path for path, stamp in now.items() if path in then and list(then[path]) != list(stamp)), None)


def saved_stamps(path: Path) -> dict[str, list[int | str]]:
    """The stamps of the shards when a pass was begun; {} without a file."""
    try:
        return msgspec.convert(read_json(path, 256 << 20), dict[str, list[int | str]])
    except FileNotFoundError:
        return {}
    except (ValueError, FileCorrupt) as error:
        raise FileCorrupt(
            f"{path} does not say how the shards of the pass stood ({error}): remove {path.parent}, or give --replace to begin again"
        ) from error


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
