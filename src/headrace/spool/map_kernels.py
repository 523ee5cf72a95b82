"""Files of a spool, opened, mapped and checked in calls that do not hold the interpreter's lock.

    map_summed      one file, and sums of parts of it
    convey          one file after the other, as long as each is there and looks like the last: see conveyor.py

Taken apart, a file is a dozen system calls, and each gives the lock back and takes it again before a trainer that waits for it
has woken (50 us): it stood still for all of them, 1.3 ms a file. Linux only. Whoever calls keeps the arrays alive whose addresses he gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit
from numba.core import types as nb

from headrace.compiled.addresses import byte_at, fence, fetch_add, pointer, put_byte, word_at
from headrace.compiled.xxh3 import SHORTEST_BYTES, hash_at

__all__ = [
    "ALIKE",
    "ANY",
    "FREED",
    "LINE",
    "MISSING",
    "NUMBER",
    "ODD",
    "OPEN",
    "OWN_SUM",
    "READY",
    "SHORTEST_BYTES",
    "TAKEN",
    "UNMAPPED",
    "WAITED",
    "await_file",
    "convey",
    "first_bad",
    "map_summed",
    "unmap",
]

READY, TAKEN, OPEN, FREED, UNMAPPED, WAITED = range(6)
"""Places in the line that a conveyor and its trainer share: files made ready and files taken, since it began; whether more may come; mappings that
were given back, and of these how many are unmapped; nanoseconds waited for the trainer."""
ALIKE, MISSING, ODD = range(3)
"""Why a conveyor came back: its time was over; the next file is not there, or was judged; it is there and looks different."""
OWN_SUM, ANY, NUMBER = -1, -2, -3
"""What may lie between two pieces of a header, besides sums: see `_is_alike`."""

_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_open = nb.ExternalFunction("open", nb.int32(nb.int64, nb.int32))
_close = nb.ExternalFunction("close", nb.int32(nb.int32))
_statx = nb.ExternalFunction("statx", nb.int32(nb.int32, nb.int64, nb.int32, nb.uint32, nb.int64))
_mmap = nb.ExternalFunction("mmap", nb.int64(nb.int64, nb.int64, nb.int32, nb.int32, nb.int32, nb.int64))
_clock_gettime = nb.ExternalFunction("clock_gettime", nb.int32(nb.int32, nb.int64))
_usleep = nb.ExternalFunction("usleep", nb.int32(nb.uint32))
_munmap = nb.ExternalFunction("munmap", nb.int32(nb.int64, nb.int64))
_HERE, _NO_FOLLOW, _EMPTY_PATH, _TYPE_AND_SIZE = -100, 0x100, 0x1000, 0x201
_MODE_AT, _SIZE_AT, _STATUS_BYTES = 28, 40, 256
"""Where the kernel's struct statx has them, on every architecture."""
_KIND, _REGULAR = 0o170000, 0o100000
_MONOTONIC = 1
"""The clock of `until`, that of time.monotonic_ns."""
_TRAINER_LOOKS, _CONVEYOR_LOOKS, _HELPER_LOOKS = 20, 300, 20
"""Microseconds between two looks at what the other has done."""
_SUMS = 8
_NEXT, _TIME, _COUNT, _DONE, _BAD, _FILE, _BEGIN, _WHERE, _SPANS = range(9)
"""From there on in the line, of the file that is being summed: the next array to sum; how many times there was one; how many there are, are done and were
wrong; addresses: of the file, of its first array, and of where and spans as `_is_alike` has them."""
LINE = _SUMS + _SPANS + 1
"""How long it is."""
_PLACE_BITS = 20
_PLACE = (1 << _PLACE_BITS) - 1
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_ZERO, _NINE, _SPACE, _MAX_DIGITS = ord("0"), ord("9"), ord(" "), 18
_B1, _N1, _READ_U1 = nb.Array(nb.uint8, 1, "C"), nb.Array(nb.int64, 1, "C"), nb.Array(nb.uint64, 1, "C", readonly=True)
_N2, _B2, _U2 = nb.Array(nb.int64, 2, "C"), nb.Array(nb.uint8, 2, "C"), nb.Array(nb.uint64, 2, "C")


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


@njit(nb.int64(_N2, _B2, _N1, _N2, nb.int64, _N1, _U2), **_OPTIONS)
def map_summed(old, names, how, spans, count, mapped, sums):
    """Unmap what is `old`, then map a file: whether it was to be had.

    names[0]      a path at which nothing may lie, and names[1], the file
    how           flags to open it with, protection and kind to map it with
    mapped        becomes address, size
    sums[k]       becomes the (high, low) hash of its bytes spans[k, 0] to spans[k, 1], for k < `count`; 0, 0 where they do not fit

    Why it is not to be had is learned by opening it by the usual way.
    """
    unmap(old)
    status = np.empty(_STATUS_BYTES // 8, np.int64)
    beside, path = names[0].ctypes.data, names[1].ctypes.data
    address = _map_one(beside, path, how[0], how[1], how[2], status.ctypes.data, mapped[1:].ctypes.data)
    if address == 0:
        return 0
    mapped[0] = address
    for k in range(count):
        first, end = spans[k, 0], spans[k, 1]
        sums[k, 0] = sums[k, 1] = np.uint64(0)
        if first >= 0 and end <= mapped[1] and end - first >= SHORTEST_BYTES:
            sums[k, 0], sums[k, 1] = hash_at(address + first, end - first)
    return 1


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


# ----------------------------------------------------------------------------------------------- conveyor


@njit(nb.int64(nb.int64, nb.uint64, nb.uint64), **_OPTIONS)
def _is_written(at, high, low):
    """Whether the 32 characters there are this hash."""
    for j in range(16):
        shift = np.uint64(60 - 4 * j)
        if byte_at(at + j) != _HEX[(high >> shift) & np.uint64(15)]:
            return 0
        if byte_at(at + 16 + j) != _HEX[(low >> shift) & np.uint64(15)]:
            return 0
    return 1


@njit(nb.int64(nb.int64, nb.int64, nb.int64), **_OPTIONS)
def _number_ends(at, end, wanted):
    """Where the whole number that begins there ends, if it is `wanted` and written as JSON has it; -1 otherwise."""
    value, begin = 0, at
    while at < end and _ZERO <= byte_at(at) <= _NINE and at - begin < _MAX_DIGITS:
        value = 10 * value + byte_at(at) - _ZERO
        at += 1
    if at == begin or value != wanted or (byte_at(begin) == _ZERO and at > begin + 1):
        return -1
    return -1 if at < end and _ZERO <= byte_at(at) <= _NINE else at


@njit(nb.int64(nb.int64, nb.int64, _B1, nb.int64, nb.int64), **_OPTIONS)
def _piece_begins(at, end, pieces, first, last):
    """Where pieces[first:last] begins, from there on; -1 if it does not before `end`."""
    while at + last - first <= end:
        same = 0
        while same < last - first and byte_at(at + same) == pieces[first + same]:
            same += 1
        if same == last - first:
            return at
        at += 1
    return -1


@njit(nb.int64(nb.int64, nb.int64, _B1, _N1, _N1, _N2, _N1, _B1, _N1), **_OPTIONS)
def _is_alike(address, size, pieces, bounds, gaps, spans, numbers, scratch, where):
    """Whether a mapped file is of a form and has these `numbers`, and every byte of its header is right.

    pieces, bounds     what its header is made of, one after the other, and where each begins; then where the last ends
    gaps[g]            what lies behind piece g: k >= 0, the sum of bytes spans[k]; OWN_SUM, the header's; NUMBER - n, numbers[n]; ANY, whatever lies
                       before the next piece, of which only the header's sum is compared
    spans              counted from the end of the header; the last one ends where the file does
    where[k]           becomes where the sum of spans[k] is written
    """
    if size < 8:
        return 0
    length = np.int64(word_at(address))
    if not 0 < length <= len(scratch) or 8 + length + spans[len(spans) - 1, 1] != size:
        return 0
    at, end, own = address + 8, address + 8 + length, np.int64(0)
    for g in range(len(bounds) - 1):
        if at + bounds[g + 1] - bounds[g] > end:
            return 0
        for j in range(bounds[g], bounds[g + 1]):
            if byte_at(at) != pieces[j]:
                return 0
            at += 1
        if g == len(gaps):
            break
        if gaps[g] == ANY or gaps[g] <= NUMBER:
            if gaps[g] == ANY:
                at = _piece_begins(at, end, pieces, bounds[g + 1], bounds[g + 2])
            else:
                at = _number_ends(at, end, numbers[NUMBER - gaps[g]])
            if at < 0:
                return 0
            continue
        if at + 32 > end:
            return 0
        if gaps[g] == OWN_SUM:
            own = at - address - 8
        else:
            where[gaps[g]] = at - address
        at += 32
    while at < end:
        if byte_at(at) != _SPACE:
            return 0
        at += 1
    for j in range(length):
        scratch[j] = byte_at(address + 8 + j)
    scratch[own : own + 32] = _ZERO
    high, low = hash_at(scratch.ctypes.data, length)
    if not _is_written(address + 8 + own, high, low):
        return 0
    return 1


@njit(nb.int64(nb.int64), **_OPTIONS)
def _sum_one(sums):
    """Sum one of the arrays that are to be summed and that nobody has begun with; whether there was one. For both threads.

    `sums`: the address of what they share, _NEXT to _SPANS. Each time it is used for has a number, which is part of every number that is taken, so
    that one taken late is good for nothing. Who took one may read the rest until he has counted it as _DONE: until all are, nobody changes it.
    """
    shared = carray(pointer(sums), (LINE - _SUMS,), np.int64)
    if shared[_NEXT] & _PLACE >= shared[_COUNT]:
        return 0
    own = fetch_add(sums + 8 * _NEXT, 1)
    count = shared[_COUNT]
    fence()
    if own >> _PLACE_BITS != shared[_TIME] or own & _PLACE >= count:
        return 0
    own &= _PLACE
    span, where = shared[_SPANS] + 16 * own, shared[_WHERE] + 8 * own
    first, end = np.int64(word_at(span)), np.int64(word_at(span + 8))
    if end - first >= SHORTEST_BYTES:  # others are left to whoever takes the file
        high, low = hash_at(shared[_BEGIN] + first, end - first)
        if not _is_written(shared[_FILE] + np.int64(word_at(where)), high, low):
            fetch_add(sums + 8 * _BAD, 1)
    fetch_add(sums + 8 * _DONE, 1)
    return 1


@njit(nb.int64(_N1, nb.int64, nb.int64, _N2, _N1), **_OPTIONS)
def _is_right(line, address, size, spans, where):
    """Whether the arrays of a file have the sums that its header says. A trainer that waits for it sums some of them."""
    shared = line[_SUMS:]
    count = len(spans)
    shared[_TIME] += 1
    fence()
    shared[_COUNT], shared[_DONE], shared[_BAD] = count, 0, 0
    shared[_FILE], shared[_BEGIN] = address, address + size - spans[count - 1, 1]
    shared[_WHERE], shared[_SPANS] = where.ctypes.data, spans.ctypes.data
    fence()
    shared[_NEXT] = shared[_TIME] << _PLACE_BITS
    fence()
    while _sum_one(shared.ctypes.data):
        continue
    while shared[_DONE] < count:
        _usleep(np.uint32(_HELPER_LOOKS))
    fence()
    return np.int64(shared[_BAD] == 0)


@njit(nb.int64(), **_OPTIONS)
def _now():
    clock = np.empty(2, np.int64)
    _clock_gettime(np.int32(_MONOTONIC), clock.ctypes.data)
    return clock[0] * 1_000_000_000 + clock[1]


@njit(nb.int64(_N1, nb.int64, nb.int64), **_OPTIONS)
def await_file(line, index, until):
    """Whether file `index` is ready: looks until `until`, or until none is to come."""
    while line[READY] <= index:
        if not line[OPEN] or _now() >= until:
            fence()
            return np.int64(line[READY] > index)
        if line[READY] < index or not _sum_one(line[_SUMS:].ctypes.data):
            _usleep(np.uint32(_TRAINER_LOOKS))
    fence()
    return 1


@njit(nb.int64(_N1, _N1, _B2, _N1, _N1, _N1, _B1, _N1, _N1, _N2, _B1, _N2, _N2, _N2, nb.int64), **_OPTIONS)
def convey(line, called, names, digits, how, about, pieces, bounds, gaps, spans, scratch, ring, where, freed, until):
    """Make files ready, `deep` ahead of the trainer, until `until`, until `called`, or until the next one is MISSING or ODD.

    names, digits      paths as for `map_summed`, and where in each the 12 digits of the file's number are
    about              number of the file at index 0, its first row, rows of each, deep
    ring[i % n]        becomes address, size of file i; where[i % n] as for `_is_alike`
    freed[i % n]       address, size of what the trainer gave back

    Files in the ring that were not taken are those from line[TAKEN] to line[READY].
    """
    status, size, numbers = np.empty(_STATUS_BYTES // 8, np.int64), np.zeros(1, np.int64), np.zeros(2, np.int64)
    while True:
        while line[UNMAPPED] < line[FREED]:
            fence()
            place = line[UNMAPPED] % len(freed)
            _munmap(freed[place, 0], freed[place, 1])
            line[UNMAPPED] += 1
        if called[0]:
            return ALIKE
        index = line[READY]
        if index - line[TAKEN] >= about[3]:
            before = _now()
            if before >= until:
                return ALIKE
            _usleep(np.uint32(_CONVEYOR_LOOKS))
            line[WAITED] += _now() - before
            continue
        fence()
        numbers[0], numbers[1] = about[0] + index, about[1] + index * about[2]
        rest = numbers[0]
        for j in range(12):
            for name in range(2):
                put_byte(names[name].ctypes.data + digits[name] + 11 - j, _ZERO + rest % 10)
            rest //= 10
        if rest:
            return MISSING
        beside, path = names[0].ctypes.data, names[1].ctypes.data
        address = _map_one(beside, path, how[0], how[1], how[2], status.ctypes.data, size.ctypes.data)
        if address == 0:
            return MISSING
        place = index % len(ring)
        if not _is_alike(
            address, size[0], pieces, bounds, gaps, spans, numbers, scratch, where[place]
        ) or not _is_right(line, address, size[0], spans, where[place]):
            _munmap(address, size[0])
            return ODD
        ring[place, 0], ring[place, 1] = address, size[0]
        fence()
        line[READY] = index + 1
