"""The flatbuffers of Arrow IPC messages.

A file or stream of Arrow data is a run of messages, each a flatbuffer (metadata) and a body:

    ff ff ff ff | length | metadata                                    | body
                           kind, body length; of a batch: rows,          the columns' buffers
                           (offset, length) of every buffer

pyarrow reads messages only whole: to count the rows of a batch or to reach one column, it reads and trusts all of the batch.
So the few numbers needed are read here, and each is compared with the bytes that are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
_MAX_ITEMS = 1 << 20
_MAX_ROWS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A record batch: its rows, a (rows, nulls) pair for every array of the schema's tree, and where its buffers lie."""

    rows: int
    nodes: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[int, int], ...]
    """(offset in the body, length)."""
    codec: str
    """How the buffers are packed: "", "lz4" or "zstd"."""
    views: tuple[int, ...]
    """How many data buffers each array of views has."""


_NO_BATCH = Batch(rows=0, nodes=(), buffers=(), codec="", views=())


def parse_message(data: bytes) -> tuple[int, int, Batch]:
    """Parse the metadata of a message; ValueError if it is damaged.

    Return its kind, the length of its body, and its batch: that of a BATCH or DICTIONARY message, an empty one of a schema.
    """
    message = _Table(data, _at(data, 0, "I"))
    kind, body, header = message.number(1, "B"), message.number(3, "q"), message.table(2)
    if kind not in (SCHEMA, DICTIONARY, BATCH) or body < 0:
        raise ValueError("it is of an unknown kind")
    if kind == SCHEMA:
        return kind, body, _NO_BATCH
    if header is not None and kind == DICTIONARY:
        header = header.table(1)
    if header is None:
        raise ValueError("a record batch without a header")
    rows, packing, codec = header.number(0, "q"), header.table(3), ""
    if not 0 <= rows <= _MAX_ROWS:
        raise ValueError(f"it claims {rows:,} rows; between 0 and {_MAX_ROWS:,} are accepted")
    if packing is not None:
        number = packing.number(0, "b")
        if number not in (0, 1) or packing.number(1, "b") != 0:
            raise ValueError("buffers packed in an unknown way")
        codec = ("lz4", "zstd")[number]
    return (
        kind,
        body,
        Batch(
            rows=rows,
            nodes=tuple(header.pairs(1)),
            buffers=tuple(header.pairs(2)),
            codec=codec,
            views=tuple(header.numbers(4)),
        ),
    )


def _at(data: bytes, place: int, kind: str) -> int:
    if not 0 <= place <= len(data) - struct.calcsize(f"<{kind}"):
        raise ValueError(f"byte {place} of a message of {len(data)} was asked for")
    return struct.unpack_from(f"<{kind}", data, place)[0]


class _Table:
    """A table of a flatbuffer: numbered fields, each of which may be absent."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place
        self._fields = place - _at(data, place, "i")
        self._size = _at(data, self._fields, "H")

    def number(self, field: int, kind: str) -> int:
        place = self._field(field)
        return 0 if place is None else _at(self._data, place, kind)

    def table(self, field: int) -> _Table | None:
        place = self._field(field)
        return None if place is None else _Table(self._data, place + _at(self._data, place, "I"))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structs of two 64-bit numbers."""
        start, count = self._vector(field, 16)
        flat = struct.unpack_from(f"<{2 * count}q", self._data, start)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def numbers(self, field: int) -> tuple[int, ...]:
        start, count = self._vector(field, 8)
        return struct.unpack_from(f"<{count}q", self._data, start)

    def _vector(self, field: int, width: int) -> tuple[int, int]:
        place = self._field(field)
        if place is None:
            return 0, 0
        start = place + _at(self._data, place, "I")
        count = _at(self._data, start, "I")
        if count > _MAX_ITEMS or start + 4 + count * width > len(self._data):
            raise ValueError(f"a vector claims {count:,} items")
        return start + 4, count

    def _field(self, field: int) -> int | None:
        slot = 4 + 2 * field
        offset = _at(self._data, self._fields + slot, "H") if slot + 2 <= self._size else 0
        return self._place + offset if offset else None
