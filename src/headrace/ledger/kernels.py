"""The loops over groups that numpy cannot express, compiled: an index by gid, and lists that run through its slots.

A `Places` (places.py) is six arrays. `keys[slot]` is the gid, `table` finds the slot of a gid (open addressing, linear probing, half
full at most, removal by shifting back: no tombstones, so it never slows down with age), and `before` / `after` chain each slot
into one of three lists whose ends are in `ends`:

    LINE      oldest first: what is evicted next stands at its head
    PENDING   touched in the step under way, in any order; joins the end of LINE, by gid, when the step is over
    FREE      slots that were given back

A slot is found, refreshed, evicted and given back in constant time; nothing ever walks over what it leaves alone, but for slots
that are protected. Importing this compiles, or loads from numba's cache: only `places.loops()` does it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

HEAD, TAIL, FREE, COUNT, USED, PENDING, PENDING_TAIL, PENDING_COUNT = range(8)
"""Places in `ends`. USED: slots below it were handed out at least once."""

_I64, _I32 = nb.int64, nb.int32
_A64, _A32, _A8 = nb.Array(nb.int64, 1, "C"), nb.Array(nb.int32, 1, "C"), nb.Array(nb.uint8, 1, "C")
_R64 = nb.Array(nb.int64, 1, "A", readonly=True)
_R32 = nb.Array(nb.int32, 1, "A", readonly=True)
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_PLACES = (_A64, _A32, _A32, _A32, _A64)
"""keys, table, before, after, ends."""


# ------------------------------------------------------------------------------------------------ index


@njit(**_OPTIONS)
def _home(gid, size):
    """Where in a table of `size` a gid belongs: the high half of mix64, scaled. Buckets are the low bits, so they do not crowd it."""
    z = np.uint64(gid)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.int64(((z >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32))


@njit(**_OPTIONS)
def _find(keys, table, gid):
    at = _home(gid, len(table))
    while table[at] >= 0:
        if keys[table[at]] == gid:
            return at
        at += 1
        if at == len(table):
            at = 0
    return -1


@njit(**_OPTIONS)
def _enter(keys, table, slot):
    at = _home(keys[slot], len(table))
    while table[at] >= 0:
        at += 1
        if at == len(table):
            at = 0
    table[at] = slot


@njit(**_OPTIONS)
def _leave(keys, table, gid):
    size = len(table)
    hole = _find(keys, table, gid)
    at = hole
    while True:
        at += 1
        if at == size:
            at = 0
        if table[at] < 0:
            break
        home = _home(keys[table[at]], size)
        stays = (hole < home <= at) if hole <= at else (hole < home or home <= at)
        if not stays:
            table[hole] = table[at]
            hole = at
    table[hole] = -1


# ------------------------------------------------------------------------------------------------ lists


@njit(**_OPTIONS)
def _append(before, after, ends, slot, head):
    tail = ends[head + 1]
    before[slot] = tail
    after[slot] = -1
    if tail >= 0:
        after[tail] = slot
    else:
        ends[head] = slot
    ends[head + 1] = slot


@njit(**_OPTIONS)
def _unlink(before, after, ends, slot, head):
    b, a = before[slot], after[slot]
    if b >= 0:
        after[b] = a
    else:
        ends[head] = a
    if a >= 0:
        before[a] = b
    else:
        ends[head + 1] = b


@njit(**_OPTIONS)
def _take(after, ends):
    slot = ends[FREE]
    if slot >= 0:
        ends[FREE] = after[slot]
    else:
        slot = ends[USED]
        ends[USED] += 1
    ends[COUNT] += 1
    return slot


@njit(**_OPTIONS)
def _give_back(keys, table, before, after, ends, slot):
    """Of a slot of LINE: out of the index and the list."""
    _leave(keys, table, keys[slot])
    _unlink(before, after, ends, slot, HEAD)
    after[slot] = ends[FREE]
    ends[FREE] = slot
    ends[COUNT] -= 1


# ------------------------------------------------------------------------------------------ whole batches


@njit(nb.void(_A64, _A32, _A64), **_OPTIONS)
def reindex(keys, table, slots):
    """Fill an empty table with these slots."""
    for i in range(len(slots)):
        _enter(keys, table, slots[i])


@njit(_I64(_A64, _A32, _R64, _A64), **_OPTIONS)
def find_slots(keys, table, gids, slots):
    """The slot of each gid, -1 where there is none; how many there are."""
    found = 0
    for i in range(len(gids)):
        at = _find(keys, table, gids[i])
        slots[i] = table[at] if at >= 0 else -1
        found += at >= 0
    return found


@njit(_I64(*_PLACES, _A32, _R64, _I64), **_OPTIONS)
def refresh(keys, table, before, after, ends, last, slots, step):
    """Slots that were stored again go to PENDING; how many were there already, and so are in conflict."""
    conflicts = 0
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0:
            continue
        if last[slot] == step:
            conflicts += 1
            continue
        _unlink(before, after, ends, slot, HEAD)
        last[slot] = step
        _append(before, after, ends, slot, PENDING)
        ends[PENDING_COUNT] += 1
    return conflicts


@njit(nb.void(*_PLACES, _A32, _R64, _A64, _I64), **_OPTIONS)
def admit(keys, table, before, after, ends, last, gids, slots, step):
    """Give each new gid a slot, in PENDING. There is room, and none of them is known."""
    for i in range(len(gids)):
        slot = _take(after, ends)
        keys[slot] = gids[i]
        last[slot] = step
        _enter(keys, table, slot)
        _append(before, after, ends, slot, PENDING)
        ends[PENDING_COUNT] += 1
        slots[i] = slot


@njit(_I64(_A32, _A64, _A64, _I64), **_OPTIONS)
def walk(after, ends, slots, head):
    """The slots of a list, in its order; how many."""
    n = 0
    slot = ends[head]
    while slot >= 0:
        slots[n] = slot
        n += 1
        slot = after[slot]
    return n


@njit(nb.void(_A32, _A32, _A64, _R64), **_OPTIONS)
def close_step(before, after, ends, slots):
    """What was pending joins the end of LINE, in this order."""
    ends[PENDING] = -1
    ends[PENDING_TAIL] = -1
    ends[PENDING_COUNT] = 0
    for i in range(len(slots)):
        _append(before, after, ends, slots[i], HEAD)


@njit(**_OPTIONS)
def _is_active(stream, active):
    low, high = 0, len(active)
    while low < high:
        middle = (low + high) // 2
        if active[middle] < stream:
            low = middle + 1
        else:
            high = middle
    return low < len(active) and active[low] == stream


@njit(_I64(*_PLACES, _A32, _A32, _R64, _I64, _I64, _A64), **_OPTIONS)
def evict(keys, table, before, after, ends, last, stream, active, cutoff, limit, slots):
    """Give back the oldest slots with last < cutoff whose stream is not active, at most `limit`; which, in that order."""
    n = 0
    slot = ends[HEAD]
    while slot >= 0 and n < limit and last[slot] < cutoff:
        following = after[slot]
        if not _is_active(stream[slot], active):
            _give_back(keys, table, before, after, ends, slot)
            slots[n] = slot
            n += 1
        slot = following
    return n


# ---------------------------------------------------------------------------------------------- ghosts


@njit(_I64(*_PLACES, _A32, _A32, _A32, _A8, _R64, _R32, _R32, _I64, _I64, _I64), **_OPTIONS)
def remember(
    keys, table, before, after, ends, when, stream, epoch, mode, gids, streams, epochs, as_mode, step, capacity
):
    """Make ghosts of evicted gids; how many older ones had to be dropped for them. The arrays hold `capacity` or all of them."""
    dropped = 0
    for i in range(len(gids)):
        if ends[COUNT] == capacity:
            dropped += 1
            if capacity == 0:
                continue
            _give_back(keys, table, before, after, ends, ends[HEAD])
        slot = _take(after, ends)
        keys[slot] = gids[i]
        when[slot] = step
        stream[slot] = streams[i]
        epoch[slot] = epochs[i]
        mode[slot] = as_mode
        _enter(keys, table, slot)
        _append(before, after, ends, slot, HEAD)
    return dropped


@njit(nb.void(*_PLACES, _A32, _A32, _A32, _A8, _R64, _R32, _R32, _I64, _I64, _A64), **_OPTIONS)
def recall(keys, table, before, after, ends, when, stream, epoch, mode, gids, streams, epochs, step, horizon, counts):
    """Pop the ghosts of gids that are written anew. counts[mode] grows by those of the same stream and epoch, within the horizon;
    counts[0] becomes their longest distance."""
    for i in range(len(gids)):
        at = _find(keys, table, gids[i])
        if at < 0:
            continue
        slot = table[at]
        distance = step - when[slot]
        if stream[slot] == streams[i] and epoch[slot] == epochs[i] and distance <= horizon:
            counts[mode[slot]] += 1
            counts[0] = max(counts[0], distance)
        _give_back(keys, table, before, after, ends, slot)


@njit(_I64(*_PLACES, _A32, _I64), **_OPTIONS)
def forget(keys, table, before, after, ends, when, cutoff):
    """Give back the ghosts from before `cutoff`; how many."""
    n = 0
    while ends[HEAD] >= 0 and when[ends[HEAD]] < cutoff:
        _give_back(keys, table, before, after, ends, ends[HEAD])
        n += 1
    return n
