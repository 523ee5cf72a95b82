"""A file of a spool, opened, mapped and summed in one call that does not hold the interpreter's lock.

Taken apart, a file is a dozen system calls, and each gives the lock back and takes it again before a trainer that waits for it
has woken (50 us): it stood still for all of them, 1.3 ms a file. Linux only. Whoever calls keeps the arrays alive whose addresses he gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types as nb

from headrace.compiled.addresses import pointer
from headrace.compiled.xxh3 import SHORTEST_BYTES, hash_at

__all__ = ["SHORTEST_BYTES", "first_bad", "map_summed", "unmap"]

_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_open = nb.ExternalFunction("open", nb.int32(nb.int64, nb.int32))
_close = nb.ExternalFunction("close", nb.int32(nb.int32))
_statx = nb.ExternalFunction("statx", nb.int32(nb.int32, nb.int64, nb.int32, nb.uint32, nb.int64))
_mmap = nb.ExternalFunction("mmap", nb.int64(nb.int64, nb.int64, nb.int32, nb.int32, nb.int32, nb.int64))
_munmap = nb.ExternalFunction("munmap", nb.int32(nb.int64, nb.int64))
_HERE, _NO_FOLLOW, _EMPTY_PATH, _TYPE_AND_SIZE = -100, 0x100, 0x1000, 0x201
_MODE_AT, _SIZE_AT, _STATUS_BYTES = 28, 40, 256
"""Where the kernel's struct statx has them, on every architecture."""
_KIND, _REGULAR = 0o170000, 0o100000
_N1, _READ_U1 = nb.Array(nb.int64, 1, "C"), nb.Array(nb.uint64, 1, "C", readonly=True)
_N2, _U2, _U3 = nb.Array(nb.int64, 2, "C"), nb.Array(nb.uint8, 2, "C", readonly=True), nb.Array(nb.uint64, 3, "C")


@njit(nb.int64(nb.int64, nb.int64), **_OPTIONS)
def _size_of(descriptor, status):
    """Bytes of an open regular file; -1 if it is none."""
    empty = status + _STATUS_BYTES - 1
    carray(pointer(empty), (1,), np.uint8)[0] = 0
    if _statx(np.int32(descriptor), empty, np.int32(_EMPTY_PATH), np.uint32(_TYPE_AND_SIZE), status) != 0:
        return -1
    if carray(pointer(status + _MODE_AT), (1,), np.uint16)[0] & _KIND != _REGULAR:
        return -1
    return carray(pointer(status + _SIZE_AT), (1,), np.int64)[0]


@njit(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64), **_OPTIONS)
def _map_one(beside, path, how, protection, kind, status, size_at):
    """The address of the mapped file; 0 if something lies at `beside`, or it is not a regular file that can be opened."""
    if _statx(np.int32(_HERE), beside, np.int32(_NO_FOLLOW), np.uint32(_TYPE_AND_SIZE), status) == 0:
        return 0
    descriptor = _open(path, np.int32(how))
    if descriptor < 0:
        return 0
    size = _size_of(np.int64(descriptor), status)
    address = np.int64(-1)
    if size > 0:
        address = _mmap(0, size, np.int32(protection), np.int32(kind), descriptor, 0)
    _close(descriptor)
    if address == -1:
        return 0
    carray(pointer(size_at), (1,), np.int64)[0] = size
    return address


@njit(nb.void(_N2), **_OPTIONS)
def unmap(old):
    """old[i]: address, size."""
    for i in range(len(old)):
        _munmap(old[i, 0], old[i, 1])


@njit(nb.int64(_N2, _U2, nb.int64, nb.int64, nb.int64, _N2, nb.int64, _N2, _U3, nb.int64), **_OPTIONS)
def map_summed(old, names, how, protection, kind, spans, count, mapped, sums, enough):
    """Unmap what is `old`, then map files one after the other until one is not to be had, or they have `enough` bytes: how many.

    names[2 i]        a path at which nothing may lie, and names[2 i + 1], the file to be opened `how` and mapped with `protection`, as `kind`
    mapped[i]         becomes address, size
    sums[i, k]        becomes the (high, low) hash of its bytes spans[k, 0] to spans[k, 1], for k < `count`; 0, 0 where they do not fit

    Why one is not to be had is learned by opening it by the usual way.
    """
    unmap(old)
    status = np.empty(_STATUS_BYTES // 8, np.int64)
    total, done = 0, 0
    while done < len(mapped) and total < enough:
        beside, path = names[2 * done].ctypes.data, names[2 * done + 1].ctypes.data
        address = _map_one(beside, path, how, protection, kind, status.ctypes.data, mapped[done, 1:].ctypes.data)
        if address == 0:
            break
        mapped[done, 0] = address
        size = mapped[done, 1]
        for k in range(count):
            first, end = spans[k, 0], spans[k, 1]
            sums[done, k, 0] = sums[done, k, 1] = np.uint64(0)
            if first >= 0 and end <= size and end - first >= SHORTEST_BYTES:
                sums[done, k, 0], sums[done, k, 1] = hash_at(address + first, end - first)
        total += size
        done += 1
    return done


@njit(nb.int64(nb.int64, nb.int64, nb.int64, _READ_U1, _N1), **_OPTIONS)
def first_bad(data, end, size, sums, segments):
    """The first of `segments`, of `size` bytes each, whose xxh3-64 hash is not that in `sums`; -1 if there is none. `end`: bytes of the data, where the
    last segment ends."""
    for i in range(len(segments)):
        start = segments[i] * size
        _, low = hash_at(data + start, min(size, end - start))
        if low != sums[segments[i]]:
            return segments[i]
    return -1
