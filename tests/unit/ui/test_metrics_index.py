"""The index of a metrics file: every spike kept, the later line of a step counts, memory bounded, damage passed over."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.ui.metrics_index import MAX_KEYS, MetricsIndex, sampled_lines
from headrace.ui.run_view import RunView


def written(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_merged_buckets_keep_every_spike_and_the_sums(tmp_path):
    values = np.zeros(20_000)
    values[15_123], values[3] = 9.0, -4.0
    file = written(tmp_path / "m.jsonl", [{"step": i, "x": v} for i, v in enumerate(values)])
    index = MetricsIndex(file, buckets=64)
    index.update()
    found = index.curve("x", points=100)
    assert len(found["steps"]) <= 102
    assert {3, 15_123} <= set(found["steps"])
    assert index.extremes("x") == (-4.0, 3, 9.0, 15_123)
    assert index.total("x") == 5.0
    exact = index.curve("x", first=15_100, last=15_150)
    assert exact["steps"] == list(range(15_100, 15_151)), "a range is read again line by line"
    assert exact["values"][23] == 9.0


def test_merged_buckets_keep_the_extremes_of_a_key_that_few_lines_have(tmp_path):
    rare = {3: 9.0, 40: 1.0, 97: 2.0}
    index = MetricsIndex(written(tmp_path / "m.jsonl", []), buckets=8)
    for step in range(100):  # one by one, so that full buckets are merged
        with open(tmp_path / "m.jsonl", "a") as out:
            out.write(json.dumps({"step": step, "x": 0.0} | ({"rare": rare[step]} if step in rare else {})) + "\n")
        index.update()
    assert index.extremes("rare") == (1.0, 40, 9.0, 3)


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=40), min_size=1, max_size=5),
    st.integers(2, 9),
    st.integers(1, 9),
)
def test_a_run_that_goes_back_holds_what_a_dict_of_steps_would(attempts, buckets, chunk):
    """Attempts begin at some step and go on: what a later attempt reached again replaces the rest of the earlier one."""
    import tempfile

    lines, truth, value = [], {}, 0.0
    for attempt in attempts:
        start = attempt[0] if not truth else min(attempt[0], max(truth) + 1)
        truth = {s: v for s, v in truth.items() if s < start}
        for step in range(start, start + len(attempt)):
            value += 1.0
            truth[step] = value
            lines.append({"step": step, "x": value})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.jsonl"
        file.touch()
        index = MetricsIndex(file, buckets=2 * buckets)
        for at in range(0, len(lines), chunk):
            with open(file, "a") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines[at : at + chunk])
            index.update()
        assert index.last_step == max(truth)
        assert index.total("x") == pytest.approx(sum(truth.values()))
        low, high = min(truth, key=lambda s: truth[s]), max(truth, key=lambda s: truth[s])
        assert index.extremes("x") == (truth[low], low, truth[high], high)


def test_lines_that_come_one_by_one_are_found_again_by_step_also_after_a_rewind(tmp_path):
    file = tmp_path / "m.jsonl"
    file.touch()
    index = MetricsIndex(file, buckets=8)
    truth: dict[int, float] = {}
    for step in (
        *range(1, 100),
        *range(51, 80),
        *range(60, 90),
    ):  # killed after step 99, resumed from 50, and again from 59
        truth = {s: v for s, v in truth.items() if s < step} | {step: float(len(truth))}
        with open(file, "a") as out:
            out.write(json.dumps({"step": step, "x": truth[step]}) + "\n")
        index.update()
    assert index.total("x") == sum(truth.values())
    for first in range(1, 89, 7):
        found = index.curve("x", first=first, last=first + 5)
        assert found["steps"] == [s for s in truth if first <= s <= first + 5]
        assert found["values"] == [truth[s] for s in found["steps"]]


def test_a_counter_is_drawn_per_step_and_summed_whole(tmp_path):
    lines = [{"step": 1, "n": 5, "steps_in_interval": 1}, {"step": 10, "n": 45, "steps_in_interval": 9}]
    index = MetricsIndex(written(tmp_path / "m.jsonl", lines), per_step=lambda key: key == "n")
    index.update()
    assert index.curve("n")["values"] == [5, 5], "no false collapse at the first line"
    assert index.total("n") == 50


def test_damage_is_passed_over_and_counted(tmp_path):
    file = tmp_path / "m.jsonl"
    huge = b'{"step": 2, "x": "' + b"y" * (5 << 20) + b'"}\n'
    file.write_bytes(
        b'{"step": 1, "x": 1.5}\n{"torn\n[]\n7\n{"step": "no"}\n{"step": true, "x": 1}\n{"step": -4, "x": 1}\n' + huge
        + b'{"step": 3, "x": null, "t": "text", "f": true, "l": [1]}\n{"step": 4, "x": 1e400}\n{"step": 5, "x": '
        + str(10**400).encode() + b'}\n{"step": 6, "x": 2.5}\n{"step": 7, "x": NaN}\n{"step": 8, "x": 3'
    )  # fmt: skip
    index = MetricsIndex(file)
    index.update()
    assert index.curve("x")["values"] == [1.5, None, 2.5, None], "NaN, which Python writes, is a line without a number"
    assert index.known_keys() == ["x"]
    assert index.damaged >= 7
    with open(file, "ab") as out:
        out.write(b".5}\n")
    index.update()
    assert index.curve("x")["values"][-1] == 3.5, "the line that was being written is taken when it is whole"


def test_keys_without_end_do_not_take_memory_without_end(tmp_path):
    lines = [{"step": s, **{f"k/{s}/{i}": 1.0 for i in range(200)}} for s in range(1, 40)]
    index = MetricsIndex(written(tmp_path / "m.jsonl", lines))
    index.update()
    assert len(index.known_keys()) == MAX_KEYS
    assert index.keys_left_out > 0


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path):
    file = written(tmp_path / "m.jsonl", [{"step": s, "x": 1.0} for s in range(1, 50)])
    index = MetricsIndex(file)
    index.update()
    before = index.generation
    written(file, [{"step": 1, "x": 7.0}])
    index.update()
    assert index.generation > before
    assert index.curve("x") == {"steps": [1], "values": [7.0]}


def test_some_lines_of_a_long_file_are_shown_until_it_is_read(tmp_path, monkeypatch):
    file = written(
        tmp_path / "metrics.jsonl", [{"step": s, "x": math.sin(s / 3000), "pad": "p" * 900} for s in range(1, 20_001)]
    )
    view = RunView("run", tmp_path)
    monkeypatch.setattr("headrace.ui.run_view._OUTLINE_BYTES", 1 << 20)
    view.refresh()
    outline = view.index.curve("x", points=400)
    assert view.status()["sketched"]
    assert outline["steps"][0] == 1
    assert outline["steps"][-1] == 20_000
    assert max(outline["values"]) == pytest.approx(1.0, abs=0.01)
    view.refresh(60)
    assert not view.status()["sketched"]
    assert view.index.lines == 20_000
    assert len(sampled_lines(file, 50)) in range(40, 60)


def test_what_would_block_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match="is not a regular file"):
        MetricsIndex(tmp_path / "metrics.jsonl").update()
    with pytest.raises(DataError, match="does not exist"):
        MetricsIndex(tmp_path / "nowhere").update()
