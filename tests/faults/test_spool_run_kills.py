"""Whole runs over a spool: killed with their provider, and on a number of ranks that changes; always the data of the run nobody touched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spool_config import write_spool_config


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.environ.get("HEADRACE_FAULTS", "long") != "long", reason="three whole runs: for the long sweep")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see whether a process is gone")
@pytest.mark.timeout(300)
def test_a_killed_run_takes_its_provider_along_and_resumes_to_the_same_model(headrace, tmp_path):
    write_spool_config(tmp_path / "run.toml", run={"steps": 40, "log_every": 2})
    alone = headrace("run", "run.toml", "--run.dir", "A", "--format", "json", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    words = [sys.executable, "-m", "headrace", "run", "run.toml", "--run.dir", "B", "--spool.enabled", "true"]
    env = os.environ | {"NO_COLOR": "1"}
    run = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: list((tmp_path / "B" / "checkpoints").glob("step-*")) or run.poll() is not None)
    run.send_signal(signal.SIGKILL)
    said, _ = run.communicate(timeout=30)
    provider = int(re.search(r"a provider fills .* .process (\d+)", said)[1])
    until(lambda: not alive(provider), 20)
    resumed = headrace("run", "--resume", "B", "--format", "json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    one, two = json.loads(alone.stdout), json.loads(resumed.stdout)
    assert (one["digest"], one["model_sha256"]) == (two["digest"], two["model_sha256"])
    assert len(list((tmp_path / "B" / "spool" / "queue" / "train").iterdir())) < 10


@pytest.mark.skipif(os.environ.get("HEADRACE_FAULTS", "long") != "long", reason="four whole runs: for the long sweep")
@pytest.mark.timeout(400)
def test_ranks_of_torchrun_share_a_spool_and_their_number_may_change_between_runs(headrace, tmp_path):
    write_spool_config(tmp_path / "run.toml", run={"steps": 40, "log_every": 2})
    alone = headrace("run", "run.toml", "--run.dir", "A", "--format", "json", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    expected = json.loads(alone.stdout)
    env = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    for ranks, words in (
        (2, ("run.toml", "--run.dir", "B", "--spool.dir", "S", "--spool.parts", "3", "--run.stop_after", "14")),
        (3, ("--resume", "B", "--run.stop_after", "27")),
        (1, ("--resume", "B", "--run.stop_after", "40")),
    ):
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
            "headrace",
            "run",
            *words,
        ]
        done = subprocess.run(launch, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "B" / "summary.json").read_text())
    same = ("step", "digest", "tokens", "documents", "mix")
    assert {k: found[k] for k in same} == {k: expected[k] for k in same}
    shown = headrace("spool", "stat", "S", "--format", "json", cwd=tmp_path)
    parts = json.loads(shown.stdout)["splits"]["train"]
    assert [part["commit"] > 0 for part in parts] == [True] * 3, "rank 0 let go of what all had saved"
    assert all(part["files"] < 12 for part in parts)
