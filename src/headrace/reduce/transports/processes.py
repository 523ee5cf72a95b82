"""Workers as processes of this machine, one socket each.

A worker gets its order as JSON, then the numbers of units; it answers with the bytes of `NodePartial`. Nothing is pickled, and a script
needs no main guard (`runtime.workers`).
"""

from __future__ import annotations

import contextlib
import json
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from headrace.errors import HeadraceError
from headrace.metrics import Wait
from headrace.reduce.orders import PartialMaker, WorkOrder
from headrace.reduce.transports.transport import Answer, Transport
from headrace.runtime.wire_errors import decode_error, encode_error
from headrace.runtime.workers import WorkerProcess

_MESSAGE, _ERROR = b"P", b"E"
_PATIENCE = 5.0
_MID_MESSAGE = 60.0
"""Seconds without a byte in the middle of a message after which its worker counts as gone."""


class ProcessTransport(Transport):
    """One process a rank. `close` ends them all."""

    def __init__(self, order: WorkOrder) -> None:
        self._order = order.to_dict()
        self._workers: dict[int, WorkerProcess] = {}
        try:
            for rank in range(order.partition.n_ranks):
                self._start(rank)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    def ask(self, rank: int, ordinal: int) -> None:
        with contextlib.suppress(OSError):  # a worker that is gone: `answer` reports it
            self._workers[rank].pipe.send_bytes(ordinal.to_bytes(8, "little"))

    def answer(self, timeout: float) -> Answer | None:
        ends = {worker.pipe: rank for rank, worker in self._workers.items()}
        for connection in wait_for(list(ends), timeout):
            assert isinstance(connection, Connection)
            rank = ends[connection]
            try:
                kind = connection.recv_bytes(1)
                body = connection.recv_bytes()
            except (EOFError, OSError):
                return Answer(rank=rank, lost=self._workers[rank].how_it_ended(_PATIENCE))
            if kind == _MESSAGE:
                return Answer(rank=rank, message=body)
            return Answer(rank=rank, error=decode_error(json.loads(body), prefix=f"rank {rank}: "))
        return None

    def replace(self, rank: int) -> None:
        self._end(rank)
        self._start(rank)

    def close(self) -> None:
        for rank in list(self._workers):
            self._end(rank)

    def _start(self, rank: int) -> None:
        # A worker that is stopped in the middle of a message must not stop the coordinator for ever.
        self._workers[rank] = WorkerProcess(
            f"headrace-gram-{rank}", _serve, self._order, rank, imports_main=False, mid_message=_MID_MESSAGE
        )

    def _end(self, rank: int) -> None:
        with Wait("reduce.worker.exit", deadline=60):
            self._workers.pop(rank).end(patience=0.0)


def _serve(connection: Connection, described: dict[str, Any], rank: int) -> None:
    """The whole life of a worker process: it makes units until the socket ends."""
    maker = PartialMaker(WorkOrder.from_dict(described), rank)
    while True:
        ordinal = int.from_bytes(connection.recv_bytes(8), "little")
        try:
            message, kind = maker.make(ordinal), _MESSAGE
        except HeadraceError as error:
            message, kind = json.dumps(encode_error(error)).encode(), _ERROR
        connection.send_bytes(kind)
        connection.send_bytes(message)
