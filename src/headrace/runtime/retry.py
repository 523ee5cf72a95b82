"""Calls that are tried again while their error is one that passes: a full disk, a store out of reach.

retry(call, passes=lambda error: isinstance(error, StorageError), wait_name="spool.disk", deadline=600)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.metrics import Wait

T = TypeVar("T")


def retry(
    call: Callable[[], T],
    *,
    passes: Callable[[Exception], bool],
    wait_name: str,
    deadline: float,
    doing: str = "",
    most_tries: int | None = None,
    first_pause: float = 0.01,
    longest_pause: float = 1.0,
    hidden: bool = True,
    gave_up: Callable[[Exception, int, float], Exception] = lambda error, tries, seconds: error,
) -> T:
    """The result of `call`, which is tried again with growing pauses while `passes` says that its error may pass.

    Every try starts from nothing, so a failed fsync is never repeated on the same file. The time from the first failure on is one named
    wait.

    Args:
        call: The call. An error that does not pass is raised as it is.
        passes: Whether an error may go away by itself.
        wait_name: Name of the wait.
        deadline: Seconds from the first try after which no further try begins.
        doing: What is being done, for the list of a process's current waits.
        most_tries: Most calls in all; unlimited unless given.
        first_pause: Seconds between the first two tries; doubled with every further one.
        longest_pause: Seconds between two tries at most.
        hidden: Whether a background thread waits, and no trainer.
        gave_up: Makes the error to raise in the end from the last error, the number of tries and the seconds they took.
    """
    begin, tries, pause = time.monotonic(), 0, first_pause
    with contextlib.ExitStack() as stack:
        wait = None
        while True:
            try:
                return call()
            except Exception as error:
                if not passes(error):
                    raise
                problem, tries = error, tries + 1
            if wait is None:
                left = max(0.0, deadline - (time.monotonic() - begin))
                wait = stack.enter_context(Wait(wait_name, deadline=left, hidden=hidden, remedy=f"{doing}: {problem}"))
            if tries == most_tries or wait.expired():
                break
            time.sleep(min(pause, wait.remaining()))
            pause = min(2 * pause, longest_pause)
    final = gave_up(problem, tries, time.monotonic() - begin)
    raise final from problem.__cause__ if final is problem else problem
