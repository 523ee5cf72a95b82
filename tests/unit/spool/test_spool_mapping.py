"""Files that are mapped and summed in one call hold what files opened step by step hold, are refused like them, and go when nobody uses them."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import FileCorrupt
from headrace.files import first_bad_segment, open_container
from headrace.spool import FieldSpec, FileHeader, mapping, open_batch_file, write_batch_file
from headrace.spool.batch_file import BatchFile
from headrace.spool.channel import Channel
from headrace.spool.mapping import FileMapper, map_loops

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from spool_files import arrays_of, channel_in, flipped, in_memory, write


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    map_loops()


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    return channel_in(tmp_path)


def opened(mapper: FileMapper, channel: Channel, seq: int, **how: Any) -> BatchFile:
    """A file by way of the mapper, as a checker opens it."""
    mapped = mapper.map(channel, seq, **how)
    assert mapped is not None
    file = open_batch_file(channel.path(seq), seq=seq, mapped=mapped)
    mapper.learn(file)
    return file


def test_files_mapped_in_one_call_hold_what_they_hold_opened_step_by_step(channel):
    mapper = FileMapper(private=False)
    for seq in (0, 8, 9, 10, 11, 12, 1234567):  # numbers of other lengths, so other headers
        path = write(channel, seq)
        file, plain = opened(mapper, channel, seq), open_batch_file(path)
        assert file.header == plain.header
        file.check()
        for name, array in arrays_of(seq).items():
            assert np.array_equal(file.arrays[name], array)
            assert not file.arrays[name].flags.writeable
    mapper.close()


def test_a_file_that_was_judged_is_mapped_for_who_knows_it(channel):
    write(channel, 3)
    channel.judge(3)
    mapper = FileMapper(private=False)
    assert mapper.map(channel, 3) is None, "what was decided about it is not known"
    assert np.array_equal(opened(mapper, channel, 3, judged=True).arrays["a"], arrays_of(3)["a"])
    mapper.close()


@pytest.mark.parametrize("make", ["fifo", "link", "folder", "device", "empty", "missing"])
def test_what_is_no_file_of_ours_is_not_mapped(channel, tmp_path, make):
    path = channel.path(0)
    if make == "fifo":
        os.mkfifo(path)
    elif make == "link":
        path.symlink_to(write(channel, 1))
    elif make == "folder":
        path.mkdir()
    elif make == "device":
        path.symlink_to("/dev/zero")
    elif make == "empty":
        path.touch()
    before = len(os.listdir("/proc/self/fd"))
    assert FileMapper(private=False).map(channel, 0) is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("whole", [True, False])
def test_every_flipped_bit_of_a_file_that_looks_like_another_is_found(channel, whole):
    mapper = FileMapper(private=False)
    write(channel, 7)
    opened(mapper, channel, 7)
    path = write(channel, 8)
    raw = path.read_bytes()
    for bad in flipped(raw):
        path.write_bytes(bad)
        with pytest.raises(FileCorrupt, match=r"000000000008"):
            opened(mapper, channel, 8, whole=whole).check()
    path.write_bytes(raw)
    file = opened(mapper, channel, 8, whole=whole)
    file.check()
    assert np.array_equal(file.arrays["a"], arrays_of(8)["a"])
    mapper.close()


def test_private_memory_may_be_written_and_the_file_stays(channel):
    path = write(channel, 0)
    raw = path.read_bytes()
    mapper = FileMapper(private=True)
    file = opened(mapper, channel, 0)
    file.arrays["a"][:] = 0
    assert not file.arrays["a"].any()
    assert path.read_bytes() == raw
    mapper.close()


def test_a_file_stays_mapped_as_long_as_a_view_of_it_is_used_and_no_longer(channel):
    paths = [write(channel, seq) for seq in range(3)]
    mapper = FileMapper(private=False)
    views = [opened(mapper, channel, seq).arrays["a"][1:3] for seq in range(2)]
    gc.collect()
    assert in_memory(paths[0])
    assert in_memory(paths[1])
    views[0] = None
    gc.collect()
    assert mapper.map(channel, 2) is not None  # the next call lets go of what is not used
    assert not in_memory(paths[0])
    mapper.close()
    assert in_memory(paths[1])
    assert np.array_equal(views[1], arrays_of(1)["a"][1:3])
    views.clear()
    gc.collect()
    assert not any(map(in_memory, paths))


def test_files_read_to_their_end_leave_memory_though_no_other_comes(counted, consumer, tmp_path):
    counted(total=24, batches_per_file=1, max_backlog_files=8).run(("train",))
    reader = consumer(ack="commit")
    for _ in range(6):
        reader.get_batch("train")
    assert reader._ahead.drain(10.0)
    left = [path for path in sorted((tmp_path / "spool" / "queue" / "train").iterdir()) if in_memory(path)]
    assert len(left) <= 1, "the last one stays open"


def test_the_loops_are_loaded_once_several_files_went_by_within_a_moment_each(monkeypatch):
    asked = []
    monkeypatch.setattr(mapping, "warm_kernels", asked.append)
    monkeypatch.setattr(mapping.map_loops, "_module", None)
    mapper = FileMapper(private=False)
    now = time.monotonic()
    for seconds in (1.0, 0.01, 0.01, 0.01, 0.5, 0.01, 0.01, 0.01):
        now += seconds
        mapper.went_by(now)
    assert asked == []
    for _ in range(5):
        now += 0.01
        mapper.went_by(now)
    assert asked == [map_loops]


def test_a_trainer_is_hurried_that_has_just_begun_or_reads_a_file_within_ten_milliseconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(mapping.time, "monotonic", lambda: now[0])
    mapper = FileMapper(private=False)
    assert mapper.hurried
    found = []
    for seconds in (0.005, 0.005, 0.03, 0.005):
        now[0] += seconds
        mapper.went_by(now[0])
        found.append(mapper.hurried)
    assert found == [True, True, False, True]
    now[0] += 0.025
    assert not mapper.hurried, "it has stopped"


@pytest.mark.parametrize("rows", [1, 5, 12, 40])
@pytest.mark.parametrize("width", [1, 20, 300, 3000])
def test_the_compiled_sums_of_segments_find_what_the_others_find(tmp_path, rows, width):
    path = tmp_path / "f.safetensors"
    header = FileHeader(
        split="train", seq=0, schema=(FieldSpec("a", "int64", (width,)),), rows=rows, first=0, batch_size=1
    )
    write_batch_file(path, header, {"a": np.arange(rows * width).reshape(rows, width)}, durable=False)
    container = open_container(path, verify=False)
    data = container.arrays["a"].reshape(-1).view(np.uint8)
    sums = container.arrays["a!sums"]
    size = max(1, 8192 // (8 * width)) * 8 * width
    every = range(len(sums))
    assert mapping._first_bad(data.data, size, sums, every) is None
    for at in (0, len(data) // 2, len(data) - 1):
        wrong = data.copy()
        wrong[at] ^= 4
        bad = first_bad_segment(wrong.data, size, sums, every)
        assert bad == at // size
        assert mapping._first_bad(wrong.data, size, sums, every) == bad
        assert mapping._first_bad(wrong.data, size, sums, [s for s in every if s != bad]) is None
