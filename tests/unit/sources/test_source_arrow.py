"""Record batches become rows: of a file or a stream, only the text column is read, and only the bytes that were hashed."""

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import DataChanged, DataError
from headrace.formats.arrow import PlacedMessage
from headrace.formats.arrow_messages import BATCH, Batch
from headrace.formats.byte_file import RawFile
from headrace.sources import Source, open_source, text_arrow
from headrace.sources.text_arrow import ArrowTexts

TEXTS = ["a", "b\0", "", "é\u2028", "long " * 500]


def written(path, table, *, form="stream", rows=3, codec=None, legacy=False):
    options = pa.ipc.IpcWriteOptions(compression=codec, use_legacy_format=legacy)
    make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with make(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def opened(tmp_path, spec="arrow:d.arrow", **fields):
    return open_source(Source(spec, **fields), base=tmp_path, cache=tmp_path / "cache")


def texts_of(source):
    return [text for chunk in range(source.manifest.chunks) for text in source.read(chunk)]


@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("legacy", [False, True])
def test_rows_come_back_in_order_whatever_the_writer_chose(tmp_path, form, codec, legacy):
    table = pa.table({"n": range(20), "text": TEXTS * 4, "after": [[1.5, None]] * 20})
    written(tmp_path / "d.arrow", table, form=form, codec=codec, legacy=legacy)
    source = opened(tmp_path)
    assert texts_of(source) == TEXTS * 4
    assert source.manifest.chunk_rows.tolist() == [3, 3, 3, 3, 3, 3, 2]
    assert source.manifest.locate(7) == (0, 7)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()],
    ids=str,
)
def test_every_type_that_holds_text_gives_the_same_text(tmp_path, kind):
    texts = [*TEXTS, None]
    column = pa.array([t and t.encode() for t in texts] if "binary" in str(kind) else texts, kind)
    written(
        tmp_path / "d.arrow",
        pa.table({"views": pa.array(["longer than twelve bytes"] * 6, pa.string_view()), "text": column}),
    )
    assert texts_of(opened(tmp_path, on_bad="skip")) == texts


BESIDE = {
    "null": pa.array([None] * 2),
    "lists": pa.array([[1], None]),
    "large lists": pa.array([["x"], []], pa.large_list(pa.string())),
    "fixed lists": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
    "list views": pa.array([[1], [2]], pa.list_view(pa.int16())),
    "maps": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
    "structs": pa.array([{"a": {"b": "x", "c": [1]}, "d": 1}, None]),
    "dictionaries": pa.array(["u", "v"]).dictionary_encode(),
    "decimals": pa.array([1, 2], pa.decimal128(5, 1)),
    "fixed bytes": pa.array([b"ab", b"cd"], pa.binary(2)),
    "booleans": pa.array([True, None]),
    "sparse unions": pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["x", "y"])]),
    "dense unions": pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["x"])]
    ),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["r"])),
    "extensions": pa.array([b"0" * 16, b"1" * 16], pa.uuid()),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_the_text_column_is_found_behind_columns_of_any_type(tmp_path, beside):
    written(tmp_path / "d.arrow", pa.table({"x": BESIDE[beside], "text": ["first", "second"], "y": BESIDE[beside]}))
    assert texts_of(opened(tmp_path)) == ["first", "second"]


def test_only_the_text_column_is_read(tmp_path, monkeypatch):
    written(
        tmp_path / "d.arrow", pa.table({"image": [b"x" * 100_000] * 5, "text": TEXTS, "more": [b"y" * 100_000] * 5})
    )
    source = opened(tmp_path)
    read_into, sizes = RawFile.read_into, []
    monkeypatch.setattr(
        RawFile, "read_into", lambda file, view, offset: (sizes.append(len(view)), read_into(file, view, offset))
    )
    assert texts_of(source) == TEXTS
    assert 0 < sum(sizes) < 10_000


def test_a_dotted_key_reads_a_field_of_a_struct_and_a_null_struct_has_no_text(tmp_path):
    docs = pa.array([{"id": 1, "in": {"body": "x"}}, None, {"id": 2, "in": None}, {"id": 3, "in": {"body": None}}])
    written(tmp_path / "d.arrow", pa.table({"n": range(4), "doc": docs}), rows=4)
    source = opened(tmp_path, text_key="doc.in.body", on_bad="skip")
    assert texts_of(source) == ["x", None, None, None]
    assert [hole["row"] for hole in source.holes()] == [1, 2, 3]
    written(tmp_path / "e.arrow", pa.table({"doc.body": ["y"]}))
    assert texts_of(opened(tmp_path, "arrow:e.arrow", text_key="doc.body")) == ["y"]


@pytest.mark.parametrize(
    ("column", "key", "sentence"),
    [
        (["a"], "txt", r"d.arrow has no column 'txt'; it has 'text', 'id'. Set text_key"),
        ([1], "text", "column 'text' of .*d.arrow holds int64, expected one text a row"),
        ([["a"]], "text", "holds list<.*string>, expected one text a row"),
        (pa.array(["a"]).dictionary_encode(), "text", "or write it without a dictionary"),
        (["a"], "text.body", "column 'text' of .* holds string, expected a struct with 'body' in it"),
    ],
)
@pytest.mark.parametrize("on_bad", ["fail", "skip"])
def test_a_column_that_cannot_be_meant_is_refused_at_the_start_and_is_no_hole(tmp_path, column, key, sentence, on_bad):
    written(tmp_path / "d.arrow", pa.table({"id": [1], "text": column}))
    with pytest.raises(DataError, match=sentence):
        opened(tmp_path, text_key=key, on_bad=on_bad)


def test_a_null_and_a_text_that_is_not_utf8_are_bad_rows_with_their_row_number(tmp_path):
    broken = pa.StringArray.from_buffers(
        4,
        pa.py_buffer(np.array([0, 1, 1, 3, 4], dtype=np.int32).tobytes()),
        pa.py_buffer(b"a\xff\xfeb"),
        pa.py_buffer(b"\x0d"),
    )
    written(tmp_path / "d.arrow", pa.table({"text": pa.concat_arrays([pa.array(["x", "y"]), broken])}), rows=6)
    with pytest.raises(
        DataError, match=r'd.arrow, row 4: its text is null \(2 bad rows in this chunk\).*on_bad = "skip"'
    ):
        texts_of(opened(tmp_path))
    source = opened(tmp_path, on_bad="skip")
    assert texts_of(source) == ["x", "y", "a", None, None, "b"]
    assert [(hole["row"], hole["rows"]) for hole in source.holes()] == [(3, 1), (4, 1)]


def test_a_stream_of_no_batches_and_a_batch_of_no_rows_have_no_rows(tmp_path):
    schema = pa.schema([("text", pa.string())])
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema) as writer:
        writer.write_batch(pa.record_batch({"text": pa.array([], pa.string())}))
    with pa.ipc.new_file(tmp_path / "b.arrow", schema):
        assert True
    written(tmp_path / "c.arrow", pa.table({"text": ["x"]}))
    source = opened(tmp_path, "arrow:*.arrow")
    assert [file.rows for file in source.manifest.files] == [0, 0, 1]
    assert texts_of(source) == ["x"]


DAMAGE = {
    "nothing": (lambda data: b"", "is no Arrow file or stream: it has 0 bytes"),
    "zeros": (lambda data: bytes(100), "is no Arrow file or stream: it holds no schema"),
    "text": (lambda data: b'{"text": "a"}\n' * 9, "is cut short or damaged: at byte 0 a message of"),
    "cut in a batch": (lambda data: data[: len(data) * 2 // 3], "is cut short: the record batch at byte|is cut short or damaged|cut short: it does not end"),
    "a long metadata": (lambda data: data[:4] + b"\xff\xff\xff\x7f" + data[8:], "a message of 2,147,483,647 bytes should begin|damaged"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["stream", "file"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_one_sentence_that_names_it_or_a_hole(tmp_path, damage, form):
    change, sentence = DAMAGE[damage]
    path = written(tmp_path / "d.arrow", pa.table({"text": TEXTS * 4}), form=form)
    whole = path.read_bytes()
    if form == "file" and damage == "a long metadata":
        path.write_bytes(whole[:8] + change(whole[8:]))
    else:
        path.write_bytes(change(whole))
    with pytest.raises(DataError, match=rf"d.arrow .*({sentence})") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)
    source = opened(tmp_path, on_bad="skip")
    assert (source.manifest.rows, len(source.holes())) == (0, 1)


@pytest.mark.parametrize("offsets", [[0, 5, 9, 2_000_000_000], [0, 5, 9, 100], [0, 9, 5, 14], [-4, 5, 9, 14]], ids=str)
def test_a_batch_whose_offsets_lead_astray_becomes_holes_and_the_others_do_not(tmp_path, offsets):
    path = written(tmp_path / "d.arrow", pa.table({"text": ["alpha", "beta", "gamma"] * 3}))
    data = bytearray(path.read_bytes())
    place = data.find(np.array([0, 5, 9, 14], dtype="<i4").tobytes(), data.find(b"gamma"))
    data[place : place + 16] = np.array(offsets, dtype="<i4").tobytes()
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"d.arrow, row 4: the record batch cannot be decoded .*3 bad rows in this chunk"
    ):
        texts_of(opened(tmp_path))
    source = opened(tmp_path, on_bad="skip")
    assert texts_of(source) == ["alpha", "beta", "gamma", None, None, None, "alpha", "beta", "gamma"]
    [hole] = source.holes()
    assert (hole["row"], hole["rows"]) == (3, 3)


def test_a_changed_byte_in_the_text_is_refused_and_one_in_another_column_is_not(tmp_path):
    path = written(tmp_path / "d.arrow", pa.table({"n": pa.array([7] * 300), "text": ["needle"] * 300}), rows=100)
    with opened(tmp_path) as source:
        texts_of(source)
    whole = path.read_bytes()
    number = whole.find((7).to_bytes(8, "little") * 20) + 40
    path.write_bytes(whole[:number] + b"\x09" + whole[number + 1 :])
    assert texts_of(opened(tmp_path)) == ["needle"] * 300
    path.write_bytes(whole[::-1].replace(b"eldeen", b"eldeeN", 1)[::-1])
    source = opened(tmp_path)
    source.bind_records()
    assert source.read(0) == ["needle"] * 100
    with pytest.raises(DataChanged, match=r"d.arrow \(record batch at bytes [\d,]+ to [\d,]+\) of source 'd' changed"):
        source.read(2)


def test_a_file_rewritten_with_other_batches_is_refused_when_read(tmp_path):
    path = written(tmp_path / "d.arrow", pa.table({"text": ["alpha"] * 9}), rows=3)
    source = opened(tmp_path)
    other = written(tmp_path / "e.arrow", pa.table({"text": ["alpha"] * 9}), rows=4).read_bytes()
    path.write_bytes(other[: path.stat().st_size].ljust(path.stat().st_size, b"\0"))
    with pytest.raises(DataChanged):
        texts_of(source)


def test_a_batch_that_claims_more_rows_than_its_buffers_hold_is_refused_before_memory_is_taken(tmp_path, monkeypatch):
    path = written(tmp_path / "d.arrow", pa.table({"text": ["ab"] * 777}), rows=777)
    data = path.read_bytes()
    count = (777).to_bytes(8, "little")
    assert data.count(count) >= 2
    path.write_bytes(data.replace(count, (60_000_000).to_bytes(8, "little")))
    with pytest.raises(DataError, match="it claims 60,000,000 rows, more than its buffers can hold"):
        opened(tmp_path)
    path.write_bytes(data)
    monkeypatch.setattr(text_arrow, "_MAX_COLUMN_BYTES", 100)
    with pytest.raises(DataError, match="its text has more than the 100 bytes a chunk may have"):
        opened(tmp_path)


def test_a_batch_that_claims_views_without_end_is_refused_before_memory_is_taken(tmp_path):
    column = text_arrow._Column(arrays=((2, True),), parents=(), read_as=pa.binary_view())
    for views in ((2**62,), (-1,), ()):
        batch = Batch(rows=1, nodes=((1, 0),), buffers=((0, 0),) * 3, codec="", views=views)
        with pytest.raises(DataError, match=r"fewer than its schema|how many buffers its views have"):
            column.buffers(RawFile(tmp_path / "d.arrow"), PlacedMessage(0, 100, 100, BATCH, b"", batch))


@pytest.mark.parametrize("form", ["stream", "file"])
def test_changing_a_byte_of_a_file_never_ends_the_process_that_reads_it(tmp_path, form):
    table = pa.table({"n": range(4), "text": ["alpha", None, "beta " * 4, ""]})
    path = written(tmp_path / "d.arrow", table, form=form, rows=2, codec="zstd" if form == "file" else None)
    whole = path.read_bytes()
    read = refused = 0
    for place in range(0, len(whole), 3):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (0x01, 0x04, 0x10, 0x80, 0xFF)[place % 5]]) + whole[place + 1 :]
        )
        reader = ArrowTexts(text_key="text")
        try:
            with RawFile(path) as file:
                scan = reader.scan(file, 0)
                for start, end, rows in zip(scan.start.tolist(), scan.end.tolist(), scan.rows.tolist(), strict=True):
                    texts, bad = reader.decode(file, reader.load(file, start, end), rows)
                    assert len(texts) == rows
                    assert texts.count(None) == sum(b.rows for b in bad)
            read += 1
        except DataError:
            refused += 1
    assert read > 30
    assert refused > 30
