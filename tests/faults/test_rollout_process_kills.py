"""Processes that make samples are killed at any moment, again and again: every rollout is in its step's batch, whole and once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal

import pytest

from headrace.rollouts import RolloutPipeline, encode_rollout, open_training_batch

KILLS = {"short": 8, "long": 400}
ROLLOUTS = 24


def output(step, member):
    said = 200 + 37 * member
    tokens = {
        "prompt_ids": [step, member], "prompt_mask": [0, 0], "completion_ids": [member] * said, "completion_mask": [1] * said,
        "completion_logprobs": [-1.0] * said,
        "routed_experts": {"data": bytes([step % 251, member]) * (24 * (said + 1)), "shape": [said + 1, 24, 2]},
    }  # fmt: skip
    return {"example_id": step, "env_name": "game", "reward": float(member), "trajectory": [{"tokens": tokens}]}


def check(path, step):
    batch, seen = open_training_batch(path), []
    for micro in batch.micro_batches(0):
        for start, end in itertools.pairwise(micro["cu_seqlens"].tolist()):
            told, member = micro["ids"][start : start + 2].tolist()
            assert (told, end - start) == (step, 202 + 37 * member)
            assert micro["routed_experts"][start : end - 1].tobytes() == bytes([step % 251, member]) * (
                24 * (end - start - 1)
            )
            seen.append(member)
    assert sorted(seen) == list(range(ROLLOUTS))


@pytest.mark.timeout(900)
def test_no_rollout_is_lost_or_repeated_whenever_a_process_is_killed(tmp_path):
    kills, rng = KILLS[os.environ.get("HEADRACE_FAULTS", "long")], random.Random(5)

    async def go():
        async with RolloutPipeline(tmp_path, seq_len=4096, use_process_pool=2, worker_retries=100) as pipeline:
            assert pipeline.processes is not None
            killed = 0
            for step in itertools.count():
                for member in range(ROLLOUTS):
                    pipeline.arrive(encode_rollout(output(step, member)), step=step, key=(0, member))
                    if killed < kills and rng.random() < 0.2:
                        await asyncio.sleep(rng.random() * 0.02)  # the moment of the kill
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(rng.choice(pipeline.processes.pids), signal.SIGKILL)
                            killed += 1
                report = await pipeline.finish(step)
                assert (report.rollouts, report.refused) == (ROLLOUTS, {})
                check(report.path, step)
                if killed >= kills:
                    return pipeline.processes.restarts

    assert asyncio.run(go()) >= kills // 2
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-")]
