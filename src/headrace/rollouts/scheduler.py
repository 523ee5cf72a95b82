"""Who is asked for what, and when a step has waited long enough: `RolloutScheduler`.

    scheduler = RolloutScheduler(book, pipeline, sender, environments={"game": play}, env_of=lambda task: "game")
    async for report in scheduler.run(steps=100):  ...        a batch was sent; report.path is None if nothing could be trained on
    scheduler.policy_is(7)                                     the engines have the weights of step 7

A group's requests go out one by one under a concurrency limit that evaluation shares (`evaluate`), as soon as the policy version its step
was pinned to is there: up to `lag` steps ahead of the trainer, never further, so nothing that was generated is thrown away for its age.
A request that raises, hangs or answers with what cannot be used has failed for a reason, logged and counted when it is seen; what that does to
its group is its environment's policy (`EnvPolicy`). At the step's deadline whatever is out has failed too: one slow group holds nobody
up, and what it says later is late and enters nothing. A step of which every rollout was filtered or failed is asked for again,
`empty_retries` times at most. If rollouts came and all were filtered, it is then sent as nothing to train on; if every request failed, `StepFailed` is raised.

With a book whose membership is "completion" the first groups that close make the next step, and as many are under way as `lag` + 1 steps have.
A group is then made samples of when all its answers are there, because its step is known only then; one whose policy is more than `lag`
versions old is cancelled. The book's journal says what the clock decided; a book that is given it (`Recorded`) makes the same steps again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from headrace.errors import ConfigError, EnvironmentFailed, RolloutRefused, StepFailed, StorageError
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
_SLICE = 0.0005
"""Seconds of opening groups or starting environments before the loop runs something else."""


def _key(request: Request) -> tuple[int, int, int]:
    return request.task, request.member, request.attempt


class RolloutScheduler:
    """Drives environments, groups, pipeline and sender on one event loop."""

    def __init__(
        self, book: GroupBook, pipeline: RolloutPipeline, sender: TrainingBatchSender | None = None, *,
        environments: Mapping[str, Environment], env_of: Callable[[int], str], concurrency: int = 256, step_deadline: float = 600.0,
        request_deadline: float = 600.0, policy_deadline: float = 3600.0, empty_retries: int = 2,
    ) -> None:  # fmt: skip
        problems = []
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
        self._queue: deque[Request] = deque()
        """Requests that no task has been started for."""
        self._pump: asyncio.Task[None] | None = None
        self._running: dict[int, set[asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: dict[int, float] = {}
        self._by_index = book.membership == "index"
        # By completion: answers whose group waits for others, the step each was made samples for, groups that are being closed, and the step
        # that the next group to close is of, with how many it has.
        self._held: dict[int, dict[Request, Any]] = {}
        self._made: dict[Request, int] = {}
        self._closing: set[int] = set()
        self._collecting, self._collected = 0, 0
        self._last_step = 0
        self._broken: StorageError | None = None
        """Why the run cannot go on."""
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
        if not self._by_index and self.book.cancel_older(version - self.book.lag, answered=self._answered()):
            self._stop_ended()
            self._close_all()
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
        self._last_step = steps
        if not self._by_index:
            self._collecting = first
            self._skip_decided()
        try:
            for step in range(first, steps):
                if not self._by_index:
                    await self._policy(max(0, step - self.book.lag))
                    self._begun[step] = asyncio.get_running_loop().time()
                    self._fill()
                while self._by_index and opened < steps and (opened == step or self._version >= opened - self.book.lag):
                    await self._policy(max(0, opened - self.book.lag))
                    await self._open(opened)
                    opened += 1
                yield await self._step(step)
        finally:
            self._last_step = 0
            self._queue.clear()
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

    async def _open(self, step: int) -> None:
        """Open the groups of a step, a slice at a time: the loop runs in between."""
        self._begun[step] = until = asyncio.get_running_loop().time()
        for _ in range(self.book.groups_per_step):
            self._ask(self.book.open(self._env_of(self.book.next_task)))
            if (now := asyncio.get_running_loop().time()) > until + _SLICE:
                until = now
                await asyncio.sleep(0)

    def _fill(self) -> None:
        """By completion: open groups until as many are under way as the lag allows and the steps to come need."""
        book = self.book
        if self._by_index:
            return
        needed = (self._last_step - book.next_step) * book.groups_per_step
        # The step that one more group would be of is at most the lag ahead of the trainer.
        while book.live < needed and book.next_step + book.live // book.groups_per_step <= self._version + book.lag:
            version = book.recorded_version(book.next_task)
            version = self._version if version is None else version
            if version > self._version:
                return  # it was opened later than this, and is again
            self._ask(book.open(self._env_of(book.next_task), policy_version=version))

    def _ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.env_name not in self._environments:
                raise ConfigError(
                    f"task {request.task} wants {request.env_name!r}; there are {sorted(self._environments)}"
                )
        self._queue.extend(requests)
        if self._queue and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._start_queued(), name="rollouts-start")
            self._tasks.add(self._pump)
            self._pump.add_done_callback(self._tasks.discard)

    async def _start_queued(self) -> None:
        """Start a task for every queued request, in order, as the limit allows and a slice at a time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _SLICE
        while self._queue:
            await self._limit.acquire()
            if not self._queue:  # the run ended meanwhile
                self._limit.release()
                return
            request = self._queue.popleft()
            if not self.book.is_waiting(request):  # ended before it was begun, at a deadline or with its group
                self._limit.release()
                continue
            tasks = self._running.setdefault(request.step, set())  # -1 by completion
            self._start(
                self._one(request),
                tasks,
                self._tasks,
                name=f"rollout-{request.task}-{request.member}-{request.attempt}",
            )
            if loop.time() > until:
                await asyncio.sleep(0)
                until = loop.time() + _SLICE

    async def _one(self, request: Request) -> None:
        """One request to its end: arrived, or failed for a reason. Started with the limit acquired, which it releases when the environment has answered."""
        patience = asyncio.timeout(self._request_deadline)
        try:
            try:
                if (reason := self.book.recorded_failure(request)) is not None:
                    self._failed(request, reason, "as in the run that is made again")
                    return
                async with patience:
                    raw = await self._environments[request.env_name](request)
            finally:
                self._limit.release()
            if not self._by_index:
                await self._answer(request, raw)
                return
            cause = await self._settled(request, raw, request.step)
            reason = None if cause is None else f"refused_{cause}"
            told: object = cause
        except StorageError as error:  # the disk is no environment's fault: the run ends with it
            self._broken = error
            self._wake()
            return
        except Exception as error:  # whatever an environment raises: it is a failure of one rollout
            reason, told = type(error).__name__, error
            if isinstance(error, RolloutRefused):
                reason = f"refused_{error.cause}"
            elif isinstance(error, EnvironmentFailed):
                reason = error.cause
            if (
                isinstance(error, TimeoutError) and patience.expired()
            ):  # an environment may raise a TimeoutError of its own
                reason, told = "timeout", f"no answer for {self._request_deadline:g} s"
        if reason is None or reason == "refused_late":
            if self.book.arrive(request, _key(request)):  # a late one is counted as such there
                self._wake()
        else:
            self._failed(request, reason, told)

    async def _settled(self, request: Request, raw: Any, step: int) -> str | None:
        """Make samples of an answer for a step: None, or the cause it was refused under."""
        left = math.inf
        if step in self._begun:
            left = self._begun[step] + self._deadline - asyncio.get_running_loop().time()
        return await self.pipeline.settle(
            raw, step=step, key=_key(request), policy_version=request.policy_version, env_name=request.env_name, until=time.monotonic() + left
        )  # fmt: skip

    def _failed(self, request: Request, reason: str, told: object) -> None:
        _log.warning(
            "task %d, member %d in %s failed (%s): %s", request.task, request.member, request.env_name, reason, told
        )
        self._ask(self.book.fail(request, reason))
        if not self._by_index:
            self._close_all()
            self._fill()
        self._wake()

    # ----------------------------------------------------------------------------------------- completion

    async def _answer(self, request: Request, raw: Any) -> None:
        """An answer whose step is not known yet: kept until its group can be closed."""
        if request not in self.book.waiting(request.task):
            self.book.arrive(request, _key(request))  # late, and counted as such there
            return
        self._held.setdefault(request.task, {})[request] = raw
        await self._close(request.task)

    def _answered(self) -> set[Request]:
        return {request for held in self._held.values() for request in held}

    def _close_all(self) -> None:
        """Close every group whose requests have all ended, each in a task of its own."""
        for task in list(self._held):
            self._start(self._close(task), self._tasks, name=f"close-{task}")

    async def _close(self, task: int) -> None:
        """Make samples of a group whose answers are all there, and close it in the step that is collecting then. One that finds its step
        full when it is done is made samples of again for the next; a step takes only what was closed in it."""
        if task in self._closing:
            return
        self._closing.add(task)
        try:
            while waiting := self._ready_to_close(task):
                step = self._step_for(task)
                todo = [r for r in waiting if self._made.get(r) != step]
                held = self._held[task]
                causes = await asyncio.gather(*(self._settled(r, held[r], step) for r in todo))
                for request, cause in zip(todo, causes, strict=True):
                    if cause is None:
                        self._made[request] = step
                    elif cause != "late" or step == self._step_for(
                        task
                    ):  # late for a step that took others: once more, for the next
                        held.pop(request)
                        self._failed(request, f"refused_{cause}", cause)
                if any(causes) or step != self._step_for(task) or waiting != self._ready_to_close(task):
                    continue
                for request in waiting:
                    self.book.arrive(request, _key(request))
                    self._made.pop(request)
                if self.book.step_of(task) is None:
                    self._collected += 1
                    if self._collected == self.book.groups_per_step:
                        self._next_collected()
        except Exception as error:  # what a full disk raises, say: the group's answers could not be made samples of
            for request in self._held.pop(task, ()):
                self._failed(request, type(error).__name__, error)
        finally:
            self._closing.discard(task)
            if not self.book.waiting(task):
                for request in self._held.pop(task, ()):
                    self._made.pop(request, None)
            self._fill()
            self._wake()

    def _ready_to_close(self, task: int) -> list[Request]:
        """The requests of a group whose answers are all there; [] if one is missing."""
        waiting, held = self.book.waiting(task), self._held.get(task, {})
        for request in [r for r in held if r not in waiting]:
            del held[request]  # ended elsewhere: by a deadline, or with a group that was dropped
        return sorted(waiting, key=_key) if len(held) == len(waiting) else []

    def _step_for(self, task: int) -> int:
        decided = self.book.step_of(task)
        return self._collecting if decided is None else decided

    def _next_collected(self) -> None:
        self._collecting, self._collected = self._collecting + 1, 0
        self._skip_decided()

    def _skip_decided(self) -> None:
        while self.book.is_decided(self._collecting):
            self._collecting += 1

    def _start(self, work: Coroutine[Any, Any, None], *where: set[asyncio.Task[None]], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        for tasks in where:
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _stop_ended(self) -> None:
        """Cancel the tasks of requests whose result is not needed any more."""
        wanted = {
            f"rollout-{r.task}-{r.member}-{r.attempt}" for t in self.book.open_tasks for r in self.book.waiting(t)
        }
        for task in self._running.get(-1, ()):
            if task.get_name() not in wanted:
                task.cancel()

    # ----------------------------------------------------------------------------------------------- step

    async def _step(self, step: int) -> StepReport:
        before, tries = Counter(self.book.counts.failed), 0
        for attempt in range(self._empty_retries + 1):
            tries += 1
            await self._complete(step)
            groups = self.book.take(short=not self._by_index)
            if not self._by_index and self._collecting == step:
                self._next_collected()  # it was ended at its deadline
            self._fill()
            version = max(0, step - self.book.lag) if self._by_index else groups.policy_version
            report = await self.pipeline.finish(
                step, policy_version=version, only=set(groups.rollouts), again={_key(r) for r in self._answered()}
            )
            if not report.all_filtered:
                break
            _log.warning(
                "step %d has nothing to train on (%d rollouts, %s filtered, %s refused), try %d of %d",
                step, report.rollouts, sum(report.filtered.counts.values()), sum(report.refused.values()), attempt + 1, self._empty_retries + 1,
            )  # fmt: skip
            if attempt == self._empty_retries or not (groups.tasks or self._by_index):
                break
            self.pipeline.reopen(step)
            self._begun[step] = asyncio.get_running_loop().time()
            self._ask(self.book.again())
        if not report.rollouts:
            reasons = ", ".join(f"{n} {reason}" for reason, n in (self.book.counts.failed - before).most_common())
            raise StepFailed(
                f"every rollout of step {step} failed, at {tries} tries ({reasons or 'none was asked for'}): look at the warnings before "
                "this, mend the environments or the engine, and start again; steps that were sent are kept"
            )
        self.empty_steps += report.all_filtered
        self._running.pop(step, None)
        del self._begun[step]
        if self.sender is not None:
            await self.sender.send(report)
        return report

    async def _complete(self, step: int) -> None:
        """Until every request of the step has ended, or its deadline has ended them."""
        left = self._begun[step] + self._deadline - asyncio.get_running_loop().time()
        first = self._oldest_open()
        with Wait("rollouts.step") as wait:
            until = asyncio.get_running_loop().time() + left
            while not self.book.ready():
                if self._broken is not None:
                    raise self._broken
                if not self._by_index and self._is_hopeless(first):
                    break
                remaining = until - asyncio.get_running_loop().time()
                if remaining <= 0:
                    ended = self.book.expire(step, answered=self._answered())
                    _log.warning(
                        "step %d was ended at its deadline of %g s with %d requests out", step, self._deadline, ended
                    )
                    if self._by_index:
                        for task in list(self._running.get(step, ())):
                            task.cancel()
                    else:
                        self._stop_ended()
                        for task in list(self._held):
                            await self._closed(task)
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(1.0, remaining))
                wait.check()

    def _oldest_open(self) -> int:
        return min(self.book.open_tasks, default=self.book.next_task)

    def _is_hopeless(self, first: int) -> bool:
        """By completion: whether as many groups as all tries of a step have, from task `first` on, ended without a rollout. Others would take their
        places and fail, until the deadline."""
        tried = self.book.groups_per_step * (self._empty_retries + 1)
        return not self._held and not self.book.held and self._oldest_open() - first >= tried

    async def _closed(self, task: int) -> None:
        """Wait until a group whose answers are there is closed, by this task or by the one that is closing it."""
        while self._ready_to_close(task) or task in self._closing:
            await self._close(task)
            await asyncio.sleep(0)

    # -------------------------------------------------------------------------------------------- evaluation

    async def evaluate(self, calls: Sequence[Callable[[], Awaitable[_Result]]]) -> list[_Result | BaseException]:
        """Make these calls beside training, under the same limit; what each gave or raised, in their order."""

        async def one(call: Callable[[], Awaitable[_Result]]) -> _Result:
            async with self._limit:
                async with asyncio.timeout(self._request_deadline):
                    return await call()

        return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
