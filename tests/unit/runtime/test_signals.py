"""SIGINT and SIGTERM are requests for the time of a block, and what they were before and after."""

import os
import signal
import threading

import pytest

from headrace.runtime.signals import signal_asked, stop_signals


def test_signals_reach_the_handler_inside_and_their_old_handlers_outside():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    got = []
    with stop_signals(got.append):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert got == [signal.SIGINT, signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_signal_that_is_given_back_has_its_usual_effect_and_the_other_one_not():
    got = []
    with stop_signals(got.append) as restore:
        restore(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert got == [signal.SIGTERM]


def test_the_first_signal_is_remembered_and_the_second_has_its_usual_effect():
    with signal_asked() as asked:
        assert asked() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_keep_their_handlers():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def other():
        with stop_signals(inside.append):
            inside.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert inside == [True]
