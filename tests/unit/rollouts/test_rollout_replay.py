"""A dump gives back what was dumped, or says where it is damaged; a replay tells what a step costs."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from headrace.cli.replay import replay as verb
from headrace.cli.terminal import Output
from headrace.errors import ConfigError, FileCorrupt, StorageError
from headrace.rollouts import interleave_rollout, rollout_from_verifiers
from headrace.rollouts import replay as module
from headrace.rollouts.dumps import dump_raw_rollouts, read_dump, synthetic_rollouts
from headrace.rollouts.replay import ALONE, PhaseCost, replay, replay_phase


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


def test_a_replay_tells_wall_cpu_and_lag_of_every_phase(tmp_path):
    path = tmp_path / "r3.dump"
    dump_raw_rollouts(path, synthetic_rollouts("r3", scale=0.001))
    found = replay(path, synthetic_traffic=5, folder=tmp_path, idle=0.02)
    assert [c.phase for c in found.phases] == ["idle", "arrival", "boundary"]
    assert (found.rollouts, found.samples, found.refused) == (128, 128, {})
    assert found.tokens == 128 * 4 * 6
    assert found.bytes > found.tokens * 384
    assert all(c.wall > 0 and c.lag_max >= c.lag_p99 >= 0 for c in found.phases)
    assert found.breakdown.startswith("Step 0 phase breakdown: ")
    assert [p.name for p in tmp_path.iterdir()] == ["r3.dump"]
    json.dumps(asdict(found))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("dumps") / "r3.dump"
    dump_raw_rollouts(path, itertools.islice(synthetic_rollouts("r3", scale=0.002), 8))
    return path


@pytest.mark.parametrize("phase", ALONE)
def test_every_phase_can_be_run_alone_beside_an_idle_stretch(small, tmp_path, phase):
    interval = sys.getswitchinterval()
    idle, cost = replay_phase(small, phase, folder=tmp_path, idle=0.01)
    assert (idle.phase, cost.phase) == ("idle", phase)
    assert cost.wall > 0
    assert cost.lag_max >= cost.lag_p99 >= 0
    assert list(tmp_path.iterdir()) == []
    assert sys.getswitchinterval() == interval


def test_processes_and_encoded_rollouts_replay_to_the_same_batch(small, tmp_path):
    ways = ({}, {"form": "msgpack"}, {"form": "msgpack", "processes": 1})
    found = [replay(small, folder=tmp_path, idle=0.01, **way) for way in ways]
    assert len({(r.rollouts, r.samples, r.tokens, r.bytes) for r in found}) == 1
    idle, cost = replay_phase(small, "ingest", folder=tmp_path, idle=0.01, form="msgpack")
    assert cost.wall > 0
    assert idle.wall > 0
    with pytest.raises(ConfigError, match="form is 'xml'"):
        replay(small, form="xml")


def test_a_phase_that_is_none_is_named(small):
    with pytest.raises(ConfigError, match=r"no phase is called 'nap'.*ingest, pretokenize"):
        replay_phase(small, "nap")


def test_the_verb_tells_one_phase_alone_or_a_part_of_the_whole(small, capsys, monkeypatch):
    for function in (replay, replay_phase):
        monkeypatch.setattr(module, function.__name__, functools.partial(function, idle=0.01))
    assert verb(small, phase="interleave", output=Output(format="json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [p["phase"] for p in told["phases"]] == ["interleave"]
    assert told["phases"][0]["idle"]["wall"] > 0
    assert verb(small, phase="boundary") == 0
    shown = capsys.readouterr().out
    assert "boundary" in shown
    assert "arrival " not in shown.split("phase breakdown")[0].split("\n", 1)[1]


def test_a_folder_is_no_dump_and_a_dump_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(FileCorrupt, match="is not a regular file"):
        list(read_dump(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written: .*name another file"):
        dump_raw_rollouts(tmp_path / "file" / "x.dump", [{}])


def test_options_that_would_be_ignored_are_refused(small, tmp_path):
    with pytest.raises(ConfigError, match="--scale is for --make"):
        verb(small, scale=0.1)
    with pytest.raises(ConfigError, match="--phase pack runs without a pipeline"):
        verb(small, phase="pack", processes=1)
    with pytest.raises(ConfigError, match="--quick runs every phase alone"):
        verb(small, phase="pack", quick=True)


def test_the_command_of_the_old_scripts_runs_every_phase_alone(small, capsys, monkeypatch):
    from headrace.cli.app import app

    cost = PhaseCost(phase="", wall=1.0, cpu=1.0, loop=0.0, lag_mean=0.0, lag_p99=0.0, lag_max=0.0)
    monkeypatch.setattr(module, "replay_phase", lambda dump, phase, **more: (cost, replace(cost, phase=phase)))
    words = ["replay", "--dump", str(small), "--synthetic-traffic", "5", "--quick", "--format", "json"]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code in (0, None)
    assert [p["phase"] for p in json.loads(capsys.readouterr().out)["phases"]] == list(ALONE)


def test_a_phase_alone_leaves_out_what_the_pipeline_would_refuse(tmp_path, caplog):
    good = next(synthetic_rollouts("text", scale=0.002))
    dump_raw_rollouts(tmp_path / "odd.dump", [1, good, {}])
    _, cost = replay_phase(tmp_path / "odd.dump", "interleave", folder=tmp_path, idle=0.01)
    assert cost.phase == "interleave"
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "rollout 0 of the dump is left out",
        "rollout 2 of the dump is left out",
    ]
