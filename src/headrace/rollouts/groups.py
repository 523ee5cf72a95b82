"""Groups of rollouts: which step each belongs to, and what a failed rollout does to its group (`GroupBook`).

    task i ── opens group i of `group_size` requests ──► step floor(i / groups_per_step), policy version step − lag

With membership="index" (the default) the step of a group follows from its number alone, so slow rollouts are not left out and two
runs train on the same groups. A step's rollouts are in the order of their tasks, not of their arrival. With
membership="completion" the first groups that close make the next step. The journal then records what depended on the clock: the groups of each step, their
policy versions and their failures.

Every request ends exactly once, as arrived or as failed for a reason, and `counts` adds up at any moment:

    requested = arrived + failed + outstanding            arrived = delivered + dropped + discarded + held

A rollout that arrives after its request ended is late: it is counted and enters no step. The book reads no clock; its caller calls `expire`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.rollouts.records import check_env_name


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPolicy:
    """How the groups of an environment are scored, and what a failed rollout does to its group."""

    env_name: str
    group_size: int
    scoring: Literal["individual", "group"] = "individual"
    """group: rewards are computed against each other, so a group with a failure has no valid ones."""
    on_failure: Literal["keep", "refill", "drop"] | None = None
    """keep: train on the survivors. refill: ask again. drop: the group goes. None: keep, and drop where scoring is by group."""
    max_refills: int = 2

    def __post_init__(self) -> None:
        check_env_name(self.env_name)
        problems = []
        if self.group_size < 1:
            problems.append(f"env {self.env_name}: group_size is {self.group_size}, expected at least 1")
        if self.scoring not in ("individual", "group"):
            problems.append(f"env {self.env_name}: scoring is {self.scoring!r}, expected 'individual' or 'group'")
        if self.on_failure not in (None, "keep", "refill", "drop"):
            problems.append(f"env {self.env_name}: on_failure is {self.on_failure!r}, expected keep, refill or drop")
        if self.scoring == "group" and self.on_failure == "keep":
            problems.append(
                f"env {self.env_name}: on_failure = 'keep' would train on rewards computed against missing rollouts, because "
                "scoring is by group; say 'drop' or 'refill'"
            )
        if self.max_refills < 0:
            problems.append(f"env {self.env_name}: max_refills is {self.max_refills}, expected 0 or more")
        if problems:
            raise ConfigError(problems)

    @property
    def failure(self) -> Literal["keep", "refill", "drop"]:
        return self.on_failure or ("keep" if self.scoring == "individual" else "drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One rollout to make. A refill differs from the request it replaces in its attempt only."""

    task: int
    member: int
    attempt: int
    env_name: str
    step: int
    """-1 where membership is by completion and no step has it yet."""
    policy_version: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.task, self.member, self.attempt


@dataclass(slots=True)
class GroupCounts:
    """Numbers of requests and groups by outcome."""

    requested: int = 0
    arrived: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that failed, by reason."""
    delivered: int = 0
    """Rollouts that left the book with their step."""
    dropped: int = 0
    """Rollouts that arrived and whose group was dropped."""
    discarded: int = 0
    """Rollouts that arrived and whose group was requested again."""
    late: int = 0
    """Rollouts that arrived after their request had ended; the request is counted as failed."""
    groups: Counter[str] = field(default_factory=Counter)
    """Closed groups by kind: full, partial, dropped."""


@dataclass(slots=True)
class _Group:
    policy: EnvPolicy
    task: int
    step: int
    policy_version: int
    attempts: list[int]
    waiting: set[Request] = field(default_factory=set)
    arrived: dict[int, Any] = field(default_factory=dict)
    closed: bool = False
    first_attempt: int = 0
    """Refills are counted from this attempt; above 0 where the whole step was requested again."""

    def request(self, member: int) -> Request:
        return Request(
            task=self.task, member=member, attempt=self.attempts[member], env_name=self.policy.env_name, step=self.step,
            policy_version=self.policy_version,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The rollouts of one step, in the order of task and member."""

    step: int
    rollouts: tuple[Any, ...]
    """The objects that `arrive` was given."""
    tasks: tuple[int, ...]
    """Tasks that have rollouts in the step."""
    dropped: tuple[int, ...]
    """Tasks whose groups have no rollout left."""
    policy_version: int = 0
    """The oldest version that any of its groups was generated with."""


class GroupBook:
    """Keeps the groups that are under way."""

    def __init__(
        self,
        envs: Sequence[EnvPolicy],
        *,
        groups_per_step: int,
        lag: int = 0,
        membership: Literal["index", "completion"] = "index",
        journal: Callable[[Mapping[str, Any]], None] | None = None,
        failures: Mapping[tuple[int, int, int], str] | None = None,
    ) -> None:
        """An empty book.

        Args:
            envs: the environments, each with a name of its own.
            groups_per_step: groups that make a step.
            lag: steps by which the policy version of a group is behind its step.
            membership: see the module's text.
            journal: called with every fact: a failed or late request; by completion also opened groups and taken steps.
            failures: reasons of requests that failed in the run that is resumed, by task, member and attempt.
        """
        if groups_per_step < 1 or lag < 0 or membership not in ("index", "completion"):
            raise ConfigError(
                f"groups_per_step is {groups_per_step} (at least 1), lag is {lag} (0 or more), membership is {membership!r} ('index' or 'completion')"
            )
        self._failures = failures or {}
        self._envs = {e.env_name: e for e in envs}
        if len(self._envs) != len(envs):
            raise ConfigError(f"environments must have different names, got {[e.env_name for e in envs]}")
        self.groups_per_step, self.lag, self.membership = groups_per_step, lag, membership
        self.counts = GroupCounts()
        self._journal = journal or (lambda fact: None)
        self._groups: dict[int, _Group] = {}
        self._opened = 0
        self._next_step = 0
        self._closing_order: list[int] = []
        self._last: dict[int, _Group] = {}

    @property
    def next_step(self) -> int:
        """The step that `take` takes next."""
        return self._next_step

    @property
    def next_task(self) -> int:
        """The task that `open` opens next."""
        return self._opened

    def start_at(self, step: int) -> None:
        """Begin with this step: a restarted orchestrator continues after the steps that were sent."""
        if self._opened or self._next_step:
            raise RuntimeError("start_at comes before the first open")
        self._opened, self._next_step = step * self.groups_per_step, step

    def recorded_failure(self, request: Request) -> str | None:
        """The reason why a request failed in the run that is resumed; None if it did not fail."""
        return self._failures.get(request.key)

    @property
    def open_tasks(self) -> tuple[int, ...]:
        """Tasks whose groups still wait for rollouts."""
        return tuple(t for t, g in self._groups.items() if not g.closed)

    @property
    def live(self) -> int:
        """Groups that are in no step yet and may still be: open, or closed with survivors."""
        return sum(not g.closed or bool(g.arrived) for g in self._groups.values())

    # ------------------------------------------------------------------------------------------ requests

    def open(self, env_name: str, *, policy_version: int | None = None) -> list[Request]:
        """Open the group of the next task and return the requests to send. Its policy version follows from its step unless given."""
        if env_name not in self._envs:
            raise ConfigError(f"no environment is called {env_name!r}; there are {sorted(self._envs)}")
        task, policy = self._opened, self._envs[env_name]
        self._opened += 1
        step = task // self.groups_per_step
        version = max(0, step - self.lag) if policy_version is None else policy_version
        group = _Group(policy, task, step if self.membership == "index" else -1, version, [0] * policy.group_size)
        self._groups[task] = group
        if self.membership == "completion":
            self._journal({"fact": "opened", "task": task, "env": env_name, "policy_version": version})
        return self._ask(group, range(policy.group_size))

    def _ask(self, group: _Group, members: Sequence[int]) -> list[Request]:
        requests = [group.request(m) for m in members]
        group.waiting.update(requests)
        self.counts.requested += len(requests)
        return requests

    def is_waiting(self, request: Request) -> bool:
        """Whether the request has not ended."""
        group = self._groups.get(request.task)
        return group is not None and request in group.waiting

    def arrive(self, request: Request, rollout: Any) -> bool:
        """Record the answer to a request; whether that closed its group. `rollout` is any object. A request that had ended before is late and changes nothing."""
        group = self._groups.get(request.task)
        if group is None or request not in group.waiting:
            self.counts.late += 1
            self._journal({"fact": "late", "task": request.task, "member": request.member, "attempt": request.attempt})
            return False
        group.waiting.remove(request)
        group.arrived[request.member] = rollout
        self.counts.arrived += 1
        self._close_if_done(group)
        return group.closed

    def fail(self, request: Request, reason: str) -> list[Request]:
        """Record that a request failed, and return the requests to send in its place."""
        group = self._groups.get(request.task)
        if group is None or request not in group.waiting:
            return []
        group.waiting.remove(request)
        self._journal_failure(request, reason)
        policy = group.policy
        may_refill = policy.failure == "refill" and request.attempt - group.first_attempt < policy.max_refills
        if policy.scoring == "group":
            self._abandon(group, "superseded")
            if not may_refill:
                return self._drop(group)
            self.counts.discarded += len(group.arrived)
            group.arrived.clear()
            group.attempts = [request.attempt + 1] * policy.group_size
            return self._ask(group, range(policy.group_size))
        if may_refill:
            group.attempts[request.member] += 1
            return self._ask(group, [request.member])
        if policy.failure == "drop":
            self._abandon(group, "group_dropped")
            return self._drop(group)
        self._close_if_done(group)
        return []

    def expire(self, step: int, reason: str = "deadline") -> int:
        """End the unfinished requests of a step without refills; how many. The step can be taken afterwards."""
        mine = [g for g in self._groups.values() if not g.closed and (g.step == step or self.membership != "index")]
        return sum(self._end(group, reason) for group in mine)

    def cancel_older(self, policy_version: int, reason: str = "stale") -> int:
        """End the unfinished requests of groups whose policy is older than this version; how many. Finished groups and groups that were requested again
        stay."""
        live = [g for g in self._groups.values() if not g.closed and not g.first_attempt]
        return sum(self._end(group, reason) for group in live if group.policy_version < policy_version)

    def _end(self, group: _Group, reason: str) -> int:
        ended = self._abandon(group, reason)
        if ended and (group.policy.scoring == "group" or group.policy.failure == "drop"):
            self._drop(group)
        else:
            self._close_if_done(group)
        return ended

    def _abandon(self, group: _Group, reason: str) -> int:
        ended = sorted(group.waiting, key=lambda r: r.key)
        group.waiting.clear()
        for request in ended:
            self._journal_failure(request, reason)
        return len(ended)

    def _journal_failure(self, request: Request, reason: str) -> None:
        self.counts.failed[reason] += 1
        self._journal(
            {
                "fact": "failed", "task": request.task, "member": request.member, "attempt": request.attempt, "step": request.step,
                "reason": reason, "env": request.env_name,
            }
        )  # fmt: skip

    def _drop(self, group: _Group) -> list[Request]:
        self.counts.dropped += len(group.arrived)
        group.arrived.clear()
        self._close_if_done(group)
        return []

    def _close_if_done(self, group: _Group) -> None:
        if group.waiting or group.closed:
            return
        group.closed = True
        self._closing_order.append(group.task)
        size = len(group.arrived)
        self.counts.groups["dropped" if not size else "full" if size == group.policy.group_size else "partial"] += 1

    # --------------------------------------------------------------------------------------------- steps

    def _members_of(self, step: int) -> list[int] | None:
        """The tasks of a step, None while it is not complete."""
        if self.membership == "index":
            tasks = list(range(step * self.groups_per_step, (step + 1) * self.groups_per_step))
        else:
            tasks = self._asked_again(step)
        if tasks:
            return tasks if all(t in self._groups and self._groups[t].closed for t in tasks) else None
        full = 0
        for at, task in enumerate(self._closing_order):
            full += bool(self._groups[task].arrived)
            if full == self.groups_per_step:
                return self._closing_order[: at + 1]
        return None

    def _asked_again(self, step: int) -> list[int]:
        """By completion: the tasks of a step that was requested again. They make the step, however many other groups have closed meanwhile."""
        return [task for task, group in self._groups.items() if group.step == step]

    def ready(self) -> bool:
        """Whether the next step can be taken."""
        return self._members_of(self._next_step) is not None

    def take(self, *, short: bool = False) -> StepGroups:
        """Take the next step out of the book. `short`: by completion, take the groups that have closed even if they are fewer than a step has."""
        step, tasks = self._next_step, self._members_of(self._next_step)
        if tasks is None and short and self.membership == "completion":
            again = self._asked_again(step)
            tasks = [t for t in self._closing_order if not again or t in again]
        if tasks is None:
            raise RuntimeError(f"step {step} is not complete; wait for it, or expire({step})")
        self._next_step += 1
        if self.membership != "index":
            tasks = sorted(tasks)
            self._journal({"fact": "step", "step": step, "tasks": tasks})
        taken = {task: self._groups.pop(task) for task in tasks}
        self._closing_order = [t for t in self._closing_order if t not in taken]
        self._last = taken
        rollouts = [g.arrived[m] for g in taken.values() for m in sorted(g.arrived)]
        self.counts.delivered += len(rollouts)
        return StepGroups(
            step=step, rollouts=tuple(rollouts), tasks=tuple(t for t, g in taken.items() if g.arrived),
            dropped=tuple(t for t, g in taken.items() if not g.arrived),
            policy_version=min((g.policy_version for g in taken.values() if g.arrived), default=max(0, step - self.lag)),
        )  # fmt: skip

    def again(self) -> list[Request]:
        """Open the groups of the last step once more, because none of its rollouts could be trained on. Returns the requests to send."""
        if not self._last:
            raise RuntimeError("no step was taken that could be requested again")
        self._next_step -= 1
        requests: list[Request] = []
        for task, old in self._last.items():
            attempt, size = max(old.attempts) + 1, old.policy.group_size
            group = self._groups[task] = _Group(old.policy, task, self._next_step, old.policy_version, [attempt] * size)
            group.first_attempt = attempt
            requests += self._ask(group, range(size))
        self._last = {}
        return requests

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return sum(len(g.waiting) for g in self._groups.values())

    @property
    def held(self) -> int:
        """Rollouts that arrived and whose step is not taken yet."""
        return sum(len(g.arrived) for g in self._groups.values())


def solve_rates(groups: Mapping[Any, Sequence[float]], solved: float = 1.0) -> tuple[float, float]:
    """Two shares of groups: those in which every member has at least the reward `solved`, and those in which no member has."""
    if not groups:
        return 0.0, 0.0
    hits = [(sum(r >= solved for r in rewards), len(rewards)) for rewards in groups.values()]
    return sum(n == size for n, size in hits) / len(hits), sum(n == 0 for n, _ in hits) / len(hits)
