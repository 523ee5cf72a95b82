"""Environments hang, raise, lie and answer late: steps end at their deadlines, counts add up, and nothing enters a step that it is not of."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.errors import ConfigError, DeadlineExceeded, EndOfData, EngineDied, StepFailed, StorageError
from headrace.rollouts import (
    AdvantageConfig,
    EnvPolicy,
    GroupBook,
    RolloutPipeline,
    RolloutScheduler,
    SpoolReceiver,
    SpoolSender,
    ZeroAdvantageFilter,
    interleave_rollout,
    open_training_batch,
    rollout_from_verifiers,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rollout_outputs import output

SIZE, PER_STEP = 4, 3


def answer(request):
    return output(request.task, request.member, seed=request.attempt, routed=False, env=request.env_name)


def ids_of(task, member, attempt=0):
    (sample,) = interleave_rollout(rollout_from_verifiers(output(task, member, seed=attempt, routed=False)))
    return tuple(sample.ids[:64].tolist())


def samples_of(report):
    batch = open_training_batch(report.path)
    starts = batch.arrays["sample_start"]
    return {tuple(batch.arrays["ids"][a:b].tolist()) for a, b in itertools.pairwise(starts)}


def run(
    folder, play, *, steps=2, lag=10, policies=None, pipeline=None, first=0, after=None, facts=None, book=None, **more
):
    async def go():
        made = GroupBook(
            policies or [EnvPolicy(env_name="game", group_size=SIZE)], groups_per_step=PER_STEP, lag=lag,
            journal=None if facts is None else facts.append, **(book or {}),
        )  # fmt: skip
        return await with_book(made)

    async def with_book(book):
        made = RolloutPipeline(
            folder, **{"seq_len": 64, "advantage": AdvantageConfig(), "first_step": first, **(pipeline or {})}
        )
        async with made:
            options = {"environments": {"game": play}, "env_of": lambda task: "game", **more}
            scheduler = RolloutScheduler(book, made, **options)
            reports = []
            async for report in scheduler.run(steps, first=first):
                reports.append(report)
                if after is not None:
                    await after(scheduler, report)
            return reports, book, scheduler, made.late

    return asyncio.run(go())


def adds_up(book):
    counts = book.counts
    assert counts.requested == counts.arrived + counts.failed.total() + book.outstanding
    assert counts.arrived == counts.delivered + counts.dropped + counts.discarded + book.held


def test_every_cause_of_failure_is_counted_and_only_sound_rollouts_train(tmp_path):
    async def play(request):
        place = (request.task, request.member)
        raw = answer(request)
        tokens = raw["trajectory"][0]["tokens"]
        if place == (0, 0):
            raise ConnectionError("the engine is gone")
        if place == (0, 1):
            await asyncio.Event().wait()
        if place == (1, 0):
            tokens["completion_logprobs"][0] = float("nan")
        if place == (1, 1):
            tokens["completion_mask"].append(1)
        if place == (1, 2):
            raw["text"] = "x" * 50_000_000
        if place == (2, 0):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return raw  # it answers although it was told to stop
        return raw

    facts = []
    reports, book, _, late = run(tmp_path, play, step_deadline=1.0, facts=facts)
    adds_up(book)
    assert book.counts.failed == {
        "ConnectionError": 1,
        "deadline": 2,
        "refused_not_finite": 1,
        "refused_wrong_length": 1,
        "refused_oversize": 1,
    }
    assert (book.counts.late, late) == (1, 1)
    assert reports[0].refused == {"not_finite": 1, "wrong_length": 1, "oversize": 1}
    bad = {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)}
    for step, report in enumerate(reports):
        tasks = range(step * PER_STEP, (step + 1) * PER_STEP)
        assert samples_of(report) == {ids_of(t, m) for t in tasks for m in range(SIZE) if (t, m) not in bad}
        assert report.policy_version == 0
    assert Counter(f["fact"] for f in facts) == {"failed": 6, "late": 1}


@pytest.mark.parametrize(
    ("scoring", "on_failure"),
    [("individual", "refill"), ("group", "refill"), ("group", "drop"), ("individual", "drop")],
)
def test_a_failure_does_to_its_group_what_the_environments_policy_says(tmp_path, scoring, on_failure):
    async def play(request):
        if (request.task, request.member, request.attempt) == (1, 2, 0):
            raise RuntimeError
        return answer(request)

    policy = EnvPolicy(env_name="game", group_size=SIZE, scoring=scoring, on_failure=on_failure)
    (report,), book, _, _ = run(tmp_path, play, steps=1, policies=[policy])
    adds_up(book)
    again = {(1, m) for m in range(SIZE)} if scoring == "group" else {(1, 2)}
    if on_failure == "drop":
        expected = {ids_of(t, m) for t in (0, 2) for m in range(SIZE)}
    else:
        expected = {ids_of(t, m, int((t, m) in again)) for t in range(PER_STEP) for m in range(SIZE)}
    assert samples_of(report) == expected


def test_a_step_that_is_all_filtered_is_asked_for_again_a_bounded_number_of_times(tmp_path):
    async def play(request):
        raw = answer(request)
        # Step 0 never differs; step 1 does at its second try.
        differs = request.task >= PER_STEP and request.attempt >= 1
        return {**raw, "reward": float(request.member % 2) if differs else 1.0}

    asked = []

    async def counted(request):
        asked.append((request.step, request.attempt))
        return await play(request)

    reports, book, _, _ = run(tmp_path, counted, pipeline={"filters": [ZeroAdvantageFilter()]}, empty_retries=2)
    adds_up(book)
    assert [r.path is None for r in reports] == [True, False]
    assert Counter(asked) == dict.fromkeys(((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)), PER_STEP * SIZE)
    assert samples_of(reports[1]) == {ids_of(t, m, 1) for t in range(PER_STEP, 2 * PER_STEP) for m in range(SIZE)}


def test_a_step_that_is_asked_for_again_has_all_its_refills_again(tmp_path):
    async def play(request):
        if request.attempt in (0, 2):
            raise RuntimeError
        return {**answer(request), "reward": float(request.member % 2) if request.attempt >= 2 else 1.0}

    policy = EnvPolicy(env_name="game", group_size=SIZE, on_failure="refill", max_refills=1)
    filters = {"filters": [ZeroAdvantageFilter()]}
    (report,), book, _, _ = run(tmp_path, play, steps=1, policies=[policy], pipeline=filters, empty_retries=1)
    adds_up(book)
    assert samples_of(report) == {ids_of(t, m, 3) for t in range(PER_STEP) for m in range(SIZE)}


def test_a_step_is_generated_with_its_pinned_policy_and_never_further_ahead_than_the_lag(tmp_path):
    seen, engine = [], [0]

    async def play(request):
        seen.append((request.step, request.policy_version, engine[0]))
        return answer(request)

    async def after(scheduler, report):
        assert max(step for step, _, _ in seen) <= report.step + 1
        engine[0] = report.step + 1
        scheduler.policy_is(report.step + 1)

    reports, _, scheduler, _ = run(tmp_path, play, steps=4, lag=1, after=after)
    assert [r.policy_version for r in reports] == [0, 0, 1, 2]
    assert all(pinned == max(0, step - 1) <= version for step, pinned, version in seen)
    with pytest.raises(ConfigError, match="cannot go back"):
        scheduler.policy_is(0)


def test_a_trainer_that_publishes_no_weights_is_named(tmp_path):
    async def play(request):
        return answer(request)

    with pytest.raises(DeadlineExceeded, match=r"rollouts\.policy"):
        run(tmp_path, play, steps=2, lag=0, policy_deadline=0.05)


def test_training_and_evaluation_share_one_limit_and_overlap(tmp_path):
    at_work, most, kinds = set(), 0, set()

    async def busy(kind):
        nonlocal most
        token = object()
        at_work.add(token)
        most = max(most, len(at_work))
        kinds.add((kind, len(at_work)))
        await asyncio.sleep(0.001)
        at_work.discard(token)

    async def play(request):
        await busy("train")
        return answer(request)

    async def fails():
        raise ValueError("no")

    async def go():
        book = GroupBook([EnvPolicy(env_name="game", group_size=SIZE)], groups_per_step=PER_STEP)
        async with RolloutPipeline(tmp_path, seq_len=64) as pipeline:
            scheduler = RolloutScheduler(
                book, pipeline, environments={"game": play}, env_of=lambda t: "game", concurrency=3
            )
            evaluation = asyncio.create_task(scheduler.evaluate([lambda: busy("eval")] * 9 + [fails]))
            reports = [r async for r in scheduler.run(1)]
            return reports, await evaluation

    reports, evaluated = asyncio.run(go())
    assert reports[0].rollouts == PER_STEP * SIZE
    assert most == 3
    assert {kind for kind, _ in kinds} == {"train", "eval"}
    assert evaluated[:9] == [None] * 9
    assert isinstance(evaluated[9], ValueError)


def test_a_scheduler_that_is_started_again_goes_on_and_the_last_step_drains(tmp_path):
    async def play(request):
        return answer(request)

    async def orchestrate(until):
        async with SpoolSender(tmp_path, max_unread=9) as sender:
            book = GroupBook([EnvPolicy(env_name="game", group_size=SIZE)], groups_per_step=PER_STEP, lag=9)
            async with RolloutPipeline(sender.queue, seq_len=64, first_step=sender.next_step) as pipeline:
                scheduler = RolloutScheduler(
                    book, pipeline, sender, environments={"game": play}, env_of=lambda t: "game"
                )
                return [r.step async for r in scheduler.run(until, first=sender.next_step)]

    assert asyncio.run(orchestrate(2)) == [0, 1]
    assert asyncio.run(orchestrate(4)) == [2, 3]
    with SpoolReceiver(tmp_path, deadline=5.0) as receiver:
        for step in range(4):
            batch = receiver.receive()
            assert batch.step == step
            assert batch.arrays["ids"][:3].tolist() == list(ids_of(step * PER_STEP, 0)[:3])
        with pytest.raises(EndOfData):
            receiver.receive()


def test_what_a_scheduler_cannot_do_is_named(tmp_path):
    async def play(request):
        return answer(request)

    async def wrong_book():
        book = GroupBook([], groups_per_step=1)
        RolloutScheduler(book, RolloutPipeline(tmp_path, seq_len=4), environments={}, env_of=str, concurrency=0)

    with pytest.raises(ConfigError, match=r"concurrency is 0"):
        asyncio.run(wrong_book())
    with pytest.raises(ConfigError, match="task 0 wants 'game'; there are"):
        run(tmp_path, play, environments={"other": play})


BY_COMPLETION = {"membership": "completion"}


@pytest.mark.parametrize("book", [{}, BY_COMPLETION])
@pytest.mark.parametrize("as_rollout", [False, True])
def test_two_draws_of_one_example_in_a_step_have_a_baseline_each(tmp_path, book, as_rollout):
    async def play(request):
        raw = {**answer(request), "example_id": 7, "reward": 10.0 * request.task + request.member}
        return rollout_from_verifiers(raw) if as_rollout else raw

    policies = [EnvPolicy(env_name="game", group_size=2)]
    (report,), _, _, _ = run(tmp_path, play, steps=1, policies=policies, book=book)
    assert report.advantages == (-0.5, 0.5) * PER_STEP
    assert report.metrics["solve_none/game"] == pytest.approx(0.0)


@pytest.mark.parametrize("book", [{}, BY_COMPLETION])
def test_a_rollout_that_names_no_environment_is_of_the_one_that_was_asked(tmp_path, book):
    async def play(request):
        raw = answer(request)
        del raw["env_name"]
        return raw

    (report,), counted, _, _ = run(tmp_path, play, steps=1, book=book)
    assert (report.rollouts, counted.counts.failed) == (PER_STEP * SIZE, {})
    assert "reward/game/mean" in report.metrics


def test_a_timeout_of_the_environments_own_is_told_as_such(tmp_path, caplog):
    async def play(request):
        if (request.task, request.member) == (0, 0):
            raise TimeoutError("the sandbox did not start")
        if (request.task, request.member) == (0, 1):
            await asyncio.Event().wait()
        return answer(request)

    _, book, _, _ = run(tmp_path, play, steps=1, request_deadline=0.2)
    assert book.counts.failed == {"TimeoutError": 1, "timeout": 1}
    assert "(TimeoutError): the sandbox did not start" in caplog.text
    assert caplog.text.count("no answer for 0.2 s") == 1


@pytest.mark.parametrize("book", [{}, BY_COMPLETION])
def test_a_step_of_which_everything_failed_at_every_try_is_an_error_with_its_reasons(tmp_path, book):
    async def play(request):
        if request.task >= PER_STEP:
            raise ConnectionError("the engine is gone")
        return answer(request)

    seen = []

    async def after(scheduler, report):
        seen.append(report.rollouts)

    tries = 1 if book else 2
    with pytest.raises(StepFailed, match=rf"every rollout of step 1 failed, at {tries} tries \(\d+ ConnectionError\)"):
        run(tmp_path, play, steps=3, empty_retries=1, after=after, book=book)
    assert seen == [PER_STEP * SIZE]


class FullDisk(list):
    """A journal whose disk is full."""

    def append(self, fact):
        raise StorageError("no space for a failure")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("error", "ends"), [(OSError("the judge is gone"), StorageError), (EngineDied("gone"), EngineDied)]
)
def test_a_full_disk_or_a_dead_engine_ends_the_run_and_not_the_rollouts(tmp_path, error, ends):
    async def play(request):
        raise error

    facts = FullDisk()
    with pytest.raises(ends):
        run(tmp_path, play, facts=facts)


# ------------------------------------------------------------------------------------------------- completion


def tasks_of(facts):
    return {f["step"]: f["tasks"] for f in facts if f["fact"] == "step"}


def all_of(tasks, attempts=None):
    return {ids_of(t, m, (attempts or {}).get((t, m), 0)) for t in tasks for m in range(SIZE)}


def test_by_completion_the_first_groups_that_close_make_a_step_and_a_slow_one_holds_nobody_up(tmp_path):
    async def go():
        done = {task: asyncio.Event() for task in range(20)}
        facts = []

        async def play(request):
            if request.task in (0, 2):  # they answer once step 0 has been made without them
                await done[request.task].wait()
            return answer(request)

        async def after(scheduler, report):
            if report.step == 0:
                done[0].set()
                done[2].set()

        book = GroupBook([EnvPolicy(env_name="game", group_size=SIZE)], groups_per_step=PER_STEP, lag=1, journal=facts.append, **BY_COMPLETION)  # fmt: skip
        async with RolloutPipeline(tmp_path, seq_len=64) as pipeline:
            scheduler = RolloutScheduler(book, pipeline, environments={"game": play}, env_of=lambda t: "game")
            reports = []
            async for report in scheduler.run(3):
                reports.append(report)
                scheduler.policy_is(report.step + 1)
                await after(scheduler, report)
        return facts, reports, book, pipeline.late

    facts, reports, book, late = asyncio.run(go())
    steps = tasks_of(facts)
    assert steps[0] == [1, 3, 4]
    assert {0, 2} <= {*steps[1], *steps[2]}
    assert len({t for tasks in steps.values() for t in tasks}) == 3 * PER_STEP
    for step, report in enumerate(reports):
        assert samples_of(report) == all_of(steps[step])
    assert late == 0
    adds_up(book)


def jumbled(seed, failing=()):
    """An environment whose answers come in an order of their own; some requests fail."""

    async def play(request):
        place = (request.task, request.member, request.attempt)
        for _ in range(hash((seed, *place)) % 23):
            await asyncio.sleep(0)
        if place in failing:
            raise RuntimeError
        raw = answer(request)
        if place == (5, 0, 0):
            raw["trajectory"][0]["tokens"]["completion_logprobs"][0] = float("nan")
        return raw

    return play


@pytest.mark.parametrize(("scoring", "on_failure"), [("individual", "keep"), ("individual", "refill"), ("group", "refill"), ("group", "drop")])  # fmt: skip
def test_by_completion_every_step_has_the_samples_of_its_tasks_whatever_fails(tmp_path, scoring, on_failure):
    policies = [EnvPolicy(env_name="game", group_size=SIZE, scoring=scoring, on_failure=on_failure)]
    failing = {(1, 1, 0), (3, 0, 0), (3, 0, 1), (3, 0, 2), (7, 2, 0)}

    async def after(scheduler, report):
        scheduler.policy_is(report.step + 1)

    facts = []
    reports, book, _, late = run(
        tmp_path, jumbled(1, failing), steps=4, lag=2, policies=policies, after=after, facts=facts, book=BY_COMPLETION
    )
    adds_up(book)
    assert late == 0
    taken = [task for tasks in tasks_of(facts).values() for task in tasks]
    assert len(set(taken)) == len(taken)
    assert book.counts.failed["RuntimeError"] >= 2
    possible = {(t, m, a): ids_of(t, m, a) for t in taken for m in range(SIZE) for a in range(4)}
    for report in reports:
        tasks = tasks_of(facts)[report.step]
        own = {ids for (t, _, _), ids in possible.items() if t in tasks}
        assert samples_of(report) <= own
        assert report.samples == len(samples_of(report)) > 0


def test_by_completion_a_deadline_ends_a_step_with_what_has_closed(tmp_path):
    async def play(request):
        if request.task >= 2 or request.member == 3:
            await asyncio.Event().wait()
        return answer(request)

    facts = []
    reports, book, _, late = run(
        tmp_path, play, steps=1, facts=facts, book=BY_COMPLETION, step_deadline=0.3, lag=0, empty_retries=0
    )
    adds_up(book)
    assert samples_of(reports[0]) == {ids_of(t, m) for t in (0, 1) for m in range(3)}
    assert book.counts.failed == {"deadline": 2 + SIZE}
    assert late == 0


def test_by_completion_a_step_that_is_all_filtered_is_asked_for_again(tmp_path):
    async def play(request):
        raw = answer(request)
        return {**raw, "reward": float(request.member % 2) if request.attempt else 1.0}

    facts = []
    reports, book, _, _ = run(
        tmp_path, play, facts=facts, book=BY_COMPLETION, pipeline={"filters": [ZeroAdvantageFilter()]}, empty_retries=1
    )
    adds_up(book)
    steps = tasks_of(facts)
    for step, report in enumerate(reports):
        assert samples_of(report) == {ids_of(t, m, 1) for t in steps[step] for m in range(SIZE)}


def test_by_completion_a_group_whose_policy_is_too_old_is_cancelled_and_a_closed_one_never(tmp_path):
    async def play(request):
        if request.task == 0:
            await asyncio.Event().wait()
        return answer(request)

    async def after(scheduler, report):
        scheduler.policy_is(report.step + 1)

    facts = []
    reports, book, _, _ = run(tmp_path, play, steps=4, lag=1, after=after, facts=facts, book=BY_COMPLETION)
    adds_up(book)
    assert book.counts.failed["stale"] == SIZE
    assert 0 not in {t for s, tasks in tasks_of(facts).items() for t in tasks if samples_of(reports[s]) >= all_of([t])}
    assert all(r.rollouts == PER_STEP * SIZE for r in reports)
