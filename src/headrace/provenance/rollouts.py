"""Which rollouts a step of an RL run learnt from, read out of its arrival logs.

read_step(run, 20)            the groups of step 20: every rollout, its reward, its turns, and what failed
read_task(run, 640)           every rollout of a task, training and refills
diff_rollouts(run_a, run_b)   the first rollout that differs, and whether weights, sampling or the environment made the difference
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from headrace.errors import DataError
from headrace.rollouts.arrival_log import Arrival, read_arrivals

_LOG = re.compile(r"step_(\d{1,15})\.log", re.ASCII)


def has_rollouts(run: Path) -> bool:
    """Whether a folder is that of an RL run."""
    return (run / "arrivals").is_dir()


def arrival_logs(run: Path) -> dict[int, Path]:
    """Logs of finished rollouts by step, in order: batch n makes step n + 1. Unless the run keeps them, logs that a checkpoint covers are deleted."""
    found = ((_LOG.fullmatch(path.name), path) for path in (run / "arrivals").glob("step_*.log"))
    return dict(sorted((int(match[1]) + 1, path) for match, path in found if match))


def _ordered(log: Path) -> list[Arrival]:
    """The records of a step by task, member and attempt, whatever order they came in. A failure that a rollout of the same request followed is kept too."""
    return sorted(read_arrivals(log), key=lambda a: (*a.key, bool(a.failed)))


def read_step(run: Path, step: int) -> list[Arrival]:
    """The rollouts and failures of a step, counted from 1; DataError if the run has no record of it."""
    logs = arrival_logs(run)
    if step not in logs:
        there = f"it has those of steps {min(logs)} to {max(logs)}" if logs else "it has none"
        raise DataError(
            f"{run} has no rollouts of step {step}: {there} (rollouts.keep = false drops those that a checkpoint covers)"
        )
    return _ordered(logs[step])


def read_task(run: Path, task: int) -> list[Arrival]:
    """Every record of a task; DataError if there is none."""
    found = [arrival for log in arrival_logs(run).values() for arrival in _ordered(log) if arrival.task == task]
    if not found:
        raise DataError(
            f"{run} has no rollout of task {task}: a task is the number of a group, counted from 0 over the run"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDifference:
    """Where two runs part."""

    same: bool
    compared: int
    """Rollouts that are equal in both."""
    step: int | None = None
    """Of the first that differs, from 1."""
    task: int | None = None
    member: int | None = None
    attempt: int | None = None
    cause: str = ""
    """missing, weights, sampling, environment or failure."""
    sentence: str = ""
    """One sentence."""


def diff_rollouts(run_a: Path, run_b: Path) -> RolloutDifference:
    """Compare the rollouts of the steps that both runs have, in the order of steps, tasks and members."""
    compared, logs_a, logs_b = 0, arrival_logs(run_a), arrival_logs(run_b)
    for step in sorted(logs_a.keys() & logs_b.keys()):
        for a, b in zip_longest(_ordered(logs_a[step]), _ordered(logs_b[step])):
            cause, sentence = _difference(a, b)
            if cause:
                one = a or b
                assert one is not None
                return RolloutDifference(
                    same=False, compared=compared, step=step, task=one.task, member=one.member, attempt=one.attempt, cause=cause, sentence=sentence
                )  # fmt: skip
            compared += 1
    return RolloutDifference(same=True, compared=compared)


def _difference(a: Arrival | None, b: Arrival | None) -> tuple[str, str]:
    """Why two records differ, and in which words; empty if they do not."""
    if a is None or b is None or a.key != b.key:
        return "missing", "only one of the two runs has a record of this request"
    if a.failed != b.failed:
        return "failure", f"A: {a.failed or 'answered'}, B: {b.failed or 'answered'}"
    for number, (x, y) in enumerate(zip_longest(a.turns, b.turns)):
        if x is None or y is None:
            return "environment", f"A has {len(a.turns)} turns, B has {len(b.turns)}"
        if x.prompt_ids != y.prompt_ids:
            return "environment", f"turn {number + 1}: the prompt was {x.prompt!r} in A and {y.prompt!r} in B"
        if x.ids != y.ids and a.sampling == b.sampling and x.logprobs[:4] == y.logprobs[:4]:
            return (
                "sampling",
                f"turn {number + 1}: A answered {x.completion!r}, B {y.completion!r}, from equal log-probs of the first token",
            )
        if x.ids != y.ids or x.logprobs != y.logprobs:
            cause = "sampling" if a.sampling != b.sampling else "weights"
            return (
                cause,
                f"turn {number + 1}: A answered {x.completion!r} (version {a.version}), B {y.completion!r} (version {b.version})",
            )
    if a.reward != b.reward:
        return "environment", f"equal answers were rewarded with {a.reward:g} in A and {b.reward:g} in B"
    return "", ""
