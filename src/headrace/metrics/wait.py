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

Each thread adds to cells of its own, and draining subtracts what was drained before; so the hot path takes no lock, and
a forked child, which starts from zero, cannot inherit a held one. Wait enter+exit costs 1.4 us (1.6 inside a step) and
phase 1.1 us, where a bare pair of clock reads costs 0.17 us (benchmarks/metrics.py).

A Wait belongs to the thread that enters it and is meant to nest. One that is left out of order (a generator closed
late) is taken out of the chain and still counted; then the parts may overlap.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Self

from headrace.errors import DeadlineExceeded
from headrace.metrics.spec import MetricSpec, Number, Reduction, register

MAX_NAMES = 1000
"""Distinct names a thread may use; what comes after is counted under the name `overflow`, so memory stays bounded."""

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
    MetricSpec("counter/overflow", Reduction.SUM, False, "", (0, 0), "added to counters past the number of names a thread may use"),
)  # fmt: skip
register(*_SPECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWait:
    """A wait that a thread is in right now."""

    thread: str
    name: str
    seconds: float
    hidden: bool


class _Thread:
    """What one thread has counted in one meter. Only that thread writes; the drain reads, and folds it in once the thread is gone."""

    __slots__ = ("cells", "counts", "name", "steps", "top")

    def __init__(self) -> None:
        self.name = threading.current_thread().name
        self.top: _Frame | None = None
        self.cells: dict[str, list[Any]] = {}
        """By `wait/<name>` or `phase/<name>`: [exposed seconds, hidden seconds, count, seconds inside steps]."""
        self.counts: dict[str, Number] = {}
        self.steps = [0.0, 0.0, 0]
        """[seconds, other seconds, count] of finished steps."""


class _Token:
    """Dies with the thread that holds it: that is how a meter learns that a thread is gone."""

    __slots__ = ("__weakref__",)


class Meter:
    """Waits, phases and counters of a process, or of a part of it. Any thread may add; one reader drains."""

    def __init__(self) -> None:
        self._forget()
        _meters.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._threads: list[tuple[weakref.ref[_Token], _Thread]] = []
        self._retired: dict[str, Number] = {}
        self._drained: dict[str, Number] = {}

    # ------------------------------------------------------------------------------------------ adding

    def add(self, key: str, value: Number = 1) -> None:
        """Add to the counter `key` (a whole metric key, declared by its owner as a SUM)."""
        try:
            counts = self._local.thread.counts
        except AttributeError:
            counts = self._join().counts
        if key in counts:
            counts[key] += value
            return
        with self._lock:  # a reader may be walking the dict: only values change outside the lock
            if len(counts) >= MAX_NAMES:
                key = "counter/overflow"
                value += counts.get(key, 0)
            counts[key] = value

    def step(self) -> _Step:
        """`with meter.step():` measures one whole step of this thread."""
        return _Step(self)

    # ----------------------------------------------------------------------------------------- reading

    def totals(self) -> dict[str, Number]:
        """Everything since the meter was made, under flat keys."""
        with self._lock:
            return self._totals()

    def drain(self) -> dict[str, Number]:
        """What was added since the last drain, under flat keys; {} if nothing was."""
        with self._lock:
            totals, before = self._totals(), self._drained
            self._drained = totals
        return {key: value - before.get(key, 0) for key, value in totals.items() if value != before.get(key, 0)}

    drain_metrics = drain

    def metric_specs(self) -> tuple[MetricSpec, ...]:
        """The families of waits, phases and steps. A counter is declared by the code that adds to it."""
        return _SPECS

    def open_waits(self) -> list[OpenWait]:
        """The waits that threads are in right now, the longest first: what to print when a run stands still."""
        now = _clock()
        with self._lock:
            tops = [(thread.name, thread.top) for _, thread in self._threads]
        found: list[OpenWait] = []
        for thread_name, frame in tops:
            while frame is not None:
                if isinstance(frame, Wait):
                    found.append(
                        OpenWait(thread=thread_name, name=frame.name, seconds=now - frame.start, hidden=frame.unseen)
                    )
                frame = frame.parent
        return sorted(found, key=lambda wait: -wait.seconds)

    def _totals(self) -> dict[str, Number]:
        # A thread that is gone is folded into one dict, so a run that starts a million threads keeps a handful.
        alive: list[tuple[weakref.ref[_Token], _Thread]] = []
        for entry in self._threads:
            if entry[0]() is None:
                _fold(entry[1], self._retired)
            else:
                alive.append(entry)
        self._threads = alive
        totals = dict(self._retired)
        for _, thread in alive:
            _fold(thread, totals)
        return totals

    def _join(self) -> _Thread:
        """The cells of a thread that comes here for the first time."""
        token, thread = _Token(), _Thread()
        with self._lock:
            self._totals()  # folds threads that are gone, so they do not pile up in a run that never drains
            self._threads.append((weakref.ref(token), thread))
        self._local.token = token
        self._local.thread = thread
        return thread

    def _open_cell(self, thread: _Thread, key: str) -> list[Any]:
        kind, _, name = key.partition("/")
        if not _NAME.fullmatch(name):
            raise ValueError(f"a {kind} is named by letters, digits and _.- such as 'spool.empty', got {name!r}")
        with self._lock:
            if len(thread.cells) >= MAX_NAMES:
                key = f"{kind}/overflow"
            return thread.cells.setdefault(key, [0.0, 0.0, 0, 0.0])


def _fold(thread: _Thread, into: dict[str, Number]) -> None:
    exposed = hidden = 0.0
    for key, (shown, unseen, count, inside) in thread.cells.items():
        if not count:
            continue
        into[f"{key}/seconds"] = into.get(f"{key}/seconds", 0.0) + shown + unseen
        if key.startswith("wait/"):
            into[f"{key}/count"] = into.get(f"{key}/count", 0) + count
            exposed += shown
            hidden += unseen
        if inside:
            into[f"step/{key}/seconds"] = into.get(f"step/{key}/seconds", 0.0) + inside
    for key, seconds in (("waits/exposed/seconds", exposed), ("waits/hidden/seconds", hidden)):
        if seconds:
            into[key] = into.get(key, 0.0) + seconds
    seconds, other, count = thread.steps
    if count:
        into["step/seconds"] = into.get("step/seconds", 0.0) + seconds
        into["step/other/seconds"] = into.get("step/other/seconds", 0.0) + other
        into["step/count"] = into.get("step/count", 0) + count
    for key, value in thread.counts.items():
        into[key] = into.get(key, 0) + value


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _forget_all() -> None:
    for meter in list(_meters):
        meter._forget()


# A forked child (a DataLoader worker) would report the parent's seconds a second time, and its lock may be held by a
# thread that does not exist there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)

_default = Meter()


def default_meter() -> Meter:
    """The meter of this process, used by every Wait and phase that is given none."""
    return _default


class _Frame:
    """An open wait, phase or step: a link in its thread's chain that collects the time of what lies inside it."""

    __slots__ = ("cell", "hidden", "inner", "key", "meter", "parent", "seconds", "start", "step", "thread", "unseen")

    key: str
    meter: Meter
    thread: _Thread | None
    parent: _Frame | None
    step: _Step | None
    hidden: bool
    """Whether it is the wait of a background thread."""
    unseen: bool
    """Whether it is hidden and lies inside nothing that is exposed."""
    cell: list[Any]
    start: float
    inner: float
    seconds: float

    def __enter__(self) -> Self:
        meter = self.meter
        try:
            thread = meter._local.thread
        except AttributeError:
            thread = meter._join()
        if self.thread is not None:
            raise RuntimeError(f"{self.key!r} is already open; make a new one for each `with`")
        try:
            self.cell = thread.cells[self.key]
        except KeyError:
            self.cell = meter._open_cell(thread, self.key)
        parent = thread.top
        if parent is None:
            self.step, self.unseen = None, self.hidden
        else:
            self.step, self.unseen = parent.step, self.hidden and parent.unseen
        self.parent = parent
        self.thread = thread
        self.inner = 0.0
        thread.top = self
        self.start = _clock()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = self.seconds = _clock() - self.start
        self._leave()
        parent = self.parent
        if parent is not None:
            parent.inner += seconds
        own = seconds - self.inner
        cell = self.cell
        cell[1 if self.unseen else 0] += own
        cell[2] += 1
        if self.step is not None:
            cell[3] += own
        self.thread = self.parent = self.step = None

    def _leave(self) -> _Thread:
        """Take the frame out of its thread's chain, also where it is left out of order."""
        thread = self.thread
        if thread is None:
            raise RuntimeError(f"{self.key!r} is left without having been entered")
        above = thread.top
        if above is self:
            thread.top = self.parent
            return thread
        while above is not None and above.parent is not self:
            above = above.parent
        if above is not None:
            above.parent = self.parent
        return thread


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

    __slots__ = ("deadline", "remedy")

    def __init__(
        self,
        name: str,
        *,
        meter: Meter | None = None,
        deadline: float = 300.0,
        hidden: bool = False,
        remedy: str = "",
    ) -> None:
        if not 0 <= deadline <= _LONGEST:
            raise ValueError(f"wait {name!r} needs a finite deadline of 0 seconds or more, got {deadline}")
        self.key = "wait/" + name
        self.meter = meter if meter is not None else _default
        self.deadline = deadline
        self.hidden = hidden
        self.remedy = remedy
        self.thread = None
        self.seconds = 0.0

    @property
    def name(self) -> str:
        """What is awaited."""
        return self.key[len("wait/") :]

    @property
    def elapsed(self) -> float:
        """Seconds since it was entered; once left, how long it took."""
        return self.seconds if self.thread is None else _clock() - self.start

    def remaining(self) -> float:
        """Seconds left before the deadline, never below 0: the timeout of whatever blocks inside."""
        left = self.deadline - self.elapsed
        return left if left > 0.0 else 0.0

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
    __slots__ = ()

    def __init__(self, name: str, meter: Meter) -> None:
        self.key = "phase/" + name
        self.meter = meter
        self.thread = None
        # Neutral: a phase of a background thread must not turn the hidden waits in it exposed.
        self.hidden = True
        self.seconds = 0.0


def phase(name: str, *, meter: Meter | None = None) -> _Phase:
    """`with phase("pack"):` counts phase/pack/seconds: the time in the body, without inner phases and waits.

    `name` is part of the metric's key. `meter` counts it; the process's own unless given.
    """
    return _Phase(name, meter if meter is not None else _default)


class _Step(_Frame):
    """A whole step. What lies in it and in no phase and no wait is `other`."""

    __slots__ = ()

    def __init__(self, meter: Meter) -> None:
        self.key = "step"
        self.meter = meter
        self.thread = None
        self.seconds = 0.0
        self.hidden = self.unseen = False

    def __enter__(self) -> Self:
        meter = self.meter
        thread = getattr(meter._local, "thread", None) or meter._join()
        if thread.top is not None:
            raise RuntimeError(
                f"a step begins inside {thread.top.key!r} on thread {thread.name!r}; close that first, "
                "or the parts of the step cannot add up"
            )
        self.thread = thread
        self.parent = None
        self.step = self
        self.inner = 0.0
        thread.top = self
        self.start = _clock()
        return self

    def __exit__(self, *error: object) -> None:
        seconds = self.seconds = _clock() - self.start
        thread = self._leave()
        other = seconds - self.inner
        thread.steps[0] += seconds
        thread.steps[1] += other
        thread.steps[2] += 1
        self.thread = self.step = None
