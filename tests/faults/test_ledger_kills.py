"""A recurrent run with its ledger, killed again and again at any moment, ends with the bits of the run that nobody touched.

HEADRACE_FAULTS=short takes some seconds; long kills 50 times. Run as a script this file is the launcher of several ranks, in one process
group, so that a kill takes them all:  test_ledger_kills.py RANKS WORD ...
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.files import open_container
from headrace.jobs.folder import read_jsonl
from headrace.testing import kill_sweep

LONG = os.environ.get("HEADRACE_FAULTS", "short") == "long"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "stream_mixing"
CONFIG = [
    str(EXAMPLES / "diag_stale_false_evict.toml"), "--run.steps", "150" if LONG else "90", "--run.checkpoint_every", "7", "--train.threads", "1",
]  # fmt: skip
FOLLOWS = ("ledger/", "ledger_wipe", "train/loss", "train/grad_norm", "data/rows", "data/tokens_seen/")
"""Metrics that the run decides; the others are times."""


def launch(ranks: int, words: Sequence[str]) -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "headrace", *words], env=shared | {"RANK": str(n), "LOCAL_RANK": str(n)}
        )
        for n in range(ranks)
    ]
    return max(abs(process.wait()) for process in started)


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder in which the examples' relative paths lead somewhere."""
    folder = tmp_path_factory.mktemp("desk")
    out = folder / "examples" / "stream_mixing" / "data"
    subprocess.run([sys.executable, str(EXAMPLES / "make_data.py"), "--out", str(out)], check=True, capture_output=True)
    return folder


class Begun:
    """Whether the run under way has read its checkpoint, if there is one, and steps: else most kills would fall into imports."""

    def __init__(self, folder: Path) -> None:
        self._journal, self._lives = folder / "journal.jsonl", 0

    def __call__(self) -> bool:
        text = self._journal.read_text() if self._journal.exists() else ""
        lives = sum('"started"' in line or '"resumed"' in line for line in text.splitlines())
        if lives == self._lives:
            return False
        self._lives = lives
        return True


def left_behind(folder: Path) -> tuple[dict[str, bytes], dict[str, Any], dict[int, dict[str, Any]]]:
    """Model, optimiser, ledger and ghosts as bytes; cursor and counts; the last word of the metrics on each step."""
    container = open_container(max(folder.glob("checkpoints/step-*.safetensors")))
    arrays = {name: np.array(array).tobytes() for name, array in container.arrays.items()}
    meta = {name: container.meta[name] for name in ("data", "ledger", "trainer", "stats", "order_digest", "losses")}
    lines = {line["step"]: {k: v for k, v in line.items() if k.startswith(FOLLOWS)} for line in read_jsonl(folder / "metrics.jsonl")}  # fmt: skip
    return arrays, meta, lines


def sweep(desk: Path, tmp_path: Path, ranks: int, kills: Sequence[int], longest: float) -> None:
    def command(*words: str) -> list[str]:
        given = ("run", *words, "--quiet")
        alone = [sys.executable, "-m", "headrace", *given]
        return alone if ranks == 1 else [sys.executable, __file__, str(ranks), *given]

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    straight = command(*CONFIG, "--run.dir", str(tmp_path / "straight"))
    subprocess.run(straight, cwd=desk, check=True, timeout=200, env=environment)
    expected = left_behind(tmp_path / "straight")
    assert len(expected[0]["ledger/gid"]) > 0
    assert sum(line["ledger/false_evictions/stale"] for line in expected[2].values()) > 0
    killed = 0
    for seed, count in enumerate(kills):
        folder = tmp_path / f"killed-{seed}"
        done = kill_sweep(
            command(*CONFIG, "--run.dir", str(folder)), command("--resume", str(folder)), kills=count, seed=seed, longest=longest,
            ready=Begun(folder), cwd=desk, deadline=200, env=environment,
        )  # fmt: skip
        killed += len(done.moments)
        found = left_behind(folder)
        assert found[0].keys() == expected[0].keys()
        different = [name for name, content in found[0].items() if content != expected[0][name]]
        assert different == [], done
        assert found[1] == expected[1], done
        assert found[2] == expected[2], done
    assert killed >= len(kills), "runs that end before they are killed show nothing"


@pytest.mark.timeout(1800 if LONG else 240)
def test_a_killed_recurrent_run_ends_with_the_model_the_ledger_and_the_metrics_of_the_undisturbed_one(desk, tmp_path):
    sweep(desk, tmp_path, 1, [5] * 10 if LONG else [2], 0.6)


@pytest.mark.timeout(1800 if LONG else 240)
def test_so_does_one_on_two_ranks(desk, tmp_path):
    sweep(desk, tmp_path, 2, [5] if LONG else [1], 0.8)
