"""A tokenizer may be a path, a folder, a name in the Hugging Face cache, or an object; all give the same ids."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from headrace.errors import TokenizerError
from headrace.loader import Loader, TextDataset
from headrace.text import definition_of, load_tokenizer, train_bpe

TEXT = "The quick brown fox doesn't jump over 12 lazy dogs."


@pytest.fixture(scope="module")
def definition() -> bytes:
    return train_bpe([TEXT] * 5, 400)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def store(hub: Path, name: str, revision: str, text: bytes, *, main: bool = True) -> None:
    """A snapshot as huggingface_hub lays it out: a link to a blob."""
    folder = hub / f"models--{name.replace('/', '--')}"
    blob = folder / "blobs" / revision
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(text)
    file = folder / "snapshots" / revision / "tokenizer.json"
    file.parent.mkdir(parents=True)
    file.symlink_to(blob)
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)


def ids(given, **options) -> list[int]:
    return load_tokenizer(given, **options).encode([TEXT]).ids.tolist()


def test_a_folder_and_names_with_and_without_an_owner_are_found(hub, tmp_path, definition):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(definition)
    store(hub, "org/name", "aaa", definition)
    store(hub, "gpt2", "bbb", definition)
    expected = ids(tmp_path / "model" / "tokenizer.json")
    assert ids(tmp_path / "model") == ids("model", base=tmp_path) == ids("org/name") == ids("gpt2") == expected


def test_the_main_revision_wins_over_others(hub, definition):
    other = train_bpe(["zzz"], 300)
    store(hub, "org/name", "old", other, main=False)
    store(hub, "org/name", "new", definition)
    store(hub, "org/name", "newest", other, main=False)
    assert (
        load_tokenizer("org/name").vocab_size == load_tokenizer(tokenizers.Tokenizer.from_buffer(definition)).vocab_size
    )


def test_a_path_wins_over_the_cache(hub, tmp_path, definition, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "tokenizer.json").write_bytes(definition)
    store(hub, "org/name", "aaa", train_bpe(["zzz"], 300))
    assert ids("org/name") == ids("org/name/tokenizer.json")


@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_a_name_that_is_nowhere_is_refused_with_the_command_that_downloads_it(hub, name):
    with pytest.raises(TokenizerError, match=f"neither a file nor a folder.*hf download {name} tokenizer.json"):
        load_tokenizer(name)


@pytest.mark.parametrize("name", ["..", "../other", "a/b/c", "/etc/passwd/x"])
def test_no_name_leads_out_of_the_cache(hub, name):
    hub.mkdir()
    with pytest.raises(TokenizerError):
        load_tokenizer(name)


def test_objects_of_tokenizers_and_transformers_are_taken_with_their_special_tokens(definition):
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer.from_buffer(definition)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|pad|>", bos_token="<|bos|>")
    assert ids(theirs) == ids(inner) == inner.encode(TEXT).ids
    made = load_tokenizer(theirs)
    assert (made.eos_id, made.bos_id) == (inner.token_to_id("<|pad|>"), inner.token_to_id("<|bos|>"))
    assert load_tokenizer(theirs, eos="<|endoftext|>").eos_id == inner.token_to_id("<|endoftext|>")
    fingerprint = made.fingerprint
    theirs([TEXT], truncation=True, max_length=2)  # leaves its settings in the object
    assert ids(theirs) == ids(inner)
    assert load_tokenizer(theirs).fingerprint == fingerprint


def test_a_slow_transformers_tokenizer_is_refused():
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(TokenizerError, match=r"SlowTokenizer is a slow transformers tokenizer.*use_fast=True"):
        load_tokenizer(SlowTokenizer())
    with pytest.raises(TokenizerError, match="got 7"):
        load_tokenizer(7)


def test_a_dataset_of_a_tokenizer_object_can_be_made_again_in_a_worker_process(tmp_path, write_jsonl, definition):
    write_jsonl("a.jsonl", [TEXT] * 40)
    given = tokenizers.Tokenizer.from_buffer(definition)
    data = TextDataset([tmp_path / "a.jsonl"], tokenizer=given, seq_len=16, lanes=2, cache=tmp_path / "c")
    again = pickle.loads(pickle.dumps(definition_of(given)))  # noqa: S301  our own bytes
    assert TextDataset(**(data.recipe | {"tokenizer": again})).fingerprint() == data.fingerprint()
    here = [b["input_ids"].numpy().copy() for b in Loader(data, global_batch_size=2)]
    there = [b["input_ids"].numpy().copy() for b in Loader(data, global_batch_size=2, data_loader_workers=1)]
    assert len(here) == len(there) > 3
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
