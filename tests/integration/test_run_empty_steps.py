"""A finite run trains on no step with nothing to learn: alone, on ranks of a process group, over a spool, and after resumes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

CONFIG = """
[run]
steps = 500
checkpoint_every = 7
log_every = 5
[[source]]
spec = "jsonl:a.jsonl"
[text]
seq_len = 32
window_blocks = 2
[loader]
global_batch_size = 4
lanes = 12
exhausted = "drop"
[train]
threads = 1
"""
ENV = {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def steps_of(run: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in (run / "digests.jsonl").read_text().splitlines():
        record = json.loads(line)
        found |= {record["first"] + i: d for i, d in enumerate(record["digests"])}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finite")
    rows = [{"text": f"document {i} " + "word " * (i % 23)} for i in range(100)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def call(headrace, folder):
    def run(*words: str, **how) -> dict:
        done = headrace(*words, "--format", "json", cwd=folder, env=ENV, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def alone(call, folder):
    return call("run", "run.toml", "--run.dir", "A"), folder / "A"


def test_a_run_to_the_end_of_its_data_has_a_loss_at_every_step_and_can_tell_each(alone, headrace, folder, call):
    summary, run = alone
    assert summary["state"] == "data_ended"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line["train/loss"]) for line in lines)
    assert sorted(steps_of(run)) == list(range(1, summary["step"] + 1))
    records = [json.loads(line) for line in (run / "flight.jsonl").read_text().splitlines()]
    assert any("skipped" in record for record in records), "this run has no empty step"
    for step in range(summary["step"] - 8, summary["step"] + 1):
        assert call("step", "A", str(step))["documents"], f"step {step}"
    assert summary["documents"] == 100


@pytest.mark.parametrize(("first", "then"), [(2, 1), (4, 2)])
def test_ranks_take_the_steps_of_one_process_and_other_ranks_continue(alone, headrace, call, folder, first, then):
    summary, run = alone
    name = f"R{first}"
    stop = str(summary["step"] - 6)  # among the steps with empty ones between them
    call("run", "run.toml", "--run.dir", name, "--run.stop_after", stop, ranks=first)
    found = call("run", "--resume", name, "--run.stop_after", "500", ranks=then)
    assert {k: found[k] for k in ("state", "step", "digest", "tokens", "documents")} == {
        k: summary[k] for k in ("state", "step", "digest", "tokens", "documents")
    }
    assert steps_of(folder / name) == steps_of(run)
    compared = headrace("diff", "A", name, cwd=folder, env=ENV)
    assert (compared.returncode, "the same data" in compared.stdout) == (0, True), compared.stdout


def test_a_spool_gives_the_run_without_one(alone, call, folder):
    summary, run = alone
    try:
        found = call("run", "run.toml", "--run.dir", "S", "--spool.dir", "spool")
    finally:
        shutil.rmtree(folder / "spool", ignore_errors=True)
    names = ("state", "step", "digest", "tokens", "documents", "model_sha256")
    assert {k: found[k] for k in names} == {k: summary[k] for k in names}
    assert steps_of(folder / "S") == steps_of(run)
    assert (folder / "S" / "flight.jsonl").read_text() == (run / "flight.jsonl").read_text()
