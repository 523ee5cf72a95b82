"""Lines of text and JSON lines: the lines of a file in chunks, and the text of each line.

    txt     with ?split=line a line is a document; \\n or \\r\\n ends it; an empty line is an empty document
    jsonl   a line is an object with the text in one field; a line of nothing but blanks is no row

Chunks are runs of whole lines of at most `chunk_bytes`; a longer line is a chunk of its own. A file is scanned block by
block with numpy, at 2 GB/s of one core, short lines at 0.7. Only \\n ends a line: U+2028 and the like are text. A byte-order mark at the start
of a file belongs to no row.

jsonl is decoded a chunk at a time by msgspec, into a type that holds nothing but the text (docs/decisions/text-sources.md). msgspec's
`decode_lines` takes any white space for a line end: a value may span lines, and a line may hold two values. So its answer is used only where
every line begins with { and ends with }: between } and { no JSON value can continue, hence each line is one value. Other chunks are
decoded line by line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import xxhash

from headrace.errors import DataChanged, nearest
from headrace.formats.byte_file import ACCEPT_DATA, ByteFile
from headrace.formats.chunks import BadRow, FileScan, Loaded, not_utf8
from headrace.formats.compressed import PACKINGS
from headrace.order import chunk_hash

BLOCK_BYTES = 256 << 10
BOM = b"\xef\xbb\xbf"
NEWLINE, _RETURN, _OPEN, _CLOSE = 10, 13, 123, 125
BLANKS = b" \t\r"
_LAST_BLANK = 32
_IS_BLANK = np.isin(np.arange(256), list(BLANKS + b"\n"))
_ZERO = np.zeros(1, dtype=np.int64)


class TextLines:
    """A document per line."""

    format = "txt"
    suffixes: tuple[str, ...] = (".txt",)
    packings: tuple[str, ...] = PACKINGS
    unit = "line"
    span = "bytes"
    max_line_bytes = 256 << 20
    """A longer line, or a longer document of a txt file, is a bad row."""
    _blank_is_row = True

    def parameters(self) -> dict[str, Any]:
        return {}

    def chunk_bytes(self, total: int) -> int:
        """Return a 1024th of the source, at least 256 KiB (64 KiB for sources below 64 MiB) and at most 1 MiB.

        A chunk costs 60 us besides its bytes, so larger ones are cheaper to read, and a few hundred of them are enough to deal.
        """
        return min(max(total // 1024, 256 << 10 if total >= 64 << 20 else 64 << 10), 1 << 20)

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        cuts = np.array(list(self._cuts(file, chunk_bytes)), dtype=np.int64).reshape(-1, 4)
        line = np.cumsum(cuts[:, 2]) - cuts[:, 2]
        blank = int(np.sum(cuts[:, 2] - cuts[:, 3]))
        kept = cuts[:, 3] > 0
        start, end, _, rows = cuts[kept].T.copy()
        return FileScan(start=start, end=end, rows=rows, line=line[kept], size=end - start, blank_lines=blank)

    def load(self, file: ByteFile, start: int, end: int) -> Loaded:
        if end - start > self.max_line_bytes + 2 and end - start > 1 << 20:
            # A chunk of this size is one line. It is hashed in pieces and never held.
            hasher = xxhash.xxh3_64()
            buffer = piece = memoryview(bytearray(1 << 20))
            for offset in range(start, end, len(buffer)):
                piece = buffer[: min(len(buffer), end - offset)]
                file.read_into(piece, offset)
                hasher.update(piece)
            line_bytes = end - start - (piece[-1] == NEWLINE)
            return Loaded(hash=hasher.intdigest(), payload=line_bytes)
        data = file.read(start, end - start)
        return Loaded(hash=chunk_hash(memoryview(data)), payload=data)

    def decode(self, file: ByteFile, loaded: Loaded, rows: int) -> tuple[list[str | None], list[BadRow]]:
        if isinstance(loaded.payload, int):
            if rows != 1:
                raise other_rows(file, rows, 1)
            return [None], [BadRow(row=0, line=0, reason=self._too_long(loaded.payload))]
        texts = self._decode_all(loaded.payload, rows)
        if texts is not None:
            return texts, []
        return self._decode_each(file, loaded.payload, rows)

    def _cuts(self, file: ByteFile, chunk_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, end, lines, rows) of every chunk: as many whole lines as fit, or one that does not."""
        end = start = text_start(file)
        lines = rows = 0  # of the open chunk, which is [start, end)
        for ends, is_text in line_ends(file, start):
            rows_before = np.concatenate((_ZERO, np.cumsum(is_text | self._blank_is_row)))
            at = 0
            while at < len(ends):
                fit = int(ends.searchsorted(start + chunk_bytes, side="right"))
                if fit == at and lines == 0:
                    fit = at + 1  # a line that fits in no chunk is one
                if fit > at:
                    end = int(ends[fit - 1])
                    lines += fit - at
                    rows += int(rows_before[fit] - rows_before[at])
                    at = fit
                if at < len(ends) or end - start >= chunk_bytes:
                    yield start, end, lines, rows
                    start, lines, rows = end, 0, 0
        if lines:
            yield start, end, lines, rows

    def _too_long(self, size: int) -> str:
        return f"it is {size:,} bytes long, more than the {self.max_line_bytes:,} that are read"

    def _decode_all(self, data: bytearray, rows: int) -> list[str | None] | None:
        """Return all texts at once, or None if the chunk has to be decoded line by line."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return None
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
        texts: list[str | None] = list(text.split("\n"))
        if text.endswith("\n"):
            texts.pop()
        return texts if len(texts) == rows and len(data) <= self.max_line_bytes else None

    def _decode_each(self, file: ByteFile, data: bytearray, rows: int) -> tuple[list[str | None], list[BadRow]]:
        texts: list[str | None] = []
        bad: list[BadRow] = []
        for number, line in enumerate(split_lines(data)):
            if not self._blank_is_row and not line.strip(BLANKS):
                continue
            text, reason = (
                self._decode_line(line) if len(line) <= self.max_line_bytes else (None, self._too_long(len(line)))
            )
            if reason:
                bad.append(BadRow(row=len(texts), line=number, reason=reason))
            texts.append(text)
        if len(texts) != rows:
            raise other_rows(file, rows, len(texts))
        return texts, bad

    def _decode_line(self, line: bytes) -> tuple[str | None, str]:
        try:
            return line.removesuffix(b"\r").decode("utf-8"), ""
        except UnicodeDecodeError as error:
            return None, not_utf8(error)


class JsonLines(TextLines):
    """A JSON object per line, the text in one field of it."""

    format = "jsonl"
    suffixes = (".jsonl", ".ndjson")
    _blank_is_row = False

    def __init__(self, *, text_key: str) -> None:
        self.text_key = text_key
        self._keys = text_key.split(".")
        row: Any = str
        for key in reversed(self._keys):
            row = msgspec.defstruct("Row", [("value", row)], rename={"value": key}, gc=False)
        self._decoder: Any = msgspec.json.Decoder(row)

    def _decode_all(self, data: bytearray, rows: int) -> list[str | None] | None:
        if len(data) > self.max_line_bytes:
            return None
        if not _is_objects(data, rows):
            return None
        try:
            values = self._decoder.decode_lines(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        for _ in self._keys[1:]:
            values = [value.value for value in values]
        return [value.value for value in values] if len(values) == rows else None

    def _decode_line(self, line: bytes) -> tuple[str | None, str]:
        try:
            value = self._decoder.decode(line)
        except UnicodeDecodeError as error:
            return None, not_utf8(error)
        except RecursionError:
            return None, "it is nested too deeply to be parsed"
        except msgspec.ValidationError as error:
            return None, self._misfit(line, str(error))
        except msgspec.MsgspecError as error:
            return None, _not_json(line, str(error))
        for _ in self._keys:
            value = value.value
        return value, ""

    def _misfit(self, line: bytes, message: str) -> str:
        """Describe valid JSON without a text under the key: which keys exist, nearest first, or what is there instead."""
        try:
            found: Any = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            return message
        for depth, key in enumerate(self._keys):
            where = ".".join(self._keys[:depth]) or "the line"
            if not isinstance(found, dict):
                return f"{where} is {_type_name(found)}, expected an object with the key {key!r}"
            if key not in found:
                keys = ", ".join(repr(k if len(k) <= 40 else k[:40] + "…") for k in nearest(key, found)[:8])
                return f"it has no key {key!r}; it has {keys or 'none at all'} (set text_key to the one that holds the text)"
            found = found[key]
        if isinstance(found, str):  # the key is there twice: the struct decoder saw the first value, this one the last
            return f"{self.text_key!r} stands in it more than once, and not every time as text"
        return f"{self.text_key!r} is {_type_name(found)}, expected text"


def text_start(file: ByteFile) -> int:
    """Return the offset of the first byte after a byte-order mark."""
    return len(BOM) if file.size >= len(BOM) and file.read(0, len(BOM)) == BOM else 0


def blocks(file: ByteFile, start: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (offset, bytes) of a file from `start` on, in blocks of 256 KiB. All blocks use the same memory."""
    buffer = np.empty(min(BLOCK_BYTES, file.size - start), np.uint8)
    for offset in range(start, file.size, max(1, len(buffer))):
        window = buffer[: file.size - offset]
        file.read_into(window.data, offset)
        yield offset, window


def line_ends(file: ByteFile, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, block by block from byte `start` on, where the lines of a file end and which of them hold more than blanks.

    A line ends after its line feed, the last one with the file. Of a line longer than a block nothing is kept.
    """
    open_is_text = False  # whether the line that is open at the block's start has shown a byte that is not blank
    for offset, window in blocks(file, start):
        ends = (window == NEWLINE).nonzero()[0] + 1
        if offset + len(window) == file.size and window[-1] != NEWLINE:
            ends = np.append(ends, len(window))
        begins = np.concatenate((_ZERO, ends))
        begins = begins[begins < len(window)]  # of the lines that end here, and of the one that stays open
        is_text = np.maximum.reduceat(window, begins) > _LAST_BLANK
        if not is_text.all() and not _IS_BLANK[window[window < _LAST_BLANK]].all():  # control characters are text
            is_text = np.logical_or.reduceat(~_IS_BLANK[window], begins)
        is_text[0] |= open_is_text
        open_is_text = len(begins) > len(ends) and bool(is_text[-1])
        yield ends + offset, is_text[: len(ends)]


def split_lines(data: bytearray) -> Iterator[bytes]:
    """Yield the lines without their \\n, one at a time: a chunk of many lines is never held twice."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        yield bytes(memoryview(data)[start:end])
        start = end + 1


def _is_objects(data: bytearray, rows: int) -> bool:
    """Return whether the chunk is `rows` lines that each begin with { and end with }."""
    array = np.frombuffer(data, dtype=np.uint8)
    newlines = (array == NEWLINE).nonzero()[0]
    count, ended = len(newlines), data[-1] == NEWLINE
    if count + (not ended) != rows or data[0] != _OPEN:
        return False
    closed = array[newlines - 1]
    if np.count_nonzero(closed == _CLOSE) != count:
        lasts = newlines - 1
        lasts -= closed == _RETURN
        if np.count_nonzero(array[lasts] == _CLOSE) != count:
            return False
    inner = newlines[:-1] if ended else newlines
    return np.count_nonzero(array[inner + 1] == _OPEN) == len(inner)


def _not_json(line: bytes, message: str) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return not_utf8(error)
    if "surrogate" in message or "hex escape" in message or (b"\\ud" in line.lower() and "truncated" in message):
        return "it holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    return f"it is not a JSON value: {message.removeprefix('JSON is malformed: ')}"


def _type_name(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def other_rows(file: ByteFile, expected: int, found: int) -> DataChanged:
    return DataChanged(
        f"{file.path} held {expected:,} rows in this chunk when they were counted and holds {found:,} now: the file was "
        f"written to since. Restore it, or {ACCEPT_DATA}."
    )
