"""Two providers of one spool that start at the same moment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.errors import WorkerDied
from headrace.runs.job import Job
from headrace.runs.own_provider import OwnProvider
from headrace.runs.provide import provider_of
from spool_config import load_spool_config, write_spool_config


@pytest.fixture
def config(tmp_path):
    path = write_spool_config(tmp_path / "run.toml", run={"steps": 6})
    return load_spool_config(path, "--run.dir", str(tmp_path / "B"), "--spool.dir", str(tmp_path / "S"))


def provider_below(pid: int) -> int | None:
    """The provider that a process has started."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if Path(f"/proc/{pid}").exists() else ():
        with contextlib.suppress(OSError):
            if b"provide" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return int(child)
    return None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see whether a process is gone")
@pytest.mark.timeout(250)
def test_a_run_goes_on_when_another_provider_takes_the_spool_before_its_own(config, tmp_path, until):
    words = [
        sys.executable,
        "-m",
        "headrace",
        "run",
        "run.toml",
        "--run.dir",
        "B",
        "--spool.dir",
        "S",
        "--format",
        "json",
    ]
    restarted = provider_of(Job(config))
    filling = threading.Thread(target=restarted.run, args=(("train",),))
    run = subprocess.Popen(words, cwd=tmp_path, env=os.environ | {"NO_COLOR": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        # The run has looked for a provider, found none and started its own, which is still importing.
        until(lambda: provider_below(run.pid) or run.poll() is not None)
        own = provider_below(run.pid)
        restarted.open(("train",))
        until(
            lambda: not Path(f"/proc/{own}").exists(), 100
        )  # refused, and the run has noticed: a zombie is still there
        filling.start()
        said, error = run.communicate(timeout=100)
    finally:
        run.kill()
        run.wait()
        restarted.stop()
        if filling.ident is not None:
            filling.join(30)
    assert run.returncode == 0, error
    assert json.loads(said)["steps"] == 6
    assert "is in use by TextProvider" in (tmp_path / "B" / "provide.log").read_text(), "its own provider was refused"


@pytest.mark.timeout(120)
def test_a_provider_that_ended_while_no_other_holds_the_spool_is_still_an_error(config, tmp_path):
    restarted = provider_of(Job(config))
    (tmp_path / "B").mkdir()
    with OwnProvider(config, tmp_path / "B" / "provide.log") as own:
        assert own._child is not None
        restarted.open(("train",))
        assert own._child.wait(timeout=60) == 1
        restarted.close()
        with pytest.raises(WorkerDied, match="ended with exit code 1"):
            own.check()


@pytest.mark.timeout(120)
def test_a_provider_that_is_refused_does_not_say_that_it_fills_the_spool(config, tmp_path, headrace):
    first = provider_of(Job(config))
    first.open(("train",))
    try:
        second = headrace("provide", "run.toml", "--spool.dir", "S", "--files", "1", cwd=tmp_path)
    finally:
        first.close()
    assert (second.returncode, second.stdout) == (1, "")
    assert "is in use by TextProvider" in second.stderr
    third = headrace("provide", "run.toml", "--spool.dir", "S", "--files", "1", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert "fills the spool" in third.stdout
    assert "train 0: published" in third.stdout
