"""Lets an event loop run between slices of work in another thread of its process: `LoopYield`.

    pause = LoopYield(loop)
    for rollout in rollouts: ...; pause()        returns at once for 0.5 ms; then it waits until the loop has drained its ready queue

The loop and the thread share the GIL, and the thread holds it for up to 5 ms (the switch interval) while the loop waits. The thread therefore schedules a callback
on the loop, which runs after all ready callbacks and all due timers, and waits for it. Each pass of the loop then waits for one
slice at most. Sleeping for a fixed time is not enough: a loop with many callbacks releases the GIL after each, and the thread would take it before
the loop is done. The switch interval belongs to the whole process and is not changed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from headrace.metrics import Wait

_SLICE, _LONGEST_SLICE = 5e-4, 2e-3
"""Seconds of work between two waits, and at most so many where the loop is busy."""
_LOOP_SHARE = 4
"""Ratio of the loop's time to the thread's time where the loop is always busy: a pass of 4 ms is followed by 1 ms of work, so neither starves."""
_PASSES = 2
"""Passes of the loop after the one that received the callback: a due timer runs in that pass, and the task that slept runs in the next."""
_LONGEST_WAIT = 0.05

_Item = TypeVar("_Item")


class PausingList(list[_Item]):
    """A list that calls `pause` after every item of an iteration, so that the function that iterates needs no code for it."""

    def __init__(self, items: Iterable[_Item], pause: Callable[[], None]) -> None:
        super().__init__(items)
        self._pause = pause

    def __iter__(self) -> Iterator[_Item]:
        for item in super().__iter__():
            yield item
            self._pause()


class LoopYield:
    """Called between slices of work. Every 0.5 ms it waits until the loop has run what was ready. Used by one thread at a time."""

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
            return  # the loop is closed
        with Wait("rollouts.loop", hidden=True):
            gate.acquire(timeout=_LONGEST_WAIT)  # a loop that hangs does not stop the thread
        end = time.perf_counter()
        self._until = end + min(max(_SLICE, (end - start) / _LOOP_SHARE), _LONGEST_SLICE)

    def between(self, items: Iterable[_Item]) -> PausingList[_Item]:
        """The items; the loop runs between them."""
        return PausingList(items, self)

    def _passed(self, gate: threading.Lock, more: int) -> None:
        """Runs on the loop."""
        if more:
            self._loop.call_soon(self._passed, gate, more - 1)
        else:
            gate.release()
