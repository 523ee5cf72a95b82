"""A foreign DataLoader delivers what hr.Loader delivers: in the same order, from any state, and with nothing lost or twice."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import re
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headrace.errors import ConfigError, CursorMismatch
from headrace.loader import Loader, TextDataset
from headrace.loader.torch_adapters import TorchDataset
from headrace.sources import Source
from headrace.testing import assert_exact_resume, first_difference, frozen

# torchdata itself calls what torch has deprecated.
stateful = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def workers(test):
    """Our own warning, which is an error in a forked worker as it is here; and Python's (from 3.12) about forking at all."""
    test = pytest.mark.filterwarnings("ignore:a TorchDataset in a DataLoader:UserWarning")(test)
    return pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")(test)


@pytest.fixture
def data(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", [f"document {i} " + "word " * (i % 40) for i in range(100)])
    return TextDataset([f"jsonl:{path}"], seq_len=32, seed=3, lanes=12, window_blocks=4, cache=tmp_path / "cache")


def dataset(data, **options) -> TorchDataset:
    return TorchDataset(data, **({"global_batch_size": 12, "tokenizer_workers": 0, "prefetch_batches": 1} | options))


def delivered(data, passes: int = 1, **options) -> list[dict]:
    loader = Loader(data, **({"global_batch_size": 12, "tokenizer_workers": 0} | options))
    return [frozen(batch) for _ in range(passes) for batch in loader]


def samples(batches) -> dict[int, bytes]:
    """Every sample by its global index; an index that comes twice is an error."""
    found: dict[int, bytes] = {}
    for batch in batches:
        for g, ids, labels in zip(batch["sample_index"], batch["input_ids"], batch["labels"], strict=True):
            assert int(g) not in found, f"sample {g} came twice"
            found[int(g)] = np.asarray(ids).tobytes() + np.asarray(labels).tobytes()
    return found


def without_fillers(batches) -> dict[int, bytes]:
    kept = ("sample_index", "input_ids", "labels")
    return samples({name: b[name][(b["labels"] != -100).any(axis=1)] for name in kept} for b in batches)


# ------------------------------------------------------------------------------------------ one process


def test_a_dataloader_delivers_the_batches_of_the_loader(data):
    expected = delivered(data)
    assert len(expected) > 20
    assert first_difference(expected, [frozen(b) for b in DataLoader(dataset(data), batch_size=None)]) is None


@pytest.mark.parametrize("world", [1, 2])
def test_rows_collated_by_torch_are_the_batches_of_the_loader_without_their_borders(data, world):
    for rank in range(world):
        expected = delivered(data, dp_rank=rank, dp_world_size=world, segment_ids=True)
        rows = dataset(data, dp_rank=rank, dp_world_size=world, batched=False, segment_ids=True)
        got = [frozen(b) for b in DataLoader(rows, batch_size=12 // world)]
        for batch in expected:
            del batch["cu_seqlens"], batch["max_seqlen"]
        assert first_difference(expected, got) is None


def test_batches_that_a_dataloader_holds_on_to_do_not_change(data):
    held = list(itertools.islice(DataLoader(dataset(data), batch_size=None), 12))
    assert first_difference(delivered(data)[:12], [frozen(b) for b in held]) is None


@stateful
@pytest.mark.parametrize(("batched", "size"), [(True, None), (False, 5)])
def test_a_stateful_dataloader_resumes_exactly_everywhere(data, batched, size):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")
    report = assert_exact_resume(
        lambda: torchdata.StatefulDataLoader(dataset(data, batched=batched), batch_size=size),
        steps=100,
        at=[0, 1, 2, 5, 12, *range(33, 42)],
        tail=3,
        chain=2,
    )
    assert report.largest_state < 4096


@pytest.mark.parametrize("batched", [True, False])
def test_a_dataset_resumes_exactly_everywhere(data, batched):
    steps = [0, 1, 7, 11, 12, 13, 24, 400, *range(36, 41)]
    report = assert_exact_resume(lambda: dataset(data, batched=batched), steps=600, at=steps, tail=14, chain=2)
    assert report.ended


def test_rows_that_were_not_delivered_come_when_it_is_iterated_again(data):
    rows = dataset(data, batched=False)
    got = [int(row["sample_index"]) for part in (5, 9, 40) for row in itertools.islice(rows, part)]
    assert got == list(range(54))


def test_states_pass_between_loader_and_dataset_both_ways(data):
    expected = delivered(data)
    loader = Loader(data, global_batch_size=12, tokenizer_workers=0)
    for _ in range(3):
        next(loader)
    for batched in (True, False):
        adapted = dataset(data, batched=batched)
        adapted.load_state_dict(loader.state_dict())
        for _ in itertools.islice(adapted, 2 if batched else 24):
            continue
        back = Loader(data, global_batch_size=12, tokenizer_workers=0)
        back.load_state_dict(adapted.state_dict())
        assert first_difference(expected[5], frozen(next(back))) is None


def test_a_state_in_the_middle_of_a_batch_is_refused_where_it_would_repeat_rows(data):
    rows = dataset(data, batched=False)
    next(iter(rows))
    state = rows.state_dict()
    with pytest.raises(CursorMismatch, match="kind 'text-rows'; this loader takes 'text'"):
        Loader(data, global_batch_size=12).load_state_dict(state)
    with pytest.raises(CursorMismatch, match=r"in the middle of a batch, after row 1: load it into .* batched=False"):
        dataset(data).load_state_dict(state)
    whole = dataset(data, batched=False).state_dict()
    with pytest.raises(CursorMismatch, match=r"after rows 0, 1 of a batch\. Save all ranks at the same row"):
        dataset(data, batched=False).load_state_dict([state, whole])
    for _ in itertools.islice(rows, 6):
        continue
    smaller = dataset(data, batched=False, global_batch_size=6)
    smaller.load_state_dict(rows.state_dict())
    with pytest.raises(CursorMismatch, match="after row 7 of a batch, and batches have 6 rows now"):
        next(iter(smaller))
    state["body"]["rows"] = "1"
    with pytest.raises(CursorMismatch, match=r"state is damaged.*rows='1'"):
        dataset(data, batched=False).load_state_dict(state)


def test_the_second_time_round_is_the_loaders_second_pass(data):
    loader = DataLoader(dataset(data), batch_size=None)
    assert first_difference(delivered(data, passes=2), [frozen(b) for _ in range(2) for b in loader]) is None


def test_set_epoch_starts_a_pass_but_never_leaves_one_or_goes_back(data):
    told = dataset(data)
    told.set_epoch(2)
    told.set_epoch(1)
    got = [b["input_ids"].tolist() for b in told]
    loader = Loader(data, global_batch_size=12, tokenizer_workers=0)
    *_, third = ([b["input_ids"].tolist() for b in loader] for _ in range(3))
    assert got == third
    under_way = dataset(data)
    next(iter(under_way))
    under_way.set_epoch(5)
    assert first_difference(delivered(data)[1], frozen(next(iter(under_way)))) is None
    with pytest.raises(ConfigError, match="set_epoch takes an integer of 0 or more, got -1"):
        told.set_epoch(-1)


def test_a_length_is_refused_in_a_sentence_and_nothing_else_needs_one(data):
    adapted = dataset(data)
    with pytest.raises(TypeError, match="known only once it has been tokenised"):
        len(adapted)
    assert len(list(adapted)) == len(delivered(data))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "cpu", "pin_memory": True}, ConfigError, "takes no device or pin_memory"),
        ({"global_batch_size": 0}, ConfigError, "global_batch_size must be a positive integer, got 0"),
        ({"batches": True}, TypeError, "batches"),
    ],
)
def test_a_wrong_option_is_refused_when_the_dataset_is_made(data, options, error, message):
    with pytest.raises(error, match=message):
        dataset(data, **options)


def test_a_copy_goes_on_by_itself_where_the_original_stood(data):
    rows = dataset(data, batched=False)
    for _ in itertools.islice(rows, 17):
        continue
    other = copy.deepcopy(rows)  # as pickle does it
    got = [frozen(row) for row in itertools.islice(other, 30)]
    assert other.loader.data is not data
    assert first_difference([frozen(row) for row in itertools.islice(rows, 30)], got) is None


@pytest.mark.parametrize("dispatch", [True, False])
def test_accelerate_may_not_split_the_share_of_a_rank_again(data, dispatch):
    accelerate = pytest.importorskip("accelerate.data_loader", reason="needs accelerate: pip install accelerate")

    def prepared(world):
        adapted = dataset(data, dp_rank=0, dp_world_size=world, batched=False)
        loader = DataLoader(adapted, batch_size=2)
        return accelerate.prepare_data_loader(
            loader, torch.device("cpu"), num_processes=2, process_index=0, put_on_device=True, dispatch_batches=dispatch
        )

    with pytest.raises(ConfigError, match=r"one rank's share of 2, and Accelerate's .* would split it a second time"):
        next(iter(prepared(2)))
    if not dispatch:  # the whole stream on every rank is Accelerate's to split
        assert next(iter(prepared(1)))["sample_index"].tolist() == [0, 1]


# -------------------------------------------------------------------------------------- worker processes


@pytest.fixture
def refused(monkeypatch):
    """What the first batch of a DataLoader raises. Torch gives each worker 5 s to end by itself after an error."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)

    def first_batch(loader, error, message) -> None:
        batches = iter(loader)
        with pytest.raises(error, match=message):
            next(batches)
        batches._shutdown_workers()

    return first_batch


@workers
def test_forked_workers_share_the_samples_without_loss_or_repetition(data):
    expected = without_fillers(delivered(data, global_batch_size=24))
    loader = DataLoader(dataset(data), batch_size=None, num_workers=2)
    batches = [frozen(b) for b in loader]
    assert without_fillers(batches) == expected
    assert {len(b["sample_index"]) for b in batches} == {12}


def test_a_warning_says_that_batches_depend_on_the_number_of_workers(data, refused):
    loader = DataLoader(dataset(data), batch_size=None, num_workers=1)
    refused(
        loader,
        UserWarning,
        r"num_workers=1.*depends on the number of workers.*hr\.Loader delivers.*set_epoch\(n\).*persistent_workers",
    )


def test_a_worker_of_a_single_rank_does_not_work_out_what_the_other_workers_have(data):
    worker = Loader(data, global_batch_size=24, dp_rank=1, dp_world_size=2, tokenizer_workers=0)
    worker.plan.ends_alone = True
    assert list(worker)
    assert not [name for name in data.meter.totals() if "loader.epoch_end" in name], "as costly as their data"


@workers
def test_workers_of_two_ranks_cover_everything_and_end_at_the_same_step(data):
    expected = without_fillers(delivered(data, global_batch_size=24))
    ranks = [
        [frozen(b) for b in DataLoader(dataset(data, dp_rank=rank, dp_world_size=2), batch_size=None, num_workers=2)]
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1])
    assert without_fillers(ranks[0] + ranks[1]) == expected
    assert all((b["sample_index"] % 2 == rank).all() for rank in range(2) for b in ranks[rank])


@workers
def test_a_spawned_worker_makes_the_dataset_anew_and_goes_on_where_it_stood(data):
    expected = delivered(data)
    adapted = dataset(data)
    for _ in itertools.islice(adapted, 3):
        continue
    assert adapted.loader._running is not None, "it holds threads and files, which do not travel"
    loader = DataLoader(adapted, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert first_difference(expected[3:], [frozen(b) for b in loader]) is None


@workers
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_read_the_second_epoch_as_the_second_pass(data, persistent):
    adapted = dataset(data)
    loader = DataLoader(adapted, batch_size=None, num_workers=1, persistent_workers=persistent)
    first = [frozen(b) for b in loader]
    if not persistent:
        adapted.set_epoch(1)
    second = [frozen(b) for b in loader]
    expected = delivered(data, passes=2)
    assert first_difference(expected[: len(first)], first) is None
    assert [b["input_ids"].tolist() for b in second] == [b["input_ids"].tolist() for b in expected[len(first) :]]


@stateful
@workers
def test_a_stateful_dataloader_with_workers_resumes_exactly_with_as_many(data):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: pip install torchdata")
    assert_exact_resume(
        lambda: torchdata.StatefulDataLoader(dataset(data), batch_size=None, num_workers=2),
        steps=7,
        at=[7],
        tail=40,
        chain=1,
    )


@workers
def test_a_killed_worker_is_the_dataloaders_own_error(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", ["some text " * 20] * 60)
    endless = TextDataset(f"jsonl:{path}", seq_len=32, lanes=4, exhausted="repeat", cache=tmp_path / "cache")
    loader = DataLoader(dataset(endless, global_batch_size=4), batch_size=None, num_workers=1)
    # In a process of its own: torch raises from a signal handler, which strikes wherever this process happens to be.
    parent = multiprocessing.get_context("fork").Process(target=lose_a_worker, args=(loader, tmp_path / "said"))
    parent.start()
    parent.join(100)
    assert parent.exitcode == 0
    said = (tmp_path / "said").read_text()
    assert re.search(r"DataLoader worker|Connection reset|EOFError|FileNotFoundError|ConnectionRefused", said), said


def lose_a_worker(loader, said) -> None:
    """What follows the death of a worker: torch says which one died, or a batch on its way is a connection that is broken,
    cut off or gone, as the moment has it. Never a hang, and never the end of the data."""
    try:
        try:
            batches = iter(loader)
            next(batches)
            os.kill(batches._workers[0].pid, signal.SIGKILL)
            list(itertools.islice(batches, 10_000))
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except Exception as error:
        said.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


@workers
@pytest.mark.filterwarnings("ignore:This DataLoader will create 5 worker processes:UserWarning")
@pytest.mark.parametrize(
    ("options", "count", "message"),
    [
        ({}, 5, "the 12 lanes of a rank cannot be shared by 5 workers: use num_workers of 1, 2, 3, 4, 6, 12, or 0"),
        ({"tokenizer_workers": 2}, 1, "num_workers=1 and tokenizer_workers=2 together are refused"),
        ({"skip": [(3, 5)]}, 2, "skip count steps of the run, which a worker among 2 does not see"),
    ],
)
def test_workers_that_cannot_share_the_work_are_refused(data, refused, options, count, message):
    refused(DataLoader(dataset(data, **options), batch_size=None, num_workers=count), ConfigError, message)


@workers
def test_workers_are_not_started_in_the_middle_of_a_batch(data, refused):
    rows = dataset(data, batched=False)
    for _ in itertools.islice(rows, 5):
        continue
    refused(DataLoader(rows, batch_size=4, num_workers=2), ConfigError, "middle of a batch, after row 5")
    assert next(iter(DataLoader(rows, batch_size=4, num_workers=1)))["sample_index"].tolist() == [5, 6, 7, 8]


def test_a_worker_reads_relative_specs_from_where_the_dataset_was_made(tmp_path, write_jsonl, monkeypatch):
    write_jsonl("here/a.jsonl", ["some text"] * 20)
    monkeypatch.chdir(tmp_path / "here")
    data = TextDataset([Source("jsonl:a.jsonl")], seq_len=16, lanes=2, cache=tmp_path / "cache")
    adapted = dataset(data, global_batch_size=2)
    monkeypatch.chdir(tmp_path)
    assert first_difference([frozen(b) for b in adapted], [frozen(b) for b in copy.deepcopy(dataset(data, global_batch_size=2))]) is None  # fmt: skip
