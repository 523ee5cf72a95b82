"""Environments: functions that are given a task and a way to ask the policy, and return a reward.

    async def play(task, say):
        digits = task.rng.integers(0, 10, 4)
        answer = await say("".join(map(str, digits)) + ">", max_tokens=4)     several calls are several turns
        return float(answer == "".join(map(str, sorted(digits))))             or Result(reward, metrics={...})

    spec                              what it names
    python:sort.py:play               the function `play` of a file; a relative path starts at the config's folder
    python:package.module:play        the function `play` of an importable module
    reasoning-gym:number_sorting      a procedural dataset of reasoning-gym
    verifiers:reverse-text            a taskset of verifiers (0.4 and later) whose tasks are one prompt, scored without a sandbox

A task is keyed by its number: every member of a group, and every re-run, gets the same `task.rng`. Evaluation tasks are keyed apart from training. Each turn's
prompt is the context before it, token for token, and the ids of the new text, so a rollout of several turns is one sample.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError, RolloutRefused
from headrace.files import read_regular
from headrace.order import derive, key
from headrace.rollouts.engine import Codec, Engine
from headrace.rollouts.records import Rollout, Step, StepTokens


@dataclass(slots=True, frozen=True)
class Result:
    """A reward with further metrics; an environment may return it instead of a bare reward."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers about the rollout; saved with it."""


@dataclass(frozen=True)
class Task:
    """One problem to solve. Members of a group are given equal tasks."""

    index: int
    """Number of the task within its split."""
    env: str
    key: int
    """64 bits that depend on the run's seed, the environment, the split and the index."""
    split: str = "train"

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """A generator seeded with the task's key: a fresh one for every rollout, with equal draws in equal tasks."""
        return np.random.default_rng(self.key)


EnvFunction = Callable[[Task, Any], Awaitable[Any]]
"""`play(task, say)`: returns a reward or a Result."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A loaded environment and its sampling settings."""

    name: str
    spec: str
    play: EnvFunction
    max_tokens: int = 32
    temperature: float = 1.0
    seed: int = 0
    fingerprint: str = ""
    """Fingerprint of the file that it was loaded from; empty for other specs."""

    def task(self, index: int, split: str = "train") -> Task:
        """The task with this number."""
        return Task(index, self.name, derive(_split_key("rollouts.task", self.name, split, self.seed), index), split)

    def sampling_key(self, split: str, index: int, member: int, attempt: int) -> int:
        """The key that the completions of one rollout are sampled with."""
        split_key = _split_key("rollouts.sample", self.name, split, self.seed)
        return derive(derive(derive(split_key, index), member), attempt)


@functools.lru_cache
def _split_key(purpose: str, env: str, split: str, seed: int) -> int:
    return key(f"{purpose}:{env}:{split}", seed=seed)


class Say:
    """Asks the policy: called with the next text, returns the answer. Keeps ids, log-probs and versions of every turn."""

    def __init__(
        self, engine: Engine, codec: Codec, *, key: int, version: int, max_tokens: int, temperature: float, session: str = ""
    ) -> None:  # fmt: skip
        self._engine, self._codec, self._key, self._version = engine, codec, key, version
        self._max_tokens, self._temperature, self.session = max_tokens, temperature, session
        self._context = np.empty(0, np.int32)
        self.turns: list[Step] = []
        self.seconds = 0.0
        """Time spent waiting for the engine."""

    async def __call__(self, text: str, *, max_tokens: int | None = None) -> str:
        """Append `text` to the context and let the policy answer.

        Args:
            text: the next prompt; its ids follow the ids of all turns before.
            max_tokens: the longest answer, in tokens; the environment's own setting unless given.
        """
        prompt = np.concatenate([self._context, self._codec.encode(text)])
        started = time.perf_counter()
        completion = await self._engine.complete(
            prompt, max_tokens=max_tokens or self._max_tokens, temperature=self._temperature, seed=derive(self._key, len(self.turns)),
            version=self._version, session=self.session,
        )  # fmt: skip
        self.seconds += time.perf_counter() - started
        answer = self._codec.decode(completion.ids) if completion.text is None else completion.text
        tokens = StepTokens.answered(prompt, completion.ids, completion.logprobs, version_spans=completion.spans)
        self.turns.append(Step(prompt=text, completion=answer, tokens=tokens))
        self._context = np.concatenate([prompt, completion.ids])
        return answer


async def play_rollout(
    environment: Environment, engine: Engine, codec: Codec, *, index: int, member: int = 0, attempt: int = 0, version: int, split: str = "train",
    greedy: bool = False,
) -> Rollout:  # fmt: skip
    """Play one rollout to its end. Errors of the environment pass through; RolloutRefused if its result is not a reward."""
    started = time.perf_counter()
    say = Say(
        engine, codec, key=environment.sampling_key(split, index, member, attempt), version=version, max_tokens=environment.max_tokens,
        temperature=0.0 if greedy else environment.temperature, session=f"{environment.name}-{split}-{index}-{member}-{attempt}",
    )  # fmt: skip
    result = await environment.play(environment.task(index, split), say)
    seconds = time.perf_counter() - started
    reward, metrics = (result.reward, result.metrics) if isinstance(result, Result) else (result, {})
    try:
        reward = float(reward)
        metrics = {str(name): float(value) for name, value in dict(metrics).items()}
    except (TypeError, ValueError) as error:
        raise RolloutRefused(
            "nonsense", f"environment {environment.name} returned {reward!r:.60} with metrics {metrics!r:.60}: expected a number, or a Result"
        ) from error  # fmt: skip
    if not math.isfinite(reward):
        raise RolloutRefused("not_finite", f"environment {environment.name} returned the reward {reward}")
    if not say.turns:
        raise RolloutRefused("no_turns", f"environment {environment.name} returned without asking the policy anything")
    return Rollout(
        example_id=index, env_name=environment.name, reward=reward, metrics=metrics, trajectory=tuple(say.turns), policy_version=_oldest_version(say.turns, version),
        sampling_args={"temperature": environment.temperature}, timing={"total": seconds, "model": say.seconds, "env": seconds - say.seconds},
    )  # fmt: skip


def _oldest_version(turns: Sequence[Step], asked: int) -> int:
    """The oldest version of the weights that sampled a token, as the engine reported it; `asked` without a report."""
    told = [span.version for turn in turns if turn.tokens is not None for span in turn.tokens.version_spans]
    return min(map(int, told)) if told and all(version.isdecimal() for version in told) else asked


# ------------------------------------------------------------------------------------------------------ specs


def load_environment(
    spec: str, *, name: str, base: Path, seed: int, max_tokens: int = 32, temperature: float = 1.0, options: Mapping[str, Any] | None = None
) -> Environment:  # fmt: skip
    """The environment that a spec names; ConfigError says what is wrong with it.

    Args:
        spec: see the module's table.
        name: the environment's name in metrics.
        base: the folder that relative paths start at.
        seed: the run's seed, which keys tasks and samples.
        max_tokens: the longest answer, in tokens.
        temperature: of the sampling.
        options: keyword arguments of the function, of the dataset (reasoning-gym) or of the taskset's config (verifiers).
    """
    kind, _, rest = spec.partition(":")
    fingerprint = ""
    if kind == "python":
        path, _, function = rest.rpartition(":")
        play = _python_function(path, function, base, spec)
        if path.endswith(".py"):
            fingerprint = hashlib.sha256(read_regular(base / path, 16 << 20, follow=True)).hexdigest()[:16]
        if options:
            play = functools.partial(play, **options)
    elif kind == "reasoning-gym":
        play = _reasoning_gym(rest, options or {}, spec)
    elif kind == "verifiers":
        play = _verifiers(rest, options or {}, spec)
    else:
        raise ConfigError(
            f'env.spec {spec!r}: expected "python:FILE.py:FUNCTION", "python:MODULE:FUNCTION", "reasoning-gym:DATASET" or "verifiers:TASKSET"'
        )
    return Environment(
        name=name, spec=spec, play=play, max_tokens=max_tokens, temperature=temperature, seed=seed, fingerprint=fingerprint
    )  # fmt: skip


def _python_function(path: str, function: str, base: Path, spec: str) -> EnvFunction:
    if not path or not function:
        raise ConfigError(f'env.spec {spec!r}: expected "python:FILE.py:FUNCTION" or "python:MODULE:FUNCTION"')
    try:
        if path.endswith(".py"):
            file = base / path
            if not file.is_file():
                raise ConfigError(f"env.spec {spec!r}: there is no file {file}")
            name = "headrace_env_" + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
            found = importlib.util.spec_from_file_location(name, file)
            assert found is not None
            assert found.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(path)
    except ConfigError:
        raise
    except Exception as error:  # raised by the user's module
        raise ConfigError(f"env.spec {spec!r}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    play = getattr(module, function, None)
    if not inspect.iscoroutinefunction(play):
        raise ConfigError(
            f"env.spec {spec!r}: expected `async def {function}(task, say)` in {path}, found {type(play).__name__}"
        )
    return play


def _reasoning_gym(name: str, options: Mapping[str, Any], spec: str) -> EnvFunction:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"env.spec {spec!r} needs reasoning-gym, which cannot be imported ({error}): pip install reasoning-gym"
        ) from error
    try:
        gym.create_dataset(name, seed=0, size=1, **options)
    except Exception as error:
        raise ConfigError(
            f"env.spec {spec!r}: reasoning-gym does not make it: {type(error).__name__}: {error}"
        ) from error

    async def play(task: Task, say: Say) -> float:
        dataset = gym.create_dataset(name, seed=task.key % (1 << 31), size=1, **options)
        item = dataset[0]
        answer = await say(item["question"])
        return float(dataset.score_answer(answer, item))

    return play


_TASKS = 10_000
"""The most tasks that are taken of a verifiers taskset, which may be endless."""


def _verifiers(name: str, options: Mapping[str, Any], spec: str) -> EnvFunction:
    """Plays tasks that are one prompt; the task's own rewards score the answer. One task in ten is held out, by its key."""
    try:
        vf = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
    except ImportError as error:
        raise ConfigError(
            f"env.spec {spec!r} needs verifiers 0.4 or later, which cannot be imported ({error}): pip install verifiers"
        ) from error
    try:
        taskset = loaders.load_taskset(loaders.taskset_config_type(name)(id=name, **options))
        tasks = list(itertools.islice(taskset, _TASKS))
    except Exception as error:  # raised by the taskset
        raise ConfigError(f"env.spec {spec!r}: verifiers does not make it: {type(error).__name__}: {error}") from error
    needs = [
        task.key for task in tasks if task.data.prompt is None or type(task).toolsets(task.config) or _needs_sandbox(task)
    ]  # fmt: skip
    if needs or len(tasks) < 2:
        raise ConfigError(
            f"env.spec {spec!r}: {len(needs)} of its {len(tasks)} tasks have no prompt, or need tools or a sandbox. Play them with verifiers, and give "
            "headrace.rollouts.RolloutPipeline their episodes"
        )
    held_out = {at for at, task in enumerate(tasks) if key(f"rollouts.held_out:{task.key}") % 10 == 0} or {0}
    of_split = {
        "eval": [tasks[at] for at in sorted(held_out)],
        "train": [task for at, task in enumerate(tasks) if at not in held_out] or tasks,
    }

    async def play(task: Task, say: Say) -> Result:
        chosen = of_split[task.split][task.key % len(of_split[task.split])]
        prompt = "\n\n".join(filter(None, (chosen.data.system_prompt, chosen.data.prompt_text)))
        answer = await say(prompt)
        record = vf.TraceTask(type=type(chosen).__name__, data=chosen.data, key=chosen.key, hash=chosen.hash)
        trace = vf.Trace(task=record, agent=vf.AgentInfo(config=vf.AgentConfig()))
        trace.nodes = [
            vf.MessageNode(message=vf.UserMessage(content=prompt)),
            vf.MessageNode(message=vf.AssistantMessage(content=answer), parent=0, sampled=True),
        ]
        await chosen.score(trace)
        return Result(trace.reward, {name: value for name, value in trace.metrics.items() if value is not None})

    return play


def _needs_sandbox(task: Any) -> bool:
    """Whether a reward of a verifiers task needs the sandbox that its episode ran in."""
    parameters = [inspect.signature(hook).parameters.get("runtime") for hook in task.hooks("reward")]
    return any(p is not None and p.default is inspect.Parameter.empty for p in parameters)
