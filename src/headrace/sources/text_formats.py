"""The registry of text formats: the scheme of a spec, the suffixes of its files, and the classes that read them.

A new format is a class with the methods of `formats.chunks.Reader`, and an entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import ConfigError
from headrace.formats.chunks import Reader
from headrace.sources.rows import RowShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """One format of text files."""

    holds: str
    """What a file holds, for messages."""
    suffixes: tuple[str, ...]
    """What a bare path must end in for this format to be proposed."""
    texts: str
    """Module and class that read one text a row."""
    labelled: str | None = None
    """Module and class that read several columns a row; None where rows have no columns."""
    is_lines: bool = False
    """Whether it takes `max_line_bytes`."""
    has_key: bool = True
    """Whether the text is in a field or column that `text_key` names."""
    split_texts: Mapping[str, str] = field(default_factory=dict)
    """Module and class that cut a file into documents in another way than `texts`, by the value of `split`."""


TEXT_FORMATS: dict[str, TextFormat] = {
    "jsonl": TextFormat(
        holds="one JSON object per line",
        suffixes=(".jsonl", ".ndjson"),
        texts="headrace.formats.lines:JsonLines",
        labelled="headrace.sources.rows:JsonLabelled",
        is_lines=True,
    ),
    "txt": TextFormat(
        holds="one document per file; ?split=line or ?split=paragraph cuts files",
        suffixes=(".txt",),
        texts="headrace.formats.lines:TextLines",
        split_texts={
            "file": "headrace.formats.text_files:TextFiles",
            "paragraph": "headrace.formats.text_files:TextParagraphs",
        },
        is_lines=True,
        has_key=False,
    ),
    "parquet": TextFormat(
        holds="one document per row",
        suffixes=(".parquet", ".pq"),
        texts="headrace.sources.text_parquet:ParquetTexts",
        labelled="headrace.sources.text_parquet:ParquetTexts",
    ),
    "arrow": TextFormat(
        holds="Arrow IPC files or streams, one document per row",
        suffixes=(".arrow",),
        texts="headrace.sources.text_arrow:ArrowTexts",
        labelled="headrace.sources.text_arrow:ArrowLabelled",
    ),
}


def text_reader(
    scheme: str, text_key: str, max_line_bytes: int, rows: RowShape | None, *, split: str | None = None
) -> Reader:
    """The reader of a scheme, for one text a row or for the columns of `rows`. `split`: how a txt file is cut; by lines if None."""
    text_format = TEXT_FORMATS[scheme]
    options: dict[str, Any] = {"max_line_bytes": max_line_bytes} if text_format.is_lines else {}
    if rows is None:
        place = text_format.split_texts.get(split or "", text_format.texts)
        options |= {"text_key": text_key} if text_format.has_key else {}
    elif text_format.labelled is not None:
        place = text_format.labelled
        options["shape"] = rows
    else:
        raise ConfigError(
            f"a {scheme} file has one text a line and no columns {', '.join(rows.columns)}; use jsonl:, parquet: or arrow:"
        )
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)(**options)
