"""Order is arithmetic: bijections that invert, keys that never change, cursors that survive JSON."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CursorMismatch
from headrace.order import (
    Cursor,
    Digest,
    Permutation,
    content_hash,
    derive,
    draws,
    key,
    mix64,
    mix64_array,
    sample_term,
)

keys = st.integers(0, 2**64 - 1)


@given(n=st.integers(0, 3000) | st.integers(4090, 9000), k=keys)
def test_a_permutation_is_a_bijection_and_its_inverse_undoes_it(n, k):
    p = Permutation(n, k)
    items = p.slice(0, n)
    assert np.array_equal(np.sort(items), np.arange(n))
    assert np.array_equal(p.positions(items), np.arange(n))


@given(n=st.integers(1, 2**62), k=keys, data=st.data())
def test_one_item_of_a_huge_permutation_is_found_both_ways_without_the_others(n, k, data):
    p = Permutation(n, k)
    i = data.draw(st.integers(0, n - 1))
    assert 0 <= p[i] < n
    assert p.position(p[i]) == i
    assert p.take(np.array([i]))[0] == p[i]


@given(n=st.integers(2, 500), k=keys)
def test_another_key_gives_another_permutation_of_anything_but_the_smallest_sets(n, k):
    other = Permutation(n, derive(k, 1)).slice(0, n)
    if n > 20:
        assert not np.array_equal(Permutation(n, k).slice(0, n), other)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_orders_of_a_few_items_are_equally_likely(n):
    keys_tried = 12_000
    counts = Counter(tuple(Permutation(n, derive(1, k)).slice(0, n).tolist()) for k in range(keys_tried))
    orders = math.factorial(n)
    expected = keys_tried / orders
    assert len(counts) == orders
    chi_squared = sum((c - expected) ** 2 / expected for c in counts.values())
    assert chi_squared < orders - 1 + 5 * math.sqrt(2 * (orders - 1))


@pytest.mark.parametrize("n", [5_000, 100_000])
def test_a_large_permutation_spreads_neighbours(n):
    gaps = np.diff(Permutation(n, 5).slice(0, n)) / n
    assert abs(gaps.mean()) < 0.01
    assert abs(np.abs(gaps).mean() - 1 / 3) < 0.02  # two independent places are a third of the range apart


@given(k=keys, start=st.integers(0, 1000), count=st.integers(0, 200))
def test_draws_of_a_range_are_the_single_draws(k, start, count):
    assert draws(k, count, start).tolist() == [derive(k, i) for i in range(start, start + count)]


@given(values=st.lists(keys, max_size=50))
def test_the_array_mixer_is_the_scalar_mixer(values):
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(v) for v in values]


def test_keys_are_the_same_for_ever():
    # Changing any of these changes the order of every run ever saved.
    assert mix64(1) == 0x5692161D100B05E5
    assert key("shuffle", seed=7, epoch=3) == key("shuffle", epoch=3, seed=7)
    assert key("shuffle", seed=7) == PINNED["key"]
    assert Permutation(1000, 42).slice(0, 5).tolist() == PINNED["small"]
    assert Permutation(10**6, 42).slice(0, 5).tolist() == PINNED["large"]
    assert sample_term(3, content_hash(b"abc")) == PINNED["term"]


PINNED = {
    "key": 15556945061565968173,
    "small": [171, 215, 920, 808, 718],
    "large": [378656, 535703, 167793, 279710, 933862],
    "term": 266162759719798833187267419601166887619,
}


@given(terms=st.lists(st.tuples(st.integers(0, 2**40), st.binary(max_size=20)), max_size=30), ranks=st.integers(1, 5))
def test_a_digest_does_not_depend_on_who_delivered_what_in_which_order(terms, ranks):
    total = Digest()
    parts = [Digest() for _ in range(ranks)]
    for g, content in terms:
        total.add(sample_term(g, content_hash(content)))
    for i, (g, content) in enumerate(reversed(terms)):
        parts[i % ranks].add(sample_term(g, content_hash(content)))
    merged = Digest()
    for part in parts:
        merged = merged + Digest(str(part))
    assert merged == total


@given(a=st.binary(max_size=30), b=st.binary(max_size=30), g=st.integers(0, 2**40), h=st.integers(0, 2**40))
def test_a_digest_term_tells_contents_positions_and_borders_apart(a, b, g, h):
    if a != b:
        assert sample_term(g, content_hash(a)) != sample_term(g, content_hash(b))
    if g != h:
        assert sample_term(g, content_hash(a)) != sample_term(h, content_hash(a))
    if a:
        assert content_hash(a, b) != content_hash(a + b)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=8,
)


@given(
    kind=st.text(max_size=8), version=st.integers(0, 9), fingerprint=st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=4),
    body=st.dictionaries(st.text(max_size=6), json_values, max_size=4),
)  # fmt: skip
def test_a_cursor_survives_json(kind, version, fingerprint, body):
    cursor = Cursor(kind=kind, version=version, fingerprint=fingerprint, body=body)
    again = Cursor.from_json(cursor.to_json())
    assert again.to_dict() == cursor.to_dict()
    assert again.to_json() == cursor.to_json()
    assert json.loads(cursor.to_json()) == cursor.to_dict()


@given(
    saved=st.dictionaries(st.sampled_from(["data:a", "data:b", "tokenizer", "weights"]), st.sampled_from("xy")),
    now=st.dictionaries(st.sampled_from(["data:a", "data:b", "tokenizer", "weights"]), st.sampled_from("xy")),
    accept=st.sets(st.sampled_from(["data", "tokenizer", "weights"])),
)
def test_a_cursor_is_refused_exactly_for_what_differs_and_is_not_accepted(saved, now, accept):
    cursor = Cursor(kind="k", version=1, fingerprint=saved, body={})
    different = {n for n in saved.keys() | now.keys() if saved.get(n) != now.get(n)}
    refused = {n for n in different if n.split(":")[0] not in accept}
    if not refused:
        assert cursor.require(kind="k", version=1, fingerprint=now, accept=accept) == different
        return
    with pytest.raises(CursorMismatch) as caught:
        cursor.require(kind="k", version=1, fingerprint=now, accept=accept)
    assert set(caught.value.differences) == refused
    assert all(n in str(caught.value) for n in refused)
