"""Processes that make samples are stopped, or never answer: steps end at their deadlines, other rollouts train, and what was not ready is counted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.rollouts import EnvPolicy, GroupBook, RolloutPipeline, RolloutScheduler, open_training_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rollout_outputs import output, render

ROUNDS = {"short": 1, "long": 20}[os.environ.get("HEADRACE_FAULTS", "long")]
GROUPS, SIZE = 4, 8


def large(task, member):
    """A rollout that no pipe's buffer holds."""
    raw = output(task, member, routed=False)
    tokens = raw["trajectory"][-1]["tokens"]
    tokens["completion_ids"], tokens["completion_mask"] = list(range(200_000)), [1] * 200_000
    tokens["completion_logprobs"] = [-0.5] * 200_000
    return msgspec.msgpack.encode(raw)


def small(task, member, **more):
    return msgspec.msgpack.encode(output(task, member, **more))


def run(folder, play, *, steps, processes, step_deadline):
    async def go():
        book = GroupBook([EnvPolicy(env_name="game", group_size=SIZE)], groups_per_step=GROUPS)
        async with RolloutPipeline(
            folder, seq_len=64, use_process_pool=processes, render=render, worker_deadline=3600.0
        ) as pipeline:
            scheduler = RolloutScheduler(
                book, pipeline, environments={"game": lambda request: play(request, pipeline)}, env_of=lambda task: "game",
                step_deadline=step_deadline,
            )  # fmt: skip
            reports = []
            async for report in scheduler.run(steps):
                reports.append(report)
                scheduler.policy_is(report.step + 1)
            return reports, book, pipeline.late, pipeline.processes.restarts

    return asyncio.run(go())


@pytest.mark.timeout(120 * ROUNDS)
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("make", [large, small])
def test_a_stopped_process_costs_a_step_a_part_of_its_time_and_no_rollout(tmp_path, processes, make):
    steps = 2 * ROUNDS

    async def play(request, pipeline):
        if request.step % 2 == 0 and (request.task % GROUPS, request.member) == (1, 2):
            os.kill(pipeline.processes.pids[0], signal.SIGSTOP)
            return make(request.task, request.member)
        return small(request.task, request.member, routed=make is small)

    reports, book, late, restarts = run(tmp_path, play, steps=steps, processes=processes, step_deadline=16.0)
    assert [r.rollouts for r in reports] == [GROUPS * SIZE] * steps
    assert (book.counts.failed, late) == ({}, 0)
    assert restarts >= ROUNDS
    assert all(open_training_batch(r.path).samples == GROUPS * SIZE for r in reports)


@pytest.mark.timeout(120 * ROUNDS)
def test_rollouts_that_no_process_answers_are_late_or_refused_and_the_next_step_is_whole(tmp_path):
    steps = 2 * ROUNDS

    async def play(request, pipeline):
        if request.step % 2 == 0 and (request.task % GROUPS, request.member) in (
            (3, 6),
            (3, 7),
        ):  # the last: both processes
            spin = [{"prompt": [{"role": "user", "content": "spin"}], "completion": []}]
            return msgspec.msgpack.encode({"example_id": request.task, "reward": 0.0, "trajectory": spin})
        return small(request.task, request.member, routed=False)

    reports, book, late, restarts = run(tmp_path, play, steps=steps, processes=2, step_deadline=15.0)
    assert [r.rollouts for r in reports] == [GROUPS * SIZE - 2, GROUPS * SIZE] * ROUNDS
    assert set(book.counts.failed) <= {"deadline", "refused_worker"}
    assert book.counts.failed.total() == 2 * ROUNDS
    assert book.counts.failed["deadline"] == late
    assert 2 * ROUNDS <= restarts <= 6 * ROUNDS
    assert book.counts.delivered == sum(r.rollouts for r in reports)


@pytest.mark.timeout(120)
def test_an_answer_of_50_mb_is_refused_or_late_and_the_steps_after_it_are_whole(tmp_path):
    async def play(request, pipeline):
        raw = output(request.task, request.member, routed=False)
        if (request.task, request.member) == (1, 2):
            raw["text"] = "x" * 50_000_000
        if (request.task, request.member) == (2, 2):
            raw["trajectory"][0]["completion"] = "x" * 50_000_000
        return msgspec.msgpack.encode(raw)

    reports, book, late, restarts = run(tmp_path, play, steps=3, processes=1, step_deadline=60.0)
    assert [r.rollouts for r in reports] == [GROUPS * SIZE - 2, GROUPS * SIZE, GROUPS * SIZE]
    assert (book.counts.failed, late, restarts) == ({"refused_oversize": 2}, 0, 0)
