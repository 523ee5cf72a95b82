"""What is the xxh3-128 hash of some bytes, inside a compiled loop?

    hash_at(address, size)           of `size` bytes, more than 240, as (high, low); low is their xxh3-64 hash
    term_of(a, b, index)             of such a digest followed by a 64-bit index: what a sample adds to a run's digest

The same numbers as the `xxhash` package gives (a property compares them): a loop that holds no lock cannot call it, and taking
Python's lock 64 times a window to do so cost more than the hashing. The constants are those of the format (XXH3, seed 0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types as nb
from numba.extending import intrinsic

from headrace.compiled.addresses import prefetch, word_at

__all__ = ["SHORTEST_BYTES", "hash_at", "term_of"]

SHORTEST_BYTES = 241
"""From which on `hash_at` holds: shorter inputs have other formulas, which nothing hot needs."""
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
_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_U0, _U32, _U37 = (np.uint64(n) for n in (0, 32, 37))
_LAST = 192 - 64
_AHEAD = 1024
"""Bytes that are asked for before they are needed: 1.2 ms for 25 MB out of memory instead of 1.6."""


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


def _take_block(typing_context, sums, address, keys):
    """A block of 1,024 bytes at `address` goes into the eight sums, and they are scrambled. Written in vectors: 45 GB/s out of the cache; loops
    that the compiler makes vectors of by itself reach 15 where they are written out lane by lane, and 8 where they are not."""

    def generate(context, builder, signature, arguments):
        sums, address, keys = arguments
        word, four = ir.IntType(64), ir.VectorType(ir.IntType(64), 4)

        def place(start, offset):
            return builder.inttoptr(builder.add(start, ir.Constant(word, offset)), four.as_pointer())

        def all_four(value):
            return ir.Constant(four, [int(value)] * 4)

        swap = ir.Constant(ir.VectorType(ir.IntType(32), 4), [1, 0, 3, 2])
        halves = (0, 32)
        totals = [builder.load(place(sums, half), align=8) for half in halves]
        for stripe in range(16):
            prefetch(builder, builder.add(address, ir.Constant(word, 64 * stripe + _AHEAD)))
            for k, half in enumerate(halves):
                value = builder.load(place(address, 64 * stripe + half), align=1)
                keyed = builder.xor(value, builder.load(place(keys, 8 * stripe + half), align=8))
                product = builder.mul(builder.and_(keyed, all_four(_LOW)), builder.lshr(keyed, all_four(32)))
                totals[k] = builder.add(totals[k], builder.shuffle_vector(value, value, swap))
                totals[k] = builder.add(totals[k], product)
        for total, half in zip(totals, halves, strict=True):
            mixed = builder.xor(total, builder.lshr(total, all_four(47)))
            mixed = builder.xor(mixed, builder.load(place(keys, _LAST + half), align=8))
            builder.store(builder.mul(mixed, all_four(_P32_1)), place(sums, half), align=8)
        return context.get_dummy_value()

    return nb.void(nb.int64, nb.int64, nb.int64), generate


_block: Any = intrinsic(_take_block)


@njit(**_OPTIONS)
def _merged(sums, place, start):
    for i in range(4):
        start += _folded(sums[2 * i] ^ _KEYS[place + 16 * i], sums[2 * i + 1] ^ _KEYS[place + 16 * i + 8])
    return _avalanche(start)


@njit(**_OPTIONS)  # without types: compiled by the loop that uses it, not by every loop that imports this module
def hash_at(address, size):
    """The hash of `size` bytes, at least SHORTEST_BYTES, as (high, low)."""
    sums = np.empty(8, np.uint64)
    sums[0], sums[1], sums[2], sums[3] = _P32_3, _P1, _P2, _P3
    sums[4], sums[5], sums[6], sums[7] = _P4, _P32_2, _P5, _P32_1
    keys, rest = _ALIGNED.ctypes.data, address
    for _ in range((size - 1) // 1024):
        _block(sums.ctypes.data, rest, keys)
        rest += 1024
    stripes = (address + size - 1 - rest) // 64
    for stripe in range(stripes + 1):  # the last 64 bytes again or in part for the first time, wherever they begin
        last = stripe == stripes
        at = address + size - 64 if last else rest + 64 * stripe
        for i in range(8):
            value = word_at(at + 8 * i)
            keyed = value ^ _KEYS[(_LAST - 7 if last else 8 * stripe) + 8 * i]
            sums[i ^ 1] += value
            sums[i] += (keyed & _LOW) * (keyed >> _U32)
    length = np.uint64(size)
    return _merged(sums, _LAST - 11, ~(length * _P2)), _merged(sums, 11, length * _P1)


@njit(nb.UniTuple(nb.uint64, 2)(nb.uint64, nb.uint64, nb.uint64), **_OPTIONS)
def term_of(a, b, index):
    """(low, high) of the 128-bit hash of the 24 bytes a, b, index."""
    low = np.uint64(24) * _P1
    low += _folded(a ^ _KEYS[0], b ^ _KEYS[8])
    low ^= b + index
    high = _folded(b ^ _KEYS[16], index ^ _KEYS[24])
    high ^= a + b
    return _avalanche(low + high), _U0 - _avalanche(low * _P1 + high * _P4 + np.uint64(24) * _P2)
