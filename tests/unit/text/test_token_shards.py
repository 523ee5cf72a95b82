"""Shards of tokens: what is written comes back, and nothing that was tampered with gets through."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.errors import DataError, FileCorrupt
from headrace.order import fingerprint_json
from headrace.text import Packing, TokenBatch
from headrace.text.shards import (
    PreparedManifest,
    PreparedSource,
    lay_documents,
    open_packed,
    open_shard,
    pack_shard,
    packed_name,
    shard_name,
    token_dtype,
    write_packed,
    write_shard,
)


def batch(*documents: list[int]) -> TokenBatch:
    offsets = np.cumsum([0, *(len(d) for d in documents)]).astype(np.int64)
    return TokenBatch(np.array([t for d in documents for t in d], np.int32), offsets)


@pytest.fixture
def shard(tmp_path):
    lengths = np.array([3, 0, 9000, 40, 5000, 1], np.int64)
    tokens = np.random.default_rng(0).integers(0, 60_000, lengths.sum()).astype(np.uint16)
    path = tmp_path / shard_name(0)
    return path, tokens, lengths, write_shard(path, tokens, lengths, first_row=7, bad=1, about={"source": "web"})


def manifest(entry, **changes) -> PreparedManifest:
    source = PreparedSource(
        name="web", spec="jsonl:web", weight=1.0, max_epochs=None, max_tokens=None, data="x", files=(("a.jsonl", 13),),
        shards=(entry,),
    )  # fmt: skip
    values = {
        "vocab_size": 60_000,
        "dtype": "uint16",
        "seq_len": 16,
        "pack": "best_fit",
        "sources": (source,),
    } | changes
    return PreparedManifest(tokenizer="t", bos_id=None, eos_id=1, pad_id=0, **values)


def test_documents_are_laid_with_bos_and_eos_and_empty_ones_stay_empty():
    packing = Packing(seq_len=8, bos_id=90, eos_id=91)
    tokens, lengths = lay_documents(batch([5, 6], [], [7]), packing, np.dtype("<u2"))
    assert tokens.tolist() == [90, 5, 6, 91, 90, 7, 91]
    assert lengths.tolist() == [4, 0, 3]
    assert tokens.dtype == np.uint16
    nothing, none = lay_documents(batch(), packing, np.dtype("<u4"))
    assert (nothing.size, none.size, nothing.dtype) == (0, 0, np.uint32)


@pytest.mark.parametrize(("vocabulary", "name"), [(1, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_two_bytes_as_long_as_all_of_them_fit(vocabulary, name):
    assert token_dtype(vocabulary).name == name


def test_a_shard_comes_back_as_it_was_written_and_has_the_same_bytes_every_time(shard, tmp_path):
    path, tokens, lengths, entry = shard
    found = open_shard(path, entry, full=True)
    assert np.array_equal(found.tokens, tokens)
    assert np.diff(found.offsets).tolist() == lengths.tolist()
    assert (entry.rows, entry.documents, entry.bad, entry.tokens, entry.first_row) == (6, 5, 1, len(tokens), 7)
    again = tmp_path / "again"
    write_shard(again, tokens, lengths, first_row=7, bad=1, about={"source": "web"})
    assert again.read_bytes() == path.read_bytes()


def test_any_flipped_bit_of_a_shard_is_found_when_all_of_it_is_checked(shard):
    path, *_ = shard
    raw = path.read_bytes()
    rng = np.random.default_rng(1)
    for place in [0, 3, 9, len(raw) - 1, *rng.integers(0, len(raw), 150).tolist()]:
        bad = bytearray(raw)
        bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(FileCorrupt):
            open_shard(path, full=True)


def test_a_shard_of_other_tokens_under_the_right_name_is_refused(shard, tmp_path):
    path, tokens, lengths, entry = shard
    other = tmp_path / "other"
    other.mkdir()
    write_shard(other / path.name, tokens[::-1], lengths, first_row=7, bad=1, about={})
    with pytest.raises(FileCorrupt, match=r"not the shard that the manifest names: expected 14,044 tokens"):
        open_shard(other / path.name, entry)


def test_an_index_of_other_tokens_or_of_another_length_is_refused(shard, tmp_path):
    path, _, _, entry = shard
    packed = pack_shard(open_shard(path).offsets, 64)
    place = tmp_path / packed_name(64, 0)
    write_packed(place, packed, seq_len=64, of=entry)
    assert len(open_packed(place, seq_len=64, of=entry)) == len(packed)
    with pytest.raises(FileCorrupt, match="of another packing"):
        open_packed(place, seq_len=65, of=entry)


def test_a_manifest_comes_back_and_a_changed_letter_is_noticed(shard, tmp_path):
    *_, entry = shard
    entry = write_shard(tmp_path / shard_name(1), np.zeros(4, np.uint16), np.array([4]), first_row=0, bad=0, about={})
    written = manifest(entry)
    written.write(tmp_path)
    assert PreparedManifest.read(tmp_path) == written
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace('"weight": 1.0', '"weight": 2.0'))
    with pytest.raises(FileCorrupt, match="fails its own checksum"):
        PreparedManifest.read(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(FileCorrupt, match=r"manifest.json"):
        PreparedManifest.read(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="make it with `headrace prepare CONFIG --out"):
        PreparedManifest.read(tmp_path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("file", "../outside"), ("file", "/etc/passwd"), ("file", "a/b"), ("file", ""), ("name", ".."), ("name", "a/../b"),
        ("tokens", -1), ("tokens", 1 << 70), ("rows", "9"), ("rows", True), ("size", 1.5), ("first_row", 3), ("sum", "xyz"),
        ("weight", "NaN"), ("weight", -1), ("pack", "other"), ("seq_len", 1), ("seq_len", "9"), ("dtype", "int8"),
        ("pad_id", -5), ("shards", None), ("sources", []),
    ],
)  # fmt: skip
def test_a_manifest_that_names_something_outside_or_impossible_is_refused_although_its_checksum_is_right(
    tmp_path, where, value
):
    write_shard(tmp_path / shard_name(1), np.zeros(4, np.uint16), np.array([4]), first_row=0, bad=0, about={})
    body = {
        "kind": "headrace-prepared", "version": 2, "tokenizer": "t", "vocab_size": 9, "dtype": "uint16", "bos_id": None,
        "eos_id": 1, "pad_id": 0, "seq_len": 16, "pack": "concat",
        "sources": [{
            "name": "web", "spec": "x", "weight": 1.0, "max_epochs": None, "max_tokens": None, "data": "", "files": [["a", 1]],
            "shards": [{"file": shard_name(1), "first_row": 0, "rows": 1, "documents": 1, "bad": 0, "tokens": 4, "size": 9, "sum": "0" * 32}],
        }],
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(body | {"checksum": fingerprint_json(body)}))
    assert PreparedManifest.read(tmp_path).sources[0].tokens == 4
    source = body["sources"][0]
    target = next((d for d in (source["shards"][0], source, body) if where in d), body)
    target[where] = value
    (tmp_path / "manifest.json").write_text(json.dumps(body | {"checksum": fingerprint_json(body)}))
    with pytest.raises(FileCorrupt, match="does not describe prepared data"):
        PreparedManifest.read(tmp_path)
