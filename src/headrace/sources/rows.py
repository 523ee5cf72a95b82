"""What do several columns of a row say?

    source = open_source(Source("jsonl:reviews/*.jsonl"), rows=RowShape(columns=("text", "label"), judge=judge))
    source.read(17)      one JSON object a row: '{"text": "fine", "label": 1}'

Chunks, hashes, holes, packed files and object stores are those of the text readers; only decoding differs. A row without one
of the columns is bad, and so is one of which `judge` has something to say: on_bad decides what that means, and the error names
file, line and remedy. Columns may hold text, numbers, and lists of them. `a.b` is field b of object a.

Of parquet the pages from the first wanted column to the last are read; of Arrow files whole record batches, because a batch is
one piece to pyarrow. Dictionary-encoded Arrow columns lie elsewhere and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from headrace.errors import DataChanged, DataError
from headrace.order import chunk_hash
from headrace.sources.batches import ArrowBatches, batch_of, messages_of
from headrace.sources.columns import Pages, ParquetColumn, ParquetColumns, no_such_column
from headrace.sources.lines import JsonLines
from headrace.sources.messages import BATCH, SCHEMA
from headrace.sources.raw import ACCEPT_DATA, ByteFile
from headrace.sources.reader import BadRow, FileScan, Loaded, Undecodable, all_bad, first_line
from headrace.sources.spec import nearest

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArrowRows", "JsonRows", "ParquetRows", "RowShape"]

_MAX_CHUNK_TEXT = 1 << 30
"""Bytes of JSON that a chunk may become: half a megabyte of parquet can stand for terabytes of repeated text."""
_MAX_BATCH_BYTES = 1 << 30
_MAX_VALUES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Which columns are read, and what makes a row of them bad."""

    columns: tuple[str, ...]
    judge: Callable[[Mapping[str, Any]], str]
    """Why a row cannot be used ("its label is null"), or nothing. Pure: it says the same of the same row."""

    def row(self, found: Any) -> tuple[str | None, str]:
        """The JSON of a row, or why there is none."""
        values: dict[str, Any] = {}
        for column in self.columns:
            value = found
            for key in column.split(".") if not (isinstance(found, dict) and column in found) else [column]:
                if not isinstance(value, dict) or key not in value:
                    have = ", ".join(repr(k[:40]) for k in nearest(key, value)[:8]) if isinstance(value, dict) else ""
                    return (
                        None,
                        f"it has no key {column!r}; it has {have or 'none at all'} (set text_key and label_key)",
                    )
                value = value[key]
            values[column] = value
        try:
            reason = self.judge(values)
            return (None, reason) if reason else (orjson.dumps(values).decode(), "")
        except (TypeError, ValueError, UnicodeError) as error:
            return None, f"it holds what JSON cannot ({first_line(error)})"

    def rows(self, found: list[Any]) -> tuple[list[str | None], list[BadRow]]:
        """The same for all rows of a chunk."""
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


class JsonRows(JsonLines):
    """Several fields of JSON objects, one object a line."""

    def __init__(self, *, shape: RowShape, max_line_bytes: int) -> None:
        super().__init__(text_key=shape.columns[0], max_line_bytes=max_line_bytes)
        self._shape = shape
        self._whole = msgspec.json.Decoder(dict[str, Any])

    def _decode_all(self, data: bytearray, rows: int) -> list[str | None] | None:
        return None  # every row is looked at by itself

    def _decode_line(self, line: bytes) -> tuple[str | None, str]:
        try:
            found = self._whole.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            text, reason = super()._decode_line(line)  # it knows what to call what is wrong
            return None, reason or f"it is no object with the keys {', '.join(self._shape.columns)} ({text!r:.40})"
        return self._shape.row(found)


class ParquetRows(ParquetColumn):
    """Several columns of parquet files."""

    def __init__(self, *, shape: RowShape) -> None:
        super().__init__(text_key=shape.columns[0])
        self._shape = shape

    def parameters(self) -> dict[str, Any]:
        return {"columns": list(self._shape.columns)}

    def _described(self, file: ByteFile) -> ParquetColumns:
        return ParquetColumns(file, self._shape.columns, text=False)

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        group, data = loaded.payload
        column = self._column(file)
        try:
            parquet = pq.ParquetFile(
                Pages(data, column.pages[group].offset, file.size),
                metadata=column.for_pyarrow,
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=list(column.leaves) if column.pages[group].has_dictionary else None,
            )
            table = parquet.read_row_group(group, columns=list(column.leaves), use_threads=False)
            texts, bad = self._shape.rows(_rows(table))
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
            return all_bad(rows, f"row group {group} cannot be decoded ({first_line(error)})")
        if len(texts) != rows:
            return all_bad(rows, f"row group {group} holds {len(texts):,} rows, its footer says {rows:,}")
        return texts, bad


class ArrowRows(ArrowBatches):
    """Several columns of Arrow IPC files."""

    def __init__(self, *, shape: RowShape) -> None:
        super().__init__(text_key=shape.columns[0])
        self._shape = shape

    def parameters(self) -> dict[str, Any]:
        return {"columns": list(self._shape.columns)}

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        self._schema_of(file)
        found: list[tuple[int, int, int, int, int]] = []
        row = 0
        for at, end, body, kind, metadata in messages_of(file):
            if kind == BATCH:
                rows = batch_of(file, at, metadata).rows
                if body > _MAX_BATCH_BYTES:
                    raise Undecodable(
                        file.path, f"has a record batch of {body:,} bytes at byte {at:,}", "Write smaller ones"
                    )
                if rows:
                    found.append((at, end, rows, row, body))
                row += rows
        start, stop, rows_, line, sizes = (np.array([f[i] for f in found], dtype=np.int64) for i in range(5))
        return FileScan(start=start, end=stop, rows=rows_, line=line, size=sizes)

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        if not 0 <= start < end <= file.size:
            raise DataChanged(
                f"{file.path} has {file.size:,} bytes and no longer holds a record batch at bytes {start:,} to {end:,}. Restore it, or "
                f"{ACCEPT_DATA}."
            )
        data = file.read(start, end - start)
        return Loaded(hash=chunk_hash(memoryview(data)), size=len(data), payload=data)

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa

        schema = self._schema_of(file)
        try:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(loaded.payload)), schema)
            batch.validate(full=True)
            wanted = [c if c in schema.names else c.split(".")[0] for c in self._shape.columns]
            texts, bad = self._shape.rows(_rows(batch.select(list(dict.fromkeys(wanted)))))
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
            return all_bad(rows, f"the record batch cannot be decoded ({first_line(error)})")
        if len(texts) != rows:
            return all_bad(rows, f"the record batch says {rows:,} rows and holds {len(texts):,}")
        return texts, bad

    def _schema_of(self, file: ByteFile) -> pa.Schema:
        import pyarrow as pa

        found = next((m for _, _, _, kind, m in messages_of(file) if kind == SCHEMA), None)
        if found is None:
            raise Undecodable(file.path, "is no Arrow file or stream: it holds no schema")
        try:
            head = (0xFFFFFFFF).to_bytes(4, "little") + len(found).to_bytes(4, "little")
            schema = pa.ipc.read_schema(pa.py_buffer(head + found))
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise Undecodable(file.path, f"is damaged: its schema does not parse ({first_line(error)})") from error
        for column in self._shape.columns:
            name = column if column in schema.names else column.split(".")[0]
            if name not in schema.names:
                raise no_such_column(file, column, schema.names, text=False)
            if pa.types.is_dictionary(schema.field(name).type):
                raise DataError(
                    f"column {name!r} of {file.path} is dictionary-encoded, which is not read; write it as plain values."
                )
        return schema


def _rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows as objects."""
    import pyarrow as pa

    names = table.schema.names
    columns = []
    for name in names:
        column = table.column(name)
        arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        columns.append([value for array in arrays for value in _values(array)])
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(array: pa.Array) -> list[Any]:
    """The array's values. Those of a dictionary are made once, however often they stand in it."""
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
