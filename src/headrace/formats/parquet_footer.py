"""The Thrift structures of a parquet file: the footer and the headers of pages.

pyarrow parses footers too, but its Python accessors to row groups and their columns let some C++ exceptions through: one wrong
byte in a footer, such as a histogram of another length, then aborts the process (pyarrow 26: 3 of 1,400 damaged files). So
the few numbers of row groups that a scan needs are read here, from the Thrift compact protocol, and every claim is compared with the bytes
that are there. The schema is pyarrow's, which gets the same bytes through calls whose errors it does catch.

A page's header says how many values the page decodes to. A few bytes can stand for 10^8 values, so the headers are read
before pyarrow takes memory for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPages:
    """The place of the pages of one column of one row group, by the footer."""

    path: str
    """Names that lead to the column in the schema's tree, joined by dots."""
    offset: int
    compressed: int
    uncompressed: int
    values: int
    has_dictionary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHeader:
    """The claims of one page."""

    values: int
    """0 for a page without values, such as a dictionary."""
    uncompressed: int
    compressed: int
    end: int
    """Where the header ends and the page's bytes begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    group_rows: tuple[int, ...]
    pages: tuple[tuple[ColumnPages, ...], ...]
    """By row group, then by column."""


def parse_footer(data: bytes) -> Footer:
    """Parse a FileMetaData structure; ValueError if it is damaged."""
    try:
        meta = _Compact(data).struct(0)
        _check_nesting(_list(meta, 2))
        groups = _list(meta, 4)
        return Footer(
            group_rows=tuple(_number(group, 3) for group in groups),
            pages=tuple(tuple(map(_pages, _list(group, 1))) for group in groups),
        )
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{type(error).__name__} where a parquet structure should be") from error


def parse_page_header(data: bytes | memoryview, at: int) -> PageHeader:
    """Parse the PageHeader structure that begins at `at`; ValueError if it is damaged."""
    try:
        parser = _Compact(data, at)
        header = parser.struct(0)
        # 5: a data page of version 1, 8: one of version 2.
        values = sum(_number(header[kind], 1) for kind in (5, 8) if kind in header)
        page = PageHeader(
            values=values, uncompressed=_number(header, 2), compressed=_number(header, 3), end=parser.place
        )
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__} where the header of a page should be") from error
    if min(page.values, page.uncompressed, page.compressed) < 0:
        raise ValueError("a page of negative size")
    return page


def _check_nesting(elements: list[Any]) -> None:
    """Refuse a schema that is nested too deeply for pyarrow, which follows it by recursion.

    The schema is a tree written out depth first, each inner node with its number of children.
    """
    left: list[int] = []  # children still to come, per open node
    for element in elements:
        while left and left[-1] <= 0:
            left.pop()
        if left:
            left[-1] -= 1
        if element.get(5):
            left.append(_number(element, 5))
        if len(left) > _MAX_DEPTH:
            raise ValueError("the schema is nested too deeply")


def _pages(column: dict[int, Any]) -> ColumnPages:
    if column.get(1):
        raise ValueError("a column lies in another file")
    meta = column[3]
    offset, dictionary = _number(meta, 9), meta.get(11, 0)
    if not isinstance(dictionary, int):
        raise ValueError("a dictionary offset that is no number")
    return ColumnPages(
        path=".".join(part.decode("utf-8") for part in _list(meta, 3)),
        offset=min(offset, dictionary) if dictionary > 0 else offset,
        compressed=_number(meta, 7),
        uncompressed=_number(meta, 6),
        values=_number(meta, 5),
        has_dictionary=dictionary > 0,
    )


def _number(struct: dict[int, Any], field: int) -> int:
    value = struct[field]
    if type(value) is not int:
        raise ValueError(f"field {field} is no number")
    return value


def _list(struct: dict[int, Any], field: int) -> list[Any]:
    value = struct[field]
    if not isinstance(value, list):
        raise ValueError(f"field {field} is no list")
    return value


class _Compact:
    """Values of the Thrift compact protocol. Reading past the end is an IndexError or a ValueError, never memory."""

    def __init__(self, data: bytes | memoryview, at: int = 0) -> None:
        self._data = data
        self._at = at

    @property
    def place(self) -> int:
        """Where the next value begins."""
        return self._at

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _MAX_DEPTH:
            raise ValueError("structures nested too deeply")
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            field = field + step if step else self._zigzag()
            fields[field] = kind == 1 if kind <= 2 else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("values nested too deeply")
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            head = self._byte()
            size, inner = head >> 4, head & 15
            if size == 15:
                size = self._varint()
            if size > len(self._data) - self._at:
                raise ValueError(f"a list claims {size:,} items")
            return [self._value(inner, depth + 1) for _ in range(size)]
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (1, 2, 3):
            return self._byte()
        if kind == 7:
            return self._bytes(8)
        if kind == 11:
            return self._map(depth)
        raise ValueError(f"a value of unknown type {kind}")

    def _map(self, depth: int) -> list[Any]:
        size = self._varint()
        if size > len(self._data) - self._at:
            raise ValueError(f"a map claims {size:,} items")
        kinds = self._byte() if size else 0
        return [(self._value(kinds >> 4, depth + 1), self._value(kinds & 15, depth + 1)) for _ in range(size)]

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _bytes(self, size: int) -> bytes | memoryview:
        if size > len(self._data) - self._at:
            raise ValueError(f"a value claims {size:,} bytes")
        self._at += size
        return self._data[self._at - size : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number longer than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
