"""The loops over groups that numpy cannot express, compiled: an index by gid, and lists that run through its slots.

A `Places` (places.py) is six arrays. `keys[slot]` is the gid. `table` finds the slot of a gid: open addressing, linear probing, half
full at most, removal by shifting back, so there are no tombstones and it never slows down with age. `away` says of each entry how far
it stands from where its gid belongs, plus one; 0: the entry is empty. So a probe of another gid, and a shift, need not look at `keys`,
which would be a line of memory for each. `before` / `after` chain each slot into
one of three lists whose ends are in `ends`:

    LINE      oldest first: what is evicted next stands at its head
    PENDING   touched in the step under way, in any order; joins the end of LINE, by gid, when the step is over
    FREE      slots that were given back, the last ones first; chained by `after` only

A slot is found, refreshed, evicted and given back in constant time; nothing ever walks over what it leaves alone, but for slots
that are protected. Importing this compiles, or loads from numba's cache: only `places.loops()` does it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils
from numba.core import types as nb
from numba.extending import intrinsic

from headrace.compiled.orders import mixed

HEAD, TAIL, FREE, COUNT, USED, PENDING, PENDING_TAIL, PENDING_COUNT = range(8)
"""Places in `ends`. USED: slots below it were handed out at least once."""
OLDER, ENTRIES, DROPPED = 5, 6, 7
"""Of ghosts, which have no PENDING: how many, counted from the oldest, stand in the older half of their index; how many entries the younger
half has, those left behind included; how many ghosts went to make room, ever."""

_I64, _I32 = nb.int64, nb.int32
_A64, _A32, _A8 = nb.Array(nb.int64, 1, "C"), nb.Array(nb.int32, 1, "C"), nb.Array(nb.uint8, 1, "C")
_R64 = nb.Array(nb.int64, 1, "A", readonly=True)
_R32 = nb.Array(nb.int32, 1, "A", readonly=True)
_ROWS = nb.Array(nb.uint8, 2, "C")
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_INDEX = (_A64, _A32, _A8)
"""keys, table, away."""
_PLACES = (*_INDEX, _A32, _A32, _A64)
"""keys, table, away, before, after, ends."""
_GHOSTS = (*_INDEX, _A32, _A8, _A32, _A32, _A64, _A32, _A32, _A32, _A8)
"""keys, table, away, the older table and away, before, after, ends, when, stream, epoch, mode (0: the slot is free)."""
_AHEAD = 8
"""Groups between asking for a line of the index and needing it: 6 to 12 are alike."""
_FAR = 255
"""What `away` says from there on: only keys that were made to collide get there, and then `keys` is asked."""


# ------------------------------------------------------------------------------------------------ index


@njit(**_OPTIONS)
def _hash(gid):
    """The high half of mix64. Buckets are its low bits, so they do not crowd a table."""
    return mixed(np.uint64(gid)) >> np.uint64(32)


@njit(**_OPTIONS)
def _place(hashed, size):
    """Where in a table of `size` a gid with this hash belongs."""
    return np.int64((hashed * np.uint64(size)) >> np.uint64(32))


@njit(**_OPTIONS)
def _home(gid, size):
    return _place(_hash(gid), size)


def _prefetching(typing, array, index):

    def emit(context, builder, signature, arguments):
        held = context.make_array(array)(context, builder, arguments[0])
        at = builder.bitcast(builder.gep(held.data, [arguments[1]]), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[cgutils.int32_t] * 3])
        call = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(call, [at, *(ir.Constant(cgutils.int32_t, n) for n in (1, 3, 1))])  # to be written, kept, data
        return context.get_dummy_value()

    return nb.void(array, index), emit


_prefetch: Any = intrinsic(_prefetching)
"""_prefetch(array, index) asks for a line of memory without waiting for it."""


@njit(**_OPTIONS)
def _ask(table, away, home):
    """Bring the lines of the index that are read soon. A store of 1 MB pushes them out of the near caches at every step, and waiting for them one
    after the other was half of the time of 1,024 evictions."""
    _prefetch(away, home)
    _prefetch(table, home)


@njit(**_OPTIONS)
def _find(keys, table, away, gid):
    """Where in the table a gid is; -1: nowhere."""
    size = len(table)
    at = _home(gid, size)
    far = 1
    while away[at] != 0:
        # Whoever stands here and is as far from home as we are by now has our home: few others do.
        if away[at] == far and keys[table[at]] == gid:
            return at
        at += 1
        if at == size:
            at = 0
        far = min(far + 1, _FAR)
    return -1


@njit(**_OPTIONS)
def _enter(table, away, slot, home):
    size = len(table)
    at = home
    far = 1
    while away[at] != 0:
        at += 1
        if at == size:
            at = 0
        far = min(far + 1, _FAR)
    table[at] = slot
    away[at] = far


@njit(**_OPTIONS)
def _leave(keys, table, away, slot, home):
    size = len(table)
    hole = home
    while table[hole] != slot:  # it is there, and no entry on the way to it is empty
        hole += 1
        if hole == size:
            hole = 0
    at = hole
    gap = 0
    while True:
        at += 1
        gap += 1
        if at == size:
            at = 0
        far = np.int64(away[at])
        if far == 0:
            break
        if far == _FAR:
            far = at - _home(keys[table[at]], size)
            far += 1 + (size if far < 0 else 0)
        if far > gap:  # its home is not behind the hole
            table[hole] = table[at]
            away[hole] = min(far - gap, _FAR)
            hole = at
            gap = 0
    away[hole] = 0


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


# ------------------------------------------------------------------------------------------ whole batches


@njit(nb.void(*_INDEX, _A64), **_OPTIONS)
def reindex(keys, table, away, slots):
    """Fill an empty table with these slots."""
    for i in range(len(slots)):
        _enter(table, away, slots[i], _home(keys[slots[i]], len(table)))


@njit(_I64(*_INDEX, _R64, _A64), **_OPTIONS)
def find_slots(keys, table, away, gids, slots):
    """The slot of each gid, -1 where there is none; how many there are."""
    found = 0
    for i in range(len(gids)):
        at = _find(keys, table, away, gids[i])
        slots[i] = table[at] if at >= 0 else -1
        found += at >= 0
    return found


@njit(_I64(*_PLACES, _A32, _R64, _I64), **_OPTIONS)
def refresh(keys, table, away, before, after, ends, last, slots, step):
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
def admit(keys, table, away, before, after, ends, last, gids, slots, step):
    """Give each new gid a slot, in PENDING. There is room, and none of them is known."""
    for i in range(len(gids)):
        slot = _take(after, ends)
        keys[slot] = gids[i]
        last[slot] = step
        _enter(table, away, slot, _home(gids[i], len(table)))
        _append(before, after, ends, slot, PENDING)
        ends[PENDING_COUNT] += 1
        slots[i] = slot


@njit(nb.void(_ROWS, _R64, _ROWS), **_OPTIONS)
def gather_rows(arena, slots, out):
    """out[i] = arena[slots[i]], as bytes; zeros where the slot is -1. Half of what index_select and a mask over the misses take."""
    for i in range(len(slots)):
        slot = slots[i]
        if slot < 0:
            for j in range(arena.shape[1]):
                out[i, j] = 0
        else:
            for j in range(arena.shape[1]):
                out[i, j] = arena[slot, j]


@njit(nb.void(_ROWS, _R64, _ROWS), **_OPTIONS)
def scatter_rows(arena, slots, rows):
    """arena[slots[i]] = rows[i], as bytes, one after the other."""
    for i in range(len(slots)):
        slot = slots[i]
        for j in range(arena.shape[1]):
            arena[slot, j] = rows[i, j]


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


# ---------------------------------------------------------------------------------------------- ghosts


@njit(**_OPTIONS)
def _find_ghost(keys, table, away, mode, gid):
    """The slot of a ghost, -1 if there is none. An entry that was left behind leads to a slot that is free, or another's, or its own again."""
    size = len(table)
    at = _home(gid, size)
    far = 1
    while away[at] != 0:
        if away[at] == far:
            slot = table[at]
            if keys[slot] == gid and mode[slot] != 0:
                return slot
        at += 1
        if at == size:
            at = 0
        far = min(far + 1, _FAR)
    return -1


@njit(**_OPTIONS)
def _drop_oldest(before, after, ends, mode):
    """Out of the line, with its slot."""
    slot = ends[HEAD]
    following = after[slot]
    ends[HEAD] = following
    if following >= 0:
        before[following] = -1
    else:
        ends[TAIL] = -1
    ends[COUNT] -= 1
    ends[OLDER] -= ends[OLDER] > 0
    mode[slot] = 0
    return slot


@njit(nb.void(*_GHOSTS, _I64), **_OPTIONS)
def forget(keys, table, away, old, old_away, before, after, ends, when, stream, epoch, mode, cutoff):
    """Let the ghosts go that are of steps before `cutoff`."""
    while ends[HEAD] >= 0 and when[ends[HEAD]] < cutoff:
        slot = _drop_oldest(before, after, ends, mode)
        after[slot] = ends[FREE]
        ends[FREE] = slot


@njit(nb.void(*_GHOSTS, _R64, _R32, _R32, _I64, _I64, _A64), **_OPTIONS)
def recall(
    keys, table, away, old, old_away, before, after, ends, when, stream, epoch, mode,
    gids, streams, epochs, step, horizon, counts,
):  # fmt: skip
    """Pop the ghosts of gids that are written anew. counts[mode] grows by those of the same stream and epoch, within the horizon;
    counts[0] becomes their longest distance."""
    for i in range(len(gids) + _AHEAD):
        if i < len(gids):
            home = _home(gids[i], len(table))
            _prefetch(away, home)
            _prefetch(old_away, home)
        if i < _AHEAD:
            continue
        gid = gids[i - _AHEAD]
        slot = _find_ghost(keys, table, away, mode, gid)
        if slot < 0:
            # Slots of the newer half are not found here: what leads to them from here stood for a ghost that they replaced.
            slot = _find_ghost(keys, old, old_away, mode, gid)
            if slot < 0:
                continue
            ends[OLDER] -= 1
        distance = step - when[slot]
        if stream[slot] == streams[i - _AHEAD] and epoch[slot] == epochs[i - _AHEAD] and distance <= horizon:
            counts[mode[slot]] += 1
            counts[0] = max(counts[0], distance)
        _unlink(before, after, ends, slot, HEAD)
        mode[slot] = 0
        after[slot] = ends[FREE]
        ends[FREE] = slot
        ends[COUNT] -= 1


@njit(_I64(*_PLACES, _A32, _A32, _A32, _R64, _I64, _I64, *_GHOSTS, _I64, _I64, _I64), **_OPTIONS)
def evict(
    keys, table, away, before, after, ends, last, stream, epoch, active, cutoff, limit,
    ghost_keys, ghost_table, ghost_away, _old, _old_away, ghost_before, ghost_after, ghost_ends, when, ghost_stream, ghost_epoch, mode,
    ghost_limit, as_mode, step,
):  # fmt: skip
    """Give back the oldest slots with last < cutoff whose stream is not active, at most `limit`, and make a ghost of each; how many. If there
    is no room for a ghost, it stops there: -1 - how many.

    FREE begins with them, the oldest first. At their limit the oldest ghosts make room. None of the new ones is a ghost already, for a group
    that is written loses its ghost.
    """
    room = limit
    if ghost_limit:
        room = len(ghost_keys) - ghost_ends[ENTRIES]
        if len(ghost_keys) < ghost_limit:
            room = min(room, len(ghost_keys) - ghost_ends[COUNT])
    full = False
    n = 0
    first, final, kept = -1, -1, -1
    slot = ends[HEAD]
    # Hashes are made ahead too: a branch that goes wrong then waits for a line that is near, not for a hash as well.
    ahead = slot
    hashes = np.empty(_AHEAD, np.uint64)
    for turn in range(_AHEAD):
        if ahead >= 0:
            hashes[turn] = hashed = _hash(keys[ahead])
            _ask(table, away, _place(hashed, len(table)))
            _ask(ghost_table, ghost_away, _place(hashed, len(ghost_table)))
            ahead = after[ahead]
    turn = 0
    while slot >= 0 and n < limit and last[slot] < cutoff:
        own = hashes[turn]
        if ahead >= 0:
            hashes[turn] = hashed = _hash(keys[ahead])
            _ask(table, away, _place(hashed, len(table)))
            _ask(ghost_table, ghost_away, _place(hashed, len(ghost_table)))
            ahead = after[ahead]
        turn = (turn + 1) % _AHEAD
        following = after[slot]
        if len(active) and _is_active(stream[slot], active):
            if kept >= 0:
                after[kept] = slot
            else:
                ends[HEAD] = slot
            before[slot] = kept
            kept = slot
        else:
            if n == room:
                full = True
                break
            _leave(keys, table, away, slot, _place(own, len(table)))
            if ghost_limit:
                if ghost_ends[COUNT] == ghost_limit:
                    ghost = _drop_oldest(ghost_before, ghost_after, ghost_ends, mode)
                    ghost_ends[COUNT] += 1
                    ghost_ends[DROPPED] += 1
                else:
                    ghost = _take(ghost_after, ghost_ends)
                ghost_keys[ghost] = keys[slot]
                when[ghost] = step
                ghost_stream[ghost] = stream[slot]
                ghost_epoch[ghost] = epoch[slot]
                mode[ghost] = as_mode
                _enter(ghost_table, ghost_away, ghost, _place(own, len(ghost_table)))
                _append(ghost_before, ghost_after, ghost_ends, ghost, HEAD)
            if n:
                after[final] = slot
            else:
                first = slot
            final = slot
            n += 1
        slot = following
    # What was passed over, and then what is left, is the line now: nobody in between has to be unlinked one by one.
    if kept >= 0:
        after[kept] = slot
    else:
        ends[HEAD] = slot
    if slot >= 0:
        before[slot] = kept
    else:
        ends[TAIL] = kept
    if n:
        after[final] = ends[FREE]
        ends[FREE] = first
        ends[COUNT] -= n
    if ghost_limit:
        ghost_ends[ENTRIES] += n
    return -1 - n if full else n
