"""Lines become rows: what a row is, what its text is, and why one is refused."""

import re

import pytest

from headrace.errors import DataChanged, DataError
from headrace.formats.lines import TextLines
from headrace.sources import Source, open_source


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read("jsonl", b"...") -> (texts, opened source); each call is a new file."""
    opened = []

    def run(scheme, data, *, chunk_bytes=None, max_line_bytes=256 << 20, **fields):
        monkeypatch.setattr(TextLines, "max_line_bytes", max_line_bytes)
        path = tmp_path / f"{len(opened)}.{scheme}"
        path.write_bytes(data)
        source = open_source(
            Source(f"{scheme}:{path}", **({"split": "line"} if scheme == "txt" else {}), **fields),
            cache=tmp_path / "cache",
            chunk_bytes=chunk_bytes,
        )
        opened.append(source)
        texts = [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]
        assert len(texts) == source.manifest.rows == sum(file.rows for file in source.manifest.files)
        return texts, source

    yield run
    for source in opened:
        source.close()


def test_txt_lines_are_documents_and_an_empty_line_is_an_empty_document(read):
    texts, _ = read("txt", b"one\n\nthree\r\nfour\rfive\nlast")
    assert texts == ["one", "", "three", "four\rfive", "last"]


def test_only_newline_ends_a_line(read):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    assert read("txt", f"{text}\nnext\n".encode())[0] == [text, "next"]
    assert read("jsonl", '{"text":"a\u2028b\x85c"}\n{"text":"d"}\n'.encode())[0] == ["a\u2028b\x85c", "d"]


def test_nul_is_text(read):
    assert read("txt", b"a\0b\n\0\n")[0] == ["a\0b", "\0"]
    assert read("jsonl", b'{"text":"a\\u0000b"}\n')[0] == ["a\0b"]


@pytest.mark.parametrize("rest", [b"", b"\n", b"a", b"a\nb"])
def test_a_byte_order_mark_at_the_start_belongs_to_no_row(read, rest):
    assert read("txt", b"\xef\xbb\xbf" + rest)[0] == read("txt", rest)[0]
    assert read("jsonl", b'\xef\xbb\xbf{"text":"a"}\n')[0] == ["a"]


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file_has_no_rows_and_no_chunks(read, data):
    for scheme in ("txt", "jsonl"):
        texts, source = read(scheme, data)
        assert (texts, source.manifest.chunks, source.manifest.rows) == ([], 0, 0)


def test_blank_jsonl_lines_are_no_rows_and_are_counted(read):
    data = b'\n  \n{"text":"a"}\n\t\r\n\r\n {"text":"b"} \n\n{"text":"c"}\r\n   '
    for chunk_bytes in (1, 5, 16, 40, None):
        texts, source = read("jsonl", data, chunk_bytes=chunk_bytes)
        assert texts == ["a", "b", "c"]
        assert source.manifest.blank_lines == 6


def test_no_chunk_is_empty_even_where_all_its_lines_are_blank(read):
    _, source = read("jsonl", b"\n" * 500 + b'{"text":"a"}\n' + b" " * 300 + b"\n", chunk_bytes=50)
    assert source.manifest.chunk_rows.min() == 1


def test_a_dotted_text_key_reads_a_nested_field(read):
    data = b'{"a":{"b":{"c":"x"}},"n":1}\n{"a":{"z":0,"b":{"c":"y"}}}\n'
    assert read("jsonl", data, text_key="a.b.c")[0] == ["x", "y"]


def test_chunks_are_whole_lines_and_a_long_line_is_a_chunk_of_its_own(read):
    data = b"aa\nbb\n" + b"c" * 30 + b"\ndd\nee\nff"
    texts, source = read("txt", data, chunk_bytes=8)
    manifest = source.manifest
    assert texts == ["aa", "bb", "c" * 30, "dd", "ee", "ff"]
    assert manifest.chunk_start.tolist() == [0, 6, 37]
    assert manifest.chunk_end.tolist() == [6, 37, 45]
    assert manifest.chunk_line.tolist() == [0, 2, 3]


def test_the_chunk_size_is_a_1024th_of_the_source_within_its_bounds():
    assert [TextLines().chunk_bytes(n) for n in (0, 1 << 20, 1 << 28, 1 << 40)] == [65536, 65536, 262144, 1 << 20]


BAD = [
    (b'{"text":"\xff"}', r"it is not valid UTF-8 \(byte 0xff at 0"),
    (b'{"text":"\xed\xa0\x80"}', "it is not valid UTF-8"),
    (rb'{"text":"\ud800"}', "half of a surrogate pair"),
    (rb'{"text":"\udc00 and more"}', "half of a surrogate pair"),
    (b'{"text":"a"', "it is not a JSON value"),
    (b'{"text":"a\0b"}', "it is not a JSON value: invalid character"),
    (b'{"text":"a"} {"text":"b"}', "it is not a JSON value: trailing characters"),
    (b'{"text":null,"text":"x"}', "'text' stands in it more than once, and not every time as text"),
    (b'{"text":null}', "'text' is null, expected text"),
    (b'{"text":7}', "'text' is a number, expected text"),
    (b'{"text":["a"]}', "'text' is an array, expected text"),
    (b'["a"]', "the line is an array, expected an object with the key 'text'"),
    (b'"a"', "the line is text, expected an object"),
    (b'{"id":1,"txt":"a","body":2}', "it has no key 'text'; it has 'txt', 'body', 'id'"),
    (b"{}", "it has none at all"),
    (b"\x00", "it is not a JSON value"),
    (b'{"text":"a","x":' + b"[" * 100_000 + b"}", "nested too deeply"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_jsonl_row_stops_the_run_and_names_file_line_reason_and_remedy(read, line, reason):
    data = b'{"text":"a"}\n\n{"text":"b"}\n' + line + b'\n{"text":"c"}\n'
    with pytest.raises(DataError, match=rf"\d.jsonl, line 4: .*{reason}.*on_bad = \"skip\""):
        read("jsonl", data)


@pytest.mark.parametrize(("line", "reason"), BAD)
@pytest.mark.parametrize("chunk_bytes", [16, None])
def test_a_bad_jsonl_row_is_a_hole_when_skipped(read, line, reason, chunk_bytes):
    data = b'{"text":"a"}\n\n{"text":"b"}\n' + line + b'\n{"text":"c"}\n'
    texts, source = read("jsonl", data, on_bad="skip", chunk_bytes=chunk_bytes)
    assert texts == ["a", "b", None, "c"]
    [hole] = source.holes()
    assert (hole["file"], hole["row"], hole["rows"]) == (source.manifest.files[0].path, 2, 1)
    assert re.search(reason, hole["reason"])


@pytest.mark.parametrize(
    "value",
    [b'{"text":\n"c"}', b'{"text":"c","x":\n{}}', b'{"text":"c","x":{}\n,"y":{}}'],
    ids=["neither brace", "only {", "only }"],
)
def test_a_value_over_two_lines_and_two_values_on_a_line_do_not_cancel_out(read, value):
    """msgspec's decode_lines takes all four lines for four rows."""
    data = b'{"text":"a"} {"text":"b"}\n' + value + b'\n{"text":"d"}\n'
    assert read("jsonl", data, on_bad="skip")[0] == [None, None, None, "d"]


def test_a_nested_key_that_is_missing_names_the_keys_of_its_object(read):
    with pytest.raises(DataError, match="it has no key 'body'; it has 'bod', 'title'"):
        read("jsonl", b'{"doc":{"title":"t","bod":"x"}}\n', text_key="doc.body")
    with pytest.raises(DataError, match="doc is text, expected an object with the key 'body'"):
        read("jsonl", b'{"doc":"x"}\n', text_key="doc.body")


def test_a_bad_txt_row_is_named_or_skipped(read):
    data = b"a\nb\xff\r\nc"
    with pytest.raises(DataError, match=r"txt, line 2: it is not valid UTF-8 \(byte 0xff at 1"):
        read("txt", data)
    texts, source = read("txt", data, on_bad="skip")
    assert texts == ["a", None, "c"]
    assert [hole["row"] for hole in source.holes()] == [1]


def test_the_line_number_counts_from_the_start_of_the_file_not_of_the_chunk(read):
    data = b"".join(b'{"text":"%d"}\n\n' % i for i in range(100)) + b"oops\n"
    with pytest.raises(DataError, match=r"line 201: "):
        read("jsonl", data, chunk_bytes=64)


def test_only_the_first_thousand_holes_are_kept(read):
    texts, source = read("jsonl", b"x\n" * 2500, on_bad="skip")
    assert texts == [None] * 2500
    source.read(0)
    assert len(source.holes()) == 1000


def test_a_line_above_the_limit_is_bad_by_policy_and_its_neighbours_are_not(read):
    for long in (b"y" * 3_000_000, b"y" * 300):
        data = b'{"text":"a"}\n{"text":"' + long + b'"}\n{"text":"b"}\n'
        limit = len(long)
        with pytest.raises(DataError, match=rf"line 2: it is {len(long) + 11:,} bytes long, more than the {limit:,}"):
            read("jsonl", data, max_line_bytes=limit)
        assert read("jsonl", data, max_line_bytes=limit, on_bad="skip")[0] == ["a", None, "b"]
        assert read("jsonl", data, max_line_bytes=limit + 11)[0] == ["a", long.decode(), "b"]
        assert read("txt", data, max_line_bytes=limit, on_bad="skip")[0][1] is None


def test_a_file_rewritten_at_equal_size_with_other_line_ends_is_refused(read, tmp_path):
    _, source = read("txt", b"aa\nbb\n")
    fresh = open_source(source.source, cache=tmp_path / "cache", records=tmp_path / "fresh")
    (tmp_path / "0.txt").write_bytes(b"a\na\nb\n")
    with pytest.raises(DataChanged, match="held 2 rows in this chunk when they were counted and holds 3 now"):
        fresh.read(0)


def test_a_chunk_that_does_not_exist_is_an_index_error(read):
    _, source = read("txt", b"a\n")
    for chunk in (-1, 1):
        with pytest.raises(IndexError, match=f"chunk {chunk} of source"):
            source.read(chunk)
