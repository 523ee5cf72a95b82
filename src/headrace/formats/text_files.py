"""Text files as documents: a whole file, or its paragraphs.

    TextFiles        a file is a document
    TextParagraphs   a document is a run of lines between blank lines

`formats.lines.TextLines` makes a document of each line. In all three a byte-order mark belongs to no document, and \\r\\n becomes \\n.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.formats.byte_file import ByteFile
from headrace.formats.chunks import BadRow, FileScan, not_utf8
from headrace.formats.lines import BLANKS, TextLines, line_ends, other_rows, split_lines, text_start


class TextFiles(TextLines):
    """A document per file. Each file is one chunk; an empty file has no document."""

    unit = "document"

    def parameters(self) -> dict[str, Any]:
        return {"split": "file"}

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        start = text_start(file)
        begin = np.full(1 if file.size > start else 0, start, np.int64)
        end = np.full_like(begin, file.size)
        return FileScan(start=begin, end=end, rows=np.ones_like(begin), line=np.zeros_like(begin), size=end - begin)

    def decode(self, file: ByteFile, loaded: Any, rows: int) -> tuple[list[str | None], list[BadRow]]:
        if rows != 1:
            raise other_rows(file, rows, 1)
        text, reason = self._document(loaded.payload)
        return [text], [BadRow(row=0, line=0, reason=reason)] if reason else []

    def _document(self, payload: Any) -> tuple[str | None, str]:
        size = payload if isinstance(payload, int) else len(payload)
        if size > self.max_line_bytes:
            return (
                None,
                f"{self._too_long(size)}. To cut it into documents, add ?split=paragraph or ?split=line to the spec",
            )
        return _decoded(payload)


class TextParagraphs(TextLines):
    """A document per paragraph: lines that hold more than blanks, up to a blank line or the end of the file."""

    def parameters(self) -> dict[str, Any]:
        return {"split": "paragraph"}

    def scan(self, file: ByteFile, chunk_bytes: int) -> FileScan:
        starts, lines = self._paragraphs(file)
        borders = np.append(starts, file.size)
        cuts = [0]  # the first paragraph of each chunk
        while cuts[-1] < len(starts):
            fit = int(borders.searchsorted(borders[cuts[-1]] + chunk_bytes, side="right")) - 1
            cuts.append(min(max(fit, cuts[-1] + 1), len(starts)))
        at = np.array(cuts, dtype=np.int64)
        start, end = borders[at[:-1]], borders[at[1:]]
        return FileScan(start=start, end=end, rows=np.diff(at), line=lines[at[:-1]], size=end - start)

    def _paragraphs(self, file: ByteFile) -> tuple[np.ndarray, np.ndarray]:
        """Find the paragraphs of a file: the offset at which each begins, and the number of lines before it."""
        starts, lines = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        line_start, line = text_start(file), 0  # the line that is open at the block's start
        after_blank = True  # whether the line before it was blank, or there is none
        for ends, is_text in line_ends(file, line_start):
            if not len(ends):
                continue
            begins = is_text & np.concatenate(([after_blank], ~is_text[:-1]))
            starts.append(np.concatenate(([line_start], ends[:-1]))[begins])
            lines.append(line + begins.nonzero()[0])
            line_start, line, after_blank = int(ends[-1]), line + len(ends), not is_text[-1]
        return np.concatenate(starts), np.concatenate(lines)

    def decode(self, file: ByteFile, loaded: Any, rows: int) -> tuple[list[str | None], list[BadRow]]:
        if isinstance(loaded.payload, int):
            return super().decode(file, loaded, rows)
        texts: list[str | None] = []
        bad: list[BadRow] = []
        own: list[bytes] = []
        number = 0

        def finish() -> None:
            if own:
                text, reason = _decoded(b"\n".join(own))
                if reason:
                    bad.append(BadRow(row=len(texts), line=number - len(own), reason=reason))
                texts.append(text)
                own.clear()

        for line in split_lines(loaded.payload):
            if line.strip(BLANKS):
                own.append(line.removesuffix(b"\r"))
            else:
                finish()
            number += 1
        finish()
        if len(texts) != rows:
            raise other_rows(file, rows, len(texts))
        return texts, bad


def _decoded(data: bytes | bytearray) -> tuple[str | None, str]:
    try:
        return data.decode("utf-8").replace("\r\n", "\n"), ""
    except UnicodeDecodeError as error:
        return None, not_utf8(error)
