"""What a text format must know how to do: find the chunks of a file, load one, decode its rows.

    scan(file)                 where the chunks of a file are and how many rows each holds      once, then cached
    load(file, start, end)     the bytes of one chunk, and their hash                           every time it is read
    decode(loaded)             the texts of its rows                                            after the hash was checked

`start` and `end` mean what the format says: byte offsets of whole lines (lines.py), row groups (text_columns.py),
offsets of messages (text_columns.py). A new format is a class with these methods and an entry in `sources.text_formats`.

What is wrong with the bytes themselves is `Undecodable`, which on_bad = "skip" turns into a hole: it says the same on
every rank and every time. A disk that fails, a file that vanished or changed is any other DataError and always stops.
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
    """Line (or row) of the file at which each chunk begins, from 0: what an error counts from."""
    size: np.ndarray
    """Bytes of text in each chunk, as far as the format can tell without decoding: lanes are balanced by it."""
    blank_lines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A chunk's bytes as they were hashed; `payload` is the format's own."""

    hash: int
    size: int
    payload: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """Rows that cannot be used: the first one's place in the chunk, the lines before it in the chunk, and why."""

    row: int
    line: int
    reason: str
    rows: int = 1


class Reader(Protocol):
    """One format, bound to what a source asked of it. Its methods are called from many threads."""

    format: str
    suffixes: tuple[str, ...]
    packings: tuple[str, ...]
    """Suffixes of compressed files whose text it reads."""
    unit: str
    """What an error calls a row: "line" or "row"."""
    span: str
    """What an error calls [start, end): "bytes" or "row groups"."""

    def parameters(self) -> dict[str, Any]:
        """What a scan depends on besides the bytes."""
        ...

    def chunk_bytes(self, total: int) -> int:
        """How large a chunk should be in a source of `total` bytes; 0 where the files decide."""
        ...

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan: ...

    def load(self, file: ByteFile, start: int, end: int) -> Loaded: ...

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        """Exactly `rows` texts; None where a row is bad, and why. DataError if the chunk does not hold `rows` rows."""
        ...


def not_utf8(error: UnicodeDecodeError) -> str:
    """Why a row is bad, for every format alike."""
    return f"it is not valid UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start:,}: {error.reason})"


def all_bad(rows: int, reason: str) -> tuple[list[str | None], list[BadRow]]:
    """A chunk of which nothing can be used."""
    return [None] * rows, [BadRow(row=0, line=0, rows=rows, reason=reason)]
