"""Fields of a batch: what fits, what does not, and the way to JSON and back."""

import numpy as np
import pytest
import torch

from headrace.batch import BatchSpec, FieldSpec, lm_batch_spec
from headrace.errors import DataError

SPEC = BatchSpec(
    [FieldSpec("x", "int64", (3,), "input"), FieldSpec("w", "bfloat16"), FieldSpec("r", "int32", ragged=True)]
)


def batch(rows=2, **changes):
    arrays = {
        "x": np.zeros((rows, 3), np.int64),
        "w": np.zeros(rows, np.uint16),
        "r": np.arange(5, dtype=np.int32),
        "r_offsets": np.arange(rows + 1),
    }
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def test_rows_are_counted_in_numpy_and_in_torch():
    assert SPEC.check(batch()) == 2
    assert SPEC.check({name: torch.from_numpy(array) for name, array in batch(w=np.zeros(2, np.uint16)).items()}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "'x' is missing"),
        ({"x": np.zeros((2, 4), np.int64)}, r"'x' has shape \[2, 4\], expected \[2, 3\]"),
        ({"x": np.zeros((2, 3), np.int32)}, "'x' is int32, expected int64"),
        ({"w": np.zeros(3, np.uint16)}, r"'w' has shape \[3\], expected \[2\]"),
        ({"r_offsets": None}, "'r_offsets' is missing"),
        ({"r_offsets": np.arange(2)}, r"'r_offsets' has shape \[2\], expected \[3\]"),
        ({"y": np.zeros(2)}, "'y' is not in the schema"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(DataError, match=message):
        SPEC.check(batch(**changes))


def test_an_expected_number_of_rows_is_held():
    with pytest.raises(DataError, match=r"expected \[3, 3\]"):
        SPEC.check(batch(), rows=3)


def test_json_gives_the_same_spec_and_names_must_differ():
    assert BatchSpec.from_json(SPEC.to_json()) == SPEC
    with pytest.raises(ValueError, match="different names"):
        BatchSpec([FieldSpec("a", "int8", ragged=True), FieldSpec("a_offsets", "int64")])


def test_a_text_batch_without_borders_has_no_longest_piece():
    assert [f.name for f in lm_batch_spec(8, ("input_ids",))] == ["input_ids", "sample_index"]
    with pytest.raises(DataError, match="'cu_seqlens' has shape"):
        lm_batch_spec(8, ("input_ids", "cu_seqlens")).check(
            {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "sample_index": torch.zeros(1, dtype=torch.int64),
             "cu_seqlens": torch.zeros(1, 1, dtype=torch.int32), "max_seqlen": 8}
        )  # fmt: skip
