"""The protocol of text formats: find the chunks of a file, load one, decode its rows.

    scan(file)                 places and row counts of the chunks of a file      once, then cached
    load(file, start, end)     the bytes of one chunk, and their hash             every time it is read
    decode(loaded)             the texts of its rows                              after the hash was checked

The meaning of `start` and `end` depends on the format: byte offsets of whole lines (`formats.lines`), row groups (`sources.text_parquet`),
offsets of messages (`sources.text_arrow`). A new format is a class with these methods and an entry in `sources.text_formats`.

Damaged bytes are `Undecodable`, which on_bad = "skip" turns into a hole; the reason is the same on every rank and every time. A disk that
fails, or a file that vanished or changed, is any other DataError and always stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.formats.byte_file import ByteFile


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScan:
    """The chunks of one file that hold rows, in file order."""

    start: np.ndarray
    end: np.ndarray
    rows: np.ndarray
    line: np.ndarray
    """Line (or row) of the file at which each chunk begins, from 0. Errors count from it."""
    size: np.ndarray
    """Bytes of text in each chunk, as far as the format can tell without decoding: lanes are balanced by it."""
    blank_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A chunk's bytes as they were hashed; the format decides what `payload` is."""

    hash: int
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """Consecutive rows that cannot be used: the first one's place in the chunk, the lines before it in the chunk, and why."""

    row: int
    line: int
    reason: str
    rows: int = 1


class Reader(Protocol):
    """One format with the options of a source. Its methods are called from many threads."""

    format: str
    suffixes: tuple[str, ...]
    packings: tuple[str, ...]
    """Suffixes of compressed files whose text it reads."""
    unit: str
    """Name of a row in errors: "line" or "row"."""
    span: str
    """Name of [start, end) in errors: "bytes" or "row groups"."""

    def parameters(self) -> dict[str, Any]:
        """Return the options that a scan depends on besides the bytes."""
        ...

    def chunk_bytes(self, total: int) -> int:
        """Return the size of a chunk in a source of `total` bytes; 0 if the files decide it."""
        ...

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan: ...

    def load(self, file: ByteFile, start: int, end: int) -> Loaded: ...

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        """Return exactly `rows` texts, None where a row is bad, and the bad rows. DataError if the chunk does not hold `rows` rows."""
        ...


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason of a bad row, the same for every format."""
    return f"it is not valid UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start:,}: {error.reason})"


def all_bad(rows: int, reason: str) -> tuple[list[str | None], list[BadRow]]:
    """Return the result of `decode` for a chunk of which no row can be used."""
    return [None] * rows, [BadRow(row=0, line=0, rows=rows, reason=reason)]
