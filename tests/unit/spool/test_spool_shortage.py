"""A process without descriptors: no file of the spool is called damaged, quarantined or removed because of it."""

from __future__ import annotations

import contextlib
import os
import resource

import numpy as np
import pytest

from headrace.errors import FileCorrupt, StorageError
from headrace.files import open_container, read_lines, unreadable, write_container
from headrace.runs.folder import read_json
from headrace.spool import read_meta
from headrace.spool.batch_file import check_pt_records, load_pt
from headrace.spool.records import read_record, read_sealed, reserve_record
from headrace.text.shards import read_checked


@contextlib.contextmanager
def no_descriptors():
    """Every open fails meanwhile: 0, 1 and 2 are taken, and whatever another thread closes has a higher number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "read",
    [open_container, read_sealed, read_record, read_json, lambda path: read_checked(path, "x"), lambda path: list(read_lines(path)),
     lambda path: load_pt(path, 2), check_pt_records],
    ids=["container", "sealed", "record", "json", "checked", "lines", "pt", "pt records"],
)  # fmt: skip
def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_not_called_damaged(tmp_path, read):
    path = tmp_path / "file"
    path.write_bytes(b"{}")
    with no_descriptors(), pytest.raises(StorageError, match=r"file could not be read: Too many open files.*ulimit -n"):
        read(path)


@pytest.mark.parametrize("number", [5, 12, 23, 24])
def test_what_the_system_lacks_says_nothing_about_the_file(tmp_path, number):
    assert isinstance(unreadable(tmp_path, OSError(number, os.strerror(number))), StorageError)
    for other in (2, 13, 21, 40):
        assert isinstance(unreadable(tmp_path, OSError(other, os.strerror(other))), FileCorrupt)


def test_memory_that_is_missing_for_a_map_is_no_damage(tmp_path):
    path = tmp_path / "large"
    write_container(path, {"a": np.zeros(8 << 20, np.uint8)}, {})
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as handle:
        used = int(handle.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), hard))
    try:
        with pytest.raises(StorageError, match="Cannot allocate memory"):
            open_container(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    open_container(path)


def test_a_provider_keeps_verdicts_files_and_positions_that_it_cannot_open(counted, tmp_path):
    provider = counted(max_backlog_files=3)
    provider.run(max_files=2)
    provider.open()
    (channel,) = provider.channels("train")
    channel.judge(0, "it was bad")
    provider._next.clear()  # as after a restart: the file before says where it stands
    reserve_record(provider.folder.state / "read-0", {"splits": {}})
    with no_descriptors():
        for call in (
            lambda: channel.verdict(0),
            lambda: provider._readable(channel, 1),
            provider.folder.commit_points,
            provider.folder.read_positions,
            lambda: provider._move_to(channel, 2),
            lambda: read_meta(tmp_path / "spool"),
            lambda: channel.claim(2, "test", 60.0),
            channel.present,
            provider.folder.provider_at_work,
        ):
            with pytest.raises(StorageError, match="Too many open files"):
                call()
    assert channel.verdict(0).reason == "it was bad"
    assert channel.present() == [0, 1]
    provider.close()


def test_a_consumer_without_descriptors_says_so_and_quarantines_nothing(counted, consumer, tmp_path):
    counted(max_backlog_files=3).run(max_files=3)
    reader = consumer(ack="commit")
    reader.get_batch("train")
    commit = tmp_path / "spool" / "state" / "commit"
    before = commit.read_bytes()
    (part,), background = reader._queue._readers["train"].parts, reader._queue.background
    with background.changed:  # the two files ahead are open
        assert background.changed.wait_for(lambda: len(part.files._ready) == 2, timeout=60)
    with no_descriptors(), pytest.raises(StorageError, match="Too many open files"):
        reader._queue.retention.move_commit({"train": {"g": 8, "at": [[1, 0]], "start": [8]}}, patience=0.0)
    assert commit.read_bytes() == before
    assert reader.get_batch("train")["g"].tolist() == [4, 5, 6, 7]
    assert not list((tmp_path / "spool" / "quarantine" / "train").iterdir())
