"""Keyed permutations: which row comes at position i of a shuffle, and at which position a row came.

    p = Permutation(1_000_000, key("rows", seed=7))
    p[12]               -> 604_113          without computing the remaining 999,999
    p.position(604_113) -> 12

Up to 4,096 items: the order of as many keyed draws, kept as a table. Beyond: a keyed Feistel network on the smallest
power of two ≥ n, walked until it lands below n (under two turns on average). Both ways are O(1) in time and memory, so a
shuffle has no buffer to lose and none to rebuild at a resume. A Feistel network alone will not do: on five items some
orders come up several times as often as others, because on so few bits it cannot reach them all equally.
"""

from __future__ import annotations

import numpy as np

from headrace.order.keys import derive, draws

TABLE = 4096
"""Items up to which the order is a table of draws."""
ROUNDS = 8


class Permutation:
    """A bijection of [0, n) chosen by the 64-bit `key`."""

    __slots__ = ("_keys", "_left_bits", "_right_bits", "_table", "key", "n")

    def __init__(self, n: int, key: int) -> None:
        if n < 0:
            raise ValueError(f"a permutation needs n >= 0, got {n}")
        if n > 1 << 62:
            raise ValueError(f"a permutation holds at most 2**62 items, got {n}")
        self.n = n
        self.key = key
        self._table: np.ndarray | None = None
        if n <= TABLE:
            self._table = np.argsort(draws(key, n), kind="stable")
            return
        bits = (n - 1).bit_length()
        self._left_bits = bits // 2
        self._right_bits = bits - bits // 2
        # Per round: what is mixed in, and an odd multiplier of whose product the top bits are taken.
        self._keys = tuple((derive(key, 2 * r), derive(key, 2 * r + 1) | 1) for r in range(ROUNDS))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        return int(self.take(np.array([position]))[0])

    def position(self, item: int) -> int:
        """The position at which `item` stands: the inverse of indexing."""
        return int(self.positions(np.array([item]))[0])

    def take(self, positions: np.ndarray) -> np.ndarray:
        """The items at many positions (int64 in, int64 out)."""
        found = self._inside(positions)
        return self._table[found] if self._table is not None else self._walk(found, range(ROUNDS))

    def positions(self, items: np.ndarray) -> np.ndarray:
        """The positions of many items (int64 in, int64 out)."""
        found = self._inside(items)
        if self._table is not None:
            return np.argsort(self._table)[found]
        return self._walk(found, range(ROUNDS - 1, -1, -1))

    def slice(self, start: int, stop: int) -> np.ndarray:
        """The items at positions [start, stop)."""
        return self.take(np.arange(start, stop, dtype=np.int64))

    def _inside(self, values: np.ndarray) -> np.ndarray:
        x = np.asarray(values, dtype=np.int64)
        if x.size and (int(x.min()) < 0 or int(x.max()) >= self.n):
            raise IndexError(f"values {int(x.min())} to {int(x.max())} of a permutation of {self.n}")
        return x

    def _walk(self, values: np.ndarray, rounds: range) -> np.ndarray:
        out = self._feistel(values.astype(np.uint64), rounds)
        outside = np.flatnonzero(out >= np.uint64(self.n))
        while outside.size:
            out[outside] = self._feistel(out[outside], rounds)
            outside = outside[out[outside] >= np.uint64(self.n)]
        return out.astype(np.int64)

    def _feistel(self, x: np.ndarray, rounds: range) -> np.ndarray:
        """Even rounds change the left half by the right one, odd rounds the right half by the left. Run backwards, the rounds invert the permutation."""
        right_bits = np.uint64(self._right_bits)
        halves = [x >> right_bits, x & np.uint64((1 << self._right_bits) - 1)]
        shifts = [np.uint64(64 - self._left_bits), np.uint64(64 - self._right_bits)]
        scratch = np.empty_like(x)
        for r in rounds:
            mixed_in, multiplier = self._keys[r]
            np.bitwise_xor(halves[1 - r % 2], np.uint64(mixed_in), out=scratch)
            scratch *= np.uint64(multiplier)
            scratch >>= shifts[r % 2]
            halves[r % 2] ^= scratch
        return (halves[0] << right_bits) | halves[1]
