"""Damaged and hostile files: an error that names the file, in every reader, and memory bounded by the file's own size."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DataError
from headrace.formats import byte_file
from headrace.formats.object_store import fits
from headrace.formats.parquet_footer import parse_footer
from headrace.reduce.shards import RowShards
from headrace.sources import RowShape, Source, open_source
from headrace.sources.cells import open_cells


def as_cells(path):
    file = open_cells(path)
    try:
        return file.read(0, file.rows)
    finally:
        file.close()


def as_gram(path):
    shards = RowShards.open([path])
    return shards.read(0, shards.n_rows)


def as_text(path, rows=None):
    scheme = {".pq": "parquet"}.get(path.suffix, path.suffix[1:])
    key = "x" if rows is None else "text"
    with open_source(Source(f"{scheme}:{path.name}", text_key=key), base=path.parent, cache=path.parent / "c", rows=rows) as source:  # fmt: skip
        return [source.read(chunk) for chunk in range(source.manifest.chunks)]


def as_labelled(path):
    return as_text(path, RowShape(columns=("x",), judge=lambda row: ""))


def empty_lists(rows):
    return pa.ListArray.from_arrays(np.zeros(rows + 1, np.int32), pa.array([], pa.float32()))


@pytest.mark.parametrize("read", [as_cells, as_gram, as_labelled])
def test_a_parquet_file_that_decodes_to_far_more_than_its_size_is_refused_by_every_reader(tmp_path, monkeypatch, read):
    monkeypatch.setattr(byte_file, "RATIO_COUNTS_FROM", 1 << 20)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": empty_lists(500_000)}), path)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"a\.parquet.*cannot be decoded.*claim to hold [\d,]+ bytes"):
        read(path)
    pq.write_table(pa.table({"x": empty_lists(1000)}), path)
    if read is as_cells:
        assert len(read(path)["x"]) == 1000


def test_a_string_that_a_dictionary_repeats_exists_once_in_cells(tmp_path):
    words = pa.DictionaryArray.from_arrays(np.zeros(200_000, np.int32), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"name": words}), tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 30)
    names = as_cells(tmp_path / "a.parquet")["name"]
    assert len(names) == 200_000
    assert len({id(name) for name in names.tolist()}) == 1


def test_the_arrays_of_an_archive_are_capped_together(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_file, "RATIO_COUNTS_FROM", 100_000)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros((1000, 10)), b=np.zeros((1000, 10)))
    with pytest.raises(DataError, match=r"a\.npz .*with array 'b' it unpacks to 160,\d+ bytes"):
        open_cells(tmp_path / "a.npz")
    assert open_cells(tmp_path / "a.npz", ["b"]).rows == 1000


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_packed_as_numpy_never_does_is_refused(tmp_path, method):
    array = io.BytesIO()
    np.save(array, np.zeros((4, 2)))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", array.getvalue())
    with pytest.raises(DataError, match=r"a\.npz has an array 'x' that is encrypted or packed in another way"):
        open_cells(tmp_path / "a.npz")


@pytest.mark.parametrize("read", [as_cells, as_gram])
@pytest.mark.parametrize("structured", [False, True])
def test_a_flipped_bit_in_the_header_of_an_array_is_an_error_that_names_the_file(tmp_path, read, structured):
    path = tmp_path / "a.npy"
    np.save(path, np.ones(3, dtype=[("a", "<f4"), ("b", "<i8")]) if structured else np.ones((3, 2), np.float32))
    whole = path.read_bytes()
    refused = []
    for at in range(0, 128 * 8, 3):  # every byte, and all bits in turn
        place, bit = divmod(at, 8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            read(path)
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in message for message in refused)


def test_names_that_are_not_utf8_are_an_error_that_names_the_file(tmp_path):
    table = pa.table({"x": pa.array([[1.0]], pa.list_(pa.float32())), "naame": ["a"]})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as sink:
        sink.write_table(table)
    for name, reads in (("a.parquet", (as_cells, as_gram, as_text, as_labelled)), ("b.arrow", (as_cells, as_text, as_labelled))):  # fmt: skip
        path = tmp_path / name
        path.write_bytes(path.read_bytes().replace(b"naame", b"na\xff\xfee"))
        for read in reads:
            with pytest.raises(DataError, match=name):
                read(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, suffix):
    table = pa.Table.from_arrays([pa.array([1.0]), pa.array([2.0])], names=["x", "x"])
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table)
    with pytest.raises(DataError, match=r"a\.\w+ has several columns called 'x'"):
        as_cells(path)


@pytest.mark.parametrize("opening", [b"\x19", b"\x1b\x01\x99"], ids=["lists", "maps"])
def test_lists_within_lists_in_a_footer_are_refused(opening):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_footer(b"\x19" + b"\x19" * 100_000 if opening == b"\x19" else b"\x1b" + b"\x01\xbb" * 100_000)


def test_an_arrow_buffer_that_claims_to_unpack_to_gigabytes_is_refused(tmp_path):
    table = pa.table({"x": np.arange(4000, dtype=np.float64)})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as sink:
        sink.write_table(table)
    size = (32_000).to_bytes(8, "little")
    data = path.read_bytes()
    assert data.count(size) == 1
    path.write_bytes(data.replace(size, (3 << 30).to_bytes(8, "little")))
    with pytest.raises(DataError, match=r"a\.arrow .*claim to unpack to 3,221,225,472 bytes"):
        as_cells(path)


def test_a_shard_of_lists_that_change_their_length_is_refused_where_the_change_is_read(tmp_path):
    lists = [[1.0, 2.0]] * 5000 + [[1.0, 2.0, 3.0]] * 100
    pq.write_table(pa.table({"x": pa.array(lists, pa.list_(pa.float32()))}), tmp_path / "a.parquet")
    shards = RowShards.open([tmp_path / "a.parquet"])
    assert shards.read(0, 5000).x.shape == (5000, 2)
    with pytest.raises(DataError, match=r"a\.parquet has rows of 3 numbers from row 5,000 on, the first one has 2"):
        shards.read(5000, 5100)
    with pytest.raises(DataError, match=r"a\.parquet: the lists of 'x' are not of one length"):
        shards.read(4990, 5100)


def test_a_glob_of_many_double_stars_is_answered_at_once():
    """A README of a dataset names its files by globs."""
    assert not fits(list("abcdefghijkl"), [*["**"] * 30, "z"])
    assert fits(list("abcdefghijkl"), [*["**"] * 30, "l"])


@pytest.mark.parametrize("read", [as_cells, as_gram])
@pytest.mark.parametrize("shape", ["(-3, 4)", "(3, -4)", "(-3,)"])
def test_an_array_of_negative_size_is_refused_by_name(tmp_path, read, shape):
    raw = io.BytesIO()
    np.save(raw, np.zeros((3, 4), np.float32))
    path = tmp_path / "x.npy"
    path.write_bytes(raw.getvalue().replace(b"(3, 4)", shape.encode(), 1)[: len(raw.getvalue())])
    with pytest.raises(DataError, match=r"x.npy"):
        read(path)
