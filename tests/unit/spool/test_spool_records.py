"""Small state that is overwritten in place: the newest whole record counts, whatever was torn, and writing it needs no room."""

from __future__ import annotations

import os
import threading

import pytest

from headrace.errors import FileCorrupt, StorageError
from headrace.spool.folder import SpoolFolder
from headrace.spool.records import read_record, reserve_record, seal, write_record

POINT = {"g": 80, "at": [[10, 0]], "start": [80]}


def test_the_newest_whole_record_counts(tmp_path):
    path = tmp_path / "record"
    assert read_record(path) is None
    reserve_record(path, {"n": 0})
    assert read_record(path) == {"n": 0}
    for n in range(1, 6):
        write_record(path, {"n": n}, durable=False)
        assert read_record(path) == {"n": n}
    reserve_record(path, {"n": 0})
    assert read_record(path) == {"n": 5}, "a file that is there stays"
    whole = path.read_bytes()
    slot = len(whole) // 2
    assert slot == 4096, "a power cut while one is written does not touch the other"
    newest = slot * (whole.index(b'"n":5') // slot)
    for bit in range(newest * 8, (newest + 80) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read_record(path) == {"n": 4}, bit
    path.write_bytes(whole[: newest + 40] + bytes(slot - 40) + whole[newest + slot :])
    write_record(path, {"n": 6}, durable=False)
    assert read_record(path) == {"n": 6}
    assert b'"n":4' in path.read_bytes(), "the torn one was overwritten, not the whole one"


def test_a_file_without_a_whole_record_is_damaged_and_never_a_value(tmp_path):
    path = tmp_path / "record"
    reserve_record(path, {"n": 0})
    for raw in (b"", b"\0" * 8192, path.read_bytes()[:100], path.read_bytes().replace(b'"n":0', b'"n":1')):
        path.write_bytes(raw)
        with pytest.raises(FileCorrupt, match="neither of its records is whole"):
            read_record(path)
    write_record(path, {"n": 1}, durable=True)
    assert read_record(path) == {"n": 1}


def test_a_value_that_outgrows_its_room_gets_a_larger_file(tmp_path):
    path = tmp_path / "record"
    reserve_record(path, {"n": []}, size=9000)
    assert path.stat().st_size == 2 * 12288
    write_record(path, {"n": [123456789012] * 900}, durable=True)
    assert path.stat().st_size == 2 * 12288, "there was room for it"
    write_record(path, {"n": [123456789012] * 2000}, durable=True)
    assert read_record(path) == {"n": [123456789012] * 2000}
    write_record(path, {"n": [1]}, durable=True)
    assert read_record(path) == {"n": [1]}


def test_a_reader_beside_a_writer_sees_no_record_that_is_older_than_one_it_saw(tmp_path):
    path = tmp_path / "record"
    reserve_record(path, {"n": 0, "more": "x" * 3000}, durable=False)
    seen, done = [], threading.Event()

    def read():
        while not done.is_set():
            seen.append(read_record(path)["n"])

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 2000):
        write_record(path, {"n": n, "more": "x" * (n % 3000)}, durable=False)
    done.set()
    reader.join(20)
    assert seen == sorted(seen)


def test_a_record_whose_sync_failed_is_not_taken_for_one_and_the_one_before_it_is_never_overwritten(
    tmp_path, monkeypatch
):
    path = tmp_path / "record"
    reserve_record(path, {"n": 0})
    write_record(path, {"n": 1}, durable=True)
    real, failures = os.fsync, [3]

    def fsync(fd):
        if failures[0]:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(3):
        with pytest.raises(StorageError, match="Input/output error"):
            write_record(path, {"n": 2}, durable=True)
        assert read_record(path) == {"n": 1}
        assert b'"n":1' in path.read_bytes()
    write_record(path, {"n": 2}, durable=True)
    assert read_record(path) == {"n": 2}


def test_a_commit_is_on_the_disk_before_a_file_is_deleted(drawn, consumer, tmp_path, monkeypatch):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer(ack="commit")
    for _ in range(4):
        reader.get_batch("train")
    commit = (tmp_path / "spool" / "state" / "commit").stat().st_ino
    told: list[str] = []
    fsync, unlink = os.fsync, os.unlink

    def synced(fd):
        fsync(fd)
        told.append("synced" if os.fstat(fd).st_ino == commit else "other")

    def unlinked(path, **more):
        told.extend(["deleted"] if str(path).endswith(".safetensors") else [])
        unlink(path, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "unlink", unlinked)
    reader.commit()
    assert reader._queue.background.drain(10)
    assert told == ["synced", "deleted", "deleted"], "nothing else has to be made for it"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_lies_in_the_place_of_a_record_is_neither_followed_nor_waited_for(tmp_path, kind):
    path, outside = tmp_path / "record", tmp_path / "outside"
    outside.write_bytes(b"precious")
    {"link": lambda: path.symlink_to(outside), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(StorageError, match=r"record cannot be used: .*remove what lies there"):
        write_record(path, {"n": 1}, durable=False)
    assert outside.read_bytes() == b"precious"


# ------------------------------------------------------------------------------------ files of version 0.1


def test_the_commit_point_of_version_0_1_is_read_until_another_is_written(tmp_path):
    folder = SpoolFolder(tmp_path / "spool")
    folder.prepare()
    assert folder.commit_points() == {}
    old = folder.state / "commit.json"
    old.write_bytes(seal({"splits": {"train": POINT}}))
    assert folder.commit_points() == {"train": POINT}
    folder.write_commit_points({"train": POINT | {"g": 88}})
    assert folder.commit_points()["train"]["g"] == 88
    assert not old.exists()


def test_a_spool_of_version_0_1_is_read_on_where_it_was_left(drawn, consumer, tmp_path):
    drawn(max_backlog_files=4).run(("train",), max_files=4)
    state = tmp_path / "spool" / "state"
    (state / "commit").unlink()
    (state / "commit.json").write_bytes(seal({"splits": {"train": {"g": 8, "at": [[1, 0]], "start": [8]}}}))
    (state / "read-0.json").write_bytes(seal({"rank": 0, "world_size": 1, "splits": {"train": {"done": [2]}}}))
    # Two records of 256 bytes, the second written first.
    records = [seal({"turn": turn, "seq": seq, "row": 8 * seq}).ljust(256) for turn, seq in ((2, 2), (1, 1))]
    (state / "taken-train").write_bytes(b"".join(records))
    expected = drawn().produce_one_file("train", 2)
    from headrace.spool import open_batch_file

    rows = open_batch_file(expected).arrays["x"][:4].tolist()
    reader = consumer()
    assert reader.get_batch("train")[0].tolist() == rows, "files 0 and 1 were begun"
    assert not (state / "read-0.json").exists()
    reader.get_batch("train")
    reader.get_batch("train")
    assert reader._queue.background.drain(10)
    assert reader._queue.folder.commit_points()["train"]["at"] == [[3, 0]]
    assert not (state / "commit.json").exists()
