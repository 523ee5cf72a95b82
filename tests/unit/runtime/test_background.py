"""What a background thread runs, when, and how often."""

from __future__ import annotations

import threading

import pytest

from headrace.errors import WorkerDied
from headrace.metrics import Meter
from headrace.runtime.background import BackgroundThread


@pytest.fixture
def background():
    made = BackgroundThread("test", on_error=lambda _: None, meter=Meter())
    yield made
    made.close()


def test_a_task_runs_without_the_thread_being_woken_for_it(background):
    background.wake()
    done = threading.Event()
    background.later(done.set)
    assert done.wait(20)
    assert background.drain(20)


def test_drain_waits_for_the_task_that_is_running(background):
    begun, go, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert go.wait(20)
        done.append(1)

    background.later(slow)
    assert begun.wait(20)
    assert not background.drain(0.0)
    go.set()
    assert background.drain(20)
    assert done == [1]


def test_a_task_that_waits_under_a_name_runs_once_and_one_that_has_begun_once_more(background):
    done, begun, go = [], threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go.wait(20)
        done.append("first")

    background.later(first, "position")
    assert begun.wait(20)
    for number in range(3):  # the first has looked already: one more has to look again, and one will do
        background.later(lambda number=number: done.append(number), "position")
    background.later(lambda: done.append("other"))
    go.set()
    assert background.drain(20)
    assert done == ["first", 0, "other"]


def test_a_task_that_fails_is_reported_and_tried_again_while_others_run(until):
    said, done, allowed = [], [], threading.Event()
    background = BackgroundThread("test", on_error=said.append, meter=Meter())

    def task() -> None:
        if not allowed.is_set():
            raise OSError("no space")
        done.append("task")

    background.later(task)
    background.later(lambda: done.append("other"))
    until(lambda: len(said) > 1 and done)
    assert said[0] == "OSError: no space"
    assert done == ["other"]
    assert not background.drain(20), "it failed twice meanwhile"
    allowed.set()
    until(lambda: "task" in done)
    background.close()


def test_a_closed_thread_is_joined_and_runs_nothing_more(background):
    background.wake()
    background.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-test"]
    background.later(lambda: pytest.fail("it ran"))
    with pytest.raises(WorkerDied, match="headrace-test is gone while a file was waited for"):
        background.require_alive("a file")
