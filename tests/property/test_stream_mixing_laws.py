"""Stream mixing over real files: one global order for any shape, exact resume on another, every row once an epoch."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loader.stream_metrics import EXHAUSTED
from headrace.loader.streams import StreamMixingDataset
from headrace.testing import assert_exact_resume

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from stream_cells import write_streams

SIZES = {"atac": [13, 40, 0], "protein": [9, 22], "rna": [31, 7, 18, 26]}
SHAPES = [(0, 1), (0, 2), (1, 1), (2, 1), (3, 1), (2, 2), (0, 5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_streams(tmp_path_factory.mktemp("cells"), SIZES)


def dataset(root: Path, **options: Any) -> StreamMixingDataset:
    given = {
        "batch_size": {"atac": 3, "protein": 2, "rna": 4},
        "num_streams_mixed": 3,
        "seed": 5,
        "prefetch_batches": 0,
    }
    return StreamMixingDataset(root, cache=root.parent / "cache", **(given | options))


def seen(batch: dict[str, Any]) -> tuple[int, list[tuple[int, float, int]]]:
    """The draw, and (stream, who the cell says it is, group) of every row."""
    x, streams, groups = batch["x"], batch["stream_id"].tolist(), batch["group_id"].tolist()
    return batch["draw"], [(s, float(v), g) for s, v, g in zip(streams, x[:, 0].tolist(), groups, strict=True)]


def take(ranks: list[StreamMixingDataset], steps: int) -> list[tuple[int, list[Any]]]:
    """What all ranks deliver in so many steps, as one list of (draw, cells in rank order)."""
    iterators = [iter(rank) for rank in ranks]
    drawn: dict[int, list[Any]] = {}
    for _ in range(steps):
        for iterator in iterators:
            batch = next(iterator, None)
            if batch is not None:
                draw, cells = seen(batch)
                drawn.setdefault(draw, []).extend(cells)
    return sorted(drawn.items())


def ranks_of(root: Path, world: int, **options: Any) -> list[StreamMixingDataset]:
    return [dataset(root, dp_rank=r, dp_world_size=world, **options) for r in range(world)]


def close(ranks: list[StreamMixingDataset]) -> None:
    for rank in ranks:
        rank.close()


def straight(root: Path, steps: int, **options: Any) -> list[tuple[int, list[Any]]]:
    with dataset(root, **options) as data:
        return take([data], steps)


def test_the_global_order_is_the_same_for_any_number_of_workers_and_ranks(root):
    expected = straight(root, 30, global_ranks=2, repeat=True)
    assert len(expected) == 30
    kept: dict[tuple[int, int], list[StreamMixingDataset]] = {}
    try:
        for workers, world in SHAPES:
            ranks = ranks_of(
                root, world, global_ranks=2, repeat=True, num_workers=workers, prefetch_batches=workers and 2
            )
            kept[workers, world] = ranks
            head = take(ranks, 11)
            states = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
            assert all(state == states[0] for state in states)
            assert head + take(ranks, 19) == expected, f"{workers} workers, {world} ranks"
        # Stopped on two ranks with two workers each, resumed on one with three.
        stopped = kept[2, 2]
        for rank in stopped:
            rank.load_state_dict(states)
        tail = take(stopped, 7)
        (other,) = kept[3, 1]
        other.load_state_dict(json.loads(json.dumps([rank.state_dict() for rank in stopped])))
        assert head + tail + take([other], 12) == expected
    finally:
        for ranks in kept.values():
            close(ranks)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_are_read_together_are_cut_where_they_were_drawn(tmp_path, world):
    """Files of more draws than are read in one go, beside one that ends early; each cell says who it is."""
    root = write_streams(tmp_path / "cells", {"atac": [9], "rna": [700, 611]})
    ranks = ranks_of(root, world, global_ranks=world, batch_size=3, num_streams_mixed=2)
    found = Counter()
    for draw, cells in take(ranks, 500):
        found.update((stream, who) for stream, who, _ in cells)
        assert len({stream for stream, _, _ in cells}) == 1, draw
    close(ranks)
    assert set(found.values()) == {1}
    assert Counter(stream for stream, _ in found) == {0: 9, 1: 700, 2: 611}
    assert len({who for _, who in found}) == 1320


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("mode", ["per_stream", "device_per_stream"])
def test_who_asks_seldom_is_told_what_one_who_asks_at_every_step_is_told(tmp_path, mode, prefetch):
    """Over many batches, and files that end meanwhile."""
    root = write_streams(tmp_path / "cells", {"atac": [9, 700], "rna": [700, 611, 40]})
    chosen = {"batching_mode": mode, "batch_size": {"atac": 3, "rna": 4}}
    with dataset(root, **chosen) as always, dataset(root, prefetch_batches=prefetch, **chosen) as seldom:
        picks = Counter()
        for at, _ in enumerate(itertools.islice(zip(always, seldom, strict=True), 450)):
            told = always.drain_step_metrics()
            picks.update({key: n for key, n in told.items() if "/picks/" in key or key == EXHAUSTED})
            if at in (3, 63, 64, 65, 127, 140, 141, 400):
                now = seldom.drain_step_metrics()
                counted = {key: now.pop(key) for key in picks}
                assert counted == dict(picks)
                assert now == {key: value for key, value in told.items() if key not in picks}
                assert seldom.state_dict() == always.state_dict()
                picks.clear()


@pytest.mark.parametrize("mode", ["per_stream", "device_per_stream"])
def test_stopping_at_every_step_and_resuming_on_other_shapes_in_a_chain_is_exact(root, mode):
    options = {"batching_mode": mode, "global_ranks": 4, "repeat": True}
    worlds = (1, 2, 4) if mode == "device_per_stream" else (1, 2, 3, 5)
    total = 24
    expected = straight(root, total + 16, **options)
    for stop in range(1, total):
        state, got = None, []
        for world in itertools.cycle(worlds):
            ranks = ranks_of(root, world, **options)
            for rank in ranks if state is not None else ():
                rank.load_state_dict(state)
            got += take(ranks, max(stop // world, 1) if mode == "device_per_stream" else stop)
            state = json.loads(json.dumps(ranks[-1].state_dict()))
            close(ranks)
            if len(got) >= total:
                break
        assert got[: total + 16] == expected[: len(got)]


@given(
    first=st.integers(1, 9), second=st.integers(1, 9), stop=st.integers(0, 40), mode=st.sampled_from(["proportional", "weighted", "uniform", "round_robin", "sequential"]),
    queue=st.sampled_from(["stratified", "permuted", "banded"]),
)  # fmt: skip
@settings(max_examples=25)
def test_an_epoch_that_changes_its_pool_size_half_way_holds_every_row_once(root, first, second, stop, mode, queue):
    with dataset(root, num_streams_mixed=first, pick_mode=mode, queue=queue) as data:
        head = take([data], stop)
        state = data.state_dict()
    with dataset(root, num_streams_mixed=second, pick_mode=mode, queue=queue) as other:
        other.load_state_dict(state)
        tail = take([other], 200) if not other.ended else []
    rows = Counter(cell[1] for _, cells in head + tail for cell in cells)
    expected = [file * 10_000 + row for file, n in enumerate(itertools.chain(*SIZES.values())) for row in range(n)]
    assert rows == Counter(map(float, expected))


def test_the_oracle_finds_no_resume_that_is_not_exact(root):
    report = assert_exact_resume(lambda: dataset(root, prefetch_batches=2), steps=60, tail=4, chain=2)
    assert report.ended
    assert report.resumes > 100


def test_the_next_iteration_is_the_next_epoch_in_another_order_also_after_a_resume_at_the_end(root):
    with dataset(root) as data:
        first, second = take([data], 200), take([data], 200)
        assert [d for d, _ in second] == list(range(len(first), 2 * len(first)))
        rows = [Counter(cell[1] for _, cells in part for cell in cells) for part in (first, second)]
        assert rows[0] == rows[1]
        assert [cells for _, cells in first] != [cells for _, cells in second]
        ended = data.state_dict()
        third = take([data], 200)
    with dataset(root) as other:
        other.load_state_dict(ended)
        assert other.ended
        assert take([other], 200) == third


def test_a_state_is_small(tmp_path):
    root = write_streams(tmp_path, {"a": [60] * 50, "b": [90] * 50}, (".npy",))
    with StreamMixingDataset(root, batch_size=1, num_streams_mixed=64, repeat=True, cache=tmp_path / "c") as data:
        largest = 0
        for _ in zip(range(4000), data, strict=False):
            if data.delivered % 97 == 0:
                largest = max(largest, len(json.dumps(data.state_dict(), separators=(",", ":"))))
    assert largest <= 2048
