"""The prepared tier under the laws: block i is pure, an epoch is complete, one integer says where, shares follow the weights."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loader import PreparedDataset, PreparedLoader
from headrace.loader.schedule import Schedule
from headrace.testing import assert_exact_resume, frozen
from headrace.text.shards import (
    SHARD_FOLDER,
    PreparedManifest,
    PreparedSource,
    pack_shard,
    shard_name,
    write_shard,
)

SEQ_LEN = 24


def write_folder(folder, sources, *, seq_len=SEQ_LEN, dtype=np.uint16):
    """Sources are lists of shards, shards are lists of documents' lengths; token k of a source is simply k."""
    described = []
    for name, shards in sources.items():
        place = folder / SHARD_FOLDER / name
        place.mkdir(parents=True)
        entries, row, token = [], 0, 0
        for n, lengths in enumerate(shards):
            total = sum(lengths)
            tokens = np.arange(token, token + total).astype(dtype)
            entries.append(
                write_shard(place / shard_name(n), tokens, np.array(lengths, np.int64), first_row=row, bad=0, about={})
            )
            row, token = row + len(lengths), token + total
        described.append(
            PreparedSource(
                name=name, spec="x", weight=1.0, max_epochs=None, max_tokens=None, data="", files=(("a", row),),
                shards=tuple(entries),
            )
        )  # fmt: skip
    PreparedManifest(
        tokenizer="t", vocab_size=1 << 16, dtype=np.dtype(dtype).name, bos_id=None, eos_id=None, pad_id=0, seq_len=seq_len,
        pack="best_fit", sources=tuple(described),
    ).write(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five sources: long and short documents, a tiny one, one with an empty shard and empty rows, one without any."""
    rng = np.random.default_rng(0)
    return write_folder(
        tmp_path_factory.mktemp("laws"),
        {
            "web": [rng.integers(0, 60, 40).tolist() for _ in range(3)],
            "books": [[700, 300], [1], [9000]],
            "tiny": [[30]],
            "gaps": [[0, 50, 0, 0, 20], [0, 0], [0, 70, 3]],
            "none": [],
        },
    )


WEIGHTS = {"web": 0.5, "books": 0.25, "tiny": 0.05, "gaps": 0.1, "none": 0.1}


def by_sample(batch):
    kept = frozen(batch)
    columns = [kept[name] for name in ("input_ids", "labels", "position_ids")]
    return {int(g): np.stack([c[i] for c in columns]) for i, g in enumerate(kept["sample_index"])}


@pytest.mark.parametrize("pack", ["best_fit", "concat"])
@pytest.mark.parametrize("exhausted", ["drop", "repeat", "stop_first"])
def test_resuming_at_every_step_into_a_fresh_loader_is_exact_and_the_state_is_small(folder, pack, exhausted):
    options = {"pack": pack, "exhausted": exhausted, "seed": 11, "weights": WEIGHTS}
    data = PreparedDataset(folder, **options)

    def make() -> PreparedLoader:
        return PreparedLoader(data, global_batch_size=12, prefetch_batches=0)

    def other(link: int) -> PreparedLoader:
        again = PreparedDataset(folder, **options) if link == 0 else data  # nothing may hang on the object
        return PreparedLoader(again, global_batch_size=12, prefetch_batches=(0, 2, 1)[link])

    report = assert_exact_resume(make, steps=10, tail=4, make_resumed=other)
    assert report.resumes >= (6 if exhausted == "stop_first" else 30)
    assert report.largest_state < 1024


@settings(max_examples=15)
@given(
    stops=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    worlds=st.lists(st.integers(1, 7), min_size=6, max_size=6),
    sizes=st.lists(st.integers(7, 20), min_size=6, max_size=6),
    pack=st.sampled_from(["best_fit", "concat"]),
)
def test_any_chain_of_world_sizes_and_batch_sizes_delivers_the_samples_of_one_rank(folder, stops, worlds, sizes, pack):
    data = PreparedDataset(folder, pack=pack, weights=WEIGHTS, seed=2)
    state, got = None, {}
    for link, (world, size) in enumerate(zip(worlds, sizes, strict=True)):
        ranks = [
            PreparedLoader(data, global_batch_size=size, dp_rank=r, dp_world_size=world, prefetch_batches=0)
            for r in range(world)
        ]
        counts = set()
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
            taken = 0
            while taken < (stops[link] if link < len(stops) else 10**9) and (batch := next(rank, None)) is not None:
                fresh = by_sample(batch)
                assert {g % world for g in fresh} == {rank.rank}
                assert not got.keys() & fresh.keys(), "no sample comes twice"
                got |= fresh
                taken += 1
            counts.add(taken)
        assert len(counts) == 1, "all ranks end at the same step"
        state = [r.state_dict() for r in ranks]
        if link >= len(stops):
            break
    assert sorted(got) == list(range(len(got))), "no sample is missing"
    whole = PreparedLoader(data, global_batch_size=1, prefetch_batches=0)
    straight = {}
    for batch in whole:
        straight |= by_sample(batch)
    assert len(straight) == len(data) <= len(got)
    assert all(np.array_equal(got[g], straight[g]) for g in straight)
    last = PreparedLoader(data, global_batch_size=1, prefetch_batches=0)
    last.load_state_dict(state)
    if len(got) == len(straight):  # else the last batch was filled up, and fillers count too
        assert last.digest == whole.digest


@given(order=st.permutations(range(40)), seed=st.integers(0, 2**63 - 1), pack=st.sampled_from(["best_fit", "concat"]))
@settings(max_examples=10)
def test_block_i_is_a_pure_function_of_i(folder, order, seed, pack):
    data = PreparedDataset(folder, pack=pack, seed=seed, weights=WEIGHTS, exhausted="repeat")
    jumbled = {i: data.block(i) for i in order}
    straight = PreparedLoader(
        PreparedDataset(folder, pack=pack, seed=seed, weights=WEIGHTS, exhausted="repeat"), global_batch_size=40, prefetch_batches=0
    )  # fmt: skip
    batch = next(straight)
    sources = [p.source for p in straight.pieces(batch) if p.column == 0]
    for i in range(40):
        assert np.array_equal(jumbled[i].arrays["input_ids"], batch["input_ids"][i])
        assert np.array_equal(jumbled[i].arrays["labels"], batch["labels"][i])
        assert jumbled[i].source == sources[i]


@settings(max_examples=40)
@given(
    shards=st.lists(st.lists(st.integers(0, 70), max_size=12), min_size=1, max_size=4).filter(
        lambda s: any(map(sum, s))
    ),
    seq_len=st.integers(2, 40),
    pack=st.sampled_from(["best_fit", "concat"]),
    dtype=st.sampled_from([np.uint16, np.uint32]),
    seed=st.integers(0, 99),
)
def test_every_token_of_every_document_is_delivered_once_an_epoch(tmp_path_factory, shards, seq_len, pack, dtype, seed):
    folder = write_folder(tmp_path_factory.mktemp("c"), {"a": shards}, seq_len=seq_len, dtype=dtype)
    loader = PreparedLoader(PreparedDataset(folder, pack=pack, seed=seed), global_batch_size=3, prefetch_batches=0)
    seen: Counter[int] = Counter()
    learned: Counter[int] = Counter()
    rows = 0
    for batch in loader:
        rows += int(batch["row_count"].sum())
        learned.update(batch["labels"][batch["labels"] >= 0].tolist())
        for piece in loader.pieces(batch):
            r = piece.sample_index - int(batch["sample_index"][0])
            seen.update(batch["input_ids"][r, piece.column : piece.column + piece.length].tolist())
    lengths = [n for shard in shards for n in shard]
    firsts = np.cumsum([0, *lengths])[:-1]
    assert seen == Counter(range(sum(lengths)))
    assert rows == sum(1 for n in lengths if n)
    begins = {int(f) for f, n in zip(firsts, lengths, strict=True) if n}
    assert learned == Counter(set(range(sum(lengths))) - begins), "every token but a document's first is learned once"


@given(lengths=st.lists(st.integers(0, 90), max_size=60), seq_len=st.integers(2, 50))
def test_packing_a_shard_cuts_only_documents_that_are_longer_than_a_block(lengths, seq_len):
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    packed = pack_shard(offsets, seq_len)
    sizes = np.abs(packed.piece_len)
    room = np.add.reduceat(sizes, packed.block_ptr[:-1]) if len(packed) else np.zeros(0)
    assert (room <= seq_len).all()
    covered = sorted(zip(packed.piece_at.tolist(), sizes.tolist(), strict=True))
    assert [at for at, _ in covered] == np.cumsum([0, *(n for _, n in covered)])[:-1].tolist()
    assert sum(n for _, n in covered) == offsets[-1]
    owners = Counter((np.searchsorted(offsets, packed.piece_at, side="right") - 1).tolist())
    assert all(count == -(-lengths[doc] // seq_len) for doc, count in owners.items())
    ends = {int(a + n) for a, n in zip(packed.piece_at, sizes, strict=True) if n and a + n in set(offsets[1:].tolist())}
    assert {int(a - n) for a, n in zip(packed.piece_at, packed.piece_len, strict=True) if n < 0} == ends


@settings(max_examples=20)
@given(weights=st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=30), far=st.integers(0, 10**12))
def test_at_every_sample_a_source_is_less_than_a_block_away_from_its_share(weights, far):
    schedule = Schedule(weights, limits=[None] * len(weights))
    shares = np.array(weights) / sum(weights)
    source, taken = schedule.at(np.arange(20_000))
    for i, share in enumerate(shares):
        drift = np.cumsum(source == i) - share * np.arange(1, 20_001)
        assert np.abs(drift).max() <= 1 - 1 / (2 * len(weights) - 2) + 20_000 / 2**20, "Tijdeman's bound, and rounding"
        assert (taken[source == i] == np.arange((source == i).sum())).all()
    # Anywhere, without what lies before: the next picks go on counting where `counts` says they stand.
    before = np.array(schedule.counts(far))
    assert before.sum() == far
    there, which = schedule.at(np.arange(far, far + 100))
    for i in range(len(weights)):
        mine = which[there == i]
        assert mine.tolist() == list(range(before[i], before[i] + len(mine)))


@settings(max_examples=25)
@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    limits=st.lists(st.integers(0, 50), min_size=6, max_size=6),
    stop_first=st.booleans(),
)
def test_finite_sources_give_all_their_blocks_once_and_the_end_is_known(weights, limits, stop_first):
    limits = limits[: len(weights)]
    schedule = Schedule(weights, limits=limits, stop_first=stop_first)
    total = schedule.total
    source, taken = schedule.at(np.arange(total + 5))
    counts = np.bincount(source[:total], minlength=len(weights)).tolist() if total else [0] * len(weights)
    assert (source[total:] == -1).all()
    assert (source[:total] >= 0).all()
    assert schedule.counts(total) == tuple(counts)
    if stop_first:
        assert not any(limits) or any(c == n for c, n in zip(counts, limits, strict=True))
    else:
        assert counts == limits
    assert schedule.reaches(total - 1) == (total > 0)
    assert not schedule.reaches(total)
    for i in range(len(weights)):
        assert taken[:total][source[:total] == i].tolist() == list(range(counts[i]))
