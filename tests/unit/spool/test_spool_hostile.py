"""Input that means harm: nothing runs, nothing large is allocated, nothing outside the folder is touched."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, FileCorrupt
from headrace.spool import open_batch_file, purge_spool, read_meta
from headrace.spool.meta import with_job, write_meta
from headrace.spool.records import seal

META = {
    "dataset_name": "d",
    "training_type": "SEQUENCE_SCORING",
    "batch_size": 2,
    "split_info": {},
    "batch_schema": [{"name": "x", "dtype": "int64", "shape": []}],
}


class Runs:
    """Unpickled, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def laughs(depth=60):
    """A pickle of a few hundred bytes that unfolds into 2**depth lists."""
    value: list = []
    for _ in range(depth):
        value = [value, value]
    return pickle.dumps({"laughs": value, **META})


HOSTILE = {
    "global": b"cos\nsystem\n(S'true'\ntR.",
    "stack_global": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "object": pickle.dumps(np.float64(1.0)),
    "set": pickle.dumps({1, 2}),
    "bytes": pickle.dumps({"a": b"x"}),
    "persistent": b"Pabc\n.",
    "huge_memo": b"\x80\x04}r\xff\xff\xff\x7f.",
    "huge_text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "huge_number": b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b"x.",
    "laughs": laughs(),
    "truncated": pickle.dumps(META)[:-3],
    "empty": b"",
    "noise": bytes(range(256)),
    "deep": b"(" * 100_000 + b".",
    "not_a_dict": pickle.dumps([1]),
    "extension": b"\x80\x04\x82\x01.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_meta_pkl_runs_nothing_and_costs_no_memory(tmp_path, name):
    (tmp_path / "meta.pkl").write_bytes(HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((FileCorrupt, ConfigError), match=r"meta.pkl"):
        read_meta(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_an_object_in_a_meta_pkl_is_not_made(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({**META, "extra": Runs(tmp_path / "made")}))
    with pytest.raises(FileCorrupt, match=r"meta.pkl was not read: it uses"):
        read_meta(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_a_plain_meta_pkl_of_any_protocol_is_read(tmp_path, protocol):
    meta = {**META, "itos": {0: "a", 1: "é"}, "pair": (1, 2.5), "none": None, "yes": True, "big": 1 << 80}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol=protocol))
    assert read_meta(tmp_path) == meta


@pytest.mark.parametrize("make", ["fifo", "link", "folder", "large"])
def test_a_meta_that_is_no_plain_file_is_refused_without_blocking(tmp_path, make):
    path = tmp_path / "meta.json"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "link":
        (tmp_path / "real").write_text("{}")
        path.symlink_to(tmp_path / "real")
    elif make == "folder":
        path.mkdir()
    else:
        with path.open("wb") as handle:
            handle.truncate(1 << 40)
    with pytest.raises(FileCorrupt, match=r"meta.json"):
        read_meta(tmp_path)


def torch_file(path, value):
    torch.save(value, path)
    return path


def stretched(path):
    """A .pt whose tensor claims 2**40 elements over a storage of one."""
    tensor = torch.zeros(1, dtype=torch.int64).as_strided((1 << 20, 1 << 20), (0, 0))
    meta = {
        "batch_size": 1,
        "num_batches": 1,
        "file_idx": 0,
        "split": "train",
        "schema": [{"name": "x", "dtype": "int64", "shape": [1 << 20]}],
    }
    torch.save({"metadata": meta, "tensors": {"x": tensor}}, path)


def packed(path):
    """A .pt with records that are deflated: a bomb."""
    buffer = io.BytesIO()
    torch.save({"metadata": {}, "tensors": {"x": torch.zeros(1 << 20, dtype=torch.int64)}}, buffer)
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))


def running(path):
    torch.save({"metadata": Runs(path.parent / "made"), "tensors": {}}, path)


def broken_schema(path):
    torch.save(
        {
            "metadata": {"batch_size": 1, "file_idx": 0, "split": "train", "schema": "x"},
            "tensors": {"x": torch.zeros(3)},
        },
        path,
    )


def sparse(path):
    tensor = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (1 << 40,), check_invariants=False
    )
    torch.save(
        {"metadata": {"batch_size": 1, "file_idx": 0, "split": "train", "schema": []}, "tensors": {"x": tensor}}, path
    )


@pytest.mark.parametrize(
    "make",
    [
        stretched,
        packed,
        running,
        broken_schema,
        sparse,
        lambda p: p.write_bytes(b"PK\x03\x04 nonsense"),
        lambda p: p.write_bytes(b""),
    ],
)
def test_a_hostile_pt_runs_nothing_and_costs_no_memory(tmp_path, make):
    path = tmp_path / "000000000000.pt"
    make(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileCorrupt, match=r"000000000000.pt"):
        open_batch_file(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert not (tmp_path / "made").exists()


def container(meta, entries=None, data=b"", **ours):
    """A container with a valid checksum over whatever header we like."""
    import xxhash

    inner = {"version": 1, "sums": {}, "header": "0" * 32, "meta": meta} | ours
    entries = entries or {}

    def header():
        text = json.dumps(
            {"__metadata__": {"headrace": json.dumps(inner, separators=(",", ":"))}, **entries}, separators=(",", ":")
        )
        return text.encode()

    inner["header"] = xxhash.xxh3_128_hexdigest(header())
    raw = header()
    return len(raw).to_bytes(8, "little") + raw + data


HEADER = {
    "kind": "headrace-spool", "version": 1, "job": "j", "split": "train", "part": 0, "parts": 1, "seq": 0, "first": 0, "rows": 1, "batch_size": 1,
    "num_batches": 1, "last": False, "follows": "", "cursor": None, "schema": [{"name": "x", "dtype": "int64", "shape": []}],
}  # fmt: skip
X = {"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ((1 << 63).to_bytes(8, "little") + b"{}", "claims"),
        (container({"kind": "other"}, X, bytes(8)), "not a batch file of a spool"),
        (container({**HEADER, "version": 2}, X, bytes(8)), "version 2"),
        (container({**HEADER, "rows": 1 << 62}, X, bytes(8)), "rows is"),
        (container({**HEADER, "rows": -1}, X, bytes(8)), "rows is"),
        (container({**HEADER, "rows": 2}, X, bytes(8)), "has shape"),
        (container({**HEADER, "rows": True}, X, bytes(8)), "rows is True"),
        (container({**HEADER, "part": 3}, X, bytes(8)), "part 3 of 1"),
        (container({**HEADER, "schema": [{"name": "x", "dtype": "int64", "shape": [1 << 62]}]}, X, bytes(8)), "shape"),
        (container({**HEADER, "schema": [{"name": "../x", "dtype": "int64", "shape": []}]}, X, bytes(8)), "named like"),
        (container({**HEADER, "schema": [{"name": "y", "dtype": "int64", "shape": []}]}, X, bytes(8)), "missing"),
        (container({k: v for k, v in HEADER.items() if k != "seq"}, X, bytes(8)), "seq"),
        (container(HEADER, {"x": {"dtype": "I64", "shape": [1 << 61], "data_offsets": [0, 8]}}, bytes(8)), "describe"),
        (container(HEADER, {"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "float64, expected int64"),
        (container(HEADER, X, bytes(8), sums={"x": "rows:" + "9" * 4000}), "."),
        (container(HEADER, X, bytes(8), sums={"x": 5}), "."),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path, raw, why):
    path = tmp_path / "000000000000.safetensors"
    path.write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileCorrupt, match=why):
        open_batch_file(path).check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("make", ["fifo", "link", "folder", "device"])
def test_what_is_no_file_in_the_queue_is_set_aside_as_it_is_and_not_followed(drawn, consumer, tmp_path, make):
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    provider = drawn()
    provider.open(("train",))
    path = tmp_path / "spool" / "queue" / "train" / "000000000000.safetensors"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "link":
        path.symlink_to(outside)
    elif make == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    reader = consumer(deadline=0.3)
    with pytest.raises(Exception, match=r"spool.remake"):
        reader.get_batch("train")
    assert outside.read_bytes() == b"precious"
    assert not os.path.lexists(path)
    assert len(provider.channels("train")[0].quarantined()) == 1
    provider.close()


@pytest.mark.parametrize("split", ["../outside", "/etc", "a/b", "", ".hidden", "x" * 100])
def test_a_split_is_a_plain_name(drawn, consumer, split):
    drawn().run(("train",), max_files=1)
    with pytest.raises(ConfigError, match="a split is named by"):
        consumer().get_batch(split)


def test_names_that_are_not_ours_are_left_alone(drawn, consumer, tmp_path):
    drawn().run(("train",), max_files=1)
    queue = tmp_path / "spool" / "queue" / "train"
    for name in (
        "notes.txt",
        "0.safetensors",
        "..safetensors",
        "000000000000.safetensors.bak",
        "１２３４５６７８９０１２.safetensors",
    ):
        (queue / name).write_bytes(b"mine")
    reader = consumer()
    reader.get_batch("train")
    reader.get_batch("train")
    reader.close()
    assert len(list(queue.iterdir())) == 5


def test_purging_follows_no_link(drawn, tmp_path):
    drawn().run(("train",), max_files=1)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(b"x")
    (tmp_path / "spool" / "archives").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a symbolic link; nothing behind it is deleted"):
        purge_spool(tmp_path / "spool")
    assert (tmp_path / "outside" / "precious").exists()


@pytest.mark.parametrize(
    "value",
    [5, None, {"splits": 3}, {"splits": {"train": {}}}, {"splits": {"train": {"g": -1, "at": [[0, 0]], "start": [0]}}}],
)
def test_a_commit_point_with_a_valid_seal_and_a_wrong_content_is_refused(drawn, consumer, tmp_path, value):
    drawn().run(("train",), max_files=1)
    (tmp_path / "spool" / "state" / "commit.json").write_bytes(seal(value))
    if value is None:
        return
    with pytest.raises(FileCorrupt, match=r"commit.json"):
        consumer().get_batch("train")


def test_importing_the_spool_imports_no_torch():
    code = "import sys, headrace.spool; sys.exit('torch' in sys.modules or 'numba' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_meta_pkl_of_headrace_that_lost_its_meta_json_is_refused_also_with_a_flipped_bit(tmp_path):
    write_meta(tmp_path, with_job(META, {"parts": 2, "format": "safetensors"}, "meta"))
    whole = (tmp_path / "meta.pkl").read_bytes()
    (tmp_path / "meta.json").unlink()
    with pytest.raises(FileCorrupt, match=r"meta\.pkl has lost the meta\.json beside it"):
        read_meta(tmp_path)
    for place in range(0, len(whole) * 8, 5):  # every byte, and all bits in turn
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        (tmp_path / "meta.pkl").write_bytes(data)
        with pytest.raises((ConfigError, FileCorrupt), match=r"meta\.pkl"):
            read_meta(tmp_path)


def test_a_meta_of_another_program_is_compared_with_a_file_of_its_queue(tmp_path):
    queue = tmp_path / "queue" / "train"
    queue.mkdir(parents=True)
    about = {"split": "train", "file_idx": 0, "schema": META["batch_schema"], "batch_size": 2}
    torch.save({"tensors": {"x": torch.arange(4)}, "metadata": about}, queue / "000000.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(META))
    assert read_meta(tmp_path)["batch_size"] == 2
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({**META, "batch_size": 3}))
    with pytest.raises(FileCorrupt, match=r"meta\.pkl says batches of 3 .* 000000\.pt holds batches of 2"):
        read_meta(tmp_path)
