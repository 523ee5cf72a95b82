"""One file ahead: a thread that opens, checks and judges the files that are needed next, and deletes those that are not.

    want(key, prepare)     try `prepare` again and again until it gives a file
    take(key)              that file; waits by name where it is not ready yet
    later(job)             do this when there is time; again, with growing pauses, as long as it fails
    soon(note)             tell the thread something, without waking it: it looks for itself, every 2 to 50 ms

All reading and deleting of the consumer happens here, so that the trainer's thread only copies rows out of memory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from headrace.errors import DeadlineExceeded, WorkerDied
from headrace.metrics import Meter, Wait

__all__ = ["Ahead", "NotYet"]

T = TypeVar("T")
Key = tuple[str, int, int]
"""Split, part, number."""
_SHORTEST, _LONGEST = 0.002, 0.05
"""Seconds between two looks at what is to do: doubled up to the second while nothing moves, so an idle consumer costs 20 looks a second, and who
reads a file in T seconds is noticed within T of having begun the next."""

_BESIDE = 0.05
"""Seconds for which a note may have to wait for what is done beside."""

_FILES_FIRST = 4
"""Files that are prepared one after the other before a job has its turn: what a trainer waits for comes first, what can wait comes still."""


class NotYet(Exception):
    """A file is not ready; `args[0]` is the name of the wait for what is missing, `args[1]` says what to look at."""


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], None]
    name: str = ""
    begun: bool = False
    """Whether what it looks at may have changed since it looked."""
    at: float = 0.0
    """When to try it again."""
    pause: float = _LONGEST
    sooner_if_missed: bool = False


class Ahead(Generic[T]):
    """The background thread of one consumer."""

    def __init__(self, meter: Meter, on_failure: Callable[[str], None]) -> None:
        self._meter, self._on_failure = meter, on_failure
        self._changed = threading.Condition()
        self._wanted: dict[Key, Callable[[], T]] = {}
        self._ready: dict[Key, T] = {}
        self._failed: dict[Key, Exception] = {}
        self._why: dict[Key, NotYet] = {}
        self._jobs: deque[_Job] = deque()
        self._notes: deque[Callable[[], None]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the thread, for somebody who waits."""
        self.called = np.zeros(1, np.int64)
        """1 once it was rung since the thread last looked."""
        self.beside: Callable[[float], bool] = lambda until: False
        """What the thread does when there is nothing else to do, until a moment or until it is called; whether it did anything."""
        self._busy = False
        self._failures = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def want(self, key: Key, prepare: Callable[[], T]) -> None:
        """Start to look for `key`, unless that is done already."""
        with self._changed:
            if key in self._wanted or key in self._ready or key in self._failed:
                return
            self._wanted[key] = prepare
            self._start()

    def take(self, key: Key, deadline: float) -> T:
        """The file, once it is ready. DeadlineExceeded names what was waited for; an error of `prepare` comes out here."""
        self.hold(key, deadline)
        with self._changed:
            return self._ready.pop(key)

    def ready(self, key: Key) -> T | None:
        """The file if it is ready now; takes no lock."""
        return self._ready.pop(key, None)

    def hold(self, key: Key, deadline: float) -> None:
        """Wait like `take`; the file stays to be taken."""
        with self._changed:
            if key in self._ready:
                return
        self._start()  # it may be asked for by a note, and what the provider waits for may be one: where the next row is
        until = time.monotonic() + deadline
        while True:
            name, remedy = self._reason(key)
            with (
                Wait(name, deadline=max(0.0, until - time.monotonic()), remedy=remedy, meter=self._meter) as wait,
                self._changed,
            ):
                while key not in self._ready and key not in self._failed and self._reason(key)[0] == name:
                    self.require(wait, key)
                    self._changed.wait(min(1.0, wait.remaining()))
            with self._changed:
                if key in self._failed:
                    raise self._failed.pop(key)
                if key in self._ready:
                    return

    def require(self, wait: Wait, key: Key) -> None:
        """An error if the thread is gone, or a wait for what it brings has taken too long."""
        if self._thread is None or not self._thread.is_alive():
            raise WorkerDied(f"the thread that reads the spool ahead is gone while {key} was waited for")
        if wait.expired():
            raise DeadlineExceeded(f"wait {wait.name!r} has taken {wait.deadline:g} s, its deadline. {wait.remedy}")

    def ring(self) -> None:
        """Have the thread look now, for somebody who waits."""
        self._start()

    def later(
        self, job: Callable[[], None], name: str = "", *, at: float = 0.0, sooner_if_missed: bool = False
    ) -> None:
        """Do `job` in the background. An OSError or a HeadraceError of it is reported and the job is tried again.

        `name`: one that waits under this name already will do. `at`: not before this moment (time.monotonic), or, with
        `sooner_if_missed`, before a wanted file is found missing.
        """
        with self._changed:
            if not name or all(waiting.name != name or waiting.begun for waiting in self._jobs):
                self._jobs.append(_Job(job, name, at=at, sooner_if_missed=sooner_if_missed))
                self._start()

    def soon(self, note: Callable[[], None]) -> None:
        """Call `note` in the background when the thread next looks. It is not woken for it: to wake a thread takes 50 us, and
        where it is put on the same core, the trainer waits 2 ms for its turn."""
        self._notes.append(note)
        if self._thread is None:
            self._start()

    def forget(self, match: Callable[[Key], bool] = lambda _: True) -> None:
        """Drop what was prepared: somebody loaded another position."""
        with self._changed:
            for store in (self._wanted, self._ready, self._failed, self._why):
                for key in [k for k in store if match(k)]:
                    del store[key]

    def drain(self, timeout: float) -> bool:
        """Wait until all jobs are done; False if they were not in time, or one fails twice while we wait."""
        failures = self._failures
        with Wait("spool.drain", deadline=timeout, meter=self._meter) as wait, self._changed:
            for job in self._jobs:
                if job.sooner_if_missed:
                    job.at = 0.0
            if self._notes or self._jobs:
                self._start()
            while (self._notes or self._jobs or self._busy) and not wait.expired() and self._thread is not None:
                if self._failures >= failures + 2:
                    return False
                self._changed.wait(min(0.1, wait.remaining()))
            return not self._notes and not self._jobs and not self._busy

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._bell.put(None)
        self.called[0] = 1
        if self._thread is not None:
            self._thread.join(timeout=10.0)
            self._thread = None

    # ------------------------------------------------------------------------------------------- thread

    def _reason(self, key: Key) -> tuple[str, str]:
        why = self._why.get(key)
        return (why.args[0], why.args[1]) if why is not None else ("spool.open", "")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="headrace-spool-ahead", daemon=True)
            self._thread.start()
        if threading.current_thread() is not self._thread:
            self._bell.put(None)
            self.called[0] = 1

    def _loop(self) -> None:
        pause = _SHORTEST
        in_a_row = 0
        while True:
            self.called[0] = 0
            with contextlib.suppress(queue.Empty):  # what was rung for is looked at now
                while True:
                    self._bell.get_nowait()
            moved = False
            while self._notes:
                self._busy = moved = True
                self._notes.popleft()()
            with self._changed:
                if self._closed:
                    return
                wanted = list(self._wanted.items())
            found = [self._try(key, prepare) for key, prepare in wanted]
            moved, missed = moved or any(found), not all(found)
            in_a_row = in_a_row + 1 if any(found) else 0
            if 0 < in_a_row < _FILES_FIRST:
                continue
            in_a_row = 0
            with self._changed:
                now = time.monotonic()
                job = next((j for j in self._jobs if j.at <= now or (missed and j.sooner_if_missed)), None)
                self._busy = job is not None
                if job is not None:
                    job.begun = True
            if job is not None:
                try:
                    job.call()
                    done = True
                except Exception as error:  # full disk, no permission: keep the job, tell, come back later; others need not wait for it
                    self._on_failure(f"{type(error).__name__}: {error}")
                    self._failures += 1
                    done, job.begun, job.at, job.sooner_if_missed = False, False, time.monotonic() + job.pause, False
                    job.pause = min(2 * job.pause, 5.0)
                with self._changed:
                    if done:
                        self._jobs.remove(job)
                        moved = True
                    self._busy = False
                    self._changed.notify_all()
            with self._changed:
                now = time.monotonic()
                soonest = min((j.at for j in self._jobs), default=now + _LONGEST)
            until = min(soonest, now + (pause if missed else _BESIDE))
            if self.beside(0.0 if moved else until) or moved:
                pause = _SHORTEST
                continue
            asleep = max(0.0, min(pause, soonest - time.monotonic()))
            woken = True
            with Wait("spool.ahead", deadline=60.0, hidden=True, meter=self._meter):
                try:
                    self._bell.get(timeout=asleep) if asleep else None
                except queue.Empty:
                    woken = False
            pause = _SHORTEST if woken else min(2 * pause, _LONGEST)

    def _try(self, key: Key, prepare: Callable[[], T]) -> bool:
        try:
            value = prepare()
        except NotYet as why:
            with self._changed:
                if key in self._wanted and self._why.get(key, NotYet("", "")).args[0] != why.args[0]:
                    self._why[key] = why
                    self._changed.notify_all()
            return False
        except Exception as error:  # goes up where the file is asked for
            with self._changed:
                if self._wanted.pop(key, None) is not None:
                    self._failed[key] = error
                self._changed.notify_all()
            return True
        with self._changed:
            if self._wanted.pop(key, None) is not None:
                self._ready[key] = value
                self._why.pop(key, None)
            self._changed.notify_all()
        return True
