"""Calls that are tried again."""

from __future__ import annotations

import time

import pytest

from headrace.errors import DataError
from headrace.metrics import default_meter
from headrace.runtime.retry import retry


class Flaky:
    """A call that raises its errors in turn, then returns "done"."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def tried(call, **options):
    how = {"wait_name": "test.retry", "deadline": 60.0, "first_pause": 0.001, **options}
    return retry(call, passes=lambda error: isinstance(error, OSError), **how)


def test_errors_that_pass_are_tried_again_under_one_named_wait():
    call = Flaky(OSError("one"), OSError("two"))
    before = default_meter().totals().get("wait/test.retry/count", 0)
    assert tried(call) == "done"
    assert call.calls == 3
    assert default_meter().totals()["wait/test.retry/count"] == before + 1


def test_a_call_that_succeeds_at_once_waits_for_nothing():
    before = default_meter().totals().get("wait/test.retry/count", 0)
    assert tried(Flaky()) == "done"
    assert default_meter().totals().get("wait/test.retry/count", 0) == before


@pytest.mark.parametrize("errors", [(ValueError("no"),), (OSError("passes"), ValueError("no"))])
def test_an_error_that_does_not_pass_is_raised_as_it_is(errors):
    call = Flaky(*errors)
    with pytest.raises(ValueError, match="no"):
        tried(call)
    assert call.calls == len(errors)


def test_the_last_error_is_raised_after_the_most_tries():
    call = Flaky(*(OSError(str(n)) for n in range(9)))
    with pytest.raises(OSError, match=r"^2$"):
        tried(call, most_tries=3)
    assert call.calls == 3


def test_the_deadline_ends_the_tries_and_the_caller_words_the_error():
    def gave_up(error, tries, seconds):
        return DataError(f"{error} after {tries} tries, {0.2 <= seconds < 30}")

    call, begin = Flaky(*(OSError("gone") for _ in range(10_000))), time.monotonic()
    with pytest.raises(DataError, match=r"^gone after \d+ tries, True$"):
        tried(call, deadline=0.2, longest_pause=0.01, gave_up=gave_up)
    assert time.monotonic() - begin < 30
    assert call.calls > 1


def test_a_first_try_that_takes_longer_than_the_deadline_is_the_only_one(monkeypatch):
    call = Flaky(OSError("late"), OSError("later"))
    moments = iter([0.0, 100.0, 100.0])
    monkeypatch.setattr("headrace.runtime.retry.time.monotonic", lambda: next(moments))
    with pytest.raises(OSError, match="late"):
        tried(call)
    assert call.calls == 1
