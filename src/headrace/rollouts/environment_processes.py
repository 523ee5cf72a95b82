"""Environments in worker processes: an environment that blocks, leaks or crashes costs its own rollouts only.

    workers = EnvironmentProcesses("python:sort.py:play", workers=2, name="sort", base=Path("."), seed=7, memory_mb=512)
    await workers.start()
    await workers.play(task, say)             called like the environment's own function, which runs in a process

Each process plays many rollouts at a time on an event loop (`EnvironmentPlayer`). Its prompts come back over its pipe and are answered here, so
ids and log-probs never leave this process. A frame is a line of JSON. When a process dies, its rollouts fail with `WorkerDied` and a new process is
started. A rollout that is cancelled at its deadline is cancelled in the process too; a process that does not confirm that is blocked, and is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Awaitable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, EnvironmentFailed, HeadraceError, WorkerDied
from headrace.rollouts.environments import Result, Say, Task, load_environment
from headrace.runtime.workers import WorkerProcess

_log = logging.getLogger("headrace.rollouts")
_START_SECONDS = 120.0
_CANCEL_SECONDS = 2.0
_LARGEST = 64 << 20
"""Bytes of a frame."""


class _Process:
    """One process, the stream to it, and the rollouts it plays."""

    def __init__(self, worker: WorkerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker, self.reader, self.writer = worker, reader, writer
        self.playing: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.cancelling: set[int] = set()

    def send(self, value: Mapping[str, Any]) -> None:
        self.writer.write(_framed(value))  # lost if the process is gone, which its reader task notices


class EnvironmentProcesses:
    """The processes of one environment. Used on one event loop."""

    def __init__(
        self, spec: str, *, workers: int, name: str, base: Path, seed: int, options: Mapping[str, Any] | None = None, memory_mb: int = 0
    ) -> None:  # fmt: skip
        """`memory_mb`: address space of each process, 0 for no limit; the other arguments are those of `load_environment`."""
        self._settings = {
            "spec": spec, "name": name, "base": str(base), "seed": seed, "options": dict(options or {}), "memory_mb": memory_mb
        }  # fmt: skip
        self._name, self._workers = name, workers
        self._processes: list[_Process] = []
        self._numbers = itertools.count()
        self._readers: set[asyncio.Task[None]] = set()
        self._started = asyncio.Event()
        self._lost: HeadraceError | None = None
        """The error of a process that could not be started again."""
        self.restarts = 0
        """Processes that died or were killed, and were replaced."""

    async def start(self) -> None:
        """Start all processes and wait until each has imported the environment. `close` ends them also after an error."""
        started = await asyncio.gather(*(self._spawn() for _ in range(self._workers)), return_exceptions=True)
        self._processes = [process for process in started if isinstance(process, _Process)]
        for error in started:
            if isinstance(error, BaseException):
                raise error

    async def _spawn(self) -> _Process:
        worker = WorkerProcess(f"of environment {self._name}", _serve, imports_main=False)
        worker.has_answered = True  # it does not import the main script, so its end has another cause
        process = _Process(worker, *await _opened(worker.pipe))
        process.send(self._settings)
        ready = b""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_SECONDS):
                    ready = await process.reader.readline()
        finally:  # also if `close` was called meanwhile
            if not ready:
                worker.kill()
                how = await _end(process)
        if not ready:
            raise WorkerDied(f"{how} at its start; its error is above")
        if "error" in (told := json.loads(ready)):
            await _end(process)
            raise ConfigError(told["error"])
        reader = asyncio.get_running_loop().create_task(self._read_all(process), name=f"headrace-env-{worker.pid}")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return process

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [p.worker.pid for p in self._processes]

    async def _read_all(self, process: _Process) -> None:
        """Hand out the frames of a process until it ends; then fail its rollouts and start another process."""
        try:
            while (line := await process.reader.readline()).endswith(b"\n"):
                said = json.loads(line)
                process.cancelling.discard(said["id"])
                if (inbox := process.playing.get(said["id"])) is not None:
                    inbox.put_nowait(said)
        except (ConnectionError, ValueError):  # a line that is too long, or no frame
            process.worker.kill()
        how = await _end(process)
        for inbox in process.playing.values():
            inbox.put_nowait({"died": how})
        self.restarts += 1
        _log.warning("%s over %d rollouts; another is started", how, len(process.playing))
        self._processes.remove(process)
        self._started.clear()
        try:
            self._processes.append(await self._spawn())
        except HeadraceError as error:
            self._lost = error
        finally:
            self._started.set()

    async def play(self, task: Task, say: Say) -> Result:
        """Play a rollout in the process that plays fewest. EnvironmentFailed if the environment raises there, WorkerDied if its process ends."""
        while not self._processes:
            if self._lost is not None:
                raise self._lost
            await self._started.wait()
        process = min(self._processes, key=lambda p: len(p.playing))
        number = next(self._numbers)
        inbox = process.playing[number] = asyncio.Queue()
        process.send({"id": number, "play": [task.index, task.key, task.split]})
        try:
            while True:
                said = await inbox.get()
                if "died" in said:
                    raise WorkerDied(said["died"])
                move = await next_move(said, say)
                if isinstance(move, Result):
                    return move
                process.send({"id": number, "answer": move})
        except asyncio.CancelledError:
            self._cancel(process, number)
            raise
        finally:
            process.playing.pop(number, None)

    def _cancel(self, process: _Process, number: int) -> None:
        """Cancel a rollout in its process; kill the process if it does not confirm."""
        process.cancelling.add(number)
        process.send({"id": number, "cancel": True})

        def check() -> None:
            if number in process.cancelling and process.worker.is_alive():
                _log.warning("process %d of environment %s is blocked and is killed", process.worker.pid, self._name)
                process.worker.kill()

        asyncio.get_running_loop().call_later(_CANCEL_SECONDS, check)

    async def close(self) -> None:
        """End the processes."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for process in self._processes:
            process.worker.kill()
        await asyncio.gather(*map(_end, self._processes))


async def _opened(pipe: Connection) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The streams of a pipe, which stays open."""
    return await asyncio.open_connection(sock=socket.socket(fileno=os.dup(pipe.fileno())), limit=_LARGEST)


async def _end(process: _Process) -> str:
    """Wait until a process that closed its pipe or was killed has ended. Returns how it ended, in words."""
    process.writer.close()
    how = await asyncio.to_thread(process.worker.describe_end)
    await asyncio.to_thread(process.worker.end)
    return how


async def next_move(said: Mapping[str, Any], say: Say) -> str | Result:
    """Act on a frame of an `EnvironmentPlayer`: the policy's answer to its prompt, or its result. EnvironmentFailed if the environment raised."""
    if "say" in said:
        return await say(said["say"], max_tokens=said["max_tokens"])
    if "reward" in said:
        return Result(said["reward"], said["metrics"])
    raise EnvironmentFailed(said["kind"], said["failed"])


def _framed(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, default=str).encode() + b"\n"


# -------------------------------------------------------------------------------------------- in the process


class EnvironmentPlayer:
    """Plays rollouts of one environment for another process. Each call returns a frame: the environment's next prompt, its result or its error."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: memory_mb, and the arguments of `load_environment`. ConfigError as there."""
        if limit := settings["memory_mb"]:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
        self._environment = load_environment(
            settings["spec"], name=settings["name"], base=Path(settings["base"]), seed=settings["seed"], options=settings["options"]
        )  # fmt: skip
        self._playing: dict[int, tuple[asyncio.Task[None], _RemoteSay]] = {}

    async def play(self, number: int, index: int, key: int, split: str) -> dict[str, Any]:
        """Begin rollout `number`."""
        say = _RemoteSay()
        task = Task(index, self._environment.name, key, split)
        self._playing[number] = (asyncio.get_running_loop().create_task(self._played(task, say)), say)
        return await self._next(number)

    async def answer(self, number: int, text: str) -> dict[str, Any]:
        """Go on with the policy's answer."""
        self._playing[number][1].answers.put_nowait(text)
        return await self._next(number)

    def cancel(self, number: int) -> None:
        """End a rollout; its frame says "cancelled"."""
        if number in self._playing:
            self._playing[number][0].cancel()

    async def _next(self, number: int) -> dict[str, Any]:
        frame = await self._playing[number][1].frames.get()
        if "say" not in frame:
            del self._playing[number]
        return {"id": number, **frame}

    async def _played(self, task: Task, say: _RemoteSay) -> None:
        try:
            result = await self._environment.play(task, say)
            reward, metrics = (result.reward, result.metrics) if isinstance(result, Result) else (result, {})
            frame = {"reward": _plain(reward), "metrics": {str(k): _plain(v) for k, v in dict(metrics).items()}}
        except asyncio.CancelledError:
            frame = {"kind": "cancelled", "failed": "cancelled"}
        except Exception as error:
            frame = {"kind": type(error).__name__, "failed": str(error)[:2000]}
        say.frames.put_nowait(frame)


class _RemoteSay:
    """`say` of an environment that is played for another process."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, text: str, *, max_tokens: int | None = None) -> str:
        self.frames.put_nowait({"say": text, "max_tokens": max_tokens})
        return await self.answers.get()


def _plain(value: Any) -> float | str:
    """A number; the `repr` of anything else, for the message that refuses it."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)[:200]


def _serve(pipe: Connection) -> None:
    """Play the rollouts that the parent asks for, until its pipe ends."""
    os.dup2(2, 1)  # standard output belongs to the parent: what an environment prints goes to standard error
    asyncio.run(_serve_frames(pipe))


async def _serve_frames(pipe: Connection) -> None:
    reader, writer = await _opened(pipe)
    try:
        player = EnvironmentPlayer(json.loads(await reader.readline()))
    except (ConfigError, ValueError, OSError) as error:
        writer.write(_framed({"id": -1, "error": str(error)}))
        await writer.drain()
        return
    writer.write(_framed({"id": -1, "ready": True}))
    replies: set[asyncio.Task[None]] = set()

    async def reply(frame: Awaitable[dict[str, Any]]) -> None:
        writer.write(_framed(await frame))

    while line := await reader.readline():
        asked = json.loads(line)
        number = asked["id"]
        if "cancel" in asked:
            player.cancel(number)
            # This process is not blocked.
            writer.write(_framed({"id": number, "kind": "cancelled", "failed": "cancelled"}))
            continue
        frame = player.play(number, *asked["play"]) if "play" in asked else player.answer(number, asked["answer"])
        replies.add(task := asyncio.create_task(reply(frame)))
        task.add_done_callback(replies.discard)
