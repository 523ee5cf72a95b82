"""One very long document takes a bounded amount of memory beside its text and its ids, or is named before it is encoded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headrace.errors import DataError
from headrace.loader import Loader, TextDataset
from headrace.text import pieces, train_bpe

MEMORY = """
import resource, sys
from headrace.loader import TextDataset
from headrace.loader.windows import WindowStart

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def window(spec):
    data = TextDataset([spec], tokenizer="tok.json", engine=sys.argv[1], seq_len=128, lanes=1, window_blocks=4, cache="cache")
    return data.makers[0].make(0, WindowStart(0, 0, 0))[0]

window("txt:short.txt?split=line")
before = peak()
window("txt:long.txt?split=line")
print(peak() - before)
"""


@pytest.mark.parametrize(("engine", "megabytes", "limit"), [("tokenizers", 8, 220), ("fastokens", 64, 700)])
def test_a_long_line_takes_no_more_memory_than_a_few_times_its_size(tmp_path, engine, megabytes, limit):
    if engine != "tokenizers":
        pytest.importorskip(engine, reason="an optional encoder")
    words = "the quick brown fox jumps over the lazy dog, and more words here. "
    (tmp_path / "tok.json").write_bytes(train_bpe([words] * 50, 500))
    (tmp_path / "short.txt").write_text(words)
    (tmp_path / "long.txt").write_text(words * (megabytes * 1_000_000 // len(words)))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, engine], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < limit


@pytest.fixture
def unbroken(tmp_path, monkeypatch):
    """A source in which one document has no place to cut and is longer than may be encoded at once."""
    monkeypatch.setattr(pieces, "LONGEST_PIECE", 2000)
    monkeypatch.setattr("headrace.loader.windows.LONGEST_PIECE", 2000)
    monkeypatch.setattr(pieces, "PIECE", 100)
    (tmp_path / "tok.json").write_bytes(train_bpe(["a few words"] * 50, 300))
    texts = ["a few words", "a few words, " * 1000, "a" * 5000, "a last one"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def loader(on_bad: str) -> Loader:
        data = TextDataset(
            [f"jsonl:d.jsonl?on_bad={on_bad}"], tokenizer=tmp_path / "tok.json", seq_len=64, lanes=1, base=tmp_path, cache=tmp_path / "c"
        )  # fmt: skip
        return Loader(data, global_batch_size=1, tokenizer_workers=0)

    return loader


def test_a_document_that_cannot_be_cut_is_named_before_it_is_encoded(unbroken):
    with unbroken("fail") as batches, pytest.raises(DataError, match=r"row 2 of d.jsonl .* 5,000 characters in a row"):
        list(batches)


def test_a_document_that_cannot_be_cut_is_a_hole_where_bad_rows_are_skipped(unbroken):
    with unbroken("skip") as batches:
        assert sum(int(batch["row_count"].sum()) for batch in batches) == 3
        assert batches.left_out()["bad_rows"] == 1
        [hole] = batches.data.holes()
    assert (hole["file"], hole["row"], hole["rows"]) == ("d.jsonl", 2, 1)
    assert "5,000 characters in a row" in hole["reason"]
