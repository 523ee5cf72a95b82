"""A whole run, killed again and again at any moment of its life, ends with the bits of the run that nobody touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.testing import kill_sweep

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--run.steps", "40", "--run.checkpoint_every", "1", "--run.log_every", "2", "--text.seq_len", "32", "--train.threads", "1",
    "--loader.global_batch_size", "12",
]  # fmt: skip
ENV = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def headrace(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *words]


def facts(run: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        headrace("inspect", str(run), "--format", "json"), cwd=ROOT, env=ENV, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    return found["step"], found["digest"], found["model_sha256"]


@pytest.mark.timeout(1800)
def test_killed_runs_end_with_the_bits_of_the_run_nobody_touched(tmp_path):
    quickstart = "examples/quickstart.toml"
    subprocess.run(
        headrace("run", quickstart, "--run.dir", str(tmp_path / "A"), *SMALL),
        cwd=ROOT,
        env=ENV,
        check=True,
        capture_output=True,
    )
    expected = facts(tmp_path / "A")
    for seed in range(8 if LONG else 1):
        run = tmp_path / f"B{seed}"
        # Checkpoints after every step: most kills fall into a save or close to one.
        sweep = kill_sweep(
            headrace("run", quickstart, "--run.dir", str(run), *SMALL), headrace("run", "--resume", str(run)),
            kills=10 if LONG else 4, seed=seed, longest=1.5, ready=lambda run=run: (run / "journal.jsonl").exists(), env=ENV, cwd=ROOT,
        )  # fmt: skip
        assert facts(run) == expected, sweep
        leftovers = list(run.rglob(".tmp-*"))
        assert len(leftovers) == 0, "a finished run leaves nothing behind"
