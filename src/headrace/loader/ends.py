"""Agreement of the ranks: which steps are delivered, and where a finite run ends.

Lanes do not look at each other, so a rank whose own share of a step has nothing to learn does not know whether another
rank's share has. A step that teaches no rank anything is passed over by all of them; one that teaches some rank is delivered by all, because the
others would hang in their next collective. The run ends, on every rank at the same step, when no lane of any rank has anything left. The ranks
agree on this in one of two ways:

    StoreEnds     under torch.distributed: ranks publish what they have at step t as they produce it, in the background
    ReplayEnds    without it (a rank and world size were given by hand): the rank works out the other lanes by itself
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from headrace.errors import ConfigError
from headrace.loader.lanes import LaneTable
from headrace.metrics import Meter, Wait


class Share(NamedTuple):
    """What some ranks have at a step."""

    real: bool
    """A sample of the step has something to learn."""
    more: bool
    """So has a sample of this step or of a later one."""


_NOTHING = Share(False, False)


class Ends(Protocol):
    """What the producer asks once a step."""

    def others(self, step: int, samples: range, own: Share, stopped: Callable[[], bool]) -> Share:
        """What the other ranks have at `step`, of which `samples` are the global samples. A rank with something to learn itself is not made to
        wait: what the store says about the other ranks then means nothing."""
        ...


class AloneEnds:
    """One rank: there are no others."""

    def others(self, step: int, samples: range, own: Share, stopped: Callable[[], bool]) -> Share:
        return _NOTHING


class ReplayEnds:
    """The other lanes are walked up to the step in question, when this rank's own share is empty. Exact, and as costly as their data."""

    def __init__(self, others: LaneTable, *, origin: int, missing: bool, meter: Meter) -> None:
        """`origin` is the global sample at which the lanes were handed over; `missing`: their states are not known."""
        self._table = others
        self._next = {lane: others.next_sample(lane, origin) for lane in others.lanes}
        self._missing = missing
        self._meter = meter

    def others(self, step: int, samples: range, own: Share, stopped: Callable[[], bool]) -> Share:
        if own.real:
            return _NOTHING
        if self._missing:
            raise ConfigError(
                "this rank's lanes are dry, and it cannot know when the other ranks end: it was resumed from its own state "
                "only. Load the list of all ranks' states, or initialise torch.distributed before making the loader."
            )
        with Wait("loader.epoch_end", meter=self._meter, hidden=True):
            # Every lane is walked, also where one has answered already: the next step is asked about later samples only.
            found = [self._walk(lane, samples, stopped) for lane in self._table.lanes]
            if any(found):
                return Share(True, True)
            return Share(False, any(self._table.has_more(lane, g) for lane, g in self._next.items()))

    def _walk(self, lane: int, samples: range, stopped: Callable[[], bool]) -> bool:
        """Take a lane's samples up to the end of `samples`; whether one of those in `samples` has something to learn."""
        real, g = False, self._next[lane]
        while g < samples.stop and not stopped():
            real |= self._table.take(range(g, g + 1)).has_text and g >= samples.start
            g = self._table.next_sample(lane, g + 1)
        self._next[lane] = g
        return real


class StoreEnds:
    """Ranks tell each other through the process group's key-value store, from the producing thread.

    <name>/<rank>           the last step this rank has produced; −d − 1 once it has nothing from step d on
    <name>/<rank>/<step>    exists if its share of that step has nothing to learn
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int, meter: Meter) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._meter = meter
        self._dry = False

    def others(self, step: int, samples: range, own: Share, stopped: Callable[[], bool]) -> Share:
        self._publish(step, own)
        if own.real:
            return _NOTHING
        # No deadline of its own: another rank may be busy for an hour while this one looks ahead. Who waits for a batch
        # has a deadline, and this wait's name says what it hangs on.
        with Wait("loader.epoch_end", meter=self._meter, deadline=1e6, hidden=True):
            pause = 0.0005
            while not stopped():
                answers = [self._answer(rank, step) for rank in self._others]
                answered = [a for a in answers if a is not None]
                if any(a.real for a in answered):
                    return Share(True, True)
                if len(answered) == len(answers):
                    return Share(False, any(a.more for a in answered))
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        return _NOTHING

    def _publish(self, step: int, own: Share) -> None:
        if own.more:
            if not own.real:  # before the step itself is published: a rank that sees the one sees the other
                self._store.set(f"{self._name}/{self._rank}/{step}", "1")
            self._store.set(f"{self._name}/{self._rank}", f"{step}")
        elif not self._dry:
            # Said once, and with the step: another rank may ask about an earlier one, at which this rank still had data.
            self._dry = True
            self._store.set(f"{self._name}/{self._rank}", f"{-step - 1}")

    def _answer(self, rank: int, step: int) -> Share | None:
        """What that rank has at `step`; None while it has not said."""
        name = f"{self._name}/{rank}"
        if not self._store.check([name]):
            return None
        said = int(self._store.get(name))
        if said < 0 and step >= -said - 1:
            return _NOTHING  # dry once is dry for the rest of the pass
        if 0 <= said < step:
            return None
        return Share(not self._store.check([f"{name}/{step}"]), True)
