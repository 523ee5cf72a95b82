"""The RL run of the examples is killed between two steps and goes on with the one that was under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rollouts" / "sort_digits.py"


def words(out, steps):
    return [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", str(steps), "--tasks", "2", "--told-every", "3"]


@pytest.mark.timeout(110)
def test_a_killed_rl_run_goes_on_and_learns_from_every_step_once(warm, tmp_path):
    process = warm.Popen(words(tmp_path, 1000), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 3: reward ")
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    before = torch.load(tmp_path / "policy.pt", weights_only=True)
    done = warm.run(words(tmp_path, before["step"] + 2), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"step {before['step'] + 2}: reward ")
    after = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert after["step"] == before["step"] + 2
    steps = {s["step"].item() for s in after["optimiser"]["state"].values()}
    assert steps == {after["step"]}
    for verb, told in (("report", "reward/sort"), ("inspect", "next_step")):
        shown = warm.run(
            [sys.executable, "-m", "headrace", verb, str(tmp_path), "--format", "json"], capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert told in shown.stdout
