"""Who makes the next batch, and when?

A thread makes batches ahead of need, a bounded number of them. A trainer that asks faster than they
are made gets no quicker by waiting for another thread: handing a batch over costs as much as making it (8 x 2,048 tokens:
60 us either way). So when nothing is ready, `next` makes the batch itself, and it is the trainer's turn from then on: it takes no
lock any more, and the thread only looks, every five milliseconds, whether a batch was asked for since. Where none was, it works ahead
again. Only one of the two is at work at a time, so what is made needs no lock, and the order is the same whoever makes it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.metrics import Meter, Wait

__all__ = ["Ahead"]

Made = TypeVar("Made")

_AWAY = 0.005


class Ahead(Generic[Made]):
    """Batches in the order in which `make` makes them; None is the end."""

    def __init__(
        self,
        make: Callable[[], Made | None],
        *,
        depth: int,
        name: str,
        meter: Meter,
    ) -> None:
        """`depth` batches are kept ready; with 0 every batch is made when it is asked for, and there is no thread."""
        self._make = make
        self._depth = depth
        self._meter = meter
        # A trainer finds its caches cold: what it does here to take a batch that is ready is two locks, and little Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """A batch was made: for a trainer that waits."""
        self._bell = threading.Lock()
        """Taken while the thread sleeps; whoever gives it back wakes the thread."""
        self._bell.acquire()
        self._made: deque[Made | None] = deque()
        self._failure: BaseException | None = None
        self._busy = False
        """A batch is being made, by the thread or by the trainer."""
        self._own = False
        """It is the trainer's turn: it found nothing ready the last time it asked, and makes batches itself."""
        self._making = False
        """It is making one just now, without the lock."""
        self._asked = 0
        """How often it did so."""
        self._sleeps = False
        self._closed = False
        self._ended = False
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._work_ahead, name=name, daemon=True)
            self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def ready(self) -> Made | None:
        """The next batch if it is already made; None: call `next`."""
        if self._own or self._thread is None:
            return None
        with self._lock:
            if not self._made or self._made[0] is None:
                return None
            self._wake()
            return self._made.popleft()

    def next(self, wait: Wait) -> Made | None:
        """The next batch, made before or now; None at the end."""
        if self._thread is None:  # nobody to hand over from: 6 us of locks a batch are saved
            return self._make_one()
        if self._own and not self._ended:
            # Said before it is asked whose turn it is, and the thread asks in the other order: so one of the two sees the other.
            self._making = True
            try:
                if self._own:
                    self._asked += 1
                    return self._make_one()
            finally:
                self._making = False
        with self._lock:
            while self._busy and not self._made:
                self._check(wait)
                self._changed.wait(min(0.5, max(wait.remaining(), 0.001)))
            if self._made:
                made = self._made.popleft()
                self._own = False
                self._wake()
                return made
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._busy = self._own = True
            self._asked += 1
        try:
            return self._make_one()
        finally:
            self._busy = False  # nobody waits for this: the thread looks by itself while it is the trainer's turn

    def close(self, timeout: float = 2.0) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(timeout, 0.0))

    def _wake(self) -> None:
        if self._sleeps:
            self._sleeps = False
            self._bell.release()

    def _check(self, wait: Wait) -> None:
        if self._failure is not None:
            raise self._failure
        wait.check()

    def _make_one(self) -> Made | None:
        made = None if self._ended else self._make()
        self._ended = made is None
        return made

    def _work_ahead(self) -> None:
        try:
            while True:
                with self._lock:
                    go_on = self._may_go_on()
                if not go_on:
                    with Wait("loader.ahead", meter=self._meter, deadline=1e6, hidden=True):
                        self._sleep()
                with self._lock:
                    if self._closed or self._ended:
                        return
                    if not self._may_go_on():  # the trainer has asked since, and its turn has come
                        continue
                    self._busy = True
                made = self._make_one()
                with self._lock:
                    self._busy = False
                    self._made.append(made)
                    self._changed.notify_all()
        except BaseException as error:  # raised again by the next() that needs the batch
            with self._lock:
                self._busy = False
                self._failure = error
                self._changed.notify_all()

    def _sleep(self) -> None:
        """Until there may be something to do."""
        away = False
        while True:
            with self._lock:
                if self._may_go_on(away):
                    return
                asked, patience = self._asked, _AWAY if self._own or self._busy else 1.0
                self._bell.acquire(blocking=False)  # it may have been given back just after the last sleep
                self._sleeps = True
            self._bell.acquire(timeout=patience)
            with self._lock:
                self._sleeps = False
            away = asked == self._asked

    def _may_go_on(self, away: bool = False) -> bool:
        """`depth` batches are ready, one is being made, and no more. `away`: the trainer has asked for nothing in a while."""
        if self._closed or self._ended:
            return True
        if self._busy or (self._own and not (away and self._taken_back())):
            return False
        return len(self._made) <= self._depth

    def _taken_back(self) -> bool:
        """Whether it is the thread's turn again: not while the trainer is making a batch, however long that takes."""
        self._own = False
        self._own = self._making
        return not self._own
