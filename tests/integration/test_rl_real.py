"""RL with real parts: each test runs where its package is installed and is skipped by name elsewhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_reasoning_gym_tasks_are_played_in_processes(warm, tmp_path):
    pytest.importorskip("reasoning_gym")
    words = [
        "--run.steps",
        "2",
        "--run.dir",
        str(tmp_path / "gym"),
        "--eval.tasks",
        "4",
        "--rollouts.groups_per_step",
        "4",
    ]
    done = warm.run(
        [sys.executable, "-m", "headrace", "run", "examples/rl/gym.toml", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gym" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward/chain_sum/mean", "reward/sort/mean"} <= lines[-1].keys()
    assert json.loads((tmp_path / "gym" / "summary.json").read_text())["failed"] == {}


def test_a_vllm_server_takes_weights_and_proves_it():
    pytest.importorskip("vllm")
    url = os.environ.get("HEADRACE_VLLM_URL", "")
    if not url:
        pytest.skip("HEADRACE_VLLM_URL names no server")
    import asyncio

    from headrace.rollouts.openai_engine import OpenAIEngine

    async def main() -> None:
        engine = OpenAIEngine([url])
        folder = Path(os.environ["HEADRACE_VLLM_WEIGHTS"])
        await engine.take_weights(1, folder, tolerance=0.02)
        await engine.close()

    asyncio.run(main())
