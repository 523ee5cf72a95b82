"""Stream plans: every row once an epoch, the same order from any stop, nothing lost on another shape, by integers only."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, CursorMismatch
from headrace.mix import PICK_MODES, QUEUES, MixPlan, MixSettings, MixState, Slice, StreamTable, rank_share
from headrace.mix.queue import queue_order
from headrace.order import derive, key

modes = st.sampled_from(PICK_MODES)
queues = st.sampled_from(QUEUES)
seeds = st.integers(0, 2**32)


@st.composite
def tables(draw, max_streams: int = 12) -> StreamTable:
    rows = draw(st.lists(st.integers(0, 40), min_size=1, max_size=max_streams))
    kinds = draw(st.lists(st.sampled_from("abc"), min_size=len(rows), max_size=len(rows)))
    paths = sorted(f"{kind}/{i:03d}" for i, kind in enumerate(kinds))
    return StreamTable(paths=tuple(paths), rows=tuple(rows), modalities=tuple(p[0] for p in paths))


@st.composite
def setups(draw, max_streams: int = 12, **fixed):
    table = draw(tables(max_streams))
    chosen = {
        "slots": draw(st.sampled_from([1, 2, 2, 3, 3, 4, 5, 20, 40])),
        "queue": draw(queues),
        "pick_mode": draw(modes),
        "seed": draw(seeds),
        "batch_size": {kind: draw(st.integers(1, 9)) for kind in table.kinds},
    }
    if draw(st.booleans()):
        chosen |= {"batching_mode": "device_per_stream", "lanes": draw(st.sampled_from([1, 2, 4]))}
    else:
        chosen |= {"global_ranks": draw(st.integers(1, 3))}
    return table, MixSettings(**(chosen | fixed))


def epoch_draws(plan: MixPlan) -> list:
    drawn = []
    while not plan.over:
        drawn.append(plan.next())
    return drawn


def rows_of(draws) -> Counter:
    return Counter((d.stream, row) for d in draws for row in range(d.start, d.stop))


@given(setup=setups(batching_mode="per_stream", lanes=1))
def test_an_epoch_holds_every_row_exactly_once(setup):
    table, chosen = setup
    plan = MixPlan(table, chosen)
    for _ in range(3):
        drawn = epoch_draws(plan)
        assert rows_of(drawn) == Counter((s, r) for s, n in enumerate(table.rows) for r in range(n))
        assert len(drawn) == sum(plan.picks)
        assert sum(d.dry for d in drawn) == sum(n > 0 for n in table.rows)
        plan.next_epoch()


@given(setup=setups(), stops=st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_stopping_anywhere_and_going_on_in_a_fresh_plan_gives_the_order_of_the_plan_that_never_stopped(setup, stops):
    table, chosen = setup
    total = sum(stops) + 30
    straight = MixPlan(table, chosen)
    expected = draws_for(straight, total)
    plan, got = MixPlan(table, chosen), []
    for stop in stops:
        got += draws_for(plan, stop)
        body = json.loads(json.dumps(plan.to_body()))
        plan = MixPlan(table, chosen)
        plan.load_body(body)
        assert plan.to_body() == body, "saving right after loading gives the same state"
    got += draws_for(plan, total - len(got))
    assert [d[:5] for d in got] == [d[:5] for d in expected]
    assert plan.to_body() == straight.to_body()


def draws_for(plan: MixPlan, count: int) -> list:
    """So many draws, epochs one after the other; fewer if there are no rows at all."""
    drawn = []
    while len(drawn) < count and any(plan.picks):
        if plan.over:
            plan.next_epoch()
        drawn.append(plan.next())
    return drawn


@given(setup=setups(batching_mode="per_stream", lanes=1), slots=st.lists(st.integers(1, 20), min_size=1, max_size=4), stop=st.integers(0, 20))  # fmt: skip
def test_another_pool_size_in_mid_epoch_loses_no_row_and_repeats_none(setup, slots, stop):
    table, chosen = setup
    plan = MixPlan(table, chosen)
    drawn = []
    for size in slots:
        drawn += [plan.next() for _ in range(stop) if not plan.over]
        fields = {name: getattr(chosen, name) for name in ("batch_size", "seed", "queue", "pick_mode", "global_ranks")}
        other = MixPlan(table, MixSettings(slots=size, **fields))
        before = len(plan.lanes[0].state.slots)
        moved = other.load_body(plan.to_body())
        assert moved.parked == max(0, before - size)
        assert moved.dropped == 0
        plan = other
    drawn += epoch_draws(plan)
    assert rows_of(drawn) == Counter((s, r) for s, n in enumerate(table.rows) for r in range(n))


@given(setup=setups(batching_mode="device_per_stream"), others=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3), stop=st.integers(0, 40))  # fmt: skip
@settings(max_examples=60)
def test_another_number_of_lanes_loses_no_row_and_repeats_none_within_an_epoch(setup, others, stop):
    """Lanes stand in different epochs; whatever the lanes, a stream's rows come in order, epoch after epoch."""
    table, chosen = setup
    plan = MixPlan(table, chosen)
    drawn = draws_for(plan, stop)
    for lanes in others:
        fields = {name: getattr(chosen, name) for name in ("batch_size", "seed", "queue", "pick_mode", "slots")}
        other = MixPlan(table, MixSettings(batching_mode="device_per_stream", lanes=lanes, **fields))
        other.load_body(json.loads(json.dumps(plan.to_body())))
        plan = other
        drawn += draws_for(plan, stop)
    assert [d.index for d in drawn] == list(range(len(drawn)))
    for stream, rows in enumerate(table.rows):
        mine = [row for d in drawn if d.stream == stream for row in range(d.start, d.stop)]
        assert mine == list(itertools.islice(itertools.cycle(range(rows)), len(mine)))


@given(setup=setups(batching_mode="device_per_stream", lanes=4), world=st.sampled_from([1, 2, 4]), first=st.integers(0, 9), steps=st.integers(0, 9))  # fmt: skip
def test_ranks_deliver_the_draws_of_the_plan_and_agree_where_it_stands(setup, world, first, steps):
    table, chosen = setup
    whole = MixPlan(table, chosen)
    for _ in range(first):
        whole.next()
    ranks = [MixPlan(table, chosen) for _ in range(world)]
    for rank in ranks:
        rank.load_body(whole.to_body())
    got = [plan.next_step(r, world).draw for _ in range(steps) for r, plan in enumerate(ranks)]
    expected = [whole.next() for _ in range(steps * world)]
    assert sorted(d[:5] for d in got) == [d[:5] for d in expected]
    assert all(plan.to_body() == whole.to_body() for plan in ranks)


@given(start=st.integers(0, 99), rows=st.integers(0, 50), world=st.integers(1, 9))
def test_the_shares_of_the_ranks_tile_the_rows_of_a_pick(start, rows, world):
    shares = [rank_share(start, start + rows, r, world) for r in range(world)]
    assert [row for a, b in shares for row in range(a, b)] == list(range(start, start + rows))
    assert max(b - a for a, b in shares) - min(b - a for a, b in shares) <= 1


@given(table=tables(40), queue=queues, epoch=st.integers(0, 3), seed=seeds, band=st.integers(1, 9))
def test_a_queue_is_a_permutation_and_stratified_gives_every_stretch_its_share(table, queue, epoch, seed, band):
    streams = [s for s, n in enumerate(table.rows) if n]
    order = queue_order(
        streams, kinds=table.kind_of, picks=table.rows, queue=queue, key=key("t", seed=seed), epoch=epoch, band=band
    )
    assert sorted(order) == streams
    if queue == "stratified":
        counts = Counter(table.kind_of[s] for s in streams)
        for length in range(len(order)):
            seen = Counter(table.kind_of[s] for s in order[:length])
            for kind, count in counts.items():
                assert abs(seen[kind] - length * count / len(order)) <= len(counts) / 2 + 0.5
    if queue == "banded":
        sizes = sorted((table.rows[s] for s in streams), reverse=True)
        bands = [sorted(sizes[i : i + band], reverse=True) for i in range(0, len(sizes), band)]
        short = next((b for b in bands if len(b) < band), None)
        at, found = 0, []
        while at < len(order):
            piece = sorted((table.rows[s] for s in order[at : at + band]), reverse=True)
            if piece not in bands and short is not None:
                piece = sorted((table.rows[s] for s in order[at : at + len(short)]), reverse=True)
            found.append(piece)
            at += len(piece)
        assert sorted(found) == sorted(bands)


@given(setup=setups(pick_mode="weighted", batching_mode="per_stream", lanes=1), steps=st.integers(1, 30))
def test_a_weighted_pick_is_the_draw_of_its_step_over_the_picks_left(setup, steps):
    table, chosen = setup
    plan = MixPlan(table, chosen)
    pool = plan.lanes[0]
    for step in range(steps):
        if plan.over:
            break
        left = [one.remaining for one in pool.state.slots]
        target = derive(key("stream.pick", seed=chosen.seed, lane=0), step) % sum(left)
        expected = next(i for i in range(len(left)) if sum(left[: i + 1]) > target)
        stream = pool.state.slots[expected].stream
        assert plan.next().stream == stream


@given(setup=setups(pick_mode="proportional", batching_mode="per_stream", lanes=1))
def test_proportional_keeps_a_closed_pool_within_a_pick_of_even(setup):
    """Without refill, after any number of picks each slice has had its share of them to within one and a half."""
    table, chosen = setup
    fields = {name: getattr(chosen, name) for name in ("batch_size", "seed", "queue", "pick_mode", "global_ranks")}
    plan = MixPlan(table, MixSettings(slots=64, **fields))
    total = sum(plan.picks)
    had = Counter()
    for step in range(total):
        had[plan.next().stream] += 1
        for stream, picks in enumerate(plan.picks):
            assert abs(had[stream] - (step + 1) * picks / total) <= 1 + len(table) / 2


@given(setup=setups(), steps=st.integers(1, 60), asked=st.integers(1, 7))
def test_a_snapshot_says_what_the_slices_say(setup, steps, asked):
    table, chosen = setup
    plan = MixPlan(table, chosen)
    state = MixState(plan)
    last: dict[tuple[int, int, int], int] = {}

    def named(one: Slice) -> tuple[int, int, int]:
        return pool.lane, pool.state.epoch, one.stream

    for turn in range(steps):
        if not any(plan.picks):
            return
        pool = plan.lanes[plan.index % len(plan.lanes)]
        fresh = pool.state.step == 0 or (pool and pool.over)
        if fresh and pool.state.step:
            pool.next_epoch()
        step = pool.state.step
        for one in pool.state.slots:
            last.setdefault(named(one), step if fresh else step - 1)
        before = [
            (named(one), one.remaining, (one.end - one.position) / one.end, -(-one.end // one.per_pick))
            for one in pool.state.slots
        ]
        drawn = plan.next_step()
        state.add(drawn)
        if turn % asked == 0:
            state.to_body()  # the snapshot does not depend on it
        shot = state.snapshots().get(pool.lane)
        if not pool:
            assert (shot, drawn.draw.stream) == (None, -1)
            continue
        last |= {name: step for name, *_ in before if name[2] == drawn.draw.stream}
        assert shot is not None
        assert (shot.remaining_min, shot.remaining_max) == (min(b[1] for b in before), max(b[1] for b in before))
        fractions = [b[2] for b in before]
        assert (shot.fraction_min, shot.fraction_max) == (min(fractions), max(fractions))
        assert shot.since_max == step - min(last[b[0]] for b in before)
        weight = {"uniform": 1, "round_robin": 1, "sequential": 0}.get(chosen.pick_mode)
        weights = [b[3] if weight is None else weight for b in before]
        expected = max((step - last[b[0]]) * w for b, w in zip(before, weights, strict=True)) / (sum(weights) or 1)
        assert shot.overdue_max == pytest.approx(expected)
        kinds = Counter(table.kind_of[b[0][2]] for b in before)
        assert shot.kinds == tuple(kinds[k] for k in range(len(table.kinds)))


@given(setup=setups(), ahead=st.lists(st.integers(0, 9), min_size=1, max_size=20), asked=st.integers(1, 4))
def test_the_state_after_a_draw_is_that_of_a_plan_that_never_ran_ahead(setup, ahead, asked):
    plan, behind = MixPlan(*setup), MixPlan(*setup)
    if not any(plan.picks):
        return
    state, waiting, delivered = MixState(plan), [], 0
    for count in ahead:
        for _ in range(count):
            if plan.over:
                plan.next_epoch()
            waiting.append(plan.next_step())
        for _ in range(min(len(waiting), count)):
            state.add(waiting.pop(0))
            if behind.over:
                behind.next_epoch()
            behind.next()
            delivered += 1
            if delivered % asked == 0:
                assert state.to_body() == behind.to_body()
    assert state.to_body() == behind.to_body()
    assert sum(state.picks_by_kind) <= state.index == delivered
    again = MixPlan(*setup)
    again.load(state)
    for step in waiting:
        if again.over:
            again.next_epoch()
        drawn = again.next_step()
        assert drawn.draw[:5] == step.draw[:5]
        state.add(drawn)
    assert state.to_body() == plan.to_body() == again.to_body()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"draw": "x"}, "not one of a stream plan"),
        ({"lanes": []}, "not one of a stream plan"),
        ({"lanes": [{"epoch": 0, "queue_index": 99, "streams": [], "positions": []}]}, "place 99 in a queue of 2"),
        ({"lanes": [{"epoch": 0, "queue_index": 0, "streams": [7], "positions": [0], "entries": [0]}]}, "stream 7"),
        (
            {"lanes": [{"epoch": 0, "queue_index": 0, "streams": [0], "positions": [-1], "entries": [0]}]},
            "row -1 of a/0",
        ),
        (
            {"lanes": [{"epoch": 0, "queue_index": 0, "streams": [0], "positions": [], "entries": [0]}]},
            "do(es)? not fit",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, sentence):
    table = StreamTable(paths=("a/0", "a/1"), rows=(5, 5), modalities=("a", "a"))
    plan = MixPlan(table, MixSettings(batch_size={"a": 2}))
    with pytest.raises(CursorMismatch, match=sentence):
        plan.load_body(plan.to_body() | change)


def test_settings_say_everything_that_is_wrong_at_once():
    with pytest.raises(ConfigError) as caught:
        MixSettings(slots=0, queue="sorted", pick_mode="best", lanes=2, batch_size={"a": 0})  # ty: ignore
    assert len(caught.value.problems) == 5
