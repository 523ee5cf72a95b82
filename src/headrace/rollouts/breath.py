"""How a thread works beside an event loop without making it late: `Breath`, `return_freed_memory`.

    breathe = Breath(loop)
    for turn in rollout: ...; breathe()          for half a millisecond it does nothing; then it lets the loop go first

Both want the interpreter's lock, and whoever holds it hands it over when asked, not to whom it matters most. So the thread asks the loop for
its turn: a callback that runs when everything that was ready, and everything whose time had come, has run. Each pass of the loop then
waits for one piece of work at most, however many callbacks it has. Losers, by p99 of the loop's lag above idle while text is read beside 200 tasks: no pause
11 to 62 ms; a pause of 50 us every half millisecond 2.8 to 12 ms, because a loop with many callbacks lets go of the lock after each and a thread that sleeps
for a fixed time is back before it is through; asking .2 to .5 ms. The interpreter's switch interval, which belongs to the whole process, is left alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import threading
import time
from collections.abc import Callable

from headrace.metrics import Wait

__all__ = ["Breath", "at_once", "return_freed_memory"]

_WORK, _MOST_WORK = 5e-4, 2e-3
_SHARE = 4
"""The loop's time to the thread's where the loop is always busy: a pass of 4 ms is followed by 1 ms of work, so nobody starves."""
_PASSES = 2
"""Of the loop after the one that heard the question: a timer whose time has come is run in that one, and the task that slept in the next."""
_PATIENCE = 0.05


class Breath:
    """Called between pieces of work; now and then it waits until the loop has been through what it had to do."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._until = 0.0

    def __call__(self) -> None:
        start = time.perf_counter()
        if start < self._until:
            return
        gate = threading.Lock()
        gate.acquire()
        try:
            self._loop.call_soon_threadsafe(self._passed, gate, _PASSES)
        except RuntimeError:
            return  # the loop is closed: nobody to let go first
        with Wait("rollouts.loop", hidden=True):
            gate.acquire(timeout=_PATIENCE)  # a loop that stands still is no reason to stand still too
        end = time.perf_counter()
        self._until = end + min(max(_WORK, (end - start) / _SHARE), _MOST_WORK)

    def _passed(self, gate: threading.Lock, more: int) -> None:
        """On the loop."""
        if more:
            self._loop.call_soon(self._passed, gate, more - 1)
        else:
            gate.release()


def at_once() -> None:
    """The breath of whoever has nobody to stand back for."""


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None  # another libc: it keeps its pages as it likes


def return_freed_memory() -> None:
    """Hand freed pages back to the system. glibc keeps them otherwise, and a process grows by some MB a step. Meanwhile nobody can
    allocate where the pages were: .2 ms a MB of small blocks, so it is called for a few MB at a time."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
