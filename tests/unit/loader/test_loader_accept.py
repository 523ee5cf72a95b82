"""What changed since a state was saved is accepted by one word, or the first refusal says that it cannot be."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

import pytest

from headrace.errors import CursorMismatch, DataChanged
from headrace.loader import Loader, TextDataset
from headrace.order import file_fingerprint

ROWS = 4000


def write_rows(path: Path, most_words: int = 60) -> None:
    path.write_text("".join(f'{{"text": "row {i:06d} {"word " * (i % most_words)}"}}\n' for i in range(ROWS)))


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    write_rows(path)
    return path


def loader(tmp_path: Path, *, workers: int = 0, **options) -> Loader:
    data = TextDataset(
        ["jsonl:a.jsonl"], **({"seq_len": 256, "lanes": 4, "base": tmp_path, "cache": tmp_path / "cache"} | options)
    )
    return Loader(
        data,
        global_batch_size=4,
        tokenizer_workers=0 if workers else 1,
        data_loader_workers=workers,
        prefetch_batches=1,
    )


def state_after(tmp_path: Path, steps: int) -> dict:
    with loader(tmp_path) as before:
        for _ in range(steps):
            next(before)
        return before.state_dict()


def edited(path: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    path.write_bytes(path.read_bytes().replace(old, new))


def texts_of(batches: Loader) -> str:
    return "".join(batches.data.tokenizer.decode(row) for batch in batches for row in batch["input_ids"].numpy())


@pytest.mark.parametrize("workers", [0, 1])
def test_data_accepted_at_a_resume_is_read_to_its_end_without_another_word(tmp_path, rows, workers):
    state = state_after(tmp_path, 3)
    edited(rows, b"row 0", b"Row 0")
    with loader(tmp_path, workers=workers) as after:
        with pytest.raises(CursorMismatch, match=r'accept=\{"data"\} \(command: --accept data\)'):
            after.load_state_dict(state)
        after.load_state_dict(state, accept={"data"})
        text = texts_of(after)
        assert "Row 0" in text
        assert "row 0" not in text
    with loader(tmp_path) as again:  # what was accepted is the truth from then on
        again.load_state_dict(after.state_dict())
        assert list(again)


def test_accepted_data_whose_lines_moved_is_counted_anew(tmp_path, rows):
    write_rows(rows, 500)
    state = state_after(tmp_path, 3)
    before, status = rows.read_bytes(), rows.stat()
    sampled = file_fingerprint(rows, status.st_size)
    for row in range(200, ROWS - 200, 97):  # a place between the sampled blocks, behind an unchanged mtime
        line = b'{"text": "row %06d word' % row
        if line not in before:
            continue
        rows.write_bytes(before.replace(line, b'{"text": "row"}\n{"text":"', 1))
        if file_fingerprint(rows, status.st_size) == sampled:
            break
    else:
        pytest.fail("every place that was tried lies in a sampled block")
    os.utime(rows, ns=(status.st_atime_ns, status.st_mtime_ns))
    with loader(tmp_path) as after:
        after.load_state_dict(state)
        with pytest.raises(
            DataChanged, match=r'a.jsonl .*load_state_dict\(state, accept=\{"data"\}\) \(command: --accept data\)'
        ):
            list(after)
    with loader(tmp_path) as after:
        after.load_state_dict(state, accept={"data"})
        assert after.data.sources[0].manifest.rows == ROWS + 1
        assert list(after)


def test_a_new_run_notes_what_changed_since_an_earlier_one_and_reads_it_as_it_is(tmp_path, rows, caplog):
    with loader(tmp_path) as earlier:
        list(earlier)
    edited(rows, b"row 0", b"Row 0")
    with caplog.at_level(logging.WARNING, "headrace.sources"), loader(tmp_path) as new:
        text = texts_of(new)
    assert "Row 0" in text
    assert "row 0" not in text
    [noted] = [record.getMessage() for record in caplog.records]
    assert "a.jsonl" in noted
    assert "changed since an earlier run read it" in noted


def test_what_a_new_run_has_read_may_not_change_under_it(tmp_path, rows):
    with loader(tmp_path, exhausted="repeat", chunk_memory=0) as running:
        for _ in range(300):
            next(running)
        edited(rows, b"row 0", b"Row 0")
        with pytest.raises(DataChanged, match=r"a.jsonl"):
            list(itertools.islice(running, 3000))


def test_lanes_are_never_accepted_and_the_first_refusal_says_so(tmp_path, rows):
    state = state_after(tmp_path, 3)
    with loader(tmp_path, lanes=8, seed=5) as other:
        with pytest.raises(
            CursorMismatch,
            match=r'config:lanes cannot be accepted: .*start a new run. The rest can be accepted with accept=\{"config"\}',
        ):
            other.load_state_dict(state)
        with pytest.raises(CursorMismatch, match=r"config:lanes cannot be accepted: .*start a new run.$"):
            other.load_state_dict(state, accept={"config"})


def test_a_caller_may_say_what_cannot_be_accepted(tmp_path, rows):
    state = state_after(tmp_path, 3)
    with loader(tmp_path, seq_len=128) as other:
        with pytest.raises(CursorMismatch, match=r"config:seq_len cannot be accepted: the model has 256 positions"):
            other.load_state_dict(state, accept={"config"}, fixed={"config:seq_len": "the model has 256 positions"})
        other.load_state_dict(state, accept={"config"})
        assert list(other)
