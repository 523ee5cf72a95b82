"""RL runs from the command: what a person sees, resume to the bit, stops, failures, engines by URL, ranks, and the verbs that read a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.openai_server import ServedPolicy, openai_server

from headrace.files import open_container
from headrace.rollouts.arrival_log import read_arrivals
from headrace.rollouts.engine import CharacterCodec
from headrace.text import train_bpe
from headrace.train.gpt import GPT, GPTConfig, init_parameters

ROOT = Path(__file__).resolve().parents[2]
SORT = str(ROOT / "examples" / "rl" / "sort.toml")
SMALL = [
    "--rollouts.groups_per_step", "4", "--env.0.group_size", "4", "--engine.slots", "16", "--eval.tasks", "6", "--eval.every", "4",
    "--run.checkpoint_every", "4", "--policy.decay", "0",
]  # fmt: skip
BAD = """
import asyncio

async def play(task, say):
    answer = await say("1>", max_tokens=2)
    kind = task.index % 4
    if kind == 1:
        raise OSError("the judge is out of reach")
    if kind == 2 and answer[:1] != "9":
        return None
    if kind == 3 and task.split == "train" and task.index == 3:
        await asyncio.sleep(60)
    return float(len(answer)) / 2 if answer[:1] < "5" else 0.0
"""


def headrace(*words: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *words]


def done(warm, *words: str, ok: bool = True, timeout: float = 100):
    found = warm.run(headrace(*words), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert (found.returncode == 0) == ok, found.stdout + found.stderr
    return found


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def metrics(run: Path) -> dict[int, dict]:
    return {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def test_a_run_shows_its_steps_and_answers_and_can_be_read_afterwards(warm, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    words = ["run", SORT, "--run.steps", "6", "--rollouts.lag", "2", "--eval.samples", "2", *SMALL]
    shown = done(warm, *words, "--run.dir", str(a)).stdout
    assert "4 groups of 4 a step, lag 2, 6 steps" in shown
    assert sum(line.startswith("step ") and "held out" in line for line in shown.splitlines()) == 6
    assert shown.count("'  reward ") == 3 * 3, "three answers at steps 0, 4 and 6"
    assert "completed at step 6 of 6" in shown
    assert f"headrace run --resume {a} --run.steps 12" in shown.replace("\n", "")
    lines = metrics(a)
    assert [lines[n]["staleness/max"] for n in range(1, 7)] == [0, 1, 2, 2, 2, 2]
    wanted = {
        "reward/all/mean", "reward/sort/mean", "rollouts/late", "rollouts/split_samples", "entropy/sort/mean",
        "mismatch_kl/all/mean", "wait/rollouts.batch/seconds", "phase/rollouts.pack/seconds", "eval/sort/greedy", "eval/all/pass_at_k",
    }  # fmt: skip
    assert wanted <= lines[6].keys(), wanted - lines[6].keys()
    assert any("event_loop_lag/max" in line for line in lines.values()), (
        "sampled ten times a second; a step may take less"
    )
    # Versions are facts: batch n was sampled by version max(0, n - lag), and engine and trainer agree on its log-probs.
    for batch in range(6):
        for arrival in read_arrivals(a / "arrivals" / f"step_{batch:012d}.log"):
            assert arrival.version == max(0, batch - 2)
            assert arrival.turns[0].spans == ((str(arrival.version), 0, len(arrival.turns[0].ids) // 4),)
    assert lines[1]["mismatch_kl/all/max"] < 1e-9
    # The same run once more, stopped in the middle and resumed: the same bits.
    stopped = done(warm, *words, "--run.dir", str(b), "--run.stop_after", "3", "--quiet")
    assert stopped.stdout == ""
    done(warm, "run", "--resume", str(b))
    assert summary(a)["model_sha256"] == summary(b)["model_sha256"]
    assert summary(a)["digest"] == summary(b)["digest"]
    assert summary(b)["state"] == "completed"
    assert "the same rollouts, 96 of them" in done(warm, "diff", str(a), str(b)).stdout
    step = done(warm, "step", str(a), "3").stdout
    assert "step 3 of" in step
    assert "task 8 (sort, step 3, version 0)" in step
    assert "policy  " in step
    assert len(json.loads(done(warm, "find", str(a), "--task", "8", "--format", "json").stdout)["rollouts"]) == 4
    assert "reward/sort" in json.dumps(json.loads(done(warm, "report", str(a), "--format", "json").stdout))
    inspected = json.loads(done(warm, "inspect", str(a), "--format", "json").stdout)
    assert (inspected["step"], inspected["rollouts"] > 0, "delivered" in inspected) == (6, True, False)
    c = tmp_path / "c"
    done(warm, *words, "--run.dir", str(c), "--policy.lr", "0.01", "--run.stop_after", "4", "--quiet")
    parted = done(warm, "diff", str(a), str(c), ok=False).stdout
    assert "the runs part at step 4" in parted
    assert "weights" in parted
    changed = done(warm, "run", "--resume", str(c), "--policy.kl", "0.1", ok=False)
    assert "--accept config" in changed.stderr


def test_bad_environments_cost_their_own_rollouts_and_counts_add_up(warm, tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    run = tmp_path / "run"
    words = [
        "--env.0.spec",
        f"python:{tmp_path / 'bad.py'}:play",
        "--rollouts.deadline",
        "1",
        "--rollouts.max_refills",
        "1",
        "--run.steps",
        "2",
    ]
    done(warm, "run", SORT, "--run.dir", str(run), *SMALL, *words, "--run.log_every", "1")
    lines = metrics(run)
    failed = {
        k.removeprefix("rollouts/failed/"): n
        for line in lines.values()
        for k, n in line.items()
        if k.startswith("rollouts/failed/")
    }
    assert {"OSError", "refused_nonsense"} <= failed.keys()
    assert lines[1]["rollouts/failed/timeout"] == 8
    records = [a for path in (run / "arrivals").glob("*.log") for a in read_arrivals(path)]
    answered, refused = [a for a in records if not a.failed], [a for a in records if a.failed]
    assert len(answered) == sum(line.get("rollouts/count", 0) for line in lines.values())
    assert len(refused) == sum(summary(run)["failed"].values())
    # Every request ended once, and each failure that could be refilled was asked for again.
    assert len({a.key for a in records}) == len(records)
    every = tmp_path / "every"
    broken = tmp_path / "broken.py"
    broken.write_text("async def play(task, say):\n    raise OSError('gone')\n")
    found = done(
        warm,
        "run",
        SORT,
        "--run.dir",
        str(every),
        *SMALL,
        "--env.0.spec",
        f"python:{broken}:play",
        "--eval.tasks",
        "0",
        ok=False,
    )
    assert "every rollout of step 0 failed" in found.stderr
    assert "OSError" in found.stderr
    # The environment is mended: what failed is asked for again, under the keys it had.
    broken.write_text((ROOT / "examples" / "rl" / "sort.py").read_text())
    done(warm, "run", "--resume", str(every), "--run.steps", "2")
    assert summary(every)["failed"] == {}
    assert {a.attempt for path in (every / "arrivals").glob("*.log") for a in read_arrivals(path)} == {0}


STUCK = """
import asyncio, time
from pathlib import Path

STUCK = {stuck!r}
evaluated = 0

async def play(task, say):
    global evaluated
    evaluated += task.split == "eval"
    if evaluated > 6 if STUCK == "evaluation" else task.split == "train" and task.index >= 8:
        Path({mark!r}).touch()
        if STUCK == "loop":
            time.sleep(60)
        await asyncio.sleep(60)
    return float((await say("1>", max_tokens=2))[:1] < "5")
"""


@pytest.mark.parametrize("stuck", ["rollout", "evaluation", "loop"])
def test_an_interrupt_ends_a_run_within_seconds_whatever_hangs(warm, tmp_path, stuck):
    mark = tmp_path / "stuck"
    (tmp_path / "slow.py").write_text(STUCK.format(stuck=stuck, mark=str(mark)))
    run = tmp_path / "run"
    words = [
        "--env.0.spec",
        f"python:{tmp_path / 'slow.py'}:play",
        "--eval.every",
        "2",
        "--run.steps",
        "5",
        "--run.checkpoint_every",
        "9",
    ]
    process = warm.Popen(
        headrace("run", SORT, "--run.dir", str(run), *SMALL, *words),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        lines = 2 if stuck == "rollout" else 1
        while not mark.exists() or len((run / "metrics.jsonl").read_text().splitlines()) < lines:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        asked = time.monotonic()
        shown = process.communicate(timeout=60)[0]
        took = time.monotonic() - asked
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, shown
    assert took < 10, "5 s on a machine that is not busy"
    step = summary(run)["step"]
    assert step == 2 or (stuck == "loop" and step == 1)
    assert f"stopped at step {step} of 5" in shown
    assert f"headrace run --resume {run}" in shown.replace("\n", "")
    assert (run / "checkpoints" / f"step-{step:08d}.safetensors").exists()


@pytest.mark.parametrize("takes_weights", [True, False])
def test_a_server_is_asked_only_after_it_proved_its_weights(warm, tmp_path, takes_weights):
    codec = CharacterCodec("0123456789>")
    model = GPT(GPTConfig.preset("gpt-digits", vocab_size=codec.vocab_size, seq_len=16))
    init_parameters(model, 99)
    served = ServedPolicy(model, codec, takes_weights=takes_weights)
    run = tmp_path / "run"
    with openai_server(served) as url:
        words = [
            "--engine.kind",
            "openai",
            "--engine.url",
            f"{url}/v1",
            "--run.steps",
            "2",
            "--eval.tasks",
            "2",
            "--rollouts.groups_per_step",
            "2",
            "--rollouts.lag",
            "0",
        ]
        found = done(warm, "run", SORT, "--run.dir", str(run), *SMALL, *words, "--env.0.workers", "1", ok=takes_weights)
    if not takes_weights:
        assert "does not have version 0 of the weights" in found.stderr
        assert served.asked == ["/collective_rpc", "probe"], "no rollout was asked for"
        return
    assert summary(run)["state"] == "completed"
    assert served.asked.count("/collective_rpc") == served.asked.count("probe") == 3, "versions 0, 1 and 2"
    for line in metrics(run).values():
        assert line.get("mismatch_kl/all/max", 0) < 1e-6
    assert sorted(p.name for p in (run / "weights").iterdir()) == ["v000002"]


GATED = """
import asyncio
from pathlib import Path

async def play(task, say):
    while task.index >= 8 and not Path({gate!r}).exists():
        await asyncio.sleep(0.05)
    digits = task.rng.integers(0, 10, 4).tolist()
    answer = await say("".join(map(str, digits)) + ">", max_tokens=4)
    return sum(a == b for a, b in zip(answer, sorted(map(str, digits)))) / 4
"""


def test_two_ranks_learn_from_the_rollouts_of_one_and_a_lost_rank_is_named(warm, tmp_path):
    gate, lost, whole, alone = (tmp_path / name for name in ("gate", "lost", "whole", "alone"))
    (tmp_path / "gated.py").write_text(GATED.format(gate=str(gate)))
    words = [
        "run", SORT, *SMALL, "--run.steps", "5", "--policy.micro_tokens", "64", "--env.0.spec", f"python:{tmp_path / 'gated.py'}:play",
        "--eval.tasks", "0", "--quiet",
    ]  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [
        warm.Popen(
            headrace(*words, "--run.dir", str(lost)), cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (lost / "metrics.jsonl").exists() or len((lost / "metrics.jsonl").read_text().splitlines()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        both[1].kill()
        told = both[0].communicate(timeout=60)[1]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[0].returncode
    assert "rank 0 lost another rank while waiting for batch 2" in told
    gate.touch()
    for found in (
        warm.ranks(2, headrace("run", "--resume", str(lost), "--quiet"), cwd=ROOT, timeout=110),
        warm.ranks(2, headrace(*words, "--run.dir", str(whole)), cwd=ROOT, timeout=110),
    ):
        assert found.returncode == 0, found.stderr
    assert (summary(whole)["state"], summary(whole)["step"], summary(whole)["world_size"]) == ("completed", 5, 2)
    assert summary(lost)["model_sha256"] == summary(whole)["model_sha256"]
    assert summary(lost)["recorded"] >= 32, "two steps of 16 rollouts had arrived"
    done(warm, *words, "--run.dir", str(alone))
    ours, theirs = metrics(alone), metrics(whole)
    assert ours[1]["train/loss"] == pytest.approx(theirs[1]["train/loss"], abs=1e-6)
    assert ours[1]["train/grad_norm"] == pytest.approx(theirs[1]["train/grad_norm"], rel=1e-4)


def test_a_policy_starts_from_an_earlier_run_or_from_a_model_of_transformers(warm, tmp_path):
    transformers = pytest.importorskip("transformers")
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    words = ["run", SORT, *SMALL, "--run.steps", "2", "--quiet"]
    done(warm, *words, "--run.dir", str(first))
    done(warm, *words, "--run.dir", str(second), "--policy.model", str(first), "--policy.kl", "0.1")
    began = open_container(second / "initial_policy.safetensors").arrays
    ended = open_container(first / "checkpoints" / "step-00000002.safetensors").arrays
    assert sorted(began) == sorted(name[6:] for name in ended if name.startswith("model/"))
    assert all(np.array_equal(array, ended[f"model/{name}"]) for name, array in began.items())
    assert metrics(second)[1]["mismatch_kl/all/max"] < 1e-9
    # The reference policy of a resumed run is the one it began with, whatever became of the earlier run.
    shutil.rmtree(first / "checkpoints")
    done(warm, "run", "--resume", str(second), "--run.steps", "3")
    model = tmp_path / "model"
    shape = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(model)
    (model / "tokenizer.json").write_bytes(train_bpe(["0123456789> <|endoftext|>"] * 9, 300))
    (tmp_path / "ord.py").write_text(
        "async def play(task, say):\n    return float(sum(map(ord, await say('12>', max_tokens=4))) % 7)\n"
    )
    env = f"python:{tmp_path / 'ord.py'}:play"
    done(warm, *words, "--run.dir", str(third), "--policy.model", f"hf:{model}", "--env.0.spec", env)
    assert metrics(third)[1]["mismatch_kl/all/max"] < 1e-6, "engine and trainer agree"
    missing = done(warm, *words, "--run.dir", str(tmp_path / "fourth"), "--policy.model", "gpt-huge", ok=False).stderr
    assert "expected one of gpt-digits" in missing
