"""Pick modes: which slice of the pool gives the next batch.

    proportional   each slice is picked in proportion to its length, evenly spaced: all run dry at about the same time
    weighted       drawn, with the picks left as weights
    uniform        drawn, all alike
    round_robin    each slice in turn
    sequential     the first slot until it is dry

Proportional is stride scheduling. A slice of n picks that came into the pool at virtual time e is due at

    e + (k + phase) / n        for its picks k = 0, 1, …, n − 1        (fixed-point integers, 2**32 a unit)

and the earliest is picked. The phase, in [0, 1), is keyed by stream and epoch: with a constant one, lanes whose files have
equal lengths go in step, and all their slices run dry at the same steps. A heap finds the earliest in O(log K); there is no
generator, and nothing to save but e.

Weighted with refill is pathological by construction: what is left decays exponentially, so a slice with one pick left is in
the pool in some 70 % of the steps and waits for hundreds of them. It is kept for runs that began with it. The draws are pure
functions of (key, step): counters, never a generator.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, get_args

from headrace.mix.pool import Slice
from headrace.order import derive

PickMode = Literal["proportional", "weighted", "uniform", "round_robin", "sequential"]
PICK_MODES: tuple[PickMode, ...] = get_args(PickMode)

UNIT_BITS = 32


class Picker:
    """Chooses among the slices of a pool. Told of everything that happens to them."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.clock = 0
        """Virtual time; only proportional has one."""
        self.turn = 0
        """The slot whose turn it is; only round_robin has one."""

    def choose(self, slots: list[Slice], step: int) -> Slice:
        raise NotImplementedError

    def admitted(self, one: Slice) -> None:
        """A slice has come into its slot (its `entry` is set)."""

    def read_on(self, one: Slice) -> None:
        """A slice was picked and is not dry."""

    def removed(self, slots: list[Slice], slot: int) -> None:
        """The slice of `slot` is dry and nothing took its place; those behind it have moved up."""

    def passed(self, slot: int) -> None:
        """The slice of `slot` was dry and another has taken its place."""


class _Proportional(Picker):
    def __init__(self, key: int) -> None:
        super().__init__(key)
        self._heap: list[tuple[int, int, Slice]] = []

    def choose(self, slots: list[Slice], step: int) -> Slice:
        self.clock, _, one = self._heap[0]
        return one

    def admitted(self, one: Slice) -> None:
        one.due = _due(one)
        heapq.heappush(self._heap, (one.due, one.stream, one))

    def read_on(self, one: Slice) -> None:
        one.due = due = _due(one)
        heapq.heapreplace(self._heap, (due, one.stream, one))

    def passed(self, slot: int) -> None:
        heapq.heappop(self._heap)

    def removed(self, slots: list[Slice], slot: int) -> None:
        heapq.heappop(self._heap)


def _due(one: Slice) -> int:
    taken = -(-one.position // one.per_pick)
    return one.entry + ((taken << UNIT_BITS) + one.phase) // (taken + one.remaining)


class _Weighted(Picker):
    """A Fenwick tree over the picks left: a draw and an update are O(log K)."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self._tree: list[int] = [0]
        self._held: list[int] = []
        self._total = 0
        self._top = 0

    def choose(self, slots: list[Slice], step: int) -> Slice:
        target = derive(self.key, step) % self._total
        tree, at, bit, size = self._tree, 0, self._top, len(self._tree)
        while bit:
            if at + bit < size and tree[at + bit] <= target:
                at += bit
                target -= tree[at]
            bit >>= 1
        return slots[at]

    def admitted(self, one: Slice) -> None:
        if one.slot == len(self._held):
            self._held.append(one.remaining)
            self._build()
        else:
            self._add(one.slot, one.remaining - self._held[one.slot])

    def read_on(self, one: Slice) -> None:
        self._add(one.slot, one.remaining - self._held[one.slot])

    def removed(self, slots: list[Slice], slot: int) -> None:
        del self._held[slot]
        self._build()

    def _add(self, slot: int, change: int) -> None:
        self._held[slot] += change
        self._total += change
        tree, at = self._tree, slot + 1
        while at < len(tree):
            tree[at] += change
            at += at & -at

    def _build(self) -> None:
        self._total = sum(self._held)
        tree = self._tree = [0, *self._held]
        self._top = 1 << len(self._held).bit_length() >> 1
        for at in range(1, len(tree)):
            above = at + (at & -at)
            if above < len(tree):
                tree[above] += tree[at]


class _Uniform(Picker):
    def choose(self, slots: list[Slice], step: int) -> Slice:
        return slots[derive(self.key, step) % len(slots)]


class _RoundRobin(Picker):
    def choose(self, slots: list[Slice], step: int) -> Slice:
        if self.turn >= len(slots):
            self.turn = 0
        return slots[self.turn]

    def read_on(self, one: Slice) -> None:
        self.turn = one.slot + 1

    def passed(self, slot: int) -> None:
        self.turn = slot + 1


class _Sequential(Picker):
    def choose(self, slots: list[Slice], step: int) -> Slice:
        return slots[0]


_PICKERS: dict[str, type[Picker]] = {
    "proportional": _Proportional,
    "weighted": _Weighted,
    "uniform": _Uniform,
    "round_robin": _RoundRobin,
    "sequential": _Sequential,
}


def picker_for(mode: PickMode, key: int) -> Picker:
    """The picker of a mode."""
    return _PICKERS[mode](key)


def promised_shares(mode: PickMode, picks: Sequence[int]) -> Sequence[int]:
    """What share of the picks each slice is promised, in proportion to the others, by the picks that it has in all; 0 where none is."""
    if mode in ("proportional", "weighted"):
        return picks
    return [0 if mode == "sequential" else 1] * len(picks)
