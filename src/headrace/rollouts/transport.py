"""Transport of batches from the orchestrator to the trainer, through a shared folder: `SpoolSender` and `SpoolReceiver`.

    sender = SpoolSender(folder, ranks=4)                 the pipeline writes into sender.queue; nothing is copied
    await sender.send(report)                             waits, by name, while the trainer is too far behind
    receiver = SpoolReceiver(folder, rank=0, ranks=4)
    batch = receiver.receive(policy_version=17)           maps the batch; stale batches are refused and counted
    receiver.ack(batch.step)                              the batch may be deleted

    folder/queue/rollouts/step_000000000012[.experts].safetensors    batches; not synced, because they can be made again
    folder/queue/rollouts/step_000000000013.skip                     a step without anything to train on
    folder/state/rollouts-{sender,receiver-<rank>}.lock              locks of the two ends; the kernel releases the lock of a process that dies
    folder/state/rollouts-read-<rank>.json, rollouts-end.json        first step that the rank has not acknowledged; number of the last step

Steps are read in order, each once. A sender that dies is noticed within a heartbeat, because its lock is free. A sender that is closed
writes the number of its last step; after that step the receiver raises EndOfData.
"""

from __future__ import annotations

import abc
import asyncio
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from headrace.errors import ConfigError, EndOfData, FileCorrupt, WorkerDied
from headrace.files import make_inside, publish
from headrace.metrics import Wait
from headrace.rollouts.batch_files import TrainingBatch, batch_path, open_training_batch, sidecar_path
from headrace.rollouts.pipeline import StepReport
from headrace.runtime.locks import lock_holder
from headrace.spool.folder import SpoolFolder, sweep_dead_temporaries
from headrace.spool.records import read_sealed, seal

POLL_SECONDS = 0.005


class TrainingBatchSender(abc.ABC):
    """The orchestrator's end. `send` is awaited on its event loop and does not block it."""

    _wait_name: str
    _remedy: str
    """Name of the wait for the trainer, and the remedy that its error names."""

    def __init__(self, queue: Path, *, ranks: int, max_unread: int, deadline: float, sent: int) -> None:
        if ranks < 1 or max_unread < 1:
            raise ConfigError(
                f"ranks is {ranks} and max_unread is {max_unread}: a trainer has at least one rank, and one batch to read"
            )
        self.queue, self._max_unread, self._deadline, self._sent = queue, max_unread, deadline, sent
        """`queue`: the folder that the pipeline publishes into."""

    async def send(self, report: StepReport) -> None:
        """Hand a finished step to the trainer; waits while the trainer is more than `max_unread` steps behind."""
        if report.step != self._sent + 1:
            raise ConfigError(
                f"step {report.step} was sent after step {self._sent}: steps are sent in order and each once"
            )
        await self._hand_over(report)
        self._sent = report.step
        await self._until_unread_below(self._max_unread)

    async def _until_unread_below(self, count: int) -> None:
        with Wait(self._wait_name, deadline=self._deadline, remedy=self._remedy) as wait:
            while self._sent - await asyncio.to_thread(self._first_needed) >= count:
                wait.check()
                await asyncio.sleep(min(POLL_SECONDS, wait.remaining()))

    @abc.abstractmethod
    async def _hand_over(self, report: StepReport) -> None:
        """Make a step visible to the receivers."""

    @abc.abstractmethod
    def _first_needed(self) -> int:
        """The first step that a rank still needs; steps before it are deleted."""

    @abc.abstractmethod
    async def close(self, *, last: bool = True) -> None:
        """Close this end. `last`: no step follows those that were sent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        await self.close(last=kind is None)


class TrainingBatchReceiver(abc.ABC):
    """The trainer's end, one for each rank. Steps are received in order, each once."""

    def __init__(self, *, rank: int, ranks: int, max_lag: int | None, deadline: float, heartbeat: float) -> None:
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank {rank} of {ranks} ranks cannot be")
        self.rank, self.ranks, self.max_lag = rank, ranks, max_lag
        self._deadline, self._heartbeat = deadline, heartbeat
        self.next_step = 0
        """The step that `receive` asks for next."""
        self.refused: Counter[str] = Counter()
        """Batches that were not delivered, by cause."""

    def receive(self, *, policy_version: int | None = None) -> TrainingBatch:
        """The next step's batch, at most `max_lag` versions older than `policy_version`.

        EndOfData after the last; WorkerDied if the sender is gone; DeadlineExceeded if nothing comes.
        """
        while True:
            path = self._next_path()
            batch = open_training_batch(path)
            if batch.step != self.next_step - 1:
                raise FileCorrupt(f"{path} holds step {batch.step}: it was renamed. Make the step again")
            if batch.ranks != self.ranks:
                raise ConfigError(
                    f"{batch.path} was packed for {batch.ranks} ranks, this trainer has {self.ranks}; tell the pipeline the trainer's ranks"
                )
            if self.max_lag is None or policy_version is None or policy_version - batch.policy_version <= self.max_lag:
                return batch
            # Every rank sees the same versions, so every rank refuses the same batches.
            self.refused["stale"] += 1
            self.ack(batch.step)

    def _next_path(self) -> Path:
        remedy = "the orchestrator publishes no batches; is it alive?"
        with Wait("rollouts.batch", deadline=self._deadline, remedy=remedy) as wait:
            while True:
                found = self._look_for(self.next_step)
                if found is None:
                    wait.check()
                    time.sleep(min(POLL_SECONDS, wait.remaining()))
                    continue
                self.next_step += 1
                if isinstance(found, Path):
                    return found
                self.refused["nothing_to_train_on"] += 1

    def ack(self, step: int) -> None:
        """Acknowledge all steps up to this one: this rank does not need them any more."""
        if step >= self.next_step:
            raise ConfigError(
                f"step {step} cannot be acknowledged: step {self.next_step - 1} was the last that was received"
            )
        self._acknowledge(step)

    @abc.abstractmethod
    def _look_for(self, step: int) -> Path | Literal["skip"] | None:
        """The file of a step; "skip" for a step without a batch, None while it was not sent. EndOfData or WorkerDied if it will not come."""

    @abc.abstractmethod
    def _acknowledge(self, step: int) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def unlink_batch(path: Path) -> None:
    """Remove a batch and its sidecar, where they exist."""
    for name in (path, sidecar_path(path)):
        name.unlink(missing_ok=True)


def _skip_path(queue: Path, step: int) -> Path:
    return queue / f"step_{step:012d}.skip"


class _Folder:
    """The folder and its state files, as both ends see it."""

    def __init__(self, folder: Path | str, ranks: int) -> None:
        self.spool, self.ranks = SpoolFolder(Path(folder)), ranks
        self.spool.prepare()
        self.queue = make_inside(self.spool.path, "queue/rollouts")

    def state(self, name: str) -> Path:
        return self.spool.state / f"rollouts-{name}.json"

    def acknowledged(self) -> list[int]:
        """The first step that each rank still needs."""
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
    """Hands batches over in a folder that both ends can open."""

    _wait_name, _remedy = "rollouts.trainer", "the trainer reads no batches; is it alive?"

    def __init__(self, folder: Path | str, *, ranks: int = 1, max_unread: int = 2, deadline: float = 3600.0) -> None:
        self._folder = _Folder(folder, ranks)
        super().__init__(self._folder.queue, ranks=ranks, max_unread=max_unread, deadline=deadline, sent=-1)
        self._lock = self._folder.spool.take_lock(
            "rollouts-sender", "an orchestrator", "stop that first, or give this run its own folder"
        )
        sweep_dead_temporaries(self.queue)
        self._folder.state("end").unlink(missing_ok=True)
        self._sent = max((_step_of(name) for name in os.listdir(self.queue)), default=-1)
        self._sent = max(self._sent, *(n - 1 for n in self._folder.acknowledged()))
        self._deleted = -1
        self.next_step = self._sent + 1
        """The step that a restarted orchestrator continues with."""

    async def _hand_over(self, report: StepReport) -> None:
        if report.path is None:
            await asyncio.to_thread(
                publish, _skip_path(self.queue, report.step), seal({"step": report.step}), durable=False
            )
        elif report.path != batch_path(self.queue, report.step) or not report.path.exists():
            raise ConfigError(
                f"{report.path} does not lie in {self.queue}: give the pipeline the sender's queue as its folder"
            )

    def _first_needed(self) -> int:
        needed = min(self._folder.acknowledged())
        if needed - 1 > self._deleted:
            for name in os.listdir(self.queue):
                if 0 <= _step_of(name) < needed:
                    unlink_batch(self.queue / name)
            self._deleted = needed - 1
        return needed

    async def close(self, *, last: bool = True) -> None:
        if last:
            publish(self._folder.state("end"), seal({"last": self._sent}), replace=True, durable=False)
        self._lock.release()


class SpoolReceiver(TrainingBatchReceiver):
    """Reads one rank's batches from the folder."""

    def __init__(
        self, folder: Path | str, *, rank: int = 0, ranks: int = 1, max_lag: int | None = None, deadline: float = 3600.0,
        heartbeat: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(rank=rank, ranks=ranks, max_lag=max_lag, deadline=deadline, heartbeat=heartbeat)
        self._folder = _Folder(folder, ranks)
        self._lock = self._folder.spool.take_lock(
            f"rollouts-receiver-{rank}", f"rank {rank} of a trainer", "stop that first, or give this run its own folder"
        )
        self.next_step = self._folder.acknowledged()[rank]
        self._sender_seen = math.inf
        """Monotonic time at which the sender's lock was last held; infinite until it was seen once."""

    def _look_for(self, step: int) -> Path | Literal["skip"] | None:
        path = batch_path(self._folder.queue, step)
        if path.exists():
            return path
        if _skip_path(self._folder.queue, step).exists():
            return "skip"
        end = read_sealed(self._folder.state("end"))
        if end is not None and end["last"] < step:
            raise EndOfData(f"the orchestrator of {self._folder.spool.path} ended after step {end['last']}")
        if lock_holder(self._folder.spool.state / "rollouts-sender.lock") is not None:
            self._sender_seen = time.monotonic()
        if time.monotonic() - self._sender_seen > self._heartbeat:
            raise WorkerDied(
                f"the orchestrator of {self._folder.spool.path} is gone and step {step} was not sent: look at its log, start it again and "
                "resume the trainer"
            )
        return None

    def _acknowledge(self, step: int) -> None:
        value = {"rank": self.rank, "ranks": self._folder.ranks, "next": step + 1}
        publish(self._folder.state(f"read-{self.rank}"), seal(value), replace=True, durable=False)

    def close(self) -> None:
        self._lock.release()


def _step_of(name: str) -> int:
    """The step of a file name in the queue; -1 for other names and for sidecars, whose batch may be unfinished."""
    stem = name.removeprefix("step_").partition(".")[0]
    whole = name.startswith("step_") and stem.isdecimal() and not name.endswith(".experts.safetensors")
    return int(stem) if whole else -1
