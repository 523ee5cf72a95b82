"""Rollouts to test with, and a render function that misbehaves when a message tells it to. Processes import this module by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

LAYERS, TOPK = 2, 3


def output(task, member, *, turns=3, routed=True, seed=0, env="game", **more):
    """A rollout of some turns; its tokens and experts follow from its place."""
    rng = np.random.default_rng([seed, task, member])
    context: list[int] = []
    steps = []
    for _ in range(turns):
        context = [*context, *rng.integers(0, 1000, 5).tolist()]
        said = rng.integers(0, 1000, int(rng.integers(1, 6))).tolist()
        tokens = {
            "prompt_ids": list(context), "prompt_mask": [0] * len(context), "completion_ids": said, "completion_mask": [1] * len(said),
            "completion_logprobs": (-rng.random(len(said))).tolist(),
        }  # fmt: skip
        context = [*context, *said]
        if routed:
            rows = len(context) - 1
            tokens["routed_experts"] = {"data": rng.bytes(rows * LAYERS * TOPK), "shape": [rows, LAYERS, TOPK]}
        steps.append({"prompt": "?", "completion": "!", "tokens": tokens})
    return {"example_id": task, "env_name": env, "reward": float(member % 2), "trajectory": steps, **more}


def told(batch):
    """Everything a trainer sees, but not where rows lie in the file."""
    return [
        {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in micro.items()}
        for rank in range(batch.ranks)
        for micro in batch.micro_batches(rank)
    ]


def render(messages, generation):
    """Ids of messages. A message tells the process it is rendered in what to do: die (while its file is there), hang, spin."""
    for message in messages:
        verb, _, path = message["content"].partition(" ")
        if verb == "die" and (not path or Path(path).exists()):
            if path:
                os.unlink(path)
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "hang":
            time.sleep(60)
        while verb == "spin":
            pass
    ids = [ord(c) for m in messages for c in m["content"]]
    return [*ids, 1] if generation else [*ids, 1, 2]
