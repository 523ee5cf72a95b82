"""The order of labelled rows: every class served, every row in its turn, from any index."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.mix import BALANCES, Strata, held_out

labels = st.lists(st.integers(-3, 6), min_size=1, max_size=60).map(np.array)
keys = st.integers(0, 2**64 - 1)


@given(labels=labels, key=keys, balance=st.sampled_from(BALANCES), cuts=st.lists(st.integers(0, 150), max_size=6))
def test_rows_asked_for_in_any_pieces_are_those_of_one_request(labels, key, balance, cuts):
    whole = Strata(labels, key=key, balance=balance).rows(0, 150)
    plan = Strata(labels, key=key, balance=balance)
    borders = sorted({0, 150, *cuts})
    pieces = list(itertools.pairwise(borders))
    found = {
        a: plan.rows(a, b - a) for a, b in reversed(pieces)
    }  # the last first: nothing depends on what was asked before
    assert np.array_equal(np.concatenate([found[a] for a, _ in pieces]), whole)


@given(labels=labels, key=keys, rounds=st.integers(1, 20))
def test_every_round_of_equal_strata_holds_each_class_once(labels, key, rounds):
    plan = Strata(labels, key=key)
    classes = len(set(labels.tolist()))
    served = labels[plan.rows(0, rounds * classes)].reshape(rounds, classes)
    assert np.array_equal(np.sort(served, axis=1), np.broadcast_to(np.unique(labels), served.shape))


@given(labels=labels, key=keys)
def test_a_class_shows_all_its_rows_before_it_shows_one_again(labels, key):
    plan = Strata(labels, key=key)
    rows = plan.rows(0, 3 * len(labels) * len(plan.classes))
    for name in plan.classes.tolist():
        own = np.flatnonzero(labels == name)
        shown = rows[labels[rows] == name]
        for epoch in range(3):
            assert sorted(shown[epoch * len(own) : (epoch + 1) * len(own)].tolist()) == own.tolist()


@given(labels=labels, key=keys, epoch=st.integers(0, 5))
def test_an_epoch_of_natural_strata_holds_every_row_once(labels, key, epoch):
    rows = Strata(labels, key=key, balance="natural").rows(epoch * len(labels), len(labels))
    assert sorted(rows.tolist()) == list(range(len(labels)))


@given(labels=labels, key=keys, start=st.integers(0, 59), width=st.integers(1, 60))
def test_any_stretch_of_an_epoch_holds_each_class_about_as_often_as_its_share(labels, key, start, width):
    rows = Strata(labels, key=key, balance="natural").rows(0, len(labels))[start : start + width]
    counts, shown = Counter(labels.tolist()), Counter(labels[rows].tolist())
    for name, size in counts.items():
        share = size / len(labels)
        assert abs(shown[name] - share * len(rows)) <= 2 + 2 * len(counts) * share


def test_another_key_gives_another_order_and_the_same_key_the_same():
    labels = np.arange(1000) % 7
    one, again, other = (Strata(labels, key=k).rows(0, 500) for k in (1, 1, 2))
    assert np.array_equal(one, again)
    assert (one != other).mean() > 0.9


def test_labels_of_no_row_are_refused():
    with pytest.raises(ValueError, match=r"at least one row, got labels of shape \(0,\)"):
        Strata(np.empty(0, np.int64), key=1)


def test_a_class_comes_in_another_order_in_each_of_its_epochs():
    labels = np.zeros(100, np.int64)
    for balance in BALANCES:
        epochs = Strata(labels, key=1, balance=balance).rows(0, 300).reshape(3, 100)
        assert (epochs[0] != epochs[1]).any()
        assert (epochs[1] != epochs[2]).any()


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60), fraction=st.floats(0, 0.99), seed=st.integers(0, 2**64 - 1)
)  # fmt: skip
def test_a_share_of_every_class_is_held_out_and_something_of_each_is_left(labels, fraction, seed):
    kept = held_out(np.array(labels), fraction, key=seed)
    assert np.array_equal(kept, held_out(np.array(labels) * 7, fraction, key=seed)), (
        "what classes are called does not matter"
    )
    for name in set(labels):
        size = labels.count(name)
        many = int(kept[np.array(labels) == name].sum())
        assert many <= max(0, size - 1)
        assert many == 0 if not fraction or size == 1 else many >= 1
        assert abs(many - fraction * size) <= 1
