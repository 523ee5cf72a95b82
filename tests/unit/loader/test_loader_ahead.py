"""Two may make the next batch, the thread and whoever asks for it: never both, and always in order."""

from __future__ import annotations

import random
import threading
import time

import pytest

from headrace.loader import ahead
from headrace.loader.ahead import Ahead
from headrace.metrics import Meter, Wait

pytestmark = pytest.mark.timeout(60)


class Maker:
    """Counts, and notices when it is asked twice at once."""

    def __init__(self, end: int, work: float = 0.0) -> None:
        self.end, self.work, self.next = end, work, 0
        self.at_work: list[str] = []
        self.both = False
        self.by: list[bool] = []
        """Of every batch, whether whoever asked made it."""
        self.asking = threading.current_thread()

    def __call__(self) -> int | None:
        self.at_work.append(threading.current_thread().name)
        self.both |= len(self.at_work) > 1
        number = self.next
        if self.work:
            time.sleep(self.work)  # lets the other one in, if anything does
        self.next = number + 1
        self.both |= len(self.at_work) > 1
        self.at_work.pop()
        self.by.append(threading.current_thread() is self.asking)
        return number if number < self.end else None


def taken(maker: Maker, depth: int, pauses) -> list[int]:
    made = Ahead(maker, depth=depth, name="test", meter=Meter())
    found, wait = [], Wait("test", deadline=30.0, meter=Meter())
    try:
        for pause in pauses:
            number = made.ready()
            if number is None:
                with wait:
                    number = made.next(wait)
            if number is None:
                return found
            found.append(number)
            if pause:
                time.sleep(pause)
    finally:
        made.close()
    raise AssertionError("it did not end")


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("work", [0.0, 0.0003])
def test_a_turn_that_goes_back_and_forth_keeps_order_and_one_maker(monkeypatch, depth, work):
    monkeypatch.setattr(ahead, "_AWAY", 0.0002)
    rng, maker = random.Random(depth), Maker(1500, work)
    found = taken(maker, depth, (rng.choice([0.0, 0.0, 0.0, 0.0001, 0.0005]) for _ in range(2000)))
    assert found == list(range(1500))
    assert not maker.both
    assert all(maker.by) if depth == 0 else False in maker.by
    assert work or True in maker.by  # else the thread is at work whenever somebody asks


def test_the_thread_works_ahead_again_once_the_trainer_is_away():
    maker = Maker(10**9)
    made = Ahead(maker, depth=2, name="test", meter=Meter())
    wait = Wait("test", deadline=30.0, meter=Meter())
    try:
        for _ in range(500):  # faster than anybody could hand over
            with wait:
                made.next(wait)
        assert maker.by[-1], "the trainer's turn never came"
        until = time.monotonic() + 30.0
        while maker.by[-1] and time.monotonic() < until:
            time.sleep(0.001)
        assert not maker.by[-1], "the thread did not go on by itself"
    finally:
        made.close()


def test_what_goes_wrong_while_the_trainer_makes_it_comes_out_there():
    def make():
        raise OSError("gone")

    made = Ahead(make, depth=1, name="test", meter=Meter())
    wait = Wait("test", deadline=30.0, meter=Meter())
    try:
        with wait, pytest.raises(OSError, match="gone"):
            made.next(wait)
    finally:
        made.close()
