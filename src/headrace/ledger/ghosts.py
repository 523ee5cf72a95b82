"""Which groups were evicted, and when?

    ghosts = Ghosts(limit=65_536)
    ghosts.make_room()                   when evict says that there is none
    ghosts.load({"gid": ..., "when": ..., "stream": ..., "epoch": ..., "mode": ...})      oldest first

Ghosts come and go in one order, so nothing is ever taken out of their index. It has two halves. What is new is entered in the younger one; an
entry whose ghost has gone stays behind, and leads to a slot that is free or another's, which is seen there. Once all that are left
are of the younger half, the older one is cleared (a few microseconds) and they change places. A ghost that goes costs nothing, then: it was a
third of the time of an eviction.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.ledger.places import loops

__all__ = ["GHOST_COLUMNS", "Ghosts"]

GHOST_COLUMNS = {"when": np.int32, "stream": np.int32, "epoch": np.int32, "mode": np.uint8}
_FIRST = 1_024
# As kernels.py has them, which is not imported before it is needed:
_HEAD, _COUNT, _OLDER, _ENTRIES, _DROPPED = 0, 3, 5, 6, 7


class Ghosts:
    """What is left of evicted groups, the oldest first; at most `limit`. `core` is what every loop over them takes first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._allocate(0)

    def _allocate(self, slots: int) -> None:
        self.slots = slots
        self.keys = np.zeros(slots, np.int64)
        self.before, self.after = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        self.ends = np.array([-1, -1, -1, 0, 0, 0, 0, 0], np.int64)
        self.columns = {name: np.zeros(slots, dtype) for name, dtype in GHOST_COLUMNS.items()}
        self._halves = [(np.zeros(2 * slots or 2, np.int32), np.zeros(2 * slots or 2, np.uint8)) for _ in range(2)]
        self._gather()

    def _gather(self) -> None:
        younger, older = self._halves
        self.core = (self.keys, *younger, *older, self.before, self.after, self.ends, *self.columns.values())

    def __len__(self) -> int:
        return int(self.ends[_COUNT])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.core)

    def take_dropped(self) -> int:
        """How many went to make room for others since this was last asked."""
        dropped = int(self.ends[_DROPPED])
        self.ends[_DROPPED] = 0
        return dropped

    def make_room(self) -> None:
        """Have room for one more at least."""
        if len(self) == self.slots < self.limit:
            self._grow()
        else:
            self._turn()

    def _turn(self) -> None:
        """Make the younger half the older one. Both hold `slots` entries, half of what would fit."""
        self._halves.reverse()
        self._gather()
        if self.ends[_OLDER]:  # many were known again, and so these have lived through a whole half
            self._reindex()
        else:
            self._halves[0][1][:] = 0
            self.ends[_ENTRIES] = 0
        self.ends[_OLDER] = len(self)

    def _grow(self) -> None:
        held = {name: column[self.line()] for name, column in {"gid": self.keys, **self.columns}.items()}
        dropped = self.ends[_DROPPED]
        self.load(held, slots=min(max(2 * self.slots, _FIRST), self.limit))
        self.ends[_DROPPED] = dropped

    def _reindex(self) -> None:
        for _, away in self._halves:
            away[:] = 0
        self.ends[_ENTRIES] = 0
        loops().reindex(self.keys, *self._halves[1], self.line())

    def load(self, columns: Mapping[str, np.ndarray], *, slots: int | None = None) -> None:
        """Become these, the oldest first, with room for so many."""
        count = len(columns["gid"])
        self._allocate(count if slots is None else slots)
        if not count:
            return
        self.keys[:count] = columns["gid"]
        for name, column in self.columns.items():
            column[:count] = columns[name]
        self.before[:count] = np.arange(-1, count - 1)
        self.after[:count] = np.arange(1, count + 1)
        self.after[count - 1] = -1
        self.ends[:6] = 0, count - 1, -1, count, count, count
        self._reindex()

    def line(self) -> np.ndarray:
        """Their slots, oldest first."""
        slots = np.empty(len(self), np.int64)
        loops().walk(self.after, self.ends, slots, _HEAD)
        return slots
