"""Keyed numbers: random-looking, and functions of their key alone.

    key("shuffle", seed=7, source=0, epoch=3) -> 0x1f0c…       the same on every machine, for ever
    mix64(k)                                  -> a bijection of 64-bit integers that looks random
    draws(k, n)                               -> mix64(k + i·golden) for i in [0, n): a counter, not a generator

There is no generator state anywhere in headrace: code that needs the i-th random number of a run computes it. The mixer
is the finaliser of splitmix64 (Steele, Lea and Flood, 2014), which passes BigCrush as a counter generator.
"""

from __future__ import annotations

import numpy as np
import xxhash

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(value: int) -> int:
    """The splitmix64 finaliser of one Python int (taken modulo 2**64)."""
    z = value & _MASK
    z = ((z ^ (z >> 30)) * _M1) & _MASK
    z = ((z ^ (z >> 27)) * _M2) & _MASK
    return z ^ (z >> 31)


def mix64_array(values: np.ndarray) -> np.ndarray:
    """`mix64` of every element of a uint64 array; a new array."""
    z = values.astype(np.uint64)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_M1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_M2)
    z ^= z >> np.uint64(31)
    return z


def key(purpose: str, **parts: int) -> int:
    """A 64-bit key for one purpose. Parts are named, so that two purposes never share a key by accident of order."""
    k = xxhash.xxh3_64_intdigest(purpose.encode())
    for name in sorted(parts):
        k = mix64(k ^ xxhash.xxh3_64_intdigest(name.encode()))
        k = mix64(k + (parts[name] & _MASK) * _GOLDEN)
    return k


def derive(parent: int, index: int) -> int:
    """The child key number `index` of `parent`; cheap enough for a hot loop."""
    return mix64(parent + ((index + 1) & _MASK) * _GOLDEN)


def draws(parent: int, count: int, start: int = 0) -> np.ndarray:
    """`derive(parent, i)` for i in [start, start + count), as uint64."""
    counter = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
    return mix64_array(counter * np.uint64(_GOLDEN) + np.uint64(parent & _MASK))
