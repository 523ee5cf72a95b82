"""Folders of the document's own making: legacy files at the root, and queues filled by its provider."""

from __future__ import annotations

import pickle

import pytest
import torch

from headrace.errors import ConfigError, DataError, DeadlineExceeded, FileCorrupt

SCHEMA = [
    {"name": "x", "dtype": "int64", "shape": [2], "role": "input"},
    {"name": "y", "dtype": "int64", "shape": [2], "role": "target"},
]


@pytest.fixture
def folder(tmp_path):
    meta = {
        "dataset_name": "old",
        "training_type": "LM",
        "vocab_size": 9,
        "batch_size": 4,
        "split_info": {},
        "batch_schema": SCHEMA,
    }
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    return tmp_path


def rows(first, count):
    x = torch.arange(first, first + count).repeat(2, 1).T.contiguous()
    return {"x": x, "y": x + 1}


def queue_file(folder, stamp, seq, first, count=8):
    (folder / "queue" / "train").mkdir(parents=True, exist_ok=True)
    meta = {
        "batch_size": 4,
        "num_batches": count // 4,
        "file_idx": seq,
        "split": "train",
        "produced_at": 0.5,
        "schema": SCHEMA,
    }
    torch.save(
        {"metadata": meta, "tensors": rows(first, count)},
        folder / "queue" / "train" / f"{stamp}-{seq:06d}-{count // 4}.pt",
    )


def test_legacy_files_are_read_in_numeric_order_in_a_circle_and_filled_by_repeating(folder, consumer):
    for number, first, count in ((10, 100, 4), (9, 0, 6)):
        torch.save(rows(first, count), folder / f"train_batches_{number}.pt")
    reader = consumer(folder)
    got = [reader.get_batch("train", "cpu")[0][:, 0].tolist() for _ in range(5)]
    assert got == [[0, 1, 2, 3], [4, 5, 4, 5], [100, 101, 102, 103], [0, 1, 2, 3], [4, 5, 4, 5]]
    assert len(list(folder.glob("*.pt"))) == 2, "never deleted"
    assert [f.name for f in reader.schema("train")] == ["x", "y"]


LEGACY_META = {"vocab_size": 3, "stoi": {"a": 0, "b": 1}, "itos": {0: "a", 1: "b"}}


def test_a_legacy_folder_whose_meta_holds_only_a_vocabulary_is_read(tmp_path, consumer):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(LEGACY_META))
    torch.save(rows(0, 6), tmp_path / "train_batches_0000.pt")
    with pytest.raises(ConfigError, match=r"say how large a batch is: give batch_size"):
        consumer(tmp_path)
    reader = consumer(tmp_path, batch_size=3)
    assert reader.meta == LEGACY_META
    assert [reader.get_batch("train", "cpu")[0][:, 0].tolist() for _ in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    reader.set_batch_size(2)
    assert len(reader.get_batch("train", "cpu")[0]) == 2


def test_the_batch_size_of_a_legacy_folder_comes_from_its_files_where_the_meta_has_none(tmp_path, consumer):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(LEGACY_META))
    about = {"batch_size": 2, "block_size": 2, "num_batches": 3, "file_idx": 0, "split": "train"}
    torch.save(rows(0, 6) | {"metadata": about}, tmp_path / "train_batches_0000.pt")
    reader = consumer(tmp_path)
    assert (reader.batch_size, reader.meta["batch_size"]) == (2, 2)
    with pytest.warns(UserWarning, match="was made with batch_size 2"):
        consumer(tmp_path, batch_size=3)


def test_a_meta_that_holds_only_a_vocabulary_is_refused_where_there_is_a_queue_or_no_batch_file(tmp_path, consumer):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(LEGACY_META))
    with pytest.raises(ConfigError, match="meta has no 'dataset_name'"):
        consumer(tmp_path, batch_size=2)
    torch.save(rows(0, 6), tmp_path / "train_batches_0000.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(LEGACY_META | {"vocab_size": "three"}))
    with pytest.raises(ConfigError, match="vocab_size is 'three'"):
        consumer(tmp_path, batch_size=2)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(LEGACY_META))
    (tmp_path / "queue").mkdir()
    with pytest.raises(ConfigError, match="meta has no 'dataset_name'"):
        consumer(tmp_path, batch_size=2)


def test_a_provider_leaves_a_legacy_folder_as_it_is(tmp_path, drawn, consumer):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "meta.pkl").write_bytes(pickle.dumps(LEGACY_META))
    torch.save(rows(0, 6), tmp_path / "spool" / "train_batches_0000.pt")
    with pytest.raises(ConfigError, match="has a meta that another program wrote"):
        drawn().run()
    assert consumer(batch_size=3).get_batch("train", "cpu")[0][:, 0].tolist() == [0, 1, 2]


def test_legacy_reading_resumes_anywhere_on_any_number_of_ranks(folder, consumer):
    for number in range(3):
        torch.save(rows(100 * number, 6), folder / f"train_batches_{number:04d}.pt")
    straight = consumer(folder)
    expected = [straight.get_batch("train")[0] for _ in range(12)]
    reader = consumer(folder)
    for step in range(12):
        state = reader.state_dict()
        world = (1, 2, 4)[step % 3]
        ranks = [consumer(folder, ack="commit", dp_rank=r, dp_world_size=world) for r in range(world)]
        for rank in ranks:
            rank.load_state_dict(state)
        assert torch.equal(torch.stack([r.get_batch("train")[0] for r in ranks], 1).flatten(0, 1), expected[step])
        reader.get_batch("train")


def test_prefer_queue_decides_where_both_are(folder, consumer):
    torch.save(rows(0, 4), folder / "train_batches_0.pt")
    queue_file(folder, 1, 0, 50)
    assert consumer(folder, prefer_queue=False).get_batch("train")[0][0, 0] == 0
    assert consumer(folder).get_batch("train")[0][0, 0] == 50


def test_a_queue_filled_by_the_document_s_provider_is_read_by_number_not_by_clock(folder, consumer):
    for stamp, seq in ((900, 0), (100, 1), (500, 2)):
        queue_file(folder, stamp, seq, 10 * seq)
    reader = consumer(folder)
    got = [reader.get_batch("train")[0][0, 0].item() for _ in range(6)]
    assert got == [0, 4, 10, 14, 20, 24]
    assert reader._queue.background.drain(10)
    assert not list((folder / "queue" / "train").iterdir()), "deletion is what its backpressure counts"


def test_a_flipped_bit_in_a_foreign_pt_is_found_by_the_archive_s_own_sums(folder, consumer):
    queue_file(folder, 1, 0, 7)
    (path,) = (folder / "queue" / "train").iterdir()
    raw = bytearray(path.read_bytes())
    raw[raw.find((7).to_bytes(8, "little"))] ^= 1
    path.write_bytes(raw)
    reader = consumer(folder, deadline=0.3)
    with pytest.raises(DeadlineExceeded, match=r"spool.empty.*File 1 of train"):
        reader.get_batch("train")
    (reason,) = (folder / "quarantine" / "train").glob("*.reason.json")
    assert "fails its checksum" in reason.read_text()


def test_a_bad_file_that_nobody_makes_again_is_passed_over_by_every_run(folder, consumer):
    for seq in range(4):
        queue_file(folder, 100 + seq, seq, 10 * seq)
    (folder / "queue" / "train" / "101-000001-2.pt").write_bytes(b"junk")
    for _ in range(2):
        reader = consumer(folder, ack="commit", deadline=5)
        assert [reader.get_batch("train")[0][0, 0].item() for _ in range(6)] == [0, 4, 20, 24, 30, 34]
        bad = reader.stats()["bad_files"]
        reader.close()
    assert bad == 0, "it was set aside by the first"


def test_a_reader_that_is_faster_than_the_document_s_provider_waits_for_it(folder, consumer):
    reader = None
    for seq in range(3):
        queue_file(folder, 100 + seq, seq, 10 * seq)
        reader = reader or consumer(
            folder, ack="commit", deadline=5
        )  # nothing is deleted: the files it has read lie there
        assert [reader.get_batch("train")[0][0, 0].item() for _ in range(2)] == [10 * seq, 10 * seq + 4]
        assert not reader.wait_for_data("train", 0.1)
    state = reader.state_dict()
    reader.close()
    later = consumer(folder, ack="commit", deadline=5)
    later.load_state_dict(state)
    assert not later.wait_for_data("train", 0.1)


def test_a_provider_does_not_fill_a_folder_of_another_program(folder, drawn):
    made = drawn()
    made.data_dir = folder
    made.folder = type(made.folder)(folder)
    before = (folder / "meta.pkl").read_bytes()
    with pytest.raises(ConfigError, match=r"has a meta that another program wrote \(dataset_name 'old'\)"):
        made.run(max_files=1)
    assert (folder / "meta.pkl").read_bytes() == before


def test_a_legacy_file_without_x_and_y_or_with_another_shape_is_named(folder, consumer):
    torch.save({"x": torch.zeros(4, 2)}, folder / "train_batches_0.pt")
    with pytest.raises(FileCorrupt, match=r"train_batches_0.pt is not a legacy batch file with x and y"):
        consumer(folder).get_batch("train")
    torch.save({"x": torch.zeros(4, 2), "y": torch.zeros(3, 2)}, folder / "train_batches_0.pt")
    with pytest.raises(DataError, match="has 4 rows of x and 3 of y"):
        consumer(folder).get_batch("train")
    with pytest.raises(ConfigError, match="neither a queue nor files named val_batches_"):
        consumer(folder).get_batch("val")


def test_a_validation_split_without_a_readable_row_is_an_error_and_no_endless_search(folder, consumer):
    (folder / "queue" / "val").mkdir(parents=True)
    (folder / "queue" / "val" / "100-000000-2.pt").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"no file of val in .* holds a row"):
        consumer(folder, deadline=60).get_batch("val")
