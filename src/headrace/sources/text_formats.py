"""The registry of text formats: the scheme of a spec, the suffixes of its files, and the function that makes their reader.

A new format is a class with the methods of `formats.chunks.Reader`, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.formats.chunks import Reader
from headrace.formats.lines import JsonLines, TextLines
from headrace.formats.text_files import TextFiles, TextParagraphs
from headrace.sources.rows import JsonLabelled, RowShape
from headrace.sources.text_arrow import ArrowLabelled, ArrowTexts
from headrace.sources.text_parquet import ParquetTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """One format of text files."""

    holds: str
    """What a file holds, for messages."""
    suffixes: tuple[str, ...]
    """What a bare path must end in for this format to be proposed."""
    reader: Callable[[str, RowShape | None, str | None], Reader]
    """Makes the reader, from the field or column of the text, or several columns in its place, and how a txt file is cut (by lines if None)."""


def _txt_reader(_: str, rows: RowShape | None, split: str | None) -> Reader:
    if rows is not None:
        raise ConfigError(
            f"a txt file has one text a line and no columns {', '.join(rows.columns)}; use jsonl:, parquet: or arrow:"
        )
    return {"file": TextFiles, "paragraph": TextParagraphs}.get(split or "", TextLines)()


TEXT_FORMATS: dict[str, TextFormat] = {
    "jsonl": TextFormat(
        holds="one JSON object per line",
        suffixes=(".jsonl", ".ndjson"),
        reader=lambda text_key, rows, _: JsonLines(text_key=text_key) if rows is None else JsonLabelled(shape=rows),
    ),
    "txt": TextFormat(
        holds="one document per file; ?split=line or ?split=paragraph cuts files",
        suffixes=(".txt",),
        reader=_txt_reader,
    ),
    "parquet": TextFormat(
        holds="one document per row",
        suffixes=(".parquet", ".pq"),
        reader=lambda text_key, rows, _: ParquetTexts(text_key=text_key, shape=rows),
    ),
    "arrow": TextFormat(
        holds="Arrow IPC files or streams, one document per row",
        suffixes=(".arrow",),
        reader=lambda text_key, rows, _: ArrowTexts(text_key=text_key) if rows is None else ArrowLabelled(shape=rows),
    ),
}
