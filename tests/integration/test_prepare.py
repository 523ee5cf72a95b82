"""Preparing as a user meets it: same bytes whatever happens, and a sentence for everything that is off."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from headrace.runs.config.loading import load_config
from headrace.runs.prepare import PrepareSummary, prepare

CONFIG = """
[run]
name = "mix"
seed = 3
[[source]]
spec = "jsonl:web-*.jsonl"
name = "web"
weight = 0.7
[[source]]
spec = "jsonl:notes.jsonl"
weight = 0.3
max_epochs = 2
[text]
seq_len = 64
[train]
"""
ENV = os.environ | {"NO_COLOR": "1"}


class Quiet:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def progress(self, line, done, total) -> None:
        assert " rows  " in line
        assert 0 < done <= total

    def notice(self, sentence) -> None:
        self.notices.append(sentence)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A config and 2 MB of text, enough for several shards of one MiB."""
    folder = tmp_path_factory.mktemp("project")
    for shard in range(2):
        texts = [f"web {shard} {i} " + "lorem ipsum dolor " * (i % 97) for i in range(1200)]
        (folder / f"web-{shard}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": f"note {i}" * (i % 3)}) + "\n" for i in range(300)))
    (folder / "c.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def whole(project, headrace) -> tuple[Path, str]:
    """Prepared by the command in one go, by one thread; what it printed."""
    done = headrace("prepare", "c.toml", "--out", "whole", "--workers", "1", "--shard-mb", "1", cwd=project)
    assert done.returncode == 0, done.stderr
    return project / "whole", done.stdout


def again(project: Path, out: str, *words: str, watcher: Quiet | None = None, **options) -> PrepareSummary:
    """The same in this process."""
    config = load_config(project / "c.toml", words)
    return prepare(config, project / out, watcher or Quiet(), **({"shard_bytes": 1 << 20} | options))


def contents(folder: Path) -> dict[str, str]:
    """What a prepared folder is, byte for byte; the lock and the hashes of chunks say who made it and when."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "prepare.lock" and p.parent.name != "records"
    }


def test_a_prepared_config_is_said_in_full_and_read_by_the_loader(whole):
    folder, said = whole
    for word in (
        "prepares whole",
        "web 2,400 rows",
        "notes 300 rows",
        "prepared  whole",
        "2,600 documents",
        "MB in 5 shards",
        "tokens/s",
    ):
        assert word in said
    data = hr.PreparedDataset(folder)
    assert data.names == ("web", "notes")
    assert data.weights == (0.7, 0.3)
    loader = hr.PreparedLoader(data, global_batch_size=16, prefetch_batches=0)
    for _ in loader:
        continue
    tokens = loader.drain_metrics()
    assert tokens["data/source_tokens/web"] == data.sources[0].tokens
    assert tokens["data/source_tokens/notes"] == 2 * data.sources[1].tokens, "max_epochs = 2"


def test_bytes_do_not_depend_on_the_number_of_threads_and_a_complete_folder_is_left_alone(whole, project):
    folder, _ = whole
    summary = again(project, "three", workers=3)
    assert (summary.state, summary.documents, summary.kept) == ("prepared", 2600, 0)
    assert contents(project / "three") == contents(folder)
    summary = again(project, "three", workers=2)
    assert (summary.state, summary.kept, summary.new_tokens) == ("complete", summary.shards, 0)
    assert contents(project / "three") == contents(folder)
    again(project, "three", "--text.seq_len", "100")
    assert (project / "three/best_fit-100.json").exists(), "another seq_len only adds an index"
    assert hr.PreparedDataset(project / "three").seq_len == 100
    assert len(hr.PreparedDataset(project / "three", seq_len=64)) == len(hr.PreparedDataset(folder))


def test_what_is_damaged_or_missing_is_made_again_and_the_rest_is_kept(whole, project):
    folder, _ = whole
    shutil.copytree(folder, project / "damaged")
    place, watcher = project / "damaged/tokens/web", Quiet()
    raw = bytearray((place / "tokens-00001.safetensors").read_bytes())
    raw[-1000] ^= 1
    (place / "tokens-00001.safetensors").write_bytes(raw)
    (place / "tokens-00003.safetensors").unlink()
    (place / "best_fit-64-00000.safetensors").write_bytes(b"short")
    shutil.copyfile(place / "tokens-00000.safetensors", project / "damaged/tokens/notes/tokens-00001.safetensors")
    (project / "damaged/manifest.json").write_text("{}")
    summary = again(project, "damaged", watcher=watcher)
    assert (summary.remade, summary.kept) == (1, summary.shards - 2)
    said = "\n".join(watcher.notices)
    for part in ("tokens-00001.safetensors is damaged", "best_fit-64-00000", "beyond the last row", "manifest.json"):
        assert part in said
    shutil.rmtree(project / "damaged/quarantine")
    assert contents(project / "damaged") == contents(folder)


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        ((), {"shard_bytes": 2 << 20}, "shard_tokens was 524288, is 1048576"),
        (("--text.bos", "true"), {}, "bos_id was None, is 257"),
        (("--text.tokenizer", "sample"), {}, "tokenizer was bytes-v1, is "),
        (("--source.0.max_rows", "9"), {}, "max_rows of source web was None, is 9"),
        (("--source.1.name", "other"), {}, "source notes is gone; source other is new"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_going_on_with_another_config_is_refused_by_name(whole, project, words, options, sentence):
    folder, _ = whole
    before = contents(folder)
    with pytest.raises(hr.DataChanged, match=rf"{sentence}.*--out"):
        again(project, "whole", *words, **options)
    assert contents(folder) == before


def test_going_on_with_changed_files_or_in_a_foreign_folder_is_refused(whole, project, tmp_path):
    assert whole[0].exists()
    copy = tmp_path / "p"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("three", "damaged"))
    with open(copy / "notes.jsonl", "a") as handle:
        handle.write('{"text": "one more"}\n')
    with pytest.raises(hr.DataChanged, match=r"source notes: notes.jsonl changed"):
        again(copy, "whole")
    (copy / "mine").mkdir()
    (copy / "mine/thesis.tex").write_text("x")
    with pytest.raises(hr.ConfigError, match=r"mine holds 'thesis.tex' and no prepared data"):
        again(copy, "mine")
    assert os.listdir(copy / "mine") == ["thesis.tex"]
    with pytest.raises(hr.ConfigError, match=r"c.toml is a file"):
        again(copy, "c.toml")


def test_bad_rows_are_refused_by_name_or_left_out_and_counted(tmp_path):
    rows = [json.dumps({"text": f"row {i}"}) for i in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:4], '{"text": ', *rows[4:]]) + "\n")
    (tmp_path / "c.toml").write_text('[[source]]\nspec = "jsonl:a.jsonl"\n[text]\nseq_len = 16\n[train]\n')
    with pytest.raises(hr.DataError, match=r"a.jsonl, line 5"):
        again(tmp_path, "out")
    summary = again(tmp_path, "skipped", "--source.0.on_bad", "skip")
    assert (summary.documents, summary.bad_rows) == (9, 1)
    loader = hr.PreparedLoader(hr.PreparedDataset(tmp_path / "skipped"), global_batch_size=1, prefetch_batches=0)
    assert sorted({p.row for batch in loader for p in loader.pieces(batch)}) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


# The first shard is there, and the tokenizer goes on only when it is told to: a moment at which to interrupt.
HELD = """
import resource, sys, time
from pathlib import Path
import headrace.text.tokenizer as t
plain = t.ByteTokenizer.encode
def held(self, texts):
    while Path("stopped/tokens/web/tokens-00000.safetensors").exists() and not Path("go").exists():
        time.sleep(0.01)
    return plain(self, texts)
t.ByteTokenizer.encode = held
if int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from headrace.cli import main
main(sys.argv[2:])
"""


def test_ctrl_c_stops_cleanly_says_how_to_go_on_and_the_rest_has_the_same_bytes(whole, project, warm, until):
    folder, _ = whole
    words = ["prepare", "c.toml", "--out", "stopped", "--shard-mb", "1", "--workers", "1"]
    with warm.Popen(
        [sys.executable, "-c", HELD, "0", *words], cwd=project, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        first = project / "stopped/tokens/web/tokens-00000.safetensors"
        until(lambda: first.exists() or process.poll() is not None)
        with pytest.raises(hr.ConfigError, match=f"is being written by process {process.pid} on"):
            again(project, "stopped")
        process.send_signal(signal.SIGINT)
        (project / "go").touch()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert "headrace prepare c.toml --out stopped --shard-mb 1" in out
    assert not (project / "stopped/manifest.json").exists()
    with pytest.raises(hr.DataError, match="holds no prepared data"):
        hr.PreparedDataset(project / "stopped")
    assert again(project, "stopped").kept >= 1
    assert contents(project / "stopped") == contents(folder)


def test_a_full_disk_is_one_sentence_and_the_rest_goes_on_later(whole, project):
    folder, _ = whole
    done = subprocess.run(
        [sys.executable, "-c", HELD, "300000", "prepare", "c.toml", "--out", "full", "--shard-mb", "1", "--quiet"],
        cwd=project, env=ENV, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "File too large" in done.stderr
    assert "the same command continues from there" in done.stderr
    again(project, "full")
    assert contents(project / "full") == contents(folder)
