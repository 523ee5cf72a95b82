"""Exclusive locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.errors import ConfigError, StorageError
from headrace.runtime.locks import ExclusiveLock, lock_holder

_HOLD = """
import sys
from pathlib import Path
from headrace.runtime.locks import ExclusiveLock
lock = ExclusiveLock.take(Path(sys.argv[1]), "a test")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held_elsewhere(tmp_path):
    """A lock file, and the process that holds it until its standard input ends."""
    path = tmp_path / "a.lock"
    command = [sys.executable, "-c", _HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield path, process
        process.kill()


def acquire(path, **options):
    return ExclusiveLock.acquire(path, in_use=f"{path} is in use by", advice="wait for it", **options)


def test_a_second_process_is_refused_with_the_name_of_the_first(held_elsewhere):
    path, process = held_elsewhere
    assert ExclusiveLock.take(path) is None
    for patience in (0.0, 0.05):
        with pytest.raises(ConfigError, match=rf"is in use by a test, process {process.pid} on \S+: wait for it$"):
            acquire(path, patience=patience)


def test_the_lock_of_a_killed_process_is_free(held_elsewhere):
    path, process = held_elsewhere
    assert lock_holder(path).startswith(f"a test, process {process.pid} on ")
    process.kill()
    process.wait()
    assert lock_holder(path) is None
    acquire(path, owner="the next").release()


def test_a_short_line_replaces_a_long_one(tmp_path):
    path = tmp_path / "a.lock"
    path.write_text("x" * 300)
    lock = acquire(path)
    assert path.read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"
    lock.release()
    lock.release()


def test_a_lock_held_by_this_process_says_so(tmp_path):
    lock = acquire(tmp_path / "a.lock")
    with pytest.raises(ConfigError, match="It is this process that has it open"):
        acquire(tmp_path / "a.lock")
    lock.release()


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_symbolic_link_is_not_followed(tmp_path, target):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "a.lock").symlink_to(tmp_path / target)
    for inside in (None, tmp_path):
        with pytest.raises(StorageError, match=r"a\.lock"):
            acquire(tmp_path / "a.lock", inside=inside)
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_inside_refuses_a_linked_folder_on_the_way(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "work").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError, match="work"):
        acquire(tmp_path / "work" / "lock", inside=tmp_path)
    acquire(tmp_path / "work" / "lock").release()


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.lock")
    with pytest.raises(StorageError, match="not a regular file"):
        acquire(tmp_path / "a.lock")


def test_a_removed_lock_file_is_noticed(tmp_path):
    path = tmp_path / "a.lock"
    first = acquire(path)
    path.unlink()
    assert not first.valid()
    second = acquire(path)
    assert second.valid()
    first.release(remove=True)
    assert path.exists(), "the file of another holder stays"
    second.release(remove=True)
    assert not path.exists()
