"""Rows of files: the same numbers whatever the format, and bad files by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from headrace.errors import ConfigError, DataChanged, DataError
from headrace.reduce import gram
from headrace.reduce.shards import RowShards, require_unchanged

X = np.random.default_rng(0).standard_normal((50, 4)).astype("f4")
Y = X[:, :1].astype("f8") * 2
CUTS = [(0, 50), (7, 8), (18, 33), (0, 0), (49, 50), (20, 20)]


def npy(folder):
    for i, (a, b) in enumerate(((0, 20), (20, 21), (21, 50))):
        np.save(folder / f"{i}.npy", X[a:b])
    return RowShards.open([folder])


def safetensors(folder):
    for i, (a, b) in enumerate(((0, 20), (20, 50))):
        save_file({"x": X[a:b], "y": Y[a:b], "w": np.ones(b - a)}, folder / f"{i}.safetensors")
    return RowShards.open([folder / "*.safetensors"], field="x", targets="y", weights="w")


def parquet(folder):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 4)
    table = pa.table({"x": lists, "y": Y[:, 0], "w": np.ones(50, "i8")})
    pq.write_table(table, folder / "a.parquet", row_group_size=16)
    return RowShards.open([folder / "a.parquet"], targets="y", weights="w")


def ragged_lists(folder):
    pq.write_table(
        pa.table({"x": pa.array(X.tolist(), pa.list_(pa.float32()))}), folder / "a.parquet", row_group_size=16
    )
    return RowShards.open([folder / "a.parquet"])


def long_lists(folder):
    pq.write_table(
        pa.table({"x": pa.array(X.tolist(), pa.large_list(pa.float32()))}), folder / "a.parquet", row_group_size=16
    )
    return RowShards.open([folder / "a.parquet"])


def lists_with_gaps(folder):
    table = pa.table({"x": pa.array(X.tolist(), pa.list_(pa.float32()))})
    pq.write_table(table.slice(0, 0), folder / "a.parquet")
    with pq.ParquetWriter(folder / "b.parquet", table.schema) as writer:
        for start, end in ((0, 0), (0, 20), (20, 20), (20, 50), (50, 50)):
            writer.write_table(table.slice(start, end - start))
    pq.write_table(table.slice(0, 0), folder / "c.parquet")
    return RowShards.open([folder])


def columns(folder):
    pq.write_table(pa.table({f"c{i}": X[:, i] for i in range(4)}), folder / "a.parquet", row_group_size=16)
    return RowShards.open([folder / "a.parquet"], field="c0,c1,c2,c3")


@pytest.mark.parametrize("write", [npy, safetensors, parquet, ragged_lists, long_lists, lists_with_gaps, columns])
def test_every_format_gives_the_rows_that_were_written(write, tmp_path):
    shards = write(tmp_path)
    assert (shards.n_rows, shards.width, shards.dtype) == (50, 4, "f32")
    for start, end in CUTS:
        batch = shards.read(start, end)
        assert batch.x.tobytes() == X[start:end].tobytes()
        assert batch.x.shape == (end - start, 4)
        if shards.n_targets:
            assert batch.y.tobytes() == Y[start:end].tobytes()
            assert (batch.w == 1).all()


def test_rows_can_be_converted_and_half_precision_is_read(tmp_path):
    np.save(tmp_path / "a.npy", X.astype("f8"))
    assert RowShards.open([tmp_path], rows="f32").read(0, 50).x.tobytes() == X.tobytes()
    np.save(tmp_path / "b.npy", X)
    with pytest.raises(DataError, match=r"a.npy has f64 rows, .*b.npy has f32; choose one type with --rows"):
        RowShards.open([tmp_path])
    assert RowShards.open([tmp_path], rows="f16").read(0, 100).x.dtype == np.float16
    raw = (X.view(np.uint32) >> 16).astype(np.uint16)
    head = json.dumps({"x": {"dtype": "BF16", "shape": [50, 4], "data_offsets": [0, 400]}}).encode()
    (tmp_path / "c.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw.tobytes())
    half = RowShards.open([tmp_path / "c.safetensors"])
    assert half.dtype == "bf16"
    assert half.read(3, 9).x.tobytes() == raw[3:9].tobytes()


def header(entry) -> bytes:
    head = json.dumps({"x": entry}).encode()
    return len(head).to_bytes(8, "little") + head + b"\0" * 64


def npy_header(shape) -> bytes:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.npy", b"", "cannot be read as .npy"),
        ("a.npy", b"\x80\x04N.", "cannot be read as .npy: .* begins with .* Give files that numpy.save wrote"),
        ("a.npy", b"\x93NUMPY\x01\x00\x10\x00garbage", "cannot be read as .npy"),
        ("a.safetensors", b"", "is no .safetensors file"),
        ("a.safetensors", (2**63).to_bytes(8, "little") + b"{}", "header claims"),
        ("a.safetensors", header({"dtype": "F32", "shape": [2**40, 4], "data_offsets": [0, 64]}), "damaged header"),
        ("a.safetensors", header({"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}), "damaged header"),
        ("a.safetensors", header({"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 80]}), "damaged header"),
        ("a.parquet", b"PAR1garbagePAR1", "cannot be read as .parquet"),
        ("a.safetensors", header({"dtype": "F32", "shape": [math.inf, 4], "data_offsets": [0, 64]}), "damaged header"),
        ("a.npy", npy_header((10**23, 4)), "cannot be read as .npy"),
    ],
)
def test_a_damaged_shard_is_refused_by_name_and_allocates_nothing(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} .*{told}"):
        RowShards.open([tmp_path])


def test_a_pickled_array_runs_no_code(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"cannot be read as .npy"):
        RowShards.open([tmp_path])


def test_what_was_meant_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="no shards match"):
        RowShards.open([tmp_path / "none*.npy"])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"a.txt is none of \.npy, \.safetensors, \.parquet"):
        RowShards.open([tmp_path / "a.txt"])
    safetensors(tmp_path)
    with pytest.raises(ConfigError, match="has no float matrix 'z' for rows; it has w, x, y"):
        RowShards.open([tmp_path], field="z")
    with pytest.raises(ConfigError, match=r"holds 2 matrices .x, y.: name one with --field"):
        RowShards.open([tmp_path])
    np.save(tmp_path / "b.npy", X)
    with pytest.raises(ConfigError, match=r"is a .npy file and has no field 'x'"):
        RowShards.open([tmp_path / "b.npy"], field="x")
    np.save(tmp_path / "b.npy", np.asfortranarray(X))
    with pytest.raises(DataError, match="by columns"):
        RowShards.open([tmp_path / "b.npy"])
    pq.write_table(pa.table({"x": pa.array([[1.0], [1.0, 2.0]])}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="the lists of 'x' are not of one length"):
        RowShards.open([tmp_path / "c.parquet"])


def test_shards_that_changed_are_noticed(tmp_path):
    shards = npy(tmp_path)
    before = shards.fingerprint()
    require_unchanged(shards, before)
    changed = X[20:21].copy()
    changed[0, 0] += 1
    np.save(tmp_path / "1.npy", changed)
    with pytest.raises(DataChanged, match="are not those the pass was begun with"):
        require_unchanged(RowShards.open([tmp_path]), before)


def test_whole_numbers_of_16_bits_are_rows_only_where_they_are_said_to_be_bfloat16(tmp_path):
    np.save(tmp_path / "a.npy", (X.view(np.uint32) >> 16).astype(np.uint16))
    with pytest.raises(DataError, match=r"a.npy holds uint16.* --rows bf16"):
        RowShards.open([tmp_path])
    assert RowShards.open([tmp_path], rows="bf16").dtype == "bf16"


def test_rows_that_cannot_become_bfloat16_are_refused_when_they_are_opened(tmp_path):
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(ConfigError, match=r"a.npy holds f32 rows: .* not to bf16"):
        RowShards.open([tmp_path], rows="bf16")


def test_results_are_no_shards_of_the_folder_they_lie_in(tmp_path):
    save_file({"x": X}, tmp_path / "a.safetensors")
    gram(X).save(tmp_path / "gram.safetensors")
    for given in (tmp_path, tmp_path / "*.safetensors"):
        assert [p.rpartition("/")[2] for p in RowShards.open([given]).spec.paths] == ["a.safetensors"]
