"""What is known of the disk under a spool, what is said about it, and when loose files reach it."""

from __future__ import annotations

import os
import stat

import pytest

from headrace.metrics import Meter
from headrace.spool.durability import sync_file
from headrace.spool.file_system import FileSystem, room

LINE = "{n} 1 {device} / {point} rw,relatime shared:1 - {kind} /dev/x rw\n"


@pytest.fixture
def mounts(tmp_path):
    """A mountinfo in which these (device, point, kind) are mounted."""

    def write(*entries):
        path = tmp_path / "mountinfo"
        path.write_text(
            "".join(LINE.format(n=n, device=d, point=p, kind=k) for n, (d, p, k) in enumerate(entries)) + "odd\n"
        )
        return path

    return write


def device_of(path):
    number = path.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def test_a_file_system_is_found_by_its_device_number(tmp_path, mounts):
    table = mounts(("0:1", "/", "overlay"), (device_of(tmp_path), "/", "ext4"), ("0:2", "/other", "nfs"))
    assert FileSystem.of(tmp_path, table).kind == "ext4"
    assert FileSystem.of(tmp_path / "not" / "there", table).kind == "ext4"


def test_one_with_other_device_numbers_is_found_by_the_longest_path(tmp_path, mounts):
    spaced = tmp_path / "a b"
    spaced.mkdir()
    table = mounts(
        ("0:1", "/", "overlay"), ("0:2", str(tmp_path), "btrfs"), ("0:3", str(spaced).replace(" ", "\\040"), "nfs4")
    )
    assert FileSystem.of(tmp_path, table).kind == "btrfs"
    assert FileSystem.of(spaced, table).kind == "nfs4"
    assert FileSystem.of(tmp_path, mounts()).kind == ""
    assert FileSystem.of(tmp_path, tmp_path / "no such table").kind == ""


def test_a_view_is_safe_where_a_deleted_file_stays_readable():
    local = {kind: FileSystem(kind=kind).local for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "")}
    assert all(local.values()), local
    shared = {
        kind: FileSystem(kind=kind).local for kind in ("nfs", "nfs4", "cifs", "lustre", "fuse.sshfs", "9p", "gpfs")
    }
    assert not any(shared.values()), shared


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("tmpfs", "nothing in it survives a power cut"), ("cifs", "not seen by other machines"), ("fuse.s3fs", "may not pass fsync")],
)  # fmt: skip
def test_a_disk_that_does_not_keep_its_word_is_named_to_both_ends(drawn, consumer, monkeypatch, kind, sentence):
    monkeypatch.setattr(FileSystem, "of", classmethod(lambda cls, path: cls(kind=kind)))
    said, heard = [], []
    drawn(report=said.append).run(("train",), max_files=1)
    assert sum(sentence in line for line in said) == 1
    consumer(report=heard.append)
    assert sum(sentence in line for line in heard) == 1


def test_nothing_is_said_about_an_ordinary_disk(drawn, monkeypatch):
    monkeypatch.setattr(FileSystem, "of", classmethod(lambda cls, path: cls(kind="ext4")))
    said = []
    drawn(report=said.append).run(("train",), max_files=1)
    assert [line for line in said if "published" not in line] == []


def test_room_is_what_this_user_may_use(tmp_path):
    told = os.statvfs(tmp_path)
    assert 0 < room(tmp_path).bytes <= told.f_blocks * told.f_frsize


@pytest.fixture
def synced(monkeypatch):
    """(inode, whether it is a folder, thread) of every fsync."""
    import threading

    calls, real = [], os.fsync

    def fsync(fd):
        status = os.fstat(fd)
        calls.append((status.st_ino, stat.S_ISDIR(status.st_mode), threading.current_thread().name))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


def test_loose_files_and_then_their_folder_are_synced_behind_the_provider(drawn, tmp_path, synced):
    drawn().produce_one_file("train", 9)  # meta is there, and durable
    synced.clear()
    drawn(durable=False, max_backlog_files=5).run(("train",), max_files=5)
    folder = tmp_path / "spool" / "queue" / "train"
    files = {path.stat().st_ino for path in folder.iterdir() if path.stem.endswith(tuple("01234"))}
    assert {ino for ino, _, _ in synced} == files | {folder.stat().st_ino}
    assert {thread for _, _, thread in synced} == {"headrace-spool-sync"}, "the provider itself waits for no disk"
    assert synced[-1][1], "the folder comes after the files in it"
    synced.clear()
    drawn(max_backlog_files=7).run(("train",), max_files=1)
    assert "headrace-spool-sync" not in {thread for _, _, thread in synced}


def test_a_failed_sync_is_told_and_not_repeated_and_a_file_that_is_gone_is_none(tmp_path, monkeypatch):
    calls = []

    def fail(fd):
        calls.append(os.fstat(fd).st_ino)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"x")
    said, meter = [], Meter()
    for name in ("gone.safetensors", "file.safetensors"):
        sync_file(tmp_path / name, said.append, meter)
    assert calls.count(path.stat().st_ino) == 1
    assert any(line.startswith(f"{path} could not be synced (Input/output error)") for line in said)
    assert not any("gone" in line for line in said)
    assert meter.totals()["spool/sync_failures"] >= 1


def fsynced_names(folder, synced):
    """What of a spool was fsynced, by its path in the folder. Folders are left out."""
    by_inode = {p.stat().st_ino: str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    return {by_inode[ino] for ino, is_folder, _ in synced if ino in by_inode and not is_folder}


def test_what_is_fsynced_is_what_the_table_in_durability_says(drawn, consumer, tmp_path, synced, until):
    folder = tmp_path / "spool"
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    batch_files = {f"queue/train/{seq:012d}.safetensors" for seq in range(3)}
    assert fsynced_names(folder, synced) == {"meta.json", "meta.pkl", "state/commit"} | batch_files
    path = folder / "queue/train/000000000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    synced.clear()
    ranks = [consumer(ack="commit", dp_rank=rank, dp_world_size=2) for rank in (0, 1)]
    for rank in ranks * 2:
        rank.get_batch("train")
    reason = folder / "quarantine/train/000000000001.safetensors.reason.json"
    until(reason.exists)
    until((folder / "verdicts/train/000000000000").exists)
    ranks[0]._queue.background.drain(10.0)
    judged_bad = {"verdicts/train/000000000001", str(reason.relative_to(folder))}
    assert fsynced_names(folder, synced) == judged_bad, "no good verdict and no position"
    ranks[0].commit()
    assert fsynced_names(folder, synced) == judged_bad | {"state/commit"}
