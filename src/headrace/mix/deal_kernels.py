"""The rows of a lane's part, one after the other, compiled: what `Deal.spans` says, for a whole window in one call.

A window of 64 blocks of 2,048 tokens reads about ten chunks of 64 KiB. Chunk by chunk that was most of what Python did for a window, under
its lock: 20 us for the order of twenty rows. This is 30 us for all of them. `Deal.spans` stays the readable rule, and the judge in the tests.

Imported only through `headrace.loader.windows.deal_kernels()`, in the background.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

from headrace.compiled.orders import derived, feistel_item, fill_order
from headrace.order.permutation import TABLE

_I64, _U64 = nb.int64, nb.uint64
_A64, _R64 = nb.Array(nb.int64, 1, "C"), nb.Array(nb.int64, 1, "C", readonly=True)
_OPTIONS: Any = {"nogil": False, "cache": True, "error_model": "numpy", "boundscheck": False}


@njit(_I64(_R64, _R64, _R64, _U64, nb.boolean, _I64, _I64, _A64, _A64, _A64), **_OPTIONS)
def walk(order, ends, chunk_rows, key, shuffle, at, stop, chunks, rows, borders):
    """Rows [at, stop) of an epoch's sequence: the chunk of each, its row in it, and where in these the next chunk begins.

    `order`, `ends`: chunks in reading order, rows up to and including each. `key`: of the epoch's rows. How many chunks there
    were; `borders` has room for one more than rows, and ends with how many those are.
    """
    begun, seen = at, 0
    place = np.searchsorted(ends, at, side="right")
    room = 0
    draws, items = np.empty(0, np.uint64), np.empty(0, np.int64)
    while at < stop:
        chunk, end = order[place], ends[place]
        count = chunk_rows[chunk]
        place += 1
        if count == 0:
            continue
        first = end - count
        upto = min(stop, end)
        out = at - begun
        borders[seen] = out
        seen += 1
        own = derived(key, chunk)
        if shuffle and count <= TABLE:
            if count > room:
                room = max(2 * count, 256)
                draws, items = np.empty(room, np.uint64), np.empty(room, np.int64)
            fill_order(count, own, at - first, upto - first, draws, items)
        for i in range(at - first, upto - first):
            chunks[out] = chunk
            if not shuffle:
                rows[out] = i
            elif count <= TABLE:
                rows[out] = items[i]
            else:
                rows[out] = feistel_item(i, count, own)
            out += 1
        at = upto
    borders[seen] = at - begun
    return seen
