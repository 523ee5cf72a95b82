"""LoopYield: the event loop runs between slices of a thread's work."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from headrace.rollouts import RolloutPipeline, loop_yield
from headrace.rollouts.loop_yield import LoopYield

pytestmark = pytest.mark.timeout(60)


def test_a_thread_that_yields_goes_on_after_everything_that_was_ready_or_due(monkeypatch):
    monkeypatch.setattr(loop_yield, "_LONGEST_WAIT", 30.0)
    ran = []

    def slow(name):
        time.sleep(0.002)  # longer than a thread that stood back for a fixed moment would be away
        ran.append(name)

    async def task(name):
        await asyncio.sleep(0.001)
        slow(name)

    async def go():
        loop = asyncio.get_running_loop()
        pause, may = LoopYield(loop), threading.Event()
        tasks = [loop.create_task(task(f"due {n}")) for n in range(5)]
        await asyncio.sleep(0)

        def work():
            assert may.wait(30)
            pause()
            return list(ran)

        seen = loop.run_in_executor(None, work)
        time.sleep(0.005)  # on the loop, so that the tasks' time comes while it is busy
        for n in range(5):
            loop.call_soon(slow, f"ready {n}")
        may.set()
        found = await seen
        await asyncio.gather(*tasks)
        return found

    assert sorted(asyncio.run(go())) == sorted([f"due {n}" for n in range(5)] + [f"ready {n}" for n in range(5)])


def test_a_task_whose_time_comes_while_the_question_lies_there_still_goes_first(monkeypatch):
    """Its timer runs in the pass that hears the question, behind it, and the task itself in the next, behind what the question left there."""
    monkeypatch.setattr(loop_yield, "_LONGEST_WAIT", 30.0)
    ran = []

    async def task(number):
        await asyncio.sleep(0.001)
        time.sleep(0.002)  # lets go of the interpreter: a thread that was let go on would be quicker
        ran.append(number)

    class Asked:
        """The loop, and a word when it has been asked."""

        def __init__(self, loop):
            self.call_soon, self._ask, self.asked = loop.call_soon, loop.call_soon_threadsafe, threading.Event()

        def call_soon_threadsafe(self, *call):
            self._ask(*call)
            self.asked.set()

    async def go():
        loop = asyncio.get_running_loop()
        asked = Asked(loop)
        pause = LoopYield(asked)
        tasks = [loop.create_task(task(n)) for n in range(5)]
        await asyncio.sleep(0)

        def work():
            pause()
            return list(ran)

        seen = loop.run_in_executor(None, work)
        assert asked.asked.wait(30)
        time.sleep(0.005)  # on the loop, so that the tasks' time comes when the question is there already
        found = await seen
        await asyncio.gather(*tasks)
        return found

    assert sorted(asyncio.run(go())) == list(range(5))


def test_a_loop_that_stands_still_does_not_stop_the_thread(monkeypatch):
    monkeypatch.setattr(loop_yield, "_LONGEST_WAIT", 0.01)
    through = threading.Event()

    async def go():
        pause = LoopYield(asyncio.get_running_loop())

        def work():
            pause()
            through.set()

        working = asyncio.get_running_loop().run_in_executor(None, work)
        assert through.wait(30), "the thread waited for a loop that did nothing"
        await working

    asyncio.run(go())


def test_beside_a_closed_loop_the_thread_does_not_wait(monkeypatch):
    loop = asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(loop_yield, "_LONGEST_WAIT", 1000.0)  # longer than a test may take
    assert list(LoopYield(loop).between([1, 2, 3])) == [1, 2, 3]


def test_half_a_millisecond_of_work_is_between_two_waits(monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr(loop_yield.time, "perf_counter", lambda: clock[0])

    class Loop:
        def call_soon(self, call, *rest):
            call(*rest)

        def call_soon_threadsafe(self, call, *rest):
            asked.append(clock[0])
            call(*rest)

    pause = LoopYield(Loop())
    for tenth in range(20):
        clock[0] = tenth * 1e-4
        pause()
    assert len(asked) in (4, 5), asked  # 2 ms, with or without the rounding of the last


def test_an_open_pipeline_leaves_the_switch_interval_of_the_process_alone(tmp_path):
    before = sys.getswitchinterval()

    async def go():
        async with RolloutPipeline(tmp_path, seq_len=64):
            return sys.getswitchinterval()

    assert asyncio.run(go()) == before
