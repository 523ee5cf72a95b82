"""A run with a spool is the run without one: the same digests, the same model, whoever makes the batches."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest

from headrace.errors import ConfigError, WorkerDied
from headrace.provenance.record import merge_rank_records
from headrace.provenance.steps import RunProvenance
from headrace.runs.config.loading import load_config
from headrace.runs.job import Job
from headrace.runs.provide import provider_of
from headrace.runs.recorded import recorded_run
from headrace.runs.spool_plan import SpoolData
from spool_config import load_spool_config, write_spool_config

SOURCES = ({"spec": "sample:prose", "weight": 0.7}, {"spec": "sample:code", "weight": 0.3})


@pytest.fixture
def config(tmp_path):
    path = write_spool_config(tmp_path / "run.toml", sources=SOURCES)
    return lambda *more: load_spool_config(path, *more)


def step_facts(run, step=5):
    """What `headrace step` tells, but for when."""
    with RunProvenance(recorded_run(run)) as provenance:
        told = asdict(provenance.step(step))
    return {k: v for k, v in told.items() if k != "seconds"}


@pytest.mark.parametrize("parts", [1, 3])
def test_batches_out_of_a_spool_are_the_loader_s_own_for_any_parts_and_ranks(config, tmp_path, parts):
    checked = config("--spool.parts", str(parts), "--spool.max_backlog_files", "5", "--text.segment_ids", "true")
    job = Job(checked)
    data = job.dataset()
    # Providers come and go: every file may be made by another one, from the cursor in the file before it.
    for _ in range(3):
        provider_of(job, data, sleep_seconds=0.001).run(max_files=parts)
    straight = job.loader(data, dp_rank=0, dp_world_size=1)
    expected = [(next(straight), straight.step_digest, straight.drain_metrics()) for _ in range(9)]
    straight.close()
    spool = SpoolData.open(checked, deadline=60)
    assert (spool.names, spool.vocab_size, spool.seq_len) == (tuple(data.names), data.vocab_size, 64)
    assert spool.mean_weights(5) == pytest.approx(data.mean_weights(5))
    state = None
    for world, steps in ((2, range(0, 4)), (3, range(4, 7)), (1, range(7, 9))):
        ranks = [job.loader(spool, dp_rank=r, dp_world_size=world) for r in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        with ThreadPoolExecutor(world) as threads:
            for step in steps:
                shares = list(threads.map(next, ranks))
                whole, digest, metrics = expected[step]
                order = np.argsort(np.concatenate([s["sample_index"].numpy() for s in shares]))
                for name in ("sample_index", "input_ids", "labels", "position_ids", "row_count", "segment_ids"):
                    got = np.concatenate([s[name].numpy() for s in shares])[order]
                    assert got.dtype == np.int64
                    assert np.array_equal(got, whole[name].numpy()), name
                if world == 1:
                    assert np.array_equal(shares[0]["cu_seqlens"].numpy(), whole["cu_seqlens"].numpy())
                    assert shares[0]["max_seqlen"] == whole["max_seqlen"]
                assert f"{sum(int(r.step_digest, 16) for r in ranks) % (1 << 128):032x}" == digest
                counted: dict = {}
                for rank in ranks:
                    for key, value in rank.drain_metrics().items():
                        counted[key] = counted.get(key, 0) + value
                assert {k: v for k, v in counted.items() if k.startswith("data/")} == {
                    k: v for k, v in metrics.items() if k.startswith("data/")
                }
        state = ranks[0].state_dict()
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_steps_passed_over_and_the_flight_record_are_those_of_the_run_without_a_spool(config, tmp_path, parts):
    checked = config("--spool.parts", str(parts), "--spool.max_backlog_files", "5", "--run.skip", "2:3,5:8")
    job = Job(checked)
    data = job.dataset()
    provider_of(job, data, sleep_seconds=0.001).run(max_files=5 * parts)
    straight = job.loader(data, dp_rank=0, dp_world_size=1, record=True)
    expected = []
    for _ in range(6):
        batch = next(straight)
        expected.append(batch["sample_index"].tolist())
    line, state = straight.drain_flight(), straight.state_dict()["body"]
    straight.close()
    spool = SpoolData.open(checked, deadline=10)
    # One rank takes the first three steps, two the others: their lines together tell what the one run's does.
    with job.loader(spool, dp_rank=0, dp_world_size=1) as alone:
        head = [next(alone)["sample_index"].tolist() for _ in range(3)]
        lines, saved = [alone.drain_flight()], alone.state_dict()
    ranks = [job.loader(spool, dp_rank=r, dp_world_size=2) for r in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for rank in ranks:
            rank.load_state_dict(saved)
        tail = [
            sorted(g for share in threads.map(next, ranks) for g in share["sample_index"].tolist()) for _ in range(3)
        ]
    assert head + tail == expected
    lines.append(merge_rank_records([rank.drain_flight() for rank in ranks]))
    assert [rank.drain_flight() for rank in ranks] == [None, None]
    assert lines[0]["first"] == line["first"] == 1
    assert lines[1]["first"] == 4
    assert [*lines[0]["samples"][:-1], *lines[1]["samples"]] == line["samples"]
    assert sorted(lines[0]["opened"] + lines[1]["opened"]) == line["opened"]
    assert lines[0].get("skipped", []) + lines[1].get("skipped", []) == line["skipped"]
    for name in ("picks", "skipped_picks"):
        assert b"".join(base64.b64decode(part.get(name, "")) for part in lines) == base64.b64decode(line[name])
    found = [rank.state_dict()["body"] for rank in ranks]
    for rank in ranks:
        rank.close()
    assert found[0]["step"] == state["step"]
    assert found[0]["skipped"] == state["skipped"]
    assert sum(int(b["digest"], 16) for b in found) % (1 << 128) == int(state["digest"], 16)
    assert {k: sum(b["delivered"][k] for b in found) for k in state["delivered"]} == state["delivered"]


FINITE = """
[run]
seed = 3
steps = 500
skip = "3:5,{late}:{end}"
[[source]]
spec = "jsonl:{folder}/a.jsonl"
[text]
seq_len = 32
window_blocks = 2
[loader]
global_batch_size = 4
lanes = 12
exhausted = "drop"
[spool]
parts = {parts}
batches_per_file = 3
max_backlog_files = 500
[train]
"""


@pytest.mark.parametrize("parts", [1, 2])
def test_steps_with_nothing_to_learn_are_passed_over_by_a_spool_as_by_the_run_without_one(tmp_path, write_jsonl, parts):
    write_jsonl("a.jsonl", [f"document {i} " + "word " * (i % 23) for i in range(120)])

    def opened(late: int):
        (tmp_path / "f.toml").write_text(FINITE.format(folder=tmp_path, parts=parts, late=late, end=late + 3))
        return load_config(
            tmp_path / "f.toml", ("--run.dir", str(tmp_path / "run"), "--spool.dir", str(tmp_path / "S"))
        )

    data = Job(opened(900)).dataset()
    with Job(opened(900)).loader(data, dp_rank=0, dp_world_size=1, record=True) as straight:
        for _ in straight:
            continue
        first = straight.drain_flight()["skipped"][2:][0][0] // 4 + 1
    checked = opened(first)  # the first empty step and its neighbours are skipped as well
    job = Job(checked)
    provider_of(job, data, sleep_seconds=0.001).run()
    expected, lines = [], []
    with job.loader(data, dp_rank=0, dp_world_size=1, record=True) as straight:
        for batch in straight:
            expected.append((straight.step, straight.step_digest, batch["sample_index"].tolist()))
            lines.append(straight.drain_flight())
        state = straight.state_dict()["body"]
    assert state["empty_steps"] > 3
    spool = SpoolData.open(checked, deadline=60)
    saved, at = None, 0
    for world, steps in ((1, len(expected) - 9), (2, 4), (1, 10)):
        ranks = [job.loader(spool, dp_rank=r, dp_world_size=world) for r in range(world)]
        with ThreadPoolExecutor(world) as threads:
            for rank in ranks:
                if saved is not None:
                    rank.load_state_dict(saved)
            for _ in range(steps):
                shares = list(threads.map(lambda rank: next(rank, None), ranks))
                if shares[0] is None:
                    break
                samples = sorted(g for share in shares for g in share["sample_index"].tolist())
                digest = f"{sum(int(r.step_digest, 16) for r in ranks) % (1 << 128):032x}"
                assert (ranks[0].step, digest, samples) == expected[at]
                assert merge_rank_records([rank.drain_flight() for rank in ranks]) == lines[at]
                at += 1
        bodies = [rank.state_dict() for rank in ranks]
        saved = bodies[0] | {"body": bodies[0]["body"] | {"delivered": {
            k: sum(b["body"]["delivered"][k] for b in bodies) for k in state["delivered"]
        }, "digest": f"{sum(int(b['body']['digest'], 16) for b in bodies) % (1 << 128):032x}"}}  # fmt: skip
        for rank in ranks:
            rank.close()
    assert at == len(expected)
    names = ("step", "ended", "skipped", "empty_steps", "digest", "delivered")
    assert {n: saved["body"][n] for n in names} == {n: state[n] for n in names}


def test_a_spool_of_other_batches_is_refused(config, tmp_path):
    checked = config()
    provider_of(Job(checked), Job(checked).dataset()).run(max_files=1)
    with pytest.raises(ConfigError, match="was made for other batches than this config describes"):
        SpoolData.open(config("--text.seq_len", "32"), deadline=60)
    SpoolData.open(config("--train.lr", "1e-4", "--run.steps", "50"), deadline=60)
    other = config("--run.seed", "4")
    with pytest.raises(ConfigError, match=r"was made for something else \(.*seed is 3, now 4"):
        provider_of(Job(other), Job(other).dataset()).run(max_files=1)


def test_settings_of_a_spool_that_cannot_be_are_refused(config):
    with pytest.raises(ConfigError, match=r"spool.parts = 5 must divide loader.global_batch_size = 12"):
        config("--spool.parts", "5")
    assert config().hash == config("--spool.enabled", "false").hash


def test_two_terminals_give_the_run_of_one(headrace, warm, until, tmp_path):
    write_spool_config(tmp_path / "run.toml", run={"steps": 8}, sources=SOURCES)
    alone = headrace("run", "run.toml", "--run.dir", "A", "--format", "json", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    provider = warm.Popen(
        [sys.executable, "-m", "headrace", "provide", "run.toml", "--spool.dir", "S"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    try:
        until(lambda: (tmp_path / "S" / "meta.json").exists() or provider.poll() is not None)
        spooled = headrace("run", "run.toml", "--run.dir", "B", "--spool.dir", "S", "--format", "json", cwd=tmp_path)
        assert spooled.returncode == 0, spooled.stderr
        provider.send_signal(signal.SIGINT)
        said, _ = provider.communicate(timeout=60)
    finally:
        provider.kill()
        provider.wait()
    assert provider.returncode == 0, said
    assert "train 0: published" in said
    one, two = json.loads(alone.stdout), json.loads(spooled.stdout)
    assert {k: one[k] for k in ("digest", "model_sha256", "tokens", "mix", "documents")} == {
        k: two[k] for k in ("digest", "model_sha256", "tokens", "mix", "documents")
    }
    records = [(tmp_path / name / "flight.jsonl").read_text() for name in "AB"]
    assert records[0] == records[1], "where every sample came from is known as well"
    told = [step_facts(tmp_path / name) for name in "AB"]
    assert told[0] == told[1]
    seen = told[0]["documents"][0]
    where = ("--source", seen["source"], "--file", seen["file"], "--row", str(seen["row"]), "--format", "json")
    found = [json.loads(headrace("find", name, *where, cwd=tmp_path).stdout)["seen"] for name in "AB"]
    assert found[0] == found[1]
    assert 5 in [place["step"] for place in found[1]]
    compared = headrace("diff", "A", "B", cwd=tmp_path)
    assert (compared.returncode, "the same data for all 8 steps" in compared.stdout) == (0, True), compared.stdout
    shown = headrace("spool", "verify", "S", cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout


def test_a_run_whose_own_provider_dies_says_so_and_can_be_resumed(config, tmp_path):
    from headrace.runs.own_provider import OwnProvider

    checked = config()
    (tmp_path / "run").mkdir()
    own = OwnProvider(checked, tmp_path / "run" / "provide.log")
    with own:
        SpoolData.open(checked, deadline=60, check=own.check)
        own._child.kill()
        own._child.wait()
        with pytest.raises(WorkerDied, match=r"the provider of the spool .* was killed by signal 9.*can be resumed"):
            own.check()


def test_the_character_diffusion_example_trains_beside_its_provider(repository, warm, tmp_path):
    words = [
        sys.executable,
        str(repository / "examples" / "char_diffusion.py"),
        "both",
        "--data_dir",
        str(tmp_path / "data"),
        "--steps",
        "3",
        "--batches_per_file",
        "2",
    ]
    done = warm.run(words, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "step 1  loss" in done.stdout
