"""Row groups become rows: only the text column is read, and only the bytes that were hashed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DataChanged, DataError
from headrace.formats import parquet
from headrace.formats.byte_file import RawFile
from headrace.sources import Source, open_source

TEXTS = ["a", "b\0", "", "é\u2028", "long " * 500]


def table(path, texts, *, rows=3, column="text", **options):
    numbers = pa.array(range(len(texts)))
    pq.write_table(pa.table({"n": numbers, column: texts}), path, row_group_size=rows, **options)
    return path


def opened(tmp_path, spec="parquet:d.parquet", **fields):
    return open_source(Source(spec, **fields), base=tmp_path, cache=tmp_path / "cache")


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_rows_come_back_in_order_whatever_the_writer_chose(tmp_path, compression, dictionary):
    table(tmp_path / "d.parquet", TEXTS * 4, compression=compression, use_dictionary=dictionary, data_page_size=64)
    source = opened(tmp_path)
    assert texts_of(source) == TEXTS * 4
    assert source.manifest.chunk_rows.tolist() == [3, 3, 3, 3, 3, 3, 2]
    assert source.manifest.chunk_start.tolist() == list(range(7))


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_every_type_that_holds_text_gives_the_same_text(tmp_path, kind):
    column = (
        pa.array(TEXTS, pa.string()).cast(kind)
        if not pa.types.is_dictionary(kind)
        else pa.array(TEXTS).dictionary_encode()
    )
    table(tmp_path / "d.parquet", column)
    assert texts_of(opened(tmp_path)) == TEXTS


def test_only_the_text_column_is_read(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": TEXTS, "image": [b"x" * 100_000] * 5}), tmp_path / "d.parquet", compression="none")
    source = opened(tmp_path)
    read_into, sizes = RawFile.read_into, []
    monkeypatch.setattr(
        RawFile, "read_into", lambda file, view, offset: (sizes.append(len(view)), read_into(file, view, offset))
    )
    assert texts_of(source) == TEXTS
    assert 0 < sum(sizes) < 10_000


def test_a_dotted_key_reads_a_field_of_a_struct_and_a_column_with_a_dot_in_its_name(tmp_path):
    pq.write_table(pa.table({"doc": [{"id": 1, "body": "x"}, None, {"id": 2, "body": None}]}), tmp_path / "d.parquet")
    assert texts_of(opened(tmp_path, text_key="doc.body", on_bad="skip")) == ["x", None, None]
    pq.write_table(pa.table({"doc.body": ["y"]}), tmp_path / "e.parquet")
    assert texts_of(opened(tmp_path, "parquet:e.parquet", text_key="doc.body")) == ["y"]


def test_a_missing_column_names_those_that_exist_nearest_first(tmp_path):
    pq.write_table(pa.table({"id": [1], "txt": ["a"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d.parquet has no column 'text'; it has 'txt', 'id'. Set text_key"):
        opened(tmp_path)


@pytest.mark.parametrize(("column", "kind"), [([1, 2], "INT64"), ([1.5, None], "DOUBLE")])
def test_a_column_that_is_no_text_is_refused_at_the_start(tmp_path, column, kind):
    pq.write_table(pa.table({"text": column}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=rf"column 'text' of .*d.parquet holds {kind}, expected one text a row"):
        opened(tmp_path)


def test_a_column_of_lists_is_refused_at_the_start(tmp_path):
    pq.write_table(pa.table({"text": [["a"], ["b", "c"]]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="holds lists, expected one text a row"):
        opened(tmp_path, text_key="text.list.element")


@pytest.mark.parametrize("dictionary", [True, False])
def test_a_null_and_a_text_that_is_not_utf8_are_bad_rows_with_their_row_number(tmp_path, dictionary):
    broken = pa.StringArray.from_buffers(
        4,
        pa.py_buffer(np.array([0, 1, 1, 3, 4], dtype=np.int32).tobytes()),
        pa.py_buffer(b"a\xff\xfeb"),
        pa.py_buffer(b"\x0d"),
    )
    assert broken.null_count == 1
    pq.write_table(
        pa.table({"text": pa.concat_arrays([pa.array(["x", "y"]), broken])}),
        tmp_path / "d.parquet",
        use_dictionary=dictionary,
    )
    with pytest.raises(
        DataError, match=r'd.parquet, row 4: its text is null \(2 bad rows in this chunk\).*on_bad = "skip"'
    ):
        texts_of(opened(tmp_path))
    source = opened(tmp_path, on_bad="skip")
    assert texts_of(source) == ["x", "y", "a", None, None, "b"]
    assert [(hole["row"], hole["reason"][:24]) for hole in source.holes()] == [
        (3, "its text is null"),
        (4, "it is not valid UTF-8 (b"),
    ]


def test_a_file_with_no_rows_and_a_file_with_no_row_groups_have_none(tmp_path):
    table(tmp_path / "a.parquet", pa.array([], pa.string()))
    with pq.ParquetWriter(tmp_path / "b.parquet", pa.schema([("text", pa.string())])):
        assert True
    table(tmp_path / "c.parquet", ["x"])
    source = opened(tmp_path, "parquet:*.parquet")
    assert [file.rows for file in source.manifest.files] == [0, 0, 1]
    assert texts_of(source) == ["x"]
    assert source.manifest.locate(0) == (2, 0)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: b"", "is not a parquet file: it has 0 bytes"),
        (lambda data: b"PAR1", "is not a parquet file: it has 4 bytes"),
        (lambda data: b'{"text": "a"}\n' * 9, "is not a parquet file, or was cut short"),
        (lambda data: data[:-100], "is not a parquet file, or was cut short"),
        (lambda data: data[:200] + data[260:], "d.parquet"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "its footer claims 2,147,483,647 bytes"),
        (lambda data: data[:-8] + b"\x05\0\0\0PAR1", "d.parquet is damaged"),
        (lambda data: data[:-400] + bytes(392) + data[-8:], "d.parquet is damaged: its footer does not parse"),
        (lambda data: data[:-8] + data[-8:-4] + b"PARE", "is an encrypted parquet file"),
    ],
)
def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path, damage, sentence):
    path = table(tmp_path / "d.parquet", TEXTS * 4)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=sentence) as caught:
        texts_of(opened(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_row_group_whose_pages_are_damaged_stops_the_run_or_becomes_holes(tmp_path):
    path = table(tmp_path / "d.parquet", TEXTS * 4, compression="zstd")
    column = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset
    data[start : start + column.total_compressed_size] = b"\xaa" * column.total_compressed_size
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"d.parquet, row 4: row group 1 cannot be decoded \(.*3 bad rows in this chunk"
    ):
        texts_of(opened(tmp_path))
    source = opened(tmp_path, on_bad="skip")
    expected = TEXTS * 4
    assert texts_of(source) == [*expected[:3], None, None, None, *expected[6:]]
    assert [(hole["row"], hole["rows"]) for hole in source.holes()] == [(3, 3)]


def test_a_row_group_that_calls_the_column_by_another_name_than_the_schema_is_refused(tmp_path):
    path = table(tmp_path / "d.parquet", ["a"])
    in_schema, in_group = b"\x04text", b"\x04texu"
    head, name, rest = path.read_bytes().partition(in_schema)
    path.write_bytes(head + name + rest.replace(in_schema, in_group, 1))
    with pytest.raises(DataError, match=r"footer does not parse \(column text is called texu in a row group\)"):
        opened(tmp_path)


def test_footers_of_many_shapes_say_what_pyarrow_says(tmp_path):
    columns_ = {
        "a": [1, 2],
        "b": [{"c": {"d": "x", "e": 1.5}, "f": [1]}, None],
        "g": [["y"], []],
        "h": [{"k": 1}, {}],
        "text": ["t", "u"],
    }
    pq.write_table(pa.table(columns_), tmp_path / "d.parquet", row_group_size=1)
    with RawFile(tmp_path / "d.parquet") as file:
        read = parquet.ParquetFile(file)
    footer = read.footer
    theirs = pq.read_metadata(tmp_path / "d.parquet")
    assert [p.path for p in footer.pages[0]] == [c.path for c in map(theirs.schema.column, range(theirs.num_columns))]
    assert {leaf.path: parquet.holds(leaf) for leaf in read.leaves}["b.c.d"] == "text"
    assert list(map(parquet.holds, read.leaves)).count("lists") == 2
    assert footer.group_rows == (1, 1)
    for group, pages in enumerate(footer.pages):
        for index, ours in enumerate(pages):
            column = theirs.row_group(group).column(index)
            starts = [offset for offset in (column.dictionary_page_offset, column.data_page_offset) if offset]
            assert (ours.offset, ours.compressed, ours.uncompressed, ours.has_dictionary) == (
                min(starts),
                column.total_compressed_size,
                column.total_uncompressed_size,
                column.has_dictionary_page,
            )


def test_page_checksums_are_checked_where_the_writer_left_them(tmp_path):
    path = table(
        tmp_path / "d.parquet",
        ["needle in the text"] * 3,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
        write_statistics=False,
    )
    path.write_bytes(path.read_bytes().replace(b"needle", b"noodle", 1))
    with pytest.raises(DataError, match=r"row group 0 cannot be decoded \(.*(CRC|checksum)"):
        texts_of(opened(tmp_path))


def test_a_changed_byte_in_the_text_column_is_refused_and_one_in_another_column_is_not(tmp_path):
    path = table(tmp_path / "d.parquet", ["needle"] * 300, rows=100, compression="none", use_dictionary=False)
    with opened(tmp_path) as source:
        texts_of(source)
    whole = path.read_bytes()
    number = pq.read_metadata(path).row_group(2).column(0).data_page_offset + 40
    path.write_bytes(whole[:number] + bytes([whole[number] ^ 1]) + whole[number + 1 :])
    assert texts_of(opened(tmp_path)) == ["needle"] * 300
    place = pq.read_metadata(path).row_group(1).column(1).data_page_offset + 60
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    source = opened(tmp_path)
    source.bind_records()
    assert source.read(0) == ["needle"] * 100
    with pytest.raises(DataChanged, match=r"d.parquet \(row group 1\) of source 'd' changed since it was first read"):
        source.read(1)


def test_a_row_group_that_claims_to_unpack_to_more_than_the_cap_is_refused(tmp_path, monkeypatch):
    table(tmp_path / "d.parquet", ["x" * 100_000], use_dictionary=False)
    monkeypatch.setattr(parquet, "_MAX_COLUMN_BYTES", 50_000)
    with pytest.raises(DataError, match=r"unpacks to 100,\d+ bytes, more than the 50,000 a chunk may have"):
        opened(tmp_path)


def test_a_row_group_that_claims_too_many_rows_is_refused(tmp_path, monkeypatch):
    table(tmp_path / "d.parquet", ["x"] * 100, rows=100)
    monkeypatch.setattr(parquet, "_MAX_GROUP_ROWS", 99)
    with pytest.raises(
        DataError, match=r"d.parquet has a row group 0 that claims 100 rows; between 0 and 99 are accepted"
    ):
        opened(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of memory")
def test_a_dictionary_that_stands_for_hundreds_of_gigabytes_of_text_is_held_once(tmp_path):
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 10_000_000]))
    pq.write_table(pa.table({"text": values}), tmp_path / "d.parquet", dictionary_pagesize_limit=1 << 30)
    script = (
        "import sys; from pathlib import Path; from headrace.sources import Source, open_source\n"
        "source = open_source(Source('parquet:d.parquet'), base=Path(sys.argv[1]), cache=Path(sys.argv[1]) / 'cache')\n"
        "texts = source.read(0)\n"
        "peak = next(row for row in open('/proc/self/status') if row.startswith('VmHWM'))\n"
        "print(len(texts), sum(map(len, texts)), int(peak.split()[1]) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    rows, characters, peak_mib = map(int, done.stdout.split())
    assert (rows, characters) == (20_000, 200_000_000_000)
    assert peak_mib < 400
