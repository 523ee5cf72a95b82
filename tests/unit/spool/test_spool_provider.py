"""What providers promise: the same file whoever makes it, no more than wanted, one of them at a time."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from headrace.errors import ConfigError, DataError, DeadlineExceeded
from headrace.metrics import Meter
from headrace.spool import DataProviderBase, open_batch_file, purge_spool, read_meta
from headrace.spool.survey import describe, list_files, verify


def bytes_of(folder):
    return {p.name: p.read_bytes() for p in sorted((folder / "queue" / "train").iterdir())}


def test_a_provider_fills_the_queue_to_its_backlog_and_no_further(drawn):
    provider = drawn(max_backlog_files=3)
    assert provider.run(("train",), max_files=3) == 3
    assert provider.backlog_size("train") == 3
    assert list(provider.channels("train")[0].present()) == [0, 1, 2]
    waiting = drawn(max_backlog_files=3, deadline=0.2, meter=(meter := Meter()))
    with pytest.raises(DeadlineExceeded, match=r"spool.backlog.*Is a consumer of .*spool running"):
        waiting.run(("train",))
    assert meter.totals()["wait/spool.backlog/count"] == 1


def test_a_circular_split_is_made_once_and_then_the_provider_is_done(drawn):
    assert drawn(val_files=2).run(("val",)) == 2
    assert drawn(val_files=2).run(("val",)) == 0


def test_a_file_has_the_same_bytes_whoever_makes_it_and_in_whatever_order(drawn, tmp_path):
    drawn().run(("train",), max_files=2)
    first = bytes_of(tmp_path / "spool")
    again = drawn(force_regenerate=True)
    again.open(("train",))
    for seq in (1, 0):
        again.produce_one_file("train", seq)
    again.close()
    assert bytes_of(tmp_path / "spool") == first


def test_splits_and_files_draw_from_different_places(drawn, tmp_path):
    drawn(val_files=1).run(("train", "val"), max_files=3)
    spool = tmp_path / "spool" / "queue"
    files = [open_batch_file(p).arrays["x"] for p in [*sorted((spool / "train").iterdir()), *(spool / "val").iterdir()]]
    assert len({a.tobytes() for a in files}) == 3


def test_a_file_is_plain_safetensors_with_the_schema_in_its_header(drawn, tmp_path):
    path = drawn().produce_one_file("train", 5)
    tensors = safetensors.torch.load_file(path)
    assert torch.equal(tensors["y"], tensors["x"] + 1)
    header = open_batch_file(path).header
    assert (header.seq, header.first, header.rows, header.batch_size, header.num_batches) == (5, 40, 8, 4, 2)
    assert [f.name for f in header.schema] == ["x", "y"]


@pytest.mark.parametrize("file_format", ["safetensors", "pt"])
def test_when_a_file_was_made_is_known_and_not_in_its_bytes(drawn, tmp_path, file_format):
    path = drawn(file_format=file_format).produce_one_file("train", 0)
    first = path.read_bytes()
    os.utime(path, (1e9, 1e9))
    assert list_files(tmp_path / "spool")[0]["produced_at"] == 1e9
    path.unlink()
    assert drawn(file_format=file_format).produce_one_file("train", 0).read_bytes() == first


def test_a_provider_logs_a_line_for_each_file_and_more_where_it_is_verbose(drawn, caplog):
    caplog.set_level(logging.INFO, "headrace.spool")
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    lines = [r.getMessage() for r in caplog.records if r.name == "headrace.spool.provider"]
    assert [re.sub(r"[\d.]+ s", "T", line) for line in lines] == [
        f"train {k}: published in T, backlog {k + 1}" for k in range(3)
    ]
    caplog.clear()
    with pytest.raises(DeadlineExceeded):
        drawn(max_backlog_files=4, verbose=True, deadline=0.1).run(("train",))
    lines = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"train 3: 8 rows, 384 bytes; [\d.]+ s to make, [\d.]+ s to write", lines[0])
    assert lines[1].endswith("backlog 4")
    assert lines[2:] == ["waiting for consumers: 4 files of train are ahead"]


def test_a_script_that_set_up_no_logging_shows_a_line_for_each_file_and_one_that_did_decides(tmp_path, warm):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from conftest import Drawn\n"
        "{setup}\n"
        "Drawn(sys.argv[1], batch_size=4, batches_per_file=2).run(('train',), max_files=2)"
    )
    for name, setup, lines in (("a", "", 2), ("b", "import logging; logging.basicConfig(level=logging.WARNING)", 0)):
        words = [sys.executable, "-c", code.format(setup=setup), tmp_path / name, Path(__file__).parent]
        done = warm.run(words, check=True)
        assert (done.stdout, done.stderr.count(": published in")) == ("", lines)


def test_pt_files_on_request_hold_metadata_and_tensors(drawn):
    path = drawn(file_format="pt").produce_one_file("train", 3)
    loaded = torch.load(path, weights_only=True)
    assert {k: loaded["metadata"][k] for k in ("batch_size", "num_batches", "file_idx", "split")} == {
        "batch_size": 4, "num_batches": 2, "file_idx": 3, "split": "train",
    }  # fmt: skip
    assert loaded["tensors"]["x"].shape == (8, 3)
    opened = open_batch_file(path)
    opened.check()
    assert np.array_equal(opened.arrays["x"], loaded["tensors"]["x"].numpy())


def test_meta_is_written_as_json_and_as_pickle(drawn, tmp_path):
    drawn().produce_one_file("train", 0)
    meta = read_meta(tmp_path / "spool")
    assert (meta["dataset_name"], meta["batch_size"], meta["vocab_size"]) == ("drawn", 4, 1000)
    assert pickle.loads((tmp_path / "spool" / "meta.pkl").read_bytes())["training_type"] == "LM"  # noqa: S301


def test_a_vocabulary_keyed_by_numbers_survives_the_json(drawn, tmp_path):
    provider = drawn()
    provider.build_meta = lambda: {**type(provider).build_meta(provider), "itos": {0: "a", 1: "b"}}
    provider.produce_one_file("train", 0)
    assert read_meta(tmp_path / "spool")["itos"] == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"training_type": "RNN"}, "training_type is 'RNN'; it is one of LM, MLM"),
        ({"dataset_name": 5}, "dataset_name is 5"),
        ({"batch_size": 8}, "batch_size is 8, the provider was made with 4"),
        ({"batch_schema": []}, "batch_schema: a batch_schema is a list of fields"),
        ({"batch_schema": [{"name": "x", "dtype": "complex64", "shape": []}]}, "dtype 'complex64'; a field is one of"),
        ({"batch_schema": [{"name": "x", "dtype": "int64"}]}, "a field has name, dtype, shape"),
        ({"split_info": 3}, "split_info maps each split"),
    ],
)
def test_a_meta_that_does_not_hold_is_refused_before_anything_is_made(drawn, tmp_path, change, sentence):
    provider = drawn()
    provider.build_meta = lambda: {**type(provider).build_meta(provider), **change}
    with pytest.raises(ConfigError, match=sentence):
        provider.run(("train",))
    assert not list((tmp_path / "spool" / "queue" / "train").iterdir())


def test_all_problems_of_a_meta_come_at_once(drawn):
    provider = drawn()
    provider.build_meta = lambda: {"training_type": "LM"}
    with pytest.raises(ConfigError) as caught:
        provider.run(("train",))
    assert len(caught.value.problems) == 3


def test_a_batch_that_does_not_fit_the_schema_names_every_field(drawn):
    provider = drawn()
    provider.sample_batch = lambda split, rng: {"x": torch.zeros(4, 2, dtype=torch.int64), "z": torch.zeros(4)}
    with pytest.raises(
        DataError, match=r"'z' is not in the schema; 'x' has shape \[4, 2\], expected \[4, 3\]; 'y' is missing"
    ):
        provider.run(("train",))


def test_a_batch_of_another_size_is_refused(drawn):
    provider = drawn()
    provider.sample_batch = lambda split, rng: {
        "x": torch.zeros(3, 3, dtype=torch.int64),
        "y": torch.zeros(3, 3, dtype=torch.int64),
    }
    with pytest.raises(ConfigError, match="returned 3 rows for batch 0 of train 0; batch_size is 4"):
        provider.run(("train",))


def test_arguments_that_cannot_be_are_named_all_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        DataProviderBase(tmp_path, batch_size=0, batches_per_file=-1, sleep_seconds=0, file_format="csv")
    assert len(caught.value.problems) == 4


def test_another_recipe_in_the_same_folder_is_refused_naming_what_differs(drawn):
    drawn().run(("train",), max_files=1)
    with pytest.raises(ConfigError, match=r"was made for something else \(seed is 1337, now 5\).*force_regenerate"):
        drawn(seed=5).run(("train",))
    assert drawn(seed=5, force_regenerate=True).run(("train",), max_files=1) == 1


SECOND = """
import sys, time
from headrace.errors import ConfigError
from headrace.spool import DataProviderBase
began = time.perf_counter()
try:
    DataProviderBase(sys.argv[1], batch_size=4).run(("train",))
except ConfigError as error:
    print(f"{time.perf_counter() - began:.2f}", error)
"""


def test_a_second_provider_is_refused_within_two_seconds_naming_the_holder(drawn, warm, tmp_path):
    first = drawn()
    first.open(("train",))
    needed = []
    while not needed or min(needed) >= 2:  # a busy machine may be slow, but not every time
        done = warm.run([sys.executable, "-c", SECOND, tmp_path / "spool"], check=True)
        seconds, _, sentence = done.stdout.partition(" ")
        needed.append(float(seconds))
        assert len(needed) < 5, needed
    assert "is in use by Drawn for train, process" in sentence
    assert "--join" in sentence
    joined = drawn(join=True)
    joined.open(("train",))
    first.close()


def test_providers_that_join_make_every_file_once_and_the_same(drawn, tmp_path):
    drawn(max_backlog_files=12).run(("train",), max_files=12)
    alone = bytes_of(tmp_path / "spool")
    purge_spool(tmp_path / "spool")
    providers = [drawn(max_backlog_files=12, join=True) for _ in range(3)]
    counts = [0] * 3

    def work(k):
        providers[k].open(("train",))
        while (item := providers[k]._take(("train",))) is not None:
            counts[k] += providers[k]._make(item)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    [t.start() for t in threads]
    [t.join(30) for t in threads]
    [p.close() for p in providers]
    assert sum(counts) == 12
    assert bytes_of(tmp_path / "spool") == alone
    assert not list((tmp_path / "spool" / "claims" / "train").iterdir())


def test_a_claim_of_somebody_stuck_is_passed_over_after_its_lease(drawn):
    first, second = drawn(join=True), drawn(join=True, lease_seconds=0.05, deadline=10)
    first.open(("train",))
    stuck = first._take(("train",))
    assert stuck is not None
    assert stuck.seq == 0
    assert second.run(("train",), max_files=2) == 2
    assert first._make(stuck) is False, "it woke up after its file was made by another"
    assert second.channels("train")[0].present() == [0, 1]
    first.close()


def test_a_provider_that_wakes_up_after_its_file_was_committed_publishes_nothing_that_is_read(drawn):
    provider = drawn()
    provider.open(("train",))
    work = provider._take(("train",))
    provider.folder.write_commit_points({"train": {"g": 80, "at": [[10, 0]], "start": [80]}})
    assert provider._make(work) is False
    assert provider.channels("train")[0].present() == []
    provider.close()


def test_a_commit_that_comes_while_the_file_is_linked_takes_it_away_again(drawn):
    provider = drawn()
    provider.open(("train",))
    channel = provider.channels("train")[0]

    def write(path):
        path.write_bytes(b"x")
        provider.folder.write_commit_points({"train": {"g": 80, "at": [[10, 0]], "start": [80]}})

    assert channel.publish(3, write) == "late"
    assert channel.present() == []
    provider.close()


def test_the_numbering_goes_on_after_everything_was_read_and_deleted(drawn, consumer):
    drawn(max_backlog_files=1).run(("train",), max_files=1)
    reader = consumer()
    seen = [reader.get_batch("train")[0] for _ in range(2)]
    reader.close()
    again = drawn(max_backlog_files=1)
    assert again.run(("train",), max_files=1) == 1
    assert again.channels("train")[0].present() == [1]
    reader = consumer()
    assert not torch.equal(reader.get_batch("train")[0], seen[0])


def test_files_that_nobody_commits_end_at_max_retained(drawn, consumer):
    provider = drawn(max_retained=3, max_backlog_files=2)
    provider.run(("train",), max_files=2)
    reader = consumer(ack="commit")
    for _ in range(4):
        reader.get_batch("train")
    reader.close()
    with pytest.raises(ConfigError, match=r"holds 3 files of train since the last commit.*consumer.commit"):
        drawn(max_retained=3, max_backlog_files=2).run(("train",))


def test_a_sequential_producer_goes_on_where_the_last_file_ends(counted, tmp_path):
    assert counted(max_backlog_files=3).run(max_files=2) == 2
    assert counted(max_backlog_files=3).run(max_files=1) == 1
    files = [open_batch_file(p) for p in sorted((tmp_path / "spool" / "queue" / "train").iterdir())]
    assert np.concatenate([f.arrays["g"] for f in files]).tolist() == list(range(24))
    assert verify(tmp_path / "spool") == (3, [])


def test_a_missing_or_unreadable_file_of_a_sequence_is_made_again_from_its_predecessor(counted, tmp_path):
    counted(max_backlog_files=4).run(max_files=4)
    before = bytes_of(tmp_path / "spool")
    queue = tmp_path / "spool" / "queue" / "train"
    (queue / "000000000002.safetensors").unlink()
    (queue / "000000000001.safetensors").write_bytes(b"torn")
    assert counted(max_backlog_files=4).run(max_files=1) == 1
    assert bytes_of(tmp_path / "spool") == before
    assert (tmp_path / "spool" / "quarantine" / "train" / "000000000001.safetensors").read_bytes() == b"torn"


def test_a_finite_sequence_ends_with_a_short_file_marked_as_the_last(counted, tmp_path):
    assert counted(total=19, max_backlog_files=10).run() == 3
    last = open_batch_file(tmp_path / "spool" / "queue" / "train" / "000000000002.safetensors")
    assert last.header.last
    assert last.arrays["g"].tolist() == [16, 17, 18]
    assert counted(total=19, max_backlog_files=10).run() == 0


def test_parts_belong_to_one_provider_each_and_hold_every_pth_sample(counted, tmp_path):
    first, second = counted(parts=2, take=1), counted(parts=2, join=True)
    first.open(("train",))
    second.open(("train",))
    assert [c.part for c in first.channels("train")] == [0]
    assert [c.part for c in second.channels("train")] == [1]
    with pytest.raises(ConfigError, match=r"all 2 parts of .* have a provider already"):
        counted(parts=2, join=True).open(("train",))
    for provider in (first, second):
        assert provider._make(provider._take(("train",)))
        provider.close()
    for part in (0, 1):
        file = open_batch_file(tmp_path / "spool" / "queue" / "train" / f"part-00{part}" / "000000000000.safetensors")
        assert file.arrays["g"].tolist() == list(range(part, 16, 2))


def test_starting_over_after_the_predecessor_is_gone_says_what_to_do(counted, tmp_path):
    counted(max_backlog_files=2).run(max_files=2)
    provider = counted()
    provider.folder.write_commit_points({"train": {"g": 16, "at": [[2, 0]], "start": [16]}})
    for path in (tmp_path / "spool" / "queue" / "train").iterdir():
        path.unlink()
    with pytest.raises(
        DataError, match=r"file 2 of train cannot be made, because the file before it.*force_regenerate"
    ):
        provider.run(max_files=1)


def test_a_stopped_provider_ends_its_run(drawn):
    provider = drawn(sleep_seconds=5.0)
    thread = threading.Thread(target=provider.run)
    thread.start()
    provider.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_on_start_and_on_stop_are_called_once_also_around_an_error(drawn):
    provider, calls = drawn(), []
    provider.on_start = lambda: calls.append("start")
    provider.on_stop = lambda: calls.append("stop")
    provider.sample_batch = lambda split, rng: 1 / 0
    with pytest.raises(ZeroDivisionError):
        provider.run()
    assert calls == ["start", "stop"]


def test_a_damaged_meta_is_refused_with_the_remedy(drawn, tmp_path):
    drawn().run(("train",), max_files=1)
    path = tmp_path / "spool" / "meta.json"
    path.write_text(path.read_text().replace('"batch_size": 4', '"batch_size": 5'))
    with pytest.raises(
        Exception, match=r"meta.json is damaged or was edited by hand.*delete it and start the provider"
    ):
        drawn().run(("train",))


def test_describe_says_where_a_spool_stands(drawn, consumer, tmp_path):
    drawn(max_backlog_files=3).run(("train",), max_files=3)
    reader = consumer(ack="commit")
    for _ in range(3):
        reader.get_batch("train")
    assert reader._queue.background.drain(10)
    (tmp_path / "spool" / "queue" / "train" / "000000000002.safetensors").rename(tmp_path / "elsewhere")
    told = describe(tmp_path / "spool")
    (train,) = told["splits"]["train"]
    assert (train["files"], train["first"], train["last"], train["read"], train["commit"]) == (2, 0, 1, 1, 0)
    assert (train["backlog"], train["retained"], train["gaps"]) == (1, 1, [])
    assert list(told["at_work"]) == ["consumer-0"]
    assert json.dumps(told)


def test_what_a_provider_s_own_code_gives_wrongly_is_named(drawn, counted, monkeypatch):
    made = drawn()
    monkeypatch.setattr(made, "sample_batch", lambda split, rng: None)
    with pytest.raises(DataError, match="a batch is NoneType, expected a dict"):
        made.run(("train",), max_files=1)
    for meta, said in (
        (None, "build_meta returned NoneType"),
        ({"odd": {1, 2}}, "cannot be written"),
        ({"odd": float("nan")}, "cannot be written"),
    ):
        odd = drawn()
        right = odd.build_meta()
        monkeypatch.setattr(odd, "build_meta", lambda meta=meta, right=right: meta and right | meta)
        with pytest.raises(ConfigError, match=said):
            odd.run(("train",), max_files=1)
    with pytest.raises(ConfigError, match="take is 0"):
        counted(take=0)
    for name in ("deadline", "lease_seconds", "sleep_seconds"):
        with pytest.raises(ConfigError, match=f"{name} is -1"):
            drawn(**{name: -1})
