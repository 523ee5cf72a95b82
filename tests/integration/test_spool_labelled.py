"""[spool] task = "classify" and "tag": labelled rows of any source with columns, every class in its turn, the same whoever makes them."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, DataError
from headrace.runs.config.loading import load_config
from headrace.runs.job import Job
from headrace.runs.provide import provide_text, provider_of
from headrace.sources import hub
from headrace.spool import DatasetConsumer, read_meta

CONFIG = """
[run]
seed = 3
[[source]]
spec = "{spec}"
[text]
seq_len = {seq_len}
[loader]
global_batch_size = 12
lanes = 12
[spool]
task = "{task}"
batches_per_file = 2
max_backlog_files = 8
"""
ROWS = [
    {"text": f"row {i} says {'x' * (i % 9)}", "label": ["bad", "good", "odd"][0 if i % 7 else 1 + i % 2]}
    for i in range(80)
]
WORDS = [
    {"text": ["Ada", "sang", "in", "Rome"][: 2 + i % 3], "tags": ["name", "none", "none", "place"][: 2 + i % 3]}
    for i in range(20)
]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))

    def made(*more, spec="jsonl:d.jsonl", task="classify", seq_len=32, rows=None):
        if rows is not None:
            (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (tmp_path / "c.toml").write_text(CONFIG.format(spec=spec, task=task, seq_len=seq_len))
        return load_config(tmp_path / "c.toml", ("--spool.dir", str(tmp_path / "S"), *more))

    return made


def fill(config, files=4, **more):
    return provide_text(config, max_files=files, **more)


def batches(folder, count, **more):
    with DatasetConsumer(folder, "cpu", ack="commit", deadline=30, **more) as consumer:
        return [{k: v.clone() for k, v in consumer.get_batch("train").items()} for _ in range(count)]


def text_of(batch, row):
    ids = batch["input_ids"][row][batch["attention_mask"][row] == 1]
    return bytes(ids[ids < 256].tolist()).decode()


def test_every_batch_holds_each_class_equally_often_and_each_text_its_own_label(config, tmp_path):
    assert fill(config(rows=ROWS)) == 4
    meta = read_meta(tmp_path / "S")
    assert (meta["training_type"], meta["label_map"]) == ("CLASSIFICATION", {"bad": 0, "good": 1, "odd": 2})
    assert (meta["target_size"], meta["vocab_size"], meta["block_size"]) == (3, 259, 32)
    seen = Counter()
    for number, batch in enumerate(batches(tmp_path / "S", 8)):
        assert Counter(batch["labels"].tolist()) == {0: 4, 1: 4, 2: 4}
        assert batch["sample_index"].tolist() == list(range(12 * number, 12 * number + 12))
        for row in range(12):
            source, place = batch["origin"][row].tolist()
            assert source == 0
            assert text_of(batch, row) == ROWS[place]["text"]
            assert meta["label_map"][ROWS[place]["label"]] == batch["labels"][row]
            seen[place] += 1
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 258).all()
    rare = [i for i, row in enumerate(ROWS) if row["label"] == "odd"]
    assert {seen[i] for i in rare} <= {32 // len(rare), 32 // len(rare) + 1}  # each once before any comes again


def test_natural_balance_shows_every_row_once_an_epoch(config, tmp_path):
    fill(config("--spool.balance", "natural", rows=ROWS))
    places = torch.cat([b["origin"][:, 1] for b in batches(tmp_path / "S", 7)])[:80]
    assert sorted(places.tolist()) == list(range(80))


@pytest.mark.parametrize("form", ["jsonl.gz", "parquet", "parquet-numbers", "arrow"])
def test_all_forms_of_the_same_rows_give_the_same_batches(config, tmp_path, form):
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = ["bad", "good", "odd"]
    fill(config("--spool.labels", json.dumps(labels), rows=ROWS), 2)
    expected = batches(tmp_path / "S", 4)
    columns = {"id": list(range(80)), "text": [r["text"] for r in ROWS], "label": [r["label"] for r in ROWS]}
    if form == "jsonl.gz":
        (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress((tmp_path / "d.jsonl").read_bytes()))
    elif form == "arrow":
        table = pa.table(columns)
        with pa.ipc.new_file(tmp_path / "e.arrow", table.schema) as writer:
            for batch in table.to_batches(max_chunksize=33):
                writer.write_batch(batch)
    else:
        if form == "parquet-numbers":
            columns["label"] = [labels.index(name) for name in columns["label"]]
        pq.write_table(pa.table(columns), tmp_path / "e.parquet", row_group_size=33)
    scheme = form.split(".")[0].split("-")[0]
    name = {"jsonl": "e.jsonl.gz", "parquet": "e.parquet", "arrow": "e.arrow"}[scheme]
    other = config("--spool.labels", json.dumps(labels), "--spool.dir", str(tmp_path / "T"), spec=f"{scheme}:{name}")
    fill(other, 2)
    for one, two in zip(expected, batches(tmp_path / "T", 4), strict=True):
        assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_word_s_first_token_bears_its_label_and_nothing_else_does(config, tmp_path):
    fill(config(task="tag", rows=WORDS))
    meta = read_meta(tmp_path / "S")
    assert meta["training_type"] == "TOKEN_CLASSIFICATION"
    names = {number: name for name, number in meta["label_map"].items()}
    for batch in batches(tmp_path / "S", 4):
        assert batch["labels"].shape == batch["input_ids"].shape
        for row in range(12):
            words = WORDS[int(batch["origin"][row, 1])]
            assert text_of(batch, row) == " ".join(words["text"])
            marked = torch.nonzero(batch["labels"][row] != -100).reshape(-1).tolist()
            assert [names[int(batch["labels"][row, i])] for i in marked] == words["tags"]
            starts = np.cumsum([0, *(len(w) + (i > 0) for i, w in enumerate(words["text"]))])[:-1]
            assert marked == starts.tolist()


def test_sentences_are_drawn_for_their_rarest_tag(config, tmp_path):
    rows = [{"text": ["a", "b"], "tags": ["O", "O"]}] * 40 + [{"text": ["a", "b"], "tags": ["O", "X"]}] * 2
    fill(config("--source.0.label_key", "tags", task="tag", rows=rows))
    for batch in batches(tmp_path / "S", 4):
        assert int((batch["origin"][:, 1] >= 40).sum()) == 6  # X is one class of two, however rare


def test_words_beyond_the_block_are_cut_and_the_end_is_kept(config, tmp_path):
    fill(config(task="tag", seq_len=6, rows=[{"text": ["abc", "def", "g"], "tags": ["O", "X", "O"]}]), 1)
    batch = batches(tmp_path / "S", 1)[0]
    assert batch["input_ids"][0].tolist() == [*b"abc d", 256]
    assert batch["labels"][0].tolist() == [0, -100, -100, 1, -100, -100]


def test_files_are_the_same_bytes_whoever_makes_them(config, tmp_path):
    fill(config(rows=ROWS), 6)
    checked = config("--spool.dir", str(tmp_path / "T"))
    first = provider_of(Job(checked))
    first.open(("train",))
    other = provider_of(Job(checked), join=True)
    for _ in range(3):  # side by side: each takes what is missing
        other.run(("train",), max_files=1)
    first.run(("train",), max_files=3)
    made = sorted((tmp_path / "S" / "queue" / "train").iterdir())
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (tmp_path / "T" / "queue" / "train" / path.name).read_bytes()


def test_ranks_share_what_one_rank_reads(config, tmp_path):
    fill(config(rows=ROWS), 2)
    straight = batches(tmp_path / "S", 4)
    consumers = [DatasetConsumer(tmp_path / "S", "cpu", ack="commit", dp_rank=r, dp_world_size=3) for r in range(3)]
    try:
        for batch in straight:
            shares = [c.get_batch("train") for c in consumers]
            for rank, share in enumerate(shares):
                assert all(torch.equal(share[k], batch[k][rank::3]) for k in batch)
    finally:
        for consumer in consumers:
            consumer.close()


def test_rows_are_read_once_and_kept(config, tmp_path):
    checked = config(rows=ROWS)
    fill(checked, 1)
    (kept,) = (tmp_path / "cache" / "labelled").iterdir()
    stamp = kept.stat().st_mtime_ns
    told: list[str] = []
    provider = provider_of(Job(checked), report=told.append)
    assert kept.stat().st_mtime_ns == stamp
    ids = provider.examples.ids.copy()  # it is mapped
    assert told[0] == "80 examples of 3 classes: bad 68, good 6, odd 6"
    data = bytearray(kept.read_bytes())
    data[-9] ^= 1
    kept.write_bytes(data)
    again = provider_of(Job(checked))
    assert np.array_equal(again.examples.ids, ids)  # a damaged file is made anew


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": "t", "label": "gud"}, r"d\.jsonl, line 3: its label 'gud' is none of spool\.labels; did you mean 'good'\? .*Fix it"),
        ({"text": "t", "label": 2}, r"line 3: its label is 2, spool\.labels has the numbers 0 to 1"),
        ({"text": "t", "label": None}, r"line 3: 'label' is null, expected a name or a whole number"),
        ({"text": "t", "label": 0.5}, r"line 3: 'label' is the fraction 0\.5"),
        ({"text": "t", "lable": "good"}, r"line 3: it has no key 'label'; it has 'lable', 'text' \(set text_key and label_key\)"),
        ({"text": ["t"], "label": "good"}, r"line 3: 'text' is a list, expected text"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_line_and_the_remedy(config, tmp_path, row, sentence):
    rows = [{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}, row]
    with pytest.raises(DataError, match=sentence):
        fill(config("--spool.labels", '["bad", "good"]', rows=rows), 1)
    told: list[str] = []
    skipping = config("--spool.labels", '["bad", "good"]', "--source.0.on_bad", "skip", rows=rows)
    assert fill(skipping, 1, report=told.append) == 1
    assert '1 bad rows were left out (on_bad = "skip")' in told
    assert set(torch.cat([b["origin"][:, 1] for b in batches(tmp_path / "S", 2)]).tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"text": ["a", "b"], "tags": ["O"]}, r"it has 2 words in 'text' and 1 labels in 'tags'"),
        ({"text": "a b", "tags": ["O"]}, r"'text' is text, expected a list with one entry a word"),
        ({"text": ["a", 3], "tags": ["O", "O"]}, r"'text' holds an entry that is not text"),
    ],
)
def test_words_and_labels_that_do_not_fit_are_named(config, tmp_path, row, sentence):
    with pytest.raises(DataError, match=rf"d\.jsonl, line 2: {sentence}"):
        fill(config(task="tag", rows=[WORDS[0], row]), 1)


def test_a_missing_column_of_a_parquet_file_is_named(config, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"], "stars": [1]}), tmp_path / "e.parquet")
    with pytest.raises(
        DataError, match=r"e\.parquet has no column 'label'; it has .*'stars'.*Set text_key and label_key"
    ):
        fill(config(spec="parquet:e.parquet"), 1)
    with pytest.raises(DataError, match=r"no column 'lable'"):
        fill(config("--source.0.label_key", "lable", spec="parquet:e.parquet"), 1)


def test_what_has_no_meaning_for_labelled_rows_is_refused(config, tmp_path):
    config(rows=ROWS)
    with pytest.raises(
        ConfigError, match=r"draws its samples by label.*leave out source d: max_epochs, loader.exhausted"
    ):
        config("--source.0.max_epochs", "2", "--loader.exhausted", "stop_first")
    with pytest.raises(ConfigError, match=r"a txt file has one text a line and no columns text, label"):
        fill(config(spec="txt:d.txt"), 1)
    with pytest.raises(ConfigError, match=r"spool\.labels.*at least two names"):
        config("--spool.labels", '["one"]')
    with pytest.raises(ConfigError, match=r"text_key and label_key are both 'text'"):
        fill(config("--source.0.label_key", "text"), 1)


def test_headrace_run_and_check_say_what_a_labelled_task_is(config, headrace, tmp_path):
    config(rows=ROWS)
    done = headrace("run", "c.toml", "--spool.dir", "S", cwd=tmp_path)
    assert done.returncode == 1
    assert 'spool.task = "classify"' in done.stderr
    assert "Traceback" not in done.stderr
    done = headrace("check", "c.toml", "--format", "json", cwd=tmp_path)
    plan = json.loads(done.stdout)
    assert (plan["kind"], plan["sources"][0]["rows"]) == ("classify", 80)


class Streamed:
    """A stream as datasets gives them."""

    num_shards = 2

    def __init__(self, rows):
        self.rows = rows

    def shard(self, *, num_shards, index):
        return iter([{"id": 7, **row} for row in self.rows[40 * index : 40 * index + 40]])


def test_labels_of_a_streamed_dataset_are_kept_with_its_texts(config, tmp_path, monkeypatch):
    fill(config(rows=ROWS), 2)
    expected = batches(tmp_path / "S", 4)
    monkeypatch.setattr(hub, "_snapshot", lambda *_: None)
    monkeypatch.setattr(hub, "_stream", lambda *_: Streamed(ROWS))
    other = config("--spool.dir", str(tmp_path / "T"), spec="hf:org/reviews")
    fill(other, 2)
    for one, two in zip(expected, batches(tmp_path / "T", 4), strict=True):
        assert all(torch.equal(one[k], two[k]) for k in one)
    wrong = config("--spool.dir", str(tmp_path / "U"), "--source.0.label_key", "stars", spec="hf:org/reviews")
    with pytest.raises(
        DataError, match=r"a row has no key 'stars'; it has .*'label'.*label_key to the field of the label"
    ):
        fill(wrong, 1)


# ------------------------------------------------------------------------------------------------ held out


def val_pass(folder, count, **more):
    with DatasetConsumer(folder, "cpu", ack="commit", deadline=30, **more) as consumer:
        return [{k: v.clone() for k, v in consumer.get_batch("val").items()} for _ in range(count)]


@pytest.mark.parametrize("balance", ["equal", "natural"])
def test_what_is_held_out_is_a_share_of_every_class_and_never_trained_on(config, tmp_path, balance):
    told: list[str] = []
    checked = config("--spool.val_fraction", "0.4", "--spool.balance", balance, rows=ROWS)
    fill(checked, 10, report=told.append)
    sizes = Counter(row["label"] for row in ROWS)
    kept = {name: round(0.4 * many) for name, many in sizes.items()}
    total = sum(kept.values())
    assert f"{total} examples are held out as split val" in told
    meta = read_meta(tmp_path / "S")
    assert meta["split_info"]["val"] == {"samples": total}
    assert meta["split_info"]["train"]["samples"] == 80 - total
    assert len(list((tmp_path / "S" / "queue" / "val").iterdir())) == 2, "24 rows a file, the last one shorter"
    rows = [int(r) for b in val_pass(tmp_path / "S", 6) for r in b["origin"][:, 1]]
    held = rows[:total]
    assert len(set(held)) == total, "each once"
    assert rows[total : 2 * total] == held[: len(rows) - total], "and then from the beginning again"
    assert Counter(ROWS[i]["label"] for i in held) == kept
    trained = {int(r) for b in batches(tmp_path / "S", 12) for r in b["origin"][:, 1]}
    assert not trained & set(held)
    if balance == "natural":
        assert trained | set(held) == set(range(80))


def test_ranks_share_what_is_held_out(config, tmp_path):
    fill(config("--spool.val_fraction", "0.4", rows=ROWS), 4)
    straight = val_pass(tmp_path / "S", 5)
    for rank in range(3):
        shares = val_pass(tmp_path / "S", 5, dp_rank=rank, dp_world_size=3)
        for batch, share in zip(straight, shares, strict=True):
            assert all(torch.equal(share[k], batch[k][rank::3]) for k in batch)


def test_a_share_that_cannot_be_held_out_is_refused(config, tmp_path):
    lonely = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    with pytest.raises(
        DataError, match=r"val_fraction = 0\.1 leaves nothing to validate on: no class has a second row"
    ):
        fill(config("--spool.val_fraction", "0.1", rows=lonely), 1)
    with pytest.raises(
        ConfigError, match=r"val_fraction = 0\.1 holds out labelled rows, and spool\.task = \"lm\" has none"
    ):
        config("--spool.val_fraction", "0.1", task="lm")
    with pytest.raises(ConfigError, match=r"spool\.val_fraction"):
        config("--spool.val_fraction", "1")
    fill(config("--spool.val_fraction", "0.4", rows=ROWS), 2)
    with pytest.raises(ConfigError, match=r"val_fraction"):
        fill(config("--spool.val_fraction", "0.2"), 1)
