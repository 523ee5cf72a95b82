"""A run needs no config file where the environment names its sources."""

from __future__ import annotations

import json

OVERRIDES = ("--run.steps", "4", "--loader.global_batch_size", "4", "--loader.lanes", "4", "--train.warmup_steps", "1")


def test_a_run_from_the_environment_alone_trains_and_is_resumed_without_it(tmp_path, headrace, write_jsonl):
    write_jsonl("a.jsonl", [f"document number {i} " + "word " * (i % 9) for i in range(60)])
    (tmp_path / "b.txt").write_text("a line of text\n" * 50)
    env = {"DATASET_SPECS": "jsonl:a.jsonl?weight=0.7; txt:b.txt?weight=0.3&split=line", "CONTEXT_LEN": "32"}
    done = headrace("run", *OVERRIDES, "--run.stop_after", "2", "--format", "json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["mix"]) == {"a", "b"}
    kept = (tmp_path / "runs" / "run" / "config.toml").read_text()
    assert "jsonl:a.jsonl" in kept
    assert "seq_len = 32" in kept
    done = headrace("run", "--resume", "runs/run", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 4
    done = headrace("check", "--format", "json", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert [s["name"] for s in json.loads(done.stdout)["sources"]] == ["a", "b"]


def test_without_a_config_and_without_sources_the_call_is_refused_with_an_example(tmp_path, headrace):
    for verb in ("run", "check"):
        done = headrace(verb, cwd=tmp_path, env={"DATASET_SPECS": " "})
        assert done.returncode == 2
        assert f"DATASET_SPECS='jsonl:web/*.jsonl' headrace {verb}" in done.stderr
    done = headrace("run", "run.toml", "--resume", "runs/run", cwd=tmp_path)
    assert done.returncode == 2
