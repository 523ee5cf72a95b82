"""What a run saw is told by the command: after a kill, on other ranks, and of texts that mean no good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main

STEPS = 40
SAVED = 30
CONFIG = """
[run]
steps = 40
checkpoint_every = 30
log_every = 1
[[source]]
spec = "jsonl:a.jsonl"
weight = 2
[[source]]
spec = "jsonl:b.jsonl"
[text]
seq_len = 32
window_blocks = 4
[loader]
global_batch_size = 4
lanes = 4
exhausted = "repeat"
[train]
threads = 1
"""
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n[bold]not bold[/] \u202e \x9b31m"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, headrace, warm, until) -> Path:
    """A folder with run A: begun by one rank, killed between two checkpoints, brought to its end by two."""
    folder = tmp_path_factory.mktemp("flight")
    for name in "ab":
        texts = [f"{name}{i} {HOSTILE}" + "word " * (i % 9) for i in range(60)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "c.toml").write_text(CONFIG)
    words = ("run", "c.toml", "--run.dir", "A", "--run.steps", "100000", "--quiet")
    first = warm.Popen(
        [sys.executable, "-m", "headrace", *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:  # until the last steps are recorded and in no checkpoint
        until(lambda: recorded(folder / "A") >= SAVED + 2 or first.poll() is not None)
    finally:
        first.kill()
        said = first.communicate()[0]
    assert first.returncode == -signal.SIGKILL, said
    done = headrace("run", "--resume", "A", "--run.steps", str(STEPS), "--quiet", cwd=folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


def recorded(run: Path) -> int:
    path = run / "flight.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def ask(runs, monkeypatch, capsys):
    """Call a verb: (exit code, what it printed)."""
    monkeypatch.chdir(runs)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(words)
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def test_every_step_of_a_run_that_was_killed_is_proven(ask, runs):
    lines = [json.loads(line) for line in (runs / "A/flight.jsonl").read_text().splitlines()]
    firsts = [line["first"] for line in lines]
    assert len(set(firsts)) < len(firsts), "steps were recorded again"
    for step in (1, 2, *range(SAVED - 3, STEPS + 1)):
        code, out, err = ask("step", "A", str(step), "--format", "json", "--no-text")
        assert code == 0, err
        assert json.loads(out)["proven"]


def test_rows_are_counted_for_the_ranks_that_took_the_step(ask):
    one, two = (json.loads(ask("step", "A", str(n), "--format", "json")[1]) for n in (SAVED, SAVED + 1))
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert {(d["rank"], d["position"]) for d in two["documents"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    again = json.loads(ask("step", "A", str(SAVED), "--format", "json", "--world", "2")[1])
    assert {(d["rank"], d["position"]) for d in again["documents"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [d["row"] for d in again["documents"]] == [d["row"] for d in one["documents"]]
    only = json.loads(ask("step", "A", str(SAVED + 1), "--format", "json", "--rank", "1")[1])
    assert only["documents"] == [d for d in two["documents"] if d["rank"] == 1]


def test_what_a_person_sees_of_a_step(ask):
    code, out, _ = ask("step", "A", "1", "--chars", "30")
    assert code == 0
    for expected in (
        "step 1 of A: samples 0 to 3, 1 rank", "rank 0 row   0 column     0", ".jsonl row ", "  tokens [", " documents, ",
        "proven: these blocks give digest ", "made again in ",
    ):  # fmt: skip
        assert expected in out, expected
    assert r"\x1b[2J\x1b]0;owned\x07\r\n[bold]not" in out, "hostile text is shown as it is, and does nothing"
    assert all(c.isprintable() or c == "\n" for c in out)
    raw = ask("step", "A", "1", "--format", "json")[1]
    assert raw.isascii()
    assert any(HOSTILE[:12] in d["text"] for d in json.loads(raw)["documents"]), "machines get the text itself"
    assert ask("step", "A", "1", "--quiet")[:2] == (0, "")


def test_a_document_of_a_step_is_found_in_that_step(ask):
    seen = json.loads(ask("step", "A", "7", "--format", "json")[1])["documents"][0]
    found = json.loads(
        ask(
            "find",
            "A",
            "--source",
            seen["source"],
            "--file",
            seen["file"],
            "--row",
            str(seen["row"]),
            "--format",
            "json",
        )[1]
    )
    places = [(s["step"], s["rank"], s["position"], s["column"], s["start"], s["length"]) for s in found["seen"]]
    assert (7, *(seen[k] for k in ("rank", "position", "column", "start", "length"))) in places
    code, out, _ = ask("find", "A", "--source", seen["source"], "--row", str(found["source_row"]))
    assert code == 0
    assert "step 7  sample " in out
    assert "comes next in epoch " in out


def test_a_document_that_did_not_come_yet_is_said_to_come(ask):
    rows = [
        json.loads(ask("find", "A", "--source", "b", "--row", str(r), "--format", "json")[1]) for r in range(0, 60, 7)
    ]
    waiting = [r for r in rows if not r["seen"]]
    assert waiting, "40 steps are not enough for 60 documents"
    assert all(r["upcoming"]["position"] >= r["upcoming"]["reached"] for r in waiting)
    out = ask("find", "A", "--source", "b", "--row", str(waiting[0]["source_row"]))[1]
    assert f"not seen yet, at step {STEPS}" in out


@pytest.fixture
def copy(runs, tmp_path) -> Path:
    """What the flight recorder needs of run A."""
    for name in ("config.toml", "run.json", "flight.jsonl", "digests.jsonl"):
        (tmp_path / name).write_bytes((runs / "A" / name).read_bytes())
    return tmp_path


def test_runs_that_saw_the_same_are_said_to(ask, copy):
    code, out, _ = ask("diff", "A", str(copy))
    assert code == 0
    assert f"the same data for all {STEPS} steps" in out
    assert "has no checkpoint yet" in out
    assert ask("diff", "A", str(copy), "--quiet")[:2] == (0, "")


def test_runs_that_part_exit_with_1_and_say_where(ask, copy):
    changed = [json.loads(line) for line in (copy / "digests.jsonl").read_text().splitlines()]
    changed[-3]["digests"][0] = "0" * 32
    (copy / "digests.jsonl").write_text("".join(json.dumps(c) + "\n" for c in changed))
    step = changed[-3]["first"]
    code, out, _ = ask("diff", "A", str(copy))
    assert code == 1
    assert f"the runs part at step {step}; the {4 * (step - 1)} samples before are the same" in out
    assert "do not give its digest" in out
    answer = json.loads(ask("diff", "A", str(copy), "--format", "json")[1])
    assert (answer["same"], answer["step_a"], answer["sample"]) == (False, step, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("step", "A", "99"), "headrace step: step 99 is not recorded yet: the last step in A/flight.jsonl is 40"),
        (("step", "nowhere", "1"), "headrace step: there is no run folder nowhere"),
        (("find", "A", "--source", "bb", "--row", "1"), 'headrace find: A has no source "bb", did you mean b?'),
        (("find", "A", "--source", "b"), "headrace find: say which document with --source NAME --row N"),
        (("diff", "A", "nowhere"), "headrace diff: there is no run folder nowhere"),
    ],
)
def test_an_error_is_one_sentence_and_nothing_on_standard_output(ask, words, message):
    code, out, err = ask(*words)
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [("step", "A", "x"), ("step", "A"), ("diff", "A")])
def test_a_call_that_is_off_exits_with_2(ask, words):
    assert ask(*words)[0] == 2


def test_a_plan_is_printed_and_given_to_machines(ask):
    code, out, _ = ask("plan", "c.toml", "--steps", "400")
    assert code == 0
    for expected in ("source", "target", "epochs", "repeats", "share over the run", "400 steps x 4 x 32", "█"):
        assert expected in out, expected
    found = json.loads(ask("plan", "c.toml", "--steps", "400", "--loader.exhausted", "drop", "--format", "json")[1])
    assert 0 < found["ends_at"] < 400
    assert [s["name"] for s in found["sources"]] == ["a", "b"]


@pytest.mark.parametrize("verb", ["step", "find", "diff", "plan"])
def test_the_verbs_have_help_with_an_example_and_the_common_options(ask, verb):
    code, out, _ = ask(verb, "--help")
    assert code == 0
    assert f"headrace {verb} " in out.split("╭")[0].split("\n", 2)[2]
    assert "--format" in out
    assert "--quiet" in out
