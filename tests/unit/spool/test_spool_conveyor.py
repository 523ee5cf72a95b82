"""Files that come on a conveyor hold what files opened one by one hold, in order; whatever is not as expected ends it, and goes the usual way."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from headrace.files import open_container
from headrace.metrics import Meter
from headrace.spool import conveyor, open_batch_file
from headrace.spool.channel import Channel
from headrace.spool.conveyor import Conveyor
from headrace.spool.mapping import FileMapper, map_loops

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from spool_files import ROWS, arrays_of, channel_in, flipped, in_memory, write


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    map_loops()


class Belt:
    """A conveyor and who asks for its files."""

    def __init__(self, folder: Path, private: bool = False) -> None:
        self.channel: Channel = channel_in(folder)
        self.mapper, self.called = FileMapper(private=private), np.zeros(1, np.int64)
        self.meter = Meter()
        self.conveyor = Conveyor(self.mapper, self.called, self.meter)
        self.ends: list[tuple[int, int]] = []

    def goes_on(self, seq: int, start: int) -> None:
        self.ends.append((seq, start))

    def begin(self, seq: int, deep: int = 8) -> bool:
        """Bring the files behind one that was opened the usual way."""
        file = open_batch_file(self.channel.path(seq))
        return self.conveyor.begin(self, self.channel, file, ROWS * (seq + 1), deep)

    def run(self, until: float) -> bool:
        """As the background thread does: it has heard what was called before."""
        self.called[0] = 0
        return self.conveyor.run(until)

    def take(self, seq: int):
        return self.conveyor.take(self, seq, ROWS * seq)

    def close(self) -> None:
        self.conveyor.clear()
        self.mapper.close()


@pytest.fixture
def belt(tmp_path):
    made = Belt(tmp_path)
    yield made
    made.close()


def test_both_threads_mean_the_same_numbers():
    loops = map_loops()
    names = ("READY", "TAKEN", "OPEN", "FREED", "UNMAPPED", "WAITED", "LINE")
    assert [getattr(conveyor, f"_{name}") for name in names] == [getattr(loops, name) for name in names]
    assert conveyor._SHARED == loops._SUMS > max(getattr(loops, name) for name in names[:-1])


def test_files_hold_what_they_hold_opened_one_by_one(belt):
    for seq in range(7, 13):  # numbers of other lengths, so other headers
        write(belt.channel, seq)
    for seq in range(97, 103):  # and of a producer that says where it stands
        write(belt.channel, seq, cursor={"at": 10 ** (seq - 90), "of": ["a", {}]}, follows=f"{seq:x}" * (seq - 96))
    for first, last in ((7, 12), (97, 102)):
        assert belt.begin(first)
        assert belt.run(0.0)
        for seq in range(first + 1, last + 1):
            file, plain = belt.take(seq), open_batch_file(belt.channel.path(seq))
            assert file.header == plain.header
            assert file.path == str(plain.path)
            assert (file.rows, file.last) == (plain.rows, plain.last)
            file.batches(3)
            batches = list(file.stock)
            for place, (name, array) in enumerate(arrays_of(seq).items()):
                assert np.array_equal(file.arrays[name], array)
                assert np.array_equal(np.concatenate([batch[place] for batch in batches]), array)
                assert not file.arrays[name].flags.writeable
        assert belt.take(last + 1) is None
        assert belt.ends[-1] == (last + 1, ROWS * (last + 1))
    assert len(belt.ends) == 2


def test_no_more_files_are_brought_than_are_asked_for_and_the_next_as_soon_as_one_is_taken(belt):
    for seq in range(20):
        write(belt.channel, seq)
    belt.begin(0, deep=3)
    belt.run(0.0)
    assert [belt.conveyor.wait(seq, 0.0) for seq in (1, 2, 3, 4)] == [True, True, True, False]
    for seq in range(1, 20):
        assert np.array_equal(belt.take(seq).arrays["a"], arrays_of(seq)["a"])
        assert belt.run(0.0) == (seq < 17)
    assert belt.ends == [(20, 20 * ROWS)]
    assert not belt.conveyor.carries(belt, 20)


def judged(channel: Channel, seq: int) -> None:
    write(channel, seq)
    channel.judge(seq)


ODD = {
    "missing": lambda channel, seq: None,
    "judged": judged,
    "last": lambda channel, seq: write(channel, seq, last=True),
    "other job": lambda channel, seq: write(channel, seq, job="k"),
    "other batches": lambda channel, seq: write(channel, seq, batch_size=4),
    "other number": lambda channel, seq: write(channel, 1000 + seq).rename(channel.path(seq)),
    "other rows": lambda channel, seq: write(channel, seq, first=7),
    "fifo": lambda channel, seq: os.mkfifo(channel.path(seq)),
    "link": lambda channel, seq: channel.path(seq).symlink_to(write(channel, 1000 + seq)),
    "folder": lambda channel, seq: channel.path(seq).mkdir(),
    "device": lambda channel, seq: channel.path(seq).symlink_to("/dev/zero"),
    "empty": lambda channel, seq: channel.path(seq).touch(),
    "seven bytes": lambda channel, seq: channel.path(seq).write_bytes(b"1234567"),
    "a long header": lambda channel, seq: channel.path(seq).write_bytes((1 << 60).to_bytes(8, "little") + b"{" * 99),
    "a header below nothing": lambda channel, seq: channel.path(seq).write_bytes(b"\xff" * 8 + b"{" * 99),
}


@pytest.mark.parametrize("what", ODD)
def test_whatever_is_different_ends_it_and_what_is_ready_is_still_taken(belt, what):
    for seq in (0, 1, 2, 4):
        write(belt.channel, seq)
    ODD[what](belt.channel, 3)
    belt.begin(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert belt.run(time.monotonic() + 60), "it comes back at once"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert belt.ends == [(3, 3 * ROWS)]
    assert not belt.begin(4), "not before what is on it is taken"
    assert [belt.conveyor.carries(belt, seq) for seq in (1, 2, 3)] == [True, True, False]
    for seq in (1, 2):
        assert np.array_equal(belt.take(seq).arrays["b"], arrays_of(seq)["b"])
    assert belt.take(3) is None
    write(belt.channel, 5)
    assert belt.begin(4)
    belt.run(0.0)
    assert np.array_equal(belt.take(5).arrays["a"], arrays_of(5)["a"])


def test_no_file_with_a_flipped_bit_is_taken(belt):
    write(belt.channel, 7)
    path = write(belt.channel, 8)
    raw = path.read_bytes()
    tries = belt.conveyor._tries
    for bad in flipped(raw):
        path.write_bytes(bad)
        belt.conveyor._tries = tries
        assert belt.begin(7)
        belt.run(0.0)
        assert belt.take(8) is None
        assert not belt.conveyor.carries(belt, 8)
        belt.conveyor.clear()
    path.write_bytes(raw)
    belt.conveyor._tries = tries
    assert belt.begin(7)
    belt.run(0.0)
    assert np.array_equal(belt.take(8).arrays["a"], arrays_of(8)["a"])


def test_a_header_whose_sum_is_right_and_whose_text_is_not_json_of_its_form_ends_it(belt):
    channel = belt.channel
    headers = (open_container(write(channel, 5, job="j" * n), verify=False).header for n in range(1, 65))
    long = next(n for n, text in enumerate(headers, 1) if text.endswith(b" " * 40))
    for seq in (4, 5):  # there is room for other text, and the arrays stay where they are
        write(channel, seq, job="j" * long)
    path = channel.path(5)
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    own = raw.index(b'header\\":\\"') + len(b'header\\":\\"')
    for wrong in (b"5", b"6", b"", b"-5", b"05", b"5.0", b"9" * 30, b"x" * 32, b'\\"5\\"', b"5 and more"):
        number, _, behind = wrong.partition(b" ")
        text = raw[8:header].replace(b'\\"seq\\":5', b'\\"seq\\":' + number).rstrip() + behind
        text = bytearray(text.ljust(header - 8))
        text[own - 8 : own + 24] = b"0" * 32
        text[own - 8 : own + 24] = xxhash.xxh3_128_hexdigest(bytes(text)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[header:])
        belt.conveyor._tries = 8
        assert belt.begin(4)
        belt.run(0.0)
        assert (belt.take(5) is not None) == (wrong == b"5")
        belt.conveyor.clear()


def test_files_of_which_none_looks_like_another_are_not_tried_for_ever(belt):
    for seq in range(20):
        write(belt.channel, seq, job=str(seq))
    begun = [belt.begin(seq) and not belt.run(0.0) for seq in range(19)]
    assert begun == [True] * 8 + [False] * 11


def test_a_file_that_begins_elsewhere_goes_the_usual_way(belt):
    for seq in range(3):
        write(belt.channel, seq)
    belt.begin(0)
    belt.run(0.0)
    assert belt.conveyor.take(belt, 1, ROWS + 1) is None
    assert not belt.conveyor.carries(belt, 1)
    assert belt.called[0] == 1


def test_memory_goes_when_nobody_uses_it_and_no_sooner(tmp_path):
    belt = Belt(tmp_path, private=True)
    paths = [write(belt.channel, seq) for seq in range(8)]
    raw = paths[1].read_bytes()
    belt.begin(0, deep=2)
    belt.run(0.0)
    view = belt.take(1).arrays["a"][2:4]
    view[:] = 0
    assert paths[1].read_bytes() == raw, "writing to a batch changes no file"
    for seq in range(2, 6):
        assert belt.take(seq) is not None
        belt.run(0.0)
    gc.collect()
    assert belt.take(6) is not None
    belt.run(0.0)
    assert in_memory(paths[1])
    assert not any(map(in_memory, paths[2:6])), "the loop lets go of what nobody uses"
    assert in_memory(paths[7])
    belt.conveyor.drop(belt)
    belt.run(0.0)
    belt.mapper.let_go()
    assert not in_memory(paths[7]), "nobody will take it"
    belt.close()
    assert not view.any()
    del view
    gc.collect()
    assert not any(map(in_memory, paths))


def test_who_calls_the_background_does_not_wait_for_the_trainer(belt):
    for seq in range(5):
        write(belt.channel, seq)
    belt.begin(0, deep=2)
    thread = threading.Thread(target=belt.run, args=(time.monotonic() + 60,))
    thread.start()
    until = time.monotonic() + 20
    while not belt.conveyor._line[map_loops().WAITED]:
        assert time.monotonic() < until
    belt.called[0] = 1
    thread.join(20)
    assert not thread.is_alive()
    assert belt.ends == []
    assert belt.meter.totals()["wait/spool.ahead/seconds"] > 0


@pytest.mark.parametrize("bad", [None, 150])
def test_both_threads_sum_and_every_file_arrives_whole_and_in_order(belt, bad):
    count = 300
    paths = [write(belt.channel, seq) for seq in range(count)]
    if bad is not None:
        raw = bytearray(paths[bad].read_bytes())
        raw[-1] ^= 1
        paths[bad].write_bytes(raw)
    belt.begin(0, deep=2)

    def bring() -> None:
        while not belt.ends:
            belt.run(time.monotonic() + 0.002)

    thread = threading.Thread(target=bring, daemon=True)
    thread.start()
    seen, until = 1, time.monotonic() + 60
    while belt.conveyor.carries(belt, seen):
        assert time.monotonic() < until
        if belt.conveyor.wait(seen, 0.01):
            file = belt.take(seen)
            for name, array in arrays_of(seen).items():
                assert np.array_equal(file.arrays[name], array)
            seen += 1
    thread.join(20)
    assert seen == (bad or count)
    assert belt.ends == [(seen, seen * ROWS)]


def test_a_wrong_sum_is_found_by_whichever_thread_comes_to_it():
    loops, size, count = map_loops(), 1 << 20, 6
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, 32 * count + size * count, dtype=np.uint8)
    begin = 32 * count
    spans = np.array([(size * k, size * (k + 1)) for k in range(count)], np.int64)
    where = np.arange(0, begin, 32, dtype=np.int64)
    for k, (first, end) in enumerate(spans):
        text = xxhash.xxh3_128_hexdigest(raw[begin + first : begin + end].tobytes()).encode()
        raw[32 * k : 32 * k + 32] = np.frombuffer(text, np.uint8)
    line = np.zeros(loops.LINE, np.int64)
    for turn in range(40):
        bad = turn % (count + 1)  # one past the last: none
        at = begin + size * bad + 5
        if bad < count:
            raw[at] ^= 1
        line[loops.OPEN] = 1
        found = []

        def background(found=found) -> None:
            found.append(loops._is_right(line, raw.ctypes.data, len(raw), spans, where))
            line[loops.OPEN] = 0

        thread = threading.Thread(target=background)
        thread.start()
        assert not loops.await_file(line, 0, time.monotonic_ns() + 20 * 10**9), "it sums, and nothing is ready"
        thread.join(20)
        assert found == [bad == count]
        if bad < count:
            raw[at] ^= 1
