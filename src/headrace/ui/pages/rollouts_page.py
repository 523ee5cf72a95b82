"""RL: rewards, groups, staleness, event-loop lag; and the rollouts of a step as they arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import DataError, HeadraceError
from headrace.provenance.rollouts import arrival_logs
from headrace.rollouts.arrival_log import Arrival, read_arrivals
from headrace.ui.metrics_index import is_number
from headrace.ui.pages.page_parts import BARS, POINTS, bars, chart, charts, findings, header
from headrace.ui.run_view import RunView, cached_by_file, tail_lines

_MAX_LOG = 1 << 30
"""Most bytes of a log that is read."""
_MAX_ROLLOUTS = 1024
_GROUP_STEPS = 12
"""Steps in the table of groups."""


def rl(view: RunView) -> dict[str, Any]:
    """Charts, findings, groups and held-out answers of an RL run, and the steps that have rollouts to read."""
    envs = sorted(view.members("reward/<env>/mean"), key=lambda name: (name != "all", name))
    if len(envs) == 2 and envs[0] == "all":  # with one environment, "all" repeats it
        envs = envs[1:]

    def by_env(pattern: str) -> list[str]:
        return [key for name, key in view.members(pattern).items() if name in envs or not envs]

    def starting(*heads: str) -> list[str]:
        return [k for k in view.index.known_keys() if k.startswith(heads) and not k.endswith(("_max", "/worst_rank"))]

    drawn = charts(view, (
        ("Groups solved by all members, by none", [*by_env("solve_all/<env>"), *by_env("solve_none/<env>")]),
        ("Held-out tasks solved", [*by_env("eval/<env>/greedy"), *by_env("eval/<env>/pass_at_k")]),
        ("Rollouts that failed or were refused", starting("rollouts/failed/", "rollouts/refused/", "failures/")),
        ("Filters that fired", list(view.members("filter/<name>").values())),
        ("Staleness of the policy", starting("staleness", "rollouts/staleness", "rollouts/lag")),
        ("Event-loop lag", ["event_loop_lag/median", "event_loop_lag/p99", "event_loop_lag/max"]),
        ("Length of completions", by_env("completion_length/<env>/mean")),
        ("Turns", by_env("turns/<env>/mean")),
        ("Entropy of the policy", by_env("entropy/<env>/mean")),
        ("Divergence between engine and trainer", by_env("mismatch_kl/<env>/mean")),
    ))  # fmt: skip
    found = header(view)
    return found | {
        "rewards": [_reward(view, env) for env in envs], "charts": drawn, "findings": findings(view, found["status"]),
        "lines": bars(view, view.index.sampled(BARS)), "steps": list(arrival_logs(view.path))[-5000:], "groups": _groups(view), "answers": _answers(view),
    }  # fmt: skip


def _reward(view: RunView, env: str) -> dict[str, Any]:
    """The mean reward of an environment, with a band of one standard deviation."""
    title = "Reward, all environments" if env == "all" else f"Reward: {env}"
    drawn = chart(view, [f"reward/{env}/mean"], title=title)
    mean, spread = drawn["curves"][0], view.index.curve(f"reward/{env}/std", points=POINTS)
    if mean["steps"] == spread["steps"]:
        pairs = zip(mean["steps"], mean["values"], spread["values"], strict=True)
        drawn["band"] = [[s, m - d, m + d] for s, m, d in pairs if m is not None and d is not None]
    return drawn


def _answers(view: RunView) -> list[dict[str, Any]]:
    """Held-out answers of the first evaluation and of the newest."""
    lines = [line for line in tail_lines(view.path / "answers.jsonl") if isinstance(line.get("step"), int)]
    shown = [line for line in lines if line["step"] in (lines[0]["step"], lines[-1]["step"])]
    keep = ("step", "env", "task", "prompt", "answer", "reward")
    return [{k: v if is_number(v := line.get(k)) else str(v)[:2000] for k in keep} for line in shown[:24]]


# ------------------------------------------------------------------------------------------------ arrival logs


def _arrivals(path: Path) -> Iterator[Arrival]:
    """The records of a log. FileCorrupt at a damaged record, DataError if the log is larger than a page reads."""
    size = path.lstat().st_size
    if size > _MAX_LOG:
        raise DataError(f"{path} has {size:,} bytes; a page reads logs of up to {_MAX_LOG:,}")
    yield from read_arrivals(path)


def rollouts(view: RunView, step: int) -> dict[str, Any]:
    """The rollouts of a step as they arrived: task, environment, reward, turns."""
    path = arrival_logs(view.path).get(step)
    if path is None:
        raise DataError(
            f"{view.path} has no rollouts of step {step}: they are deleted once a checkpoint covers the step"
        )
    found: list[dict[str, Any]] = []
    rewards: dict[int, list[float]] = {}
    damaged = ""
    try:
        for arrival in _arrivals(path):
            if len(found) == _MAX_ROLLOUTS:
                damaged = f"Only the first {_MAX_ROLLOUTS:,} rollouts that arrived are shown."
                break
            found.append(_rollout(arrival))
            if not arrival.failed:
                rewards.setdefault(arrival.task, []).append(found[-1]["reward"])
    except (HeadraceError, OSError) as error:
        damaged = f"{error}; rollouts after it are not shown."
    drops_equal = view.section("rollouts").get("drop_equal") is True
    for one in found:
        if not one["error"]:
            group = rewards[one["example_id"]]
            equal = min(group) == max(group)
            one["advantage"] = 0.0 if equal else one["reward"] - sum(group) / len(group)
            one["filters"] = ["zero_advantage"] if equal and drops_equal else []
    found.sort(key=lambda one: (one["env_name"], one["example_id"], one["draw"]))
    return header(view) | {
        "step": step,
        "rollouts": found,
        "steps": list(arrival_logs(view.path))[-5000:],
        "damaged": damaged,
    }


def _rollout(arrival: Arrival) -> dict[str, Any]:
    """One record as the page shows it, cut to a bounded length."""
    turns = []
    for turn in arrival.turns[:200]:
        ids = np.frombuffer(turn.ids, "<i4")[:4000].tolist()
        logprobs = np.frombuffer(turn.logprobs, "<f4")[:4000].tolist()
        completion = turn.completion[:20_000]
        turns.append({
            "messages": [{"role": "prompt", "text": turn.prompt[:20_000]}, {"role": "completion", "text": completion}],
            "ids": ids, "logprobs": [v if is_number(v) else None for v in logprobs], "spans": [list(span) for span in turn.spans[:50]],
            "tokens": list(completion) if len(completion) == len(ids) else [],
        })  # fmt: skip
    return {
        "example_id": arrival.task, "env_name": arrival.env[:200], "draw": arrival.member, "reward": arrival.reward if is_number(arrival.reward) else 0.0, "error": arrival.failed[:1000],
        "policy_version": arrival.version, "attempt": arrival.attempt, "turns": turns,
        "metrics": {k: v for k, v in list(arrival.metrics.items())[:30] if is_number(v)},
    }  # fmt: skip


def _groups(view: RunView) -> list[dict[str, Any]]:
    """Groups of the newest steps: complete, open, and requests that failed, by cause. The newest step first."""
    envs = view.config.get("env")
    envs = [env for env in envs if isinstance(env, dict)] if isinstance(envs, list) else []
    sizes = {str(env.get("name")): env.get("group_size") for env in envs}
    wanted, trained, logs = (
        view.section("rollouts").get("groups_per_step"),
        view.index.last_step,
        arrival_logs(view.path),
    )
    found = []
    for step in sorted(logs, reverse=True)[:_GROUP_STEPS]:
        members, failed, damaged = _members(logs[step])
        complete = sum(
            len(finished) >= size for (env, _), finished in members.items() if isinstance(size := sizes.get(env), int)
        )
        found.append({
            "step": step, "trained": step <= trained, "rollouts": sum(map(len, members.values())), "complete": complete,
            "open": max(wanted - complete, 0) if isinstance(wanted, int) and step > trained else 0, "failed": failed, "damaged": damaged,
        })  # fmt: skip
    return found


@cached_by_file(4 * _GROUP_STEPS)
def _members(path: Path) -> tuple[dict[tuple[str, int], set[int]], dict[str, int], bool]:
    """Finished members by (environment, task), failures by cause, and whether the log is damaged."""
    members: dict[tuple[str, int], set[int]] = {}
    failed: Counter[str] = Counter()
    try:
        for arrival in _arrivals(path):
            if arrival.failed:
                failed[arrival.failed[:80]] += 1
            else:
                members.setdefault((arrival.env, arrival.task), set()).add(arrival.member)
    except (HeadraceError, OSError):
        return members, failed, True
    return members, failed, False
