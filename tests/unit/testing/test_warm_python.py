"""A warm process is what a fresh interpreter would be, but for its imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PYTHON = sys.executable


def test_it_is_a_process_of_its_own_with_its_own_folder_words_and_environment(warm, tmp_path):
    code = "import os, sys; print(os.getpid(), os.getcwd(), sys.argv, sorted(os.environ), __name__)"
    process = warm.Popen([PYTHON, "-c", code, "a", "b c"], cwd=tmp_path, env={"ONLY": "this"}, stdout=-1, text=True)
    said, none = process.communicate(timeout=60)
    assert said == f"{process.pid} {tmp_path} ['-c', 'a', 'b c'] ['ONLY'] __main__\n"
    assert none is None
    assert process.pid != os.getpid()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "expected", "error"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import warnings; warnings.warn('old', DeprecationWarning)", 0, "<string>:1: DeprecationWarning: old\n"),
    ],
)
def test_its_exit_code_and_last_words_are_those_of_an_interpreter(warm, code, expected, error):
    done, fresh = (run([PYTHON, "-c", code], capture_output=True, text=True) for run in (warm.run, subprocess.run))
    assert done.returncode == fresh.returncode == expected
    assert done.stderr.endswith(error)
    assert fresh.stderr.endswith(error)


def test_warnings_are_errors_for_it_and_for_what_it_spawns_if_asked_and_not_otherwise(warm):
    code = "import sys, warnings; print(sys.warnoptions); warnings.warn('x', ResourceWarning)"
    assert warm.run([PYTHON, "-c", code]).stdout == "[]\n"
    done = warm.run([PYTHON, "-W", "error", "-c", code])
    assert (done.returncode, done.stdout) == (1, "['error']\n")
    assert "ResourceWarning: x" in done.stderr


def test_threads_and_exit_functions_are_waited_for_and_nothing_printed_is_lost(warm):
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('first')"
    )
    assert warm.run([PYTHON, "-c", code]).stdout == "first\nthread\nlast\n"


def test_it_can_be_spoken_to_signalled_and_waited_for(warm):
    code = "import sys; print(sys.stdin.readline().strip() + '!', flush=True); sys.stdin.read()"
    with warm.Popen([PYTHON, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hello!\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL


def test_what_was_read_line_by_line_and_what_is_read_at_the_end_is_all_it_said(warm):
    code = "import sys; print('one\\ntwo\\nthree', flush=True); print('four', file=sys.stderr)"
    process = warm.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert next(iter(process.stdout)) == "one\n"
    assert process.communicate(timeout=60) == ("two\nthree\n", "four\n")


def test_a_session_of_its_own_can_be_killed_as_a_group(warm, until):
    code = "import os, time; print(os.getpgid(0), os.fork(), flush=True); time.sleep(100)"
    process = warm.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline().split()[0] == str(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    process.communicate(timeout=60)  # ends only when the child's child is gone too


def test_ranks_meet_and_one_that_fails_takes_the_others_along(warm):
    code = (
        "import os, sys, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_rank(), dist.get_world_size(), flush=True)\n"
        "dist.barrier()\n"
        "sys.exit(7) if dist.get_rank() else time.sleep(100)"
    )
    done = warm.ranks(2, [PYTHON, "-c", code], timeout=90)
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]


def test_worker_processes_started_by_spawn_do_not_run_the_command_again(warm, tmp_path):
    (tmp_path / "script.py").write_text(
        "import multiprocessing, os\n"
        "def work(n): return n * n\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(work, [2, 3]))\n"
    )
    assert warm.run([PYTHON, str(tmp_path / "script.py")]).stdout == "[4, 9]\n"
