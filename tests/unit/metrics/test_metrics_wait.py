import json
import os
import queue
import threading
import time

import pytest

from headrace.errors import DeadlineExceeded
from headrace.metrics import Meter, SpecBook, Wait, default_meter, phase


def spend(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(50))


@pytest.fixture
def meter() -> Meter:
    return Meter()


def test_a_wait_gives_its_seconds_and_count(meter: Meter) -> None:
    for _ in range(3):
        with Wait("spool.empty", meter=meter):
            spend(0.002)
    drained = meter.drain()
    assert drained["wait/spool.empty/count"] == 3
    assert drained["wait/spool.empty/seconds"] >= 0.006
    assert drained["waits/exposed/seconds"] == drained["wait/spool.empty/seconds"]
    assert "waits/hidden/seconds" not in drained


def test_draining_clears_and_totals_remain(meter: Meter) -> None:
    assert meter.drain() == {}
    with Wait("a", meter=meter):
        spend(0.0)
    meter.add("rows", 5)
    first = meter.drain()
    assert first["rows"] == 5
    assert meter.drain() == {}
    meter.add("rows", 2)
    assert meter.drain() == {"rows": 2}
    assert meter.totals()["rows"] == 7
    assert meter.totals()["wait/a/count"] == 1


def test_every_drained_key_of_waits_phases_and_steps_is_declared(meter: Meter) -> None:
    with meter.step(), phase("p", meter=meter), Wait("w", meter=meter), Wait("h", meter=meter, hidden=True):
        spend(0.0)
    book = SpecBook(meter.metric_specs())
    drained = meter.drain()
    assert len(drained) >= 8
    assert [key for key in drained if book.find(key) is None] == []


def test_a_wait_counts_also_when_its_body_raises(meter: Meter) -> None:
    with pytest.raises(KeyError), Wait("a", meter=meter):
        raise KeyError("x")
    assert meter.drain()["wait/a/count"] == 1
    assert meter.open_waits() == []


def test_check_is_quiet_before_the_deadline_and_names_everything_after_it(meter: Meter) -> None:
    with Wait("spool.empty", meter=meter, deadline=60) as wait:
        wait.check()
        assert 0 < wait.remaining() <= 60
        assert not wait.expired()
    with Wait("spool.empty", meter=meter, deadline=0.001, remedy="Is the provider running?") as wait:
        spend(0.002)
        assert wait.remaining() == 0.0
        with pytest.raises(
            DeadlineExceeded, match=r"wait 'spool.empty' has taken [\d.]+ s; its deadline is 0.001 s. Is the provider"
        ):
            wait.check()


def test_check_has_a_remedy_when_none_was_given(meter: Meter) -> None:
    with Wait("a", meter=meter, deadline=0) as wait, pytest.raises(DeadlineExceeded, match="longer deadline"):
        wait.check()


def test_remaining_ends_a_blocking_call(meter: Meter) -> None:
    with Wait("a", meter=meter, deadline=0.01) as wait, pytest.raises(queue.Empty):
        queue.Queue().get(timeout=wait.remaining())
    assert 0.01 <= wait.elapsed < 60
    assert wait.elapsed == wait.seconds, "it stands still once left"
    with Wait("b", meter=meter) as wait:
        entered = wait.elapsed
        spend(0.001)
        assert wait.elapsed > entered, "it grows while it lasts"


@pytest.mark.parametrize("deadline", [-1.0, float("nan"), float("inf")])
def test_a_wait_without_an_end_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match="'a' needs a finite deadline"):
        Wait("a", deadline=deadline)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\n"])
def test_a_name_that_would_break_its_key_is_refused_before_anything_is_counted(meter: Meter, name: str) -> None:
    with pytest.raises(ValueError, match="a wait is named by"), Wait(name, meter=meter):
        pytest.fail("entered")
    with pytest.raises(ValueError, match="a phase is named by"), phase(name, meter=meter):
        pytest.fail("entered")
    assert meter.totals() == {}


def test_nested_waits_do_not_count_twice(meter: Meter) -> None:
    began = time.perf_counter()
    with Wait("outer", meter=meter):
        spend(0.004)
        with Wait("inner", meter=meter):
            spend(0.004)
    whole = time.perf_counter() - began
    t = meter.drain()
    assert t["waits/exposed/seconds"] <= whole
    assert t["waits/exposed/seconds"] == pytest.approx(t["wait/outer/seconds"] + t["wait/inner/seconds"])
    assert 0.004 <= t["wait/inner/seconds"] < whole - 0.003


def test_hidden_waits_are_kept_apart(meter: Meter) -> None:
    with Wait("idle", meter=meter, hidden=True):
        spend(0.002)
    with Wait("next", meter=meter):
        spend(0.001)
    t = meter.drain()
    assert t["waits/hidden/seconds"] == t["wait/idle/seconds"] >= 0.002
    assert t["waits/exposed/seconds"] == t["wait/next/seconds"]


def test_a_hidden_wait_that_the_trainer_stands_in_is_exposed(meter: Meter) -> None:
    with meter.step(), phase("read", meter=meter), Wait("retry", meter=meter, hidden=True):
        spend(0.001)
    assert "waits/hidden/seconds" not in meter.drain()
    with Wait("next", meter=meter), Wait("retry", meter=meter, hidden=True):
        spend(0.001)
    assert "waits/hidden/seconds" not in meter.drain()
    with phase("background", meter=meter), Wait("retry", meter=meter, hidden=True):
        spend(0.001)
    assert "waits/exposed/seconds" not in meter.drain()


def test_a_phase_that_is_used_again_forgets_that_the_trainer_once_stood_in_it(meter: Meter) -> None:
    again, retry = phase("assemble", meter=meter), Wait("retry", meter=meter, hidden=True)
    with Wait("next", meter=meter), again, retry:
        spend(0.001)
    assert "waits/hidden/seconds" not in meter.drain()
    with again, retry:
        spend(0.001)
    assert "waits/exposed/seconds" not in meter.drain()


def test_the_parts_of_a_step_add_up_to_the_whole(meter: Meter) -> None:
    for _ in range(3):
        with meter.step():
            spend(0.001)
            with Wait("next", meter=meter):
                spend(0.001)
            with phase("forward", meter=meter):
                spend(0.001)
                with phase("attention", meter=meter), Wait("sync", meter=meter):
                    spend(0.001)
    with phase("forward", meter=meter):
        spend(0.001)  # outside any step
    t = meter.drain()
    parts = [v for k, v in t.items() if k.startswith("step/") and k not in ("step/seconds", "step/count")]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(t["step/seconds"], rel=1e-9)
    assert t["step/count"] == 3
    assert (
        min(parts[0], t["step/other/seconds"], t["step/phase/forward/seconds"], t["step/wait/sync/seconds"])
        >= 0.003 / 3
    )
    assert t["step/phase/attention/seconds"] < t["step/wait/sync/seconds"]
    assert t["phase/forward/seconds"] >= t["step/phase/forward/seconds"] + 0.001


def test_other_threads_do_not_enter_the_step(meter: Meter) -> None:
    def background() -> None:
        with phase("pack", meter=meter), Wait("idle", meter=meter, hidden=True):
            spend(0.001)

    with meter.step():
        thread = threading.Thread(target=background)
        thread.start()
        thread.join(10)
    t = meter.drain()
    assert t["phase/pack/seconds"] > 0
    assert t["waits/hidden/seconds"] >= 0.001
    assert not any(key.startswith(("step/phase", "step/wait")) for key in t)


def test_steps_do_not_nest(meter: Meter) -> None:
    with meter.step(), pytest.raises(RuntimeError, match="a step begins inside 'step'"), meter.step():
        pass


def test_one_wait_object_cannot_be_open_twice(meter: Meter) -> None:
    wait = Wait("a", meter=meter)
    with wait, pytest.raises(RuntimeError, match="already open"):
        wait.__enter__()
    with wait:  # again is fine
        spend(0.0)
    assert meter.drain()["wait/a/count"] == 2


def test_a_wait_left_out_of_order_does_not_stay_in_the_chain(meter: Meter) -> None:
    def generator():
        with phase("reading", meter=meter):
            yield 1

    stream = generator()
    with Wait("next", meter=meter):
        next(stream)
    stream.close()
    assert meter.open_waits() == []
    with meter.step():
        spend(0.0)
    t = meter.drain()
    assert t["wait/next/count"] == 1
    assert t["step/count"] == 1


def test_no_count_is_lost_between_threads_that_add_and_one_that_drains(meter: Meter) -> None:
    each, threads = 2000, 4
    done = threading.Event()
    seen: dict[str, float] = {}

    def work() -> None:
        for i in range(each):
            with Wait(f"w{i % 7}", meter=meter, hidden=True):
                meter.add("rows")

    def take() -> None:
        for key, value in meter.drain().items():
            seen[key] = seen.get(key, 0) + value

    def reader() -> None:
        while not done.is_set():
            take()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    reading = threading.Thread(target=reader)
    for thread in (reading, *workers):
        thread.start()
    for thread in workers:
        thread.join(60)
    done.set()
    reading.join(60)
    take()
    assert seen["rows"] == each * threads
    assert sum(v for k, v in seen.items() if k.endswith("/count")) == each * threads
    assert seen["waits/hidden/seconds"] == pytest.approx(
        sum(v for k, v in seen.items() if k[:6] == "wait/w" and k.endswith("/seconds"))
    )


def test_open_waits_say_who_waits_for_what(meter: Meter) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck() -> None:
        with Wait("upload", meter=meter, hidden=True):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=stuck, name="uploader")
    thread.start()
    assert entered.wait(10)
    with Wait("next", meter=meter):
        found = meter.open_waits()
    leave.set()
    thread.join(10)
    assert [(wait.name, wait.exposed) for wait in found] == [("upload", False), ("next", True)]
    assert meter.open_waits() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_from_zero_even_if_the_lock_was_held(meter: Meter) -> None:
    meter.add("rows", 3)
    reading, writing = os.pipe()
    with Wait("fork", meter=meter), meter._lock:
        pid = os.fork()
        if pid == 0:
            meter.add("rows", 1)
            with Wait("a", meter=meter):
                spend(0.0)
            os.write(writing, json.dumps(sorted(meter.drain())).encode())
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert told == ["rows", "wait/a/count", "wait/a/seconds", "waits/exposed/seconds"]
    assert meter.totals()["rows"] == 3


def test_the_default_meter_takes_what_names_no_other() -> None:
    before = default_meter().totals().get("wait/test.default/count", 0)
    with Wait("test.default"), phase("test.default"):
        spend(0.0)
    after = default_meter().totals()
    assert after["wait/test.default/count"] == before + 1
    assert after["phase/test.default/seconds"] > 0
