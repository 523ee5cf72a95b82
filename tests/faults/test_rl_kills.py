"""An RL run that is killed again and again ends with the bits of the run that nobody touched, and asks for no finished rollout twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.rollouts.arrival_log import read_arrivals
from headrace.testing import kill_sweep

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
STEPS, GROUPS, MEMBERS = 24, 4, 4
SMALL = [
    "--run.steps", str(STEPS), "--run.checkpoint_every", "5", "--rollouts.groups_per_step", str(GROUPS), "--env.0.group_size", str(MEMBERS),
    "--eval.tasks", "0", "--engine.slots", "16", "--env.0.spec", "python:slow_sort.py:play",
]  # fmt: skip
SLOW_SORT = """
import asyncio

async def play(task, say):
    numbers = task.rng.integers(0, 10, 4).tolist()
    # Rollouts end apart from each other, so that a kill finds some finished and some under way; one in 16 fails.
    await asyncio.sleep(0.02 * (numbers[0] + 1) / 10)
    answer = await say("".join(map(str, numbers)) + ">", max_tokens=4)
    if answer[0] == "9":
        raise ValueError("the environment is out of order")
    return sum(a == b for a, b in zip(answer, sorted(map(str, numbers)))) / 4
"""


def headrace(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *words]


def final(run: Path) -> tuple[int, str]:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["state"] == "completed"
    return summary["step"], summary["model_sha256"]


def arrivals(run: Path) -> list[tuple[int, int, int]]:
    """Every record of the run's log, by its key."""
    return [a.key for path in sorted((run / "arrivals").glob("step_*.log")) for a in read_arrivals(path)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lag", [0, 1, 4] if LONG else [1])
def test_killed_rl_runs_end_with_the_bits_of_the_run_nobody_touched(tmp_path, lag):
    config = tmp_path / "sort.toml"
    config.write_text((ROOT / "examples" / "rl" / "sort.toml").read_text())
    (tmp_path / "sort.py").write_text("")
    (tmp_path / "slow_sort.py").write_text(SLOW_SORT)
    words = [*SMALL, "--rollouts.lag", str(lag), "--quiet"]
    whole = tmp_path / "whole"
    subprocess.run(headrace("run", str(config), "--run.dir", str(whole), *words), cwd=tmp_path, env=ENV, check=True)
    expected, made = final(whole), arrivals(whole)
    assert len(made) == len(set(made)) >= STEPS * GROUPS * MEMBERS
    for seed in range(3 if LONG else 1):
        run = tmp_path / f"killed{seed}"
        sweep = kill_sweep(
            headrace("run", str(config), "--run.dir", str(run), *words), headrace("run", "--resume", str(run), "--quiet"),
            kills=8 if LONG else 3, seed=seed, longest=0.8, ready=lambda run=run: any((run / "arrivals").glob("*.log")), env=ENV, cwd=tmp_path,
        )  # fmt: skip
        assert final(run) == expected, sweep
        # A rollout that was asked for again after it had arrived would have a second record.
        assert sorted(arrivals(run)) == sorted(made), sweep
        assert not list(run.rglob(".tmp-*")), "a finished run leaves nothing behind"
