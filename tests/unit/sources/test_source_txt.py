"""What a document of a txt source is: a file, unless paragraphs or lines are asked for."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, CursorMismatch, DataError
from headrace.formats import lines as line_format
from headrace.loader import Loader, TextDataset
from headrace.sources import Source, open_source

BLANK = " \t\r"


def documents(folder: Path, split: str | None, chunk_bytes: int | None = None, **fields) -> list[str | None]:
    source = Source(f"txt:{folder}/d", split=split, **fields)
    with open_source(source, cache=folder / "cache", chunk_bytes=chunk_bytes) as opened:
        texts = [text for chunk in range(opened.manifest.chunks) for text in opened.read(chunk)]
        assert len(texts) == opened.manifest.rows
        return texts


def written(folder: Path, *contents: bytes) -> Path:
    (folder / "d").mkdir()
    for number, content in enumerate(contents):
        (folder / "d" / f"{number}.txt").write_bytes(content)
    return folder


def test_a_file_is_a_document_unless_something_else_is_asked_for(tmp_path):
    written(tmp_path, b"one\n\n two\nthree\n\n \t\nfour", b"", b"\xef\xbb\xbfcrlf\r\n\r\nend")
    assert (
        documents(tmp_path, None) == documents(tmp_path, "file") == ["one\n\n two\nthree\n\n \t\nfour", "crlf\n\nend"]
    )
    assert documents(tmp_path, "paragraph") == ["one", " two\nthree", "four", "crlf", "end"]
    assert documents(tmp_path, "line") == ["one", "", " two", "three", "", " \t", "four", "crlf", "", "end"]


def by_hand(data: bytes) -> list[str]:
    """The paragraphs of a text, line by line."""
    found: list[list[str]] = [[]]
    for line in data.decode().removeprefix("\ufeff").split("\n"):
        if line.strip(BLANK):
            found[-1].append(line.removesuffix("\r"))
        elif found[-1]:
            found.append([])
    return ["\n".join(lines).replace("\r\n", "\n") for lines in found if lines]


LINES = st.lists(st.sampled_from(["", " ", "\t\r", "a", " b", "c\r", "é漢", "x" * 30]), max_size=20)


@given(lines=LINES, ended=st.booleans(), block=st.integers(1, 40), chunk_bytes=st.integers(1, 60))
def test_paragraphs_are_those_of_a_plain_reading_whatever_the_blocks_and_chunks(lines, ended, block, chunk_bytes):
    data = ("\n".join(lines) + ("\n" if ended else "")).encode()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_format, "BLOCK_BYTES", block)
        assert documents(written(Path(folder), data), "paragraph", chunk_bytes) == by_hand(data)


def test_a_document_that_is_not_utf8_is_named_or_skipped(tmp_path):
    written(tmp_path, b"good\n\nbad \xff\nline\n\nlast", b"fine")
    with pytest.raises(DataError, match=r"0.txt, document 1: it is not valid UTF-8"):
        documents(tmp_path, "file")
    assert documents(tmp_path, "file", on_bad="skip") == [None, "fine"]
    with pytest.raises(DataError, match=r"0.txt, line 3: it is not valid UTF-8"):
        documents(tmp_path, "paragraph")
    assert documents(tmp_path, "paragraph", on_bad="skip") == ["good", None, "last", "fine"]


def test_a_file_that_is_too_long_for_a_document_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(line_format.TextLines, "max_line_bytes", 99)
    written(tmp_path, b"x" * 100)
    opened = open_source(Source(f"txt:{tmp_path}/d"), cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"100 bytes long, more than the 99.*add \?split=paragraph or \?split=line"):
        opened.read(0)


def test_other_splits_are_refused():
    with pytest.raises(ConfigError, match="must be 'file', 'paragraph' or 'line', got 'word'"):
        Source("txt:books", split="word")
    with pytest.raises(ConfigError, match="split means something for hf: and txt: only"):
        Source("jsonl:web", split="line")


def state_of_lines(tmp_path: Path) -> dict:
    written(tmp_path, b"a line of text\n" * 40, b"another line\n" * 40)
    data = TextDataset([f"txt:{tmp_path}/d?split=line"], seq_len=16, lanes=2, cache=tmp_path / "c")
    assert data.fingerprint()["data:d"].endswith("(2 files, 80 rows)")  # in the words of 0.1, which had no other way
    loader = Loader(data, global_batch_size=2)
    next(loader)
    return loader.state_dict()


def test_a_state_that_read_lines_is_refused_with_the_spec_that_continues_it(tmp_path):
    state = state_of_lines(tmp_path)
    files = TextDataset([f"txt:{tmp_path}/d"], seq_len=16, lanes=2, cache=tmp_path / "c")
    with pytest.raises(CursorMismatch, match=r"line by line, as headrace 0.1 did.*add \?split=line"):
        Loader(files, global_batch_size=2).load_state_dict(state)
    lines = TextDataset([f"txt:{tmp_path}/d?split=line"], seq_len=16, lanes=2, cache=tmp_path / "c")
    Loader(lines, global_batch_size=2).load_state_dict(state)
