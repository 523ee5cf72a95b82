"""The oracle bites: every known kind of broken resume is found, and an exact one passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.testing import assert_exact_resume, first_difference, frozen


class Counting:
    """An exact loader over 40 items; what a subclass breaks is what the oracle must find."""

    def __init__(self, total: int = 40) -> None:
        self.total, self.at = total, 0

    def __iter__(self):
        while self.at < self.total:
            self.at += 1
            yield {"x": np.full(3, self.at - 1)}

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_an_exact_loader_passes_and_the_report_says_what_was_compared():
    report = assert_exact_resume(Counting, steps=20)
    assert report.resumes >= 60
    assert not report.ended
    assert assert_exact_resume(Counting, steps=60).ended


class SavesWhatWasProduced(Counting):
    def state_dict(self):
        return {"at": min(self.at + 1, self.total)}


class RestartsAtTheSecondResume(Counting):
    resumed = False

    def load_state_dict(self, state):
        self.at = 0 if state.get("resumed") else state["at"]
        self.resumed = True

    def state_dict(self):
        return {"at": self.at, "resumed": self.resumed}


class LosesTheLastItems(Counting):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.total -= 2


class DeliversTheLastItemTwice(Counting):
    def load_state_dict(self, state):
        self.at = state["at"] - (state["at"] == self.total)


class ReordersAfterAResume(Counting):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.reverse = True

    def __iter__(self):
        for item in super().__iter__():
            yield {"x": item["x"][::-1] + (getattr(self, "reverse", False) and self.at > 7)}


class ForgetsItsStateWhenSavedRightAfterLoading(Counting):
    fresh = False

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.fresh = True

    def __iter__(self):
        self.fresh = False
        return super().__iter__()

    def state_dict(self):
        return {"at": 0 if self.fresh else self.at}


@pytest.mark.parametrize(
    "broken",
    [SavesWhatWasProduced, RestartsAtTheSecondResume, LosesTheLastItems, DeliversTheLastItemTwice, ReordersAfterAResume,
     ForgetsItsStateWhenSavedRightAfterLoading],
)  # fmt: skip
def test_a_broken_loader_is_found(broken):
    with pytest.raises(AssertionError, match="resume is not exact: saved after item"):
        assert_exact_resume(broken, steps=45)


def test_a_hugging_face_style_stateful_loader_of_torch_can_be_checked():
    class Sampled:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(0)

        def __iter__(self):
            while True:
                yield torch.randint(0, 100, (4,), generator=self.generator)

        def state_dict(self):
            return {"generator": self.generator.get_state()}  # not JSON

        def load_state_dict(self, state):
            self.generator.set_state(state["generator"])

    assert assert_exact_resume(Sampled, steps=10).largest_state == 0


def test_a_difference_is_told_by_its_place():
    a, b = frozen({"x": torch.zeros(2, 3)}), frozen({"x": torch.zeros(2, 3)})
    assert first_difference(a, b) is None
    b["x"][1, 2] = 5
    assert first_difference(a, b) == "item['x'][1, 2]: np.float32(0.0) expected, np.float32(5.0) delivered"
    assert "keys" in (first_difference({"a": 1}, {"b": 1}) or "")
    assert "parts" in (first_difference([1], [1, 2]) or "")
    assert "expected" in (first_difference(1, 1.0) or "")
