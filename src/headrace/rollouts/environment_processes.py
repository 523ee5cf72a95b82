"""Environments in processes of their own: one that blocks, leaks or crashes costs its own rollouts only.

    workers = EnvironmentProcesses("python:sort.py:play", workers=2, name="sort", base=Path("."), seed=7, memory_mb=512)
    await workers.start()
    await workers.play(task, say)             as the environment's own function, which runs in a process

Each process plays many rollouts at a time on an event loop. What it says to the policy comes back here over a pipe and is answered here, so ids and log-probs never
leave this process. Frames are a length and msgpack. A process that dies fails the rollouts it had with `WorkerDied`, and a new one takes its place. A rollout
that is cancelled at its deadline is cancelled there too; a process that does not confirm it is blocked, and is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError, EnvironmentFailed, WorkerDied
from headrace.rollouts.environments import Result, Say, Task, load_environment

__all__ = ["EnvironmentProcesses"]

_log = logging.getLogger("headrace.rollouts")
_START_SECONDS = 120.0
_CANCEL_SECONDS = 2.0
_HEAD = 4
_LARGEST = 64 << 20


class _Process:
    """One process, the pipes to it, and the rollouts it plays."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.playing: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.reader: asyncio.Task[None] | None = None
        self.cancelling: set[int] = set()

    def send(self, value: Mapping[str, Any]) -> None:
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # the reader notices that it is gone
            pipe.write(_framed(value))


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
        self._closing = False
        self.restarts = 0
        """Processes that died or were killed, and were replaced."""

    async def start(self) -> None:
        """Start all processes and wait until each has imported the environment."""
        self._processes = list(await asyncio.gather(*(self._spawn() for _ in range(self._workers))))

    async def _spawn(self) -> _Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.rollouts.environment_processes", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=_LARGEST,
        )  # fmt: skip
        made = _Process(process)
        made.send(self._settings)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                ready = await _read(process.stdout)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            code = await process.wait()
            raise WorkerDied(
                f"a process of environment {self._name} {_ended(code)} at its start; its error is above"
            ) from error
        if "error" in ready:
            await process.wait()
            raise ConfigError(ready["error"])
        made.reader = asyncio.get_running_loop().create_task(self._read_all(made), name=f"headrace-env-{process.pid}")
        return made

    @property
    def pids(self) -> list[int]:
        """Of the processes that are there now."""
        return [p.process.pid for p in self._processes]

    async def _read_all(self, worker: _Process) -> None:
        """Hand out what a process says until it ends; then fail what it played, and start another."""
        assert worker.process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            while True:
                said = await _read(worker.process.stdout)
                worker.cancelling.discard(said["id"])
                if (inbox := worker.playing.get(said["id"])) is not None:
                    inbox.put_nowait(said)
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()
        code = await worker.process.wait()
        how = f"process {worker.process.pid} of environment {self._name} {_ended(code)}"
        for inbox in worker.playing.values():
            inbox.put_nowait({"died": how})
        if self._closing:
            return
        self.restarts += 1
        _log.warning("%s over %d rollouts; another is started", how, len(worker.playing))
        self._processes.remove(worker)
        self._processes.append(await self._spawn())

    async def play(self, task: Task, say: Say) -> Result:
        """Play a rollout in the process that plays fewest. EnvironmentFailed if the environment raises there, WorkerDied if its process ends."""
        if not self._processes:
            raise WorkerDied(f"no process of environment {self._name} is alive; another is being started")
        worker = min(self._processes, key=lambda p: len(p.playing))
        number = next(self._numbers)
        inbox = worker.playing[number] = asyncio.Queue()
        worker.send({"id": number, "play": [task.index, task.key, task.split]})
        try:
            while True:
                said = await inbox.get()
                if "say" in said:
                    answer = await say(said["say"], max_tokens=said["max_tokens"])
                    worker.send({"id": number, "answer": answer})
                elif "reward" in said:
                    return Result(said["reward"], said["metrics"])
                elif "died" in said:
                    raise WorkerDied(said["died"])
                else:
                    raise EnvironmentFailed(said["kind"], said["failed"])
        except asyncio.CancelledError:
            self._cancel(worker, number)
            raise
        finally:
            worker.playing.pop(number, None)

    def _cancel(self, worker: _Process, number: int) -> None:
        """Cancel a rollout in its process; kill the process if it does not confirm."""
        if self._closing:
            return
        worker.cancelling.add(number)
        worker.send({"id": number, "cancel": True})

        def check() -> None:
            if number in worker.cancelling and worker.process.returncode is None:
                _log.warning("process %d of environment %s is blocked and is killed", worker.process.pid, self._name)
                worker.process.kill()

        asyncio.get_running_loop().call_later(_CANCEL_SECONDS, check)

    async def close(self) -> None:
        """End the processes."""
        self._closing = True
        for worker in self._processes:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        await asyncio.gather(*(w.reader for w in self._processes if w.reader is not None), return_exceptions=True)


def _ended(code: int | None) -> str:
    """An exit code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"


def _framed(value: Mapping[str, Any]) -> bytes:
    payload = msgspec.msgpack.encode(value)
    return len(payload).to_bytes(_HEAD, "little") + payload


async def _read(stream: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await stream.readexactly(_HEAD), "little")
    if size > _LARGEST:
        raise ConnectionError(f"a frame of {size:,} bytes")
    return msgspec.msgpack.decode(await stream.readexactly(size))


# -------------------------------------------------------------------------------------------- in the process


class _RemoteSay:
    """`say` of an environment in its process: the text goes to the parent, the answer comes back."""

    def __init__(self, number: int, out: int) -> None:
        self._number, self._out = number, out
        self.answers: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, text: str, *, max_tokens: int | None = None) -> str:
        _write(self._out, {"id": self._number, "say": text, "max_tokens": max_tokens})
        return await self.answers.get()


def _write(out: int, value: Mapping[str, Any]) -> None:
    view = memoryview(_framed(value))
    while view:
        view = view[os.write(out, view) :]


async def _serve() -> None:
    """Play what the parent asks for until its pipe ends."""
    # What an environment prints goes to standard error: standard output carries the frames.
    out = os.dup(1)
    os.dup2(2, 1)
    loop, stream = asyncio.get_running_loop(), asyncio.StreamReader(limit=_LARGEST)
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), stdin)
    settings = await _read(stream)
    try:
        if limit := settings["memory_mb"]:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
        environment = load_environment(
            settings["spec"],
            name=settings["name"],
            base=Path(settings["base"]),
            seed=settings["seed"],
            options=settings["options"],
        )
    except (ConfigError, ValueError, OSError) as error:
        _write(out, {"id": -1, "error": str(error)})
        return
    _write(out, {"id": -1, "ready": True})
    playing: dict[int, tuple[asyncio.Task[None], _RemoteSay]] = {}

    async def play(number: int, task: Task, say: _RemoteSay) -> None:
        try:
            result = await environment.play(task, say)
            reward, metrics = (result.reward, result.metrics) if isinstance(result, Result) else (result, {})
            try:
                frame: dict[str, Any] = {"id": number, "reward": reward, "metrics": dict(metrics)}
                _write(out, frame)
            except (
                TypeError,
                NotImplementedError,
            ):  # a number of numpy's, or what is no number at all: the parent judges it
                _write(
                    out,
                    {
                        "id": number,
                        "reward": _plain(reward),
                        "metrics": {str(k): _plain(v) for k, v in dict(metrics).items()},
                    },
                )
        except asyncio.CancelledError:
            _write(out, {"id": number, "kind": "cancelled", "failed": "cancelled"})
        except Exception as error:
            _write(out, {"id": number, "kind": type(error).__name__, "failed": str(error)[:2000]})
        finally:
            playing.pop(number, None)

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            asked = await _read(stream)
            number = asked["id"]
            if "play" in asked:
                index, key, split = asked["play"]
                say = _RemoteSay(number, out)
                task = Task(index, environment.name, key, split)
                playing[number] = (loop.create_task(play(number, task, say)), say)
            elif number in playing and "answer" in asked:
                playing[number][1].answers.put_nowait(asked["answer"])
            elif number in playing:
                playing[number][0].cancel()
            else:  # it has ended meanwhile
                _write(out, {"id": number, "kind": "cancelled", "failed": "ended"})


def _plain(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)[:200]


if __name__ == "__main__":
    asyncio.run(_serve())
