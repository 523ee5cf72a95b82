"""The orders of `headrace.order`, inside a compiled loop.

    mixed(z)                              `order.mix64`
    derived(key, i)                       `order.derive`
    fill_order(n, key, a, b, …)           places [a, b) of `order.Permutation(n, key)`, of at most 4,096 items
    order_of(n, key)                      all items of `order.Permutation(n, key)`
    feistel_item(i, n, key)               the item at position i of one of more than 4,096

The same numbers (properties compare them): the readable forms take 20 us for twenty items, under Python's lock. Brings numba: import it in
modules of compiled loops only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

from headrace.order.permutation import ROUNDS, TABLE

__all__ = ["derived", "feistel_item", "fill_order", "mixed", "order_of"]

_I64, _U64 = nb.int64, nb.uint64
_A64, _V64 = nb.Array(nb.int64, 1, "C"), nb.Array(nb.uint64, 1, "C")
_OPTIONS: Any = {"nogil": False, "cache": True, "error_model": "numpy", "boundscheck": False}

_GOLDEN, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _S27, _S30, _S31 = (np.uint64(n) for n in (1, 27, 30, 31))
_SHORT = 16
"""Items that are sorted by insertion."""


@njit(_U64(_U64), **_OPTIONS)
def mixed(z):
    """`order.mix64`."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@njit(_U64(_U64, _I64), **_OPTIONS)
def derived(parent, index):
    """`order.derive`."""
    return mixed(parent + np.uint64(index + 1) * _GOLDEN)


@njit(nb.void(_V64, _A64, _I64, _I64, _I64), **_OPTIONS)
def _sort_part(draws, items, count, start, stop):
    """Sort the first `count` draws, and the items with them, as far as places [start, stop) need it. No two draws are equal."""
    lows, highs = np.empty(64, np.int64), np.empty(64, np.int64)
    lows[0], highs[0] = 0, count
    waiting = 1
    while waiting:
        waiting -= 1
        low, high = lows[waiting], highs[waiting]
        while high - low > _SHORT and low < stop and high > start:
            # The median of three, at the end: runs of any kind are cut in two.
            middle, last = (low + high) >> 1, high - 1
            if draws[middle] < draws[low]:
                draws[middle], draws[low] = draws[low], draws[middle]
                items[middle], items[low] = items[low], items[middle]
            if draws[last] < draws[low]:
                draws[last], draws[low] = draws[low], draws[last]
                items[last], items[low] = items[low], items[last]
            if draws[middle] < draws[last]:
                draws[middle], draws[last] = draws[last], draws[middle]
                items[middle], items[last] = items[last], items[middle]
            pivot, at = draws[last], low
            for i in range(low, last):
                if draws[i] < pivot:
                    draws[i], draws[at] = draws[at], draws[i]
                    items[i], items[at] = items[at], items[i]
                    at += 1
            draws[last], draws[at] = draws[at], draws[last]
            items[last], items[at] = items[at], items[last]
            # The shorter side first: the other waits, so that no more than 64 ever do.
            if at - low < high - at - 1:
                lows[waiting], highs[waiting] = at + 1, high
                high = at
            else:
                lows[waiting], highs[waiting] = low, at
                low = at + 1
            waiting += 1
        if low >= stop or high <= start:
            continue
        for i in range(low + 1, high):
            draw, item, at = draws[i], items[i], i
            while at > low and draws[at - 1] > draw:
                draws[at], items[at] = draws[at - 1], items[at - 1]
                at -= 1
            draws[at], items[at] = draw, item


@njit(nb.void(_I64, _U64, _I64, _I64, _V64, _A64), **_OPTIONS)
def fill_order(count, key, start, stop, draws, items):
    """The items at places [start, stop) of `order.Permutation(count, key)`, of at most 4,096 items, into those places of `items`; what else
    is in `items` and `draws` is scratch."""
    for i in range(count):
        draws[i] = derived(key, i)
        items[i] = i
    _sort_part(draws, items, count, start, stop)


@njit(_I64(_I64, _I64, _U64), **_OPTIONS)
def feistel_item(position, count, key):
    """The item at a position of `order.Permutation(count, key)`, of more than 4,096 items."""
    bits = 0
    while (np.uint64(count - 1) >> np.uint64(bits)) > np.uint64(0):
        bits += 1
    left_bits = bits // 2
    right_bits = bits - left_bits
    mask = (_ONE << np.uint64(right_bits)) - _ONE
    left_shift, right_shift, by = np.uint64(64 - left_bits), np.uint64(64 - right_bits), np.uint64(right_bits)
    x = np.uint64(position)
    while True:
        left, right = x >> by, x & mask
        for r in range(0, ROUNDS, 2):
            left ^= ((right ^ derived(key, 2 * r)) * (derived(key, 2 * r + 1) | _ONE)) >> left_shift
            right ^= ((left ^ derived(key, 2 * r + 2)) * (derived(key, 2 * r + 3) | _ONE)) >> right_shift
        x = (left << by) | right
        if x < np.uint64(count):
            return np.int64(x)


@njit(_A64(_I64, _U64), **_OPTIONS)
def order_of(count, key):
    """The items of `order.Permutation(count, key)`, from the first position to the last."""
    items = np.empty(count, np.int64)
    if count > TABLE:
        for i in range(count):
            items[i] = feistel_item(i, count, key)
        return items
    fill_order(count, key, 0, count, np.empty(count, np.uint64), items)
    return items
