"""Text and labelled rows of parquet files. A chunk is a row group; only the pages of the wanted columns are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.errors import DataError
from headrace.formats.byte_file import ByteFile
from headrace.formats.chunks import BadRow, FileScan, Loaded
from headrace.formats.parquet import ParquetColumns, ParquetFile
from headrace.order import chunk_hash
from headrace.sources.rows import ColumnReader, row_objects, texts_of

if TYPE_CHECKING:
    import pyarrow as pa


class ParquetTexts(ColumnReader[ParquetColumns]):
    """One text column of parquet files, or several columns, from the first page of the first to the last of the last."""

    format = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")
    span = "row groups"

    def describe(self, file: ByteFile) -> ParquetColumns:
        if self._shape is not None:
            return ParquetColumns(ParquetFile(file), self._shape.columns)
        return ParquetColumns(ParquetFile(file), (self.text_key,), text=True)

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        columns = self.describe(file)
        rows = np.array(columns.group_rows, dtype=np.int64)
        kept = np.flatnonzero(rows)
        first = np.cumsum(rows) - rows
        sizes = np.array([max(pages.uncompressed, 0) for pages in columns.pages], dtype=np.int64)
        return FileScan(start=kept, end=kept + 1, rows=rows[kept], line=first[kept], size=sizes[kept])

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        columns = self.described(file)
        if not 0 <= start < len(columns.pages):
            raise DataError(
                f"{file.path} has {len(columns.pages)} row groups; number {start} was asked of it. Restore the file."
            )
        pages = columns.pages[start]
        data = file.read(pages.offset, pages.length)
        return Loaded(hash=chunk_hash(memoryview(data)), payload=(start, data))

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        group, data = loaded.payload
        columns = self.described(file)

        def decode() -> tuple[list[str | None], list[BadRow]]:
            table = columns.decode(group, [(columns.pages[group].offset, data)])
            return _texts(table) if self._shape is None else self._shape.rows(row_objects(table))

        return self.checked(f"row group {group}", rows, decode)


def _texts(table: pa.Table) -> tuple[list[str | None], list[BadRow]]:
    """The texts of the only column, which may lie in structs."""
    import pyarrow as pa

    texts: list[str | None] = []
    bad: list[BadRow] = []
    for array in table.column(0).chunks:
        while isinstance(array, pa.StructArray):
            array = array.flatten()[0]
        more, why = texts_of(array)
        bad += [BadRow(row=r + len(texts), line=r + len(texts), reason=why[r]) for r in sorted(why)]
        texts += more
    return texts, bad
