"""Workers as processes of this machine, one socket each.

A worker is told its order as JSON and then numbers; it answers with messages as they stand in `partial`. Nothing is pickled.
A worker whose coordinator is gone reads the end of its socket and ends; one that dies is seen the same way from the other
side. Each has its own interpreter (`python -m headrace.reduce.processes`), so a script needs no main guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for

from headrace import errors
from headrace.errors import HeadraceError
from headrace.metrics import Wait
from headrace.reduce.crew import Answer
from headrace.reduce.orders import PartialMaker, WorkOrder

__all__ = ["ProcessCrew"]

_MESSAGE, _ERROR = b"P", b"E"
_PATIENCE = 5.0
_MID_MESSAGE = 60.0
"""Seconds without a byte in the middle of a message after which its worker counts as gone."""
_NATIVE_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ProcessCrew:
    """One process a rank. `close` ends them all."""

    def __init__(self, order: WorkOrder) -> None:
        self._order = json.dumps(order.to_dict()).encode()
        self._workers: dict[int, tuple[subprocess.Popen[bytes], Connection]] = {}
        try:
            for rank in range(order.partition.n_ranks):
                self._start(rank)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers.values()]

    def ask(self, rank: int, ordinal: int) -> None:
        with contextlib.suppress(OSError):  # a worker that is gone is told by `answer`
            self._workers[rank][1].send_bytes(ordinal.to_bytes(8, "little"))

    def answer(self, timeout: float) -> Answer | None:
        ends = {connection: rank for rank, (_, connection) in self._workers.items()}
        for connection in wait_for(list(ends), timeout):
            assert isinstance(connection, Connection)
            rank = ends[connection]
            try:
                kind = connection.recv_bytes(1)
                body = connection.recv_bytes()
            except (EOFError, OSError):
                return Answer(rank=rank, lost=self._ended(rank))
            if kind == _MESSAGE:
                return Answer(rank=rank, message=body)
            return Answer(rank=rank, error=_told(body, rank))
        return None

    def replace(self, rank: int) -> None:
        self._end(rank)
        self._start(rank)

    def close(self) -> None:
        for rank in list(self._workers):
            self._end(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        # A worker that is stopped in the middle of a message must not stop the coordinator for ever.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_MID_MESSAGE), 0))
        with theirs:
            # Workers of one machine share its processors: a library's own threads on top would only get in the way.
            env = os.environ | dict.fromkeys(_NATIVE_THREADS, "1")
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace.reduce.processes", str(theirs.fileno()), str(rank)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=env,
            )
        connection = Connection(ours.detach())
        self._workers[rank] = (process, connection)
        with contextlib.suppress(OSError):
            connection.send_bytes(self._order)

    def _ended(self, rank: int) -> str:
        process, _ = self._workers[rank]
        try:
            with Wait("reduce.worker.exit", deadline=_PATIENCE):
                code = process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _end(self, rank: int) -> None:
        process, connection = self._workers.pop(rank)
        connection.close()
        process.kill()
        with Wait("reduce.worker.exit", deadline=60):
            process.wait(60)


def _told(body: bytes, rank: int) -> HeadraceError:
    told = json.loads(body)
    kind = getattr(errors, str(told["kind"]), None)
    kind = kind if isinstance(kind, type) and issubclass(kind, HeadraceError) else errors.DataError
    return kind(f"rank {rank}: {told['sentence']}")


def _serve(connection: Connection, rank: int) -> None:
    """A worker's whole life: an order, then numbers, until the socket ends."""
    try:
        maker = None
        order = WorkOrder.from_dict(json.loads(connection.recv_bytes()))
        while True:
            ordinal = int.from_bytes(connection.recv_bytes(8), "little")
            try:
                if maker is None:
                    maker = PartialMaker(order, rank)
                message, kind = maker.make(ordinal), _MESSAGE
            except HeadraceError as error:
                told = {"kind": type(error).__name__, "sentence": str(error)}
                message, kind = json.dumps(told).encode(), _ERROR
            connection.send_bytes(kind)
            connection.send_bytes(message)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the coordinator, whose end ends this process too
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
