"""How a batch gets from the orchestrator to the trainer: `TrainingBatchSender` and `TrainingBatchReceiver`, here over a spool's folder.

    sender = SpoolSender(folder, ranks=4)                 the pipeline writes into sender.queue; nothing is copied
    await sender.send(report)                             waits, by name, while the trainer is too far behind
    receiver = SpoolReceiver(folder, rank=0, ranks=4)
    batch = receiver.receive(policy_version=17)           maps it; stale ones are refused and counted
    receiver.ack(batch.step)                              now it may be deleted

    folder/queue/rollouts/step_000000000012[.experts].safetensors    batches; not synced, because they can be made again
    folder/queue/rollouts/step_000000000013.skip                     a step that gave nothing to train on
    folder/state/rollouts-{sender,receiver-<rank>}.lock              who is at work; the kernel lets go when a process dies
    folder/state/rollouts-read-<rank>.json, rollouts-end.json        what was acknowledged; which step was the last

Steps are read in their order and each once. A sender that dies is noticed within a heartbeat, because its lock is free; one that
closed left the number of its last step behind, and after it the receiver raises EndOfData.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

from headrace.errors import ConfigError, EndOfData, FileCorrupt, WorkerDied
from headrace.files import make_inside, publish
from headrace.metrics import Wait
from headrace.rollouts.batch_files import TrainingBatch, batch_path, open_training_batch, sidecar_path
from headrace.rollouts.pipeline import StepReport
from headrace.runtime.locks import lock_holder
from headrace.spool.folder import SpoolFolder, read_sealed, seal, sweep_dead_temporaries

__all__ = ["SpoolReceiver", "SpoolSender", "TrainingBatchReceiver", "TrainingBatchSender"]

_POLL = 0.005


class TrainingBatchSender(abc.ABC):
    """The orchestrator's end. `send` is awaited on its event loop and blocks nothing."""

    queue: Path
    """Where the pipeline publishes."""

    @abc.abstractmethod
    async def send(self, report: StepReport) -> None:
        """Make a finished step the trainer's; waits while the trainer is too far behind."""

    @abc.abstractmethod
    async def close(self, *, last: bool = True) -> None:
        """Let go. `last`: no step comes after those that were sent."""


class TrainingBatchReceiver(abc.ABC):
    """The trainer's end, one for each rank."""

    def __init__(self, *, rank: int, ranks: int, max_lag: int | None) -> None:
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank {rank} of {ranks} ranks cannot be")
        self.rank, self.ranks, self.max_lag = rank, ranks, max_lag
        self.refused: Counter[str] = Counter()
        """Batches that were not delivered, by cause."""

    def receive(self, *, policy_version: int | None = None) -> TrainingBatch:
        """The next step's batch, not older than `max_lag` versions behind `policy_version`.

        EndOfData after the last; WorkerDied if the sender is gone; DeadlineExceeded if nothing comes.
        """
        while True:
            batch = self._next_batch()
            if batch.ranks != self.ranks:
                raise ConfigError(
                    f"{batch.path} was packed for {batch.ranks} ranks, this trainer has {self.ranks}; tell the pipeline the trainer's ranks"
                )
            if self.max_lag is None or policy_version is None or policy_version - batch.policy_version <= self.max_lag:
                return batch
            # Every rank sees the same versions, so every rank refuses the same batches.
            self.refused["stale"] += 1
            self.ack(batch.step)

    @abc.abstractmethod
    def _next_batch(self) -> TrainingBatch: ...

    @abc.abstractmethod
    def ack(self, step: int) -> None:
        """This rank needs nothing up to and including this step any more."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _skip_path(queue: Path, step: int) -> Path:
    return queue / f"step_{step:012d}.skip"


class _Folder:
    """What both ends know about the folder."""

    def __init__(self, folder: Path | str, ranks: int) -> None:
        if ranks < 1:
            raise ConfigError(f"a trainer has at least one rank, got {ranks}")
        self.spool, self.ranks = SpoolFolder(Path(folder)), ranks
        self.spool.prepare()
        self.queue = make_inside(self.spool.path, "queue/rollouts")

    def state(self, name: str) -> Path:
        return self.spool.state / f"rollouts-{name}.json"

    def acknowledged(self) -> list[int]:
        """Per rank: the first step it still needs."""
        steps = []
        for rank in range(self.ranks):
            value = read_sealed(self.state(f"read-{rank}"))
            if value is not None and value["ranks"] != self.ranks:
                raise ConfigError(
                    f"{self.state(f'read-{rank}')} was written by a trainer of {value['ranks']} ranks, this one has {self.ranks}; "
                    "batches are packed for a number of ranks: start in a new folder"
                )
            steps.append(0 if value is None else int(value["next"]))
        return steps


class SpoolSender(TrainingBatchSender):
    """Hands batches over in a folder that both ends see."""

    def __init__(self, folder: Path | str, *, ranks: int = 1, max_unread: int = 2, deadline: float = 3600.0) -> None:
        if max_unread < 1:
            raise ConfigError(f"max_unread is {max_unread}, a trainer needs at least one batch to read")
        self._folder = _Folder(folder, ranks)
        self.queue, self._max_unread, self._deadline = self._folder.queue, max_unread, deadline
        self._lock = self._folder.spool.take_lock(
            "rollouts-sender", "an orchestrator", "stop that first, or give this run its own folder"
        )
        sweep_dead_temporaries(self.queue)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder.state("end"))
        self._sent = max((_step_of(name) for name in os.listdir(self.queue)), default=-1)
        self._sent = max(self._sent, *(n - 1 for n in self._folder.acknowledged()))
        self._deleted = -1
        self.next_step = self._sent + 1
        """The step a restarted orchestrator goes on with."""

    async def send(self, report: StepReport) -> None:
        if report.step != self._sent + 1:
            raise ConfigError(
                f"step {report.step} was sent after step {self._sent}: steps are sent in order and each once"
            )
        if report.path is None:
            await asyncio.to_thread(
                publish, _skip_path(self.queue, report.step), seal({"step": report.step}), durable=False
            )
        elif report.path != batch_path(self.queue, report.step) or not report.path.exists():
            raise ConfigError(
                f"{report.path} does not lie in {self.queue}: give the pipeline the sender's queue as its folder"
            )
        self._sent = report.step
        with Wait(
            "rollouts.trainer", deadline=self._deadline, remedy="the trainer reads no batches; is it alive?"
        ) as wait:
            while True:
                needed = min(await asyncio.to_thread(self._folder.acknowledged))
                await asyncio.to_thread(self._delete_below, needed)
                if self._sent - needed < self._max_unread:
                    return
                wait.check()
                await asyncio.sleep(min(_POLL, wait.remaining()))

    def _delete_below(self, step: int) -> None:
        if step - 1 <= self._deleted:
            return
        for name in os.listdir(self.queue):
            if 0 <= _step_of(name) < step:
                for path in (self.queue / name, sidecar_path(self.queue / name)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
        self._deleted = step - 1

    async def close(self, *, last: bool = True) -> None:
        if last:
            publish(self._folder.state("end"), seal({"last": self._sent}), replace=True, durable=False)
        self._lock.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        await self.close(last=kind is None)


class SpoolReceiver(TrainingBatchReceiver):
    """Reads one rank's batches from the folder."""

    def __init__(
        self, folder: Path | str, *, rank: int = 0, ranks: int = 1, max_lag: int | None = None, deadline: float = 3600.0,
        heartbeat: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(rank=rank, ranks=ranks, max_lag=max_lag)
        self._folder, self._deadline, self._heartbeat = _Folder(folder, ranks), deadline, heartbeat
        self._lock = self._folder.spool.take_lock(
            f"rollouts-receiver-{rank}", f"rank {rank} of a trainer", "stop that first, or give this run its own folder"
        )
        self._next = self._folder.acknowledged()[rank]

    @property
    def next_step(self) -> int:
        """The step that `receive` asks for next."""
        return self._next

    def _next_batch(self) -> TrainingBatch:
        gone_since = None
        seen = False
        with Wait(
            "rollouts.batch", deadline=self._deadline, remedy="the orchestrator publishes no batches; is it alive?"
        ) as wait:
            while True:
                step = self._next
                path = batch_path(self._folder.queue, step)
                if path.exists():
                    batch = open_training_batch(path)
                    if batch.step != step:
                        raise FileCorrupt(f"{path} holds step {batch.step}: somebody renamed it. Make the step again")
                    self._next += 1
                    return batch
                if _skip_path(self._folder.queue, step).exists():
                    self.refused["nothing_to_train_on"] += 1
                    self._next += 1
                    continue
                end = read_sealed(self._folder.state("end"))
                if end is not None and end["last"] < step:
                    raise EndOfData(f"the orchestrator of {self._folder.spool.path} ended after step {end['last']}")
                alive = lock_holder(self._folder.spool.state / "rollouts-sender.lock") is not None
                seen |= alive
                gone_since = None if alive or not seen else gone_since or time.monotonic()
                if gone_since is not None and time.monotonic() - gone_since > self._heartbeat:
                    raise WorkerDied(
                        f"the orchestrator of {self._folder.spool.path} is gone and step {step} was not sent: look at its log, start it again and "
                        "resume the trainer"
                    )
                wait.check()
                time.sleep(min(_POLL, wait.remaining()))

    def ack(self, step: int) -> None:
        if step >= self._next:
            raise ConfigError(
                f"step {step} cannot be acknowledged: step {self._next - 1} was the last that was received"
            )
        value = {"rank": self.rank, "ranks": self._folder.ranks, "next": step + 1}
        publish(self._folder.state(f"read-{self.rank}"), seal(value), replace=True, durable=False)

    def close(self) -> None:
        self._lock.release()


def _step_of(name: str) -> int:
    """The step a name in the queue belongs to; -1 if to none, or to a batch that was never finished."""
    stem = name.removeprefix("step_").partition(".")[0]
    whole = name.startswith("step_") and stem.isdecimal() and not name.endswith(".experts.safetensors")
    return int(stem) if whole else -1
