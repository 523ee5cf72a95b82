"""For every config: it is written and read back unchanged; for every input: a config, or problems of one line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.runs.config.loading import load_config
from headrace.runs.config.schema import RunConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NAME = st.from_regex(r"[A-Za-z0-9_é][A-Za-z0-9_.é-]{0,63}", fullmatch=True)
POSITIVE = st.floats(min_value=5e-324, allow_infinity=False)
COUNT = st.integers(1, 1 << 70)


def table(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


SOURCES = st.fixed_dictionaries(
    {"spec": TEXT.map(lambda text: f"txt:a{text}")},
    optional={
        "weight": st.one_of(st.integers(1, 10**300), POSITIVE), "name": NAME, "text_key": TEXT, "max_rows": COUNT,
        "max_tokens": COUNT, "max_epochs": COUNT, "on_bad": st.sampled_from(["fail", "skip"]),
        "allow_symlinks": st.booleans(),
    },
)  # fmt: skip
CONFIGS = st.fixed_dictionaries(
    {"source": st.lists(SOURCES, min_size=1, max_size=4)},
    optional={
        "run": table(
            name=NAME, dir=TEXT, steps=st.integers(1, 1 << 40), seed=st.integers(0, (1 << 63) - 1), log_every=COUNT,
            sinks=st.lists(st.sampled_from(["wandb", "tensorboard"]), unique=True), stop_after=COUNT, deadline=POSITIVE,
        ),
        "text": table(
            tokenizer=TEXT, seq_len=st.integers(2, 1 << 20), pack=st.sampled_from(["best_fit", "concat"]),
            window_blocks=st.integers(1, 128), bos=st.booleans(), labels=st.sampled_from(["shifted", "hf"]),
        ),
        "loader": table(
            global_batch_size=st.integers(1, 1 << 20), lanes=st.integers(1, 1 << 16), tokenizer_workers=st.integers(0, 64),
            exhausted=st.sampled_from(["repeat", "drop", "stop_first"]),
        ),
        "train": table(
            lr=POSITIVE, betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2), threads=COUNT, compile=st.booleans(),
        ),
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "run.toml"


@given(values=CONFIGS)
@settings(max_examples=50, deadline=None)
def test_a_config_written_as_toml_reads_back_to_the_same_config(file, values):
    values = values | {
        "run": values.get("run", {}) | {"base": str(file.parent)}
    }  # where its paths start, else the reading sets it
    config = RunConfig.model_validate(values)
    file.write_text(config.to_toml(), encoding="utf-8", newline="")
    again = load_config(file, [], {})
    if any(
        re.search(r"\?\w+=", source.spec) for source in config.source
    ):  # the first reading lifts a spec's options into fields
        config = again
        file.write_text(config.to_toml(), encoding="utf-8", newline="")
        again = load_config(file, [], {})
    assert again == config
    assert again.to_toml() == config.to_toml()
    assert again.hash == config.hash


@given(specs=st.lists(st.text("ax?&=1", max_size=12), min_size=1, max_size=3))
def test_options_of_a_spec_are_lifted_once_and_for_all(file, specs):
    lines = [spec.replace("a", "weight").replace("x", "split") for spec in specs]
    try:
        config = load_config(None, [], {"DATASET_SPECS": "\n".join(f"txt:p{line}" for line in lines)})
    except ConfigError:
        return
    file.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(file, [], {}) == config


# Each of these is one mistake, whatever stands beside it.
MISTAKES = {
    "run": [
        "stepps = 3",
        "seed = -1",
        "dir = 3",
        "deadline = inf",
        "sinks = ['w']",
        "keep_checkpoints = 0",
        "lanes = 3",
    ],
    "text": ["pack = 'x'", "bos = 'yes'", "labels = 1", "sek_len = 4", "window_blocks = 0", "eos = 1.0"],
    "loader": ["lanes = 0", "exhausted = 'go'", "pin_memory = 1", "data_loader_workers = -1", "zzz = 1", "lr = 1"],
    "train": ["lr = 'x'", "betas = 3", "model = 'gpt'", "threads = 0", "min_lr_ratio = 1.5", "device = 'gpu'"],
}
EVERY_MISTAKE = [(name, line) for name, lines in MISTAKES.items() for line in lines]


@given(chosen=st.sets(st.sampled_from(EVERY_MISTAKE), min_size=1), order=st.permutations(list(MISTAKES)))
@settings(max_examples=60, deadline=None)
def test_n_mistakes_give_n_problems_each_with_its_own_line_and_key(file, chosen, order):
    lines = ["[[source]]", 'spec = "sample:prose"']
    expected = []
    for name in order:
        lines.append(f"[{name}]")
        for _, line in sorted(c for c in chosen if c[0] == name):
            lines.append(line)
            expected.append(f"{file}:{len(lines)}: {name}.{line.split(' = ')[0]}")
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_config(file, [], {})
    assert [re.match(r".*?:\d+: \w+\.\w+", p)[0] for p in caught.value.problems] == expected


KEYS = st.sampled_from(
    ["run", "source", "text", "loader", "train", "streams", "sources", "lr", "spec", "weight", "betas", "sinks", "0", "1",
     "seq_len", "context_len", "name", "pack", "window_blocks", "data_loader_workers", "wieght", "é", "\n", ""]
)  # fmt: skip
VALUES = st.sampled_from(
    ["1", "-1", "0", "0.5", "nan", "true", '"a"', '"txt:a?weight=0&x=1"', "[]", "[0.1, 0.2]", "{}", "{spec = 'a:b'}", "[{}]",
     "1979-05-27", "0x" + "f" * 5000, '"\\n\\u001b"', "[[1], {lr = 1}]", "sample:prose", "\udc80", "\0", "9" * 5000]
)  # fmt: skip


def quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_]+", name) else '"' + name.replace("\n", "\\n") + '"'


@st.composite
def scraps(draw: Any) -> str:
    """Something like a config file, with everything wrong in it."""
    lines = []
    for _ in range(draw(st.integers(0, 6))):
        dotted = ".".join(map(quoted, draw(st.lists(KEYS, min_size=1, max_size=3))))
        lines.append(draw(st.sampled_from([f"[{dotted}]", f"[[{dotted}]]", *[f"{dotted} = {draw(VALUES)}"] * 4])))
    return "\n".join(lines)


OVERRIDES = st.lists(
    st.one_of(
        st.lists(KEYS, min_size=1, max_size=4).map(lambda parts: "--" + ".".join(parts)),
        VALUES,
        st.text("-=.:# 1\n\x1bé", max_size=5),
    ),
    max_size=6,
)
ENVIRONMENTS = st.dictionaries(st.sampled_from(["CONTEXT_LEN", "DATASET_SPECS", "DATA_LOADER_WORKERS"]), VALUES)
JARGON = re.compile(r"Input should|validation error|pydantic|type=|Traceback|NoneType|dict\b|None\b")


def config_or_problems(*arguments: Any) -> RunConfig | tuple[str, ...]:
    try:
        return load_config(*arguments)
    except ConfigError as error:
        return error.problems


@given(text=scraps(), overrides=OVERRIDES, env=ENVIRONMENTS)
def test_whatever_is_written_the_answer_is_a_config_or_problems_of_one_plain_line_each(file, text, overrides, env):
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = config_or_problems(file, overrides, env)
    if isinstance(found, RunConfig):
        file.write_text(found.to_toml(), encoding="utf-8")
        assert load_config(file, [], {}) == found
        return
    assert found
    assert len(set(found)) == len(found)
    for problem in found:
        assert problem.isprintable()
        assert not JARGON.search(problem), problem
        assert len(problem) < 600
        if not overrides and not env:
            assert re.match(re.escape(str(file)) + r":\d+: \S", problem), problem
