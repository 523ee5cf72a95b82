"""A run writes inside its folder only: a symbolic link in it is refused or replaced, and what it leads to stays as it was."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from headrace.cli.terminal import Display
from headrace.errors import HeadraceError
from headrace.files import open_container
from headrace.runs.start import claim_folder, train

TEXT = """
[run]
dir = "{folder}/run"
steps = 8
checkpoint_every = 2
log_every = 1
[[source]]
spec = "jsonl:rows.jsonl"
[text]
seq_len = 16
[loader]
global_batch_size = 4
lanes = 4
exhausted = "repeat"
[train]
warmup_steps = 1
"""
STREAMS = """
[run]
dir = "{folder}/run"
steps = 8
checkpoint_every = 2
log_every = 1
[streams]
roots = ["data"]
num_streams_mixed = 2
batch_size = 4
[train]
dim = 8
depth = 1
"""


def stopped_at_four(folder, config, headrace, *words):
    (folder / "run.toml").write_text(config.format(folder=folder))
    done = headrace("run", "run.toml", "--run.stop_after", "4", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def text_run(tmp_path_factory, headrace):
    """A text run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": f"document number {i} " + "word " * (i % 9)}) + "\n" for i in range(40))
    (folder / "rows.jsonl").write_text("".join(lines))
    return stopped_at_four(folder, TEXT, headrace)


@pytest.fixture(scope="module")
def spooled_run(tmp_path_factory, headrace):
    """A run that fills its spool with a provider of its own."""
    folder = tmp_path_factory.mktemp("spooled")
    (folder / "rows.jsonl").write_text('{"text": "document number one of a few words"}\n' * 40)
    return stopped_at_four(folder, TEXT, headrace, "--spool.dir", str(folder / "spool"))


@pytest.fixture(scope="module")
def stream_run(tmp_path_factory, headrace):
    """A run over streams of cells."""
    folder = tmp_path_factory.mktemp("streams")
    for file in range(3):
        (folder / "data" / "rna").mkdir(parents=True, exist_ok=True)
        np.savez(folder / "data" / "rna" / f"{file}.npz", x=np.ones((40, 3), np.float32), group_id=np.arange(40))
    return stopped_at_four(folder, STREAMS, headrace)


@pytest.fixture
def desk(tmp_path, text_run):
    """A copy of it, beside an empty folder `outside`."""
    return copied(text_run, tmp_path)


def copied(run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True, symlinks=True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(about | {"base": str(tmp_path)}))
    (tmp_path / "outside").mkdir()
    return tmp_path


def moved_out(desk, name):
    """Put a link where `name` is, to the same file or folder outside the run."""
    inside, outside = desk / "run" / name, desk / "outside" / "target"
    if inside.exists():
        inside.rename(outside)
    elif inside.suffix:
        outside.write_bytes(b"precious\n")
    else:
        outside.mkdir()
    inside.symlink_to(outside)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def resumed(desk, *words):
    """Resume the run in this process, up to step 6; the error that ended it, if one did."""
    before = content(desk / "outside")
    try:
        folder = claim_folder(resume=desk / "run", overrides=("--run.steps", "6", *words))
        try:
            train(folder, Display())
        finally:
            folder.release()
    except HeadraceError as error:
        return error
    finally:
        assert content(desk / "outside") == before
    return None


def refused(error, name):
    assert error is not None
    assert "symbolic link" in str(error)
    assert f"run/{name}" in str(error)
    assert "run again" in str(error) or "Put the file itself there" in str(error)


@pytest.mark.parametrize("name", ["run.lock", "journal.jsonl", "metrics.jsonl", "digests.jsonl", "flight.jsonl"])
def test_a_linked_file_that_is_appended_to_is_refused_by_name(desk, name):
    moved_out(desk, name)
    refused(resumed(desk), name)


@pytest.mark.parametrize("name", ["run.lock", "metrics.jsonl"])
def test_a_link_to_nothing_makes_nothing(desk, name):
    (desk / "run" / name).unlink()
    (desk / "run" / name).symlink_to(desk / "outside" / "new")
    refused(resumed(desk), name)


@pytest.mark.parametrize("name", ["config.toml", "summary.json", "checkpoints/step-00000006.safetensors"])
def test_a_linked_file_that_is_published_is_replaced_and_its_target_stays(desk, name):
    moved_out(desk, name)
    assert resumed(desk) is None
    assert not (desk / "run" / name).is_symlink()
    assert open_container(desk / "run" / "checkpoints" / "step-00000006.safetensors").meta["kind"] == "lm"


def test_a_linked_file_that_a_resume_reads_is_refused_by_name(desk):
    moved_out(desk, "run.json")
    refused(resumed(desk), "run.json")


@pytest.mark.parametrize("name", ["checkpoints", "records", "tensorboard", "wandb"])
def test_a_linked_folder_of_a_run_is_refused_by_name(desk, name):
    moved_out(desk, name)
    sinks = ("--run.sinks", f'["{name}"]') if name in ("tensorboard", "wandb") else ()
    refused(resumed(desk, *sinks), name)


def test_linked_chunk_hashes_are_left_alone(desk):
    (chunks,) = (desk / "run" / "records").glob("*.chunks")
    moved_out(desk, f"records/{chunks.name}")
    (desk / "outside" / "target").write_bytes(b"")
    resumed(desk)


@pytest.mark.parametrize(
    ("name", "words"),
    [("quarantine", ()), ("superseded", ("--run.skip", "3:4", "--run.checkpoint_every", "3"))],
)
def test_nothing_is_set_aside_through_a_linked_folder(desk, name, words):
    newest = desk / "run" / "checkpoints" / "step-00000004.safetensors"
    if name == "quarantine":
        newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    (desk / "outside" / "folder").mkdir()
    (desk / "run" / "checkpoints" / name).symlink_to(desk / "outside" / "folder")
    refused(resumed(desk, *words), f"checkpoints/{name}")
    assert newest.exists()


@pytest.mark.parametrize("name", ["provide.toml", "provide.log"])
def test_linked_files_of_a_run_s_own_provider_are_not_written_through(spooled_run, tmp_path, name):
    desk = copied(spooled_run, tmp_path)
    moved_out(desk, name)
    error = resumed(desk, "--spool.dir", str(desk / "spool"))
    if name == "provide.log":
        refused(error, name)
    else:
        assert error is None


@pytest.mark.parametrize("name", ["streams.json", "metrics.jsonl"])
def test_a_stream_run_writes_through_no_link_either(stream_run, tmp_path, name):
    desk = copied(stream_run, tmp_path)
    moved_out(desk, name)
    refused(resumed(desk), name)


@pytest.mark.parametrize("command", ["gram", "prepare"])
def test_the_lock_of_another_command_s_folder_is_no_way_out_either(desk, headrace, command):
    np.save(desk / "rows.npy", np.ones((8, 2), np.float32))
    words = {
        "gram": ("rows.npy", "--out", "g.safetensors", "--workers", "1"),
        "prepare": ("run.toml", "--out", "prepared"),
    }[command]
    folder, lock = {"gram": ("g.safetensors.work", "lock"), "prepare": ("prepared", "prepare.lock")}[command]
    (desk / folder).mkdir()
    (desk / "outside" / "target").write_bytes(b"precious")
    (desk / folder / lock).symlink_to(desk / "outside" / "target")
    done = headrace(command, *words, cwd=desk)
    assert done.returncode == 1
    assert f"{folder}/{lock}: it is a symbolic link" in done.stderr
    assert (desk / "outside" / "target").read_bytes() == b"precious"


def test_a_run_folder_may_itself_be_reached_through_a_link(desk):
    (desk / "run").rename(desk / "disk")
    (desk / "run").symlink_to(desk / "disk")
    assert resumed(desk) is None
