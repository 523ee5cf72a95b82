"""SIGINT and SIGTERM as a request to stop, for the time of one block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Any


@contextlib.contextmanager
def stop_signals(handler: Callable[[int], None]) -> Generator[Callable[..., None]]:
    """SIGINT and SIGTERM call `handler(number)` while the body runs. Yields a function that restores the handlers of the signals it is given, or of
    both.

    Outside the main thread signals keep their handlers.
    """
    before: dict[int, Any] = {}

    def restore(*numbers: int) -> None:
        for number in numbers or before:
            signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, _: handler(number))
    except ValueError:  # not the main thread
        before.clear()
    try:
        yield restore
    finally:
        restore()


@contextlib.contextmanager
def signal_asked() -> Generator[Callable[[], int]]:
    """Yield a function that returns the number of the first SIGINT or SIGTERM received, or 0. A second signal ends the process as usual."""
    asked = [0]

    def remember(number: int) -> None:
        asked[0] = number
        restore()

    with stop_signals(remember) as restore:
        yield lambda: asked[0]
