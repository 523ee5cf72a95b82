"""A tokenizer.json from anywhere: what native code cannot bear is refused before it sees the file."""

from __future__ import annotations

import copy
import json

import pytest

from headrace.errors import TokenizerError
from headrace.text.tokenizer import load_tokenizer, train_bpe

PLAIN = json.loads(train_bpe(["some words and some more words"], 300))


def token(number, content):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


def doubling(times):
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": " "}, "content": "  "}] * times,
    }


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t["model"]["vocab"].update(far=2**31), "an id of 2,147,483,648"),
        (lambda t: t["added_tokens"].append(token(2**31 - 1, "<far>")), "an id of 2,147,483,647"),
        (lambda t: t["added_tokens"].append(token(-1, "<below>")), "or below 0"),
        (lambda t: t["added_tokens"].append(token(300, "x" * 5000)), "more than 1,000 characters"),
        (lambda t: t["added_tokens"].extend(token(300 + i, f"<{i}>") for i in range(20_000)), "10,000 added tokens"),
        (lambda t: t.update(normalizer=doubling(10)), "64 times longer"),
        (lambda t: t.update(normalizer=doubling(100)), "more than 64 steps"),
        (lambda t: t["model"].update(merges=["a b", *t["model"]["merges"]], vocab={"a": 0, "b": 1}), "tokenizer"),
        (lambda t: t.update(model=[]), "it has no model"),
        (lambda t: t.update(pre_tokenizer=split("(a|b)" * 1000)), "a regular expression of more than 4,096 characters"),
    ],
)
def test_a_file_that_claims_too_much_is_refused_by_name(tmp_path, change, told):
    changed = copy.deepcopy(PLAIN)
    change(changed)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json.*{told}"):
        load_tokenizer(path)


def test_a_panic_of_the_native_library_is_a_tokenizer_error(tmp_path):
    changed = {**PLAIN, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer\.json that `tokenizers` can load"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_regular_expression_that_backtracks_without_end_is_a_tokenizer_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({**PLAIN, "pre_tokenizer": split("(a+)+$")}))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", engine="tokenizers")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*it takes too many steps"):
        tokenizer.encode(["a" * 50 + "b"])


def test_a_deep_file_and_a_harmless_normaliser(tmp_path):
    (tmp_path / "tokenizer.json").write_text("[" * 1_000_000)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text(json.dumps({**PLAIN, "normalizer": doubling(2)}))
    assert len(load_tokenizer(tmp_path).encode(["a b"]).ids) > 3
