"""In which slot is a group?

    places = Places({"last": np.int32, "stream": np.int32}, limit=100_000)
    places.make_room(1_024)              grows by doubling, up to the limit
    places.find(gids)                    slots, -1 where there is none

An index from gid to slot, and the slots in lists (kernels.py). It grows as it fills, so a large limit costs nothing until it is
needed. With the two columns above a group takes 8 + 10 + 8 + 8 = 34 bytes: key, index at twice the slots, list, columns.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType

import numpy as np

from headrace.ledger.settings import NO_LIMIT
from headrace.metrics import Wait

__all__ = ["Places", "loops"]

_FIRST = 1_024
_HEAD, _COUNT, _PENDING, _PENDING_COUNT = (
    0,
    3,
    5,
    7,
)  # as kernels.py has them, which is not imported before it is needed


@functools.cache
def loops() -> ModuleType:
    """The compiled loops; the first call compiles them, or loads them from numba's cache."""
    with Wait("kernels.compile"):
        return importlib.import_module("headrace.ledger.kernels")


class Places:
    """Slots by gid. `core` is what every loop takes first; `columns` are arrays by slot that grow with it, `whole` has them too."""

    def __init__(self, columns: Mapping[str, type[np.generic]], *, limit: int = NO_LIMIT) -> None:
        self.limit = limit
        self._dtypes = dict(columns)
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._allocate(0)

    def _allocate(self, slots: int) -> None:
        self.slots = slots
        self.keys = np.zeros(slots, np.int64)
        self.table = np.zeros(max(2 * slots, 2), np.int32)
        self.away = np.zeros(len(self.table), np.uint8)
        self.before = np.zeros(slots, np.int32)
        self.after = np.zeros(slots, np.int32)
        self.ends = np.array([-1, -1, -1, 0, 0, -1, -1, 0], np.int64)
        self.columns = {name: np.zeros(slots, dtype) for name, dtype in self._dtypes.items()}
        self.core = (self.keys, self.table, self.away, self.before, self.after, self.ends)
        self.whole = (*self.core, *self.columns.values())

    def __len__(self) -> int:
        return int(self.ends[_COUNT])

    @property
    def pending(self) -> int:
        """Slots touched in the step under way."""
        return int(self.ends[_PENDING_COUNT])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.whole)

    def make_room(self, more: int) -> bool:
        """Have slots for so many more, as far as the limit goes; whether the arrays are others now. Slots keep their numbers."""
        wanted = min(len(self) + more, self.limit)
        if wanted <= self.slots:
            return False
        grown = min(max(wanted, 2 * self.slots, _FIRST), self.limit)
        old, in_use, ends = self.slots, self.walk(_HEAD, _PENDING), self.ends
        held = (self.keys, self.before, self.after, *self.columns.values())
        self._allocate(grown)
        for before, now in zip(held, (self.keys, self.before, self.after, *self.columns.values()), strict=True):
            now[:old] = before
        self.ends[:] = ends
        loops().reindex(self.keys, self.table, self.away, in_use)
        return True

    def find(self, gids: np.ndarray) -> tuple[np.ndarray, int]:
        """(the slot of each gid or -1, how many there are)."""
        slots = np.empty(len(gids), np.int64)
        return slots, loops().find_slots(self.keys, self.table, self.away, gids, slots)

    def walk(self, *heads: int) -> np.ndarray:
        """The slots of these lists, one list after the other."""
        slots = np.empty(len(self), np.int64)
        n = 0
        for head in heads:
            n += loops().walk(self.after, self.ends, slots[n:], head)
        return slots[:n]

    def line(self) -> np.ndarray:
        """The slots that are not pending, oldest first."""
        return self.walk(_HEAD)

    def touched(self) -> np.ndarray:
        """The slots of the step under way, by gid."""
        slots = self.walk(_PENDING)
        return slots[np.argsort(self.keys[slots])]
