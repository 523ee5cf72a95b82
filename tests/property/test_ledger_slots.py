"""Slots by gid are a dict in the order of appending, compiled or not."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ledger.slot_index import INDEX_KERNELS, _home
from headrace.ledger.slots import Slots
from headrace.runtime.compiled import wait_for_kernels

wait_for_kernels(*INDEX_KERNELS)

gids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=30, unique=True)
moves = st.lists(st.tuples(st.sampled_from(["add", "remove", "again", "forget"]), gids), max_size=30)


@pytest.mark.parametrize("compiled", [True, False])
@settings(max_examples=60)
@given(moves=moves)
def test_slots_are_a_dict_in_the_order_of_appending(interpreted, compiled, moves):
    with contextlib.nullcontext() if compiled else interpreted(_home, *INDEX_KERNELS):
        slots, model = Slots({"value": np.int64}), {}
        for number, (move, some) in enumerate(moves):
            known = np.array([g for g in some if g in model], np.int64)
            fresh = np.array([g for g in some if g not in model], np.int64)
            found, count = slots.find(np.array(some, np.int64))
            assert count == len(known)
            assert slots.keys[found[found >= 0]].tolist() == known.tolist()
            if move == "add":
                slots.make_room(len(fresh))
                taken = slots.take(fresh)
                slots.columns["value"][taken] = number
                slots.append(taken)
                model |= dict.fromkeys(fresh.tolist(), number)
            elif move == "remove":
                slots.remove(found[found >= 0])
                for gid in known.tolist():
                    del model[gid]
            elif move == "again":
                slots.append(found[found >= 0])
                for gid in known.tolist():
                    model[gid] = model.pop(gid)
            else:
                first = slots.first(len(some))
                assert slots.keys[first].tolist() == list(model)[: len(some)]
                slots.remove(first)
                model = dict(list(model.items())[len(first) :])
            assert slots.keys[slots.line()].tolist() == list(model)
            assert slots.columns["value"][slots.line()].tolist() == list(model.values())
            assert len(slots) == len(model)


@given(gid=st.integers(-(2**63), 2**63 - 1), size=st.integers(2, 2**31))
def test_the_compiled_place_of_a_gid_is_the_plain_one(gid, size):
    assert _home(gid, size) == _home.python(gid, size)
