"""Which rows does an Arrow IPC file hold, and what is the text of each?

Both forms are read: the file (`ARROW1` at both ends) and the bare stream, which is what `datasets` keeps in its caches and
in `save_to_disk` folders. A chunk is a record batch. Of it only the buffers of the text column are read and hashed, with
pread; nothing is mapped, and no offset in them is followed before pyarrow's full validation has passed.

The messages are walked from the first to the last; a file's footer, which lists them a second time, only says where they
end. Dictionary-encoded text would need batches that lie elsewhere, and is refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from headrace.errors import DataChanged, DataError
from headrace.sources.columns import texts_of
from headrace.sources.messages import BATCH, DICTIONARY, SCHEMA, Batch, is_big_endian, parse_batch, parse_message
from headrace.sources.raw import ACCEPT_DATA, ByteFile
from headrace.sources.reader import BadRow, FileScan, Loaded, Undecodable, all_bad, first_line
from headrace.sources.spec import nearest

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ArrowBatches", "batch_of", "messages_of"]

_MAGIC = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
_MAX_METADATA = 64 << 20
_MAX_COLUMN_BYTES = 4 << 30
_MAX_BATCH_ROWS = 1 << 26
_SCHEMAS_KEPT = 64


class ArrowBatches:
    """One text column of Arrow IPC files. pyarrow is imported on first use."""

    format = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".ipc", ".feather")
    packings: tuple[str, ...] = ()
    unit = "row"
    span = "record batch at bytes"

    def __init__(self, *, text_key: str) -> None:
        self.text_key = text_key
        self._kept: OrderedDict[tuple[str, int, int | str], _Column] = OrderedDict()
        self._lock = threading.Lock()

    def parameters(self) -> dict[str, Any]:
        return {"column": self.text_key}

    def chunk_bytes(self, total: int) -> int:
        return 0

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        found: list[tuple[int, int, int, int, int]] = []
        row = 0
        column: _Column | None = None
        for at, end, body, kind, metadata in messages_of(file):
            if kind == SCHEMA:
                column = _Column.of(file, metadata, self.text_key)
            elif kind == BATCH:
                if column is None:
                    raise Undecodable(file.path, "is damaged: a record batch comes before any schema")
                batch = batch_of(file, at, metadata)
                size = sum(length for _, length in column.buffers(file, at, batch, end - body, end))
                if batch.rows:
                    found.append((at, end, batch.rows, row, size))
                row += batch.rows
        if column is None:
            raise Undecodable(file.path, "is no Arrow file or stream: it holds no schema")
        start, stop, rows, line, sizes = (np.array([f[i] for f in found], dtype=np.int64) for i in range(5))
        return FileScan(start=start, end=stop, rows=rows, line=line, size=sizes)

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        column = self._column(file)
        try:
            at, stop, body, kind, metadata = next(messages_of(file, start, end))
            if kind != BATCH or (at, stop) != (start, end):
                raise ValueError("no record batch")
            batch = batch_of(file, start, metadata)
            places = column.buffers(file, start, batch, stop - body, stop)
        except (StopIteration, ValueError, Undecodable) as error:
            raise DataChanged(
                f"{file.path} no longer holds a record batch at bytes {start:,} to {end:,}: it was written to since its rows were "
                f"counted. Restore it, or {ACCEPT_DATA}."
            ) from error
        first = min((offset for offset, length in places if length), default=0)
        last = max((offset + length for offset, length in places if length), default=0)
        data = file.read(first, last - first)
        hasher = xxhash.xxh3_64(metadata)
        view = memoryview(data)
        buffers = [view[offset - first : offset - first + length] if length else None for offset, length in places]
        for buffer in buffers:
            hasher.update(b"" if buffer is None else buffer)
        return Loaded(hash=hasher.intdigest(), size=len(data), payload=(batch, buffers))

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa

        batch, buffers = loaded.payload
        column = self._column(file)
        try:
            plain = [None if b is None else _plain(b, batch.codec) for b in buffers]
            parents, own = plain[: len(column.parents)], plain[len(column.parents) :]
            length, nulls = batch.nodes[column.node]
            array = pa.Array.from_buffers(
                column.read_as, length, [b and pa.py_buffer(b) for b in own], null_count=nulls
            )
            array.validate(full=True)
            texts, why = texts_of(array)
            for bits in parents:
                _hide(texts, why, bits)
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
            return all_bad(rows, f"the record batch cannot be decoded ({first_line(error)})")
        if len(texts) != rows:
            return all_bad(rows, f"the record batch says {rows:,} rows and its text column holds {len(texts):,}")
        return texts, [BadRow(row=row, line=row, reason=why[row]) for row in sorted(why)]

    def _column(self, file: ByteFile) -> _Column:
        """What the schema says; that of the last 64 files is kept, because consecutive chunks come from few files."""
        key = (str(file.path), file.size, file.version)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        metadata = next((m for _, _, _, kind, m in messages_of(file) if kind == SCHEMA), None)
        if metadata is None:
            raise Undecodable(file.path, "is no Arrow file or stream: it holds no schema")
        column = _Column.of(file, metadata, self.text_key)
        with self._lock:
            self._kept[key] = column
            while len(self._kept) > _SCHEMAS_KEPT:
                self._kept.popitem(last=False)
        return column


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """Where the text column stands among the arrays and buffers of a batch."""

    node: int
    first_buffer: int
    buffer_count: int
    views_before: int
    """Arrays of views before it; each has as many more buffers as the batch says."""
    parents: tuple[tuple[int, int], ...]
    """(buffer, views before it) of the validity of each struct around it, outermost first."""
    read_as: pa.DataType
    """The bytes of its type: whether a row is UTF-8 is judged row by row."""

    @classmethod
    def of(cls, file: ByteFile, metadata: bytes, text_key: str) -> _Column:
        import pyarrow as pa

        try:
            head = _CONTINUED.to_bytes(4, "little") + len(metadata).to_bytes(4, "little")
            schema = pa.ipc.read_schema(pa.py_buffer(head + metadata))
            big = is_big_endian(metadata)
            names = text_key.split(".") if text_key not in schema.names else [text_key]
            if not big:
                return cls._named(file, list(schema), names, text_key)
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:  # a name that is not UTF-8 among them
            raise Undecodable(file.path, f"is damaged: its schema does not parse ({first_line(error)})") from error
        raise Undecodable(file.path, "was written on a big-endian machine", "Write it again on another")

    @classmethod
    def _named(cls, file: ByteFile, fields: list[pa.Field], names: list[str], text_key: str) -> _Column:
        import pyarrow as pa

        place = np.zeros(3, dtype=np.int64)  # arrays, buffers and arrays of views that come before
        parents: list[tuple[int, int]] = []
        for depth, name in enumerate(names):
            present = [field.name for field in fields]
            if name not in present:
                listed = ", ".join(map(repr, nearest(name, present)[:8])) or "none at all"
                raise DataError(
                    f"{file.path} has no column {text_key!r}; it has {listed}. Set text_key to the one that holds the text."
                )
            index = present.index(name)
            for before in fields[:index]:
                place += _layout(before.type)
            kind = fields[index].type
            if depth < len(names) - 1:
                if not pa.types.is_struct(kind):
                    raise DataError(
                        f"column {name!r} of {file.path} holds {kind}, expected a struct with {names[depth + 1]!r} in it"
                    )
                parents.append((int(place[1]), int(place[2])))
                place += (1, 1, 0)
                fields = [kind.field(i) for i in range(kind.num_fields)]
        read_as = _as_bytes(kind)
        if read_as is None:
            raise DataError(
                f"column {text_key!r} of {file.path} holds {kind}, expected one text a row. Set text_key to a column of strings"
                f"{', or write it without a dictionary' if pa.types.is_dictionary(kind) else ''}."
            )
        nodes, buffers, views = map(int, place)
        return cls(
            node=nodes,
            first_buffer=buffers,
            buffer_count=_layout(kind)[1],
            views_before=views,
            parents=tuple(parents),
            read_as=read_as,
        )

    def buffers(self, file: ByteFile, at: int, batch: Batch, start: int, end: int) -> list[tuple[int, int]]:
        """(offset in the file, length) of the parents' validities and of the column's own buffers, held against the body."""
        first = self.first_buffer + sum(batch.views[: self.views_before])
        count = self.buffer_count
        if _has_views(self.read_as):
            if self.views_before >= len(batch.views):
                raise _bad_batch(file, at, "it does not say how many buffers its views have")
            count += batch.views[self.views_before]
        # Claims first: parents come before the column, so its end bounds all of them.
        if (
            self.node >= len(batch.nodes)
            or not 0 <= first <= first + count <= len(batch.buffers)
            or min(batch.views, default=0) < 0
        ):
            raise _bad_batch(
                file, at, f"it has {len(batch.nodes)} arrays and {len(batch.buffers)} buffers, fewer than its schema"
            )
        numbers = [buffer + sum(batch.views[:views]) for buffer, views in self.parents]
        numbers += range(first, first + count)
        places = [batch.buffers[number] for number in numbers]
        for offset, length in places:
            if offset < 0 or length < 0 or start + offset + length > end:
                raise _bad_batch(
                    file,
                    at,
                    f"a buffer should lie at bytes {offset:,} to {offset + length:,} of a body of {end - start:,}",
                )
        if sum(length for _, length in places) > _MAX_COLUMN_BYTES:
            raise _bad_batch(file, at, f"its text has more than the {_MAX_COLUMN_BYTES:,} bytes a chunk may have")
        width = 16 if _has_views(self.read_as) else 4
        if not batch.codec and batch.rows * width > places[len(self.parents) + 1][1]:
            raise _bad_batch(file, at, f"it claims {batch.rows:,} rows, more than its buffers can hold")
        return [(start + offset, length) for offset, length in places]


def messages_of(
    file: ByteFile, at: int | None = None, end: int | None = None
) -> Iterator[tuple[int, int, int, int, bytes]]:
    """(start, end, length of the body, kind, metadata) of the messages from `at` on; the whole file's by default."""
    if at is None:
        at, end = _bounds(file)
    assert end is not None
    while at < end:
        head = bytes(file.read(at, min(8, end - at)))
        first = int.from_bytes(head[:4], "little")
        if len(head) == 8 and first == _CONTINUED:
            length, here = int.from_bytes(head[4:], "little"), at + 8
        else:  # as Arrow wrote before 0.15
            length, here = first, at + 4
        if length == 0 and len(head) >= 4:
            return
        if len(head) < 4 or length > min(end - here, _MAX_METADATA):
            raise Undecodable(
                file.path,
                f"is cut short or damaged: at byte {at:,} a message of {length:,} bytes should begin, {max(end - here, 0):,} are left",
            )
        metadata = bytes(file.read(here, length))
        try:
            message = parse_message(metadata)
        except ValueError as error:
            raise Undecodable(file.path, f"is damaged: the message at byte {at:,} does not parse ({error})") from error
        stop = here + length + message.body
        if message.kind not in (SCHEMA, DICTIONARY, BATCH) or message.body < 0:
            raise Undecodable(file.path, f"is damaged: the message at byte {at:,} is of an unknown kind")
        if stop > end:
            raise Undecodable(
                file.path,
                f"is cut short: the record batch at byte {at:,} should end at {stop:,}, the file has {end:,} bytes of them",
            )
        yield at, stop, message.body, message.kind, metadata
        at = stop


def _bounds(file: ByteFile) -> tuple[int, int]:
    """Where the messages begin and end: all of a stream, what lies between the magic and the footer of a file."""
    if file.size < 8:
        raise Undecodable(file.path, f"is no Arrow file or stream: it has {file.size:,} bytes")
    if file.read(0, 6) != _MAGIC:
        return 0, file.size
    tail = bytes(file.read(file.size - 10, 10)) if file.size >= 18 else b""
    footer = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or footer > file.size - 18:
        raise Undecodable(file.path, "is an Arrow file that was cut short: it does not end with ARROW1")
    return 8, file.size - 10 - footer


def batch_of(file: ByteFile, at: int, metadata: bytes) -> Batch:
    try:
        batch = parse_batch(metadata)
    except ValueError as error:
        raise Undecodable(file.path, f"is damaged: the message at byte {at:,} does not parse ({error})") from error
    if not 0 <= batch.rows <= _MAX_BATCH_ROWS:
        raise _bad_batch(file, at, f"it claims {batch.rows:,} rows; between 0 and {_MAX_BATCH_ROWS:,} are accepted")
    return batch


def _bad_batch(file: ByteFile, at: int, why: str) -> Undecodable:
    return Undecodable(file.path, f"is damaged: of the record batch at byte {at:,}, {why}")


def _layout(kind: pa.DataType) -> tuple[int, int, int]:
    """(arrays, buffers, arrays of views) that a type takes in a batch, itself and all that is in it."""
    import pyarrow.types as t

    while isinstance(kind, _extension()):
        kind = kind.storage_type
    views = 0
    if t.is_null(kind) or t.is_run_end_encoded(kind):
        buffers = 0
    elif t.is_struct(kind) or t.is_fixed_size_list(kind):
        buffers = 1
    elif t.is_union(kind):
        buffers = 1 if kind.mode == "sparse" else 2
    elif _has_views(kind):
        buffers, views = 2, 1
    elif _is_text(kind) or t.is_list_view(kind) or t.is_large_list_view(kind):
        buffers = 3
    else:  # numbers, times, lists, maps, dictionaries' indices
        buffers = 2
    nodes = 1
    if not t.is_dictionary(kind):
        for child in range(kind.num_fields):
            more = _layout(kind.field(child).type)
            nodes, buffers, views = nodes + more[0], buffers + more[1], views + more[2]
    return nodes, buffers, views


def _extension() -> type:
    import pyarrow as pa

    return pa.BaseExtensionType


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as t

    return t.is_string(kind) or t.is_binary(kind) or t.is_large_string(kind) or t.is_large_binary(kind)


def _has_views(kind: pa.DataType) -> bool:
    import pyarrow.types as t

    return t.is_string_view(kind) or t.is_binary_view(kind)


def _as_bytes(kind: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa
    import pyarrow.types as t

    if _has_views(kind):
        return pa.binary_view()
    if t.is_string(kind) or t.is_binary(kind):
        return pa.binary()
    return pa.large_binary() if _is_text(kind) else None


def _plain(buffer: memoryview, codec: str) -> Any:
    """A buffer as it was before it was packed: 8 bytes say how long that is, -1 that it was left as it is."""
    if not codec:
        return buffer
    import pyarrow as pa

    if len(buffer) < 8:
        raise ValueError("a packed buffer of less than 8 bytes")
    size = int.from_bytes(buffer[:8], "little", signed=True)
    if size == -1:
        return buffer[8:]
    if not 0 <= size <= _MAX_COLUMN_BYTES:
        raise ValueError(f"a buffer claims to unpack to {size:,} bytes")
    return pa.Codec(codec).decompress(buffer[8:], decompressed_size=size)


def _hide(texts: list[str | None], why: dict[int, str], validity: Any) -> None:
    """A struct that is null has no text in it."""
    if validity is None:
        return
    bits = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), bitorder="little")
    if len(bits) < len(texts):
        raise ValueError("a validity buffer is too short")
    for row in np.flatnonzero(bits[: len(texts)] == 0).tolist():
        texts[row] = None
        why[row] = "its text is null"
