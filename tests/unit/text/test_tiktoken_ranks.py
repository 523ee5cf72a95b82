"""A .tiktoken vocabulary gives the ids that tiktoken gives."""

from __future__ import annotations

import base64
import json

import pytest

from headrace.errors import TokenizerError
from headrace.text import load_tokenizer, train_bpe
from headrace.text.engines import proof_sample
from headrace.text.tiktoken_ranks import byte_characters

TEXTS = [
    "It's 1234 o'clock; the naïve fox doesn't JUMP!\n\n  def f(x):\treturn x\n",
    "漢字かな 👍🏽 Привет HELLOWorld 12345678",
] * 30


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A small vocabulary as tiktoken has them: bytes first, then merges in order."""
    vocabulary = json.loads(train_bpe(TEXTS, 500))["model"]["vocab"]
    to_byte = {c: b for b, c in byte_characters().items()}
    tokens = [bytes(to_byte[c] for c in t) for t in sorted(vocabulary, key=vocabulary.get) if not t.startswith("<|")]
    return {token: rank for rank, token in enumerate(tokens)}


def written(tmp_path, ranks, name):
    path = tmp_path / f"{name}.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items()))
    return path


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_ids_are_those_of_tiktoken(tmp_path, ranks, name):
    tiktoken = pytest.importorskip("tiktoken", reason="pip install tiktoken")
    from headrace.text.tiktoken_ranks import _KNOWN

    tokenizer = load_tokenizer(written(tmp_path, ranks, name))
    pattern, specials = _KNOWN[name]
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    texts = [*TEXTS, *proof_sample(b"{}")]
    found = tokenizer.encode(texts)
    for i, text in enumerate(texts):
        assert found.documents(i, i + 1).ids.tolist() == theirs.encode(text, allowed_special="all"), text[:50]
    assert tokenizer.eos_id == specials["<|endoftext|>"]
    assert tokenizer.decode(tokenizer.encode([TEXTS[1]]).ids) == TEXTS[1]


def test_a_name_that_is_no_known_encoding_is_refused_with_the_known_ones(tmp_path, ranks):
    with pytest.raises(TokenizerError, match=r"'mine' is none of the encodings known by name \(gpt2, r50k_base"):
        load_tokenizer(written(tmp_path, ranks, "mine"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda lines: lines[:100], r"has no token for the byte 0x"),
        (lambda lines: [*lines, b"!!! 7"], r":\d+: expected BASE64 RANK, found b'!!! 7'"),
        (lambda lines: [*lines, b"eHl6enp6 0"], r"the same rank"),
        (lambda lines: [*lines, b"AAECAwQFBgcICQ== 999999"], r"cannot be made by joining two tokens"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, ranks, damage, sentence):
    path = written(tmp_path, ranks, "r50k_base")
    path.write_bytes(b"\n".join(damage(path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(TokenizerError, match=sentence):
        load_tokenizer(path)
