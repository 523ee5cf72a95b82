"""SIGINT and SIGTERM for work without steps: remembered, and asked for between pieces of work."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator
from typing import Any

__all__ = ["signal_asked"]


@contextlib.contextmanager
def signal_asked() -> Generator[Callable[[], int]]:
    """Yield a function that returns the number of the first SIGINT or SIGTERM received, or 0.

    A second signal ends the process as usual. Outside the main thread signals keep their handlers.
    """
    asked = [0]

    def remember(number: int, _: object) -> None:
        asked[0] = number
        for n in before:
            signal.signal(n, before[n])

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, remember)
    except ValueError:
        before = {}
    try:
        yield lambda: asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
