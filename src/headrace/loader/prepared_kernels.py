"""The compiled loops behind `headrace.loader.schedule` and the plan of `headrace.loader.prepared`; imported when they are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

from headrace.compiled.orders import mixed

_A64 = nb.Array(nb.int64, 1, "C")
_A32 = nb.Array(nb.int32, 1, "C")
_U64 = nb.Array(nb.uint64, 1, "C")
_U8 = nb.Array(nb.uint8, 1, "C")
_GOLDEN, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}


@njit(nb.void(_A64, _A32, _A32), **_OPTIONS)
def chairman(shares, pick, rank):
    """Fill one period: pick[t] is the source of turn t, rank[t] how often it was picked before. `shares` sum to the period.

    Tijdeman's rule for the chairman assignment problem, on integers. With S sources, owed = share·(t + 1) − period·picks: of
    the sources that are owed at least period/(2S − 2) the one whose deadline comes first, ties to the lower index.
    """
    period = len(pick)
    count = len(shares)
    parts = max(2 * count - 2, 1)
    picks = np.zeros(count, np.int64)
    for t in range(period):
        best = -1
        best_late = 0
        for i in range(count):
            owed = shares[i] * (t + 1) - period * picks[i]
            if owed * parts >= period:
                late = period * (parts - 1) - owed * parts  # over shares[i]: the turns that are left
                if best < 0 or late * shares[best] < best_late * shares[i]:
                    best, best_late = i, late
        pick[t] = best
        rank[t] = picks[best]
        picks[best] += 1


@njit(nb.void(_A64, _A64, _A64, _A64, _U64, _U64, _A64, _A64, _U64, _U64, _U8), **_OPTIONS)
def place(samples, source, through, first_block, sum_low, sum_high, shard, local, low, high, wanted):
    """Where the blocks `through`, counted through all shards, lie: shard and block of it, what each sample adds to the digest (as
    `sample_term(g, content)`: the content of a block is given by the checksum of its shard and its place in it), and which
    shards are wanted. Shard -1 for samples without a source, whose sums come last."""
    last = len(first_block) - 1
    for i in range(len(samples)):
        left, right = 0, last
        if source[i] < 0:
            left = last
        while right - left > 1:
            middle = (left + right) // 2
            if first_block[middle] <= through[i]:
                left = middle
            else:
                right = middle
        shard[i] = left if left < last else -1
        local[i] = through[i] - first_block[left]
        if left < last:
            wanted[left] = 1
        at = np.uint64(samples[i]) * _GOLDEN
        which = (np.uint64(local[i]) + _ONE) * _GOLDEN
        low[i] = mixed(mixed(sum_low[left] + which) + at)
        high[i] = mixed(mixed(sum_high[left] + which) ^ at)
