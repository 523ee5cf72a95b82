"""A rank of a gloo group that is killed or stopped ends the pass with its name, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from headrace.reduce import gram

LONG = os.environ.get("HEADRACE_FAULTS", "long") == "long"
CHUNK = 20


def started(folder, ranks: int, deadline: float) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "headrace", "gram", "a.npy", "--chunk", str(CHUNK), "--engine", "torchrun", "--save-every", "0.05",
        "--deadline", str(deadline), "--out", "g.safetensors", "--format", "json",
    ]  # fmt: skip
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command, cwd=folder, env=os.environ | place | {"RANK": str(rank), "NO_COLOR": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP] if LONG else [signal.SIGKILL])
def test_a_rank_that_is_killed_or_stopped_is_named_within_the_deadline_and_a_restart_goes_on(tmp_path, how):
    rows = np.random.default_rng(5).standard_normal((200_000, 24)).astype("f4")
    np.save(tmp_path / "a.npy", rows)
    deadline = 100.0 if how == signal.SIGKILL else 15.0
    group = started(tmp_path, 3, deadline)
    try:
        work, until = tmp_path / "g.safetensors.work", time.monotonic() + 100
        while not (work.is_dir() and list(work.glob("coordinator-*"))):
            assert time.monotonic() < until
            assert group[0].poll() is None, group[0].communicate()[1]
            time.sleep(0.002)
        group[2].send_signal(how)
        began = time.monotonic()
        _, said = group[0].communicate(timeout=60)
        assert time.monotonic() - began < (10 if how == signal.SIGKILL else deadline + 10)
        assert group[0].returncode == 1
        assert "rank 2 of the group is gone or did not answer" in said
        assert "Start the same command again" in said
        assert "Traceback" not in said
    finally:
        for process in group:
            process.kill()
            process.communicate()
    again = started(tmp_path, 2, 100.0)
    told, said = again[0].communicate(timeout=120)
    again[1].communicate(timeout=60)
    assert again[0].returncode == 0, said
    summary = json.loads(told)
    assert summary["sha256"] == gram(rows, chunk_size=CHUNK).sha256
    assert 0 < summary["resumed_at"] < summary["n_chunks"]
