"""A dump gives back what was dumped, or says where it is damaged; a replay tells what a step costs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.errors import ConfigError, FileCorrupt
from headrace.jobs.replay import replay
from headrace.rollouts import interleave_rollout, rollout_from_verifiers
from headrace.rollouts.dumps import dump_raw_rollouts, read_dump, synthetic_rollouts


def test_a_dump_gives_back_plain_values_and_names_what_it_left_out(tmp_path):
    raw = [
        {"example_id": 1, "data": b"\x00\xff", "ids": np.arange(3), "n": np.float32(0.5), "response": object()},
        {"text": "é"},
    ]
    assert dump_raw_rollouts(tmp_path / "d" / "step_1.dump", iter(raw)) == 2
    assert list(read_dump(tmp_path / "d" / "step_1.dump")) == [
        {"example_id": 1, "data": b"\x00\xff", "ids": [0, 1, 2], "n": 0.5, "response": {"omitted": "object"}},
        {"text": "é"},
    ]


def test_every_flipped_bit_and_every_cut_of_a_dump_is_found(tmp_path):
    path = tmp_path / "step.dump"
    dump_raw_rollouts(path, [{"a": list(range(20))}, {"b": "text"}, {}])
    whole = path.read_bytes()
    for at in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(FileCorrupt):
            list(read_dump(path))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FileCorrupt):
            list(read_dump(path))
    with pytest.raises(ConfigError, match="cannot be opened"):
        list(read_dump(tmp_path / "nothing"))


@pytest.mark.parametrize(("kind", "rollouts", "turns"), [("r3", 128, 4), ("text", 256, 30)])
def test_a_synthetic_step_has_the_rollouts_and_turns_it_says(kind, rollouts, turns):
    made = list(synthetic_rollouts(kind, scale=0.002))
    assert len(made) == rollouts
    rollout = rollout_from_verifiers(made[5])
    assert len(rollout.trajectory) == turns
    (sample,) = interleave_rollout(rollout)
    assert (sample.experts is not None) == (kind == "r3")
    with pytest.raises(ConfigError, match="scale"):
        list(synthetic_rollouts(kind, scale=0))


@pytest.mark.parametrize("mode", ["arrival", "boundary"])
def test_a_replay_tells_wall_cpu_and_lag_of_every_phase(tmp_path, mode):
    path = tmp_path / "r3.dump"
    dump_raw_rollouts(path, synthetic_rollouts("r3", scale=0.001))
    found = replay(path, mode=mode, synthetic_traffic=5, folder=tmp_path, idle=0.02)
    assert [c.phase for c in found.phases] == ["idle", "arrival", "boundary"]
    assert (found.rollouts, found.samples, found.refused) == (128, 128, {})
    assert found.tokens == 128 * 4 * 6
    assert found.bytes > found.tokens * 384
    assert all(c.wall > 0 and c.lag_max >= c.lag_p99 >= 0 for c in found.phases)
    assert found.breakdown.startswith("Step 0 phase breakdown: ")
    assert [p.name for p in tmp_path.iterdir()] == ["r3.dump"]
    json.dumps(found.to_dict())
