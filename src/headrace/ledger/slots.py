"""Slots by group id, and the order in which they are evicted.

    slots = Slots({"last": np.int32, "stream": np.int32}, limit=100_000)
    slots.make_room(1_024)              grows by doubling, up to the limit
    taken = slots.take(gids)            slots for new gids
    slots.find(gids)                    the slot of each gid, -1 where there is none
    slots.append(taken)                 at the end of the line
    slots.remove(slots.line()[:64])     the oldest 64

The index from gid to slot is compiled (slot_index.py); the rest is numpy. The line is a log of slots: an entry counts as long as its slot says that
this is its place, so a slot leaves the line, or moves to its end, without being looked for. Once the log is full, what no longer
counts is dropped. With the two columns above a group takes 8 + 8 + 4 + 8 + 8 + 8 = 44 bytes: key, index, free list, place, log, columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from headrace.ledger.settings import NO_LIMIT
from headrace.ledger.slot_index import INDEX_KERNELS, enter_slots, find_slots, remove_slots
from headrace.runtime.compiled import wait_for_kernels

_FIRST = 1_024
_MANY = 20_000
"""Gids at once from which on it takes less to wait for the compiler than to do without it."""
_PIECE = 256


class Slots:
    """Slots by gid. `columns` are arrays by slot that grow with it."""

    def __init__(self, columns: Mapping[str, type[np.generic]], *, limit: int = NO_LIMIT) -> None:
        self.limit = limit
        self._dtypes = dict(columns)
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._count = 0
        self.size = 0
        """Slots that there is memory for."""
        self.keys = np.empty(0, np.int64)
        self._free = np.empty(0, np.int32)
        """The first size − count of them are free, the next one to be taken last."""
        self._place = np.empty(0, np.int64)
        """Where each slot stands in the log, -1: nowhere."""
        self.columns = {name: np.empty(0, dtype) for name, dtype in self._dtypes.items()}
        self._table = np.zeros(2, np.int32)
        self._log = np.empty(0, np.int32)
        self._head = self._tail = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        held = (self.keys, self._free, self._place, self._table, self._log, *self.columns.values())
        return sum(array.nbytes for array in held)

    # ------------------------------------------------------------------------------------------------ index

    def find(self, gids: np.ndarray) -> tuple[np.ndarray, int]:
        """(the slot of each gid or -1, how many there are)."""
        _compiled_for(gids)
        slots = np.empty(len(gids), np.int64)
        return slots, int(find_slots(self.keys, self._table, gids, slots))

    def make_room(self, more: int) -> bool:
        """Have slots for so many more, as far as the limit goes; whether the arrays are others now. Slots keep their numbers."""
        wanted = min(self._count + more, self.limit)
        if wanted <= self.size:
            return False
        before, size = self.size, min(max(wanted, 2 * self.size, _FIRST), self.limit)
        in_use = np.setdiff1d(np.arange(before), self._free[: before - self._count], assume_unique=True)
        self.keys, self._place = _grown(self.keys, size), _grown(self._place, size)
        self.columns = {name: _grown(column, size) for name, column in self.columns.items()}
        self._free = np.concatenate(
            [np.arange(size - 1, before - 1, -1, dtype=np.int32), self._free[: before - self._count]]
        )
        self._free = _grown(self._free, size)
        self._log = _grown(self._log, 2 * size)
        self._table = np.zeros(2 * size, np.int32)
        self.size = size
        _compiled_for(in_use)
        enter_slots(self.keys, self._table, in_use)
        return True

    def take(self, gids: np.ndarray) -> np.ndarray:
        """Slots for gids that have none, in no line yet. There is room (`make_room`)."""
        _compiled_for(gids)
        free = self.size - self._count
        slots = self._free[free - len(gids) : free][::-1].astype(np.int64)
        self.keys[slots] = gids
        self._place[slots] = -1
        enter_slots(self.keys, self._table, slots)
        self._count += len(gids)
        return slots

    def remove(self, slots: np.ndarray) -> None:
        """Give these slots back."""
        _compiled_for(slots)
        remove_slots(self.keys, self._table, slots)
        self._place[slots] = -1
        free = self.size - self._count
        self._free[free : free + len(slots)] = slots
        self._count -= len(slots)

    # ------------------------------------------------------------------------------------------------- line

    def append(self, slots: np.ndarray) -> None:
        """Put these slots, each once, at the end of the line, wherever they stood."""
        if self._tail + len(slots) > len(self._log):
            kept = self.line()
            self._log[: len(kept)] = kept
            self._head, self._tail = 0, len(kept)
            self._place[kept] = np.arange(len(kept))
        end = self._tail + len(slots)
        self._log[self._tail : end] = slots
        self._place[slots] = np.arange(self._tail, end)
        self._tail = end

    def leave_line(self, slots: np.ndarray) -> None:
        """Take slots out of the line that stay in use."""
        self._place[slots] = -1

    def line(self) -> np.ndarray:
        """The slots in line, oldest first."""
        return self._counting(self._head, self._tail)

    def oldest(self) -> Iterator[np.ndarray]:
        """The slots in line, oldest first, piece by piece. The line must not change meanwhile."""
        at, many = self._head, _PIECE
        while at < self._tail:
            upto = min(at + many, self._tail)
            slots = self._counting(at, upto)
            if not len(slots) and at == self._head:  # what was left behind at the head is not looked at again
                self._head = upto
            elif len(slots):
                yield slots
            at, many = upto, 2 * many

    def oldest_before(self, column: str, cutoff: int) -> Iterator[np.ndarray]:
        """Of the slots in line, which is sorted by this column, those below `cutoff`, piece by piece."""
        for slots in self.oldest():
            old = slots[self.columns[column][slots] < cutoff]
            yield old
            if len(old) < len(slots):
                return

    def first(self, count: int) -> np.ndarray:
        """The oldest `count` slots in line, or as many as there are."""
        found: list[np.ndarray] = [np.empty(0, np.int64)]
        for slots in self.oldest():
            found.append(slots[:count])
            count -= len(found[-1])
            if not count:
                break
        return np.concatenate(found)

    def _counting(self, start: int, stop: int) -> np.ndarray:
        slots = self._log[start:stop]
        return slots[self._place[slots] == np.arange(start, stop)].astype(np.int64)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    grown = np.empty(size, array.dtype)
    grown[: len(array)] = array[:size]
    return grown


def _compiled_for(gids: np.ndarray) -> None:
    if len(gids) >= _MANY and not find_slots.is_compiled:
        wait_for_kernels(*INDEX_KERNELS)
