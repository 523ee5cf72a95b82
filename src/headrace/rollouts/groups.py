"""Which rollouts belong to which step, and what happens when one of them fails: `GroupBook`.

    task i ── opens group i of `group_size` requests ──► step floor(i / groups_per_step), policy version step − lag

With membership="index" (the default) the step of a group follows from its number alone, so slow rollouts are not left out and two
runs train on the same groups; a step's rollouts come in the order of their tasks, not of their arrival. With
membership="completion" the first groups that close make the next step; what the clock decided then (which groups, which policy versions, which
failures) is in the journal, and a book that is given it (`Recorded`) makes the same steps again.

Every request ends exactly once, as arrived or as failed for a reason, and `counts` adds up at any moment:

    requested = arrived + failed + outstanding            arrived = delivered + dropped + discarded + held

What arrives after its request ended is late: counted, and in no step. Reads no clock; the scheduler calls `expire`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from headrace.errors import ConfigError
from headrace.rollouts.records import check_env_name

__all__ = ["EnvPolicy", "GroupBook", "GroupCounts", "Recorded", "Request", "StepGroups", "solve_rates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPolicy:
    """How the groups of an environment are scored, and what a failure does to them."""

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
    """One rollout to be made. A refill differs from what it replaces in its attempt only."""

    task: int
    member: int
    attempt: int
    env_name: str
    step: int
    """-1 where membership is by completion and no step has it yet."""
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the clock decided in a run whose membership was by completion."""

    steps: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The tasks of each step, those included that were dropped before it was full."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """The policy version that each task was opened with."""
    failures: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    """Why a request failed, by task, member and attempt."""

    @classmethod
    def from_journal(cls, facts: Iterable[Mapping[str, Any]]) -> Self:
        """From the facts that a book handed to its journal, in their order. A step that was asked for again counts as it was in the end."""
        steps: dict[int, tuple[int, ...]] = {}
        versions: dict[int, int] = {}
        failures: dict[tuple[int, int, int], str] = {}
        for fact in facts:
            if fact["fact"] == "step":
                steps[fact["step"]] = tuple(fact["tasks"])
            elif fact["fact"] == "opened":
                versions[fact["task"]] = fact["policy_version"]
            elif fact["fact"] == "failed":
                failures[fact["task"], fact["member"], fact["attempt"]] = fact["reason"]
        return cls(steps=steps, versions=versions, failures=failures)


@dataclass(slots=True)
class GroupCounts:
    """What became of every request."""

    requested: int = 0
    arrived: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By reason."""
    delivered: int = 0
    dropped: int = 0
    """Arrived, but its group was dropped."""
    discarded: int = 0
    """Arrived, but its group was asked for again."""
    late: int = 0
    """Arrived after its request had ended; the request is counted as failed."""
    groups: Counter[str] = field(default_factory=Counter)
    """full, partial, dropped."""


@dataclass(slots=True)
class _Group:
    policy: EnvPolicy
    task: int
    step: int
    policy_version: int
    attempt: int = 0
    attempts: list[int] = field(default_factory=list)
    waiting: set[Request] = field(default_factory=set)
    arrived: dict[int, Any] = field(default_factory=dict)
    closed: bool = False
    first_attempt: int = 0
    """Refills are counted from here; above 0 where the whole step was asked for again."""

    def request(self, member: int) -> Request:
        return Request(
            task=self.task, member=member, attempt=self.attempts[member], env_name=self.policy.env_name, step=self.step,
            policy_version=self.policy_version,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The rollouts of one step, by task and member, and the groups that gave none."""

    step: int
    rollouts: tuple[Any, ...]
    """What `arrive` was given."""
    tasks: tuple[int, ...]
    """Tasks whose groups are in it."""
    dropped: tuple[int, ...]
    policy_version: int = 0
    """The oldest that any of its groups was generated with."""


class GroupBook:
    """Keeps the groups that are under way."""

    def __init__(
        self, envs: Sequence[EnvPolicy], *, groups_per_step: int, lag: int = 0,
        membership: Literal["index", "completion"] = "index", journal: Callable[[Mapping[str, Any]], None] | None = None,
        recorded: Recorded | None = None,
    ) -> None:  # fmt: skip
        if groups_per_step < 1 or lag < 0 or membership not in ("index", "completion"):
            raise ConfigError(
                f"groups_per_step is {groups_per_step} (at least 1), lag is {lag} (0 or more), membership is {membership!r} ('index' or 'completion')"
            )
        if recorded is not None and (recorded.steps or recorded.versions) and membership != "completion":
            raise ConfigError(
                "recorded steps are for membership='completion'; by index a step follows from its number alone"
            )
        self._recorded = recorded or Recorded()
        self._steps = dict(self._recorded.steps)
        self._step_of = {task: step for step, tasks in self._steps.items() for task in tasks}
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
        """Begin with this step: a restarted orchestrator goes on after those that were sent."""
        if self._opened or self._next_step:
            raise RuntimeError("a book begins at a step before anything is opened in it")
        # By completion a task's number says nothing about its step: go on after all that were opened.
        after = max(self._recorded.versions, default=-1) + 1 if self.membership == "completion" else 0
        self._opened, self._next_step = max(after, step * self.groups_per_step), step

    def step_of(self, task: int) -> int | None:
        """The step of a task's group; None where membership is by completion and nothing has decided it yet."""
        return task // self.groups_per_step if self.membership == "index" else self._step_of.get(task)

    def is_decided(self, step: int) -> bool:
        """Whether the tasks of a step are known beforehand."""
        return self.membership == "index" or step in self._steps

    def recorded_version(self, task: int) -> int | None:
        """The policy version that a task was opened with in the run that is made again."""
        return self._recorded.versions.get(task)

    def recorded_failure(self, request: Request) -> str | None:
        """Why a request failed in the run that is made again; None if it did not."""
        return self._recorded.failures.get((request.task, request.member, request.attempt))

    def waiting(self, task: int) -> frozenset[Request]:
        """The requests of a task's group that have not ended."""
        group = self._groups.get(task)
        return frozenset() if group is None else frozenset(group.waiting)

    @property
    def open_tasks(self) -> tuple[int, ...]:
        """Tasks whose groups wait for something."""
        return tuple(t for t, g in self._groups.items() if not g.closed)

    @property
    def live(self) -> int:
        """Groups that are in no step yet and may still be: open, or closed with survivors."""
        return sum(not g.closed or bool(g.arrived) for g in self._groups.values())

    # ------------------------------------------------------------------------------------------ requests

    def open(self, env_name: str, *, policy_version: int | None = None) -> list[Request]:
        """Open the next task's group; the requests to send. Its policy version is pinned by its number unless given."""
        if env_name not in self._envs:
            raise ConfigError(f"no environment is called {env_name!r}; there are {sorted(self._envs)}")
        task, policy = self._opened, self._envs[env_name]
        self._opened += 1
        step = task // self.groups_per_step
        version = max(0, step - self.lag) if policy_version is None else policy_version
        group = _Group(
            policy, task, step if self.membership == "index" else -1, version, attempts=[0] * policy.group_size
        )
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
        """A request was answered, by a rollout or by whatever stands for one; whether that closed its group. A request that had ended before is late
        and changes nothing."""
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
        """A request came to nothing; what to ask for instead, if anything."""
        group = self._groups.get(request.task)
        if group is None or request not in group.waiting:
            return []
        group.waiting.remove(request)
        self.counts.failed[reason] += 1
        self._journal(
            {
                "fact": "failed", "task": request.task, "member": request.member, "attempt": request.attempt, "step": group.step, "reason": reason,
                "env": group.policy.env_name,
            }
        )  # fmt: skip
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

    def expire(self, step: int, reason: str = "deadline", *, answered: Collection[Request] = ()) -> int:
        """End every request of a step that is still out, without refills; how many. The step can be taken afterwards. `answered`: requests that
        are not out any more, although `arrive` was not called for them yet."""
        mine = [g for g in self._groups.values() if not g.closed and (g.step == step or self.membership != "index")]
        return sum(self._end(group, reason, answered) for group in mine)

    def cancel_older(self, policy_version: int, reason: str = "stale", *, answered: Collection[Request] = ()) -> int:
        """End what is still out in groups generated with an older policy than this; how many. Finished groups stay."""
        stale = [
            g for g in self._groups.values() if not g.closed and g.policy_version < policy_version and g.task not in self._step_of
        ]  # fmt: skip
        return sum(self._end(group, reason, answered) for group in stale)

    def _end(self, group: _Group, reason: str, answered: Collection[Request]) -> int:
        ended = self._abandon(group, reason, answered)
        if ended and (group.policy.scoring == "group" or group.policy.failure == "drop"):
            ended += self._abandon(group, "group_dropped")
            self._drop(group)
        else:
            self._close_if_done(group)
        return ended

    def _abandon(self, group: _Group, reason: str, answered: Collection[Request] = ()) -> int:
        ended = sorted(group.waiting.difference(answered), key=lambda r: (r.member, r.attempt))
        group.waiting.difference_update(ended)
        self.counts.failed[reason] += len(ended)
        for r in ended:
            self._journal(
                {"fact": "failed", "task": r.task, "member": r.member, "attempt": r.attempt, "step": group.step, "reason": reason, "env": r.env_name}
            )  # fmt: skip
        return len(ended)

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
            tasks = range(step * self.groups_per_step, (step + 1) * self.groups_per_step)
            return list(tasks) if all(t in self._groups and self._groups[t].closed for t in tasks) else None
        if (known := self._steps.get(step)) is not None:
            return list(known) if all(t in self._groups and self._groups[t].closed for t in known) else None
        full: list[int] = []
        closing = [t for t in self._closing_order if t not in self._step_of]
        for at, task in enumerate(closing):
            full += [task] if self._groups[task].arrived else []
            if len(full) == self.groups_per_step:
                return closing[: at + 1]
        return None

    def ready(self) -> bool:
        """Whether the next step can be taken."""
        return self._members_of(self._next_step) is not None

    def take(self, *, short: bool = False) -> StepGroups:
        """The next step. Its rollouts leave the book. `short`: by completion, with fewer groups than a step has, if no more have closed."""
        step, tasks = self._next_step, self._members_of(self._next_step)
        if tasks is None and short and self.membership == "completion":
            mine = self._steps.get(step)
            tasks = [t for t in self._closing_order if (t not in self._step_of if mine is None else t in mine)]
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
        """Open the groups of the step that was taken last once more, because nothing of it could be trained on; the requests to send."""
        if not self._last:
            raise RuntimeError("no step was taken that could be asked for again")
        self._next_step -= 1
        if (
            self.membership == "completion"
        ):  # a repeated request is for this step, however many groups have closed meanwhile
            self._steps[self._next_step] = tuple(self._last)
            self._step_of.update(dict.fromkeys(self._last, self._next_step))
        requests: list[Request] = []
        for task, old in self._last.items():
            attempt = max(old.attempts) + 1
            group = self._groups[task] = _Group(
                old.policy,
                task,
                old.step,
                old.policy_version,
                attempts=[attempt] * old.policy.group_size,
                first_attempt=attempt,
            )
            requests += self._ask(group, range(old.policy.group_size))
        self._last = {}
        return requests

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return sum(len(g.waiting) for g in self._groups.values())

    @property
    def held(self) -> int:
        """Rollouts that arrived and wait for their step."""
        return sum(len(g.arrived) for g in self._groups.values())


def solve_rates(groups: Mapping[Any, Sequence[float]], solved: float = 1.0) -> tuple[float, float]:
    """The shares of groups in which every member, and in which none, has at least the reward `solved`: by each group's own size."""
    if not groups:
        return 0.0, 0.0
    hits = [(sum(r >= solved for r in rewards), len(rewards)) for rewards in groups.values()]
    return sum(n == size for n, size in hits) / len(hits), sum(n == 0 for n, _ in hits) / len(hits)
