"""Prepared tokens as batches: the contract, the ends, and everything that can be wrong with a folder."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import threading

import numpy as np
import pytest

from headrace.errors import ConfigError, CursorMismatch, DataError, FileCorrupt
from headrace.files import write_container
from headrace.loader import PreparedDataset, PreparedLoader
from headrace.loader.schedule import Schedule
from headrace.runs.config.loading import load_config
from headrace.runs.prepare import prepare
from headrace.testing import frozen
from headrace.text.shards import PreparedManifest

SEQ_LEN = 32


class Quiet:
    def __init__(self):
        self.said = []

    def progress(self, line, done, total):
        assert done <= total

    def notice(self, sentence):
        self.said.append(sentence)


@pytest.fixture(scope="module")
def texts():
    """Short, long and empty documents in three sources, one of them tiny."""
    rng = np.random.default_rng(0)
    shapes = {"web": (60, 50), "books": (6, 400), "tiny": (2, 9)}
    return {
        name: ["" if i % 7 == 3 else f"{name}{i} " + "x" * int(rng.integers(0, 2 * mean)) for i in range(rows)]
        for name, (rows, mean) in shapes.items()
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory, texts):
    """Prepared for real, in shards of 512 tokens."""
    root = tmp_path_factory.mktemp("prepared")
    lines = ["[run]\nseed = 3\n"]
    for name, weight in (("web", 0.5), ("books", 0.3), ("tiny", 0.2)):
        for shard in range(2):
            part = texts[name][shard::2]
            (root / f"{name}-{shard}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
        lines.append(f'[[source]]\nspec = "jsonl:{root}/{name}-*.jsonl"\nname = "{name}"\nweight = {weight}\n')
    (root / "c.toml").write_text("".join(lines) + f"[text]\nseq_len = {SEQ_LEN}\n[train]\n")
    prepare(load_config(root / "c.toml"), root / "out", Quiet(), workers=2, shard_bytes=1024)
    return root / "out"


@pytest.fixture
def folder(original, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(original, tmp_path / "out")
    return tmp_path / "out"


def documents(texts):
    """(file, row) → ids with EOS, as the byte tokenizer has them."""
    found = {}
    for name, all_texts in texts.items():
        for shard in range(2):
            for row, text in enumerate(all_texts[shard::2]):
                if text:
                    found[f"{name}-{shard}.jsonl", row] = [*text.encode(), 256]
    return found


@pytest.mark.parametrize("pack", ["best_fit", "concat"])
@pytest.mark.parametrize("labels", ["shifted", "hf"])
def test_batches_keep_the_contract_and_hold_the_documents_they_name(original, texts, pack, labels):
    expected = documents(texts)
    data = PreparedDataset(original, pack=pack, seed=5)
    fields = ("input_ids", "labels", "position_ids", "cu_seqlens", "row_count", "segment_ids")
    loader = PreparedLoader(data, global_batch_size=6, labels=labels, fields=fields, prefetch_batches=1)
    rows = tokens = 0
    for batch in loader:
        assert loader.spec.check(batch) == 6
        want = {"input_ids": np.full((6, SEQ_LEN), data.pad_id), "labels": np.full((6, SEQ_LEN), -100)}
        want |= {"position_ids": np.tile(np.arange(SEQ_LEN), (6, 1)), "segment_ids": np.zeros((6, SEQ_LEN), int)}
        ends, borders = np.zeros(6, int), {0, 6 * SEQ_LEN}
        filled = [0] * 6
        for piece in loader.pieces(batch):
            row = piece.sample_index - int(batch["sample_index"][0])
            ids = expected[piece.file, piece.row]
            span = slice(piece.column, piece.column + piece.length)
            inside = ids[piece.start : piece.start + piece.length]
            want["input_ids"][row, span] = inside
            following = [*ids[piece.start + 1 : piece.start + piece.length + 1], -100][: piece.length]
            want["labels"][row, span] = following if labels == "shifted" else [-100, *inside[1:]]
            want["position_ids"][row, span] = range(piece.length)
            want["segment_ids"][row, span] = want["segment_ids"][row].max() + 1
            want["position_ids"][row, span.stop :] = range(SEQ_LEN - span.stop)
            ends[row] += piece.start + piece.length == len(ids)
            borders |= {row * SEQ_LEN + span.start, row * SEQ_LEN + span.stop, (row + 1) * SEQ_LEN}
            filled[row] += piece.length
            assert piece.source == piece.file.partition("-")[0]
        borders |= {r * SEQ_LEN for r in range(7)}
        for name, array in want.items():
            assert np.array_equal(batch[name].numpy(), array), name
        assert batch["row_count"].tolist() == ends.tolist()
        assert batch["cu_seqlens"].tolist() == sorted(borders)
        assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(sorted(borders)))
        rows += int(ends.sum())
        tokens += sum(filled)
    assert rows == len(expected)
    assert tokens == sum(map(len, expected.values()))
    report = loader.report()
    assert (report.tokens, report.documents) == (tokens, rows)
    metrics = loader.drain_metrics()
    assert metrics["data/tokens"] == tokens
    assert sum(metrics[f"data/source_tokens/{n}"] for n in data.names) == tokens
    assert metrics["data/samples"] * SEQ_LEN == metrics["data/tokens"] + metrics["data/padding"]
    assert loader.drain_metrics() == {}


def test_only_the_fields_that_were_asked_for_come(original):
    loader = PreparedLoader(PreparedDataset(original), global_batch_size=4, fields=("input_ids",), prefetch_batches=0)
    batch = next(loader)
    assert set(batch) == {"input_ids", "sample_index"}
    whole = PreparedLoader(PreparedDataset(original), global_batch_size=4)
    assert np.array_equal(next(whole)["input_ids"], batch["input_ids"])
    whole.close()
    with pytest.raises(ConfigError, match=r"there is no field 'label'; there are input_ids, labels"):
        PreparedLoader(PreparedDataset(original), global_batch_size=4, fields=("input_ids", "label"))


@pytest.mark.parametrize("exhausted", ["drop", "stop_first"])
def test_finite_sources_end_as_the_policy_says(original, exhausted):
    data = PreparedDataset(original, exhausted=exhausted)
    loader = PreparedLoader(data, global_batch_size=5, prefetch_batches=0)
    steps = sum(1 for _ in loader)
    assert steps == -(-len(data) // 5)
    totals = loader.drain_metrics()
    assert totals["data/samples"] - totals["data/fillers"] == len(data)
    whole = sum(s.tokens for s in data.sources)
    assert totals["data/tokens"] == whole if exhausted == "drop" else totals["data/tokens"] < whole
    assert loader.ended
    with pytest.raises(StopIteration):
        next(loader)


def test_a_second_pass_has_the_same_blocks_in_another_order(original):
    data = PreparedDataset(original)
    loader = PreparedLoader(data, global_batch_size=4, prefetch_batches=0)
    passes = [[p[2:] for batch in loader for p in loader.pieces(batch)] for _ in range(2)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1])
    saved = loader.state_dict()
    third = [p[2:] for batch in loader for p in loader.pieces(batch)]
    again = PreparedLoader(data, global_batch_size=4, prefetch_batches=0)
    again.load_state_dict(saved)
    assert [p[2:] for batch in again for p in again.pieces(batch)] == third


def test_repeating_goes_on_with_the_next_epoch(original):
    data = PreparedDataset(original, exhausted="repeat", weights={"tiny": 1})
    blocks = [data.block(i)[:3] for i in range(9)]
    count = max(b for _, _, b in blocks) + 1
    assert [epoch for _, epoch, _ in blocks] == [i // count for i in range(9)]
    for start in range(0, 9 - count + 1, count):
        assert sorted(b for _, _, b in blocks[start : start + count]) == list(range(count))
    with pytest.raises(TypeError, match="repeats for ever"):
        len(data)


def test_without_shuffle_blocks_come_in_stored_order(original):
    data = PreparedDataset(original, shuffle=False, weights={"web": 1})
    assert [data.block(i).block for i in range(len(data))] == list(range(len(data)))


@pytest.mark.parametrize("pack", ["best_fit", "concat"])
def test_a_flipped_bit_among_the_tokens_is_refused_before_the_batch_leaves(folder, pack):
    shard = folder / "tokens/web/tokens-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    tokens = PreparedManifest.read(folder).sources[0].shards[1].tokens
    raw[len(raw) - 2 * tokens + 100] ^= 16  # tokens have the smallest items, so they stand last in the file
    shard.write_bytes(raw)
    loader = PreparedLoader(PreparedDataset(folder, pack=pack), global_batch_size=4)
    with pytest.raises(
        FileCorrupt, match=r"tokens/web/tokens-00001.*tokens 0 to 5\d\d of source web fail their checksum"
    ):
        list(loader)
    data = PreparedDataset(folder, pack=pack, weights={"books": 1, "tiny": 1})
    assert sum(1 for _ in PreparedLoader(data, global_batch_size=4, prefetch_batches=0)) > 3, "the others are untouched"
    with pytest.raises(FileCorrupt, match="tensor 'tokens' fails its checksum"):
        PreparedDataset(folder, pack=pack, full_check=True)


def test_a_shard_that_was_cut_short_or_is_gone_is_a_sentence_when_the_folder_is_opened(folder):
    shard = folder / "tokens/web/tokens-00000.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 7)
    (folder / "tokens/books/tokens-00001.safetensors").unlink()
    with pytest.raises(
        FileCorrupt,
        match=rf"2 of \d+ shards are not whole: .*web.*has {size - 7:,} bytes, expected {size:,}.*No such file",
    ):
        PreparedDataset(folder)


def test_a_damaged_index_is_refused_and_one_that_points_outside_is_no_wild_read(folder):
    path = folder / f"tokens/web/best_fit-{SEQ_LEN}-00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(FileCorrupt, match=r"best_fit-32-00000.*fails its checksum"):
        list(PreparedLoader(PreparedDataset(folder), global_batch_size=4))
    raw[-3] ^= 1
    path.write_bytes(raw)
    from headrace.files import open_container

    whole = open_container(path)
    for name, value in (
        ("piece_at", 1 << 40),
        ("piece_at", (1 << 63) - 1),
        ("piece_at", -9),
        ("piece_len", 1 << 30),
        ("block_ptr", 1 << 50),
    ):
        arrays = {n: np.array(a) for n, a in whole.arrays.items()}
        arrays[name][1] = value
        write_container(path, arrays, whole.meta, replace=True)
        with pytest.raises(FileCorrupt, match="points outside the shard"):
            list(PreparedLoader(PreparedDataset(folder), global_batch_size=4, prefetch_batches=0))


def test_another_seq_len_is_indexed_once_and_kept(folder):
    first = PreparedDataset(folder, seq_len=20)
    assert (folder / "best_fit-20.json").exists()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("best_fit-20*")}
    second = PreparedDataset(folder, seq_len=20)
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("best_fit-20*")}
    assert len(first) == len(second)
    (folder / "best_fit-20.json").write_text("{}")
    with pytest.raises(FileCorrupt, match=r"best_fit-20.json"):
        PreparedDataset(folder, seq_len=20)


def test_a_folder_that_cannot_be_written_is_indexed_in_memory(folder):
    expected = [PreparedDataset(folder, seq_len=20).block(i).arrays["input_ids"].tolist() for i in range(5)]
    shutil.rmtree(folder / "quarantine", ignore_errors=True)
    for path in folder.rglob("best_fit-20*"):
        path.unlink()
    for source in ("web", "books", "tiny"):
        for n in range(20):
            (folder / f"tokens/{source}/best_fit-20-{n:05d}.safetensors").mkdir()  # nothing can take this name
    data = PreparedDataset(folder, seq_len=20)
    assert [data.block(i).arrays["input_ids"].tolist() for i in range(5)] == expected
    assert not (folder / "best_fit-20.json").exists()


def test_two_folders_are_one_dataset_and_must_share_their_tokenizer(folder, original):
    data = PreparedDataset([original, folder], weights=[1, 0, 0, 1, 0, 0])
    assert data.names == ("web", "books", "tiny", "web-2", "books-2", "tiny-2")
    assert data.weights == (0.5, 0, 0, 0.5, 0, 0)
    one = PreparedDataset(original, weights={"web": 1})
    assert len(data) == 2 * len(one)
    manifest = PreparedManifest.read(folder)
    import dataclasses

    dataclasses.replace(manifest, tokenizer="other").write(folder)
    with pytest.raises(ConfigError, match="prepared differently: tokenizer is other there"):
        PreparedDataset([original, folder])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": {"wbe": 1}}, "weights name wbe; the prepared sources are web, books, tiny"),
        ({"weights": [1, 2]}, "2 weights for 3 sources"),
        ({"weights": [0, 0, 0]}, "weight 0"),
        ({"weights": [1, float("nan"), 0]}, "finite"),
        ({"seq_len": 1}, "seq_len must be"),
        ({"pack": "next_fit"}, "pack must be"),
        ({"seed": -1}, "seed must be"),
        ({"exhausted": "never"}, "exhausted must be"),
    ],
)
def test_impossible_settings_are_refused(original, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PreparedDataset(original, **options)


def test_a_folder_without_prepared_data_says_how_to_make_it(tmp_path):
    with pytest.raises(DataError, match="headrace prepare CONFIG"):
        PreparedDataset(tmp_path)


def test_more_ranks_than_samples_in_a_batch_are_refused(original):
    with pytest.raises(ConfigError, match="global_batch_size 3 leaves some of 4 ranks without a sample"):
        PreparedLoader(PreparedDataset(original), global_batch_size=3, dp_rank=0, dp_world_size=4)


def test_a_state_of_something_else_is_refused_by_name(original):
    loader = PreparedLoader(PreparedDataset(original, seed=1), global_batch_size=4, prefetch_batches=0)
    next(loader)
    saved = loader.state_dict()
    for options, name in (
        ({"seed": 2}, "config:order"),
        ({"seq_len": 16, "seed": 1}, "config:packing"),
        ({"weights": [1, 1, 1], "seed": 1}, "weights"),
    ):
        other = PreparedLoader(PreparedDataset(original, **options), global_batch_size=4, prefetch_batches=0)
        with pytest.raises(CursorMismatch, match=name):
            other.load_state_dict(saved)
        other.load_state_dict(saved, accept={name})
        assert other.step == 1
    for damage in ({"sample": -4}, {"sample": "x"}, {"begun": 99}, {"delivered": {}}, {"share": None}):
        with pytest.raises(CursorMismatch, match="damaged"):
            loader.load_state_dict(saved | {"body": saved["body"] | damage})


def test_states_of_all_ranks_are_the_state_of_one(original):
    data = PreparedDataset(original)
    alone = PreparedLoader(data, global_batch_size=7, prefetch_batches=0)
    ranks = [
        PreparedLoader(data, global_batch_size=7, dp_rank=r, dp_world_size=3, prefetch_batches=0) for r in range(3)
    ]
    for _ in range(5):
        next(alone)
        sizes = [len(next(r)["sample_index"]) for r in ranks]
        assert sorted(sizes) == [2, 2, 3]
    states = [r.state_dict() for r in ranks]
    again = PreparedLoader(data, global_batch_size=7, prefetch_batches=0)
    again.load_state_dict(states)
    assert again.state_dict() == alone.state_dict()
    with pytest.raises(CursorMismatch, match="was one passed twice"):
        again.load_state_dict([states[0], states[0], states[2]])
    next(ranks[1])
    with pytest.raises(CursorMismatch, match="do not belong together: sample is"):
        again.load_state_dict([*states[:1], ranks[1].state_dict(), states[2]])


def test_a_dataset_travels_to_another_process_as_its_arguments(original):
    data = PreparedDataset(original, seed=4, pack="concat")
    copy = pickle.loads(pickle.dumps(data))  # noqa: S301
    assert frozen(copy.block(3).arrays)["input_ids"].tolist() == data.block(3).arrays["input_ids"].tolist()
    assert copy.fingerprint() == data.fingerprint()


def test_a_loader_that_is_left_in_the_middle_leaves_no_thread(original):
    import gc

    loader = PreparedLoader(PreparedDataset(original), global_batch_size=2)
    next(loader)
    (thread,) = (t for t in threading.enumerate() if t.name == "headrace-prepared")
    del loader
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_sources_with_more_weight_than_blocks_leave_and_the_rest_share():
    schedule = Schedule([0.5, 0.3, 0.2], limits=[10, 100, 7])
    source, taken = schedule.at(np.arange(120))
    assert schedule.total == 117
    assert np.bincount(source[:117]).tolist() == [10, 100, 7]
    assert source[117:].tolist() == [-1] * 3
    for s in range(3):
        mine = taken[:117][source[:117] == s]
        assert mine.tolist() == list(range(len(mine))), "each block of a source once, in turn"
    assert Schedule([0.5, 0.3, 0.2], limits=[10, 100, 7], stop_first=True).total == 20


def test_after_100_000_samples_shares_are_right_to_a_twentieth_of_a_point():
    weights = [0.9, *(0.1 / 50 for _ in range(50))]
    for given in (weights, [1 / 3, 0.123456789, 0.2, 1e-5], [0.7, 0.3]):
        counts = Schedule(given, limits=[None] * len(given)).counts(100_000)
        for count, weight in zip(counts, given, strict=True):
            assert abs(count / 100_000 - weight / sum(given)) < 0.0005
