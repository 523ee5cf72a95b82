"""The orchestrator of an RL run: an event loop in a thread beside the trainer, with environments, engine, arrival log, batches and evaluation.

    with Orchestrator(config, run, environments=…, codec=…, batches=folder, first=0, models={0: model}) as orchestrator:
        report = orchestrator.next_batch()            the next step's batch is published
        orchestrator.publish(1, model)                version 1 of the policy: rollouts of later steps are sampled with it
        orchestrator.evaluate(1)                      plays held-out tasks beside the rollouts that are under way

The trainer's thread calls these methods; all other code runs on the loop's thread. Each method returns None as soon as a signal asks the run to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from headrace.errors import StepFailed
from headrace.metrics import JsonlSink, Wait
from headrace.mix import LaneMix, fixed_point, starting_credits
from headrace.rollouts.advantages import advantage_named
from headrace.rollouts.arrival_log import ArrivalLog
from headrace.rollouts.engine import Codec
from headrace.rollouts.environment_actors import EnvironmentActors
from headrace.rollouts.environment_processes import EnvironmentProcesses
from headrace.rollouts.environments import Environment, play_rollout
from headrace.rollouts.filters import ZeroAdvantageFilter
from headrace.rollouts.groups import EnvPolicy, GroupBook, Request
from headrace.rollouts.openai_engine import OpenAIEngine
from headrace.rollouts.pipeline import RolloutPipeline, StepReport
from headrace.rollouts.records import Rollout
from headrace.rollouts.scheduler import RolloutScheduler
from headrace.rollouts.weights import drop_weights_below, probe_ids, publish_weights
from headrace.runs.config.rl import RLConfig
from headrace.runs.run_loop import Run

_CLOSE_SECONDS = 3.0
"""Seconds that the loop may take to end. A loop that takes longer is blocked by an environment."""
_ANSWERS = 3
"""Held-out answers that are shown at each evaluation."""
_T = TypeVar("_T")


def environment_of_task(weights: Sequence[float], seed: int) -> Callable[[int], int]:
    """A function from a task to the index of its environment, by the mix rule: after n tasks every environment has had its share of n, plus or minus about one."""
    shares = fixed_point(weights)
    mix = LaneMix(shares, starting_credits(shares, block=1, lane=0, lanes=1, seed=seed), block=1)
    chosen: list[int] = []

    def environment(task: int) -> int:
        while len(chosen) <= task:
            source = mix.next_source()
            mix.deliver(source, 1)
            chosen.append(source)
        return chosen[task]

    return environment


class Orchestrator:
    """Runs the event loop while it is entered. One thread, the trainer's, calls its methods."""

    def __init__(
        self, config: RLConfig, run: Run, *, environments: Mapping[str, Environment], codec: Codec, batches: Path, first: int,
        models: Mapping[int, Any],
    ) -> None:  # fmt: skip
        """An orchestrator that is not started yet.

        Args:
            config: the run's config.
            run: the run, for its folder, its signals and its notices.
            environments: the loaded environments, by name.
            codec: text to ids and back.
            batches: the folder of training batches.
            first: number of the first batch to make.
            models: versions of the policy that rollouts may be pinned to, by version.
        """
        self.config, self.run, self.environments, self.codec = config, run, dict(environments), codec
        self.batches, self.first, self._models = batches, first, dict(models)
        fingerprints = {name: env.fingerprint for name, env in environments.items()}
        made_with = {"config": config.hash, "environments": fingerprints}
        self.log = ArrivalLog(run.folder.path / "arrivals", first_step=first, made_with=made_with)
        self._recorded, self._failed = 0, Counter[str]()
        """Rollouts that were taken from the arrival log and requests that failed by reason, since the last version."""
        self._environment_of = environment_of_task([env.weight for env in config.env], config.run.seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-orchestrator", daemon=True)
        self._opened = contextlib.AsyncExitStack()
        self.engine: Any = None
        self._steps: AsyncGenerator[StepReport] | None = None

    # ------------------------------------------------------------------------------------ trainer's thread

    def __enter__(self) -> Self:
        if self.log.dropped:
            self.run.watcher.notice(
                "the arrival log was made with other settings or environments; its rollouts are made again"
            )
        if answered := len(self.log.known) - len(self.log.failures()):
            self.run.watcher.notice(
                f"the arrival log has {answered:,} rollouts of steps that are not saved; they are not asked for again"
            )
        self._thread.start()
        try:
            self._unless_stopped(self._open())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        ended, _ = wait([closing], _CLOSE_SECONDS)
        if not ended:
            self.run.watcher.notice(
                f"the event loop did not end within {_CLOSE_SECONDS:g} s and is left behind: an environment blocks it; play it in processes (env.workers)"
            )
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.log.close()
        closing.result()

    def _unless_stopped(self, work: Coroutine[Any, Any, _T], every: Callable[[], None] = lambda: None) -> _T | None:
        """The result of a coroutine that is run on the loop; None if a signal asks the run to stop before. `every` is called ten times a second."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([future], 0.1).done:
                if self.run.stop_signal:
                    return None
                every()
            return future.result()
        finally:
            future.cancel()

    def next_batch(self, every: Callable[[], None] = lambda: None) -> StepReport | None:
        """Collect the next step's rollouts into a batch, and wait for it. `every` is called ten times a second meanwhile."""
        with Wait("rollouts.batch"):
            return self._unless_stopped(self._next_step(), every)

    def publish(self, version: int, model: Any) -> tuple[Counter[str], int] | None:
        """Let rollouts be sampled with this version of the policy. Returns the failed requests by reason and the number of rollouts taken from the arrival
        log, both since the last call."""
        return self._unless_stopped(self._published(version, model))

    def evaluate(self, version: int) -> dict[str, float] | None:
        """Play the held-out tasks with one version of the policy; {} if there are none."""
        with Wait("rollouts.evaluation"):
            return self._unless_stopped(self._evaluated(version))

    # --------------------------------------------------------------------------------------- loop's thread

    async def _open(self) -> None:
        config, rollouts = self.config, self.config.rollouts
        await self._open_workers()
        await self._open_engine()
        book = GroupBook(
            [
                EnvPolicy(env_name=env.name, group_size=env.group_size, on_failure=rollouts.on_failure, max_refills=rollouts.max_refills)
                for env in config.env
            ],
            groups_per_step=rollouts.groups_per_step, lag=rollouts.lag, journal=self._journalled, failures=self.log.failures(),
        )  # fmt: skip
        pipeline = await self._opened.enter_async_context(
            RolloutPipeline(
                self.batches, seq_len=config.policy.micro_tokens, ranks=self.run.world_size, advantage=advantage_named(config.policy.advantage),
                filters=[ZeroAdvantageFilter()] if rollouts.drop_equal else [], first_step=self.first,
                warn_of_lag=False,
            )
        )  # fmt: skip
        self.scheduler = RolloutScheduler(
            book, pipeline, environments={env.name: self._answer for env in config.env},
            env_of=lambda task: config.env[self._environment_of(task)].name, concurrency=rollouts.concurrency, step_deadline=rollouts.step_deadline,
            request_deadline=rollouts.deadline, policy_deadline=config.run.deadline,
        )  # fmt: skip
        self.scheduler.policy_is(self.first)
        self._steps = self.scheduler.run(config.run.steps, first=self.first)

    async def _open_workers(self) -> None:
        """Start the processes or actors of environments that are configured with `workers`."""
        for env in self.config.env:
            if env.workers:
                settings: dict[str, Any] = {
                    "name": env.name, "base": self.run.folder.base, "seed": self.config.run.seed, "options": env.options, "memory_mb": env.memory_mb
                }  # fmt: skip
                if env.workers == "ray":
                    workers = EnvironmentActors(env.spec, **settings)
                else:
                    workers = EnvironmentProcesses(env.spec, workers=env.workers, **settings)
                self._opened.push_async_callback(workers.close)
                await workers.start()
                self.environments[env.name] = dataclasses.replace(self.environments[env.name], play=workers.play)

    async def _open_engine(self) -> None:
        config = self.config
        if config.engine.kind == "openai":
            self.engine = OpenAIEngine(config.engine.url, model=config.engine.model, deadline=config.engine.deadline)
            self._opened.push_async_callback(self.engine.close)
            await self._send_weights(self.first, self._models[self.first])
            return
        from headrace.train.embedded_engine import EmbeddedEngine

        self.engine = EmbeddedEngine(
            end_id=self.codec.end_id, context=config.policy.context, slots=config.engine.slots, versions=config.rollouts.lag + 1
        )  # fmt: skip
        self._opened.push_async_callback(self.engine.close)
        for version, model in self._models.items():
            self.engine.take(version, model)

    async def _send_weights(self, version: int, model: Any) -> None:
        """Publish a version as files, and let the servers load it and answer its probe."""
        from headrace.train.policy import logprobs_of
        from headrace.train.policy_models import parameters_of

        if self.config.engine.weights == "none":
            return
        folder = self.run.folder.make_folder("weights")
        ids = probe_ids(self.codec.vocab_size, self.config.policy.context)
        arrays = {name: parameter.detach().cpu().numpy() for name, parameter in parameters_of(model).items()}
        where = await asyncio.to_thread(publish_weights, folder, version, arrays, ids, logprobs_of(model, ids))
        await self.engine.take_weights(version, where, tolerance=self.config.engine.tolerance)
        drop_weights_below(folder, version)
        self.run.note("weights", version=version, where=str(where.relative_to(self.run.folder.path)))

    async def _close(self) -> None:
        if self._steps is not None:
            with contextlib.suppress(RuntimeError):  # the generator was cancelled in the middle of a step and has ended
                await self._steps.aclose()
        await self._opened.aclose()

    async def _next_step(self) -> StepReport:
        assert self._steps is not None
        try:
            return await anext(self._steps)
        except StepFailed:
            self.log.forget_failures()
            raise

    async def _published(self, version: int, model: Any) -> tuple[Counter[str], int]:
        if isinstance(self.engine, OpenAIEngine):
            await self._send_weights(version, model)
        else:
            self.engine.take(version, model)
        self.log.finish(version - 1)
        self.scheduler.policy_is(version)
        counts = self._failed, self._recorded
        self._failed, self._recorded = Counter(), 0
        return counts

    async def _answer(self, request: Request) -> Rollout:
        """The rollout of a request: from the arrival log if it finished before, else played and written there."""
        if (recorded := self.log.answer(request)) is not None:
            self._recorded += 1
            return recorded
        rollout = await play_rollout(
            self.environments[request.env_name], self.engine, self.codec, index=request.task, member=request.member, attempt=request.attempt,
            version=request.policy_version,
        )  # fmt: skip
        self.log.append(request, rollout)
        return rollout

    def _journalled(self, fact: Mapping[str, Any]) -> None:
        if fact["fact"] == "failed":
            self._failed[fact["reason"]] += 1
            self.log.append_failure(fact)

    # ----------------------------------------------------------------------------------------- evaluation

    async def _evaluated(self, version: int) -> dict[str, float]:
        config = self.config.eval
        if not config.tasks:
            return {}
        cases = [
            (name, task, k)
            for name in self.environments
            for task in range(config.tasks)
            for k in range(config.samples + 1)
        ]
        calls = [functools.partial(self._held_out, name, task, k, version) for name, task, k in cases]
        # Servers have the newest version only.
        keep = contextlib.nullcontext() if isinstance(self.engine, OpenAIEngine) else self.engine.keep(version)
        with keep:
            answers = await self.scheduler.evaluate(calls)
        rewards: dict[str, dict[int, list[float]]] = {name: {} for name in self.environments}
        shown: list[tuple[str, int, Rollout]] = []
        failed = 0
        for (name, task, k), rollout in zip(cases, answers, strict=True):
            failed += isinstance(rollout, BaseException)
            rewards[name].setdefault(task, []).append(0.0 if isinstance(rollout, BaseException) else rollout.reward)
            if not isinstance(rollout, BaseException) and k == 0 and len(shown) < _ANSWERS:
                shown.append((name, task, rollout))
        self._show(version, shown)
        found = {"eval/failed": float(failed)}
        by_env = {name: list(of_env.values()) for name, of_env in rewards.items()}
        by_env["all"] = [task for of_env in by_env.values() for task in of_env]
        for name, tasks in by_env.items():
            found[f"eval/{name}/greedy"] = float(np.mean([t[0] >= 1.0 for t in tasks]))
            found[f"eval/{name}/reward"] = float(np.mean([t[0] for t in tasks]))
            if config.samples:
                found[f"eval/{name}/pass_at_k"] = float(np.mean([max(t[1:]) >= 1.0 for t in tasks]))
        return found

    async def _held_out(self, name: str, task: int, k: int, version: int) -> Rollout:
        """Play a held-out task; member 0 is greedy."""
        return await play_rollout(
            self.environments[name], self.engine, self.codec, index=task, member=k, version=version, split="eval", greedy=k == 0
        )  # fmt: skip

    def _show(self, version: int, shown: Sequence[tuple[str, int, Rollout]]) -> None:
        """Append the first few answers to answers.jsonl, and print them."""
        with JsonlSink(self.run.folder.path / "answers.jsonl") as sink:
            for name, task, rollout in shown:
                prompt = str(rollout.trajectory[0].prompt)
                answer = " | ".join(str(turn.completion) for turn in rollout.trajectory)
                line = {"step": version, "env": name, "task": task, "prompt": prompt, "answer": answer}
                sink.write({**line, "reward": rollout.reward})
                self.run.watcher.info(f"{prompt}  {answer!r}  reward {rollout.reward:.2f}")
