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
class ReaderOptions:
    """What a source asks of the reader of its files."""

    text_key: str = "text"
    """The field or column that holds the text."""
    rows: RowShape | None = None
    """Several columns of every row in place of its text."""
    split: str | None = None
    """How a txt file is cut into documents; by lines if None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """One format of text files."""

    holds: str
    """What a file holds, for messages."""
    suffixes: tuple[str, ...]
    """What a bare path must end in for this format to be proposed."""
    reader: Callable[[ReaderOptions], Reader]


def _txt_reader(options: ReaderOptions) -> Reader:
    if options.rows is not None:
        raise ConfigError(
            f"a txt file has one text a line and no columns {', '.join(options.rows.columns)}; use jsonl:, parquet: or arrow:"
        )
    return {"file": TextFiles, "paragraph": TextParagraphs}.get(options.split or "", TextLines)()


TEXT_FORMATS: dict[str, TextFormat] = {
    "jsonl": TextFormat(
        holds="one JSON object per line",
        suffixes=(".jsonl", ".ndjson"),
        reader=lambda options: (
            JsonLines(text_key=options.text_key) if options.rows is None else JsonLabelled(shape=options.rows)
        ),
    ),
    "txt": TextFormat(
        holds="one document per file; ?split=line or ?split=paragraph cuts files",
        suffixes=(".txt",),
        reader=_txt_reader,
    ),
    "parquet": TextFormat(
        holds="one document per row",
        suffixes=(".parquet", ".pq"),
        reader=lambda options: ParquetTexts(text_key=options.text_key, shape=options.rows),
    ),
    "arrow": TextFormat(
        holds="Arrow IPC files or streams, one document per row",
        suffixes=(".arrow",),
        reader=lambda options: (
            ArrowTexts(text_key=options.text_key) if options.rows is None else ArrowLabelled(shape=options.rows)
        ),
    ),
}
