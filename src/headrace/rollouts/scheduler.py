"""Who is asked for what, and when a step has waited long enough: `RolloutScheduler`.

    scheduler = RolloutScheduler(book, pipeline, sender, environments={"game": play}, env_of=lambda task: "game")
    async for report in scheduler.run(steps=100):  ...        a batch was sent; report.path is None if nothing could be trained on
    scheduler.policy_is(7)                                     the engines have the weights of step 7

A group's requests go out one by one under a concurrency limit that evaluation shares (`evaluate`), as soon as the policy version its step
was pinned to is there: up to `lag` steps ahead of the trainer, never further, so nothing that was generated is thrown away for its age.
A request that raises, hangs or answers with what cannot be used has failed for a reason, logged and counted when it is seen; what that does to
its group is its environment's policy (`EnvPolicy`). At the step's deadline whatever is out has failed too: one slow group holds nobody
up, and what it says later is late and enters nothing. A step of which every rollout was filtered is asked for again,
`empty_retries` times at most, and then sent as nothing to train on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.errors import ConfigError
from headrace.metrics import Wait
from headrace.rollouts.groups import GroupBook, Request
from headrace.rollouts.pipeline import RolloutPipeline, StepReport
from headrace.rollouts.transport import TrainingBatchSender

__all__ = ["Environment", "RolloutScheduler"]

_log = logging.getLogger("headrace.rollouts")
Environment = Callable[[Request], Awaitable[Any]]
"""Makes the rollout of a request: a `verifiers` dict, JSON text or a Rollout."""
_Result = TypeVar("_Result")
_GRACE = 5.0


class RolloutScheduler:
    """Drives environments, groups, pipeline and sender on one event loop."""

    def __init__(
        self, book: GroupBook, pipeline: RolloutPipeline, sender: TrainingBatchSender | None = None, *,
        environments: Mapping[str, Environment], env_of: Callable[[int], str], concurrency: int = 256, step_deadline: float = 600.0,
        request_deadline: float = 600.0, policy_deadline: float = 3600.0, empty_retries: int = 2,
    ) -> None:  # fmt: skip
        problems = []
        if book.membership != "index":
            problems.append(
                "a scheduler's steps follow from the tasks' numbers: give it a GroupBook with membership='index'"
            )
        if concurrency < 1 or empty_retries < 0:
            problems.append(f"concurrency is {concurrency} (at least 1), empty_retries is {empty_retries} (0 or more)")
        if min(step_deadline, request_deadline, policy_deadline) <= 0:
            problems.append("deadlines are seconds above 0")
        if problems:
            raise ConfigError(problems)
        self.book, self.pipeline, self.sender = book, pipeline, sender
        self._environments, self._env_of = dict(environments), env_of
        self._limit = asyncio.Semaphore(concurrency)
        self._deadline, self._request_deadline, self._policy_deadline = step_deadline, request_deadline, policy_deadline
        self._empty_retries = empty_retries
        self._version = 0
        self._changed = asyncio.Event()
        self._running: dict[int, set[asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: dict[int, float] = {}
        self.empty_steps = 0
        """Steps that were sent with nothing to train on."""

    # -------------------------------------------------------------------------------------------- policy

    @property
    def policy_version(self) -> int:
        return self._version

    def policy_is(self, version: int) -> None:
        """The engines answer with this version of the policy from now on."""
        if version < self._version:
            raise ConfigError(f"the policy is version {self._version} and cannot go back to {version}")
        self._version = version
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------------- steps

    async def run(self, steps: int, *, first: int = 0) -> AsyncGenerator[StepReport]:
        """The reports of the steps [first, steps), in order, each after its batch was sent. What is still out at the end is cancelled."""
        if first:
            self.book.start_at(first)
        opened = first
        try:
            for step in range(first, steps):
                while opened < steps and (opened == step or self._version >= opened - self.book.lag):
                    await self._policy(max(0, opened - self.book.lag))
                    self._open(opened)
                    opened += 1
                yield await self._step(step)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                _, stubborn = await asyncio.wait(self._tasks, timeout=_GRACE)
                if stubborn:
                    _log.warning("%d environments did not stop within %g s and are left behind", len(stubborn), _GRACE)

    async def _policy(self, version: int) -> None:
        if self._version >= version:
            return
        with Wait(
            "rollouts.policy", deadline=self._policy_deadline, remedy="the trainer publishes no weights; is it alive?"
        ) as wait:
            while self._version < version:
                await self._until_changed(wait)

    async def _until_changed(self, wait: Wait) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(1.0, max(wait.remaining(), 0.001)))
        wait.check()

    def _open(self, step: int) -> None:
        self._begun[step] = asyncio.get_running_loop().time()
        for _ in range(self.book.groups_per_step):
            self._ask(self.book.open(self._env_of(self.book.next_task)))

    def _ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.env_name not in self._environments:
                raise ConfigError(
                    f"task {request.task} wants {request.env_name!r}; there are {sorted(self._environments)}"
                )
            tasks = self._running.setdefault(request.step, set())
            task = asyncio.get_running_loop().create_task(
                self._one(request), name=f"rollout-{request.task}-{request.member}"
            )
            for where in (tasks, self._tasks):
                where.add(task)
                task.add_done_callback(where.discard)

    async def _one(self, request: Request) -> None:
        """One request to its end: arrived, or failed for a reason."""
        key = (request.task, request.member, request.attempt)
        try:
            async with self._limit:
                async with asyncio.timeout(self._request_deadline):
                    raw = await self._environments[request.env_name](request)
            cause = await self.pipeline.settle(raw, step=request.step, key=key, policy_version=request.policy_version)
            reason = None if cause is None else f"refused_{cause}"
            told: object = cause
        except TimeoutError:
            reason, told = "timeout", f"no answer for {self._request_deadline:g} s"
        except Exception as error:  # whatever an environment raises: it is a failure of one rollout
            reason, told = type(error).__name__, error
        if reason is None or reason == "refused_late":
            self.book.arrive(request, key)  # a late one is counted as such there
        else:
            _log.warning(
                "task %d, member %d in %s failed (%s): %s", request.task, request.member, request.env_name, reason, told
            )
            self._ask(self.book.fail(request, reason))
        self._wake()

    async def _step(self, step: int) -> StepReport:
        for attempt in range(self._empty_retries + 1):
            await self._complete(step)
            groups = self.book.take()
            version = max(0, step - self.book.lag)
            report = await self.pipeline.finish(step, policy_version=version, only=set(groups.rollouts))
            if not report.all_filtered:
                break
            _log.warning(
                "step %d has nothing to train on (%d rollouts, %s filtered, %s refused), try %d of %d",
                step, report.rollouts, sum(report.filtered.counts.values()), sum(report.refused.values()), attempt + 1, self._empty_retries + 1,
            )  # fmt: skip
            if attempt < self._empty_retries:
                self.pipeline.reopen(step)
                self._begun[step] = asyncio.get_running_loop().time()
                self._ask(self.book.again())
        self.empty_steps += report.all_filtered
        self._running.pop(step, None)
        del self._begun[step]
        if self.sender is not None:
            await self.sender.send(report)
        return report

    async def _complete(self, step: int) -> None:
        """Until every request of the step has ended, or its deadline has ended them."""
        left = self._begun[step] + self._deadline - asyncio.get_running_loop().time()
        with Wait("rollouts.step") as wait:
            until = asyncio.get_running_loop().time() + left
            while not self.book.ready():
                remaining = until - asyncio.get_running_loop().time()
                if remaining <= 0:
                    ended = self.book.expire(step)
                    _log.warning(
                        "step %d was ended at its deadline of %g s with %d requests out", step, self._deadline, ended
                    )
                    for task in list(self._running.get(step, ())):
                        task.cancel()
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(1.0, remaining))
                wait.check()

    # -------------------------------------------------------------------------------------------- evaluation

    async def evaluate(self, calls: Sequence[Callable[[], Awaitable[_Result]]]) -> list[_Result | BaseException]:
        """Make these calls beside training, under the same limit; what each gave or raised, in their order."""

        async def one(call: Callable[[], Awaitable[_Result]]) -> _Result:
            async with self._limit:
                async with asyncio.timeout(self._request_deadline):
                    return await call()

        return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
