"""The loader's laws: resume is exact at every step, on any shape; every row once an epoch; equal digests."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CursorMismatch
from headrace.formats.lines import JsonLines
from headrace.loader import Loader, TextDataset, merge_states
from headrace.loader.text_plan import LaneShare
from headrace.sources import Source
from headrace.testing import assert_exact_resume, frozen

LANES = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Five sources: long and short documents, a tiny one, one with empty rows, one without any."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    shapes = {"web": (240, 60), "books": (12, 700), "tiny": (5, 30), "gaps": (60, 40), "none": (0, 1)}
    for name, (rows, mean) in shapes.items():
        for shard in range(2):
            with open(folder / f"{name}-{shard}.jsonl", "w") as handle:
                for i in range(shard, rows, 2):
                    empty = name == "gaps" and i % 3 == 0
                    handle.write(
                        json.dumps({"text": "" if empty else f"{name} {i} " + "x" * int(rng.integers(0, 2 * mean))})
                        + "\n"
                    )
    return folder


@pytest.fixture(scope="module")
def make_data(corpus):
    kept: dict[str, TextDataset] = {}

    def make(*, fresh: bool = False, **options) -> TextDataset:
        name = json.dumps(options, sort_keys=True)
        if fresh or name not in kept:
            weights = {"web": 0.5, "books": 0.25, "tiny": 0.05, "gaps": 0.1, "none": 0.1}
            sources = [Source(f"jsonl:{corpus}/{n}-*.jsonl", weight=w, name=n) for n, w in weights.items()]
            kept[name] = TextDataset(
                sources, seq_len=48, seed=11, lanes=LANES, window_blocks=3, cache=corpus / "cache", **options
            )
        return kept[name]

    return make


def simple(data: TextDataset, **options) -> Loader:
    return Loader(data, **({"global_batch_size": 12, "tokenizer_workers": 0, "prefetch_batches": 0} | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pack": "concat"},
        {"exhausted": "repeat"},
        {"exhausted": "stop_first"},
        {"shuffle": False},
        {"bos": True, "eos": False},
    ],
    ids=str,
)
def test_resuming_at_every_step_into_a_fresh_loader_with_other_threads_is_exact(make_data, options):
    data = make_data(**options)

    def other(link: int) -> Loader:
        again = make_data(fresh=True, **options) if link == 0 else data  # nothing may hang on the object
        return simple(again, tokenizer_workers=(0, 2, 1)[link], prefetch_batches=(2, 0, 1)[link])

    report = assert_exact_resume(lambda: simple(data), steps=18, tail=4, make_resumed=other)
    assert report.resumes >= 60
    assert report.largest_state < 64 << 10


def test_resuming_around_the_end_of_finite_sources_is_exact(make_data):
    data = make_data()
    total = sum(1 for _ in simple(data))
    report = assert_exact_resume(lambda: simple(data), steps=total + 2, at=range(total - 4, total + 1), tail=3)
    assert report.ended


@settings(max_examples=12)
@given(
    stops=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    size_and_worlds=st.sampled_from(
        [(12, (1, 2, 3, 4, 6, 12)), (20, (1, 4, 5, 10, 20)), (16, (1, 2, 8, 16)), (21, (1, 3, 7))]
    ).flatmap(lambda of: st.tuples(st.just(of[0]), st.lists(st.sampled_from(of[1]), min_size=6, max_size=6))),
)
def test_any_chain_of_world_sizes_delivers_the_samples_of_one_rank(make_data, stops, size_and_worlds):
    size, worlds = size_and_worlds
    data = make_data()
    straight = {}
    loader = simple(data, global_batch_size=size)
    for batch in loader:
        straight |= by_sample(batch)
    state, got = None, {}
    for link, world in enumerate(worlds):
        ranks = [simple(data, global_batch_size=size, dp_rank=r, dp_world_size=world) for r in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
        limit = stops[link] if link < len(stops) else 10**9
        counts = set()
        for rank in ranks:
            taken = 0
            while taken < limit and (batch := next(iter(rank), None)) is not None:
                fresh = by_sample(batch)
                assert not got.keys() & fresh.keys(), "no sample comes twice"
                got |= fresh
                taken += 1
            counts.add(taken)
        assert len(counts) == 1, "all ranks end at the same step"
        state = merge_states([r.state_dict() for r in ranks])
        if limit == 10**9:
            break
    assert got.keys() == straight.keys()
    assert all(np.array_equal(got[g], straight[g]) for g in got)
    assert state["body"]["digest"] == loader.digest


WORLDS = (1, 2, 3, 5, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


@given(st.integers(1, 100), st.sampled_from(WORLDS), st.integers(0, 10**9), st.integers(1, 4))
def test_ranks_share_a_step_out_and_follow_whole_lanes(lanes, world, step, rows):
    first, stop = step * rows * world, (step + 1) * rows * world
    delivered = []
    for rank in range(world):
        share = LaneShare(lanes=lanes, rank=rank, world_size=world)
        followed = share.followed_samples(first, stop)
        every, begin = share.own_of_followed(first)
        own = followed[begin::every]
        assert own == range(first + rank, stop, world)
        assert list(followed) == [g for g in range(first, stop) if g % lanes in share.followed_lanes]
        delivered += own
    assert sorted(delivered) == list(range(first, stop))
    counting = [LaneShare(lanes=lanes, rank=r, world_size=world) for r in range(world)]
    assert sorted(lane for s in counting if s.is_first_follower for lane in s.followed_lanes) == list(range(lanes))


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_of_any_world_delivers_its_samples_of_the_one_order(make_data, world):
    data = make_data(exhausted="repeat")
    straight: dict[int, np.ndarray] = {}
    loader = simple(data, global_batch_size=256)
    while len(straight) < 768:
        straight |= by_sample(next(loader))
    for rank in {0, world // 2, world - 1}:
        for g, row in itertools.chain.from_iterable(
            by_sample(batch).items()
            for batch in itertools.islice(simple(data, global_batch_size=world, dp_rank=rank, dp_world_size=world), 3)
        ):
            assert g % world == rank
            assert np.array_equal(row, straight[g])


def test_states_of_ranks_that_share_lanes_are_put_together_once(make_data):
    data = make_data(exhausted="repeat")
    ranks = [simple(data, global_batch_size=8, dp_rank=r, dp_world_size=8) for r in range(8)]
    for rank in ranks:
        next(rank)
    states = [rank.state_dict() for rank in ranks]
    alone = simple(data, global_batch_size=8)
    next(alone)
    merged, whole = merge_states(states)["body"], alone.state_dict()["body"]
    assert merged == whole
    for wrong, sentence in (
        (states[:-1], "the states of ranks 7 of 8 are missing"),
        ([*states[:-1], states[0]], "rank 0 is in two of the states"),
    ):
        with pytest.raises(CursorMismatch, match=sentence):
            merge_states(wrong)
    for other in (5, 3):  # rank 1 and rank 5 follow the same lanes
        with pytest.raises(CursorMismatch, match=r"state was saved by rank 1 of 8|it was saved by one rank of several"):
            simple(data, global_batch_size=8, dp_rank=other, dp_world_size=8).load_state_dict(states[1])
    again = simple(data, global_batch_size=8, dp_rank=1, dp_world_size=8)
    again.load_state_dict(states[1])
    assert again.state_dict() == states[1]


def by_sample(batch) -> dict[int, np.ndarray]:
    kept = frozen(batch)
    return {
        int(g): np.stack([kept["input_ids"][i], kept["labels"][i], kept["position_ids"][i]])
        for i, g in enumerate(kept["sample_index"])
    }


@pytest.mark.parametrize("pack", ["best_fit", "concat"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_row_with_text_is_delivered_once_an_epoch(corpus, pack, epochs):
    names = ["web", "books", "tiny", "gaps"]
    sources = [Source(f"jsonl:{corpus}/{n}-*.jsonl", name=n, max_epochs=epochs) for n in names]
    data = TextDataset(sources, seq_len=48, seed=5, lanes=LANES, window_blocks=3, pack=pack, cache=corpus / "cache")
    loader = simple(data)
    tokens: Counter[tuple[str, str, int]] = Counter()
    rows = 0
    for batch in loader:
        rows += int(batch["row_count"].sum())
        for piece in loader.pieces(batch):
            tokens[piece.source, piece.file, piece.row] += piece.length
    expected: Counter[tuple[str, str, int]] = Counter()
    for name in names:
        for shard in range(2):
            for row, line in enumerate((corpus / f"{name}-{shard}.jsonl").read_text().splitlines()):
                text = json.loads(line)["text"]
                if text:
                    expected[name, f"{name}-{shard}.jsonl", row] = epochs * (len(text.encode()) + 1)
    assert tokens == expected
    assert rows == epochs * len(expected)


def test_a_second_pass_delivers_the_same_rows_in_another_order(make_data):
    data = make_data()
    loader = simple(data)
    passes = []
    for _ in range(2):
        seen = []
        for batch in loader:
            seen += [(p.file, p.row, p.start) for p in loader.pieces(batch)]
        passes.append(seen)
    assert passes[0] != passes[1]
    assert sorted(set(passes[0])) == sorted(set(passes[1]))


def test_batches_keep_the_contract(make_data):
    data = make_data()
    loader = simple(data, segment_ids=True)
    seen = []
    for batch in loader:
        assert next(f.shape for f in loader.spec if f.name == "input_ids") == (48,)
        assert loader.spec.check(batch) == 12
        ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
        borders = batch["cu_seqlens"].tolist()
        assert borders[0] == 0
        assert borders[-1] == ids.numel()
        assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(borders))
        flat_positions, flat_labels, flat_ids = positions.flatten(), labels.flatten(), ids.flatten()
        for a, b in itertools.pairwise(borders):
            assert flat_positions[a:b].tolist() == list(range(b - a))
            learned = flat_labels[a : b - 1]
            assert ((learned == flat_ids[a + 1 : b]) | (learned == -100)).all()
        assert ((batch["segment_ids"] == 0) <= (labels == -100)).all()
        seen += batch["sample_index"].tolist()
    assert seen == list(range(len(seen)))


def test_realised_shares_follow_the_weights_while_no_source_is_dry(make_data):
    data = make_data(exhausted="repeat")
    loader = simple(data)
    for _ in range(150):
        next(loader)
    for realised, target in loader.report().mix.values():
        assert abs(realised - target) < 0.02


@settings(max_examples=6)
@given(batch_sizes=st.lists(st.sampled_from([6, 12, 24]), min_size=2, max_size=4))
def test_the_batch_size_may_change_over_a_run(make_data, batch_sizes):
    data = make_data(exhausted="repeat")
    straight = simple(data, global_batch_size=6)
    state, got, want = None, {}, {}
    for size in batch_sizes:
        loader = simple(data, global_batch_size=size)
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(2):
            got |= by_sample(next(loader))
        state = loader.state_dict()
    while len(want) < len(got):
        want |= by_sample(next(straight))
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[g], want[g]) for g in got)


def test_neither_the_memory_for_chunks_nor_who_reads_the_lines_changes_anything(make_data, monkeypatch):
    def digest(data: TextDataset) -> str:
        with simple(data) as loader:
            for _ in itertools.islice(loader, 30):
                continue
            return loader.report().digest

    expected = digest(make_data(exhausted="repeat", fresh=True))
    bare = make_data(exhausted="repeat", chunk_memory=0)
    assert digest(bare) == expected
    assert bare.chunks.misses > 3 * sum(s.manifest.chunks for s in bare.sources)
    monkeypatch.setattr(JsonLines, "_decode_all", lambda self, data, rows: None)
    assert digest(make_data(exhausted="repeat", fresh=True)) == expected
