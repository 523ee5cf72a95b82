"""The compiled loop behind `headrace.loader.schedule`; imported through it only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

_A64 = nb.Array(nb.int64, 1, "C")
_A32 = nb.Array(nb.int32, 1, "C")
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
