"""Stream runs under stress: killed at any moment, under torchrun, lost reader processes, every shape at every step.

HEADRACE_FAULTS=short takes some seconds, long the numbers of the issue.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import DataError, DeadlineExceeded, WorkerDied
from headrace.loader.streams import StreamMixingDataset
from headrace.testing import kill_sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from stream_cells import write_streams
from stream_runs import CONFIGS, make_desk

ROOT = Path(__file__).resolve().parents[2]
LONG = os.environ.get("HEADRACE_FAULTS", "short") == "long"
SHAPES = [(0, 1), (0, 2), (1, 1), (2, 1), (3, 1), (2, 2), (0, 5)]


ROWS_OF_A_FILE = r"rows \d+ to \d+ of \S+/\w+/\d+\.\w+"


def assert_rows_of_the_plan(sentence: str, expected: list[Any]) -> None:
    """The rows that an error names are those of a batch that the plan has."""
    found = re.search(r"rows (\d+) to (\d+) of \S+/(\d+)\.\w+", sentence)
    assert found is not None, sentence
    first, last, file = (int(n) for n in found.groups())
    assert [float(file * 10_000 + row) for row in range(first, last)] in [cells for _, cells in expected]


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    return make_desk(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_streams(
        tmp_path_factory.mktemp("cells"), {"atac": [13, 40, 0], "protein": [9, 22], "rna": [31, 7, 18, 26]}
    )


def dataset(root: Path, **options: Any) -> StreamMixingDataset:
    given = {"batch_size": {"atac": 3, "protein": 2, "rna": 4}, "num_streams_mixed": 3, "seed": 5, "repeat": True}
    return StreamMixingDataset(root, cache=root.parent / "cache", global_ranks=2, **(given | options))


def seen(ranks: list[StreamMixingDataset], steps: int) -> list[Any]:
    """(draw, who the cells say they are) of so many steps, over all ranks."""
    iterators, drawn = [iter(rank) for rank in ranks], {}
    for _ in range(steps):
        for iterator in iterators:
            batch = next(iterator)
            drawn.setdefault(batch["draw"], []).extend(batch["x"][:, 0].tolist())
    return sorted(drawn.items())


@pytest.mark.timeout(120)
def test_the_command_runs_a_stream_job_under_torchrun(desk, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "headrace",
        "run",
    ]
    done = subprocess.run(
        [*command, str(CONFIGS / "healthy.toml"), "--run.dir", str(tmp_path / "run"), "--run.steps", "4", "--format", "json"],
        cwd=desk, capture_output=True, text=True, timeout=110, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["state"], summary["step"], summary["world_size"]) == ("completed", 4, 2)


@pytest.mark.timeout(900 if LONG else 120)
def test_a_run_killed_at_any_moment_ends_where_the_undisturbed_one_does(desk, tmp_path):
    def command(folder: str, *more: str) -> list[str]:
        return [sys.executable, "-m", "headrace", "run", *more, "--quiet"] + (
            ["--run.dir", str(tmp_path / folder)] if more[0] != "--resume" else []
        )

    config = [str(CONFIGS / "healthy.toml"), "--run.steps", "120", "--run.checkpoint_every", "5"]
    subprocess.run(command("straight", *config), cwd=desk, check=True, timeout=100)
    expected = json.loads((tmp_path / "straight" / "summary.json").read_text())
    for seed in range(12 if LONG else 1):
        folder = tmp_path / f"killed-{seed}"
        kill_sweep(
            command(folder.name, *config), command("", "--resume", str(folder)), kills=3, seed=seed, longest=1.5,
            ready=lambda folder=folder: any((folder / "checkpoints").glob("step-*")), cwd=desk, deadline=100,
        )  # fmt: skip
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["order_digest"] == expected["order_digest"]
        assert summary["model_sha256"] == expected["model_sha256"]
        assert summary["mix"] == expected["mix"]


@pytest.mark.skipif(not LONG, reason="every step of every pair of shapes: HEADRACE_FAULTS=long")
@pytest.mark.timeout(1200)
def test_stopping_at_every_step_of_every_shape_and_resuming_on_every_other_is_exact(root):
    total = 40
    with dataset(root, prefetch_batches=0) as data:
        expected = seen([data], total)
    pools = {
        (workers, world): [dataset(root, num_workers=workers, dp_rank=r, dp_world_size=world) for r in range(world)]
        for workers, world in SHAPES
    }
    fresh = {shape: ranks[0].state_dict() for shape, ranks in pools.items()}
    try:
        for a, b in itertools.product(SHAPES, SHAPES):
            for stop in range(total):
                for rank in pools[a]:
                    rank.load_state_dict(fresh[a])
                head = seen(pools[a], stop)
                states = json.loads(json.dumps([rank.state_dict() for rank in pools[a]]))
                for rank in pools[b]:
                    rank.load_state_dict(states)
                assert head + seen(pools[b], min(6, total - stop)) == expected[: min(stop + 6, total)], (a, b, stop)
    finally:
        for rank in itertools.chain(*pools.values()):
            rank.close()


def test_a_killed_reader_process_is_named_and_the_state_is_good_for_another_run(root):
    with dataset(root, prefetch_batches=0) as data:
        expected = seen([data], 20)
    data = dataset(root, num_workers=2, prefetch_batches=1)
    head = seen([data], 7)
    state = data.state_dict()
    victim = data.loader.plan.processes.pids[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(
        WorkerDied,
        match=rf"reader process 1 \(pid {victim}\) of 2 was killed by SIGKILL while it read {ROWS_OF_A_FILE}",
    ) as died:
        seen([data], 20)
    assert_rows_of_the_plan(str(died.value), expected)
    data.close()
    with dataset(root, num_workers=1) as other:
        other.load_state_dict(state)
        assert head + seen([other], 13) == expected


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_reader_process_that_hangs_is_an_error_at_the_deadline_with_file_and_rows(root, prefetch):
    with dataset(root, prefetch_batches=0) as data:
        expected = seen([data], 23)
    data = dataset(root, num_workers=1, prefetch_batches=prefetch, deadline=60.0)
    seen([data], 3)
    (pid,) = data.loader.plan.processes.pids
    os.kill(pid, signal.SIGSTOP)
    # Only now: a process takes longer to start on a busy machine.
    data.loader._wait.deadline = data.loader.plan.processes._deadline = 1.0
    try:
        with pytest.raises(DeadlineExceeded, match=ROWS_OF_A_FILE) as late:
            seen([data], 20)
        assert_rows_of_the_plan(str(late.value), expected)
        with pytest.raises(DeadlineExceeded, match=rf"reader process 0 \(pid {pid}\) of 1 .*{ROWS_OF_A_FILE}"):
            next(iter(data))  # the answer that did not come is still the first: nothing else is taken for it
    finally:
        os.kill(pid, signal.SIGCONT)
        data.loader._wait.deadline = data.loader.plan.processes._deadline = 60.0
    at = data.delivered  # with batches that were ready before the process hung
    assert 3 <= at <= 3 + prefetch
    assert seen([data], 1) == expected[at : at + 1]
    data.close()


def test_a_reader_that_hangs_in_the_trainers_process_is_named_with_file_and_rows(tmp_path):
    release = threading.Event()

    class Slow:
        rows = 30

        def read(self, start: int, stop: int) -> dict[str, Any]:
            assert release.wait(60) or stop
            return {"x": np.zeros((stop - start, 2), np.float32)}

        def close(self) -> None: ...

    (tmp_path / "cells" / "rna").mkdir(parents=True)
    (tmp_path / "cells" / "rna" / "a.slow").write_bytes(b"slow")
    data = StreamMixingDataset(
        tmp_path / "cells", batch_size=4, readers={".slow": lambda path, columns: Slow()}, cache=tmp_path / "c", deadline=0.5
    )  # fmt: skip
    try:
        with pytest.raises(DeadlineExceeded, match=r"rna/a\.slow"):
            next(iter(data))
    finally:
        release.set()
        data.close()


def test_what_a_reader_process_cannot_read_is_its_sentence_here(root, tmp_path):
    broken = write_streams(tmp_path / "cells", {"rna": [30, 30]}, (".parquet",))
    data = StreamMixingDataset(broken, batch_size=4, num_workers=1, cache=tmp_path / "c")
    for path in (broken / "rna").iterdir():
        path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"parquet is not a parquet file, or was cut short"):
        list(data)
    data.close()
