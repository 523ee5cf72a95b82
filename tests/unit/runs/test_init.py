"""`headrace init` writes a config that `headrace check` accepts, for whatever files there are."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import ConfigError
from headrace.runs.check import check_job
from headrace.runs.config.loading import load_config
from headrace.runs.init import draft_config


@pytest.fixture
def files(tmp_path) -> Path:
    (tmp_path / "web").mkdir()
    for part in "ab":
        rows = [{"id": "7", "body": f"document {i} of part {part}"} for i in range(30)]
        (tmp_path / "web" / f"{part}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "web" / "notes.txt").write_text("a note\n" * 50)
    pq.write_table(pa.table({"n": [1, 2], "content": ["some code", "more code"]}), tmp_path / "code.parquet")
    return tmp_path


def test_the_config_of_a_folder_and_a_file_can_be_checked_as_it_is(files, monkeypatch):
    monkeypatch.chdir(files / "web")  # elsewhere: paths are relative to the config
    (files / "jobs").mkdir()
    path = files / "jobs" / "first run.toml"
    path.write_text(draft_config([files / "web", files / "code.parquet"], beside=path))
    config = load_config(path, [], {})
    assert [(s.spec, s.text_key) for s in config.source] == [
        (f"jsonl:{files}/web/", "body"), (f"txt:{files}/web/", "text"), (f"parquet:{files}/code.parquet", "content"),
    ]  # fmt: skip
    assert config.run.name == "first-run"
    plan = check_job(config)
    assert [s.rows for s in plan.sources] == [60, 1, 2]


def test_paths_below_the_config_are_relative_to_it(files, monkeypatch):
    monkeypatch.chdir(files / "web")
    assert 'spec = "jsonl:web/"' in draft_config([Path(), files / "code.parquet"], beside=files / "run.toml")


def test_without_files_it_reads_built_in_text_and_names_the_tokenizer(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(draft_config([], beside=path, tokenizer="org/name"))
    config = load_config(path, [], {})
    assert (config.source[0].spec, config.text.tokenizer) == ("sample:prose", "org/name")


def test_paths_without_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    for path, sentence in (
        (tmp_path / "no", "there is no"),
        (tmp_path / "a.csv", r"holds no text.*\.jsonl, \.ndjson, \.txt"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            draft_config([path], beside=tmp_path / "run.toml")
