"""Stopped anywhere and resumed on any shape, five times in a chain, a run delivers what it would have delivered.

More than 2,000 resumes: shapes are simulated in one process, and windows (pure functions of their first row, as other
tests show) are made once and kept, so that a resume costs a millisecond.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.loader import Loader, MixChange, TextDataset, merge_states
from headrace.mix import LaneMix, fixed_point, starting_credits
from headrace.sources import Source

LANES, BATCH = 12, 12
CHAINS = (
    # world size, tokenizer threads, prefetched batches
    ((1, 0, 0), (2, 1, 2), (4, 2, 1), (1, 4, 2), (2, 0, 0)),
    ((4, 0, 2), (1, 2, 0), (3, 1, 1), (12, 0, 0), (1, 1, 1)),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Five sources: long and short documents, one that is dry early, one with an empty shard, one of a single row."""
    folder = tmp_path_factory.mktemp("shapes")
    rng = np.random.default_rng(1)
    shapes = {"web": (400, 60), "books": (30, 500), "early": (9, 25), "holey": (80, 40), "one": (1, 30)}
    for name, (rows, mean) in shapes.items():
        for shard in range(2):
            lines = [
                json.dumps({"text": f"{name} {i} " + "x" * int(rng.integers(0, 2 * mean))})
                for i in range(shard, rows, 2)
                if name != "holey" or shard == 0
            ]
            (folder / f"{name}-{shard}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def make_data(corpus):
    def make(**options) -> TextDataset:
        weights = {"web": 0.5, "books": 0.2, "early": 0.1, "holey": 0.15, "one": 0.05}
        sources = [Source(f"jsonl:{corpus}/{n}-*.jsonl", weight=w, name=n) for n, w in weights.items()]
        data = TextDataset(
            sources, seq_len=48, seed=11, lanes=LANES, window_blocks=3, cache=corpus / "cache", **options
        )
        kept = {}
        fresh = data.make_window

        def make_once(key, carry):
            if key not in kept:
                kept[key] = fresh(key, None)[0]
            return kept[key], None

        data.make_window = make_once
        return data

    return make


def load(data: TextDataset, shape: tuple[int, int, int], state, skip=()) -> list[Loader]:
    world, threads, prefetch = shape
    ranks = [
        Loader(
            data, global_batch_size=BATCH, dp_rank=r, dp_world_size=world, tokenizer_workers=threads,
            prefetch_batches=prefetch, skip=skip,
        )
        for r in range(world)
    ]  # fmt: skip
    if state is not None:
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(state)))
    return ranks


def step(ranks: list[Loader]) -> dict[int, bytes] | None:
    """One step of all ranks, by sample; None at the end."""
    got: dict[int, bytes] = {}
    ended = []
    for rank in ranks:
        batch = next(rank, None)
        ended.append(batch is None)
        if batch is not None:
            rows = torch_rows(batch)
            assert not got.keys() & rows.keys()
            got |= rows
    assert len(set(ended)) == 1, "all ranks end at the same step"
    return None if ended[0] else got


def torch_rows(batch) -> dict[int, bytes]:
    return {
        int(g): batch["input_ids"][i].numpy().tobytes() + batch["labels"][i].numpy().tobytes()
        for i, g in enumerate(batch["sample_index"].tolist())
    }


CHANGES = (
    MixChange(10, {"web": 0.0, "early": 0.4}),
    MixChange(11, {"web": 0.3, "books": 0.0}),
    MixChange(31, {"books": 0.6, "one": 0.0}),
)


@pytest.mark.parametrize(
    ("options", "skip", "steps"),
    [
        ({}, (), 70),
        ({"pack": "concat", "exhausted": "repeat"}, (), 36),
        ({"mix_changes": CHANGES, "exhausted": "repeat"}, (), 40),
        ({"mix_changes": CHANGES}, ((4, 6), (21, 22), (29, 34)), 44),
    ],
    ids=["best_fit to the end", "concat for ever", "weights change", "weights change and steps are skipped"],
)
def test_a_chain_of_five_resumes_on_other_shapes_from_every_step_delivers_the_order_of_one_run(
    make_data, options, skip, steps
):
    data = make_data(**options)
    (straight,) = load(data, (1, 0, 0), None, skip)
    order, states = [], [straight.state_dict()]
    while len(order) < steps and (got := step([straight])) is not None:
        order.append(got)
        states.append(straight.state_dict())
    resumes = 0
    for k in range(len(states)):
        state, at, chain = states[k], k, CHAINS[k % 2]
        for link, shape in enumerate(chain):
            ranks = load(data, shape, state, skip)
            resumes += len(ranks)
            for _ in range(1 + (k + link) % 2):
                got = step(ranks)
                if got is None:
                    assert at == len(order) < steps
                    break
                if at < len(order):
                    assert got == order[at], f"step {at} after {link + 1} resumes from step {k}"
                at += 1
            state = merge_states([r.state_dict() for r in ranks])
            for rank in ranks:
                rank.close()
            if at >= len(order):
                break
        if at < len(states):
            assert state == states[at], "a state does not tell on which shape it was saved"
    assert resumes >= 500  # of this case alone


def test_skipped_steps_move_on_what_is_delivered_and_nothing_else(make_data):
    data = make_data(exhausted="repeat")
    (straight,) = load(data, (1, 0, 0), None)
    order = [step([straight]) for _ in range(12)]
    (skipping,) = load(data, (1, 0, 0), None, skip=((3, 6), (8, 9)))
    got = [step([skipping]) for _ in range(8)]
    assert got == order[:2] + order[5:7] + order[8:12]
    assert skipping.skipped == [[3, 6], [8, 9]]
    assert (skipping.step, skipping.skipped_steps) == (12, 4)
    assert skipping.state_dict()["body"]["delivered"]["skipped"] == 4 * BATCH


def test_a_change_of_weights_shows_from_its_step_on_and_leaves_the_steps_before_alone(make_data):
    plain, changed = (
        make_data(exhausted="repeat"),
        make_data(exhausted="repeat", mix_changes=(MixChange(21, {"web": 4.0}),)),
    )
    (a,), (b,) = load(plain, (1, 0, 0), None), load(changed, (1, 0, 0), None)
    for n in range(20):
        assert step([a]) == step([b]), f"step {n}"
    before = list(b.state_dict()["body"]["source_tokens"])
    for _ in range(100):
        step([b])
    tokens = np.subtract(b.state_dict()["body"]["source_tokens"], before)
    target = np.array([4.0, 0.2, 0.1, 0.15, 0.05]) / 4.5
    assert np.abs(tokens / tokens.sum() - target).max() < 0.01


def test_the_past_of_the_weights_is_part_of_the_cursor_and_their_future_is_not(make_data):
    data = make_data(mix_changes=(MixChange(6, {"web": 0.9}),), exhausted="repeat")
    other = make_data(mix_changes=(MixChange(6, {"web": 0.8}),), exhausted="repeat")
    (loader,) = load(data, (1, 0, 0), None)
    states = []
    for _ in range(8):
        states.append(loader.state_dict())
        step([loader])
    load(other, (1, 0, 0), states[5])  # not made yet: may still be changed
    with pytest.raises(Exception, match=r"weights.*from step 6 on: web 0\.9"):
        load(other, (1, 0, 0), states[6])


@pytest.mark.parametrize(
    "raw",
    [[0.7, 0.3], [0.9] + [0.1 / 50] * 50, [2.0**-i for i in range(12)], [1.0] * 7, [0.999, 0.001]],
    ids=["two", "fifty tiny beside a big one", "powers of two", "equal", "one in a thousand"],
)
def test_shares_are_within_the_stated_bounds_after_10_000_and_100_000_samples(raw):
    """Blocks of very unequal filling: a source of long documents fills its blocks, one of odd lengths three quarters."""
    lanes, width = 48, 2048
    weights = fixed_point(raw)
    share = np.array(weights) / (1 << 24)
    mixes = [
        LaneMix(weights, starting_credits(weights, block=width, lane=lane, lanes=lanes, seed=3), block=width)
        for lane in range(lanes)
    ]
    rng = np.random.default_rng(0)
    filling = (width * rng.uniform(0.75, 1.0, 4096)).astype(np.int64)
    full = np.arange(len(raw)) % 2 == 0
    delivered = np.zeros((lanes, len(raw)))
    for g in range(100_000):
        source = mixes[g % lanes].next_source()
        tokens = width if full[source] else int(filling[g % 4096])
        mixes[g % lanes].deliver(source, tokens)
        delivered[g % lanes, source] += tokens
        if g + 1 in (1_000, 10_000, 100_000):
            totals = delivered.sum(0)
            error = np.abs(totals / totals.sum() - share).max()
            drift = np.abs(delivered - share * delivered.sum(1, keepdims=True)).max() / width
            assert drift <= 1.2
            assert error <= {1_000: 0.02, 10_000: 0.0025, 100_000: 0.0005}[g + 1]
