"""Lanes and windows that follow the size of the data, and stay with the run."""

import json

import numpy as np
import pytest

from headrace.errors import CursorMismatch
from headrace.loader import Loader, TextDataset
from headrace.loader.dataset import fitting_lanes, fitting_window_blocks


@pytest.fixture
def books(tmp_path):
    (tmp_path / "books").mkdir()
    for i in range(20):
        (tmp_path / "books" / f"{i:02}.txt").write_text(f"book {i} " + "some words of it " * (60 + i))
    return tmp_path


def dataset(folder, **options):
    return TextDataset([f"txt:{folder}/books"], seq_len=32, cache=folder / "cache", **options)


def taken(loader, steps):
    return [next(loader)["input_ids"].clone() for _ in range(steps)]


def equal(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("documents", "rows", "lanes"),
    [(0, 0, 1), (10, 9999, 1), (16, 9999, 2), (20, 9999, 2), (383, 9999, 24), (384, 384, 48), (384, 383, 24), (10**9, 10**9, 48)],
)  # fmt: skip
def test_lanes_are_the_largest_divisor_of_48_that_leaves_each_8_documents_and_rows(documents, rows, lanes):
    assert fitting_lanes(documents, rows) == lanes


@pytest.mark.parametrize(("seq_len", "blocks"), [(128, 64), (4096, 64), (8192, 32), (32768, 8), (1 << 20, 8)])
def test_a_window_has_64_rows_or_as_many_as_fit_into_262144_tokens_but_8_at_least(seq_len, blocks):
    assert fitting_window_blocks(seq_len) == blocks


def test_a_few_whole_books_fill_every_row_of_a_batch(books):
    data = dataset(books)
    assert data.lanes == 2
    with Loader(data, global_batch_size=4) as loader:
        counts = [int((batch["labels"] != -100).any(dim=1).sum()) for batch in loader]
    assert sum(counts) / (4 * len(counts)) > 0.9  # with 48 lanes it is 40 %


def test_sizes_that_are_given_are_used_as_they_are(books):
    data = dataset(books, lanes=48, window_blocks=5, shuffle_chunks=3)
    assert data.sizes == {"lanes": 48, "window_blocks": 5, "shuffle_chunks": 3}


@pytest.mark.parametrize("workers", [{"tokenizer_workers": 0}, {"data_loader_workers": 1}])
def test_a_run_that_began_with_48_lanes_continues_with_them(books, workers):
    before = {"lanes": 48, "window_blocks": 3, "shuffle_chunks": 1, "exhausted": "repeat"}
    whole = Loader(dataset(books, **before), global_batch_size=6)
    expected = taken(whole, 9)
    first = Loader(dataset(books, **before), global_batch_size=6)
    taken(first, 4)
    state = json.loads(json.dumps(first.state_dict()))
    with Loader(dataset(books, exhausted="repeat"), global_batch_size=6, **workers) as later:
        assert later.data.lanes == 2
        assert later.data.shuffle_chunks == 16
        assert "config:shuffle_chunks" not in state["fingerprint"]  # as in states of earlier versions
        later.load_state_dict(state)
        assert later.data.sizes == {"lanes": 48, "window_blocks": 3, "shuffle_chunks": 1}
        assert equal(taken(later, 5), expected[4:])
        assert later.state_dict()["body"]["lanes"] == 48
    whole.close()
    first.close()


def test_a_state_that_is_refused_changes_no_size(books):
    other = Loader(dataset(books, lanes=48, seed=9), global_batch_size=6)
    taken(other, 2)
    loader = Loader(dataset(books), global_batch_size=6)
    expected = taken(loader, 5)
    again = Loader(dataset(books), global_batch_size=6)
    start = taken(again, 2)
    with pytest.raises(CursorMismatch, match="seed"):
        again.load_state_dict(other.state_dict())
    assert again.data.sizes == loader.data.sizes
    assert equal(start + taken(again, 3), expected)
    for one in (other, loader, again):
        one.close()


@pytest.mark.parametrize("lanes", ["0", "-3", "1" * 40, "ten", None, [48]])
def test_a_state_whose_lanes_are_no_number_is_refused(books, lanes):
    loader = Loader(dataset(books), global_batch_size=6)
    taken(loader, 1)
    state = loader.state_dict()
    state["fingerprint"] = dict(state["fingerprint"]) | {"config:lanes": lanes}
    with pytest.raises(CursorMismatch):
        loader.load_state_dict(state)
    loader.close()


def test_data_that_grew_after_the_first_start_keeps_the_lanes_it_began_with(books):
    first = Loader(dataset(books, exhausted="repeat"), global_batch_size=2)
    taken(first, 3)
    for i in range(20, 400):
        (books / "books" / f"{i}.txt").write_text("another book " * 60)
    later = Loader(dataset(books, exhausted="repeat"), global_batch_size=2)
    assert later.data.lanes == 48
    later.load_state_dict(first.state_dict(), accept={"data"})
    assert later.data.lanes == 2
    taken(later, 1)
    first.close()
    later.close()
