"""Columns of pyarrow tables as numpy arrays, for formats that decode rows in pieces (row groups, record batches)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import DataError
from headrace.formats.byte_file import ByteFile, Undecodable, first_line
from headrace.formats.rows import Column, Ragged, chosen

if TYPE_CHECKING:
    import pyarrow as pa


class PiecedRows:
    """Rows of a file that is decoded piece by piece. The last piece is kept."""

    piece_name = "piece"

    def __init__(self, file: ByteFile, schema: pa.Schema, columns: Sequence[str] | None, sizes: Sequence[int]) -> None:
        """Args:
        file: The file.
        schema: Its schema.
        columns: Columns to read; all unless given.
        sizes: Rows of each piece.
        """
        self.file = file
        self._ends = list(accumulate(sizes))
        self.rows = self._ends[-1] if self._ends else 0
        try:
            names = chosen(file.path, schema.names, columns)
        except UnicodeDecodeError as error:
            raise Undecodable(file.path, "has a column whose name is not UTF-8") from error
        self.schema = {name: _described(schema.field(name).type, self.rows) for name in names}
        self._held: tuple[int, tuple[str, ...], dict[str, np.ndarray | Ragged]] = (-1, (), {})

    def decode(self, piece: int, names: tuple[str, ...]) -> pa.Table:
        """Read and decode one piece."""
        raise NotImplementedError

    def read(self, start: int, stop: int, columns: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
        names = tuple(columns)
        parts: list[dict[str, np.ndarray | Ragged]] = []
        piece = bisect_right(self._ends, start)
        while start < stop:
            begins, end = self._ends[piece - 1] if piece else 0, min(stop, self._ends[piece])
            if end > start:
                held = self._piece(piece, names)
                parts.append({name: held[name][start - begins : end - begins] for name in names})
            start, piece = end, piece + 1
        if not parts:
            return {name: _nothing(self.schema[name]) for name in names}
        return parts[0] if len(parts) == 1 else {name: _joined([part[name] for part in parts]) for name in names}

    def _piece(self, piece: int, names: tuple[str, ...]) -> dict[str, np.ndarray | Ragged]:
        import pyarrow as pa

        if self._held[:2] != (piece, names):
            self._held = (-1, (), {})  # freed first: two pieces at once would take twice the memory
            expected = self._ends[piece] - (self._ends[piece - 1] if piece else 0)
            try:
                table = self.decode(piece, names)
                if len(table) != expected:
                    raise ValueError(f"it holds {len(table):,} rows, {expected:,} were announced")
                self._held = (piece, names, {name: self._numpy(name, table.column(name)) for name in names})
            except (pa.ArrowException, OSError, ValueError, IndexError, KeyError, MemoryError) as error:
                raise Undecodable(
                    self.file.path, f"{self.piece_name} {piece} cannot be decoded: {first_line(error)}"
                ) from error
        return self._held[2]

    def _numpy(self, name: str, column: pa.ChunkedArray) -> np.ndarray | Ragged:
        import pyarrow as pa

        try:
            return _as_numpy(column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks))
        except _Unfit as error:
            raise DataError(
                f"column {name!r} of {self.file.path} {error}. Change the file, or leave the column out with columns=."
            ) from error


class _Unfit(Exception):
    """A column holds values that an array cannot hold."""


def _described(kind: pa.DataType, rows: int) -> Column:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inner = kind.value_type if _is_list(kind) else kind
    known = _is_number(inner)
    dtype = np.dtype(inner.to_pandas_dtype()) if known else np.dtype(object)
    if _is_list(kind) and known:
        return Column(dtype=dtype, shape=(kind.list_size,) if pa.types.is_fixed_size_list(kind) else None, rows=rows)
    return Column(dtype=dtype, shape=(), rows=rows)


def _as_numpy(array: pa.Array) -> np.ndarray | Ragged:
    """The column as an array, without a copy if Arrow and numpy have the same layout. _Unfit if an array cannot hold its values."""
    import pyarrow as pa

    kind = array.type
    if isinstance(array, pa.DictionaryArray):
        if array.null_count:
            raise _Unfit(f"has {array.null_count:,} nulls")
        words = _as_numpy(array.dictionary)
        if isinstance(words, Ragged):
            raise _Unfit(f"is {kind}, which has no place in a batch")
        return words[array.indices.to_numpy(zero_copy_only=False)]
    if _is_number(kind):
        if array.null_count and not pa.types.is_floating(kind):
            raise _Unfit(f"has {array.null_count:,} nulls, and {kind} has no value for one")
        return array.to_numpy(zero_copy_only=False)
    if array.null_count:
        raise _Unfit(f"has {array.null_count:,} nulls")
    if _is_list(kind) and _is_number(kind.value_type):
        is_fixed = pa.types.is_fixed_size_list(kind)
        values = array.flatten()
        if values.null_count and (is_fixed or not pa.types.is_floating(kind.value_type)):
            raise _Unfit(f"has {values.null_count:,} nulls in its lists")
        flat = values.to_numpy(zero_copy_only=False)
        if is_fixed:
            return flat.reshape(len(array), kind.list_size)
        offsets = np.asarray(array.offsets, np.int64)
        return Ragged(values=flat, offsets=offsets - offsets[0])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        return np.array([*array.to_pylist(), None], dtype=object)[:-1]
    raise _Unfit(f"is {kind}, which has no place in a batch")


def _nothing(column: Column) -> np.ndarray | Ragged:
    if column.shape is None:
        return Ragged(values=np.empty(0, column.dtype), offsets=np.zeros(1, np.int64))
    return np.empty((0, *column.shape), column.dtype)


def _joined(parts: list[Any]) -> np.ndarray | Ragged:
    if not isinstance(parts[0], Ragged):
        return np.concatenate(parts)
    ends = np.cumsum([0, *(len(p.values) for p in parts)])
    offsets = [parts[0].offsets[:1], *(p.offsets[1:] + at for p, at in zip(parts, ends, strict=False))]
    return Ragged(values=np.concatenate([p.values for p in parts]), offsets=np.concatenate(offsets))


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
