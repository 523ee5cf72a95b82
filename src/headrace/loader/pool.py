"""Windows made ahead of need, by threads.

`request` says what will be wanted and how soon; `take` waits for it. Which thread makes a window, and in which order,
changes only the time it takes. An error made in a thread is raised by the `take` that needs that window, so it comes at
the same sample whatever the number of threads. With no workers `take` makes the window itself.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Protocol

from headrace.errors import WorkerDied
from headrace.loader.windows import Carry, Window, WindowStart
from headrace.metrics import Meter, Wait

WindowKey = tuple[int, int, WindowStart]
"""(source, lane, start)"""


class WindowSupply(Protocol):
    """Where lanes get their windows from."""

    def request(self, key: WindowKey, priority: float) -> None:
        """Say that a window will be wanted; the lowest priority is made first."""
        ...

    def take(self, key: WindowKey, priority: float = ...) -> Window:
        """The window, made now or earlier. It is the caller's from here on."""
        ...

    def close(self, timeout: float = ...) -> None: ...


class _Task:
    __slots__ = ("awaited", "done", "error", "running", "window")

    def __init__(self) -> None:
        self.awaited = False
        self.done = False
        self.running = False
        self.window: Window | None = None
        self.error: BaseException | None = None


class WindowPool:
    """A few threads and a heap of what is wanted."""

    def __init__(
        self,
        make: Callable[[WindowKey, Carry | None], tuple[Window, Carry | None]],
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
        # One lock, and two reasons to be woken: a thread that is woken for nothing takes a core, and the GIL, from threads that work.
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)
        self._made = threading.Condition(self._lock)
        self._heap: list[tuple[float, int, WindowKey]] = []
        self._tasks: dict[WindowKey, _Task] = {}
        self._carries: dict[WindowKey, Carry] = {}
        self._order = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"headrace-windows-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def request(self, key: WindowKey, priority: float) -> None:
        """Say that a window will be wanted; the lowest priority is made first."""
        if not self._threads:
            return
        with self._lock:
            if key in self._tasks:
                return
            self._tasks[key] = _Task()
            self._push(key, priority)
        self._look_ahead(key)

    def take(self, key: WindowKey, priority: float = float("-inf")) -> Window:
        """The window, made now or earlier. It is the caller's from here on."""
        if not self._threads:
            window, carry = self._make(key, self._carries.pop(key, None))
            self._keep(key, window, carry)
            return window
        with self._lock:
            task = self._tasks.get(key)
            if task is None:
                task = self._tasks[key] = _Task()
                self._push(key, priority)
            elif not task.done and not task.running:
                self._push(key, priority)  # the older entry in the heap finds the task taken and is skipped
            if not task.done:
                task.awaited = True
                with Wait(
                    "loader.window", meter=self._meter, deadline=self._deadline, hidden=True,
                    remedy=f"{self._maker} hangs or is far too slow: look at the phases read and tokenize.",
                ) as wait:  # fmt: skip
                    while not task.done:
                        if self._closed:
                            raise WorkerDied("the window pool was closed while a window was being waited for")
                        dead = [t.name for t in self._threads if not t.is_alive()]
                        if dead:
                            raise WorkerDied(
                                f"tokenizer thread {dead[0]} is gone; the window it was to make cannot come"
                            )
                        wait.check()
                        self._made.wait(min(0.5, max(wait.remaining(), 0.001)))
            del self._tasks[key]
        if task.error is not None:
            raise task.error
        assert task.window is not None
        return task.window

    def close(self, timeout: float = 2.0) -> None:
        """Stop the threads. One that is inside a tokenizer call ends when the call does; it is a daemon."""
        with self._lock:
            self._closed = True
            self._heap.clear()
            self._wanted.notify_all()
            self._made.notify_all()
        until = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def _push(self, key: WindowKey, priority: float) -> None:
        self._order += 1
        heapq.heappush(self._heap, (priority, self._order, key))
        self._wanted.notify()

    def _keep(self, key: WindowKey, window: Window, carry: Carry | None) -> None:
        if carry is not None:
            self._carries[key[0], key[1], window.end] = carry

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._heap and not self._closed:
                    with Wait("loader.idle", meter=self._meter, deadline=1e6, hidden=True):
                        while not self._heap and not self._closed:
                            self._wanted.wait(1.0)
                if self._closed:
                    return
                _, _, key = heapq.heappop(self._heap)
                task = self._tasks.get(key)
                if task is None or task.running or task.done:
                    continue
                task.running = True
                carry = self._carries.pop(key, None)
            try:
                window, left = self._make(key, carry)
            except BaseException as error:  # raised again by the take() that needs it
                with self._lock:
                    task.error = error
                    self._done(task)
                continue
            with self._lock:
                self._keep(key, window, left)
                task.window = window
                self._done(task)

    def _done(self, task: _Task) -> None:
        task.done = True
        if task.awaited:
            self._made.notify_all()
