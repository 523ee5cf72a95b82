"""Text and labelled rows of Arrow IPC files and streams. A chunk is a record batch.

Of a batch only the buffers of the text column are read and hashed. Labelled rows read whole batches, because pyarrow decodes a batch
as one piece. Dictionary-encoded columns are refused: their values lie in other messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from headrace.errors import DataChanged, DataError
from headrace.formats.arrow import (
    PlacedMessage,
    bad_batch,
    messages_of,
    read_batch,
    read_schema,
    schema_message,
)
from headrace.formats.arrow_messages import BATCH
from headrace.formats.byte_file import ACCEPT_DATA, ByteFile, Undecodable, first_line, most_decoded
from headrace.formats.chunks import BadRow, FileScan, Loaded
from headrace.formats.parquet import no_such_column
from headrace.order import chunk_hash
from headrace.sources.rows import ColumnReader, RowShape, row_objects, texts_of

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_COLUMN_BYTES = 4 << 30
_MAX_BATCH_BYTES = 1 << 30


class ArrowTexts(ColumnReader[Any]):
    """One text column of Arrow IPC files."""

    format = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".ipc", ".feather")
    span = "record batch at bytes"

    def describe(self, file: ByteFile) -> Any:
        return _Column.of(file, self.text_key)

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        head = self.describe(file)
        found: list[tuple[int, int, int, int, int]] = []
        row = 0
        for message in messages_of(file):
            if message.kind == BATCH:
                size, rows = self._size(file, head, message), message.batch.rows
                if rows:
                    found.append((message.start, message.end, rows, row, size))
                row += rows
        start, end, rows, line, sizes = np.array(found, dtype=np.int64).reshape(-1, 5).T.copy()
        return FileScan(start=start, end=end, rows=rows, line=line, size=sizes)

    def _size(self, file: ByteFile, head: Any, message: PlacedMessage) -> int:
        """The bytes of a batch that are read, once its claims were checked. `head`: as `describe` returns it."""
        return sum(length for _, length in head.buffers(file, message))

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        column = self.described(file)
        try:
            message = next(messages_of(file, start, end))
            if message.kind != BATCH or message.end != end:
                raise ValueError("no record batch")
            places = column.buffers(file, message)
        except (StopIteration, ValueError, Undecodable) as error:
            raise DataChanged(
                f"{file.path} no longer holds a record batch at bytes {start:,} to {end:,}: it was written to since its rows were "
                f"counted. Restore it, or {ACCEPT_DATA}."
            ) from error
        first = min((offset for offset, length in places if length), default=0)
        last = max((offset + length for offset, length in places if length), default=0)
        data = file.read(first, last - first)
        hasher = xxhash.xxh3_64(message.metadata)
        view = memoryview(data)
        buffers = [view[offset - first : offset - first + length] if length else None for offset, length in places]
        for buffer in buffers:
            hasher.update(b"" if buffer is None else buffer)
        return Loaded(hash=hasher.intdigest(), payload=(message.batch, buffers))

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa

        batch, buffers = loaded.payload
        column = self.described(file)

        def decode() -> tuple[list[str | None], list[BadRow]]:
            plain = [None if b is None else _plain(b, batch.codec) for b in buffers]
            parents, own = plain[: len(column.parents)], plain[len(column.parents) :]
            length, nulls = batch.nodes[len(column.arrays) - 1]
            array = pa.Array.from_buffers(
                column.read_as, length, [b and pa.py_buffer(b) for b in own], null_count=nulls
            )
            array.validate(full=True)
            texts, why = texts_of(array)
            for bits in parents:
                _hide(texts, why, bits)
            return texts, [BadRow(row=row, line=row, reason=why[row]) for row in sorted(why)]

        return self.checked("the record batch", rows, decode)


class ArrowLabelled(ArrowTexts):
    """Several columns of Arrow IPC files."""

    def __init__(self, *, shape: RowShape) -> None:
        super().__init__(shape=shape)
        self._columns = shape.columns
        self._rows = shape.rows

    def describe(self, file: ByteFile) -> tuple[bytes, list[str]]:
        """The schema's message, and the columns of the file that are needed."""
        import pyarrow as pa

        schema = read_schema(file)
        names = [column if column in schema.names else column.split(".")[0] for column in self._columns]
        for column, name in zip(self._columns, names, strict=True):
            if name not in schema.names:
                raise no_such_column(file.path, column, schema.names, text=False)
            if pa.types.is_dictionary(schema.field(name).type):
                raise DataError(
                    f"column {name!r} of {file.path} is dictionary-encoded, which is not read; write it as plain values."
                )
        return schema_message(file), list(dict.fromkeys(names))

    def _size(self, file: ByteFile, head: Any, message: PlacedMessage) -> int:
        if message.body > _MAX_BATCH_BYTES:
            raise Undecodable(
                file.path,
                f"has a record batch of {message.body:,} bytes at byte {message.start:,}",
                "Write smaller ones",
            )
        return message.body

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        if not 0 <= start < end <= file.size:
            raise DataChanged(
                f"{file.path} has {file.size:,} bytes and no longer holds a record batch at bytes {start:,} to {end:,}. Restore it, or "
                f"{ACCEPT_DATA}."
            )
        data = file.read(start, end - start)
        return Loaded(hash=chunk_hash(memoryview(data)), payload=data)

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        opening, names = self.described(file)

        def decode() -> tuple[list[str | None], list[BadRow]]:
            return self._rows(row_objects(read_batch(file, opening, loaded.payload).select(names)))

        return self.checked("the record batch", rows, decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """The text column among the arrays of a batch, which lie depth first."""

    arrays: tuple[tuple[int, bool], ...]
    """Of every array up to the column's own, which is the last: its buffers, and whether the batch says how many more it has."""
    parents: tuple[int, ...]
    """Places in `arrays` of the structs around it, outermost first."""
    read_as: pa.DataType
    """Its type as bytes: whether a row is UTF-8 is checked row by row."""

    @classmethod
    def of(cls, file: ByteFile, text_key: str) -> _Column:
        schema = read_schema(file)
        try:
            return cls._named(file, list(schema), [text_key] if text_key in schema.names else text_key.split("."))
        except (ValueError, MemoryError) as error:  # a name within a struct that is not UTF-8
            raise Undecodable(file.path, f"is damaged: its schema does not parse ({first_line(error)})") from error

    @classmethod
    def _named(cls, file: ByteFile, fields: list[pa.Field], names: list[str]) -> _Column:
        import pyarrow as pa

        text_key = ".".join(names)
        arrays: list[tuple[int, bool]] = []
        parents: list[int] = []
        for depth, name in enumerate(names):
            present = [field.name for field in fields]
            if name not in present:
                raise no_such_column(file.path, text_key, present, text=True)
            index = present.index(name)
            for before in fields[:index]:
                arrays += _layout(before.type)
            kind = fields[index].type
            if depth < len(names) - 1:
                if not pa.types.is_struct(kind):
                    raise DataError(
                        f"column {name!r} of {file.path} holds {kind}, expected a struct with {names[depth + 1]!r} in it"
                    )
                parents.append(len(arrays))
                arrays.append((1, False))
                fields = [kind.field(i) for i in range(kind.num_fields)]
        read_as = _as_bytes(kind)
        if read_as is None:
            raise DataError(
                f"column {text_key!r} of {file.path} holds {kind}, expected one text a row. Set text_key to a column of strings"
                f"{', or write it without a dictionary' if pa.types.is_dictionary(kind) else ''}."
            )
        return cls(arrays=(*arrays, *_layout(kind)), parents=tuple(parents), read_as=read_as)

    def buffers(self, file: ByteFile, message: PlacedMessage) -> list[tuple[int, int]]:
        """Return (offset in the file, length) of the parents' validities and of the column's own buffers.

        Every claim of the batch is compared with the body of its message first.
        """
        import pyarrow.types as t

        at, batch = message.start, message.batch
        first, views = 0, iter(batch.views)
        own: list[range] = []  # the buffers of each array
        for count, has_views in self.arrays:
            more = next(views, -1) if has_views else 0
            if more < 0:
                raise bad_batch(file, at, "it does not say how many buffers its views have")
            own.append(range(first, first + count + more))
            first += count + more
        if len(own) > len(batch.nodes) or first > len(batch.buffers):
            raise bad_batch(
                file, at, f"it has {len(batch.nodes)} arrays and {len(batch.buffers)} buffers, fewer than its schema"
            )
        numbers = [*(own[parent][0] for parent in self.parents), *own[-1]]
        places = [batch.buffers[number] for number in numbers]
        for offset, length in places:
            if offset < 0 or length < 0 or offset + length > message.body:
                raise bad_batch(
                    file,
                    at,
                    f"a buffer should lie at bytes {offset:,} to {offset + length:,} of a body of {message.body:,}",
                )
        if sum(length for _, length in places) > _MAX_COLUMN_BYTES:
            raise bad_batch(file, at, f"its text has more than the {_MAX_COLUMN_BYTES:,} bytes a chunk may have")
        width = 16 if t.is_binary_view(self.read_as) else 4
        if not batch.codec and batch.rows * width > places[len(self.parents) + 1][1]:
            raise bad_batch(file, at, f"it claims {batch.rows:,} rows, more than its buffers can hold")
        return [(message.end - message.body + offset, length) for offset, length in places]


def _layout(kind: pa.DataType) -> list[tuple[int, bool]]:
    """The arrays of a type, its own first: how many buffers each has, and whether the batch says how many more."""
    import pyarrow as pa
    import pyarrow.types as t

    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    stored = _as_bytes(kind)
    has_views = stored is not None and t.is_binary_view(stored)
    if t.is_null(kind) or t.is_run_end_encoded(kind):
        buffers = 0
    elif t.is_struct(kind) or t.is_fixed_size_list(kind):
        buffers = 1
    elif t.is_union(kind):
        buffers = 1 if kind.mode == "sparse" else 2
    elif (stored is not None and not has_views) or t.is_list_view(kind) or t.is_large_list_view(kind):
        buffers = 3
    else:  # views, numbers, times, lists, maps, dictionaries' indices
        buffers = 2
    children = [] if t.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    return [(buffers, has_views), *(array for child in children for array in _layout(child))]


def _as_bytes(kind: pa.DataType) -> pa.DataType | None:
    """The type of the bytes of a text column; None for any other column."""
    import pyarrow as pa
    import pyarrow.types as t

    if t.is_string_view(kind) or t.is_binary_view(kind):
        return pa.binary_view()
    if t.is_string(kind) or t.is_binary(kind):
        return pa.binary()
    return pa.large_binary() if t.is_large_string(kind) or t.is_large_binary(kind) else None


def _plain(buffer: memoryview, codec: str) -> Any:
    """Unpack a buffer. Its first 8 bytes are the unpacked length; -1 if it was not packed."""
    if not codec:
        return buffer
    import pyarrow as pa

    if len(buffer) < 8:
        raise ValueError("a packed buffer of less than 8 bytes")
    size = int.from_bytes(buffer[:8], "little", signed=True)
    if size == -1:
        return buffer[8:]
    if not 0 <= size <= most_decoded(len(buffer)):
        raise ValueError(f"a buffer claims to unpack to {size:,} bytes")
    return pa.Codec(codec).decompress(buffer[8:], decompressed_size=size)


def _hide(texts: list[str | None], why: dict[int, str], validity: Any) -> None:
    """Remove the texts inside structs that are null."""
    if validity is None:
        return
    bits = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), bitorder="little")
    if len(bits) < len(texts):
        raise ValueError("a validity buffer is too short")
    for row in np.flatnonzero(bits[: len(texts)] == 0).tolist():
        texts[row] = None
        why[row] = "its text is null"
