"""A process killed while it saves leaves a checkpoint to go on from.

Run as a script, this file is the fork server that starts savers and kills them:  test_train_kills.py FOLDER KILLS
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from headrace.train import CheckpointStore

KILLS = 15


def save_for_ever(folder: Path, acknowledge: int) -> None:
    store = CheckpointStore(folder, keep=2)
    found = store.latest()
    step = 0 if found is None else found[0]
    while True:
        step += 1
        arrays = {f"model/{i}": np.full(100_000, step, np.float32) for i in range(4)}
        store.save(step, arrays, {}, {"step": step})
        os.write(acknowledge, f"{step}\n".encode())


def kill_once(folder: Path, moment: float) -> dict:
    """Start a saver, let it acknowledge one step, kill it `moment` later; what it had promised and what is there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    began = select.select([reading], [], [], 30)[0]
    time.sleep(moment)  # not a wait for anything: the moment of the kill is what is being varied
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    promised = b""
    while part := os.read(reading, 1 << 16):
        promised += part
    os.close(reading)
    leftovers = sum(p.name.startswith(".tmp-") for p in folder.iterdir())
    said: list[str] = []
    found = CheckpointStore(folder, keep=2, report=said.append).latest()
    step, container = found if found is not None else (None, None)
    return {
        "began": bool(began),
        "killed": os.WIFSIGNALED(status),
        "promised": int(promised.split(b"\n")[-2]) if promised else 0,
        "step": step,
        "whole": container is not None
        and container.meta == {"step": step}
        and all(bool((array == step).all()) for array in container.arrays.values()),
        "said": said,
        "leftovers": leftovers,
        "generations": len(CheckpointStore(folder, writer=False).steps()),
    }


def test_a_saver_killed_at_random_moments_always_leaves_the_last_step_it_promised_or_a_later_one(tmp_path):
    command = [sys.executable, __file__, str(tmp_path), str(KILLS)]
    # One BLAS thread: the server forks, so it must have no other threads.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) == KILLS
    for kill in kills:
        assert kill["began"]
        assert kill["killed"]
        assert kill["whole"], kill
        assert kill["step"] >= kill["promised"], kill
        assert kill["said"] == [], "a kill never leaves a damaged generation, only none"
        assert kill["generations"] <= 3, "at most the new one and the two it has not pruned yet"
    assert [kill["step"] for kill in kills] == sorted(kill["step"] for kill in kills)
    assert any(kill["leftovers"] for kill in kills), "no kill fell into a save: the moments miss what they are for"


if __name__ == "__main__":
    draw = random.Random(5)
    for _ in range(int(sys.argv[2])):
        print(json.dumps(kill_once(Path(sys.argv[1]), draw.uniform(0.0, 0.02))), flush=True)
