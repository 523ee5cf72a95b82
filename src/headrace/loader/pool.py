"""Windows made ahead of need, by threads.

`request` says what will be wanted and how soon; `take` waits for it. Which thread makes a window, and in which order,
changes only the time it takes. An error made in a thread is raised by the `take` that needs that window, so it comes at
the same sample whatever the number of threads. With no workers `take` makes the window itself.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Protocol

from headrace.errors import WorkerDied
from headrace.loader.windows import Encoded, Window, WindowStart
from headrace.metrics import Meter, Wait

WindowKey = tuple[int, int, WindowStart]
"""(source, lane, start)"""
_LOOK_UP_EVERY = 0.05
"""Seconds after which a thread that waits for a window looks whether the pool was closed or a thread has died."""


class WindowSupply(Protocol):
    """Where lanes get their windows from. One thread at a time asks."""

    def request(self, key: WindowKey, priority: float) -> None:
        """Say that a window will be wanted; the lowest priority is made first."""
        ...

    def take(self, key: WindowKey, priority: float = ...) -> Window:
        """The window, made now or earlier. It is the caller's from here on."""
        ...

    def close(self, timeout: float = ...) -> None: ...


class WindowPool:
    """A few threads and a queue of what is wanted."""

    def __init__(
        self,
        make: Callable[[WindowKey, Encoded | None], tuple[Window, Encoded | None]],
        *,
        workers: int,
        meter: Meter,
        deadline: float,
        look_ahead: Callable[[WindowKey], None] = lambda key: None,
        maker: str = "A tokenizer thread",
    ) -> None:
        """`look_ahead` is called with every window that will be wanted, before a thread has time for it. `maker`: who makes the windows, for a
        sentence about a wait that is too long."""
        self._make = make
        self._look_ahead = look_ahead
        self._meter = meter
        self._deadline = deadline
        self._maker = maker
        self._queue: queue.PriorityQueue[tuple[float, int, WindowKey | None, Future[Window]]] = queue.PriorityQueue()
        """(priority, number of the request, window, where it goes). No window: a thread that gets this ends."""
        self._numbers = itertools.count()
        self._wanted: dict[WindowKey, Future[Window]] = {}
        self._carries: dict[WindowKey, Encoded] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"headrace-windows-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def request(self, key: WindowKey, priority: float) -> None:
        """Say that a window will be wanted; the lowest priority is made first."""
        if self._threads and key not in self._wanted:
            self._put(key, priority)
            self._look_ahead(key)

    def take(self, key: WindowKey, priority: float = -math.inf) -> Window:
        """The window, made now or earlier. It is the caller's from here on."""
        if not self._threads:
            return self._made(key)
        wanted = self._wanted.get(key)
        if wanted is None or wanted.cancel():  # no thread has begun it: it is wanted sooner than it was
            wanted = self._put(key, priority)
        if not wanted.done():
            self._await(wanted)
        del self._wanted[key]
        return wanted.result()

    def close(self, timeout: float = 2.0) -> None:
        """Stop the threads. One that is inside a tokenizer call ends when the call does; it is a daemon."""
        self._closed = True
        for _ in self._threads:
            self._put(None, -math.inf)
        until = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def _put(self, key: WindowKey | None, priority: float) -> Future[Window]:
        made: Future[Window] = Future()
        if key is not None:
            self._wanted[key] = made
        self._queue.put((priority, next(self._numbers), key, made))
        return made

    def _await(self, wanted: Future[Window]) -> None:
        remedy = f"{self._maker} hangs or is far too slow: look at the phases read and tokenize."
        with Wait("loader.window", meter=self._meter, deadline=self._deadline, hidden=True, remedy=remedy) as wait:
            while not futures.wait([wanted], min(_LOOK_UP_EVERY, wait.remaining())).done:
                if self._closed:
                    raise WorkerDied("the window pool was closed while a window was being waited for")
                dead = [t.name for t in self._threads if not t.is_alive()]
                if dead:
                    raise WorkerDied(f"tokenizer thread {dead[0]} is gone; the window it was to make cannot come")
                wait.check()

    def _made(self, key: WindowKey) -> Window:
        window, carry = self._make(key, self._carries.pop(key, None))
        if carry is not None:
            self._carries[key[0], key[1], window.end] = carry
        return window

    def _work(self) -> None:
        while True:
            with Wait("loader.idle", meter=self._meter, deadline=1e6, hidden=True):
                _, _, key, made = self._queue.get()
            if key is None or self._closed:
                return
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(self._made(key))
                except BaseException as error:  # raised again by the take() that needs it
                    made.set_exception(error)
