"""The documents are true: snippets run, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = dict(re.findall(r"<!-- test: ([\w-]+) -->\n```python\n(.*?)```", README, re.DOTALL))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def desk(tmp_path):
    """A folder such as the README's reader has: some jsonl, some parquet, a tokenizer."""
    (tmp_path / "web").mkdir()
    (tmp_path / "code").mkdir()
    for shard in range(3):
        lines = (
            json.dumps({"text": f"page {shard}.{i}. " + "water runs to the wheel. " * (i % 23)}) for i in range(120)
        )
        (tmp_path / "web" / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    texts = [f"def f{i}():\n    return {i}\n" * (1 + i % 17) for i in range(300)]
    pq.write_table(
        pa.table({"content": texts, "stars": list(range(300))}), tmp_path / "code" / "0.parquet", row_group_size=64
    )
    from headrace.text import train_bpe

    (tmp_path / "tokenizer.json").write_bytes(train_bpe(texts[:50] + ["water runs to the wheel. page"] * 9, 400))
    return tmp_path


def test_every_python_snippet_of_the_readme_is_tested():
    assert len(SNIPPETS) == README.count("```python")
    assert {"my-jsonl", "mixture", "resume", "oracle"} <= SNIPPETS.keys()


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_of_the_readme_runs_as_printed(name, desk, warm):
    start = subprocess.run if name == "my-jsonl" else warm.run
    done = start(
        [sys.executable, "-W", "error", "-c", SNIPPETS[name]],
        cwd=desk,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_no_figure_was_left_to_be_filled_in(document):
    assert not re.findall(r"\b[A-Z]+_(?:FIGURE|TABLE|MACHINE)\b|\bFILLERS\b|\bTODO\b", document.read_text())


def test_verbs_and_modules_named_in_the_documents_exist(headrace):
    verbs = {
        "run", "check", "prepare", "provide", "spool", "plan", "step", "find", "diff", "inspect", "metrics", "env", "report", "gram",
        "replay",
    }  # fmt: skip
    assert verbs <= set(re.findall(r"headrace (\w+)", README)), "every verb is shown"
    listed = headrace("--help").stdout
    assert all(verb in listed for verb in verbs)
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    for module in re.findall(
        r"`((?:loader|rollouts|mix|sources|text|ledger|spool|reduce|jobs|metrics|train|order|dash)\.\w+)`", architecture
    ):
        assert (ROOT / "src" / "headrace" / (module.replace(".", "/") + ".py")).exists(), module


def test_the_quickstart_of_the_readme_is_the_one_in_examples(repository):
    assert "examples/quickstart.toml" in README
    assert (repository / "examples" / "quickstart.toml").is_file()


# ------------------------------------------------------------------------------------------- docs/names.md


def rows_of_names() -> list[tuple[str, str, str]]:
    """(there, here, notes) of every row of the tables of docs/names.md."""
    lines = (ROOT / "docs" / "names.md").read_text().splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    assert all(len(row) == 3 for row in rows), [row for row in rows if len(row) != 3]
    return [row for row in rows if row[1] != "here" and set(row[0]) != {"-"}]


NAMES = rows_of_names()


def resolved(dotted: str) -> Any:
    """What a dotted name leads to, whether its parts are modules or attributes."""
    found: Any = importlib.import_module("headrace")
    done = "headrace"
    for part in dotted.split(".")[1:]:
        done += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(done)
    return found


@cache
def key_exists(key: str) -> bool:
    """Whether `[table] key` or `[[table]] key` is in the schema of some kind of run."""
    from headrace.jobs.config import LoaderSection, RunSection, SourceSection, SpoolSection, TextSection, TrainSection
    from headrace.jobs.streams_config import CellTrainSection, LedgerSection, StreamsSection

    tables = {
        "[run]": (RunSection,), "[[source]]": (SourceSection,), "[text]": (TextSection,), "[loader]": (LoaderSection,), "[spool]": (SpoolSection,),
        "[train]": (TrainSection, CellTrainSection), "[streams]": (StreamsSection,), "[ledger]": (LedgerSection,),
    }  # fmt: skip
    table, _, name = key.partition(" ")
    return any(name in section.model_fields for section in tables.get(table, ()))


@cache
def metrics() -> Any:
    import headrace as package
    from headrace.metrics import SpecBook, registered_specs

    for module in pkgutil.walk_packages(package.__path__, "headrace."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return SpecBook(registered_specs())


def problem_with(span: str, headrace: Any) -> str | None:
    """What is wrong with a name that docs/names.md gives; None if it is as the page says."""
    if called := re.fullmatch(r"(headrace(?:\.\w+)+)\(((?:\w+=(?:, )?)+)\)", span):
        parameters = inspect.signature(resolved(called[1])).parameters
        missing = [name for name in re.findall(r"(\w+)=", called[2]) if name not in parameters]
        return f"{called[1]} takes no {', '.join(missing)}" if missing else None
    if re.fullmatch(r"headrace(\.\w+)+", span):
        try:
            resolved(span)
        except (ImportError, AttributeError) as error:
            return str(error)
        return None
    if command := re.fullmatch(r"headrace (\w+)(?: (\w+))?(?: (--[\w-]+))?", span):
        words = [word for word in command.groups()[:2] if word is not None]
        told = headrace(*words, "--help")
        if told.returncode:
            return f"there is no verb {' '.join(words)}"
        has = command[3] is None or re.search(rf"(?<![\w-]){re.escape(command[3])}(?![\w-])", told.stdout)
        return None if has else f"headrace {' '.join(words)} has no {command[3]}"
    if span.startswith("["):
        return None if key_exists(span) else "there is no such key"
    if span.startswith(("examples/", "docs/")):
        return None if (ROOT / span).is_file() else "there is no such file"
    if span.isupper():
        from headrace.jobs import config_layers

        known = {"DATASET_SPECS", *config_layers._ENVIRONMENT}
        return None if span in known else "no variable of that name is read"
    return None if metrics().find(re.sub(r"<(\w+)>", r"\1", span)) is not None else "no such metric is registered"


@pytest.mark.parametrize("row", NAMES, ids=lambda row: re.sub(r"[^\w/.]+", "-", row[0])[:50])
def test_what_the_page_of_names_gives_exists(row, headrace):
    there, here, notes = row
    spans = re.findall(r"`([^`]+)`", here) + re.findall(r"`(headrace\.[^`]+)`", notes)
    assert spans or (here.startswith("not here") and notes), f"{there}: say where it is, or `not here` with the reason"
    problems = [f"{span}: {problem}" for span in spans if (problem := problem_with(span, headrace)) is not None]
    assert not problems


def test_the_page_of_names_is_linked_and_covers_five_designs():
    assert "(docs/names.md)" in README
    assert (ROOT / "docs" / "names.md").read_text().count("\n## ") == 5
    assert len(NAMES) > 100


@pytest.mark.parametrize(
    "wrong",
    [
        "headrace.NoSuchName", "headrace.Loader.no_such_method", "headrace.DatasetConsumer(no_such=)", "[text] no_such", "[no_such] seq_len",
        "[[source]] no_such", "headrace replay --no-such", "headrace nosuch", "stream_mixing/no_such", "NO_SUCH_VARIABLE", "examples/no_such.toml",
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_would_be_found(wrong, headrace):
    assert problem_with(wrong, headrace) is not None
