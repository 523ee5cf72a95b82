"""Where a value comes from, what is filled in, and what the checked config can say about itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import ValidationError

from headrace.errors import ConfigError
from headrace.runs.config.loading import BUILT_IN, load_config
from headrace.runs.config.schema import LoaderSection, RunConfig, TextSection
from headrace.runs.folder import RunFolder
from headrace.settings import LoaderOptions, LoaderSettings, TextOptions, TextSettings
from headrace.sources import Source

SOURCE = '[[source]]\nspec = "sample:prose"\n'
QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.toml"


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config_of(folder: Path, text: str = SOURCE, *overrides: str, env: dict[str, str] | None = None) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(path, overrides, env or {})


def test_override_beats_environment_beats_file_beats_default(tmp_path):
    text = SOURCE + "[text]\nseq_len = 100\n"
    env = {"CONTEXT_LEN": "200"}
    assert config_of(tmp_path).text.seq_len == 1024
    assert config_of(tmp_path, text).text.seq_len == 100
    assert config_of(tmp_path, text, env=env).text.seq_len == 200
    assert config_of(tmp_path, text, "--text.seq_len", "300", env=env).text.seq_len == 300


def test_only_the_named_variables_are_read_and_empty_ones_count_as_unset(tmp_path):
    env = {
        "TOKENIZER_WORKERS": "3",
        "PREFETCH_BATCHES": "0",
        "DATA_LOADER_WORKERS": "0",
        "CONTEXT_LEN": " ",
        "LANES": "7",
    }
    config = config_of(tmp_path, env=env)
    assert (config.loader.tokenizer_workers, config.loader.prefetch_batches, config.loader.lanes) == (3, 0, "auto")
    assert config.text.seq_len == 1024


def test_dataset_specs_stand_in_for_sources_and_are_refused_beside_them(tmp_path):
    env = {"DATASET_SPECS": "jsonl:a,b.jsonl?weight=0.25; ;\n parquet:code/?text_key=content&max_rows=5 "}
    sources = config_of(tmp_path, "", "--source.1.weight", "0.75", env=env).source
    assert [(s.spec, s.weight, s.text_key, s.max_rows) for s in sources] == [
        ("jsonl:a,b.jsonl", 0.25, "text", None),
        ("parquet:code/", 0.75, "content", 5),
    ]
    with pytest.raises(ConfigError, match=r"DATASET_SPECS: source: the file has \[\[source\]\] too"):
        config_of(tmp_path, env=env)
    with pytest.raises(ConfigError, match=r"DATASET_SPECS: source\.0\.spec\?weight: must be at least 0, found -1"):
        config_of(tmp_path, "", env={"DATASET_SPECS": "txt:a?weight=-1"})


def test_a_question_mark_of_a_pattern_stays_in_the_spec(tmp_path):
    text = '[[source]]\nspec = "txt:part-?.txt"\n[[source]]\nspec = "txt:p?/x?weight=0.5"\n'
    assert [(s.spec, s.weight) for s in config_of(tmp_path, text).source] == [
        ("txt:part-?.txt", 1.0),
        ("txt:p?/x", 0.5),
    ]


def test_the_options_of_a_hub_dataset_are_keys_of_a_source(tmp_path):
    line = "hf:org/name?split=test&config=en&cache=/scratch"
    for source in (
        config_of(tmp_path, f'[[source]]\nspec = "{line}"\n').source[0],
        config_of(
            tmp_path, '[[source]]\nspec = "hf:org/name"\nsplit = "test"\nconfig = "en"\ncache = "/scratch"\n'
        ).source[0],
        config_of(tmp_path, "", env={"DATASET_SPECS": line}).source[0],
    ):
        assert (source.spec, source.name, source.split, source.config, source.cache) == (
            "hf:org/name", "name", "test", "en", "/scratch"
        )  # fmt: skip


def test_dataset_specs_may_be_a_json_list(tmp_path):
    env = {"DATASET_SPECS": ' ["jsonl:a;b.jsonl?weight=0.25", "parquet:code/"]'}
    assert [(s.spec, s.weight) for s in config_of(tmp_path, "", env=env).source] == [
        ("jsonl:a;b.jsonl", 0.25),
        ("parquet:code/", 1.0),
    ]
    for text in ("[", "[1]", '[["txt:a"]]', '["txt:a", ""]', '["txt:a"] x'):
        with pytest.raises(
            ConfigError, match=r"\ADATASET_SPECS: source: expected a JSON list of specs such as [^\n]*\Z"
        ):
            config_of(tmp_path, "", env={"DATASET_SPECS": text})
    with pytest.raises(
        ConfigError, match=r"DATASET_SPECS: source\.0\.spec\?wieght: unknown option, did you mean weight"
    ):
        config_of(tmp_path, "", env={"DATASET_SPECS": '["txt:a?wieght=1"]'})


def test_an_override_of_a_spec_brings_its_options_along(tmp_path):
    text = SOURCE + "weight = 0.1\n"
    assert config_of(tmp_path, text, "--source.0.spec", "txt:a?weight=.2").source[0].weight == 0.2
    assert (
        config_of(tmp_path, text, "--source.0.spec=txt:a?weight=.2", "--source.0.weight", ".3").source[0].weight == 0.3
    )
    assert config_of(tmp_path, text, "--source.0", "{spec = 'txt:a?weight=0.4'}").source[0].weight == 0.4


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["--train.lr", "3e-4"], "train.lr", 3e-4),
        (["--train.lr=3e-4"], "train.lr", 3e-4),
        (["--train.lr", "1"], "train.lr", 1.0),
        (["--train.lr", ".5"], "train.lr", 0.5),
        (["--train.betas", "[0.8, 0.9]"], "train.betas", (0.8, 0.9)),
        (["--train.betas.0", "0.8", "--train.betas.1", "0.9"], "train.betas", (0.8, 0.9)),
        (["--run.sinks.0", "wandb"], "run.sinks", ("wandb",)),
        (["--text.bos"], "text.bos", True),
        (["--text.bos", "--text.eos", "false"], "text.eos", False),
        (["--text.bos", "true"], "text.bos", True),
        (["--text.pack", "concat"], "text.pack", "concat"),
        (["--text.pack", '"concat"'], "text.pack", "concat"),
        (["--run.name", "7"], "run.name", "7"),
        (["--run.name", "2024-05-01"], "run.name", "2024-05-01"),
        (["--run.dir", "a=b\nc=1"], "run.dir", "a=b\nc=1"),
        (["--run.dir=a=b"], "run.dir", "a=b"),
        (["--run.steps", "1_000"], "run.steps", 1000),
        (["--run.steps", "1", "--run.steps", "2"], "run.steps", 2),
        (["--train", "{lr = 1}"], "train.lr", 1.0),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(tmp_path, overrides, path, value):
    table, key = path.split(".")
    found = getattr(getattr(config_of(tmp_path, SOURCE, *overrides), table), key)
    assert found == value
    assert type(found) is type(value)


def test_a_run_needs_no_file(tmp_path):
    config = load_config(None, ["--source.0.spec", "sample:prose", "--source.1.spec", "sample:code"], {})
    assert [s.name for s in config.source] == ["prose", "code"]
    with pytest.raises(ConfigError, match=r"^command line: source: missing"):
        load_config(None, [], {})


def test_defaults_are_filled_in(tmp_path):
    config = config_of(tmp_path, SOURCE, "--run.name", "first")
    assert config.run.dir == "runs/first"
    assert config.loader.tokenizer_workers is None  # chosen where the run starts: configs move between machines
    assert config.kind == "lm"
    resolved = config.resolved()
    assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved
    assert resolved["train"]["betas"] == [0.9, 0.95]
    assert resolved["run"]["stop_after"] is None


def test_a_config_cannot_be_changed(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(ValidationError):
        config.train.lr = 1.0
    assert hash(config) == hash(config_of(tmp_path))


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["sample:prose", "sample:code"], ["prose", "code"]),
        (["jsonl:data/web/*.jsonl.zst", "txt:books/", "txt:./a b.txt", "txt:*.txt"], ["web", "books", "a-b", "source"]),
        (["txt:a", "txt:a", "txt:a"], ["a", "a-2", "a-3"]),
        (["txt:a", "txt:a", "txt:x?name=a-2"], ["a", "a-3", "a-2"]),
        (["txt:x?name=w", "txt:y?name=w"], ["w", "w-2"]),
        (["txt:" + "é" * 99, "txt:" + "é" * 99], ["é" * 48, "é" * 48 + "-2"]),
    ],
)
def test_sources_get_names_from_their_specs_that_are_unique_and_stable(specs, names):
    config = load_config(None, [], {"DATASET_SPECS": "\n".join(specs)})
    assert [s.name for s in config.source] == names


def test_the_hash_follows_what_changes_the_result_and_nothing_else(tmp_path):
    base = config_of(tmp_path).hash
    assert len(base) == 12
    assert int(base, 16) >= 0
    for same in (
        ["--run.name", "other"], ["--run.dir", "x"], ["--run.log_every", "3"], ["--run.sinks", '["wandb"]'],
        ["--run.deadline", "9"], ["--run.checkpoint_every", "3"], ["--run.stop_after", "3"],
        ["--loader.tokenizer_workers", "1"], ["--loader.prefetch_batches", "5"], ["--text.tokenizer", "bytes"],
    ):  # fmt: skip
        assert config_of(tmp_path, SOURCE, *same).hash == base, same
    others = [
        config_of(tmp_path, SOURCE, *other).hash
        for other in (
            ["--run.seed", "1"], ["--run.steps", "201"], ["--source.0.weight", "2"], ["--text.seq_len", "64"],
            ["--loader.lanes", "24"], ["--train.lr", "1"], ["--text.tokenizer", "sample"], ["--text.shuffle", "false"],
        )
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1


def test_the_hash_is_the_same_in_another_process():
    code = "import sys, pathlib, headrace.runs.config.loading as c; print(c.load_config(pathlib.Path(sys.argv[1]), [], {}).hash)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(QUICKSTART)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == load_config(QUICKSTART, [], {}).hash


def test_the_quickstart_is_the_example_of_the_docs():
    config = load_config(QUICKSTART, [], {})
    assert [(s.spec, s.weight) for s in config.source] == [("sample:prose", 0.7), ("sample:code", 0.3)]
    assert (config.run.name, config.run.steps, config.run.seed) == ("quickstart", 200, 7)
    assert (config.text.tokenizer, config.text.seq_len, config.text.pack) == ("sample", 256, "best_fit")
    assert (config.loader.global_batch_size, config.loader.tokenizer_workers, config.loader.prefetch_batches) == (
        24,
        2,
        2,
    )
    assert (config.train.model, config.train.lr) == ("gpt-tiny", 3e-3)
    for world in (1, 2, 3, 4, 6, 8, 12, 24):  # the numbers that its comment names
        config.check_world_size(world)


def test_a_world_size_must_divide_the_batch_and_the_error_lists_those_that_do(tmp_path):
    config = config_of(tmp_path, SOURCE, "--loader.global_batch_size", "18")
    for world in (1, 2, 3, 6, 9, 18):
        config.check_world_size(world)
    for world in (0, -1, 4, 5, 48):
        with pytest.raises(
            ConfigError, match=rf"^loader\.global_batch_size: {world} ranks .* start 1, 2, 3, 6, 9, 18 ranks"
        ):
            config.check_world_size(world)


def test_a_copy_of_a_config_under_another_name_gets_a_folder_of_its_own(tmp_path):
    text = config_of(tmp_path, SOURCE, "--run.name", "first").to_toml()
    assert config_of(tmp_path, text, "--run.name", "second").run.dir == "runs/second"


def test_importing_the_config_brings_neither_numpy_nor_torch_nor_pyarrow():
    code = "import sys, headrace.runs.config.loading; print([m for m in ('numpy', 'torch', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_one_line_spec_means_in_toml_what_it_means_in_python(tmp_path):
    line = "jsonl:a?text_key=x%2By+z%26"
    assert config_of(tmp_path, f'[[source]]\nspec = "{line}"\n').source[0].text_key == "x+y+z&"
    assert config_of(tmp_path, "", env={"DATASET_SPECS": line}).source[0].text_key == "x+y+z&"
    assert Source.parse(line).text_key == "x+y+z&"


def test_a_txt_source_says_in_a_kept_config_what_its_documents_are(tmp_path):
    config = config_of(tmp_path, '[[source]]\nspec = "txt:books"\n[[source]]\nspec = "txt:logs?split=line"\n')
    assert [s.split for s in config.source] == ["file", "line"]
    assert 'split = "file"' in config.to_toml()
    with pytest.raises(
        ConfigError, match=r"run.toml:2: source.0.spec\?split: expected file, paragraph or line for a txt source, found"
    ):
        config_of(tmp_path, '[[source]]\nspec = "txt:books?split=word"\n')


def test_a_run_folder_of_0_1_keeps_reading_txt_files_line_by_line(tmp_path):
    kept = '[run]\nname = "r"\n[[source]]\nspec = "jsonl:a"\n[[source]]\nspec = "txt:books"\n'
    lines = config_of(tmp_path, kept.replace("books", "books?split=line"))
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_text(kept)
    (tmp_path / "r" / "run.json").write_text("{}")
    reopened = RunFolder.reopen(tmp_path / "r").text_config
    assert [s.split for s in reopened.source] == [None, "line"]
    assert reopened.hash == lines.hash  # as 0.1 hashed it, which had no other way


def test_paths_of_a_config_start_at_its_folder_and_those_of_overrides_at_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "jobs" / "web").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tokenizer.json").write_text("{}")
    text = '[[source]]\nspec = "jsonl:web/*.jsonl"\n[text]\ntokenizer = "t.json"\n'
    monkeypatch.chdir(tmp_path / "here")
    config = config_of(tmp_path / "jobs", text)
    assert config.run.base == str(tmp_path / "jobs")
    assert (config.source[0].spec, config.text.tokenizer) == ("jsonl:web/*.jsonl", "t.json")
    again = config_of(tmp_path, config.to_toml())
    assert again == config  # a kept config says where its paths start, wherever it lies
    assert again.hash == config_of(tmp_path / "here", text).hash
    other = config_of(
        tmp_path / "jobs", text, "--source.0.spec", "txt:a.txt?weight=2", "--text.tokenizer", "tokenizer.json"
    )
    assert other.source[0].spec == f"txt:{tmp_path}/here/a.txt"
    assert other.text.tokenizer == str(tmp_path / "here" / "tokenizer.json")
    assert config_of(tmp_path / "jobs", text, "--text.tokenizer", "org/name").text.tokenizer == "org/name"
    named = config_of(tmp_path / "jobs", '[run]\nbase = "../data"\n' + text)
    assert named.run.base == str(tmp_path / "data")
    spooled = config_of(tmp_path / "jobs", text, "--spool.enabled")
    assert spooled.spool_dir == str(tmp_path / "here" / "runs" / "run" / "spool")


def test_a_config_whose_paths_start_at_the_working_folder_is_told_what_to_write(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r'run.toml:2: source.0.spec: paths of a config start at its folder.*set run.base = "..", or'
    ):
        config_of(tmp_path / "jobs", '[[source]]\nspec = "jsonl:data/*.jsonl"\n')


def test_the_built_in_config_is_found_by_name_and_is_the_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("quickstart"), [], {})
    assert (config.run.name, config.run.base) == ("quickstart", str(tmp_path))
    example = Path(__file__).parents[3] / "examples" / "quickstart.toml"
    assert BUILT_IN["quickstart"].read_text() == example.read_text()
    (tmp_path / "quickstart").write_text(SOURCE + '[run]\nname = "mine"\n')
    assert load_config(Path("quickstart"), [], {}).run.name == "mine"


def test_a_default_of_toml_is_that_of_python():
    toml = {name: f.default for section in (TextSection, LoaderSection) for name, f in section.model_fields.items()}
    del toml["global_batch_size"], toml["tokenizer"]  # Python has no default for the first, and [text] alone the second
    python = {f.name: f.default for settings in (TextSettings, LoaderSettings) for f in fields(settings)}
    assert toml == {name: python[name] for name in toml}


@pytest.mark.parametrize(("settings", "options"), [(TextSettings, TextOptions), (LoaderSettings, LoaderOptions)])
def test_editors_know_every_setting_by_name_and_type(settings, options):
    assert get_type_hints(options) == get_type_hints(settings)
