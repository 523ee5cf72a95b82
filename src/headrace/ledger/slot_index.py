"""The index from a gid to its slot, compiled: open addressing with linear probing, at most half full.

`keys[slot]` is the gid of a slot, `table` holds slot + 1 (0: empty). A removal shifts back what was pushed over the hole, so there are no
tombstones and the index does not slow down with age.
"""

from __future__ import annotations

import numpy as np

from headrace.order import mix64
from headrace.runtime.compiled import kernel

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(n) for n in (27, 30, 31, 32))
_GIDS = "Array(int64, 1, 'A', readonly=True)"


@kernel("int64(int64, int64)", nogil=False, python=lambda gid, size: ((mix64(int(gid)) >> 32) * size) >> 32)
def _home(gid, size):
    """Where in a table of `size` a gid belongs: by the high half of `order.mix64`. A gid's rank follows from the low bits, so the gids of a rank
    do not crowd its table."""
    z = np.uint64(gid)
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    z = z ^ (z >> _S31)
    return np.int64(((z >> _S32) * np.uint64(size)) >> _S32)


@kernel(f"int64(int64[::1], int32[::1], {_GIDS}, int64[::1])")
def find_slots(keys, table, gids, slots):
    """The slot of each gid, -1 where there is none; returns how many there are."""
    size = len(table)
    found = 0
    for i in range(len(gids)):
        gid = gids[i]
        slots[i] = -1
        at = _home(gid, size)
        while table[at] != 0:
            if keys[table[at] - 1] == gid:
                slots[i] = table[at] - 1
                found += 1
                break
            at += 1
            if at == size:
                at = 0
    return found


@kernel(f"void(int64[::1], int32[::1], {_GIDS})")
def enter_slots(keys, table, slots):
    """Enter slots whose gids are not in the table."""
    size = len(table)
    for i in range(len(slots)):
        at = _home(keys[slots[i]], size)
        while table[at] != 0:
            at += 1
            if at == size:
                at = 0
        table[at] = slots[i] + 1


@kernel(f"void(int64[::1], int32[::1], {_GIDS})")
def remove_slots(keys, table, slots):
    """Remove slots that are in the table."""
    size = len(table)
    for i in range(len(slots)):
        hole = _home(keys[slots[i]], size)
        while table[hole] != slots[i] + 1:
            hole += 1
            if hole == size:
                hole = 0
        at = hole
        while True:
            at += 1
            if at == size:
                at = 0
            if table[at] == 0:
                break
            # An entry may move into the hole unless its home lies behind the hole, on the way round to the entry.
            from_home, from_hole = at - _home(keys[table[at] - 1], size), at - hole
            if from_home < 0:
                from_home += size
            if from_hole < 0:
                from_hole += size
            if from_home >= from_hole:
                table[hole] = table[at]
                hole = at
        table[hole] = 0


INDEX_KERNELS = (find_slots, enter_slots, remove_slots)
