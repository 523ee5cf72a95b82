"""Processes make of a rollout what a thread makes of it; one that dies costs its rollout another try and nobody anything else."""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.rollouts import AdvantageConfig, RolloutPipeline, encode_rollout, open_training_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rollout_outputs import output, render, told

KEYS = [(task, member) for task in range(3) for member in range(4)]


def bare(task, member, prompt):
    raw = {
        "example_id": task, "env_name": "game", "reward": float(member),
        "trajectory": [{"prompt": [{"role": "user", "content": prompt}], "completion": []}],
    }  # fmt: skip
    return json.dumps(raw)


def run(folder, arrivals, *, step=0, during=None, **more):
    async def go():
        options = {"seq_len": 64, "ranks": 2, "advantage": AdvantageConfig(), **more}
        async with RolloutPipeline(folder, **options) as pipeline:
            for key, raw in arrivals:
                assert pipeline.arrive(raw, step=step, key=key, policy_version=4)
                if during is not None:
                    await during(pipeline)
            report = await pipeline.finish(step, policy_version=5)
            return report, 0 if pipeline.processes is None else pipeline.processes.restarts

    before = multiprocessing.active_children()
    found = asyncio.run(go())
    assert multiprocessing.active_children() == before
    return found


def as_text(raw):
    """The rollout as it comes over HTTP: JSON, experts in base64."""

    def plain(value):
        if isinstance(value, bytes):
            return base64.b64encode(value).decode()
        raise TypeError

    return json.dumps(raw, default=plain).encode()


def odd(kind):
    raw = output(7, 0)
    tokens = raw["trajectory"][1]["tokens"]
    routed = tokens["routed_experts"]
    if kind == "array":
        tokens["routed_experts"] = np.frombuffer(routed["data"], np.uint8).reshape(routed["shape"])
        tokens["completion_ids"] = np.array(tokens["completion_ids"])
        tokens["completion_mask"] = np.array(tokens["completion_mask"], bool)
        raw["trajectory"][1]["response"] = object()
        raw["board"] = np.arange(3)
    elif kind == "text":
        tokens["routed_experts"] = {**routed, "data": base64.b64encode(routed["data"]).decode()}
    elif kind == "short":
        tokens["routed_experts"] = {**routed, "data": routed["data"][:-1]}
    elif kind == "not base64":
        tokens["routed_experts"] = {**routed, "data": "é" * (-(-len(routed["data"]) // 3) * 4)}
    elif kind == "object":
        raw["board"] = object()
    elif kind == "surrogate":
        raw["board"] = "\ud800"
    elif kind == "large":
        raw["board"] = 2**70
    elif kind == "nothing":
        return None
    elif kind == "no turns":
        return {**raw, "trajectory": 3}
    elif kind == "turn":
        raw["trajectory"][1] = 5
    return raw


def test_processes_make_what_a_thread_makes_of_whatever_comes(tmp_path):
    kinds = ("array", "text", "short", "not base64", "object", "surrogate", "large", "nothing", "no turns", "turn")
    arrivals = [(key, output(*key)) for key in KEYS[:5]]
    arrivals += [(key, as_text(output(*key))) for key in KEYS[5:9]]
    arrivals += [((9, n), odd(kind)) for n, kind in enumerate(kinds)]
    arrivals += [((10, 0), b"{"), ((10, 1), as_text(output(8, 1, turns=30))), ((10, 2), '{"example_id": "\ud800"}')]
    arrivals += [
        ((11, 0), encode_rollout(output(9, 0))),
        ((11, 1), encode_rollout(output(9, 1, draw=3, metrics={"m": 1.5}))),
    ]
    options = {"save_to": tmp_path / "saved", "state_columns": {"game": ["board"]}}
    expected, _ = run(tmp_path / "a", arrivals, **options)
    lines = (tmp_path / "saved" / "step_0.jsonl").read_bytes()
    found, restarts = run(tmp_path / "b", arrivals, use_process_pool=2, **options)
    assert told(open_training_batch(found.path)) == told(open_training_batch(expected.path))
    assert (found.refused, found.truncated, found.samples) == (expected.refused, expected.truncated, expected.samples)
    assert sum(found.refused.values()) == 10
    metrics = [{k: v for k, v in r.metrics.items() if not k.startswith("event_loop_lag/")} for r in (found, expected)]
    assert metrics[0] == metrics[1] | {"rollouts/worker_restarts": 0.0}
    assert (tmp_path / "saved" / "step_0.jsonl").read_bytes() == lines
    assert restarts == 0


def test_a_killed_process_costs_nothing_but_another_try(tmp_path):
    expected, _ = run(tmp_path / "a", [(key, output(*key)) for key in KEYS])
    victims = []

    async def kill(pipeline):
        # Whoever it is, and whatever it is doing: asking, working, answering, idle.
        if len(victims) < 4:
            victims.append(pipeline.processes.pids[0])
            os.kill(victims[-1], signal.SIGKILL)
        await asyncio.sleep(0)

    found, restarts = run(
        tmp_path / "b",
        [(key, as_text(output(*key))) for key in KEYS],
        use_process_pool=1,
        worker_retries=9,
        during=kill,
    )
    assert told(open_training_batch(found.path)) == told(open_training_batch(expected.path))
    assert (found.rollouts, found.refused) == (len(KEYS), {})
    assert found.metrics["rollouts/worker_restarts"] == restarts >= 1


def test_a_rollout_that_kills_its_process_is_tried_again_a_bounded_number_of_times_and_then_refused(tmp_path):
    (tmp_path / "once").touch()
    arrivals = [
        ((0, 0), bare(0, 0, f"die {tmp_path / 'once'}")),
        ((0, 1), bare(0, 1, "die")),
        ((0, 2), bare(0, 2, "live")),
    ]
    report, restarts = run(tmp_path / "q", arrivals, use_process_pool=1, render=render, worker_retries=1)
    assert report.refused == {"worker": 1}
    assert report.metrics["rollouts/refused/worker"] == 1.0
    assert report.rollouts == 2
    assert restarts == 3
    batch = open_training_batch(report.path)
    assert batch.samples == 2
    assert sorted(p.name for p in (tmp_path / "q").iterdir()) == ["step_000000000000.safetensors"]


def test_a_process_that_hangs_is_replaced_at_its_deadline(tmp_path):
    arrivals = [((0, 0), bare(0, 0, "hang")), ((0, 1), bare(0, 1, "live"))]
    report, restarts = run(tmp_path, arrivals, use_process_pool=1, render=render, worker_retries=0, worker_deadline=0.5)
    assert (report.refused, report.rollouts, restarts) == ({"worker": 1}, 1, 1)


def test_a_pipeline_that_is_left_in_the_middle_ends_its_processes(tmp_path):
    async def go():
        async with RolloutPipeline(tmp_path, seq_len=64, use_process_pool=1, render=render) as pipeline:
            pipeline.arrive(bare(0, 0, "hang"), step=0, key=(0, 0))
            pipeline.arrive(bare(0, 1, "live"), step=0, key=(0, 1))

    asyncio.run(go())
    assert not multiprocessing.active_children()
    assert list(tmp_path.iterdir()) == []


def test_what_a_pool_cannot_be_is_named(tmp_path):
    with pytest.raises(ConfigError, match="use_process_pool is -1"):
        RolloutPipeline(tmp_path, seq_len=4, use_process_pool=-1)
    with pytest.raises(ConfigError, match="retries -1"):
        RolloutPipeline(tmp_path, seq_len=4, use_process_pool=1, worker_retries=-1)
    with pytest.raises(ConfigError, match="render function cannot be sent"):
        run(tmp_path, [], use_process_pool=1, render=lambda messages, generation: [])
    assert not multiprocessing.active_children()
