"""Engines: none is used that does not give the reference's ids, and a difference in a live document is never silent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import TokenizerError
from headrace.loader import Loader, TextDataset
from headrace.text import BpeTokenizer, TokenBatch, engines, train_bpe

TEXTS = [
    "The quick brown fox doesn't jump over 12 lazy dogs. ",
    "for i in range(10):\n    print(i)\n",
    "naïve 漢字 👍🏽 ",
] * 20


@pytest.fixture(scope="module")
def byte_level() -> bytes:
    return train_bpe(TEXTS, 600)


def made(kind: str) -> bytes:
    """A tokenizer.json of another shape than plain byte-level BPE."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    if kind == "wordpiece":
        inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.normalizer = normalizers.BertNormalizer(lowercase=True)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    elif kind == "unigram":
        inner = Tokenizer(models.Unigram())
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        )
    else:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
        if kind == "normalised":
            inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        if kind == "split":
            pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            from tokenizers import Regex

            inner.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    inner.train_from_iterator(TEXTS, trainer)
    if kind == "added tokens":
        from tokenizers import AddedToken

        inner.add_tokens([AddedToken("quick brown", single_word=False), AddedToken("<x>", lstrip=True, rstrip=True)])
    return inner.to_str().encode()


KINDS = ("plain", "split", "normalised", "prefix space", "added tokens", "wordpiece", "unigram")


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], BpeTokenizer]:
    """Every engine with every kind of tokenizer it proves itself on."""
    found = {}
    for kind in KINDS:
        definition = made(kind)
        for engine in ("auto", *engines.ENGINES):
            with contextlib.suppress(TokenizerError):
                found[kind, engine] = BpeTokenizer(definition, name=kind, engine=engine)
    return found


def test_auto_always_finds_an_engine_and_takes_a_fast_one_for_plain_byte_level_bpe(pairs):
    assert all((kind, "auto") in pairs for kind in KINDS)
    if any(engines._version(e) for e in engines.ENGINES):
        assert pairs["plain", "auto"].engine.name in engines.ENGINES
        assert pairs["split", "auto"].engine.name in engines.ENGINES
    fallback = pairs["wordpiece", "auto"].engine
    if fallback.name == "tokenizers":
        assert len(fallback.passed_over) == len(engines.ENGINES)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=4))
def test_every_engine_that_is_used_gives_the_ids_of_the_reference(pairs, texts):
    for (kind, engine), tokenizer in pairs.items():
        found, expected = tokenizer.encode(texts), pairs[kind, "auto"]
        reference = expected.reference or expected.encode
        wanted = reference(texts)
        assert found.ids.tolist() == wanted.ids.tolist(), (kind, engine)
        assert found.offsets.tolist() == wanted.offsets.tolist(), (kind, engine)
        assert len(tokenizer.encode([])) == 0


class Liar:
    """An encoder that is wrong about one text."""

    def __init__(self, definition: bytes, wrong_about: str) -> None:
        self._honest = BpeTokenizer(definition, name="t", engine="tokenizers").encode
        self._wrong_about = wrong_about

    def __call__(self, texts) -> TokenBatch:
        batch = self._honest(texts)
        ids = batch.ids.copy()
        for i, text in enumerate(texts):
            if text == self._wrong_about and batch.offsets[i + 1] > batch.offsets[i]:
                ids[batch.offsets[i]] ^= 1
        return TokenBatch(ids, batch.offsets)


def test_an_engine_that_differs_on_one_text_of_the_sample_is_passed_over_and_the_text_is_named(byte_level, monkeypatch):
    monkeypatch.setattr(engines, "ENGINES", ("tokenizers",))
    monkeypatch.setattr(engines, "_MAKERS", {"tokenizers": lambda d: Liar(d, "I'M")})
    choice = engines.choose_engine(
        "auto", byte_level, BpeTokenizer(byte_level, name="t").reference or Liar(byte_level, ""), name="t"
    )
    assert choice.name == "tokenizers"
    assert 'gave other ids: "I\'M"' in choice.passed_over[0]


def test_an_engine_that_is_asked_for_by_name_and_differs_is_refused(byte_level, monkeypatch):
    monkeypatch.setitem(engines._MAKERS, "fastokens", lambda d: Liar(d, "\n\n\n"))
    monkeypatch.setattr(engines, "_version", lambda package: "1.0")
    with pytest.raises(TokenizerError, match=r"engine fastokens cannot be used for tokenizer t.*gave other ids"):
        BpeTokenizer(byte_level, name="t", engine="fastokens")


def test_an_engine_that_is_not_installed_is_said_to_be_so(byte_level, monkeypatch):
    monkeypatch.setattr(engines, "_version", lambda package: None)
    tokenizer = BpeTokenizer(byte_level, name="t", engine="auto")
    assert tokenizer.engine.name == "tokenizers"
    assert "fastokens is not installed" in str(tokenizer.engine)
    with pytest.raises(TokenizerError, match=r"gigatoken is not installed.*Install gigatoken"):
        BpeTokenizer(byte_level, name="t", engine="gigatoken")


def test_the_slow_encoder_is_said_aloud_once_and_only_where_no_fast_one_could_be_used(byte_level, monkeypatch, caplog):
    monkeypatch.setattr(engines, "_said", set())
    BpeTokenizer(byte_level, name="plain", engine="tokenizers")  # asked for by name
    assert not caplog.records
    wordpiece = made("wordpiece")
    for _ in range(2):
        assert BpeTokenizer(wordpiece, name="words").engine.is_fallback
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("tokenizer words is encoded by `tokenizers`")
    assert "fastokens" in record.getMessage()
    monkeypatch.setenv("RANK", "1")
    BpeTokenizer(wordpiece, name="words on another rank")
    assert len(caplog.records) == 1


def test_the_fast_encoder_is_a_dependency_and_is_used_for_byte_level_bpe(byte_level):
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("fastokens>=") for name in project["dependencies"])
    assert BpeTokenizer(byte_level, name="t").engine.name == "fastokens"


def test_the_sample_holds_the_tokenizers_own_special_tokens_and_is_the_same_every_time(byte_level):
    sample = engines.proof_sample(byte_level)
    assert sample == engines.proof_sample(byte_level)
    assert {"", "<|bos|>", "a<|endoftext|>b"} <= set(sample)
    assert max(map(len, sample)) >= 5000


def test_a_live_document_on_which_the_engine_differs_stops_the_run_and_is_named(tmp_path, byte_level, monkeypatch):
    monkeypatch.setattr("headrace.loader.windows.SPOT_CHECK_EVERY", 7)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_level)
    texts = [f"document {i}" for i in range(24)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    data = TextDataset(f"jsonl:{tmp_path}/d.jsonl", tokenizer=path, seq_len=16, lanes=2, cache=tmp_path / "c")
    for maker in data.makers:
        maker._reference = BpeTokenizer(byte_level, name="t", engine="tokenizers").encode
    named = {}
    for row, wrong in enumerate(texts):
        data.tokenizer.encode = Liar(byte_level, wrong)
        try:
            list(Loader(data, global_batch_size=2, tokenizer_workers=0, prefetch_batches=0))
        except TokenizerError as error:
            named[row] = str(error)
    assert 1 <= len(named) <= 12  # one in seven, and the same ones every time
    assert all(f"does not agree with `tokenizers` on row {row} of d.jsonl" in text for row, text in named.items())


def test_engines_never_change_what_is_delivered(tmp_path, byte_level):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_level)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t * (i % 5)}) + "\n" for i, t in enumerate(TEXTS)))
    digests = set()
    for engine in ("auto", "tokenizers"):
        data = TextDataset(
            f"jsonl:{tmp_path}/d.jsonl", tokenizer=path, seq_len=16, lanes=2, engine=engine, cache=tmp_path / "c"
        )
        loader = Loader(data, global_batch_size=2)
        assert sum(int((b["labels"] != -100).sum()) for b in loader) > 0
        digests.add((loader.digest, data.fingerprint()["tokenizer"]))
    assert len(digests) == 1


def test_ids_are_int32_and_offsets_int64_whatever_the_engine(pairs):
    for tokenizer in pairs.values():
        for texts in ([], [""], ["a", "", "b c"]):
            batch = tokenizer.encode(texts)
            assert (batch.ids.dtype, batch.offsets.dtype) == (np.int32, np.int64)
            assert len(batch) == len(texts)


THREADS = """
import os, sys, threading
import numpy, headrace.text.engines as engines
before = len(os.listdir("/proc/self/task"))
encode = engines._MAKERS["fastokens"](sys.stdin.buffer.read())
for _ in range(5):
    encode(["for i in range(10):\\n    print(i)\\n" * 200] * 100)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_fastokens_starts_no_threads_of_its_own(byte_level):
    pytest.importorskip("fastokens")
    environment = {k: v for k, v in os.environ.items() if k != "FASTOKENS_BPE_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], input=byte_level, env=environment, capture_output=True, check=True
    )
    assert done.stdout.decode().split() == ["0"]
