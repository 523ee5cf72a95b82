"""Environments in processes: what goes wrong in one costs its own rollouts only, by name."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from headrace.errors import ConfigError, EnvironmentFailed, RolloutRefused, WorkerDied
from headrace.rollouts.engine import CharacterCodec, Completion
from headrace.rollouts.environment_processes import EnvironmentProcesses
from headrace.rollouts.environments import Environment, load_environment, play_rollout
from headrace.rollouts.interleave import interleave_rollout

GAME = """
import time

async def play(task, say, extra=0):
    print("what an environment prints does not disturb the frames")
    kind = task.index
    if kind == 1:
        raise KeyError("no such key")
    first = await say("1+", max_tokens=3)
    if kind == 2:
        time.sleep(60)
    if kind == 3:
        bytearray(1 << 32)
    if kind == 4:
        return "a lot"
    if kind == 5:
        return float("nan")
    second = await say("=")
    return float(len(first) + len(second)) + extra + float(task.rng.integers(0, 1))
"""


class Echo:
    """An engine that answers with the length of its context."""

    async def complete(self, ids, *, max_tokens, temperature, seed, version, session=""):
        await asyncio.sleep(0)
        said = np.full(min(max_tokens, 2), len(ids) % 10, np.int32)
        return Completion(said, np.full(len(said), -0.5, np.float32), ())

    async def close(self):
        pass


@pytest.fixture
def game(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    return tmp_path


async def played(environment: Environment, index: int, **more):
    return await play_rollout(environment, Echo(), CharacterCodec("0123456789+="), index=index, version=0, **more)


def test_rollouts_played_in_processes_are_those_of_the_loop(game):
    options = {"extra": 2}
    here = load_environment("python:game.py:play", name="game", base=game, seed=1, options=options)

    async def main():
        workers = EnvironmentProcesses(
            "python:game.py:play", workers=2, name="game", base=game, seed=1, options=options, memory_mb=3000
        )
        await workers.start()
        there = Environment(name="game", spec="", play=workers.play, seed=1)
        try:
            both = await asyncio.gather(*(played(env, 6 + n) for n in range(20) for env in (here, there)))
            for one, other in zip(both[::2], both[1::2], strict=True):
                assert one.reward == other.reward == 6.0
                (a,), (b,) = interleave_rollout(one), interleave_rollout(other)  # several turns are one sample
                assert a.ids.tolist() == b.ids.tolist()
                assert a.mask.tolist() == [0, 0, 1, 1, 0, 1, 1]
            with pytest.raises(EnvironmentFailed, match="no such key") as raised:
                await played(there, 1)
            assert raised.value.cause == "KeyError"
            with pytest.raises(EnvironmentFailed) as raised:
                await played(there, 3)
            assert raised.value.cause == "MemoryError"
            with pytest.raises(RolloutRefused, match="expected a number"):
                await played(there, 4)
            with pytest.raises(RolloutRefused, match="returned the reward nan"):
                await played(there, 5)
            assert workers.restarts == 0
            before = workers.pids
            # A rollout that blocks its process: cancelled at its deadline, and the process is replaced.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(played(there, 2), 0.5)
            async with asyncio.timeout(60):
                while workers.restarts < 1 or len(workers.pids) < 2:
                    await asyncio.sleep(0.05)
            assert workers.pids != before
            assert (await played(there, 9)).reward == 6.0
            blocked = asyncio.ensure_future(played(there, 2))
            await asyncio.sleep(0.3)
            for pid in workers.pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="was killed by SIGKILL"):
                await blocked
            # With every process gone, a rollout waits for the next one: it has not failed.
            async with asyncio.timeout(60):
                while workers.restarts < 3:
                    await asyncio.sleep(0.01)
                assert (await played(there, 9)).reward == 6.0
        finally:
            await workers.close()

    asyncio.run(main())


def test_an_environment_that_cannot_be_loaded_is_named_at_the_start(game):
    async def main(spec):
        workers = EnvironmentProcesses(spec, workers=1, name="game", base=game, seed=1)
        try:
            await workers.start()
        finally:
            await workers.close()

    with pytest.raises(ConfigError, match="there is no file"):
        asyncio.run(main("python:gone.py:play"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("python:gone.py:play", "there is no file"),
        ("python:game.py:game", "expected `async def game"),
        ("python:json:loads", "expected `async def loads"),
        ("python:broken.py:play", "cannot be imported: SyntaxError"),
        ("ruby:game.rb", 'expected "python:'),
        ("reasoning-gym:nothing", "reasoning-gym"),
    ],
)
def test_a_spec_that_names_no_environment_says_why(game, spec, message):
    (game / "broken.py").write_text("async def play(task, say:\n")
    with pytest.raises(ConfigError, match=message):
        load_environment(spec, name="game", base=game, seed=0)
