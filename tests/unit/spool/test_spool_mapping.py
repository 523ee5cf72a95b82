"""Files that are mapped and summed in one call hold what files opened step by step hold, are refused like them, and go when nobody uses them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import FileCorrupt
from headrace.files import first_bad_segment, open_container
from headrace.spool import FieldSpec, FileHeader, mapping, open_batch_file, write_batch_file
from headrace.spool.batch_file import Kind
from headrace.spool.channel import Channel
from headrace.spool.folder import SpoolFolder
from headrace.spool.mapping import FileMapper, map_loops

SCHEMA = (FieldSpec("a", "int64", (300,)), FieldSpec("b", "int8", (50,)))
ROWS = 12


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    map_loops()


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    made = Channel(SpoolFolder(tmp_path), "train")
    made.prepare()
    return made


def arrays_of(seq: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seq)
    return {
        "a": rng.integers(0, 1 << 60, (ROWS, 300)),
        "b": rng.integers(-100, 100, (ROWS, 50)).astype(np.int8),
    }


def write(channel: Channel, seq: int, **more: Any) -> Path:
    known = {"split": "train", "schema": SCHEMA, "rows": ROWS, "first": ROWS * seq, "batch_size": 3, "job": "j"}
    header = FileHeader(seq=seq, **(known | more))
    path = channel.path(seq)
    path.unlink(missing_ok=True)
    write_batch_file(path, header, arrays_of(seq), durable=False)
    return path


def in_memory(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_files_mapped_in_one_call_hold_what_they_hold_opened_step_by_step(channel):
    mapper = FileMapper(private=False)
    for seq in (0, 8, 9, 10, 11, 12, 1234567):  # numbers of other lengths, so other headers
        path = write(channel, seq)
        mapped = mapper.map(channel, seq)
        assert mapped is not None
        file, plain = mapper.open(path, seq, mapped), open_batch_file(path)
        assert file.header == plain.header
        assert (file.container is None) == (seq > 0), "those that look like the first are not read anew"
        file.check()
        for name, array in arrays_of(seq).items():
            assert np.array_equal(file.arrays[name], array)
            assert not file.arrays[name].flags.writeable
    mapper.close()


def test_several_files_are_mapped_at_once_up_to_one_that_is_missing_or_judged(channel):
    for seq in (0, 1, 2, 3, 5):
        write(channel, seq)
    channel.judge(3)
    mapper = FileMapper(private=False)
    calls = []
    real = map_loops().map_summed
    one_call = type("OneCall", (), {"map_summed": staticmethod(lambda *a: calls.append(1) or real(*a))})
    first = mapper.map(channel, 0)
    mapper.open(channel.path(0), 0, first)  # where the arrays lie is known from here on
    mapping.map_loops._module, kept = one_call, mapping.map_loops._module
    try:
        one_call.unmap = kept.unmap
        found = [mapper.map(channel, seq, more=4) for seq in (1, 2)]
        assert len(calls) == 1
        assert mapper.map(channel, 3) is None, "what was decided about it is not known"
        assert mapper.map(channel, 3, judged=True) is not None
        assert mapper.map(channel, 4) is None
    finally:
        mapping.map_loops._module = kept
    for seq, mapped in zip((1, 2), found, strict=True):
        assert np.array_equal(mapper.open(channel.path(seq), seq, mapped).arrays["a"], arrays_of(seq)["a"])
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
    mapper.open(write(channel, 7), 7, mapper.map(channel, 7))
    path = write(channel, 8)
    raw = path.read_bytes()
    rng = np.random.default_rng(1)
    header = 8 + int.from_bytes(raw[:8], "little")
    bits = [*range(0, 8 * header, 5), *rng.integers(8 * header, 8 * len(raw), 300).tolist()]
    for bit in bits:
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bad)
        mapped = mapper.map(channel, 8, whole=whole)
        assert mapped is not None
        with pytest.raises(FileCorrupt, match=r"000000000008"):
            mapper.open(path, 8, mapped).check()
    path.write_bytes(raw)
    file = mapper.open(path, 8, mapper.map(channel, 8, whole=whole))
    file.check()
    assert np.array_equal(file.arrays["a"], arrays_of(8)["a"])
    mapper.close()


@pytest.mark.parametrize("more", [{"last": True}, {"job": "k"}, {"cursor": {"at": 3}}, {"batch_size": 4}])
def test_a_file_of_another_shape_or_kind_is_read_anew(channel, more):
    mapper = FileMapper(private=False)
    mapper.open(write(channel, 0), 0, mapper.map(channel, 0))
    path = write(channel, 1, **more)
    file = mapper.open(path, 1, mapper.map(channel, 1))
    file.check()
    assert file.header == open_batch_file(path).header
    assert file.container is not None
    mapper.close()


def test_a_header_whose_sum_is_right_and_whose_text_is_not_json_of_its_form_is_refused(channel):
    import xxhash

    headers = (open_container(write(channel, 5, job="j" * n), verify=False).header for n in range(1, 65))
    assert any(
        text.endswith(b" " * 40) for text in headers
    )  # there is room for other text, and the arrays stay where they are
    path = channel.path(5)
    kind = Kind.of(open_batch_file(path))
    assert kind is not None
    mapper = FileMapper(private=False)
    mapper.open(path, 5, mapper.map(channel, 5))  # where the arrays lie is known from here on
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    own = raw.index(b'header\\":\\"') + len(b'header\\":\\"')
    for wrong in (b"6", b"", b"-5", b"05", b"5.0", b"9" * 30, b"x" * 32, b'\\"5\\"', b"5 and more"):
        number, _, behind = wrong.partition(b" ")
        text = raw[8:header].replace(b'\\"seq\\":5', b'\\"seq\\":' + number).rstrip() + behind
        text = bytearray(text.ljust(header - 8))
        text[own - 8 : own + 24] = b"0" * 32
        text[own - 8 : own + 24] = xxhash.xxh3_128_hexdigest(bytes(text)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[header:])
        mapped = mapper.map(channel, 5)
        assert mapped is not None
        file = kind.open(path, mapped)
        assert file.header.seq == 6 if wrong == b"6" else file is None
    mapper.close()


def test_private_memory_may_be_written_and_the_file_stays(channel):
    path = write(channel, 0)
    raw = path.read_bytes()
    mapper = FileMapper(private=True)
    file = mapper.open(path, 0, mapper.map(channel, 0))
    file.arrays["a"][:] = 0
    assert not file.arrays["a"].any()
    assert path.read_bytes() == raw
    mapper.close()


def test_a_file_stays_mapped_as_long_as_a_view_of_it_is_used_and_no_longer(channel):
    paths = [write(channel, seq) for seq in range(3)]
    mapper = FileMapper(private=False)
    views = [mapper.open(paths[seq], seq, mapper.map(channel, seq)).arrays["a"][1:3] for seq in range(2)]
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
    now, asked = [0.0], []
    monkeypatch.setattr(mapping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(mapping, "warm_kernels", asked.append)
    monkeypatch.setattr(mapping.map_loops, "_module", None)
    mapper = FileMapper(private=False)
    for seconds in (1.0, 0.01, 0.01, 0.01, 0.5, 0.01, 0.01, 0.01):
        now[0] += seconds
        mapper.went_by()
    assert asked == []
    for _ in range(5):
        now[0] += 0.01
        mapper.went_by()
    assert asked == [map_loops]


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
