"""What the command prints and imports, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as package
from headrace.cli import main, terminal


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import headrace",
        "from headrace.cli import app\ntry: app(['--help'])\nexcept SystemExit: ...",
        "import headrace; headrace.TextDataset, headrace.Loader, headrace.Source, headrace.Wait",
        "import headrace; headrace.reduce.gram, headrace.reduce.activations",
    ],
    ids=["import headrace", "headrace --help", "naming the loader", "naming the reduction"],
)
def test_torch_and_numba_come_only_when_they_are_needed(code):
    assert not {"torch", "numba", "wandb", "tensorboard"} & loaded_after(code)


def test_the_public_names_are_the_ones_that_exist():
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package._HOME) < set(package.__all__)
    assert len(package.__all__) <= 40
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_every_verb_has_help_with_an_example_and_the_common_options(headrace, capsys):
    def help_of(verb: str) -> str:
        if verb == "run":  # once in an interpreter that imports all anew
            return headrace(verb, "--help", fresh=True).stdout
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    for verb in ("run", "check", "prepare", "plan", "step", "find", "diff", "gram", "inspect", "metrics", "env"):
        text = help_of(verb)
        assert f"headrace {verb}" in text.split("╭")[0].split("\n", 2)[2], "an example after the usage line"
        assert "--format" in text
        assert "--quiet" in text


def test_check_prints_the_plan(headrace, repository):
    done = headrace("check", "examples/quickstart.toml", cwd=repository)
    assert done.returncode == 0, done.stderr
    for word in (
        "prose",
        "code",
        "0.700",
        "0.300",
        "epochs",
        "48 lanes",
        "world sizes that make every window once: 1, 2, 3, 4, 6, 8, 12, 24",
        "windows in memory: 12.6MB with 1 rank, 524kB a rank with 24",
    ):
        assert word in done.stdout


def test_check_warns_before_a_run_that_would_run_dry(headrace, tmp_path, write_jsonl):
    write_jsonl("a.jsonl", ["short text"] * 20)
    (tmp_path / "c.toml").write_text(
        '[[source]]\nspec = "jsonl:a.jsonl"\nmax_epochs = 1\n[text]\nseq_len = 16\n[train]\n'
    )
    out = headrace("check", "c.toml", "--loader.lanes", "48", cwd=tmp_path).stdout
    assert "is dry after 1 epoch" in out
    assert "20 rows for 48 lanes" in out
    assert headrace("check", "c.toml", "--quiet", cwd=tmp_path).stdout == ""


def test_metrics_lists_keys_with_their_reduction(headrace):
    rows = {r["key"]: r for r in json.loads(headrace("metrics", "--format", "json").stdout)}
    assert rows["train/loss"]["reduction"] == "mean"
    assert rows["wait/<name>/seconds"]["reduction"] == "sum"
    assert rows["data/tokens"]["help"]
    assert "data/tokens" in headrace("metrics").stdout


def test_env_says_what_is_here(headrace):
    facts = json.loads(headrace("env", "--format", "json").stdout)
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["machine"]["usable"] >= 1
    assert facts["encoder"]["byte-level BPE"].startswith("fastokens ")
    assert facts["cache"]["publishing"] == "durable and exclusive"


def test_inspect_shows_runs_checkpoints_and_cursors(headrace, tmp_path, write_jsonl, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))  # others fill the common one meanwhile
    write_jsonl("a.jsonl", [f"document {i} with text" for i in range(60)])
    (tmp_path / "c.toml").write_text(
        '[run]\ndir = "r"\nsteps = 3\n[[source]]\nspec = "jsonl:a.jsonl"\n[text]\nseq_len = 16\n[loader]\nglobal_batch_size = 4\nlanes = 4\n[train]\n'
    )
    done = headrace("run", "c.toml", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    run = json.loads(headrace("inspect", "r", "--format", "json", cwd=tmp_path).stdout)
    assert (run["digest"], run["model_sha256"], run["state"], run["step"]) == (
        summary["digest"],
        summary["model_sha256"],
        "completed",
        3,
    )
    checkpoint = headrace("inspect", "r/checkpoints/step-00000003.safetensors", cwd=tmp_path).stdout
    assert "container (lm)" in checkpoint
    assert "optim/exp_avg" in checkpoint
    import safetensors

    with safetensors.safe_open(tmp_path / "r/checkpoints/step-00000003.safetensors", "np") as opened:
        state = json.loads(opened.metadata()["headrace"])["meta"]["data"]
    (tmp_path / "cursor.json").write_text(json.dumps(state))
    cursor = json.loads(headrace("inspect", "cursor.json", "--format", "json", cwd=tmp_path).stdout)
    assert (cursor["kind"], cursor["step"], cursor["lanes_saved"]) == ("cursor (text)", 3, 4)
    cache = Path(os.environ["HEADRACE_CACHE"]) / "manifests"
    newest = max(cache.glob("*.manifest"), key=lambda p: p.stat().st_mtime)
    manifest = json.loads(headrace("inspect", str(newest), "--format", "json", cwd=tmp_path).stdout)
    assert (manifest["kind"], manifest["rows"]) == ("manifest (jsonl)", 60)
    assert manifest["files"][0]["path"] == "a.jsonl"
    raw = bytearray((tmp_path / "r/checkpoints/step-00000003.safetensors").read_bytes())
    raw[-5] ^= 4
    (tmp_path / "bad").write_bytes(raw)
    bad = headrace("inspect", "bad", cwd=tmp_path)
    assert bad.returncode == 1
    assert "fails its checksum" in bad.stderr
    journal = [json.loads(line)["event"] for line in (tmp_path / "r/journal.jsonl").read_text().splitlines()]
    assert journal == ["started", "saved", "completed"]
    assert {json.loads(line)["step"] for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()} == {1, 3}


def test_init_writes_a_config_once(headrace, tmp_path, write_jsonl):
    write_jsonl("web/a.jsonl", ["a document"] * 9)
    done = headrace("init", "web", "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "jsonl:web/" in (tmp_path / "run.toml").read_text()
    again = headrace("init", "web", cwd=tmp_path)
    assert again.returncode == 1
    assert "run.toml exists already: give another name with --out" in again.stderr


def test_the_built_in_config_can_be_checked_from_any_folder(headrace, tmp_path):
    plan = json.loads(headrace("check", "quickstart", "--format", "json", cwd=tmp_path).stdout)
    assert plan["total_tokens"] == 200 * 24 * 256
    assert {s["name"] for s in plan["sources"]} == {"prose", "code"}
    assert all(s["tokens"] > 100_000 for s in plan["sources"])


def test_a_progress_line_is_cut_between_words_where_the_terminal_ends():
    line = "step 10  loss 1.234  tokens/s  210k  wait 0.1 ms (0%)  mix prose .70 code .30"
    assert terminal.fitted(line, 80) == line
    assert terminal.fitted(line, 76) == line[:-4] + " …"
    assert all(len(terminal.fitted(line, width)) <= width for width in range(4, 90))
