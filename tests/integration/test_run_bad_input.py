"""Bad input gets one clear sentence, a non-zero exit, and nothing lost."""

from __future__ import annotations

import json
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def toml(tmp_path, **tables: str) -> str:
    source = tables.get("source", 'spec = "jsonl:rows.jsonl"')
    text = f'[run]\ndir = "{tmp_path}/run"\nsteps = 4\ncheckpoint_every = 2\nlog_every = 1\n{tables.get("run", "")}\n'
    text += f'[[source]]\n{source}\n[text]\nseq_len = 16\n{tables.get("text", "")}\n[loader]\nglobal_batch_size = 4\nlanes = 4\nexhausted = "repeat"\n[train]\nwarmup_steps = 1\n'
    (tmp_path / "run.toml").write_text(text)
    return "run.toml"


@pytest.fixture
def rows(tmp_path, write_jsonl):
    return write_jsonl("rows.jsonl", [f"document number {i} " + "word " * (i % 9) for i in range(40)])


def one_sentence(done, *fragments: str) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [
        line for line in done.stderr.strip().splitlines() if "is encoded by `tokenizers`" not in line
    ]  # that is a notice
    assert len(lines) == 1, done.stderr
    for fragment in fragments:
        assert fragment in lines[0], lines[0]
    return lines[0]


def test_five_mistakes_give_five_lines_with_file_line_and_nearest_name(tmp_path, headrace):
    (tmp_path / "bad.toml").write_text(
        '[run]\nsteps = "many"\n\n[[source]]\nspec = "sample:prose"\nweigth = 0.5\n\n[text]\npack = "bestfit"\nseq_len = 1\n\n[trian]\nlr = 1e-3\n'
    )
    done = headrace("run", "bad.toml", cwd=tmp_path, fresh=True)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 5, done.stderr
    for line, fragment in zip(
        sorted(lines),
        [
            "bad.toml:10: text.seq_len",
            "bad.toml:12: trian",
            "bad.toml:2: run.steps",
            "bad.toml:6: source",
            "bad.toml:9: text.pack",
        ],
        strict=True,
    ):
        assert fragment in line
    assert sum("did you mean" in line for line in lines) == 3
    assert not (tmp_path / "runs").exists()


def test_a_missing_data_file_is_named(tmp_path, headrace):
    one_sentence(headrace("run", toml(tmp_path), cwd=tmp_path), "rows.jsonl")


def test_a_truncated_parquet_is_named(tmp_path, headrace):
    pq.write_table(pa.table({"text": ["abc"] * 1000}), tmp_path / "t.parquet")
    raw = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(raw[: len(raw) // 2])
    one_sentence(headrace("run", toml(tmp_path, source='spec = "parquet:t.parquet"'), cwd=tmp_path), "t.parquet")


def test_a_line_that_is_not_json_is_named_with_its_number(tmp_path, headrace, rows):
    rows.write_text(rows.read_text() + '{"text": "half\n')
    one_sentence(
        headrace("run", toml(tmp_path), cwd=tmp_path),
        "rows.jsonl",
        "41",
    )


def test_a_missing_text_key_names_the_keys_that_exist(tmp_path, headrace, rows):
    one_sentence(
        headrace("run", toml(tmp_path, source='spec = "jsonl:rows.jsonl"\ntext_key = "content"'), cwd=tmp_path),
        "content",
        "text",
    )


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "does not exist"),
        ("{}", "not a tokenizer.json"),
        ('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', "empty vocabulary"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_named(tmp_path, headrace, rows, content, fragment):
    if content is not None:
        (tmp_path / "tok.json").write_text(content)
    one_sentence(headrace("run", toml(tmp_path, text='tokenizer = "tok.json"'), cwd=tmp_path), "tok.json", fragment)


def test_a_tokenizer_without_an_end_token_says_what_to_do(tmp_path, headrace, rows):
    (tmp_path / "tok.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    one_sentence(
        headrace("run", toml(tmp_path, text='tokenizer = "tok.json"'), cwd=tmp_path), "no eos token", "eos_token"
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, headrace):
    """A run that was stopped at step 2, with its data."""
    folder = tmp_path_factory.mktemp("stopped")
    lines = (json.dumps({"text": f"document number {i} " + "word " * (i % 9)}) + "\n" for i in range(40))
    (folder / "rows.jsonl").write_text("".join(lines))
    done = headrace("run", toml(folder), "--run.stop_after", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def desk(tmp_path, stopped):
    """A copy of it to do things to."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(about | {"base": str(tmp_path)}))
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace(str(stopped), str(tmp_path)))
    return tmp_path


def test_a_shard_that_changed_since_the_checkpoint_is_refused_by_name_and_can_be_accepted(desk, headrace):
    rows = desk / "rows.jsonl"
    raw = bytearray(rows.read_bytes())
    raw[raw.index(b"number") + 2] ^= 1  # one bit, same size
    rows.write_bytes(raw)
    line = one_sentence(headrace("run", "--resume", "run", cwd=desk), "rows.jsonl", "--accept data")
    assert "step 2" in line
    done = headrace("run", "--resume", "run", "--accept", "data", "--run.stop_after", "4", cwd=desk)
    assert done.returncode == 0, done.stderr


def test_a_row_more_a_renamed_shard_and_other_weights_are_refused_by_name(desk, headrace):
    rows = desk / "rows.jsonl"
    before = rows.read_bytes()
    rows.write_bytes(before + b'{"text": "one more"}\n')
    one_sentence(headrace("run", "--resume", "run", cwd=desk), "rows.jsonl")
    rows.rename(desk / "other.jsonl")
    one_sentence(headrace("run", "--resume", "run", cwd=desk), "rows.jsonl")
    rows.write_bytes(before)
    changed = ("--source.0.weight", "2", "--run.seed", "5", "--text.seq_len", "32")
    one_sentence(
        headrace("run", "--resume", "run", *changed, cwd=desk),
        "weights", "--accept weights", "config:seed: saved 0, now 5", "config:seq_len: saved 16, now 32",
    )  # fmt: skip


def test_a_changed_tokenizer_is_refused_at_resume(tmp_path, headrace, rows):
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (tmp_path / "tok.json").write_text(json.dumps(tokenizer))
    done = headrace("run", toml(tmp_path, text='tokenizer = "tok.json"'), "--run.stop_after", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tokenizer["model"]["vocab"] = {"a": 1, "</s>": 0}
    (tmp_path / "tok.json").write_text(json.dumps(tokenizer))
    one_sentence(headrace("run", "--resume", "run", cwd=tmp_path), "tokenizer: saved")


def test_a_folder_that_holds_a_run_is_not_overwritten(desk, headrace):
    (desk / "run.toml").write_text((desk / "run.toml").read_text().replace('dir = "', 'dir = "run" # "'))
    one_sentence(headrace("run", "run.toml", cwd=desk), "already holds a run", "--resume")


def test_resuming_nothing_says_so(tmp_path, headrace):
    one_sentence(headrace("run", "--resume", "nowhere", cwd=tmp_path), "no run folder nowhere")
    (tmp_path / "empty").mkdir()
    one_sentence(headrace("run", "--resume", "empty", cwd=tmp_path), "stopped before it began")


def test_a_number_of_ranks_that_does_not_fit_lists_those_that_do(tmp_path, headrace, rows):
    done = headrace("check", toml(tmp_path), "--ranks", "3", cwd=tmp_path)
    one_sentence(done, "3 ranks", "1, 2, 4")


def test_calls_that_cannot_work_are_one_sentence(desk, headrace):
    one_sentence(headrace("inspect", "nothing-here", cwd=desk), "does not exist")
    one_sentence(headrace("inspect", "run.toml", cwd=desk), "not a container of headrace's")
    one_sentence(headrace("run", "--resume", "run", "--accept", "dta", cwd=desk), "did you mean data?")
    one_sentence(headrace("run", "--resume", "run", "--run.dir", "elsewhere", cwd=desk), "--run.dir cannot be changed")


def test_a_folder_in_which_no_step_was_saved_can_be_used_again(tmp_path, headrace, rows):
    config = toml(tmp_path, source='spec = "jsonl:rows.jsonl"\ntext_key = "content"')
    one_sentence(headrace("run", config, cwd=tmp_path), "content")
    done = headrace("run", toml(tmp_path), "--run.stop_after", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_step_without_a_token_to_learn_is_no_failure(tmp_path, headrace, write_jsonl):
    write_jsonl("rows.jsonl", ["a", "b"])
    done = headrace(
        "run", toml(tmp_path, text="eos = false"), "--loader.exhausted", "drop", "--format", "json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss_last"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["fly"],
        ["run"],
        ["run", "a.toml", "--resume", "b"],
        ["run", "x.toml", "--no-such-option"],
        ["check"],
        ["inspect", "a", "--format", "xml"],
    ],
)
def test_words_that_do_not_exist_are_usage_errors(tmp_path, headrace, words):
    done = headrace(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--help" in done.stderr


def test_debug_shows_where_an_error_came_from(tmp_path, headrace):
    done = headrace("run", "--resume", "nowhere", "--debug", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"Traceback[\s\S]*ConfigError", done.stderr)


def test_a_resume_that_forgets_skipped_steps_is_refused_and_quiet_says_nothing_else(tmp_path, headrace, rows):
    def run(*words):
        return headrace("run", *words, "--quiet", cwd=tmp_path)

    words = (toml(tmp_path), "--run.dir", "S", "--run.skip", "3:5", "--run.steps", "6", "--run.keep_checkpoints", "9")
    assert run(*words).returncode == 0
    done = run("--resume", "S", "--run.skip", "", "--run.steps", "8")
    assert done.returncode == 1
    assert "passed over the data of steps 3:5, and run.skip is empty" in done.stderr
    done = run("--resume", "S", "--run.steps", "8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_weights_changed_at_a_resume_and_holes_are_journalled_once(tmp_path, headrace, rows):
    rows.write_text("{broken\n" + rows.read_text())
    words = ("--source.0.on_bad", "skip", "--loader.exhausted", "repeat", "--run.keep_checkpoints", "9", "--quiet")
    for more in (
        (toml(tmp_path), "--run.dir", "W", "--run.steps", "10"),
        ("--resume", "W", "--run.steps", "20"),
        ("--resume", "W", "--run.steps", "21", "--source.0.weight", "3", "--accept", "weights"),
    ):
        done = headrace("run", *more, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "W" / "journal.jsonl").read_text().splitlines()]
    assert len([e for e in events if e["event"] == "hole"]) == 1
    (told,) = [e for e in events if e["event"] == "weights"]
    assert (told["step"], told["weights"], told["weights_before"]) == (21, {"rows": 3.0}, {"rows": 1.0})
    assert json.loads((tmp_path / "W" / "summary.json").read_text())["left_out"].keys() == {
        "empty_documents",
        "bad_rows",
        "bad_shards",
    }


def test_what_the_checkpoints_model_was_made_for_is_refused_at_once_as_not_acceptable(desk, headrace):
    fragments = ("config:seq_len cannot be accepted: the model of the checkpoint has 16 positions", "start a new run")
    for accepted in ((), ("--accept", "config")):
        line = one_sentence(headrace("run", "--resume", "run", "--text.seq_len", "32", *accepted, cwd=desk), *fragments)
        assert "--accept" not in line
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (desk / "tok.json").write_text(json.dumps(tokenizer))
    one_sentence(
        headrace("run", "--resume", "run", "--text.tokenizer", "tok.json", "--accept", "config", cwd=desk),
        "tokenizer cannot be accepted: the model of the checkpoint has 259 ids, this tokenizer 2",
    )
    one_sentence(headrace("run", "--resume", "run", "--loader.lanes", "8", cwd=desk), "config:lanes cannot be accepted")
