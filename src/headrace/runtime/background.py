"""A background thread that runs what the trainer's thread must not wait for.

    thread = BackgroundThread("spool", on_error=report)
    thread.later(task, "position")      run `task` soon; while it fails, again with growing pauses
    thread.drain(5.0)                   wait until all of it is done

**The trainer's thread wakes no other thread.** To wake a thread costs the waker 50 us, and milliseconds where the kernel puts the woken thread on
the waker's core. So the background thread polls: 2 ms after it last did something, then 4 ms, up to every 50 ms. Only a thread that waits
for a result wakes it (`wake`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import WorkerDied
from headrace.metrics import Meter, Wait

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two polls. An idle thread polls 20 times a second."""
_FIRST_RETRY, _LAST_RETRY = 0.05, 5.0
"""Seconds before a failed task is tried again: doubled with every failure, up to the second."""


@dataclass(slots=True, eq=False)
class _Task:
    call: Callable[[], None]
    name: str
    at: float = 0.0
    """Not before this moment (time.monotonic). Set when the task has failed."""
    running: bool = False
    retry_pause: float = _FIRST_RETRY


class BackgroundThread:
    """One daemon thread, started by its first work. All methods may be called from any thread."""

    def __init__(self, room: str, *, on_error: Callable[[str], None], meter: Meter | None = None) -> None:
        """Nothing runs before the first work is added.

        Args:
            room: Names the thread `headrace-<room>` and its waits `<room>.idle` (between two polls) and `<room>.drain`.
            on_error: Gets a sentence for every task that failed.
            meter: Counts the waits; the process's own unless given.
        """
        self._name, self._on_error, self._meter = f"headrace-{room}", on_error, meter
        self._idle_wait, self._drain_wait = f"{room}.idle", f"{room}.drain"
        self.changed = threading.Condition()
        """Notified when an item or a task is done, and by `wake`."""
        self._sources: list[Callable[[], bool]] = []
        self._tasks: list[_Task] = []
        self._failures = 0
        self._called = self._closed = False
        self._thread: threading.Thread | None = None

    def add_source(self, poll: Callable[[], bool]) -> None:
        """Poll a source of prefetched items from now on. `poll` returns whether it made an item."""
        with self.changed:
            self._sources.append(poll)
        self.wake()

    def remove_source(self, poll: Callable[[], bool]) -> None:
        """Stop polling a source. A poll that is under way is not interrupted."""
        with self.changed:
            self._sources.remove(poll)

    def later(self, task: Callable[[], None], name: str = "") -> None:
        """Run `task` at one of the next polls. An error is reported, and the task is tried again after a pause.

        `name`: if a task of this name is waiting to run, `task` is not added. Empty: it always is.
        """
        with self.changed:
            if name and any(waiting.name == name and not waiting.running for waiting in self._tasks):
                return
            self._tasks.append(_Task(task, name))
        if self._thread is None:
            self.wake()

    def wake(self) -> None:
        """Poll now. Called by a thread that is about to wait for a result."""
        with self.changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._called = True
            self.changed.notify_all()

    def require_alive(self, what: str) -> None:
        """WorkerDied if the thread is gone while `what` is waited for."""
        if self._thread is None or not self._thread.is_alive():
            raise WorkerDied(f"the background thread {self._name} is gone while {what} was waited for")

    def drain(self, timeout: float) -> bool:
        """Wait until all tasks are done; False if they were not in time, or failed twice meanwhile."""
        with Wait(self._drain_wait, deadline=timeout, meter=self._meter) as wait, self.changed:
            failures = self._failures
            self._called = True
            self.changed.notify_all()
            while self._tasks and self._thread is not None:
                if wait.expired() or self._failures >= failures + 2:
                    return False
                self.changed.wait(min(0.1, wait.remaining()))
        return True

    def close(self, timeout: float = 10.0) -> None:
        """Stop after what is running now, and join the thread, for at most `timeout` seconds. What was not run is dropped."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(timeout, 0.0))
            self._thread = None

    # ------------------------------------------------------------------------------- the background thread

    def _run(self) -> None:
        pause = _SHORTEST_PAUSE
        while not self._closed:
            with self.changed:
                self._called = False  # before the poll: a call from now on is heard after it
            made = [poll() for poll in tuple(self._sources)]
            if self._run_task() or any(made):
                pause = _SHORTEST_PAUSE
                continue
            with Wait(self._idle_wait, hidden=True, meter=self._meter), self.changed:
                woken = self._called or self._closed or self.changed.wait(self._until_next_task(pause))
            pause = _SHORTEST_PAUSE if woken else min(2 * pause, _LONGEST_PAUSE)

    def _until_next_task(self, pause: float) -> float:
        now = time.monotonic()
        return max(0.0, min([pause, *(task.at - now for task in self._tasks)]))

    def _run_task(self) -> bool:
        """Run the first task that is due; whether it succeeded."""
        with self.changed:
            now = time.monotonic()
            task = next((task for task in self._tasks if task.at <= now), None)
            if task is None:
                return False
            task.running = True
        try:
            task.call()
        except Exception as error:  # a full disk, no permission: the task is tried again, other work goes on
            self._on_error(f"{type(error).__name__}: {error}")
            failed = True
        else:
            failed = False
        with self.changed:
            if failed:
                self._failures += 1
                task.running, task.at = False, time.monotonic() + task.retry_pause
                task.retry_pause = min(2 * task.retry_pause, _LAST_RETRY)
            else:
                self._tasks.remove(task)
            self.changed.notify_all()
        return not failed
