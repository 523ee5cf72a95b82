"""What is the xxh3-128 hash of some words, inside a compiled loop?

    content_words(words, count)      of `count` 32-bit words, as two 64-bit words whose bytes are the digest's; more than 240 bytes
    term_of(a, b, index)             of such a digest followed by a 64-bit index: what a sample adds to a run's digest

The same numbers as the `xxhash` package gives (a property compares them): a loop that holds no lock cannot call it, and taking
Python's lock 64 times a window to do so cost more than the hashing. The constants are those of the format (XXH3, seed 0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types as nb

__all__ = ["SHORTEST", "content_words", "term_of"]

SHORTEST = 61
"""Words from which on `content_words` holds: shorter inputs have other formulas, which nothing hot needs."""
_OPTIONS: Any = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET = tuple(np.uint64(int.from_bytes(_SECRET_BYTES[i : i + 8], "little")) for i in range(185))
"""The eight bytes from each place on."""
_KEYS = np.array(_SECRET, np.uint64)
_ALIGNED = _KEYS[::8].copy()
_A64 = nb.Array(nb.uint64, 1, "C")
_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_U0, _U8, _U32, _U37, _U47 = (np.uint64(n) for n in (0, 8, 32, 37, 47))
_LAST = 192 - 64
_N1, _N2, _N3, _N4, _N5, _N6, _N7, _EIGHT = (np.uintp(n) for n in range(1, 9))


@njit(nb.uint64(nb.uint64, nb.uint64), **_OPTIONS)
def _folded(a, b):
    """The product of two 64-bit numbers, its halves xored."""
    low_low = (a & _LOW) * (b & _LOW)
    high_low = (a >> _U32) * (b & _LOW)
    low_high = (a & _LOW) * (b >> _U32)
    cross = (low_low >> _U32) + (high_low & _LOW) + low_high
    upper = (high_low >> _U32) + (cross >> _U32) + (a >> _U32) * (b >> _U32)
    return upper ^ ((cross << _U32) | (low_low & _LOW))


@njit(nb.uint64(nb.uint64), **_OPTIONS)
def _avalanche(h):
    h ^= h >> _U37
    h *= _AVALANCHE
    return h ^ (h >> _U32)


@njit(nb.uint64(nb.uint64), **_OPTIONS)
def _swapped(x):
    """The bytes in reverse: a digest is written with its high byte first."""
    x = ((x & np.uint64(0x00FF00FF00FF00FF)) << _U8) | ((x >> _U8) & np.uint64(0x00FF00FF00FF00FF))
    x = ((x & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(16)) | ((x >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    return (x << _U32) | (x >> _U32)


@njit(nb.void(_A64, _A64, _A64, nb.uintp, nb.int64), **_OPTIONS)
def _accumulate(sums, plain, pairs, at, stripes):
    """Stripes of eight 64-bit words from `at` on. What goes to the neighbouring sum is kept apart, in `plain`.

    Written out, with unsigned places: 19 GB/s, one vector instruction for four lanes; as a loop over lanes it is 8, and with
    signed places, which could count from the end, 3.6.
    """
    s0, p0 = sums[0], plain[0]
    s1, p1 = sums[1], plain[1]
    s2, p2 = sums[2], plain[2]
    s3, p3 = sums[3], plain[3]
    s4, p4 = sums[4], plain[4]
    s5, p5 = sums[5], plain[5]
    s6, p6 = sums[6], plain[6]
    s7, p7 = sums[7], plain[7]
    for stripe in range(stripes):
        k = np.uintp(stripe)
        w = at + _EIGHT * k
        v0, v1, v2, v3 = pairs[w], pairs[w + _N1], pairs[w + _N2], pairs[w + _N3]
        v4, v5, v6, v7 = pairs[w + _N4], pairs[w + _N5], pairs[w + _N6], pairs[w + _N7]
        k0 = v0 ^ _ALIGNED[k]
        k1 = v1 ^ _ALIGNED[k + _N1]
        k2 = v2 ^ _ALIGNED[k + _N2]
        k3 = v3 ^ _ALIGNED[k + _N3]
        k4 = v4 ^ _ALIGNED[k + _N4]
        k5 = v5 ^ _ALIGNED[k + _N5]
        k6 = v6 ^ _ALIGNED[k + _N6]
        k7 = v7 ^ _ALIGNED[k + _N7]
        p0 += v0
        p1 += v1
        p2 += v2
        p3 += v3
        p4 += v4
        p5 += v5
        p6 += v6
        p7 += v7
        s0 += (k0 & _LOW) * (k0 >> _U32)
        s1 += (k1 & _LOW) * (k1 >> _U32)
        s2 += (k2 & _LOW) * (k2 >> _U32)
        s3 += (k3 & _LOW) * (k3 >> _U32)
        s4 += (k4 & _LOW) * (k4 >> _U32)
        s5 += (k5 & _LOW) * (k5 >> _U32)
        s6 += (k6 & _LOW) * (k6 >> _U32)
        s7 += (k7 & _LOW) * (k7 >> _U32)
    sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7] = s0, s1, s2, s3, s4, s5, s6, s7
    plain[0], plain[1], plain[2], plain[3], plain[4], plain[5], plain[6], plain[7] = p0, p1, p2, p3, p4, p5, p6, p7


@njit(nb.uint64(_A64, nb.int64, nb.uint64), **_OPTIONS)
def _merged(sums, place, start):
    for i in range(4):
        start += _folded(sums[2 * i] ^ _KEYS[place + 16 * i], sums[2 * i + 1] ^ _KEYS[place + 16 * i + 8])
    return _avalanche(start)


@njit(nb.UniTuple(nb.uint64, 2)(nb.Array(nb.int32, 1, "C"), nb.int64), **_OPTIONS)
def content_words(words, count):
    """The hash of words[:count]; `count` is at least SHORTEST."""
    sums = np.empty(8, np.uint64)
    sums[0], sums[1], sums[2], sums[3] = _P32_3, _P1, _P2, _P3
    sums[4], sums[5], sums[6], sums[7] = _P4, _P32_2, _P5, _P32_1
    plain = np.zeros(8, np.uint64)
    pairs = words[: 2 * (count // 2)].view(np.uint64)
    whole = (4 * count - 1) // 1024
    for block in range(whole):
        _accumulate(sums, plain, pairs, np.uintp(128 * block), 16)
        for i in range(8):
            total = sums[i] + plain[i ^ 1]
            sums[i] = (total ^ (total >> _U47) ^ _KEYS[_LAST + 8 * i]) * _P32_1
        plain[:] = _U0
    _accumulate(sums, plain, pairs, np.uintp(128 * whole), (4 * count - 1 - 1024 * whole) // 64)
    for i in range(8):  # the last 64 bytes again or in part for the first time, wherever they begin
        at = count - 16 + 2 * i
        value = np.uint64(np.uint32(words[at])) | (np.uint64(np.uint32(words[at + 1])) << _U32)
        keyed = value ^ _KEYS[_LAST - 7 + 8 * i]
        plain[i] += value
        sums[i] += (keyed & _LOW) * (keyed >> _U32)
    for i in range(4):
        sums[2 * i] += plain[2 * i + 1]
        sums[2 * i + 1] += plain[2 * i]
    size = np.uint64(4 * count)
    low = _merged(sums, 11, size * _P1)
    high = _merged(sums, _LAST - 11, ~(size * _P2))
    return _swapped(high), _swapped(low)


@njit(nb.UniTuple(nb.uint64, 2)(nb.uint64, nb.uint64, nb.uint64), **_OPTIONS)
def term_of(a, b, index):
    """(low, high) of the 128-bit hash of the 24 bytes a, b, index."""
    low = np.uint64(24) * _P1
    low += _folded(a ^ _KEYS[0], b ^ _KEYS[8])
    low ^= b + index
    high = _folded(b ^ _KEYS[16], index ^ _KEYS[24])
    high ^= a + b
    return _avalanche(low + high), _U0 - _avalanche(low * _P1 + high * _P4 + np.uint64(24) * _P2)
