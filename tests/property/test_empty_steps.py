"""A step in which no rank has anything to learn is not delivered: on any shape, from any state, at the same place."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loader import Loader, MixChange, TextDataset, merge_states
from headrace.loader.ends import StoreEnds
from headrace.order import Digest
from headrace.sources import Source

SEQ_LEN = 16
WORLDS = {2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 6: (1, 2, 3, 6)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    rng = np.random.default_rng(3)
    for name, rows, longest in (("web", 90, 60), ("few", 5, 200), ("tail", 30, 12)):
        texts = [f"{name} {i} " + "x" * int(rng.integers(0, longest)) for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


@pytest.fixture(scope="module")
def make_data(corpus):
    def make(*, weights=None, **options) -> TextDataset:
        weights = weights or {"web": 0.6, "few": 0.2, "tail": 0.2}
        sources = [Source(f"jsonl:{corpus}/{n}.jsonl", weight=w, name=n) for n, w in weights.items()]
        data = TextDataset(
            sources, seq_len=SEQ_LEN, seed=7, window_blocks=2, cache=corpus / "cache", **({"lanes": 12} | options)
        )
        kept, fresh = {}, data.make_window

        def make_once(key, carry):
            if key not in kept:
                kept[key] = fresh(key, None)[0]
            return kept[key], None

        data.make_window = make_once
        return data

    return make


def load(data, world, state=None, *, batch, **options) -> list[Loader]:
    ranks = [
        Loader(data, global_batch_size=batch, dp_rank=r, dp_world_size=world, tokenizer_workers=0, **({"prefetch_batches": 0, "segment_ids": True} | options))
        for r in range(world)
    ]  # fmt: skip
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def rows(batch) -> dict[int, bytes]:
    return {
        int(g): batch["input_ids"][i].numpy().tobytes() + batch["labels"][i].numpy().tobytes()
        for i, g in enumerate(batch["sample_index"].tolist())
    }


def tokens(batch) -> int:
    """How many, padding aside. The one token of a document may have no label, and still makes a step that exists."""
    return int((batch["segment_ids"] != 0).sum())


def step(ranks) -> tuple[dict[int, bytes], int] | None:
    """The rows of all ranks at one step, and how many tokens they hold; None at the end."""
    batches = [next(rank, None) for rank in ranks]
    assert len({batch is None for batch in batches}) == 1, "all ranks end at the same step"
    if batches[0] is None:
        return None
    assert len({rank.step for rank in ranks}) == 1
    merged: dict[int, bytes] = {}
    for batch in batches:
        merged |= rows(batch)
    return merged, sum(map(tokens, batches))


CHANGES = (MixChange(7, {"web": 0.0, "tail": 1.0}), MixChange(60, {"web": 1.0, "tail": 0.0}))
SETTINGS = [
    ({}, (), 4),
    ({}, (), 6),
    ({"exhausted": "stop_first"}, (), 3),
    ({"pack": "concat"}, (), 2),
    ({"mix_changes": CHANGES}, (), 4),
    ({"mix_changes": CHANGES}, ((5, 8), (50, 58), (70, 71)), 2),
    ({"weights": {"web": 0.0, "few": 0.0, "tail": 1.0}, "mix_changes": (MixChange(30, {"web": 1.0}),)}, ((12, 13),), 4),
]


@pytest.mark.parametrize(("options", "skip", "batch"), SETTINGS, ids=str)
def test_only_empty_steps_are_missing_and_on_every_shape_and_after_a_resume_at_any_step_the_same_ones(
    make_data, options, skip, batch
):
    data = make_data(**options)
    (straight,) = load(data, 1, batch=batch, skip=skip)
    order, states, steps = [], [straight.state_dict()], []
    while (got := step([straight])) is not None:
        assert got[1], f"step {straight.step} holds nothing but padding"
        assert {g // batch + 1 for g in got[0]} == {straight.step}, "the number of a step follows from its samples"
        order.append(got[0])
        steps.append(straight.step)
        states.append(straight.state_dict())
        assert straight.delivered_steps == len(order)
    left_out = {n for a, b in skip for n in range(a, b)} & set(range(1, steps[-1] + 1))
    assert straight.empty_steps == steps[-1] - len(order) - len(left_out) > 0, "this setting has no empty step"
    assert not left_out & set(steps)
    for world in WORLDS[batch]:
        ranks = load(data, world, batch=batch, skip=skip)
        for k in range(len(states)):
            if k:
                got = step(ranks)
                assert got is not None
                assert got[0] == order[k - 1]
            merged = merge_states([r.state_dict() for r in ranks])
            assert merged == states[k], f"after {k} steps of {world} ranks"
            if k % 3 == 0 or k > len(states) - 8:
                resumed = load(data, WORLDS[batch][k % len(WORLDS[batch])], merged, batch=batch, skip=skip)
                for n in range(k, min(k + 2, len(order))):
                    again = step(resumed)
                    assert again is not None
                    assert again[0] == order[n]
                if k + 2 > len(order):
                    assert step(resumed) is None
        assert step(ranks) is None


@settings(max_examples=25)
@given(
    lanes=st.sampled_from([1, 4, 12, 48]),
    batch=st.sampled_from([1, 2, 3, 8]),
    documents=st.integers(1, 40),
    prefetch=st.sampled_from([0, 2]),
)
def test_one_rank_never_gets_a_batch_of_fillers_and_gets_every_document(corpus, lanes, batch, documents, prefetch):
    data = TextDataset(
        [Source(f"jsonl:{corpus}/web.jsonl", max_rows=documents)], seq_len=SEQ_LEN, seed=1, lanes=lanes, window_blocks=2,
        cache=corpus / "cache",
    )  # fmt: skip
    with Loader(data, global_batch_size=batch, tokenizer_workers=0, prefetch_batches=prefetch) as loader:
        for number in range(2):  # two passes
            delivered, found, total = 0, set(), Digest()
            for got in loader:
                pieces = loader.pieces(got)
                assert pieces, "a batch of fillers"
                found |= {(p.row, p.start) for p in pieces}
                delivered += int(got["row_count"].sum())
                total.add(int(loader.step_digest, 16))
            assert delivered == documents
            assert len({row for row, _ in found}) == documents
            if number == 0:
                assert str(total) == loader.digest, "steps that were passed over add nothing"
        counts = loader.state_dict()["body"]["delivered"]
        assert counts["samples"] * SEQ_LEN == counts["tokens"] + counts["padding"]
        assert counts["samples"] == loader.delivered_steps * batch


def test_a_state_without_a_count_of_empty_steps_continues(make_data):
    """As earlier versions saved it, which delivered them: what they trained on is counted as delivered."""
    data = make_data()
    (straight,) = load(data, 1, batch=4)
    states = []
    while step([straight]) is not None:
        states.append(straight.state_dict())
    late = next(s for s in states if s["body"].get("empty_steps", 0) > 2)
    old = json.loads(json.dumps(late))
    del old["body"]["empty_steps"]
    (one,), (other,) = load(data, 1, late, batch=4), load(data, 1, old, batch=4)
    while (got := step([one])) is not None:
        assert step([other]) == got
    assert step([other]) is None
    assert other.delivered_steps == one.delivered_steps + late["body"]["empty_steps"]


class GroupLoader(Loader):
    """A rank whose process group is a store in this process."""

    def __init__(self, *args, store, **options) -> None:
        super().__init__(*args, **options)
        plan = self.plan

        def new_ends(lanes, changes):
            name = f"ends/{plan.state.number}/{plan.origin}"
            return StoreEnds(store, name, self.rank, self.world_size, self.meter)

        plan.new_ends = new_ends


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("options", "skip", "batch"), [SETTINGS[0], SETTINGS[4], SETTINGS[5]], ids=str)
def test_ranks_that_agree_through_a_store_deliver_the_steps_of_one_rank(make_data, options, skip, batch, world):
    if world not in WORLDS[batch]:
        pytest.skip("the batch cannot be shared by so many ranks")
    data = make_data(**options)
    (straight,) = load(data, 1, batch=batch, skip=skip)
    expected = []
    while (got := step([straight])) is not None:
        expected.append((straight.step, got[0]))
    for start in (0, len(expected) // 2, len(expected) - 3):
        state = None
        if start:
            (before,) = load(data, 1, batch=batch, skip=skip)
            for _ in range(start):
                next(before)
            state = before.state_dict()
        store = torch.distributed.HashStore()
        ranks = [
            GroupLoader(
                data, global_batch_size=batch, dp_rank=r, dp_world_size=world, tokenizer_workers=0, prefetch_batches=r % 3, skip=skip, store=store,
            )
            for r in range(world)
        ]  # fmt: skip
        found: list[list] = [[] for _ in ranks]

        def take(rank: Loader, got: list) -> None:
            got.extend((rank.step, rows(batch)) for batch in rank)

        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        threads = [threading.Thread(target=take, args=(r, f)) for r, f in zip(ranks, found, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len({len(f) for f in found}) == 1
        merged = [(shares[0][0], {g: r for _, share in shares for g, r in share.items()}) for shares in zip(*found, strict=True)]  # fmt: skip
        assert merged == expected[start:]
        assert merge_states([r.state_dict() for r in ranks])["body"]["empty_steps"] == straight.empty_steps
