"""headrace spool, headrace inspect, headrace provide: in this process, with what they print."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from headrace.cli import main
from headrace.spool import DataProviderBase, DatasetConsumer


class Drawn(DataProviderBase):
    def build_meta(self) -> dict[str, Any]:
        return {
            "dataset_name": "drawn",
            "training_type": "SEQUENCE_SCORING",
            "batch_schema": [{"name": "x", "dtype": "int64", "shape": [20]}],
        }

    def sample_batch(self, split, rng):
        return {"x": torch.randint(0, 9, (self.batch_size, 20), generator=rng)}


@pytest.fixture
def spool(tmp_path):
    Drawn(tmp_path / "S", 4, batches_per_file=2, max_backlog_files=3).run(("train",), max_files=3)
    return tmp_path / "S"


@pytest.fixture
def say(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as left:
            main([str(w) for w in words])
        return left.value.code or 0, *capsys.readouterr()

    return call


def test_ls_lists_every_file(spool, say):
    code, out, _ = say("spool", "ls", spool)
    assert code == 0
    assert len(out.splitlines()) == 3
    files = json.loads(say("spool", "ls", spool, "--format", "json")[1])
    assert [(f["seq"], f["rows"], f["first"]) for f in files] == [(0, 8, 0), (1, 8, 8), (2, 8, 16)]


def test_stat_tells_backlog_commit_and_who_is_at_work(spool, say):
    with DatasetConsumer(spool, ack="commit") as consumer:
        for _ in range(3):
            consumer.get_batch("train")
        consumer.commit()
        assert consumer._queue.background.drain(10)
        code, out, _ = say("spool", "stat", spool)
        assert code == 0
        assert "read 1  commit 1  backlog 2  retained 0  quarantined 0" in out
        assert "consumer-0" in out
    assert "no process holds a lock" in say("spool", "stat", spool)[1]


def test_verify_has_an_exit_code_for_ci(spool, say):
    assert say("spool", "verify", spool, "--quiet") == (0, "", "")
    path = spool / "queue" / "train" / "000000000001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-200] ^= 1
    path.write_bytes(raw)
    (spool / "queue" / "train" / "000000000000.safetensors").rename(
        spool / "queue" / "train" / "000000000007.safetensors"
    )
    code, out, _ = say("spool", "verify", spool)
    assert code == 1
    assert "fails its checksum" in out
    assert "says it is file 0" in out
    assert "file 5 is missing" in out


def test_quarantine_shows_files_and_reasons(spool, say):
    assert say("spool", "quarantine", spool)[1] == "nothing\n"
    path = spool / "queue" / "train" / "000000000000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with DatasetConsumer(spool, deadline=0.3) as consumer, pytest.raises(Exception, match=r"spool\.remake"):
        consumer.get_batch("train")
    assert "000000000000.safetensors: " in say("spool", "quarantine", spool)[1]


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_set_aside_by_hand_is_kept_shown_with_its_reason_and_made_again(spool, say, number):
    path = spool / "queue" / "train" / f"00000000000{number}.safetensors"
    content = path.read_bytes()
    code, out, _ = say("spool", "quarantine", spool, "--file", number, "--reason", "the disk was failing")
    assert (code, out) == (0, f"train {path.name}: the disk was failing\n")
    kept = spool / "quarantine" / "train" / path.name
    assert not path.exists()
    assert kept.read_bytes() == content
    assert f"quarantine/{path.name}: the disk was failing" in say("spool", "ls", spool)[1]
    code, out, _ = say("spool", "verify", spool)
    assert code == 1
    assert f"file {number} was set aside and is not made again yet: the disk was failing" in out
    assert "quarantined 1" in say("spool", "stat", spool)[1]
    with DatasetConsumer(spool, ack="commit", deadline=0.3) as consumer:
        for _ in range(2 * number):
            consumer.get_batch("train")
        with pytest.raises(Exception, match=r"spool\.remake.*the disk was failing"):
            consumer.get_batch("train")
    Drawn(spool, 4, batches_per_file=2, max_backlog_files=3).run(("train",), max_files=1)
    assert path.read_bytes() == content, "a function of (seed, split, number)"
    assert kept.read_bytes() == content
    assert say("spool", "verify", spool)[0] == 0


def test_only_a_file_that_is_there_and_was_not_read_is_set_aside_and_for_a_reason(spool, say):
    with DatasetConsumer(spool, ack="commit") as consumer:
        for _ in range(3):
            consumer.get_batch("train")
        assert consumer._queue.background.drain(10)
    for words, sentence in (
        (("--file", 0, "--reason", "x"), "file 0 of train in .* was read .the read position is 1."),
        (("--file", 9, "--reason", "x"), "has no file 9 in train; it has files 0 to 2"),
        (("--file", 1), "a file is set aside for a reason: say which"),
        (("--file", 1, "--reason", "x", "--split", "test"), "has no split 'test' with a part 0"),
    ):
        code, out, err = say("spool", "quarantine", spool, *words)
        assert (code, out) == (1, "")
        assert re.search(sentence, err)
    assert len(list((spool / "queue" / "train").iterdir())) == 3


def test_purge_asks_first_and_refuses_while_somebody_is_at_work(spool, say):
    code, _, err = say("spool", "purge", spool)
    assert code == 1
    assert "holds 3 files; say --yes" in err
    with DatasetConsumer(spool):
        code, _, err = say("spool", "purge", spool, "--yes")
        assert code == 1
        assert "is in use by rank 0 of 1" in err
    assert say("spool", "purge", spool, "--yes")[1] == "3 files deleted\n"
    assert not (spool / "queue").exists()


def test_inspect_shows_schema_and_first_rows_of_a_file(spool, say):
    code, out, _ = say("inspect", spool / "queue" / "train" / "000000000001.safetensors", "--format", "json")
    assert code == 0
    told = json.loads(out)
    assert told["kind"] == "batch file (train, file 1)"
    assert told["schema"] == [{"name": "x", "dtype": "int64", "shape": [20]}]
    assert len(told["first_rows"]) == 3
    assert told["first_rows"][0]["x"][-1] == "…"


@pytest.mark.parametrize("verb", ["ls", "stat", "verify", "quarantine", "purge"])
def test_a_folder_that_is_no_spool_is_one_sentence(tmp_path, say, verb):
    code, out, err = say("spool", verb, tmp_path)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "has neither meta.json nor meta.pkl" in err


def test_provide_says_what_it_made(tmp_path, say):
    (tmp_path / "run.toml").write_text(
        '[[source]]\nspec = "sample:prose"\n[text]\nseq_len = 64\n[loader]\nglobal_batch_size = 6\nlanes = 6\n[spool]\nbatches_per_file = 2\n[train]\n'
    )
    code, out, _ = say("provide", tmp_path / "run.toml", "--spool.dir", tmp_path / "S", "--files", "2")
    assert code == 0
    assert "train 1: published" in out
    assert "made 2 files" in out
    code, out, _ = say(
        "provide", tmp_path / "run.toml", "--spool.dir", tmp_path / "S", "--files", "1", "--format", "json"
    )
    assert json.loads(out)["files"] == 1
    code, _, err = say("provide", tmp_path / "run.toml", "--spool.dir", tmp_path / "S", "--text.seq_len", "32")
    assert code == 1
    assert "was made for something else" in err


def test_what_does_not_belong_into_a_queue_is_a_finding_and_no_traceback(spool, say):
    (spool / "queue" / "notes.txt").write_text("hi")
    assert say("spool", "ls", spool)[0] == 0
    assert say("spool", "stat", spool)[0] == 0
    code, out, _ = say("spool", "verify", spool)
    assert code == 1
    assert "notes.txt does not belong into a spool: remove it" in out


def test_inspect_shows_files_that_torch_saved(tmp_path, say):
    Drawn(tmp_path / "P", 4, batches_per_file=2, file_format="pt").run(("train",), max_files=1)
    code, out, _ = say("inspect", tmp_path / "P" / "queue" / "train" / "000000000000.pt", "--format", "json")
    assert code == 0
    told = json.loads(out)
    assert (told["rows"], told["batch_size"], len(told["first_rows"])) == (8, 4, 3)
    torch.save({"x": "no tensor"}, tmp_path / "odd.pt")
    code, _, said = say("inspect", tmp_path / "odd.pt")
    assert code == 1
    assert "odd.pt is not a batch file in the .pt layout" in said
    code, _, said = say("inspect", tmp_path / "P")
    assert code == 1
    assert "is a spool: see `headrace spool stat" in said


def test_what_the_system_forbids_is_one_sentence(spool, say, monkeypatch):
    def forbidden(path, **_):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("shutil.rmtree", forbidden)
    code, _, said = say("spool", "purge", spool, "--yes")
    assert code == 1
    assert re.search(r"could not be emptied: .*queue: Operation not permitted", said)


def test_provide_refuses_numbers_that_mean_nothing(say):
    assert (
        say("provide", "examples/quickstart.toml", "--files", "0")[2]
        .strip()
        .endswith("--files is 0, expected 1 or more")
    )
