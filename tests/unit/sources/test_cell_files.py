"""Stream files: every format gives the same cells, and what cannot be read is a sentence."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from headrace.errors import ConfigError, DataError
from headrace.sources.cells import cell_openers, open_cells, register_cells
from headrace.sources.stream_files import list_streams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from stream_cells import SUFFIXES, WIDTH, cells, change_stream, write_stream, write_streams


def read(path: Path, start: int, stop: int, **options):
    file = open_cells(path, **options)
    try:
        return file.rows, file.read(start, stop)
    finally:
        file.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("odd", [0, 1])
def test_every_format_gives_any_run_of_rows(tmp_path, suffix, odd):
    path = tmp_path / f"a{suffix}"
    write_stream(path, odd, 20)
    x, group = cells(odd, 20)
    for start, stop in [(0, 20), (0, 0), (3, 4), (6, 15), (13, 20), (20, 20)]:
        rows, found = read(path, start, stop)
        assert rows == 20
        assert found["x"].dtype == np.float32
        assert np.array_equal(found["x"], x[start:stop])
        if suffix != ".npy":
            assert np.array_equal(found["group_id"], group[start:stop])
            assert found["group_id"].dtype == np.int64


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_past_the_end_are_refused(tmp_path, suffix):
    write_stream(tmp_path / f"a{suffix}", 1, 5)
    with pytest.raises(DataError, match=r"has 5 rows; rows 3 to 6 were asked"):
        read(tmp_path / f"a{suffix}", 3, 6)


@pytest.mark.parametrize("suffix", [s for s in SUFFIXES if s != ".npy"])
def test_columns_leaves_out_the_others_and_names_the_nearest_when_one_is_missing(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    write_stream(path, 1, 5)
    assert list(read(path, 0, 2, columns=["x"])[1]) == ["x"]
    with pytest.raises(DataError, match=r"no column 'group'; it has group_id"):
        open_cells(path, ["group"])


def test_strings_and_ragged_lists_become_object_arrays_whatever_rows_are_asked_for(tmp_path):
    table = pa.table({"genes": pa.array([[1, 2], [3], [], [4, 5]], pa.list_(pa.int32())), "name": ["a", "b", "ü", "d"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    _, found = read(tmp_path / "a.parquet", 1, 4)
    assert [list(g) for g in found["genes"]] == [[3], [], [4, 5]]
    assert found["genes"].dtype == found["name"].dtype == object
    assert list(found["name"]) == ["b", "ü", "d"]
    _, nothing = read(tmp_path / "a.parquet", 2, 2)
    assert nothing["genes"].dtype == object
    assert len(nothing["name"]) == 0


def test_an_arrow_stream_and_dictionaries_are_read_too(tmp_path):
    kinds = pa.array(["t", "b", "t", "nk"]).dictionary_encode()
    table = pa.table({"kind": kinds, "n": pa.array([1, 2, 3, 4], pa.int16())})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as sink:
        sink.write_table(table, max_chunksize=3)
    rows, found = read(tmp_path / "a.arrow", 1, 4)
    assert rows == 4
    assert list(found["kind"]) == ["b", "t", "nk"]
    assert found["n"].tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16), np.zeros((3, 4, 5), ">f8"), np.array([True, False]), np.zeros((0, 7), np.float32),
        np.zeros(4, dtype=[("a", "<f4"), ("b", "<i8", (2,))]), np.zeros((2, 0)), np.ones((5, 1), np.complex64),
    ],
)  # fmt: skip
def test_arrays_of_any_plain_dtype_and_shape_are_read_as_numpy_reads_them(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    rows, found = read(tmp_path / "a.npy", 0, len(array))
    assert rows == len(array)
    for name in array.dtype.names or ("x",):
        expected = array[name] if array.dtype.names else array
        assert found[name].dtype == expected.dtype
        assert np.array_equal(found[name], expected)


def test_files_can_be_opened_by_many_threads_at_once(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(4, dtype=[("a", "<f4"), ("b", "<i8")]))
    np.save(tmp_path / "b.npy", np.zeros((4, 2)))
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda i: read(tmp_path / f"{'ab'[i % 2]}.npy", 0, 4)[0], range(400)))
    assert rows == [4] * 400


def _pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _short(path: Path) -> None:
    np.save(path, np.zeros((50, 4)))
    os.truncate(path, 300)


def _huge(path: Path) -> None:
    np.save(path, np.zeros((2, 2), np.float32))
    data = path.read_bytes().replace(b"(2, 2), ", b"(9999999, 999), ".ljust(8))
    path.write_bytes(data)


def _fortran(path: Path) -> None:
    np.save(path, np.asfortranarray(np.zeros((5, 4))))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_pickled, "Python objects"),
        (_short, "cut short"),
        (_huge, "claims|no numpy array"),
        (_fortran, "Fortran order"),
        (lambda p: p.write_bytes(b"not numpy"), "no numpy array"),
    ],
)
def test_an_array_that_cannot_be_trusted_is_refused(tmp_path, make, sentence):
    make(tmp_path / "a.npy")
    with pytest.raises(DataError, match=sentence):
        open_cells(tmp_path / "a.npy")


def test_an_archive_that_unpacks_to_more_than_it_may_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 10)))
    assert read(tmp_path / "a.npz", 0, 5)[0] == 1000
    monkeypatch.setattr("headrace.formats.numpy_arrays._MAX_UNPACKED", 50_000)
    with pytest.raises(DataError, match=r"'x' it unpacks to 80,128 bytes, more than 50,000"):
        open_cells(tmp_path / "a.npz")


def test_arrays_of_different_lengths_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((5, 2)), group_id=np.zeros(4, np.int64))
    with pytest.raises(DataError, match="different numbers of rows"):
        open_cells(tmp_path / "a.npz")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("keep", [0, 3, 40, 0.5, 0.9])
def test_a_file_that_was_cut_short_is_a_sentence(tmp_path, suffix, keep):
    path = tmp_path / f"a{suffix}"
    write_stream(path, 1, 40)
    size = path.stat().st_size
    os.truncate(path, int(size * keep) if isinstance(keep, float) else keep)
    if suffix == ".jsonl" and keep in (0,):
        assert open_cells(path).rows == 0
        return
    with pytest.raises(DataError):
        read(path, 0, 40)


def test_a_damaged_row_group_is_named(tmp_path):
    x = pa.array(np.random.default_rng(0).integers(0, 1 << 60, 400))
    pq.write_table(pa.table({"x": x}), tmp_path / "a.parquet", row_group_size=100, write_page_checksum=True, use_dictionary=False)  # fmt: skip
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"row group \d cannot be decoded"):
        read(tmp_path / "a.parquet", 0, 400)


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ('{"x": [1.0, 2.0, 3.0], "n": 1}', "line 3 has 3 numbers in 'x' where the first row has 2"),
        ('{"x": [1.0, 2.0]}', "line 3 has NoneType in 'n'"),
        ('{"x": [1.0, 2.0], "n": 1.5}', "a fraction"),
        ("{", "line 3 cannot be used"),
        ("[1]", "expected an object"),
    ],
)
def test_a_line_that_does_not_fit_the_first_is_named(tmp_path, second, sentence):
    (tmp_path / "a.jsonl").write_text('{"x": [1.0, 2], "n": 7}\n\n' + second + "\n")
    with pytest.raises(DataError, match=sentence):
        read(tmp_path / "a.jsonl", 0, 2)


def test_nulls_where_numbers_have_none_are_refused(tmp_path):
    pq.write_table(pa.table({"n": pa.array([1, None, 3])}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'n' of .* has 1 nulls"):
        read(tmp_path / "a.parquet", 0, 3)


@pytest.mark.timeout(10)
def test_a_pipe_and_a_link_are_refused_and_nothing_blocks(tmp_path):
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(DataError, match="named pipe"):
        open_cells(tmp_path / "a.npy")
    write_stream(tmp_path / "real.npy", 0, 3)
    (tmp_path / "link.npy").symlink_to("real.npy")
    with pytest.raises(DataError, match="symbolic link"):
        open_cells(tmp_path / "link.npy")


class Counting:
    """A format of a user's own: a file holds a number of rows as text."""

    def __init__(self, path: Path, columns) -> None:
        self.rows = int(path.read_text())

    def read(self, start: int, stop: int):
        return {"x": np.arange(start, stop, dtype=np.float32)[:, None]}

    def close(self) -> None:
        self.rows = 0


def test_a_registered_format_is_listed_and_read(tmp_path):
    (tmp_path / "rna").mkdir()
    (tmp_path / "rna" / "0.count").write_text("12")
    readers = {".count": Counting}
    assert list_streams(tmp_path, readers=readers, cache=tmp_path / "c").files[0].rows == 12
    assert read(tmp_path / "rna" / "0.count", 3, 5, readers=readers)[1]["x"].ravel().tolist() == [3, 4]
    assert ".count" not in cell_openers()
    with pytest.raises(ConfigError, match=r"such as '\.h5ad'"):
        register_cells("h5ad", Counting)


class Untold(Counting):
    def __init__(self, path, columns) -> None:
        del path, columns


class Odd(Counting):
    def __init__(self, path, columns) -> None:
        del path, columns
        self.rows = -3


@pytest.mark.parametrize(("reader", "said"), [(Untold, "does not say how many rows"), (Odd, "says it has -3 rows")])
def test_a_reader_that_cannot_count_is_refused_with_the_remedy(tmp_path, reader, said):
    (tmp_path / "rna").mkdir()
    (tmp_path / "rna" / "0.odd").write_text("12")
    with pytest.raises(DataError, match=rf"0\.odd: its reader \(\.odd\) {said}.*count the rows"):
        list_streams(tmp_path, readers={".odd": reader}, cache=tmp_path / "c")


# --------------------------------------------------------------------------------------------------- listing


def test_nested_takes_the_modality_from_the_folder_and_direct_from_the_roots_name(tmp_path):
    root = write_streams(tmp_path / "all", {"rna": [3, 4], "atac": [5]})
    nested = list_streams(root, cache=tmp_path / "c")
    assert [(f.name, f.rows, f.modality) for f in nested.files] == [
        ("atac/002.npz", 5, "atac"), ("rna/000.parquet", 3, "rna"), ("rna/001.arrow", 4, "rna"),
    ]  # fmt: skip
    direct = list_streams([root / "rna", root / "atac"], layout="direct", cache=tmp_path / "c")
    assert [(f.name, f.rows, f.modality) for f in direct.files] == [(f.name, f.rows, f.modality) for f in nested.files]
    assert direct.fingerprint == nested.fingerprint


def test_links_are_refused_unless_allowed_and_then_their_targets_are_read(tmp_path):
    write_stream(tmp_path / "elsewhere" / "0.npy", 0, 4)
    (tmp_path / "all" / "rna").mkdir(parents=True)
    (tmp_path / "all" / "rna" / "0.npy").symlink_to(tmp_path / "elsewhere" / "0.npy")
    with pytest.raises(DataError, match="is a symbolic link to"):
        list_streams(tmp_path / "all", cache=tmp_path / "c")
    (file,) = list_streams(tmp_path / "all", cache=tmp_path / "c", allow_symlinks=True).files
    assert (file.name, file.modality, file.rows) == ("rna/0.npy", "rna", 4)
    assert read(Path(file.path), 0, 4)[0] == 4


def test_a_file_at_the_wrong_depth_is_refused_with_the_layout_that_would_fit(tmp_path):
    root = write_streams(tmp_path / "all", {"rna": [3]})
    with pytest.raises(DataError, match="Use layout = 'nested'"):
        list_streams(root, layout="direct", cache=tmp_path / "c")
    with pytest.raises(DataError, match="Use layout = 'direct'"):
        list_streams(root / "rna", cache=tmp_path / "c")


def test_rows_are_counted_once_and_again_when_the_file_changes(tmp_path):
    root = write_streams(tmp_path / "all", {"rna": [30]}, (".npy",))
    path = root / "rna" / "000.npy"
    opened = []

    def counting(path, columns):
        opened.append(path)
        return open_cells(path, columns)

    def listed():
        return list_streams(root, cache=tmp_path / "c", readers={".npy": counting})

    first = listed()
    assert listed() == first
    assert len(opened) == 1
    change_stream(path, 0, 30)  # of the same size and time of modification
    assert listed().changes_since(first.to_json()) == ["rna/000.npy has other content"]
    assert len(opened) == 2
    write_stream(path, 0, 31)
    changed = list_streams(root, cache=tmp_path / "c")
    assert changed.files[0].rows == 31
    assert changed.changes_since(first.to_json()) == ["rna/000.npy had 30 rows and has 31"]
    for kept in (tmp_path / "c" / "streams").glob("*.json"):
        kept.write_text('{"000": broken')
    assert list_streams(root, cache=tmp_path / "c") == changed


def test_what_changed_since_a_listing_is_said_file_by_file(tmp_path):
    root = write_streams(tmp_path / "all", {"rna": [30, 20, 10]}, (".npy",))
    first = list_streams(root, cache=tmp_path / "c")
    np.save(root / "rna" / "000.npy", np.ones((30, WIDTH), np.float32))
    (root / "rna" / "001.npy").unlink()
    write_stream(root / "rna" / "003.npy", 3, 5)
    assert list_streams(root, cache=tmp_path / "c").changes_since(json.loads(json.dumps(first.to_json()))) == [
        "rna/001.npy is gone", "rna/003.npy is new", "rna/000.npy has other content",
    ]  # fmt: skip


def test_names_that_cannot_be_told_apart_and_folders_without_rows_are_refused(tmp_path):
    write_streams(tmp_path / "a", {"rna": [3]})
    write_streams(tmp_path / "b", {"rna": [3]})
    with pytest.raises(ConfigError, match=r"both called rna/000\.parquet"):
        list_streams([tmp_path / "a", tmp_path / "b"], cache=tmp_path / "c")
    write_streams(tmp_path / "e", {"rna": [0, 0]})
    with pytest.raises(DataError, match="none of the 2 stream files"):
        list_streams(tmp_path / "e", cache=tmp_path / "c")
    write_streams(tmp_path / "f", {"r n a": [3]})
    with pytest.raises(DataError, match="becomes a modality"):
        list_streams(tmp_path / "f", cache=tmp_path / "c")
