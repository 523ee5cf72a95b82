"""Named waits, phases and steps. The parts of a step add up to its whole.

    with meter.step():                                    step   |=====================================|
        with Wait("loader.next", deadline=60) as wait:    wait   |======|
            item = queue.get(timeout=wait.remaining())
        with phase("forward"):                            phase         |=================|
            with Wait("grad.sync"): ...                   wait                |====|
                                                          other                           |============|

Times are exclusive: what lies inside an inner wait or phase counts for the inner one only. So for every step

    step/seconds = sum of step/phase/<name>/seconds + sum of step/wait/<name>/seconds + step/other/seconds

while `wait/<name>/seconds` and `phase/<name>/seconds` count everywhere, also in background threads and outside steps.
An exposed wait (the trainer's thread was blocked) is counted apart from a hidden one (`hidden=True`: a
background thread was idle). A hidden wait inside a step or an exposed wait of the same thread is exposed
after all, because the trainer itself is blocked.

Draining subtracts what was drained before. A forked child starts from zero. Entering and leaving a Wait costs about 3 us, where a
bare pair of clock reads costs 0.17 us (benchmarks/metrics.py).

A Wait belongs to the thread that enters it and is meant to nest. One that is left out of order (a generator closed
late) is taken out of the chain and still counted; then the parts may overlap.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from typing import Self

from headrace.errors import DeadlineExceeded
from headrace.metrics.spec import MetricSpec, Number, Reduction, register

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_LONGEST = threading.TIMEOUT_MAX
_clock = time.perf_counter

_SPECS = (
    MetricSpec("wait/<name>/seconds", Reduction.SUM, True, "s", None, "time spent in this wait, inner waits not counted"),
    MetricSpec("wait/<name>/count", Reduction.SUM, False, "", None, "how often this wait was entered"),
    MetricSpec("waits/exposed/seconds", Reduction.SUM, True, "s", None, "all waits in which the trainer's thread was blocked"),
    MetricSpec("waits/hidden/seconds", Reduction.SUM, False, "s", None, "idle time of background threads"),
    MetricSpec("phase/<name>/seconds", Reduction.SUM, True, "s", None, "time spent in this phase, without what lies inside it"),
    MetricSpec("step/seconds", Reduction.SUM, True, "s", None, "time spent in steps; it is the sum of all step/phase, step/wait and step/other times"),
    MetricSpec("step/count", Reduction.SUM, False, "", None, "steps finished"),
    MetricSpec("step/phase/<name>/seconds", Reduction.SUM, False, "s", None, "the part of step/seconds in this phase"),
    MetricSpec("step/wait/<name>/seconds", Reduction.SUM, False, "s", None, "the part of step/seconds in this wait"),
    MetricSpec("step/other/seconds", Reduction.SUM, False, "s", None, "the part of step/seconds in no phase and no wait"),
)  # fmt: skip
register(*_SPECS)


class _Chain:
    """The open waits, phases and steps of one thread in one meter, linked from the innermost outwards."""

    __slots__ = ("__weakref__", "top")

    def __init__(self) -> None:
        self.top: _Frame | None = None


class Meter:
    """Waits, phases and counters of a process, or of a part of it. Any thread may add; one reader drains."""

    def __init__(self) -> None:
        self._forget()
        _meters.add(self)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a signal handler may count while its thread does
        self._local = threading.local()
        self._chains: weakref.WeakSet[_Chain] = weakref.WeakSet()  # a chain ends with its thread, which alone holds it
        self._totals: dict[str, Number] = {}
        self._drained: dict[str, Number] = {}

    def add(self, key: str, value: Number = 1) -> None:
        """Add to the counter `key` (a whole metric key, declared by its owner as a SUM)."""
        with self._lock:
            self._totals[key] = self._totals.get(key, 0) + value

    def step(self) -> _Step:
        """`with meter.step():` measures one whole step of this thread."""
        return _Step("step", self)

    def totals(self) -> dict[str, Number]:
        """Everything since the meter was made, under flat keys."""
        with self._lock:
            return dict(self._totals)

    def drain(self) -> dict[str, Number]:
        """What was added since the last drain, under flat keys; {} if nothing was."""
        with self._lock:
            totals, before = dict(self._totals), self._drained
            self._drained = totals
        return {key: value - before.get(key, 0) for key, value in totals.items() if value != before.get(key, 0)}

    drain_metrics = drain

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """The families of waits, phases and steps. A counter is declared by the code that adds to it."""
        return _SPECS

    def open_waits(self) -> list[Wait]:
        """The waits that threads are in right now, the longest first: what to print when a run stands still."""
        with self._lock:
            tops = [chain.top for chain in self._chains]
        found: list[Wait] = []
        for frame in tops:
            while frame is not None:
                if isinstance(frame, Wait):
                    found.append(frame)
                frame = frame._outer
        return sorted(found, key=lambda wait: wait.start)

    def _join(self) -> _Chain:
        """The chain of a thread that comes here for the first time."""
        chain = self._local.chain = _Chain()
        with self._lock:
            self._chains.add(chain)
        return chain


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _forget_all() -> None:
    for meter in list(_meters):
        meter._forget()


# A forked child (a DataLoader worker) would report the parent's seconds a second time, and its lock may be held by a
# thread that does not exist there.
os.register_at_fork(after_in_child=_forget_all)

_default = Meter()


def default_meter() -> Meter:
    """The meter of this process, used by every Wait and phase that is given none."""
    return _default


class _Frame:
    """An open wait, phase or step: a link in its thread's chain that collects the time of what lies inside it."""

    hidden = False
    """Whether it belongs to a background thread, whose waits no trainer feels."""

    def __init__(self, key: str, meter: Meter | None) -> None:
        kind, slash, name = key.partition("/")
        if slash and not _NAME.fullmatch(name):
            raise ValueError(f"a {kind} is named by letters, digits and _.- such as 'spool.empty', got {name!r}")
        self.key = key
        self.meter = meter if meter is not None else _default
        self.seconds = 0.0
        self.exposed = False
        """Whether the trainer's thread is blocked: a hidden wait inside something exposed is exposed too."""
        self.step: _Step | None = None
        """The step it lies in."""
        self._chain: _Chain | None = None
        """The chain it is in; None unless it is open."""

    def __enter__(self) -> Self:
        if self._chain is not None:
            raise RuntimeError(f"{self.key!r} is already open; make a new one for each `with`")
        try:
            chain: _Chain = self.meter._local.chain
        except AttributeError:
            chain = self.meter._join()
        outer = chain.top
        if outer is None:
            self.step, self.exposed = None, not self.hidden
        else:
            self.step, self.exposed = outer.step, outer.exposed or not self.hidden
        self._chain, self._outer, self._inner = chain, outer, 0.0
        self.start = _clock()
        chain.top = self  # last: from here on `open_waits` sees it
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = _clock() - self.start
        self._leave()
        if self._outer is not None:
            self._outer._inner += self.seconds
        counted = self._counted(self.seconds - self._inner)
        self._chain = self._outer = self.step = None
        with self.meter._lock:
            totals = self.meter._totals
            for key, value in counted:
                totals[key] = totals.get(key, 0) + value

    def _counted(self, own: float) -> list[tuple[str, Number]]:
        """What is added to the meter. `own`: seconds without those of inner frames."""
        counted: list[tuple[str, Number]] = [(f"{self.key}/seconds", own)]
        if self.step is not None:
            counted.append((f"step/{self.key}/seconds", own))
        return counted

    def _leave(self) -> None:
        """Take the frame out of its thread's chain, also where it is left out of order."""
        chain = self._chain
        assert chain is not None
        if chain.top is self:
            chain.top = self._outer
            return
        above = chain.top
        while above is not None and above._outer is not self:
            above = above._outer
        if above is not None:
            above._outer = self._outer


class Wait(_Frame):
    """The only way to block: a named, counted piece of time with a deadline.

        with Wait("spool.empty", deadline=60, remedy="Is the provider running?") as wait:
            while not ready.wait(timeout=min(1.0, wait.remaining())):
                wait.check()

    The caller does the waiting, with any call that takes a timeout: pass `remaining()` as the timeout, and call `check()` when
    the call returns without a result.

    - `name`: what is awaited, dotted: `spool.empty`. It is part of the metric's key.
    - `deadline`: seconds after which `check` raises DeadlineExceeded, with `remedy` at the end of the message.
    - `hidden`: the wait of a background thread, counted apart.
    - `meter`: counts the wait; the process's own unless given.
    """

    def __init__(
        self,
        name: str,
        *,
        meter: Meter | None = None,
        deadline: float = 300.0,
        hidden: bool = False,
        remedy: str = "",
    ) -> None:
        super().__init__(f"wait/{name}", meter)
        if not 0 <= deadline <= _LONGEST:
            raise ValueError(f"wait {name!r} needs a finite deadline of 0 seconds or more, got {deadline}")
        self.name = name
        self.deadline = deadline
        self.hidden = hidden
        self.remedy = remedy

    def _counted(self, own: float) -> list[tuple[str, Number]]:
        all_waits = "waits/exposed/seconds" if self.exposed else "waits/hidden/seconds"
        return [*super()._counted(own), (f"{self.key}/count", 1), (all_waits, own)]

    @property
    def elapsed(self) -> float:
        """Seconds since it was entered; once left, how long it took."""
        return self.seconds if self._chain is None else _clock() - self.start

    def remaining(self) -> float:
        """Seconds left before the deadline, never below 0: the timeout of whatever blocks inside."""
        return max(self.deadline - self.elapsed, 0.0)

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.elapsed >= self.deadline

    def check(self) -> None:
        """Raise DeadlineExceeded once the deadline has passed."""
        elapsed = self.elapsed
        if elapsed >= self.deadline:
            remedy = self.remedy or "Look at what it waits for, or give it a longer deadline if that is expected."
            raise DeadlineExceeded(
                f"wait {self.name!r} has taken {elapsed:.3g} s; its deadline is {self.deadline:g} s. {remedy}"
            )


class _Phase(_Frame):
    # Neutral: a phase of a background thread must not turn the hidden waits in it exposed.
    hidden = True


def phase(name: str, *, meter: Meter | None = None) -> _Phase:
    """`with phase("pack"):` counts phase/pack/seconds: the time in the body, without inner phases and waits.

    `name` is part of the metric's key. `meter` counts it; the process's own unless given.
    """
    return _Phase(f"phase/{name}", meter)


class _Step(_Frame):
    """A whole step. What lies in it and in no phase and no wait is `other`."""

    def __enter__(self) -> Self:
        chain = getattr(self.meter._local, "chain", None)
        if chain is not None and chain.top is not None:
            raise RuntimeError(
                f"a step begins inside {chain.top.key!r} on thread {threading.current_thread().name!r}; close that first, "
                "or the parts of the step cannot add up"
            )
        super().__enter__()
        self.step = self
        return self

    def _counted(self, own: float) -> list[tuple[str, Number]]:
        return [("step/seconds", self.seconds), ("step/other/seconds", own), ("step/count", 1)]
