"""Arrow IPC: the messages of a file or stream, and its record batches by row.

Both forms are read: the file (`ARROW1` at both ends) and the bare stream, which `datasets` writes to its caches and `save_to_disk`
folders. The messages are read from the first to the last; of a file's footer, which lists them a second time, only the place is used.
Nothing is mapped, and no offset in a batch is followed before pyarrow's full validation has passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.formats.arrow_columns import PiecedRows
from headrace.formats.arrow_messages import BATCH, DICTIONARY, SCHEMA, Batch, parse_message
from headrace.formats.byte_file import MAX_DECODED, ByteFile, Undecodable, first_line, most_decoded

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
_MAX_METADATA = 64 << 20


class PlacedMessage(NamedTuple):
    """A message and its place in the file."""

    start: int
    end: int
    body: int
    """Bytes of the body, which ends at `end`."""
    kind: int
    """SCHEMA, DICTIONARY or BATCH."""
    metadata: bytes
    batch: Batch
    """Empty for a schema."""


class ArrowRows(PiecedRows):
    """Columns of an Arrow file by row. A record batch is decoded when its first row is asked for, and kept."""

    piece_name = "record batch"

    def __init__(self, file: ByteFile, columns: Sequence[str] | None = None) -> None:
        self._places: list[tuple[int, int, int]] = []
        opening: list[bytearray] = []
        held = 0
        for found in messages_of(file):
            if found.body > MAX_DECODED:
                raise Undecodable(
                    file.path,
                    f"has a record batch of {found.body:,} bytes at byte {found.start:,}",
                    "Write smaller ones",
                )
            if found.kind == BATCH:
                self._places.append((found.start, found.end, found.batch.rows))
                continue
            message = file.read(found.start, found.end - found.start)
            if found.kind == DICTIONARY:
                held += _decoded(file, found.start, found.batch, memoryview(message)[len(message) - found.body :])
            if held > MAX_DECODED:
                raise Undecodable(
                    file.path, f"has dictionaries of more than {MAX_DECODED:,} bytes", "Write smaller ones"
                )
            opening.append(message)
        self._opening = b"".join(opening)
        super().__init__(file, read_schema(file), columns, [rows for _, _, rows in self._places])

    def decode(self, piece: int, names: tuple[str, ...]) -> pa.Table:
        import pyarrow as pa

        start, end, _ = self._places[piece]
        batch = read_batch(self.file, self._opening, self.file.read(start, end - start))
        return pa.Table.from_batches([batch]).select(list(names))


def schema_message(file: ByteFile) -> bytes:
    """Return the bytes of the message that holds the schema, which has no body."""
    found = next((message for message in messages_of(file) if message.kind == SCHEMA), None)
    if found is None:
        raise Undecodable(file.path, "is no Arrow file or stream: it holds no schema")
    return bytes(file.read(found.start, found.end - found.body - found.start))


def read_schema(file: ByteFile) -> pa.Schema:
    """Return the schema of a file; Undecodable if it does not parse, or a name in it is not UTF-8."""
    import pyarrow as pa

    try:
        schema = pa.ipc.read_schema(pa.py_buffer(schema_message(file)))
        schema.names  # noqa: B018 (decodes the names)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise Undecodable(file.path, f"is damaged: its schema does not parse ({first_line(error)})") from error
    return schema


def read_batch(file: ByteFile, opening: bytes, message: bytes | bytearray) -> pa.RecordBatch:
    """Return the record batch in the bytes of one message, validated. ValueError or an error of pyarrow if it is damaged.

    `opening`: the messages of the schema and of dictionaries.
    """
    import pyarrow as pa

    found = pa.ipc.read_message(pa.py_buffer(message))
    _decoded(file, 0, parse_message(found.metadata.to_pybytes())[2], memoryview(found.body))
    with pa.ipc.open_stream(b"".join((opening, message))) as stream:
        batch = stream.read_next_batch()
    batch.validate(full=True)
    return batch


def _decoded(file: ByteFile, at: int, batch: Batch, body: memoryview) -> int:
    """Bytes that the buffers of a batch claim to unpack to; Undecodable if it is more than may be made of its body."""
    if not batch.codec:
        return len(body)
    claims = [bytes(body[offset : offset + 8]) for offset, length in batch.buffers if length > 0 and offset >= 0]
    total = sum(max(int.from_bytes(claim, "little", signed=True), 0) for claim in claims)
    if total > most_decoded(len(body)):
        raise bad_batch(file, at, f"its buffers claim to unpack to {total:,} bytes, more than is unpacked from so few")
    return total


def messages_of(file: ByteFile, at: int | None = None, end: int | None = None) -> Iterator[PlacedMessage]:
    """Yield the messages of bytes [at, end); of the whole file by default."""
    if at is None:
        at, end = _bounds(file)
    assert end is not None
    while at < end:
        head = bytes(file.read(at, min(8, end - at)))
        first = int.from_bytes(head[:4], "little")
        if len(head) == 8 and first == _CONTINUED:
            length, here = int.from_bytes(head[4:], "little"), at + 8
        else:  # the form of Arrow before 0.15
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
            kind, body, batch = parse_message(metadata)
        except ValueError as error:
            raise Undecodable(file.path, f"is damaged: the message at byte {at:,} does not parse ({error})") from error
        stop = here + length + body
        if stop > end:
            raise Undecodable(
                file.path,
                f"is cut short: the record batch at byte {at:,} should end at {stop:,}, the file has {end:,} bytes of them",
            )
        yield PlacedMessage(at, stop, body, kind, metadata, batch)
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


def bad_batch(file: ByteFile, at: int, why: str) -> Undecodable:
    return Undecodable(file.path, f"is damaged: of the record batch at byte {at:,}, {why}")
