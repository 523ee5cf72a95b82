"""A recurrent run with its ledger, killed again and again at any moment, ends with the bits of the run that nobody touched.

HEADRACE_FAULTS=short takes some seconds; long kills 50 times. Run as a script this file is the server that imports torch and the compiled
loops once and forks each life of a run, which is the command itself with its words.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.files import open_container, read_jsonl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rank_server
from stream_runs import CONFIGS, make_desk

LONG = os.environ.get("HEADRACE_FAULTS", "short") == "long"
CONFIG = [
    str(CONFIGS / "diag_stale_false_evict.toml"), "--run.steps", "150" if LONG else "90", "--run.checkpoint_every", "7", "--train.threads", "1",
]  # fmt: skip
FOLLOWS = ("ledger/", "ledger_wipe", "train/loss", "train/grad_norm", "data/rows", "data/tokens_seen/")
"""Metrics that the run decides; the others are times."""


def lives_of(journal: Path) -> int:
    """How often a run has started or gone on: then it has read its checkpoint, if there is one, and steps."""
    text = journal.read_text() if journal.exists() else ""
    return sum('"started"' in line or '"resumed"' in line for line in text.splitlines())


def live(order: dict[str, Any]) -> list[int]:
    """One life of a run, on so many ranks; how each ended. A moment: it is killed so many seconds after it began to step."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    journal = Path(order["folder"]) / "journal.jsonl"
    before, pids = lives_of(journal), []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            os.chdir(order["desk"])
            said = os.open(order["folder"] + f".rank-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(said, 1)
            os.dup2(said, 2)
            if order["ranks"] > 1:
                os.environ |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
                os.environ |= {"WORLD_SIZE": str(order["ranks"]), "LOCAL_WORLD_SIZE": str(order["ranks"])}
            code = 1
            try:
                main(order["words"])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            finally:
                os._exit(code)  # taking torch down costs a second
        pids.append(pid)
    codes: dict[int, int] = {}
    end, kill_at = time.monotonic() + 100.0, None
    while len(codes) < len(pids):
        now = time.monotonic()
        if order["moment"] is not None and kill_at is None and lives_of(journal) > before:
            kill_at = now + order["moment"]
        if now > end or (kill_at is not None and now >= kill_at):
            for pid in (p for p in pids if p not in codes):
                os.kill(pid, signal.SIGKILL)
            kill_at, end = None, float("inf")
            order["moment"] = None
        for pid in (p for p in pids if p not in codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    import headrace.runs.streams
    import headrace.train.recurrent  # noqa: F401  (once, for all lives to come)
    from headrace.cli import main
    from headrace.ledger.slot_index import INDEX_KERNELS
    from headrace.runtime.compiled import wait_for_kernels

    wait_for_kernels(*INDEX_KERNELS)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(live(json.loads(line))), flush=True)
    sys.exit(0)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with rank_server.serving(__file__) as process:
        yield process


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    return make_desk(tmp_path_factory.mktemp("desk"))


def left_behind(folder: Path) -> tuple[dict[str, bytes], dict[str, Any], dict[int, dict[str, Any]]]:
    """Model, optimiser, ledger and ghosts as bytes; cursor and counts; the last word of the metrics on each step."""
    container = open_container(max(folder.glob("checkpoints/step-*.safetensors")))
    arrays = {name: np.array(array).tobytes() for name, array in container.arrays.items()}
    meta = {name: container.meta[name] for name in ("data", "ledger", "trainer", "stats", "order_digest", "losses")}
    lines = {line["step"]: {k: v for k, v in line.items() if k.startswith(FOLLOWS)} for line in read_jsonl(folder / "metrics.jsonl")}  # fmt: skip
    return arrays, meta, lines


def sweep(server: subprocess.Popen[str], desk: Path, tmp_path: Path, ranks: int, runs: int, kills: int) -> None:
    """Some runs, each killed so many times on its way, beside one that is not."""

    def life(folder: Path, moment: float | None) -> list[int]:
        words = ["--resume", str(folder)] if lives_of(folder / "journal.jsonl") else [*CONFIG, "--run.dir", str(folder)]
        order = {
            "ranks": ranks,
            "words": ["run", *words, "--quiet"],
            "folder": str(folder),
            "desk": str(desk),
            "moment": moment,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        allowed = {0} if moment is None else {0, -signal.SIGKILL}
        said = "".join(path.read_text() for path in folder.parent.glob(f"{folder.name}.rank-*.txt"))
        assert set(codes) <= allowed, said
        return codes

    began = time.monotonic()
    life(tmp_path / "straight", None)
    took = time.monotonic() - began
    expected = left_behind(tmp_path / "straight")
    assert len(expected[0]["ledger/gid"]) > 0
    assert sum(line["ledger/false_evictions/stale"] for line in expected[2].values()) > 0
    draw, killed = random.Random(ranks), 0
    for n in range(runs):
        folder = tmp_path / f"killed-{n}"
        for _ in range(kills):
            # Within the part of the way that is its own: a run that ends before it is killed shows nothing.
            killed += -signal.SIGKILL in life(folder, draw.uniform(0.0, took / (kills + 1)))
        life(folder, None)
        arrays, meta, lines = left_behind(folder)
        assert arrays.keys() == expected[0].keys()
        assert [name for name, content in arrays.items() if content != expected[0][name]] == []
        assert meta == expected[1]
        assert lines == expected[2]
        assert list(folder.rglob(".tmp-*")) == [], "a finished run leaves nothing behind"
    assert killed >= max(runs * kills // 2, 1)


@pytest.mark.timeout(1800 if LONG else 120)
def test_a_killed_recurrent_run_ends_with_the_model_the_ledger_and_the_metrics_of_the_undisturbed_one(
    server, desk, tmp_path
):
    sweep(server, desk, tmp_path, 1, *((10, 5) if LONG else (1, 4)))


@pytest.mark.timeout(1800 if LONG else 120)
def test_so_does_one_on_two_ranks(server, desk, tmp_path):
    sweep(server, desk, tmp_path, 2, *((2, 5) if LONG else (1, 2)))
