"""An orchestrator that is killed at any moment and started again sends every step once, in order and whole.

Run as a script, this file is the sweep, in a process that has no threads and can therefore fork:  test_rollout_kills.py FOLDER KILLS
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import DeadlineExceeded, EndOfData
from headrace.rollouts import RolloutPipeline, SpoolReceiver, SpoolSender

KILLS = {"short": 60, "long": 2000}
MEMBERS = 3


def output(step, member):
    n = 4 + (step + member) % 5
    tokens = {
        "prompt_ids": [step, member], "prompt_mask": [0, 0], "completion_ids": list(range(n)), "completion_mask": [1] * n,
        "completion_logprobs": [-1.0] * n,
        "routed_experts": {"data": bytes([step % 251, member]) * (3 * (n + 1)), "shape": [n + 1, 3, 2]},
    }  # fmt: skip
    return {"example_id": step, "env_name": "game", "reward": float(member), "trajectory": [{"tokens": tokens}]}


async def orchestrate(folder, steps):
    sender = SpoolSender(folder, max_unread=10**6)
    async with sender, RolloutPipeline(sender.queue, seq_len=64, first_step=sender.next_step) as pipeline:
        for step in range(sender.next_step, steps):
            for member in range(MEMBERS):
                pipeline.arrive(output(step, member), step=step, key=(step, member))
            await sender.send(await pipeline.finish(step, policy_version=step))


def check(batch, step):
    assert batch.step == step
    (micro,) = batch.micro_batches(0)
    borders = micro["cu_seqlens"].tolist()
    seen = set()
    for start, end in itertools.pairwise(borders):
        told, member = micro["ids"][start : start + 2].tolist()
        assert told == step
        assert end - start == 6 + (step + member) % 5
        assert micro["routed_experts"][start : end - 1].tobytes() == bytes([step % 251, member]) * (
            3 * (end - start - 1)
        )
        seen.add(member)
    assert seen == set(range(MEMBERS))


def sweep(folder, kills):
    rng = random.Random(7)
    steps, killed, received = 3 * kills, 0, 0
    receiver = SpoolReceiver(folder, deadline=0.002)
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                asyncio.run(orchestrate(folder, steps))
                code = 0
            finally:
                os._exit(code)
        if killed < kills:
            time.sleep(rng.random() * 0.03)  # the moment of the kill
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
        else:
            assert status == 0
        with contextlib.suppress(DeadlineExceeded, EndOfData):
            while True:
                check(receiver.receive(), received)
                receiver.ack(received)
                received += 1
        if not os.WIFSIGNALED(status):
            break
    assert received == steps
    left = [p.name for p in (Path(folder) / "queue" / "rollouts").iterdir() if p.name.startswith(".tmp-")]
    assert left == []
    print(f"{killed} kills, {received} steps")


@pytest.mark.timeout(600)
def test_no_step_is_lost_repeated_torn_or_out_of_order_whenever_the_orchestrator_is_killed(tmp_path):
    kills = KILLS[os.environ.get("HEADRACE_FAULTS", "long")]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(kills)], capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= kills // 2


if __name__ == "__main__":
    sweep(sys.argv[1], int(sys.argv[2]))
