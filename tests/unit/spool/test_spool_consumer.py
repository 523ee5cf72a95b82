"""What a consumer delivers, deletes, waits for and refuses."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.batch import OFFSETS, BatchSpec
from headrace.errors import (
    ConfigError,
    CursorMismatch,
    DataError,
    DeadlineExceeded,
    EndOfData,
    FileCorrupt,
    HeadraceError,
    StorageError,
)
from headrace.metrics import Meter
from headrace.spool import FieldSpec, FileHeader, open_batch_file, purge_spool, write_batch_file
from headrace.spool.file_system import FileSystem


def queue(tmp_path):
    return tmp_path / "spool" / "queue" / "train"


def rows_of(folder):
    return np.concatenate([open_batch_file(p).arrays["x"] for p in sorted(folder.iterdir())])


def within(seconds, condition):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        os.sched_yield()


def test_batches_come_as_x_and_y_in_the_order_of_the_files(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    reader = consumer()
    got = [reader.get_batch("train", "cpu") for _ in range(6)]
    assert np.array_equal(torch.cat([x for x, _ in got]).numpy(), expected)
    assert all(torch.equal(y, x + 1) for x, y in got)


def test_other_fields_come_as_a_dict(counted, consumer):
    counted().run(max_files=1)
    batch = consumer(ack="commit").get_batch("train")
    assert set(batch) == {"g"}
    assert batch["g"].tolist() == [0, 1, 2, 3]


def test_a_batch_stays_what_it_was_while_somebody_holds_it(counted, consumer):
    counted(max_backlog_files=8).run(max_files=8)
    reader = consumer(ack="commit")
    held = [reader.get_batch("train")["g"] for _ in range(16)]
    views = [b[1:3] for b in held]
    assert torch.cat(held).tolist() == list(range(64))
    del held
    assert [v.tolist() for v in views] == [[4 * i + 1, 4 * i + 2] for i in range(16)]


def test_memory_of_batches_nobody_holds_is_used_again(counted, consumer):
    counted(max_backlog_files=8).run(max_files=8)
    reader = consumer(ack="commit", copy=True)
    places = set()
    for _ in range(16):
        batch = reader.get_batch("train")
        places.add(batch["g"].data_ptr())
        del batch
    assert len(places) <= 2 * 4, "two batches a file, of at most four files at a time"


def test_rows_of_a_rank_are_gathered_in_memory_that_is_used_again(counted, consumer):
    counted(max_backlog_files=8).run(max_files=8)
    reader = consumer(ack="commit", dp_rank=1, dp_world_size=2, verdict_patience=0.0)
    places = set()
    for step in range(16):
        batch = reader.get_batch("train", "cpu")["g"]
        assert batch.tolist() == [4 * step + 1, 4 * step + 3]
        assert batch.is_contiguous()
        places.add(batch.data_ptr())
        batch.fill_(-1)
        del batch
    assert len(places) <= 2 * 4, "two batches a file, of at most four files at a time"


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_writing_to_a_batch_changes_neither_the_file_nor_what_is_delivered_later(
    counted, consumer, tmp_path, file_format
):
    counted(max_backlog_files=2, file_format=file_format).run(max_files=2)
    before = [p.read_bytes() for p in sorted(queue(tmp_path).iterdir())]
    reader = consumer(ack="commit")
    assert not reader.copy
    start = {**reader.state_dict(), "body": {"splits": {"train": {"g": 0, "at": [[0, 0]], "start": [0]}}}}
    for _ in range(2):
        for first in (0, 4, 8, 12):
            batch = reader.get_batch("train")["g"]
            assert batch.tolist() == list(range(first, first + 4))
            batch.fill_(-1)
        del batch
        reader.load_state_dict(start)
    assert files_in_memory(reader, queue(tmp_path)) <= {"/000000000000." + file_format, "/000000000001." + file_format}
    assert [p.read_bytes() for p in sorted(queue(tmp_path).iterdir())] == before


@pytest.mark.parametrize(("copy", "file_format"), [(False, "safetensors"), (True, "safetensors"), (False, "pt")])
def test_a_batch_outlives_the_file_it_came_from(drawn, consumer, tmp_path, copy, file_format):
    drawn(max_backlog_files=3, file_format=file_format).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    reader = consumer(copy=copy)
    held = [reader.get_batch("train")[0] for _ in range(6)]
    assert reader._queue.background.drain(10)
    assert list(queue(tmp_path).iterdir()) == []
    assert np.array_equal(torch.cat(held).numpy(), expected)
    assert len(files_in_memory(reader, queue(tmp_path))) == (0 if copy else 3)
    del held
    assert files_in_memory(reader, queue(tmp_path)) == set(), "and no longer than that"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_comes_the_same_whichever_way_it_is_asked_for(counted, consumer, ranks):
    counted(max_backlog_files=6).run(max_files=6)
    reader = consumer(ack="commit", dp_rank=0, dp_world_size=ranks, verdict_patience=0.0)
    ways = (None, "cpu", torch.device("cpu"), None, "cpu", "cpu", torch.device("cpu"))
    seen = []
    for step in range(12):
        seen.append(reader.get_batch("train", ways[step % len(ways)])["g"])
        assert reader.state_dict()["body"]["splits"]["train"]["g"] == 4 * (step + 1)
        assert reader.stats()["splits"]["train"]["batches"] == step + 1
    assert torch.cat(seen).tolist() == list(range(0, 48, ranks))


def test_batches_that_lie_side_by_side_are_strangers_to_autograd(counted, consumer):
    counted(max_backlog_files=2).run(max_files=2)
    reader = consumer(ack="commit", dp_rank=1, dp_world_size=2, verdict_patience=0.0)
    first, second = (reader.get_batch("train")["g"] for _ in range(2))
    assert second.data_ptr() == first.data_ptr() + first.nbytes, "both come out of one piece of memory"
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * second).sum()
    first.fill_(-1)
    loss.backward()
    assert weight.grad.tolist() == second.tolist() == [5, 7]
    assert (first._version, second._version) == (1, 0)


def files_in_memory(reader, folder):
    """Which files below a folder are mapped, once the background has let go of what it can."""
    assert reader._queue.background.drain(10)
    reader._queue._retired = [file for file in reader._queue._retired if file.held]
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(str(folder))[1] for line in lines if str(folder) in line}


def test_files_read_to_their_end_leave_memory_though_no_other_comes(counted, consumer, tmp_path):
    counted(total=24, batches_per_file=1, max_backlog_files=8).run(("train",))
    reader = consumer(ack="commit")
    for _ in range(6):
        reader.get_batch("train")
    assert len(files_in_memory(reader, queue(tmp_path))) <= 1, "the last one stays open"


def test_a_trainer_that_writes_to_a_validation_batch_changes_no_later_pass(drawn, consumer, tmp_path):
    drawn(val_files=2).run(("val",))
    expected = rows_of(tmp_path / "spool" / "queue" / "val")
    reader = consumer(cache_files=2)
    for step in range(8):
        x, y = reader.get_batch("val")
        assert np.array_equal(x, expected[step % 4 * 4 : step % 4 * 4 + 4])
        x.fill_(-1)
        y.fill_(-1)


@pytest.mark.parametrize("world", [1, 2])
def test_a_validation_split_is_resumed_by_another_number_of_ranks(drawn, consumer, tmp_path, world):
    drawn(val_files=3).run(("val",))
    expected = np.tile(rows_of(tmp_path / "spool" / "queue" / "val"), (4, 1))
    reader = consumer(ack="commit")
    for _ in range(7):
        reader.get_batch("val")
    state = reader.state_dict()
    reader.close()
    ranks = [consumer(ack="commit", dp_rank=r, dp_world_size=world) for r in range(world)]
    for rank in ranks:
        rank.load_state_dict(state)
    for step in range(7, 12):
        whole = torch.stack([rank.get_batch("val")[0] for rank in ranks], 1).flatten(0, 1)
        assert np.array_equal(whole, expected[4 * step : 4 * step + 4])


def test_batches_are_copies_where_a_file_can_vanish_under_a_view(drawn, consumer, monkeypatch):
    drawn().run(("train",), max_files=1)
    monkeypatch.setattr(FileSystem, "of", classmethod(lambda cls, path: cls(kind="nfs4")))
    over_a_network = consumer()
    assert over_a_network.copy
    over_a_network.close()
    assert not consumer(copy=False).copy


def test_used_up_files_are_deleted_and_those_in_use_are_not(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer()
    reader.get_batch("train")
    assert reader._queue.background.drain(10)
    assert len(list(queue(tmp_path).iterdir())) == 3
    reader.get_batch("train")
    assert reader._queue.background.drain(10)
    assert sorted(p.name for p in queue(tmp_path).iterdir()) == ["000000000001.safetensors", "000000000002.safetensors"]


def test_archives_keep_the_newest_used_up_files(drawn, consumer, tmp_path):
    drawn(max_backlog_files=4).run(("train",), max_files=4)
    reader = consumer(archive=2)
    for _ in range(8):
        reader.get_batch("train")
    reader.close()
    kept = sorted(p.name for p in (tmp_path / "spool" / "archives" / "train").iterdir())
    assert kept == ["000000000002.safetensors", "000000000003.safetensors"]


def test_commit_deletes_below_the_state_it_is_given_and_nothing_else(drawn, consumer, tmp_path):
    drawn(max_backlog_files=4).run(("train",), max_files=4)
    reader = consumer(ack="commit")
    states = [reader.state_dict()]
    for _ in range(7):
        reader.get_batch("train")
        states.append(reader.state_dict())
    assert reader._queue.background.drain(10)
    assert len(list(queue(tmp_path).iterdir())) == 4, "reading alone deletes nothing"
    reader.commit(states[5])
    assert reader._queue.background.drain(10)
    assert reader._queue.channel("train", 0).present() == [2, 3]
    reader.commit(states[1])
    assert reader._queue.folder.commit_points()["train"]["g"] == 20, "a commit never goes back"
    with pytest.raises(CursorMismatch, match="is at file 0 of train, and files below 2 were committed and deleted"):
        reader.load_state_dict(states[1])
    reader.load_state_dict(states[4])


def test_a_rewound_state_is_read_again_where_the_provider_can_make_its_files(drawn, consumer):
    drawn(max_backlog_files=4).run(("train",), max_files=4)
    reader = consumer(ack="commit")
    state = None
    seen = []
    for step in range(6):
        seen.append(reader.get_batch("train")[0])
        if step == 0:
            state = reader.state_dict()
    reader.commit()
    assert reader._queue.background.drain(10)
    reader.load_state_dict(state, rewind=True)
    drawn(max_backlog_files=4).run(("train",), max_files=2)
    assert torch.equal(reader.get_batch("train")[0], seen[1])


def test_a_sequential_spool_keeps_the_file_a_producer_would_start_from(counted, consumer):
    counted(max_backlog_files=3).run(max_files=3)
    reader = consumer(ack="commit")
    for _ in range(6):
        reader.get_batch("train")
    reader.commit()
    reader.close()
    assert reader._queue._channels["train", 0].present() == [2]
    assert counted().run(max_files=1) == 1
    assert consumer(ack="commit").get_batch("train")["g"].tolist() == [24, 25, 26, 27]


def test_without_a_state_consume_goes_on_behind_every_file_that_was_begun(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    reader = consumer()
    reader.get_batch("train")
    crash(reader)
    again = consumer()
    assert np.array_equal(again.get_batch("train")[0], expected[8:12])
    assert again._queue.background.drain(10)
    assert again._queue.channel("train", 0).present() == [1, 2]


def test_without_a_state_commit_goes_on_at_the_last_commit(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    reader = consumer(ack="commit")
    for step in range(5):
        reader.get_batch("train")
        if step == 2:
            reader.commit()
    crash(reader)
    assert np.array_equal(consumer(ack="commit").get_batch("train")[0], expected[12:16])


def crash(reader):
    """What a kill leaves: nothing finished, the lock free."""
    reader._queue.background.close()
    reader._queue.lock.release()
    reader._last_state = reader.state_dict()


def test_deletion_that_is_not_allowed_is_tried_again_and_nothing_is_delivered_twice(
    drawn, consumer, tmp_path, monkeypatch
):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    allowed = threading.Event()
    real = os.unlink

    def unlink(path, *args, **more):
        if str(path).endswith(".safetensors") and not allowed.is_set():
            raise PermissionError(1, "Operation not permitted")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    reader = consumer()
    reader.get_batch("train")
    reader.get_batch("train")
    within(10, lambda: reader.stats()["retries"] > 0)
    assert "Operation not permitted" in reader.stats()["last_problem"]
    crash(reader)
    again = consumer()
    assert np.array_equal(again.get_batch("train")[0], expected[8:12])
    allowed.set()
    within(10, lambda: 0 not in again._queue.channel("train", 0).present())


def test_files_that_can_never_be_deleted_do_not_keep_the_provider_from_going_on(drawn, consumer, monkeypatch):
    real = os.unlink

    def unlink(path, *args, **more):
        if str(path).endswith(".safetensors"):
            raise PermissionError(1, "Operation not permitted")
        return real(path, *args, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    provider = drawn(max_backlog_files=2)
    thread = threading.Thread(target=provider.run)
    provider.open()
    thread.start()
    try:
        reader = consumer(ack="commit", deadline=10.0)
        for step in range(24):
            reader.get_batch("train")
            if step == 3:
                reader.commit()
                within(10, lambda: reader.stats()["retries"] > 0)
        assert reader._queue.channel("train", 0).present()[:5] == [0, 1, 2, 3, 4]
    finally:
        provider.stop()
        thread.join(10)


def test_no_file_is_a_named_wait_with_a_deadline(drawn, consumer):
    drawn().open(("train",))
    reader = consumer(deadline=0.2, meter=(meter := Meter()))
    with pytest.raises(
        DeadlineExceeded, match=r"'spool.empty'.*File 0 of train in .* is not there. Is its provider running"
    ):
        reader.get_batch("train")
    assert meter.totals()["wait/spool.empty/seconds"] > 0.1


def test_wait_for_data_says_whether_there_is_any(drawn, consumer):
    provider = drawn()
    provider.open(("train",))
    reader = consumer(deadline=0.3)
    assert reader.wait_for_data("train", timeout=0.05) is False
    with pytest.raises(DeadlineExceeded):
        reader.wait_for_data("train")
    provider.produce_one_file("train", 0)
    assert reader.wait_for_data("train", timeout=10) is True
    reader.get_batch("train")
    assert reader.wait_for_data("train") is True


def test_a_waiting_consumer_goes_on_when_the_file_comes(drawn, consumer):
    provider = drawn()
    provider.open(("train",))
    reader, got = consumer(), []
    thread = threading.Thread(target=lambda: got.append(reader.get_batch("train")))
    thread.start()
    provider.produce_one_file("train", 0)
    thread.join(10)
    assert len(got) == 1


def test_another_batch_size_cuts_the_same_rows_differently_and_warns(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    reader = consumer()
    with pytest.warns(UserWarning, match="made with batch_size 4, batches now have 7"):
        reader.set_batch_size(7)
    got = [reader.get_batch("train")[0] for _ in range(2)]
    with pytest.warns(UserWarning, match="batches now have 3"):
        reader.set_batch_size(3)
    got += [reader.get_batch("train")[0] for _ in range(2)]
    assert np.array_equal(torch.cat(got), expected[:20])
    with pytest.raises(ConfigError, match="batch_size is 0"):
        reader.set_batch_size(0)


def test_val_is_read_in_a_circle_and_never_deleted(drawn, consumer, tmp_path):
    drawn(val_files=2).run(("val",))
    expected = rows_of(tmp_path / "spool" / "queue" / "val")
    for keep in (1, 2):
        reader = consumer(cache_files=keep)
        got = torch.cat([reader.get_batch("val")[0] for _ in range(10)]).numpy()
        assert np.array_equal(got, np.concatenate([expected, expected, expected])[:40])
        reader.reset_state("val")
        assert np.array_equal(reader.get_batch("val")[0], expected[:4])
        reader.close()
    assert len(list((tmp_path / "spool" / "queue" / "val").iterdir())) == 2


def test_the_end_of_a_finite_spool_repeats_samples_to_fill_the_last_batch_and_then_says_so(counted, consumer):
    counted(total=18, max_backlog_files=10).run()
    reader = consumer(ack="commit")
    got = [reader.get_batch("train")["g"].tolist() for _ in range(5)]
    assert got[3:] == [[12, 13, 14, 15], [16, 17, 16, 17]]
    for _ in range(2):
        with pytest.raises(EndOfData, match="train ended after 18 samples"):
            reader.get_batch("train")
    state = reader.state_dict()
    reader.close()
    again = consumer(ack="commit")
    again.load_state_dict(state)
    with pytest.raises(EndOfData):
        again.get_batch("train")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_last_short_batch_as_one_rank_would_see_it(counted, consumer, world):
    counted(total=20, batch_size=6, max_backlog_files=10).run()
    ranks = [consumer(ack="commit", dp_rank=r, dp_world_size=world, verdict_patience=0.0) for r in range(world)]
    for _ in range(3):
        [r.get_batch("train") for r in ranks]
    shares = [r.get_batch("train")["g"].tolist() for r in ranks]
    whole = [0] * 6
    for rank, share in enumerate(shares):
        for i, value in zip([i for i in range(6) if (18 + i) % world == rank], share, strict=True):
            whole[i] = value
    assert whole == [18, 19, 18, 19, 18, 19]


def test_a_second_consumer_of_a_rank_is_refused_within_two_seconds_naming_the_holder(drawn, consumer, warm, tmp_path):
    drawn().run(("train",), max_files=1)
    consumer()
    code = (
        "import sys, time; from headrace.spool import DatasetConsumer; from headrace.errors import ConfigError\n"
        "began = time.perf_counter()\n"
        "try: DatasetConsumer(sys.argv[1])\n"
        "except ConfigError as error: print(f'{time.perf_counter() - began:.2f}', error)\n"
    )
    needed = []
    while not needed or min(needed) >= 2:  # a busy machine may be slow, but not every time
        done = warm.run([sys.executable, "-c", code, tmp_path / "spool"], check=True)
        seconds, _, sentence = done.stdout.partition(" ")
        needed.append(float(seconds))
        assert len(needed) < 5, needed
    assert f"is in use by rank 0 of 1, process {os.getpid()}" in sentence


def test_ranks_of_different_worlds_do_not_read_together(drawn, consumer):
    drawn().run(("train",), max_files=1)
    consumer(ack="commit", dp_rank=1, dp_world_size=2)
    with pytest.raises(ConfigError, match=r"is being read by rank 1 of 2.*this is rank 0 of 4"):
        consumer(ack="commit", dp_rank=0, dp_world_size=4)


def test_a_consumer_whose_place_was_taken_neither_delivers_nor_deletes(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer()
    reader.get_batch("train")
    reader.get_batch("train")
    assert reader._queue.background.drain(10)
    (tmp_path / "spool" / "state" / "consumer-0.lock").unlink()
    successor = consumer()
    with pytest.raises(
        HeadraceError, match=r"lost its rank lock: consumer-0.lock was removed and is now held by rank 0 of 1"
    ):
        reader.get_batch("train")
    with pytest.raises(HeadraceError, match="lost its rank lock"):
        reader.commit()
    assert successor.get_batch("train") is not None


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"ack": "maybe"}, 'ack is \'maybe\'; it is "consume" or "commit"'),
        ({"dp_world_size": 2}, 'one would delete what others still need; use ack="commit"'),
        ({"dp_rank": 3, "dp_world_size": 2, "ack": "commit"}, "dp_rank is 3, with a dp_world_size of 2"),
        ({"cache_files": 0}, "cache_files is 0"),
        ({"dp_rank": 0, "dp_world_size": 3, "ack": "commit"}, "a batch of 4 samples cannot be shared by 3 ranks"),
    ],
)
def test_arguments_that_cannot_be_are_refused(drawn, consumer, more, sentence):
    drawn().open(("train",))
    with pytest.raises(ConfigError, match=sentence):
        consumer(**more)


def test_a_folder_without_a_meta_is_refused(consumer, tmp_path):
    (tmp_path / "spool").mkdir()
    with pytest.raises(ConfigError, match=r"has neither meta.json nor meta.pkl"):
        consumer()
    with pytest.raises(ConfigError, match="is not a folder"):
        consumer(tmp_path / "nowhere")


def test_a_state_of_another_spool_is_refused(drawn, counted, consumer, tmp_path):
    drawn().run(("train",), max_files=1)
    reader = consumer(ack="commit")
    reader.get_batch("train")
    state = reader.state_dict()
    reader.close()
    drawn(seed=9, force_regenerate=True).run(("train",), max_files=1)
    other = consumer(ack="commit")
    with pytest.raises(CursorMismatch, match="job: saved"):
        other.load_state_dict(state)
    for broken in ({}, {**state, "body": {}}, {**state, "body": {"splits": {"train": {"g": -1}}}}):
        with pytest.raises(CursorMismatch):
            other.load_state_dict(broken)


def test_a_file_with_another_schema_is_an_error_that_shows_both(drawn, consumer, tmp_path):
    provider = drawn()
    provider.open(("train",))
    header = FileHeader(
        split="train",
        seq=0,
        schema=BatchSpec.from_json([{"name": "z", "dtype": "int8", "shape": []}]),
        rows=4,
        first=0,
        batch_size=4,
        job=provider.job,
    )
    write_batch_file(queue(tmp_path) / "000000000000.safetensors", header, {"z": np.zeros(4, np.int8)})
    with pytest.raises(DataError, match=r"holds .*'z'.*the spool's meta says .*'x'"):
        consumer().get_batch("train")


def test_a_file_of_another_job_is_an_error(drawn, consumer, tmp_path):
    path = drawn().produce_one_file("train", 0)
    header = open_batch_file(path).header
    arrays = {k: np.array(v) for k, v in open_batch_file(path).arrays.items() if k in "xy"}
    path.unlink()
    from dataclasses import replace

    write_batch_file(path, replace(header, job="0" * 16), arrays)
    with pytest.raises(DataError, match="was made for job 0000000000000000"):
        consumer().get_batch("train")


def test_a_bad_file_is_set_aside_with_its_reason_made_again_and_then_read(drawn, consumer, tmp_path):
    provider = drawn(max_backlog_files=2)
    provider.run(("train",), max_files=2)
    expected = rows_of(queue(tmp_path))
    path = queue(tmp_path) / "000000000000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 16
    path.write_bytes(raw)
    said = []
    reader = consumer(report=said.append, deadline=0.5)
    with pytest.raises(DeadlineExceeded, match=r"'spool.remake'.*File 0 of train in .* was bad .*fails its checksum"):
        reader.get_batch("train")
    assert reader.stats()["bad_files"] == 1
    assert provider.channels("train")[0].quarantined()[0]["reason"].endswith("in rows 0 to 7")
    assert drawn(max_backlog_files=2, report=said.append).run(("train",), max_files=1) == 1
    assert any("published again" in line for line in said)
    assert reader.wait_for_data("train", 20.0)
    assert np.array_equal(reader.get_batch("train")[0], expected[:4])


def test_a_file_that_went_bad_after_it_was_judged_is_found_by_the_next_process(drawn, consumer, tmp_path):
    provider = drawn(max_backlog_files=2)
    provider.run(("train",), max_files=2)
    reader = consumer(ack="commit")
    reader.get_batch("train")
    reader.close()
    path = queue(tmp_path) / "000000000000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 16
    path.write_bytes(raw)
    with pytest.raises(DeadlineExceeded, match=r"spool.remake"):
        consumer(ack="commit", deadline=0.5).get_batch("train")


def test_other_ranks_wait_for_the_verdict_by_name_and_overtake_a_rank_that_never_judges(drawn, consumer):
    drawn().run(("train",), max_files=1)
    impatient = consumer(ack="commit", dp_rank=1, dp_world_size=2, deadline=0.3)
    with pytest.raises(DeadlineExceeded, match=r"'spool.verdict'.*Rank 0 has not judged file 0 of train"):
        impatient.get_batch("train")
    impatient.close()
    patient = consumer(ack="commit", dp_rank=1, dp_world_size=2, verdict_patience=0.1)
    assert patient.get_batch("train")[0].shape == (2, 3)


def test_the_first_verdict_stands_whoever_comes_to_another(drawn):
    provider = drawn()
    provider.open(("train",))
    channel = provider.channels("train")[0]
    assert channel.judge(4, "it smelled").good is False
    assert channel.judge(4).reason == "it smelled"
    provider.close()


def test_a_damaged_verdict_is_no_verdict(drawn):
    provider = drawn()
    provider.open(("train",))
    channel = provider.channels("train")[0]
    channel.judge(4, "it smelled")
    path = channel.verdicts / "000000000004"
    path.write_bytes(path.read_bytes().replace(b"smelled", b"shined!"))
    assert channel.verdict(4) is None
    assert channel.judge(4).good
    provider.close()


def test_a_damaged_commit_point_stops_everybody_with_the_remedy(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer()
    for _ in range(3):
        reader.get_batch("train")
    reader.close()
    path = tmp_path / "spool" / "state" / "commit"
    path.write_bytes(path.read_bytes().replace(b'"sum":"', b'"sum":" '))
    with pytest.raises(FileCorrupt, match=r"state/commit holds no commit point.*rewind=True"):
        consumer()
    with pytest.raises(FileCorrupt, match=r"state/commit"):
        drawn().run(("train",))


def test_a_damaged_read_position_is_as_good_as_none(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer(ack="commit")
    reader.get_batch("train")
    reader.close()
    (tmp_path / "spool" / "state" / "read-0").write_bytes(b"\0" * 50)
    assert drawn().folder.read_positions() == []
    assert consumer(ack="commit").get_batch("train") is not None


def test_ragged_fields_come_as_values_and_offsets_of_the_rank_s_own_rows(tmp_path, consumer):
    from headrace.spool import DataProviderBase

    class Ragged(DataProviderBase):
        def build_meta(self):
            fields = [
                FieldSpec("g", "int32"),
                FieldSpec("pieces", "int32", ragged=True),
                FieldSpec("w", "bfloat16", (2,)),
            ]
            return {"dataset_name": "ragged", "training_type": "SEQUENCE_SCORING", "batch_schema": fields}

        def sample_batch(self, split, rng):
            lengths = torch.arange(6) % 4
            offsets = torch.zeros(7, dtype=torch.int64)
            offsets[1:] = lengths.cumsum(0)
            values = torch.cat([torch.full((int(n),), i, dtype=torch.int32) for i, n in enumerate(lengths)])
            w = torch.full((6, 2), 1.5, dtype=torch.bfloat16)
            return {"g": torch.arange(6, dtype=torch.int32), "pieces": values, "pieces" + OFFSETS: offsets, "w": w}

    Ragged(tmp_path / "spool", batch_size=6, batches_per_file=2).run(("train",), max_files=1)
    ranks = [consumer(ack="commit", dp_rank=r, dp_world_size=2) for r in range(2)]
    for _ in range(2):
        shares = [r.get_batch("train") for r in ranks]
        for rank, share in enumerate(shares):
            assert share["g"].tolist() == list(range(rank, 6, 2))
            rows = [
                share["pieces"][a:b].tolist()
                for a, b in zip(share["pieces_offsets"], share["pieces_offsets"][1:], strict=False)
            ]
            assert rows == [[g] * (g % 4) for g in range(rank, 6, 2)]
            assert share["w"].dtype == torch.bfloat16
            assert share["w"].float().unique().tolist() == [1.5]


def test_pt_spools_are_read_like_the_others(drawn, consumer, tmp_path):
    drawn(file_format="pt", max_backlog_files=2).run(("train",), max_files=2)
    expected = rows_of(queue(tmp_path))
    reader = consumer()
    assert np.array_equal(torch.cat([reader.get_batch("train")[0] for _ in range(4)]), expected)
    assert reader._queue.background.drain(10)
    assert not list(queue(tmp_path).iterdir())


def test_stats_tell_where_reading_stands(drawn, consumer):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer(ack="commit")
    for _ in range(3):
        reader.get_batch("train")
    told = reader.stats()["splits"]["train"]
    assert (told["samples"], told["batches"], told["file"], told["row"], told["batch"]) == (12, 3, 1, 4, 1)
    assert (told["backlog_files"], told["backlog"]) == (2, "high")


def test_a_closed_consumer_says_so(drawn, consumer):
    drawn().run(("train",), max_files=1)
    reader = consumer()
    reader.close()
    reader.close()
    with pytest.raises(HeadraceError, match="was closed"):
        reader.get_batch("train")


def test_closing_joins_the_thread_and_leaves_no_descriptor(drawn, consumer):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(3):
        reader = consumer(ack="commit")
        reader.get_batch("train")
        reader.close()
    assert not [t for t in threading.enumerate() if t.name == "headrace-spool"]
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before


def test_what_was_begun_in_one_split_is_remembered_while_another_is_read(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train", "extra"), max_files=6)
    reader = consumer()
    for split in ("train", "extra"):
        reader.get_batch(split)
    crash(reader)
    reader = consumer()
    reader.get_batch("train")
    assert reader._queue.background.drain(10)
    crash(reader)
    expected = rows_of(tmp_path / "spool" / "queue" / "extra")
    assert np.array_equal(consumer().get_batch("extra")[0], expected[8:12])


def test_a_spool_is_not_emptied_underneath_its_reader(drawn, consumer):
    drawn().run(("train",), max_files=1)
    consumer()
    with pytest.raises(ConfigError, match=r"is being read by rank 0 of 1.*stop that before force_regenerate"):
        drawn(force_regenerate=True).run(("train",), max_files=1)


def test_waiting_for_data_means_all_parts(counted, consumer):
    made = counted(parts=2, take=1)
    made.run(max_files=1)
    reader = consumer(ack="commit")
    assert reader.wait_for_data("train", timeout=0.1) is False
    counted(parts=2).run(max_files=3)
    assert reader.wait_for_data("train", timeout=10) is True
    assert reader.get_batch("train")["g"].tolist() == [0, 1, 2, 3]


def test_a_purged_spool_is_read_from_its_beginning_again(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer()
    first = [reader.get_batch("train")[0].clone() for _ in range(3)]
    reader.close()
    purge_spool(tmp_path / "spool")
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    again = consumer()
    assert [again.get_batch("train")[0].tolist() for _ in range(3)] == [x.tolist() for x in first]


def test_reset_state_reads_the_file_again_that_is_being_used_up(drawn, consumer, tmp_path):
    drawn(batches_per_file=3, max_backlog_files=3).run(("train",), max_files=3)
    expected = rows_of(queue(tmp_path))
    reader = consumer()
    for _ in range(4):
        reader.get_batch("train")
    reader.reset_state("train")
    got = torch.cat([reader.get_batch("train")[0] for _ in range(6)])
    assert np.array_equal(got, expected[12:])


def test_a_consumer_of_what_was_used_up_to_its_end_is_told_so_at_once(counted, consumer):
    counted(total=16, max_backlog_files=10).run()
    reader = consumer()
    assert [reader.get_batch("train")["g"].tolist()[0] for _ in range(4)] == [0, 4, 8, 12]
    with pytest.raises(EndOfData):
        reader.get_batch("train")
    assert not reader.wait_for_data("train")
    reader.reset_state("train")
    with pytest.raises(EndOfData, match="ended after 16 samples"):
        reader.get_batch("train")
    reader.close()
    again = consumer()
    assert not again.wait_for_data("train")
    with pytest.raises(EndOfData, match="ended after 16 samples"):
        again.get_batch("train")


def test_wait_for_data_waits_for_a_whole_batch(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=2)
    expected = rows_of(queue(tmp_path))
    with pytest.warns(UserWarning, match="batches now have 3"):
        reader = consumer(batch_size=3)
    got = []
    while reader.wait_for_data("train", 0.1):
        got.append(reader.get_batch("train")[0])
    assert np.array_equal(torch.cat(got), expected[:15])
    with pytest.raises(ConfigError, match="timeout is '3'"):
        reader.wait_for_data("train", "3")


def test_the_state_of_a_closed_consumer_is_that_of_its_last_batch(drawn, consumer):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer(ack="commit")
    for _ in range(3):
        reader.get_batch("train")
    state = reader.state_dict()
    reader.close()
    assert reader.state_dict() == state
    assert state["body"]["splits"]["train"]["g"] == 12


def test_who_holds_the_place_in_this_process_is_told_to_close_it(drawn, consumer):
    drawn().run(("train",), max_files=1)
    first = consumer()
    with pytest.raises(ConfigError, match=r"It is this process that has it open: close\(\) it"):
        consumer()
    first.close()
    consumer()


def test_files_are_read_on_while_a_full_disk_lets_nothing_be_committed(drawn, consumer, tmp_path, monkeypatch):
    drawn(max_backlog_files=6).run(("train",), max_files=6)
    expected = rows_of(queue(tmp_path))
    reader = consumer()
    first = reader.get_batch("train")[0]
    full = threading.Event()
    full.set()
    write = type(reader._queue.folder).write_commit_points

    def refused(folder, points):
        if full.is_set():
            raise StorageError("commit could not be written: No space left on device")
        write(folder, points)

    monkeypatch.setattr(type(reader._queue.folder), "write_commit_points", refused)
    got = torch.cat([first, *(reader.get_batch("train")[0] for _ in range(9))])
    assert np.array_equal(got, expected[:40])
    assert not reader._queue.background.drain(2)
    assert "No space left" in reader.stats()["last_problem"]
    full.clear()
    assert reader._queue.background.drain(20)
    assert [p.name for p in sorted(queue(tmp_path).iterdir())] == ["000000000005.safetensors"]
