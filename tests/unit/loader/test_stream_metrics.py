"""The pool's numbers: exact values and moments, drain semantics, modalities of both layouts, statistics over resumes."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headrace.errors import ConfigError, CursorMismatch, DataChanged, DataError
from headrace.loader.data_stats import DataStatsCollector
from headrace.loader.stream_metrics import drained_metrics, extra_metrics, without_states
from headrace.loader.streams import StreamMixingDataset
from headrace.metrics import Mean, registered_specs
from headrace.sources.stream_files import list_streams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from stream_cells import SUFFIXES, change_stream, write_stream, write_streams

A = "stream_mixing/active"
SEVEN = {
    f"{A}/remaining_min", f"{A}/remaining_max", f"{A}/remaining_fraction_min", f"{A}/remaining_fraction_max", f"{A}/modalities/atac",
    f"{A}/modalities/rna", f"{A}/steps_since_pick_max", "stream_mixing/refill/exhaust_events",
}  # fmt: skip
EXHAUSTED = "stream_mixing/refill/exhaust_events"


def four(tmp_path: Path, **options: Any) -> StreamMixingDataset:
    """Four streams of 8, 12, 4 and 6 rows; one pick after the other around the pool."""
    root = write_streams(tmp_path / "cells", {"atac": [8, 12], "rna": [4, 6]})
    given = {
        "batch_size": {"atac": 4, "rna": 2},
        "num_streams_mixed": 4,
        "pick_mode": "round_robin",
        "queue": "permuted",
    }
    return StreamMixingDataset(root, cache=tmp_path / "cache", prefetch_batches=0, **(given | options))


def test_a_drain_has_the_seven_scalars_with_the_values_of_the_pool_at_the_pick(tmp_path):
    data = four(tmp_path)
    for step, batch in enumerate(data):
        drained = data.drain_step_metrics()
        assert drained.keys() - {f"{A}/overdue_max", "stream_mixing/picks/atac", "stream_mixing/picks/rna"} == SEVEN
        assert all(type(v) in (int, float) for v in drained.values())
        if step == 0:  # picks: atac 2 and 3, rna 2 and 3; nothing taken yet at the first one
            assert (drained[f"{A}/remaining_min"], drained[f"{A}/remaining_max"]) == (2, 3)
            assert (drained[f"{A}/remaining_fraction_min"], drained[f"{A}/remaining_fraction_max"]) == (1.0, 1.0)
            assert (drained[f"{A}/modalities/atac"], drained[f"{A}/modalities/rna"]) == (2, 2)
            assert drained[f"{A}/steps_since_pick_max"] == 0
        if step == 4:  # each was picked once; the first one is picked again
            assert drained[f"{A}/remaining_fraction_min"] == pytest.approx(0.5)
            assert drained[f"{A}/remaining_fraction_max"] == pytest.approx(2 / 3)
            assert drained[f"{A}/steps_since_pick_max"] == 3
        assert drained[f"stream_mixing/picks/{batch['modality']}"] == 1


def test_remaining_fraction_does_not_depend_on_the_batch_size(tmp_path):
    root = write_streams(tmp_path / "cells", {"atac": [128], "rna": [128]}, (".npy",))
    data = StreamMixingDataset(
        root, batch_size={"atac": 1, "rna": 32}, num_streams_mixed=2, cache=tmp_path / "c", prefetch_batches=0
    )
    widest = 0.0
    for _ in data:
        drained = data.drain_step_metrics()
        widest = max(widest, drained[f"{A}/remaining_fraction_max"] - drained[f"{A}/remaining_fraction_min"])
        readers = {data._modality_for_reader(r): r for r in data.active}
        if len(readers) == 2:
            atac, rna = (readers[m] for m in ("atac", "rna"))
            assert abs(atac.position - rna.position) <= 32
            assert atac.remaining_picks == 128 - atac.position
            assert rna.remaining_picks == (128 - rna.position) // 32
    assert widest <= 32 / 128


def test_steps_since_pick_grow_for_the_unpicked_are_zero_at_a_pick_and_end_with_the_reader(tmp_path):
    data = four(tmp_path, pick_mode="sequential")
    since = [data.drain_step_metrics()[f"{A}/steps_since_pick_max"] for _ in data]
    # Slot 0 is read to its end, then the next: the ones that wait have waited one step more each time.
    assert since[:3] == [0, 1, 2]
    assert since[-1] == 0, "the last reader is alone, and is picked at every step"
    only = four(tmp_path, num_streams_mixed=1)
    assert {only.drain_step_metrics()[f"{A}/steps_since_pick_max"] for _ in only} == {0}


def test_a_reader_admitted_later_counts_from_its_admission(tmp_path):
    root = write_streams(tmp_path / "cells", {"rna": [2, 40, 40]}, (".npy",))
    data = StreamMixingDataset(
        root,
        batch_size=2,
        num_streams_mixed=2,
        pick_mode="sequential",
        queue="banded",
        cache=tmp_path / "c",
        prefetch_batches=0,
    )
    since = [data.drain_step_metrics()[f"{A}/steps_since_pick_max"] for _ in data]
    # Nobody ever waits longer than the slices before it take.
    assert max(since) <= 20 + 1
    assert since[0] == 0


def test_exhaust_events_are_counted_once_and_cleared_by_the_drain(tmp_path):
    data = four(tmp_path)
    assert data.drain_step_metrics() == {}
    total = 0
    for step, _ in enumerate(data):
        if step % 3 == 2:
            total += data.drain_step_metrics()[EXHAUSTED]
            assert data.drain_step_metrics() == {}, "nothing was picked since"
    last = data.drain_step_metrics()
    assert total + last.get(EXHAUSTED, 0) == 4
    next(iter(data))
    assert data.drain_step_metrics()[EXHAUSTED] == 0, "an epoch's end is no exhaustion"


def test_several_picks_between_drains_give_the_last_snapshot_and_the_sum_of_what_was_counted(tmp_path):
    one, many = four(tmp_path), four(tmp_path)
    every = [one.drain_step_metrics() for _ in one]
    for _ in many:
        pass
    drained = many.drain_step_metrics()
    for key, value in drained.items():
        summed = key == EXHAUSTED or key.startswith("stream_mixing/picks/")
        assert value == (sum(e[key] for e in every) if summed else every[-1][key])


def test_a_rank_with_several_lanes_speaks_for_all_of_them(tmp_path):
    options = {"batching_mode": "device_per_stream", "global_ranks": 4, "num_streams_mixed": 2}
    whole = four(tmp_path, dp_rank=0, dp_world_size=1, **options)
    ranks = [four(tmp_path, dp_rank=r, dp_world_size=4, **options) for r in range(4)]
    iterators = [iter(rank) for rank in ranks]
    for batches in itertools.islice(zip(*[iter(whole)] * 4, strict=True), 12):
        assert len(batches) == 4
        theirs = []
        for rank, iterator in zip(ranks, iterators, strict=True):
            next(iterator)
            theirs.append(rank.drain_step_metrics())
        ours = whole.drain_step_metrics()
        for key, value in ours.items():
            values = [t[key] for t in theirs]
            expected = min(values) if key.endswith("_min") else max(values) if key.endswith("_max") else sum(values)
            assert value == expected, key


def test_modalities_are_resolved_in_both_layouts(tmp_path):
    root = write_streams(tmp_path / "cells", {"atac": [8], "rna": [4]})
    nested = StreamMixingDataset(root, batch_size=2, cache=tmp_path / "c")
    direct = StreamMixingDataset([root / "rna", root / "atac"], layout="direct", batch_size=2, cache=tmp_path / "c")
    for data in (nested, direct):
        assert sorted(data._modality_for_reader(r) for r in data.active) == ["atac", "rna"]
        assert all(data._modality_for_reader(r) == data.stream_groups[r.stream_id] for r in data.active)
        assert data.modalities == ("atac", "rna")
    assert nested.state_dict() == direct.state_dict()


def test_one_rank_aggregates_to_what_it_drained(tmp_path):
    data = four(tmp_path)
    next(iter(data))
    drained = data.drain_step_metrics()
    assert data.aggregate_step_metrics(drained, 1, torch.device("cpu")) == drained
    with pytest.raises(ConfigError, match="asked for 4 ranks and the process group has 1"):
        data.aggregate_step_metrics(drained, 4, torch.device("cpu"))


def test_every_key_is_declared_with_its_reduction(tmp_path):
    data = four(tmp_path)
    next(iter(data))
    specs = {spec.key: spec.reduction.value for spec in data.metric_specs()}
    assert specs.keys() >= data.drain_step_metrics().keys()
    for key, reduction in specs.items():
        assert reduction == ("min" if key.endswith("_min") else "max" if key.endswith("_max") else "sum")
    listed = {spec.key for spec in registered_specs()}
    assert {f"{A}/modalities/<modality>", "stream_mixing/picks/<modality>", f"{A}/overdue_max", EXHAUSTED} <= listed


def test_a_trainer_asks_in_one_place_and_other_datasets_have_nothing_to_say(tmp_path):
    data = four(tmp_path)
    loader = DataLoader(data, batch_size=None)
    next(iter(loader))
    drained = extra_metrics(loader, world_size=1, device=torch.device("cpu"))
    assert drained.keys() >= SEVEN
    assert extra_metrics(loader) == {}, "it was drained"
    for other in (None, [1, 2], DataLoader([1, 2])):
        assert extra_metrics(other, world_size=4) == {}, "and no collective is waited for"
        assert drained_metrics(other) == {}


def test_counts_of_readers_stand_while_events_add_up():
    events, states = without_states({f"{A}/modalities/rna": 3, EXHAUSTED: 1, f"{A}/remaining_min": 2})
    assert states == {f"{A}/modalities/rna": 3}
    assert events == {EXHAUSTED: 1, f"{A}/remaining_min": 2}


# ------------------------------------------------------------------------------------------------ the dataset


def test_cells_carry_group_stream_row_and_modality(tmp_path):
    root = write_streams(tmp_path / "cells", {"rna": [5, 5]}, (".npz", ".npy"))
    with StreamMixingDataset(root, batch_size=5, cache=tmp_path / "c", queue="permuted") as data:
        batches = sorted(data, key=lambda b: b["stream_id"][0])
    grouped, alone = batches
    assert grouped["group_id"].tolist() == [0, 0, 0, 0, 1]
    assert alone["group_id"].tolist() == [(1 << 32) + row for row in range(5)]  # no such column: each its own
    assert alone["row"].tolist() == [0, 1, 2, 3, 4]
    assert grouped["modality"] == "rna"
    assert {b["draw"] for b in batches} == {0, 1}


def test_strings_name_groups_the_same_on_every_machine(tmp_path):
    (tmp_path / "cells" / "rna").mkdir(parents=True)
    (tmp_path / "cells" / "rna" / "0.jsonl").write_text('{"donor": "d1", "x": [1.5]}\n{"donor": "d2", "x": [2.5]}\n')
    with StreamMixingDataset(tmp_path / "cells", batch_size=2, group_key="donor", cache=tmp_path / "c") as data:
        (batch,) = list(data)
    assert batch["group_id"].tolist() == [2988384934562656713, 5296332416635544565]
    assert batch["donor"] == ["d1", "d2"]


def test_a_collator_sees_plain_arrays(tmp_path):
    with four(tmp_path, collate=lambda cells: {"total": float(cells["x"].sum()), "kind": type(cells["x"])}) as data:
        batches = list(data)
    assert all(b["kind"] is np.ndarray for b in batches)
    assert batches[0].keys() == {"total", "kind", "modality", "draw", "stream_epoch"}


def test_torchs_dataloader_passes_batches_through_and_its_workers_are_refused(tmp_path):
    data = four(tmp_path)
    through = list(DataLoader(data, batch_size=None))
    assert sum(len(b["row"]) for b in through) == 30
    assert data.ended
    with pytest.raises(ConfigError, match="Give num_workers to the dataset itself"):
        next(iter(DataLoader(data, batch_size=None, num_workers=1)))


def test_a_share_without_rows_still_is_a_batch(tmp_path):
    root = write_streams(tmp_path / "cells", {"rna": [9]}, (".parquet",))
    ranks = [
        StreamMixingDataset(root, batch_size=4, global_ranks=2, dp_rank=r, dp_world_size=3, cache=tmp_path / "c")
        for r in range(3)
    ]
    lengths = [[len(b["x"]) for b in rank] for rank in ranks]
    assert lengths == [[2, 0], [3, 0], [3, 1]]


def test_a_smaller_pool_parks_its_readers_or_drops_them_with_the_documents_words(tmp_path, caplog):
    data = four(tmp_path)
    for _ in zip(range(3), data, strict=False):
        pass
    state = data.state_dict()
    with caplog.at_level(logging.INFO, logger="headrace.loader"):
        parked = four(tmp_path, num_streams_mixed=1)
        parked.load_state_dict(state)
        dropped = four(tmp_path, num_streams_mixed=1, on_reshard="drop")
        dropped.load_state_dict(state)
    assert [r.getMessage() for r in caplog.records] == [
        "[stream_mixing] resume reshard parked 3 still-active readers at the head of the queue",
        "[stream_mixing] resume reshard dropped 3 still-active readers",
    ]
    left = 30 - sum(4 if r.stream_id < 2 else 2 for r in data.active if r.position)
    assert sum(len(b["row"]) for b in parked) == left
    assert sum(len(b["row"]) for b in dropped) < left
    assert dropped.drain_step_metrics()[EXHAUSTED] == 1, "a reader that was dropped did not run dry"


def test_a_state_of_other_data_or_settings_is_refused_by_name(tmp_path):
    data = four(tmp_path)
    state = data.state_dict()
    with pytest.raises(CursorMismatch, match="config:pick_mode: saved round_robin, now weighted"):
        four(tmp_path, pick_mode="weighted").load_state_dict(state)
    with pytest.raises(CursorMismatch, match="config:batch_size: saved atac=4,rna=2, now atac=4,rna=3"):
        four(tmp_path, batch_size={"atac": 4, "rna": 3}).load_state_dict(state)
    write_stream(tmp_path / "cells" / "rna" / "002.npz", 2, 5)
    other = StreamMixingDataset(tmp_path / "cells", batch_size={"atac": 4, "rna": 2}, num_streams_mixed=4, pick_mode="round_robin", queue="permuted", cache=tmp_path / "cache")  # fmt: skip
    with pytest.raises(CursorMismatch, match=r"\(data: rna/002\.npz had 4 rows and has 5\)"):
        other.load_state_dict(state)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_small_file_with_one_other_value_and_its_old_time_is_refused_by_name(tmp_path, suffix):
    path = tmp_path / "cells" / "rna" / f"001{suffix}"
    write_stream(path, 1, 40)

    def opened() -> StreamMixingDataset:
        return StreamMixingDataset(tmp_path / "cells", batch_size=4, cache=tmp_path / "cache")

    with opened() as data:
        list(itertools.islice(data, 3))
        state = data.state_dict()
    change_stream(path, 1, 40)
    with pytest.raises(CursorMismatch, match=rf"\(data: rna/001\{suffix} has other content\)") as refused:
        opened().load_state_dict(state)
    assert set(refused.value.differences) == {"data"}
    with opened() as data:
        data.load_state_dict(state, accept={"data"})
        assert len(list(data)) == 7


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_cells_that_changed_where_no_fingerprint_looks_are_refused_when_they_are_read_again(tmp_path, suffix, workers):
    path = tmp_path / "cells" / "rna" / f"001{suffix}"
    write_stream(path, 1, 400)
    listing = list_streams(
        tmp_path / "cells", cache=tmp_path / "cache"
    )  # of before: as if samples had missed the change

    def opened() -> StreamMixingDataset:
        return StreamMixingDataset(
            tmp_path / "cells", batch_size=4, cache=tmp_path / "cache", listing=listing, num_workers=workers
        )

    with opened() as data:
        first = list(itertools.islice(data, 3))
        state = data.state_dict()
    change_stream(path, 1, 400)
    with opened() as data:
        data.load_state_dict(state)
        with pytest.raises(DataChanged, match=rf"rows 0 to 400 of \S+/rna/001\{suffix} .* --accept data"):
            list(data)
        data.load_state_dict(state, accept={"data"})
        assert len(list(data)) == 97
    with opened() as data:  # what was accepted is what it is compared with from then on
        assert len(list(data)) == 100
    assert len(first) == 3


def test_cells_that_change_under_a_run_are_refused_in_its_next_epoch(tmp_path):
    path = tmp_path / "cells" / "rna" / "001.npy"
    write_stream(path, 1, 40)
    with StreamMixingDataset(tmp_path / "cells", batch_size=4, cache=tmp_path / "cache", repeat=True) as data:
        batches = iter(data)
        for _ in range(10):
            next(batches)
        change_stream(path, 1, 40)
        # The next epoch may have been read ahead already; the one after it is not.
        with pytest.raises(DataChanged, match=r"rows 0 to 40 of \S+/rna/001\.npy"):
            list(itertools.islice(batches, 50))


def test_every_rank_reads_and_one_of_them_records_a_unit_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.sources.cell_hashes.UNIT_BYTES", 120)  # 16 rows of 12 bytes
    write_stream(tmp_path / "cells" / "rna" / "001.npy", 1, 95)
    ranks = [
        StreamMixingDataset(
            tmp_path / "cells", batch_size=4, global_ranks=3, cache=tmp_path / "cache", records=tmp_path / "records", dp_rank=r, dp_world_size=3
        )
        for r in range(3)
    ]  # fmt: skip
    begun = [iter(rank) for rank in ranks]  # all before the first row is read: none knows the records of the others
    got = [list(batches) for batches in begun]
    for rank in ranks:
        rank.close()
    assert sorted(v for rank in got for b in rank for v in b["x"][:, 0].tolist()) == [10_000.0 + r for r in range(95)]
    (record,) = (tmp_path / "records").iterdir()
    lines = record.read_text().split()
    assert len(set(lines[::3])) == len(lines[::3]) == 6


def test_a_file_that_grew_since_it_was_listed_is_refused_when_it_is_opened(tmp_path):
    data = four(tmp_path)
    for name in ("000.parquet", "001.arrow"):
        write_stream(tmp_path / "cells" / "atac" / name, 0, 50)
    with pytest.raises(DataChanged, match="has 50 rows; it had"):
        list(data)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": {"rna": 2}}, "no size for atac"),
        ({"batch_size": {"atac": 1, "rna": 2, "prot": 3}}, "names prot, and there is no such modality"),
        ({"batch_size": 0}, "batch_size of atac must be a whole number"),
        ({"batch_size": {"atac": 0, "rna": 1}}, "batch_size of atac must be a whole number"),
        ({"num_streams_mixed": 0}, "slots must be"),
        ({"pick_mode": "fair"}, "pick_mode must be one of"),
        ({"lanes": 3}, "lanes belong to device_per_stream"),
        ({"on_reshard": "keep"}, "on_reshard must be park or drop"),
        ({"dp_rank": 1}, "belong together"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        four(tmp_path, **options)


def test_ranks_must_divide_the_lanes(tmp_path):
    data = four(tmp_path, batching_mode="device_per_stream", lanes=4, dp_rank=0, dp_world_size=3)
    with pytest.raises(ConfigError, match=r"3 ranks cannot share 4 lanes.*start 1, 2, 4 ranks"):
        iter(data)


def test_a_reserved_column_is_refused(tmp_path):
    (tmp_path / "cells" / "rna").mkdir(parents=True)
    np.savez(tmp_path / "cells" / "rna" / "0.npz", stream_id=np.zeros(3))
    with (
        StreamMixingDataset(tmp_path / "cells", batch_size=2, cache=tmp_path / "c") as data,
        pytest.raises(DataError, match="a column 'stream_id', which headrace adds itself"),
    ):
        list(data)


# ------------------------------------------------------------------------------------------------- statistics


def test_statistics_are_of_the_window_but_tokens_seen_go_on_over_resumes():
    stats = DataStatsCollector(["rna", "atac"], targets={"rna": 3, "atac": 1})
    assert stats.drain() == {}
    stats.add("rna", tokens=60, rows=6, padding=25)
    stats.add("atac", tokens=15, rows=5, documents_cut=2)
    stats.add("", tokens=9)
    drained = stats.drain()
    assert drained["data/modality_total_tokens/rna"] == 60
    assert drained["data/token_share/atac"] == Mean(15, 75)
    assert drained["data/token_share_target/rna"] == 0.75
    assert drained["data/padding_share"] == Mean(25, 100)
    assert drained["data/documents_cut"] == 2
    other = DataStatsCollector(["rna", "atac"])
    other.load_state_dict([stats.state_dict(), stats.state_dict()])
    other.add("rna", tokens=1)
    line = other.aggregate_distributed()
    assert (line["data/tokens_seen/rna"], line["data/modality_total_tokens/rna"]) == (121, 1)
    assert line["data/token_share/rna"] == 1.0
    assert stats.metric_specs() == DataStatsCollector(["atac", "rna"]).metric_specs()


def test_saved_counts_are_shared_out_so_that_their_sum_stays():
    states = []
    for tokens in (5, 7, 11):
        stats = DataStatsCollector(["rna"])
        stats.add("rna", tokens=tokens)
        states.append(stats.state_dict())
    for world in (1, 2, 3, 4):
        ranks = [DataStatsCollector(["rna"]) for _ in range(world)]
        for r, rank in enumerate(ranks):
            rank.load_state_dict(states, rank=r, world_size=world)
        assert sum(rank.tokens_seen["rna"] for rank in ranks) == 23


def test_statistics_refuse_what_they_do_not_know():
    stats = DataStatsCollector(["rna"])
    with pytest.raises(ConfigError, match="no modality 'rma'"):
        stats.add("rma", tokens=1)
    with pytest.raises(ConfigError, match="targets name atac"):
        DataStatsCollector(["rna"], targets={"atac": 1})
    with pytest.raises(CursorMismatch, match="are of atac"):
        stats.load_state_dict(DataStatsCollector(["atac"]).state_dict())
    with pytest.raises(CursorMismatch, match="expected a state of DataStatsCollector"):
        stats.load_state_dict({"kind": "text"})
