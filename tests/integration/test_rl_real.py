"""RL with real parts: each test runs where its package is installed and is skipped by name elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.rollouts.arrival_log import read_arrivals

ROOT = Path(__file__).resolve().parents[2]


def test_reasoning_gym_tasks_are_played_in_processes(warm, tmp_path):
    pytest.importorskip("reasoning_gym")
    words = ["--run.steps", "2", "--run.dir", str(tmp_path / "gym"), "--eval.tasks", "4", "--rollouts.groups_per_step", "4"]  # fmt: skip
    done = warm.run(
        [sys.executable, "-m", "headrace", "run", "examples/rl/gym.toml", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gym" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward/chain_sum/mean", "reward/sort/mean"} <= lines[-1].keys()
    assert json.loads((tmp_path / "gym" / "summary.json").read_text())["failed"] == {}


REVERSE = """
import verifiers.v1 as vf

__all__ = ["ReverseTaskset"]


class ReverseTask(vf.Task):
    @vf.reward
    async def reversed(self, trace) -> float:
        wanted, said = self.data.prompt[:-1][::-1], trace.last_message.content
        return sum(a == b for a, b in zip(said, wanted)) / len(wanted)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_message.content)


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        for number in range(200):
            yield ReverseTask(vf.TaskData(prompt=f"{number:03d}>"), self.config.task)
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_tasks_of_a_verifiers_taskset_are_played_and_scored(tmp_path, workers):
    pytest.importorskip("verifiers.v1")
    (tmp_path / "reverse_digits.py").write_text(REVERSE)
    words = [
        "--env.0.spec", "verifiers:reverse-digits", "--env.0.max_tokens", "3", "--env.0.workers", workers, "--run.steps", "2",
        "--run.dir", str(tmp_path / "run"), "--eval.tasks", "8", "--rollouts.groups_per_step", "4",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "run", str(ROOT / "examples" / "rl" / "sort.toml"), *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failed"] == {}
    assert 0 < summary["reward_last"] < 1
    records = [a for path in (tmp_path / "run" / "arrivals").glob("*.log") for a in read_arrivals(path)]
    assert {a.metrics["length"] for a in records} <= {0.0, 1.0, 2.0, 3.0}


@pytest.mark.timeout(500)
def test_ray_actors_play_the_rollouts_of_the_loop(warm, tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "headrace", "run", str(ROOT / "examples" / "rl" / "guess.toml"), "--run.steps", "2", "--rollouts.groups_per_step", "4", "--eval.tasks", "0"]  # fmt: skip
    warm.run([*command, "--run.dir", str(tmp_path / "0")], cwd=tmp_path, check=True, timeout=200)
    # A process of its own: Ray's threads do not survive a fork.
    subprocess.run(
        [*command, "--run.dir", str(tmp_path / "ray"), "--env.0.workers", "ray"],
        env=os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}, cwd=tmp_path, check=True, timeout=200,
    )  # fmt: skip
    models = {json.loads((tmp_path / way / "summary.json").read_text())["model_sha256"] for way in ("0", "ray")}
    assert len(models) == 1


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
