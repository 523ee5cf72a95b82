"""A document that is encoded in pieces has the ids of the whole, for every tokenizer that is said to allow it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tokenizers
import tokenizers.pre_tokenizers
import tokenizers.trainers
from hypothesis import given
from hypothesis import strategies as st

from headrace.text import pieces
from headrace.text.engines import GPT2_PATTERN, Encode, proof_sample, reference_encoder
from headrace.text.pieces import CL100K_PATTERN, O200K_PATTERN

TEXTS = [
    "The quick brown fox jumps over 1,234 lazy dogs, don't they? It's we'll",
    "naïve 漢字かな。カナ 한국어 Привет\n\n  x = {}\t#ok",
]
PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "cl100k": CL100K_PATTERN,
    "o200k": O200K_PATTERN,
    "qwen2": CL100K_PATTERN.replace("{1,3}", ""),
}
ADDED = ["<|endoftext|>", "<|im start|>", "fox, jumps", "a.b", "x"]
PARTS = st.one_of(
    st.sampled_from([*ADDED, "don't", "'s", "'S b", "we'll", " ", "  ", "\n", "\r\n", " \n", "\t", ",", ".", "/", "fox", "Fox", "BAR", "a"]),
    st.sampled_from(["漢字", "。", "、", "かな", "カナ", "한국어", "Мир", "é", "e\u0301", "\u0301", "1", "1234", "_", "`", "{", "~", "’s", "ſ"]),
    st.text(max_size=4),
)  # fmt: skip


@cache
def definition(kind: str) -> bytes:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if kind == "digits":
        steps = [{"type": "Digits", "individual_digits": True}, level | {"use_regex": True}]
    else:
        steps = [
            {"type": "Split", "pattern": {"Regex": PATTERNS[kind]}, "behavior": "Isolated", "invert": False},
            level,
        ]
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    inner = tokenizers.Tokenizer.from_str(
        json.dumps(empty | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS * 20,
        tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=ADDED[:1], initial_alphabet=alphabet, show_progress=False
        ),
    )
    described: dict[str, Any] = json.loads(inner.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = max(described["model"]["vocab"].values()) + 1
    described["added_tokens"] += [{"id": first + i, "content": c} | flags for i, c in enumerate(ADDED[1:])]
    return json.dumps(described).encode()


@cache
def reference(kind: str) -> Encode:
    return reference_encoder(tokenizers.Tokenizer.from_buffer(definition(kind)), kind)


def require_same(kind: str, texts: list[str], piece: int) -> int:
    """How many cuts there were."""
    cutter = pieces.Pieces(definition(kind))
    assert cutter.exact
    whole = reference(kind)(texts)
    with mock.patch.object(pieces, "PIECE", piece):
        found = cutter.encoder(reference(kind))(texts)
        cuts = sum(len(cutter.cuts_of(text)) - 1 for text in texts)
    assert np.array_equal(found.offsets, whole.offsets)
    assert np.array_equal(found.ids, whole.ids)
    return cuts


@pytest.mark.parametrize("kind", [*PATTERNS, "digits"])
@given(parts=st.lists(PARTS, min_size=1, max_size=40), piece=st.integers(1, 6))
def test_a_document_cut_anywhere_it_may_be_has_the_ids_of_the_whole(kind, parts, piece):
    require_same(kind, ["".join(parts), "short", "", "".join(reversed(parts))], piece)


@pytest.mark.parametrize("kind", [*PATTERNS, "digits"])
def test_the_texts_on_which_encoders_part_have_the_ids_of_the_whole_when_cut(kind):
    assert require_same(kind, proof_sample(definition(kind)), 2) > 1000


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}},
        {"model": {"type": "WordPiece"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"added_tokens": [{"content": "<x>", "lstrip": True}]},
    ],
)
def test_a_tokenizer_of_another_kind_is_never_given_pieces(change):
    cutter = pieces.Pieces(json.dumps(json.loads(definition("gpt2")) | change).encode())
    assert not cutter.exact
    assert cutter.cuts_of("a b " * pieces.PIECE) == [4 * pieces.PIECE]
    assert "as a whole" in str(cutter.refusal("a b " * pieces.LONGEST_PIECE))
