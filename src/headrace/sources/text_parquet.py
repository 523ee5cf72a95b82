"""Text and labelled rows of parquet files. A chunk is a row group; only the pages of the wanted columns are read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import DataError
from headrace.formats.byte_file import ByteFile, first_line
from headrace.formats.chunks import BadRow, FileScan, Loaded, all_bad
from headrace.formats.parquet import ParquetColumns, ParquetFile
from headrace.order import chunk_hash
from headrace.sources.rows import RowShape, row_objects, texts_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetLabelled", "ParquetTexts"]

_FOOTERS_KEPT = 64


class ParquetTexts:
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
        columns = self._described(file)
        rows = np.array(columns.group_rows, dtype=np.int64)
        kept = np.flatnonzero(rows)
        first = np.cumsum(rows) - rows
        sizes = np.array([max(pages.uncompressed, 0) for pages in columns.pages], dtype=np.int64)
        return FileScan(start=kept, end=kept + 1, rows=rows[kept], line=first[kept], size=sizes[kept])

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        columns = self._columns(file)
        if not 0 <= start < len(columns.pages):
            raise DataError(
                f"{file.path} has {len(columns.pages)} row groups; number {start} was asked of it. Restore the file."
            )
        pages = columns.pages[start]
        data = file.read(pages.offset, pages.compressed)
        return Loaded(hash=chunk_hash(memoryview(data)), size=len(data), payload=(start, data))

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        import pyarrow as pa

        group, data = loaded.payload
        columns = self._columns(file)
        try:
            table = columns.decode(group, [(columns.pages[group].offset, data)])
            texts, bad = self._texts(table, columns)
        except (pa.ArrowException, OSError, ValueError, IndexError, MemoryError) as error:
            return all_bad(rows, f"row group {group} cannot be decoded ({first_line(error)})")
        if len(texts) != rows:
            return all_bad(rows, f"row group {group} holds {len(texts):,} rows, its footer says {rows:,}")
        return texts, bad

    def _texts(self, table: pa.Table, columns: ParquetColumns) -> tuple[list[str | None], list[BadRow]]:
        texts: list[str | None] = []
        bad: list[BadRow] = []
        for array in table.column(0).chunks:
            for _ in range(columns.depth - 1):
                array = array.flatten()[0]
            more, why = texts_of(array)
            bad += [BadRow(row=r + len(texts), line=r + len(texts), reason=why[r]) for r in sorted(why)]
            texts += more
        return texts, bad

    def _described(self, file: ByteFile) -> ParquetColumns:
        return ParquetColumns(ParquetFile(file), (self.text_key,), text=True)

    def _columns(self, file: ByteFile) -> ParquetColumns:
        """What the footer says; that of the last 64 files is kept, because consecutive chunks come from few files."""
        key = (str(file.path), file.size, file.version)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        columns = self._described(file)
        with self._lock:
            self._kept[key] = columns
            while len(self._kept) > _FOOTERS_KEPT:
                self._kept.popitem(last=False)
        return columns


class ParquetLabelled(ParquetTexts):
    """Several columns of parquet files, from the first page of the first to the last of the last."""

    def __init__(self, *, shape: RowShape) -> None:
        super().__init__(text_key=shape.columns[0])
        self._shape = shape

    def parameters(self) -> dict[str, Any]:
        return {"columns": list(self._shape.columns)}

    def _described(self, file: ByteFile) -> ParquetColumns:
        return ParquetColumns(ParquetFile(file), self._shape.columns)

    def _texts(self, table: pa.Table, columns: ParquetColumns) -> tuple[list[str | None], list[BadRow]]:
        return self._shape.rows(row_objects(table))
