"""Labelled rows: several columns of every row, as one JSON object.

    source = open_source(Source("jsonl:reviews/*.jsonl"), rows=RowShape(columns=("text", "label"), judge=judge))
    source.read(17)      one JSON object a row: '{"text": "fine", "label": 1}'

Chunks, hashes, holes, packed files and object stores work as for text; only decoding differs. A row without one of the columns is bad,
and so is a row for which `judge` returns a reason. Columns may hold text, numbers, and lists of them. `a.b` is field b of object a.

Of parquet the pages from the first wanted column to the last are read, of Arrow files whole record batches (`text_arrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import orjson

from headrace.errors import nearest
from headrace.formats.byte_file import ByteFile, Undecodable, first_line
from headrace.formats.chunks import BadRow, all_bad, not_utf8
from headrace.formats.lines import JsonLines

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
_HEADS_KEPT = 64
_MAX_CHUNK_TEXT = 1 << 30
"""Bytes of JSON that a chunk may become: half a megabyte of parquet can stand for terabytes of repeated text."""
_MAX_VALUES = 1 << 26
_NULL = "its text is null"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Which columns are read, and what makes a row of them bad."""

    columns: tuple[str, ...]
    judge: Callable[[Mapping[str, Any]], str]
    """Returns why a row cannot be used ("its label is null"), or "". A pure function of the row."""

    def row(self, found: Any) -> tuple[str | None, str]:
        """Return the JSON of a row and "", or None and the reason."""
        try:
            values = {column: field_of(found, column) for column in self.columns}
        except KeyError as error:
            return None, f"it has {error.args[0]} (set text_key and label_key)"
        try:
            reason = self.judge(values)
            return (None, reason) if reason else (orjson.dumps(values).decode(), "")
        except (TypeError, ValueError, UnicodeError) as error:
            return None, f"it holds what JSON cannot ({first_line(error)})"

    def rows(self, found: list[Any]) -> tuple[list[str | None], list[BadRow]]:
        """Return the JSON of all rows of a chunk, None where a row is bad, and the bad rows."""
        texts: list[str | None] = []
        bad: list[BadRow] = []
        size = 0
        for at, row in enumerate(found):
            text, reason = self.row(row)
            if text is None:
                bad.append(BadRow(row=at, line=at, reason=reason))
            size += len(text or "")
            if size > _MAX_CHUNK_TEXT:
                raise ValueError(f"its rows unpack to more than {_MAX_CHUNK_TEXT:,} bytes")
            texts.append(text)
        return texts, bad


def field_of(row: Any, path: str) -> Any:
    """Return the field of a row that a path such as `a.b` names; None where `a` is null. KeyError says which keys there are instead."""
    value = row
    for key in [path] if isinstance(row, dict) and path in row else path.split("."):
        if value is None and row is not None:
            return None
        if not isinstance(value, dict) or key not in value:
            keys = [repr(k[:40]) for k in nearest(key, map(str, value))[:8]] if isinstance(value, dict) else []
            raise KeyError(f"no key {path!r}; it has {', '.join(keys) or 'none at all'}")
        value = value[key]
    return value


class ColumnReader(Generic[T]):
    """Base of the readers of parquet and Arrow: one text column, or several columns with `shape`. pyarrow is imported on first use.

    `T`: the description of the columns in the head of a file.
    """

    packings: tuple[str, ...] = ()
    unit = "row"

    def __init__(self, *, text_key: str = "", shape: RowShape | None = None) -> None:
        self.text_key, self._shape = text_key, shape
        self._kept: dict[tuple[str, int, int | str], T] = {}

    def parameters(self) -> dict[str, Any]:
        return {"column": self.text_key} if self._shape is None else {"columns": list(self._shape.columns)}

    def chunk_bytes(self, total: int) -> int:
        return 0

    def describe(self, file: ByteFile) -> T:
        """Read the head of a file."""
        raise NotImplementedError

    def described(self, file: ByteFile) -> T:
        """Return `describe(file)`. The descriptions of up to 64 files are kept."""
        key = (str(file.path), file.size, file.version)
        found = self._kept.get(key)
        if found is None:
            found = self.describe(file)
            if len(self._kept) >= _HEADS_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found

    @staticmethod
    def checked(
        what: str, rows: int, decode: Callable[[], tuple[list[str | None], list[BadRow]]]
    ) -> tuple[list[str | None], list[BadRow]]:
        """Return `decode()`. If it fails, or gives another number of rows, all rows are bad. `what` names the chunk in reasons."""
        import pyarrow as pa

        try:
            texts, bad = decode()
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError, Undecodable) as error:
            return all_bad(rows, f"{what} cannot be decoded ({first_line(error)})")
        if len(texts) != rows:
            return all_bad(rows, f"{what} holds {len(texts):,} rows, {rows:,} were announced")
        return texts, bad


class JsonLabelled(JsonLines):
    """Several fields of JSON objects, one object a line."""

    def __init__(self, *, shape: RowShape) -> None:
        super().__init__(text_key=shape.columns[0])
        self._shape = shape
        self._whole = msgspec.json.Decoder(dict[str, Any])

    def _decode_all(self, data: bytearray, rows: int) -> list[str | None] | None:
        return None  # every row is looked at by itself

    def _decode_line(self, line: bytes) -> tuple[str | None, str]:
        try:
            found = self._whole.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            text, reason = super()._decode_line(line)  # for the reason
            return None, reason or f"it is no object with the keys {', '.join(self._shape.columns)} ({text!r:.40})"
        return self._shape.row(found)


def row_objects(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a table, each as a dict."""
    import pyarrow as pa

    names = table.schema.names
    columns = []
    for name in names:
        column = table.column(name)
        arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        columns.append([value for array in arrays for value in _values(array)])
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(array: pa.Array) -> list[Any]:
    """The values of an array. A value of a dictionary is made once, however often it occurs."""
    import pyarrow as pa

    if len(array) > _MAX_VALUES:
        raise ValueError(f"a column holds {len(array):,} values, more than {_MAX_VALUES:,}")
    if isinstance(array, pa.DictionaryArray):
        words = array.dictionary.to_pylist()
        return [None if i is None else words[i] for i in array.indices.to_pylist()]
    if isinstance(array, pa.ListArray | pa.LargeListArray):
        borders, inner = array.offsets.to_pylist(), _values(array.values)
        empty = array.is_null().to_pylist() if array.null_count else [False] * len(array)
        return [None if gone else inner[a:b] for a, b, gone in zip(borders[:-1], borders[1:], empty, strict=True)]
    if isinstance(array, pa.StructArray) and not array.null_count:
        fields = [array.type.field(i).name for i in range(array.type.num_fields)]
        inside = [_values(array.field(i)) for i in range(len(fields))]
        return [dict(zip(fields, row, strict=True)) for row in zip(*inside, strict=True)]
    return array.to_pylist()


def texts_of(array: pa.Array) -> tuple[list[str | None], dict[int, str]]:
    """Return the texts of an array, None where there is none, and the reason by row."""
    import pyarrow as pa

    if isinstance(array, pa.DictionaryArray):
        values, reasons = texts_of(array.dictionary)
        indices = array.indices.to_pylist()
        texts = [None if i is None else values[i] for i in indices]
        return texts, {row: reasons.get(i, _NULL) for row, i in enumerate(indices) if i is None or i in reasons}
    try:
        texts = array.to_pylist()
        if (
            pa.types.is_binary(array.type)
            or pa.types.is_large_binary(array.type)
            or pa.types.is_binary_view(array.type)
        ):
            texts = [None if text is None else text.decode("utf-8") for text in texts]
    except UnicodeDecodeError:
        return _one_by_one(array)
    if not array.null_count:
        return texts, {}
    return texts, {row: _NULL for row, text in enumerate(texts) if text is None}


def _one_by_one(array: pa.Array) -> tuple[list[str | None], dict[int, str]]:
    texts: list[str | None] = []
    reasons: dict[int, str] = {}
    for row, value in enumerate(array):
        text = None
        buffer = value.as_buffer()
        if buffer is None:
            reasons[row] = _NULL
        else:
            try:
                text = buffer.to_pybytes().decode("utf-8")
            except UnicodeDecodeError as error:
                reasons[row] = not_utf8(error)
        texts.append(text)
    return texts, reasons
