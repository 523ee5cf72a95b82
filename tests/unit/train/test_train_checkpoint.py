"""The store: what is kept, what is fallen back to, what is set aside."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.train import CheckpointStore


def arrays_of(step: int) -> dict[str, np.ndarray]:
    return {"model/a": np.full(1000, step, np.float32), "model/b": np.full((3, 5), step % 1000, np.uint16)}


def filled(folder, *steps: int, keep: int = 2) -> tuple[CheckpointStore, list[str]]:
    said: list[str] = []
    store = CheckpointStore(folder, keep=keep, report=said.append)
    for step in steps:
        store.save(step, arrays_of(step), {"model/b": "BF16"}, {"step": step})
    return store, said


def flip_a_bit(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def test_what_was_saved_comes_back_with_its_dtypes_and_its_meta(tmp_path):
    store, _ = filled(tmp_path / "new" / "folder", 20)
    step, found = store.latest()
    assert step == 20
    assert found.path.name == "step-00000020.safetensors"
    assert found.meta == {"step": 20}
    assert found.dtypes["model/b"] == "BF16"
    assert all(np.array_equal(found.arrays[name], array) for name, array in arrays_of(20).items())


def test_a_new_run_has_no_latest(tmp_path):
    assert CheckpointStore(tmp_path).latest() is None
    assert CheckpointStore(tmp_path / "absent", writer=False).latest() is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_exactly_the_newest_generations_are_kept(tmp_path, keep):
    store, _ = filled(tmp_path, 10, 20, 30, 40, keep=keep)
    assert store.steps() == [10, 20, 30, 40][-keep:]
    assert len(list(tmp_path.iterdir())) == keep


def test_an_old_generation_is_removed_only_when_the_new_one_is_there(tmp_path):
    store, _ = filled(tmp_path, 10, 20)
    with pytest.raises(TypeError, match="complex128"):
        store.save(30, {"model/a": np.zeros(3, complex)})
    assert store.steps() == [10, 20]


@pytest.mark.parametrize("at", [3, 40, -1], ids=["length", "header", "data"])
def test_a_flipped_bit_in_the_newest_falls_back_to_the_one_before_and_says_so(tmp_path, at):
    store, said = filled(tmp_path, 10, 20)
    flip_a_bit(store.path(20), at)
    step, found = store.latest()
    assert step == 10
    assert found.meta == {"step": 10}
    aside = tmp_path / "quarantine" / "step-00000020.safetensors"
    assert aside.exists()
    assert "step-00000020" in json.loads(aside.with_name(aside.name + ".reason.json").read_text())["reason"]
    assert len(said) == 1
    assert "goes on from step 10" in said[0]
    assert str(aside) in said[0]
    store.save(20, arrays_of(20), None, {"step": 20})
    assert store.latest()[0] == 20


def test_damage_without_a_listener_is_a_warning_not_silence(tmp_path):
    filled(tmp_path, 10, 20)
    store = CheckpointStore(tmp_path)
    flip_a_bit(store.path(20), -1)
    with pytest.warns(UserWarning, match="goes on from step 10"):
        assert store.latest()[0] == 10


def test_if_no_checkpoint_verifies_the_run_is_refused_every_time_and_nothing_is_moved(tmp_path):
    store, _ = filled(tmp_path, 10, 20)
    for step in (10, 20):
        flip_a_bit(store.path(step), -1)
    for _ in range(2):
        with pytest.raises(FileCorrupt, match=r"none of the 2 checkpoints in .* verifies .*Restore one from a copy"):
            store.latest()
    assert store.steps() == [10, 20]


def test_a_checkpoint_that_cannot_be_opened_is_not_taken_for_a_damaged_one(tmp_path):
    store, _ = filled(tmp_path, 10)
    store.path(20).symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match=r"step-00000020\.safetensors cannot be opened.*Make it readable"):
        store.latest()
    assert store.steps() == [10, 20]


def test_saving_a_step_again_replaces_it(tmp_path):
    store, said = filled(tmp_path, 10, 20)
    old = store.open(20)
    store.save(20, arrays_of(7), None, {"step": 20})
    assert store.steps() == [10, 20]
    assert store.open(20).arrays["model/a"][0] == 7
    assert old.arrays["model/a"][0] == 20
    assert said == []


def test_a_run_that_went_back_does_not_resume_in_the_future_it_left(tmp_path):
    store, said = filled(tmp_path, 40, 60)
    store.save(50, arrays_of(50), None, {"step": 50})
    assert store.latest()[0] == 50
    assert store.steps() == [40, 50]
    assert (tmp_path / "superseded" / "step-00000060.safetensors").exists()
    assert len(said) == 1
    assert "step 60 was moved" in said[0]


def test_a_reader_changes_nothing(tmp_path):
    filled(tmp_path, 10, 20)
    (tmp_path / ".tmp-1-abc").write_bytes(b"of a live writer")
    said: list[str] = []
    reader = CheckpointStore(tmp_path, writer=False, report=said.append)
    flip_a_bit(reader.path(20), -1)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert reader.latest()[0] == 10
    assert len(said) == 1
    with pytest.raises(StorageError, match="read only"):
        reader.save(30, arrays_of(30))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_writer_sweeps_what_a_dead_writer_left_and_other_files_are_not_checkpoints(tmp_path):
    (tmp_path / ".tmp-1-abc").write_bytes(b"half a checkpoint")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-20.safetensors").write_bytes(b"")
    store = CheckpointStore(tmp_path)
    assert store.steps() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-20.safetensors"]


def test_steps_are_ordered_as_numbers_beyond_eight_digits(tmp_path):
    store, _ = filled(tmp_path, 99_999_999, 100_000_000)
    assert store.latest()[0] == 100_000_000


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 1 checkpoint, got keep=0"):
        CheckpointStore(tmp_path, keep=0)
