"""The scheduler sends requests to environments and ends steps at their deadlines: `RolloutScheduler`.

    scheduler = RolloutScheduler(book, pipeline, sender, environments={"game": play}, env_of=lambda task: "game")
    async for report in scheduler.run(steps=100):  ...        a batch was sent; report.path is None if the step has nothing to train on
    scheduler.policy_is(7)                                     the engines have the weights of step 7

Requests are sent under a concurrency limit that evaluation shares (`evaluate`). A step's groups are opened as soon as the policy version that the step
is pinned to exists: up to `lag` steps ahead of the trainer and never further, so no rollout is thrown away for its age.
A request that raises, hangs or answers with an unusable rollout has failed for a reason, which is logged and counted at once. The environment's `EnvPolicy` says what that
does to the group. At the step's deadline the unfinished requests have failed too: one slow group does not hold up the step, and its later answers are late and enter
no batch. A step of which every rollout was filtered or failed is requested again, `empty_retries` times at most. If rollouts came and all were filtered, it is
then sent as a step without a batch; if every request failed, `StepFailed` is raised.

With a book whose membership is "completion" the first groups that close make the next step, and `lag` + 1 steps' worth of groups are under way.
Samples are made when an answer arrives, and written when its step is taken, because its step is known only then. A group whose policy is more than
`lag` versions old is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.errors import ConfigError, EngineDied, EnvironmentFailed, RolloutRefused, StepFailed, StorageError
from headrace.metrics import Wait
from headrace.rollouts.groups import GroupBook, Request
from headrace.rollouts.pipeline import RolloutPipeline, StepReport
from headrace.rollouts.transport import TrainingBatchSender

_log = logging.getLogger("headrace.rollouts")
Environment = Callable[[Request], Awaitable[Any]]
"""Makes the rollout of a request: a `verifiers` dict, JSON text or a Rollout."""
_Result = TypeVar("_Result")
_GRACE = 2.0
"""Seconds that environments have to end after they were cancelled."""
_WARNINGS = 5
"""Failures of one reason that are warned of."""
_SLICE = 0.0005
"""Seconds of opening groups or starting environments before the loop runs something else."""


class RolloutScheduler:
    """Drives environments, groups, pipeline and sender on one event loop."""

    def __init__(
        self, book: GroupBook, pipeline: RolloutPipeline, sender: TrainingBatchSender | None = None, *,
        environments: Mapping[str, Environment], env_of: Callable[[int], str], concurrency: int = 256, step_deadline: float = 600.0,
        request_deadline: float = 600.0, policy_deadline: float = 3600.0, empty_retries: int = 2,
    ) -> None:  # fmt: skip
        """Make a scheduler on the running event loop.

        Args:
            book: keeps the groups.
            pipeline: makes samples and batches; it is open while `run` is iterated.
            sender: hands batches to the trainer; None leaves that to the caller.
            environments: the function that plays a request, by environment.
            env_of: the environment of a task.
            concurrency: requests under way at a time, evaluation included.
            step_deadline: seconds after which a step ends without its unfinished requests.
            request_deadline: seconds that one request may take.
            policy_deadline: seconds to wait for the trainer's next version.
            empty_retries: how often a step without anything to train on is requested again.
        """
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
        """Requests that have no asyncio task yet."""
        self._pump: asyncio.Task[None] | None = None
        self._running: dict[Request, asyncio.Task[None]] = {}
        self._begun: dict[int, float] = {}
        self._by_index = book.membership == "index"
        self._last_step = 0
        self._broken: BaseException | None = None
        """The error that ends the run: a full disk or a dead engine is not the fault of an environment."""

    # -------------------------------------------------------------------------------------------- policy

    def policy_is(self, version: int) -> None:
        """Tell the scheduler that the engines sample with this version of the policy from now on."""
        if version < self._version:
            raise ConfigError(f"the policy is version {self._version} and cannot go back to {version}")
        self._version = version
        if not self._by_index and self.book.cancel_older(version - self.book.lag):
            self._stop_ended()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------------- steps

    async def run(self, steps: int, *, first: int = 0) -> AsyncGenerator[StepReport]:
        """Yield the reports of the steps [first, steps) in order, each after its batch was sent. Unfinished requests are cancelled at the end."""
        if first:
            self.book.start_at(first)
        opened = first
        self._last_step = steps
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
            tasks = [*self._running.values(), *((self._pump,) if self._pump is not None else ())]
            for task in tasks:
                task.cancel()
            if tasks:
                _, stubborn = await asyncio.wait(tasks, timeout=_GRACE)
                if stubborn:
                    _log.warning("%d environments did not stop within %g s and are left behind", len(stubborn), _GRACE)

    async def _policy(self, version: int) -> None:
        if self._version >= version:
            return
        with Wait(
            "rollouts.policy", deadline=self._policy_deadline, remedy="the trainer publishes no weights; is it alive?"
        ) as wait:
            while self._version < version:
                await self._until_changed(wait.remaining())
                wait.check()

    async def _until_changed(self, seconds: float) -> None:
        """Wait until something has changed, for at most a second."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), min(1.0, max(seconds, 0.001)))

    async def _open(self, step: int) -> None:
        """Open the groups of a step, a slice at a time: the loop runs in between."""
        self._begun[step] = until = asyncio.get_running_loop().time()
        for _ in range(self.book.groups_per_step):
            self._ask(self.book.open(self._env_of(self.book.next_task)))
            if (now := asyncio.get_running_loop().time()) > until + _SLICE:
                until = now
                await asyncio.sleep(0)

    def _fill(self) -> None:
        """By completion: open groups, as many as the lag allows and the remaining steps need."""
        book = self.book
        if self._by_index:
            return
        needed = (self._last_step - book.next_step) * book.groups_per_step
        # The step that one more group would be of is at most the lag ahead of the trainer.
        while book.live < needed and book.next_step + book.live // book.groups_per_step <= self._version + book.lag:
            self._ask(book.open(self._env_of(book.next_task), policy_version=self._version))

    def _ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.env_name not in self._environments:
                raise ConfigError(
                    f"task {request.task} wants {request.env_name!r}; there are {sorted(self._environments)}"
                )
        self._queue.extend(requests)
        if self._queue and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._start_queued(), name="rollouts-start")

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
            if not self.book.is_waiting(request):  # it ended at a deadline or with its group before it was started
                self._limit.release()
                continue
            name = f"rollout-{request.task}-{request.member}-{request.attempt}"
            task = self._running[request] = loop.create_task(self._play(request), name=name)
            task.add_done_callback(functools.partial(self._ended, request))
            if loop.time() > until:
                await asyncio.sleep(0)
                until = loop.time() + _SLICE

    async def _play(self, request: Request) -> None:
        """Play a request: its rollout arrives, or the request fails for a reason. The caller has acquired the limit; it is released when the environment has answered."""
        patience, made = asyncio.timeout(self._request_deadline), None
        try:
            try:
                if (reason := self.book.recorded_failure(request)) is not None:
                    self._failed(request, reason, "as in the run that is resumed")
                    return
                async with patience:
                    raw = await self._environments[request.env_name](request)
            finally:
                self._limit.release()
            made = await self._made(request, raw)
        except (StorageError, EngineDied):
            raise
        except Exception as error:  # raised by the environment: one rollout has failed
            reason, told = type(error).__name__, str(error)
            if isinstance(error, RolloutRefused):
                reason = f"refused_{error.cause}"
            elif isinstance(error, EnvironmentFailed):
                reason = error.cause
            elif isinstance(error, TimeoutError) and patience.expired():  # else a TimeoutError of the environment's own
                reason, told = "timeout", f"no answer for {self._request_deadline:g} s"
            if reason != "refused_late":  # a late rollout is counted by the book
                self._failed(request, reason, told)
                return
        if self.book.arrive(request, made):
            self._fill()
            self._wake()

    async def _made(self, request: Request, raw: Any) -> Any:
        """Make samples of an answer. Returns the object that the book keeps; RolloutRefused if no samples could be made."""
        begun = self._begun.get(request.step) if self._by_index else min(self._begun.values(), default=None)
        left = math.inf if begun is None else begun + self._deadline - asyncio.get_running_loop().time()
        about: dict[str, Any] = {
            "policy_version": request.policy_version, "env_name": request.env_name, "until": time.monotonic() + left
        }  # fmt: skip
        if self._by_index:
            kept, cause = request.key, await self.pipeline.settle(raw, step=request.step, key=request.key, **about)
        else:
            made = await self.pipeline.prepare(raw, **about)
            kept, cause = (request.key, made), made if isinstance(made, str) else None
        if cause is not None:
            raise RolloutRefused(cause, cause)
        return kept

    def _failed(self, request: Request, reason: str, told: object) -> None:
        seen = self.book.counts.failed[reason]
        _log.log(
            logging.WARNING if seen < _WARNINGS else logging.INFO, "task %d, member %d in %s failed (%s): %s%s", request.task, request.member,
            request.env_name, reason, told, "; more of these are logged as INFO" if seen == _WARNINGS - 1 else "",
        )  # fmt: skip
        self._ask(self.book.fail(request, reason))
        self._fill()
        self._wake()

    def _ended(self, request: Request, task: asyncio.Task[None]) -> None:
        del self._running[request]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error
            self._wake()

    def _stop_ended(self) -> None:
        """Cancel the environments of requests that ended at a deadline or for their age."""
        for request, task in self._running.items():
            if not self.book.is_waiting(request):
                task.cancel()

    # ----------------------------------------------------------------------------------------------- step

    async def _step(self, step: int) -> StepReport:
        before, tries = Counter(self.book.counts.failed), 0
        for attempt in range(self._empty_retries + 1):
            tries += 1
            await self._complete(step)
            groups = self.book.take(short=not self._by_index)
            self._fill()
            if self._by_index:
                version, keys = max(0, step - self.book.lag), set(groups.rollouts)
            else:
                version, keys = groups.policy_version, {key for key, _ in groups.rollouts}
                await self.pipeline.add(step, groups.rollouts)
            report = await self.pipeline.finish(step, policy_version=version, only=keys)
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
        del self._begun[step]
        if self.sender is not None:
            await self.sender.send(report)
        return report

    async def _complete(self, step: int) -> None:
        """Wait until every request of the step has ended; the step's deadline ends them."""
        loop, until, first = asyncio.get_running_loop(), self._begun[step] + self._deadline, self._oldest_open()
        with Wait("rollouts.step"):
            while not self.book.ready():
                if self._broken is not None:
                    raise self._broken
                if not self._by_index and self._is_hopeless(first):
                    break
                if (remaining := until - loop.time()) <= 0:
                    ended = self.book.expire(step)
                    _log.warning(
                        "step %d was ended at its deadline of %g s with %d requests out", step, self._deadline, ended
                    )
                    self._stop_ended()
                    break
                await self._until_changed(remaining)

    def _oldest_open(self) -> int:
        return min(self.book.open_tasks, default=self.book.next_task)

    def _is_hopeless(self, first: int) -> bool:
        """By completion: whether all groups from task `first` on have ended without a rollout, and they are as many as all tries of a step have. Without this
        check new groups would be opened and fail until the deadline."""
        tried = self.book.groups_per_step * (self._empty_retries + 1)
        return not self.book.held and self._oldest_open() - first >= tried

    # -------------------------------------------------------------------------------------------- evaluation

    async def evaluate(self, calls: Sequence[Callable[[], Awaitable[_Result]]]) -> list[_Result | BaseException]:
        """Make these calls beside training, under the same limit. Returns the result or the exception of each, in their order."""

        async def one(call: Callable[[], Awaitable[_Result]]) -> _Result:
            async with self._limit:
                async with asyncio.timeout(self._request_deadline):
                    return await call()

        return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
