"""A run that is killed, stopped or moved to other ranks ends where the undisturbed one does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.runs.folder import RunFolder
from headrace.runs.inspection import inspect_path
from headrace.testing import kill_sweep

STEPS = 24
SMALL = [
    "--run.steps", str(STEPS), "--run.checkpoint_every", "5", "--run.log_every", "4", "--text.seq_len", "64",
    "--loader.global_batch_size", "12", "--train.threads", "1", "--train.warmup_steps", "4",
]  # fmt: skip


def torchrun(ranks: int, *words: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1",
        "--master-port", str(port), "-m", "headrace", *words,
    ]  # fmt: skip


ENV = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def call(headrace, repository) -> Callable[..., str]:
    """Run the command, which must go well: what it printed."""

    def run(*words: str, cwd: Path = repository, **how: Any) -> str:
        done = headrace(*words, cwd=cwd, env=ENV, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, call):
    """The description and the folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    call("run", "examples/quickstart.toml", "--run.dir", str(folder / "A"), *SMALL)
    return inspect_path(folder / "A"), folder / "A"


def test_a_run_that_is_killed_three_times_ends_with_the_same_data_and_the_same_model(
    tmp_path, repository, undisturbed, warm, monkeypatch
):
    def popen(command, **how):  # the first one imports all anew
        return (warm if "--resume" in command else subprocess).Popen(command, **how)

    known = {"STDOUT": subprocess.STDOUT, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr("headrace.testing.kill.subprocess", SimpleNamespace(Popen=popen, **known))
    run = tmp_path / "B"
    command = [sys.executable, "-m", "headrace", "run"]
    sweep = kill_sweep(
        [*command, "examples/quickstart.toml", "--run.dir", str(run), *SMALL], [*command, "--resume", str(run)],
        kills=3, seed=int.from_bytes(os.urandom(4)), shortest=0.0, longest=2.0, ready=lambda: (run / "journal.jsonl").exists(),
        env=os.environ | ENV, cwd=repository, deadline=100,
    )  # fmt: skip
    found, expected = inspect_path(run), undisturbed[0]
    assert found["step"] == STEPS, sweep
    assert found["digest"] == expected["digest"], sweep
    assert found["model_sha256"] == expected["model_sha256"], sweep


@pytest.fixture(scope="module")
def half_way_on_two_ranks(tmp_path_factory, call):
    """A run that two ranks brought to step 12."""
    run = tmp_path_factory.mktemp("half") / "C"
    call("run", "examples/quickstart.toml", "--run.dir", str(run), *SMALL, "--run.stop_after", "12", ranks=2)
    assert inspect_path(run)["step"] == 12
    return run


@pytest.mark.parametrize("then", [1, 3])
def test_two_ranks_stopped_half_way_and_resumed_on_others_see_the_same_data(
    tmp_path, undisturbed, half_way_on_two_ranks, call, then
):
    run = tmp_path / "C"
    shutil.copytree(half_way_on_two_ranks, run)
    call("run", "--resume", str(run), "--run.stop_after", str(STEPS), ranks=then)
    found = inspect_path(run)
    assert found["step"] == STEPS
    assert found["digest"] == undisturbed[0]["digest"]
    assert found["world_size"] == then


def test_the_digests_of_single_steps_do_not_depend_on_the_ranks_of_torchrun(tmp_path, repository, undisturbed):
    done = subprocess.run(
        torchrun(2, "run", "examples/quickstart.toml", "--run.dir", str(tmp_path / "D"), *SMALL),
        cwd=repository,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_of(tmp_path / "D") == steps_of(undisturbed[1])
    assert len(steps_of(tmp_path / "D")) == STEPS


def steps_of(run: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in (run / "digests.jsonl").read_text().splitlines():
        record = json.loads(line)
        found |= {record["first"] + i: d for i, d in enumerate(record["digests"])}
    return found


def test_sigterm_stops_after_the_step_with_a_checkpoint_and_says_how_to_go_on(tmp_path, repository, call, warm, until):
    run, straight, steps = tmp_path / "E", tmp_path / "S", 60
    words = ("run", "examples/quickstart.toml", *SMALL, "--run.steps", str(steps), "--run.log_every", "1000")
    process = warm.Popen(
        [sys.executable, "-m", "headrace", *words, "--run.dir", str(run)], cwd=repository, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=os.environ | ENV,
    )  # fmt: skip
    try:
        until(lambda: list(run.glob("checkpoints/step-*.safetensors")) or process.poll() is not None)
        process.terminate()
        seen = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, seen
    assert f"headrace run --resume {run}" in seen
    assert 0 < inspect_path(run)["step"] < steps
    call("run", "--resume", str(run))
    call(*words, "--run.dir", str(straight))
    assert inspect_path(run)["model_sha256"] == inspect_path(straight)["model_sha256"]


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(tmp_path, undisturbed, call):
    run = tmp_path / "F"
    shutil.copytree(undisturbed[1], run)
    newest = run / "checkpoints" / f"step-{STEPS:08}.safetensors"
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(raw)
    assert "goes on from step 20" in call("run", "--resume", str(run))
    found = inspect_path(run)
    assert (found["digest"], found["model_sha256"]) == (undisturbed[0]["digest"], undisturbed[0]["model_sha256"])


def test_a_finished_run_says_so_and_can_be_extended(tmp_path, undisturbed, call):
    run = tmp_path / "G"
    shutil.copytree(undisturbed[1], run)
    assert f"completed at step {STEPS} of {STEPS}" in call("run", "--resume", str(run))
    assert inspect_path(run)["model_sha256"] == undisturbed[0]["model_sha256"]
    more = str(STEPS + 2)
    assert f"completed at step {more} of {more}" in call("run", "--resume", str(run), "--run.steps", more)


def test_what_is_overridden_at_a_resume_holds_from_then_on_but_for_where_to_stop(tmp_path, undisturbed, call):
    run = tmp_path / "P"
    shutil.copytree(undisturbed[1], run)
    call("run", "--resume", str(run), "--run.steps", str(STEPS + 4), "--run.stop_after", str(STEPS + 1))
    assert inspect_path(run)["step"] == STEPS + 1
    assert f"completed at step {STEPS + 4} of {STEPS + 4}" in call("run", "--resume", str(run))


def test_two_processes_cannot_write_one_run(tmp_path, undisturbed, headrace):
    run = tmp_path / "H"
    shutil.copytree(undisturbed[1], run)
    folder = RunFolder.reopen(run)
    folder.lock()
    second = headrace("run", "--resume", str(run))
    folder.release()
    assert second.returncode == 1
    assert f"is being written by process {os.getpid()} on " in second.stderr


def test_the_quickstart_learns(tmp_path, call):
    folder = str(tmp_path / "Q")
    words = ("run", "examples/quickstart.toml", "--run.dir", folder, "--run.steps", "40", "--format", "json")
    summary = json.loads(call(*words, fresh=True))
    assert summary["loss_first"] - summary["loss_last"] > 1.0
    for name, share in summary["mix"].items():
        assert abs(share["realised"] - share["target"]) < 0.02, name
    assert summary["padding"] < 0.03


def test_a_person_sees_a_summary_progress_and_how_to_go_on(tmp_path, call):
    run = tmp_path / "V"
    out = call("run", "examples/quickstart.toml", "--run.dir", str(run), *SMALL, "--run.stop_after", "5")
    for expected in (
        "headrace runs quickstart", "prose 0.7 (sample:prose)", "seed     7   ranks 1   config ", str(run), "waiting: the first batch",
        "first step after", "step  1  loss ", "step  5  loss ", "tok/s", "wait ", "mix prose .", "stopped at step 5 of 24", "tokens/s over",
        "exposed", "padding", "(target 0.700)", "digest", f"resume   headrace run --resume {run}",
    ):  # fmt: skip
        assert expected in out, expected
    assert "\x1b" not in out, "no colours and no bar where there is no terminal"


def test_finite_sources_end_at_the_same_step_on_any_number_of_ranks(tmp_path, write_jsonl, call):
    write_jsonl("a.jsonl", [f"document {i} " + "word " * (i % 50) for i in range(150)])
    write_jsonl("b.jsonl", [f"another {i} " + "text " * (i % 7) for i in range(40)])
    (tmp_path / "c.toml").write_text(
        '[run]\nsteps = 1000\ncheckpoint_every = 7\n[[source]]\nspec = "jsonl:a.jsonl"\n[[source]]\nspec = "jsonl:b.jsonl"\n'
        '[text]\nseq_len = 32\n[loader]\nglobal_batch_size = 12\nlanes = 12\nexhausted = "drop"\n[train]\nthreads = 1\n'
    )
    found = {}
    for ranks in (1, 2):
        out = call("run", "c.toml", "--run.dir", f"R{ranks}", cwd=tmp_path, ranks=ranks)
        assert "ran out of data at step" in out
        run = inspect_path(tmp_path / f"R{ranks}")
        found[ranks] = (run["step"], run["digest"], run["delivered"])
        assert run["state"] == "data_ended"
        assert run["delivered"]["rows"] == 190
        assert sorted(steps_of(tmp_path / f"R{ranks}")) == list(range(1, run["step"] + 1)), "the digest of every step"
    assert found[1] == found[2]
    assert "ran out of data at step" in call("run", "--resume", "R1", cwd=tmp_path)
    again = inspect_path(tmp_path / "R1")
    assert (again["step"], again["digest"], again["delivered"]) == found[1], "an ended run does not begin another pass"
