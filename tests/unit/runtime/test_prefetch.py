"""Items come in order, as many ahead as asked for, and every wait for one has a name and an end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace.errors import DataError, DeadlineExceeded, EndOfData, HeadraceError
from headrace.metrics import Meter
from headrace.runtime.background import BackgroundThread
from headrace.runtime.prefetch import NotReady, Prefetch


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def prefetch(meter) -> Callable[..., Prefetch]:
    thread = BackgroundThread("test", on_error=lambda _: None, meter=meter)

    def make(make_next, depth=2, **more) -> Prefetch:
        return Prefetch(thread, make_next, depth=depth, wait_name="test.make", meter=meter, **more)

    yield make
    thread.close()


def counter(end=None):
    made = []

    def make_next():
        if end is not None and len(made) == end:
            return None
        made.append(len(made))
        return made[-1]

    return made, make_next


def test_items_come_in_order_and_no_more_are_made_than_asked_for(prefetch, until):
    made, make_next = counter()
    items = prefetch(make_next, depth=3)
    until(lambda: len(made) == 3)
    for expected in range(20):
        assert items.take(20) == expected
        assert len(made) <= expected + 1 + 3


def test_after_the_last_item_comes_the_end(prefetch):
    _, make_next = counter(end=4)
    items = prefetch(make_next)
    assert [items.take(20) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(EndOfData):
        items.take(20)


def test_the_wait_is_named_after_what_is_missing(prefetch, meter):
    def make_next():
        raise NotReady("test.empty", "Is the provider running?")

    items = prefetch(make_next)
    with pytest.raises(DeadlineExceeded, match=r"wait 'test\.empty' .*Is the provider running\?"):
        items.take(0.2)
    assert meter.totals()["wait/test.empty/seconds"] > 0.05


def test_a_waiting_caller_gets_the_item_once_it_can_be_made(prefetch, meter, until):
    there = threading.Event()

    def make_next():
        if not there.is_set():
            raise NotReady("test.empty", "")
        return "item"

    items, got = prefetch(make_next), []
    thread = threading.Thread(target=lambda: got.append(items.take(60)))
    thread.start()
    until(lambda: any(wait.name == "test.empty" for wait in meter.open_waits()))
    there.set()
    thread.join(20)
    assert got == ["item"]


def test_an_error_reaches_the_caller_behind_the_items_before_it_and_the_next_call_tries_again(prefetch):
    answers = iter([1, DataError("torn"), 2])

    def make_next():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    items = prefetch(make_next, depth=1)
    assert items.take(20) == 1
    with pytest.raises(DataError, match="torn"):
        items.take(20)
    assert items.take(20) == 2


def test_an_error_of_the_check_ends_a_wait_long_before_its_deadline(prefetch):
    def make_next():
        raise NotReady("test.empty", "")

    def check():
        raise HeadraceError("the lock is lost")

    items = prefetch(make_next, while_waiting=check)
    with pytest.raises(HeadraceError, match="the lock is lost"):
        items.take(600)


def test_a_closed_prefetch_makes_nothing_more_and_keeps_nothing(prefetch, until):
    made, make_next = counter()
    items = prefetch(make_next)
    until(lambda: len(made) == 2)
    items.close()
    items.close()
    other_made, other = counter()
    prefetch(other)
    until(lambda: len(other_made) == 2)  # the thread has gone round since
    assert made == [0, 1]
    assert not items._ready


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_one_thread_at_a_time_makes_items_and_their_order_is_kept(prefetch, depth):
    at_work, makers = threading.Lock(), set()
    numbers = iter(range(400))

    def make_next():
        assert at_work.acquire(blocking=False), "two threads make items at once"
        number = next(numbers, None)
        makers.add(threading.current_thread())
        for _ in range(200 * (number or 0) % 7):  # lets the other thread in, if anything does
            threading.Event().wait(0)
        at_work.release()
        return number

    items = prefetch(make_next, depth=depth, take_makes=True)
    assert [items.take(20) for _ in range(400)] == list(range(400))
    with pytest.raises(EndOfData):
        items.take(20)
    assert threading.current_thread() in makers
    assert len(makers) <= (2 if depth else 1)


def test_a_wait_for_an_item_that_the_background_thread_makes_has_a_name_and_an_end(prefetch, until):
    begun, release = threading.Event(), threading.Event()

    def make_next():
        begun.set()
        assert release.wait(60)
        return 1

    items = prefetch(make_next, depth=1, take_makes=True)
    until(begun.is_set)
    with pytest.raises(DeadlineExceeded, match=r"test\.make"):
        items.take(0.1)
    release.set()
    assert items.take(60) == 1


def test_an_error_of_an_item_comes_out_once_whichever_thread_makes_it(prefetch):
    def make_next():
        raise DataError("gone")

    for depth in (0, 1):
        items = prefetch(make_next, depth=depth, take_makes=True)
        for _ in range(2):
            with pytest.raises(DataError, match="gone"):
                items.take(20)
        items.close()
