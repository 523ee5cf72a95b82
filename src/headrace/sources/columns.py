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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import DataError
from headrace.order import chunk_hash
from headrace.sources.footer import ColumnPages, parse_footer
from headrace.sources.raw import ByteFile
from headrace.sources.reader import BadRow, FileScan, Loaded, Undecodable, all_bad, first_line, not_utf8
from headrace.sources.spec import nearest

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

__all__ = ["Pages", "ParquetColumn", "ParquetColumns", "no_such_column", "texts_of"]

_MAX_COLUMN_BYTES = 4 << 30
_MAX_GROUP_ROWS = 1 << 26
_FOOTERS_KEPT = 64
_NULL = "its text is null"


class ParquetColumn:
    """One text column of parquet files. pyarrow is imported on first use."""

    format = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")
    packings: tuple[str, ...] = ()
    unit = "row"
    span = "row groups"

    def __init__(self, *, text_key: str) -> None:
        self.text_key = text_key
        self._kept: OrderedDict[tuple[str, int, int | str], ParquetColumns] = OrderedDict()
        self._lock = threading.Lock()

    def parameters(self) -> dict[str, Any]:
        return {"column": self.text_key}

    def chunk_bytes(self, total: int) -> int:
        return 0

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        column = self._described(file)
        rows = np.array(column.group_rows, dtype=np.int64)
        kept = np.flatnonzero(rows)
        first = np.cumsum(rows) - rows
        sizes = np.array([max(pages.uncompressed, 0) for pages in column.pages], dtype=np.int64)
        return FileScan(start=kept, end=kept + 1, rows=rows[kept], line=first[kept], size=sizes[kept])

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        column = self._column(file)
        if not 0 <= start < len(column.pages):
            raise DataError(
                f"{file.path} has {len(column.pages)} row groups; number {start} was asked of it. Restore the file."
            )
        pages = column.pages[start]
        data = file.read(pages.offset, pages.compressed)
        return Loaded(hash=chunk_hash(memoryview(data)), size=len(data), payload=(start, data))

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        group, data = loaded.payload
        column = self._column(file)
        pages = column.pages[group]
        try:
            # Pages are checked against their own CRC where the writer left one. A column with a dictionary is taken as
            # one: half a megabyte of file can stand for terabytes of repeated text, which then exist once.
            parquet = pq.ParquetFile(
                Pages(data, pages.offset, file.size),
                metadata=column.for_pyarrow,
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=[self.text_key] if pages.has_dictionary else None,
            )
            arrays = parquet.read_row_group(group, columns=[self.text_key], use_threads=False).column(0).chunks
            texts: list[str | None] = []
            bad: list[BadRow] = []
            for array in arrays:
                for _ in range(column.depth - 1):
                    array = array.flatten()[0]
                more, why = texts_of(array)
                bad += [BadRow(row=r + len(texts), line=r + len(texts), reason=why[r]) for r in sorted(why)]
                texts += more
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
            return all_bad(rows, f"row group {group} cannot be decoded ({first_line(error)})")
        if len(texts) != rows:
            return all_bad(rows, f"row group {group} holds {len(texts):,} rows, its footer says {rows:,}")
        return texts, bad

    def _described(self, file: ByteFile) -> ParquetColumns:
        return ParquetColumns(file, (self.text_key,), text=True)

    def _column(self, file: ByteFile) -> ParquetColumns:
        """What the footer says; that of the last 64 files is kept, because consecutive chunks come from few files."""
        key = (str(file.path), file.size, file.version)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        column = self._described(file)
        with self._lock:
            self._kept[key] = column
            while len(self._kept) > _FOOTERS_KEPT:
                self._kept.popitem(last=False)
        return column


class ParquetColumns:
    """The wanted columns of one file as its footer describes them, every claim held against the file and the caps.

    Where there are several, the pages of a row group are those of all of them and of what lies between.
    """

    def __init__(self, file: ByteFile, names: Sequence[str], *, text: bool) -> None:
        """`text`: there is one name, and it must be a column of one text a row."""
        raw = _footer_bytes(file)
        try:
            footer = parse_footer(raw)
        except ValueError as error:
            raise _damaged(file, error) from error
        paths = [".".join(leaf.path) for leaf in footer.leaves]
        chosen: list[int] = []
        for name in names:
            found = [i for i, path in enumerate(paths) if path == name or (not text and path.startswith(f"{name}."))]
            if not found:
                raise no_such_column(file, name, paths if text else {leaf.path[0] for leaf in footer.leaves}, text=text)
            chosen += found
        if text and footer.leaves[chosen[0]].holds != "text":
            raise DataError(
                f"column {names[0]!r} of {file.path} holds {footer.leaves[chosen[0]].holds}, expected one text a row. Set "
                "text_key to a column of strings."
            )
        self.depth = len(footer.leaves[chosen[0]].path)
        self.leaves = tuple(paths[i] for i in chosen)
        self.group_rows = footer.group_rows
        self.pages = tuple(_together([group[i] for i in chosen]) for group in footer.pages)
        for group in range(len(self.pages)):
            self._check(file, ", ".join(names), group)
        self.for_pyarrow = _for_pyarrow(file, raw)

    def _check(self, file: ByteFile, text_key: str, group: int) -> None:
        rows, pages = self.group_rows[group], self.pages[group]
        if not 0 <= rows <= _MAX_GROUP_ROWS:
            raise Undecodable(
                file.path,
                f"has a row group {group} that claims {rows:,} rows; between 0 and {_MAX_GROUP_ROWS:,} are accepted",
                "It is damaged, or should be written with smaller row groups",
            )
        if rows == 0:
            return  # has no pages, and writers leave anything as their place
        if pages.offset < 4 or pages.compressed < 0 or pages.offset + pages.compressed > file.size:
            raise Undecodable(
                file.path,
                f"is cut short or damaged: column {text_key!r} of row group {group} should lie at bytes {pages.offset:,} to "
                f"{pages.offset + pages.compressed:,}, the file has {file.size:,}",
            )
        if max(pages.uncompressed, pages.compressed) > _MAX_COLUMN_BYTES:
            raise Undecodable(
                file.path,
                f"has a row group {group} whose column {text_key!r} unpacks to {pages.uncompressed:,} bytes, more than the "
                f"{_MAX_COLUMN_BYTES:,} a chunk may have",
                "Write it with smaller row groups",
            )


class Pages(io.RawIOBase):
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


def _together(pages: list[ColumnPages]) -> ColumnPages:
    """The pages of several columns as one stretch of the file."""
    if len(pages) == 1:
        return pages[0]
    offset = min(p.offset for p in pages)
    return ColumnPages(
        offset=offset,
        compressed=-1 if min(p.compressed for p in pages) < 0 else max(p.offset + p.compressed for p in pages) - offset,
        uncompressed=sum(p.uncompressed for p in pages),
        has_dictionary=any(p.has_dictionary for p in pages),
    )


def no_such_column(file: ByteFile, name: str, present: Iterable[str], *, text: bool) -> DataError:
    """What the file has in place of a column, the likeliest meant first."""
    listed = ", ".join(repr(p) for p in nearest(name, present)[:8]) or "none at all"
    remedy = (
        "Set text_key to the one that holds the text"
        if text
        else "Set text_key and label_key to those that hold text and labels"
    )
    return DataError(f"{file.path} has no column {name!r}; it has {listed}. {remedy}.")


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
    if length > file.size - 4 - tail:
        raise Undecodable(file.path, f"is damaged: its footer claims {length:,} bytes, the file has {file.size:,}")
    return bytes(file.read(file.size - tail - length, length))


def _for_pyarrow(file: ByteFile, raw: bytes) -> pq.FileMetaData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        alone = b"PAR1" + raw + len(raw).to_bytes(4, "little") + b"PAR1"
        return pq.read_metadata(pa.BufferReader(alone))
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _damaged(file, error) from error


def _damaged(file: ByteFile, error: BaseException) -> Undecodable:
    return Undecodable(file.path, f"is damaged: its footer does not parse ({first_line(error)})")


def texts_of(array: pa.Array) -> tuple[list[str | None], dict[int, str]]:
    """The texts of an array, None where there is none, and why not."""
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
