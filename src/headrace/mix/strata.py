"""Stratified order of labelled rows: every class is served.

    plan = Strata(labels, key=key("strata", seed=7))
    plan.rows(0, 32)             the rows of samples 0 … 31

    equal      in each round of as many samples as there are classes, every class comes up once, in an order drawn for the round
    natural    in each epoch every row comes up once; a class is spread over it as evenly as its share allows

Within a class rows come in a keyed order, each once before any comes again, so a rare class is repeated and a common one is not
cut short. The row of a sample is a pure function of (labels, key, index): O(1) for equal, one sort an epoch for natural. Nothing
is drawn from a state, so any provider can make any file.
"""

from __future__ import annotations

import functools
import itertools
from typing import Literal

import numpy as np

from headrace.order import Permutation, derive, draws

Balance = Literal["equal", "natural"]
BALANCES: tuple[Balance, ...] = ("equal", "natural")
_KEPT = 4096
"""Shuffles of classes that are kept: a table of 4,096 rows takes 32 KiB, beyond that none is made (order.permutation)."""


def held_out(labels: np.ndarray, fraction: float, *, key: int) -> np.ndarray:
    """Which rows are kept for validation: this share of every class, drawn by key, as one bool a row.

    Of a class with two rows or more at least one is kept and at least one is not; one with a single row is trained on.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"a fraction of 0 or more and less than 1 can be held out, got {fraction}")
    kept = np.zeros(len(labels), bool)
    if not fraction:
        return kept
    classes, inverse = np.unique(labels, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    first = np.searchsorted(inverse[order], np.arange(len(classes) + 1)).tolist()
    for name, (start, end) in enumerate(itertools.pairwise(first)):
        size = end - start
        many = min(size - 1, max(1, round(fraction * size)))
        kept[order[start + Permutation(size, derive(key, name)).slice(0, many)]] = True
    return kept


class Strata:
    """The order of labelled rows."""

    def __init__(self, labels: np.ndarray, *, key: int, balance: Balance = "equal") -> None:
        """`labels`: the class of each row; what they are called does not matter, only which rows share one."""
        if labels.ndim != 1 or not len(labels):
            raise ValueError(f"strata need one label for each of at least one row, got labels of shape {labels.shape}")
        if balance not in BALANCES:
            raise ValueError(f"balance is {balance!r}, expected one of {', '.join(BALANCES)}")
        self.classes, inverse = np.unique(labels, return_inverse=True)
        self._order = np.argsort(inverse, kind="stable")
        self._first = np.searchsorted(inverse[self._order], np.arange(len(self.classes) + 1))
        self.balance: Balance = balance
        self._rounds, self._within, self._phases = derive(key, 0), derive(key, 1), derive(key, 2)
        self._shuffle = functools.lru_cache(_KEPT)(self._new_shuffle)
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each class."""
        return np.diff(self._first)

    def rows(self, first: int, count: int) -> np.ndarray:
        """The rows of samples first … first + count − 1."""
        if first < 0 or count < 0:
            raise ValueError(f"samples {first} to {first + count} of a plan that begins at 0")
        return self._equal(first, count) if self.balance == "equal" else self._natural(first, count)

    def _equal(self, first: int, count: int) -> np.ndarray:
        classes = len(self.classes)
        begin, end = first // classes, -(-(first + count) // classes)
        # One draw for each place of each round; their order within a round is the order of its classes.
        turn = np.argsort(draws(self._rounds, (end - begin) * classes, begin * classes).reshape(-1, classes), axis=1)
        found = np.empty(turn.shape, np.int64)
        for name in range(classes):
            found[turn == name] = self._of_class(name, begin, end)
        return found.reshape(-1)[first - begin * classes :][:count]

    def _of_class(self, name: int, begin: int, end: int) -> np.ndarray:
        """Rows number begin … end − 1 of a class, counted over all its epochs."""
        size, start = int(self._first[name + 1] - self._first[name]), int(self._first[name])
        pieces = []
        while begin < end:
            epoch, at = divmod(begin, size)
            many = min(end - begin, size - at)
            pieces.append(self._order[start + self._shuffle(name, epoch, size).slice(at, at + many)])
            begin += many
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _new_shuffle(self, name: int, epoch: int, size: int) -> Permutation:
        return Permutation(size, derive(derive(self._within, name), epoch))

    def _natural(self, first: int, count: int) -> np.ndarray:
        total, pieces = len(self._order), []
        while count:
            epoch, at = divmod(first, total)
            many = min(count, total - at)
            pieces.append(self._order_of(epoch)[at : at + many])
            first, count = first + many, count - many
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            phases = draws(derive(self._phases, epoch), len(self.classes)) / 2.0**64
            rows, times = [], []
            for name, size in enumerate(self.sizes.tolist()):
                rows.append(self._of_class(name, epoch * size, (epoch + 1) * size))
                times.append((np.arange(size) + phases[name]) / size)
            self._epoch = epoch, np.concatenate(rows)[np.argsort(np.concatenate(times), kind="stable")]
        return self._epoch[1]
