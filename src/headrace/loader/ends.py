"""When does a finite run end, on every rank at the same step?

Lanes do not look at each other, so a rank whose own lanes are dry does not know whether another rank still has
something to learn at this step. It may not stop alone: the others would hang in their next collective. So it goes on
with blocks that teach nothing until all are dry, and the ranks agree on that step in one of two ways:

    StoreEnds     under torch.distributed: ranks publish "I have data at step t" as they produce it, in the background
    ReplayEnds    without it (a rank and world size were given by hand): the rank works out the other lanes by itself
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.loader.lanes import LaneTable
from headrace.metrics import Meter, Wait

__all__ = ["AloneEnds", "Ends", "ReplayEnds", "StoreEnds"]


class Ends(Protocol):
    """What the producer asks once a step of a finite run."""

    def others_have_data(self, step: int, first_sample: int, own: bool, stopped: Callable[[], bool]) -> bool:
        """Whether another rank has data at `step`. `own` says whether this one has; it is then not asked to wait."""
        ...


class AloneEnds:
    """One rank: there is nobody else."""

    def others_have_data(self, step: int, first_sample: int, own: bool, stopped: Callable[[], bool]) -> bool:
        return False


class ReplayEnds:
    """Other lanes are walked to their end, once, when this rank's own are dry. Exact, and as costly as their data."""

    def __init__(self, others: LaneTable, *, origin: int, missing: bool, meter: Meter) -> None:
        self._others = others
        self._origin = origin  # the global sample at which the lanes were handed over
        self._missing = missing
        self._meter = meter
        self._last: int | None = None

    def others_have_data(self, step: int, first_sample: int, own: bool, stopped: Callable[[], bool]) -> bool:
        if own:
            return False
        if self._missing:
            raise ConfigError(
                "this rank's lanes are dry, and it cannot know when the other ranks end: it was resumed from its own state "
                "only. Load the list of all ranks' states, or initialise torch.distributed before making the loader."
            )
        if self._last is None:
            with Wait("loader.epoch_end", meter=self._meter, hidden=True):
                self._last = max((self._last_sample(lane, stopped) for lane in self._others.lanes), default=-1)
        return self._last >= first_sample

    def _last_sample(self, lane: int, stopped: Callable[[], bool]) -> int:
        """The global index of the lane's last real sample, counted from where the lane was loaded."""
        last, g = -1, self._others.next_sample(lane, self._origin)
        while self._others.has_more(lane, g) and not stopped():
            taken = self._others.take(range(g, g + 1))
            last = g if taken.sources[0] >= 0 else last
            g = self._others.next_sample(lane, g + 1)
        return last


class StoreEnds:
    """Ranks tell each other through the process group's key-value store, from the producing thread."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int, meter: Meter) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._meter = meter
        self._dry_at: int | None = None

    def others_have_data(self, step: int, first_sample: int, own: bool, stopped: Callable[[], bool]) -> bool:
        if own:
            self._store.set(f"{self._name}/{self._rank}", f"{step}")
            return False
        if self._dry_at is None:
            # Said once, and with the step: another rank may ask about an earlier one, at which this rank still had data.
            self._dry_at = step
            self._store.set(f"{self._name}/{self._rank}", f"{-step - 1}")
        # No deadline of its own: another rank may be busy for an hour while this one looks ahead. Who waits for a batch
        # has a deadline, and is told by this wait's name what it hangs on.
        with Wait("loader.epoch_end", meter=self._meter, deadline=1e6, hidden=True):
            pause = 0.0005
            while not stopped():
                answers = [self._answer(rank, step) for rank in self._others]
                if any(a is True for a in answers):
                    return True
                if all(a is False for a in answers):
                    return False
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        return False

    def _answer(self, rank: int, step: int) -> bool | None:
        """Whether that rank has data at `step`; None while it has not said."""
        name = f"{self._name}/{rank}"
        if not self._store.check([name]):
            return None
        said = int(self._store.get(name))
        if said < 0:
            return step < -said - 1  # dry once is dry for the rest of the pass
        return True if said >= step else None
