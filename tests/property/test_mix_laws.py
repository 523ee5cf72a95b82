"""Who is next: rows dealt exactly once, shares kept within a bound, by integers only."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.mix import Deal, LaneMix, fixed_point, lane_weight_factors, starting_credits

T = 128
weights = st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=12)


def rows_of(deal: Deal, lane: int, epoch: int, start: int, count: int) -> list[tuple[int, int]]:
    """(chunk, row in it) of the rows [start, start + count) of a lane's part."""
    spans = deal.spans(lane, epoch, start, count)
    return [pair for s in spans for pair in zip(s.chunks.tolist(), s.rows.tolist(), strict=True)]


@given(
    chunk_rows=st.lists(st.integers(0, 9), max_size=40),
    lanes=st.sampled_from([1, 2, 3, 7, 12, 48]),
    epoch=st.integers(0, 5),
    key=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
    together=st.integers(1, 50),
)
def test_every_row_goes_to_exactly_one_lane_in_every_epoch(chunk_rows, lanes, epoch, key, shuffle, together):
    deal = Deal(np.array(chunk_rows, np.int64), key=key, lanes=lanes, shuffle=shuffle, shuffle_chunks=together)
    seen = [row for lane in range(lanes) for row in rows_of(deal, lane, epoch, 0, deal.lane_rows(lane, epoch))]
    if not shuffle and epoch % lanes == 0:  # parts move on by one lane each epoch
        assert seen == sorted(seen)
    assert sorted(seen) == [(c, r) for c, n in enumerate(chunk_rows) for r in range(n)]


@given(
    chunk_rows=st.lists(st.integers(0, 9), min_size=1, max_size=60), lanes=st.sampled_from([1, 2, 3]), epoch=st.integers(0, 3),
    key=st.integers(0, 2**64 - 1), together=st.integers(1, 9), data=st.data(),
)  # fmt: skip
def test_reading_a_lane_from_the_middle_gives_the_rest_of_reading_it_whole(
    chunk_rows, lanes, epoch, key, together, data
):
    deal = Deal(np.array(chunk_rows, np.int64), key=key, lanes=lanes, shuffle_chunks=together)
    lane = data.draw(st.integers(0, lanes - 1))
    total = deal.lane_rows(lane, epoch)
    at = data.draw(st.integers(0, total))

    again = Deal(np.array(chunk_rows, np.int64), key=key, lanes=lanes, shuffle_chunks=together)
    assert rows_of(deal, lane, epoch, 0, total)[at:] == rows_of(again, lane, epoch, at, total)


@given(
    chunk_rows=st.lists(st.integers(0, 40) | st.sampled_from([17, 300, 4096, 4097, 9000]), min_size=1, max_size=30),
    lanes=st.sampled_from([1, 2, 3, 7, 48]), epoch=st.integers(0, 5), key=st.integers(0, 2**64 - 1), shuffle=st.booleans(),
    together=st.integers(1, 9), data=st.data(),
)  # fmt: skip
def test_a_part_reads_no_chunk_but_those_that_are_announced(chunk_rows, lanes, epoch, key, shuffle, together, data):
    deal = Deal(np.array(chunk_rows, np.int64), key=key, lanes=lanes, shuffle=shuffle, shuffle_chunks=together)
    lane = data.draw(st.integers(0, lanes - 1))
    total = deal.lane_rows(lane, epoch)
    at = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - at))
    rows, announced = rows_of(deal, lane, epoch, at, count), deal.chunks(lane, epoch, at, count)
    read = list(dict.fromkeys(chunk for chunk, _ in rows))
    assert len(rows) == count
    assert read == announced if together == 1 else set(read) <= set(announced)


@given(key=st.integers(0, 2**64 - 1), together=st.integers(2, 8))
def test_rows_that_follow_each_other_come_from_all_chunks_of_a_group(key, together):
    deal = Deal(np.full(together, 50), key=key, lanes=1, shuffle_chunks=together)
    # Half of the group: that a chunk is missing there by chance has a probability of 2**-47.
    drawn = [chunk for chunk, _ in rows_of(deal, 0, 0, 0, 25 * together)]
    assert set(drawn) == set(range(together))
    assert max(drawn.count(chunk) for chunk in set(drawn)) < 45


@given(key=st.integers(0, 2**64 - 1))
def test_chunks_and_the_rows_in_them_come_in_another_order_in_another_epoch(key):
    single, wide = Deal(np.ones(60, np.int64), key=key, lanes=1), Deal(np.array([60]), key=key, lanes=1)
    orders = [[chunk for chunk, _ in rows_of(single, 0, epoch, 0, 60)] for epoch in range(2)]
    rows = [wide.spans(0, epoch, 0, 60)[0].rows.tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    assert rows[0] != rows[1]
    assert rows[0] != orders[0]


@settings(max_examples=25)
@given(
    groups=st.integers(16, 40), lanes=st.sampled_from([1, 2, 3]), epoch=st.integers(0, 3), together=st.integers(1, 4)
)
def test_with_many_chunks_no_chunk_is_shared_by_two_lanes(groups, lanes, epoch, together):
    deal = Deal(np.full(groups * lanes * together, 5), key=9, lanes=lanes, shuffle_chunks=together)
    owners: dict[int, set[int]] = {}
    for lane in range(lanes):
        for chunk, _ in rows_of(deal, lane, epoch, 0, 10**9):
            owners.setdefault(chunk, set()).add(lane)
    assert all(len(o) == 1 for o in owners.values())


@settings(max_examples=30)
@given(rows=st.integers(1, 11), epochs=st.sampled_from([1, 5, 12, 24]))
def test_with_fewer_rows_than_lanes_the_owners_rotate(rows, epochs):
    lanes = 12
    deal = Deal(np.array([rows]), key=3, lanes=lanes)
    owned = deal.rows_owned(range(epochs))
    assert owned.sum() == rows * epochs
    if epochs % lanes == 0:
        assert owned.min() == owned.max() == rows * epochs // lanes
    assert np.isclose(lane_weight_factors(owned).mean(), 1.0)


@given(ws=weights)
def test_fixed_point_weights_sum_to_one_exactly_and_keep_every_source(ws):
    fixed = fixed_point(ws)
    assert sum(fixed) == 1 << 24
    assert all(f > 0 for f in fixed)
    total = sum(ws)
    assert all(abs(f / (1 << 24) - w / total) <= len(ws) / (1 << 24) for f, w in zip(fixed, ws, strict=True))


@settings(max_examples=40)
@given(ws=weights, lane=st.integers(0, 47), seed=st.integers(0, 9), fill=st.floats(0.7, 1.0))
def test_a_lane_never_drifts_by_more_than_the_stated_bound(ws, lane, seed, fill):
    fixed = fixed_point(ws)
    mix = LaneMix(fixed, starting_credits(fixed, block=T, lane=lane, lanes=48, seed=seed), block=T)
    share = np.array(fixed) / (1 << 24)
    delivered = np.zeros(len(ws))
    rng = np.random.default_rng(seed)
    for _ in range(300):
        source = mix.next_source()
        tokens = int(T * rng.uniform(fill, 1.0))
        mix.deliver(source, tokens)
        delivered[source] += tokens
        assert sum(mix.credits) == 0
        assert np.abs(delivered - share * delivered.sum()).max() <= 1.2 * T


def test_fifty_tiny_sources_beside_a_big_one_keep_their_shares():
    fixed = fixed_point([0.9] + [0.1 / 50] * 50)
    lanes = [LaneMix(fixed, starting_credits(fixed, block=T, lane=i, lanes=48, seed=1), block=T) for i in range(48)]
    delivered = np.zeros((48, 51))
    worst = 0.0
    for g in range(10_000):
        i = g % 48
        source = lanes[i].next_source()
        lanes[i].deliver(source, T)
        delivered[i, source] += 1
        worst = max(worst, float(np.abs(delivered[i] - np.array(fixed) / (1 << 24) * delivered[i].sum()).max()))
    error = np.abs(delivered.sum(0) / delivered.sum() - np.array(fixed) / (1 << 24)).max()
    assert worst <= 1.2
    assert error <= 0.0025


@given(ws=st.lists(st.floats(0.01, 1), min_size=2, max_size=6), steps=st.integers(0, 50), data=st.data())
def test_a_state_carried_to_a_fresh_lane_goes_on_the_same(ws, steps, data):
    fixed = fixed_point(ws)
    mix = LaneMix(fixed, starting_credits(fixed, block=T, lane=5, lanes=48, seed=2), block=T)
    for _ in range(steps):
        mix.deliver(mix.next_source(), T)
    gone = data.draw(st.integers(0, len(ws) - 1))
    rest = fixed_point([0.0 if i == gone else w for i, w in enumerate(ws)])
    mix.reweight(rest)
    assert sum(mix.credits) == 0
    fresh = LaneMix(rest, list(mix.credits), block=T)
    for _ in range(20):
        assert fresh.next_source() == mix.next_source() != gone
        mix.deliver(mix.next_source(), T)
        fresh.deliver(fresh.next_source(), T)


def test_a_lane_without_sources_has_no_next_one():
    assert LaneMix((0, 0), (0, 0), block=T).next_source() == -1


def test_batches_are_mixed_from_the_first_one_on():
    fixed = fixed_point([0.7, 0.3])
    lanes = [LaneMix(fixed, starting_credits(fixed, block=T, lane=i, lanes=48, seed=7), block=T) for i in range(48)]
    for step in range(40):
        shares = [0, 0]
        for g in range(step * 24, step * 24 + 24):
            source = lanes[g % 48].next_source()
            lanes[g % 48].deliver(source, T)
            shares[source] += 1
        assert abs(shares[0] / 24 - 0.7) < 0.1, f"step {step}: {shares}"


def test_lanes_stay_balanced_when_most_chunks_are_empty():
    rows = np.zeros(1000, np.int64)
    rows[:5] = 200
    deal = Deal(rows, rows * 100, key=1, lanes=48)
    owned = deal.rows_owned(range(1))
    assert owned.min() >= 19
    assert owned.max() <= 22
