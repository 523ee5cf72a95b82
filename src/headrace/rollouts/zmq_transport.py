"""Transport of batches to a trainer on another machine over ZMQ: `ZmqSender` and `ZmqReceiver`.

    receiver  ── want 12 ──►  sender        none | have 12, sizes of its files | skip 12 | end 11
              ── part 12 ──►                up to 4 MiB of one of the files
              ── ack 12 ───►                acked 12: the sender deletes the batch once all ranks have acknowledged it

The receiver asks for every part, so no message is dropped at a high-water mark (PUB drops silently), memory is bounded by
one part, and either end may be restarted. An answer repeats its question. It is also the heartbeat: without one the receiver
reports that the sender is gone. The parts are written as the same two files, the batch last, and read with the same checks as in a shared folder.

The sender's socket belongs to a thread of its own; libzmq copies and sends without the GIL. Needs pyzmq (`headrace[rl]`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headrace.errors import ConfigError, EndOfData, FileCorrupt, WorkerDied
from headrace.files import open_regular, publish
from headrace.metrics import Wait
from headrace.rollouts.batch_files import batch_path, sidecar_path
from headrace.rollouts.pipeline import StepReport
from headrace.rollouts.transport import POLL_SECONDS, TrainingBatchReceiver, TrainingBatchSender, unlink_batch

_PART = 4 << 20
_MAX_QUESTION = 4096


class _Question(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A question of a receiver."""

    verb: Literal["want", "part", "ack"]
    rank: int
    ranks: int
    step: int
    file: Literal[0, 1] = 0
    """0 for the batch, 1 for its sidecar."""
    offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class _Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The answer of a sender; the bytes of a part follow in a frame of their own."""

    to: _Question
    verb: Literal["none", "have", "skip", "end", "gone", "part", "acked", "refused"]
    sizes: tuple[int, int] = (0, 0)
    """Sizes of the batch and of its sidecar; 0 without a sidecar."""
    told: str = ""
    """Why a receiver is refused."""


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("batches over ZMQ need pyzmq: pip install 'headrace[rl]'") from error
    return zmq


class ZmqSender(TrainingBatchSender):
    """Answers the receivers' questions about the batches in a local folder."""

    _wait_name, _remedy = "rollouts.ack", "a rank of the trainer acknowledges nothing; is it alive?"

    def __init__(
        self, address: str, queue: Path, *, ranks: int = 1, max_unread: int = 2, first_step: int = 0, deadline: float = 3600.0,
        linger: float = 5.0,
    ) -> None:  # fmt: skip
        zmq = _zmq()
        super().__init__(Path(queue), ranks=ranks, max_unread=max_unread, deadline=deadline, sent=first_step - 1)
        self._ranks = ranks
        self.queue.mkdir(parents=True, exist_ok=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(f"{address} cannot be bound: {error}. Give the sender a free address") from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lock = threading.Lock()
        self._have: dict[int, Path | None] = {}
        self._needed = [first_step] * ranks
        self._end: int | None = None
        self._told_end: set[int] = set()
        self._linger = linger
        self._closing = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="headrace-rollouts-zmq", daemon=True)
        self._thread.start()

    async def _hand_over(self, report: StepReport) -> None:
        with self._lock:
            self._have[report.step] = report.path

    def _first_needed(self) -> int:
        if self._broken is not None:
            raise WorkerDied(f"the thread that sends batches ended: {self._broken}") from self._broken
        with self._lock:
            return min(self._needed)

    async def close(self, *, last: bool = True) -> None:
        """Stop serving. With `last`, only after every rank has acknowledged all steps and has been answered `end`, or `linger` seconds have passed."""
        try:
            if last and not self._closing:
                with self._lock:
                    self._end = self._sent
                await self._until_unread_below(0)
                with Wait("rollouts.end", deadline=self._linger) as wait:
                    while len(self._told_end) < self._ranks and not wait.expired():
                        await asyncio.sleep(min(POLL_SECONDS, wait.remaining()))
        finally:
            self._closing = True
            await asyncio.to_thread(self._thread.join)
            self._context.term()

    # ------------------------------------------------------------------------------------------- thread

    def _serve(self) -> None:
        zmq = _zmq()
        try:
            while not self._closing:
                if self._socket.poll(50):
                    frames = self._socket.recv_multipart()
                    # What is no question gets no answer. A receiver that is gone asks again when it is back.
                    with contextlib.suppress(msgspec.DecodeError, FileNotFoundError, zmq.ZMQError):
                        asked = msgspec.msgpack.decode(frames[-1], type=_Question)
                        answer, data = self._answer(asked)
                        self._socket.send_multipart([frames[0], msgspec.msgpack.encode(answer), *data], copy=False)
        except BaseException as error:
            self._broken = error
        finally:
            self._socket.close()

    def _answer(self, asked: _Question) -> tuple[_Answer, list[bytes]]:
        """The answer to a question, and the bytes of a part."""
        if asked.ranks != self._ranks or not 0 <= asked.rank < self._ranks:
            told = f"batches are packed for {self._ranks} ranks, not {asked.ranks}"
            return _Answer(to=asked, verb="refused", told=told), []
        if asked.verb == "ack":
            self._acknowledged(asked.rank, asked.step)
            return _Answer(to=asked, verb="acked"), []
        with self._lock:
            known, path, end = asked.step in self._have, self._have.get(asked.step), self._end
        if not known:
            if end is not None and asked.step > end:
                self._told_end.add(asked.rank)
                return _Answer(to=asked, verb="end"), []
            return _Answer(to=asked, verb="gone" if asked.step <= self._sent else "none"), []
        if path is None:
            return _Answer(to=asked, verb="skip"), []
        side = sidecar_path(path)
        if asked.verb == "want":
            sizes = path.stat().st_size, side.stat().st_size if side.exists() else 0
            return _Answer(to=asked, verb="have", sizes=sizes), []
        with open(open_regular(side if asked.file else path), "rb", buffering=0) as file:
            return _Answer(to=asked, verb="part"), [os.pread(file.fileno(), _PART, asked.offset)]

    def _acknowledged(self, rank: int, step: int) -> None:
        with self._lock:
            if not self._needed[rank] <= step <= self._sent:
                return
            self._needed[rank] = step + 1
            gone = [self._have.pop(s) for s in list(self._have) if s < min(self._needed)]
        for path in gone:
            if path is not None:
                unlink_batch(path)


class ZmqReceiver(TrainingBatchReceiver):
    """Fetches one rank's batches into a folder of its own."""

    def __init__(
        self, address: str, folder: Path, *, rank: int = 0, ranks: int = 1, max_lag: int | None = None, first_step: int = 0,
        max_bytes: int = 1 << 40, deadline: float = 3600.0, heartbeat: float = 5.0,
    ) -> None:  # fmt: skip
        super().__init__(rank=rank, ranks=ranks, max_lag=max_lag, deadline=deadline, heartbeat=heartbeat)
        self._zmq = _zmq()
        self.address, self.folder, self._max_bytes = address, Path(folder), max_bytes
        self.next_step = first_step
        self.folder.mkdir(parents=True, exist_ok=True)
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.DEALER)
        self._socket.setsockopt(self._zmq.MAXMSGSIZE, _PART + _MAX_QUESTION)
        self._socket.setsockopt(self._zmq.LINGER, 0)
        try:
            self._socket.connect(address)
        except self._zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{address} is no address to connect to: {error}") from error

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _asked(
        self, verb: Literal["want", "part", "ack"], step: int, file: Literal[0, 1] = 0, offset: int = 0
    ) -> tuple[_Answer, Any]:
        """Ask, and wait for the answer and the bytes of its part. WorkerDied after a heartbeat without one."""
        question = _Question(verb=verb, rank=self.rank, ranks=self.ranks, step=step, file=file, offset=offset)
        self._socket.send(msgspec.msgpack.encode(question))
        until = time.monotonic() + self._heartbeat
        while self._socket.poll(max(0, int(1000 * (until - time.monotonic())))):
            frames = self._socket.recv_multipart(copy=False)
            try:
                answer = msgspec.msgpack.decode(frames[0].buffer, type=_Answer)
            except msgspec.DecodeError:
                self.refused["malformed"] += 1
                continue
            if answer.verb == "refused":
                raise ConfigError(f"{self.address} refuses rank {self.rank} of {self.ranks}: {answer.told}")
            if answer.to == question:
                return answer, frames[1].buffer if len(frames) > 1 else b""
        raise WorkerDied(
            f"{self.address} has not answered for {self._heartbeat:g} s (step {step}): the orchestrator is gone or cannot be reached; look at its "
            "log, start it again and resume the trainer"
        )

    def _look_for(self, step: int) -> Path | Literal["skip"] | None:
        told, _ = self._asked("want", step)
        if told.verb == "have":
            return self._fetched(step, told.sizes)
        if told.verb == "gone":
            raise ConfigError(
                f"step {step} was acknowledged by all ranks before and is deleted at {self.address}; resume from a later checkpoint"
            )
        if told.verb == "end":
            raise EndOfData(f"the orchestrator at {self.address} ended after step {step - 1}")
        if told.verb == "skip":
            self._asked("ack", step)
            return "skip"
        return None

    def _fetched(self, step: int, sizes: tuple[int, int]) -> Path:
        if min(sizes) < 0 or sum(sizes) > self._max_bytes:
            raise ConfigError(
                f"step {step} has {sum(sizes):,} bytes at {self.address}, at most {self._max_bytes:,} are taken"
            )
        path = batch_path(self.folder, step)
        for file in (1, 0) if sizes[1] else (0,):
            target = path if file == 0 else sidecar_path(path)
            publish(target, self._parts(step, file, sizes[file]), replace=True, durable=False)
        return path

    def _parts(self, step: int, file: Literal[0, 1], size: int) -> Iterator[memoryview]:
        """The parts of a file, in order."""
        for offset in range(0, size, _PART):
            _, data = self._asked("part", step, file, offset)
            if len(data) != min(_PART, size - offset):
                raise FileCorrupt(
                    f"{self.address} sent {len(data)} bytes of step {step} from {offset} on, the file has {size}"
                )
            yield data

    def _acknowledge(self, step: int) -> None:
        unlink_batch(batch_path(self.folder, step))
        self._asked("ack", step)
