"""Environments as Ray actors, for fleets: `workers = "ray"`.

    actors = EnvironmentActors("python:sort.py:play", name="sort", base=Path("."), seed=7)
    await actors.start()
    await actors.play(task, say)              called like the environment's own function, which runs in an actor

One actor a CPU of the cluster that Ray is connected to, or of this machine. The environment's files must lie under the same path on every node. An actor that dies
fails the rollouts it had with `WorkerDied`; Ray starts it again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, WorkerDied
from headrace.rollouts.environment_processes import EnvironmentPlayer, next_move
from headrace.rollouts.environments import Result, Say, Task

_START_SECONDS = 120.0
_AT_A_TIME = 1000
"""Rollouts that one actor plays at a time."""


class _Actor:
    """Runs in the actor. A ConfigError is returned as text, because Ray would wrap the exception."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    async def load(self) -> str:
        """Import the environment. Returns the message of a ConfigError, or ""."""
        try:
            self._player = EnvironmentPlayer(self._settings)
        except ConfigError as error:
            return str(error)
        return ""

    async def play(self, *arguments: Any) -> dict[str, Any]:
        if not hasattr(self, "_player"):  # Ray started this actor in the place of one that died
            self._player = EnvironmentPlayer(self._settings)
        return await self._player.play(*arguments)

    async def answer(self, number: int, text: str) -> dict[str, Any]:
        return await self._player.answer(number, text)

    async def cancel(self, number: int) -> None:
        self._player.cancel(number)


class EnvironmentActors:
    """The actors of one environment. Used on one event loop."""

    def __init__(
        self, spec: str, *, name: str, base: Path, seed: int, options: Mapping[str, Any] | None = None, memory_mb: int = 0
    ) -> None:  # fmt: skip
        """The arguments are those of `EnvironmentProcesses`."""
        try:
            import ray.exceptions
        except ImportError:
            raise ConfigError('env.workers = "ray" needs Ray: pip install headrace[ray]') from None
        self._ray: Any = ray
        self._settings = {
            "spec": spec, "name": name, "base": str(base.resolve()), "seed": seed, "options": dict(options or {}), "memory_mb": memory_mb
        }  # fmt: skip
        self._name = name
        self._actors: list[Any] = []
        self._playing: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._connected = False

    async def start(self) -> None:
        """Start an actor a CPU and wait until each has imported the environment. ConfigError says what is wrong with it."""
        if not self._ray.is_initialized():
            await asyncio.to_thread(self._ray.init, include_dashboard=False, log_to_driver=False, logging_level="error")
            self._connected = True
        kind = self._ray.remote(num_cpus=1, max_restarts=-1, max_concurrency=_AT_A_TIME)(_Actor)
        count = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._actors = [kind.remote(self._settings) for _ in range(count)]
        async with asyncio.timeout(_START_SECONDS):
            wrong = await asyncio.gather(*(actor.load.remote() for actor in self._actors))
        if any(wrong):
            raise ConfigError(next(filter(None, wrong)))

    async def play(self, task: Task, say: Say) -> Result:
        """Play a rollout in the actor that plays fewest. EnvironmentFailed if the environment raises there, WorkerDied if the actor ends."""
        at = min(range(len(self._actors)), key=lambda n: self._playing[n])
        actor, number = self._actors[at], next(self._numbers)
        self._playing[at] += 1
        try:
            said = await actor.play.remote(number, task.index, task.key, task.split)
            while isinstance(move := await next_move(said, say), str):
                said = await actor.answer.remote(number, move)
            return move
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(f"an actor of environment {self._name} is gone: {str(error)[:300]}") from error
        except asyncio.CancelledError:
            actor.cancel.remote(number)
            raise
        finally:
            self._playing[at] -= 1

    async def close(self) -> None:
        """End the actors, and Ray if `start` started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._connected:
            await asyncio.to_thread(self._ray.shutdown)
