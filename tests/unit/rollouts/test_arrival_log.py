"""The arrival log: what was written is read back to the bit, a torn record goes, damage is named."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest

from headrace.errors import FileCorrupt, StorageError
from headrace.rollouts.arrival_log import ArrivalLog, arrival_path, read_arrivals
from headrace.rollouts.groups import Request
from headrace.rollouts.interleave import interleave_rollout
from headrace.rollouts.records import Rollout, Step, StepTokens, VersionSpan


def request(member: int = 0, *, step: int = 3, task: int = 7) -> Request:
    return Request(task=task, member=member, attempt=0, env_name="game", step=step, policy_version=2)


def made_rollout(member: int = 0, turns: int = 2) -> Rollout:
    rng, context, steps = np.random.default_rng(member), np.empty(0, np.int32), []
    for turn in range(turns):
        prompt = np.concatenate([context, rng.integers(0, 99, 3).astype(np.int32)])
        said = rng.integers(0, 99, 4).astype(np.int32)
        tokens = StepTokens(
            prompt_ids=prompt, prompt_mask=np.zeros(len(prompt), np.uint8), completion_ids=said, completion_mask=np.ones(4, np.uint8),
            completion_logprobs=rng.standard_normal(4).astype(np.float32), version_spans=(VersionSpan("2", 0, 4),),
        )  # fmt: skip
        steps.append(Step(prompt=f"ask {turn}", completion=f"say {turn}", tokens=tokens))
        context = np.concatenate([prompt, said])
    return Rollout(
        example_id=7, env_name="game", reward=0.1 * member, trajectory=tuple(steps), policy_version=2, metrics={"moves": 3.0},
        sampling_args={"temperature": 0.7}, timing={"total": 0.5},
    )  # fmt: skip


def test_a_rollout_comes_back_to_the_bit(tmp_path):
    log = ArrivalLog(tmp_path / "arrivals")
    for member in range(3):
        log.append(request(member), made_rollout(member))
    log.append_failure({"task": 7, "member": 3, "attempt": 0, "step": 3, "reason": "timeout", "env": "game"})
    log.close()
    again = ArrivalLog(tmp_path / "arrivals", first_step=3)
    assert again.failures() == {(7, 3, 0): "timeout"}
    assert again.answer(request(3)) is None
    assert again.answer(request(9)) is None
    for member in range(3):
        was, read = made_rollout(member), again.answer(request(member))
        assert (read.reward, read.metrics, read.sampling_args, read.policy_version) == (
            was.reward,
            was.metrics,
            was.sampling_args,
            2,
        )
        (one,), (other,) = interleave_rollout(was), interleave_rollout(read)
        for name in ("ids", "mask", "logprobs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert read.trajectory[0].tokens.version_spans == was.trajectory[0].tokens.version_spans
    assert ArrivalLog(tmp_path / "arrivals", first_step=4).known == {}
    again.drop_below(4)
    assert not list((tmp_path / "arrivals").iterdir())


def test_a_failure_holds_over_a_rollout_of_the_same_request_until_failures_are_forgotten(tmp_path):
    log = ArrivalLog(tmp_path / "arrivals")
    for member, step in ((0, 2), (0, 3), (1, 3), (2, 3)):
        log.append(request(member, step=step, task=step), made_rollout(member))
    for member, step in ((0, 2), (0, 3)):  # member 0 had ended at the deadline of its step
        log.append_failure(
            {"task": step, "member": member, "attempt": 0, "step": step, "reason": "deadline", "env": "game"}
        )
    log.append(request(0, task=3), made_rollout(0))
    log.close()
    again = ArrivalLog(tmp_path / "arrivals")
    assert again.failures() == {(2, 0, 0): "deadline", (3, 0, 0): "deadline"}
    assert again.answer(request(0, task=3)) is None
    # A rollout that was taken from the log and is refused now fails from now on.
    again.append_failure({"task": 3, "member": 1, "attempt": 0, "step": 3, "reason": "refused_nan", "env": "game"})
    again.finish(2)
    again.forget_failures()
    again.append(request(3, task=3), made_rollout(3))
    again.close()
    mended = ArrivalLog(tmp_path / "arrivals")
    assert mended.failures() == {(2, 0, 0): "deadline"}, "step 2 is finished"
    assert [k for k in mended.known if k[0] == 3] == [(3, member, 0) for member in range(4)]
    mended.close()


def test_rollouts_that_were_made_with_other_settings_are_dropped(tmp_path):
    for made_with, kept in (({"seed": 1}, 0), ({"seed": 1}, 1), ({"seed": 2}, 0)):
        log = ArrivalLog(tmp_path / "arrivals", first_step=3, made_with=made_with)
        assert len(log.known) == kept
        assert log.dropped == (made_with["seed"] == 2)
        if not kept:
            for step in (2, 3):
                log.append(request(0, step=step), made_rollout(0))
        log.close()
    assert len(list(read_arrivals(arrival_path(tmp_path / "arrivals", 2)))) == 2, "step 2 is in a checkpoint"


@pytest.mark.parametrize("cut", [1, 9, 40])
def test_a_record_that_a_kill_cut_short_is_removed(tmp_path, cut):
    log = ArrivalLog(tmp_path / "arrivals")
    log.append(request(0), made_rollout(0))
    path = arrival_path(tmp_path / "arrivals", 3)
    whole = path.stat().st_size
    log.append(request(1), made_rollout(1))
    log.close()
    os.truncate(path, whole + cut)
    again = ArrivalLog(tmp_path / "arrivals")
    assert list(again.known) == [(7, 0, 0)]
    again.append(request(1), made_rollout(1))
    again.close()
    assert [a.key for a in read_arrivals(path)] == [(7, 0, 0), (7, 1, 0)]


def test_a_flipped_bit_is_damage_and_not_an_end(tmp_path):
    log = ArrivalLog(tmp_path / "arrivals")
    for member in range(2):
        log.append(request(member), made_rollout(member))
    log.close()
    path = arrival_path(tmp_path / "arrivals", 3)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileCorrupt, match="the record at byte 0 fails its checksum"):
        ArrivalLog(tmp_path / "arrivals")


def test_a_full_disk_leaves_no_half_record_and_says_what_to_do(tmp_path):
    log = ArrivalLog(tmp_path / "arrivals")
    log.append(request(0), made_rollout(0))
    path = arrival_path(tmp_path / "arrivals", 3)
    whole, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 25, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"could not be written to .*Make room and resume the run"):
            log.append(request(1), made_rollout(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == whole
    log.append(request(1), made_rollout(1))
    log.close()
    assert len(list(read_arrivals(path))) == 2
