"""Estimates of a source's tokens are within 10 % of the count, also where documents differ in length and kind."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.loader import TextDataset
from headrace.text import train_bpe

PROSE = "The quick brown fox doesn't jump over twelve lazy dogs in the garden. "
CODE = "for (int i=0;i<n;++i){x[i]^=0x1F;}\n"


def counted(data: TextDataset, index: int) -> int:
    source = data.sources[index]
    texts = [t for chunk in range(source.manifest.chunks) for t in source.read(chunk) if t]
    limit = source.source.max_rows
    return int(data.packing.lengths(data.tokenizer.encode(texts[:limit]).counts()).sum())


def lengths(kind: str) -> np.ndarray:
    spread = np.random.default_rng(3).pareto(1.3, 5_000) * 3 + 1
    return {"even": np.full(5_000, 4), "heavy tail": spread, "sorted": np.sort(spread), "few": spread[:7]}[kind].astype(
        int
    )


@pytest.mark.parametrize("kind", ["even", "heavy tail", "sorted", "few"])
@pytest.mark.parametrize("max_rows", [None, 2_000])
def test_estimated_tokens_are_within_a_tenth_of_the_count(tmp_path, kind, max_rows):
    (tmp_path / "tokenizer.json").write_bytes(train_bpe([PROSE * 5, CODE * 5], 500))
    rows = [CODE * min(n, 150) if i % 9 == 0 else PROSE * min(n, 150) for i, n in enumerate(lengths(kind))]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [*rows, ""]))
    limit = f"?max_rows={max_rows}" if max_rows else ""
    data = TextDataset(
        [f"jsonl:{tmp_path}/d.jsonl{limit}"], tokenizer=tmp_path / "tokenizer.json", seq_len=64, cache=tmp_path / "c"
    )
    (estimate,) = data.estimates()
    assert estimate.tokens == pytest.approx(counted(data, 0), rel=0.1)
    assert data.estimated_tokens() == (estimate.tokens,)
    assert rows[0].startswith(estimate.first_document)
    assert estimate.first_document


def test_the_median_length_shows_that_lines_were_taken_for_documents(tmp_path):
    (tmp_path / "man.txt").write_text("a line of a page\n" * 500)
    made = {
        split: TextDataset([f"txt:{tmp_path}/man.txt?split={split}"], seq_len=64, cache=tmp_path / "c")
        for split in ("line", "file")
    }
    medians = {split: data.estimates()[0].median_tokens for split, data in made.items()}
    assert medians == {"line": 17, "file": 8501}


def test_a_source_without_text_has_an_estimate_of_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    data = TextDataset([f"jsonl:{tmp_path}/a.jsonl", f"jsonl:{tmp_path}/b.jsonl"], seq_len=64, cache=tmp_path / "c")
    assert [e.tokens for e in data.estimates()] == [6, 0]
