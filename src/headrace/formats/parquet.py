"""Parquet: columns of the row groups of a file.

    columns = ParquetColumns(ParquetFile(file), ["text"])
    pages = columns.load(file, group)          bytes of the pages of these columns
    columns.decode(group, pages)               a pyarrow table of them

    ParquetRows(file).read(start, stop, names)     the same as numpy arrays, by row

Text, labelled rows, cells and Gram shards are read through this module. Pages are found from the footer, read with
pread and handed to pyarrow as the only bytes it can see. So the decoded bytes are those that were hashed, and a file that is cut short
during the read is an error, not a signal.

Sizes in the footer and in the headers of pages are claims. They are compared with the size of the file and with caps
before memory is taken for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.errors import DataError, nearest
from headrace.formats.arrow_columns import PiecedRows
from headrace.formats.byte_file import MAX_DECODED, ByteFile, FileObject, Undecodable, first_line, most_decoded
from headrace.formats.parquet_footer import ColumnPages, parse_footer, parse_page_header

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAX_COLUMN_BYTES = MAX_DECODED
_MAX_GROUP_ROWS = 1 << 26
_MAX_FOOTER = 64 << 20
_MAX_GAP = 64 << 10
"""Bytes between two wanted columns up to which one read takes both."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 16}

Pages = list[tuple[int, bytearray | memoryview]]
"""Stretches of a file: where each begins, and its bytes."""


class Stretch(NamedTuple):
    """The part of a file from the first page of some columns to the last."""

    offset: int
    length: int
    uncompressed: int
    """Bytes that the pages of these columns claim to unpack to."""


class ParquetFile:
    """The footer of one file. It holds no descriptor: later reads get `file` again."""

    def __init__(self, file: ByteFile) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path, self.size = file.path, file.size
        raw = _footer_bytes(file)
        try:
            self.footer = parse_footer(raw)
            alone = b"PAR1" + raw + len(raw).to_bytes(4, "little") + b"PAR1"
            self.metadata: pq.FileMetaData = pq.read_metadata(pa.BufferReader(alone))
            self.leaves = [self.metadata.schema.column(i) for i in range(self.metadata.num_columns)]
            paths = [leaf.path for leaf in self.leaves]
            for group in self.footer.pages:
                for path, pages in zip_longest(paths, group):
                    if pages is None or pages.path != path:
                        raise ValueError(f"column {path} is called {pages and pages.path} in a row group")
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise _damaged(file.path, error) from error

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        try:
            return self.metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise _damaged(self.path, error) from error


class ParquetColumns:
    """Columns of one file, by its footer. Every claim is compared with the file and the caps."""

    def __init__(self, parquet: ParquetFile, names: Sequence[str], *, text: bool = False) -> None:
        """Args:
        parquet: The file.
        names: The columns; `a.b` is field b of a struct.
        text: There is one name, and it must be a column of one text a row.
        """
        footer, leaves = parquet.footer, parquet.leaves
        self._parquet = parquet
        paths = [leaf.path for leaf in leaves]
        places: list[int] = []
        for name in names:
            found = [i for i, path in enumerate(paths) if path == name or (not text and path.startswith(f"{name}."))]
            if not found:
                present = paths if text else {path.split(".")[0] for path in paths}
                raise no_such_column(parquet.path, name, present, text=text)
            if len({paths[i] for i in found}) < len(found):
                raise Undecodable(parquet.path, f"has several columns called {name!r}", "Write it with one")
            places += found
        if text and (found := holds(leaves[places[0]])) != "text":
            raise DataError(
                f"column {names[0]!r} of {parquet.path} holds {found}, expected one text a row. Set text_key to a column of strings."
            )
        self._chosen = [leaves[i] for i in places]
        self.group_rows = footer.group_rows
        self._pages = [[group[i] for i in places] for group in footer.pages]
        self.pages = tuple(_together(pages) for pages in self._pages)
        """By row group."""
        for group in range(len(self.pages)):
            self._check(", ".join(names), group)

    def load(self, file: ByteFile, group: int) -> Pages:
        """Read the pages of these columns. Columns that lie far apart are read one by one."""
        stretches: list[tuple[int, int]] = []
        for pages in sorted(self._pages[group], key=lambda p: p.offset):
            end = pages.offset + pages.compressed
            if stretches and pages.offset - stretches[-1][1] <= _MAX_GAP:
                stretches[-1] = (stretches[-1][0], max(stretches[-1][1], end))
            else:
                stretches.append((pages.offset, end))
        buffers = [(start, np.empty(end - start, np.uint8).data) for start, end in stretches]  # not cleared first
        for start, buffer in buffers:
            file.read_into(buffer, start)
        return list(buffers)

    def decode(self, group: int, pages: Pages) -> pa.Table:
        """Return the rows of a group, from bytes that hold its pages. ValueError or an error of pyarrow if they are damaged.

        A column with a dictionary stays a dictionary array: half a megabyte of file can stand for terabytes of repeated text.
        """
        import pyarrow.parquet as pq

        def held(offset: int, length: int) -> memoryview:
            for start, data in pages:
                if start <= offset < start + len(data):
                    return memoryview(data)[offset - start : offset - start + length]
            return memoryview(b"")

        own = self._pages[group]
        decoded = sum(self._decoded(leaf, p, held) for leaf, p in zip(self._chosen, own, strict=True))
        if decoded > most_decoded(sum(p.compressed for p in own)):
            raise ValueError(f"its pages claim to hold {decoded:,} bytes, more than is decoded from so few")
        # Pages are checked against their own CRC where the writer left one.
        parquet = pq.ParquetFile(
            FileObject(held, self._parquet.size),
            metadata=self._parquet.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
            read_dictionary=[
                leaf.path
                for leaf, p in zip(self._chosen, own, strict=True)
                if p.has_dictionary and leaf.physical_type == "BYTE_ARRAY"
            ],
        )
        return parquet.read_row_group(group, columns=[leaf.path for leaf in self._chosen], use_threads=False)

    def _decoded(self, leaf: pq.ColumnSchema, pages: ColumnPages, held: Any) -> int:
        """Bytes that the pages of one column claim to decode to, from their own headers."""
        at, end, values, total = pages.offset, pages.offset + pages.compressed, 0, 0
        column = held(at, pages.compressed)
        while values < pages.values and at < end:  # pyarrow stops there too
            header = parse_page_header(column, at - pages.offset)
            values += header.values
            total += header.uncompressed
            at = pages.offset + header.end + header.compressed
        return total + values * (_width(leaf) + 8)

    def _check(self, names: str, group: int) -> None:
        path, size, rows, pages = self._parquet.path, self._parquet.size, self.group_rows[group], self.pages[group]
        if not 0 <= rows <= _MAX_GROUP_ROWS:
            raise Undecodable(
                path,
                f"has a row group {group} that claims {rows:,} rows; between 0 and {_MAX_GROUP_ROWS:,} are accepted",
                "It is damaged, or should be written with smaller row groups",
            )
        if rows == 0:
            return  # there are no pages, and writers put any number as their place
        for p in self._pages[group]:
            if p.offset < 4 or p.compressed < 0 or p.offset + p.compressed > size:
                raise Undecodable(
                    path,
                    f"is cut short or damaged: column {names!r} of row group {group} should lie at bytes {p.offset:,} to "
                    f"{p.offset + p.compressed:,}, the file has {size:,}",
                )
        if max(pages.uncompressed, pages.length) > _MAX_COLUMN_BYTES:
            raise Undecodable(
                path,
                f"has a row group {group} whose column {names!r} unpacks to {pages.uncompressed:,} bytes, more than the "
                f"{_MAX_COLUMN_BYTES:,} a chunk may have",
                "Write it with smaller row groups",
            )


class ParquetRows(PiecedRows):
    """Columns of a parquet file by row. A row group is decoded when its first row is asked for, and kept."""

    piece_name = "row group"

    def __init__(self, file: ByteFile, columns: Sequence[str] | None = None) -> None:
        parquet = ParquetFile(file)
        self._columns = functools.cache(lambda names: ParquetColumns(parquet, names))
        super().__init__(file, parquet.schema(), columns, parquet.footer.group_rows)
        self._columns(tuple(self.schema))  # checks the claims of the footer

    def decode(self, piece: int, names: tuple[str, ...]) -> pa.Table:
        columns = self._columns(names)
        return columns.decode(piece, columns.load(self.file, piece))


def _together(pages: list[ColumnPages]) -> Stretch:
    offset = min((p.offset for p in pages), default=0)
    end = max((p.offset + p.compressed for p in pages), default=0)
    return Stretch(offset, end - offset, sum(p.uncompressed for p in pages))


def no_such_column(path: object, name: str, present: Iterable[str], *, text: bool) -> DataError:
    """Return the error for a missing column. It lists up to 8 columns of the file, those with similar names first."""
    listed = ", ".join(repr(p) for p in nearest(name, present)[:8]) or "none at all"
    remedy = (
        "Set text_key to the one that holds the text"
        if text
        else "Set text_key and label_key to those that hold text and labels"
    )
    return DataError(f"{path} has no column {name!r}; it has {listed}. {remedy}.")


def _footer_bytes(file: ByteFile) -> bytes:
    tail = 8
    if file.size < 4 + tail:
        raise Undecodable(file.path, f"is not a parquet file: it has {file.size:,} bytes")
    trailer = bytes(file.read(file.size - tail, tail))
    if trailer[4:] == b"PARE":
        raise Undecodable(file.path, "is an encrypted parquet file, which cannot be read", "Write it unencrypted")
    if trailer[4:] != b"PAR1" or file.read(0, 4) != b"PAR1":
        raise Undecodable(file.path, "is not a parquet file, or was cut short: it does not begin and end with PAR1")
    length = int.from_bytes(trailer[:4], "little")
    if length > min(file.size - 4 - tail, _MAX_FOOTER):
        raise Undecodable(file.path, f"is damaged: its footer claims {length:,} bytes, the file has {file.size:,}")
    return bytes(file.read(file.size - tail - length, length))


def holds(column: pq.ColumnSchema) -> str:
    """Return "text", or the name of another type, for messages."""
    if column.max_repetition_level:
        return "lists"
    if column.physical_type == "BYTE_ARRAY":
        return "decimals" if column.converted_type == "DECIMAL" else "text"
    return column.physical_type


def _width(column: pq.ColumnSchema) -> int:
    """Bytes that a value takes in memory; of a BYTE_ARRAY besides its text."""
    return max(_WIDTHS.get(column.physical_type, column.length), 1)


def _damaged(path: object, error: BaseException) -> Undecodable:
    return Undecodable(path, f"is damaged: its footer does not parse ({first_line(error)})")
