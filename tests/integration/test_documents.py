"""The documents are true: snippets run, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cyclopts import CycloptsError

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
WITH_A_TEST_OF_ITS_OWN = {"docs/guides/rl.md"}
"""Pages whose snippets need each other."""
SNIPPET_PAGES = [page for page in PAGES if str(page.relative_to(ROOT)) not in WITH_A_TEST_OF_ITS_OWN]
SNIPPETS = {
    f"{page.stem}-{name}": code
    for page in SNIPPET_PAGES
    for name, code in re.findall(r"<!-- test: ([\w-]+) -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


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


def test_every_python_snippet_is_tested():
    assert sum(page.read_text().count("```python") for page in SNIPPET_PAGES) == len(SNIPPETS)
    assert {
        "README-readme",
        "text-mixture",
        "text-resume",
        "testing-oracle",
        "getting-started-own-loop",
    } <= SNIPPETS.keys()


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs_as_printed(name, desk, warm):
    start = subprocess.run if name == "README-readme" else warm.run
    done = start(
        [sys.executable, "-W", "error", "-c", SNIPPETS[name]],
        cwd=desk,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def reference() -> Any:
    """The module that generates the reference pages of the site."""
    spec = importlib.util.spec_from_file_location("site_reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated(reference) -> dict[Path, str]:
    """Path and text of every generated page."""
    return {DOCS / path: text for path, text in reference.pages().items()}


def prose_of(markdown: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)


def anchors(markdown: str) -> set[str]:
    """The anchors that MkDocs gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose_of(markdown), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document, generated):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", prose_of(document.read_text())):
        if target.startswith(("http:", "https:")):
            continue
        path = (document.parent / target).resolve() if target else document
        assert path in generated or path.exists(), f"{name_of(document)} links to {target}"
        if anchor and path.suffix == ".md":
            found = anchors(generated.get(path) or path.read_text())
            assert anchor in found, f"{name_of(document)} links to {target}#{anchor}"


def test_the_version_is_the_same_everywhere():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {first[1], package} == {importlib.import_module("headrace").__version__}


def test_the_pictures_of_the_concepts_are_those_that_the_script_draws():
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {name: (DOCS / "img" / name).read_text() for name in module.drawings()} == module.drawings()


def test_every_guide_is_in_the_navigation(reference):
    assert {page.stem for page in (DOCS / "guides").glob("*.md")} == set(reference.GUIDES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_figure_was_left_to_be_filled_in(document):
    assert not re.findall(r"\b[A-Z]+_(?:FIGURE|TABLE|MACHINE)\b|\bFILLERS\b|\bTODO\b", document.read_text())


def test_modules_named_in_the_architecture_exist():
    architecture = (DOCS / "architecture.md").read_text()
    rooms = "|".join(p.name for p in (ROOT / "src" / "headrace").iterdir() if p.is_dir() and p.name != "__pycache__")
    named = re.findall(rf"`((?:{rooms})\.\w+)`", architecture)
    assert len(named) > 40
    for module in named:
        path = ROOT / "src" / "headrace" / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), module


# -------------------------------------------------------------------------------------------- the reference


def test_every_public_name_is_in_the_reference(generated, reference):
    import headrace as package

    api = generated[DOCS / "reference" / "api.md"]
    names = set(package.__all__) - {"__version__", *reference.PACKAGES}
    assert names == set(re.findall(r"^::: headrace\.(\w+)$", api, re.MULTILINE))
    for room in reference.PACKAGES:
        page = generated[DOCS / "reference" / f"{room}.md"]
        shown = re.findall(rf"^(?:::: headrace\.{room}\.|## `)(\w+)`?$", page, re.MULTILINE)
        assert shown == list(importlib.import_module(f"headrace.{room}").__all__)


def test_every_argument_of_a_public_name_is_documented(reference):
    package = importlib.import_module("headrace")
    settings = {name.rpartition(".")[2]: _named(name) for name in reference.SETTINGS}
    unsaid = []
    for name in set(package.__all__) - {"__version__", *reference.PACKAGES}:
        value = getattr(package, name)
        if isinstance(value, type) and issubclass(value, (Exception, Enum)):
            continue
        words = f"{value.__doc__} {value.__init__.__doc__ if isinstance(value, type) else ''}"
        if is_dataclass(value):
            words += inspect.getsource(value)  # the string below each field
        for found in re.findall(r"`(\w+Settings)`", words):
            words += inspect.getsource(settings[found])
        arguments = [p.name for p in inspect.signature(value).parameters.values() if p.kind is not p.VAR_KEYWORD]
        unsaid += [f"{name}({argument})" for argument in arguments if not re.search(rf"\b{argument}\b", words)]
    assert not unsaid


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_config_key_is_in_the_reference(generated, reference):
    page = generated[DOCS / "reference" / "config.md"]
    for table in (
        "[run]",
        "[[source]]",
        "[[mix.change]]",
        "[text]",
        "[loader]",
        "[spool]",
        "[train]",
        "[streams]",
        "[ledger]",
    ):
        assert f"\n### {table}\n" in page, table
    for root in reference.config_roots():
        section = page.partition(f"## {root.__name__.removesuffix('Config')} config\n")[2].partition("\n## ")[0]
        for table, model in reference._tables(root):
            rows = section.partition(f"### {table}\n")[2].partition("\n### ")[0]
            keys = [key for key, field in model.model_fields.items() if not reference._nested(field.annotation)]
            assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == keys, table


def test_every_metric_and_every_verb_is_in_the_reference(generated, headrace):
    assert all(f"| `{key}` |" in generated[DOCS / "reference" / "metrics.md"] for key in metrics())
    commands = generated[DOCS / "reference" / "commands.md"]
    listed = re.findall(r"^│ (\w+) ", headrace("--help").stdout, re.MULTILINE)
    assert len(listed) > 12
    assert all(f"## headrace {verb}\n" in commands for verb in listed)
    assert "## headrace spool verify\n" in commands


def test_every_error_is_in_troubleshooting():
    from headrace import errors

    page = (DOCS / "troubleshooting.md").read_text()
    raised = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.HeadraceError)
    ]
    named = {error.__name__ for error in raised} - {"HeadraceError"}
    assert named <= set(re.findall(r"^### (\w+)$", page, re.MULTILINE))


# ------------------------------------------------------------------------------------------- console blocks


def shown_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every `headrace` command in a console block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
                words = shlex.split(line.rstrip("&"), comments=True)
                if "headrace" in words and words[0] != "pip":
                    found.append((name_of(page), words[words.index("headrace") + 1 :]))
    return found


def test_every_command_that_the_documents_show_can_be_parsed():
    from headrace.cli.app import app, with_settings

    shown = shown_commands()
    assert len(shown) > 30
    for page, words in shown:
        try:
            app.parse_args(with_settings(words), exit_on_error=False, print_error=False)
        except CycloptsError as error:
            pytest.fail(f"{page}: headrace {' '.join(words)}: {error}")


def test_getting_started_is_true(tmp_path, headrace, warm, until):
    page = (DOCS / "getting-started.md").read_text()
    config = re.search(r"<!-- file: run.toml -->\n```toml\n(.*?)```", page, re.DOTALL)
    assert config is not None
    (tmp_path / "run.toml").write_text(config[1])
    assert "run.toml is valid" in headrace("check", "run.toml", cwd=tmp_path).stdout
    shorter = ("--run.steps=4", "--run.checkpoint_every=2", "--text.seq_len=32", "--loader.global_batch_size=2")
    assert headrace("run", "run.toml", "--run.dir", "runs/straight", *shorter, cwd=tmp_path).returncode == 0
    command = [sys.executable, "-m", "headrace", "run", "run.toml", "--run.dir", "runs/killed", *shorter]
    process = warm.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: list((tmp_path / "runs/killed/checkpoints").glob("*.safetensors")) or process.poll() is not None)
    process.kill()
    process.wait()
    assert headrace("run", "--resume", "runs/killed", cwd=tmp_path).returncode == 0
    ends = [json.loads((tmp_path / "runs" / run / "summary.json").read_text()) for run in ("straight", "killed")]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["model_sha256"] == ends[1]["model_sha256"]


# ------------------------------------------------------------------------------------------- docs/coming-from.md


def rows_of_names() -> list[tuple[str, str, str]]:
    """(there, here, notes) of every row of the tables of docs/coming-from.md."""
    lines = (DOCS / "coming-from.md").read_text().splitlines()
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
    from headrace.runs.config.base import RunSection
    from headrace.runs.config.schema import LoaderSection, SourceSection, SpoolSection, TextSection, TrainSection
    from headrace.runs.config.streams import CellTrainSection, LedgerSection, StreamsSection

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


def parameters_of(dotted: str) -> set[str]:
    """Names of the arguments of a function or class, with those that it passes on to its settings."""
    from headrace.settings import LoaderSettings, TextSettings
    from headrace.spool import ConsumerSettings, ProviderSettings

    passed_on = {
        "headrace.DatasetConsumer": ConsumerSettings,
        "headrace.DataProviderBase": ProviderSettings,
        "headrace.Loader": LoaderSettings,
        "headrace.PreparedLoader": LoaderSettings,
        "headrace.TextDataset": TextSettings,
    }
    names = set(inspect.signature(resolved(dotted)).parameters)
    return names | ({f.name for f in fields(passed_on[dotted])} if dotted in passed_on else set())


def problem_with(span: str, headrace: Any) -> str | None:
    """What is wrong with a name that docs/coming-from.md gives; None if it is as the page says."""
    if called := re.fullmatch(r"(headrace(?:\.\w+)+)\(((?:\w+=(?:, )?)+)\)", span):
        missing = [name for name in re.findall(r"(\w+)=", called[2]) if name not in parameters_of(called[1])]
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
        from headrace.runs.config import loading as config_layers

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


def test_the_page_of_names_is_linked_and_covers_ten_designs():
    assert "(docs/coming-from.md)" in README
    assert (DOCS / "coming-from.md").read_text().count("\n## ") == 10
    assert len(NAMES) > 150


@pytest.mark.parametrize(
    "wrong",
    [
        "headrace.NoSuchName", "headrace.Loader.no_such_method", "headrace.DatasetConsumer(no_such=)", "[text] no_such", "[no_such] seq_len",
        "[[source]] no_such", "headrace replay --no-such", "headrace nosuch", "stream_mixing/no_such", "NO_SUCH_VARIABLE", "examples/no_such.toml",
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_would_be_found(wrong, headrace):
    assert problem_with(wrong, headrace) is not None


GUIDE = (ROOT / "docs" / "guides" / "rl.md").read_text()


def test_the_rl_guide_runs_as_printed(warm, tmp_path):
    found = {
        name: text for name, _, text in re.findall(r"<!-- test: ([\w-]+) -->\n```(\w+)\n(.*?)```", GUIDE, re.DOTALL)
    }
    (tmp_path / "digits.py").write_text(found["environment"])
    (tmp_path / "digits.toml").write_text(found["config"])
    assert GUIDE.count("```python") == 2
    for words in (
        ["run", "digits.toml"],
        ["step", "runs/digits", "2"],
        ["find", "runs/digits", "--task", "9"],
        ["report", "runs/digits"],
    ):
        done = warm.run(
            [sys.executable, "-m", "headrace", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    done = warm.run(
        [sys.executable, "-W", "error", "-c", found["arrivals"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.count("rollouts, mean reward") == 3, done.stderr
