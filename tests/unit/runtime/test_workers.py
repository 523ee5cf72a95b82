"""Worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.runtime.workers import WorkerProcess

BOTH = pytest.mark.parametrize("imports_main", [True, False], ids=["with main", "alone"])


def echo(pipe, *args):
    """Answer with the arguments, the process and its native threads; then with every message, until the pipe ends."""
    pipe.send_bytes(repr((args, os.getpid(), os.environ["OMP_NUM_THREADS"])).encode())
    while True:
        pipe.send_bytes(pipe.recv_bytes())


def leave(pipe, code):
    sys.exit(code)


def say_half(pipe):
    """Send the length of a message and no byte of it."""
    os.write(pipe.fileno(), (100).to_bytes(4, "big"))
    pipe.recv_bytes()


def started(function, *args, **options):
    return WorkerProcess("tester", function, *args, **options)


@BOTH
def test_a_worker_answers_over_its_pipe_and_ends_with_it(imports_main, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    worker = started(echo, 5, "six", imports_main=imports_main)
    assert worker.pipe.recv_bytes() == repr(((5, "six"), worker.pid, "1")).encode()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    os.kill(worker.pid, signal.SIGINT)  # as Ctrl-C sends it to the whole group
    worker.pipe.send_bytes(b"x" * 300_000)
    assert worker.pipe.recv_bytes() == b"x" * 300_000
    assert worker.is_alive()
    worker.end(patience=60)
    assert worker.exit_code() == 0, "the end of the pipe is no error"


@BOTH
def test_a_dead_worker_is_named_with_how_it_ended(imports_main):
    worker = started(echo, imports_main=imports_main)
    worker.pipe.recv_bytes()
    worker.has_answered = True
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises((EOFError, OSError)):
        worker.pipe.recv_bytes()
    assert worker.describe_end() == f"worker process tester (pid {worker.pid}) was killed by SIGKILL (out of memory?)"
    worker.end()
    worker = started(leave, 3, imports_main=imports_main)
    with pytest.raises(EOFError):
        worker.pipe.recv_bytes()
    assert worker.describe_end() == f"worker process tester (pid {worker.pid}) ended with code 3"
    worker.end()


@BOTH
def test_a_stopped_worker_is_killed_at_its_end(imports_main):
    worker = started(echo, imports_main=imports_main)
    worker.pipe.recv_bytes()
    os.kill(worker.pid, signal.SIGSTOP)
    assert worker.how_it_ended(timeout=0.01) == "closed its pipe"
    worker.end(patience=0.05)
    assert worker.exit_code() == -signal.SIGKILL


def test_a_worker_that_stops_in_the_middle_of_a_message_is_an_error():
    worker = started(say_half, imports_main=False, mid_message=1.0)
    assert worker.pipe.poll(60)
    with pytest.raises(OSError):
        worker.pipe.recv_bytes()
    worker.end(patience=0.0)


@pytest.mark.parametrize("imports_main", [True, False])
def test_a_script_without_a_main_guard_is_told_so_or_needs_none(tmp_path, imports_main):
    script = tmp_path / "script.py"
    script.write_text(
        "from headrace.runtime.workers import WorkerProcess\nfrom test_workers import echo\n"
        f"worker = WorkerProcess('w', echo, imports_main={imports_main})\n"
        "try: print('answered', worker.pipe.recv_bytes())\nexcept EOFError: print(worker.describe_end())\nworker.end()\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=100, check=False)
    if imports_main:
        assert (
            "ended with code 1 before it began to work (a script that uses worker processes must do its work under `if"
            in done.stdout
        )
    else:
        assert done.stdout.startswith("answered"), done.stderr
