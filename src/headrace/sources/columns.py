"""Which rows does a parquet file hold, and what is the text of each?

A chunk is a row group. Of it only the pages of the text column are read: their place follows from the footer, they are
read with pread, hashed, and then handed to pyarrow as the only bytes it can see. So what is decoded is what was hashed,
and a file that is cut short under us is a sentence, not a signal.

Sizes in the footer are claims. They are held against the size of the file and against caps before anything is taken
from memory for them.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import DataError
from headrace.order import chunk_hash
from headrace.sources.raw import RawFile
from headrace.sources.reader import BadRow, FileScan, Loaded, not_utf8
from headrace.sources.spec import nearest

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["ParquetColumn"]

_MAX_COLUMN_BYTES = 4 << 30
_MAX_GROUP_ROWS = 1 << 26
_FOOTERS_KEPT = 64
_NULL = "its text is null"


class ParquetColumn:
    """One text column of parquet files. pyarrow is imported on first use."""

    format = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")
    unit = "row"
    span = "row groups"

    def __init__(self, *, text_key: str) -> None:
        self.text_key = text_key
        self._footers: OrderedDict[tuple[Path, int, int], pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()

    def parameters(self) -> dict[str, Any]:
        return {"column": self.text_key}

    def chunk_bytes(self, total: int) -> int:
        return 0

    def scan(self, file: RawFile, chunk_bytes: int) -> FileScan:
        footer = self._footer(file)
        self._column(file, footer)
        groups = range(footer.num_row_groups)
        rows = np.array([_group_rows(file, footer, g) for g in groups], dtype=np.int64)
        kept = np.flatnonzero(rows)
        for group in kept:
            self._pages(file, footer, int(group))
        first = np.concatenate(([0], np.cumsum(rows)))[:-1]
        return FileScan(start=kept, end=kept + 1, rows=rows[kept], line=first[kept].astype(np.int64))

    def load(self, file: RawFile, start: int, end: int) -> Loaded:
        footer = self._footer(file)
        if not 0 <= start < footer.num_row_groups:
            raise DataError(
                f"{file.path} has {footer.num_row_groups} row groups; number {start} was asked of it. Restore the file."
            )
        offset, length = self._pages(file, footer, start)
        data = file.read(offset, length)
        return Loaded(hash=chunk_hash(memoryview(data)), size=length, payload=(start, offset, data))

    def decode(self, file: RawFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        group, offset, data = loaded.payload
        footer = self._footer(file)
        depth = self._column(file, footer)
        try:
            # Pages are checked against their own CRC where the writer left one. A column with a dictionary is taken as
            # one: half a megabyte of file can stand for terabytes of repeated text, which then exist once.
            parquet = pq.ParquetFile(
                _Pages(data, offset, file.size),
                metadata=footer,
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=[self.text_key] if self._chunk_of(footer, group).has_dictionary_page else None,
            )
            column = parquet.read_row_group(group, columns=[self.text_key], use_threads=False).column(0)
            texts: list[str | None] = []
            bad: list[BadRow] = []
            for array in column.chunks:
                for _ in range(depth - 1):
                    array = array.flatten()[0]
                more, reasons = _texts(array)
                bad += [
                    BadRow(row=r + len(texts), line=r + len(texts), reason=why) for r, why in sorted(reasons.items())
                ]
                texts += more
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
            return _all_bad(rows, f"row group {group} cannot be decoded ({_first_line(error)})")
        if len(texts) != rows:
            return _all_bad(rows, f"row group {group} holds {len(texts):,} rows, its footer says {rows:,}")
        return texts, bad

    def _footer(self, file: RawFile) -> pq.FileMetaData:
        """The footer of a file; the last 64 are kept, because consecutive chunks come from few files."""
        key = (file.path, file.size, file.mtime_ns)
        with self._lock:
            if key in self._footers:
                self._footers.move_to_end(key)
                return self._footers[key]
        footer = _read_footer(file)
        with self._lock:
            self._footers[key] = footer
            while len(self._footers) > _FOOTERS_KEPT:
                self._footers.popitem(last=False)
        return footer

    def _column(self, file: RawFile, footer: pq.FileMetaData) -> int:
        """How deep the column lies; refused if it is not there or holds something else than text."""
        paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
        if self.text_key not in paths:
            listed = ", ".join(repr(p) for p in nearest(self.text_key, paths)[:8]) or "none at all"
            raise DataError(
                f"{file.path} has no column {self.text_key!r}; it has {listed}. Set text_key to the one that holds the text."
            )
        column = footer.schema.column(paths.index(self.text_key))
        if column.physical_type != "BYTE_ARRAY" or column.max_repetition_level:
            kind = "lists" if column.max_repetition_level else column.physical_type
            raise DataError(
                f"column {self.text_key!r} of {file.path} holds {kind}, expected one text a row. Set text_key to a column "
                "of strings."
            )
        top_level = self.text_key in footer.schema.to_arrow_schema().names
        return 1 if top_level else self.text_key.count(".") + 1

    def _chunk_of(self, footer: pq.FileMetaData, group: int) -> pq.ColumnChunkMetaData:
        columns = footer.row_group(group)
        paths = (columns.column(i).path_in_schema for i in range(columns.num_columns))
        return columns.column(next(i for i, path in enumerate(paths) if path == self.text_key))

    def _pages(self, file: RawFile, footer: pq.FileMetaData, group: int) -> tuple[int, int]:
        """Offset and length of the column's pages in a row group, held against the file."""
        column = self._chunk_of(footer, group)
        offset = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset:
            offset = min(offset, column.dictionary_page_offset)
        length = column.total_compressed_size
        if offset < 0 or length < 0 or offset + length > file.size:
            raise DataError(
                f"{file.path} is cut short or damaged: column {self.text_key!r} of row group {group} should lie at bytes "
                f"{offset:,} to {offset + length:,}, the file has {file.size:,}. Restore the file."
            )
        if column.total_uncompressed_size > _MAX_COLUMN_BYTES or length > _MAX_COLUMN_BYTES:
            raise DataError(
                f"column {self.text_key!r} of row group {group} in {file.path} unpacks to {column.total_uncompressed_size:,} "
                f"bytes, more than the {_MAX_COLUMN_BYTES:,} a chunk may have. Write the file with smaller row groups."
            )
        return offset, length


class _Pages(io.RawIOBase):
    """A file of which only some bytes are there. Asking for others is an error, so pyarrow reads nothing unhashed."""

    def __init__(self, data: bytearray, offset: int, size: int) -> None:
        super().__init__()
        self._data = memoryview(data)
        self._offset = offset
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = self._size - self._at
        start = self._at - self._offset
        # Readers may ask for a little more than the pages (a header whose length is not known yet).
        got = bytes(self._data[start : start + size]) if start >= 0 else b""
        self._at += len(got)
        return got


def _read_footer(file: RawFile) -> pq.FileMetaData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tail = 8
    if file.size < 12:
        raise DataError(
            f"{file.path} is not a parquet file: it has {file.size:,} bytes. Restore it or take it out of the source."
        )
    trailer = bytes(file.read(file.size - tail, tail))
    if trailer[4:] != b"PAR1" or file.read(0, 4) != b"PAR1":
        if trailer[4:] == b"PARE":
            raise DataError(f"{file.path} is an encrypted parquet file, which cannot be read. Write it unencrypted.")
        raise DataError(
            f"{file.path} is not a parquet file, or was cut short: it does not begin and end with PAR1. Restore it or take "
            "it out of the source."
        )
    length = int.from_bytes(trailer[:4], "little") + tail
    if length > file.size - 4:
        raise DataError(
            f"{file.path} is damaged: its footer claims {length:,} bytes, the file has {file.size:,}. Restore the file."
        )
    data = file.read(file.size - length, length)
    try:
        return pq.read_metadata(pa.BufferReader(pa.py_buffer(b"PAR1" + bytes(data))))
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(
            f"{file.path} is damaged: its footer does not parse ({_first_line(error)}). Restore the file."
        ) from error


def _group_rows(file: RawFile, footer: pq.FileMetaData, group: int) -> int:
    rows = footer.row_group(group).num_rows
    if not 0 <= rows <= _MAX_GROUP_ROWS:
        raise DataError(
            f"row group {group} of {file.path} claims {rows:,} rows; between 0 and {_MAX_GROUP_ROWS:,} are accepted. The "
            "file is damaged, or should be written with smaller row groups."
        )
    return rows


def _texts(array: pa.Array) -> tuple[list[str | None], dict[int, str]]:
    """The texts of an array, None where there is none, and why not."""
    import pyarrow as pa

    if isinstance(array, pa.DictionaryArray):
        values, reasons = _texts(array.dictionary)
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
        return _texts_one_by_one(array)
    if not array.null_count:
        return texts, {}
    return texts, {row: _NULL for row, text in enumerate(texts) if text is None}


def _texts_one_by_one(array: pa.Array) -> tuple[list[str | None], dict[int, str]]:
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


def _all_bad(rows: int, reason: str) -> tuple[list[str | None], list[BadRow]]:
    return [None] * rows, [BadRow(row=0, line=0, rows=rows, reason=reason)]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
