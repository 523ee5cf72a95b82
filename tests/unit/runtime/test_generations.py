"""Numbered generations of a saved state. How a run and a reduction use them is tested with those."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.errors import DataError, FileCorrupt, StorageError
from headrace.runtime.generations import Generations


def opened(folder, name="state", **options):
    words = {"resumes": "the work goes on from", "remedy": "Remove it."}
    return Generations(folder, name, digits=4, **words, **options)


def filled(folder, *numbers, **options):
    files = opened(folder, keep=9, **options)
    for number in numbers:
        files.save(number, {"a": np.full(3, number)}, {"number": number})
    return files


def number_of(found):
    return found.meta["number"]


def test_the_newest_that_verifies_is_used_and_damaged_ones_are_set_aside_with_their_reasons(tmp_path):
    said = []
    files = filled(tmp_path, 1, 2, 3, report=said.append)
    for number in (2, 3):
        files.path(number).write_bytes(b"no container")
    assert files.newest(number_of) == (1, 1)
    assert files.numbers() == [1]
    for number in (2, 3):
        aside = tmp_path / "quarantine" / f"state-{number:04d}.safetensors"
        assert aside.read_bytes() == b"no container"
        reason = json.loads(aside.with_name(aside.name + ".reason.json").read_text())["reason"]
        assert f"{reason}; it is kept as {aside}, and the work goes on from 1" in said


def test_what_the_reader_refuses_as_damage_is_set_aside_and_what_it_passes_over_stays(tmp_path):
    def read(found):
        if number_of(found) == 3:
            raise DataError("its numbers do not add up")
        return None if number_of(found) == 2 else number_of(found)

    files = filled(tmp_path, 1, 2, 3)
    with pytest.raises(DataError):
        files.newest(read)
    assert files.newest(read, damage=(FileCorrupt, DataError)) == (1, 1)
    assert files.numbers() == [1, 2]


def test_nothing_is_moved_when_none_verifies(tmp_path):
    files = filled(tmp_path, 1, 2)
    for number in (1, 2):
        files.path(number).write_bytes(b"")
    with pytest.raises(FileCorrupt, match=r"none of the 2 checkpoints .*Remove it\.$"):
        files.newest(number_of)
    assert files.numbers() == [1, 2]


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path):
    files = filled(tmp_path, 1)
    files.path(2).symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match="Make it readable"):
        files.newest(number_of)
    assert files.numbers() == [1, 2]


def test_names_in_one_folder_do_not_mix(tmp_path):
    filled(tmp_path, 1, 2)
    other = opened(tmp_path, "state-0001", keep=1)
    other.save(7, {}, {"number": 7})
    other.save(8, {}, {"number": 8})
    assert other.numbers() == [8]
    assert opened(tmp_path).numbers() == [1, 2]
