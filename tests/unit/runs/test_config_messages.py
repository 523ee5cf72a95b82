"""Everything that is wrong is said at once, where it was written, with the nearest thing that would be right."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.runs.config.loading import load_any_config, load_config

GOOD = '[[source]]\nspec = "sample:prose"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, *overrides: str, env: dict[str, str] | None = None) -> list[str]:
    """What is said about a file run.toml, with the folder's name taken off."""
    path = folder / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, env or {})
    return [line.replace(f"{folder}/", "") for line in caught.value.problems]


def test_a_file_with_five_mistakes_gives_five_lines_with_file_line_and_nearest_name(tmp_path):
    text = """\
[run]
stepps = 200

[[source]]
spec = "sample:prose"
weight = "heavy"

[text]
pack = "bestfit"

[train]
lr = -1.0
prefetch_batches = 4
"""
    assert problems(tmp_path, text) == [
        "run.toml:2: run.stepps: unknown key, did you mean steps?",
        'run.toml:6: source.0.weight: expected a number such as 1.0, found the string "heavy"',
        'run.toml:9: text.pack: unknown value "bestfit", did you mean "best_fit"? (values: "best_fit", "concat")',
        "run.toml:12: train.lr: must be above 0, found -1.0",
        "run.toml:13: train.prefetch_batches: unknown key, belongs in [loader]",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[train]\nlrr = 1.0", "train.lrr: unknown key, did you mean lr?"),
        ("[text]\nseq-len = 8", "text.seq-len: unknown key, did you mean seq_len?"),
        ("[text]\nprefetch_batch = 8", "text.prefetch_batch: unknown key, did you mean prefetch_batches in [loader]?"),
        ("[text]\nzzz = 8", "text.zzz: unknown key, [text] takes tokenizer, seq_len, pack, "),
        ("[loader]\nname = 'x'", "loader.name: unknown key, belongs in [run] or [[source]]"),
        ("[trian]\nlr = 1.0", "trian: unknown table, did you mean [train]?"),
        ("[zzz]\nlr = 1.0", "zzz: unknown table, the tables are [run], [[source]], [mix], [text], [loader], [spool], [train]"),
        ("[text]\nseq_len = '64'", 'text.seq_len: expected an integer such as 1024, found the string "64"; write it with'),
        ("[text]\nseq_len = 64.0", "text.seq_len: expected an integer such as 1024, found the number 64.0"),
        ("[text]\nseq_len = true", "text.seq_len: expected an integer such as 1024, found true"),
        ("[text]\nseq_len = 1", "text.seq_len: must be at least 2 and at most 2**24, found 1"),
        ("[text]\nbos = 1", "text.bos: expected true or false, found the integer 1"),
        ("[text]\npack = 3", 'text.pack: expected one of "best_fit", "concat", found the integer 3'),
        ('[text]\ntokenizer = "a\\u0000"', 'text.tokenizer: must not hold a NUL character, found "a\\u0000"'),
        ("[loader]\nexhausted = 'stop'", '"stop", did you mean "stop_first"? (values: "stop_first", '),
        ("[run]\nseed = 0x8000000000000000", "run.seed: must be at least 0 and below 2**63, found 2**63"),
        ("[run]\nseed = 0x" + "f" * 6000, "run.seed: must be at least 0 and below 2**63, found an integer of 24000 bits"),
        ("[run]\nname = '../up'", 'run.name: expected 1 to 64 letters, digits, _ . or -'),
        ("[run]\nname = ''", 'run.name: expected 1 to 64 letters'),
        ("[run]\nsinks = 'wandb'", 'run.sinks: expected an array such as ["tensorboard"], found the string "wandb"'),
        ("[run]\nsinks = [\n'wandb',\n'wandbb']", 'run.toml:4: run.sinks.1: unknown value "wandbb", did you mean "wandb"?'),
        ("[run]\nsinks = ['wandb', 'wandb']", "run.sinks: names the same sink twice"),
        ("[train]\nlr = inf", "train.lr: must be a finite number, found the number inf"),
        ("[train]\nlr = 2020-01-01", "train.lr: expected a number such as 0.003, found a date or a time"),
        ("[train]\nbetas = [0.9, 1.0]", "train.betas.1: must be at least 0 and below 1, found 1.0"),
        ("[train]\nbetas = [0.9]", "train.betas.1: missing, expected a number"),
        ("[train]\nbetas = [0.9, 0.9, 0.9]", "train.betas: expected an array of 2 numbers such as [0.9, 0.95], found an ar"),
        ("[[train]]\nlr = 1.0", "train: expected one table, write [train] in place of [[train]]"),
        ("[text]\ncontext_len = 8", "run.toml:4: text.context_len: unknown key, did you mean seq_len?"),
        ("[text]\nseq_len = 4194304\nwindow_blocks = 64", "run.toml:5: text.window_blocks: a window of 64 blocks of 2**22 tokens is packed in memory"),
    ],
)  # fmt: skip
def test_each_kind_of_mistake_is_one_line_in_plain_words(tmp_path, line, said):
    found = problems(tmp_path, GOOD + line)
    assert len(found) == 1
    assert said in found[0]
    assert found[0].startswith("run.toml:")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = 1.0\n" + GOOD, "run.toml:1: lr: unknown key, belongs in [train]"),
        ("train = 3\n" + GOOD, "run.toml:1: train: expected the table [train], found the integer 3"),
        ("[source]\nspec = 'a:b'", "run.toml:1: source: expected an array of tables, write [[source]] in place of"),
        ("source = [3]", "run.toml:1: source.0: expected a table, found the integer 3"),
        ("[[sources]]\nspec = 'a:b'", "run.toml:1: sources: unknown table, did you mean [[source]]?"),
        ("[run]\n", "run.toml:1: source: missing, expected at least one [[source]] with a spec"),
        ("source = []", "run.toml:1: source: missing, expected at least one [[source]] with a spec"),
        ("\n[[source]]\nweight = 1.0", "run.toml:2: source.0.spec: missing, expected a string such as"),
        ("[[source]]\nspec = 'web'", "run.toml:2: source.0.spec: expected KIND:PATH such as"),
        ("[[source]]\nspec = 'a:b?wieght=3'", "run.toml:2: source.0.spec?wieght: unknown option, did you mean weight?"),
        ("[[source]]\nspec = 'a:b?weight=-3'", "run.toml:2: source.0.spec?weight: must be at least 0, found -3"),
        ("[[source]]\nspec = 'a:b?weight=3'\nweight = 2", "run.toml:2: source.0.spec?weight: weight is set elsewhere too"),
        (GOOD + "weight = nan", "run.toml:3: source.0.weight: must be a finite number, found the number nan"),
        (GOOD + "weight = 0", "run.toml:1: source: every source has weight 0"),
        ("[streams]\n", 'run.toml:1: streams.roots: missing, expected an array such as ["data/cells"]'),
    ],
)  # fmt: skip
def test_mistakes_about_tables_are_told_once_and_by_their_cause(tmp_path, text, said):
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_threads_and_processes_together_are_refused_with_the_reason(tmp_path):
    alone = load_config(written(tmp_path, GOOD + "[loader]\ndata_loader_workers = 2"), [], {})
    assert (alone.loader.data_loader_workers, alone.loader.tokenizer_workers) == (2, None)
    both = problems(tmp_path, GOOD + "[loader]\ndata_loader_workers = 2\ntokenizer_workers = 2")
    assert len(both) == 1
    assert both[0].startswith(
        "run.toml:4: loader.data_loader_workers: data_loader_workers and tokenizer_workers cannot both be above 0: nested process"
    )


def test_skips_and_changes_of_the_mix_are_checked(tmp_path):
    config = load_config(
        written(tmp_path, GOOD + "[run]\nskip = '1200:1240, 7 : 9'\n[[mix.change]]\nstep = 3\nweights = {prose = 1}\n"),
        [],
        {},
    )
    assert config.run.skips == ((7, 9), (1200, 1240))
    assert config.mix.change[0].weights == {"prose": 1.0}
    again = load_config(written(tmp_path, config.to_toml()), [], {})
    assert again == config
    for text, said in (
        ("[run]\nskip = '9:7'", 'run.skip: expected a range of steps FROM:TO with 1 <= FROM < TO, such as "1200:1240"'),
        ("[run]\nskip = '1:5,4:9'", "run.skip: ranges of steps must follow each other without overlap"),
        ("[[mix.change]]\nstep = 0\nweights = {prose = 1}", "mix.change.0.step: must be at least 1"),
        (
            "[[mix.change]]\nstep = 2\nweights = {prose = -1}",
            "mix.change.0.weights.prose: must be at least 0, found -1",
        ),
        (
            "[[mix.change]]\nstep = 2\nweights = {pros = 1}",
            'mix.change at step 2: there is no source "pros"; there are prose',
        ),
        ("[[mix.change]]\nstep = 2", "mix.change.0.weights: missing"),
    ):
        assert said in problems(tmp_path, GOOD + text)[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--train.lrr", "3e-4"], "--train.lrr: unknown key, did you mean --train.lr?"),
        (["--train.lrr=3e-4"], "--train.lrr: unknown key, did you mean --train.lr?"),
        (["--trian.lr", "1"], "--trian.lr: unknown table, did you mean --train.lr?"),
        (["--lr", "1"], "--lr: unknown key, did you mean --train.lr?"),
        (["--train.steps", "1"], "--train.steps: unknown key, did you mean --run.steps?"),
        (["--train.text_key", "x"], "--train.text_key: unknown key, did you mean --source.0.text_key?"),
        (["--source.0.wieght", "1"], "--source.0.wieght: unknown key, did you mean --source.0.weight?"),
        (["--source.4.weight", "1"], '--source.4.weight: no source "4", there is 0; count from 0, as in --source.0.weight'),
        (["--source.prose.weight", "1"], '--source.prose.weight: no source "prose", there is 0; count from 0'),
        (["--source.1.weight", "1"], "--source.1.weight: there is no source 1; to add it, give --source.1.spec too"),
        (["--source.0.spec.x", "1"], "--source.0.spec.x: source.0.spec is a value, not a table"),
        (["--train.lr"], "--train.lr: needs a value, expected a number such as 0.003"),
        (["--train.lr", "fast"], '--train.lr: expected a number such as 0.003, found the string "fast"'),
        (["--train.lr", "-1"], "--train.lr: must be above 0, found -1"),
        (["--train.lr", "1\nx = 2"], '--train.lr: expected a number such as 0.003, found the string "1\\nx = 2"'),
        (["--text.pack", "greedy"], '--text.pack: unknown value "greedy" (values: '),
        (["--source.0.spec", "a:b?weigt=1"], "--source.0.spec: source.0.spec?weigt: unknown option, did you mean weight?"),
        (["lr=3"], "lr=3: expected an override such as --train.lr 3e-4"),
        (["--"], "--: expected an override such as"),
        (["--train..lr", "3"], "--train..lr: expected an override such as"),
        (["--run.name", "a\nb"], "--run.name: expected 1 to 64 letters"),
        (["--run.dir", "\udc80"], "--run.dir: must be UTF-8"),
        (["--x\ny", "1"], '"--x\\ny": unknown key'),
    ],
)  # fmt: skip
def test_an_override_is_named_as_it_was_typed(tmp_path, overrides, said):
    found = problems(tmp_path, GOOD, *overrides)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_problems_of_file_environment_and_overrides_come_together_in_that_order(tmp_path):
    text = GOOD + "[train]\nlrr = 1\nlr = 0"
    found = problems(tmp_path, text, "--text.bos", "3", "--run.steps", "0", env={"CONTEXT_LEN": "long"})
    assert [line.split(": ")[0] for line in found] == [
        "run.toml:4", "run.toml:5", "CONTEXT_LEN", "--text.bos", "--run.steps",
    ]  # fmt: skip
    assert found[2] == 'CONTEXT_LEN: text.seq_len: expected an integer such as 1024, found the string "long"'


def test_a_config_error_survives_pickling_with_all_its_problems(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nx = 1\ny = 2")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [], {})
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems  # noqa: S301
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nsteps = \n", "run.toml:2: expected a value"),
        ("[run]\nsteps 3\n", "run.toml:2: expected '=' after a key"),
        ("[run]\nsteps = 3\nsteps = 4", "run.toml:3: this key is already set above"),
        ("[run]\n[text]\n[run]", "run.toml:3: this table already stands above"),
        ("run = {steps = 3}\nrun.seed = 3", "run.toml:2: this table was closed above"),
        ("[run]\nname = 'a\n", "run.toml:2: a string is not closed"),
        ('[run]\nname = "a\n', "run.toml:2: a string is not closed"),
        ('[run]\nname = "a', "run.toml:2: a string is not closed"),
        ("[run]\nname = '''a\n\n", "run.toml:2: a string is not closed"),
        ('[run]\nname = """a\n\n', "run.toml:2: a string is not closed"),
        ("\nx = " + "9" * 5000, "run.toml:2: a number is too long"),
        ("x = " + "[" * 50_000, "run.toml:1: values are nested too deeply"),
    ],
)
def test_a_syntax_error_says_its_line(tmp_path, text, said):
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "{a=" * 100_000, "run.toml:1: values are nested too deeply"),
        ("a" + ".a" * 100_000 + " = 1", "run.toml:1: values are nested too deeply"),
        ("[" + "a." * 100_000 + "a]", "run.toml:1: values are nested too deeply"),
        (GOOD * 20_000, "run.toml:1: source: 20,000 sources, at most 4,096 can be mixed"),
        ("".join(f"k{i} = 1\n" for i in range(50_000)), "run.toml:1: 50,001 mistakes; the first 100 are listed"),
    ],
)
def test_a_hostile_file_is_refused_in_seconds(tmp_path, text, said):
    began = time.process_time()
    assert problems(tmp_path, text)[0].startswith(said)
    assert time.process_time() - began < 5


def test_text_that_is_not_utf8_says_its_line(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"[run]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match=r"run\.toml:2: the text is not UTF-8"):
        load_config(tmp_path / "run.toml", [], {})


def test_the_mark_that_some_editors_put_first_is_no_mistake(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config(tmp_path / "run.toml", [], {}).source[0].spec == "sample:prose"


def test_a_missing_file_is_one_sentence_with_the_nearest_name(tmp_path):
    (tmp_path / "quickstart.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"quickstrat\.toml does not exist, did you mean .*/quickstart\.toml\?"):
        load_config(tmp_path / "quickstrat.toml", [], {})
    with pytest.raises(ConfigError, match=r"does not exist; neither does the folder .*nowhere"):
        load_config(tmp_path / "nowhere" / "run.toml", [], {})


def test_what_is_no_ordinary_small_file_is_refused_without_being_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * ((1 << 20) + 1))
    for name, said in [
        ("pipe.toml", "not a regular file"),
        (".", "not a regular file"),
        ("large.toml", "at most 1,048,576 are read"),
    ]:
        with pytest.raises(ConfigError, match=said):
            load_config(tmp_path / name, [], {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "a\0b", [], {})


def test_a_file_of_exactly_the_largest_size_is_read(tmp_path):
    (tmp_path / "run.toml").write_bytes(GOOD.encode().ljust((1 << 20) - 1, b"#") + b"\n")
    assert load_config(tmp_path / "run.toml", [], {}).source[0].spec == "sample:prose"


@pytest.mark.parametrize(
    ("workers", "said"),
    [('"many"', 'expected an integer such as 2, found the string "many"'), ("-1", "must be at least 0 and at most 256, found -1")],
)  # fmt: skip
def test_a_key_that_takes_a_number_or_a_word_has_one_problem(tmp_path, workers, said):
    path = tmp_path / "rl.toml"
    path.write_text(f'[rollouts]\n[[env]]\nspec = "python:a.py:play"\nworkers = {workers}\n')
    with pytest.raises(ConfigError) as found:
        load_any_config(path, (), {})
    assert found.value.problems == (f"{path}:4: env.0.workers: {said}",)


def test_keys_of_an_orchestrator_table_are_answered_with_their_place(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text("[orchestrator]\ndump_raw_rollouts = true\ngather_chunk_size = 128\nuse_process_pool = true\nbatchsize = 3\n[[orchestrator.env]]\nid = 'x'\n")  # fmt: skip
    with pytest.raises(ConfigError) as found:
        load_any_config(path, (), {})
    said = [line.partition("rl.toml:")[2] for line in found.value.problems]
    assert [line.partition(": ")[2].partition(": ")[0] for line in said] == [
        "orchestrator", "orchestrator.dump_raw_rollouts", "orchestrator.gather_chunk_size", "orchestrator.use_process_pool", "orchestrator.batchsize",
        "orchestrator.env",
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in said] == ["1", "2", "3", "4", "5", "6"]
    for line, place in zip(said, ("[policy], [engine], [[env]], [rollouts]", "rollouts.keep", "rollouts are processed when they arrive", "env.workers", "did you mean batch_size?", "[[env]]"), strict=True):  # fmt: skip
        assert place in line


@pytest.mark.parametrize(
    ("written_as", "meant"),
    [("save_every", "checkpoint_every"), ("logging_steps", "log_every"), ("max_steps", "steps")],
)
def test_the_words_of_other_trainers_are_answered_with_the_key_that_means_the_same(tmp_path, written_as, meant):
    (sentence,) = problems(tmp_path, f"[run]\n{written_as} = 5\n" + GOOD)
    assert sentence == f"run.toml:2: run.{written_as}: unknown key, did you mean {meant}?"


def test_the_name_of_an_environment_s_file_may_be_longer_than_names_of_files_are(tmp_path):
    (tmp_path / "rl.toml").write_text(f'[[env]]\nspec = "python:{"a" * 3000}.py:play"\n')
    config = load_any_config(tmp_path / "rl.toml", (), {})
    assert config.env[0].spec.endswith(".py:play")
