"""SIGKILL of any worker or of the coordinator, at keyed moments: the sum has the same bits in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.order import derive, key
from headrace.reduce import gram

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
ENV = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
CHUNK, SPAN = 20, 128


def workers_of(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("span", [1, SPAN] if LONG else [1])
@pytest.mark.parametrize("engine", ["local", "spool"])
def test_whoever_is_killed_the_sum_has_the_bits_of_the_pass_nobody_touched(tmp_path, engine, span):
    if not Path("/proc/self/task").exists():
        pytest.skip("finds the workers of a coordinator through /proc")
    rows = np.random.default_rng(3).standard_normal((120_000 if LONG else 40_000, 24)).astype("f4")
    np.save(tmp_path / "a.npy", rows)
    expected = gram(rows, chunk_size=CHUNK).sha256
    kills, done, passes, victims = 50 if LONG else 2, 0, 0, {"worker": 0, "coordinator": 0}
    moment = key("gram.kills", span=span)
    while done < kills or passes == 0:
        out = tmp_path / f"g{passes}.safetensors"
        command = [
            sys.executable, "-m", "headrace", "gram", "a.npy", "--chunk", str(CHUNK), "--span", str(span), "--workers", str(2 + passes % 2),
            "--engine", engine, "--save-every", "0.02", "--out", out.name, "--format", "json",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        work = tmp_path / f"{out.name}.work"
        began = {p.name for p in work.glob("coordinator-*")} if work.exists() else set()
        deadline = time.monotonic() + 60
        while process.poll() is None and done < kills:
            now = {p.name for p in work.glob("coordinator-*")} if work.exists() else set()
            if now <= began and derive(moment, done) % 4:  # mostly under way; sometimes while it starts
                assert time.monotonic() < deadline
                time.sleep(0.002)
                continue
            time.sleep(derive(moment, 1000 + done) % 200 / 1000)
            crew = workers_of(process.pid)
            if done % 2 == 0 and not crew:  # it is a worker's turn, and on a busy machine none has started yet
                continue
            done += 1
            if done % 2:
                victims["worker"] += 1
                os.kill(crew[derive(moment, 3000 + done) % len(crew)], signal.SIGKILL)
            else:
                victims["coordinator"] += 1
                process.kill()
            began = now
        said, _ = process.communicate(timeout=120)
        if process.returncode == 0:
            assert json.loads(said)["sha256"] == expected
            assert not work.exists()
            passes += 1
        else:
            assert process.returncode == -signal.SIGKILL
    assert passes >= 1
    assert min(victims.values()) >= (10 if LONG else 1), victims
