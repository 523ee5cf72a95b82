"""The documents are true: snippets run, links lead somewhere, commands exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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
