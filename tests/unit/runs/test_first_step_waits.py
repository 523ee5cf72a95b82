"""The first step of a run says what it waits for."""

from __future__ import annotations

import threading

from headrace.metrics import Wait
from headrace.runs.run_loop import _naming_waits


class Watcher:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.told = threading.Event()

    def waiting(self, what: str) -> None:
        self.lines.append(what)
        self.told.set()


def test_a_long_first_step_names_its_open_waits_once():
    watcher = Watcher()
    with _naming_waits(watcher, after=0.01), Wait("loader.next"), Wait("kernels.compile"):
        assert watcher.told.wait(60)
    assert watcher.lines == ["the first step (loader.next, kernels.compile)"]


def test_a_short_first_step_says_nothing():
    watcher = Watcher()
    with _naming_waits(watcher, after=60), Wait("loader.next"):
        pass
    assert watcher.lines == []
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
