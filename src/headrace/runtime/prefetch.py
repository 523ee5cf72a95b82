"""The items of a sequence, made ahead of the thread that takes them.

    files = Prefetch(thread, open_next_file, depth=2, wait_name="spool.open")
    file = files.take(deadline=60)

`open_next_file` runs in the background thread. It returns the next item, or None after the last one, or raises `NotReady` while the next one
cannot be made: then it is called again at the next poll. Any other error reaches the caller of `take`, after the items before it.

With `take_makes=True` a `take` that finds nothing ready calls `make_next` itself: to hand an item from thread to thread costs 60 us, as much as
to make a batch. A lock lets one thread make items at a time, so the order is the same whichever thread makes them.
No deadline holds for `make_next` itself then: whatever it may wait for needs a `Wait` of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.errors import EndOfData
from headrace.metrics import Meter, Wait
from headrace.runtime.background import BackgroundThread

T = TypeVar("T")
_CHECK_EVERY = 0.5
"""Seconds between two calls of `while_waiting`."""


class NotReady(Exception):
    """The next item cannot be made yet."""

    def __init__(self, wait_name: str, remedy: str) -> None:
        """`wait_name`: name of the wait for what is missing. `remedy`: what to look at if the wait exceeds its deadline."""
        super().__init__(f"{wait_name}: {remedy}")
        self.wait_name, self.remedy = wait_name, remedy


class Prefetch(Generic[T]):
    """Up to `depth` items ahead. One thread takes, the background thread makes."""

    def __init__(
        self,
        thread: BackgroundThread,
        make_next: Callable[[], T | None],
        *,
        depth: int,
        wait_name: str,
        while_waiting: Callable[[], None] = lambda: None,
        take_makes: bool = False,
        meter: Meter | None = None,
    ) -> None:
        """Begin to make items.

        Args:
            thread: The background thread that makes them.
            make_next: Returns the next item, or None after the last one; raises NotReady while it cannot be made.
            depth: Items to keep ready.
            wait_name: Name of the wait for an item that is being made.
            while_waiting: Called twice a second by a thread that waits in `take`. An error that it raises ends the wait.
            take_makes: Whether `take` makes an item if none is ready. Then `depth` may be 0, and `make_next` must not raise NotReady.
            meter: Counts the waits; the process's own unless given.
        """
        self._thread, self._make_next, self._depth, self._meter = thread, make_next, depth, meter
        self._while_waiting, self._take_makes = while_waiting, take_makes
        self._ready: deque[T] = deque()
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._reason = self._being_made = (wait_name, "")
        """Name and remedy of the wait for the next item."""
        self._making = threading.Lock()  # held by the thread that makes an item, until the item is ready
        if depth:
            thread.add_source(self._poll)

    def take(self, deadline: float) -> T:
        """The next item. DeadlineExceeded names what was waited for; EndOfData after the last item."""
        if not self._ready:
            (self._make_or_wait if self._take_makes else self._wait)(deadline)
        return self._ready.popleft()

    def close(self) -> None:
        """Make nothing more, and drop what is ready."""
        if not self._closed and self._depth:
            self._thread.remove_source(self._poll)
        self._closed = True
        self._ready.clear()

    def _wait(self, deadline: float) -> None:
        until = time.monotonic() + deadline
        self._thread.wake()
        while not self._ready:
            self._raise_if_over()
            reason, left = self._reason, max(0.0, until - time.monotonic())
            with Wait(reason[0], deadline=left, remedy=reason[1], meter=self._meter) as wait:
                while self._waits_for(reason):
                    wait.check()
                    self._thread.require_alive(wait.name)
                    self._while_waiting()
                    with self._thread.changed:
                        if self._waits_for(reason):
                            self._thread.changed.wait(min(_CHECK_EVERY, wait.remaining()))

    def _make_or_wait(self, deadline: float) -> None:
        """Make the next item, or wait until the background thread has made it."""
        if not self._making.acquire(blocking=False):
            with Wait(self._being_made[0], deadline=deadline, meter=self._meter) as wait:
                while not self._making.acquire(timeout=min(_CHECK_EVERY, wait.remaining())):
                    wait.check()
                    self._while_waiting()
        try:
            if not self._ready:
                self._raise_if_over()
                self._make()
        finally:
            self._making.release()
        if not self._ready:
            self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None  # the next call tries again
            raise error
        if self._ended or self._closed:
            raise EndOfData("there are no more items")

    def _waits_for(self, reason: tuple[str, str]) -> bool:
        return not (self._ready or self._error is not None or self._ended) and self._reason[0] == reason[0]

    def _poll(self) -> bool:
        """Make one item, if there is room for it; whether it was made. In the background thread."""
        if not self._making.acquire(blocking=False):
            return False
        before = self._reason[0]
        try:
            idle = self._closed or self._ended or self._error is not None or len(self._ready) >= self._depth
            made = not idle and self._make()
        finally:
            self._making.release()
        if made or self._reason[0] != before:
            with self._thread.changed:
                self._thread.changed.notify_all()
        return made

    def _make(self) -> bool:
        """Make the next item, the end or an error; False while it cannot be made."""
        try:
            item = self._make_next()
        except NotReady as missing:
            self._reason = (missing.wait_name, missing.remedy)
            return False
        except Exception as error:
            self._error = error
            return True
        self._reason = self._being_made
        if item is None:
            self._ended = True
        elif not self._closed:
            self._ready.append(item)
        return True
